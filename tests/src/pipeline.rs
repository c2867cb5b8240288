//! One test's world: a database, topics, relays, and regions with their subscribers.

use crate::cache::Cache;
use crate::daemon::{Daemon, run_to_end};
use crate::kafka::Kafka;
use crate::proxy::Proxy;
use crate::records;
use crate::servers::{Servers, authority, with_authority};
use crate::source::{self, Database};
use crate::wait::{eventually, fresh_name};
use recant_schema::key::Key;
use recant_schema::labels::Lane;
use recant_schema::topics::{self, Topics};
use recant_schema::version::Version;
use sqlx::postgres::PgConnection;
use std::path::{Path, PathBuf};

/// Enough for records of different partitions to overtake each other, and few enough to be made by the dozen.
const PARTITIONS: i32 = 3;

/// What a pipeline is made of. Each method changes one thing of the smallest one: one relay, one region.
#[derive(Clone, Debug)]
pub struct Builder {
    regions: &'static [&'static str],
    relays: usize,
    partitions: i32,
    relay_settings: Vec<(String, String)>,
    subscriber_settings: Vec<(String, String)>,
    database_url: Option<String>,
    redis_url: Option<String>,
    postgres_proxy: bool,
    redis_proxy: bool,
    largest_record: Option<u32>,
    start_subscribers: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            regions: &["eu"],
            relays: 1,
            partitions: PARTITIONS,
            relay_settings: Vec::new(),
            subscriber_settings: Vec::new(),
            database_url: None,
            redis_url: None,
            postgres_proxy: false,
            redis_proxy: false,
            largest_record: None,
            start_subscribers: true,
        }
    }
}

impl Builder {
    /// `eu` and `us`, each with a Redis and a subscriber of its own.
    #[must_use]
    pub fn two_regions(mut self) -> Self {
        self.regions = &["eu", "us"];
        self
    }

    /// So many relays side by side. None: records come by hand, and there is no database.
    #[must_use]
    pub fn relays(mut self, relays: usize) -> Self {
        self.relays = relays;
        self
    }

    /// Partitions of each topic.
    #[must_use]
    pub fn partitions(mut self, partitions: i32) -> Self {
        self.partitions = partitions;
        self
    }

    /// A setting of every relay, by its key in the file.
    #[must_use]
    pub fn relay(mut self, name: &str, value: &str) -> Self {
        self.relay_settings.push((format!("RELAY_{}", name.to_uppercase()), value.to_owned()));
        self
    }

    /// A setting of every subscriber, by its key in the file.
    #[must_use]
    pub fn subscriber(mut self, name: &str, value: &str) -> Self {
        self.subscriber_settings.push((format!("SUBSCRIBER_{}", name.to_uppercase()), value.to_owned()));
        self
    }

    /// Another Postgres server than the shared one.
    #[must_use]
    pub fn postgres(mut self, url: &str) -> Self {
        self.database_url = Some(url.to_owned());
        self
    }

    /// Another Redis server than the shared one, for the first region.
    #[must_use]
    pub fn redis(mut self, url: &str) -> Self {
        self.redis_url = Some(url.to_owned());
        self
    }

    /// The relays reach Postgres through [`Pipeline::postgres_proxy`].
    #[must_use]
    pub fn postgres_through_proxy(mut self) -> Self {
        self.postgres_proxy = true;
        self
    }

    /// Each subscriber reaches its Redis through [`Region::proxy`].
    #[must_use]
    pub fn redis_through_proxy(mut self) -> Self {
        self.redis_proxy = true;
        self
    }

    /// The shared topic takes records up to this size; a broker's default is 1 MB.
    #[must_use]
    pub fn largest_record(mut self, bytes: u32) -> Self {
        self.largest_record = Some(bytes);
        self
    }

    /// The subscribers are not started yet.
    #[must_use]
    pub fn without_subscribers(mut self) -> Self {
        self.start_subscribers = false;
        self
    }

    /// Makes everything, starts everything, and waits until all of it is ready.
    ///
    /// # Panics
    /// When something does not start, with what to do about it.
    pub async fn start(self) -> Pipeline {
        let servers = Servers::from_environment();
        servers.insist().await;
        let mut pipeline = Pipeline::prepare(&self, servers).await;
        pipeline.make(&self).await;
        for relay in &mut pipeline.relays {
            relay.start();
        }
        if self.start_subscribers {
            for region in &mut pipeline.regions {
                region.subscriber.start();
            }
        }
        pipeline.await_ready().await;
        pipeline
    }
}

/// One region.
#[derive(Debug)]
pub struct Region {
    /// Its name in this pipeline, such as `eu-3f2a9c01`.
    pub name: topics::Region,
    /// Its readers' side.
    pub cache: Cache,
    /// Its subscriber.
    pub subscriber: Daemon,
    /// Its consumer group.
    pub group: String,
    proxy: Option<Proxy>,
}

impl Region {
    /// What stands before its Redis.
    ///
    /// # Panics
    /// Unless asked for by [`Builder::redis_through_proxy`].
    pub fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("the builder was asked for a proxy")
    }
}

/// One test's world. Dropping it ends its processes and removes its database, topics, groups and cache keys.
#[derive(Debug)]
pub struct Pipeline {
    /// What the names of everything here end with.
    pub suffix: String,
    /// Topic names.
    pub topics: Topics,
    /// The cluster.
    pub kafka: Kafka,
    /// The relays, started or not.
    pub relays: Vec<Daemon>,
    /// The regions, `eu` first.
    pub regions: Vec<Region>,
    database: Option<Database>,
    postgres_proxy: Option<Proxy>,
    folder: PathBuf,
    expected_errors: Vec<String>,
}

impl Pipeline {
    /// The smallest one, to be changed.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// One relay, one region.
    ///
    /// # Panics
    /// When something does not start, with what to do about it.
    pub async fn start() -> Self {
        Builder::default().start().await
    }

    async fn prepare(builder: &Builder, servers: Servers) -> Self {
        let suffix = fresh_name();
        let server_url = builder.database_url.as_ref().unwrap_or(&servers.database_url);
        let database = if builder.relays > 0 { Some(Database::create(server_url, &format!("recant_{suffix}")).await) } else { None };
        let postgres_proxy = builder.postgres_proxy.then(|| Proxy::start(authority(server_url)));
        let executable = std::env::current_exe().expect("a running program knows its path");
        let folder =
            executable.parent().and_then(Path::parent).expect("tests run in target/<profile>/deps").join("test-logs").join(&suffix);
        std::fs::create_dir_all(&folder).expect("the target folder can be written");
        let topic_prefix = format!("recant-{suffix}");
        let names: Vec<_> =
            builder.regions.iter().map(|short| topics::Region::parse(&format!("{short}-{suffix}")).expect("a good name")).collect();

        let url = database.as_ref().map_or_else(|| server_url.clone(), Database::url);
        let url = postgres_proxy.as_ref().map_or(url.clone(), |proxy| with_authority(&url, &proxy.address()));
        let setting = |name: &str, value: String| (name.to_owned(), value);
        let regions_setting = names.iter().map(topics::Region::as_str).collect::<Vec<_>>().join(",");
        let relay_settings = [
            setting("RELAY_DATABASE_URL", url),
            setting("RELAY_BROKERS", servers.brokers.clone()),
            setting("RELAY_REGIONS", regions_setting),
            setting("RELAY_TOPIC_PREFIX", topic_prefix.clone()),
            setting("RELAY_PARTITIONS", builder.partitions.to_string()),
        ];
        let relays = (1..=builder.relays.max(1)).map(|number| {
            let mut settings = [&relay_settings[..], &builder.relay_settings].concat();
            settings.push(setting("RELAY_RELAY_NAME", format!("relay-{number}")));
            Daemon::new("relay", &format!("relay-{number}"), &folder, settings)
        });
        let relays = relays.collect();
        let regions = names.into_iter().zip(&servers.redis_urls).enumerate().map(|(at, (name, shared))| {
            let redis = builder.redis_url.as_ref().filter(|_| at == 0).unwrap_or(shared);
            let proxy = builder.redis_proxy.then(|| Proxy::start(authority(redis)));
            let group = format!("recant-{}", name.as_str());
            let mut settings = vec![
                setting("SUBSCRIBER_REGION", name.as_str().to_owned()),
                setting("SUBSCRIBER_REDIS_URL", proxy.as_ref().map_or(redis.clone(), |proxy| with_authority(redis, &proxy.address()))),
                setting("SUBSCRIBER_BROKERS", servers.brokers.clone()),
                setting("SUBSCRIBER_TOPIC_PREFIX", topic_prefix.clone()),
                setting("SUBSCRIBER_KEY_PREFIXES", format!("v2:{suffix}:")),
                // Without a stable name the group would wait for the session of a killed process, 6 s.
                setting("SUBSCRIBER_INSTANCE_ID", "subscriber-1".to_owned()),
            ];
            settings.extend(builder.subscriber_settings.iter().cloned());
            let subscriber = Daemon::new("subscriber", &format!("subscriber-{}", builder.regions[at]), &folder, settings);
            Region { name, cache: Cache::new(redis), subscriber, group, proxy }
        });
        let regions = regions.collect();
        Self {
            topics: Topics::new(&topic_prefix),
            kafka: Kafka::new(&servers.brokers),
            relays,
            regions,
            database,
            postgres_proxy,
            folder,
            expected_errors: Vec::new(),
            suffix,
        }
    }

    /// Migrates the database and creates the topics, as a person would: by the relay's own commands.
    async fn make(&mut self, builder: &Builder) {
        if let Some(bytes) = builder.largest_record {
            let bytes = bytes.to_string();
            let settings = [("max.message.bytes", bytes.as_str()), ("retention.ms", "604800000"), ("min.insync.replicas", "1")];
            self.kafka.create_topic(&self.shared_topic(), builder.partitions, &settings).await;
        }
        let commands = if self.database.is_some() { &["migrate", "topics"][..] } else { &["topics"] };
        let runs = commands.iter().map(|&command| {
            let mut settings = self.relays[0].settings().to_vec();
            if let Some(database) = &self.database {
                // The owner migrates directly, whatever stands before the relays.
                settings.retain(|(name, _)| name != "RELAY_DATABASE_URL");
                settings.push(("RELAY_DATABASE_URL".to_owned(), database.url()));
            }
            tokio::task::spawn_blocking(move || (command, run_to_end("relay", &[command], &settings)))
        });
        for run in futures::future::join_all(runs).await {
            let (command, output) = run.expect("starting a process does not panic");
            let text = [&output.stdout[..], &output.stderr].concat();
            assert!(output.status.success(), "relay {command}: {}", String::from_utf8_lossy(&text));
        }
        if self.database.is_none() {
            self.relays.clear();
        }
    }

    /// Waits until every process that was started is ready.
    ///
    /// # Panics
    /// With the end of the log of one that is not.
    pub async fn await_ready(&self) {
        for daemon in self.daemons().filter(|daemon| daemon.is_started()) {
            daemon.await_ready().await;
        }
    }

    fn daemons(&self) -> impl Iterator<Item = &Daemon> {
        self.relays.iter().chain(self.regions.iter().map(|region| &region.subscriber))
    }

    /// A cache key of this test's own.
    ///
    /// # Panics
    /// When what comes is no good end of a key.
    pub fn key(&self, end: &str) -> Key {
        Key::parse(&format!("v2:{}:{end}", self.suffix)).expect("a good key")
    }

    /// So many keys.
    pub fn keys(&self, count: usize) -> Vec<Key> {
        (0..count).map(|number| self.key(&format!("product:{number}"))).collect()
    }

    /// The first region.
    pub fn eu(&self) -> &Region {
        &self.regions[0]
    }

    /// The first region, to kill its subscriber.
    pub fn eu_mut(&mut self) -> &mut Region {
        &mut self.regions[0]
    }

    /// The second region.
    pub fn us(&self) -> &Region {
        &self.regions[1]
    }

    /// The topic of all regions, realtime.
    pub fn shared_topic(&self) -> String {
        self.topics.invalidations(None, Lane::Realtime)
    }

    /// The database.
    ///
    /// # Panics
    /// When there is no relay and so no database.
    pub fn database(&self) -> &Database {
        self.database.as_ref().expect("a pipeline with relays has a database")
    }

    /// A product's connection: direct, whatever stands before the relays.
    pub async fn product(&self) -> PgConnection {
        self.database().connect().await
    }

    /// One product transaction for one key.
    pub async fn commit(&self, key: &Key) {
        source::commit(&mut self.product().await, key.as_str()).await;
    }

    /// What stands before Postgres.
    ///
    /// # Panics
    /// Unless asked for by [`Builder::postgres_through_proxy`].
    pub fn postgres_proxy(&self) -> &Proxy {
        self.postgres_proxy.as_ref().expect("the builder was asked for a proxy")
    }

    /// Produces invalidations made by hand to the topic of all regions, in order for each key.
    pub async fn produce(&self, invalidations: &[(Key, Version)]) {
        let records: Vec<_> = invalidations.iter().map(|(key, version)| records::pair(key, *version)).collect();
        self.kafka.produce_all(&self.shared_topic(), &records).await;
    }

    /// Waits until the first region has committed everything that the topic of all regions holds now: all of it is applied then.
    ///
    /// # Panics
    /// When it has not in time.
    pub async fn await_consumed(&self) {
        let (topic, group) = (self.shared_topic(), &self.eu().group);
        let ends = self.kafka.bounds(&topic).await;
        eventually("everything in the topic is applied and committed", async || {
            let committed = self.kafka.committed(group, &topic).await;
            let reached =
                |(number, (low, high)): (&i32, &(i64, i64))| low == high || committed.get(number).is_some_and(|next| next >= high);
            ends.iter().all(reached).then_some(())
        })
        .await;
    }

    /// A second subscriber for the first region, not started. Its errors are its test's business.
    pub fn second_subscriber(&self) -> Daemon {
        let first = self.eu().subscriber.settings().iter();
        let own = ["SUBSCRIBER_HTTP_ADDRESS", "SUBSCRIBER_INSTANCE_ID", "SUBSCRIBER_LOG_FORMAT"];
        let mut settings: Vec<_> = first.filter(|(name, _)| !own.contains(&name.as_str())).cloned().collect();
        settings.push(("SUBSCRIBER_INSTANCE_ID".to_owned(), "subscriber-2".to_owned()));
        Daemon::new("subscriber", "subscriber-second", &self.folder, settings)
    }

    /// An ERROR that contains this text belongs to what is tested.
    pub fn expect_error(&mut self, text: &str) {
        self.expected_errors.push(text.to_owned());
    }

    /// Ends a test: nothing has died by itself, and nobody logged an ERROR that was not expected.
    ///
    /// # Panics
    /// With what was found.
    pub async fn finish(self) {
        for daemon in self.daemons().filter(|daemon| daemon.is_started()) {
            assert!(daemon.http("/healthz").await.is_some_and(|answer| answer.status == 200), "a process has died or is stuck");
        }
        let errors = self.daemons().flat_map(Daemon::errors);
        let unexpected: Vec<_> = errors.filter(|line| !self.expected_errors.iter().any(|text| line.contains(text.as_str()))).collect();
        assert!(unexpected.is_empty(), "unexpected errors:\n{}", unexpected.join("\n"));
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        for relay in &mut self.relays {
            relay.end();
        }
        for region in &mut self.regions {
            region.subscriber.end();
            region.cache.remove_all_blocking(&self.suffix);
        }
        let names: Vec<_> = self.regions.iter().map(|region| region.name.clone()).collect();
        let mut topics = self.topics.published_for(&names);
        topics.extend(names.iter().map(|name| self.topics.dead_letters(name)));
        self.kafka.remove_blocking(topics, self.regions.iter().map(|region| region.group.clone()).collect());
        if std::thread::panicking() {
            eprintln!("logs: {}", self.folder.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}
