//! What crosses a process boundary in Recant.
//!
//! A product service writes a [`key::Key`] into the outbox. The relay stamps it with a [`version::Version`] and encodes an
//! [`invalidation::Invalidation`] as a [`record::Record`] for one of the [`topics`]. A subscriber decodes it and runs one of the
//! [`scripts`] on its cache. Fillers run the same scripts, so the rules of marks and floors ([`tombstone`]) live here as well.
//!
//! Reading order: [`key`], [`version`], [`labels`], [`invalidation`], [`record`], [`topics`], [`tombstone`], [`scripts`]; then, behind the feature
//! `service`, what both daemons need to stand up (`service`). The core does no I/O and reads no clock.

pub mod invalidation;
pub mod key;
pub mod labels;
pub mod record;
pub mod scripts;
#[cfg(feature = "service")]
pub mod service;
pub mod tombstone;
pub mod topics;
pub mod version;
