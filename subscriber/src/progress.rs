//! PURE: how far one partition is applied.
//!
//! Records are delivered in offset order and answered by the cache in any order. The *watermark* is the newest record such that it and every
//! record delivered before it is answered. Only a watermark may be committed or remembered: whatever crashes, what lies above it is read again.
//!
//! | delivered | answered | watermark |
//! | --- | --- | --- |
//! | 7 8 9 | 8 9 | none |
//! | 7 8 9 | 7 8 | 8 |
//! | 7 8 9 | 7 8 9 | 9 |

use std::collections::VecDeque;

/// One record of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// Its offset.
    pub offset: i64,
    /// Its timestamp: milliseconds since 1970 on the broker's clock (topics use LogAppendTime).
    pub time_ms: i64,
}

#[derive(Debug)]
struct Outstanding {
    point: Point,
    answered: bool,
}

/// The records of one partition between delivery and watermark. Invariant: the front is never an answered record.
#[derive(Debug, Default)]
pub struct Track {
    outstanding: VecDeque<Outstanding>,
    delivered: Option<i64>,
    watermark: Option<Point>,
}

impl Track {
    /// Notes a delivery. `false`, and nothing noted, unless its offset is above every one delivered before.
    #[must_use]
    pub fn deliver(&mut self, point: Point) -> bool {
        if self.delivered.is_some_and(|newest| point.offset <= newest) {
            return false;
        }
        self.delivered = Some(point.offset);
        self.outstanding.push_back(Outstanding { point, answered: false });
        true
    }

    /// Notes an answer; an unknown or repeated one changes nothing.
    pub fn answer(&mut self, offset: i64) {
        let Ok(at) = self.outstanding.binary_search_by_key(&offset, |record| record.point.offset) else { return };
        self.outstanding[at].answered = true;
        while self.outstanding.front().is_some_and(|record| record.answered) {
            self.watermark = self.outstanding.pop_front().map(|record| record.point);
        }
    }

    /// The newest record up to which every answer is in; `None` before the first.
    pub fn watermark(&self) -> Option<Point> {
        self.watermark
    }

    /// The newest delivered offset.
    pub fn delivered(&self) -> Option<i64> {
        self.delivered
    }

    /// Records between delivery and watermark, answered ones behind an unanswered one included.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Whether every delivered record is answered.
    pub fn is_settled(&self) -> bool {
        self.outstanding.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn point(offset: i64) -> Point {
        Point { offset, time_ms: offset * 10 }
    }

    #[test]
    fn the_watermark_waits_for_the_oldest_unanswered_record() {
        let mut track = Track::default();
        assert!(track.deliver(point(7)) && track.deliver(point(8)) && track.deliver(point(12)));
        track.answer(12);
        track.answer(8);
        assert_eq!(track.watermark(), None);
        track.answer(7);
        assert_eq!(track.watermark(), Some(point(12)));
        assert!(track.is_settled());
    }

    #[test]
    fn a_repeated_delivery_is_not_tracked_twice() {
        let mut track = Track::default();
        assert!(track.deliver(point(7)));
        assert!(!track.deliver(point(7)) && !track.deliver(point(3)));
        track.answer(3);
        assert_eq!(track.watermark(), None);
    }

    proptest! {
        #[test]
        fn offsets_never_pass_an_unapplied_record(steps in proptest::collection::vec((1i64..4, any::<proptest::sample::Index>(), any::<bool>()), 1..200)) {
            let (mut track, mut next, mut open) = (Track::default(), 0, Vec::new());
            for (gap, pick, deliver) in steps {
                if deliver || open.is_empty() {
                    next += gap;
                    prop_assert!(track.deliver(point(next)));
                    open.push(next);
                } else {
                    track.answer(open.swap_remove(pick.index(open.len())));
                }
                let oldest_open = open.iter().min();
                if let (Some(mark), Some(oldest)) = (track.watermark(), oldest_open) {
                    prop_assert!(mark.offset < *oldest);
                }
                prop_assert_eq!(open.is_empty(), track.is_settled());
                prop_assert!(!open.is_empty() || track.watermark().map(|mark| mark.offset) == track.delivered());
            }
        }
    }
}
