//! Operating it: stopping, health, readiness, metrics.

use recant_tests::source::{commit, commit_all, outbox_rows};
use recant_tests::wait::eventually_within;
use recant_tests::{Daemon, Pipeline, eventually};
use std::time::{Duration, Instant};

/// The default `shutdown_grace_ms` of both services.
const GRACE: Duration = Duration::from_secs(10);

/// What a process that is told to end at once may take on a loaded machine.
const AT_ONCE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy)]
enum Stopped {
    Relay,
    Subscriber,
}

/// Rows keep coming while the process is asked to stop, and after it has.
async fn a_stop_under_load_loses_nothing(stopped: Stopped) {
    let mut pipeline = Pipeline::start().await;
    let keys = pipeline.keys(1_000);
    pipeline.eu().cache.put_all(&keys, "value").await;
    let mut product = pipeline.product().await;
    let mut taken = Duration::ZERO;
    for (number, part) in keys.chunks(10).enumerate() {
        let texts: Vec<_> = part.iter().map(|key| key.as_str().to_owned()).collect();
        commit_all(&mut product, &texts).await;
        if number == 50 {
            let daemon = match stopped {
                Stopped::Relay => &mut pipeline.relays[0],
                Stopped::Subscriber => &mut pipeline.regions[0].subscriber,
            };
            let asked = Instant::now();
            assert_eq!(daemon.terminate().code(), Some(0));
            taken = asked.elapsed();
            daemon.start();
        }
    }
    assert!(taken < GRACE, "{taken:?}");
    pipeline.eu().cache.await_all_gone(&keys).await;
    eventually("every row is retired", async || (outbox_rows(&mut product).await == 0).then_some(())).await;
    pipeline.await_ready().await;
    pipeline.finish().await;
}

#[tokio::test]
async fn sigterm_to_the_relay_under_load_exits_0_within_the_grace_period_and_loses_nothing() {
    a_stop_under_load_loses_nothing(Stopped::Relay).await;
}

#[tokio::test]
async fn sigterm_to_the_subscriber_under_load_exits_0_within_the_grace_period_and_loses_nothing() {
    a_stop_under_load_loses_nothing(Stopped::Subscriber).await;
}

/// A pipeline whose relay has published one row and cannot retire it.
async fn relay_held_before_retiring(shutdown_grace_ms: &str) -> Pipeline {
    let builder = Pipeline::builder().postgres_through_proxy().relay("shutdown_grace_ms", shutdown_grace_ms);
    let pipeline = builder.start().await;
    let warm = pipeline.key("warm");
    pipeline.commit(&warm).await;
    pipeline.eu().cache.await_applied(&warm).await;
    let mut product = pipeline.product().await;
    eventually("the first row is retired", async || (outbox_rows(&mut product).await == 0).then_some(())).await;
    pipeline.postgres_proxy().hold_on(b"COMMIT");
    pipeline.commit(&pipeline.key("held")).await;
    pipeline.postgres_proxy().await_held().await;
    pipeline
}

#[tokio::test]
async fn shutdown_finishes_in_flight_work_within_the_grace_period() {
    let mut pipeline = relay_held_before_retiring("10000").await;
    pipeline.relays[0].signal("TERM");
    pipeline.relays[0].await_log("stopping").await;
    pipeline.postgres_proxy().release();
    assert_eq!(pipeline.relays[0].await_end().code(), Some(0));
    assert_eq!(outbox_rows(&mut pipeline.product().await).await, 0, "what was in flight is retired");
    pipeline.finish().await;
}

#[tokio::test]
async fn past_the_grace_period_claims_are_given_back_and_nothing_is_lost() {
    let mut pipeline = relay_held_before_retiring("1000").await;
    let asked = Instant::now();
    pipeline.relays[0].terminate();
    assert!(asked.elapsed() < Duration::from_millis(1_000) + AT_ONCE, "{:?}", asked.elapsed());
    pipeline.postgres_proxy().await_dropped().await;
    pipeline.postgres_proxy().release();
    let mut product = pipeline.product().await;
    assert_eq!(outbox_rows(&mut product).await, 1, "the row is back");
    pipeline.relays[0].start();
    eventually("the row is retired", async || (outbox_rows(&mut product).await == 0).then_some(())).await;
    pipeline.await_ready().await;
    pipeline.finish().await;
}

fn second_signal_exits_at_once(daemon: &mut Daemon) {
    daemon.signal("TERM");
    let asked = Instant::now();
    assert_eq!(daemon.await_end().code(), Some(130));
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
}

#[tokio::test]
async fn a_second_sigterm_ends_the_relay_at_once() {
    let mut pipeline = relay_held_before_retiring("30000").await;
    pipeline.relays[0].signal("TERM");
    pipeline.relays[0].await_log("stopping").await;
    second_signal_exits_at_once(&mut pipeline.relays[0]);
}

#[tokio::test]
async fn a_second_sigterm_ends_the_subscriber_at_once() {
    // It drains for ten commit intervals.
    let builder =
        Pipeline::builder().redis_through_proxy().subscriber("commit_interval_ms", "2000").subscriber("shutdown_grace_ms", "30000");
    let mut pipeline = builder.start().await;
    pipeline.eu().proxy().freeze();
    pipeline.commit(&pipeline.key("held")).await;
    pipeline.eu().subscriber.await_metric("subscriber_in_flight_records", "", |count| count >= 1.0).await;
    pipeline.eu().subscriber.signal("TERM");
    pipeline.eu().subscriber.await_log("stopping").await;
    second_signal_exits_at_once(&mut pipeline.eu_mut().subscriber);
}

async fn await_status(daemon: &Daemon, path: &str, status: u16) -> String {
    eventually(&format!("{path} answers {status}"), async || {
        daemon.http(path).await.filter(|answer| answer.status == status).map(|answer| answer.text)
    })
    .await
}

#[tokio::test]
async fn readyz_says_what_is_away_and_comes_back_with_it() {
    let pipeline = Pipeline::builder().postgres_through_proxy().redis_through_proxy().start().await;
    let (relay, subscriber) = (&pipeline.relays[0], &pipeline.eu().subscriber);
    pipeline.postgres_proxy().cut();
    pipeline.eu().proxy().cut();
    let reason = await_status(relay, "/readyz", 503).await;
    assert!(reason.contains("postgres: "), "{reason}");
    let reason = await_status(subscriber, "/readyz", 503).await;
    assert!(reason.contains("redis: "), "{reason}");
    for daemon in [relay, subscriber] {
        assert_eq!(daemon.http("/healthz").await.expect("it answers").status, 200, "an outage elsewhere is no reason to restart this");
    }
    let key = pipeline.key("product:7");
    pipeline.eu().cache.put(&key, "old").await;
    pipeline.commit(&key).await;
    pipeline.postgres_proxy().restore();
    pipeline.eu().proxy().restore();
    await_status(relay, "/readyz", 200).await;
    await_status(subscriber, "/readyz", 200).await;
    pipeline.eu().cache.await_applied(&key).await;
    for daemon in [relay, subscriber] {
        let warnings = daemon.log().lines().filter(|line| line.contains("\"level\":\"WARN\"")).count();
        assert!(warnings <= 4, "an outage is logged once, not with every attempt: {warnings} lines");
    }
    pipeline.finish().await;
}

#[tokio::test]
async fn a_pipeline_started_before_its_servers_waits_for_them() {
    let mut pipeline = Pipeline::builder().postgres_through_proxy().redis_through_proxy().without_subscribers().start().await;
    assert!(pipeline.relays[0].terminate().success());
    pipeline.postgres_proxy().cut();
    pipeline.eu().proxy().cut();
    pipeline.relays[0].start();
    pipeline.eu_mut().subscriber.start();
    let reason = await_status(&pipeline.relays[0], "/readyz", 503).await;
    assert!(reason.contains("postgres: "), "{reason}");
    await_status(&pipeline.eu().subscriber, "/readyz", 503).await;
    let key = pipeline.key("product:7");
    pipeline.eu().cache.put(&key, "old").await;
    pipeline.commit(&key).await;
    pipeline.postgres_proxy().restore();
    pipeline.eu().proxy().restore();
    pipeline.eu().cache.await_applied(&key).await;
    pipeline.await_ready().await;
    pipeline.finish().await;
}

/// Both live with brokers that are not there; nothing listens on port 1.
#[tokio::test]
async fn kafka_being_away_shows_in_readyz_and_ends_nobody() {
    let mut pipeline = Pipeline::start().await;
    assert!(pipeline.relays[0].terminate().success());
    assert!(pipeline.eu_mut().subscriber.terminate().success());
    let brokers = pipeline.kafka.brokers().to_owned();
    pipeline.relays[0].set("brokers", "127.0.0.1:1");
    pipeline.relays[0].set("message_timeout_ms", "1000");
    pipeline.eu_mut().subscriber.set("brokers", "127.0.0.1:1");
    pipeline.relays[0].start();
    pipeline.eu_mut().subscriber.start();
    let key = pipeline.key("product:7");
    pipeline.eu().cache.put(&key, "old").await;
    pipeline.commit(&key).await;
    for daemon in [&pipeline.relays[0], &pipeline.eu().subscriber] {
        eventually_within(Duration::from_secs(30), "readyz names kafka", async || {
            daemon.http("/readyz").await.filter(|answer| answer.status == 503 && answer.text.contains("kafka: ")).map(drop)
        })
        .await;
        assert_eq!(daemon.http("/healthz").await.expect("it answers").status, 200);
    }
    assert_eq!(outbox_rows(&mut pipeline.product().await).await, 1, "the row waits in the outbox");
    for daemon in [&mut pipeline.relays[0], &mut pipeline.regions[0].subscriber] {
        assert_eq!(daemon.terminate().code(), Some(0), "stopping needs no broker");
        daemon.set("brokers", &brokers);
        daemon.start();
    }
    pipeline.eu().cache.await_applied(&key).await;
    pipeline.await_ready().await;
    pipeline.finish().await;
}

#[tokio::test]
async fn absent_topics_show_in_readyz_with_the_command_that_creates_them() {
    let mut pipeline = Pipeline::start().await;
    let (prefix, absent) = (format!("recant-{}", pipeline.suffix), format!("absent-{}", pipeline.suffix));
    for daemon in [&mut pipeline.relays[0], &mut pipeline.regions[0].subscriber] {
        assert!(daemon.terminate().success());
        daemon.set("topic_prefix", &absent);
        daemon.start();
    }
    for daemon in [&pipeline.relays[0], &pipeline.eu().subscriber] {
        eventually("readyz names the remedy", async || {
            daemon.http("/readyz").await.filter(|answer| answer.status == 503 && answer.text.contains("relay topics")).map(drop)
        })
        .await;
    }
    let key = pipeline.key("product:7");
    pipeline.eu().cache.put(&key, "old").await;
    pipeline.commit(&key).await;
    for daemon in [&mut pipeline.relays[0], &mut pipeline.regions[0].subscriber] {
        assert!(daemon.terminate().success());
        daemon.set("topic_prefix", &prefix);
        daemon.start();
    }
    pipeline.eu().cache.await_applied(&key).await;
    pipeline.finish().await;
}

/// Colours are for terminals: in a file they are noise that no search expects.
#[tokio::test]
async fn text_logs_in_a_file_hold_no_escape_codes() {
    let mut pipeline = Pipeline::start().await;
    for (prefix, daemon) in [("relay", &mut pipeline.relays[0]), ("subscriber", &mut pipeline.regions[0].subscriber)] {
        assert!(daemon.terminate().success());
        daemon.set("log_format", "text");
        daemon.start();
        daemon.await_ready().await;
        let log = daemon.log();
        assert!(log.contains(&format!("INFO {prefix} started")), "{log}");
        assert!(!log.contains('\u{1b}'), "{log}");
    }
}

/// The names and values of labels in OpenMetrics text.
fn labels(text: &str) -> Vec<(String, String)> {
    let series = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('{')?.1.split_once('}').map(|(labels, _)| labels));
    let pairs = series.flat_map(|labels| labels.split("\",")).filter_map(|pair| pair.split_once("=\""));
    pairs.map(|(name, value)| (name.trim_matches(',').to_owned(), value.trim_end_matches('"').to_owned())).collect()
}

#[tokio::test]
async fn metrics_carry_no_key_and_no_tenant_and_only_fixed_labels() {
    let pipeline = Pipeline::start().await;
    let keys = pipeline.keys(30);
    let mut product = pipeline.product().await;
    for key in &keys {
        let call = "select recant.invalidate($1::text, tenant => $2, class => 'C3')";
        sqlx::query(call).bind(key.as_str()).bind(format!("tenant-{key}")).execute(&mut product).await.unwrap();
    }
    for key in &keys {
        pipeline.eu().cache.await_applied(key).await;
    }
    pipeline.kafka.produce(&pipeline.shared_topic(), Some(keys[0].as_str().as_bytes()), Some(b"garbage")).await;
    pipeline.await_consumed().await;
    let known = ["le", "region", "outcome", "reason", "cause", "class", "basis", "reading", "topic", "lane", "mode"];
    for daemon in [&pipeline.relays[0], &pipeline.eu().subscriber] {
        let text = daemon.metrics().await;
        assert!(text.contains("application/openmetrics-text") && text.trim_end().ends_with("# EOF"), "{text}");
        assert!(!text.contains("tenant-") && !text.contains(":product:"), "{text}");
        for (name, value) in labels(&text) {
            assert!(known.contains(&name.as_str()), "{name} is a label that nobody has agreed to");
            assert!(value.len() <= 32, "{name}={value}");
        }
    }
    let relay = &pipeline.relays[0];
    assert_eq!(relay.metric("relay_published_records_total", "").await, 30.0);
    assert_eq!(relay.metric("relay_commit_to_claimed_seconds_count", "").await, 30.0);
    let subscriber = &pipeline.eu().subscriber;
    assert_eq!(subscriber.metric("subscriber_propagation_seconds_count", "class=\"C3\"").await, 30.0);
    assert_eq!(subscriber.metric("subscriber_dead_letters_total", "malformed").await, 1.0);
    pipeline.finish().await;
}

/// Idle and broken look different: heartbeats go on without traffic, and stop with the relay.
#[tokio::test]
async fn an_idle_pipeline_shows_living_heartbeats_and_a_small_lag() {
    let mut pipeline = Pipeline::builder().relay("heartbeat_interval_ms", "100").start().await;
    let subscriber = &pipeline.eu().subscriber;
    let beats = subscriber.metric("subscriber_heartbeats_total", "").await;
    subscriber.await_metric("subscriber_heartbeats_total", "", |count| count > beats + 50.0).await;
    subscriber.await_metric("subscriber_lag_records", "", |lag| lag <= 50.0).await;
    subscriber.await_metric("subscriber_lag_seconds", "", |lag| lag > 0.0 && lag < 5.0).await;
    let mut product = pipeline.product().await;
    commit(&mut product, pipeline.key("product:7").as_str()).await;
    assert!(pipeline.relays[0].terminate().success());
    // With nobody to send heartbeats the age of the newest one grows, idle or not.
    pipeline.eu().subscriber.await_metric("subscriber_lag_seconds", "", |lag| lag > 2.0).await;
    pipeline.finish().await;
}
