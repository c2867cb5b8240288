//! The cache protocol, every interleaving of it, on the product's own rules.
//!
//! Two or three writes of one key, claimed and delivered in any order and any number of times, beside two readers; values and entries
//! are evicted, the cache falls back to an older copy of itself, steps are torn apart by a crash. Nothing may end with everything
//! applied and an old value in the cache. For each rule of the protocol there is also a case that breaks it, and the search has to find
//! the stale end: a search that finds nothing wrong there would prove nothing elsewhere.
//!
//! `cargo test -p recant-schema --test protocol_search -- --nocapture` prints the ways to the stale states.

mod cache;
mod search;
mod world;

use recant_schema::scripts::Tombstones;
use search::search;
use world::{Case, Forget, PRIMARY, REPLICA, Reader, TwoSteps};

/// No stale end, after exactly so many states. The number keeps a holding case from passing because it no longer tries much; where it
/// changes, the world has changed, and somebody should know why.
fn holds(case: Case, states: usize) {
    let found = search(&case);
    if let Some((way, state)) = found.stale {
        panic!("stale after {}\n{state:#?}", told(&way));
    }
    assert_eq!(found.states, states, "another number of states than when this case was last looked at");
}

/// A stale end, and no way to it shorter than so many steps.
fn is_broken(case: Case, steps: usize) {
    let (way, state) = search(&case).stale.expect("the search finds the stale end of a broken case");
    println!("stale after {}", told(&way));
    assert!(state.is_stale_for_good());
    assert_eq!(way.len(), steps, "stale after {}", told(&way));
}

fn told(way: &[world::Action]) -> String {
    way.iter().map(ToString::to_string).collect::<Vec<_>>().join(" | ")
}

const MIXED: &[Reader] = &[PRIMARY, REPLICA];

mod the_protocol_leaves_nothing_stale {
    use super::*;

    #[test]
    fn with_primary_readers_evictions_and_repeated_claims() {
        holds(Case::NEW, 18_837);
    }

    #[test]
    fn with_primary_readers_that_refresh_ahead() {
        holds(Case { refresh: true, ..Case::NEW }, 19_757);
    }

    #[test]
    fn with_a_primary_reader_when_the_cache_fails_over_and_everything_is_replayed() {
        holds(Case { readers: &[PRIMARY], fail_over: true, ..Case::NEW }, 9_997);
    }

    #[test]
    fn with_primary_readers_when_two_steps_are_torn_apart_by_a_crash() {
        holds(Case { two_steps: TwoSteps::EntryFirst, ..Case::NEW }, 148_357);
    }

    #[test]
    fn with_primary_readers_when_memory_runs_out() {
        holds(Case { out_of_memory: true, ..Case::NEW }, 72_335);
    }

    #[test]
    fn with_primary_readers_when_nothing_is_written_for_what_is_not_cached() {
        holds(Case { tombstones: Tombstones::WhenCached, ..Case::NEW }, 16_539);
    }

    #[test]
    fn with_primary_readers_and_a_forget_at_any_time() {
        // As many as without: whatever a forget leads to, evictions lead to as well.
        holds(Case { forget: Forget::AtOnce, ..Case::NEW }, 18_837);
    }

    #[test]
    fn with_primary_and_replica_readers_and_a_forget_at_any_time_while_the_entry_lives() {
        holds(Case { readers: MIXED, entry_lost: false, forget: Forget::AtOnce, ..Case::NEW }, 9_819);
    }

    #[test]
    fn with_primary_readers_and_a_forget_in_two_steps_while_a_slot_moves() {
        holds(Case { forget: Forget::MarkThenValue, two_steps: TwoSteps::EntryFirst, ..Case::NEW }, 218_249);
    }

    #[test]
    fn with_primary_readers_of_a_key_built_from_two_sources() {
        holds(Case { sources: 2, ..Case::NEW }, 19_707);
    }

    #[test]
    fn with_replica_readers_while_the_entry_lives() {
        holds(Case { readers: &[REPLICA, REPLICA], entry_lost: false, ..Case::NEW }, 7_199);
    }

    #[test]
    fn with_primary_and_replica_readers_while_the_entry_lives() {
        holds(Case { readers: MIXED, entry_lost: false, ..Case::NEW }, 6_323);
    }

    #[test]
    fn with_primary_and_replica_readers_in_two_steps_with_refresh_while_the_entry_lives() {
        let case = Case { readers: MIXED, entry_lost: false, two_steps: TwoSteps::EntryFirst, refresh: true, ..Case::NEW };
        holds(case, 76_809);
    }

    #[test]
    fn with_primary_and_replica_readers_and_three_writes_while_the_entry_lives() {
        holds(Case { readers: MIXED, entry_lost: false, writes: 3, ..Case::NEW }, 764_759);
    }

    #[test]
    fn with_a_replica_reader_when_the_cache_fails_over_and_everything_is_replayed() {
        holds(Case { readers: &[REPLICA], entry_lost: false, fail_over: true, ..Case::NEW }, 4_888);
    }

    #[test]
    fn with_a_snapshot_older_than_the_miss_whose_version_was_taken_before_it() {
        let versioned = &[Reader { lags: false, versioned: true }];
        holds(Case { readers: versioned, entry_lost: false, old_snapshot: true, ..Case::NEW }, 758);
    }

    #[test]
    fn with_floors_alone_as_long_as_no_floor_is_lost() {
        holds(Case { readers: MIXED, entry_lost: false, without_marks: true, ..Case::NEW }, 2_871);
    }
}

mod the_search_finds_the_stale_end {
    use super::*;

    #[test]
    fn when_fills_raise_the_floor() {
        is_broken(Case { readers: MIXED, entry_lost: false, fills_raise_floors: true, ..Case::NEW }, 9);
    }

    #[test]
    fn when_a_replica_reader_finds_no_entry_because_it_was_lost() {
        is_broken(Case { readers: &[REPLICA], ..Case::NEW }, 7);
    }

    #[test]
    fn when_a_replica_reader_finds_no_entry_because_nothing_was_cached() {
        is_broken(Case { readers: &[REPLICA], entry_lost: false, tombstones: Tombstones::WhenCached, ..Case::NEW }, 6);
    }

    #[test]
    fn when_a_replica_reader_finds_no_entry_because_memory_ran_out() {
        is_broken(Case { readers: &[REPLICA], entry_lost: false, out_of_memory: true, ..Case::NEW }, 7);
    }

    #[test]
    fn when_a_snapshot_is_older_than_the_miss() {
        is_broken(Case { readers: &[PRIMARY], old_snapshot: true, ..Case::NEW }, 6);
    }

    #[test]
    fn when_floors_stand_without_marks_and_a_floor_is_lost() {
        is_broken(Case { readers: &[PRIMARY], without_marks: true, ..Case::NEW }, 7);
    }

    #[test]
    fn when_versions_are_taken_before_the_commit() {
        is_broken(Case { readers: &[PRIMARY], entry_lost: false, versions_before_commit: true, ..Case::NEW }, 11);
    }

    #[test]
    fn when_a_replica_reader_carries_no_version() {
        let unversioned = &[Reader { lags: true, versioned: false }];
        is_broken(Case { readers: unversioned, entry_lost: false, ..Case::NEW }, 6);
    }

    #[test]
    fn when_two_steps_begin_with_the_value() {
        is_broken(Case { readers: &[PRIMARY], entry_lost: false, two_steps: TwoSteps::ValueFirst, ..Case::NEW }, 7);
    }

    #[test]
    fn when_two_steps_leave_no_note_of_the_owed_unlink() {
        is_broken(Case { readers: &[PRIMARY], entry_lost: false, two_steps: TwoSteps::EntryFirstWithoutNote, ..Case::NEW }, 8);
    }

    #[test]
    fn when_a_forget_in_two_steps_drops_the_note_of_an_owed_unlink_first() {
        let (forget, two_steps) = (Forget::MarkAndNoteThenValue, TwoSteps::EntryFirst);
        is_broken(Case { readers: &[PRIMARY], entry_lost: false, forget, two_steps, ..Case::NEW }, 10);
    }
}
