//! Epochs: log positions compare within one unbroken run of one database; every other run gets a higher epoch, so the next write still wins.

use recant_schema::key::Key;
use recant_tests::private::PrivatePostgres;
use recant_tests::source::{commit, outbox_rows};
use recant_tests::{Database, Pipeline, eventually};
use sqlx::{Connection, Executor, PgConnection};

async fn epoch(product: &mut PgConnection) -> i64 {
    sqlx::query_scalar("select epoch from recant.source").fetch_one(product).await.unwrap()
}

async fn flushed(product: &mut PgConnection) -> i64 {
    sqlx::query_scalar("select (pg_current_wal_flush_lsn() - '0/0')::bigint").fetch_one(product).await.unwrap()
}

/// A value is there, the key is committed, and both are gone again.
async fn write_wins(pipeline: &Pipeline, product: &mut PgConnection, key: &Key) {
    let earlier = pipeline.eu().cache.floor(key).await.map(|floor| floor.version);
    pipeline.eu().cache.load(key, "value").await;
    commit(product, key.as_str()).await;
    pipeline.eu().cache.await_applied_above(key, earlier).await;
}

/// The log writer is stopped, so that nothing but commits that wait flushes the log; the floor of before is then higher than the log ever gets again soon.
#[tokio::test]
async fn after_kill_9_of_postgres_with_unflushed_log_the_next_write_still_wins() {
    let mut postgres = PrivatePostgres::start(&["wal_buffers=64MB", "autovacuum=off", "checkpoint_timeout=1h"]).await;
    let pipeline = Pipeline::builder().postgres(&postgres.url()).start().await;
    let (cache, key) = (&pipeline.eu().cache, pipeline.key("product:7"));
    let mut product = pipeline.product().await;
    write_wins(&pipeline, &mut product, &key).await;
    product.execute("create table filler (text text)").await.unwrap();
    postgres.stop_log_writer().await;

    product.execute("set synchronous_commit = off").await.unwrap();
    product.execute("insert into filler select repeat('x', 1000) from generate_series(1, 8000)").await.unwrap();
    write_wins(&pipeline, &mut product, &key).await;
    let before = cache.floor(&key).await.expect("a floor").version;
    let (at, flushed) = (i64::try_from(before.position).unwrap(), flushed(&mut product).await);
    assert!(at - flushed > 4 << 20, "the claim at {at} is to be far ahead of what is flushed, {flushed}");
    postgres.kill();
    postgres.start_again().await;

    let mut product = pipeline.product().await;
    write_wins(&pipeline, &mut product, &key).await;
    let after = cache.floor(&key).await.expect("a floor").version;
    assert!(after.position < before.position, "positions have started again lower: {after} after {before}");
    assert!(after.epoch > before.epoch);
    assert_eq!(pipeline.relays[0].metric("relay_epoch_raises_total", "crash").await, 1.0);
    pipeline.finish().await;
}

#[tokio::test]
async fn a_clean_restart_of_postgres_raises_the_epoch() {
    let mut postgres = PrivatePostgres::start(&[]).await;
    let pipeline = Pipeline::builder().postgres(&postgres.url()).start().await;
    let key = pipeline.key("product:7");
    let mut product = pipeline.product().await;
    write_wins(&pipeline, &mut product, &key).await;
    let before = epoch(&mut product).await;
    postgres.stop();
    postgres.start_again().await;
    let mut product = pipeline.product().await;
    write_wins(&pipeline, &mut product, &key).await;
    assert!(epoch(&mut product).await > before);
    assert_eq!(pipeline.relays[0].metric("relay_epoch_raises_total", "restart").await, 1.0);
    pipeline.finish().await;
}

#[tokio::test]
async fn a_copy_of_the_database_gets_an_epoch_of_its_own_and_is_a_gap() {
    let mut pipeline = Pipeline::builder().relay("source_name", "shop").start().await;
    let key = pipeline.key("product:7");
    let mut product = pipeline.product().await;
    write_wins(&pipeline, &mut product, &key).await;
    let before = epoch(&mut product).await;
    product.close().await.unwrap();
    assert!(pipeline.relays[0].terminate().success());

    let server = recant_tests::Servers::from_environment().database_url;
    let name = format!("recant_copy_{}", pipeline.suffix);
    let copy = Database::create_from(&server, &name, pipeline.database().name()).await;
    pipeline.relays[0].set("database_url", &copy.url());
    pipeline.relays[0].start();
    let mut product = copy.connect().await;
    write_wins(&pipeline, &mut product, &key).await;
    assert!(epoch(&mut product).await > before);
    // What the original committed after the copy was made is not in the copy.
    assert_eq!(pipeline.relays[0].metric("relay_epoch_raises_total", "restored").await, 1.0);
    pipeline.eu().subscriber.await_metric("subscriber_gaps_total", "new_epoch", |count| count == 1.0).await;
    pipeline.expect_error(super::gaps::ERROR);
    pipeline.expect_error("commits may be lost");
    pipeline.finish().await;
}

/// What vouches for the run is taken away ten times while two relays claim.
#[tokio::test]
async fn two_relays_racing_to_raise_the_epoch_agree_on_one() {
    const ROUNDS: u32 = 10;
    let pipeline = Pipeline::builder().relays(2).start().await;
    let mut product = pipeline.product().await;
    let valid = "select s.epoch from recant.source s join recant.incarnation i using (epoch)";
    let mut known = 0;
    for _ in 0..=ROUNDS {
        known = eventually("the epoch is raised and vouched for", async || {
            let epoch: Option<i64> = sqlx::query_scalar(valid).fetch_optional(&mut product).await.unwrap();
            epoch.filter(|epoch| *epoch > known)
        })
        .await;
        product.execute("delete from recant.incarnation").await.unwrap();
    }
    eventually("the last one", async || sqlx::query_scalar::<_, i64>(valid).fetch_optional(&mut product).await.unwrap()).await;
    let key = pipeline.key("product:7");
    write_wins(&pipeline, &mut product, &key).await;
    let mut raised = 0.0;
    for relay in &pipeline.relays {
        raised += relay.metric("relay_epoch_raises_total", "").await;
    }
    assert_eq!(raised, f64::from(ROUNDS + 2), "one relay raised each: the first, and one after each deletion");
    pipeline.finish().await;
}

/// Somebody holds the lock that raising needs, so the invalid state lasts as long as the test wants to look.
#[tokio::test]
async fn a_claim_of_nothing_is_told_apart_from_an_invalid_epoch() {
    let pipeline = Pipeline::builder().relay("heartbeat_interval_ms", "200").start().await;
    let (mut product, mut locker) = (pipeline.product().await, pipeline.product().await);
    let (relay, key) = (&pipeline.relays[0], pipeline.key("product:7"));
    write_wins(&pipeline, &mut product, &key).await;
    let invalid = relay.metric("relay_claims_total", "not_valid").await;
    let beats = relay.metric("relay_heartbeats_total", "").await;
    relay.await_metric("relay_heartbeats_total", "", |count| count >= beats + 3.0).await;
    assert_eq!(relay.metric("relay_claims_total", "not_valid").await, invalid, "an idle outbox is no invalid epoch");

    let before = pipeline.eu().cache.floor(&key).await.expect("a floor").version;
    let mut lock = locker.begin().await.unwrap();
    lock.execute("lock table recant.source in share row exclusive mode").await.unwrap();
    product.execute("delete from recant.incarnation").await.unwrap();
    relay.await_metric("relay_claims_total", "not_valid", |count| count > invalid).await;
    commit(&mut product, key.as_str()).await;
    let beats = relay.metric("relay_heartbeats_total", "").await;
    // Not a wait for something: time for five heartbeats and fifty timer steps, if there were any.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert_eq!(outbox_rows(&mut product).await, 1, "nothing is claimed without a valid epoch");
    assert!(relay.metric("relay_heartbeats_total", "").await <= beats + 1.0, "no heartbeat without a valid epoch");

    lock.rollback().await.unwrap();
    let after = pipeline.eu().cache.await_applied_above(&key, Some(before)).await.version;
    assert!(after.epoch > before.epoch);
    pipeline.finish().await;
}
