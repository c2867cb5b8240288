//! Questions about logs: bounds, offsets at a time, and whether topics exist.

use super::client;
use crate::config::Config;
use crate::error::Error;
use crate::marker::{Log, Partition};
use crate::progress::Point;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for one answer of the broker; `socket.timeout.ms` says the same for the request itself.
const PATIENCE: Duration = Duration::from_secs(10);

/// One topic as the broker describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicState {
    /// Its name.
    pub name: String,
    /// How many partitions; `None` when it does not exist or may not be seen.
    pub partitions: Option<usize>,
}

/// A client without a group that only asks.
#[derive(Clone)]
pub struct Locator {
    consumer: Arc<BaseConsumer>,
    topics: Vec<String>,
    margin: Duration,
}

impl Locator {
    /// Makes the client; nothing is asked yet.
    ///
    /// # Errors
    /// [`Error::BrokerClient`] when an option is refused.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let consumer: BaseConsumer = client(config).create().map_err(Error::BrokerClient)?;
        Ok(Self { consumer: Arc::new(consumer), topics: config.consumed_topics(), margin: config.replay_margin })
    }

    /// The partitions' bounds, and where each marker's time less the margin lies. Three requests, however many partitions.
    ///
    /// # Errors
    /// [`Error::BrokerLookUp`]; asking again is safe.
    pub async fn locate(&self, partitions: Vec<(Partition, Option<Point>)>) -> Result<Vec<(Partition, Log)>, Error> {
        let this = self.clone();
        let answer = tokio::task::spawn_blocking(move || this.locate_blocking(&partitions));
        answer.await.expect("looking up offsets does not panic")
    }

    fn locate_blocking(&self, partitions: &[(Partition, Option<Point>)]) -> Result<Vec<(Partition, Log)>, Error> {
        // To the broker, -2 and -1 in place of a time mean the oldest record and the end.
        let lows = self.offsets(partitions.iter().map(|(partition, _)| (*partition, Offset::Beginning)))?;
        let highs = self.offsets(partitions.iter().map(|(partition, _)| (*partition, Offset::End)))?;
        let margin_ms = i64::try_from(self.margin.as_millis()).unwrap_or(i64::MAX);
        let times = partitions
            .iter()
            .filter_map(|(partition, marker)| Some((*partition, Offset::Offset((*marker)?.time_ms.saturating_sub(margin_ms).max(0)))));
        let sinces = self.offsets(times)?;
        let missing = || Error::BrokerLookUp("the answer lacks a partition".to_owned());
        let logs = partitions.iter().map(|(partition, _)| {
            let bound = |offsets: &HashMap<Partition, Option<i64>>| offsets.get(partition).copied().flatten().ok_or_else(missing);
            Ok((*partition, Log { low: bound(&lows)?, high: bound(&highs)?, since: sinces.get(partition).copied().flatten() }))
        });
        logs.collect()
    }

    fn offsets(&self, times: impl Iterator<Item = (Partition, Offset)>) -> Result<HashMap<Partition, Option<i64>>, Error> {
        let mut list = TopicPartitionList::new();
        for (partition, time) in times {
            list.add_partition_offset(&self.topics[partition.topic], partition.number, time).expect("times of ours are not negative");
        }
        if list.count() == 0 {
            return Ok(HashMap::new());
        }
        let answer = self.consumer.offsets_for_times(list, PATIENCE).map_err(|error| Error::BrokerLookUp(error.to_string()))?;
        let read = answer.elements().into_iter().map(|element| {
            element.error().map_err(|error| Error::BrokerLookUp(error.to_string()))?;
            let topic = self.topics.iter().position(|topic| topic == element.topic()).expect("the answer names topics that were asked for");
            // The end stands for "no such record".
            let offset = match element.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
            Ok((Partition { topic, number: element.partition() }, offset))
        });
        read.collect()
    }

    /// The next committed offset of each partition of a group's topics; `None` where nothing is committed. Blocks.
    ///
    /// # Errors
    /// [`Error::BrokerLookUp`].
    pub fn describe_blocking(&self, name: &str) -> Result<TopicState, Error> {
        let metadata = self.consumer.fetch_metadata(Some(name), PATIENCE).map_err(|error| Error::BrokerLookUp(error.to_string()))?;
        let topic = metadata.topics().iter().find(|topic| topic.name() == name);
        let partitions = topic.filter(|topic| topic.error().is_none()).map(|topic| topic.partitions().len()).filter(|count| *count > 0);
        Ok(TopicState { name: name.to_owned(), partitions })
    }
}
