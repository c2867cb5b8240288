//! Claim, retire, release.
//!
//! A claim is a transaction: it deletes the rows, stays open while they are published, and commits only when the broker has acknowledged every
//! record. Rolled back, by choice or because the relay died, the rows are there again for anybody. Nothing can be skipped, and there is no leader.
//!
//! When some records are acknowledged and others wait for a topic, the whole claim is rolled back, and the acknowledged rows are deleted in a second
//! transaction. A crash in between repeats records and loses none, and the waiting rows keep the transaction that wrote them and with it their commit time;
//! to put them back with an insert would make them look newer than they are.

use super::{Micros, OutboxFault, Session, answer, unsigned};
use crate::pace::Scan;
use crate::plan::{Reason, Row};
use recant_schema::labels::{CommitBasis, EpochCause};
use sqlx::postgres::PgRow;
use sqlx::{Connection, Executor, Postgres, Row as _, Transaction};

/// What a claim found.
#[derive(Debug)]
pub struct Claimed {
    /// The epoch, `None` when it is not vouched for: then nothing was claimed, and the epoch has to be raised.
    pub epoch: Option<(u64, Option<EpochCause>)>,
    /// The newest identity given out.
    pub last_value: i64,
    /// The source's clock, microseconds since 1970.
    pub clock_us: i64,
    /// The rows, in no particular order.
    pub rows: Vec<Row>,
}

/// The open transaction of a claim. Dropping it releases the rows.
#[derive(Debug)]
pub struct Claim<'a> {
    transaction: Transaction<'a, Postgres>,
}

// The claiming statement. $1 and $2 bound the ids, $3 the number of rows, $4 names the pins and lanes that wait for a topic (crate::failing).
//
// valid     the epoch, if this run of this database is vouched for. Judged in the same statement as the claim: a check beforehand could pass on one
//           server and the claim run on its successor.
// claimed   any(array(…)) and not in (…): 1.4 to 2.4 times faster, and it keeps the limit under any plan. "skip locked" passes over what other
//           relays hold. The version is taken in returning, when the row's own delete has written WAL already: a later claim of a
//           later commit therefore always stamps higher.
// $4        a row waits if any of its topics fails. A lane that is not known counts as realtime, as in the plan. Empty as a rule, and then nothing
//           more is looked at.
// left()    rows that got around recant.invalidate may be of any size; what is cut is longer than any limit and gets set aside as such.
// to_json   a Postgres array can have nulls and dimensions; as JSON it is one text, read and judged by the planner.
//
// The outer join reports the epoch also when nothing was claimed: "nothing to do" and "not vouched for" are different answers.
macro_rules! claiming {
    ($committed:literal, $tracked:literal) => {
        concat!(
            "with valid as (
                select source.epoch, source.cause
                from recant.source source
                join recant.incarnation incarnation
                  on incarnation.epoch = source.epoch
                 and incarnation.started_at = pg_postmaster_start_time()
                 and incarnation.database = (select oid from pg_database where datname = current_database())
            ),
            claimed as (
                delete from recant.outbox
                where id = any(array(
                    select id from recant.outbox
                    where exists (select from valid) and id > $1 and id <= $2
                      and (cardinality($4::text[]) = 0 or not exists (
                          select from unnest(coalesce(regions, array[null::text])) as pin (region)
                          where coalesce(pin.region, '') || case when lane = 'bulk' then '/bulk' else '/realtime' end = any($4::text[])
                      ))
                    order by id
                    limit $3
                    for update skip locked
                ))
                returning
                    id, left(key, 1000) as key, left(tenant, 1000) as tenant, left(class, 100) as class,
                    left(to_json(regions)::text, 4000) as regions, left(lane, 100) as lane, left(traceparent, 100) as traceparent,
                    (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as position, ",
            $committed,
            " as committed_at, ",
            $tracked,
            " as tracked
            )
            select
                valid.epoch, valid.cause, (select last_value from recant.outbox_id_seq), clock_timestamp(),
                claimed.id, claimed.key, claimed.tenant, claimed.class, claimed.regions, claimed.lane, claimed.traceparent,
                claimed.position, claimed.committed_at, claimed.tracked
            from (select max(epoch) as epoch, max(cause) as cause from valid) valid
            left join claimed on true"
        )
    };
}

/// Where the server tracks commit times; very old transactions may be forgotten, hence the fallback.
const CLAIM_WITH_COMMIT_TIMES: &str =
    claiming!("coalesce(pg_xact_commit_timestamp(xmin), created_at)", "pg_xact_commit_timestamp(xmin) is not null");

/// Where it does not: the clock at the insert, which lies before the commit.
const CLAIM: &str = claiming!("created_at", "false");

// Only what is still there and free: rows that somebody else has claimed meanwhile are theirs to publish again. What was set aside is noted
// by whoever deletes it, once. $1 all rows to retire; $2, $3, $4 those set aside.
const RETIRE_PART: &str = "
    with gone as (
        delete from recant.outbox
        where id = any(array(select id from recant.outbox where id = any($1::bigint[]) for update skip locked))
        returning id
    )
    insert into recant.set_aside (row, reason)
    select aside.row::jsonb, aside.reason
    from unnest($2::bigint[], $3::text[], $4::text[]) as aside (id, row, reason)
    join gone on gone.id = aside.id";

impl Session {
    /// Claims up to `scan.limit` rows, locking them until the claim is retired, released or dropped. `waiting`: from
    /// [`Failing::pins`](crate::failing::Failing::pins); rows of these are left alone.
    ///
    /// # Errors
    /// From Postgres; nothing is claimed then.
    pub async fn claim(&mut self, scan: Scan, waiting: &[String]) -> Result<(Claim<'_>, Claimed), OutboxFault> {
        let statement = if self.commit_times { CLAIM_WITH_COMMIT_TIMES } else { CLAIM };
        let mut transaction = answer(self.connection.begin()).await?;
        let query = sqlx::query(statement).bind(scan.above).bind(scan.up_to).bind(i64::from(scan.limit)).bind(waiting);
        let rows = answer(query.fetch_all(&mut *transaction)).await?;
        let claimed = read(&rows).map_err(OutboxFault::new)?;
        Ok((Claim { transaction }, claimed))
    }

    /// The plan that this session uses for its claims, one node a line: it has to walk the primary key whatever the table's statistics say.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn explain_claim(&mut self) -> Result<String, OutboxFault> {
        let statement = if self.commit_times { CLAIM_WITH_COMMIT_TIMES } else { CLAIM };
        let prepare = format!("prepare recant_claim (bigint, bigint, bigint, text[]) as {statement}");
        self.connection.execute(sqlx::AssertSqlSafe(prepare)).await.map_err(OutboxFault::new)?;
        let explain = "explain execute recant_claim (0, 9223372036854775807, 128, '{us/realtime}')";
        let lines = self.connection.fetch_all(explain).await.map_err(OutboxFault::new)?;
        self.connection.execute("deallocate recant_claim").await.map_err(OutboxFault::new)?;
        let lines: Result<Vec<String>, _> = lines.iter().map(|line| line.try_get(0)).collect();
        Ok(lines.map_err(OutboxFault::new)?.join("\n"))
    }
}

fn read(rows: &[PgRow]) -> Result<Claimed, sqlx::Error> {
    let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let epoch: Option<i64> = first.try_get(0)?;
    let cause: Option<&str> = first.try_get(1)?;
    let Micros(clock_us) = first.try_get(3)?;
    let mut claimed = Claimed {
        epoch: epoch.map(|epoch| (unsigned(epoch), cause.and_then(EpochCause::parse))),
        last_value: first.try_get(2)?,
        clock_us,
        rows: Vec::with_capacity(rows.len()),
    };
    for row in rows {
        // The one row of a claim of nothing has no id.
        let Some(id) = row.try_get::<Option<i64>, _>(4)? else { continue };
        let Micros(committed_at_us) = row.try_get(12)?;
        claimed.rows.push(Row {
            id,
            key: row.try_get(5)?,
            tenant: row.try_get(6)?,
            class: row.try_get(7)?,
            regions: row.try_get(8)?,
            lane: row.try_get(9)?,
            traceparent: row.try_get(10)?,
            position: unsigned(row.try_get(11)?),
            committed_at_us,
            commit_basis: if row.try_get(13)? { CommitBasis::Commit } else { CommitBasis::Insert },
        });
    }
    Ok(claimed)
}

impl Claim<'_> {
    /// Notes rows that cannot be published, to take effect when the claim is retired.
    ///
    /// # Errors
    /// From Postgres; the claim is lost then.
    pub async fn set_aside(&mut self, rows: &[(&Row, Reason)]) -> Result<(), OutboxFault> {
        if rows.is_empty() {
            return Ok(());
        }
        let texts: Vec<String> = rows.iter().map(|(row, _)| as_json(row)).collect();
        let reasons: Vec<&str> = rows.iter().map(|(_, reason)| reason.as_str()).collect();
        let insert = "insert into recant.set_aside (row, reason) select t.row::jsonb, t.reason from unnest($1::text[], $2::text[]) as t (row, reason)";
        answer(sqlx::query(insert).bind(texts).bind(reasons).execute(&mut *self.transaction)).await.map(drop)
    }

    /// The broker has everything: the rows are gone.
    ///
    /// # Errors
    /// From Postgres; the rows may come back and be published again, which is harmless.
    pub async fn retire(self) -> Result<(), OutboxFault> {
        answer(self.transaction.commit()).await
    }

    /// The broker has some of it: these rows are gone, those of `aside` among them with a note, and the others are given back.
    ///
    /// # Errors
    /// From Postgres; all rows may come back and be published again, which is harmless.
    pub async fn retire_part(mut self, retired: &[&Row], aside: &[(&Row, Reason)]) -> Result<(), OutboxFault> {
        answer(self.transaction.execute("rollback and chain")).await?;
        let ids: Vec<i64> = retired.iter().map(|row| row.id).collect();
        let aside_ids: Vec<i64> = aside.iter().map(|(row, _)| row.id).collect();
        let texts: Vec<String> = aside.iter().map(|(row, _)| as_json(row)).collect();
        let reasons: Vec<&str> = aside.iter().map(|(_, reason)| reason.as_str()).collect();
        let query = sqlx::query(RETIRE_PART).bind(ids).bind(aside_ids).bind(texts).bind(reasons);
        answer(query.execute(&mut *self.transaction)).await?;
        answer(self.transaction.commit()).await
    }

    /// Gives the rows back at once.
    ///
    /// # Errors
    /// From Postgres; the rows are free all the same once the session ends.
    pub async fn release(self) -> Result<(), OutboxFault> {
        answer(self.transaction.rollback()).await
    }
}

fn as_json(row: &Row) -> String {
    serde_json::json!({
        "id": row.id, "key": row.key, "tenant": row.tenant, "class": row.class, "regions": row.regions, "lane": row.lane,
        "traceparent": row.traceparent, "position": row.position, "committed_at_us": row.committed_at_us,
    })
    .to_string()
}
