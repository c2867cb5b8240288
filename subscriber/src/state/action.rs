//! PURE: what can happen to the loop, and what it can be told to do.

use crate::marker::{GapCause, Log, Marker, Partition};
use crate::progress::Point;
use crate::work::{DeadLetter, Work, WorkId};
use recant_schema::invalidation::Heartbeat;
#[cfg(doc)]
use recant_schema::record::MAX_RECORD_BYTES;
use std::ops::Range;

/// One record as delivered.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// Its partition.
    pub partition: Partition,
    /// Its offset and broker timestamp.
    pub point: Point,
    /// Its Kafka key, or more than [`MAX_RECORD_BYTES`] of its beginning.
    pub key: Option<Vec<u8>>,
    /// Its value, or more than [`MAX_RECORD_BYTES`] of its beginning.
    pub value: Option<Vec<u8>>,
    /// How many bytes the whole key has.
    pub key_bytes: usize,
    /// How many bytes the whole value has.
    pub value_bytes: usize,
    /// When it was delivered: microseconds since 1970, our clock.
    pub delivered_us: i64,
}

/// What happened.
#[derive(Debug)]
pub enum Action {
    /// The group gave us partitions.
    Assigned(Vec<Partition>),
    /// The group takes all our partitions back and waits for [`Effect::Release`].
    Revoked,
    /// A primary was connected anew and remembers this.
    CacheConnected {
        /// Rises with every connection.
        generation: u64,
        /// What that primary remembers.
        marker: Marker,
    },
    /// The region's marker, as [`Effect::Recall`] asked.
    Recalled {
        /// As above.
        generation: u64,
        /// The oldest of all primaries.
        marker: Marker,
    },
    /// The broker described partitions, as [`Effect::Locate`] asked.
    Located {
        /// Which question this answers.
        request: u32,
        /// The answer.
        logs: Vec<(Partition, Log)>,
    },
    /// Records of the live consumer.
    Delivered(Vec<Delivery>),
    /// Records of the replay consumer.
    Replayed {
        /// Which [`Effect::Replay`] they belong to.
        session: u32,
        /// The records.
        records: Vec<Delivery>,
    },
    /// The replay consumer reached the end of a partition.
    ReplayReachedEnd {
        /// As above.
        session: u32,
        /// Which partition.
        partition: Partition,
    },
    /// The live consumer's position in some partition is not in the log any more.
    LiveOutOfRange,
    /// The replay's position in some partition is not in the log any more.
    ReplayOutOfRange {
        /// As above.
        session: u32,
    },
    /// The cache answered.
    Answered(Vec<WorkId>),
    /// The dead-letter topic has it.
    SetAside(WorkId),
    /// A sweep is done.
    Swept(u32),
    /// [`TICK_MS`](super::TICK_MS) have passed.
    Tick,
    /// The commit interval has passed.
    CommitDue,
    /// The marker interval has passed.
    MarkerDue,
    /// Somebody asked the process to stop.
    Stop,
}

/// What to do about it.
#[derive(Debug)]
pub enum Effect {
    /// Read the region's marker from every primary, once all are connected.
    Recall,
    /// Ask the broker for the partitions' bounds, and for the offset at each marker's time less the margin.
    Locate {
        /// Names the question.
        request: u32,
        /// Partitions with their markers.
        partitions: Vec<(Partition, Option<Point>)>,
    },
    /// Start live consumption of exactly these partitions at these offsets.
    AssignLive(Vec<(Partition, i64)>),
    /// Replay exactly these partitions from these offsets, instead of whatever is being replayed. Empty: stop.
    Replay {
        /// Names the replay.
        session: u32,
        /// Partitions with the first offset, and the one to stop before.
        ranges: Vec<(Partition, Range<i64>)>,
    },
    /// Change keys in the cache.
    Apply(Vec<Work>),
    /// Publish to the dead-letter topic.
    DeadLetter(Box<DeadLetter>),
    /// Commit these next offsets, without waiting.
    Commit(Vec<(Partition, i64)>),
    /// Write this marker to every primary, unless one was connected after `generation`.
    Remember {
        /// The newest connection that this state knows of.
        generation: u64,
        /// What to write.
        marker: Marker,
    },
    /// Write the marker, commit these next offsets, wait for both, and give all partitions up.
    Release {
        /// As in [`Effect::Remember`].
        generation: u64,
        /// As in [`Effect::Remember`].
        marker: Marker,
        /// What to commit.
        next: Vec<(Partition, i64)>,
    },
    /// Stop fetching, so that polling returns nothing.
    Pause,
    /// Fetch again.
    Resume,
    /// Invalidations may be missing: count, log, alert; stop, if that is the policy.
    Gap {
        /// Why.
        cause: GapCause,
        /// Where, for a person.
        detail: String,
    },
    /// Forget every key below the prefixes, on every primary. Instead of a sweep under way, if there is one.
    Sweep(u32),
    /// A heartbeat came through.
    Beat {
        /// The heartbeat.
        heartbeat: Heartbeat,
        /// When it was stored: milliseconds since 1970, the broker's clock.
        stored_ms: i64,
        /// When it was delivered: microseconds since 1970, our clock.
        delivered_us: i64,
        /// Where.
        partition: Partition,
    },
    /// Everything is given up; the loop ends.
    Close,
}
