//! Heartbeats: one record to every partition of every published topic, on an interval.
//!
//! They show that the whole path is alive, so they stop when it is not: no pulse from Postgres, or an epoch that is not vouched for, means no heartbeat.
//! They also find out which topics take records: a topic that does not gets none, and the others go on.

use crate::broker::BrokerTrouble;
use crate::error::Error;
use crate::outbox::Session;
use crate::outbox::reading::Pulse;
use crate::pace::period;
use crate::patience::RETRY_LONGEST;
use crate::relay::{HEARTBEAT, KAFKA, Shared};
use recant_schema::invalidation::{Heartbeat, Source};
use recant_schema::record::Record;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::MissedTickBehavior;
use tracing::debug;
use uuid::Uuid;

/// How long partition counts are believed. Partitions are added rarely, and a new one without heartbeats raises an alert only after longer than this.
const PARTITIONS_FRESH: Duration = Duration::from_secs(30);

/// Beats until shutdown.
pub(crate) async fn beat(shared: Arc<Shared>) -> Result<(), Error> {
    let mut heart = Heart { shared: shared.clone(), session: None, partitions: Vec::new(), read_at: None, oldest_due: Instant::now() };
    let mut ticks = tokio::time::interval(shared.config.heartbeat_interval);
    // After an outage one heartbeat says everything; the missed ones say nothing.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // A heartbeat is how a failing topic is found to work again: its rows must not wait for a long interval.
        let soon = async {
            shared.topic_failed.notified().await;
            tokio::time::sleep(RETRY_LONGEST).await;
        };
        tokio::select! {
            () = shared.shutdown.wait() => break,
            _ = ticks.tick() => {}
            () = soon => {}
        }
        match heart.turn().await {
            Ok(true) => shared.recovered(HEARTBEAT),
            // Not vouched for: the claims raise the epoch or say why they cannot.
            Ok(false) => {}
            Err(error) => heart.failed(&error),
        }
    }
    if let Some(session) = heart.session {
        session.close().await;
    }
    Ok(())
}

struct Heart {
    shared: Arc<Shared>,
    session: Option<Session>,
    partitions: Vec<(String, i32)>,
    read_at: Option<Instant>,
    oldest_due: Instant,
}

impl Heart {
    /// Says whether heartbeats went out.
    async fn turn(&mut self) -> Result<bool, Error> {
        let session = self.shared.session(&mut self.session, "heartbeat").await?;
        let pulse = session.pulse().await.map_err(Error::OutboxRead)?;
        if self.oldest_due <= Instant::now() {
            let began = Instant::now();
            let age = session.oldest_row_age().await.map_err(Error::OutboxRead)?;
            self.shared.metrics.oldest_row_seconds.set(age.as_secs_f64());
            // Where dead rows pile up before the first live one this gets slow, and then has to become rare.
            self.oldest_due = began + period(began.elapsed()).min(PARTITIONS_FRESH);
        }
        if let Some(tail) = &self.shared.tail
            && let Some(slot) = tail.slot()
        {
            let retained = session.retained_by(&slot).await.map_err(Error::OutboxRead)?.unwrap_or(0);
            self.shared.metrics.tail_retained_bytes.set(i64::try_from(retained).unwrap_or(i64::MAX));
            tail.retained(&slot, retained, self.shared.config.tail_retained_bytes);
        }
        let Some(pulse) = pulse else {
            debug!("no heartbeat: the epoch is not vouched for");
            return Ok(false);
        };
        let missing = self.refresh_partitions().await?;
        let (shared, partitions) = (&self.shared, &self.partitions);
        let beats = shared.publisher.publish_heartbeats(partitions, || self.encode(&pulse)).await.map_err(Error::BrokerHeartbeat)?;
        let missing = missing.into_iter().map(|topic| (topic, BrokerTrouble::TopicMissing));
        let failing: BTreeMap<_, _> = missing.chain(beats.failing).collect();
        shared.topics_work(&beats.acknowledged);
        shared.topics_fail(&failing);
        shared.kafka_answers();
        shared.metrics.heartbeats.inc();
        if !failing.is_empty() {
            self.read_at = None;
        }
        Ok(true)
    }

    /// Returns the topics that do not exist; while there are any, the next turn looks again.
    async fn refresh_partitions(&mut self) -> Result<Vec<String>, Error> {
        if self.read_at.is_some_and(|at| at.elapsed() < PARTITIONS_FRESH) {
            return Ok(Vec::new());
        }
        let config = &self.shared.config;
        let topics = config.topics.published_for(&config.regions);
        let (partitions, missing) = self.shared.publisher.partitions(topics).await.map_err(Error::BrokerMetadata)?;
        self.partitions = partitions;
        self.read_at = missing.is_empty().then(Instant::now);
        Ok(missing)
    }

    fn encode(&self, pulse: &Pulse) -> Vec<u8> {
        let config = &self.shared.config;
        let source = Source { database: config.source_name.clone(), relay: config.relay_name.clone(), epoch_cause: pulse.cause };
        Record::Heartbeat(Heartbeat { id: Uuid::now_v7(), version: pulse.version, committed_at_us: pulse.clock_us, source }).encode()
    }

    fn failed(&mut self, error: &Error) {
        self.read_at = None;
        match error {
            Error::BrokerMetadata(_) | Error::BrokerHeartbeat(_) => self.shared.report(KAFKA, error),
            // The claims meet the same outage and report it; once is enough.
            other => {
                self.session = None;
                debug!(error = other.line(), "no heartbeat");
                let _ = self.shared.health.failed(HEARTBEAT, other.line());
            }
        }
    }
}
