//! What to do after an error: the one place that decides whether to try again.

use crate::broker::BrokerTrouble;
use crate::error::Error;
use crate::outbox::OutboxTrouble;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Try again at once: the attempt itself was fine and lost a race.
    RetryNow,
    /// Try again after a growing delay, without end: the service outlives outages, and a person may repair what is wrong meanwhile.
    BackOff,
    /// End the process.
    Fatal,
}

/// Decides. Exhaustive on purpose: a new error has to be thought about here.
pub fn of(error: &Error) -> Disposition {
    match error {
        Error::Configuration(_) | Error::BrokerSetUp(_) | Error::Http(_) | Error::Signals(_) | Error::Task(_) => Disposition::Fatal,
        Error::OutboxConnect(fault)
        | Error::OutboxClaim(fault)
        | Error::OutboxRetire(fault)
        | Error::OutboxEpoch(fault)
        | Error::OutboxRead(fault)
        | Error::OutboxMigrate(fault)
        | Error::OutboxInvalidate(fault) => outbox(fault.trouble()),
        Error::BrokerMetadata(fault)
        | Error::BrokerTail(fault)
        | Error::BrokerPublish(fault)
        | Error::BrokerHeartbeat(fault)
        | Error::BrokerTopics(fault) => broker(fault.trouble()),
        Error::BrokerTopicsFailing(_) => Disposition::BackOff,
    }
}

fn outbox(trouble: OutboxTrouble) -> Disposition {
    match trouble {
        OutboxTrouble::Conflict => Disposition::RetryNow,
        OutboxTrouble::Unreachable
        | OutboxTrouble::LoginRefused
        | OutboxTrouble::NotMigrated
        | OutboxTrouble::NoPrivilege
        | OutboxTrouble::NotPrimary
        | OutboxTrouble::Interrupted
        | OutboxTrouble::Refused
        | OutboxTrouble::MigrationChanged
        | OutboxTrouble::Other => Disposition::BackOff,
    }
}

fn broker(trouble: BrokerTrouble) -> Disposition {
    match trouble {
        BrokerTrouble::Unreachable
        | BrokerTrouble::TopicMissing
        | BrokerTrouble::NoPrivilege
        | BrokerTrouble::TimedOut
        | BrokerTrouble::TooLarge
        | BrokerTrouble::Refused
        | BrokerTrouble::Options
        | BrokerTrouble::Other => Disposition::BackOff,
    }
}
