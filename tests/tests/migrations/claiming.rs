//! Claims and epochs: what the relay does in the database.

use crate::database::{OUTBOX, count, refusal, run, with_database};
use recant_relay::epoch::{Published, Sighting};
use recant_relay::outbox::Session;
use recant_relay::outbox::admin::Call;
use recant_relay::outbox::epoch::Raised;
use recant_relay::pace::Scan;
use recant_schema::labels::EpochCause;
use recant_schema::version::Version;
use sqlx::PgConnection;
use std::collections::BTreeSet;
use std::time::Duration;

/// The quick claim's scan from the beginning.
const ALL: Scan = Scan { above: 0, up_to: i64::MAX, limit: 128 };

#[tokio::test]
async fn the_relay_role_claims_and_retires_and_owns_nothing() {
    with_database("", async |database| {
        database.migrate().await;
        let (login, _) = database.login(Some("recant_relay")).await;
        let mut connection = database.connect().await;
        run(&mut connection, "select recant.invalidate('v2:a'); insert into recant.outbox (key) values ('bad key')").await.unwrap();
        let url = database.url_of(&login);
        let mut session = Session::open(&url, "r1", "test").await.unwrap();
        assert_eq!(session.missing_rights().await.unwrap(), Vec::<String>::new());
        session.raise_epoch(Published::default()).await.unwrap();
        let (mut claim, claimed) = session.claim(ALL, &[]).await.unwrap();
        assert_eq!(claimed.rows.len(), 2);
        let bad = claimed.rows.iter().find(|row| row.key.as_deref() == Some("bad key")).unwrap();
        claim.set_aside(&[(bad, recant_relay::plan::Reason::BadKey)]).await.unwrap();
        claim.retire().await.unwrap();
        assert!(session.invalidate(&Call { keys: vec!["a".into()], ..Call::default() }).await.is_err(), "a relay is no writer");
        assert_eq!(count(&mut connection, OUTBOX).await, 0);
        assert_eq!(
            count(&mut connection, "select count(*) from recant.set_aside where row->>'key' = 'bad key' and reason = 'bad_key'").await,
            1
        );
        let owned = "select count(*) from pg_class where relnamespace = 'recant'::regnamespace
                     and pg_get_userbyid(relowner) in ('recant_relay', 'recant_writer')";
        assert_eq!(count(&mut connection, owned).await, 0);
    })
    .await;
}

#[tokio::test]
async fn a_claim_walks_the_primary_key_whatever_the_statistics_say() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        // Empty and never analyzed, analyzed while empty, then full behind the planner's back.
        for prepare in ["select 1", "analyze recant.outbox", "insert into recant.outbox (key) select 'k' from generate_series(1, 20000)"] {
            run(&mut connection, prepare).await.unwrap();
            let mut session = database.claiming("r1").await;
            let plan = session.explain_claim().await.unwrap();
            assert!(plan.contains("LockRows") && plan.contains("Index Scan using outbox_pkey"), "{plan}");
            // The sequence's own one-row relation is always read so.
            let scanned = plan.replace("Seq Scan on outbox_id_seq", "");
            assert!(!scanned.contains("Seq Scan on outbox") && !scanned.contains("Sort"), "{plan}");
        }
        let mut session = database.session("r2").await;
        let (claim, claimed) = session.claim(Scan { limit: 500, ..ALL }, &[]).await.unwrap();
        let ids: BTreeSet<i64> = claimed.rows.iter().map(|row| row.id).collect();
        assert_eq!(ids, (1..=500).collect(), "the oldest rows, and no more than asked for");
        claim.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn concurrent_claims_share_the_rows_and_each_keeps_its_limit() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        run(&mut connection, "insert into recant.outbox (key) select 'k' || n from generate_series(1, 1000) n").await.unwrap();
        database.claiming("r0").await;
        let mut sessions = Vec::new();
        for number in 0..4 {
            sessions.push(database.session(&format!("r{number}")).await);
        }
        let scan = Scan { limit: 200, ..ALL };
        let claims = futures::future::join_all(sessions.iter_mut().map(|session| session.claim(scan, &[]))).await;
        let mut seen = BTreeSet::new();
        let mut open = Vec::new();
        for claim in claims {
            let (claim, claimed) = claim.unwrap();
            assert_eq!(claimed.rows.len(), 200);
            assert!(claimed.rows.iter().all(|row| seen.insert(row.id)), "no row is claimed twice");
            open.push(claim);
        }
        // Two retire, one releases, one dies with its claim open.
        let mut open = open.into_iter();
        open.next().unwrap().retire().await.unwrap();
        open.next().unwrap().retire().await.unwrap();
        open.next().unwrap().release().await.unwrap();
        drop(open);
        drop(sessions);
        within(Duration::from_secs(10), async {
            // The last session's end is noticed by the server a moment later.
            let mut session = database.session("r9").await;
            loop {
                let (claim, claimed) = session.claim(Scan { limit: 1000, ..ALL }, &[]).await.unwrap();
                let rows = claimed.rows.len();
                claim.release().await.unwrap();
                if rows == 600 {
                    break;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_later_commit_is_always_stamped_higher() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let mut session = database.claiming("r1").await;
        let mut newest = None;
        for _ in 0..50 {
            // A commit's own position: where the log ends once it is visible.
            run(&mut connection, "select recant.invalidate('v2:a')").await.unwrap();
            let committed = count(&mut connection, "select (pg_current_wal_flush_lsn() - '0/0')::bigint").await;
            let (claim, claimed) = session.claim(ALL, &[]).await.unwrap();
            let position = claimed.rows[0].position;
            assert!(position >= u64::try_from(committed).unwrap());
            assert!(newest.is_none_or(|newest| position > newest));
            newest = Some(position);
            claim.retire().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_claim_of_nothing_is_told_apart_from_an_epoch_that_is_not_vouched_for() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let mut session = database.session("r1").await;
        assert_eq!(claim_once(&mut session).await, (None, 0), "never raised");
        let Raised::Here(first, EpochCause::First) = session.raise_epoch(Published::default()).await.unwrap() else {
            panic!("nobody else raises")
        };
        assert_eq!(claim_once(&mut session).await, (Some(first), 0), "nothing to claim, and the epoch is valid");

        run(&mut connection, "select recant.invalidate('v2:a')").await.unwrap();
        for (loss, cause) in [
            // What crash recovery and promotion do.
            ("truncate recant.incarnation", EpochCause::Crash),
            // What a restart looks like.
            ("update recant.incarnation set started_at = started_at - interval '1 hour'", EpochCause::Restart),
            // What a copy looks like: in the same cluster, and in another one where it got the same oid.
            ("update recant.incarnation set database = 1; update recant.source set database = 1", EpochCause::Restored),
            ("update recant.incarnation set started_at = now(); update recant.source set cluster = 1", EpochCause::Restored),
            // A source row from a backup.
            ("update recant.source set epoch = epoch - 1", EpochCause::Restart),
            ("truncate recant.incarnation; update recant.source set timeline = timeline - 1", EpochCause::Promoted),
        ] {
            run(&mut connection, loss).await.unwrap();
            assert_eq!(claim_once(&mut session).await, (None, 0), "{loss}: nothing is claimed");
            assert_eq!(session.pulse().await.unwrap(), None, "{loss}: no heartbeat");
            let Raised::Here(_, found) = session.raise_epoch(published(&mut connection).await).await.unwrap() else {
                panic!("nobody else raises")
            };
            assert_eq!(found, cause, "{loss}");
            assert!(matches!(claim_once(&mut session).await, (Some(_), 1)), "{loss}: claimed again");
            assert!(session.pulse().await.unwrap().is_some());
        }
    })
    .await;
}

#[tokio::test]
async fn a_look_tells_nothing_to_do_apart_from_rows_and_from_a_lost_epoch() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let mut session = database.session("r1").await;
        assert_eq!(session.nothing_above(0).await.unwrap(), None, "the epoch has to be raised");
        session.raise_epoch(Published::default()).await.unwrap();
        assert!(session.nothing_above(0).await.unwrap().is_some());
        run(&mut connection, "select recant.invalidate('v2:a')").await.unwrap();
        assert_eq!(session.nothing_above(0).await.unwrap(), None, "there is a row");
        assert_eq!(session.nothing_above(1).await.unwrap(), Some(1), "and it lies below the scan");
        run(&mut connection, "truncate recant.incarnation").await.unwrap();
        assert_eq!(session.nothing_above(1).await.unwrap(), None, "the epoch is lost");
    })
    .await;
}

async fn claim_once(session: &mut Session) -> (Option<u64>, usize) {
    let (claim, claimed) = session.claim(ALL, &[]).await.unwrap();
    claim.release().await.unwrap();
    (claimed.epoch.map(|(epoch, _)| epoch), claimed.rows.len())
}

/// Topics that hold a heartbeat of the newest epoch, and of no other.
async fn published(connection: &mut PgConnection) -> Published {
    let epoch = count(connection, "select epoch from recant.source").await;
    beats(&[Version::new(u64::try_from(epoch).unwrap(), 1)])
}

fn beats(versions: &[Version]) -> Published {
    let mut published = Published::default();
    for version in versions {
        published.see(Sighting { version: *version, heartbeat: true, shared: true });
    }
    published
}

#[tokio::test]
async fn an_epoch_rises_above_what_the_topics_hold_and_lost_history_is_recognised() {
    with_database("", async |database| {
        database.migrate().await;
        let mut session = database.claiming("r1").await;
        let mut connection = database.connect().await;
        let stored = u64::try_from(count(&mut connection, "select epoch from recant.source").await).unwrap();
        for newest in [Version::new(stored, 1 << 60), Version::new(stored + 1_000_000, 1)] {
            run(&mut connection, "truncate recant.incarnation").await.unwrap();
            let before = session.raise_epoch(beats(&[newest])).await.unwrap();
            let Raised::Here(epoch, EpochCause::Restored) = before else { panic!("{before:?}") };
            assert!(epoch > newest.epoch && epoch > stored);
            run(&mut connection, &format!("update recant.source set epoch = {stored}")).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_record_with_an_absurd_epoch_does_not_use_up_the_epochs() {
    with_database("", async |database| {
        database.migrate().await;
        let mut session = database.session("r1").await;
        let raised = session.raise_epoch(beats(&[Version::new((1 << 63) - 1, 1), Version::new(u64::MAX, 1)])).await.unwrap();
        let Raised::Here(epoch, EpochCause::First) = raised else { panic!("{raised:?}") };
        let mut connection = database.connect().await;
        assert_eq!(count(&mut connection, "select extract(epoch from now())::bigint / 100").await, i64::try_from(epoch / 100).unwrap());
    })
    .await;
}

#[tokio::test]
async fn a_promotion_that_no_region_has_heard_of_is_told_with_the_next_epoch() {
    with_database("", async |database| {
        database.migrate().await;
        let mut session = database.claiming("r1").await;
        let mut connection = database.connect().await;
        let before = published(&mut connection).await;
        run(&mut connection, "truncate recant.incarnation; update recant.source set timeline = timeline - 1").await.unwrap();
        for _ in 0..3 {
            let raised = session.raise_epoch(before.clone()).await.unwrap();
            assert!(matches!(raised, Raised::Here(_, EpochCause::Promoted)), "{raised:?}");
            run(&mut connection, "truncate recant.incarnation").await.unwrap();
        }
        let raised = session.raise_epoch(published(&mut connection).await).await.unwrap();
        assert!(matches!(raised, Raised::Here(_, EpochCause::Crash)), "{raised:?}");
    })
    .await;
}

#[tokio::test]
async fn a_copy_made_in_the_same_server_is_a_restore() {
    with_database("", async |database| {
        database.migrate().await;
        let session = database.claiming("r1").await;
        session.close().await;
        let stored = published(&mut database.connect().await).await;
        let template = database.name.clone();
        // The server takes a moment to notice that the sessions are gone, and waits for it.
        with_database(&format!("template {template}"), async |copy| {
            let raised = copy.session("r1").await.raise_epoch(stored).await.unwrap();
            assert!(matches!(raised, Raised::Here(_, EpochCause::Restored)), "{raised:?}");
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn two_relays_racing_to_raise_the_epoch_raise_it_once() {
    with_database("", async |database| {
        database.migrate().await;
        let mut sessions = Vec::new();
        for number in 0..6 {
            sessions.push(database.session(&format!("r{number}")).await);
        }
        let raises = sessions.iter_mut().map(|session| session.raise_epoch(Published::default()));
        let raised: Vec<_> = futures::future::join_all(raises).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(raised.iter().filter(|raised| matches!(raised, Raised::Here(..))).count(), 1, "{raised:?}");
        let epochs: BTreeSet<u64> = raised
            .iter()
            .map(|raised| match raised {
                Raised::Here(epoch, _) | Raised::Elsewhere(epoch) => *epoch,
            })
            .collect();
        assert_eq!(epochs.len(), 1, "everybody goes on with the same epoch");
    })
    .await;
}

#[tokio::test]
async fn a_replica_position_is_refused_on_a_primary() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let (code, hint) = refusal(run(&mut connection, "select recant.replica_position()").await);
        assert_eq!((code.as_str(), hint.is_some()), ("55000", true));
    })
    .await;
}

#[tokio::test]
async fn a_frozen_relays_rows_are_free_again_within_the_stated_bound() {
    with_database("", async |database| {
        database.migrate().await;
        let mut session = database.claiming("r1").await;
        let bound = session.longest_hold().await.unwrap();
        assert!(bound > Duration::ZERO && bound <= Duration::from_secs(30), "{bound:?}");
    })
    .await;
}

/// A deadline for what the server does on its own.
async fn within<T>(limit: Duration, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(limit, wait).await.expect("in time")
}
