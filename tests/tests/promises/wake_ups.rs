//! Wake-ups from the write-ahead log: they are quick, losing them loses nothing, and nothing of them stays behind.

use recant_tests::daemon::run_to_end;
use recant_tests::private::PrivatePostgres;
use recant_tests::{Builder, Daemon, Database, Pipeline, Servers, eventually};
use sqlx::{AssertSqlSafe, Executor, PgConnection};

/// A timer that nobody would wait for: longer than any test's deadline, and five times as long beside a tail.
const NEVER_MS: &str = "60000";

/// The relay's warning, of which there is one per outage.
const WARNING: &str = "no wake-ups from the log";

const TAIL: &str = "mode=\"tail\"";

/// A pipeline whose relay has been started again with a tail; the database's name is known only then.
async fn with_tail(builder: Builder) -> Pipeline {
    let mut pipeline = builder.start().await;
    let url = pipeline.database().url();
    let relay = &mut pipeline.relays[0];
    assert!(relay.terminate().success());
    relay.set("tail_url", &url);
    relay.start();
    pipeline.await_ready().await;
    pipeline
}

fn relay(pipeline: &Pipeline) -> &Daemon {
    &pipeline.relays[0]
}

async fn await_tail(pipeline: &Pipeline) {
    relay(pipeline).await_metric("relay_wake_mode", TAIL, |value| value == 1.0).await;
}

async fn await_loss(pipeline: &Pipeline, reason: &str) {
    relay(pipeline).await_metric("relay_tail_losses_total", &format!("reason=\"{reason}\""), |value| value >= 1.0).await;
}

fn warnings(pipeline: &Pipeline) -> usize {
    relay(pipeline).log().matches(WARNING).count()
}

/// Slots of this test's database.
async fn slots(product: &mut PgConnection) -> i64 {
    let count = "select count(*) from pg_replication_slots where database = current_database()";
    sqlx::query_scalar(count).fetch_one(product).await.expect("slots can be counted")
}

async fn await_applied(pipeline: &Pipeline, end: &str) {
    let key = pipeline.key(end);
    pipeline.commit(&key).await;
    pipeline.eu().cache.await_applied(&key).await;
}

#[tokio::test]
async fn a_commit_is_applied_although_the_timer_is_slow() {
    let pipeline = with_tail(Pipeline::builder().relay("timer_longest_ms", NEVER_MS)).await;
    await_tail(&pipeline).await;
    for end in ["first", "second", "third"] {
        await_applied(&pipeline, end).await;
    }
    assert!(relay(&pipeline).metric("relay_wakes_total", TAIL).await >= 3.0);
    assert_eq!(relay(&pipeline).metric("relay_unannounced_claims_total", "").await, 0.0);
    pipeline.finish().await;
}

#[tokio::test]
async fn losing_the_tail_loses_nothing_and_it_comes_back() {
    let pipeline = with_tail(Pipeline::builder()).await;
    await_tail(&pipeline).await;
    let mut product = pipeline.product().await;
    let end = "select count(pg_terminate_backend(active_pid)) from pg_replication_slots where database = current_database()";
    let ended: i64 = sqlx::query_scalar(end).fetch_one(&mut product).await.unwrap();
    assert_eq!(ended, 1);
    for end in ["at once", "and", "afterwards"].map(|word| word.replace(' ', "-")) {
        await_applied(&pipeline, &end).await;
    }
    await_loss(&pipeline, "ended").await;
    await_tail(&pipeline).await;
    assert_eq!((warnings(&pipeline), slots(&mut product).await), (1, 1));
    pipeline.finish().await;
}

#[tokio::test]
async fn no_slot_is_left_behind_by_a_killed_relay() {
    let mut pipeline = with_tail(Pipeline::builder()).await;
    await_tail(&pipeline).await;
    let mut product = pipeline.product().await;
    assert_eq!(slots(&mut product).await, 1);
    pipeline.relays[0].kill();
    eventually("the slot is gone", async || (slots(&mut product).await == 0).then_some(())).await;
    pipeline.finish().await;
}

#[tokio::test]
async fn without_a_free_slot_the_timer_wakes_and_one_line_says_so() {
    let postgres = PrivatePostgres::start(&["wal_level=logical", "max_replication_slots=1"]).await;
    postgres.execute("select pg_create_physical_replication_slot('taken', true)").await;
    let pipeline = with_tail(Pipeline::builder().postgres(&postgres.url())).await;
    // Tried again, and again without success.
    relay(&pipeline).await_metric("relay_tail_losses_total", "reason=\"slots\"", |value| value >= 3.0).await;
    await_applied(&pipeline, "meanwhile").await;
    assert_eq!(warnings(&pipeline), 1);
    assert_eq!(relay(&pipeline).metric("relay_wake_mode", "mode=\"timer\"").await, 1.0);
    postgres.execute("select pg_drop_replication_slot('taken')").await;
    await_tail(&pipeline).await;
    await_applied(&pipeline, "later").await;
    pipeline.finish().await;
}

#[tokio::test]
async fn without_logical_wal_the_timer_wakes_and_the_check_names_what_is_missing() {
    let postgres = PrivatePostgres::start(&["wal_level=replica"]).await;
    let pipeline = with_tail(Pipeline::builder().postgres(&postgres.url())).await;
    await_loss(&pipeline, "wal_level").await;
    await_applied(&pipeline, "meanwhile").await;
    let settings = relay(&pipeline).settings().to_vec();
    let check = tokio::task::spawn_blocking(move || run_to_end("relay", &["check"], &settings)).await.unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(!check.status.success() && text.contains("wal_level is replica; set wal_level = logical"), "{text}");
    pipeline.finish().await;
}

/// A transaction that is open and has written.
async fn open_transaction(product: &mut PgConnection) {
    product.execute("begin").await.unwrap();
    product.execute("create table held_open (n int)").await.unwrap();
}

#[tokio::test]
async fn a_long_transaction_holds_up_the_tail_and_not_the_rows() {
    let mut pipeline = Pipeline::start().await;
    let mut holder = pipeline.product().await;
    open_transaction(&mut holder).await;
    let url = pipeline.database().url();
    assert!(pipeline.relays[0].terminate().success());
    pipeline.relays[0].set("tail_url", &url);
    pipeline.relays[0].start();
    await_applied(&pipeline, "meanwhile").await;
    await_loss(&pipeline, "long_transaction").await;
    assert_eq!(warnings(&pipeline), 1);
    holder.execute("rollback").await.unwrap();
    await_tail(&pipeline).await;
    pipeline.finish().await;
}

#[tokio::test]
async fn the_tail_closes_itself_when_its_slot_keeps_too_much_log() {
    let postgres = PrivatePostgres::start(&["wal_level=logical"]).await;
    let pipeline = with_tail(Pipeline::builder().postgres(&postgres.url()).relay("tail_retained_mb", "16")).await;
    await_tail(&pipeline).await;
    let (mut holder, mut product) = (pipeline.product().await, pipeline.product().await);
    // The slot has to keep the log from the beginning of this transaction on.
    open_transaction(&mut holder).await;
    product.execute("create table filler (text text)").await.unwrap();
    for _ in 0..4 {
        let fill = "insert into filler select repeat(md5(n::text), 60) from generate_series(1, 5000) n";
        product.execute(fill).await.unwrap();
    }
    await_loss(&pipeline, "retained").await;
    eventually("the slot is gone", async || (slots(&mut product).await == 0).then_some(())).await;
    await_applied(&pipeline, "meanwhile").await;
    holder.execute("rollback").await.unwrap();
    await_tail(&pipeline).await;
    pipeline.finish().await;
}

#[tokio::test]
async fn a_login_without_replication_is_named_by_the_check_with_the_remedy() {
    let mut pipeline = Pipeline::start().await;
    let login = pipeline.database().login().await;
    pipeline.relays[0].set("tail_url", login.url());
    let settings = relay(&pipeline).settings().to_vec();
    let check = tokio::task::spawn_blocking(move || run_to_end("relay", &["check"], &settings)).await.unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(!check.status.success() && text.contains("alter role … replication"), "{text}");

    let grant = format!("alter role {} replication", login.name());
    pipeline.product().await.execute(AssertSqlSafe(grant)).await.unwrap();
    let settings = relay(&pipeline).settings().to_vec();
    let check = tokio::task::spawn_blocking(move || run_to_end("relay", &["check"], &settings)).await.unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(check.status.success() && text.contains("can copy the whole cluster"), "{text}");
    pipeline.finish().await;
}

#[tokio::test]
async fn a_server_whose_commits_would_wait_for_the_tail_is_not_followed() {
    let postgres = PrivatePostgres::start(&["wal_level=logical", "synchronous_standby_names=*", "synchronous_commit=local"]).await;
    let database = Database::create(&postgres.url(), "shop").await;
    let settings = [
        ("RELAY_DATABASE_URL", database.url()),
        ("RELAY_TAIL_URL", database.url()),
        ("RELAY_BROKERS", Servers::from_environment().brokers),
        ("RELAY_REGIONS", "eu".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let check = move || {
        assert!(run_to_end("relay", &["migrate"], &settings).status.success());
        run_to_end("relay", &["check"], &settings)
    };
    let check = tokio::task::spawn_blocking(check).await.unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(!check.status.success() && text.contains("name the standbys in synchronous_standby_names"), "{text}");
}
