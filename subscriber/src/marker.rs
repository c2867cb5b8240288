//! PURE: what each cache primary remembers, and where consumption starts because of it.
//!
//! The marker is a small hash on every primary: per partition the watermark, per source the newest handled epoch. It is written after the
//! replies, so a snapshot, a replica or an append-only file that holds a marker holds the data that it claims.

use crate::progress::Point;
use recant_schema::version::parse_canonical;
use std::collections::{BTreeMap, BTreeSet};

/// A partition of one of the consumed topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition {
    /// Index into the list of consumed topics.
    pub topic: usize,
    /// Partition number.
    pub number: i32,
}

/// Most sources whose epochs one region remembers. A region with more databases than this would want several subscribers anyway.
pub const MAX_SOURCES: usize = 64;

/// Most handled epochs that are remembered one by one for a source; beyond that the oldest become the baseline. A source fails over a few times a year.
const MAX_HANDLED_EPOCHS: usize = 32;

/// Most sweeps that are remembered as owed. One sweep pays them all, so there are rarely two.
pub const MAX_OWED_SWEEPS: usize = 64;

/// Field names of epochs and of owed sweeps begin so; topic names cannot hold a slash.
const EPOCH_FIELD: &str = "epoch/";
const SWEEP_FIELD: &str = "sweep/";

/// What a region's cache remembers of its own maintenance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marker {
    /// Per partition, the record up to which everything is applied.
    pub points: BTreeMap<Partition, Point>,
    /// Partitions whose point is void, since their log is another one: to be erased.
    pub void: BTreeSet<Partition>,
    /// Per source, the epochs whose loss of commits was dealt with.
    pub epochs: BTreeMap<String, Epochs>,
    /// Gaps whose sweep is not done. Whoever reads this owes it.
    pub sweeps: BTreeSet<String>,
    /// Gaps whose sweep is done since the marker was last written: to be erased from it.
    pub swept: BTreeSet<String>,
}

impl Marker {
    /// Reads the fields of a marker hash; what cannot be read counts as absent, so that it is replayed.
    pub fn from_fields(fields: impl IntoIterator<Item = (String, String)>, topics: &[String]) -> Self {
        let mut marker = Self::default();
        for (name, value) in fields {
            if let Some(source) = name.strip_prefix(EPOCH_FIELD) {
                if let (Some(epochs), true) = (Epochs::parse(&value), marker.epochs.len() < MAX_SOURCES) {
                    marker.epochs.insert(source.to_owned(), epochs);
                }
            } else if let Some(gap) = name.strip_prefix(SWEEP_FIELD) {
                if marker.sweeps.len() < MAX_OWED_SWEEPS {
                    marker.sweeps.insert(gap.to_owned());
                }
            } else if let Some((partition, point)) = read_point(&name, &value, topics) {
                marker.points.insert(partition, point);
            }
        }
        marker
    }

    /// The marker as fields of a hash.
    pub fn to_fields(&self, topics: &[String]) -> Vec<(String, String)> {
        let point =
            |(partition, point): (&Partition, &Point)| (point_field(*partition, topics), format!("{}:{}", point.offset, point.time_ms));
        let points = self.points.iter().map(point);
        let epochs = self.epochs.iter().map(|(source, epochs)| (format!("{EPOCH_FIELD}{source}"), epochs.to_text()));
        let sweeps = self.sweeps.iter().map(|gap| (format!("{SWEEP_FIELD}{gap}"), "owed".to_owned()));
        points.chain(epochs).chain(sweeps).collect()
    }

    /// The fields to erase from the hash.
    pub fn erased_fields(&self, topics: &[String]) -> Vec<String> {
        let swept = self.swept.iter().map(|gap| format!("{SWEEP_FIELD}{gap}"));
        swept.chain(self.void.iter().map(|partition| point_field(*partition, topics))).collect()
    }

    /// What holds for the whole region: per partition the oldest point that any primary remembers, per source the epochs that any knows, every owed sweep.
    #[must_use]
    pub fn oldest(mut self, other: &Self) -> Self {
        for (partition, point) in &other.points {
            self.points.entry(*partition).and_modify(|oldest| *oldest = (*oldest).min(*point)).or_insert(*point);
        }
        for (source, epochs) in &other.epochs {
            self.epochs.entry(source.clone()).and_modify(|known| known.merge(epochs)).or_insert_with(|| epochs.clone());
        }
        self.sweeps.extend(other.sweeps.iter().cloned());
        self
    }
}

/// The epochs of one source that a region has dealt with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Epochs {
    /// The region first heard of the source in this epoch: what earlier ones lost was never cached here.
    pub baseline: u64,
    /// Later epochs that lost commits, each dealt with once. Records of several epochs arrive in any order, so the newest alone would not do.
    pub handled: BTreeSet<u64>,
}

impl Epochs {
    /// Whether what this epoch lost is dealt with.
    pub fn knows(&self, epoch: u64) -> bool {
        epoch <= self.baseline || self.handled.contains(&epoch)
    }

    /// Notes an epoch that lost commits; whether it is news.
    pub fn handle(&mut self, lossy: Option<u64>) -> bool {
        let Some(epoch) = lossy.filter(|epoch| !self.knows(*epoch)) else { return false };
        self.handled.insert(epoch);
        self.prune();
        true
    }

    /// Adds what another marker knows.
    pub fn merge(&mut self, other: &Self) {
        self.baseline = self.baseline.max(other.baseline);
        self.handled.extend(&other.handled);
        self.prune();
    }

    fn prune(&mut self) {
        self.handled.retain(|epoch| *epoch > self.baseline);
        while self.handled.len() > MAX_HANDLED_EPOCHS {
            self.baseline = self.handled.pop_first().unwrap_or(self.baseline);
        }
    }

    fn to_text(&self) -> String {
        let handled: Vec<_> = self.handled.iter().map(u64::to_string).collect();
        format!("{}:{}", self.baseline, handled.join(","))
    }

    fn parse(text: &str) -> Option<Self> {
        let (baseline, handled) = text.split_once(':')?;
        let handled = handled.split(',').filter(|epoch| !epoch.is_empty()).map(parse_canonical).collect::<Option<_>>()?;
        Some(Self { baseline: parse_canonical(baseline)?, handled })
    }
}

fn point_field(partition: Partition, topics: &[String]) -> String {
    format!("{}/{}", topics[partition.topic], partition.number)
}

fn read_point(name: &str, value: &str, topics: &[String]) -> Option<(Partition, Point)> {
    let (topic, number) = name.rsplit_once('/')?;
    let (offset, time_ms) = value.split_once(':')?;
    let topic = topics.iter().position(|known| known == topic)?;
    let point = Point { offset: offset.parse().ok()?, time_ms: time_ms.parse().ok()? };
    // The next offset has to exist as well.
    let sane = (0..i64::MAX).contains(&point.offset) && point.time_ms >= 0;
    sane.then_some((Partition { topic, number: number.parse().ok()? }, point))
}

/// What the broker says about a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// Oldest offset still there.
    pub low: i64,
    /// The offset that the next record will get.
    pub high: i64,
    /// The first record at or after the marker's time less the margin; `None` when there is none.
    pub since: Option<i64>,
}

/// Why invalidations may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapCause {
    /// The log starts after the marker's record: retention deleted records that were never applied.
    Retention,
    /// The log is shorter than the marker, or holds another record at its offset: the topic was recreated.
    Recreated,
    /// A promotion or a restore lost commits that readers may have cached.
    NewEpoch,
}

/// Where a replay starts, and what is wrong with that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// First offset to read.
    pub from: i64,
    /// Set when records are missing.
    pub gap: Option<GapCause>,
}

/// Decides where to start a partition.
///
/// | marker | log | start |
/// | --- | --- | --- |
/// | none | any | the oldest record |
/// | at 50 | 0..100 | the record at the marker's time less the margin, 50 at the latest |
/// | at 50 | 51..100 | 51: what expired was applied |
/// | at 50 | 60..100 | 60, a gap: 51 to 59 were never applied |
/// | at 50 | 0..40 | the oldest record, a gap: the topic is another one |
pub fn start(marker: Option<Point>, log: Log) -> Start {
    let Some(marker) = marker else { return Start { from: log.low, gap: None } };
    if marker.offset >= log.high {
        return Start { from: log.low, gap: Some(GapCause::Recreated) };
    }
    let gap = (log.low > marker.offset + 1).then_some(GapCause::Retention);
    let since = log.since.unwrap_or(marker.offset).min(marker.offset);
    Start { from: since.max(log.low), gap }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: Option<Point> = Some(Point { offset: 50, time_ms: 5000 });

    fn log(low: i64, high: i64, since: Option<i64>) -> Log {
        Log { low, high, since }
    }

    #[test]
    fn consumption_starts_where_the_marker_says() {
        for (marker, log, from, gap) in [
            (None, log(0, 100, None), 0, None),
            (None, log(20, 100, None), 20, None),
            (MARK, log(0, 100, Some(40)), 40, None),
            (MARK, log(0, 51, None), 50, None),
            (MARK, log(45, 100, Some(40)), 45, None),
            (MARK, log(51, 100, Some(51)), 51, None),
            (MARK, log(52, 100, Some(52)), 52, Some(GapCause::Retention)),
            (MARK, log(0, 100, Some(70)), 50, None),
            (MARK, log(0, 40, None), 0, Some(GapCause::Recreated)),
            (MARK, log(0, 50, None), 0, Some(GapCause::Recreated)),
        ] {
            assert_eq!(start(marker, log), Start { from, gap }, "{marker:?} {log:?}");
        }
    }

    #[test]
    fn a_marker_reads_back_and_garbage_counts_as_absent() {
        let topics = vec!["t.v1".to_owned(), "t.v1.bulk".to_owned()];
        let mut marker = Marker::default();
        marker.points.insert(Partition { topic: 1, number: 3 }, Point { offset: 7, time_ms: 9 });
        marker.epochs.insert("shop".into(), Epochs { baseline: 1_700_000_000, handled: BTreeSet::from([1_700_000_001, 1_700_000_007]) });
        marker.sweeps.insert("epoch/shop/1700000000".into());
        let mut fields = marker.to_fields(&topics);
        for (name, value) in [
            ("t.v1/x", "1:2"),
            ("t.v1/0", "-1:2"),
            ("t.v1/1", "1"),
            ("t.v1/2", "9223372036854775807:1"),
            ("gone/1", "1:2"),
            ("epoch/x", "01:"),
            ("epoch/y", "1:x"),
            ("", ""),
        ] {
            fields.push((name.into(), value.into()));
        }
        assert_eq!(Marker::from_fields(fields, &topics), marker);
    }

    #[test]
    fn the_region_is_as_far_as_its_oldest_primary() {
        let at = |offset| Marker {
            points: BTreeMap::from([(Partition { topic: 0, number: 0 }, Point { offset, time_ms: offset })]),
            ..Marker::default()
        };
        assert_eq!(at(5).oldest(&at(3)), at(3));
        assert_eq!(at(3).oldest(&Marker::default()), at(3));
    }
}
