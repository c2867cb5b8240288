//! Setting poison records aside in the region's dead-letter topic.

use super::client;
use crate::config::Config;
use crate::error::Error;
use crate::work::DeadLetter;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use std::time::Duration;

/// Publishes what is set aside. Clones share one client.
#[derive(Clone)]
pub struct DeadLetters {
    producer: FutureProducer,
    topic: String,
    topics: Vec<String>,
}

impl DeadLetters {
    /// Makes the client; it connects when first used.
    ///
    /// # Errors
    /// [`Error::BrokerClient`] when an option is refused.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let mut client = client(config);
        client
            .set("enable.idempotence", "true")
            .set("acks", "all")
            // Within the shutdown grace period; the caller tries again for ever.
            .set("message.timeout.ms", "5000")
            // At most some sixty poison records are in flight at once.
            .set("queue.buffering.max.messages", "1000");
        let producer = client.create().map_err(Error::BrokerClient)?;
        Ok(Self { producer, topic: config.dead_letter_topic(), topics: config.consumed_topics() })
    }

    /// Publishes one, with its reason and origin as headers.
    ///
    /// # Errors
    /// [`Error::BrokerSetAside`]; trying again is safe.
    pub async fn publish(&self, letter: &DeadLetter) -> Result<(), Error> {
        let (partition, offset) = (letter.id.partition.number.to_string(), letter.id.offset.to_string());
        let (key_bytes, value_bytes) = (letter.key_bytes.to_string(), letter.value_bytes.to_string());
        let headers = [
            ("recant-reason", letter.reason.as_str()),
            ("recant-detail", letter.detail.as_str()),
            ("recant-topic", self.topics[letter.id.partition.topic].as_str()),
            ("recant-partition", partition.as_str()),
            ("recant-offset", offset.as_str()),
            ("recant-key-bytes", key_bytes.as_str()),
            ("recant-value-bytes", value_bytes.as_str()),
        ];
        let headers = headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| headers.insert(Header { key, value: Some(*value) }));
        let mut record: FutureRecord<'_, [u8], [u8]> = FutureRecord::to(&self.topic).headers(headers);
        if let Some(key) = &letter.key {
            record = record.key(key);
        }
        if let Some(value) = &letter.value {
            record = record.payload(value);
        }
        self.producer.send(record, Duration::ZERO).await.map(drop).map_err(|(error, _)| Error::BrokerSetAside(error))
    }
}
