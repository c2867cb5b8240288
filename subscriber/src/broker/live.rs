//! The live consumer: member of the region's group, reads fresh records.

use super::{BATCH, consumer, delivery, list, partitions};
use crate::config::Config;
use crate::error::Error;
use crate::marker::Partition;
use crate::state::Delivery;
use futures::FutureExt;
use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, StreamConsumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::statistics::Statistics;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// What the live consumer has to say.
#[derive(Debug)]
pub enum LiveEvent {
    /// The group gave partitions; to be answered by [`Live::assign`].
    Assigned(Vec<Partition>),
    /// The group takes all partitions back; to be answered by [`Live::release`].
    Revoked,
    /// Records.
    Records(Vec<Delivery>),
    /// The position is not in the log.
    OutOfRange,
    /// The client reports trouble and goes on trying.
    Trouble(KafkaError),
    /// The client has given up for good.
    Fatal(KafkaError),
}

/// The group's rebalances and the broker's figures, as librdkafka reports them.
struct Context {
    topics: Vec<String>,
    rebalances: mpsc::UnboundedSender<LiveEvent>,
    ends: Arc<Mutex<HashMap<Partition, i64>>>,
    /// While the client is being dropped nobody answers rebalances any more.
    closing: AtomicBool,
}

impl ClientContext for Context {
    fn stats(&self, statistics: Statistics) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        for (topic, name) in self.topics.iter().enumerate() {
            let Some(figures) = statistics.topics.get(name) else { continue };
            for (number, figures) in figures.partitions.iter().filter(|(number, figures)| **number >= 0 && figures.hi_offset >= 0) {
                ends.insert(Partition { topic, number: *number }, figures.hi_offset);
            }
        }
    }
}

impl ConsumerContext for Context {
    /// librdkafka waits for `assign` or `unassign`, which the loop calls when it has read the marker, or drained. The queue of events is
    /// bounded by that protocol: one rebalance at a time.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let event = match error {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => LiveEvent::Assigned(partitions(list, &self.topics)),
            _ => LiveEvent::Revoked,
        };
        let nobody_answers = self.closing.load(Ordering::Acquire) || self.rebalances.send(event).is_err();
        if nobody_answers && let Err(error) = consumer.unassign() {
            tracing::warn!(%error, "could not give partitions up while closing");
        }
    }
}

/// Handle of the live consumer.
pub struct Live {
    consumer: Arc<StreamConsumer<Context>>,
    topics: Vec<String>,
    rebalances: mpsc::UnboundedReceiver<LiveEvent>,
    ends: Arc<Mutex<HashMap<Partition, i64>>>,
}

impl Live {
    /// Joins the group.
    ///
    /// # Errors
    /// [`Error::BrokerClient`] when an option is refused.
    pub fn join(config: &Config) -> Result<Self, Error> {
        let topics = config.consumed_topics();
        let (sender, rebalances) = mpsc::unbounded_channel();
        let ends = Arc::new(Mutex::new(HashMap::new()));
        let context = Context { topics: topics.clone(), rebalances: sender, ends: ends.clone(), closing: AtomicBool::new(false) };
        let mut client = consumer(config);
        client
            .set("group.id", &config.group)
            // Classic range: with a stable instance id a restarted member resumes in restart time + 0.1 s; cooperative and KIP-848 take seconds.
            .set("group.protocol", "classic")
            .set("partition.assignment.strategy", "range")
            .set("session.timeout.ms", config.session_timeout.as_millis().to_string())
            // It is also the delay of a graceful leave: 0.09 s instead of 2.9 s at 3 s.
            .set("heartbeat.interval.ms", "300")
            .set("max.poll.interval.ms", "300000")
            // Topics and partitions made later are found within this time.
            .set("topic.metadata.refresh.interval.ms", "10000")
            // Feeds lag_records.
            .set("statistics.interval.ms", "1000");
        if let Some(id) = &config.instance_id {
            client.set("group.instance.id", id);
        }
        let consumer: StreamConsumer<Context> = client.create_with_context(context).map_err(Error::BrokerClient)?;
        let names: Vec<_> = topics.iter().map(String::as_str).collect();
        consumer.subscribe(&names).map_err(Error::BrokerClient)?;
        Ok(Self { consumer: Arc::new(consumer), topics, rebalances, ends })
    }

    /// The next thing that happens. Cancel safe.
    pub async fn next(&mut self) -> LiveEvent {
        tokio::select! {
            biased;
            Some(event) = self.rebalances.recv() => event,
            first = self.consumer.recv() => match first {
                Ok(message) => {
                    let mut records = Vec::with_capacity(BATCH);
                    records.extend(delivery(&message, &self.topics));
                    // Whatever is there already comes along; an error shows again at the next call.
                    while records.len() < BATCH {
                        let Some(Ok(message)) = self.consumer.recv().now_or_never() else { break };
                        records.extend(delivery(&message, &self.topics));
                    }
                    LiveEvent::Records(records)
                }
                Err(KafkaError::MessageConsumptionFatal(code)) => LiveEvent::Fatal(KafkaError::MessageConsumptionFatal(code)),
                Err(KafkaError::MessageConsumption(RDKafkaErrorCode::OffsetOutOfRange | RDKafkaErrorCode::AutoOffsetReset)) => LiveEvent::OutOfRange,
                Err(error) => LiveEvent::Trouble(error),
            },
        }
    }

    /// Starts consuming exactly these partitions at these offsets.
    ///
    /// # Errors
    /// [`Error::BrokerConsume`].
    pub fn assign(&self, from: &[(Partition, i64)]) -> Result<(), Error> {
        let from: Vec<_> = from.iter().map(|(partition, offset)| (*partition, Offset::Offset(*offset))).collect();
        self.consumer.assign(&list(&from, &self.topics)).map_err(Error::BrokerConsume)
    }

    /// Commits these next offsets without waiting.
    ///
    /// # Errors
    /// [`Error::BrokerCommit`].
    pub fn commit(&self, next: &[(Partition, i64)]) -> Result<(), Error> {
        self.commit_as(next, CommitMode::Async)
    }

    fn commit_as(&self, next: &[(Partition, i64)], mode: CommitMode) -> Result<(), Error> {
        if next.is_empty() {
            return Ok(());
        }
        let next: Vec<_> = next.iter().map(|(partition, offset)| (*partition, Offset::Offset(*offset))).collect();
        self.consumer.commit(&list(&next, &self.topics), mode).map_err(Error::BrokerCommit)
    }

    /// Commits these next offsets, waits for it (bounded by `socket.timeout.ms`), and gives all partitions up.
    ///
    /// # Errors
    /// [`Error::BrokerCommit`] when the commit failed; the partitions are given up all the same.
    pub async fn release(&self, next: Vec<(Partition, i64)>) -> Result<(), Error> {
        let this = Self {
            consumer: self.consumer.clone(),
            topics: self.topics.clone(),
            rebalances: mpsc::unbounded_channel().1,
            ends: self.ends.clone(),
        };
        let released = tokio::task::spawn_blocking(move || {
            let committed = this.commit_as(&next, CommitMode::Sync);
            this.consumer.unassign().map_err(Error::BrokerConsume).and(committed)
        });
        released.await.unwrap_or(Ok(()))
    }

    /// Stops fetching what is assigned.
    ///
    /// # Errors
    /// [`Error::BrokerConsume`].
    pub fn pause(&self) -> Result<(), Error> {
        self.consumer.assignment().and_then(|assigned| self.consumer.pause(&assigned)).map_err(Error::BrokerConsume)
    }

    /// Fetches again.
    ///
    /// # Errors
    /// [`Error::BrokerConsume`].
    pub fn resume(&self) -> Result<(), Error> {
        self.consumer.assignment().and_then(|assigned| self.consumer.resume(&assigned)).map_err(Error::BrokerConsume)
    }

    /// The newest known end (the broker's high watermark) of each partition; at most a second old.
    pub fn ends(&self) -> HashMap<Partition, i64> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Leaves the group (a static member stays in it, by design of static membership). Blocks until librdkafka has closed.
    pub fn close(self) {
        self.consumer.context().closing.store(true, Ordering::Release);
        // Rebalances that wait for an answer from the loop would wait for ever.
        if let Err(error) = self.consumer.unassign() {
            tracing::warn!(%error, "could not give partitions up while closing");
        }
        drop(self);
    }
}
