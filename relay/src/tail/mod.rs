//! The tail: wake-ups from the write-ahead log.
//!
//! A logical replication stream of the outbox's inserts, on a temporary slot, that only says "something was committed". No data is taken from it, so losing it
//! loses nothing: versions, visibility and order stay with the claim. Where it cannot be had (`wal_level`, privilege, no free slot, a long
//! transaction) the timer wakes alone, as it does beside it as a safety net, and the tail comes back by itself.
//!
//! Reading order: [`trust`] (when to rely on it), [`loss`] (why there is none), this file (its life), `stream` (the protocol), `login`.

mod login;
pub mod loss;
mod stream;
pub mod trust;

pub use login::Login;

use crate::error::Error;
use crate::metrics::{Metrics, WakeMode};
use crate::relay::Shared;
use crate::wake::{Sign, Wake};
use loss::{Loss, Reason};
use recant_schema::service::retry::Retry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use stream::{Stream, Word};
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};
use trust::{Heard, Trust};

/// First and longest delay before the next attempt. A walsender that was ended is back at once; and making a slot costs the server a look at every running
/// transaction, which every 10 s is nothing.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(10);

/// A stream that broke sooner was no success, and the delay goes on growing.
const SETTLED: Duration = Duration::from_secs(10);

/// Longest wait of an announced claim for the one that is being published: about what Kafka's acknowledgement and the retirement take on a
/// quiet system (0.5 to 1.5 ms), after which it overlaps with a slow one.
const GATHER: Duration = Duration::from_millis(2);

/// What the tail and those who listen to it share.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    state: Mutex<State>,
    /// There is something new in `state` for whoever waits for a claim.
    news: Notify,
    /// The stream has to be closed.
    closing: Notify,
}

#[derive(Debug, Default)]
struct State {
    heard: Heard,
    slot: Option<String>,
    retained: Option<Loss>,
}

impl Tail {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves plain data behind; it stays usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self) -> Heard {
        self.lock().heard
    }

    /// What was heard; the rows are taken note of.
    fn take(&self) -> Heard {
        let mut state = self.lock();
        let heard = state.heard;
        state.heard.rows = 0;
        heard
    }

    fn opened(&self, slot: &str) {
        let mut state = self.lock();
        state.heard.alive = true;
        state.heard.life += 1;
        state.slot = Some(slot.to_owned());
        drop(state);
        self.news.notify_one();
    }

    fn hear(&self, word: Word) {
        let (Word::Committed { position, .. } | Word::Nothing { position }) = word;
        let mut state = self.lock();
        state.heard.position = state.heard.position.max(position);
        if let Word::Committed { rows, .. } = word
            && rows > 0
        {
            state.heard.rows += rows;
            drop(state);
            self.news.notify_one();
        }
    }

    fn lost(&self) {
        let mut state = self.lock();
        state.heard.alive = false;
        // The next life may read another history, where this position means nothing.
        state.heard.position = 0;
        (state.slot, state.retained) = (None, None);
        drop(state);
        self.news.notify_one();
    }

    /// The slot of the living stream.
    pub(crate) fn slot(&self) -> Option<String> {
        self.lock().slot.clone()
    }

    /// So much log is kept for the slot: more than `bound` bytes close the stream, whatever the reason.
    pub(crate) fn retained(&self, slot: &str, bytes: u64, bound: u64) {
        let mut state = self.lock();
        if bytes > bound && state.slot.as_deref() == Some(slot) {
            let text = format!("the slot kept {} MB of log, {} are allowed", bytes >> 20, bound >> 20);
            state.retained = Some(Loss::new(Reason::Retained, text));
            drop(state);
            self.closing.notify_one();
        }
    }

    async fn closed(&self) -> Loss {
        loop {
            if let Some(loss) = self.lock().retained.take() {
                return loss;
            }
            self.closing.notified().await;
        }
    }
}

/// Keeps a stream open until shutdown.
pub(crate) async fn follow(shared: Arc<Shared>, tail: Arc<Tail>, login: Login) -> Result<(), Error> {
    let mut retry = Retry::new(RETRY_FIRST, RETRY_LONGEST);
    let mut news = true;
    loop {
        let began = Instant::now();
        let loss = tokio::select! {
            () = shared.shutdown.wait() => break,
            loss = live(&shared, &tail, &login, &mut news) => match loss {
                Some(loss) => loss,
                None => break,
            },
        };
        tail.lost();
        shared.metrics.wake_mode(WakeMode::Timer);
        shared.metrics.tail_lost(loss.reason);
        shared.metrics.tail_retained_bytes.set(0);
        let (reason, line) = (loss.reason.as_str(), loss.line());
        // One line per outage, however often it is tried again.
        if std::mem::take(&mut news) {
            warn!(reason, error = line, "no wake-ups from the log; the timer wakes, and the tail is tried again");
        } else {
            debug!(reason, error = line, "still no wake-ups from the log");
        }
        if began.elapsed() > SETTLED {
            retry.reset();
        }
        tokio::select! {
            () = shared.shutdown.wait() => break,
            () = tokio::time::sleep(retry.next_delay()) => {}
        }
    }
    tail.lost();
    Ok(())
}

/// One stream, from its opening to its loss; `None` after a shutdown.
async fn live(shared: &Shared, tail: &Tail, login: &Login, news: &mut bool) -> Option<Loss> {
    let mut stream = match Stream::open(login, &shared.config.relay_name).await {
        Ok(stream) => stream,
        Err(loss) => return Some(loss),
    };
    tail.opened(stream.slot());
    shared.metrics.wake_mode(WakeMode::Tail);
    info!(slot = stream.slot(), "wake-ups come from the log");
    *news = true;
    let listen = async {
        loop {
            match stream.next().await {
                Ok(word) => tail.hear(word),
                Err(loss) => return loss,
            }
        }
    };
    let loss = tokio::select! {
        () = shared.shutdown.wait() => None,
        loss = tail.closed() => Some(loss),
        loss = listen => Some(loss),
    };
    if loss.is_none() {
        stream.close().await;
    }
    loss
}

/// Opens a stream and closes it again, for `relay check`; the cluster's system identifier.
///
/// # Errors
/// Why there would be no tail.
pub async fn probe(login: &Login, name: &str) -> Result<String, Loss> {
    let stream = Stream::open(login, name).await?;
    let cluster = stream.cluster().to_owned();
    stream.close().await;
    Ok(cluster)
}

/// Waits for the tail's word, with the timer beside it.
pub(crate) struct TailWake {
    tail: Arc<Tail>,
    trust: Trust,
    /// Claims that are being published.
    in_flight: watch::Receiver<u32>,
    metrics: Metrics,
}

impl TailWake {
    pub(crate) fn new(tail: Arc<Tail>, longest: Duration, in_flight: watch::Receiver<u32>, metrics: Metrics) -> Self {
        Self { tail, trust: Trust::new(longest), in_flight, metrics }
    }
}

impl Wake for TailWake {
    async fn wait(&mut self) -> Sign {
        loop {
            let pause = self.trust.pause(&self.tail.heard());
            if pause.is_zero() {
                break;
            }
            tokio::select! {
                // Perhaps old news; the pause says.
                () = self.tail.news.notified() => {}
                () = tokio::time::sleep(pause) => break,
            }
        }
        if self.trust.gathers(&self.tail.heard()) {
            // Closed only when the relay ends; and a slow claim is not waited for.
            let _ = tokio::time::timeout(GATHER, self.in_flight.wait_for(|claims| *claims == 0)).await;
        }
        let sign = self.trust.woken(&self.tail.take());
        self.metrics.woken(sign);
        sign
    }

    fn claimed(&mut self, rows: usize, full: bool, position: u64) {
        if self.trust.claimed(rows, full, position) {
            self.metrics.unannounced_claims.inc();
            debug!(rows, "the tail had not announced what a claim has found; the timer wakes until it has caught up");
        }
    }
}
