//! Promise 2: at least once, whatever single process is killed at whatever instant; any permutation and repetition leaves the cache right.

use crate::race::{Filling, Race};
use recant_schema::key::Key;
use recant_schema::scripts::FillReply;
use recant_schema::version::Version;
use recant_tests::source::{commit_all, outbox_rows};
use recant_tests::{Pipeline, eventually};
use std::time::Duration;

async fn published(pipeline: &Pipeline, key: &Key) -> usize {
    let records = pipeline.kafka.read_all(&pipeline.shared_topic()).await;
    records.iter().filter(|record| record.invalidates(key.as_str())).count()
}

async fn await_retired(pipeline: &Pipeline) {
    let mut product = pipeline.product().await;
    eventually("every row is retired", async || (outbox_rows(&mut product).await == 0).then_some(())).await;
}

/// Its COMMIT is held, and it is killed then.
#[tokio::test]
async fn a_crash_of_the_relay_after_publish_republishes_and_loses_nothing() {
    let mut pipeline = Pipeline::builder().postgres_through_proxy().start().await;
    let key = pipeline.key("product:7");
    // The first claim raises the epoch, with a COMMIT of its own.
    let warm = pipeline.key("warm");
    pipeline.commit(&warm).await;
    pipeline.eu().cache.await_applied(&warm).await;
    await_retired(&pipeline).await;

    pipeline.postgres_proxy().hold_on(b"COMMIT");
    pipeline.commit(&key).await;
    pipeline.postgres_proxy().await_held().await;
    let first = pipeline.eu().cache.await_applied(&key).await;
    assert_eq!(published(&pipeline, &key).await, 1);
    pipeline.relays[0].kill();
    pipeline.postgres_proxy().await_dropped().await;
    pipeline.postgres_proxy().release();
    assert_eq!(outbox_rows(&mut pipeline.product().await).await, 1, "what was not retired is still there");

    pipeline.relays[0].start();
    pipeline.eu().cache.await_applied_above(&key, Some(first.version)).await;
    await_retired(&pipeline).await;
    assert_eq!(published(&pipeline, &key).await, 2);
    pipeline.finish().await;
}

/// The answer to its claim is held, so it has locked the rows and published nothing, and it is killed then.
#[tokio::test]
async fn a_crash_of_the_relay_after_claim_releases_the_rows_and_loses_nothing() {
    let mut pipeline = Pipeline::builder().postgres_through_proxy().start().await;
    let key = pipeline.key("product:7");
    pipeline.eu().cache.load(&key, "old").await;
    pipeline.postgres_proxy().hold_replies_on(key.as_str().as_bytes());
    pipeline.commit(&key).await;
    pipeline.postgres_proxy().await_held().await;
    pipeline.relays[0].kill();
    pipeline.postgres_proxy().await_dropped().await;
    pipeline.postgres_proxy().release();
    assert_eq!(published(&pipeline, &key).await, 0);

    pipeline.relays[0].start();
    pipeline.eu().cache.await_applied(&key).await;
    await_retired(&pipeline).await;
    assert_eq!(published(&pipeline, &key).await, 1);
    pipeline.finish().await;
}

/// The names of relays that hold a claim at this moment.
async fn holders(pipeline: &Pipeline) -> Vec<String> {
    let query = "select application_name from pg_stat_activity where datname = current_database() and state = 'idle in transaction'";
    sqlx::query_scalar(query).fetch_all(&mut pipeline.product().await).await.unwrap()
}

#[tokio::test]
async fn rows_of_a_killed_relay_are_published_by_the_other_at_once() {
    let mut pipeline = Pipeline::builder().relays(2).postgres_through_proxy().start().await;
    let key = pipeline.key("product:7");
    pipeline.eu().cache.load(&key, "old").await;
    pipeline.postgres_proxy().hold_replies_on(key.as_str().as_bytes());
    pipeline.commit(&key).await;
    pipeline.postgres_proxy().await_held().await;
    let first_holds = holders(&pipeline).await.iter().any(|name| name.ends_with("relay-1"));
    pipeline.relays[usize::from(!first_holds)].kill();
    pipeline.postgres_proxy().await_dropped().await;
    pipeline.postgres_proxy().release();
    pipeline.eu().cache.await_applied(&key).await;
    await_retired(&pipeline).await;
    assert_eq!(published(&pipeline, &key).await, 1);
    pipeline.finish().await;
}

/// It is stopped, not killed: its connection stays, and only the server's own time-outs free what it holds.
#[tokio::test]
async fn rows_of_a_frozen_relay_are_free_again_within_thirty_seconds() {
    let mut pipeline = Pipeline::builder().relays(2).postgres_through_proxy().start().await;
    let key = pipeline.key("product:7");
    pipeline.postgres_proxy().hold_replies_on(key.as_str().as_bytes());
    pipeline.commit(&key).await;
    pipeline.postgres_proxy().await_held().await;
    let first_holds = holders(&pipeline).await.iter().any(|name| name.ends_with("relay-1"));
    let frozen = usize::from(!first_holds);
    pipeline.relays[frozen].signal("STOP");
    pipeline.postgres_proxy().release();
    // `await_applied` waits for thirty seconds.
    pipeline.eu().cache.await_applied(&key).await;
    pipeline.relays[frozen].kill();
    await_retired(&pipeline).await;
    pipeline.finish().await;
}

/// Neither offsets nor marker are written before it is killed; what was filled meanwhile survives the repeats.
#[tokio::test]
async fn a_crash_of_the_subscriber_between_apply_and_commit_loses_nothing() {
    let builder = Pipeline::builder().subscriber("commit_interval_ms", "60000").subscriber("marker_interval_ms", "60000");
    let mut pipeline = builder.start().await;
    let keys = pipeline.keys(60);
    let (before, during) = keys.split_at(40);
    let mut product = pipeline.product().await;
    let texts = |keys: &[Key]| keys.iter().map(|key| key.as_str().to_owned()).collect::<Vec<_>>();
    pipeline.eu().cache.put_all(&keys, "old").await;
    commit_all(&mut product, &texts(before)).await;
    pipeline.eu().cache.await_all_gone(before).await;
    for key in &before[..20] {
        assert_eq!(pipeline.eu().cache.load(key, "fresh").await, FillReply::Filled);
    }
    pipeline.eu_mut().subscriber.kill();
    let committed = pipeline.kafka.committed(&pipeline.eu().group, &pipeline.shared_topic()).await;
    assert!(committed.is_empty(), "nothing was committed before the crash: {committed:?}");

    commit_all(&mut product, &texts(during)).await;
    pipeline.eu_mut().subscriber.start();
    pipeline.eu().cache.await_all_gone(during).await;
    // The repeats of all forty are in, too, when the replay is over.
    pipeline.eu().subscriber.await_metric("subscriber_applied_total", "repeated", |count| count >= 40.0).await;
    assert_eq!(pipeline.eu().cache.with_value(&keys).await, before[..20]);
    pipeline.finish().await;
}

#[tokio::test]
async fn killing_everything_in_the_middle_of_two_thousand_rows_loses_none() {
    // With no margin, nothing but the watermark protects what was delivered and not answered.
    let mut pipeline = Pipeline::builder().relays(2).relay("claim_limit", "50").subscriber("replay_margin_ms", "0").start().await;
    let keys = pipeline.keys(2_000);
    pipeline.eu().cache.put_all(&keys, "value").await;
    let mut product = pipeline.product().await;
    for part in keys.chunks(100) {
        let texts: Vec<_> = part.iter().map(|key| key.as_str().to_owned()).collect();
        commit_all(&mut product, &texts).await;
    }
    eventually("some rows have gone all the way", async || (pipeline.eu().cache.with_value(&keys).await.len() < 1_900).then_some(())).await;
    pipeline.relays[0].kill();
    pipeline.eu_mut().subscriber.kill();
    pipeline.relays[1].kill();
    pipeline.relays[0].start();
    pipeline.relays[1].start();
    pipeline.eu_mut().subscriber.start();
    pipeline.eu().cache.await_all_gone(&keys).await;
    await_retired(&pipeline).await;
    pipeline.await_ready().await;
    pipeline.finish().await;
}

/// How long one fault lasts, and how long the pipeline has between two.
const FAULT: Duration = Duration::from_millis(300);

/// Every process killed, both servers cut off and frozen, members joining and leaving, one fault after the other.
async fn all_faults(pipeline: &mut Pipeline) {
    let mut second = pipeline.second_subscriber();
    // Not a wait for something: the fault, and the time between faults, have to last.
    let lasting = || tokio::time::sleep(FAULT);
    for round in 0..2 {
        lasting().await;
        pipeline.relays[round].kill();
        lasting().await;
        pipeline.relays[round].start();
        pipeline.eu_mut().subscriber.kill();
        lasting().await;
        pipeline.eu_mut().subscriber.start();
        pipeline.eu().proxy().cut();
        lasting().await;
        pipeline.eu().proxy().restore();
        pipeline.postgres_proxy().cut();
        lasting().await;
        pipeline.postgres_proxy().restore();
        second.start();
        lasting().await;
        pipeline.eu().proxy().freeze();
        lasting().await;
        pipeline.eu().proxy().release();
        pipeline.postgres_proxy().hold_on(b"COMMIT");
        lasting().await;
        pipeline.relays[1 - round].kill();
        pipeline.postgres_proxy().release();
        pipeline.relays[1 - round].start();
        lasting().await;
        if round == 0 { second.kill() } else { assert!(second.terminate().success()) }
    }
    assert!(second.errors().is_empty(), "{:?}", second.errors());
}

#[tokio::test]
async fn under_one_fault_after_the_other_readers_end_up_with_nothing_or_the_newest_value() {
    let builder = Pipeline::builder().relays(2).subscriber("replay_margin_ms", "0");
    let mut pipeline = builder.postgres_through_proxy().redis_through_proxy().start().await;
    let race = Race::prepare(&pipeline).await;
    let (url, cache) = (pipeline.database().url(), recant_tests::Cache::new(pipeline.eu().cache.url()));
    let (counts, ()) = tokio::join!(race.run(&url, &cache, FAULT * 18, Filling::Protocol), all_faults(&mut pipeline));
    await_retired(&pipeline).await;
    pipeline.await_consumed().await;
    let stale = race.stale(&pipeline).await;
    assert!(stale.is_empty(), "{stale:?}");
    assert!(counts.filled > 0, "{counts:?}");
    pipeline.await_ready().await;
    pipeline.finish().await;
}

/// A shuffle that is the same in every run: multiplication by a unit modulo the length.
fn shuffled<T: Clone>(items: &[T], factor: usize) -> Vec<T> {
    (0..items.len()).map(|at| items[(at * factor + factor) % items.len()].clone()).collect()
}

#[tokio::test]
async fn any_permutation_and_repetition_of_invalidations_leaves_the_cache_right() {
    let pipeline = Pipeline::builder().relays(0).start().await;
    let keys = pipeline.keys(20);
    pipeline.eu().cache.put_all(&keys, "old").await;
    let versions = [(1, 5), (1, u64::MAX), (2, 1), (2, 9), (2, 10)].map(|(epoch, position)| Version::new(epoch, position));
    let all: Vec<_> = keys.iter().flat_map(|key| versions.map(|version| (key.clone(), version))).collect();
    // 100 records: 37 and 63 share no divisor with it.
    pipeline.produce(&[shuffled(&all, 37), shuffled(&all, 63)].concat()).await;
    pipeline.await_consumed().await;
    for key in &keys {
        assert_eq!(pipeline.eu().cache.floor(key).await.map(|floor| floor.version), Some(Version::new(2, 10)), "{key}");
        assert_eq!(pipeline.eu().cache.load(key, "fresh").await, FillReply::Filled);
    }
    pipeline.produce(&shuffled(&all, 71)).await;
    pipeline.await_consumed().await;
    assert_eq!(pipeline.eu().cache.with_value(&keys).await, keys, "repeats keep what is fresh");
    pipeline.finish().await;
}
