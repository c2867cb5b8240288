//! `relay status`: where the outbox and the topics stand, for a person or as JSON.

use crate::broker::TopicEnds;
use crate::broker::topics;
use crate::config::Config;
use crate::error::Error;
use crate::outbox::Session;
use crate::outbox::admin::{COUNT_BOUND, OutboxStatus};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Both sides at about the same time.
#[derive(Debug)]
pub struct Status {
    /// The database's side.
    pub outbox: OutboxStatus,
    /// Kafka's side.
    pub topics: Vec<TopicEnds>,
}

/// Reads both sides.
///
/// # Errors
/// When one of them does not answer.
pub async fn read(config: &Config) -> Result<Status, Error> {
    let mut session = Session::open(&config.database_url, &config.relay_name, "status").await.map_err(Error::OutboxConnect)?;
    let outbox = session.status().await.map_err(Error::OutboxRead)?;
    session.close().await;
    let topics = topics::ends(config).await.map_err(Error::BrokerMetadata)?;
    Ok(Status { outbox, topics })
}

impl Status {
    /// As JSON. Epochs are texts, since they may exceed what JSON readers hold exactly.
    pub fn json(&self) -> Value {
        let outbox = &self.outbox;
        let topics: Vec<Value> = self
            .topics
            .iter()
            .map(|ends| {
                let partitions: Vec<Value> = ends.partitions.iter().map(|(low, high)| json!({ "low": low, "high": high })).collect();
                json!({ "topic": ends.topic, "partitions": partitions })
            })
            .collect();
        json!({
            "epoch": outbox.epoch.as_ref().map(|(epoch, _, _)| epoch.to_string()),
            "epoch_cause": outbox.epoch.as_ref().map(|(_, cause, _)| cause),
            "epoch_raised_at_us": outbox.epoch.as_ref().map(|(_, _, at)| at),
            "epoch_valid": outbox.valid,
            "outbox_rows": outbox.rows.min(COUNT_BOUND),
            "outbox_rows_more": outbox.rows > COUNT_BOUND,
            "oldest_row_seconds": outbox.oldest.as_secs_f64(),
            "set_aside_rows": outbox.set_aside.min(COUNT_BOUND),
            "set_aside_rows_more": outbox.set_aside > COUNT_BOUND,
            "topics": topics,
        })
    }

    /// For a person.
    pub fn text(&self) -> String {
        let outbox = &self.outbox;
        let mut text = match &outbox.epoch {
            None => "epoch       none yet: no relay has claimed here\n".to_owned(),
            Some((epoch, cause, _)) if outbox.valid => format!("epoch       {epoch} ({cause})\n"),
            Some((epoch, cause, _)) => {
                format!("epoch       {epoch} ({cause}), not valid for this run of the database: the next claim raises it\n")
            }
        };
        let _ = writeln!(text, "outbox      {} rows, oldest {:.3} s", bounded(outbox.rows), outbox.oldest.as_secs_f64());
        let _ = writeln!(
            text,
            "set aside   {} rows{}",
            bounded(outbox.set_aside),
            if outbox.set_aside > 0 { " (select * from recant.set_aside)" } else { "" }
        );
        for ends in &self.topics {
            if ends.partitions.is_empty() {
                let _ = writeln!(text, "topic       {} is missing: run relay topics", ends.topic);
            } else {
                let held: i64 = ends.partitions.iter().map(|(low, high)| high - low).sum();
                let _ = writeln!(text, "topic       {}: {} partitions, {held} records", ends.topic, ends.partitions.len());
            }
        }
        text
    }
}

fn bounded(count: i64) -> String {
    if count > COUNT_BOUND { format!("more than {COUNT_BOUND}") } else { count.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_large_backlog_is_named_as_such_and_an_epoch_survives_json() {
        let outbox = OutboxStatus {
            epoch: Some((u64::MAX, "crash".into(), 1)),
            valid: false,
            rows: COUNT_BOUND + 1,
            oldest: Duration::from_millis(1500),
            set_aside: 0,
        };
        let status = Status { outbox, topics: vec![TopicEnds { topic: "t".into(), partitions: vec![] }] };
        assert_eq!(status.json()["epoch"], "18446744073709551615");
        assert_eq!(status.json()["outbox_rows_more"], true);
        assert!(status.text().contains("more than 100000 rows, oldest 1.500 s"), "{}", status.text());
        assert!(status.text().contains("run relay topics"));
    }
}
