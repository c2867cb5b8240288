//! The subscriber: Kafka to one region's cache.
//!
//! **Promise.** Every invalidation of the consumed topics is applied at least once, whatever is killed at whatever instant; an offset is committed and
//! the cache's marker written only for records whose every answer is in; what cannot be read is set aside, never skipped.
//!
//! **Flow.** Kafka → [`broker`] → [`state`] (judge, track, decide) → [`cache`] → answers → watermark → commit and marker. The loop in
//! [`subscriber`] waits and performs; [`state::State::apply`] decides, synchronously.
//!
//! Reading order. Rules without I/O: [`judge`] (record to verdict), [`progress`] (watermarks), [`marker`] (where to start), [`work`],
//! [`state`], [`disposition`] (what follows from an answer). Edges: [`broker`] (Kafka), [`cache`] (Redis), [`config`], [`metrics`].
//! Commands: [`subscriber`] (`run`), [`check`], [`status`], [`inspect`], [`cli`].

pub mod broker;
pub mod cache;
pub mod check;
pub mod cli;
pub mod config;
pub mod disposition;
pub mod error;
pub mod inspect;
pub mod judge;
pub mod marker;
pub mod metrics;
pub mod progress;
pub mod state;
pub mod status;
pub mod subscriber;
pub mod work;
