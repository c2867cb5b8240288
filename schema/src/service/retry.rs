//! Delays between attempts. The only user of the crate `backoff`, which is unmaintained (RUSTSEC-2025-0012); replacing it changes this file alone.
//!
//! Whether to try again is not decided here but in each service's `disposition`.

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff;
use std::time::Duration;

/// Each delay is this much longer than the one before.
const GROWTH: f64 = 2.0;

/// Random part of each delay, so that many clients of one broken server do not come back in step.
const JITTER: f64 = 0.2;

/// Growing, jittered, bounded delays without end: the services outlive every outage.
#[derive(Debug)]
pub struct Retry(ExponentialBackoff);

impl Retry {
    /// Delays that start at `first` and grow to `longest`, each +-20%.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self(ExponentialBackoff {
            current_interval: first,
            initial_interval: first,
            randomization_factor: JITTER,
            multiplier: GROWTH,
            max_interval: longest,
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        })
    }

    /// The delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let longest = self.0.max_interval;
        self.0.next_backoff().unwrap_or(longest)
    }

    /// To be called after a success: the next outage starts with a short delay again.
    pub fn reset(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_bound_and_never_end() {
        let mut retry = Retry::new(Duration::from_millis(10), Duration::from_millis(100));
        let first = retry.next_delay();
        assert!((8..=12).contains(&first.as_millis()), "{first:?}");
        let last = (0..1000).map(|_| retry.next_delay()).last().unwrap();
        assert!((80..=120).contains(&last.as_millis()), "{last:?}");
        retry.reset();
        assert!(retry.next_delay() <= Duration::from_millis(12));
    }
}
