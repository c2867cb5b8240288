//! PURE: the facts that travel: invalidations, and the heartbeats that show the path alive.

use crate::key::Key;
use crate::labels::{Class, CommitBasis, EpochCause, Lane};
use crate::topics::Region;
use crate::version::Version;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Longest tenant label, in bytes; the check in `recant.invalidate`. A tenant is part of a key, and a key has 250.
pub const MAX_TENANT_BYTES: usize = 128;

/// Where a record comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The source's name; versions compare only within one. By default the database's name.
    pub database: String,
    /// Which relay published it, for people.
    pub relay: String,
    /// How the epoch came about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch_cause: Option<EpochCause>,
}

/// "What the cache holds for this key is older than this version." Carries no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalidation {
    /// A UUID of version 7, made by the relay; a repeat after a crash has another.
    pub id: Uuid,
    /// The cache key.
    pub key: Key,
    /// When the committed row was claimed, on the source's log.
    pub version: Version,
    /// Isolation label.
    pub tenant: Option<String>,
    /// Freshness class.
    pub class: Option<Class>,
    /// Residency: the regions it is pinned to; `None` means all.
    pub regions: Option<Vec<Region>>,
    /// Lane.
    pub lane: Lane,
    /// When the row was committed: microseconds since 1970, on the source's clock.
    pub committed_at_us: i64,
    /// What that time was read from.
    pub commit_basis: CommitBasis,
    /// Where it comes from.
    pub source: Source,
    /// W3C trace context of the writer.
    pub traceparent: Option<String>,
}

/// Shows that the path from the source to a partition is alive. Subscribers time it and apply nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// A UUID of version 7.
    pub id: Uuid,
    /// The epoch, and the position up to which the source's log was flushed: history up to here survives a crash.
    pub version: Version,
    /// When the source said so: microseconds since 1970, on the source's clock.
    pub committed_at_us: i64,
    /// Where it comes from.
    pub source: Source,
}
