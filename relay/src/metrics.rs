//! What the relay counts. Handles are kept: nothing is looked up by label per record.

use crate::broker::BrokerTrouble;
use crate::plan::Reason;
use crate::tail::loss::Reason as LossReason;
use crate::wake::Sign;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use recant_schema::labels::{EpochCause, Lane};
use std::sync::atomic::AtomicU64;

/// From 1 ms, where the whole path lies on a quiet system, in steps of about 2 to 2.5 up to 600 s, the longest outage whose length is still worth
/// telling apart; alerts act long before.
const SECONDS: [f64; 19] =
    [0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0];

/// How a claim ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// Nothing to claim. While idle the relay only looks, which is not counted.
    Empty,
    /// Committed after all acknowledgements.
    Retired,
    /// Rolled back, and retired in part if Kafka took some of it: the other rows are claimed again.
    Released,
    /// The epoch was not vouched for.
    NotValid,
    /// Postgres failed.
    Failed,
}

impl ClaimOutcome {
    const ALL: [Self; 5] = [Self::Empty, Self::Retired, Self::Released, Self::NotValid, Self::Failed];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Retired => "retired",
            Self::Released => "released",
            Self::NotValid => "not_valid",
            Self::Failed => "failed",
        }
    }
}

/// Where wake-ups come from at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeMode {
    /// The log, with the timer as a safety net.
    Tail,
    /// The timer alone.
    Timer,
}

// Label values come from enums only; as texts, so that their spelling is that of records and rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOutcome {
    outcome: &'static str,
}

/// `shared` by all regions or `pinned` to one, and the lane.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTopic {
    topic: &'static str,
    lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfMode {
    mode: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCause {
    cause: &'static str,
}

/// The relay's metrics. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Outbox rows claimed, repeats after a release included.
    pub claimed_rows: Counter,
    /// Rows that travelled in another row's record.
    pub coalesced_rows: Counter,
    /// Heartbeat rounds published.
    pub heartbeats: Counter,
    /// Claims that hold rows at this moment.
    pub claims_in_flight: Gauge,
    /// Age of the oldest outbox row.
    pub oldest_row_seconds: Gauge<f64, AtomicU64>,
    /// The epoch that versions are stamped with.
    pub epoch: Gauge,
    /// From commit to the claim that published it, one observation per record.
    pub commit_to_claimed: Histogram,
    /// From claim to the last acknowledgement, one observation per claim.
    pub claimed_to_acked: Histogram,
    /// Log that the tail's slot keeps the server from recycling.
    pub tail_retained_bytes: Gauge,
    /// Claims that found rows which a living tail had not announced.
    pub unannounced_claims: Counter,
    claims: [Counter; 5],
    published: [Counter; 4],
    failures: Vec<(BrokerTrouble, Counter)>,
    set_aside: Vec<(Reason, Counter)>,
    raises: Vec<(EpochCause, Counter)>,
    skew: Counter,
    modes: [Gauge; 2],
    wakes: [Counter; 2],
    losses: Vec<(LossReason, Counter)>,
}

impl Metrics {
    /// Registers everything below `relay_`. The registry adds `_total` to counters and the units.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("relay");
        let outcomes = Family::<OfOutcome, Counter>::default();
        let topics = Family::<OfTopic, Counter>::default();
        let failures = Family::<OfReason, Counter>::default();
        let set_aside = Family::<OfReason, Counter>::default();
        let raises = Family::<OfCause, Counter>::default();
        let modes = Family::<OfMode, Gauge>::default();
        let wakes = Family::<OfMode, Counter>::default();
        let losses = Family::<OfReason, Counter>::default();
        let metrics = Self {
            tail_retained_bytes: Gauge::default(),
            unannounced_claims: Counter::default(),
            modes: MODES.map(|mode| modes.get_or_create_owned(&OfMode { mode })),
            wakes: MODES.map(|mode| wakes.get_or_create_owned(&OfMode { mode })),
            losses: LossReason::ALL.iter().map(|r| (*r, losses.get_or_create_owned(&OfReason { reason: r.as_str() }))).collect(),
            claimed_rows: Counter::default(),
            coalesced_rows: Counter::default(),
            heartbeats: Counter::default(),
            claims_in_flight: Gauge::default(),
            oldest_row_seconds: Gauge::default(),
            epoch: Gauge::default(),
            commit_to_claimed: Histogram::new(SECONDS),
            claimed_to_acked: Histogram::new(SECONDS),
            claims: ClaimOutcome::ALL.map(|outcome| outcomes.get_or_create_owned(&OfOutcome { outcome: outcome.as_str() })),
            published: TOPICS.map(|(topic, lane)| topics.get_or_create_owned(&OfTopic { topic, lane: lane.as_str() })),
            failures: TROUBLES.iter().map(|t| (*t, failures.get_or_create_owned(&OfReason { reason: trouble_label(*t) }))).collect(),
            set_aside: Reason::ALL.iter().map(|r| (*r, set_aside.get_or_create_owned(&OfReason { reason: r.as_str() }))).collect(),
            raises: EpochCause::ALL.iter().map(|c| (*c, raises.get_or_create_owned(&OfCause { cause: c.as_str() }))).collect(),
            skew: Counter::default(),
        };
        registry.register("claims", "Claims by how they ended", outcomes);
        registry.register("claimed_rows", "Outbox rows claimed, repeats after a release included", metrics.claimed_rows.clone());
        registry.register("coalesced_rows", "Rows that travelled in another row's record", metrics.coalesced_rows.clone());
        registry.register("published_records", "Records acknowledged by Kafka, by kind of topic and lane", topics);
        registry.register("publish_failures", "Records that Kafka did not acknowledge, by reason", failures);
        registry.register("set_aside_rows", "Outbox rows that cannot be published, by reason", set_aside);
        registry.register("heartbeats", "Heartbeat rounds published to every partition", metrics.heartbeats.clone());
        registry.register("epoch_raises", "Epochs raised by this relay, by cause", raises);
        registry.register("negative_ages", "Ages that came out below zero and count as zero: clock skew", metrics.skew.clone());
        registry.register("claims_in_flight", "Claims that hold rows", metrics.claims_in_flight.clone());
        registry.register("wake_mode", "1 for where wake-ups come from: the log (tail) or the timer alone", modes);
        registry.register("wakes", "Looks into the outbox of a relay with a tail, by what caused them", wakes);
        registry.register("tail_losses", "How often the tail ended or could not be made, by reason", losses);
        let late = metrics.unannounced_claims.clone();
        registry.register("unannounced_claims", "Claims that found rows which a living tail had not announced", late);
        let retained = metrics.tail_retained_bytes.clone();
        registry.register_with_unit("tail_retained", "Log that the tail's slot keeps from being recycled", Unit::Bytes, retained);
        registry.register("epoch", "The epoch that versions are stamped with", metrics.epoch.clone());
        let (oldest, claimed, acked) =
            (metrics.oldest_row_seconds.clone(), metrics.commit_to_claimed.clone(), metrics.claimed_to_acked.clone());
        registry.register_with_unit("oldest_outbox_row_age", "Age of the oldest outbox row", Unit::Seconds, oldest);
        registry.register_with_unit("commit_to_claimed", "From commit to the claim that published it, by record", Unit::Seconds, claimed);
        registry.register_with_unit("claimed_to_acked", "From claim to the last acknowledgement, by claim", Unit::Seconds, acked);
        metrics
    }

    /// Where wake-ups come from, from now on.
    pub fn wake_mode(&self, mode: WakeMode) {
        let [tail, timer] = &self.modes;
        tail.set(i64::from(mode == WakeMode::Tail));
        timer.set(i64::from(mode == WakeMode::Timer));
    }

    /// A look into the outbox of a relay with a tail.
    pub fn woken(&self, sign: Sign) {
        self.wakes[usize::from(sign == Sign::Silence)].inc();
    }

    /// The tail ended, or could not be made.
    pub fn tail_lost(&self, reason: LossReason) {
        count(&self.losses, reason);
    }

    /// A claim ended.
    pub fn claim(&self, outcome: ClaimOutcome) {
        self.claims[outcome as usize].inc();
    }

    /// So many records were acknowledged.
    pub fn published(&self, pinned: bool, lane: Lane, records: u64) {
        let at = usize::from(pinned) * 2 + usize::from(lane == Lane::Bulk);
        self.published[at].inc_by(records);
    }

    /// A record was not acknowledged.
    pub fn publish_failure(&self, trouble: BrokerTrouble) {
        count(&self.failures, trouble);
    }

    /// A row was set aside.
    pub fn set_aside(&self, reason: Reason) {
        count(&self.set_aside, reason);
    }

    /// This relay raised the epoch.
    pub fn raised(&self, epoch: u64, cause: EpochCause) {
        count(&self.raises, cause);
        self.stamped_with(epoch);
    }

    /// The epoch in use.
    pub fn stamped_with(&self, epoch: u64) {
        self.epoch.set(i64::try_from(epoch).unwrap_or(i64::MAX));
    }

    /// A record's age at its claim, both times on the source's clock. Below zero (a clock was set back) counts as zero, and as skew.
    pub fn observe_commit_to_claimed(&self, age_us: i64) {
        if age_us < 0 {
            self.skew.inc();
        }
        self.commit_to_claimed.observe(age_us.max(0) as f64 / 1e6);
    }
}

/// In the order that [`Metrics::wake_mode`] and [`Metrics::woken`] count on.
const MODES: [&str; 2] = ["tail", "timer"];

/// In the order that [`Metrics::published`] counts on.
const TOPICS: [(&str, Lane); 4] = [("shared", Lane::Realtime), ("shared", Lane::Bulk), ("pinned", Lane::Realtime), ("pinned", Lane::Bulk)];

const TROUBLES: [BrokerTrouble; 8] = [
    BrokerTrouble::Unreachable,
    BrokerTrouble::TimedOut,
    BrokerTrouble::TopicMissing,
    BrokerTrouble::NoPrivilege,
    BrokerTrouble::TooLarge,
    BrokerTrouble::Refused,
    BrokerTrouble::Options,
    BrokerTrouble::Other,
];

const fn trouble_label(trouble: BrokerTrouble) -> &'static str {
    match trouble {
        BrokerTrouble::Unreachable => "unreachable",
        BrokerTrouble::TimedOut => "timed_out",
        BrokerTrouble::TopicMissing => "topic_missing",
        BrokerTrouble::NoPrivilege => "no_privilege",
        BrokerTrouble::TooLarge => "too_large",
        BrokerTrouble::Refused => "refused",
        BrokerTrouble::Options => "options",
        BrokerTrouble::Other => "other",
    }
}

fn count<T: PartialEq>(counters: &[(T, Counter)], value: T) {
    if let Some((_, counter)) = counters.iter().find(|(known, _)| *known == value) {
        counter.inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_value_is_there_from_the_start_with_units_in_the_names() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        metrics.claim(ClaimOutcome::Released);
        metrics.published(true, Lane::Bulk, 3);
        metrics.observe_commit_to_claimed(-1);
        metrics.wake_mode(WakeMode::Tail);
        metrics.tail_lost(LossReason::Slots);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "relay_claims_total{outcome=\"released\"} 1",
            "relay_published_records_total{topic=\"pinned\",lane=\"bulk\"} 3",
            "relay_set_aside_rows_total{reason=\"bad_key\"} 0",
            "relay_epoch_raises_total{cause=\"restored\"} 0",
            "relay_negative_ages_total 1",
            "relay_wake_mode{mode=\"tail\"} 1",
            "relay_wake_mode{mode=\"timer\"} 0",
            "relay_tail_losses_total{reason=\"slots\"} 1",
            "relay_tail_retained_bytes 0",
            "relay_oldest_outbox_row_age_seconds 0",
            "relay_commit_to_claimed_seconds_bucket{le=\"600.0\"} 1",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
