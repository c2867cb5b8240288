//! The outbox in Postgres: the only home of SQL.
//!
//! Reading order: this file (sessions and faults), [`claim`] (claim, retire, release), [`epoch`] (vouching for a run of the database), [`reading`]
//! (heartbeats, ages), [`log`] (what the tail asks), [`admin`] (migrate, check, status, invalidate).

pub mod admin;
pub mod claim;
pub mod epoch;
pub mod log;
pub mod reading;

use recant_schema::service::config::Secret;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection, Decode, Executor, Postgres, Row as _, Type};
use std::str::FromStr;
use std::time::Duration;

/// Most time to open a session, name resolution and TLS included. A server that takes longer is as good as away; the next attempt follows soon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Most time to wait for the answer to one statement: the server's own limit for it (`statement_timeout`, 8 s), and 2 s for the way there and back.
/// Without it a network that swallows packets would hold the relay for as long as the kernel tries again, a quarter of an hour.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8 + 2);

/// Settings of every relay session, sent when it opens.
///
/// A relay that is frozen, or cut off, must not keep the rows it has claimed for longer than 30 s. The worst case adds up to 28 s:
/// a statement runs into its time-out (8 s), or its answer is lost on the way; then the open transaction sits idle until the server ends it (20 s).
/// A broken connection is noticed sooner: while idle by keepalives (5 s + 3 x 2 s = 11 s), with an answer unacknowledged by `tcp_user_timeout` (10 s), in
/// the middle of a statement by `client_connection_check_interval` (2 s). The answer of one claim (2,000 rows, some 400 KB) fits the kernel's send
/// buffers (4 MB), so a frozen relay cannot hold the server inside a write, where no time-out of the server's own would reach it.
const SETTINGS: &[(&str, &str)] = &[
    // Losing the commit of a retire only repeats its records; waiting for the disk would cap the drain rate. Raising an epoch switches it on again.
    ("synchronous_commit", "off"),
    ("statement_timeout", "8s"),
    ("idle_in_transaction_session_timeout", "20s"),
    ("tcp_keepalives_idle", "5"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "3"),
    // The statistics of a queue are always wrong: sampled empty, the table looks best read from end to end and sorted, which is a disaster with
    // a backlog. The one right plan for a claim walks the primary key, so the others are ruled out, and the plan is made once per session.
    ("enable_seqscan", "off"),
    ("enable_sort", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    // A ruled-out plan counts as very expensive, and an expensive plan would be compiled.
    ("jit", "off"),
    ("default_transaction_isolation", "read committed"),
    ("search_path", "pg_catalog,pg_temp"),
];

/// Settings that not every platform has; a server that refuses one is used all the same.
const OPTIONAL_SETTINGS: &[(&str, &str)] = &[("tcp_user_timeout", "10000"), ("client_connection_check_interval", "2000")];

/// Why something in Postgres failed, as far as it matters for what to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxTrouble {
    /// No connection, or it broke.
    Unreachable,
    /// Wrong user, password or database.
    LoginRefused,
    /// The schema is not there, or not as this relay needs it.
    NotMigrated,
    /// The login lacks a right.
    NoPrivilege,
    /// The server is a standby.
    NotPrimary,
    /// A deadlock or a serialization failure.
    Conflict,
    /// A time-out or an administrator ended the statement.
    Interrupted,
    /// `recant.invalidate` refused its arguments (class `RC`).
    Refused,
    /// A migration that was applied is not the one this relay carries.
    MigrationChanged,
    /// Anything else.
    Other,
}

/// A failure in Postgres.
#[derive(Debug, thiserror::Error)]
#[error("{}", describe(.source))]
pub struct OutboxFault {
    trouble: OutboxTrouble,
    source: sqlx::Error,
}

impl OutboxFault {
    fn new(source: sqlx::Error) -> Self {
        Self { trouble: classify(&source), source }
    }

    fn migration(error: sqlx::migrate::MigrateError) -> Self {
        use sqlx::migrate::MigrateError;
        match error {
            MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) => Self::new(source),
            other => Self { trouble: OutboxTrouble::MigrationChanged, source: sqlx::Error::Migrate(Box::new(other)) },
        }
    }

    fn timed_out() -> Self {
        Self::new(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time")))
    }

    /// What kind of failure it is.
    pub fn trouble(&self) -> OutboxTrouble {
        self.trouble
    }

    /// The server's SQLSTATE, if the server answered.
    pub fn sqlstate(&self) -> Option<String> {
        self.source.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned())
    }

    /// What a person can do about it.
    pub fn remedy(&self) -> Option<String> {
        let postgres = self.source.as_database_error().and_then(|error| error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>());
        if let Some(hint) = postgres.and_then(|error| error.hint()) {
            return Some(hint.to_owned());
        }
        let text = match self.trouble {
            OutboxTrouble::Unreachable => "check that Postgres runs and that database_url names its host and port",
            OutboxTrouble::LoginRefused => "correct user, password and database in database_url",
            OutboxTrouble::NotMigrated => "run relay migrate with a login that owns the database",
            OutboxTrouble::NoPrivilege => "run relay check: it names each missing GRANT",
            OutboxTrouble::NotPrimary => "database_url must name the primary",
            OutboxTrouble::MigrationChanged => "use the relay version that migrated this database, or a newer one",
            OutboxTrouble::Conflict | OutboxTrouble::Interrupted | OutboxTrouble::Refused | OutboxTrouble::Other => return None,
        };
        Some(text.to_owned())
    }
}

fn describe(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(database) => match (database.code(), database.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()) {
            (Some(code), Some(postgres)) => {
                let detail = postgres.detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
                format!("{}{detail} [SQLSTATE {code}]", postgres.message())
            }
            _ => database.message().to_owned(),
        },
        sqlx::Error::Migrate(error) => error.to_string(),
        sqlx::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

fn classify(error: &sqlx::Error) -> OutboxTrouble {
    match error {
        sqlx::Error::Database(database) => database.code().map_or(OutboxTrouble::Other, |code| of_sqlstate(&code)),
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => OutboxTrouble::Unreachable,
        _ => OutboxTrouble::Other,
    }
}

fn of_sqlstate(code: &str) -> OutboxTrouble {
    match code {
        // Wrong user or password; no such database.
        "28000" | "28P01" | "3D000" => OutboxTrouble::LoginRefused,
        // No such schema, table, column or function.
        "3F000" | "42P01" | "42703" | "42883" => OutboxTrouble::NotMigrated,
        "42501" => OutboxTrouble::NoPrivilege,
        // Read-only transaction; "recovery is in progress".
        "25006" | "55000" => OutboxTrouble::NotPrimary,
        "40001" | "40P01" => OutboxTrouble::Conflict,
        "57014" | "25P03" => OutboxTrouble::Interrupted,
        // Class 08: connection exceptions. 57P01 to 57P05: shutting down, starting up, dropped. 53300: too many connections.
        "53300" | "57P01" | "57P02" | "57P03" | "57P04" | "57P05" => OutboxTrouble::Unreachable,
        code if code.starts_with("08") => OutboxTrouble::Unreachable,
        code if code.starts_with("RC") => OutboxTrouble::Refused,
        _ => OutboxTrouble::Other,
    }
}

/// The database that a URL names, for the source's default name.
///
/// # Errors
/// What is wrong with the URL; the text does not repeat it, since it holds a password.
pub fn database_name(url: &Secret) -> Result<String, String> {
    let shape = "is not of the form postgres://user:password@host:port/database";
    if !url.expose().starts_with("postgres://") && !url.expose().starts_with("postgresql://") {
        return Err(shape.to_owned());
    }
    let options = PgConnectOptions::from_str(url.expose()).map_err(|_| shape.to_owned())?;
    match options.get_database() {
        Some(name) if !name.is_empty() => Ok(name.to_owned()),
        _ => Err("names no database; add /database at its end".to_owned()),
    }
}

/// One session of the relay with Postgres.
#[derive(Debug)]
pub struct Session {
    connection: PgConnection,
    /// Whether commit times are tracked; the claim reads other columns then.
    commit_times: bool,
}

impl Session {
    /// Opens a session with all of the relay's settings. `purpose` appears in `pg_stat_activity` behind the relay's name.
    ///
    /// # Errors
    /// When there is no session within five seconds.
    pub async fn open(url: &Secret, relay_name: &str, purpose: &str) -> Result<Self, OutboxFault> {
        let options = PgConnectOptions::from_str(url.expose()).map_err(OutboxFault::new)?;
        // Postgres cuts application names at 63 bytes.
        let options = options.application_name(&format!("recant {purpose} {relay_name}")).options(SETTINGS.iter().copied());
        let open = async {
            let mut connection = options.connect().await.map_err(OutboxFault::new)?;
            for (name, value) in OPTIONAL_SETTINGS {
                // A platform without it: the other time-outs still hold.
                let _ = sqlx::query("select set_config($1, $2, false)").bind(name).bind(value).execute(&mut connection).await;
            }
            let row = connection.fetch_one("select current_setting('track_commit_timestamp')::bool").await.map_err(OutboxFault::new)?;
            Ok(Self { commit_times: row.try_get(0).map_err(OutboxFault::new)?, connection })
        };
        tokio::time::timeout(CONNECT_TIMEOUT, open).await.unwrap_or_else(|_| Err(OutboxFault::timed_out()))
    }

    /// Says good-bye; the server frees everything anyway when the connection ends.
    pub async fn close(self) {
        let _ = answer(self.connection.close()).await;
    }
}

/// Waits for the server's answer, at most [`ANSWER_TIMEOUT`]. Past that the session is as good as broken: whoever gets the fault has to drop it.
async fn answer<T>(wait: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, OutboxFault> {
    match tokio::time::timeout(ANSWER_TIMEOUT, wait).await {
        Ok(result) => result.map_err(OutboxFault::new),
        Err(_) => Err(OutboxFault::timed_out()),
    }
}

/// Microseconds since 1970, read from a `timestamptz`. "infinity" and its negative become the ends of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Micros(i64);

/// The type's number in `pg_type`, the same in every Postgres.
const TIMESTAMPTZ: u32 = 1184;

/// 2000-01-01, which Postgres counts from, in microseconds since 1970.
const POSTGRES_EPOCH_US: i64 = 946_684_800_000_000;

impl Type<Postgres> for Micros {
    fn type_info() -> sqlx::postgres::PgTypeInfo {
        sqlx::postgres::PgTypeInfo::with_oid(sqlx::postgres::types::Oid(TIMESTAMPTZ))
    }
}

impl<'r> Decode<'r, Postgres> for Micros {
    fn decode(value: sqlx::postgres::PgValueRef<'r>) -> Result<Self, sqlx::error::BoxDynError> {
        // All queries here go through the extended protocol, which answers in binary: eight bytes, microseconds since 2000.
        let bytes: [u8; 8] = value.as_bytes()?.try_into()?;
        Ok(Self(i64::from_be_bytes(bytes).saturating_add(POSTGRES_EPOCH_US)))
    }
}

/// Postgres has no unsigned numbers; none of ours is ever negative.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// An epoch or a position as Postgres holds it. Positions stay below 2^63 by construction, and epochs near the clock.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_to_name_a_database() {
        assert_eq!(database_name(&Secret::new("postgres://u:p@h:1/shop".into())), Ok("shop".to_owned()));
        for bad in ["", "shop", "mysql://h/shop", "postgres://h:notaport/x"] {
            let problem = database_name(&Secret::new(bad.into())).unwrap_err();
            assert!(bad.is_empty() || !problem.contains(bad));
        }
    }

    #[test]
    fn troubles_are_told_apart_by_sqlstate() {
        for (code, trouble) in [
            ("28P01", OutboxTrouble::LoginRefused),
            ("42P01", OutboxTrouble::NotMigrated),
            ("42501", OutboxTrouble::NoPrivilege),
            ("40P01", OutboxTrouble::Conflict),
            ("57P01", OutboxTrouble::Unreachable),
            ("08006", OutboxTrouble::Unreachable),
            ("RC001", OutboxTrouble::Refused),
            ("XX000", OutboxTrouble::Other),
        ] {
            assert_eq!(of_sqlstate(code), trouble, "{code}");
        }
    }
}
