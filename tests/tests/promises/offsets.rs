//! Promise 5: offsets are never committed past a record that is not applied or dead-lettered.

use recant_schema::key::Key;
use recant_schema::version::Version;
use recant_tests::source::commit_all;
use recant_tests::{Pipeline, eventually};

/// Where the one record of a key lies.
async fn stored_at(pipeline: &Pipeline, key: &Key) -> (i32, i64) {
    eventually("the record is in the topic", async || {
        let records = pipeline.kafka.read_all(&pipeline.shared_topic()).await;
        records.iter().find(|record| record.invalidates(key.as_str())).map(|record| (record.partition, record.offset))
    })
    .await
}

async fn committed(pipeline: &Pipeline, partition: i32) -> i64 {
    let committed = pipeline.kafka.committed(&pipeline.eu().group, &pipeline.shared_topic()).await;
    committed.get(&partition).copied().unwrap_or(0)
}

/// Waits until so many records lie behind an offset.
async fn await_behind(pipeline: &Pipeline, (partition, offset): (i32, i64), count: i64) {
    let topic = pipeline.shared_topic();
    eventually("later records are in the partition", async || {
        (pipeline.kafka.bounds(&topic).await[&partition].1 > offset + count).then_some(())
    })
    .await;
}

/// The cache is frozen with one record in flight, while heartbeats go on arriving behind it.
#[tokio::test]
async fn offsets_are_never_committed_past_an_unapplied_record() {
    let pipeline = Pipeline::builder().redis_through_proxy().relay("heartbeat_interval_ms", "100").start().await;
    let key = pipeline.key("product:7");
    pipeline.eu().cache.load(&key, "old").await;
    pipeline.eu().proxy().freeze();
    pipeline.commit(&key).await;
    let at = stored_at(&pipeline, &key).await;
    // Twenty heartbeats are two seconds, ten commit intervals.
    await_behind(&pipeline, at, 20).await;
    let stands = committed(&pipeline, at.0).await;
    assert!(stands <= at.1, "{stands} is committed, the record at {} is not applied", at.1);
    assert_eq!(pipeline.eu().cache.get(&key).await.as_deref(), Some("old"));

    pipeline.eu().proxy().release();
    pipeline.eu().cache.await_applied(&key).await;
    eventually("the offset moves on", async || (committed(&pipeline, at.0).await > at.1 + 1).then_some(())).await;
    pipeline.finish().await;
}

/// A second member joins and leaves again while records pour in.
#[tokio::test]
async fn a_revoked_partition_drains_before_it_is_given_up() {
    let pipeline = Pipeline::start().await;
    let keys = pipeline.keys(1_500);
    pipeline.eu().cache.put_all(&keys, "value").await;
    let mut second = pipeline.second_subscriber();
    let mut product = pipeline.product().await;
    for (number, part) in keys.chunks(10).enumerate() {
        let texts: Vec<_> = part.iter().map(|key| key.as_str().to_owned()).collect();
        commit_all(&mut product, &texts).await;
        match number {
            30 => second.start(),
            60 => drop(second.await_metric("subscriber_partitions", "", |owned| owned >= 1.0).await),
            _ => {}
        }
    }
    second.await_metric("subscriber_applied_total", "", |applied| applied >= 1.0).await;
    assert!(second.terminate().success());
    pipeline.eu().cache.await_all_gone(&keys).await;
    assert!(second.errors().is_empty(), "{:?}", second.errors());
    pipeline.finish().await;
}

/// The cache is frozen when a second member joins: the record stays uncommitted, and whoever gets its partition applies it.
#[tokio::test]
async fn a_revoked_partition_that_cannot_drain_is_given_up_uncommitted() {
    let pipeline = Pipeline::builder().redis_through_proxy().start().await;
    let keys = pipeline.keys(30);
    pipeline.eu().cache.put_all(&keys, "value").await;
    pipeline.eu().proxy().freeze();
    let texts: Vec<_> = keys.iter().map(|key| key.as_str().to_owned()).collect();
    commit_all(&mut pipeline.product().await, &texts).await;
    let mut places = Vec::new();
    for key in &keys {
        places.push(stored_at(&pipeline, key).await);
    }
    let mut second = pipeline.second_subscriber();
    second.start();
    second.await_log("partitions assigned").await;
    for (partition, offset) in places {
        let stands = committed(&pipeline, partition).await;
        assert!(stands <= offset, "{stands} of {partition} is committed, the record at {offset} is not applied");
    }
    pipeline.eu().proxy().release();
    pipeline.eu().cache.await_all_gone(&keys).await;
    pipeline.finish().await;
}

fn versions(keys: &[Key]) -> Vec<(Key, Version)> {
    keys.iter().map(|key| (key.clone(), Version::new(1, 2))).collect()
}

/// Consumption is paused, since the cache is away and the house is full (8,192 records), when a second member joins.
#[tokio::test]
async fn partitions_that_change_hands_during_a_pause_are_consumed_live_by_both_members_afterwards() {
    let pipeline = Pipeline::builder().relays(0).redis_through_proxy().start().await;
    let (cache, first) = (&pipeline.eu().cache, &pipeline.eu().subscriber);
    pipeline.produce(&versions(&[pipeline.key("before")])).await;
    pipeline.await_consumed().await;
    pipeline.eu().proxy().cut();
    let backlog = pipeline.keys(12_000);
    for part in backlog.chunks(4_000) {
        pipeline.produce(&versions(part)).await;
    }
    cache.put_all(&backlog, "old").await;
    first.await_metric("subscriber_paused", "", |paused| paused == 1.0).await;
    let mut second = pipeline.second_subscriber();
    second.start();
    // Also the first, whose house is still full: a member that does not answer the group would hold up all the others.
    for member in [first, &second] {
        member.await_metric("subscriber_partitions", "", |owned| (1.0..12.0).contains(&owned)).await;
    }
    pipeline.eu().proxy().restore();
    cache.await_all_gone(&backlog).await;
    for member in [first, &second] {
        member.await_metric("subscriber_replaying_partitions", "", |count| count == 0.0).await;
    }

    let fresh: Vec<_> = (0..60).map(|number| pipeline.key(&format!("fresh:{number}"))).collect();
    cache.put_all(&fresh, "old").await;
    pipeline.produce(&versions(&fresh)).await;
    cache.await_all_gone(&fresh).await;
    for member in [first, &second] {
        member.await_metric("subscriber_propagation_seconds_count", "reading=\"live\"", |count| count >= 1.0).await;
    }
    assert!(second.errors().is_empty(), "{:?}", second.errors());
    pipeline.finish().await;
}
