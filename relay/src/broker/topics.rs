//! Topics: created and checked by `relay topics` and `relay check`, counted for heartbeats and `relay status`. Nothing relies on auto-creation.

use super::producer::Publisher;
use super::{BrokerFault, REQUEST_TIMEOUT, TopicEnds, client_config};
use crate::config::{Config, TopicSettings};
use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{FutureProducer, Producer as _};
use std::collections::BTreeMap;

/// Dead letters are looked at by people, who have weekends: twice the seven days of the records they come from.
const DEAD_LETTER_RETENTION_MS: u64 = 14 * 24 * 60 * 60 * 1000;

/// What `relay topics` did, or `relay check` found, with one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// As configured.
    AsConfigured,
    /// It did not exist, and does now.
    Created,
    /// Partitions were added; the number before.
    PartitionsRaised(i32),
    /// Not there.
    Missing,
    /// It has other settings, each as "name is … instead of …". Nothing was changed.
    Differs(Vec<String>),
}

/// Every topic of a configuration, with the settings it is to have.
fn wanted(config: &Config) -> Vec<(String, TopicSettings)> {
    let invalidations = config.topics.published_for(&config.regions).into_iter().map(|topic| (topic, config.topic_settings));
    let letters = TopicSettings { retention_ms: DEAD_LETTER_RETENTION_MS, ..config.topic_settings };
    let dead_letters = config.regions.iter().map(|region| (config.topics.dead_letters(region), letters));
    invalidations.chain(dead_letters).collect()
}

/// The topic-level settings, by Kafka's names.
fn entries(settings: TopicSettings) -> [(&'static str, String); 4] {
    [
        // The broker's clock: retention must not judge a late backlog by the time of its commits.
        ("message.timestamp.type", "LogAppendTime".to_owned()),
        // Compaction would drop older invalidations of a key, which is harmless, and the heartbeats' history, which is not.
        ("cleanup.policy", "delete".to_owned()),
        ("retention.ms", settings.retention_ms.to_string()),
        ("min.insync.replicas", settings.min_insync_replicas.to_string()),
    ]
}

/// Creates what is missing, adds partitions where more are configured, and compares the rest. In the order of the topics' names as published.
///
/// # Errors
/// When the cluster does not answer or refuses.
pub async fn create(config: &Config) -> Result<Vec<(String, Finding)>, BrokerFault> {
    let admin = admin(config)?;
    let existing = partition_counts(config).await?;
    let mut findings = Vec::new();
    for (topic, settings) in wanted(config) {
        let finding = match existing.get(&topic) {
            None => create_one(&admin, &topic, settings).await?,
            Some(count) if *count < settings.partitions => {
                let more = NewPartitions::new(&topic, usize::try_from(settings.partitions).unwrap_or(1));
                let results = admin.create_partitions([&more], &options()).await.map_err(BrokerFault::new)?;
                first_error(results)?;
                Finding::PartitionsRaised(*count)
            }
            Some(count) => compare(&admin, &topic, settings, *count).await?,
        };
        findings.push((topic, finding));
    }
    Ok(findings)
}

/// Compares every topic with the configuration and changes nothing.
///
/// # Errors
/// When the cluster does not answer or refuses.
pub async fn check(config: &Config) -> Result<Vec<(String, Finding)>, BrokerFault> {
    let admin = admin(config)?;
    let existing = partition_counts(config).await?;
    let mut findings = Vec::new();
    for (topic, settings) in wanted(config) {
        let finding = match existing.get(&topic) {
            None => Finding::Missing,
            Some(count) => compare(&admin, &topic, settings, *count).await?,
        };
        findings.push((topic, finding));
    }
    Ok(findings)
}

/// The ends of every published topic's partitions.
///
/// # Errors
/// When the cluster does not answer in time.
pub async fn ends(config: &Config) -> Result<Vec<TopicEnds>, BrokerFault> {
    let counts = partition_counts(config).await?;
    let config = config.clone();
    blocking(move || {
        let client: FutureProducer = client_config(&config).create().map_err(BrokerFault::new)?;
        let mut all = Vec::new();
        for topic in config.topics.published_for(&config.regions) {
            let mut partitions = Vec::new();
            for partition in 0..counts.get(&topic).copied().unwrap_or(0) {
                partitions.push(client.client().fetch_watermarks(&topic, partition, REQUEST_TIMEOUT).map_err(BrokerFault::new)?);
            }
            all.push(TopicEnds { topic, partitions });
        }
        Ok(all)
    })
    .await
}

impl Publisher {
    /// Every partition of these topics that exist, and the topics that are missing.
    ///
    /// # Errors
    /// When the cluster does not answer in time.
    pub async fn partitions(&self, topics: Vec<String>) -> Result<(Vec<(String, i32)>, Vec<String>), BrokerFault> {
        let producer = self.producer();
        blocking(move || {
            // All topics in one question; asking for one by name would make the client look for it again and again while it is missing.
            let metadata = producer.client().fetch_metadata(None, REQUEST_TIMEOUT).map_err(BrokerFault::new)?;
            let (mut found, mut missing) = (Vec::new(), Vec::new());
            for topic in topics {
                match metadata.topics().iter().find(|t| t.name() == topic) {
                    Some(there) if !there.partitions().is_empty() => {
                        found.extend(there.partitions().iter().map(|partition| (topic.clone(), partition.id())))
                    }
                    Some(_) | None => missing.push(topic),
                }
            }
            Ok((found, missing))
        })
        .await
    }
}

fn admin(config: &Config) -> Result<AdminClient<DefaultClientContext>, BrokerFault> {
    client_config(config).create().map_err(BrokerFault::new)
}

fn options() -> AdminOptions {
    // Both: the broker waits until the topic is there, and the client does not wait for a broker that is not.
    AdminOptions::new().request_timeout(Some(2 * REQUEST_TIMEOUT)).operation_timeout(Some(REQUEST_TIMEOUT))
}

async fn partition_counts(config: &Config) -> Result<BTreeMap<String, i32>, BrokerFault> {
    let config = config.clone();
    blocking(move || {
        let client: FutureProducer = client_config(&config).create().map_err(BrokerFault::new)?;
        let metadata = client.client().fetch_metadata(None, REQUEST_TIMEOUT).map_err(BrokerFault::new)?;
        let count = |topic: &rdkafka::metadata::MetadataTopic| i32::try_from(topic.partitions().len()).unwrap_or(i32::MAX);
        Ok(metadata
            .topics()
            .iter()
            .filter(|topic| !topic.partitions().is_empty())
            .map(|topic| (topic.name().to_owned(), count(topic)))
            .collect())
    })
    .await
}

async fn create_one(admin: &AdminClient<DefaultClientContext>, topic: &str, settings: TopicSettings) -> Result<Finding, BrokerFault> {
    let entries = entries(settings);
    let mut new = NewTopic::new(topic, settings.partitions, TopicReplication::Fixed(settings.replication_factor));
    for (name, value) in &entries {
        new = new.set(name, value);
    }
    let results = admin.create_topics([&new], &options()).await.map_err(BrokerFault::new)?;
    match results.into_iter().next() {
        // Somebody else was quicker: fine.
        Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) => Ok(Finding::AsConfigured),
        Some(Err((_, code))) => Err(BrokerFault::new(KafkaError::AdminOp(code))),
        Some(Ok(_)) | None => Ok(Finding::Created),
    }
}

fn first_error(results: Vec<Result<String, (String, RDKafkaErrorCode)>>) -> Result<(), BrokerFault> {
    match results.into_iter().find_map(Result::err) {
        Some((_, code)) => Err(BrokerFault::new(KafkaError::AdminOp(code))),
        None => Ok(()),
    }
}

async fn compare(
    admin: &AdminClient<DefaultClientContext>,
    topic: &str,
    settings: TopicSettings,
    count: i32,
) -> Result<Finding, BrokerFault> {
    let described = admin.describe_configs([&ResourceSpecifier::Topic(topic)], &options()).await.map_err(BrokerFault::new)?;
    let mut differences = Vec::new();
    if count != settings.partitions {
        differences.push(format!("partitions is {count} instead of {}", settings.partitions));
    }
    for result in described {
        let resource = result.map_err(|code| BrokerFault::new(KafkaError::AdminOp(code)))?;
        let found = resource.entry_map();
        for (name, wanted) in entries(settings) {
            let value = found.get(name).and_then(|entry| entry.value.clone()).unwrap_or_default();
            if value != wanted {
                differences.push(format!("{name} is {value} instead of {wanted}"));
            }
        }
    }
    Ok(if differences.is_empty() { Finding::AsConfigured } else { Finding::Differs(differences) })
}

/// librdkafka's questions block their thread.
async fn blocking<T: Send + 'static>(ask: impl FnOnce() -> Result<T, BrokerFault> + Send + 'static) -> Result<T, BrokerFault> {
    match tokio::task::spawn_blocking(ask).await {
        Ok(result) => result,
        // The question panicked or the runtime is stopping: either way there is no answer.
        Err(_) => Err(BrokerFault::new(KafkaError::Canceled)),
    }
}
