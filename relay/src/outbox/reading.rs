//! Reading without claiming: what a heartbeat says, and how old the oldest row is.

use super::{Micros, OutboxFault, Session, answer, unsigned};
use recant_schema::labels::EpochCause;
use recant_schema::version::Version;
use sqlx::Row as _;
use std::time::Duration;

/// What a heartbeat says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// The epoch, and the position up to which the log was flushed: history that survives every crash.
    pub version: Version,
    /// How the epoch came about.
    pub cause: Option<EpochCause>,
    /// The source's clock, microseconds since 1970.
    pub clock_us: i64,
}

// The same judgement as in the claim, in one statement with the position: a heartbeat of a run that is not vouched for would prove history that is not there.
const PULSE: &str = "
    select source.epoch, (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint, source.cause, clock_timestamp()
    from recant.source source
    join recant.incarnation incarnation
      on incarnation.epoch = source.epoch
     and incarnation.started_at = pg_postmaster_start_time()
     and incarnation.database = (select oid from pg_database where datname = current_database())";

// The claim's judgement and its scan, without the claim. Rows that another relay holds count too; the claim that follows passes over them.
const PEEK: &str = "
    select
        exists (
            select from recant.source source
            join recant.incarnation incarnation
              on incarnation.epoch = source.epoch
             and incarnation.started_at = pg_postmaster_start_time()
             and incarnation.database = (select oid from pg_database where datname = current_database())
        ),
        exists (select from recant.outbox where id > $1),
        (select last_value from recant.outbox_id_seq)";

// The lowest id is the oldest row, give or take the time between two inserts. Rows that a claim holds are still seen: they are not published yet.
const OLDEST: &str = "select clock_timestamp(), (select created_at from recant.outbox order by id limit 1)";

// A statement that runs into its time-out, then an open transaction that idles into its own. Both in milliseconds.
const LONGEST_HOLD: &str = "
    select sum(setting::bigint)::bigint from pg_settings where name in ('statement_timeout', 'idle_in_transaction_session_timeout')";

impl Session {
    /// The pulse, `None` when the epoch is not vouched for.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn pulse(&mut self) -> Result<Option<Pulse>, OutboxFault> {
        let row = answer(sqlx::query(PULSE).fetch_optional(&mut self.connection)).await?;
        row.map(|row| {
            let Micros(clock_us) = row.try_get(3)?;
            let version = Version::new(unsigned(row.try_get(0)?), unsigned(row.try_get(1)?));
            let cause: Option<&str> = row.try_get(2)?;
            Ok(Pulse { version, cause: cause.and_then(EpochCause::parse), clock_us })
        })
        .transpose()
        .map_err(OutboxFault::new)
    }

    /// Looks whether a claim above this id would be worth its transaction: returns the identity sequence's last value when there is nothing to do, `None`
    /// when there are rows or the epoch is not vouched for, so that a claim has to be made.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn nothing_above(&mut self, above: i64) -> Result<Option<i64>, OutboxFault> {
        let row = answer(sqlx::query(PEEK).bind(above).fetch_one(&mut self.connection)).await?;
        let read = || -> Result<_, sqlx::Error> { Ok((row.try_get::<bool, _>(0)?, row.try_get::<bool, _>(1)?, row.try_get::<i64, _>(2)?)) };
        let (valid, rows, last_value) = read().map_err(OutboxFault::new)?;
        Ok((valid && !rows).then_some(last_value))
    }

    /// How long the server lets this session keep rows locked after its relay has stopped, by the settings in force.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn longest_hold(&mut self) -> Result<Duration, OutboxFault> {
        let row = answer(sqlx::query(LONGEST_HOLD).fetch_one(&mut self.connection)).await?;
        Ok(Duration::from_millis(unsigned(row.try_get(0).map_err(OutboxFault::new)?)))
    }

    /// How long the oldest outbox row has been waiting; zero when there is none.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn oldest_row_age(&mut self) -> Result<Duration, OutboxFault> {
        let row = answer(sqlx::query(OLDEST).fetch_one(&mut self.connection)).await?;
        let Micros(now) = row.try_get(0).map_err(OutboxFault::new)?;
        let oldest: Option<Micros> = row.try_get(1).map_err(OutboxFault::new)?;
        Ok(oldest.map_or(Duration::ZERO, |Micros(at)| Duration::from_micros(unsigned(now.saturating_sub(at)))))
    }
}
