//! PURE: marks, floors and owed unlinks, the rules that the cache scripts carry out.
//!
//! A [`Slot`] is what the cache holds for one key. Each method is one script, or one single-key step, and so atomic. The search of all
//! interleavings runs on these rules, and the scripts are held against them on a real Redis, so the three cannot drift apart.
//!
//! | step | floor | mark | unlink owed | value |
//! | --- | --- | --- | --- | --- |
//! | read, a miss | stays | the one there, else this reader's | stays | stays |
//! | fill, with the mark and not below the floor | **stays** | stays | cleared | set |
//! | fill, else | stays | stays | stays | stays |
//! | invalidate, covered by the floor and nothing owed | stays | stays | stays | stays |
//! | invalidate, else | raised | erased | cleared | unlinked |
//! | owe, where invalidate would act | raised | erased | noted | stays |
//! | forget | stays | erased | cleared | unlinked |
//!
//! Why a fill never raises the floor: a floor says which invalidations were applied, and a fill does not know. Why the mark beside the floor:
//! a floor can be lost (evicted, expired, gone with a node); then a missing mark refuses the fill where a missing floor would let it pass.
//! No clock takes part in any decision.

use crate::scripts::{FillReply, ForgetReply, InvalidateReply, OweReply, Tombstones};
use crate::version::Version;

/// What the cache holds for one key. The types of value, source and mark are the caller's: bytes and text beside a real Redis, small
/// numbers in the search.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slot<V = Vec<u8>, S = String, M = String> {
    /// The value at the key itself, in whatever form the service stores it.
    pub value: Option<V>,
    /// The tombstone entry beside it.
    pub entry: Option<Entry<S, M>>,
}

/// A tombstone entry: floor, mark, owed unlink. It holds at least one of floor and mark; an unlink is owed only beside a floor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry<S = String, M = String> {
    /// The newest invalidation applied to this key. Never goes down while it lives, within one source.
    pub floor: Option<Floor<S>>,
    /// What a fill must bring. Erased by every invalidation that is not a repeat.
    pub mark: Option<M>,
    /// An invalidation raised the floor and has not unlinked the value yet.
    pub unlink_owed: bool,
    /// The longest time to live, in milliseconds, that any step asked for since the entry came to be.
    pub ttl_ms: u64,
}

/// A version together with the source whose history it orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Floor<S = String> {
    /// Whose history.
    pub source: S,
    /// Where in it.
    pub version: Version,
}

impl<S: PartialEq> Floor<S> {
    /// Whether everything that `other` invalidates is invalidated by this floor already. Never so across sources.
    pub fn covers(&self, other: &Self) -> bool {
        self.source == other.source && self.version >= other.version
    }
}

/// Whether the cache can still grow. When it cannot, it refuses the first write of a script that could make it grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Below its limit, or able to evict.
    Free,
    /// At its limit, with nothing that it may evict.
    Full,
}

/// The cache refused a step because its memory is full; nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cache is out of memory")]
pub struct OutOfMemory;

/// What a reader is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadReply<V, M> {
    /// The value, on a hit or on a refresh.
    pub value: Option<V>,
    /// The permit to fill. None on a plain hit, and when memory was too full to leave a mark.
    pub mark: Option<Mark<M>>,
}

/// The permit that a miss leaves beside the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark<M> {
    /// What the fill must bring.
    pub nonce: M,
    /// This reader left it, and should load; otherwise another reader did.
    pub left_now: bool,
}

impl<V, S, M> Default for Slot<V, S, M> {
    fn default() -> Self {
        Self { value: None, entry: None }
    }
}

impl<V: Clone, S: Clone + PartialEq, M: Clone + PartialEq> Slot<V, S, M> {
    /// `read.lua`: the value; or, on a miss and on a refresh, the mark that is there, else `nonce`, which stays for at least `ttl_ms`.
    pub fn read(&mut self, nonce: &M, ttl_ms: u64, refresh: bool, memory: Memory) -> ReadReply<V, M> {
        let value = self.value.clone();
        if value.is_some() && !refresh {
            return ReadReply { value, mark: None };
        }
        let found = self.entry.as_ref().and_then(|entry| entry.mark.clone());
        if found.is_none() && memory == Memory::Full {
            return ReadReply { value, mark: None };
        }
        let mark = Mark { left_now: found.is_none(), nonce: found.unwrap_or_else(|| nonce.clone()) };
        let entry = self.entry.get_or_insert_with(Entry::empty);
        entry.mark = Some(mark.nonce.clone());
        entry.grow(ttl_ms);
        ReadReply { value, mark: Some(mark) }
    }

    /// `fill.lua`: sets the value unless an invalidation came after the mark, or `version` lies below the floor. `version` is none for a
    /// read from the primary with a snapshot younger than the mark.
    ///
    /// # Errors
    /// The fill was admitted, and memory is full.
    pub fn fill(&mut self, mark: Option<&M>, version: Option<&Floor<S>>, value: V, memory: Memory) -> Result<FillReply, OutOfMemory> {
        let Some(entry) = self.entry.as_mut().filter(|entry| mark.is_some() && entry.mark.as_ref() == mark) else {
            return Ok(FillReply::MarkGone);
        };
        if let (Some(version), Some(floor)) = (version, &entry.floor)
            && (version.source != floor.source || version.version < floor.version)
        {
            return Ok(FillReply::BelowFloor);
        }
        if memory == Memory::Full {
            return Err(OutOfMemory);
        }
        entry.unlink_owed = false;
        self.value = Some(value);
        Ok(FillReply::Filled)
    }

    /// `invalidate.lua`: raises the floor to `said` and erases the mark, then unlinks the value; nothing when the floor covers it already.
    ///
    /// # Errors
    /// There is something to write, and memory is full.
    pub fn invalidate(
        &mut self,
        said: &Floor<S>,
        ttl_ms: u64,
        tombstones: Tombstones,
        memory: Memory,
    ) -> Result<InvalidateReply, OutOfMemory> {
        let Some(floor) = self.raised(said) else {
            return Ok(InvalidateReply::Repeat);
        };
        if tombstones == Tombstones::WhenCached && self.value.is_none() && self.entry.is_none() {
            return Ok(InvalidateReply::NothingThere);
        }
        self.raise(floor, false, ttl_ms, memory)?;
        Ok(match self.value.take() {
            Some(_) => InvalidateReply::Deleted,
            None => InvalidateReply::Applied,
        })
    }

    /// `owe.lua`: the first of two single-key steps; [`Self::lose_value`] is the second.
    ///
    /// # Errors
    /// There is something to write, and memory is full.
    pub fn owe(&mut self, said: &Floor<S>, ttl_ms: u64, memory: Memory) -> Result<OweReply, OutOfMemory> {
        let Some(floor) = self.raised(said) else {
            return Ok(OweReply::Repeat);
        };
        self.raise(floor, true, ttl_ms, memory)?;
        Ok(OweReply::Owed)
    }

    /// `forget.lua`: unlinks the value and erases the mark. Works when memory is full.
    pub fn forget(&mut self) -> ForgetReply {
        if let Some(entry) = &mut self.entry {
            entry.unlink_owed = false;
        }
        self.erase_mark();
        match self.value.take() {
            Some(_) => ForgetReply::Deleted,
            None => ForgetReply::NothingThere,
        }
    }

    /// Erases the mark alone: the first of the two single-key steps that stand in for [`Self::forget`].
    pub fn erase_mark(&mut self) {
        if let Some(entry) = &mut self.entry {
            entry.mark = None;
            // Redis drops a hash with its last field.
            if entry.floor.is_none() {
                self.entry = None;
            }
        }
    }

    /// The value is evicted, expired, or unlinked by a single-key step.
    pub fn lose_value(&mut self) {
        self.value = None;
    }

    /// The entry is evicted, expired, or unlinked by a single-key step.
    pub fn lose_entry(&mut self) {
        self.entry = None;
    }

    /// The floor to write for `said`: itself, or the present floor where only an unlink is owed. None for a repeat.
    fn raised(&self, said: &Floor<S>) -> Option<Floor<S>> {
        match &self.entry {
            Some(Entry { floor: Some(floor), unlink_owed, .. }) if floor.covers(said) => unlink_owed.then(|| floor.clone()),
            _ => Some(said.clone()),
        }
    }

    fn raise(&mut self, floor: Floor<S>, unlink_owed: bool, ttl_ms: u64, memory: Memory) -> Result<(), OutOfMemory> {
        if memory == Memory::Full {
            return Err(OutOfMemory);
        }
        let entry = self.entry.get_or_insert_with(Entry::empty);
        entry.floor = Some(floor);
        entry.mark = None;
        entry.unlink_owed = unlink_owed;
        entry.grow(ttl_ms);
        Ok(())
    }
}

impl<S, M> Entry<S, M> {
    /// Only on the way to one that holds a floor or a mark.
    fn empty() -> Self {
        Self { floor: None, mark: None, unlink_owed: false, ttl_ms: 0 }
    }

    /// A floor must not die early because a later step asked for less.
    fn grow(&mut self, ttl_ms: u64) {
        self.ttl_ms = self.ttl_ms.max(ttl_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Small = Slot<u8, char, u8>;
    const TTL: u64 = 1_000;

    fn at(source: char, position: u64) -> Floor<char> {
        Floor { source, version: Version { epoch: 1, position } }
    }

    fn apply(slot: &mut Small, said: Floor<char>) -> InvalidateReply {
        slot.invalidate(&said, TTL, Tombstones::Always, Memory::Free).unwrap()
    }

    fn miss(slot: &mut Small, nonce: u8) -> u8 {
        slot.read(&nonce, TTL, false, Memory::Free).mark.expect("a miss gives a mark").nonce
    }

    fn fill(slot: &mut Small, mark: u8, version: Option<Floor<char>>, value: u8) -> FillReply {
        slot.fill(Some(&mark), version.as_ref(), value, Memory::Free).unwrap()
    }

    fn floor(slot: &Small) -> Option<Floor<char>> {
        slot.entry.as_ref().and_then(|entry| entry.floor)
    }

    /// A value of 7 above a floor of `a` at 5, with the mark 1 still there.
    fn filled() -> Small {
        let mut slot = Small::default();
        apply(&mut slot, at('a', 5));
        let mark = miss(&mut slot, 1);
        assert_eq!(fill(&mut slot, mark, None, 7), FillReply::Filled);
        slot
    }

    #[test]
    fn an_older_invalidation_never_lowers_the_floor() {
        for (before, said, after) in [(5, 3, 5), (5, 5, 5), (5, 6, 6)] {
            let mut slot = Small::default();
            apply(&mut slot, at('a', before));
            apply(&mut slot, at('a', said));
            assert_eq!(floor(&slot), Some(at('a', after)), "{before} then {said}");
            slot.owe(&at('a', said), TTL, Memory::Free).unwrap();
            assert_eq!(floor(&slot), Some(at('a', after)), "{before} then {said} owed");
        }
    }

    #[test]
    fn a_newer_epoch_beats_any_position_of_an_older_one() {
        let mut slot = Small::default();
        apply(&mut slot, at('a', u64::MAX));
        let said = Floor { source: 'a', version: Version { epoch: 2, position: 0 } };
        assert_eq!(apply(&mut slot, said), InvalidateReply::Applied);
        assert_eq!(floor(&slot), Some(said));
        assert_eq!(apply(&mut slot, at('a', u64::MAX)), InvalidateReply::Repeat);
    }

    #[test]
    fn a_repeated_invalidation_keeps_a_fresh_value() {
        for said in [4, 5] {
            let mut slot = filled();
            let before = slot.clone();
            assert_eq!(apply(&mut slot, at('a', said)), InvalidateReply::Repeat);
            assert_eq!(slot.owe(&at('a', said), TTL, Memory::Free), Ok(OweReply::Repeat));
            assert_eq!(slot, before);
        }
    }

    #[test]
    fn an_invalidation_of_another_source_just_applies() {
        let mut slot = filled();
        assert_eq!(apply(&mut slot, at('b', 1)), InvalidateReply::Deleted);
        assert_eq!(floor(&slot), Some(at('b', 1)));
        assert_eq!(slot.value, None);
    }

    #[test]
    fn a_stale_fill_is_refused_after_an_invalidation() {
        let mut slot = Small::default();
        let mark = miss(&mut slot, 1);
        apply(&mut slot, at('a', 5));
        assert_eq!(fill(&mut slot, mark, None, 7), FillReply::MarkGone);
        assert_eq!(fill(&mut slot, mark, Some(at('a', 9)), 7), FillReply::MarkGone);
        assert_eq!(slot.value, None);
    }

    #[test]
    fn a_fill_with_a_version_must_reach_the_floor_of_its_own_source() {
        for (version, reply) in [
            (None, FillReply::Filled),
            (Some(at('a', 4)), FillReply::BelowFloor),
            (Some(at('a', 5)), FillReply::Filled),
            (Some(at('a', 6)), FillReply::Filled),
            (Some(at('b', 6)), FillReply::BelowFloor),
        ] {
            let mut slot = Small::default();
            apply(&mut slot, at('a', 5));
            let mark = miss(&mut slot, 1);
            assert_eq!(fill(&mut slot, mark, version, 7), reply, "{version:?}");
            assert_eq!(floor(&slot), Some(at('a', 5)), "a fill never raises the floor");
        }
    }

    #[test]
    fn a_fill_with_a_version_passes_where_no_floor_is() {
        let mut slot = Small::default();
        let mark = miss(&mut slot, 1);
        assert_eq!(fill(&mut slot, mark, Some(at('a', 0)), 7), FillReply::Filled);
        assert_eq!(floor(&slot), None);
    }

    #[test]
    fn an_empty_mark_permits_nothing() {
        let mut slot = filled();
        apply(&mut slot, at('a', 6));
        assert_eq!(slot.fill(None, None, 8, Memory::Free), Ok(FillReply::MarkGone));
    }

    #[test]
    fn a_lost_entry_refuses_the_fill() {
        let mut slot = Small::default();
        let mark = miss(&mut slot, 1);
        slot.lose_entry();
        assert_eq!(fill(&mut slot, mark, None, 7), FillReply::MarkGone);
    }

    #[test]
    fn readers_of_one_miss_share_the_mark_of_the_first() {
        let mut slot = Small::default();
        assert_eq!(slot.read(&1, TTL, false, Memory::Free).mark, Some(Mark { nonce: 1, left_now: true }));
        assert_eq!(slot.read(&2, TTL, false, Memory::Free).mark, Some(Mark { nonce: 1, left_now: false }));
        assert_eq!(fill(&mut slot, 1, None, 7), FillReply::Filled);
        assert_eq!(slot.read(&3, TTL, false, Memory::Free), ReadReply { value: Some(7), mark: None });
        let refresh = slot.read(&3, TTL, true, Memory::Free);
        assert_eq!(refresh, ReadReply { value: Some(7), mark: Some(Mark { nonce: 1, left_now: false }) });
    }

    #[test]
    fn an_owed_unlink_is_paid_by_the_next_invalidation_and_only_once() {
        for said in [4, 5, 6] {
            let mut slot = filled();
            assert_eq!(slot.owe(&at('a', 6), TTL, Memory::Free), Ok(OweReply::Owed));
            assert_eq!(slot.value, Some(7), "the first step leaves the value");
            assert_eq!(apply(&mut slot, at('a', said)), InvalidateReply::Deleted);
            assert_eq!(floor(&slot), Some(at('a', 6)), "paying for {said} leaves the floor");
            assert_eq!(apply(&mut slot, at('a', said)), InvalidateReply::Repeat);
        }
    }

    #[test]
    fn a_fill_clears_an_owed_unlink() {
        let mut slot = filled();
        slot.owe(&at('a', 6), TTL, Memory::Free).unwrap();
        slot.lose_value();
        let mark = miss(&mut slot, 2);
        assert_eq!(fill(&mut slot, mark, None, 8), FillReply::Filled);
        assert_eq!(apply(&mut slot, at('a', 6)), InvalidateReply::Repeat);
        assert_eq!(slot.value, Some(8));
    }

    #[test]
    fn forgetting_keeps_the_floor_and_refuses_older_fills() {
        let mut slot = filled();
        assert_eq!(slot.forget(), ForgetReply::Deleted);
        assert_eq!(floor(&slot), Some(at('a', 5)));
        assert_eq!(fill(&mut slot, 1, None, 7), FillReply::MarkGone);
        assert_eq!(slot.forget(), ForgetReply::NothingThere);
    }

    #[test]
    fn an_entry_of_a_mark_alone_goes_with_its_mark() {
        let mut slot = Small::default();
        miss(&mut slot, 1);
        slot.forget();
        assert_eq!(slot, Small::default());
    }

    #[test]
    fn when_cached_writes_nothing_where_nothing_is() {
        let mut slot = Small::default();
        let invalidate = |slot: &mut Small| slot.invalidate(&at('a', 5), TTL, Tombstones::WhenCached, Memory::Full);
        assert_eq!(invalidate(&mut slot), Ok(InvalidateReply::NothingThere));
        assert_eq!(slot, Small::default());
        miss(&mut slot, 1);
        assert_eq!(invalidate(&mut slot), Err(OutOfMemory), "a mark is something");
    }

    #[test]
    fn a_full_cache_refuses_the_invalidation_before_it_touches_the_value() {
        let mut slot = filled();
        let before = slot.clone();
        assert_eq!(slot.invalidate(&at('a', 6), TTL, Tombstones::Always, Memory::Full), Err(OutOfMemory));
        assert_eq!(slot.owe(&at('a', 6), TTL, Memory::Full), Err(OutOfMemory));
        assert_eq!(slot.fill(Some(&1), None, 8, Memory::Full), Err(OutOfMemory));
        assert_eq!(slot, before);
        assert_eq!(slot.invalidate(&at('a', 5), TTL, Tombstones::Always, Memory::Full), Ok(InvalidateReply::Repeat));
    }

    #[test]
    fn a_full_cache_answers_a_read_without_a_mark() {
        let mut slot = Small::default();
        assert_eq!(slot.read(&1, TTL, false, Memory::Full), ReadReply { value: None, mark: None });
        assert_eq!(slot, Small::default());
        miss(&mut slot, 1);
        assert!(slot.read(&2, TTL, false, Memory::Full).mark.is_some(), "a mark that is there needs no memory");
    }

    #[test]
    fn an_entry_ttl_only_ever_grows() {
        let mut slot = Small::default();
        for (ttl_ms, after) in [(500, 500), (900, 900), (100, 900)] {
            slot.invalidate(&at('a', ttl_ms), ttl_ms, Tombstones::Always, Memory::Free).unwrap();
            slot.read(&1, 50, false, Memory::Free);
            assert_eq!(slot.entry.as_ref().map(|entry| entry.ttl_ms), Some(after));
        }
    }
}
