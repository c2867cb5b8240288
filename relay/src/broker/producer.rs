//! Publishing, and waiting for every acknowledgement.

use super::{BrokerFault, BrokerTrouble, client_config};
use crate::config::Config;
use crate::plan::{Planned, Reason};
use crate::settle::Outcome;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::DeliveryFuture;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use recant_schema::record::{FORMAT, FORMAT_HEADER, Record};
use recant_schema::topics::Topics;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Records that may wait in the client: five full claims. A stuck producer stays at 14 MiB with it, instead of 76 with the default (measured).
const QUEUE_RECORDS: &str = "10000";

/// Room beyond `message.timeout.ms` for the client to notice that a record's time is over (it looks once a second) and to say so.
const SETTLING_ROOM: Duration = Duration::from_secs(2);

/// The producer. Clones share it.
#[derive(Clone)]
pub struct Publisher {
    shared: Arc<Shared>,
}

struct Shared {
    current: Mutex<FutureProducer>,
    config: Config,
}

/// What publishing a claim came to.
#[derive(Debug, Default)]
pub struct Published {
    /// For each answer the record's index, and what was said; in no particular order.
    pub outcomes: Vec<(usize, Outcome)>,
    /// The first failure that is not final and not that of one topic, for the log.
    pub fault: Option<BrokerFault>,
    /// Topics that took no record, and why.
    pub failing: BTreeMap<String, BrokerTrouble>,
    /// Failures by trouble, final ones included.
    pub failures: Vec<BrokerTrouble>,
}

/// What a round of heartbeats came to.
#[derive(Debug, Default)]
pub struct Beats {
    /// Topics of which every partition has its heartbeat.
    pub acknowledged: BTreeSet<String>,
    /// Topics that took none, and why.
    pub failing: BTreeMap<String, BrokerTrouble>,
}

impl Publisher {
    /// A producer with these settings; connects in the background.
    ///
    /// # Errors
    /// When librdkafka does not take the options.
    pub fn new(config: &Config) -> Result<Self, BrokerFault> {
        let current = Mutex::new(build(config)?);
        Ok(Self { shared: Arc::new(Shared { current, config: config.clone() }) })
    }

    /// Publishes every record on every topic of its own, and waits for all acknowledgements, at most `message_timeout` and a little more.
    pub async fn publish(&self, topics: &Topics, records: &[Planned]) -> Published {
        let producer = self.producer();
        let limit = self.shared.config.message_timeout + SETTLING_ROOM;
        let mut round = Round { topics, records, published: Published::default(), pending: VecDeque::new() };
        // What has not been answered by then counts as unknown: settling gives its rows back.
        let in_time = tokio::time::timeout(limit, round.run(&producer)).await.is_ok();
        let mut published = round.published;
        if !in_time && published.fault.is_none() {
            published.fault = Some(BrokerFault::timed_out());
            published.failures.push(BrokerTrouble::TimedOut);
        }
        self.replace_if_broken(&producer);
        published
    }

    /// Publishes one record to each of these partitions and waits for the acknowledgements.
    ///
    /// # Errors
    /// The first failure that is not that of one topic.
    pub async fn publish_heartbeats(
        &self,
        partitions: &[(String, i32)],
        mut encode: impl FnMut() -> Vec<u8>,
    ) -> Result<Beats, BrokerFault> {
        let producer = self.producer();
        let mut pending = Vec::with_capacity(partitions.len());
        let mut beats = Beats { acknowledged: partitions.iter().map(|(topic, _)| topic.clone()).collect(), ..Beats::default() };
        for (topic, partition) in partitions {
            let value = encode();
            let record: FutureRecord<'_, (), [u8]> =
                FutureRecord::to(topic).partition(*partition).payload(value.as_slice()).headers(headers());
            match producer.send_result(record) {
                Ok(delivery) => pending.push((topic, delivery)),
                Err((error, _)) => beats.failed(topic, error)?,
            }
        }
        for (topic, delivery) in pending {
            if let Err(error) = answer(delivery).await {
                beats.failed(topic, error)?;
            }
        }
        Ok(beats)
    }

    /// Waits until nothing is left in the client, at most so long.
    pub async fn flush(&self, limit: Duration) {
        let producer = self.producer();
        // A blocking call of librdkafka; its result is of no interest, since no claim depends on it any more.
        let _ = tokio::task::spawn_blocking(move || producer.flush(limit)).await;
    }

    /// The client itself, for questions about the cluster.
    pub(super) fn producer(&self) -> FutureProducer {
        self.shared.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// An idempotent producer that lost its sequence is of no use any more, so a fresh one takes its place. Claims that used the old one are released.
    fn replace_if_broken(&self, used: &FutureProducer) {
        let Some((code, text)) = used.client().fatal_error() else { return };
        tracing::warn!(%code, text, "the Kafka producer ended with a fatal error; starting a new one");
        match build(&self.shared.config) {
            Ok(fresh) => {
                let mut current = self.shared.current.lock().unwrap_or_else(PoisonError::into_inner);
                // Two claims may find the same corpse; one replacement is enough.
                if current.client().fatal_error().is_some() {
                    *current = fresh;
                }
            }
            Err(error) => tracing::error!(%error, "failed to start a new Kafka producer"),
        }
    }
}

fn build(config: &Config) -> Result<FutureProducer, BrokerFault> {
    client_config(config)
        // No repeats and no reordering within the client's own retries.
        .set("enable.idempotence", "true")
        // A record counts once every in-sync replica has it; with min.insync.replicas 2 it survives the loss of a broker.
        .set("acks", "all")
        // Send at once. 1 ms of lingering was measured to cost 3.3 times the latency at 1,000/s, and under load batches form by themselves.
        .set("linger.ms", "0")
        // Records of one claim resemble each other; lz4 is the cheapest that shrinks them.
        .set("compression.type", "lz4")
        // The partition that Java clients choose for the same key, so that tools which look a key up find it.
        .set("partitioner", "murmur2_random")
        .set("queue.buffering.max.messages", QUEUE_RECORDS)
        // Finite, and below the time after which the server ends the claim's transaction.
        .set("message.timeout.ms", config.message_timeout.as_millis().to_string())
        // A missing topic is reported as such while the claim still waits, not as a time-out (default 30 s).
        .set("topic.metadata.propagation.max.ms", "3000")
        .create()
        .map_err(BrokerFault::new)
}

/// One claim being published.
struct Round<'a> {
    topics: &'a Topics,
    records: &'a [Planned],
    published: Published,
    /// In the order of sending: index of the record, which of its pins, and the answer to come.
    pending: VecDeque<(usize, usize, DeliveryFuture)>,
}

impl Round<'_> {
    async fn run(&mut self, producer: &FutureProducer) {
        for (index, planned) in self.records.iter().enumerate() {
            let value = Record::Invalidation(planned.invalidation.clone()).encode();
            for pin in 0..planned.pins.len() {
                if !self.send(producer, index, pin, &value).await {
                    return;
                }
            }
        }
        while self.next_answer().await {}
    }

    /// Queues one record. A full queue waits for the oldest acknowledgement, which is the next thing that can make room. Returns whether there is
    /// any sense in going on.
    async fn send(&mut self, producer: &FutureProducer, index: usize, pin: usize, value: &[u8]) -> bool {
        let topic = self.topic(index, pin);
        let key = self.records[index].invalidation.key.as_str();
        loop {
            let record = FutureRecord::to(&topic).key(key.as_bytes()).payload(value).headers(headers());
            let error = match producer.send_result(record) {
                Ok(delivery) => {
                    self.pending.push_back((index, pin, delivery));
                    return true;
                }
                Err((error, _)) => error,
            };
            if error.rdkafka_error_code() == Some(RDKafkaErrorCode::QueueFull) && self.next_answer().await {
                continue;
            }
            // Refused before it was queued: final for this record or its topic, or of no use to go on with. So is a queue that others fill: the rows
            // are given back, and the back-off is the wait.
            self.answered(index, pin, Err(error));
            return self.published.fault.is_none();
        }
    }

    /// Waits for the oldest acknowledgement. False when there is none to wait for.
    async fn next_answer(&mut self) -> bool {
        let Some((index, pin, delivery)) = self.pending.pop_front() else { return false };
        let result = answer(delivery).await;
        self.answered(index, pin, result);
        true
    }

    fn topic(&self, index: usize, pin: usize) -> String {
        let planned = &self.records[index];
        self.topics.invalidations(planned.pins[pin].as_ref(), planned.invalidation.lane)
    }

    fn answered(&mut self, index: usize, pin: usize, result: Result<(), KafkaError>) {
        let outcome = match result.map_err(BrokerFault::new) {
            Ok(()) => Outcome::Acknowledged,
            Err(fault) => {
                let trouble = fault.trouble();
                self.published.failures.push(trouble);
                match trouble {
                    BrokerTrouble::TooLarge => Outcome::Refused(Reason::TooLarge),
                    BrokerTrouble::Refused => Outcome::Refused(Reason::Refused),
                    _ if fault.concerns_one_topic() => {
                        let topic = self.topic(index, pin);
                        self.published.failing.insert(topic, trouble);
                        Outcome::Failed
                    }
                    _ => {
                        self.published.fault.get_or_insert(fault);
                        Outcome::Failed
                    }
                }
            }
        };
        self.published.outcomes.push((index, outcome));
    }
}

impl Beats {
    fn failed(&mut self, topic: &str, error: KafkaError) -> Result<(), BrokerFault> {
        let fault = BrokerFault::new(error);
        if !fault.concerns_one_topic() {
            return Err(fault);
        }
        self.acknowledged.remove(topic);
        self.failing.insert(topic.to_owned(), fault.trouble());
        Ok(())
    }
}

async fn answer(delivery: DeliveryFuture) -> Result<(), KafkaError> {
    match delivery.await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err((error, _))) => Err(error),
        // The producer is gone; the record's fate is unknown.
        Err(_) => Err(KafkaError::Canceled),
    }
}

/// The format number, so that a consumer can judge a record without reading it.
fn headers() -> OwnedHeaders {
    OwnedHeaders::new_with_capacity(1).insert(Header { key: FORMAT_HEADER, value: Some(&FORMAT.to_string()) })
}
