//! The only home of rdkafka: consuming live and by replay, describing logs, setting aside.

mod dead_letters;
mod live;
mod locate;
mod replay;

pub use dead_letters::DeadLetters;
pub use live::{Live, LiveEvent};
pub use locate::{Locator, TopicState};
pub use replay::{Replay, ReplayEvent};

use crate::config::Config;
use crate::marker::Partition;
use crate::progress::Point;
use crate::state::Delivery;
use futures::FutureExt;
use rdkafka::consumer::{ConsumerContext, StreamConsumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::types::RDKafkaConfRes;
use rdkafka::{ClientConfig, TopicPartitionList};
use recant_schema::record::MAX_RECORD_BYTES;
use recant_schema::service::clock;

/// Most records taken from a consumer at once: one pipeline's worth.
const BATCH: usize = 256;

/// What every client of ours sets. Options that behaviour depends on are written out here and in the submodules, each with its why;
/// `kafka_options` from the configuration come first, so that they cannot change these.
fn client(config: &Config) -> ClientConfig {
    let mut client = ClientConfig::new();
    for (name, value) in &config.kafka_options {
        client.set(name, value.expose());
    }
    client
        .set("bootstrap.servers", &config.brokers)
        .set("client.id", format!("recant-subscriber-{}", config.region.as_str()))
        // The first fetch after a broker's return takes 0.14 s instead of 9.5 s with the defaults of 100 ms and 10 s.
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "200")
        // Bounds every single request, and so commits and look-ups; above the group's session time-out there is nothing to wait for.
        .set("socket.timeout.ms", "10000")
        .set("socket.keepalive.enable", "true")
        .set("socket.nagle.disable", "true");
    client
}

/// What both consumers set.
fn consumer(config: &Config) -> ClientConfig {
    let mut consumer = client(config);
    consumer
        // Commits are made here, of watermarks only.
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        // An offset that is gone is a gap and must be seen, not skipped over.
        .set("auto.offset.reset", "error")
        .set("allow.auto.create.topics", "false")
        // The broker answers as soon as there is a byte; the default wait of 500 ms only paces empty fetches.
        .set("fetch.wait.max.ms", "500")
        .set("fetch.min.bytes", "1")
        // A small prefetch holds a backlog at 27 MiB instead of 71; it needs the short back-off, or consuming collapses to 28,000 records/s.
        .set("queued.min.messages", "5000")
        .set("queued.max.messages.kbytes", "16384")
        .set("fetch.queue.backoff.ms", "10");
    consumer
}

/// The next record and whatever is there already, up to a batch. An error after the first record goes to `held`. Cancel safe.
async fn batch<C: ConsumerContext + 'static>(
    consumer: &StreamConsumer<C>,
    topics: &[String],
    held: &mut Option<KafkaError>,
) -> Result<Vec<Delivery>, KafkaError> {
    let first = consumer.recv().await?;
    let mut records = Vec::with_capacity(BATCH);
    records.extend(delivery(&first, topics));
    while records.len() < BATCH {
        match consumer.recv().now_or_never() {
            Some(Ok(message)) => records.extend(delivery(&message, topics)),
            Some(Err(error)) => {
                *held = Some(error);
                break;
            }
            None => break,
        }
    }
    Ok(records)
}

/// Whether the position of some partition is not in its log; reported once, and the partition stays silent after it.
fn is_out_of_range(error: &KafkaError) -> bool {
    matches!(error, KafkaError::MessageConsumption(RDKafkaErrorCode::OffsetOutOfRange | RDKafkaErrorCode::AutoOffsetReset))
}

/// What is wrong with a librdkafka option; never its value, which may be a password.
pub fn option_problem(name: &str, value: &str) -> Option<String> {
    let refused = ClientConfig::new().set(name, value).create_native_config().err()?;
    Some(match refused {
        KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, ..) => format!("{name} is no librdkafka option"),
        _ => format!("{name} has a value that librdkafka does not take"),
    })
}

fn delivery(message: &BorrowedMessage<'_>, topics: &[String]) -> Option<Delivery> {
    let topic = topics.iter().position(|topic| topic == message.topic())?;
    Some(Delivery {
        partition: Partition { topic, number: message.partition() },
        point: Point { offset: message.offset(), time_ms: message.timestamp().to_millis().unwrap_or_default() },
        // One byte more than a record may have is enough to tell; a key of that size is no cache key either.
        key: message.key().map(cut),
        value: message.payload().map(cut),
        key_bytes: message.key_len(),
        value_bytes: message.payload_len(),
        delivered_us: clock::now_us(),
    })
}

fn cut(bytes: &[u8]) -> Vec<u8> {
    bytes[..bytes.len().min(MAX_RECORD_BYTES + 1)].to_vec()
}

fn list(partitions: &[(Partition, rdkafka::Offset)], topics: &[String]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for (partition, offset) in partitions {
        list.add_partition_offset(&topics[partition.topic], partition.number, *offset).expect("offsets of ours are not negative");
    }
    list
}

fn partitions(list: &TopicPartitionList, topics: &[String]) -> Vec<Partition> {
    let known = list.elements().into_iter().filter_map(|element| {
        let topic = topics.iter().position(|topic| topic == element.topic())?;
        Some(Partition { topic, number: element.partition() })
    });
    known.collect()
}
