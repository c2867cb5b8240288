//! The relay: from the outbox in Postgres to Kafka.
//!
//! It promises that every committed outbox row is published at least once, whatever is killed at whatever instant, and that no row which did not commit is
//! published at all. Rows become records with a version taken from the database's log *after* their commit became visible, so any number of relays
//! may claim in any order, side by side, without a leader.
//!
//! ```text
//! wake ──► outbox::claim ──► plan ──► broker::producer ──► settle ──► retire, in part, or release
//!  ▲          │ no valid epoch                                           │
//!  │          └─► broker::tail ─► epoch ─► outbox::epoch                 │
//!  └──────────────────────────── relay (the loop) ◄──────────────────────┘
//! ```
//!
//! Reading order. The rules, readable and testable without starting anything: [`plan`], [`settle`], [`failing`], [`pace`], [`epoch`], [`tail::trust`].
//! The edges: [`outbox`] (the only home of SQL), [`broker`] (the only home of Kafka), [`wake`] and [`tail`](mod@tail) (the only home of the replication
//! protocol). The loop: [`relay`], [`heartbeat`](mod@heartbeat). What surrounds it: [`config`], [`error`], [`disposition`] and `patience` (what to do
//! after an error), [`metrics`]. By hand: [`cli`], [`check`], [`status`].

pub mod broker;
pub mod check;
pub mod cli;
pub mod config;
pub mod disposition;
pub mod epoch;
pub mod error;
pub mod failing;
pub mod heartbeat;
pub mod metrics;
pub mod outbox;
pub mod pace;
mod patience;
pub mod plan;
pub mod relay;
pub mod settle;
pub mod status;
pub mod tail;
pub mod wake;

pub use config::Config;
pub use error::Error;
pub use relay::run;
