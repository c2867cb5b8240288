//! A region whose cache is watched by Sentinels: the subscriber follows the primary that they name.

use recant_schema::key::Key;
use recant_schema::version::Version;
use recant_tests::Pipeline;
use recant_tests::redis_sets::SentinelSet;

fn versions(keys: &[Key], position: u64) -> Vec<(Key, Version)> {
    keys.iter().map(|key| (key.clone(), Version::new(1, position))).collect()
}

/// The replica is cut off while deletes go on, so it comes to power with values that its primary had deleted.
#[tokio::test]
async fn a_replica_promoted_by_a_sentinel_gets_what_it_missed_from_its_own_marker() {
    let mut set = SentinelSet::start().await;
    let pipeline = Pipeline::builder().relays(0).redis(&set.url()).subscriber("marker_interval_ms", "50").start().await;
    let keys = pipeline.keys(600);
    let (before, after) = keys.split_at(200);
    let (missed, during) = after.split_at(200);
    set.first.cache.put_all(&keys, "old").await;
    pipeline.produce(&versions(before, 1)).await;
    set.first.cache.await_all_gone(before).await;
    set.first.await_replicated().await;
    set.first.cut_off(&set.second).await;
    pipeline.produce(&versions(missed, 1)).await;
    set.first.cache.await_all_gone(missed).await;
    pipeline.await_consumed().await;

    set.first.server.kill();
    set.second.server.thaw();
    assert_eq!(set.second.cache.with_value(missed).await, missed, "the replica missed the deletes");
    for part in during.chunks(20) {
        pipeline.produce(&versions(part, 1)).await;
    }
    set.await_promoted().await;
    set.second.cache.await_all_gone(&keys).await;
    pipeline.await_consumed().await;
    for key in missed.iter().chain(during) {
        assert!(set.second.cache.floor(key).await.is_some(), "{key} has no floor on the promoted replica");
    }
    pipeline.finish().await;
}

/// Frozen for longer than the Sentinel waits; when it goes on it takes itself for the primary for some more seconds.
#[tokio::test]
async fn an_old_primary_that_was_frozen_and_goes_on_is_left() {
    let set = SentinelSet::start().await;
    let pipeline = Pipeline::builder().relays(0).redis(&set.url()).start().await;
    let keys = pipeline.keys(100);
    let (early, late) = keys.split_at(50);
    set.first.cache.put_all(&keys, "old").await;
    set.first.await_replicated().await;
    set.first.server.freeze();
    pipeline.produce(&versions(early, 1)).await;
    set.await_promoted().await;
    set.second.cache.await_all_gone(early).await;

    set.first.server.thaw();
    pipeline.produce(&versions(late, 1)).await;
    set.second.cache.await_all_gone(late).await;
    pipeline.await_consumed().await;
    assert_eq!(set.first.cache.with_value(late).await, late, "nothing was sent to the old primary any more");
    pipeline.finish().await;
}
