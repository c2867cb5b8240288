//! `subscriber status`: how far the region's cache is maintained.

use crate::broker::Locator;
use crate::cache::Inspector;
use crate::config::Config;
use crate::error::Error;
use crate::marker::{Marker, Partition};
use recant_schema::service::clock;
use serde::Serialize;

#[derive(Serialize)]
struct Row {
    topic: String,
    partition: i32,
    applied: Option<i64>,
    end: i64,
    lag_records: i64,
    lag_seconds: Option<f64>,
}

/// Prints one line per partition: applied offset, end of the log, lag in records and in seconds.
///
/// # Errors
/// When Redis or Kafka cannot be asked.
pub async fn status(config: &Config, json: bool) -> Result<(), Error> {
    let primaries = Inspector::new(config).await?.primaries().await?;
    let marker = primaries.iter().fold(Marker::default(), |oldest, primary| oldest.oldest(&primary.marker));
    let rows = rows(config, &marker).await?;
    if json {
        println!("{}", serde_json::to_string_pretty(&rows).expect("rows of texts and numbers encode"));
        return Ok(());
    }
    println!("region {}, group {}, {} primaries", config.region.as_str(), config.group, primaries.len());
    println!("{:<44} {:>9} {:>12} {:>12} {:>11} {:>11}", "topic", "partition", "applied", "end", "lag_records", "lag_seconds");
    for row in rows {
        let applied = row.applied.map_or("-".to_owned(), |offset| offset.to_string());
        let seconds = row.lag_seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.1}"));
        println!("{:<44} {:>9} {applied:>12} {:>12} {:>11} {seconds:>11}", row.topic, row.partition, row.end, row.lag_records);
    }
    Ok(())
}

async fn rows(config: &Config, marker: &Marker) -> Result<Vec<Row>, Error> {
    let (locator, names) = (Locator::new(config)?, config.consumed_topics());
    let asking = locator.clone();
    let listed = names.clone();
    let described =
        tokio::task::spawn_blocking(move || listed.iter().map(|name| asking.describe_blocking(name)).collect::<Result<Vec<_>, _>>());
    let described = described.await.expect("describing topics does not panic")?;
    let partitions = described.iter().enumerate().flat_map(|(topic, state)| {
        let count = i32::try_from(state.partitions.unwrap_or(0)).unwrap_or(i32::MAX);
        (0..count).map(move |number| (Partition { topic, number }, None))
    });
    let logs = locator.locate(partitions.collect()).await?;
    let now_us = clock::now_us();
    let rows = logs.into_iter().map(|(partition, log)| {
        let point = marker.points.get(&partition);
        let lag_records = (log.high - point.map_or(log.low, |point| point.offset + 1)).max(0);
        // Heartbeats come every second, so the age of the newest applied record is a living figure; more than a few seconds is trouble.
        let lag_seconds = point.map(|point| crate::metrics::seconds(now_us.saturating_sub(point.time_ms.saturating_mul(1000))));
        Row {
            topic: names[partition.topic].clone(),
            partition: partition.number,
            applied: point.map(|point| point.offset),
            end: log.high,
            lag_records,
            lag_seconds,
        }
    });
    Ok(rows.collect())
}
