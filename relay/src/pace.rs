//! PURE: how long to wait between claims, how much one takes, where its scan starts, and how often the look-behind runs.
//!
//! The quick scan starts above `low`, below which (nearly) everything was claimed long ago. Why: while a transaction is held open anywhere in
//! the cluster, vacuum cannot remove retired rows and the index scan has to step over each of them; at 200,000 of them a claim was measured
//! 3.5 times slower. Nothing is skipped by it: a row whose transaction stayed open longer than a second after its id was drawn, or that a relay released
//! by dying, lies below `low` when it becomes visible, and the look-behind claims the ids up to `low` at its own, slower pace.

use std::time::Duration;

/// Size of a claim while claims come back short: at low rates a claim holds a few rows anyway, and locks held are what a stuck relay costs.
const SMALL: u32 = 128;

/// A full claim multiplies the next one's size by this: two steps from [`SMALL`] to the default limit of 2,000.
const GROWTH: u32 = 4;

/// After so many empty claims in a row (some 30 ms with the timer's steps) the relay only peeks: one question instead of a transaction of three. Below
/// that a peek would only delay the row that is about to come.
const IDLE_AFTER: u32 = 5;

/// How old a sample of the identity sequence must be before the scan may start there. A transaction that commits up to a second after its call sees
/// the same latency as any other; only longer ones wait for the look-behind.
const SETTLED_MS: u64 = 1_000;

/// The look-behind's shortest period: what a late row waits at most when nothing holds dead rows back.
const SHORTEST_PERIOD: Duration = Duration::from_secs(1);

/// And its longest: rows of a frozen relay are free after 20 s (idle_in_transaction_session_timeout) and have to be published within the stated 30 s.
const LONGEST_PERIOD: Duration = Duration::from_secs(5);

/// The look-behind and the oldest-row reading may use a twentieth of one backend's time while that keeps them within their longest period.
const SHARE: u32 = 20;

/// First wait after something was claimed; the smallest step of the runtime's timer.
pub const SHORTEST: Duration = Duration::from_millis(1);

/// Waits between claims by the clock alone: 1 ms after something was claimed, twice as long after each empty claim up to a longest one, none after a
/// full claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    next: Duration,
    longest: Duration,
}

impl Steps {
    /// `longest`: what a row waits at most after a quiet time, and what idling costs: at 20 ms, 50 looks a second.
    pub fn new(longest: Duration) -> Self {
        Self { next: SHORTEST, longest }
    }

    /// How long to wait before the next claim.
    pub fn pause(&self) -> Duration {
        self.next
    }

    /// Whether waits have grown as long as they get.
    pub fn at_longest(&self) -> bool {
        self.next >= self.longest
    }

    /// Learns from a claim.
    pub fn claimed(&mut self, rows: usize, full: bool) {
        self.next = match (rows, full) {
            (_, true) => Duration::ZERO,
            (0, false) => self.next.saturating_mul(2).clamp(SHORTEST, self.longest),
            (_, false) => SHORTEST,
        };
    }

    /// Something is about to come: the wait after the next claim is the shortest.
    pub fn expect(&mut self) {
        self.next = Duration::ZERO;
    }
}

/// A range of outbox ids: above `above`, up to `up_to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Exclusive.
    pub above: i64,
    /// Inclusive.
    pub up_to: i64,
    /// At most so many rows.
    pub limit: u32,
}

/// The quick scan of one relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pace {
    limit: u32,
    size: u32,
    low: i64,
    /// Empty claims in a row.
    empty: u32,
    /// When it was taken (milliseconds, monotonic), and the sequence's last value then.
    sample: Option<(u64, i64)>,
}

impl Pace {
    /// Starts small and at the beginning of the table. `limit`: most rows per claim, at least 1.
    pub fn new(limit: u32) -> Self {
        Self { limit, size: SMALL.min(limit), low: 0, empty: 0, sample: None }
    }

    /// What the next quick claim scans.
    pub fn quick(&self) -> Scan {
        Scan { above: self.low, up_to: i64::MAX, limit: self.size }
    }

    /// Whether to peek before claiming: there has been nothing for a while.
    pub fn idle(&self) -> bool {
        self.empty >= IDLE_AFTER
    }

    /// What the look-behind scans, `None` while the quick scan starts at the beginning anyway.
    pub fn behind(&self) -> Option<Scan> {
        (self.low > 0).then_some(Scan { above: 0, up_to: self.low, limit: self.limit })
    }

    /// Learns from a quick claim: what it scanned, how many rows it returned, the identity sequence's last value, and the time in milliseconds
    /// (monotonic).
    pub fn claimed(&mut self, scan: Scan, rows: usize, last_value: i64, now_ms: u64) {
        let full = rows >= scan.limit as usize;
        self.empty = if rows == 0 { self.empty.saturating_add(1) } else { 0 };
        self.size = if full { scan.limit.saturating_mul(GROWTH).min(self.limit) } else { SMALL.min(self.limit) };
        // Only a claim that scanned from here and came back short proves that nothing visible and unlocked was left above; a claim that started
        // before a reset proves nothing about where the scan starts now.
        if full || scan.above != self.low {
            return;
        }
        match self.sample {
            None => self.sample = Some((now_ms, last_value)),
            Some((taken, value)) if now_ms.saturating_sub(taken) >= SETTLED_MS => {
                self.low = self.low.max(value);
                self.sample = Some((now_ms, last_value));
            }
            Some(_) => {}
        }
    }

    /// Rows were released, or the connection is new: what was below may be free again, so the scan starts at the beginning.
    pub fn reset(&mut self) {
        self.low = 0;
        self.sample = None;
    }
}

/// How long to wait after a piece of background work that took so long.
pub fn period(last: Duration) -> Duration {
    last.saturating_mul(SHARE).clamp(SHORTEST_PERIOD, LONGEST_PERIOD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn waits_grow_while_idle_and_are_short_after_a_claim() {
        let mut steps = Steps::new(Duration::from_millis(20));
        let mut waits = vec![];
        for (rows, full) in [(0, false), (0, false), (0, false), (0, false), (0, false), (0, false), (3, false), (128, true), (0, false)] {
            steps.claimed(rows, full);
            waits.push(steps.pause().as_millis());
        }
        assert_eq!(waits, [2, 4, 8, 16, 20, 20, 1, 0, 1]);
    }

    #[test]
    fn claims_grow_while_they_come_back_full_and_shrink_at_once() {
        let mut pace = Pace::new(2_000);
        let mut sizes = vec![];
        for rows in [128, 512, 2_000, 2_000, 3, 0] {
            sizes.push(pace.quick().limit);
            pace.claimed(pace.quick(), rows, 0, 0);
        }
        assert_eq!(sizes, [128, 512, 2_000, 2_000, 2_000, 128]);
        assert_eq!(Pace::new(10).quick().limit, 10);
    }

    #[test]
    fn the_scan_starts_past_ids_drawn_a_second_ago_and_not_past_newer_ones() {
        let mut pace = Pace::new(2_000);
        pace.claimed(pace.quick(), 0, 100, 0);
        pace.claimed(pace.quick(), 0, 200, 999);
        assert_eq!((pace.quick().above, pace.behind()), (0, None));
        pace.claimed(pace.quick(), 0, 300, 1_000);
        assert_eq!(pace.quick().above, 100);
        assert_eq!(pace.behind(), Some(Scan { above: 0, up_to: 100, limit: 2_000 }));
    }

    #[test]
    fn a_full_claim_never_moves_the_start() {
        let mut pace = Pace::new(128);
        pace.claimed(pace.quick(), 0, 100, 0);
        pace.claimed(pace.quick(), 128, 200, 5_000);
        assert_eq!(pace.quick().above, 0);
    }

    #[test]
    fn after_a_release_the_scan_starts_at_the_beginning_and_an_older_claim_cannot_move_it() {
        let mut pace = Pace::new(128);
        pace.claimed(pace.quick(), 0, 100, 0);
        pace.claimed(pace.quick(), 0, 200, 1_000);
        let before = pace.quick();
        pace.reset();
        pace.claimed(before, 0, 300, 5_000);
        assert_eq!((pace.quick().above, pace.sample), (0, None));
    }

    #[test]
    fn peeking_starts_after_a_quiet_while_and_ends_with_the_first_row() {
        let mut pace = Pace::new(128);
        for _ in 0..IDLE_AFTER {
            assert!(!pace.idle());
            pace.claimed(pace.quick(), 0, 0, 0);
        }
        assert!(pace.idle());
        pace.claimed(pace.quick(), 1, 0, 0);
        assert!(!pace.idle());
    }

    #[test]
    fn background_work_takes_a_twentieth_of_the_time_within_bounds() {
        assert_eq!(period(Duration::ZERO), Duration::from_secs(1));
        assert_eq!(period(Duration::from_millis(200)), Duration::from_secs(4));
        assert_eq!(period(Duration::from_secs(2)), Duration::from_secs(5));
    }

    proptest! {
        // Ids are drawn in order. Whatever was drawn less than a second before the claim lies above the start of the scan.
        #[test]
        fn no_id_younger_than_a_second_is_passed_over(steps in proptest::collection::vec((0u64..700, 0i64..50, 0usize..200), 1..60)) {
            let mut pace = Pace::new(500);
            let (mut now, mut last) = (0u64, 0i64);
            let mut drawn = vec![(0u64, 0i64)];
            for (wait, ids, rows) in steps {
                now += wait;
                last += ids;
                drawn.push((now, last));
                pace.claimed(pace.quick(), rows, last, now);
                let settled = drawn.iter().filter(|(at, _)| now - at >= SETTLED_MS).map(|(_, id)| *id).max().unwrap_or(0);
                prop_assert!(pace.quick().above <= settled);
                prop_assert!((1..=500).contains(&pace.quick().limit));
            }
        }
    }
}
