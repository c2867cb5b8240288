//! The protocol's promises, one test each.

use recant_schema::scripts::{self, FillReply, ForgetReply, InvalidateReply, OweReply, Tombstones};
use recant_schema::tombstone::{Floor, OutOfMemory, ReadReply};
use recant_schema::version::Version;

use crate::cache::{Cache, PrivateServer, or_out_of_memory};
use crate::sequences::NUMBERS;
use recant_schema::key::Key;

const HOUR_MS: u64 = 3_600_000;

fn at(epoch: u64, position: u64) -> Floor {
    Floor { source: "shop".to_owned(), version: Version { epoch, position } }
}

impl Cache {
    fn apply(&mut self, key: &Key, said: &Floor) -> InvalidateReply {
        self.invalidate(key, said, HOUR_MS, Tombstones::Always).expect("Redis answers")
    }

    fn miss(&mut self, key: &Key, nonce: &str) -> String {
        let reply = self.read(key, nonce, HOUR_MS, false).expect("Redis answers");
        reply.mark.expect("a miss gives a mark").nonce
    }

    /// Reads past whatever is there and fills.
    fn load(&mut self, key: &Key, value: &[u8]) {
        let mark = self.read(key, "loader", HOUR_MS, true).expect("Redis answers").mark.expect("a refresh gives a mark");
        assert_eq!(self.fill(key, Some(&mark.nonce), None, value), Ok(FillReply::Filled));
    }

    fn value(&mut self, key: &Key) -> Option<Vec<u8>> {
        self.slot(key).value
    }

    fn floor(&mut self, key: &Key) -> Option<Floor> {
        self.slot(key).entry.and_then(|entry| entry.floor)
    }
}

#[test]
fn an_older_invalidation_never_lowers_the_floor() {
    let mut cache = Cache::connect();
    for (first, second, floor) in
        [(at(1, 10), at(1, 9), at(1, 10)), (at(2, 1), at(1, u64::MAX), at(2, 1)), (at(1, 9), at(1, 10), at(1, 10))]
    {
        let key = cache.key();
        cache.apply(&key, &first);
        cache.apply(&key, &second);
        assert_eq!(cache.floor(&key), Some(floor.clone()), "{first:?}, then {second:?}");
        // Nor does paying an owed unlink.
        cache.owe(&key, &at(3, 3), HOUR_MS).unwrap();
        cache.apply(&key, &first);
        assert_eq!(cache.floor(&key), Some(at(3, 3)));
    }
}

#[test]
fn any_order_and_repetition_of_the_same_invalidations_leaves_the_cache_alike() {
    let mut cache = Cache::connect();
    let said = [at(1, 9), at(1, 10), at(1, (1 << 53) + 1), at(2, 1)];
    // Every sequence of five out of four: all permutations are among them, and each repeats at least one.
    for sequence in 0..4_usize.pow(5) {
        let picked: Vec<usize> = (0..5).map(|digit| sequence / 4_usize.pow(digit) % 4).collect();
        let key = cache.key();
        cache.load(&key, b"old");
        for index in &picked {
            cache.apply(&key, &said[*index]);
        }
        let newest = picked.iter().max().expect("five were picked");
        assert_eq!(cache.value(&key), None, "{picked:?}");
        assert_eq!(cache.floor(&key), Some(said[*newest].clone()), "{picked:?}");
    }
}

#[test]
fn a_stale_fill_is_refused_after_an_invalidation() {
    let mut cache = Cache::connect();
    let key = cache.key();
    let mark = cache.miss(&key, "slow reader");
    assert_eq!(cache.apply(&key, &at(1, 5)), InvalidateReply::Applied);
    assert_eq!(cache.fill(&key, Some(&mark), None, b"old"), Ok(FillReply::MarkGone));
    assert_eq!(cache.fill(&key, Some(&mark), Some(&at(1, 9)), b"old"), Ok(FillReply::MarkGone));
    assert_eq!(cache.fill(&key, None, None, b"old"), Ok(FillReply::MarkGone));
    assert_eq!(cache.value(&key), None);
}

#[test]
fn a_fill_is_refused_once_its_entry_is_lost() {
    let mut cache = Cache::connect();
    let key = cache.key();
    let mark = cache.miss(&key, "reader");
    cache.command(&["UNLINK", &key.entry()]).unwrap();
    assert_eq!(cache.fill(&key, Some(&mark), None, b"old"), Ok(FillReply::MarkGone));
}

#[test]
fn a_replica_read_fills_only_at_or_above_the_floor_of_its_own_source() {
    let mut cache = Cache::connect();
    let of_stock = Floor { source: "stock".to_owned(), ..at(9, 9) };
    for (version, reply) in [
        (at(1, 9), FillReply::BelowFloor),
        (at(1, 10), FillReply::Filled),
        (at(2, 0), FillReply::Filled),
        (of_stock, FillReply::BelowFloor),
    ] {
        let key = cache.key();
        cache.apply(&key, &at(1, 10));
        let mark = cache.miss(&key, "replica reader");
        assert_eq!(cache.fill(&key, Some(&mark), Some(&version), b"new"), Ok(reply), "{version:?}");
        assert_eq!(cache.floor(&key), Some(at(1, 10)), "a fill never raises the floor");
    }
}

#[test]
fn a_repeated_invalidation_keeps_a_fresh_value() {
    let mut cache = Cache::connect();
    let key = cache.key();
    cache.load(&key, b"old");
    assert_eq!(cache.apply(&key, &at(1, 10)), InvalidateReply::Deleted);
    cache.load(&key, b"fresh");
    let before = cache.slot(&key);
    for said in [at(1, 10), at(1, 9), at(0, u64::MAX)] {
        assert_eq!(cache.apply(&key, &said), InvalidateReply::Repeat);
        assert_eq!(cache.owe(&key, &said, HOUR_MS), Ok(OweReply::Repeat));
    }
    let after = cache.slot(&key);
    assert_eq!((after.value, after.entry.map(|entry| entry.mark)), (before.value, before.entry.map(|entry| entry.mark)));
}

#[test]
fn versions_compare_exactly_over_their_whole_range() {
    let mut cache = Cache::connect();
    for first in NUMBERS {
        for second in NUMBERS {
            for (first, second) in [(at(7, first), at(7, second)), (at(first, 7), at(second, 7))] {
                let repeat = if second.version <= first.version { InvalidateReply::Repeat } else { InvalidateReply::Applied };
                let below = if second.version < first.version { FillReply::BelowFloor } else { FillReply::Filled };
                let key = cache.key();
                cache.apply(&key, &first);
                let mark = cache.miss(&key, "replica reader");
                assert_eq!(cache.fill(&key, Some(&mark), Some(&second), b"new"), Ok(below), "{second:?} above {first:?}");
                cache.command(&["UNLINK", key.as_str()]).unwrap();
                assert_eq!(cache.apply(&key, &second), repeat, "{first:?}, then {second:?}");
            }
        }
    }
}

#[test]
fn an_invalidation_of_another_source_just_applies() {
    let mut cache = Cache::connect();
    let key = cache.key();
    cache.apply(&key, &at(9, 9));
    cache.load(&key, b"old");
    let of_stock = Floor { source: "stock".to_owned(), ..at(1, 1) };
    assert_eq!(cache.apply(&key, &of_stock), InvalidateReply::Deleted);
    assert_eq!(cache.floor(&key), Some(of_stock));
}

#[test]
fn the_readers_of_one_miss_share_one_mark() {
    let mut cache = Cache::connect();
    let key = cache.key();
    let first = cache.read(&key, "first", HOUR_MS, false).unwrap().mark.unwrap();
    let second = cache.read(&key, "second", HOUR_MS, false).unwrap().mark.unwrap();
    assert!(first.left_now && !second.left_now);
    assert_eq!(first.nonce, second.nonce);
}

#[test]
fn a_torn_invalidation_is_finished_by_its_repeat() {
    let mut cache = Cache::connect();
    let key = cache.key();
    cache.load(&key, b"old");
    assert_eq!(cache.owe(&key, &at(1, 5), HOUR_MS), Ok(OweReply::Owed));
    assert_eq!(cache.value(&key), Some(b"old".to_vec()), "the first step leaves the value");
    assert_eq!(cache.apply(&key, &at(1, 5)), InvalidateReply::Deleted);
    assert_eq!(cache.apply(&key, &at(1, 5)), InvalidateReply::Repeat);
}

#[test]
fn a_fill_clears_an_owed_unlink() {
    let mut cache = Cache::connect();
    let key = cache.key();
    cache.owe(&key, &at(1, 5), HOUR_MS).unwrap();
    cache.load(&key, b"fresh");
    assert_eq!(cache.apply(&key, &at(1, 5)), InvalidateReply::Repeat);
    assert_eq!(cache.value(&key), Some(b"fresh".to_vec()));
}

#[test]
fn forgetting_deletes_the_value_refuses_older_fills_and_keeps_the_floor() {
    let mut cache = Cache::connect();
    let key = cache.key();
    cache.apply(&key, &at(1, 5));
    let mark = cache.miss(&key, "reader");
    cache.load(&key, b"old");
    assert_eq!(cache.forget(&key), Ok(ForgetReply::Deleted));
    assert_eq!(cache.fill(&key, Some(&mark), None, b"old"), Ok(FillReply::MarkGone));
    assert_eq!(cache.floor(&key), Some(at(1, 5)));
    assert_eq!(cache.forget(&key), Ok(ForgetReply::NothingThere));
}

#[test]
fn nothing_is_written_for_what_is_not_cached_where_the_region_asked_for_that() {
    let mut cache = Cache::connect();
    let key = cache.key();
    let invalidate = |cache: &mut Cache| cache.invalidate(&key, &at(1, 5), HOUR_MS, Tombstones::WhenCached).unwrap();
    assert_eq!(invalidate(&mut cache), InvalidateReply::NothingThere);
    assert_eq!(cache.slot(&key).entry, None);
    let mark = cache.miss(&key, "reader");
    assert_eq!(invalidate(&mut cache), InvalidateReply::Applied, "a mark is something");
    assert_eq!(cache.fill(&key, Some(&mark), None, b"old"), Ok(FillReply::MarkGone));
}

#[test]
fn an_entry_ttl_only_ever_grows() {
    let mut cache = Cache::connect();
    let key = cache.key();
    let ttl = |cache: &mut Cache| cache.slot(&key).entry.expect("the entry is there").ttl_ms;
    cache.invalidate(&key, &at(1, 1), 2 * HOUR_MS, Tombstones::Always).unwrap();
    cache.invalidate(&key, &at(1, 2), HOUR_MS, Tombstones::Always).unwrap();
    cache.owe(&key, &at(1, 3), HOUR_MS).unwrap();
    cache.read(&key, "reader", HOUR_MS, false).unwrap();
    cache.forget(&key).unwrap();
    assert!(ttl(&mut cache) > HOUR_MS, "no later step shortens it");
    for (step, hours) in [("invalidate", 3), ("owe", 4), ("read", 5)] {
        match step {
            "invalidate" => drop(cache.invalidate(&key, &at(2, hours), hours * HOUR_MS, Tombstones::Always).unwrap()),
            "owe" => drop(cache.owe(&key, &at(2, hours), hours * HOUR_MS).unwrap()),
            _ => drop(cache.read(&key, "reader", hours * HOUR_MS, false).unwrap()),
        }
        let left = ttl(&mut cache);
        assert!(left > (hours - 1) * HOUR_MS && left <= hours * HOUR_MS, "{step} leaves {left} ms");
    }
}

#[test]
fn a_full_cache_refuses_the_invalidation_before_it_touches_the_value() {
    let server = PrivateServer::start();
    let mut cache = server.connect();
    let key = cache.key();
    cache.apply(&key, &at(1, 5));
    cache.load(&key, b"old");
    let before = cache.slot(&key);
    cache.set_memory_full(true);
    let refused = or_out_of_memory(cache.invalidate(&key, &at(1, 6), 2 * HOUR_MS, Tombstones::Always));
    assert_eq!(refused, Err(OutOfMemory));
    assert_eq!(or_out_of_memory(cache.owe(&key, &at(1, 6), 2 * HOUR_MS)), Err(OutOfMemory));
    let after = cache.slot(&key);
    assert_eq!(after.value, before.value);
    assert_eq!(after.entry.as_ref().and_then(|entry| entry.floor.clone()), Some(at(1, 5)));
    assert!(after.entry.is_some_and(|entry| entry.mark.is_some() && entry.ttl_ms <= HOUR_MS));
    assert_eq!(cache.apply(&key, &at(1, 5)), InvalidateReply::Repeat, "a repeat needs no memory");
}

#[test]
fn a_full_cache_still_answers_reads_and_forgets() {
    let server = PrivateServer::start();
    let mut cache = server.connect();
    let (hit, miss) = (cache.key(), cache.key());
    cache.load(&hit, b"value");
    cache.set_memory_full(true);
    let value = Some(b"value".to_vec());
    assert_eq!(cache.read(&hit, "reader", HOUR_MS, false), Ok(ReadReply { value, mark: None }));
    assert_eq!(cache.read(&miss, "reader", HOUR_MS, false), Ok(ReadReply { value: None, mark: None }));
    assert_eq!(cache.slot(&miss).entry, None);
    assert_eq!(cache.forget(&hit), Ok(ForgetReply::Deleted));
}

#[test]
fn scripts_survive_script_flush() {
    let server = PrivateServer::start();
    let mut cache = server.connect();
    let key = cache.key();
    for (name, text) in scripts::ALL {
        assert!(cache.command(&["SCRIPT", "LOAD", text]).is_ok(), "{name}");
    }
    for position in 1..=2 {
        cache.load(&key, b"old");
        assert_eq!(cache.apply(&key, &at(1, position)), InvalidateReply::Deleted);
        cache.command(&["SCRIPT", "FLUSH"]).unwrap();
    }
}

#[test]
fn a_replica_of_the_cache_refuses_to_leave_a_mark() {
    let server = PrivateServer::start();
    let mut cache = server.connect();
    let key = cache.key();
    // Nothing listens on the discard port; a replica without its primary stays read-only.
    cache.command(&["REPLICAOF", "127.0.0.1", "9"]).unwrap();
    let error = cache.read(&key, "reader", HOUR_MS, false).unwrap_err();
    assert_eq!(error.code(), Some("READONLY"), "{error}");
}
