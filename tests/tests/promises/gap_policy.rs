//! Promise 6, its second half: the region's gap policy runs, once for each gap, whatever is killed meanwhile.

use super::gaps::{APPLIED, ERROR, applied_and_stopped, produce, recreate};
use recant_schema::key::Key;
use recant_schema::labels::EpochCause;
use recant_schema::scripts::FillReply;
use recant_schema::version::Version;
use recant_tests::private::PrivateRedis;
use recant_tests::{Pipeline, eventually, records};
use std::collections::BTreeMap;
use std::time::Duration;

/// A record of an epoch that began with a promotion, and so may have lost commits. The key is nobody's value.
async fn promote(pipeline: &Pipeline, epoch: u64) {
    let key = pipeline.key("of-the-new-epoch");
    let value = records::invalidation_from(records::BY_HAND, Some(EpochCause::Promoted), &key, Version::new(epoch, 1));
    pipeline.kafka.produce(&pipeline.shared_topic(), Some(key.as_str().as_bytes()), Some(&value)).await;
}

/// Started with the policy `stop`, it meets the gap and ends; started once more it goes on.
async fn expect_one_stop(mut pipeline: Pipeline, cause: &str) {
    let key = pipeline.key("after");
    let status = pipeline.eu_mut().subscriber.await_end();
    assert_eq!(status.code(), Some(1));
    let log = pipeline.eu().subscriber.log();
    let lines: Vec<_> = log.lines().filter(|line| !line.starts_with('{')).collect();
    let [line] = lines.as_slice() else { panic!("one line for a person, not {lines:?}") };
    assert!(line.starts_with("subscriber: ") && line.contains("gap_policy is stop"), "{line}");

    pipeline.eu().cache.put(&key, "old").await;
    pipeline.eu_mut().subscriber.start();
    pipeline.produce(&[(key.clone(), Version::new(2, 2))]).await;
    pipeline.eu().cache.await_applied(&key).await;
    pipeline.await_consumed().await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "").await, 0.0, "a gap ({cause}) is met once");
    assert!(!line.contains("could not invalidations"), "the line is a sentence: {line}");
    pipeline.expect_error(ERROR);
    pipeline.expect_error("gap_policy is stop");
    pipeline.finish().await;
}

#[tokio::test]
async fn with_the_policy_stop_a_recreated_topic_ends_the_subscriber_once() {
    let mut pipeline = applied_and_stopped().await;
    recreate(&pipeline).await;
    pipeline.eu_mut().subscriber.set("gap_policy", "stop");
    pipeline.eu_mut().subscriber.start();
    expect_one_stop(pipeline, "recreated").await;
}

#[tokio::test]
async fn with_the_policy_stop_records_lost_to_retention_end_the_subscriber_once() {
    let mut pipeline = applied_and_stopped().await;
    produce(&pipeline, APPLIED).await;
    pipeline.kafka.delete_records(&pipeline.shared_topic(), &BTreeMap::from([(0, APPLIED as i64 + 10)])).await;
    pipeline.eu_mut().subscriber.set("gap_policy", "stop");
    pipeline.eu_mut().subscriber.start();
    expect_one_stop(pipeline, "retention").await;
}

#[tokio::test]
async fn with_the_policy_stop_an_epoch_that_loses_commits_ends_the_subscriber_once() {
    let pipeline = Pipeline::builder().relays(0).partitions(1).subscriber("gap_policy", "stop").start().await;
    produce(&pipeline, APPLIED).await;
    pipeline.await_consumed().await;
    promote(&pipeline, 2).await;
    expect_one_stop(pipeline, "new_epoch").await;
}

/// A region with the policy `sweep` that has heard of the source: the next promotion is a gap. Its Redis is its own, since a sweep looks at every key.
async fn swept_region(redis: &PrivateRedis, keys_per_second: &str) -> Pipeline {
    let builder = Pipeline::builder().relays(0).redis(&redis.url()).subscriber("marker_interval_ms", "100");
    let pipeline = builder.subscriber("gap_policy", "sweep").subscriber("sweep_keys_per_second", keys_per_second).start().await;
    pipeline.produce(&[(pipeline.key("floored"), Version::new(1, 7))]).await;
    pipeline.eu().cache.await_applied(&pipeline.key("floored")).await;
    pipeline
}

async fn await_swept(pipeline: &Pipeline) {
    pipeline.eu().subscriber.await_metric("subscriber_sweeps_total", "", |count| count >= 1.0).await;
    pipeline.eu().subscriber.await_metric("subscriber_sweeping", "", |sweeping| sweeping == 0.0).await;
    let marker = format!("recant:m:{}", pipeline.eu().group);
    eventually("no sweep is owed any more", async || {
        let fields: Vec<String> = pipeline.eu().cache.command(&["HKEYS", &marker]).await;
        (!fields.iter().any(|field| field.starts_with("sweep/"))).then_some(())
    })
    .await;
}

#[tokio::test]
async fn with_the_policy_sweep_a_lossy_epoch_forgets_every_key_below_the_prefixes_and_nothing_else() {
    let redis = PrivateRedis::start(&[]).await;
    let mut pipeline = swept_region(&redis, "20000").await;
    let (cache, floored, slow) = (&pipeline.eu().cache, pipeline.key("floored"), pipeline.key("slow"));
    let keys = [pipeline.keys(700), vec![floored.clone(), pipeline.key("{cart}:1"), pipeline.key("naïve?*[x]")]].concat();
    cache.put_all(&keys, "of the lost commits").await;
    let _: i64 = cache.command(&["HSET", pipeline.key("a-hash").as_str(), "field", "value"]).await;
    let foreign = ["v1:shop:1", "v2:another:1", "v2", "recant:theirs", "recant:t:v1:shop:1", "session"];
    for name in foreign {
        let () = cache.command(&["SET", name, "theirs"]).await;
    }
    let floor = cache.floor(&floored).await;
    let mark = cache.read(&slow).await.mark.expect("a miss leaves a mark");

    promote(&pipeline, 2).await;
    await_swept(&pipeline).await;
    assert_eq!(cache.with_value(&[keys, vec![pipeline.key("a-hash")]].concat()).await, []);
    assert_eq!(cache.fill(&slow, &mark, "of the lost commits").await, FillReply::MarkGone);
    assert_eq!(cache.floor(&floored).await, floor, "floors stay");
    for name in foreign {
        assert_eq!(cache.command::<Option<String>>(&["GET", name]).await.as_deref(), Some("theirs"), "{name} is not ours");
    }
    // The same epoch again, and an epoch that lost nothing.
    promote(&pipeline, 2).await;
    pipeline.produce(&[(floored.clone(), Version::new(3, 1))]).await;
    pipeline.await_consumed().await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_sweeps_total", "").await, 1.0);
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "").await, 1.0);
    pipeline.expect_error(ERROR);
    pipeline.finish().await;
}

#[tokio::test]
async fn a_crash_in_the_middle_of_a_sweep_resumes_it_at_the_next_start() {
    let redis = PrivateRedis::start(&[]).await;
    // One look at 500 keys every five seconds.
    let mut pipeline = swept_region(&redis, "100").await;
    let keys = pipeline.keys(1_000);
    pipeline.eu().cache.put_all(&keys, "old").await;
    promote(&pipeline, 2).await;
    eventually("some are forgotten", async || (pipeline.eu().cache.with_value(&keys).await.len() < keys.len()).then_some(())).await;
    pipeline.eu_mut().subscriber.kill();
    assert!(!pipeline.eu().cache.with_value(&keys).await.is_empty(), "it was killed in the middle");

    pipeline.eu_mut().subscriber.set("sweep_keys_per_second", "1000000");
    pipeline.eu_mut().subscriber.start();
    pipeline.eu().cache.await_all_gone(&keys).await;
    await_swept(&pipeline).await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "").await, 0.0, "the gap was met before the crash");
    pipeline.expect_error(ERROR);
    pipeline.finish().await;
}

/// Slow readers, which missed and loaded before the promotion, fill all the time; fast ones load what the promoted database holds.
#[tokio::test]
async fn readers_that_fill_during_a_sweep_leave_nothing_older_than_the_database() {
    let redis = PrivateRedis::start(&[]).await;
    // Half a second for each of the two passes over the values and entries here.
    let mut pipeline = swept_region(&redis, "5000").await;
    let (cache, subscriber) = (&pipeline.eu().cache, &pipeline.eu().subscriber);
    let cached = pipeline.keys(1_500);
    let missed: Vec<_> = (0..500).map(|number| pipeline.key(&format!("missed:{number}"))).collect();
    cache.put_all(&cached, "old").await;
    let mut slow = Vec::new();
    for key in &missed {
        slow.push((key, cache.read(key).await.mark.expect("a miss leaves a mark")));
    }
    promote(&pipeline, 2).await;

    let fast = async {
        for at in (0..).map(|step: usize| step * 7 % cached.len()) {
            read_through(&cached[at], cache).await;
        }
    };
    let filled = async {
        let mut accepted = 0;
        for (key, mark) in &slow {
            accepted += i32::from(cache.fill(key, mark, "old").await == FillReply::Filled);
            // Not a wait for something: spreads the fills over the sweep.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        subscriber.await_metric("subscriber_sweeps_total", "", |count| count >= 1.0).await;
        accepted
    };
    let accepted = tokio::select! { accepted = filled => accepted, () = fast => unreachable!("readers go on") };
    assert!(accepted > 0, "no old value was filled before the sweep came by");
    for key in cached.iter().chain(&missed) {
        let value = cache.get(key).await;
        assert!(matches!(value.as_deref(), None | Some("new")), "{key} still has {value:?}");
    }
    pipeline.expect_error(ERROR);
    pipeline.finish().await;
}

/// A reader by the protocol, on a database that holds "new" for every key.
async fn read_through(key: &Key, cache: &recant_tests::Cache) {
    if cache.get(key).await.is_none()
        && let Some(mark) = cache.read(key).await.mark
    {
        cache.fill(key, &mark, "new").await;
    }
}
