//! Questions about logs: bounds, offsets at a time, and whether topics exist.

use super::{client, list};
use crate::config::Config;
use crate::error::Error;
use crate::marker::{Log, Partition};
use crate::progress::Point;
use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
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

    /// The partitions' bounds, and where each marker's time less the margin lies. Three requests, however many partitions. Partitions that the broker
    /// cannot describe now, such as those without a leader, are missing from the answer.
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
        let time = |marker: Point| Offset::Offset(marker.time_ms.saturating_sub(margin_ms).max(0));
        let sinces = self.offsets(partitions.iter().filter_map(|(partition, marker)| Some((*partition, time((*marker)?)))))?;
        let logs = partitions.iter().filter_map(|(partition, marker)| {
            let bound = |offsets: &HashMap<Partition, Option<i64>>| offsets.get(partition).copied().flatten();
            let since = match marker {
                Some(_) => *sinces.get(partition)?,
                None => None,
            };
            Some((*partition, Log { low: bound(&lows)?, high: bound(&highs)?, since }))
        });
        Ok(logs.collect())
    }

    /// The end (the broker's high watermark) of each partition that the broker can describe now.
    ///
    /// # Errors
    /// [`Error::BrokerLookUp`].
    pub async fn ends(&self, partitions: Vec<Partition>) -> Result<HashMap<Partition, i64>, Error> {
        let this = self.clone();
        let ask = move || this.offsets(partitions.into_iter().map(|partition| (partition, Offset::End)));
        let ends = tokio::task::spawn_blocking(ask).await.expect("looking up offsets does not panic")?;
        Ok(ends.into_iter().filter_map(|(partition, end)| Some((partition, end?))).collect())
    }

    fn offsets(&self, times: impl Iterator<Item = (Partition, Offset)>) -> Result<HashMap<Partition, Option<i64>>, Error> {
        let times: Vec<_> = times.collect();
        if times.is_empty() {
            return Ok(HashMap::new());
        }
        let answer = self.consumer.offsets_for_times(list(&times, &self.topics), PATIENCE);
        let answer = answer.map_err(|error| Error::BrokerLookUp(error.to_string()))?;
        let read = answer.elements().into_iter().filter(|element| element.error().is_ok()).map(|element| {
            let topic = self.topics.iter().position(|topic| topic == element.topic()).expect("the answer names topics that were asked for");
            // The end stands for "no such record".
            let offset = match element.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
            (Partition { topic, number: element.partition() }, offset)
        });
        Ok(read.collect())
    }

    /// A topic as the broker describes it now. Blocks.
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
