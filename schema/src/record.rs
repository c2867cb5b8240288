//! PURE: records as bytes. JSON, format 1; the JSON Schema is `schema/json/record.v1.schema.json`, golden bytes lie in `schema/golden/`.

use crate::invalidation::{Heartbeat, Invalidation, MAX_TENANT_BYTES, Source};
use crate::key::{Key, KeyError};
use crate::labels::{Class, CommitBasis, Lane};
use crate::topics::{Region, RegionError};
use crate::version::{Version, parse_canonical};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The format number that this code writes and reads.
pub const FORMAT: u64 = 1;

/// Kafka header with the format number in decimal.
pub const FORMAT_HEADER: &str = "recant-format";

/// Largest value that is decoded, in bytes. A record of ours stays below 8 KiB (key, tenant and some hundred regions); more is not ours.
pub const MAX_RECORD_BYTES: usize = 64 * 1024;

/// What a Kafka record of ours holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// Something to apply.
    Invalidation(Invalidation),
    /// Something to time.
    Heartbeat(Heartbeat),
}

/// Why bytes are not a record. No retry can help: the record is poison.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// No value at all (a compaction tombstone, or somebody else's record).
    #[error("the record has no value")]
    Empty,
    /// More than [`MAX_RECORD_BYTES`].
    #[error("the record has {0} bytes, more than {MAX_RECORD_BYTES}")]
    TooLarge(usize),
    /// Not JSON of the expected shape.
    #[error("the record is not JSON of format {FORMAT}: {0}")]
    Malformed(#[source] serde_json::Error),
    /// A format number that this code does not know: upgrade the subscribers first.
    #[error("the record has format {0}, this subscriber reads {FORMAT}; upgrade the subscriber")]
    UnknownFormat(u64),
    /// A field is missing or has a value outside its range.
    #[error("the record's field {field} is {problem}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The key breaks a rule.
    #[error("the record's key is not valid: {0}")]
    Key(#[from] KeyError),
    /// A region's name breaks the rule.
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl Record {
    /// The record's value as Kafka holds it.
    pub fn encode(&self) -> Vec<u8> {
        let wire = match self {
            Self::Invalidation(invalidation) => WireOut::invalidation(invalidation),
            Self::Heartbeat(heartbeat) => WireOut::heartbeat(heartbeat),
        };
        serde_json::to_vec(&wire).expect("strings, numbers and maps with string keys always encode")
    }

    /// Reads a record's value. Unknown fields are ignored.
    ///
    /// # Errors
    /// [`RecordError`], each of them final.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        match bytes.len() {
            0 => return Err(RecordError::Empty),
            length if length > MAX_RECORD_BYTES => return Err(RecordError::TooLarge(length)),
            _ => {}
        }
        let wire: WireIn = serde_json::from_slice(bytes).map_err(|error| unknown_or_malformed(bytes, error))?;
        match (wire.format, wire.kind.as_ref()) {
            (FORMAT, "invalidation") => wire.into_invalidation().map(Self::Invalidation),
            (FORMAT, "heartbeat") => Ok(Self::Heartbeat(Heartbeat {
                id: wire.id,
                version: wire.version()?,
                committed_at_us: wire.committed_at,
                source: wire.source,
            })),
            (FORMAT, _) => Err(RecordError::Field { field: "kind", problem: "neither invalidation nor heartbeat" }),
            (format, _) => Err(RecordError::UnknownFormat(format)),
        }
    }
}

/// A later format may have another shape altogether, so its number is looked for on its own before the bytes are called malformed.
fn unknown_or_malformed(bytes: &[u8], error: serde_json::Error) -> RecordError {
    #[derive(Deserialize)]
    struct FormatOnly {
        format: u64,
    }
    match serde_json::from_slice::<FormatOnly>(bytes) {
        Ok(FormatOnly { format }) if format != FORMAT => RecordError::UnknownFormat(format),
        _ => RecordError::Malformed(error),
    }
}

/// Field order is the golden order.
#[derive(Serialize)]
struct WireOut<'a> {
    format: u64,
    kind: &'static str,
    id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    // Strings, since JSON readers elsewhere hold numbers as doubles and lose bits beyond 2^53.
    epoch: String,
    position: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<Class>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regions: Option<Vec<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<Lane>,
    committed_at: i64,
    commit_basis: CommitBasis,
    source: &'a Source,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<&'a str>,
}

impl<'a> WireOut<'a> {
    fn invalidation(invalidation: &'a Invalidation) -> Self {
        Self {
            format: FORMAT,
            kind: "invalidation",
            id: invalidation.id,
            key: Some(invalidation.key.as_str()),
            epoch: invalidation.version.epoch.to_string(),
            position: invalidation.version.position.to_string(),
            tenant: invalidation.tenant.as_deref(),
            class: invalidation.class,
            regions: invalidation.regions.as_ref().map(|regions| regions.iter().map(Region::as_str).collect()),
            lane: Some(invalidation.lane),
            committed_at: invalidation.committed_at_us,
            commit_basis: invalidation.commit_basis,
            source: &invalidation.source,
            traceparent: invalidation.traceparent.as_deref(),
        }
    }

    fn heartbeat(heartbeat: &'a Heartbeat) -> Self {
        Self {
            format: FORMAT,
            kind: "heartbeat",
            id: heartbeat.id,
            key: None,
            epoch: heartbeat.version.epoch.to_string(),
            position: heartbeat.version.position.to_string(),
            tenant: None,
            class: None,
            regions: None,
            lane: None,
            committed_at: heartbeat.committed_at_us,
            commit_basis: CommitBasis::Commit,
            source: &heartbeat.source,
            traceparent: None,
        }
    }
}

#[derive(Deserialize)]
struct WireIn {
    format: u64,
    kind: String,
    id: Uuid,
    key: Option<String>,
    epoch: String,
    position: String,
    tenant: Option<String>,
    class: Option<Class>,
    regions: Option<Vec<String>>,
    lane: Option<Lane>,
    committed_at: i64,
    commit_basis: CommitBasis,
    source: Source,
    traceparent: Option<String>,
}

impl WireIn {
    fn version(&self) -> Result<Version, RecordError> {
        let number = |field, text| parse_canonical(text).ok_or(RecordError::Field { field, problem: "not a canonical decimal number" });
        Ok(Version::new(number("epoch", &self.epoch)?, number("position", &self.position)?))
    }

    fn into_invalidation(self) -> Result<Invalidation, RecordError> {
        let version = self.version()?;
        let key = self.key.ok_or(RecordError::Field { field: "key", problem: "missing" })?;
        if self.tenant.as_ref().is_some_and(|tenant| tenant.len() > MAX_TENANT_BYTES) {
            return Err(RecordError::Field { field: "tenant", problem: "too long" });
        }
        let regions = self.regions.map(|names| names.iter().map(|name| Region::parse(name)).collect::<Result<Vec<_>, _>>()).transpose()?;
        Ok(Invalidation {
            id: self.id,
            key: Key::parse(&key)?,
            version,
            tenant: self.tenant,
            class: self.class,
            regions,
            lane: self.lane.unwrap_or(Lane::Realtime),
            committed_at_us: self.committed_at,
            commit_basis: self.commit_basis,
            source: self.source,
            traceparent: self.traceparent,
        })
    }
}
