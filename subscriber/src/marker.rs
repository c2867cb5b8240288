//! PURE: what each cache primary remembers, and where consumption starts because of it.
//!
//! The marker is a small hash on every primary: per partition the watermark, per source the newest handled epoch. It is written after the
//! replies, so a snapshot, a replica or an append-only file that holds a marker holds the data that it claims.

use crate::progress::Point;
use recant_schema::version::parse_canonical;
use std::collections::BTreeMap;

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

/// Field names of epochs begin so; topic names cannot hold a slash.
const EPOCH_FIELD: &str = "epoch/";

/// What a region's cache remembers of its own maintenance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marker {
    /// Per partition, the record up to which everything is applied.
    pub points: BTreeMap<Partition, Point>,
    /// Per source, the newest epoch whose loss of history was dealt with.
    pub epochs: BTreeMap<String, u64>,
}

impl Marker {
    /// Reads the fields of a marker hash; what cannot be read counts as absent, so that it is replayed.
    pub fn from_fields(fields: impl IntoIterator<Item = (String, String)>, topics: &[String]) -> Self {
        let mut marker = Self::default();
        for (name, value) in fields {
            if let Some(source) = name.strip_prefix(EPOCH_FIELD) {
                if let (Some(epoch), true) = (parse_canonical(&value), marker.epochs.len() < MAX_SOURCES) {
                    marker.epochs.insert(source.to_owned(), epoch);
                }
            } else if let Some((partition, point)) = read_point(&name, &value, topics) {
                marker.points.insert(partition, point);
            }
        }
        marker
    }

    /// The marker as fields of a hash.
    pub fn to_fields(&self, topics: &[String]) -> Vec<(String, String)> {
        let points = self.points.iter().map(|(partition, point)| {
            (format!("{}/{}", topics[partition.topic], partition.number), format!("{}:{}", point.offset, point.time_ms))
        });
        let epochs = self.epochs.iter().map(|(source, epoch)| (format!("{EPOCH_FIELD}{source}"), epoch.to_string()));
        points.chain(epochs).collect()
    }

    /// What holds for the whole region: per partition the oldest point that any primary remembers, per source the newest epoch.
    #[must_use]
    pub fn oldest(mut self, other: &Self) -> Self {
        for (partition, point) in &other.points {
            self.points.entry(*partition).and_modify(|oldest| *oldest = (*oldest).min(*point)).or_insert(*point);
        }
        for (source, epoch) in &other.epochs {
            self.epochs.entry(source.clone()).and_modify(|newest| *newest = (*newest).max(*epoch)).or_insert(*epoch);
        }
        self
    }
}

fn read_point(name: &str, value: &str, topics: &[String]) -> Option<(Partition, Point)> {
    let (topic, number) = name.rsplit_once('/')?;
    let (offset, time_ms) = value.split_once(':')?;
    let topic = topics.iter().position(|known| known == topic)?;
    let point = Point { offset: offset.parse().ok()?, time_ms: time_ms.parse().ok()? };
    let sane = point.offset >= 0 && point.time_ms >= 0;
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
        marker.epochs.insert("shop".into(), 1_700_000_000);
        let mut fields = marker.to_fields(&topics);
        for (name, value) in [("t.v1/x", "1:2"), ("t.v1/0", "-1:2"), ("t.v1/1", "1"), ("gone/1", "1:2"), ("epoch/x", "01"), ("", "")] {
            fields.push((name.into(), value.into()));
        }
        assert_eq!(Marker::from_fields(fields, &topics), marker);
    }

    #[test]
    fn the_region_is_as_far_as_its_oldest_primary() {
        let at = |offset| Marker {
            points: BTreeMap::from([(Partition { topic: 0, number: 0 }, Point { offset, time_ms: offset })]),
            epochs: BTreeMap::new(),
        };
        assert_eq!(at(5).oldest(&at(3)), at(3));
        assert_eq!(at(3).oldest(&Marker::default()), at(3));
    }
}
