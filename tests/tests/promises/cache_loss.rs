//! A cache that loses data: whatever it had been told after its marker is told again, and a missing entry refuses fills meanwhile.

use recant_schema::key::Key;
use recant_schema::scripts::FillReply;
use recant_schema::version::Version;
use recant_tests::private::PrivateRedis;
use recant_tests::{Pipeline, eventually};

fn first_versions(keys: &[Key]) -> Vec<(Key, Version)> {
    keys.iter().map(|key| (key.clone(), Version::new(1, 1))).collect()
}

#[tokio::test]
async fn a_cache_that_restarts_empty_gets_the_whole_topic_again() {
    let mut redis = PrivateRedis::start(&[]).await;
    let pipeline = Pipeline::builder().relays(0).redis(&redis.url()).redis_through_proxy().start().await;
    let keys = pipeline.keys(200);
    pipeline.produce(&first_versions(&keys)).await;
    pipeline.await_consumed().await;
    pipeline.eu().proxy().cut();
    redis.kill();
    redis.start_again().await;
    // What a reader had loaded before and a service warms up with now.
    pipeline.eu().cache.put_all(&keys, "old").await;
    pipeline.eu().proxy().restore();
    pipeline.eu().cache.await_all_gone(&keys).await;
    pipeline.finish().await;
}

/// Replays start at the marker: with no margin, what was applied before it is not told again.
#[tokio::test]
async fn a_cache_restored_from_an_old_snapshot_is_replayed_from_its_marker() {
    let mut redis = PrivateRedis::start(&[]).await;
    let builder = Pipeline::builder().relays(0).partitions(1).subscriber("replay_margin_ms", "0").subscriber("marker_interval_ms", "50");
    let pipeline = builder.redis(&redis.url()).redis_through_proxy().start().await;
    let (cache, marker) = (&pipeline.eu().cache, format!("recant:m:{}", pipeline.eu().group));
    let keys = pipeline.keys(100);
    let (before, after) = keys.split_at(50);
    // The broker's clock has moved on before the last of them: a replay starts at a time.
    for part in [&before[..49], &before[49..]] {
        pipeline.produce(&first_versions(part)).await;
        pipeline.await_consumed().await;
    }
    let field = format!("{}/0", pipeline.shared_topic());
    let point = eventually("the marker is written", async || {
        let point: Option<String> = cache.command(&["HGET", &marker, &field]).await;
        point.filter(|point| point.starts_with("49:"))
    })
    .await;
    pipeline.produce(&first_versions(after)).await;
    pipeline.await_consumed().await;

    pipeline.eu().proxy().cut();
    redis.kill();
    redis.start_again().await;
    cache.put_all(&keys, "of the snapshot").await;
    let _: i64 = cache.command(&["HSET", &marker, &field, &point]).await;
    pipeline.eu().proxy().restore();
    cache.await_all_gone(after).await;
    // The record at the marker itself is read again, to see that the log is still the same one.
    assert_eq!(cache.with_value(before).await, before[..49]);
    pipeline.finish().await;
}

#[tokio::test]
async fn a_restart_of_the_cache_in_the_middle_of_the_work_loses_nothing() {
    let mut redis = PrivateRedis::start(&[]).await;
    let pipeline = Pipeline::builder().relays(0).redis(&redis.url()).start().await;
    let (cache, keys) = (&pipeline.eu().cache, pipeline.keys(3_000));
    for part in keys.chunks(500) {
        pipeline.produce(&first_versions(part)).await;
        if part[0] == keys[1_500] {
            eventually("some are applied", async || cache.floor(&keys[100]).await).await;
            redis.kill();
            redis.start_again().await;
        }
    }
    for key in &keys {
        eventually("a floor that the restarted cache has", async || cache.floor(key).await).await;
    }
    pipeline.finish().await;
}

#[tokio::test]
async fn a_flushed_cache_refuses_old_fills_at_once_and_gets_the_topic_again_on_a_new_connection() {
    let redis = PrivateRedis::start(&[]).await;
    let builder = Pipeline::builder().relays(0).redis(&redis.url()).redis_through_proxy();
    // The marker is not written again before the connection is cut.
    let pipeline = builder.subscriber("marker_interval_ms", "60000").start().await;
    let (cache, keys) = (&pipeline.eu().cache, pipeline.keys(50));
    let slow = cache.read(&keys[0]).await.mark.expect("a miss leaves a mark");
    pipeline.produce(&first_versions(&keys)).await;
    pipeline.await_consumed().await;
    let () = cache.command(&["FLUSHALL"]).await;
    assert_eq!(cache.fill(&keys[0], &slow, "old").await, FillReply::MarkGone);
    cache.put_all(&keys, "old").await;
    pipeline.eu().proxy().cut();
    pipeline.eu().proxy().restore();
    cache.await_all_gone(&keys).await;
    pipeline.finish().await;
}

#[tokio::test]
async fn a_cache_that_is_full_still_deletes() {
    let redis = PrivateRedis::start(&["--maxmemory-policy", "noeviction"]).await;
    let pipeline = Pipeline::builder().relays(0).redis(&redis.url()).start().await;
    let (cache, keys) = (&pipeline.eu().cache, pipeline.keys(20));
    let mut marks = Vec::new();
    for key in &keys {
        marks.push(cache.read(key).await.mark.expect("a miss leaves a mark"));
    }
    cache.put_all(&keys, "old").await;
    // Below what an empty server uses: every write that could grow memory is refused.
    let () = cache.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    pipeline.produce(&first_versions(&keys)).await;
    cache.await_all_gone(&keys).await;
    pipeline.eu().subscriber.await_metric("subscriber_applied_total", "unlinked", |count| count >= 20.0).await;
    let () = cache.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    for (key, mark) in keys.iter().zip(marks) {
        assert_eq!(cache.fill(key, &mark, "old").await, FillReply::MarkGone, "without an entry nothing is filled");
    }
    pipeline.finish().await;
}

#[tokio::test]
async fn flushed_scripts_are_loaded_again_without_anybody_noticing() {
    let redis = PrivateRedis::start(&[]).await;
    let pipeline = Pipeline::builder().relays(0).redis(&redis.url()).start().await;
    let (cache, keys) = (&pipeline.eu().cache, pipeline.keys(40));
    cache.put_all(&keys, "old").await;
    for part in keys.chunks(10) {
        let () = cache.command(&["SCRIPT", "FLUSH"]).await;
        pipeline.produce(&first_versions(part)).await;
        cache.await_all_gone(part).await;
    }
    assert_eq!(pipeline.eu().subscriber.http("/readyz").await.expect("it answers").status, 200);
    pipeline.finish().await;
}
