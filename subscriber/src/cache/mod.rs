//! The only home of Redis: applying work, remembering the marker, looking at one key.
//!
//! ```text
//! loop ── Request ──▶ router ──▶ one node task per primary ── Answer ──▶ loop
//!                       ▲  slots, addresses      │ moved, connected, lost
//!                       └────────────────────────┘
//! ```
//! A single Redis and a Sentinel set are a cluster of one primary. Reading order: [`Address`] and `topology` (who owns a slot), `router` (who gets what),
//! `node` (one connection: pipelines, retries), `command` (bytes in and out), [`inspect`](Inspector).

mod command;
mod inspect;
mod node;
mod router;
mod sweep;
mod topology;

pub use inspect::{Inspector, KeyReport, Primary};
pub use topology::Address;

use crate::config::Config;
use crate::marker::Marker;
use crate::state::MAX_IN_FLIGHT;
use crate::work::{Outcome, Work, WorkId};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Answers and changes between the tasks and the loop. Each is a batch; the loop takes them before anything else.
const REPORTS: usize = 256;

/// What the loop asks for.
#[derive(Debug)]
pub enum Request {
    /// Change these keys; each is answered, however long it takes.
    Apply(Vec<Work>),
    /// Read the marker of every primary once all are connected.
    Recall,
    /// Write the marker to every primary, unless one was connected after `generation`.
    Remember {
        /// The newest connection that the writer of the marker knows of.
        generation: u64,
        /// What to write.
        marker: Marker,
        /// Dropped by everybody once it is written wherever it can be.
        waiting: Option<mpsc::Sender<()>>,
    },
    /// Forget every key below the prefixes on every primary, instead of a sweep under way.
    Sweep(u32),
}

/// What the tasks report.
#[derive(Debug)]
pub enum Report {
    /// These are applied.
    Answered(Vec<Answer>),
    /// A primary was connected anew.
    Connected {
        /// Rises with every connection.
        generation: u64,
        /// What it remembers, or without a marker of its own the oldest of the others.
        marker: Marker,
    },
    /// The answer to [`Request::Recall`].
    Recalled {
        /// As above.
        generation: u64,
        /// The oldest of all.
        marker: Marker,
    },
    /// A sweep is done, and how many keys it forgot.
    Swept(u32, u64),
    /// Every primary of the newest map is connected.
    Complete,
    /// A primary or the map of them cannot be reached, and why; [`Report::Complete`] follows when it can.
    Lost(String),
    /// A connected primary refuses for now, and why; answers follow when it no longer does.
    Trouble(String),
}

/// One applied record.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What was asked.
    pub work: Work,
    /// How it ended.
    pub outcome: Outcome,
    /// When the reply came: microseconds since 1970, our clock.
    pub applied_us: i64,
}

impl Answer {
    /// Names the record.
    pub fn id(&self) -> WorkId {
        self.work.id
    }
}

/// Handle of the cache's tasks; dropping it ends them.
pub struct Cache {
    requests: mpsc::Sender<Request>,
    reports: mpsc::Receiver<Report>,
    router: tokio::task::JoinHandle<()>,
}

impl Cache {
    /// Starts the tasks; they connect on their own and for ever. Needs a tokio runtime.
    pub fn start(config: &Config) -> Self {
        // Every batch holds at least one record in flight, so work alone cannot fill it; markers and recalls are a few a second.
        let (requests, inbox) = mpsc::channel(2 * MAX_IN_FLIGHT);
        let (outbox, reports) = mpsc::channel(REPORTS);
        let router = tokio::spawn(router::run(config.clone(), inbox, outbox));
        Self { requests, reports, router }
    }

    /// Hands a request over; never waits.
    pub fn request(&self, request: Request) {
        if self.requests.try_send(request).is_err() {
            unreachable!("the queue holds more batches than records may be in flight, and the router lives as long as self");
        }
    }

    /// Writes a marker and waits until it is written on every connected primary, or until `patience` is over.
    pub async fn remember(&self, generation: u64, marker: Marker, patience: Duration) {
        let (waiting, mut written) = mpsc::channel(1);
        self.request(Request::Remember { generation, marker, waiting: Some(waiting) });
        // Nobody sends; the channel closes when the last holder is done.
        let _ = timeout(patience, written.recv()).await;
    }

    /// The next report. Cancel safe.
    pub async fn next(&mut self) -> Report {
        match self.reports.recv().await {
            Some(report) => report,
            // The router only ends with self; a panic in it must not look like silence.
            None => panic!("the cache router has ended"),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.router.abort();
    }
}
