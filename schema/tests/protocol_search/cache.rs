//! The cache side of a state, small enough to be kept a million times, and the rules that run on it.
//!
//! Every step goes through the product's own [`recant_schema::tombstone`]; the alterations of the broken cases are wrapped around it.

use recant_schema::scripts::{FillReply, InvalidateReply, OweReply, Tombstones};
use recant_schema::tombstone::{Entry, Floor, Memory, Slot};
use recant_schema::version::Version;

/// Longest life of an entry. Expiry is a step of its own in the search, so any number does.
const TTL_MS: u64 = 1;

/// No value, no mark.
const NONE: u8 = u8::MAX;

pub(crate) type Said = Floor<u8>;
type Small = Slot<u8, u8, u8>;

/// The invalidation of `source` at `position`. One epoch is enough: the search is about order, and the order of versions has tests of its own.
pub(crate) fn said(source: u8, position: u8) -> Said {
    Floor { source, version: Version { epoch: 1, position: u64::from(position) } }
}

/// A [`Slot`] in seven bytes: the value is the number of commits that it reflects, a floor is its position (0 for none).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cache {
    value: u8,
    has_entry: bool,
    floor: u8,
    floor_source: u8,
    mark: u8,
    unlink_owed: bool,
}

impl Cache {
    pub(crate) const EMPTY: Self = Self { value: NONE, has_entry: false, floor: 0, floor_source: 0, mark: NONE, unlink_owed: false };

    pub(crate) fn value(self) -> Option<u8> {
        (self.value != NONE).then_some(self.value)
    }

    pub(crate) fn has_entry(self) -> bool {
        self.has_entry
    }

    fn floor(self) -> Option<Said> {
        (self.floor != 0).then(|| said(self.floor_source, self.floor))
    }

    fn slot(self) -> Small {
        let entry = self.has_entry.then(|| Entry {
            floor: self.floor(),
            mark: (self.mark != NONE).then_some(self.mark),
            unlink_owed: self.unlink_owed,
            ttl_ms: TTL_MS,
        });
        Slot { value: self.value(), entry }
    }

    fn of(slot: &Small) -> Self {
        let mut cache = Self { value: slot.value.unwrap_or(NONE), ..Self::EMPTY };
        if let Some(entry) = &slot.entry {
            cache.has_entry = true;
            cache.mark = entry.mark.unwrap_or(NONE);
            cache.unlink_owed = entry.unlink_owed;
            if let Some(floor) = entry.floor {
                cache.floor = u8::try_from(floor.version.position).expect("positions count the commits of a case");
                cache.floor_source = floor.source;
            }
        }
        cache
    }

    /// Runs one step on the slot and gives back what it answered and the cache after it.
    fn step<R>(self, step: impl FnOnce(&mut Small) -> R) -> (R, Self) {
        let mut slot = self.slot();
        let reply = step(&mut slot);
        (reply, Self::of(&slot))
    }

    /// The mark of a miss, and whether `nonce` became it. None on a hit.
    pub(crate) fn read(self, nonce: u8, refresh: bool) -> Option<(u8, bool, Self)> {
        let (reply, after) = self.step(|slot| slot.read(&nonce, TTL_MS, refresh, Memory::Free));
        reply.mark.map(|mark| (mark.nonce, mark.left_now, after))
    }

    /// The cache after a fill that is admitted, none for one that is refused.
    pub(crate) fn fill(self, mark: u8, version: Option<Said>, value: u8) -> Option<Self> {
        let (reply, after) = self.step(|slot| slot.fill(Some(&mark), version.as_ref(), value, Memory::Free));
        (reply == Ok(FillReply::Filled)).then_some(after)
    }

    pub(crate) fn invalidate(self, said: Said, tombstones: Tombstones) -> (InvalidateReply, Self) {
        let (reply, after) = self.step(|slot| slot.invalidate(&said, TTL_MS, tombstones, Memory::Free));
        (reply.expect("memory is free"), after)
    }

    pub(crate) fn owe(self, said: Said) -> (OweReply, Self) {
        let (reply, after) = self.step(|slot| slot.owe(&said, TTL_MS, Memory::Free));
        (reply.expect("memory is free"), after)
    }

    pub(crate) fn forget(self) -> Self {
        self.step(Slot::forget).1
    }

    pub(crate) fn erase_mark(self) -> Self {
        self.step(Slot::erase_mark).1
    }

    pub(crate) fn lose_value(self) -> Self {
        self.step(Slot::lose_value).1
    }

    pub(crate) fn lose_entry(self) -> Self {
        self.step(Slot::lose_entry).1
    }

    // What follows is not the product: each alteration breaks one rule, and the search has to notice.

    /// Altered: floors alone guard the value, and a missing floor is trusted.
    pub(crate) fn fill_without_mark(self, version: Said, value: u8) -> Option<Self> {
        let admitted = self.floor().is_none_or(|floor| version.covers(&floor));
        admitted.then_some(Self { value, ..self })
    }

    /// Altered: a fill claims that every invalidation up to its own version was applied.
    pub(crate) fn with_floor_raised_to(self, version: Said) -> Self {
        let (_, raised) = self.owe(version);
        Self { floor: raised.floor, ..self }
    }

    /// Altered: the note of an owed unlink is dropped.
    pub(crate) fn without_note(self) -> Self {
        Self { unlink_owed: false, ..self }
    }
}
