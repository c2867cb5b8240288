//! PURE: which epoch comes next, and how it came about.
//!
//! An epoch is one unbroken run of one database. The claim finds that the present one is not vouched for (the unlogged incarnation is empty, or names
//! another start or database); this module says what happened:
//!
//! | seen | cause | commits lost? |
//! | --- | --- | --- |
//! | topics hold a later epoch of this source than the database stores, or any of a source without a stored one | `restored` | yes |
//! | topics hold a heartbeat of the stored epoch at a later position than the log has now | `restored` | yes |
//! | the stored epoch was raised in another database or another cluster | `restored` | yes |
//! | the timeline rose | `promoted` | perhaps |
//! | nothing stored, nothing in the topics | `first` | no |
//! | the incarnation is empty | `crash` | no: only unflushed log, and nobody was told that it was committed |
//! | the incarnation is of another start | `restart` | no |
//!
//! Only heartbeats prove lost history. An invalidation is stamped with the *insert* position, which may run ahead of what is flushed, so after a plain crash
//! the topics may well hold invalidations at positions that the log has not reached again. A heartbeat carries the *flushed* position: history up to
//! there survives every crash, and a log that ends before it is another, older history.
//!
//! A database that finds itself elsewhere is a copy. The original went on after the copy was made, and its commits are not in the copy, whatever the
//! positions say: the other server's log may be further along. `pg_upgrade` also makes a new cluster, with all of the history; that cannot be told
//! from a restored dump, so it counts as one: a needless run of the gap policies is better than a missing one.
//!
//! A cause that loses commits is a debt until the regions have been told. They hear of an epoch from its records, so if the server ends before there
//! is any, the next epoch comes with the same cause.

use recant_schema::labels::EpochCause;
use recant_schema::version::Version;
use std::collections::BTreeMap;

/// How far above the clock, or above what is stored, an epoch in the topics is believed. Epochs are the clock's seconds, or one above an earlier one, so
/// an honest one lies ahead only as far as a clock was wrong: a year of seconds is more than any clock in use. What lies beyond was written by somebody
/// else, and believing it would use up the numbers: after 2^63-1 there is no next epoch.
const BELIEVED_AHEAD: u64 = 365 * 24 * 60 * 60;

/// A database of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// The cluster's system identifier.
    pub cluster: i64,
    /// The database's oid in it.
    pub database: i64,
}

/// The row of `recant.source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The newest epoch that the database knows.
    pub epoch: u64,
    /// How it came about; `None` if that cannot be read.
    pub cause: Option<EpochCause>,
    /// The timeline it was raised on.
    pub timeline: u32,
    /// Where it was raised.
    pub home: Home,
}

/// A record of this source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Its version.
    pub version: Version,
    /// Whether it is a heartbeat.
    pub heartbeat: bool,
    /// Whether every region reads the topic it is in.
    pub shared: bool,
}

/// What the ends of the topics hold of this source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// All epochs, since the newest one may not be to be believed. No more than there are records read.
    epochs: BTreeMap<u64, Seen>,
}

/// What the topics hold of one epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// The newest heartbeat's position.
    heartbeat: Option<u64>,
    /// Whether a topic that every region reads holds any record of it.
    shared: bool,
}

/// The database at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// Its clock, in seconds since 1970.
    pub unix_seconds: u64,
    /// Its timeline.
    pub timeline: u32,
    /// Its insert position.
    pub position: u64,
    /// Where it is.
    pub home: Home,
    /// Whether the unlogged incarnation is gone.
    pub incarnation_empty: bool,
}

impl Published {
    /// Takes another record into account.
    pub fn see(&mut self, sighting: Sighting) {
        let seen = self.epochs.entry(sighting.version.epoch).or_default();
        seen.shared |= sighting.shared;
        if sighting.heartbeat {
            seen.heartbeat = seen.heartbeat.max(Some(sighting.version.position));
        }
    }

    /// The newest epoch up to `ceiling`.
    fn newest(&self, ceiling: u64) -> Option<u64> {
        self.epochs.range(..=ceiling).next_back().map(|(epoch, _)| *epoch)
    }

    fn of(&self, epoch: u64) -> Seen {
        self.epochs.get(&epoch).copied().unwrap_or_default()
    }
}

/// The next epoch: above everything ever stored or (believably) published, and at least the time, so that even a database restored without a trace and
/// topics without records start above what caches may remember.
pub fn next(stored: Option<Stored>, published: &Published, present: Present) -> (u64, EpochCause) {
    let known = stored.map_or(0, |stored| stored.epoch);
    let newest = published.newest(present.unix_seconds.max(known).saturating_add(BELIEVED_AHEAD));
    let above = known.max(newest.unwrap_or(0)).saturating_add(1);
    let cause = match stored {
        Some(stored) => cause(stored, newest, published.of(stored.epoch), present),
        None if newest.is_some() => EpochCause::Restored,
        None => EpochCause::First,
    };
    (present.unix_seconds.max(above), cause)
}

/// `newest`: in the topics; `seen`: of the stored epoch.
fn cause(stored: Stored, newest: Option<u64>, seen: Seen, present: Present) -> EpochCause {
    let later_epoch = newest.is_some_and(|epoch| epoch > stored.epoch);
    let later_history = seen.heartbeat.is_some_and(|position| position > present.position);
    let owed = stored.cause.filter(|cause| cause.loses_commits() && !seen.shared);
    if later_epoch || later_history || stored.home != present.home {
        EpochCause::Restored
    } else if present.timeline > stored.timeline {
        EpochCause::Promoted
    } else if let Some(owed) = owed {
        owed
    } else if present.incarnation_empty {
        EpochCause::Crash
    } else {
        EpochCause::Restart
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOME: Home = Home { cluster: 7, database: 16_384 };
    const STORED: Stored = Stored { epoch: 100, cause: Some(EpochCause::First), timeline: 1, home: HOME };
    const PRESENT: Present = Present { unix_seconds: 50, timeline: 1, position: 1_000, home: HOME, incarnation_empty: true };
    const RESTARTED: Present = Present { incarnation_empty: false, ..PRESENT };

    fn published(epoch: u64, position: u64, heartbeat: bool) -> Published {
        let mut published = Published::default();
        published.see(Sighting { version: Version::new(epoch, position), heartbeat, shared: true });
        published
    }

    #[test]
    fn each_way_to_a_new_epoch_is_told_apart() {
        let promoted = Present { timeline: 2, ..PRESENT };
        for (stored, seen, present, expected) in [
            (None, Published::default(), PRESENT, EpochCause::First),
            (None, published(3, 5, false), PRESENT, EpochCause::Restored),
            (Some(STORED), Published::default(), PRESENT, EpochCause::Crash),
            (Some(STORED), Published::default(), RESTARTED, EpochCause::Restart),
            (Some(STORED), published(100, 900, true), promoted, EpochCause::Promoted),
            (Some(STORED), published(101, 5, false), PRESENT, EpochCause::Restored),
            (Some(STORED), published(100, 1_001, true), RESTARTED, EpochCause::Restored),
            (Some(STORED), published(100, 1_001, true), promoted, EpochCause::Restored),
            (Some(STORED), published(99, 9_999, true), RESTARTED, EpochCause::Restart),
        ] {
            assert_eq!(next(stored, &seen, present).1, expected, "{stored:?} {seen:?} {present:?}");
        }
    }

    #[test]
    fn an_invalidation_ahead_of_the_flushed_log_does_not_prove_lost_history() {
        assert_eq!(next(Some(STORED), &published(100, 9_999, false), PRESENT).1, EpochCause::Crash);
    }

    #[test]
    fn a_copy_is_restored_however_far_along_the_log_is_that_it_was_brought_to() {
        for home in [Home { database: 16_385, ..HOME }, Home { cluster: 8, ..HOME }] {
            for present in [PRESENT, RESTARTED] {
                let there = Present { home, position: u64::MAX, ..present };
                assert_eq!(next(Some(STORED), &published(100, 900, true), there).1, EpochCause::Restored);
            }
        }
    }

    #[test]
    fn a_cause_that_loses_commits_stays_until_every_region_can_have_read_it() {
        for owed in [EpochCause::Promoted, EpochCause::Restored] {
            let stored = Stored { cause: Some(owed), ..STORED };
            let mut seen = published(99, 900, true);
            seen.see(Sighting { version: Version::new(100, 950), heartbeat: true, shared: false });
            for (seen, present, expected) in [
                (&Published::default(), PRESENT, owed),
                (&seen, PRESENT, owed),
                (&seen, RESTARTED, owed),
                (&published(100, 900, false), PRESENT, EpochCause::Crash),
                (&published(100, 900, true), RESTARTED, EpochCause::Restart),
            ] {
                assert_eq!(next(Some(stored), seen, present).1, expected, "{owed:?} {seen:?} {present:?}");
            }
        }
    }

    #[test]
    fn an_epoch_that_nobody_can_have_raised_is_not_believed_and_hides_none() {
        let now = Present { unix_seconds: 1_800_000_000, ..PRESENT };
        for absurd in [u64::MAX, (1 << 63) - 1, now.unix_seconds + BELIEVED_AHEAD + 1] {
            let mut seen = published(absurd, 5, true);
            assert_eq!(next(Some(STORED), &seen, now), (now.unix_seconds, EpochCause::Crash), "{absurd}");
            assert_eq!(next(None, &seen, now), (now.unix_seconds, EpochCause::First), "{absurd}");
            seen.see(Sighting { version: Version::new(now.unix_seconds + 9, 5), heartbeat: false, shared: true });
            assert_eq!(next(Some(STORED), &seen, now), (now.unix_seconds + 10, EpochCause::Restored), "{absurd}");
        }
    }

    proptest! {
        #[test]
        fn the_next_epoch_is_above_everything_believable(stored in proptest::option::of(1u64..1 << 40), seen in proptest::collection::vec(1u64..1 << 40, 0..5), now in 0u64..1 << 40) {
            let mut published = Published::default();
            for epoch in &seen {
                published.see(Sighting { version: Version::new(*epoch, 1), heartbeat: false, shared: true });
            }
            let stored = stored.map(|epoch| Stored { epoch, ..STORED });
            let (epoch, _) = next(stored, &published, Present { unix_seconds: now, ..PRESENT });
            let known = now.max(stored.map_or(0, |stored| stored.epoch));
            prop_assert!(epoch >= 1 && epoch >= now && epoch <= known + BELIEVED_AHEAD + 1);
            prop_assert!(stored.is_none_or(|stored| epoch > stored.epoch));
            prop_assert!(seen.iter().all(|seen| epoch > *seen || *seen > known + BELIEVED_AHEAD));
        }
    }
}
