//! PURE: which losses of history were met, and which sweeps are owed because of gaps.
//!
//! Everything here is written into the marker together with the watermarks, so what a primary's marker says of gaps is true of the data beside
//! it: a marker that lacks a handled epoch lies beside data from before that epoch's sweep, one that holds an owed sweep beside data
//! that may be half swept.

use super::Effect;
use crate::marker::{Epochs, MAX_OWED_SWEEPS, MAX_SOURCES, Marker};
use recant_schema::invalidation::Source;
use std::collections::{BTreeMap, BTreeSet};

/// The gaps of one region.
#[derive(Debug)]
pub(super) struct Gaps {
    /// Whether the policy is to sweep.
    sweep: bool,
    epochs: BTreeMap<String, Epochs>,
    owed: BTreeSet<String>,
    /// Paid since the marker was last written.
    paid: BTreeSet<String>,
    /// The sweep under way, and what it pays.
    running: Option<(u32, BTreeSet<String>)>,
    numbers: u32,
}

impl Gaps {
    pub(super) fn new(sweep: bool) -> Self {
        Self { sweep, epochs: BTreeMap::new(), owed: BTreeSet::new(), paid: BTreeSet::new(), running: None, numbers: 0 }
    }

    /// Whether this record shows, for the first time in this region, an epoch that lost commits which readers may have cached: its gap, for a person.
    pub(super) fn meet(&mut self, source: &Source, epoch: u64) -> Option<String> {
        let lossy = source.epoch_cause.filter(|cause| cause.loses_commits());
        if let Some(known) = self.epochs.get_mut(&source.database) {
            return known.handle(lossy.map(|_| epoch)).then(|| epoch_gap(&source.database, epoch));
        }
        // A source that nobody has heard of had nothing cached from it. Beyond the bound a region has far more databases than it can be meant to have.
        if self.epochs.len() < MAX_SOURCES {
            self.epochs.insert(source.database.clone(), Epochs { baseline: epoch, handled: BTreeSet::new() });
        }
        None
    }

    /// Learns what the region's primaries remember when partitions are newly owned.
    pub(super) fn recalled(&mut self, marker: &Marker) -> Option<Effect> {
        for (source, theirs) in &marker.epochs {
            self.epochs.entry(source.clone()).and_modify(|ours| ours.merge(theirs)).or_insert_with(|| theirs.clone());
        }
        self.owe(marker.sweeps.iter().cloned())
    }

    /// Learns what one newly connected primary remembers. Epochs that were handled without it being there are handled again.
    pub(super) fn connected(&mut self, marker: &Marker) -> Option<Effect> {
        let missed = self.epochs.iter().flat_map(|(source, ours)| {
            let theirs = marker.epochs.get(source);
            let known = move |epoch: u64| theirs.is_some_and(|theirs| theirs.knows(epoch));
            ours.handled.iter().copied().filter(move |epoch| !known(*epoch)).map(move |epoch| epoch_gap(source, epoch))
        });
        let missed: Vec<_> = missed.chain(marker.sweeps.iter().cloned()).collect();
        let effect = self.owe(missed);
        for (source, theirs) in &marker.epochs {
            self.epochs.entry(source.clone()).and_modify(|ours| ours.merge(theirs)).or_insert_with(|| theirs.clone());
        }
        effect
    }

    /// Owes a sweep for each of these gaps, if sweeping is the policy. The sweep under way, if any, started too early for them and starts over.
    pub(super) fn owe(&mut self, gaps: impl IntoIterator<Item = String>) -> Option<Effect> {
        if !self.sweep {
            return None;
        }
        let before = self.owed.len();
        for gap in gaps {
            self.paid.remove(&gap);
            if self.owed.len() < MAX_OWED_SWEEPS {
                self.owed.insert(gap);
            }
        }
        (self.owed.len() > before).then(|| self.start())
    }

    fn start(&mut self) -> Effect {
        self.numbers += 1;
        self.running = Some((self.numbers, self.owed.clone()));
        Effect::Sweep(self.numbers)
    }

    /// A sweep is done.
    pub(super) fn swept(&mut self, number: u32) {
        if let Some((_, paid)) = self.running.take_if(|(running, _)| *running == number) {
            self.owed.retain(|gap| !paid.contains(gap));
            self.paid.extend(paid);
        }
    }

    /// Whether a sweep is under way.
    pub(super) fn sweeping(&self) -> bool {
        self.running.is_some()
    }

    /// Adds all of this to a marker about to be written.
    pub(super) fn write(&mut self, marker: &mut Marker) {
        marker.epochs = self.epochs.clone();
        marker.sweeps = self.owed.clone();
        marker.swept = std::mem::take(&mut self.paid);
    }
}

/// Names the gap; the same in every member of the group.
fn epoch_gap(source: &str, epoch: u64) -> String {
    format!("epoch {epoch} of {source}")
}
