//! `subscriber check`: what `run` needs, found out one by one, each failure with its remedy.

use crate::broker::Locator;
use crate::cache::Inspector;
use crate::config::Config;

/// Oldest server whose scripts behave as the protocol needs.
const OLDEST_REDIS: u32 = 7;

/// Prints one line per requirement; whether all are met.
pub async fn check(config: &Config) -> bool {
    println!("ok    configuration: region {}, group {}", config.region.as_str(), config.group);
    let (cache, broker) = (check_cache(config).await, check_broker(config).await);
    cache && broker
}

async fn check_cache(config: &Config) -> bool {
    let primaries = match Inspector::new(config).await {
        Ok(inspector) => inspector.primaries().await,
        Err(error) => Err(error),
    };
    let primaries = match primaries {
        Ok(primaries) => primaries,
        Err(error) => {
            println!("FAIL  Redis: {}", error.line());
            return false;
        }
    };
    let mut fine = true;
    for primary in primaries {
        let major = primary.version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= OLDEST_REDIS) {
            println!("ok    Redis {}: version {}", primary.name, primary.version);
        } else {
            fine = false;
            println!("FAIL  Redis {}: version {}; the scripts need {OLDEST_REDIS} or later, upgrade it", primary.name, primary.version);
        }
        if primary.eviction.starts_with("allkeys") {
            println!(
                "note  Redis {}: {} may evict floors and the marker; that is safe, but costs refused fills and replays",
                primary.name, primary.eviction
            );
        }
        if primary.marker.points.is_empty() {
            println!("note  Redis {}: no marker yet; the first start replays the whole retained topic", primary.name);
        }
    }
    fine
}

async fn check_broker(config: &Config) -> bool {
    let names: Vec<_> = config.consumed_topics().into_iter().chain([config.dead_letter_topic()]).collect();
    let locator = match Locator::new(config) {
        Ok(locator) => locator,
        Err(error) => {
            println!("FAIL  Kafka: {}", error.line());
            return false;
        }
    };
    let described =
        tokio::task::spawn_blocking(move || names.iter().map(|name| locator.describe_blocking(name)).collect::<Result<Vec<_>, _>>());
    match described.await.expect("describing topics does not panic") {
        Err(error) => {
            println!("FAIL  Kafka {}: {}", config.brokers, error.line());
            false
        }
        Ok(topics) => {
            let mut fine = true;
            for topic in topics {
                match topic.partitions {
                    Some(partitions) => println!("ok    Kafka: topic {} has {partitions} partitions", topic.name),
                    None => {
                        fine = false;
                        println!(
                            "FAIL  Kafka: topic {} does not exist or may not be seen; create it with relay topics, or grant READ and DESCRIBE",
                            topic.name
                        );
                    }
                }
            }
            fine
        }
    }
}
