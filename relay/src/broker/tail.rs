//! The newest epoch that the topics hold, read from the ends of their partitions.

use super::{BrokerFault, REQUEST_TIMEOUT, client_config};
use crate::config::Config;
use crate::epoch::{Published, Sighting};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use recant_schema::labels::Lane;
use recant_schema::record::Record;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Records read from the end of each partition. Every relay puts a heartbeat into every partition once a second, so this finds this source even when a
/// few others publish beside it; a busy partition shows the epoch in its invalidations, and the quiet ones the heartbeats.
const RECORDS: i64 = 50;

/// Most time for reading all of them: a few thousand small records arrive within a second, and twice the time for one question is patience enough.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// What the ends of all topics hold of this source. Missing and empty topics hold nothing. Blocks: run it where that is allowed.
///
/// # Errors
/// When Kafka does not answer in time: without it an epoch must not be raised.
pub fn read(config: &Config) -> Result<Published, BrokerFault> {
    let consumer: BaseConsumer = client_config(config)
        // The client asks for a group, although partitions are assigned by hand and nothing is ever committed.
        .set("group.id", "recant-relay-tail")
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        // Retention may overtake the reading; what is left is then read from its beginning, where the default would skip to the end.
        .set("auto.offset.reset", "earliest")
        // Tells where a partition ends.
        .set("enable.partition.eof", "true")
        // Records here are small; the default prefetch of 64 MB is not needed for fifty of them per partition.
        .set("queued.max.messages.kbytes", "1024")
        .create()
        .map_err(BrokerFault::new)?;
    let ends = ends(&consumer, &config.topics.published_for(&config.regions))?;
    let mut list = TopicPartitionList::new();
    for ((topic, partition), (low, high)) in &ends {
        let start = Offset::Offset((high - RECORDS).max(*low));
        list.add_partition_offset(topic, *partition, start).map_err(BrokerFault::new)?;
    }
    let mut published = Published::default();
    if !ends.is_empty() {
        consumer.assign(&list).map_err(BrokerFault::new)?;
        read_to(&consumer, ends, config, &mut published)?;
    }
    Ok(published)
}

/// A partition, and its oldest and next offset.
type Ends = BTreeMap<(String, i32), (i64, i64)>;

/// Where each partition that holds anything begins and ends.
fn ends(consumer: &BaseConsumer, topics: &[String]) -> Result<Ends, BrokerFault> {
    // All topics in one question: asked for by name, a missing one would be looked for again and again.
    let metadata = consumer.fetch_metadata(None, REQUEST_TIMEOUT).map_err(BrokerFault::new)?;
    let mut ends = Ends::new();
    for topic in metadata.topics().iter().filter(|topic| topics.iter().any(|wanted| wanted == topic.name())) {
        for partition in topic.partitions() {
            let (low, high) = consumer.fetch_watermarks(topic.name(), partition.id(), REQUEST_TIMEOUT).map_err(BrokerFault::new)?;
            if high > low {
                ends.insert((topic.name().to_owned(), partition.id()), (low, high));
            }
        }
    }
    Ok(ends)
}

/// Reads each partition up to the end it had.
fn read_to(consumer: &BaseConsumer, mut open: Ends, config: &Config, published: &mut Published) -> Result<(), BrokerFault> {
    let shared: Vec<_> = Lane::ALL.iter().map(|lane| config.topics.invalidations(None, *lane)).collect();
    let started = Instant::now();
    while !open.is_empty() {
        let left = READ_TIMEOUT.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Err(BrokerFault::new(KafkaError::MessageConsumption(RDKafkaErrorCode::OperationTimedOut)));
        }
        match consumer.poll(left) {
            None => {}
            Some(Ok(record)) => {
                let shared = shared.iter().any(|topic| topic == record.topic());
                note(record.payload(), &config.source_name, shared, published);
                let at = (record.topic().to_owned(), record.partition());
                if open.get(&at).is_some_and(|(_, high)| record.offset() + 1 >= *high) {
                    open.remove(&at);
                }
            }
            // Named by number alone; a partition whose last offsets hold no record is found out when it is the only open one of its number.
            Some(Err(KafkaError::PartitionEOF(number))) => {
                let mut same = open.keys().filter(|(_, partition)| *partition == number);
                if let (Some(only), None) = (same.next().cloned(), same.next()) {
                    open.remove(&only);
                }
            }
            // Brokers come and go; the deadline decides.
            Some(Err(KafkaError::MessageConsumption(RDKafkaErrorCode::BrokerTransportFailure | RDKafkaErrorCode::AllBrokersDown))) => {}
            Some(Err(error)) => return Err(BrokerFault::new(error)),
        }
    }
    Ok(())
}

/// What cannot be read as a record of ours says nothing about an epoch.
fn note(value: Option<&[u8]>, source: &str, shared: bool, published: &mut Published) {
    match value.map(Record::decode) {
        Some(Ok(Record::Invalidation(invalidation))) if invalidation.source.database == source => {
            published.see(Sighting { version: invalidation.version, heartbeat: false, shared })
        }
        Some(Ok(Record::Heartbeat(heartbeat))) if heartbeat.source.database == source => {
            published.see(Sighting { version: heartbeat.version, heartbeat: true, shared })
        }
        Some(Ok(_) | Err(_)) | None => {}
    }
}
