//! PURE: which epoch comes next, and how it came about.
//!
//! An epoch is one unbroken run of one database. The claim finds that the present one is not vouched for (the unlogged incarnation is empty, or names
//! another start or database); this module says what happened:
//!
//! | seen | cause | commits lost? |
//! | --- | --- | --- |
//! | topics hold a later epoch of this source than the database stores, or any of a source without a stored one | `restored` | yes |
//! | topics hold a heartbeat of the stored epoch at a later position than the log has now | `restored` | yes |
//! | the timeline rose | `promoted` | perhaps |
//! | nothing stored, nothing in the topics | `first` | no |
//! | the incarnation is empty | `crash` | no: only unflushed log, and nobody was told that it was committed |
//! | the incarnation is of another start or database | `restart` | no |
//!
//! Only heartbeats prove lost history. An invalidation is stamped with the *insert* position, which may run ahead of what is flushed, so after a plain crash
//! the topics may well hold invalidations at positions that the log has not reached again. A heartbeat carries the *flushed* position: history up to
//! there survives every crash, and a log that ends before it is another, older history.

use recant_schema::labels::EpochCause;
use recant_schema::version::Version;

/// The row of `recant.source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The newest epoch that the database knows.
    pub epoch: u64,
    /// The timeline it was raised on.
    pub timeline: u32,
}

/// What the ends of the topics hold of this source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// The newest epoch in any record.
    pub epoch: Option<u64>,
    /// The newest heartbeat.
    pub heartbeat: Option<Version>,
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
    /// Whether the unlogged incarnation is gone.
    pub incarnation_empty: bool,
}

impl Published {
    /// Takes another record's version into account.
    pub fn see(&mut self, version: Version, heartbeat: bool) {
        self.epoch = self.epoch.max(Some(version.epoch));
        if heartbeat {
            self.heartbeat = self.heartbeat.max(Some(version));
        }
    }
}

/// The next epoch: above everything ever stored or published, and at least the time, so that even a database restored without a trace and
/// topics without records start above what caches may remember.
pub fn next(stored: Option<Stored>, published: Published, present: Present) -> (u64, EpochCause) {
    let above = |epoch: u64| epoch.saturating_add(1);
    let epoch = present.unix_seconds.max(stored.map_or(1, |stored| above(stored.epoch))).max(published.epoch.map_or(1, above));
    (epoch, cause(stored, published, present))
}

fn cause(stored: Option<Stored>, published: Published, present: Present) -> EpochCause {
    let Some(stored) = stored else {
        return if published.epoch.is_some() { EpochCause::Restored } else { EpochCause::First };
    };
    let later_epoch = published.epoch.is_some_and(|epoch| epoch > stored.epoch);
    let later_history = published.heartbeat.is_some_and(|beat| beat.epoch == stored.epoch && beat.position > present.position);
    if later_epoch || later_history {
        EpochCause::Restored
    } else if present.timeline > stored.timeline {
        EpochCause::Promoted
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

    const STORED: Stored = Stored { epoch: 100, timeline: 1 };
    const PRESENT: Present = Present { unix_seconds: 50, timeline: 1, position: 1_000, incarnation_empty: true };

    fn published(epoch: u64, position: u64, heartbeat: bool) -> Published {
        let mut published = Published::default();
        published.see(Version::new(epoch, position), heartbeat);
        published
    }

    #[test]
    fn each_way_to_a_new_epoch_is_told_apart() {
        let restarted = Present { incarnation_empty: false, ..PRESENT };
        let promoted = Present { timeline: 2, ..PRESENT };
        for (stored, seen, present, expected) in [
            (None, Published::default(), PRESENT, EpochCause::First),
            (None, published(3, 5, false), PRESENT, EpochCause::Restored),
            (Some(STORED), Published::default(), PRESENT, EpochCause::Crash),
            (Some(STORED), Published::default(), restarted, EpochCause::Restart),
            (Some(STORED), published(100, 900, true), promoted, EpochCause::Promoted),
            (Some(STORED), published(101, 5, false), PRESENT, EpochCause::Restored),
            (Some(STORED), published(100, 1_001, true), restarted, EpochCause::Restored),
            (Some(STORED), published(100, 1_001, true), promoted, EpochCause::Restored),
            (Some(STORED), published(99, 9_999, true), restarted, EpochCause::Restart),
        ] {
            assert_eq!(next(stored, seen, present).1, expected, "{stored:?} {seen:?} {present:?}");
        }
    }

    #[test]
    fn an_invalidation_ahead_of_the_flushed_log_does_not_prove_lost_history() {
        assert_eq!(next(Some(STORED), published(100, 9_999, false), PRESENT).1, EpochCause::Crash);
    }

    proptest! {
        #[test]
        fn the_next_epoch_is_above_everything_known(stored in proptest::option::of(1u64..1 << 40), seen in proptest::option::of(1u64..1 << 40), now in 0u64..1 << 40) {
            let mut published = Published::default();
            if let Some(epoch) = seen {
                published.see(Version::new(epoch, 1), false);
            }
            let stored = stored.map(|epoch| Stored { epoch, timeline: 1 });
            let (epoch, _) = next(stored, published, Present { unix_seconds: now, ..PRESENT });
            prop_assert!(epoch >= 1 && epoch >= now);
            prop_assert!(stored.is_none_or(|stored| epoch > stored.epoch));
            prop_assert!(seen.is_none_or(|seen| epoch > seen));
        }
    }
}
