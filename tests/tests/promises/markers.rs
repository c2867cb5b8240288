//! A marker that somebody or something has spoilt: what cannot be read counts as absent, is replayed, and is written anew.

use recant_schema::version::Version;
use recant_tests::{Pipeline, eventually};
use redis::Pipeline as Commands;

/// The marker's name, where there is no cluster.
fn marker(pipeline: &Pipeline) -> String {
    format!("recant:m:{}", pipeline.eu().group)
}

/// Starts the subscriber on a topic with one record per key; all of it is applied, and the marker tells so.
async fn expect_everything_applied(pipeline: &mut Pipeline) {
    let keys = pipeline.keys(30);
    pipeline.eu().cache.put_all(&keys, "old").await;
    let records: Vec<_> = keys.iter().map(|key| (key.clone(), Version::new(1, 1))).collect();
    pipeline.produce(&records).await;
    pipeline.eu_mut().subscriber.start();
    pipeline.await_ready().await;
    let cache = &pipeline.eu().cache;
    cache.await_all_gone(&keys).await;
    let (marker, topic) = (marker(pipeline), pipeline.shared_topic());
    for (partition, (_, high)) in pipeline.kafka.bounds(&topic).await {
        let (field, wanted) = (format!("{topic}/{partition}"), format!("{}:", high - 1));
        eventually(&format!("the marker says {wanted} of partition {partition}"), async || {
            let point: Option<String> = cache.command(&["HGET", &marker, &field]).await;
            (high == 0 || point.is_some_and(|point| point.starts_with(&wanted))).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_hostile_marker_never_stops_a_subscriber() {
    let mut pipeline = Pipeline::builder().relays(0).subscriber("marker_interval_ms", "100").without_subscribers().start().await;
    let (topic, marker) = (pipeline.shared_topic(), marker(&pipeline));
    let point = |partition: u32| format!("{topic}/{partition}").into_bytes();
    let fields: [(Vec<u8>, &[u8]); 12] = [
        (b"\xff\xfe".to_vec(), b"1:1"),
        ([&point(0)[..], b"\xff"].concat(), b"1:1"),
        (point(0), b"9223372036854775807:9223372036854775807"),
        (point(1), b"\xff\xfe"),
        (point(2), b"-9223372036854775808:-1"),
        (point(77), b"1:1"),
        (format!("{topic}/99999999999999999999").into_bytes(), b"1:1"),
        (b"epoch/by-hand".to_vec(), b"18446744073709551616:\xff"),
        (b"epoch/".to_vec(), b"18446744073709551615:18446744073709551615,"),
        (b"sweep/\xff".to_vec(), b"owed"),
        (b"sweep/".to_vec(), b""),
        (b"".to_vec(), b""),
    ];
    let mut commands = Commands::new();
    for (name, value) in fields {
        commands.cmd("HSET").arg(&marker).arg(name).arg(value).ignore();
    }
    let () = pipeline.eu().cache.run(&commands).await;
    expect_everything_applied(&mut pipeline).await;
    assert_eq!(pipeline.eu().subscriber.metric("subscriber_gaps_total", "").await, 0.0);
    pipeline.finish().await;
}

/// The largest offset that still has a successor, at the end of time: a log that is shorter, and so another one.
#[tokio::test]
async fn a_marker_that_claims_the_end_of_time_is_a_gap_and_everything_is_applied() {
    let mut pipeline = Pipeline::builder().relays(0).subscriber("marker_interval_ms", "100").without_subscribers().start().await;
    let field = format!("{}/0", pipeline.shared_topic());
    let far = "9223372036854775806:9223372036854775807";
    let _: i64 = pipeline.eu().cache.command(&["HSET", &marker(&pipeline), &field, far]).await;
    expect_everything_applied(&mut pipeline).await;
    pipeline.eu().subscriber.await_metric("subscriber_gaps_total", "recreated", |count| count == 1.0).await;
    pipeline.expect_error(super::gaps::ERROR);
    pipeline.finish().await;
}

#[tokio::test]
async fn something_else_at_the_markers_name_never_stops_a_subscriber() {
    let builder = Pipeline::builder().relays(0).subscriber("marker_interval_ms", "100").redis_through_proxy();
    let mut pipeline = builder.without_subscribers().start().await;
    let () = pipeline.eu().cache.command(&["SET", &marker(&pipeline), "theirs"]).await;
    expect_everything_applied(&mut pipeline).await;

    // Also while it runs: markers cannot be written then, and a new connection replays and puts it right.
    let () = pipeline.eu().cache.command(&["SET", &marker(&pipeline), "theirs"]).await;
    let keys = pipeline.keys(3);
    pipeline.eu().cache.put_all(&keys, "old").await;
    pipeline.produce(&keys.iter().map(|key| (key.clone(), Version::new(1, 2))).collect::<Vec<_>>()).await;
    pipeline.eu().cache.await_all_gone(&keys).await;
    pipeline.eu().proxy().cut();
    pipeline.eu().proxy().restore();
    eventually("the marker is a hash again", async || {
        let kind: String = pipeline.eu().cache.command(&["TYPE", &marker(&pipeline)]).await;
        (kind == "hash").then_some(())
    })
    .await;
    pipeline.finish().await;
}
