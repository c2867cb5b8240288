//! PURE: when to rely on the tail, and when to look all the same.
//!
//! While the tail lives, a claim is made when it has announced something, and otherwise rarely. Three things can go wrong without the stream breaking:
//!
//! - *Too early.* The server decodes a commit as soon as it is in the log, which can be a moment before other sessions see its rows. So rows that were announced
//!   and that no claim has returned are *owed*: the next looks follow the timer's steps, from 1 ms. When those have grown long, somebody else has
//!   claimed the rows.
//! - *Too late.* The server decodes a large transaction of somebody else's, and what commits behind it is not announced for seconds. It shows
//!   as a claim after silence that finds rows. Then the timer's steps hold until the tail has read past that place in the log.
//! - *Before it lived.* What was committed before the stream began is not announced. So its beginning counts as an announcement.

use crate::pace::Steps;
use crate::wake::Sign;
use std::time::Duration;

/// While the tail is relied on, silence lasts so many times the timer's longest wait: with 20 ms ten looks a second, a fifth of the timer's cost. That is
/// also what the first row that is not announced may wait; it ends the reliance. Rows that another relay released by dying are such rows.
const PATIENCE: u32 = 5;

/// Steps as long as this have become too long for rows that are merely not visible yet: microseconds pass between log and visibility on a quiet machine, and
/// the steps before this one, 15 ms together, allow for a busy one.
const VISIBLE_BY: Duration = Duration::from_millis(16);

/// What the tail has told so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Whether a stream is open.
    pub alive: bool,
    /// How many streams have been opened.
    pub life: u64,
    /// Rows announced since they were last taken note of.
    pub rows: u64,
    /// The tail has read the log up to here.
    pub position: u64,
}

/// Decides how long to wait for the next claim.
#[derive(Clone, Debug)]
pub struct Trust {
    steps: Steps,
    patience: Duration,
    /// The stream that has been taken note of.
    life: u64,
    /// Rows that were announced and not returned by a claim; below zero, rows that were found before their announcement, for which nobody has to look
    /// again. A wrong balance (rows released and claimed again) lasts until the next silence.
    owed: i64,
    /// Rows up to here were found without a word from the tail.
    overtaken: u64,
    /// The coming claim follows the longest silence.
    silence: bool,
}

impl Trust {
    /// `longest`: the timer's longest wait.
    pub fn new(longest: Duration) -> Self {
        Self { steps: Steps::new(longest), patience: longest * PATIENCE, life: 0, owed: 0, overtaken: 0, silence: false }
    }

    /// How long to wait unless the tail says something more. Zero: claim now.
    pub fn pause(&self, heard: &Heard) -> Duration {
        let news = heard.alive && (heard.rows > 0 || heard.life != self.life);
        if news {
            Duration::ZERO
        } else if self.relies_on(heard) {
            self.patience
        } else {
            self.steps.pause()
        }
    }

    /// Whether only silence is left to wait for.
    fn relies_on(&self, heard: &Heard) -> bool {
        heard.alive && self.owed <= 0 && heard.position >= self.overtaken && !self.steps.pause().is_zero()
    }

    /// Whether the coming claim should wait for the one that is being published. A claim for each commit costs more than it brings, and rows that
    /// come meanwhile share the next one; a backlog does not wait.
    pub fn gathers(&self, heard: &Heard) -> bool {
        heard.alive && heard.rows > 0 && !self.steps.pause().is_zero()
    }

    /// The wait is over and a claim follows; `heard` is taken note of.
    pub fn woken(&mut self, heard: &Heard) -> Sign {
        self.silence = self.pause(heard) == self.patience;
        let begun = heard.alive && heard.life != self.life;
        if begun {
            // Perhaps of another history, with lower positions.
            (self.life, self.overtaken, self.owed) = (heard.life, 0, 0);
        }
        if heard.rows == 0 && !begun {
            return Sign::Silence;
        }
        self.owed = self.owed.saturating_add(signed(heard.rows.max(1)));
        self.steps.expect();
        Sign::Word
    }

    /// Learns from the claim. Returns whether the tail should have announced what it found.
    pub fn claimed(&mut self, rows: usize, full: bool, position: u64) -> bool {
        let late = self.silence && rows > 0;
        if late {
            self.overtaken = position;
        }
        self.owed = self.owed.saturating_sub(signed(rows as u64));
        self.steps.claimed(rows, full);
        let given_up = rows == 0 && self.owed > 0 && (self.steps.pause() >= VISIBLE_BY || self.steps.at_longest());
        if given_up || self.silence {
            self.owed = 0;
        }
        self.silence = false;
        late
    }
}

fn signed(rows: u64) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LONGEST: Duration = Duration::from_millis(20);
    const LIVING: Heard = Heard { alive: true, life: 1, rows: 0, position: 100 };

    fn with_rows(rows: u64) -> Heard {
        Heard { rows, ..LIVING }
    }

    /// Its beginning taken note of, and nothing owed.
    fn settled() -> Trust {
        let mut trust = Trust::new(LONGEST);
        trust.woken(&LIVING);
        trust.claimed(1, false, 90);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(100));
        trust
    }

    /// The pauses after empty claims.
    fn empty_claims(trust: &mut Trust, heard: &Heard, count: usize) -> Vec<u128> {
        let mut pauses = vec![];
        for _ in 0..count {
            trust.woken(heard);
            trust.claimed(0, false, 0);
            pauses.push(trust.pause(heard).as_millis());
        }
        pauses
    }

    #[test]
    fn without_a_tail_the_steps_of_the_timer_hold() {
        let mut trust = Trust::new(LONGEST);
        assert_eq!(empty_claims(&mut trust, &Heard::default(), 7), [2, 4, 8, 16, 20, 20, 20]);
    }

    #[test]
    fn an_announcement_wakes_at_once_and_then_there_is_silence() {
        let mut trust = settled();
        assert_eq!(trust.pause(&with_rows(2)), Duration::ZERO);
        assert_eq!(trust.woken(&with_rows(2)), Sign::Word);
        trust.claimed(2, false, 110);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(100));
    }

    #[test]
    fn rows_that_are_not_visible_yet_are_looked_for_again_from_a_millisecond_on() {
        let mut trust = settled();
        assert_eq!(empty_claims(&mut trust, &LIVING, 6).last(), Some(&100), "quiet for long");
        trust.woken(&with_rows(2));
        trust.claimed(1, false, 110);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(1), "one of the two is owed");
        assert_eq!(empty_claims(&mut trust, &LIVING, 4), [2, 4, 8, 100], "somebody else has claimed it");
    }

    #[test]
    fn an_empty_claim_after_an_announcement_is_repeated_after_a_millisecond_however_long_it_was_quiet() {
        let mut trust = settled();
        empty_claims(&mut trust, &LIVING, 9);
        trust.woken(&with_rows(1));
        trust.claimed(0, false, 0);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(1));
    }

    #[test]
    fn a_row_found_in_silence_ends_the_reliance_until_the_tail_has_read_past_it() {
        let mut trust = settled();
        assert_eq!(trust.woken(&LIVING), Sign::Silence);
        assert!(trust.claimed(1, false, 150), "it was not announced");
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(1));
        trust.woken(&LIVING);
        assert!(!trust.claimed(1, false, 160), "the timer is expected to find rows");
        assert_eq!(trust.pause(&Heard { position: 150, ..LIVING }), Duration::from_millis(100));
    }

    #[test]
    fn the_beginning_and_the_end_of_a_stream_are_looked_at() {
        let mut trust = Trust::new(LONGEST);
        empty_claims(&mut trust, &Heard::default(), 9);
        assert_eq!(trust.pause(&LIVING), Duration::ZERO);
        assert_eq!(trust.woken(&LIVING), Sign::Word);
        trust.claimed(0, false, 0);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(1));
        let lost = Heard { alive: false, ..LIVING };
        assert!(trust.pause(&lost) <= LONGEST);
        assert_eq!(trust.pause(&Heard { life: 2, ..LIVING }), Duration::ZERO);
    }

    #[test]
    fn a_row_found_before_its_announcement_is_not_looked_for_again() {
        let mut trust = settled();
        trust.woken(&with_rows(1));
        trust.claimed(2, false, 110);
        trust.woken(&with_rows(1));
        trust.claimed(0, false, 0);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(100));
        // The balance does not outlive a silence.
        trust.woken(&with_rows(1));
        trust.claimed(9, false, 120);
        empty_claims(&mut trust, &LIVING, 1);
        trust.woken(&with_rows(1));
        trust.claimed(0, false, 0);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(1));
    }

    #[test]
    fn a_slow_timer_changes_nothing_about_looking_again() {
        let mut trust = Trust::new(Duration::from_secs(30));
        assert_eq!(empty_claims(&mut trust, &LIVING, 5), [1, 2, 4, 8, 150_000]);
    }

    #[test]
    fn a_failed_claim_still_owes_what_was_announced() {
        let mut trust = settled();
        trust.woken(&with_rows(3));
        assert!(trust.pause(&LIVING) <= Duration::from_millis(1));
        trust.woken(&LIVING);
        trust.claimed(3, false, 110);
        assert_eq!(trust.pause(&LIVING), Duration::from_millis(100));
    }

    #[test]
    fn a_backlog_is_claimed_without_waiting_and_without_gathering() {
        let mut trust = settled();
        assert!(trust.gathers(&with_rows(1)));
        trust.woken(&with_rows(128));
        trust.claimed(128, true, 110);
        assert_eq!(trust.pause(&LIVING), Duration::ZERO);
        assert!(!trust.gathers(&with_rows(500)));
    }

    proptest! {
        // Whatever was heard and claimed: there is another look after five times the timer's longest wait, and without a tail after one.
        #[test]
        fn silence_is_bounded(steps in proptest::collection::vec((any::<bool>(), 0u64..3, 0u64..4, 0u64..200, 0usize..4, any::<bool>()), 1..60)) {
            let mut trust = Trust::new(LONGEST);
            for (alive, life, rows, position, claimed, full) in steps {
                let heard = Heard { alive, life, rows, position };
                let pause = trust.pause(&heard);
                let longest = if alive { LONGEST * PATIENCE } else { LONGEST };
                prop_assert!(pause <= longest);
                prop_assert!(!(alive && rows > 0) || pause.is_zero());
                trust.woken(&heard);
                trust.claimed(claimed, full, position + 1);
            }
        }
    }
}
