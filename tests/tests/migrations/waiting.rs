//! Rows that wait for a topic, and servers that do not answer.

use crate::database::{OUTBOX, count, run, with_database};
use recant_relay::outbox::OutboxTrouble;
use recant_relay::pace::Scan;
use recant_relay::plan::{Reason, Row};
use recant_tests::proxy::Proxy;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const ALL: Scan = Scan { above: 0, up_to: i64::MAX, limit: 128 };

/// The relay's own limit for an answer, 10 s, and as much again for a loaded machine.
const NOTICED: Duration = Duration::from_secs(20);

fn waiting(pins: &[&str]) -> Vec<String> {
    pins.iter().map(|pin| (*pin).to_owned()).collect()
}

#[tokio::test]
async fn rows_that_wait_for_a_topic_are_left_alone_and_the_others_are_claimed() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let rows = "insert into recant.outbox (key, regions, lane) values
            ('shared', null, 'realtime'), ('shared-null', null, null), ('shared-bulk', null, 'bulk'), ('shared-slow', null, 'slow'),
            ('eu', '{eu}', 'realtime'), ('us', '{us}', 'realtime'), ('both', '{eu,us}', 'realtime'), ('us-bulk', '{us}', 'bulk'),
            ('nowhere', '{}', 'realtime')";
        run(&mut connection, rows).await.unwrap();
        let mut session = database.claiming("r1").await;
        let all = BTreeSet::from(
            ["shared", "shared-null", "shared-bulk", "shared-slow", "eu", "us", "both", "us-bulk", "nowhere"].map(str::to_owned),
        );
        for (pins, left) in [
            (&[][..], &[][..]),
            (&["us/realtime"], &["us", "both"]),
            (&["us/realtime", "us/bulk"], &["us", "both", "us-bulk"]),
            (&["/realtime"], &["shared", "shared-null", "shared-slow"]),
            (&["/bulk", "eu/realtime"], &["shared-bulk", "eu", "both"]),
        ] {
            let (claim, claimed) = session.claim(ALL, &waiting(pins)).await.unwrap();
            claim.release().await.unwrap();
            let keys: BTreeSet<String> = claimed.rows.into_iter().filter_map(|row| row.key).collect();
            let expected: BTreeSet<String> = all.iter().filter(|key| !left.contains(&key.as_str())).cloned().collect();
            assert_eq!(keys, expected, "{pins:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_claim_retired_in_part_gives_the_other_rows_back_as_they_were() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        run(&mut connection, "insert into recant.outbox (key) values ('sent'), ('waits'), ('bad key'), ('taken'), ('bad taken')")
            .await
            .unwrap();
        let writer = "select xmin::text::bigint from recant.outbox where key = 'waits'";
        let before = count(&mut connection, writer).await;
        let mut session = database.claiming("r1").await;
        let mut other = database.session("r2").await;
        let (claim, claimed) = session.claim(Scan { limit: 3, ..ALL }, &[]).await.unwrap();
        // As if these two had been claimed by another relay between the two transactions.
        let (theirs, taken) = other.claim(ALL, &[]).await.unwrap();
        let rows = [claimed.rows, taken.rows].concat();
        let row = |key: &str| -> &Row { rows.iter().find(|row| row.key.as_deref() == Some(key)).unwrap() };
        let aside = [(row("bad key"), Reason::BadKey), (row("bad taken"), Reason::BadKey)];
        claim.retire_part(&[row("sent"), row("bad key"), row("taken"), row("bad taken")], &aside).await.unwrap();

        assert_eq!(count(&mut connection, writer).await, before, "still of the transaction that wrote it, so its commit time is kept");
        let noted = "select count(*) from recant.set_aside where row->>'key' = 'bad key' and reason = 'bad_key'";
        assert_eq!(count(&mut connection, noted).await, 1);
        theirs.release().await.unwrap();
        assert_eq!(count(&mut connection, OUTBOX).await, 3, "what others have claimed is theirs");
        assert_eq!(count(&mut connection, "select count(*) from recant.set_aside").await, 1, "and theirs to set aside");
        let (claim, claimed) = session.claim(ALL, &[]).await.unwrap();
        assert_eq!(claimed.rows.len(), 3, "all of it is free again");
        claim.release().await.unwrap();
    })
    .await;
}

/// Packets go nowhere, and no connection breaks.
#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up_on() {
    with_database("", async |database| {
        database.migrate().await;
        let server = database.options();
        let proxy = Proxy::start(&format!("{}:{}", server.get_host(), server.get_port()));
        let (host, port) = proxy.address().rsplit_once(':').map(|(host, port)| (host.to_owned(), port.parse().unwrap())).unwrap();
        let url = database.url_at(&host, port);
        let mut claiming = database.session_at(&url, "r1").await;
        let mut retiring = database.session_at(&url, "r2").await;
        let mut beating = database.session_at(&url, "r3").await;
        let mut raising = database.session_at(&url, "r4").await;
        let (claim, _) = retiring.claim(ALL, &[]).await.unwrap();
        proxy.freeze();
        let began = Instant::now();
        let (claimed, retired, pulse, raised) = tokio::join!(
            async { claiming.claim(ALL, &[]).await.map(drop) },
            claim.retire(),
            async { beating.pulse().await.map(drop) },
            async { raising.raise_epoch(recant_relay::epoch::Published::default()).await.map(drop) },
        );
        for outcome in [claimed, retired, pulse, raised] {
            assert_eq!(outcome.unwrap_err().trouble(), OutboxTrouble::Unreachable);
        }
        assert!(began.elapsed() < NOTICED, "{:?}", began.elapsed());
        proxy.release();
    })
    .await;
}
