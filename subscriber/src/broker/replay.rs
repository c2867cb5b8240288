//! Replays: reading again what a cache primary may have lost, beside the live consumer and without the group.

use super::{batch, consumer, is_out_of_range, list};
use crate::config::Config;
use crate::error::Error;
use crate::marker::Partition;
use crate::state::Delivery;
use rdkafka::Offset;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::error::KafkaError;
use std::collections::BTreeMap;
use std::ops::Range;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Batches between the readers and the loop; the loop takes one when it has room.
const QUEUE: usize = 4;

/// What a replay has to say, with its session.
#[derive(Debug)]
pub enum ReplayEvent {
    /// Records.
    Records(Vec<Delivery>),
    /// A partition has no more records.
    ReachedEnd(Partition),
    /// A position is not in its log any more.
    OutOfRange,
    /// A reader reports trouble and goes on trying.
    Trouble(KafkaError),
}

/// At most one replay at a time: starting one ends the one before.
pub struct Replay {
    sender: mpsc::Sender<(u32, ReplayEvent)>,
    receiver: mpsc::Receiver<(u32, ReplayEvent)>,
    readers: Vec<JoinHandle<()>>,
}

impl Default for Replay {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE);
        Self { sender, receiver, readers: Vec::new() }
    }
}

impl Replay {
    /// Reads exactly these ranges from now on, one reader a topic (the end of a partition is reported without its topic).
    ///
    /// # Errors
    /// [`Error::BrokerClient`] or [`Error::BrokerConsume`] when a client cannot be made.
    pub fn restart(&mut self, config: &Config, session: u32, ranges: Vec<(Partition, Range<i64>)>) -> Result<(), Error> {
        for reader in self.readers.drain(..) {
            reader.abort();
        }
        let topics = config.consumed_topics();
        let mut by_topic: BTreeMap<usize, BTreeMap<Partition, Range<i64>>> = BTreeMap::new();
        for (partition, range) in ranges {
            by_topic.entry(partition.topic).or_default().insert(partition, range);
        }
        for (topic, ranges) in by_topic {
            let mut client = consumer(config);
            // Needed by the client to consume at all; it never joins and never commits.
            client.set("group.id", format!("{}.replay", config.group)).set("enable.partition.eof", "true");
            let consumer: StreamConsumer = client.create().map_err(Error::BrokerClient)?;
            let from: Vec<_> = ranges.iter().map(|(partition, range)| (*partition, Offset::Offset(range.start))).collect();
            consumer.assign(&list(&from, &topics)).map_err(Error::BrokerConsume)?;
            let reader = Reader { consumer, topics: topics.clone(), topic, ranges, session, sender: self.sender.clone(), held: None };
            self.readers.push(tokio::spawn(reader.run()));
        }
        Ok(())
    }

    /// The next thing that happens in the current or an earlier session. Cancel safe.
    pub async fn next(&mut self) -> (u32, ReplayEvent) {
        match self.receiver.recv().await {
            Some(event) => event,
            None => unreachable!("self holds a sender"),
        }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        for reader in &self.readers {
            reader.abort();
        }
    }
}

struct Reader {
    consumer: StreamConsumer,
    topics: Vec<String>,
    topic: usize,
    ranges: BTreeMap<Partition, Range<i64>>,
    session: u32,
    sender: mpsc::Sender<(u32, ReplayEvent)>,
    /// The error that ended a batch: an end of a partition is reported once.
    held: Option<KafkaError>,
}

impl Reader {
    async fn run(mut self) {
        while !self.ranges.is_empty() {
            let read = match self.held.take() {
                Some(error) => Err(error),
                None => batch(&self.consumer, &self.topics, &mut self.held).await,
            };
            let event = match read {
                Ok(records) => {
                    self.stop_what_is_done(&records);
                    ReplayEvent::Records(records)
                }
                Err(KafkaError::PartitionEOF(number)) => {
                    let partition = Partition { topic: self.topic, number };
                    self.stop(partition);
                    ReplayEvent::ReachedEnd(partition)
                }
                Err(error) if is_out_of_range(&error) => ReplayEvent::OutOfRange,
                Err(error) => ReplayEvent::Trouble(error),
            };
            if self.sender.send((self.session, event)).await.is_err() {
                return;
            }
        }
    }

    fn stop_what_is_done(&mut self, records: &[Delivery]) {
        let done = |record: &&Delivery| self.ranges.get(&record.partition).is_some_and(|range| record.point.offset + 1 >= range.end);
        let done: Vec<_> = records.iter().filter(done).map(|record| record.partition).collect();
        for partition in done {
            self.stop(partition);
        }
    }

    /// What is replayed whole is not read any further while its neighbours are.
    fn stop(&mut self, partition: Partition) {
        if self.ranges.remove(&partition).is_some() {
            let paused = self.consumer.pause(&list(&[(partition, Offset::Invalid)], &self.topics));
            if let Err(error) = paused {
                tracing::debug!(%error, "could not pause a replayed partition");
            }
        }
    }
}
