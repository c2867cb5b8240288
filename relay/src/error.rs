//! What can go wrong, the side first. Whether to try again is decided in [`crate::disposition`], from the fault's trouble.

use crate::broker::BrokerFault;
use crate::outbox::{OutboxFault, OutboxTrouble};
use recant_schema::service::config::Problems;
use std::error::Error as _;
use std::fmt::Write as _;

/// Everything that ends an operation of the relay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be used; one line per problem.
    #[error(transparent)]
    Configuration(#[from] Problems),
    /// No session with Postgres.
    #[error("connect to the database")]
    OutboxConnect(#[source] OutboxFault),
    /// The claiming statement failed.
    #[error("claim outbox rows")]
    OutboxClaim(#[source] OutboxFault),
    /// The claim could not be committed after its records were acknowledged; they will be repeated.
    #[error("retire outbox rows")]
    OutboxRetire(#[source] OutboxFault),
    /// The epoch could not be raised.
    #[error("raise the epoch")]
    OutboxEpoch(#[source] OutboxFault),
    /// Reading the state of the outbox failed.
    #[error("read the outbox")]
    OutboxRead(#[source] OutboxFault),
    /// A migration failed.
    #[error("migrate the database")]
    OutboxMigrate(#[source] OutboxFault),
    /// `recant.invalidate` refused the call or failed.
    #[error("invalidate")]
    OutboxInvalidate(#[source] OutboxFault),
    /// No client could be made with these options.
    #[error("set up the Kafka client")]
    BrokerSetUp(#[source] BrokerFault),
    /// Topics and partitions could not be read.
    #[error("read topics")]
    BrokerMetadata(#[source] BrokerFault),
    /// The newest epoch in the topics could not be read.
    #[error("read the ends of the topics")]
    BrokerTail(#[source] BrokerFault),
    /// Records were not acknowledged.
    #[error("publish invalidations")]
    BrokerPublish(#[source] BrokerFault),
    /// Heartbeats were not acknowledged.
    #[error("publish heartbeats")]
    BrokerHeartbeat(#[source] BrokerFault),
    /// Topics could not be created or changed.
    #[error("create topics")]
    BrokerTopics(#[source] BrokerFault),
    /// These topics take no records; the others go on.
    #[error("publish to the topics {0}")]
    BrokerTopicsFailing(String),
    /// The HTTP address is not free, or the server failed.
    #[error("serve HTTP: {0}")]
    Http(String),
    /// The process may not install signal handlers.
    #[error("listen for signals")]
    Signals(#[source] std::io::Error),
    /// A task of the relay panicked: a defect.
    #[error("keep a task running")]
    Task(#[source] tokio::task::JoinError),
}

impl Error {
    /// The fault, when it is Postgres'.
    pub fn outbox_fault(&self) -> Option<&OutboxFault> {
        match self {
            Self::OutboxConnect(fault)
            | Self::OutboxClaim(fault)
            | Self::OutboxRetire(fault)
            | Self::OutboxEpoch(fault)
            | Self::OutboxRead(fault)
            | Self::OutboxMigrate(fault)
            | Self::OutboxInvalidate(fault) => Some(fault),
            _ => None,
        }
    }

    /// The fault, when it is Kafka's.
    pub fn broker_fault(&self) -> Option<&BrokerFault> {
        match self {
            Self::BrokerSetUp(fault)
            | Self::BrokerMetadata(fault)
            | Self::BrokerTail(fault)
            | Self::BrokerPublish(fault)
            | Self::BrokerHeartbeat(fault)
            | Self::BrokerTopics(fault) => Some(fault),
            _ => None,
        }
    }

    /// One line for a person: what was attempted, why it failed, and what to do.
    pub fn line(&self) -> String {
        let mut line = format!("could not {self}");
        // One level: a fault's own text already says what lies below it.
        if let Some(cause) = self.source() {
            let _ = write!(line, ": {cause}");
        }
        if let Some(remedy) = self.remedy() {
            let _ = write!(line, "; {remedy}");
        }
        line.replace('\n', " ")
    }

    /// What a person can do about it.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::OutboxMigrate(fault) if fault.trouble() == OutboxTrouble::NoPrivilege => {
                Some("use a login that owns the database (or may create schemas in it) and may create roles".to_owned())
            }
            Self::OutboxInvalidate(fault) if fault.trouble() == OutboxTrouble::NoPrivilege => {
                Some("use a login of a product service, or: grant recant_writer to this one".to_owned())
            }
            Self::BrokerTopicsFailing(_) => Some("run relay topics, and allow this login to describe and write them".to_owned()),
            other => other.outbox_fault().map_or_else(|| other.broker_fault().and_then(BrokerFault::remedy), OutboxFault::remedy),
        }
    }
}
