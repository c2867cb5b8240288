//! Records made by hand, where a test needs versions that no database would stamp.

use recant_schema::invalidation::{Invalidation, Source};
use recant_schema::key::Key;
use recant_schema::labels::{CommitBasis, EpochCause, Lane};
use recant_schema::record::Record;
use recant_schema::service::clock;
use recant_schema::version::Version;
use uuid::Uuid;

/// The source that records by hand come from, unless a test is about sources.
pub const BY_HAND: &str = "by-hand";

/// An invalidation's value.
pub fn invalidation(key: &Key, version: Version) -> Vec<u8> {
    invalidation_from(BY_HAND, None, key, version)
}

/// An invalidation's value, from another source, or of an epoch with a cause.
pub fn invalidation_from(source: &str, epoch_cause: Option<EpochCause>, key: &Key, version: Version) -> Vec<u8> {
    let source = Source { database: source.to_owned(), relay: "test".to_owned(), epoch_cause };
    Record::Invalidation(Invalidation {
        id: Uuid::now_v7(),
        key: key.clone(),
        version,
        tenant: None,
        class: None,
        regions: None,
        lane: Lane::Realtime,
        committed_at_us: clock::now_us(),
        commit_basis: CommitBasis::Commit,
        source,
        traceparent: None,
    })
    .encode()
}

/// Key and value, as [`crate::Kafka::produce_all`] takes them.
pub fn pair(key: &Key, version: Version) -> (Vec<u8>, Vec<u8>) {
    (key.as_str().as_bytes().to_vec(), invalidation(key, version))
}
