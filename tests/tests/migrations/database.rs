//! A database per test, and what the tests ask it.

use futures::FutureExt as _;
use recant_relay::epoch::Published;
use recant_relay::outbox::Session;
use recant_relay::outbox::admin::migrate;
use recant_schema::service::config::Secret;
use recant_schema::topics::Region;
use sqlx::postgres::{PgConnectOptions, PgDatabaseError};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, PgConnection, Row as _};
use std::panic::AssertUnwindSafe;
use std::str::FromStr as _;
use uuid::Uuid;

/// Where `make up` puts Postgres.
const DEFAULT_URL: &str = "postgres://recant:recant@127.0.0.1:55432/recant";

#[expect(clippy::disallowed_methods, reason = "a test finds its server by the environment, as the harness does")]
fn server_url() -> String {
    std::env::var("DATABASE_URL").unwrap_or_else(|_| DEFAULT_URL.to_owned())
}

/// A database of one test alone.
pub(crate) struct Database {
    pub(crate) name: String,
    logins: u32,
}

impl Database {
    pub(crate) fn options(&self) -> PgConnectOptions {
        PgConnectOptions::from_str(&server_url()).expect("DATABASE_URL is a Postgres URL").database(&self.name).disable_statement_logging()
    }

    pub(crate) fn url(&self) -> Secret {
        Secret::new(self.options().to_url_lossy().to_string())
    }

    /// For one of this test's logins.
    pub(crate) fn url_of(&self, login: &str) -> Secret {
        Secret::new(self.options().username(login).password(login).to_url_lossy().to_string())
    }

    /// Through something that stands before the server.
    pub(crate) fn url_at(&self, host: &str, port: u16) -> Secret {
        Secret::new(self.options().host(host).port(port).to_url_lossy().to_string())
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        self.options().connect().await.unwrap_or_else(|error| panic!("no Postgres at DATABASE_URL ({error}); start one with: make up"))
    }

    pub(crate) async fn migrate(&self) {
        migrate(&self.url(), &[region("eu"), region("us")]).await.unwrap();
    }

    pub(crate) async fn session(&self, name: &str) -> Session {
        self.session_at(&self.url(), name).await
    }

    pub(crate) async fn session_at(&self, url: &Secret, name: &str) -> Session {
        Session::open(url, name, "test").await.unwrap()
    }

    /// A session of the relay's whose epoch is raised, so that it can claim.
    pub(crate) async fn claiming(&self, name: &str) -> Session {
        let mut session = self.session(name).await;
        session.raise_epoch(Published::default()).await.unwrap();
        session
    }

    /// A login of this test alone, member of `role` if one is given.
    pub(crate) async fn login(&mut self, role: Option<&str>) -> (String, PgConnection) {
        self.logins += 1;
        let name = format!("{}_{}", self.name, self.logins);
        let mut admin = self.connect().await;
        run(&mut admin, &format!("create role {name} login password '{name}'")).await.unwrap();
        if let Some(role) = role {
            run(&mut admin, &format!("grant {role} to {name}")).await.unwrap();
        }
        let connection = self.options().username(&name).password(&name).connect().await.unwrap();
        (name, connection)
    }
}

/// Runs a test in a database of its own, and drops that and the test's logins whatever happens. `create` is added to `create database`.
pub(crate) async fn with_database(create: &str, test: impl AsyncFnOnce(&mut Database)) {
    let options = PgConnectOptions::from_str(&server_url()).expect("DATABASE_URL is a Postgres URL").disable_statement_logging();
    let mut admin =
        options.connect().await.unwrap_or_else(|error| panic!("no Postgres at DATABASE_URL ({error}); start one with: make up"));
    let mut database = Database { name: format!("recant_test_{}", Uuid::now_v7().simple()), logins: 0 };
    run(&mut admin, &format!("create database {} {create}", database.name)).await.unwrap();
    let outcome = AssertUnwindSafe(test(&mut database)).catch_unwind().await;
    run(&mut admin, &format!("drop database {} with (force)", database.name)).await.unwrap();
    for login in 1..=database.logins {
        // A test that failed early may not have made it.
        run(&mut admin, &format!("drop role if exists {}_{login}", database.name)).await.unwrap();
    }
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

pub(crate) async fn run(connection: &mut PgConnection, sql: &str) -> Result<(), sqlx::Error> {
    connection.execute(AssertSqlSafe(sql.to_owned())).await.map(drop)
}

pub(crate) async fn count(connection: &mut PgConnection, sql: &str) -> i64 {
    connection.fetch_one(AssertSqlSafe(sql.to_owned())).await.unwrap().try_get(0).unwrap()
}

pub(crate) const OUTBOX: &str = "select count(*) from recant.outbox";

/// SQLSTATE and hint of a refusal.
pub(crate) fn refusal(result: Result<(), sqlx::Error>) -> (String, Option<String>) {
    let error = result.expect_err("the call has to be refused");
    let postgres = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()).expect("the server answered");
    (postgres.code().to_owned(), postgres.hint().map(str::to_owned))
}

pub(crate) fn region(name: &str) -> Region {
    Region::parse(name).unwrap()
}
