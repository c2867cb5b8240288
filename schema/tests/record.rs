//! The record's bytes are a contract: golden files, the JSON Schema, and this code say the same.

use proptest::prelude::*;
use recant_schema::invalidation::{Heartbeat, Invalidation, Source};
use recant_schema::key::Key;
use recant_schema::labels::{Class, CommitBasis, EpochCause, Lane};
use recant_schema::record::{Record, RecordError};
use recant_schema::topics::Region;
use recant_schema::version::Version;
use std::sync::LazyLock;
use uuid::Uuid;

const ID: Uuid = Uuid::from_u128(0x01890a5d_ac96_774b_bcce_b302099a8057);
const COMMITTED_AT_US: i64 = 1_700_000_000_123_456;

static SCHEMA: LazyLock<jsonschema::Validator> = LazyLock::new(|| {
    let schema = serde_json::from_str(include_str!("../json/record.v1.schema.json")).expect("the schema is JSON");
    jsonschema::validator_for(&schema).expect("the schema is a JSON Schema")
});

fn satisfies_the_schema(bytes: &[u8]) -> bool {
    SCHEMA.is_valid(&serde_json::from_slice(bytes).expect("records are JSON"))
}

fn full() -> Invalidation {
    Invalidation {
        id: ID,
        key: Key::parse("v2:{shop}:größe:7").unwrap(),
        version: Version::new(1_700_000_000, i64::MAX as u64),
        tenant: Some("shop".into()),
        class: Some(Class::Price),
        regions: Some(vec![Region::parse("eu").unwrap(), Region::parse("us").unwrap()]),
        lane: Lane::Bulk,
        committed_at_us: COMMITTED_AT_US,
        commit_basis: CommitBasis::Commit,
        source: Source { database: "shop".into(), relay: "relay-1".into(), epoch_cause: Some(EpochCause::ByHand) },
        traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into()),
    }
}

fn least() -> Invalidation {
    Invalidation {
        key: Key::parse("v2:shop:product:7").unwrap(),
        version: Version::new(1, (1 << 53) + 1),
        tenant: None,
        class: None,
        regions: None,
        lane: Lane::Realtime,
        commit_basis: CommitBasis::Insert,
        source: Source { database: "shop".into(), relay: "relay-1".into(), epoch_cause: None },
        traceparent: None,
        ..full()
    }
}

fn heartbeat() -> Heartbeat {
    let source = Source { database: "shop".into(), relay: "relay-1".into(), epoch_cause: Some(EpochCause::First) };
    Heartbeat { id: ID, version: Version::new(1_700_000_000, u64::MAX), committed_at_us: COMMITTED_AT_US, source }
}

#[test]
fn a_record_has_exactly_the_golden_bytes() {
    for (record, golden) in [
        (Record::Invalidation(full()), include_str!("../golden/invalidation.full.v1.json")),
        (Record::Invalidation(least()), include_str!("../golden/invalidation.least.v1.json")),
        (Record::Heartbeat(heartbeat()), include_str!("../golden/heartbeat.v1.json")),
    ] {
        assert_eq!(String::from_utf8(record.encode()).unwrap(), golden);
        assert_eq!(Record::decode(golden.as_bytes()).unwrap(), record);
        assert!(satisfies_the_schema(golden.as_bytes()), "{golden}");
    }
}

#[test]
fn the_schema_refuses_what_the_code_refuses() {
    let least = include_str!("../golden/invalidation.least.v1.json");
    for (from, to) in [
        ("\"format\":1", "\"format\":2"),
        ("\"kind\":\"invalidation\"", "\"kind\":\"purge\""),
        ("\"key\":\"v2:shop:product:7\",", ""),
        ("\"key\":\"v2:shop:product:7\"", "\"key\":\"\""),
        ("\"epoch\":\"1\"", "\"epoch\":\"01\""),
        ("\"epoch\":\"1\"", "\"epoch\":1"),
        ("\"position\":\"9007199254740993\"", "\"position\":\"-1\""),
        ("\"lane\":\"realtime\"", "\"lane\":\"express\""),
        ("\"commit_basis\":\"insert\"", "\"commit_basis\":\"guess\""),
        ("\"source\":{\"database\":\"shop\",\"relay\":\"relay-1\"}", "\"source\":{}"),
        ("\"lane\":\"realtime\"", "\"regions\":[\"EU\"],\"lane\":\"realtime\""),
    ] {
        let bad = least.replace(from, to);
        assert_ne!(bad, least, "{from} is in the golden record");
        assert!(Record::decode(bad.as_bytes()).is_err(), "decoded: {bad}");
        assert!(!satisfies_the_schema(bad.as_bytes()), "satisfies the schema: {bad}");
    }
}

#[test]
fn an_unknown_format_is_told_apart_from_garbage() {
    assert!(matches!(Record::decode(br#"{"format":2,"shape":"another"}"#), Err(RecordError::UnknownFormat(2))));
    assert!(matches!(Record::decode(br#"{"format":1}"#), Err(RecordError::Malformed(_))));
    assert!(matches!(Record::decode(b"\x00\xff"), Err(RecordError::Malformed(_))));
    assert!(matches!(Record::decode(b""), Err(RecordError::Empty)));
}

#[test]
fn unknown_fields_are_ignored() {
    let later = include_str!("../golden/invalidation.least.v1.json").replace("{\"format\"", "{\"later\":{\"a\":[1]},\"format\"");
    assert_eq!(Record::decode(later.as_bytes()).unwrap(), Record::Invalidation(least()));
}

proptest! {
    #[test]
    fn every_record_reads_back_as_itself(
        key in "[!-z]{1,40}", epoch in any::<u64>(), position in any::<u64>(), tenant in proptest::option::of("\\PC{1,20}"),
        class in proptest::option::of(proptest::sample::select(Class::ALL)), committed_at_us in -(1i64 << 53) + 1..1i64 << 53, relay in "\\PC{0,20}",
    ) {
        let Ok(key) = Key::parse(&key) else { return Ok(()) };
        let source = Source { database: "shop".into(), relay, epoch_cause: None };
        let record = Record::Invalidation(Invalidation { key, version: Version::new(epoch, position), tenant, class, committed_at_us, source, ..full() });
        let bytes = record.encode();
        prop_assert_eq!(Record::decode(&bytes).unwrap(), record);
        prop_assert!(satisfies_the_schema(&bytes));
    }

    #[test]
    fn no_bytes_make_decoding_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Record::decode(&bytes);
    }
}
