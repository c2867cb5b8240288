//! The schema `recant` on a real Postgres.

#[path = "migrations/claiming.rs"]
mod claiming;
#[path = "migrations/database.rs"]
mod database;
#[path = "migrations/migrating.rs"]
mod migrating;
#[path = "migrations/waiting.rs"]
mod waiting;
#[path = "migrations/writing.rs"]
mod writing;
