//! When to look into the outbox. A wake-up is a hint that there may be something to claim; it never carries what.

use std::future::Future;
use std::time::Duration;

/// First wait after something was claimed; the smallest step of the runtime's timer.
const SHORTEST: Duration = Duration::from_millis(1);

/// Longest wait while idle: 50 empty claims a second, about 1% of a core, and the latency bound of the first row after a quiet time.
const LONGEST: Duration = Duration::from_millis(20);

/// Says when the next claim is worth making. Losing a wake-up must lose nothing: every implementation returns from [`Wake::wait`] after a
/// bounded time on its own.
pub trait Wake: Send + 'static {
    /// Returns when there may be something to claim. Cancel safe.
    fn wait(&mut self) -> impl Future<Output = ()> + Send;

    /// Told after each claim how many rows it returned, and whether there may be more already.
    fn claimed(&mut self, rows: usize, full: bool);
}

/// Waits 1 ms after something was claimed, twice as long after each empty claim, 20 ms at most; not at all after a full claim.
#[derive(Debug)]
pub struct Timer {
    next: Duration,
}

impl Default for Timer {
    fn default() -> Self {
        Self { next: SHORTEST }
    }
}

impl Wake for Timer {
    async fn wait(&mut self) {
        if !self.next.is_zero() {
            tokio::time::sleep(self.next).await;
        }
    }

    fn claimed(&mut self, rows: usize, full: bool) {
        self.next = match (rows, full) {
            (_, true) => Duration::ZERO,
            (0, false) => (self.next * 2).clamp(SHORTEST, LONGEST),
            (_, false) => SHORTEST,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timer_slows_down_while_idle_and_is_quick_after_a_claim() {
        let mut timer = Timer::default();
        let mut waits = vec![];
        for (rows, full) in [(0, false), (0, false), (0, false), (0, false), (0, false), (0, false), (3, false), (128, true), (0, false)] {
            timer.claimed(rows, full);
            waits.push(timer.next.as_millis());
        }
        assert_eq!(waits, [2, 4, 8, 16, 20, 20, 1, 0, 1]);
    }
}
