//! The harness: a whole pipeline of a test's own, on real servers, with faults that have names.
//!
//! **Promise.** A test shares nothing with another but the servers: [`Pipeline`] gives it a database, topics, groups, regions and a key prefix of its own and
//! takes all of them away again, also after a panic. Relay and subscriber are the unmodified binaries, as child processes; crashes at
//! exact steps are made from outside, by holding what crosses a [`Proxy`] and killing the process then. Nothing waits by sleeping: [`eventually`]
//! looks until it sees, with a deadline.
//!
//! Reading order: [`servers`] (where Postgres, Kafka and Redis are), [`pipeline`] (one test's world), [`source`] (the product's side), [`cache`] (one region's Redis),
//! [`kafka`] and [`records`] (records by hand), [`daemon`] (one child process), [`proxy`] (faults on the wire), [`private`] and [`redis_sets`] (servers to be killed), [`wait`].

pub mod cache;
pub mod daemon;
pub mod kafka;
pub mod pipeline;
pub mod private;
pub mod proxy;
pub mod records;
pub mod redis_sets;
pub mod servers;
pub mod source;
pub mod wait;

pub use cache::Cache;
pub use daemon::Daemon;
pub use kafka::Kafka;
pub use pipeline::{Builder, Pipeline, Region};
pub use proxy::Proxy;
pub use servers::Servers;
pub use source::Database;
pub use wait::{DEADLINE, eventually};
