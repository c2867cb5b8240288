//! What Recant promises, as tests on real servers. The list of names is the specification: a module is an area, a test is a promise.
//!
//! Relay and subscriber are the built binaries; see `recant_tests` for what each test is given.

mod bounds;
mod cache_loss;
mod cluster;
mod crashes;
mod delivery;
mod epochs;
mod fills;
mod floors;
mod gap_policy;
mod gaps;
mod input;
mod keys;
mod markers;
mod offsets;
mod operation;
mod poison;
mod race;
mod sentinel;
mod tidy;
mod wake_ups;
