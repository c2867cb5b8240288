//! Promise 8: nothing is unbounded.

use recant_schema::version::Version;
use recant_tests::Pipeline;

/// The subscriber's own bound (8192) and the batch that may come on top of it.
const MAX_IN_FLIGHT: f64 = 8_192.0 + 256.0;

/// Most memory that the subscriber may take with a backlog before it, in kB: an optimised one takes 27 MiB, an unoptimised one some more.
const MAX_RESIDENT_KB: u64 = 120 * 1024;

fn resident_kb(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has a size");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[tokio::test]
async fn with_the_cache_away_the_subscriber_holds_a_bounded_backlog_and_loses_nothing() {
    let pipeline = Pipeline::builder().relays(0).redis_through_proxy().start().await;
    let keys = pipeline.keys(20_000);
    pipeline.eu().cache.put_all(&keys, "value").await;
    pipeline.eu().proxy().cut();
    let invalidations: Vec<_> = keys.iter().map(|key| (key.clone(), Version::new(1, 1))).collect();
    for part in invalidations.chunks(5_000) {
        pipeline.produce(part).await;
    }
    let subscriber = &pipeline.eu().subscriber;
    let in_flight = subscriber.await_metric("subscriber_in_flight_records", "", |count| count >= 8_192.0).await;
    assert!(in_flight <= MAX_IN_FLIGHT, "{in_flight} in flight");
    subscriber.await_metric("subscriber_paused", "", |paused| paused == 1.0).await;
    subscriber.await_metric("subscriber_lag_records", "", |lag| lag >= 10_000.0).await;
    let resident = resident_kb(subscriber.id());
    assert!(resident < MAX_RESIDENT_KB, "{resident} kB resident");
    assert!(subscriber.metric("subscriber_in_flight_records", "").await <= MAX_IN_FLIGHT);
    pipeline.eu().proxy().restore();
    pipeline.eu().cache.await_all_gone(&keys).await;
    subscriber.await_metric("subscriber_paused", "", |paused| paused == 0.0).await;
    pipeline.finish().await;
}

/// Poison weighs more than other records, since it is kept whole until it is set aside.
#[tokio::test]
async fn a_flood_of_poison_is_set_aside_at_a_bounded_pace() {
    let pipeline = Pipeline::builder().relays(0).start().await;
    let garbage = vec![b'x'; 30_000];
    let records: Vec<_> =
        (0..1_000).map(|number| (pipeline.key(&format!("p:{number}")).as_str().as_bytes().to_vec(), garbage.clone())).collect();
    pipeline.kafka.produce_all(&pipeline.shared_topic(), &records).await;
    let subscriber = &pipeline.eu().subscriber;
    subscriber.await_metric("subscriber_dead_letters_total", "malformed", |count| count >= 1_000.0).await;
    pipeline.await_consumed().await;
    let resident = resident_kb(subscriber.id());
    assert!(resident < MAX_RESIDENT_KB, "{resident} kB resident");
    pipeline.finish().await;
}
