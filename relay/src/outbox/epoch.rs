//! Vouching for this run of this database: raising the epoch.

use super::{OutboxFault, Session, answer, signed, unsigned};
use crate::epoch::{Home, Present, Published, Stored, next};
use recant_schema::labels::EpochCause;
use sqlx::{Connection, Executor, Row as _};

/// What raising found or did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// This call raised it.
    Here(u64, EpochCause),
    /// Another relay had raised it meanwhile.
    Elsewhere(u64),
}

// Everything that the decision needs, read under the lock. The timeline is the first eight hexadecimal digits of the name of the log file being written.
const PRESENT: &str = "
    select
        source.epoch, source.timeline,
        incarnation.epoch is null as incarnation_empty,
        coalesce(
            incarnation.epoch = source.epoch
            and incarnation.started_at = pg_postmaster_start_time()
            and incarnation.database = (select oid from pg_database where datname = current_database()),
            false
        ) as valid,
        extract(epoch from clock_timestamp())::bigint as unix_seconds,
        ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int as timeline_now,
        (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as position,
        source.cause, source.cluster, source.database::bigint,
        (select system_identifier from pg_control_system()) as cluster_now,
        (select oid::bigint from pg_database where datname = current_database()) as database_now
    from (select) one
    left join recant.source source on true
    left join recant.incarnation incarnation on true";

const STORE_SOURCE: &str = "
    insert into recant.source (epoch, cause, timeline, started_at, cluster, database)
    select $1, $2, $3, pg_postmaster_start_time(), system_identifier, oid
    from pg_database, pg_control_system() where datname = current_database()
    on conflict (only_row) do update
    set epoch = excluded.epoch, cause = excluded.cause, raised_at = clock_timestamp(), timeline = excluded.timeline,
        started_at = excluded.started_at, cluster = excluded.cluster, database = excluded.database";

const STORE_INCARNATION: &str = "
    insert into recant.incarnation (epoch, started_at, database)
    select $1, pg_postmaster_start_time(), oid from pg_database where datname = current_database()
    on conflict (only_row) do update
    set epoch = excluded.epoch, started_at = excluded.started_at, database = excluded.database";

impl Session {
    /// Raises the epoch, unless another relay has done so meanwhile. `published` was read from Kafka beforehand: the lock is not held while a
    /// broker is waited for.
    ///
    /// # Errors
    /// From Postgres; nothing has changed then.
    pub async fn raise_epoch(&mut self, published: Published) -> Result<Raised, OutboxFault> {
        let mut transaction = answer(self.connection.begin()).await?;
        // The new epoch must outlive a crash before anything is stamped with it: otherwise the next run would draw the same number again.
        answer(transaction.execute("set local synchronous_commit = on")).await?;
        // One at a time, and readers (claims, heartbeats) are not held up.
        answer(transaction.execute("lock table recant.source in share row exclusive mode")).await?;
        // A new statement sees what the holder before us committed.
        let row = answer(sqlx::query(PRESENT).fetch_one(&mut *transaction)).await?;
        let stored_epoch: Option<i64> = row.try_get(0).map_err(OutboxFault::new)?;
        if let (Some(epoch), true) = (stored_epoch, row.try_get(3).map_err(OutboxFault::new)?) {
            answer(transaction.rollback()).await?;
            return Ok(Raised::Elsewhere(unsigned(epoch)));
        }
        let (stored, present) = read(&row).map_err(OutboxFault::new)?;
        let (epoch, cause) = next(stored, &published, present);
        let timeline = i32::try_from(present.timeline).unwrap_or(i32::MAX);
        let store = sqlx::query(STORE_SOURCE).bind(signed(epoch)).bind(cause.as_str()).bind(timeline);
        answer(store.execute(&mut *transaction)).await?;
        answer(sqlx::query(STORE_INCARNATION).bind(signed(epoch)).execute(&mut *transaction)).await?;
        answer(transaction.commit()).await?;
        Ok(Raised::Here(epoch, cause))
    }
}

fn read(row: &sqlx::postgres::PgRow) -> Result<(Option<Stored>, Present), sqlx::Error> {
    let timeline = |number: i32| u32::try_from(number).unwrap_or(0);
    let stored = match row.try_get::<Option<i64>, _>(0)? {
        None => None,
        Some(epoch) => Some(Stored {
            epoch: unsigned(epoch),
            timeline: timeline(row.try_get(1)?),
            cause: EpochCause::parse(row.try_get(7)?),
            home: Home { cluster: row.try_get(8)?, database: row.try_get(9)? },
        }),
    };
    let present = Present {
        incarnation_empty: row.try_get(2)?,
        unix_seconds: unsigned(row.try_get(4)?),
        timeline: timeline(row.try_get(5)?),
        position: unsigned(row.try_get(6)?),
        home: Home { cluster: row.try_get(10)?, database: row.try_get(11)? },
    };
    Ok((stored, present))
}
