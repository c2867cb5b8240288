//! Propagation, timed from outside: from just before a commit until the cache holds the floor.
//!
//! A probe invalidates a key of its own in a transaction of its own, so its tombstone entry comes into being when the invalidation is applied.
//! Redis itself reports that instant: client tracking in broadcast mode pushes the name of every changed key below a prefix to this
//! connection. Nobody has to poll, and neither the relay's nor the subscriber's clock is asked.

use crate::redis_client;
use crate::storefront::KEY_PREFIX;
use crate::tally::Tally;
use anyhow::Context as _;
use recant_schema::key::Key;
use redis::aio::{AsyncPushSender, MultiplexedConnection, SendError};
use redis::{Client, ProtocolVersion, PushInfo, PushKind, Value};
use sqlx::PgPool;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;

/// Probes under way at most; beyond it none is sent. Five seconds of them: by then something is broken, and the table shows it.
const MOST_UNDER_WAY: usize = 100;

fn probe_key(number: u64) -> anyhow::Result<Key> {
    Ok(Key::parse(&format!("{KEY_PREFIX}probe:{number}"))?)
}

/// The probes that one region has not applied yet: name of the tombstone entry, and when its commit was asked for.
#[derive(Default)]
struct UnderWay(Mutex<HashMap<String, Instant>>);

impl UnderWay {
    fn with<T>(&self, act: impl FnOnce(&mut HashMap<String, Instant>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Receives what Redis pushes, in the task that reads the connection.
struct Arrivals {
    under_way: Arc<UnderWay>,
    tally: Arc<Tally>,
    region: usize,
}

impl AsyncPushSender for Arrivals {
    fn send(&self, info: PushInfo) -> Result<(), SendError> {
        let now = Instant::now();
        let (PushKind::Invalidate, Some(Value::Array(names))) = (info.kind, info.data.first()) else { return Ok(()) };
        for name in names {
            let Ok(name) = redis::from_redis_value_ref::<String>(name) else { continue };
            if let Some(sent) = self.under_way.with(|probes| probes.remove(&name)) {
                self.tally.regions[self.region].probe_took(now - sent);
            }
        }
        Ok(())
    }
}

/// Sends probes and times their arrival in every region.
pub(crate) struct Prober {
    database: PgPool,
    under_way: Vec<Arc<UnderWay>>,
    /// Held open: Redis pushes for as long as they are.
    _watched: Vec<MultiplexedConnection>,
}

impl Prober {
    pub(crate) async fn start(database: PgPool, redis_urls: &[String], tally: &Arc<Tally>) -> anyhow::Result<Self> {
        let mut prober = Self { database, under_way: Vec::new(), _watched: Vec::new() };
        for (region, url) in redis_urls.iter().enumerate() {
            let under_way = Arc::new(UnderWay::default());
            let arrivals = Arrivals { under_way: Arc::clone(&under_way), tally: Arc::clone(tally), region };
            prober.under_way.push(under_way);
            prober._watched.push(watch(url, arrivals).await.context("could not make Redis report changed keys")?);
        }
        Ok(prober)
    }

    /// Sends one probe, unless too many are under way.
    pub(crate) async fn send(&self, number: u64) -> anyhow::Result<bool> {
        if self.missing().iter().any(|count| *count >= MOST_UNDER_WAY) {
            return Ok(false);
        }
        let key = probe_key(number)?;
        let mut transaction = self.database.begin().await?;
        sqlx::query("select recant.invalidate($1)").bind(key.as_str()).execute(&mut *transaction).await?;
        let sent = Instant::now();
        for region in &self.under_way {
            region.with(|probes| probes.insert(key.entry(), sent));
        }
        transaction.commit().await?;
        Ok(true)
    }

    /// How many probes each region has not applied yet.
    pub(crate) fn missing(&self) -> Vec<usize> {
        self.under_way.iter().map(|region| region.with(|probes| probes.len())).collect()
    }
}

async fn watch(url: &str, arrivals: Arrivals) -> anyhow::Result<MultiplexedConnection> {
    let address = redis_client::address(url)?;
    // Only the third protocol version has pushes.
    let third = address.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let config = redis_client::settings().set_push_sender(arrivals);
    let client = Client::open(address.set_redis_settings(third))?;
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    // The entry of any probe, up to its number.
    let entry = probe_key(0)?.entry();
    let prefix = entry.trim_end_matches("0}");
    let () = redis::cmd("CLIENT").arg(&["TRACKING", "ON", "BCAST", "PREFIX", prefix]).query_async(&mut connection).await?;
    Ok(connection)
}
