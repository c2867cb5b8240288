//! What people do by hand: migrate, check, status, invalidate.

use super::{CONNECT_TIMEOUT, Micros, OutboxFault, Session, unsigned};
use recant_schema::service::config::Secret;
use recant_schema::topics::Region;
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection, Executor, Row as _};
use std::str::FromStr;
use std::time::Duration;

/// Counting stops here: a backlog of millions must not make `status` slow, and beyond this the exact number changes nothing.
pub const COUNT_BOUND: i64 = 100_000;

/// Longest single statement of a migration, the wait for another relay's migration included.
const MIGRATION_STATEMENT_TIMEOUT: &str = "5min";

/// The migrations in this binary, and where the list of applied ones is kept.
fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!("../migrations");
    migrator.dangerous_set_table_name("recant.migrations");
    migrator.create_schema("recant");
    migrator
}

/// Applies what is missing and registers the regions. Safe to run by several relays at once and again at any time. Returns how many migrations
/// this binary carries.
///
/// # Errors
/// From Postgres; each migration is applied as a whole or not at all.
pub async fn migrate(url: &Secret, regions: &[Region]) -> Result<usize, OutboxFault> {
    let mut connection = plain_connection(url, "recant migrate").await?;
    let migrator = migrator();
    migrator.run_direct(None, &mut connection, false).await.map_err(OutboxFault::migration)?;
    let names: Vec<&str> = regions.iter().map(Region::as_str).collect();
    sqlx::query("insert into recant.region (name) select unnest($1::text[]) on conflict do nothing")
        .bind(names)
        .execute(&mut connection)
        .await
        .map_err(OutboxFault::new)?;
    let _ = connection.close().await;
    Ok(migrator.iter().count())
}

/// A session without the relay's settings, which suit claims only.
async fn plain_connection(url: &Secret, name: &str) -> Result<PgConnection, OutboxFault> {
    let options = PgConnectOptions::from_str(url.expose()).map_err(OutboxFault::new)?;
    let options = options.application_name(name).options([("statement_timeout", MIGRATION_STATEMENT_TIMEOUT)]);
    match tokio::time::timeout(CONNECT_TIMEOUT, options.connect()).await {
        Ok(connection) => connection.map_err(OutboxFault::new),
        Err(_) => Err(OutboxFault::timed_out()),
    }
}

/// What `relay check` wants to know about the server.
#[derive(Clone, Debug)]
pub struct ServerFacts {
    /// Such as 150004.
    pub version: i32,
    /// Such as UTF8.
    pub encoding: String,
    /// Whether it is a standby.
    pub in_recovery: bool,
    /// Whether commit times are tracked.
    pub commit_times: bool,
    /// `minimal`, `replica` or `logical`.
    pub wal_level: String,
    /// The login.
    pub login: String,
    /// The cluster's system identifier.
    pub cluster: String,
    /// How far it is migrated.
    pub migrations: Migrations,
}

/// How far a database is migrated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Migrations {
    /// Not at all.
    Never,
    /// The login may not read the list.
    Unreadable,
    /// These are missing, or were applied in another form than this binary carries. Empty: all are applied.
    Missing(Vec<i64>),
}

/// What `relay check` wants to know about a migrated database.
#[derive(Clone, Debug)]
pub struct SchemaFacts {
    /// Rights that the login lacks, each as the words after GRANT.
    pub missing_rights: Vec<String>,
    /// Logins that may call `recant.invalidate` and have no scope.
    pub unlimited_writers: Vec<String>,
    /// The rows of `recant.region`.
    pub regions: Vec<String>,
}

/// What `relay status` shows of the database.
#[derive(Clone, Debug)]
pub struct OutboxStatus {
    /// Epoch, cause, and when it was raised (microseconds since 1970).
    pub epoch: Option<(u64, String, i64)>,
    /// Whether this run of the database is vouched for.
    pub valid: bool,
    /// Rows in the outbox, counted up to one above [`COUNT_BOUND`].
    pub rows: i64,
    /// How long the oldest has been waiting.
    pub oldest: Duration,
    /// Rows set aside, counted up to one above [`COUNT_BOUND`].
    pub set_aside: i64,
}

// Without this right Postgres refuses to look up a name in the schema at all, so it is asked for first, and by the schema's number.
const MAY_USE_SCHEMA: &str =
    "select coalesce((select has_schema_privilege(oid, 'usage') from pg_namespace where nspname = 'recant'), false)";

// Every right that the relay uses, as it would be granted. Column rights count where they are enough.
const RIGHTS: &str = "
    select wanted.words from (values
        ('select on recant.outbox', has_table_privilege('recant.outbox', 'select')),
        ('delete on recant.outbox', has_table_privilege('recant.outbox', 'delete')),
        ('update (id) on recant.outbox', has_any_column_privilege('recant.outbox', 'update')),
        ('select on sequence recant.outbox_id_seq', has_sequence_privilege('recant.outbox_id_seq', 'select')),
        ('insert on recant.set_aside', has_table_privilege('recant.set_aside', 'insert')),
        ('select on recant.set_aside', has_table_privilege('recant.set_aside', 'select')),
        ('select, insert, update on recant.source',
            has_table_privilege('recant.source', 'select') and has_table_privilege('recant.source', 'insert')
            and has_table_privilege('recant.source', 'update')),
        ('select, insert, update on recant.incarnation',
            has_table_privilege('recant.incarnation', 'select') and has_table_privilege('recant.incarnation', 'insert')
            and has_table_privilege('recant.incarnation', 'update')),
        ('select on recant.region', has_table_privilege('recant.region', 'select')),
        ('select on recant.writer_scope', has_table_privilege('recant.writer_scope', 'select')),
        ('select on recant.migrations', has_table_privilege('recant.migrations', 'select'))
    ) as wanted (words, held)
    where not wanted.held";

// Superusers may do everything anyway and are no product service's login.
const UNLIMITED_WRITERS: &str = "
    select rolname::text from pg_roles
    where rolcanlogin and not rolsuper and pg_has_role(oid, 'recant_writer', 'member')
      and not exists (select from recant.writer_scope where role = rolname)
    order by 1 limit 20";

const STATUS: &str = "
    select
        source.epoch, source.cause, source.raised_at,
        coalesce(
            incarnation.epoch = source.epoch
            and incarnation.started_at = pg_postmaster_start_time()
            and incarnation.database = (select oid from pg_database where datname = current_database()),
            false
        ),
        (select count(*) from (select from recant.outbox limit $1 + 1) bounded),
        (select count(*) from (select from recant.set_aside limit $1 + 1) bounded)
    from (select) one
    left join recant.source source on true
    left join recant.incarnation incarnation on true";

const SERVER: &str = "
    select current_setting('server_version_num')::int, getdatabaseencoding()::text, pg_is_in_recovery(),
           current_setting('track_commit_timestamp')::bool, current_setting('wal_level'), session_user::text,
           list.oid is not null,
           coalesce(has_schema_privilege(list.relnamespace, 'usage') and has_table_privilege(list.oid, 'select'), false),
           (select system_identifier::text from pg_control_system())
    from (select) one
    left join pg_class list on list.relname = 'migrations' and list.relnamespace = (select oid from pg_namespace where nspname = 'recant')";

impl Session {
    /// About the server, whether or not it is migrated.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn server_facts(&mut self) -> Result<ServerFacts, OutboxFault> {
        let row = sqlx::query(SERVER).fetch_one(&mut self.connection).await.map_err(OutboxFault::new)?;
        let (migrated, readable): (bool, bool) = (row.try_get(6).map_err(OutboxFault::new)?, row.try_get(7).map_err(OutboxFault::new)?);
        let migrations = match (migrated, readable) {
            (false, _) => Migrations::Never,
            (true, false) => Migrations::Unreadable,
            (true, true) => Migrations::Missing(self.missing_migrations().await?),
        };
        let facts = || -> Result<ServerFacts, sqlx::Error> {
            Ok(ServerFacts {
                version: row.try_get(0)?,
                encoding: row.try_get(1)?,
                in_recovery: row.try_get(2)?,
                commit_times: row.try_get(3)?,
                wal_level: row.try_get(4)?,
                login: row.try_get(5)?,
                cluster: row.try_get(8)?,
                migrations,
            })
        };
        facts().map_err(OutboxFault::new)
    }

    async fn missing_migrations(&mut self) -> Result<Vec<i64>, OutboxFault> {
        let applied: Vec<(i64, Vec<u8>)> = sqlx::query_as("select version, checksum from recant.migrations where success")
            .fetch_all(&mut self.connection)
            .await
            .map_err(OutboxFault::new)?;
        let held = |version: i64, checksum: &[u8]| applied.iter().any(|(v, sum)| *v == version && sum == checksum);
        Ok(migrator().iter().filter(|migration| !held(migration.version, &migration.checksum)).map(|migration| migration.version).collect())
    }

    /// The rights that the login lacks, as the words after GRANT.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn missing_rights(&mut self) -> Result<Vec<String>, OutboxFault> {
        let may_use: bool = sqlx::query_scalar(MAY_USE_SCHEMA).fetch_one(&mut self.connection).await.map_err(OutboxFault::new)?;
        if !may_use {
            return Ok(vec!["usage on schema recant".to_owned()]);
        }
        sqlx::query_scalar(RIGHTS).fetch_all(&mut self.connection).await.map_err(OutboxFault::new)
    }

    /// Logins that may write without a scope (the first 20), and the known regions.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn schema_facts(&mut self) -> Result<SchemaFacts, OutboxFault> {
        let missing_rights = self.missing_rights().await?;
        let readable = |table: &str| !missing_rights.iter().any(|right| right.ends_with(table) || right.starts_with("usage"));
        let mut unlimited_writers = Vec::new();
        if readable("recant.writer_scope") {
            unlimited_writers = sqlx::query_scalar(UNLIMITED_WRITERS).fetch_all(&mut self.connection).await.map_err(OutboxFault::new)?;
        }
        let mut regions = Vec::new();
        if readable("recant.region") {
            let select = "select name from recant.region order by name";
            regions = sqlx::query_scalar(select).fetch_all(&mut self.connection).await.map_err(OutboxFault::new)?;
        }
        Ok(SchemaFacts { missing_rights, unlimited_writers, regions })
    }

    /// The state of the outbox.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn status(&mut self) -> Result<OutboxStatus, OutboxFault> {
        let row = sqlx::query(STATUS).bind(COUNT_BOUND).fetch_one(&mut self.connection).await.map_err(OutboxFault::new)?;
        let oldest = self.oldest_row_age().await?;
        let status = || -> Result<OutboxStatus, sqlx::Error> {
            let epoch: (Option<i64>, Option<String>, Option<Micros>) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            let epoch = match epoch {
                (Some(epoch), Some(cause), Some(Micros(raised))) => Some((unsigned(epoch), cause, raised)),
                _ => None,
            };
            Ok(OutboxStatus { epoch, valid: row.try_get(3)?, rows: row.try_get(4)?, oldest, set_aside: row.try_get(5)? })
        };
        status().map_err(OutboxFault::new)
    }

    /// Calls `recant.invalidate` for these keys, in a transaction of its own that is on disk when this returns.
    ///
    /// # Errors
    /// From Postgres; an SQLSTATE of class `RC` says what is wrong with the arguments. Nothing is written then.
    pub async fn invalidate(&mut self, call: &Call) -> Result<(), OutboxFault> {
        let mut transaction = self.connection.begin().await.map_err(OutboxFault::new)?;
        transaction.execute("set local synchronous_commit = on").await.map_err(OutboxFault::new)?;
        sqlx::query("select recant.invalidate($1::text[], tenant => $2, class => $3, regions => $4, lane => $5)")
            .bind(&call.keys)
            .bind(&call.tenant)
            .bind(&call.class)
            .bind(&call.regions)
            .bind(&call.lane)
            .execute(&mut *transaction)
            .await
            .map_err(OutboxFault::new)?;
        transaction.commit().await.map_err(OutboxFault::new)
    }
}

/// The arguments of `recant.invalidate`; the function judges them.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// One or more keys.
    pub keys: Vec<String>,
    /// Isolation label.
    pub tenant: Option<String>,
    /// Freshness class.
    pub class: Option<String>,
    /// Residency; `None` for all.
    pub regions: Option<Vec<String>>,
    /// Lane; `None` for realtime.
    pub lane: Option<String>,
}
