//! PURE: every decision of the subscriber's loop. `apply` takes what happened and returns what to do; nothing here waits or fails.
//!
//! Reading order: [`Action`] and [`Effect`], [`State::apply`]; one partition's part is in `partition`.

mod action;
mod gaps;
mod partition;
#[cfg(test)]
mod tests;

pub use action::{Action, Delivery, Effect};

use crate::judge::{Verdict, judge};
use crate::marker::{GapCause, Log, Marker, Partition};
use crate::progress::Point;
use crate::work::{DeadLetter, Order, Times, Work, WorkId};
use gaps::Gaps;
use partition::Owned;

use recant_schema::invalidation::Source;
use recant_schema::key::{Key, KeyPrefixes};
use recant_schema::labels::CommitBasis;
#[cfg(doc)]
use recant_schema::record::MAX_RECORD_BYTES;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Most records between delivery and answer. Two to four pipelines of 256 a node keep a Redis busy (measured: more in flight brings nothing); this holds
/// enough for a dozen nodes, at about 300 bytes each.
pub const MAX_IN_FLIGHT: usize = 8192;

/// A replay may use only so much of it, so that fresh records always find room.
const MAX_IN_FLIGHT_FOR_REPLAY: usize = MAX_IN_FLIGHT / 2;

/// What a poison record counts as: it carries up to [`MAX_RECORD_BYTES`] (64 KiB), so some 4 MiB of them and one batch are in memory at most.
const POISON_WEIGHT: usize = 128;

/// Most records between delivery and watermark. Answered records wait behind one that is not, such as a poison record whose dead letter Kafka does not
/// take; at some 32 bytes each this is 2 MiB.
const MAX_OUTSTANDING: usize = 8 * MAX_IN_FLIGHT;

/// Milliseconds between two [`Action::Tick`]s.
pub const TICK_MS: u64 = 200;

/// A full house for so many ticks (1 s) means that the cache is away, not busy: pause the consumer, so that it can be polled.
const FULL_TICKS_BEFORE_PAUSE: u32 = 5;

/// How many ticks (2 s) revoked or stopping partitions may take to drain. Below the session time-out (6 s).
const TICKS_TO_DRAIN: u32 = 10;

/// Longest explanation kept of a poison record, in bytes: it may quote the record.
const MAX_DETAIL_BYTES: usize = 300;

/// The loop's memory.
#[derive(Debug)]
pub struct State {
    prefixes: KeyPrefixes,
    /// Names of the consumed topics, for people.
    topics: Vec<String>,
    partitions: BTreeMap<Partition, Owned>,
    poison: HashMap<WorkId, DeadLetter>,
    gaps: Gaps,
    generation: u64,
    requests: u32,
    sessions: u32,
    tracks: u32,
    in_flight: usize,
    full_ticks: u32,
    paused: bool,
    /// Ticks left to drain in, while giving partitions up.
    draining: Option<u32>,
    closing: bool,
}

impl State {
    /// Owns nothing yet; touches keys below these prefixes only; sweeps them after a gap if `sweep_gaps`.
    pub fn new(prefixes: KeyPrefixes, topics: Vec<String>, sweep_gaps: bool) -> Self {
        Self {
            prefixes,
            topics,
            partitions: BTreeMap::new(),
            poison: HashMap::new(),
            gaps: Gaps::new(sweep_gaps),
            generation: 0,
            requests: 0,
            sessions: 0,
            tracks: 0,
            in_flight: 0,
            full_ticks: 0,
            paused: false,
            draining: None,
            closing: false,
        }
    }

    /// Whether the live consumer should be polled. A paused one is: it returns nothing but keeps its place in the group.
    pub fn wants_live(&self) -> bool {
        // Who owns nothing must hear the group all the same.
        self.paused || self.partitions.is_empty() || !self.is_full()
    }

    fn is_full(&self) -> bool {
        self.in_flight >= MAX_IN_FLIGHT || self.partitions.values().map(Owned::outstanding).sum::<usize>() >= MAX_OUTSTANDING
    }

    /// Whether records of a replay have room.
    pub fn wants_replay(&self) -> bool {
        self.draining.is_none() && self.in_flight < MAX_IN_FLIGHT_FOR_REPLAY && !self.is_full()
    }

    /// Records between delivery and answer.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether consumption is paused because the cache does not answer.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether the region is being swept.
    pub fn sweeping(&self) -> bool {
        self.gaps.sweeping()
    }

    /// How many partitions are being replayed, or wait to be.
    pub fn replaying(&self) -> usize {
        self.partitions.values().filter(|owned| owned.is_behind()).count()
    }

    /// Per owned partition the newest point that may be committed and remembered.
    pub fn settled(&self) -> impl Iterator<Item = (Partition, Option<Point>)> + '_ {
        self.partitions.iter().map(|(partition, owned)| (*partition, owned.settled()))
    }

    /// Takes what happened; returns what to do, in this order.
    pub fn apply(&mut self, action: Action) -> Vec<Effect> {
        match action {
            Action::Assigned(partitions) => self.assigned(partitions),
            Action::Revoked => self.drain(),
            Action::CacheConnected { generation, marker } => self.cache_connected(generation, marker),
            Action::Recalled { generation, marker } => self.recalled(generation, marker),
            Action::Located { request, logs } => self.located(request, logs),
            Action::Delivered(records) => self.delivered(records),
            Action::Replayed { session, records } => self.replayed(session, records),
            Action::ReplayReachedEnd { session, partition } => self.replay_reached_end(session, partition),
            Action::LiveOutOfRange => self.live_out_of_range(),
            Action::Answered(ids) => self.answered(ids),
            Action::SetAside(id) => {
                self.finish(id, POISON_WEIGHT);
                self.after_progress()
            }
            Action::ReplayOutOfRange { session } => self.replay_out_of_range(session),
            Action::Tick => self.tick(),
            Action::CommitDue => self.commit_due(),
            Action::Swept(number) => {
                self.gaps.swept(number);
                vec![self.remember()]
            }
            Action::MarkerDue => vec![self.remember()],
            Action::Stop => {
                self.closing = true;
                self.drain()
            }
        }
    }

    fn assigned(&mut self, partitions: Vec<Partition>) -> Vec<Effect> {
        self.paused = false;
        self.partitions = partitions.into_iter().map(|partition| (partition, Owned::default())).collect();
        if self.closing {
            return self.drain();
        }
        if self.partitions.is_empty() { vec![Effect::AssignLive(Vec::new())] } else { vec![Effect::Recall] }
    }

    fn recalled(&mut self, generation: u64, marker: Marker) -> Vec<Effect> {
        self.generation = self.generation.max(generation);
        let sweep = self.gaps.recalled(&marker);
        let fresh = self.partitions.iter_mut().filter(|(_, owned)| owned.awaits_marker());
        let fresh: Vec<_> = fresh.map(|(partition, owned)| owned.demand(*partition, marker.points.get(partition).copied())).collect();
        let mut effects = self.locate(fresh);
        effects.extend(sweep);
        effects
    }

    /// Whatever this primary had been told after its marker, it may have lost.
    fn cache_connected(&mut self, generation: u64, marker: Marker) -> Vec<Effect> {
        self.generation = self.generation.max(generation);
        let sweep = self.gaps.connected(&marker);
        let known = self.partitions.iter_mut().filter(|(_, owned)| !owned.awaits_marker());
        let demands: Vec<_> = known.map(|(partition, owned)| owned.demand(*partition, marker.points.get(partition).copied())).collect();
        let mut effects = self.locate(demands);
        effects.extend(sweep);
        effects
    }

    fn live_out_of_range(&mut self) -> Vec<Effect> {
        let demands = self.partitions.iter_mut().map(|(partition, owned)| owned.start_over(*partition)).collect();
        self.locate(demands)
    }

    /// Retention has overtaken a replay. It is not said which partition's, so all of them are located again from where they had got to.
    fn replay_out_of_range(&mut self, session: u32) -> Vec<Effect> {
        if session != self.sessions {
            return Vec::new();
        }
        let replaying = self.partitions.iter_mut().filter(|(_, owned)| owned.is_replaying());
        let demands = replaying.map(|(partition, owned)| owned.demand(*partition, owned.settled())).collect();
        self.locate(demands)
    }

    fn locate(&mut self, partitions: Vec<(Partition, Option<Point>)>) -> Vec<Effect> {
        if partitions.is_empty() || self.draining.is_some() {
            return Vec::new();
        }
        self.requests += 1;
        for (partition, _) in &partitions {
            self.partitions.get_mut(partition).expect("demands come from owned partitions").locating(self.requests);
        }
        vec![Effect::Locate { request: self.requests, partitions }]
    }

    fn located(&mut self, request: u32, logs: Vec<(Partition, Log)>) -> Vec<Effect> {
        let (mut effects, mut started) = (Vec::new(), false);
        for (partition, log) in logs {
            let Some(owned) = self.partitions.get_mut(&partition) else { continue };
            self.tracks += 2;
            let Some(located) = owned.located(request, log, self.tracks) else { continue };
            started |= located.goes_live;
            if let Some(cause) = located.gap {
                effects.extend(self.gap(cause, format!("{}: the log holds offsets {} to {}", self.name(partition), log.low, log.high)));
            }
        }
        // Partitions that the broker could not describe yet join later; the others do not wait for them.
        if started {
            let live = self.partitions.iter().filter_map(|(partition, owned)| Some((*partition, owned.live_from()?)));
            effects.push(Effect::AssignLive(live.collect()));
            self.paused = false;
        }
        effects.push(self.replay());
        effects
    }

    /// One consumer replays everything that is behind; a change means a new session from wherever each partition had got to.
    fn replay(&mut self) -> Effect {
        self.sessions += 1;
        let ranges = self.partitions.iter().filter_map(|(partition, owned)| Some((*partition, owned.replay_range()?))).collect();
        Effect::Replay { session: self.sessions, ranges }
    }

    fn delivered(&mut self, records: Vec<Delivery>) -> Vec<Effect> {
        if self.draining.is_some() {
            return Vec::new();
        }
        let (mut effects, mut work) = (Vec::new(), Vec::new());
        for record in records {
            let Some(track) = self.partitions.get_mut(&record.partition).and_then(|owned| owned.deliver(record.point)) else { continue };
            self.take(record, track, false, &mut work, &mut effects);
        }
        if !work.is_empty() {
            effects.push(Effect::Apply(work));
        }
        effects
    }

    fn replayed(&mut self, session: u32, records: Vec<Delivery>) -> Vec<Effect> {
        if session != self.sessions || self.draining.is_some() {
            return Vec::new();
        }
        let (mut effects, mut work) = (Vec::new(), Vec::new());
        for record in records {
            let Some(owned) = self.partitions.get_mut(&record.partition) else { continue };
            if owned.contradicts(record.point) {
                self.tracks += 2;
                owned.replay_from_oldest(self.tracks);
                let detail = format!("{}: another record at offset {}", self.name(record.partition), record.point.offset);
                effects.extend(self.gap(GapCause::Recreated, detail));
                effects.push(self.replay());
                break;
            }
            let Some(track) = owned.deliver_replayed(record.point) else { continue };
            self.take(record, track, true, &mut work, &mut effects);
        }
        if !work.is_empty() {
            effects.push(Effect::Apply(work));
        }
        effects.extend(self.after_progress());
        effects
    }

    fn replay_reached_end(&mut self, session: u32, partition: Partition) -> Vec<Effect> {
        if let (true, Some(owned)) = (session == self.sessions, self.partitions.get_mut(&partition)) {
            owned.replay_reached_end();
        }
        self.after_progress()
    }

    /// Judges one tracked record.
    fn take(&mut self, record: Delivery, track: u32, replayed: bool, work: &mut Vec<Work>, effects: &mut Vec<Effect>) {
        let id = WorkId { partition: record.partition, offset: record.point.offset, track };
        let times = Times {
            committed_us: None,
            basis: CommitBasis::Insert,
            stored_us: record.point.time_ms.saturating_mul(1000),
            delivered_us: record.delivered_us,
            class: None,
            replayed,
        };
        match judge(record.key.as_deref(), record.value.as_deref(), &self.prefixes) {
            Verdict::Apply(invalidation) => {
                effects.extend(self.meet_epoch(&invalidation.source, invalidation.version.epoch));
                let times = Times {
                    committed_us: Some(invalidation.committed_at_us),
                    basis: invalidation.commit_basis,
                    class: invalidation.class,
                    ..times
                };
                let order = Order::Invalidate { source: Arc::from(invalidation.source.database), version: invalidation.version };
                self.in_flight += 1;
                work.push(Work { id, key: invalidation.key, order, times });
            }
            Verdict::Time(heartbeat) => {
                effects.extend(self.meet_epoch(&heartbeat.source, heartbeat.version.epoch));
                self.finish(id, 0);
                if !replayed {
                    let (stored_ms, delivered_us, partition) = (record.point.time_ms, record.delivered_us, record.partition);
                    effects.push(Effect::Beat { heartbeat, stored_ms, delivered_us, partition });
                }
            }
            Verdict::SetAside(poison, forgotten) => {
                let mut detail = poison.to_string();
                detail.truncate(detail.floor_char_boundary(MAX_DETAIL_BYTES));
                let Delivery { key, value, key_bytes, value_bytes, .. } = record;
                let letter = DeadLetter { id, reason: poison.reason(), detail, key, value, key_bytes, value_bytes };
                self.in_flight += POISON_WEIGHT;
                self.forget_then_set_aside(letter, forgotten, times, work, effects);
            }
        }
    }

    /// The key comes first: the dead-letter topic may be away, and the cache must not wait for it.
    fn forget_then_set_aside(
        &mut self,
        letter: DeadLetter,
        forgotten: Option<Key>,
        times: Times,
        work: &mut Vec<Work>,
        effects: &mut Vec<Effect>,
    ) {
        match forgotten {
            Some(key) => {
                work.push(Work { id: letter.id, key, order: Order::Forget, times });
                self.poison.insert(letter.id, letter);
            }
            None => effects.push(Effect::DeadLetter(Box::new(letter))),
        }
    }

    /// A promotion or restore can lose commits that no invalidation will ever name; once per source and epoch.
    fn meet_epoch(&mut self, source: &Source, epoch: u64) -> Vec<Effect> {
        let gap = self.gaps.meet(source, epoch);
        gap.map_or_else(Vec::new, |detail| self.gap(GapCause::NewEpoch, detail))
    }

    fn name(&self, partition: Partition) -> String {
        format!("{} partition {}", self.topics[partition.topic], partition.number)
    }

    /// Reports a gap and sweeps because of it, if that is the policy. What is owed is remembered before the sweep begins.
    fn gap(&mut self, cause: GapCause, detail: String) -> Vec<Effect> {
        let sweep = self.gaps.owe([detail.clone()]);
        let mut effects = vec![Effect::Gap { cause, detail }];
        if let Some(sweep) = sweep {
            effects.extend([self.remember(), sweep]);
        }
        effects
    }

    fn answered(&mut self, ids: Vec<WorkId>) -> Vec<Effect> {
        let mut effects = Vec::new();
        for id in ids {
            match self.poison.remove(&id) {
                Some(letter) => effects.push(Effect::DeadLetter(Box::new(letter))),
                None => self.finish(id, 1),
            }
        }
        effects.extend(self.after_progress());
        effects
    }

    fn finish(&mut self, id: WorkId, weight: usize) {
        self.in_flight = self.in_flight.saturating_sub(weight);
        if let Some(owned) = self.partitions.get_mut(&id.partition) {
            owned.answer(id.track, id.offset);
        }
    }

    fn after_progress(&mut self) -> Vec<Effect> {
        if self.draining.is_some() {
            return self.release_if_drained();
        }
        let finished = self.partitions.values_mut().filter_map(Owned::finish_replay).count();
        let none_left = self.partitions.values().all(|owned| owned.replay_range().is_none());
        if finished > 0 && none_left { vec![self.replay()] } else { Vec::new() }
    }

    fn commit_due(&mut self) -> Vec<Effect> {
        let due: Vec<_> = self.partitions.iter_mut().filter_map(|(partition, owned)| Some((*partition, owned.commit()?))).collect();
        if due.is_empty() { Vec::new() } else { vec![Effect::Commit(due)] }
    }

    fn tick(&mut self) -> Vec<Effect> {
        if let Some(left) = &mut self.draining {
            *left = left.saturating_sub(1);
            return self.release_if_drained();
        }
        self.full_ticks = if self.is_full() { self.full_ticks + 1 } else { 0 };
        if !self.paused && self.full_ticks >= FULL_TICKS_BEFORE_PAUSE && !self.partitions.is_empty() {
            self.paused = true;
            return vec![Effect::Pause];
        }
        if self.paused && !self.is_full() && self.in_flight < MAX_IN_FLIGHT / 2 {
            self.paused = false;
            return vec![Effect::Resume];
        }
        Vec::new()
    }

    fn remember(&mut self) -> Effect {
        Effect::Remember { generation: self.generation, marker: self.marker() }
    }

    fn marker(&mut self) -> Marker {
        let points = self.partitions.iter().filter_map(|(partition, owned)| Some((*partition, owned.settled()?))).collect();
        let void = self.partitions.iter().filter(|(_, owned)| owned.is_void()).map(|(partition, _)| *partition).collect();
        let mut marker = Marker { points, void, ..Marker::default() };
        self.gaps.write(&mut marker);
        marker
    }

    /// A revoked partition is finished, or left uncommitted for whoever gets it next.
    fn drain(&mut self) -> Vec<Effect> {
        self.draining = Some(self.draining.unwrap_or(TICKS_TO_DRAIN));
        self.sessions += 1;
        let mut effects = vec![Effect::Replay { session: self.sessions, ranges: Vec::new() }];
        effects.extend(self.release_if_drained());
        effects
    }

    fn release_if_drained(&mut self) -> Vec<Effect> {
        let drained = self.partitions.values().all(Owned::is_settled);
        if !drained && self.draining != Some(0) {
            return Vec::new();
        }
        let marker = self.marker();
        let next = self.partitions.iter().filter_map(|(partition, owned)| Some((*partition, owned.settled()?.offset + 1))).collect();
        self.partitions.clear();
        self.draining = None;
        self.paused = false;
        let mut effects = vec![Effect::Release { generation: self.generation, marker, next }];
        if self.closing {
            effects.push(Effect::Close);
        }
        effects
    }
}
