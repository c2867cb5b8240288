//! The product's side: a database of the test's own, and the one call that a product makes.

use crate::servers::{with_login, with_path};
use crate::wait::{fresh_name, run_elsewhere};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, Executor};

/// A database that is dropped with this value.
#[derive(Debug)]
pub struct Database {
    server_url: String,
    name: String,
}

impl Database {
    /// Creates an empty one.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn create(server_url: &str, name: &str) -> Self {
        Self::create_from(server_url, name, "template1").await
    }

    /// Creates one as a copy of another, which nobody may be connected to.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn create_from(server_url: &str, name: &str, template: &str) -> Self {
        let mut connection = connect(server_url).await;
        let statement = format!("create database \"{name}\" template \"{template}\"");
        connection.execute(AssertSqlSafe(statement)).await.unwrap_or_else(|error| panic!("create database {name}: {error}"));
        let _ = connection.close().await;
        Self { server_url: server_url.to_owned(), name: name.to_owned() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is, for its owner.
    pub fn url(&self) -> String {
        with_path(&self.server_url, &self.name)
    }

    /// A fresh login without any right but to connect; it is dropped with the value.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn login(&self) -> Login {
        let name = format!("recant_login_{}", fresh_name());
        let mut connection = self.connect().await;
        let statement = format!("create role {name} login password 'recant'");
        connection.execute(AssertSqlSafe(statement)).await.unwrap_or_else(|error| panic!("create role {name}: {error}"));
        Login { owner_url: self.server_url.clone(), url: with_login(&self.url(), &name, "recant"), name }
    }

    /// A connection as its owner.
    ///
    /// # Panics
    /// When there is none.
    pub async fn connect(&self) -> PgConnection {
        connect(&self.url()).await
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (url, name) = (self.server_url.clone(), self.name.clone());
        run_elsewhere(async move {
            // The server may have been killed by its test, together with the database.
            if let Ok(mut connection) = PgConnection::connect(&url).await {
                let _ = connection.execute(AssertSqlSafe(format!("drop database if exists \"{name}\" with (force)"))).await;
            }
        });
    }
}

/// A role that may log in.
#[derive(Debug)]
pub struct Login {
    owner_url: String,
    url: String,
    name: String,
}

impl Login {
    /// The role's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The database's URL with this login.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Login {
    fn drop(&mut self) {
        let (url, name) = (self.owner_url.clone(), self.name.clone());
        run_elsewhere(async move {
            if let Ok(mut connection) = PgConnection::connect(&url).await {
                let _ = connection.execute(AssertSqlSafe(format!("drop role if exists {name}"))).await;
            }
        });
    }
}

/// A connection to any database.
///
/// # Panics
/// With the command that starts the servers.
pub async fn connect(url: &str) -> PgConnection {
    PgConnection::connect(url).await.unwrap_or_else(|error| panic!("connect to Postgres: {error}; start the servers: make up"))
}

/// The call that a product makes in its transaction.
///
/// # Errors
/// What the function raises.
pub async fn invalidate(connection: &mut PgConnection, key: &str) -> Result<(), sqlx::Error> {
    sqlx::query("select recant.invalidate($1::text)").bind(key).execute(connection).await.map(drop)
}

/// The call with its array overload, in a transaction of its own.
///
/// # Panics
/// When it is refused.
pub async fn commit_all(connection: &mut PgConnection, keys: &[String]) {
    sqlx::query("select recant.invalidate($1::text[])").bind(keys).execute(connection).await.expect("good keys are taken");
}

/// One transaction that invalidates one key and commits.
///
/// # Panics
/// When it is refused.
pub async fn commit(connection: &mut PgConnection, key: &str) {
    invalidate(connection, key).await.unwrap_or_else(|error| panic!("invalidate {key}: {error}"));
}

/// How many rows wait in the outbox.
///
/// # Panics
/// When the outbox cannot be read.
pub async fn outbox_rows(connection: &mut PgConnection) -> i64 {
    sqlx::query_scalar("select count(*) from recant.outbox").fetch_one(connection).await.expect("the outbox can be counted")
}
