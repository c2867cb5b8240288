//! PURE: one owned partition: its live reading, its replay, and the point that both together allow to be remembered.

use crate::marker::{GapCause, Log, Partition, start};
use crate::progress::{Point, Track};
use std::ops::Range;

/// One owned partition.
///
/// Live reading starts at the end of the log; what lies between the marker and that end is replayed. Until the replay is done the settled
/// point follows it, so that a crash resumes it.
#[derive(Debug, Default)]
pub(super) struct Owned {
    stage: Stage,
    live: Option<Live>,
    replay: Option<Replay>,
    /// What the cache remembered when the wanted or running replay was decided on.
    base: Option<Point>,
    settled: Option<Point>,
    committed: Option<i64>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Newly owned: nobody has asked the cache yet.
    #[default]
    AwaitsMarker,
    /// The broker was asked for the log's bounds, by this request.
    Locating(u32),
    /// Live, and perhaps replaying.
    Running,
}

#[derive(Debug)]
struct Live {
    from: i64,
    id: u32,
    track: Track,
}

#[derive(Debug)]
struct Replay {
    from: i64,
    /// The live reading had everything from here on.
    until: i64,
    oldest: i64,
    reached_end: bool,
    id: u32,
    track: Track,
}

/// What a located partition needs.
pub(super) struct Located {
    pub(super) goes_live: bool,
    pub(super) gap: Option<GapCause>,
}

impl Owned {
    pub(super) fn awaits_marker(&self) -> bool {
        self.stage == Stage::AwaitsMarker
    }

    /// Some primary remembers only this much: nothing above it may be remembered until it is replayed. Returns the question for the broker.
    pub(super) fn demand(&mut self, partition: Partition, marker: Option<Point>) -> (Partition, Option<Point>) {
        self.replay = None;
        let base = match &self.stage {
            Stage::AwaitsMarker => marker,
            // A replay that was under way or asked for had only got so far.
            Stage::Locating(_) => older(self.base, marker),
            Stage::Running => older(self.settled, marker),
        };
        self.base = base;
        self.settled = base;
        (partition, base)
    }

    /// The log is not what it was: locate and read everything anew from the settled point.
    pub(super) fn start_over(&mut self, partition: Partition) -> (Partition, Option<Point>) {
        self.live = None;
        self.demand(partition, self.settled)
    }

    pub(super) fn locating(&mut self, request: u32) {
        self.stage = Stage::Locating(request);
    }

    /// Takes the broker's answer, if it is to the newest question. `id` and `id + 1` name the new tracks.
    pub(super) fn located(&mut self, request: u32, log: Log, id: u32) -> Option<Located> {
        if self.stage != Stage::Locating(request) {
            return None;
        }
        self.stage = Stage::Running;
        let start = start(self.base, log);
        match start.gap {
            None => {}
            // Reported once: what was lost is lost, and the next start must not find the same gap again.
            Some(GapCause::Retention) => self.base = self.base.map(|base| Point { offset: log.low - 1, ..base }),
            Some(GapCause::Recreated | GapCause::NewEpoch) => self.base = None,
        }
        self.settled = self.base;
        let goes_live = self.live.is_none();
        let live = self.live.get_or_insert_with(|| Live { from: log.high, id, track: Track::default() });
        let until = live.track.delivered().map_or(live.from, |newest| newest + 1);
        if start.from < until {
            self.replay =
                Some(Replay { from: start.from, until, oldest: log.low, reached_end: false, id: id + 1, track: Track::default() });
        }
        self.settle();
        Some(Located { goes_live, gap: start.gap })
    }

    pub(super) fn live_from(&self) -> Option<i64> {
        self.live.as_ref().map(|live| live.track.delivered().map_or(live.from, |newest| newest + 1))
    }

    /// Tracks a live delivery; the track's id, unless the record is not new.
    pub(super) fn deliver(&mut self, point: Point) -> Option<u32> {
        let live = self.live.as_mut()?;
        (point.offset >= live.from && live.track.deliver(point)).then_some(live.id)
    }

    /// Whether a replayed record shows that the marker was about another log: its offset is the marker's, its time is not.
    pub(super) fn contradicts(&self, point: Point) -> bool {
        self.replay.is_some() && self.base.is_some_and(|base| base.offset == point.offset && base.time_ms != point.time_ms)
    }

    pub(super) fn replay_from_oldest(&mut self, id: u32) {
        self.base = None;
        self.settled = None;
        if let Some(replay) = &mut self.replay {
            *replay =
                Replay { from: replay.oldest, until: replay.until, oldest: replay.oldest, reached_end: false, id, track: Track::default() };
        }
    }

    pub(super) fn deliver_replayed(&mut self, point: Point) -> Option<u32> {
        let replay = self.replay.as_mut()?;
        if point.offset >= replay.until {
            replay.reached_end = true;
            return None;
        }
        replay.track.deliver(point).then_some(replay.id)
    }

    pub(super) fn replay_reached_end(&mut self) {
        if let Some(replay) = &mut self.replay {
            replay.reached_end = true;
        }
    }

    pub(super) fn answer(&mut self, track: u32, offset: i64) {
        if let Some(live) = self.live.as_mut().filter(|live| live.id == track) {
            live.track.answer(offset);
        } else if let Some(replay) = self.replay.as_mut().filter(|replay| replay.id == track) {
            replay.track.answer(offset);
        }
        self.settle();
    }

    fn settle(&mut self) {
        if self.stage != Stage::Running {
            return;
        }
        let reached = match (&self.replay, &self.live) {
            (Some(replay), _) => replay.track.watermark(),
            (None, Some(live)) => live.track.watermark(),
            (None, None) => None,
        };
        // A replay begins below its base; the settled point waits at the base until the replay has passed it.
        self.settled = self.settled.max(reached);
    }

    /// Ends a replay that has caught up with the live reading. `Some` when it ended now.
    pub(super) fn finish_replay(&mut self) -> Option<()> {
        let replay = self.replay.as_ref()?;
        let last = replay.track.delivered().map_or(replay.from - 1, |newest| newest);
        let complete = replay.track.is_settled() && (replay.reached_end || last + 1 >= replay.until);
        complete.then(|| {
            self.replay = None;
            self.settle();
        })
    }

    /// What is left to replay; `None` without a replay, or when it has been delivered whole.
    pub(super) fn replay_range(&self) -> Option<Range<i64>> {
        let replay = self.replay.as_ref()?;
        let next = replay.track.delivered().map_or(replay.from, |newest| newest + 1);
        (!replay.reached_end && next < replay.until).then_some(next..replay.until)
    }

    pub(super) fn is_behind(&self) -> bool {
        self.replay.is_some() || self.stage != Stage::Running
    }

    /// Whether the cache remembers a point of this partition that is void.
    pub(super) fn is_void(&self) -> bool {
        self.stage == Stage::Running && self.settled.is_none()
    }

    /// Whether a replay is under way.
    pub(super) fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// Records delivered and not below the watermark.
    pub(super) fn outstanding(&self) -> usize {
        let live = self.live.as_ref().map_or(0, |live| live.track.outstanding());
        live + self.replay.as_ref().map_or(0, |replay| replay.track.outstanding())
    }

    pub(super) fn settled(&self) -> Option<Point> {
        self.settled
    }

    /// Whether nothing of the live reading is in flight.
    pub(super) fn is_settled(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.track.is_settled())
    }

    /// The next offset to commit, if it has moved.
    pub(super) fn commit(&mut self) -> Option<i64> {
        let next = self.settled?.offset + 1;
        (self.committed != Some(next)).then(|| {
            self.committed = Some(next);
            next
        })
    }
}

/// The older of two points, where `None` is older than everything.
fn older(one: Option<Point>, other: Option<Point>) -> Option<Point> {
    Some(one?.min(other?))
}
