//! PURE: what follows from each answer of the cache. The retry decision of this service, in one exhaustive match.

use crate::work::{Order, Outcome};
use recant_schema::scripts::{ForgetReply, InvalidateReply, OweReply};

/// One command on its way to a key's primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The script over value and entry.
    Invalidate,
    /// First single-key step of an invalidation: raise the floor, erase the mark, note the owed unlink.
    Owe,
    /// The script over value and entry.
    Forget,
    /// First single-key step of a forget.
    EraseMark,
    /// First single-key step where no floor can be written. A missing entry refuses every fill.
    UnlinkEntry,
    /// Second single-key step.
    UnlinkValue(Half),
}

/// Which first step a [`Step::UnlinkValue`] completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// After [`Step::Owe`].
    Owed,
    /// After [`Step::EraseMark`].
    MarkErased,
    /// After [`Step::UnlinkEntry`].
    EntryUnlinked,
}

impl Step {
    /// The first step of an order.
    pub const fn first(order: &Order) -> Self {
        match order {
            Order::Invalidate { .. } => Self::Invalidate,
            Order::Forget => Self::Forget,
        }
    }
}

/// An answer, reduced to what matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A number.
    Number(i64),
    /// NOSCRIPT: a new or promoted node, or somebody flushed the scripts.
    ScriptUnknown,
    /// MOVED: another primary owns the slot.
    Moved,
    /// ASK: this key of a moving slot is at that address.
    Ask(String),
    /// TRYAGAIN: of the two keys one has moved already.
    TryAgain,
    /// OOM: no memory for a floor.
    OutOfMemory,
    /// READONLY: the primary was demoted.
    Demoted,
    /// LOADING, BUSY, CLUSTERDOWN, MASTERDOWN, MISCONF, NOREPLICAS, missing permission, whatever a later server invents: waiting can help.
    NotNow(String),
    /// WRONGTYPE or an error of the script itself: the entry is not one of ours.
    Odd(String),
}

/// What to do next with one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// The record is applied.
    Done(Outcome),
    /// Send this step.
    Then(Step),
    /// Load the scripts, send the step again.
    Reload,
    /// Learn the slots anew, send the step to the owner.
    Reroute,
    /// Send the step there, after ASKING.
    AskAt(String),
    /// Wait, send the step again.
    Wait(String),
    /// Find the primary, connect anew, send the step again.
    Reconnect,
}

/// Decides what follows.
pub fn next(step: Step, reply: Reply) -> Next {
    match reply {
        Reply::Number(number) => after_number(step, number),
        Reply::ScriptUnknown => Next::Reload,
        Reply::Moved => Next::Reroute,
        Reply::Ask(address) => Next::AskAt(address),
        Reply::Demoted => Next::Reconnect,
        Reply::NotNow(why) => Next::Wait(why),
        Reply::TryAgain => match step {
            Step::Invalidate => Next::Then(Step::Owe),
            Step::Forget => Next::Then(Step::EraseMark),
            single @ (Step::Owe | Step::EraseMark | Step::UnlinkEntry | Step::UnlinkValue(_)) => Next::Then(single),
        },
        Reply::OutOfMemory => match step {
            Step::Invalidate | Step::Owe => Next::Then(Step::UnlinkEntry),
            // These need no memory; a server that says so all the same may come to its senses.
            Step::Forget | Step::EraseMark | Step::UnlinkEntry | Step::UnlinkValue(_) => Next::Wait("out of memory".to_owned()),
        },
        Reply::Odd(why) => match step {
            Step::Invalidate | Step::Owe | Step::Forget | Step::EraseMark => Next::Then(Step::UnlinkEntry),
            Step::UnlinkEntry | Step::UnlinkValue(_) => Next::Wait(why),
        },
    }
}

fn after_number(step: Step, number: i64) -> Next {
    let unknown = || Next::Wait(format!("an unknown reply {number}"));
    match step {
        Step::Invalidate => match InvalidateReply::try_from(number) {
            Ok(InvalidateReply::Repeat) => Next::Done(Outcome::Repeated),
            Ok(InvalidateReply::Applied) => Next::Done(Outcome::NothingCached),
            Ok(InvalidateReply::Deleted) => Next::Done(Outcome::Deleted),
            Ok(InvalidateReply::NothingThere) => Next::Done(Outcome::NothingThere),
            Err(_) => unknown(),
        },
        Step::Owe => match OweReply::try_from(number) {
            Ok(OweReply::Repeat) => Next::Done(Outcome::Repeated),
            Ok(OweReply::Owed) => Next::Then(Step::UnlinkValue(Half::Owed)),
            Err(_) => unknown(),
        },
        Step::Forget => match ForgetReply::try_from(number) {
            Ok(ForgetReply::NothingThere | ForgetReply::Deleted) => Next::Done(Outcome::Forgotten),
            Err(_) => unknown(),
        },
        Step::EraseMark => Next::Then(Step::UnlinkValue(Half::MarkErased)),
        Step::UnlinkEntry => Next::Then(Step::UnlinkValue(Half::EntryUnlinked)),
        Step::UnlinkValue(Half::Owed) => Next::Done(if number > 0 { Outcome::Deleted } else { Outcome::NothingCached }),
        Step::UnlinkValue(Half::MarkErased) => Next::Done(Outcome::Forgotten),
        Step::UnlinkValue(Half::EntryUnlinked) => Next::Done(Outcome::Unlinked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_raised_before_the_value_is_unlinked_also_in_two_steps() {
        assert_eq!(next(Step::Invalidate, Reply::TryAgain), Next::Then(Step::Owe));
        assert_eq!(next(Step::Owe, Reply::Number(1)), Next::Then(Step::UnlinkValue(Half::Owed)));
        assert_eq!(next(Step::UnlinkValue(Half::Owed), Reply::Number(1)), Next::Done(Outcome::Deleted));
        assert_eq!(next(Step::Owe, Reply::Number(0)), Next::Done(Outcome::Repeated));
    }

    #[test]
    fn a_full_cache_still_gets_its_deletes_entry_first() {
        assert_eq!(next(Step::Invalidate, Reply::OutOfMemory), Next::Then(Step::UnlinkEntry));
        assert_eq!(next(Step::UnlinkEntry, Reply::Number(0)), Next::Then(Step::UnlinkValue(Half::EntryUnlinked)));
        assert_eq!(next(Step::UnlinkValue(Half::EntryUnlinked), Reply::Number(0)), Next::Done(Outcome::Unlinked));
    }

    #[test]
    fn nothing_but_an_answer_ends_a_record() {
        let steps = [Step::Invalidate, Step::Owe, Step::Forget, Step::EraseMark, Step::UnlinkEntry, Step::UnlinkValue(Half::Owed)];
        let refusals = [
            Reply::ScriptUnknown,
            Reply::Moved,
            Reply::Ask("h:1".into()),
            Reply::TryAgain,
            Reply::OutOfMemory,
            Reply::Demoted,
            Reply::NotNow("LOADING".into()),
            Reply::Odd("WRONGTYPE".into()),
        ];
        for step in steps {
            for refusal in &refusals {
                assert!(!matches!(next(step, refusal.clone()), Next::Done(_)), "{step:?} {refusal:?}");
            }
        }
    }
}
