//! The live consumer: member of the region's group, reads fresh records.

use super::{batch, consumer, is_out_of_range, list, partitions};
use crate::config::Config;
use crate::error::Error;
use crate::marker::Partition;
use crate::state::Delivery;
use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// The group's rebalances, as librdkafka reports them.
struct Context {
    topics: Vec<String>,
    rebalances: mpsc::UnboundedSender<LiveEvent>,
    /// While the client is being dropped nobody answers rebalances any more.
    closing: AtomicBool,
}

impl ClientContext for Context {}

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

/// Handle of the live consumer. Dropping it leaves the group (a static member stays in it, by design of static membership), which blocks
/// until librdkafka has closed.
pub struct Live {
    consumer: Arc<StreamConsumer<Context>>,
    topics: Vec<String>,
    rebalances: mpsc::UnboundedReceiver<LiveEvent>,
    /// The error that ended a batch: librdkafka reports some errors once and never again.
    held: Option<KafkaError>,
}

impl Live {
    /// Joins the group.
    ///
    /// # Errors
    /// [`Error::BrokerClient`] when an option is refused.
    pub fn join(config: &Config) -> Result<Self, Error> {
        let topics = config.consumed_topics();
        let (sender, rebalances) = mpsc::unbounded_channel();
        let context = Context { topics: topics.clone(), rebalances: sender, closing: AtomicBool::new(false) };
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
            .set("topic.metadata.refresh.interval.ms", "10000");
        if let Some(id) = &config.instance_id {
            client.set("group.instance.id", id);
        }
        let consumer: StreamConsumer<Context> = client.create_with_context(context).map_err(Error::BrokerClient)?;
        let names: Vec<_> = topics.iter().map(String::as_str).collect();
        consumer.subscribe(&names).map_err(Error::BrokerClient)?;
        Ok(Self { consumer: Arc::new(consumer), topics, rebalances, held: None })
    }

    /// The next thing that happens. Cancel safe.
    pub async fn next(&mut self) -> LiveEvent {
        if let Some(error) = self.held.take() {
            return trouble(error);
        }
        tokio::select! {
            biased;
            Some(event) = self.rebalances.recv() => event,
            read = batch(&self.consumer, &self.topics, &mut self.held) => read.map_or_else(trouble, LiveEvent::Records),
        }
    }

    /// Starts consuming exactly these partitions at these offsets.
    ///
    /// # Errors
    /// [`Error::BrokerConsume`].
    pub fn assign(&self, from: &[(Partition, i64)]) -> Result<(), Error> {
        let from = self.list_of(from);
        // librdkafka keeps a partition paused over a rebalance; the state takes everything assigned for flowing.
        self.consumer.assign(&from).and_then(|()| self.consumer.resume(&from)).map_err(Error::BrokerConsume)
    }

    /// Commits these next offsets without waiting.
    ///
    /// # Errors
    /// [`Error::BrokerCommit`].
    pub fn commit(&self, next: &[(Partition, i64)]) -> Result<(), Error> {
        self.consumer.commit(&self.list_of(next), CommitMode::Async).map_err(Error::BrokerCommit)
    }

    /// Commits these next offsets, waits for it (bounded by `socket.timeout.ms`), and gives all partitions up.
    ///
    /// # Errors
    /// [`Error::BrokerCommit`] when the commit failed; the partitions are given up all the same.
    pub async fn release(&self, next: &[(Partition, i64)]) -> Result<(), Error> {
        let (consumer, next) = (self.consumer.clone(), self.list_of(next));
        let released = tokio::task::spawn_blocking(move || {
            let committed = if next.count() == 0 { Ok(()) } else { consumer.commit(&next, CommitMode::Sync).map_err(Error::BrokerCommit) };
            consumer.unassign().map_err(Error::BrokerConsume).and(committed)
        });
        released.await.unwrap_or(Ok(()))
    }

    fn list_of(&self, offsets: &[(Partition, i64)]) -> TopicPartitionList {
        let offsets: Vec<_> = offsets.iter().map(|(partition, offset)| (*partition, Offset::Offset(*offset))).collect();
        list(&offsets, &self.topics)
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
}

impl Drop for Live {
    /// Rebalances that wait for an answer from the loop would wait for ever, also when the loop ends by a panic.
    fn drop(&mut self) {
        self.consumer.context().closing.store(true, Ordering::Release);
        if let Err(error) = self.consumer.unassign() {
            tracing::warn!(%error, "could not give partitions up while closing");
        }
    }
}

fn trouble(error: KafkaError) -> LiveEvent {
    match error {
        KafkaError::MessageConsumptionFatal(_) => LiveEvent::Fatal(error),
        error if is_out_of_range(&error) => LiveEvent::OutOfRange,
        error => LiveEvent::Trouble(error),
    }
}
