//! Bytes in and out: one step as a Redis command, one Redis answer as a [`Reply`].

use crate::config::Config;
use crate::disposition::{Reply, Step};
use crate::marker::Marker;
use crate::work::{Order, Work};
use recant_schema::key::Key;
use recant_schema::scripts::{FORGET, INVALIDATE, OWE};
use redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, Script, Value, cmd};

/// The marker's name begins so; the group and, in a cluster, a hash tag follow.
const MARKER_PREFIX: &str = "recant:m:";

/// The scripts that a subscriber runs.
pub(super) struct Scripts {
    invalidate: Script,
    owe: Script,
    forget: Script,
    floor_ttl_ms: String,
    tombstones: &'static str,
}

impl Scripts {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            invalidate: Script::new(INVALIDATE),
            owe: Script::new(OWE),
            forget: Script::new(FORGET),
            floor_ttl_ms: config.floor_ttl.as_millis().to_string(),
            tombstones: config.tombstones.as_str(),
        }
    }

    /// Loads every script: a new or promoted node knows none.
    pub(super) fn load(&self, pipeline: &mut Pipeline) {
        for text in [INVALIDATE, OWE, FORGET] {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(text).ignore();
        }
    }

    /// One step of one order as a command.
    pub(super) fn command(&self, step: Step, work: &Work) -> Cmd {
        let (key, entry) = (work.key.as_str(), work.key.entry());
        match step {
            Step::Invalidate => {
                let mut command = evalsha(&self.invalidate, &[key, &entry]);
                self.version(&mut command, &work.order);
                command.arg(self.tombstones);
                command
            }
            Step::Owe => {
                let mut command = evalsha(&self.owe, &[&entry]);
                self.version(&mut command, &work.order);
                command
            }
            Step::Forget => evalsha(&self.forget, &[key, &entry]),
            Step::EraseMark => cmd("HDEL").arg(entry).arg("m").take(),
            Step::UnlinkEntry => cmd("UNLINK").arg(entry).take(),
            Step::UnlinkValue(_) => cmd("UNLINK").arg(key).take(),
        }
    }

    fn version(&self, command: &mut Cmd, order: &Order) {
        let Order::Invalidate { source, version } = order else { unreachable!("only invalidations carry versions") };
        command.arg(&**source).arg(version.epoch.to_string()).arg(version.position.to_string()).arg(&self.floor_ttl_ms);
    }
}

fn evalsha(script: &Script, keys: &[&str]) -> Cmd {
    let mut command = cmd("EVALSHA");
    command.arg(script.get_hash()).arg(keys.len()).arg(keys);
    command
}

/// What a server said, reduced; `Err` when the connection itself is lost or late.
pub(super) fn reply(answer: RedisResult<Value>) -> Result<Reply, RedisError> {
    let error = match answer {
        Ok(Value::Int(number)) => return Ok(Reply::Number(number)),
        Ok(other) => return Ok(Reply::Odd(format!("an answer that is no number: {other:?}"))),
        Err(error) => error,
    };
    if !matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) {
        return Err(error);
    }
    let text = error.to_string();
    Ok(match error.code().unwrap_or_default() {
        "NOSCRIPT" => Reply::ScriptUnknown,
        "MOVED" => Reply::Moved,
        "ASK" => match error.redirect_node() {
            Some((address, _)) => Reply::Ask(address.to_owned()),
            None => Reply::NotNow(text),
        },
        "TRYAGAIN" => Reply::TryAgain,
        "OOM" => Reply::OutOfMemory,
        "READONLY" => Reply::Demoted,
        "WRONGTYPE" | "ERR" => Reply::Odd(text),
        _ => Reply::NotNow(text),
    })
}

/// The name of a primary's marker.
pub(super) fn marker_key(group: &str, tag: Option<&str>) -> String {
    match tag {
        Some(tag) => format!("{MARKER_PREFIX}{group}:{{{tag}}}"),
        None => format!("{MARKER_PREFIX}{group}"),
    }
}

/// A marker as one transaction: what it says of gaps and how far it says the cache was maintained belong together.
pub(super) fn write_marker(key: &str, marker: &Marker, topics: &[String]) -> Option<Pipeline> {
    let (fields, erased) = (marker.to_fields(topics), marker.erased_fields(topics));
    let mut pipeline = Pipeline::new();
    pipeline.atomic();
    if !fields.is_empty() {
        pipeline.cmd("HSET").arg(key).arg(fields.as_slice()).ignore();
    }
    if !erased.is_empty() {
        pipeline.cmd("HDEL").arg(key).arg(erased).ignore();
    }
    (!pipeline.is_empty()).then_some(pipeline)
}

/// A forget of a key that a sweep has found.
pub(super) fn forget(scripts: &Scripts, key: &Key) -> Cmd {
    evalsha(&scripts.forget, &[key.as_str(), &key.entry()])
}

/// A marker as HGETALL answers it; fields that are not text count as absent.
pub(super) fn read_marker(fields: Vec<(Vec<u8>, Vec<u8>)>, topics: &[String]) -> Marker {
    let text = |(name, value): (Vec<u8>, Vec<u8>)| Some((String::from_utf8(name).ok()?, String::from_utf8(value).ok()?));
    Marker::from_fields(fields.into_iter().filter_map(text), topics)
}
