//! Arguments that the scripts do not take: an error, and nothing has changed.

use recant_schema::scripts::{FILL, INVALIDATE, OWE, READ, Tombstones};
use recant_schema::tombstone::Floor;
use recant_schema::version::Version;

use crate::cache::Cache;

const HOUR_MS: u64 = 3_600_000;

/// Spellings of numbers that are not canonical decimals.
const NOT_CANONICAL: [&str; 9] = ["", "007", "00", "1e3", "-1", "+1", " 1", "1.0", "0x10"];

/// Ttls that are no positive number of milliseconds, or so long that `PEXPIRE` could fail after the first write.
const NOT_A_TTL: [&str; 8] = ["", "0", "-1", "1.5", "1e3", "0x10", "ten", "10000000000000"];

/// Runs a script with these arguments on a key with a value, a floor and the mark `held`, and expects an error and no change.
fn refused(cache: &mut Cache, script: &str, arguments: &[&str]) {
    let key = cache.key();
    let floor = Floor { source: "shop".to_owned(), version: Version { epoch: 1, position: 5 } };
    cache.invalidate(&key, &floor, HOUR_MS, Tombstones::Always).unwrap();
    cache.read(&key, "held", HOUR_MS, false).unwrap();
    cache.fill(&key, Some("held"), None, b"value").unwrap();
    let before = cache.slot(&key);

    let (value, entry) = (key.as_str().to_owned(), key.entry());
    let keys: &[&str] = if script == OWE { &["1", &entry] } else { &["2", &value, &entry] };
    let words = [&["EVAL", script], keys, arguments].concat();
    let error = cache.command(&words).expect_err(&format!("{arguments:?} are refused"));
    assert!(error.to_string().contains("recant"), "{arguments:?}: {error}");

    let after = cache.slot(&key);
    assert_eq!(after.value, before.value, "{arguments:?}");
    let known = |slot: recant_schema::tombstone::Slot| slot.entry.map(|entry| (entry.floor, entry.mark, entry.unlink_owed));
    assert_eq!(known(after), known(before), "{arguments:?}");
}

#[test]
fn a_version_in_any_but_its_canonical_spelling_is_refused_and_changes_nothing() {
    let mut cache = Cache::connect();
    for bad in NOT_CANONICAL {
        for (epoch, position) in [(bad, "6"), ("1", bad)] {
            refused(&mut cache, INVALIDATE, &["shop", epoch, position, "1000", "always"]);
            refused(&mut cache, OWE, &["shop", epoch, position, "1000"]);
            refused(&mut cache, FILL, &["held", "new", "1000", "shop", epoch, position]);
        }
    }
    refused(&mut cache, FILL, &["held", "new", "1000", "", "1", "6"]);
}

#[test]
fn a_ttl_that_redis_could_choke_on_is_refused_and_changes_nothing() {
    let mut cache = Cache::connect();
    for bad in NOT_A_TTL {
        refused(&mut cache, INVALIDATE, &["shop", "1", "6", bad, "always"]);
        refused(&mut cache, OWE, &["shop", "1", "6", bad]);
        refused(&mut cache, FILL, &["held", "new", bad, "", "", ""]);
        refused(&mut cache, READ, &["nonce", bad, "1"]);
    }
}

#[test]
fn an_empty_source_or_nonce_and_an_unknown_mode_are_refused_and_change_nothing() {
    let mut cache = Cache::connect();
    refused(&mut cache, INVALIDATE, &["", "1", "6", "1000", "always"]);
    refused(&mut cache, INVALIDATE, &["shop", "1", "6", "1000", "sometimes"]);
    refused(&mut cache, OWE, &["", "1", "6", "1000"]);
    refused(&mut cache, READ, &["", "1000", "1"]);
}

#[test]
fn a_key_of_another_type_is_an_error_and_keeps_its_contents() {
    let mut cache = Cache::connect();
    let key = cache.key();
    cache.command(&["RPUSH", &key.entry(), "not ours"]).unwrap();
    let floor = Floor { source: "shop".to_owned(), version: Version { epoch: 1, position: 5 } };
    cache.command(&["SET", key.as_str(), "value", "PX", "1000000"]).unwrap();
    assert_eq!(cache.invalidate(&key, &floor, HOUR_MS, Tombstones::Always).unwrap_err().code(), Some("WRONGTYPE"));
    assert_eq!(cache.forget(&key).unwrap_err().code(), Some("WRONGTYPE"));
    let value: String = redis::cmd("GET").arg(key.as_str()).query(&mut cache.redis).unwrap();
    assert_eq!(value, "value", "whoever cannot raise the floor leaves the value");
}
