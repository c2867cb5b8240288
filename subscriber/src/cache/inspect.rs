//! Looking at the cache without changing it, for `check`, `status` and `inspect`.

use super::command::{marker_key, read_marker};
use super::topology::{Map, PrimaryInfo, connect};
use crate::config::Config;
use crate::error::Error;
use crate::marker::Marker;
use recant_schema::key::Key;
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, Pipeline, cmd};
use std::collections::BTreeMap;

/// One primary as seen from outside.
#[derive(Debug)]
pub struct Primary {
    /// `host:port`.
    pub name: String,
    /// Its server version, as INFO tells.
    pub version: String,
    /// What it does when memory is full.
    pub eviction: String,
    /// What it remembers.
    pub marker: Marker,
}

/// One key as its primary holds it.
#[derive(Debug)]
pub struct KeyReport {
    /// `host:port` of the primary that owns the slot.
    pub node: String,
    /// Type of the value, `none` without one.
    pub value_type: String,
    /// Time to live of the value in ms; negative as Redis says it: -1 without expiry, -2 without value.
    pub value_ttl_ms: i64,
    /// Fields of the entry; empty without one.
    pub entry: BTreeMap<String, String>,
    /// Time to live of the entry in ms.
    pub entry_ttl_ms: i64,
}

/// Connects when asked, reads, and is done.
pub struct Inspector {
    config: Config,
    map: Map,
}

impl Inspector {
    /// Learns where the primaries are.
    ///
    /// # Errors
    /// [`Error::Cache`] or [`Error::CacheTopology`].
    pub async fn new(config: &Config) -> Result<Self, Error> {
        Ok(Self { config: config.clone(), map: config.redis.discover().await? })
    }

    /// Every primary.
    ///
    /// # Errors
    /// [`Error::Cache`] when one cannot be asked.
    pub async fn primaries(&self) -> Result<Vec<Primary>, Error> {
        let mut primaries = Vec::new();
        for primary in &self.map.primaries {
            primaries.push(self.primary(primary).await?);
        }
        Ok(primaries)
    }

    async fn primary(&self, primary: &PrimaryInfo) -> Result<Primary, Error> {
        let mut connection = connect(primary.info.clone()).await?;
        let info: String = ask(&mut connection, "read INFO", cmd("INFO").arg("server").take()).await?;
        let memory: String = ask(&mut connection, "read INFO", cmd("INFO").arg("memory").take()).await?;
        let key = marker_key(&self.config.group, primary.tag.as_deref());
        let fields: Vec<(Vec<u8>, Vec<u8>)> = ask(&mut connection, "read the marker", cmd("HGETALL").arg(key).take()).await?;
        let line = |text: &str, name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("unknown").trim().to_owned();
        Ok(Primary {
            name: primary.name.clone(),
            version: line(&info, "redis_version:"),
            eviction: line(&memory, "maxmemory_policy:"),
            marker: read_marker(fields, &self.config.consumed_topics()),
        })
    }

    /// One key.
    ///
    /// # Errors
    /// [`Error::Cache`] when its primary cannot be asked, [`Error::CacheTopology`] when nobody owns its slot.
    pub async fn key(&self, key: &Key) -> Result<KeyReport, Error> {
        let primary = self.map.owner(key.slot()).ok_or_else(|| Error::CacheTopology(format!("no primary owns slot {}", key.slot())))?;
        let mut connection = connect(primary.info.clone()).await?;
        let mut pipeline = Pipeline::new();
        pipeline.cmd("TYPE").arg(key.as_str()).cmd("PTTL").arg(key.as_str()).cmd("HGETALL").arg(key.entry()).cmd("PTTL").arg(key.entry());
        let asked = pipeline.query_async(&mut connection).await;
        let (value_type, value_ttl_ms, entry, entry_ttl_ms) =
            asked.map_err(|source| Error::Cache { attempt: "look at the key", source })?;
        Ok(KeyReport { node: primary.name.clone(), value_type, value_ttl_ms, entry, entry_ttl_ms })
    }
}

async fn ask<T: FromRedisValue>(connection: &mut MultiplexedConnection, attempt: &'static str, command: redis::Cmd) -> Result<T, Error> {
    command.query_async(connection).await.map_err(|source| Error::Cache { attempt, source })
}
