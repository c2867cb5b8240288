//! What is counted, and what makes a demo fail.

use crate::settings::REGIONS;
use crate::storefront::Source;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A count that many tasks raise.
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn raise(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    pub(crate) fn set(&self, number: u64) {
        self.0.store(number, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// All counts.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) committed: Count,
    pub(crate) rolled_back: Count,
    pub(crate) probes: Count,
    /// In the order of [`REGIONS`].
    pub(crate) regions: [RegionTally; 2],
}

/// One region's counts.
#[derive(Default)]
pub(crate) struct RegionTally {
    pub(crate) hits: Count,
    pub(crate) misses: Count,
    pub(crate) fills: Count,
    pub(crate) refused: Count,
    /// Reads for which the floor said that some write had been applied, so that the value could be judged.
    pub(crate) judged: Count,
    pub(crate) stale: Count,
    pub(crate) first_stale: OnceLock<String>,
    /// As the region's subscriber counts them, probes included, repeats not.
    pub(crate) applied: Count,
    propagation: Mutex<Vec<Duration>>,
}

/// How long probes took from just before their commit until they were applied.
pub(crate) struct Propagation {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
    pub(crate) probes: usize,
}

impl RegionTally {
    pub(crate) fn read_from(&self, source: Source) {
        match source {
            Source::Hit => return self.hits.raise(),
            Source::Filled => self.fills.raise(),
            Source::Refused => self.refused.raise(),
            Source::NotFilled => {}
        }
        self.misses.raise();
    }

    pub(crate) fn probe_took(&self, time: Duration) {
        self.propagation.lock().unwrap_or_else(PoisonError::into_inner).push(time);
    }

    /// `None` before the first probe has arrived.
    pub(crate) fn propagation(&self) -> Option<Propagation> {
        let mut times = self.propagation.lock().unwrap_or_else(PoisonError::into_inner).clone();
        times.sort_unstable();
        let max = *times.last()?;
        let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
        Some(Propagation { p50: at(50), p99: at(99), max, probes: times.len() })
    }
}

/// What was not right once the writers had stopped and everything had had time to arrive; in the order of [`REGIONS`].
pub(crate) struct LeftBehind {
    /// Cached products that are older than the database's row.
    pub(crate) products: [usize; 2],
    /// Probes whose invalidation never came.
    pub(crate) probes: [usize; 2],
}

impl Tally {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Everything that must not be, one line each; empty for a good run.
    pub(crate) fn failures(&self, left: &LeftBehind) -> Vec<String> {
        let mut failures = Vec::new();
        if self.committed.get() == 0 {
            failures.push("nothing was written".to_owned());
        }
        for (index, region) in self.regions.iter().enumerate() {
            let name = REGIONS[index];
            let example = region.first_stale.get().map_or("", String::as_str);
            let counted = [
                (region.stale.get(), format!("stale reads after the invalidation was applied; the first: {example}")),
                (left.products[index] as u64, "cached products are older than their row, and stay so".to_owned()),
                (left.probes[index] as u64, "probes were never applied".to_owned()),
            ];
            failures.extend(counted.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{name}: {count} {what}")));
            let absent = [
                (region.applied.get(), "no invalidation was applied"),
                (region.hits.get(), "no read was answered by the cache"),
                (region.judged.get(), "no read could be judged, so that there are no stale ones says nothing"),
            ];
            failures.extend(absent.iter().filter(|(count, _)| *count == 0).map(|(_, what)| format!("{name}: {what}")));
        }
        failures
    }
}
