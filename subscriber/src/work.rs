//! PURE: what the loop asks the cache to do, and what comes back.

use crate::judge::Reason;
use crate::marker::Partition;
use recant_schema::key::Key;
use recant_schema::labels::{Class, CommitBasis};
use recant_schema::version::Version;
use std::sync::Arc;

/// Names one record in flight. `track` tells the live reading of a partition from a replay of it, and this ownership of it from an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId {
    /// Which partition.
    pub partition: Partition,
    /// Which record.
    pub offset: i64,
    /// Which reading of the partition.
    pub track: u32,
}

/// One key to change in the cache.
#[derive(Clone, Debug)]
pub struct Work {
    /// Which record asks for it.
    pub id: WorkId,
    /// The key.
    pub key: Key,
    /// What to do with it.
    pub order: Order,
    /// Its times, for the histograms.
    pub times: Times,
}

/// What to do with a key.
#[derive(Clone, Debug)]
pub enum Order {
    /// Raise the floor, erase the mark, unlink the value.
    Invalidate {
        /// The source of the version.
        source: Arc<str>,
        /// The version.
        version: Version,
    },
    /// Unlink the value and erase the mark; the floor stays. For what cannot be read.
    Forget,
}

/// When a record passed each stage. Microseconds since 1970; the first on the source's clock, the second on the broker's, the third on ours.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The commit; `None` for a poison record, which does not say.
    pub committed_us: Option<i64>,
    /// What the commit time was read from.
    pub basis: CommitBasis,
    /// Stored by the broker (resolution 1 ms).
    pub stored_us: i64,
    /// Delivered to this process.
    pub delivered_us: i64,
    /// Freshness class.
    pub class: Option<Class>,
    /// Whether it was read by a replay.
    pub replayed: bool,
}

/// How the cache answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Floor raised; a value was there and is gone.
    Deleted,
    /// Floor raised; no value was there.
    NothingCached,
    /// The floor was there already.
    Repeated,
    /// Neither value nor entry was there, and `tombstones = "when-cached"`.
    NothingThere,
    /// Value and entry unlinked without a floor, since the cache had no memory for one or its entry was not ours.
    Unlinked,
    /// Forgotten on behalf of a poison record.
    Forgotten,
}

impl Outcome {
    /// The spelling in metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::NothingCached => "nothing_cached",
            Self::Repeated => "repeated",
            Self::NothingThere => "nothing_there",
            Self::Unlinked => "unlinked",
            Self::Forgotten => "forgotten",
        }
    }
}

/// One record to set aside in the region's dead-letter topic.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// Which record.
    pub id: WorkId,
    /// Label of the reason.
    pub reason: Reason,
    /// The reason in words.
    pub detail: String,
    /// The beginning of the record's key.
    pub key: Option<Vec<u8>>,
    /// The beginning of the record's value.
    pub value: Option<Vec<u8>>,
    /// How many bytes the whole key had.
    pub key_bytes: usize,
    /// How many bytes the whole value had.
    pub value_bytes: usize,
}
