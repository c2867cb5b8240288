//! What must be there before the services start: a fresh database with the shop in it, topics, and no keys of an earlier demo.

use crate::processes::Processes;
use crate::redis_client;
use crate::settings::{REGIONS, Settings};
use crate::storefront::KEY_PREFIX;
use anyhow::{Context as _, bail};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{BaseProducer, Producer as _};
use recant_schema::key::ENTRY_PREFIX;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, PgPool};
use std::str::FromStr as _;
use std::time::Duration;
use uuid::Uuid;

/// Products in the shop: enough for a cold tail, few enough that the hot ones are read and changed at the same time.
pub(crate) const PRODUCTS: usize = 1_000;

/// Dropped and made again by every demo.
const DATABASE: &str = "recant_demo";

/// Topics and groups of every demo begin so, and those of earlier ones are deleted.
const NAME_PREFIX: &str = "demo-";

/// Writers, probes, and readers that missed; a server takes 100 connections unless told otherwise.
const CONNECTIONS: u32 = 16;

/// Enough to see records spread; each gets two heartbeats a second.
const PARTITIONS: &str = "4";

/// A broker on the same machine answers in milliseconds; a JVM that has just started may need seconds.
const KAFKA_TIMEOUT: Duration = Duration::from_secs(15);

/// Redis keys looked at and removed per step.
const KEYS_PER_STEP: usize = 1_000;

/// The demo's own places on the servers.
pub(crate) struct Stage {
    pub(crate) database: PgPool,
    pub(crate) database_url: String,
    /// Random, so that nothing of an earlier demo is taken for this one's.
    pub(crate) name: String,
}

impl Stage {
    pub(crate) async fn build(settings: &Settings, processes: &Processes) -> anyhow::Result<Self> {
        for url in &settings.redis_urls {
            remove_keys(url).await?;
        }
        delete_topics(&settings.brokers).await?;
        let options = make_database(settings.database_url.expose()).await?;
        let stage = Self {
            database_url: options.to_url_lossy().to_string(),
            database: PgPoolOptions::new().max_connections(CONNECTIONS).connect_with(options).await?,
            name: format!("{NAME_PREFIX}{:08x}", Uuid::now_v7().as_u64_pair().1 as u32),
        };
        processes.relay(settings, &stage, "migrate").await?;
        processes.relay(settings, &stage, "topics").await?;
        stage.make_shop().await.context("could not make the shop")?;
        println!("database {DATABASE}, {PRODUCTS} products, topics {}.*", stage.name);
        Ok(stage)
    }

    async fn make_shop(&self) -> anyhow::Result<()> {
        sqlx::raw_sql(
            "create schema shop;
             create table shop.product (
                 id bigint primary key,
                 title text not null,
                 price_cents bigint not null check (price_cents > 0),
                 -- Raised by every change; for the demo's check only.
                 revision bigint not null default 1
             )",
        )
        .execute(&self.database)
        .await?;
        let fill =
            "insert into shop.product (id, title, price_cents) select n, 'Product ' || n, 100 + n from generate_series(1, $1::bigint) n";
        sqlx::query(fill).bind(i64::try_from(PRODUCTS)?).execute(&self.database).await?;
        Ok(())
    }

    /// The settings of both relays, but for name and address.
    pub(crate) fn relay_environment(&self, settings: &Settings) -> Vec<(&'static str, String)> {
        vec![
            ("RELAY_DATABASE_URL", self.database_url.clone()),
            // The stack's login has REPLICATION; elsewhere this would be a login of its own, and without it the relays poll.
            ("RELAY_TAIL_URL", self.database_url.split('?').next().unwrap_or_default().to_owned()),
            ("RELAY_BROKERS", settings.brokers.clone()),
            ("RELAY_REGIONS", REGIONS.join(",")),
            ("RELAY_TOPIC_PREFIX", self.name.clone()),
            ("RELAY_PARTITIONS", PARTITIONS.to_owned()),
        ]
    }

    /// The settings of one region's subscriber, but for its address.
    pub(crate) fn subscriber_environment(&self, settings: &Settings, region: usize) -> Vec<(&'static str, String)> {
        vec![
            ("SUBSCRIBER_REGION", REGIONS[region].to_owned()),
            ("SUBSCRIBER_REDIS_URL", settings.redis_urls[region].clone()),
            ("SUBSCRIBER_BROKERS", settings.brokers.clone()),
            ("SUBSCRIBER_TOPIC_PREFIX", self.name.clone()),
            ("SUBSCRIBER_GROUP", format!("{}-{}", self.name, REGIONS[region])),
            ("SUBSCRIBER_KEY_PREFIXES", KEY_PREFIX.to_owned()),
        ]
    }
}

async fn make_database(url: &str) -> anyhow::Result<PgConnectOptions> {
    // What the parser says could repeat the password.
    let options =
        PgConnectOptions::from_str(url).ok().context("DATABASE_URL is not of the form postgres://user:password@host:port/database")?;
    let place = format!("{}:{}", options.get_host(), options.get_port());
    let mut administrator = PgConnection::connect_with(&options)
        .await
        .with_context(|| format!("could not connect to Postgres at {place}; `make up` starts one"))?;
    // Force: relays that were killed with their demo may still be connected.
    sqlx::raw_sql("drop database if exists recant_demo with (force)").execute(&mut administrator).await?;
    sqlx::raw_sql("create database recant_demo encoding 'UTF8' template template0").execute(&mut administrator).await?;
    administrator.close().await?;
    Ok(options.database(DATABASE))
}

/// Removes what earlier demos left: values, tombstone entries, markers.
async fn remove_keys(url: &str) -> anyhow::Result<()> {
    let mut connection = redis_client::connect(url).await?;
    for pattern in [format!("{KEY_PREFIX}*"), format!("{ENTRY_PREFIX}{{{KEY_PREFIX}*"), format!("recant:m:{NAME_PREFIX}*")] {
        let mut cursor = 0u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(KEYS_PER_STEP);
            let (next, keys): (u64, Vec<String>) = scan.query_async(&mut connection).await?;
            if !keys.is_empty() {
                let () = redis::cmd("UNLINK").arg(keys).query_async(&mut connection).await?;
            }
            if next == 0 {
                break;
            }
            cursor = next;
        }
    }
    Ok(())
}

async fn delete_topics(brokers: &str) -> anyhow::Result<()> {
    let mut config = ClientConfig::new();
    // Quiet: one clear error below says more than a line per attempt.
    config.set("bootstrap.servers", brokers).set_log_level(rdkafka::config::RDKafkaLogLevel::Emerg);
    let lister: BaseProducer = config.create()?;
    // Blocks; nothing else runs yet.
    let found = tokio::task::spawn_blocking(move || lister.client().fetch_metadata(None, KAFKA_TIMEOUT)).await?;
    let found = found.with_context(|| format!("Kafka does not answer at {brokers}; `make up` starts one"))?;
    let old: Vec<_> = found.topics().iter().map(|topic| topic.name()).filter(|name| name.starts_with(NAME_PREFIX)).collect();
    if old.is_empty() {
        return Ok(());
    }
    let admin: AdminClient<DefaultClientContext> = config.create()?;
    let options = AdminOptions::new().request_timeout(Some(KAFKA_TIMEOUT)).operation_timeout(Some(KAFKA_TIMEOUT));
    for outcome in admin.delete_topics(&old, &options).await? {
        if let Err((topic, code)) = outcome {
            bail!("could not delete topic {topic} of an earlier demo: {code}");
        }
    }
    Ok(())
}
