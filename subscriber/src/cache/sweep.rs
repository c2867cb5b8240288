//! Sweeping: forgetting every key below the region's prefixes, because nobody knows any more which of them are stale.
//!
//! On each primary a paced SCAN looks for values below each key prefix and for entries, and forgets the key of each. SCAN returns whatever was there
//! from beginning to end; a reader that had missed before the sweep has left its mark in an entry, which is found, so its fill is refused
//! or its value unlinked; a reader that misses later loads what the database holds now. Floors stay.

use super::command::{Scripts, forget, reply};
use super::node::foreign_role;
use super::topology::{Map, PrimaryInfo, connect};
use crate::config::Config;
use crate::disposition::Reply;
use crate::error::Error;
use recant_schema::key::{ENTRY_PREFIX, Key};
use recant_schema::service::retry::Retry;
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisResult, Value, cmd};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// Keys looked at by one SCAN: about a millisecond of the server's time.
const SCAN_COUNT: u64 = 500;

/// First and longest wait before a sweep that was interrupted starts over.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Sweeps every primary, from the beginning again after any interruption, until one pass went through. Returns how many keys that pass forgot.
pub(super) async fn run(config: &Config, scripts: &Scripts) -> u64 {
    let mut retry = Retry::new(FIRST_WAIT, LONGEST_WAIT);
    loop {
        match sweep(config, scripts).await {
            Ok(forgotten) => return forgotten,
            Err(error) => tracing::info!(%error, "the sweep was interrupted and starts over"),
        }
        tokio::time::sleep(retry.next_delay()).await;
    }
}

async fn sweep(config: &Config, scripts: &Scripts) -> Result<u64, Error> {
    let before = config.redis.discover().await?;
    let mut forgotten = 0;
    for primary in &before.primaries {
        forgotten += sweep_primary(config, scripts, primary).await?;
    }
    // A key that moved from a primary not yet swept to one that was is missed.
    if Map::same_owners(&before, &config.redis.discover().await?) {
        Ok(forgotten)
    } else {
        Err(Error::CacheTopology("slots moved during the sweep".to_owned()))
    }
}

async fn sweep_primary(config: &Config, scripts: &Scripts, primary: &PrimaryInfo) -> Result<u64, Error> {
    let failed = |source| Error::Cache { attempt: "sweep", source };
    let mut connection = connect(primary.info.clone()).await?;
    if let Some(role) = foreign_role(&mut connection).await.map_err(failed)? {
        return Err(Error::CacheTopology(format!("{} is a {role}, not a primary", primary.name)));
    }
    let mut load = Pipeline::new();
    scripts.load(&mut load);
    load.exec_async(&mut connection).await.map_err(failed)?;
    let mut pace = interval(Duration::from_secs_f64(SCAN_COUNT as f64 / config.sweep_keys_per_second as f64));
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut forgotten = 0;
    // Entries last: a fill between the two passes has its mark in an entry, and so is found by the second.
    for prefix in config.key_prefixes.as_slice().iter().map(String::as_str).chain([ENTRY_PREFIX]) {
        let pattern = format!("{}*", escape(prefix));
        let mut cursor = "0".to_owned();
        loop {
            pace.tick().await;
            let scan = cmd("SCAN").arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCAN_COUNT).take();
            let (next, names): (String, Vec<Vec<u8>>) = scan.query_async(&mut connection).await.map_err(failed)?;
            forgotten += forget_all(config, scripts, &mut connection, &names).await?;
            cursor = next;
            if cursor == "0" {
                break;
            }
        }
    }
    Ok(forgotten)
}

async fn forget_all(config: &Config, scripts: &Scripts, connection: &mut MultiplexedConnection, names: &[Vec<u8>]) -> Result<u64, Error> {
    let keys = names.iter().filter_map(|name| {
        let name = std::str::from_utf8(name).ok()?;
        let key = if name.starts_with(ENTRY_PREFIX) { Key::of_entry(name) } else { Key::parse(name).ok() };
        key.filter(|key| config.key_prefixes.allow(key))
    });
    let keys: Vec<_> = keys.collect();
    if keys.is_empty() {
        return Ok(0);
    }
    let mut pipeline = Pipeline::with_capacity(keys.len());
    pipeline.ignore_errors();
    for key in &keys {
        pipeline.add_command(forget(scripts, key));
    }
    let failed = |source| Error::Cache { attempt: "forget swept keys", source };
    let answers: Vec<RedisResult<Value>> = pipeline.query_async(connection).await.map_err(failed)?;
    for answer in answers {
        match reply(answer).map_err(failed)? {
            Reply::Number(_) => {}
            refused => return Err(Error::CacheTopology(format!("a swept key was refused: {refused:?}"))),
        }
    }
    Ok(keys.len() as u64)
}

/// Glob characters of a prefix, taken literally.
fn escape(prefix: &str) -> String {
    let escaped = prefix.chars().flat_map(|c| if "*?[]^-\\".contains(c) { vec!['\\', c] } else { vec![c] });
    escaped.collect()
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn a_prefix_with_glob_characters_is_meant_literally() {
        assert_eq!(escape("v2:a*[b]?"), "v2:a\\*\\[b\\]\\?");
    }
}
