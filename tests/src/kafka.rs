//! Kafka by hand: raw records in, everything out, what a group has committed.

use crate::wait::run_elsewhere;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::FromClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Longest wait for one answer of the broker.
const PATIENCE: Duration = Duration::from_secs(20);

/// Largest record that a test produces, and a batch around it.
const MAX_RECORD_BYTES: &str = "8000000";

/// One record, as it lies in the log.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its partition.
    pub partition: i32,
    /// Its offset.
    pub offset: i64,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its value.
    pub value: Option<Vec<u8>>,
    /// Its headers, as text.
    pub headers: BTreeMap<String, String>,
}

impl Stored {
    /// The value as JSON, `Null` when it is none.
    pub fn json(&self) -> serde_json::Value {
        self.value.as_deref().and_then(|value| serde_json::from_slice(value).ok()).unwrap_or_default()
    }

    /// Whether it is an invalidation of this key.
    pub fn invalidates(&self, key: &str) -> bool {
        self.key.as_deref() == Some(key.as_bytes()) && self.json()["kind"] == "invalidation"
    }
}

/// A cluster.
#[derive(Clone)]
pub struct Kafka {
    brokers: String,
    producer: FutureProducer,
}

impl std::fmt::Debug for Kafka {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kafka({})", self.brokers)
    }
}

impl Kafka {
    /// Connects when first used.
    ///
    /// # Panics
    /// When librdkafka refuses its options.
    pub fn new(brokers: &str) -> Self {
        let mut config = client(brokers);
        // As the relay's producer: a key's partition is the same from both.
        config.set("partitioner", "murmur2_random").set("message.max.bytes", MAX_RECORD_BYTES).set("linger.ms", "0");
        Self { brokers: brokers.to_owned(), producer: config.create().expect("the options are good") }
    }

    /// Bootstrap servers.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// Produces one record and waits for it; its partition and offset.
    ///
    /// # Panics
    /// When the broker does not take it.
    pub async fn produce(&self, topic: &str, key: Option<&[u8]>, value: Option<&[u8]>) -> (i32, i64) {
        let mut record: FutureRecord<'_, [u8], [u8]> = FutureRecord::to(topic);
        record.key = key;
        record.payload = value;
        let delivered = self.producer.send(record, PATIENCE).await;
        let delivery = delivered.unwrap_or_else(|(error, _)| panic!("produce to {topic}: {error}; start the servers: make up"));
        (delivery.partition, delivery.offset)
    }

    /// Produces many records, in order for each key.
    ///
    /// # Panics
    /// When the broker does not take one.
    pub async fn produce_all(&self, topic: &str, records: &[(Vec<u8>, Vec<u8>)]) {
        let sends = records.iter().map(|(key, value)| self.producer.send(FutureRecord::to(topic).key(key).payload(value), PATIENCE));
        for sent in futures::future::join_all(sends).await {
            sent.unwrap_or_else(|(error, _)| panic!("produce to {topic}: {error}"));
        }
    }

    fn consumer(&self, group: &str) -> BaseConsumer {
        let mut config = client(&self.brokers);
        config.set("group.id", group).set("enable.auto.commit", "false").set("auto.offset.reset", "earliest");
        config.set("fetch.message.max.bytes", MAX_RECORD_BYTES).set("receive.message.max.bytes", "64000000");
        config.create().expect("the options are good")
    }

    /// First and next offset of each partition.
    ///
    /// # Panics
    /// When the broker does not answer or the topic is not there.
    pub async fn bounds(&self, topic: &str) -> BTreeMap<i32, (i64, i64)> {
        let (this, topic) = (self.clone(), topic.to_owned());
        blocking(move || this.bounds_blocking(&this.consumer("recant-tests"), &topic)).await
    }

    fn bounds_blocking(&self, consumer: &BaseConsumer, topic: &str) -> BTreeMap<i32, (i64, i64)> {
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).expect("the broker describes a topic");
        let numbers = metadata.topics()[0].partitions().iter().map(|partition| partition.id());
        numbers.map(|number| (number, consumer.fetch_watermarks(topic, number, PATIENCE).expect("the broker knows the bounds"))).collect()
    }

    /// Every record that the topic holds now.
    ///
    /// # Panics
    /// When the broker does not answer in time.
    pub async fn read_all(&self, topic: &str) -> Vec<Stored> {
        let (this, topic) = (self.clone(), topic.to_owned());
        blocking(move || this.read_all_blocking(&topic)).await
    }

    fn read_all_blocking(&self, topic: &str) -> Vec<Stored> {
        let consumer = self.consumer("recant-tests");
        let bounds = self.bounds_blocking(&consumer, topic);
        let mut open: BTreeSet<i32> = bounds.iter().filter(|(_, (low, high))| low < high).map(|(number, _)| *number).collect();
        let mut list = TopicPartitionList::new();
        for number in &open {
            list.add_partition_offset(topic, *number, Offset::Beginning).expect("a good offset");
        }
        consumer.assign(&list).expect("partitions can be assigned");
        let (mut records, started) = (Vec::new(), Instant::now());
        while !open.is_empty() {
            assert!(started.elapsed() < PATIENCE, "{topic} could not be read within {PATIENCE:?}");
            let Some(polled) = consumer.poll(Duration::from_millis(100)) else { continue };
            let message = polled.unwrap_or_else(|error| panic!("read {topic}: {error}"));
            if message.offset() + 1 >= bounds[&message.partition()].1 {
                open.remove(&message.partition());
            }
            records.push(stored(&message));
        }
        records
    }

    /// The next offset that a group has committed, per partition; partitions without one are absent.
    ///
    /// # Panics
    /// When the broker does not answer in time.
    pub async fn committed(&self, group: &str, topic: &str) -> BTreeMap<i32, i64> {
        let (this, group, topic) = (self.clone(), group.to_owned(), topic.to_owned());
        blocking(move || {
            let consumer = this.consumer(&group);
            let mut list = TopicPartitionList::new();
            for number in this.bounds_blocking(&consumer, &topic).keys() {
                list.add_partition(&topic, *number);
            }
            let committed = consumer.committed_offsets(list, PATIENCE).expect("the broker knows what is committed");
            let offsets = committed.elements().into_iter().filter_map(|element| match element.offset() {
                Offset::Offset(offset) => Some((element.partition(), offset)),
                _ => None,
            });
            offsets.collect()
        })
        .await
    }

    /// Creates a topic as `relay topics` would, with further settings.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub async fn create_topic(&self, topic: &str, partitions: i32, settings: &[(&str, &str)]) {
        let mut new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
        for (name, value) in [("message.timestamp.type", "LogAppendTime"), ("cleanup.policy", "delete")].iter().chain(settings) {
            new = new.set(name, value);
        }
        let created = admin(&self.brokers).create_topics([&new], &options()).await.expect("the cluster answers");
        for topic in created {
            topic.unwrap_or_else(|(topic, code)| panic!("create {topic}: {code}"));
        }
    }

    /// Deletes a topic and waits until it is gone.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub async fn delete_topic(&self, topic: &str) {
        let deleted = admin(&self.brokers).delete_topics(&[topic], &options()).await.expect("the cluster answers");
        for topic in deleted {
            topic.unwrap_or_else(|(topic, code)| panic!("delete {topic}: {code}"));
        }
        let (this, name) = (self.clone(), topic.to_owned());
        crate::wait::eventually(&format!("{topic} is gone"), async || {
            let (this, name) = (this.clone(), name.clone());
            let there = blocking(move || {
                let metadata = this.consumer("recant-tests").fetch_metadata(None, PATIENCE).expect("the broker lists its topics");
                metadata.topics().iter().any(|topic| topic.name() == name)
            });
            (!there.await).then_some(())
        })
        .await;
    }

    /// Deletes the records before these offsets, as retention does.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub async fn delete_records(&self, topic: &str, before: &BTreeMap<i32, i64>) {
        let mut list = TopicPartitionList::new();
        for (number, offset) in before {
            list.add_partition_offset(topic, *number, Offset::Offset(*offset)).expect("a good offset");
        }
        admin(&self.brokers).delete_records(&list, &options()).await.expect("the cluster deletes records");
    }

    /// Deletes topics and groups without asking how it went.
    pub(crate) fn remove_blocking(&self, topics: Vec<String>, groups: Vec<String>) {
        let brokers = self.brokers.clone();
        run_elsewhere(async move {
            let admin = admin(&brokers);
            let topics: Vec<_> = topics.iter().map(String::as_str).collect();
            let groups: Vec<_> = groups.iter().map(String::as_str).collect();
            let _ = admin.delete_topics(&topics, &options()).await;
            let _ = admin.delete_groups(&groups, &options()).await;
        });
    }
}

fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}

fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    AdminClient::from_config(&client(brokers)).expect("the options are good")
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}

fn stored(message: &impl Message) -> Stored {
    let headers = message.headers().map(|headers| {
        let text = |value: Option<&[u8]>| String::from_utf8_lossy(value.unwrap_or_default()).into_owned();
        headers.iter().map(|header| (header.key.to_owned(), text(header.value))).collect()
    });
    Stored {
        partition: message.partition(),
        offset: message.offset(),
        key: message.key().map(<[u8]>::to_vec),
        value: message.payload().map(<[u8]>::to_vec),
        headers: headers.unwrap_or_default(),
    }
}

/// librdkafka's questions block their thread.
async fn blocking<T: Send + 'static>(ask: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(ask).await {
        Ok(answer) => answer,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
