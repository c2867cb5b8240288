//! Breadth first over every state that a case can reach.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::world::{Action, Case, State};

/// What the search found.
pub(crate) struct Found {
    /// How many different states were seen.
    pub(crate) states: usize,
    /// A shortest way to a state that is stale for good, with that state; none when there is no such state.
    pub(crate) stale: Option<(Vec<Action>, State)>,
}

/// Tries everything that can happen, in every order.
pub(crate) fn search(case: &Case) -> Found {
    let mut seen: HashMap<State, (), BuildHasherDefault<Multiply>> = HashMap::default();
    // In the order of discovery; each with the index it was reached from.
    let mut states: Vec<(State, usize, Option<Action>)> = vec![(State::START, 0, None)];
    seen.insert(State::START, ());
    let mut next = Vec::new();
    let mut at = 0;
    while at < states.len() {
        let state = states[at].0;
        if state.is_stale_for_good() {
            return Found { states: states.len(), stale: Some((way_to(at, &states), state)) };
        }
        state.next(case, &mut next);
        for (action, after) in next.drain(..) {
            if seen.insert(after, ()).is_none() {
                states.push((after, at, Some(action)));
            }
        }
        at += 1;
    }
    Found { states: states.len(), stale: None }
}

fn way_to(mut at: usize, states: &[(State, usize, Option<Action>)]) -> Vec<Action> {
    let mut way = Vec::new();
    while let (_, from, Some(action)) = states[at] {
        way.push(action);
        at = from;
    }
    way.reverse();
    way
}

/// A multiplicative hash. The standard one resists chosen keys, which nobody chooses here, and costs most of the search's time.
#[derive(Default)]
struct Multiply(u64);

/// 2^64 divided by the golden ratio, made odd: it spreads small numbers over all bits (Knuth, volume 3, section 6.4).
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

impl Multiply {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(GOLDEN);
    }
}

impl Hasher for Multiply {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.add(u64::from(number));
    }

    fn write_u16(&mut self, number: u16) {
        self.add(u64::from(number));
    }

    fn write_usize(&mut self, number: usize) {
        self.add(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.add(number as u64);
    }

    fn finish(&self) -> u64 {
        // The table takes its bucket from the low bits, where a product is weakest.
        self.0.rotate_left(26)
    }
}
