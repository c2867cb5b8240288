//! What the subscriber exports. Label values are small fixed sets: no key, no tenant ever.

use crate::cache::Answer;
use crate::judge::Reason;
use crate::marker::GapCause;
use crate::work::Outcome;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use recant_schema::labels::{Class, CommitBasis};
use std::sync::atomic::AtomicU64;

/// Upper bounds in seconds. 1 ms is the broker timestamp's resolution and about the fastest whole path; steps of 2 to 2.5 up to 0.2 s tell a healthy path
/// from a busy one; 1 s and 10 s are the freshness promises; 600 s is where a backstop TTL has long taken over.
const SECONDS: [f64; 18] = [0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0];

type SecondsGauge = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TimeLabels {
    class: &'static str,
    basis: &'static str,
    reading: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: &'static str,
}

/// Handles of everything exported.
#[derive(Clone)]
pub struct Metrics {
    propagation: Family<TimeLabels, Histogram, fn() -> Histogram>,
    stored_to_delivered: Histogram,
    delivered_to_applied: Histogram,
    applied: Family<OutcomeLabels, Counter>,
    dead_letters: Family<ReasonLabels, Counter>,
    gaps: Family<CauseLabels, Counter>,
    clock_skews: Counter,
    /// Partitions whose replay was asked for.
    pub replays: Counter,
    /// Sweeps done.
    pub sweeps: Counter,
    /// 1 while the region is being swept.
    pub sweeping: Gauge,
    /// Heartbeats delivered.
    pub heartbeats: Counter,
    /// Time from the newest heartbeat's reading at the source to its delivery here.
    pub heartbeat_lag: SecondsGauge,
    /// Age of the newest record up to which everything is applied, in the partition that is furthest behind.
    pub lag_seconds: SecondsGauge,
    /// Records stored and not applied, over all owned partitions.
    pub lag_records: Gauge,
    /// Records between delivery and answer.
    pub in_flight: Gauge,
    /// Partitions owned.
    pub partitions: Gauge,
    /// Partitions that wait for a replay or are being replayed.
    pub replaying: Gauge,
    /// 1 while consumption is paused because the cache does not answer.
    pub paused: Gauge,
}

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

impl Metrics {
    /// Registers everything below `subscriber_`, with the region as a label of all.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            propagation: Family::new_with_constructor(histogram),
            stored_to_delivered: histogram(),
            delivered_to_applied: histogram(),
            applied: Family::default(),
            dead_letters: Family::default(),
            gaps: Family::default(),
            clock_skews: Counter::default(),
            replays: Counter::default(),
            sweeps: Counter::default(),
            sweeping: Gauge::default(),
            heartbeats: Counter::default(),
            heartbeat_lag: SecondsGauge::default(),
            lag_seconds: SecondsGauge::default(),
            lag_records: Gauge::default(),
            in_flight: Gauge::default(),
            partitions: Gauge::default(),
            replaying: Gauge::default(),
            paused: Gauge::default(),
        };
        let of = registry;
        of.register_with_unit("propagation", "Time from commit to applied", Unit::Seconds, metrics.propagation.clone());
        of.register_with_unit(
            "stored_to_delivered",
            "Time from stored by the broker to delivered here",
            Unit::Seconds,
            metrics.stored_to_delivered.clone(),
        );
        of.register_with_unit(
            "delivered_to_applied",
            "Time from delivered here to answered by the cache",
            Unit::Seconds,
            metrics.delivered_to_applied.clone(),
        );
        of.register("applied", "Records answered by the cache, by outcome", metrics.applied.clone());
        of.register("dead_letters", "Records set aside, by reason", metrics.dead_letters.clone());
        of.register("gaps", "Times that invalidations may have been missed, by cause", metrics.gaps.clone());
        of.register("clock_skews", "Times that came out negative, and were counted as zero", metrics.clock_skews.clone());
        of.register("replays", "Partitions replayed from the cache's marker", metrics.replays.clone());
        of.register("sweeps", "Sweeps of the region done because of gaps", metrics.sweeps.clone());
        of.register("sweeping", "1 while the region is being swept", metrics.sweeping.clone());
        of.register("heartbeats", "Heartbeats delivered", metrics.heartbeats.clone());
        of.register_with_unit(
            "heartbeat_lag",
            "Time from the source to here of the newest heartbeat",
            Unit::Seconds,
            metrics.heartbeat_lag.clone(),
        );
        of.register_with_unit(
            "lag",
            "Age of the newest record up to which everything is applied",
            Unit::Seconds,
            metrics.lag_seconds.clone(),
        );
        of.register("lag_records", "Records stored and not applied", metrics.lag_records.clone());
        of.register("in_flight_records", "Records between delivery and answer", metrics.in_flight.clone());
        of.register("partitions", "Partitions owned", metrics.partitions.clone());
        of.register("replaying_partitions", "Partitions that wait for a replay or are replayed", metrics.replaying.clone());
        of.register("paused", "1 while consumption is paused because the cache does not answer", metrics.paused.clone());
        metrics
    }

    /// Counts and times one batch of answers.
    pub fn answered(&self, answers: &[Answer]) {
        for answer in answers {
            let times = &answer.work.times;
            self.applied.get_or_create(&OutcomeLabels { outcome: answer.outcome.as_str() }).inc();
            // A repeat had its effect earlier; its age says nothing about freshness.
            if answer.outcome == Outcome::Repeated {
                continue;
            }
            self.observe(&self.delivered_to_applied, times.delivered_us, answer.applied_us);
            if !times.replayed {
                self.observe(&self.stored_to_delivered, times.stored_us, times.delivered_us);
            }
            if let Some(committed_us) = times.committed_us {
                let labels = TimeLabels {
                    class: class(times.class),
                    basis: basis(times.basis),
                    reading: if times.replayed { "replay" } else { "live" },
                };
                self.observe(&self.propagation.get_or_create(&labels), committed_us, answer.applied_us);
            }
        }
    }

    fn observe(&self, histogram: &Histogram, from_us: i64, to_us: i64) {
        if to_us < from_us {
            self.clock_skews.inc();
        }
        histogram.observe(seconds(to_us.saturating_sub(from_us)));
    }

    /// Counts a dead letter.
    pub fn set_aside(&self, reason: Reason) {
        self.dead_letters.get_or_create(&ReasonLabels { reason: reason.as_str() }).inc();
    }

    /// Counts a gap.
    pub fn gap(&self, cause: GapCause) {
        let cause = match cause {
            GapCause::Retention => "retention",
            GapCause::Recreated => "recreated",
            GapCause::NewEpoch => "new_epoch",
        };
        self.gaps.get_or_create(&CauseLabels { cause }).inc();
    }
}

/// A time span in seconds; a negative one, from clocks that disagree, counts as zero.
pub fn seconds(span_us: i64) -> f64 {
    // A span of interest has far fewer than 2^53 microseconds.
    span_us.max(0) as f64 / 1e6
}

const fn class(class: Option<Class>) -> &'static str {
    match class {
        Some(class) => class.as_str(),
        None => "none",
    }
}

const fn basis(basis: CommitBasis) -> &'static str {
    basis.as_str()
}
