//! What can go wrong, named by the side on which it did.

use rdkafka::error::KafkaError;
use redis::RedisError;

/// An error of the subscriber. Display prints the attempt; the cause is its source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A Kafka client could not be made.
    #[error("make a Kafka client: {0}; check brokers and kafka_options")]
    BrokerClient(#[source] KafkaError),
    /// Assigning, pausing or polling failed.
    #[error("consume from Kafka: {0}")]
    BrokerConsume(#[source] KafkaError),
    /// The client has given up.
    #[error(
        "consume from Kafka: {0}; when it says fenced or unreleased instance id, another process uses the same instance_id: give each its own"
    )]
    BrokerFatal(#[source] KafkaError),
    /// Committing offsets failed.
    #[error("commit offsets: {0}")]
    BrokerCommit(#[source] KafkaError),
    /// Asking for offsets or topics failed.
    #[error("ask Kafka about a log: {0}; check brokers, and that they are reachable from here")]
    BrokerLookUp(String),
    /// A dead letter could not be published.
    #[error("publish a dead letter: {0}")]
    BrokerSetAside(#[source] KafkaError),
    /// The cache could not be reached or asked.
    #[error("{attempt}: {source}; check redis_url, that the server runs, and its password")]
    Cache {
        /// What was attempted.
        attempt: &'static str,
        /// What Redis or the connection said.
        #[source]
        source: RedisError,
    },
    /// The cache is not what the configuration says.
    #[error("{0}")]
    CacheTopology(String),
    /// The HTTP address could not be taken.
    #[error("{0}")]
    Http(String),
    /// The gap policy `stop`.
    #[error("invalidations may be missing ({0}) and gap_policy is stop; see the log; to start again, set gap_policy to sweep or alert")]
    Gap(String),
}

impl Error {
    /// The error as one line for a person: an attempt is introduced as one, a statement stands for itself.
    pub fn line(&self) -> String {
        match self {
            Self::CacheTopology(_) | Self::Http(_) | Self::Gap(_) => self.to_string(),
            Self::BrokerClient(_)
            | Self::BrokerConsume(_)
            | Self::BrokerFatal(_)
            | Self::BrokerCommit(_)
            | Self::BrokerLookUp(_)
            | Self::BrokerSetAside(_)
            | Self::Cache { .. } => format!("could not {self}"),
        }
    }
}
