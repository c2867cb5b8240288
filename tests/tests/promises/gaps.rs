//! Promise 6: a gap is never silent: it is counted, logged as an error, and the region's gap policy runs.

use recant_schema::key::Key;
use recant_schema::labels::EpochCause;
use recant_schema::version::Version;
use recant_tests::source::commit;
use recant_tests::{Pipeline, eventually, records};
use sqlx::Executor;
use std::collections::BTreeMap;

/// Part of the line that a person has to act on.
pub(crate) const ERROR: &str = "invalidations may be missing";

/// So many records are applied and remembered, then the subscriber is stopped.
pub(crate) const APPLIED: usize = 30;

pub(crate) async fn applied_and_stopped() -> Pipeline {
    let mut pipeline = Pipeline::builder().relays(0).partitions(1).start().await;
    produce(&pipeline, APPLIED).await;
    pipeline.await_consumed().await;
    assert!(pipeline.eu_mut().subscriber.terminate().success());
    pipeline
}

pub(crate) async fn produce(pipeline: &Pipeline, count: usize) {
    let invalidations: Vec<_> = (0..count).map(|position| (pipeline.key("product:7"), Version::new(1, position as u64))).collect();
    pipeline.produce(&invalidations).await;
}

pub(crate) async fn recreate(pipeline: &Pipeline) {
    pipeline.kafka.delete_topic(&pipeline.shared_topic()).await;
    pipeline.kafka.create_topic(&pipeline.shared_topic(), 1, &[("retention.ms", "604800000")]).await;
}

/// The gap is counted and logged, and what the topic holds now is applied all the same.
async fn expect_gap(mut pipeline: Pipeline, cause: &str) {
    let key = pipeline.key("after");
    pipeline.eu().cache.load(&key, "old").await;
    pipeline.eu_mut().subscriber.start();
    pipeline.eu().subscriber.await_metric("subscriber_gaps_total", cause, |count| count >= 1.0).await;
    pipeline.produce(&[(key.clone(), Version::new(1, 1))]).await;
    pipeline.eu().cache.await_applied(&key).await;
    assert!(pipeline.eu().subscriber.errors().iter().any(|line| line.contains(ERROR)));
    pipeline.expect_error(ERROR);
    pipeline.finish().await;
}

#[tokio::test]
async fn a_topic_recreated_shorter_is_a_gap() {
    let pipeline = applied_and_stopped().await;
    recreate(&pipeline).await;
    produce(&pipeline, 3).await;
    expect_gap(pipeline, "recreated").await;
}

#[tokio::test]
async fn a_topic_recreated_with_another_record_at_the_markers_offset_is_a_gap() {
    let pipeline = applied_and_stopped().await;
    recreate(&pipeline).await;
    produce(&pipeline, 2 * APPLIED).await;
    expect_gap(pipeline, "recreated").await;
}

#[tokio::test]
async fn records_that_retention_deleted_before_they_were_applied_are_a_gap() {
    let pipeline = applied_and_stopped().await;
    produce(&pipeline, APPLIED).await;
    pipeline.kafka.delete_records(&pipeline.shared_topic(), &BTreeMap::from([(0, APPLIED as i64 + 10)])).await;
    expect_gap(pipeline, "retention").await;
}

#[tokio::test]
async fn records_that_retention_deleted_after_they_were_applied_are_no_gap() {
    let mut pipeline = applied_and_stopped().await;
    pipeline.kafka.delete_records(&pipeline.shared_topic(), &BTreeMap::from([(0, APPLIED as i64)])).await;
    produce(&pipeline, 1).await;
    pipeline.eu_mut().subscriber.start();
    pipeline.await_consumed().await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "").await, 0.0);
    pipeline.finish().await;
}

/// The house is full (8,192 records) and consumption paused, when retention deletes what the consumer would have read next of one partition; the others
/// have records enough for it to go on with.
#[tokio::test]
async fn retention_that_overtakes_a_paused_partition_is_a_gap_and_what_follows_is_applied() {
    let mut pipeline = Pipeline::builder().relays(0).redis_through_proxy().start().await;
    let topic = pipeline.shared_topic();
    let versions = |keys: &[Key]| keys.iter().map(|key| (key.clone(), Version::new(1, 1))).collect::<Vec<_>>();
    let (first, backlog) = (pipeline.keys(30), pipeline.keys(27_000));
    pipeline.produce(&versions(&first)).await;
    pipeline.await_consumed().await;
    pipeline.eu().proxy().cut();
    for part in backlog.chunks(4_500) {
        pipeline.produce(&versions(part)).await;
    }
    pipeline.eu().subscriber.await_metric("subscriber_paused", "", |paused| paused == 1.0).await;
    let (_, end) = pipeline.kafka.bounds(&topic).await[&2];
    pipeline.kafka.delete_records(&topic, &BTreeMap::from([(2, end)])).await;
    pipeline.eu().proxy().restore();
    expect_one_gap_and_life_after_it(&mut pipeline).await;
    pipeline.eu().subscriber.await_metric("subscriber_paused", "", |paused| paused == 0.0).await;
    pipeline.finish().await;
}

/// The cache holds the first pipeline of a replay back, so that the replay waits with most of its records unread, when retention deletes them.
#[tokio::test]
async fn retention_that_overtakes_a_replay_is_a_gap_and_the_replay_ends() {
    let mut pipeline = Pipeline::builder().relays(0).partitions(1).redis_through_proxy().start().await;
    produce(&pipeline, APPLIED).await;
    pipeline.await_consumed().await;
    assert!(pipeline.eu_mut().subscriber.terminate().success());
    // Far more than a replay has in flight (4,096) and fetches ahead (5,000 records and a response of 1 MB).
    for _ in 0..4 {
        produce(&pipeline, 5_000).await;
    }
    pipeline.eu().proxy().hold_on(b"EVALSHA");
    pipeline.eu_mut().subscriber.start();
    pipeline.eu().proxy().await_held().await;
    pipeline.kafka.delete_records(&pipeline.shared_topic(), &BTreeMap::from([(0, 20_000)])).await;
    pipeline.eu().proxy().release();
    expect_one_gap_and_life_after_it(&mut pipeline).await;
    pipeline.finish().await;
}

async fn expect_one_gap_and_life_after_it(pipeline: &mut Pipeline) {
    let (subscriber, cache) = (&pipeline.eu().subscriber, &pipeline.eu().cache);
    subscriber.await_metric("subscriber_gaps_total", "retention", |count| count >= 1.0).await;
    // Enough to be in every partition.
    let after: Vec<_> = (0..60).map(|number| pipeline.key(&format!("after:{number}"))).collect();
    cache.put_all(&after, "old").await;
    pipeline.produce(&after.iter().map(|key| (key.clone(), Version::new(1, 1))).collect::<Vec<_>>()).await;
    cache.await_all_gone(&after).await;
    pipeline.await_consumed().await;
    subscriber.await_metric("subscriber_replaying_partitions", "", |count| count == 0.0).await;
    assert_eq!(subscriber.metric("subscriber_gaps_total", "").await, 1.0, "one loss is one gap");
    pipeline.expect_error(ERROR);
}

#[tokio::test]
async fn an_epoch_that_loses_commits_is_a_gap_once_for_the_region() {
    let mut pipeline = Pipeline::builder().relays(0).start().await;
    let key = pipeline.key("product:7");
    let epochs =
        [(1, EpochCause::First), (2, EpochCause::Crash), (3, EpochCause::Promoted), (3, EpochCause::Promoted), (4, EpochCause::Restart)];
    for (position, (epoch, cause)) in epochs.into_iter().enumerate() {
        let value = records::invalidation_from(records::BY_HAND, Some(cause), &key, Version::new(epoch, position as u64));
        pipeline.kafka.produce(&pipeline.shared_topic(), Some(key.as_str().as_bytes()), Some(&value)).await;
        // A region that is just starting may hear of the last epoch first, live, and of the others by replay: then nothing was cached before it.
        eventually("the record is applied", async || pipeline.eu().cache.floor(&key).await.filter(|floor| floor.version.epoch >= epoch))
            .await;
    }
    pipeline.await_consumed().await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "new_epoch").await, 1.0);
    // The cache remembers which epochs were dealt with.
    assert!(pipeline.eu_mut().subscriber.terminate().success());
    pipeline.eu_mut().subscriber.start();
    pipeline.await_ready().await;
    let after = pipeline.key("after");
    pipeline.produce(&[(after.clone(), Version::new(4, 9))]).await;
    pipeline.eu().cache.await_applied(&after).await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "new_epoch").await, 0.0);
    pipeline.expect_error(ERROR);
    pipeline.finish().await;
}

/// As after a restore from an old backup: the topics know a later epoch than the database.
#[tokio::test]
async fn a_restored_database_is_a_gap_for_every_region() {
    let mut pipeline = Pipeline::builder().two_regions().start().await;
    let key = pipeline.key("product:7");
    let mut product = pipeline.product().await;
    commit(&mut product, key.as_str()).await;
    let before = pipeline.eu().cache.await_applied(&key).await.version;
    pipeline.us().cache.await_applied(&key).await;
    assert!(pipeline.relays[0].terminate().success());
    product.execute("update recant.source set epoch = epoch - 1000; delete from recant.incarnation").await.unwrap();
    pipeline.relays[0].start();
    commit(&mut product, key.as_str()).await;
    for region in &pipeline.regions {
        let after = region.cache.await_applied_above(&key, Some(before)).await.version;
        assert!(after.epoch > before.epoch);
        region.subscriber.await_metric("subscriber_gaps_total", "new_epoch", |count| count >= 1.0).await;
    }
    assert_eq!(pipeline.relays[0].metric("relay_epoch_raises_total", "restored").await, 1.0);
    pipeline.expect_error(ERROR);
    pipeline.expect_error("commits may be lost");
    pipeline.finish().await;
}
