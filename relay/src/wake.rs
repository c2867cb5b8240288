//! When to look into the outbox. A wake-up is a hint that there may be something to claim; it never carries what.

use crate::pace::Steps;
use std::future::Future;
use std::time::Duration;

/// Why a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A commit was announced: the rows are there, or about to be.
    Word,
    /// Time has passed; there may be nothing.
    Silence,
}

/// Says when the next claim is worth making. Losing a wake-up must lose nothing: every implementation returns from [`Wake::wait`] after a
/// bounded time on its own.
pub trait Wake: Send + 'static {
    /// Returns when there may be something to claim. Cancel safe.
    fn wait(&mut self) -> impl Future<Output = Sign> + Send;

    /// Told after each claim how many rows it returned, whether there may be more already, and the log position of its rows (0 without rows).
    fn claimed(&mut self, rows: usize, full: bool, position: u64);
}

/// Waits by the clock alone; see [`Steps`].
#[derive(Debug)]
pub struct Timer {
    steps: Steps,
}

impl Timer {
    /// `longest`: the longest wait, while idle.
    pub fn new(longest: Duration) -> Self {
        Self { steps: Steps::new(longest) }
    }
}

impl Wake for Timer {
    async fn wait(&mut self) -> Sign {
        let pause = self.steps.pause();
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Sign::Silence
    }

    fn claimed(&mut self, rows: usize, full: bool, _position: u64) {
        self.steps.claimed(rows, full);
    }
}
