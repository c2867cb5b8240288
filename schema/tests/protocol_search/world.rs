//! Everything around one cache key: commits, claims, a subscriber, readers, and what can go wrong. One [`State`] and all its next states.

use std::fmt;

use recant_schema::scripts::{InvalidateReply, OweReply, Tombstones};

use crate::cache::{Cache, Said, said};

/// Most transactions in a case.
const MAX_WRITES: usize = 3;
/// Most readers in a case.
const MAX_READERS: usize = 2;

/// How a reader reads the source of truth, and what it says about that when it fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reader {
    /// It may see any earlier snapshot, as on a replica; otherwise the newest.
    pub(crate) lags: bool,
    /// Its fill carries the position of its snapshot.
    pub(crate) versioned: bool,
}

pub(crate) const PRIMARY: Reader = Reader { lags: false, versioned: false };
pub(crate) const REPLICA: Reader = Reader { lags: true, versioned: true };

/// How an invalidation is carried out while a cluster slot moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TwoSteps {
    Never,
    /// The product's way: entry first, with the note that an unlink is owed.
    EntryFirst,
    /// Altered: no note.
    EntryFirstWithoutNote,
    /// Altered: the value goes first.
    ValueFirst,
}

/// How a forget is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forget {
    Never,
    AtOnce,
    /// The product's way while a cluster slot moves: the mark first, an owed unlink stays owed.
    MarkThenValue,
    /// Altered: the note of an owed unlink goes with the mark.
    MarkAndNoteThenValue,
}

/// What may happen in a case. [`Case::NEW`] is the plain protocol with evictions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) writes: usize,
    /// Transactions belong to this many sources in turn.
    pub(crate) sources: u8,
    pub(crate) readers: &'static [Reader],
    pub(crate) tombstones: Tombstones,
    pub(crate) entry_lost: bool,
    /// Readers may ask for a mark although a value is there.
    pub(crate) refresh: bool,
    /// The cache may fall back once to an older copy of itself; everything applied is then replayed.
    pub(crate) fail_over: bool,
    pub(crate) two_steps: TwoSteps,
    /// Invalidations may be refused for lack of memory; then the entry is unlinked, and after it the value.
    pub(crate) out_of_memory: bool,
    pub(crate) forget: Forget,
    /// A reader that does not lag may open its snapshot before its miss.
    pub(crate) old_snapshot: bool,
    /// Altered: fills with a version raise the floor to it.
    pub(crate) fills_raise_floors: bool,
    /// Altered: no marks; fills are judged by floors alone.
    pub(crate) without_marks: bool,
    /// Altered: a version is a number drawn before the commit.
    pub(crate) versions_before_commit: bool,
}

impl Case {
    pub(crate) const NEW: Self = Self {
        writes: 2,
        sources: 1,
        readers: &[PRIMARY, PRIMARY],
        tombstones: Tombstones::Always,
        entry_lost: true,
        refresh: false,
        fail_over: false,
        two_steps: TwoSteps::Never,
        out_of_memory: false,
        forget: Forget::Never,
        old_snapshot: false,
        fills_raise_floors: false,
        without_marks: false,
        versions_before_commit: false,
    };
}

/// One claimed row: the transaction, and the position it was stamped with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Claim {
    tx: u8,
    position: u8,
}

/// A set of claims; the same row may be claimed more than once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Claims(u16);

impl Claims {
    /// Positions run from 1 to [`MAX_WRITES`].
    const STRIDE: u8 = MAX_WRITES as u8 + 1;

    fn bit(claim: Claim) -> u16 {
        1 << (claim.tx * Self::STRIDE + claim.position)
    }

    fn with(self, claim: Claim) -> Self {
        Self(self.0 | Self::bit(claim))
    }

    fn without(self, claim: Claim) -> Self {
        Self(self.0 & !Self::bit(claim))
    }

    fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn iter(self) -> impl Iterator<Item = Claim> {
        let bits = (0..16u8).filter(move |bit| self.0 & (1 << bit) != 0);
        bits.map(|bit| Claim { tx: bit / Self::STRIDE, position: bit % Self::STRIDE })
    }
}

/// Where a reader stands. Snapshots are numbered by the commits they see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Idle,
    Opened { snapshot: u8 },
    Missed { mark: u8 },
    Loaded { mark: u8, snapshot: u8 },
    Done,
}

/// What is between the two single-key steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum HalfDone {
    No,
    ValueLeft(Claim),
    EntryLeft(Claim),
    ForgetValueLeft,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum FailOver {
    NotYet,
    Copied(Cache),
    Over,
}

/// The whole world of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// Transactions in commit order; the first `commits` count. The log position after k commits is k.
    log: [u8; MAX_WRITES],
    commits: u8,
    /// The number drawn before the commit, 0 for none yet.
    drawn: [u8; MAX_WRITES],
    /// Committed rows that no relay has claimed, a bit each.
    unclaimed: u8,
    /// Claimed and to be applied (again).
    pending: Claims,
    /// Applied at least once. Any of them may be delivered again.
    applied: Claims,
    cache: Cache,
    readers: [Stage; MAX_READERS],
    next_nonce: u8,
    half_done: HalfDone,
    fail_over: FailOver,
}

/// One step, for the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Draw { tx: u8, number: u8 },
    Commit(u8),
    Claim(Claim),
    ClaimAgain(Claim),
    Skip(Claim),
    NothingThere(Claim),
    Apply(Claim),
    EntryStep(Claim),
    ValueStep(Claim),
    RefusedSoUnlinkEntry(Claim),
    ForgetValueStep,
    CrashBetweenSteps,
    LoseValue,
    LoseEntry,
    Forget,
    ForgetMarkStep,
    Copy,
    FailOver,
    Open { reader: usize, snapshot: u8 },
    Miss { reader: usize, mark: u8 },
    Load { reader: usize, snapshot: u8 },
    Fill { reader: usize, snapshot: u8 },
    Refused { reader: usize },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Draw { tx, number } => write!(f, "write {tx} draws {number}"),
            Self::Commit(tx) => write!(f, "commit {tx}"),
            Self::Claim(claim) => write!(f, "claim {claim}"),
            Self::ClaimAgain(claim) => write!(f, "claim again {claim}"),
            Self::Skip(claim) => write!(f, "repeat {claim}"),
            Self::NothingThere(claim) => write!(f, "nothing there for {claim}"),
            Self::Apply(claim) => write!(f, "apply {claim}"),
            Self::EntryStep(claim) => write!(f, "raise floor, erase mark for {claim}"),
            Self::ValueStep(claim) => write!(f, "unlink value for {claim}"),
            Self::RefusedSoUnlinkEntry(claim) => write!(f, "out of memory: unlink entry for {claim}"),
            Self::ForgetValueStep => write!(f, "forget: unlink value"),
            Self::CrashBetweenSteps => write!(f, "crash between the steps"),
            Self::LoseValue => write!(f, "value evicted"),
            Self::LoseEntry => write!(f, "entry evicted"),
            Self::Forget => write!(f, "forget"),
            Self::ForgetMarkStep => write!(f, "forget: erase mark"),
            Self::Copy => write!(f, "cache copied"),
            Self::FailOver => write!(f, "cache falls back to the copy, everything is replayed"),
            Self::Open { reader, snapshot } => write!(f, "reader {reader} opens snapshot {snapshot}"),
            Self::Miss { reader, mark } => write!(f, "reader {reader} misses, mark {mark}"),
            Self::Load { reader, snapshot } => write!(f, "reader {reader} loads snapshot {snapshot}"),
            Self::Fill { reader, snapshot } => write!(f, "reader {reader} fills {snapshot}"),
            Self::Refused { reader } => write!(f, "reader {reader} is refused"),
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.tx, self.position)
    }
}

impl State {
    pub(crate) const START: Self = Self {
        log: [0; MAX_WRITES],
        commits: 0,
        drawn: [0; MAX_WRITES],
        unclaimed: 0,
        pending: Claims(0),
        applied: Claims(0),
        cache: Cache::EMPTY,
        readers: [Stage::Idle; MAX_READERS],
        next_nonce: 0,
        half_done: HalfDone::No,
        fail_over: FailOver::NotYet,
    };

    /// Everything committed is applied, and still the cache holds an old value: nobody will ever correct it.
    pub(crate) fn is_stale_for_good(&self) -> bool {
        let settled = self.unclaimed == 0 && self.pending.is_empty() && self.half_done == HalfDone::No;
        settled && self.cache.value().is_some_and(|value| value != self.commits)
    }

    /// Every step that can come next, with the state after it.
    pub(crate) fn next(&self, case: &Case, out: &mut Vec<(Action, Self)>) {
        self.writers_and_relays(case, out);
        match self.half_done {
            HalfDone::No => self.pending.union(self.applied).iter().for_each(|claim| self.deliver(case, claim, out)),
            _ => self.second_step(out),
        }
        self.losses(case, out);
        for reader in 0..case.readers.len() {
            self.reader(case, reader, out);
        }
    }

    fn writers_and_relays(&self, case: &Case, out: &mut Vec<(Action, Self)>) {
        let committed = &self.log[..usize::from(self.commits)];
        for tx in (0..case.writes as u8).filter(|tx| !committed.contains(tx)) {
            let mut after = *self;
            if case.versions_before_commit && self.drawn[usize::from(tx)] == 0 {
                let number = 1 + self.drawn.iter().filter(|number| **number != 0).count() as u8;
                after.drawn[usize::from(tx)] = number;
                out.push((Action::Draw { tx, number }, after));
                continue;
            }
            after.log[committed.len()] = tx;
            after.commits += 1;
            after.unclaimed |= 1 << tx;
            out.push((Action::Commit(tx), after));
        }
        for tx in (0..case.writes as u8).filter(|tx| self.unclaimed & (1 << tx) != 0) {
            let position = if case.versions_before_commit { self.drawn[usize::from(tx)] } else { self.commits };
            let claim = Claim { tx, position };
            let after = Self { unclaimed: self.unclaimed & !(1 << tx), pending: self.pending.with(claim), ..*self };
            out.push((Action::Claim(claim), after));
        }
        // A relay that died before it retired the row; a claim that repeats its position is a repeated delivery, which `deliver` covers.
        for claim in self.applied.iter().filter(|claim| !case.versions_before_commit && claim.position < self.commits) {
            let again = Claim { position: self.commits, ..claim };
            out.push((Action::ClaimAgain(again), Self { pending: self.pending.with(again), ..*self }));
        }
    }

    /// The subscriber applies any claim that it was or will be handed, in any order and any number of times.
    fn deliver(&self, case: &Case, claim: Claim, out: &mut Vec<(Action, Self)>) {
        let said = said(claim.tx % case.sources, claim.position);
        let (reply, cache) = self.cache.invalidate(said, case.tombstones);
        let action = match reply {
            InvalidateReply::Repeat => Action::Skip(claim),
            InvalidateReply::NothingThere => Action::NothingThere(claim),
            InvalidateReply::Applied | InvalidateReply::Deleted => Action::Apply(claim),
        };
        out.push((action, Self { cache, ..self.settled(claim) }));
        if reply == InvalidateReply::Repeat {
            return;
        }
        if case.out_of_memory {
            let after = Self { cache: self.cache.lose_entry(), half_done: HalfDone::ValueLeft(claim), ..*self };
            out.push((Action::RefusedSoUnlinkEntry(claim), after));
        }
        match case.two_steps {
            TwoSteps::Never => {}
            TwoSteps::EntryFirst | TwoSteps::EntryFirstWithoutNote => {
                let (owed, mut cache) = self.cache.owe(said);
                assert_eq!(owed, OweReply::Owed, "owe acts wherever invalidate does");
                if case.two_steps == TwoSteps::EntryFirstWithoutNote {
                    cache = cache.without_note();
                }
                out.push((Action::EntryStep(claim), Self { cache, half_done: HalfDone::ValueLeft(claim), ..*self }));
            }
            TwoSteps::ValueFirst => {
                let after = Self { cache: self.cache.lose_value(), half_done: HalfDone::EntryLeft(claim), ..*self };
                out.push((Action::ValueStep(claim), after));
            }
        }
    }

    fn second_step(&self, out: &mut Vec<(Action, Self)>) {
        let crash = Self { half_done: HalfDone::No, ..*self };
        match self.half_done {
            HalfDone::No => {}
            HalfDone::ValueLeft(claim) => {
                let after = Self { cache: self.cache.lose_value(), half_done: HalfDone::No, ..self.settled(claim) };
                out.push((Action::ValueStep(claim), after));
                out.push((Action::CrashBetweenSteps, Self { pending: self.pending.with(claim), ..crash }));
            }
            HalfDone::EntryLeft(claim) => {
                // Sources do not matter to this alteration, so one is enough.
                let cache = self.cache.owe(said(0, claim.position)).1.without_note();
                let after = Self { cache, half_done: HalfDone::No, ..self.settled(claim) };
                out.push((Action::EntryStep(claim), after));
                out.push((Action::CrashBetweenSteps, Self { pending: self.pending.with(claim), ..crash }));
            }
            HalfDone::ForgetValueLeft => {
                out.push((Action::ForgetValueStep, Self { cache: self.cache.lose_value(), ..crash }));
                // A forget is nobody's promise: whoever dies in the middle of one does not repeat it.
                out.push((Action::CrashBetweenSteps, crash));
            }
        }
    }

    fn losses(&self, case: &Case, out: &mut Vec<(Action, Self)>) {
        let holds_value = self.cache.value().is_some();
        if holds_value {
            out.push((Action::LoseValue, Self { cache: self.cache.lose_value(), ..*self }));
        }
        if case.entry_lost && self.cache.has_entry() {
            out.push((Action::LoseEntry, Self { cache: self.cache.lose_entry(), ..*self }));
        }
        if holds_value || self.cache.has_entry() {
            self.forget(case, out);
        }
        match self.fail_over {
            FailOver::NotYet if case.fail_over => {
                out.push((Action::Copy, Self { fail_over: FailOver::Copied(self.cache), ..*self }));
            }
            FailOver::Copied(cache) => {
                let pending = self.pending.union(self.applied);
                let after = Self { cache, pending, half_done: HalfDone::No, fail_over: FailOver::Over, ..*self };
                out.push((Action::FailOver, after));
            }
            FailOver::NotYet | FailOver::Over => {}
        }
    }

    fn forget(&self, case: &Case, out: &mut Vec<(Action, Self)>) {
        let half_done = HalfDone::ForgetValueLeft;
        match case.forget {
            Forget::AtOnce => out.push((Action::Forget, Self { cache: self.cache.forget(), ..*self })),
            // One half-done step at a time keeps the search small.
            Forget::MarkThenValue if self.half_done == HalfDone::No => {
                out.push((Action::ForgetMarkStep, Self { cache: self.cache.erase_mark(), half_done, ..*self }));
            }
            Forget::MarkAndNoteThenValue if self.half_done == HalfDone::No => {
                let cache = self.cache.erase_mark().without_note();
                out.push((Action::ForgetMarkStep, Self { cache, half_done, ..*self }));
            }
            Forget::Never | Forget::MarkThenValue | Forget::MarkAndNoteThenValue => {}
        }
    }

    fn reader(&self, case: &Case, reader: usize, out: &mut Vec<(Action, Self)>) {
        let Reader { lags, .. } = case.readers[reader];
        match self.readers[reader] {
            Stage::Idle => {
                if case.old_snapshot && !lags {
                    let snapshot = self.commits;
                    out.push((Action::Open { reader, snapshot }, self.at(reader, Stage::Opened { snapshot })));
                }
                self.miss(case, reader, |mark| Stage::Missed { mark }, out);
            }
            Stage::Opened { snapshot } => self.miss(case, reader, |mark| Stage::Loaded { mark, snapshot }, out),
            Stage::Missed { mark } => {
                let oldest = if lags { 0 } else { self.commits };
                for snapshot in oldest..=self.commits {
                    out.push((Action::Load { reader, snapshot }, self.at(reader, Stage::Loaded { mark, snapshot })));
                }
            }
            Stage::Loaded { mark, snapshot } => out.push(match self.filled(case, reader, mark, snapshot) {
                Some(cache) => (Action::Fill { reader, snapshot }, Self { cache, ..self.at(reader, Stage::Done) }),
                None => (Action::Refused { reader }, self.at(reader, Stage::Done)),
            }),
            Stage::Done => {}
        }
    }

    fn miss(&self, case: &Case, reader: usize, then: impl FnOnce(u8) -> Stage, out: &mut Vec<(Action, Self)>) {
        let Some((mark, left_now, mut cache)) = self.cache.read(self.next_nonce, case.refresh) else {
            return;
        };
        if case.without_marks {
            cache = self.cache;
        }
        let next_nonce = self.next_nonce + u8::from(left_now && !case.without_marks);
        // Readers read once each, so this never binds; it keeps a mistake in the search from running without end.
        assert!(usize::from(next_nonce) <= MAX_READERS + 2, "more marks than misses");
        out.push((Action::Miss { reader, mark }, Self { cache, next_nonce, ..self.at(reader, then(mark)) }));
    }

    /// The cache after this reader's fill, none when it is refused.
    fn filled(&self, case: &Case, reader: usize, mark: u8, snapshot: u8) -> Option<Cache> {
        let read_at: Said = said(0, snapshot);
        if case.without_marks {
            return self.cache.fill_without_mark(read_at, snapshot);
        }
        let version = case.readers[reader].versioned.then_some(read_at);
        let cache = self.cache.fill(mark, version, snapshot)?;
        Some(if case.fills_raise_floors && version.is_some() { cache.with_floor_raised_to(read_at) } else { cache })
    }

    fn at(&self, reader: usize, stage: Stage) -> Self {
        let mut after = *self;
        after.readers[reader] = stage;
        after
    }

    fn settled(&self, claim: Claim) -> Self {
        Self { pending: self.pending.without(claim), applied: self.applied.with(claim), ..*self }
    }
}
