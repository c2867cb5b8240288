//! `relay migrate` on empty, filled and busy databases, alone and in company.

use crate::database::{Database, OUTBOX, count, run, with_database};
use recant_relay::outbox::admin::migrate;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[tokio::test]
async fn an_empty_database_is_migrated_and_knows_its_regions() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        assert_eq!(count(&mut connection, OUTBOX).await, 0);
        assert_eq!(count(&mut connection, "select count(*) from recant.region where name in ('eu', 'us')").await, 2);
        assert_eq!(count(&mut connection, "select count(*) from recant.source").await, 0, "the first claim raises the epoch");
        run(&mut connection, "select recant.invalidate('v2:a')").await.unwrap();
        assert_eq!(count(&mut connection, OUTBOX).await, 1);
    })
    .await;
}

#[tokio::test]
async fn migrating_again_changes_nothing() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let snapshot =
            "select count(*) * 1000 + (select count(*) from recant.migrations) from pg_class where relnamespace = 'recant'::regnamespace";
        let before = count(&mut connection, snapshot).await;
        database.migrate().await;
        assert_eq!(count(&mut connection, snapshot).await, before);
    })
    .await;
}

#[tokio::test]
async fn two_relays_migrate_one_database_at_once() {
    with_database("", async |database| {
        let (one, other) = tokio::join!(relay_migrate(database), relay_migrate(database));
        for output in [one, other] {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let mut connection = database.connect().await;
        run(&mut connection, "select recant.invalidate('v2:a', regions => '{eu}')").await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn databases_of_one_server_are_migrated_at_once_although_they_share_their_roles() {
    let one = || {
        with_database("", async |database| {
            database.migrate().await;
        })
    };
    tokio::join!(one(), one(), one(), one());
}

#[tokio::test]
async fn a_database_with_rows_in_its_outbox_and_writers_at_work_is_migrated_and_keeps_every_row() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        run(&mut connection, "select recant.invalidate('v2:before:' || n) from generate_series(1, 1000) n").await.unwrap();

        let (started, stop) = (Arc::new(tokio::sync::Notify::new()), Arc::new(AtomicBool::new(false)));
        let mut writer = database.connect().await;
        let writing = tokio::spawn({
            let (started, stop) = (started.clone(), stop.clone());
            async move {
                let mut written = 0i64;
                while !stop.load(Ordering::Relaxed) {
                    run(&mut writer, "select recant.invalidate('v2:during')").await.unwrap();
                    written += 1;
                    started.notify_one();
                }
                written
            }
        });
        started.notified().await;
        for _ in 0..5 {
            assert!(relay_migrate(database).await.status.success());
        }
        stop.store(true, Ordering::Relaxed);
        let written = writing.await.unwrap();
        assert!(written > 0);
        assert_eq!(count(&mut connection, OUTBOX).await, 1000 + written);
    })
    .await;
}

#[tokio::test]
async fn a_database_that_is_not_utf8_is_refused_with_the_remedy() {
    with_database("encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C' template template0", async |database| {
        let fault = migrate(&database.url(), &[]).await.unwrap_err();
        assert!(fault.to_string().contains("UTF8"), "{fault}");
        assert!(fault.remedy().unwrap().contains("create database"));
    })
    .await;
}

/// The relay as built, beside this test's own binary.
fn relay_binary() -> PathBuf {
    let mut folder = std::env::current_exe().expect("a test knows where it is");
    folder.pop();
    if folder.ends_with("deps") {
        folder.pop();
    }
    let binary = folder.join("relay");
    assert!(binary.exists(), "{} is missing; build it with: make build", binary.display());
    binary
}

async fn relay_migrate(database: &Database) -> std::process::Output {
    let mut command = tokio::process::Command::new(relay_binary());
    command
        .arg("migrate")
        .env("RELAY_DATABASE_URL", database.url().expose())
        .env("RELAY_BROKERS", "127.0.0.1:1")
        .env("RELAY_REGIONS", "eu,us");
    command.output().await.unwrap()
}
