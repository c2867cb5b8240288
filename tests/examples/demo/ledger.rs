//! What a stale read is, decided without trusting the subscribers.
//!
//! A read is stale when a write newer than the returned value had been *applied* in the reader's region before the reader sent its GET.
//! That needs two facts about a write n of a product, and neither comes from the processes under test:
//!
//! - Its *receipt*: the source's insert position, read by the writer in a statement of its own after its commit returned. Every change of the
//!   product is visible to every snapshot taken after that moment. [`Ledger::note`] keeps it with the row's revision.
//! - The product's *floor* in the region: the version in the tombstone entry, read by the reader before it sends its GET.
//!
//! The rule: **floor > receipt(n) and returned revision < n is a stale read.** Why it accuses nobody wrongly:
//!
//! 1. A floor's position is the insert position at the moment a relay claimed the row, and the insert position never falls within an epoch
//!    (versions compare by epoch first, and an epoch is raised before anything is claimed in it). So floor > receipt(n) means that the claim came
//!    after the receipt was read, and so after write n was visible to everybody. An equal position would leave that open, so it does not count.
//! 2. That invalidation was applied before the floor was seen. In one atomic step it raised the floor, erased the mark and unlinked the
//!    value. What the cache holds afterwards was filled with a mark left after that step, from a snapshot taken after the mark: it shows write n or
//!    a later one.
//! 3. The floor was seen before the GET was sent, so the GET ran after that step. A value loaded after a miss is newer still.
//!
//! Whether the invalidation that raised the floor belongs to write n or to another write of the same product does not matter in any of the three.
//!
//! What it leaves out: a relay may claim between a commit and its receipt. The write then counts as applied only with the product's next one.
//! The number of reads that the rule could judge is shown, since a check that judges nothing finds nothing.

use recant_schema::version::Version;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Receipts kept per product. The hottest product changes some 20 times a second at the default rate, so these reach back three seconds,
/// a thousand times the usual propagation. A dropped receipt makes the check see less, never accuse wrongly.
const RECEIPTS_KEPT: usize = 64;

struct Receipt {
    revision: i64,
    position: Version,
}

/// The committed writes of every product.
pub(crate) struct Ledger {
    /// By id, which begins at 1.
    products: Vec<Mutex<VecDeque<Receipt>>>,
}

impl Ledger {
    pub(crate) fn new(products: usize) -> Self {
        Self { products: (0..products).map(|_| Mutex::default()).collect() }
    }

    /// A write was committed, and `position` was read afterwards.
    pub(crate) fn note(&self, id: i64, revision: i64, position: Version) {
        self.with(id, |receipts| {
            if receipts.len() == RECEIPTS_KEPT {
                receipts.pop_front();
            }
            receipts.push_back(Receipt { revision, position });
        });
    }

    /// The oldest revision that a reader may be given who saw this floor before it asked; `None` when nothing follows from it.
    pub(crate) fn oldest_allowed(&self, id: i64, floor: Version) -> Option<i64> {
        // Writers can note in another order than they committed in, so every receipt is looked at.
        self.with(id, |receipts| receipts.iter().filter(|receipt| floor > receipt.position).map(|receipt| receipt.revision).max())
    }

    fn with<T>(&self, id: i64, act: impl FnOnce(&mut VecDeque<Receipt>) -> T) -> T {
        let index = usize::try_from(id - 1).expect("ids begin at 1");
        act(&mut self.products[index].lock().unwrap_or_else(PoisonError::into_inner))
    }
}
