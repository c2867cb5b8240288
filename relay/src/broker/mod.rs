//! Kafka: the only home of rdkafka.
//!
//! Reading order: this file (clients and faults), [`producer`] (publish a claim, publish heartbeats), [`topics`] (create, check, ends),
//! [`tail`] (the newest epoch in the topics).

pub mod producer;
pub mod tail;
pub mod topics;

use crate::config::Config;
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::types::RDKafkaConfRes;
use std::time::Duration;

/// Most time for one question to the cluster (metadata, offsets, topic administration).
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Why something in Kafka failed, as far as it matters for what to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokerTrouble {
    /// No broker answers.
    Unreachable,
    /// No acknowledgement in time; the record may have been stored.
    TimedOut,
    /// A topic is not there.
    TopicMissing,
    /// The login lacks a right, or is refused.
    NoPrivilege,
    /// Refused for good because of the record's size.
    TooLarge,
    /// Refused for good because of what the record is.
    Refused,
    /// librdkafka does not take the options.
    Options,
    /// Anything else.
    Other,
}

/// A failure in Kafka.
#[derive(Debug, thiserror::Error)]
#[error("{}", describe(.source))]
pub struct BrokerFault {
    trouble: BrokerTrouble,
    source: KafkaError,
}

impl BrokerFault {
    fn new(source: KafkaError) -> Self {
        Self { trouble: classify(&source), source }
    }

    /// No acknowledgement within the time given.
    pub(crate) fn timed_out() -> Self {
        Self::new(KafkaError::MessageProduction(RDKafkaErrorCode::MessageTimedOut))
    }

    /// What kind of failure it is.
    pub fn trouble(&self) -> BrokerTrouble {
        self.trouble
    }

    /// Whether it says something about one topic only, and the others may work: it is missing, or closed to this login.
    pub fn concerns_one_topic(&self) -> bool {
        use RDKafkaErrorCode as Code;
        let code = self.source.rdkafka_error_code();
        matches!(code, Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition | Code::TopicAuthorizationFailed))
    }

    /// What a person can do about it.
    pub fn remedy(&self) -> Option<String> {
        let text = match self.trouble {
            BrokerTrouble::Unreachable | BrokerTrouble::TimedOut => {
                "check that Kafka runs, that brokers names it, and that relay check finds all topics"
            }
            BrokerTrouble::TopicMissing => "run relay topics",
            BrokerTrouble::NoPrivilege => "allow this login to describe and write the topics, and to read them for raising an epoch",
            BrokerTrouble::Options => "correct kafka_options",
            BrokerTrouble::TooLarge | BrokerTrouble::Refused | BrokerTrouble::Other => return None,
        };
        Some(text.to_owned())
    }
}

fn describe(error: &KafkaError) -> String {
    match (error.rdkafka_error_code(), error) {
        // Options that librdkafka refuses one by one are configuration problems; this is what only shows when they come together.
        (_, KafkaError::ClientConfig(_, description, ..) | KafkaError::ClientCreation(description)) => description.clone(),
        (Some(code), _) => code.to_string(),
        (None, other) => other.to_string(),
    }
}

/// What is wrong with a librdkafka option; never its value, which may be a password.
pub(crate) fn option_problem(name: &str, value: &str) -> Option<String> {
    let refused = ClientConfig::new().set(name, value).create_native_config().err()?;
    Some(match refused {
        KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, ..) => format!("{name} is no librdkafka option"),
        _ => format!("{name} has a value that librdkafka does not take"),
    })
}

fn classify(error: &KafkaError) -> BrokerTrouble {
    use RDKafkaErrorCode as Code;
    if matches!(error, KafkaError::ClientConfig(..) | KafkaError::ClientCreation(_)) {
        return BrokerTrouble::Options;
    }
    match error.rdkafka_error_code() {
        Some(Code::BrokerTransportFailure | Code::AllBrokersDown | Code::Resolve | Code::NetworkException | Code::BrokerNotAvailable) => {
            BrokerTrouble::Unreachable
        }
        Some(Code::MessageTimedOut | Code::OperationTimedOut | Code::RequestTimedOut | Code::TimedOutQueue | Code::QueueFull) => {
            BrokerTrouble::TimedOut
        }
        Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition) => BrokerTrouble::TopicMissing,
        Some(
            Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::Authentication
            | Code::SaslAuthenticationFailed,
        ) => BrokerTrouble::NoPrivilege,
        Some(Code::MessageSizeTooLarge) => BrokerTrouble::TooLarge,
        // Not "invalid message", which reports a damaged transfer and may be cured by a retry.
        Some(Code::InvalidRecord | Code::InvalidMessageSize) => BrokerTrouble::Refused,
        _ => BrokerTrouble::Other,
    }
}

/// What every client of the relay shares. `extra` options come first, so that none can replace one of ours.
fn client_config(config: &Config) -> ClientConfig {
    let mut client = ClientConfig::new();
    for (option, value) in &config.kafka_options {
        client.set(option, value.expose());
    }
    client
        .set("bootstrap.servers", &config.brokers)
        .set("client.id", format!("recant-relay {}", config.relay_name))
        // A broker that returns is used again after 0.14 s instead of 9.5 s (measured with the default of 100 ms to 10 s).
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "200")
        // A record must not wait for the previous one's acknowledgement in the kernel.
        .set("socket.nagle.disable", "true")
        // Otherwise a dead connection behind a firewall is noticed by the next request's time-out only.
        .set("socket.keepalive.enable", "true")
        // Nothing relies on auto-creation: a topic made by accident has the wrong settings.
        .set("allow.auto.create.topics", "false");
    client
}

/// Partition counts and ends of one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicEnds {
    /// Its name.
    pub topic: String,
    /// Per partition: oldest offset kept, and the offset after the newest. Empty: the topic is missing.
    pub partitions: Vec<(i64, i64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_brokers_missing_topics_and_refused_records_are_told_apart() {
        for (code, trouble) in [
            (RDKafkaErrorCode::AllBrokersDown, BrokerTrouble::Unreachable),
            (RDKafkaErrorCode::MessageTimedOut, BrokerTrouble::TimedOut),
            (RDKafkaErrorCode::UnknownTopicOrPartition, BrokerTrouble::TopicMissing),
            (RDKafkaErrorCode::MessageSizeTooLarge, BrokerTrouble::TooLarge),
            (RDKafkaErrorCode::InvalidMessage, BrokerTrouble::Other),
        ] {
            assert_eq!(BrokerFault::new(KafkaError::MessageProduction(code)).trouble(), trouble);
        }
    }

    #[test]
    fn what_concerns_one_topic_is_told_apart_from_what_concerns_the_cluster() {
        for (code, one) in [
            (RDKafkaErrorCode::UnknownTopic, true),
            (RDKafkaErrorCode::UnknownTopicOrPartition, true),
            (RDKafkaErrorCode::TopicAuthorizationFailed, true),
            (RDKafkaErrorCode::ClusterAuthorizationFailed, false),
            (RDKafkaErrorCode::SaslAuthenticationFailed, false),
            (RDKafkaErrorCode::MessageTimedOut, false),
            (RDKafkaErrorCode::AllBrokersDown, false),
        ] {
            assert_eq!(BrokerFault::new(KafkaError::MessageProduction(code)).concerns_one_topic(), one, "{code}");
        }
    }
}
