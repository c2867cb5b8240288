//! What a task of the loop does after a failure: try again at once, wait, or give up. Which of them is decided in [`crate::disposition`].

use crate::disposition::{self, Disposition};
use crate::error::Error;
use crate::metrics::ClaimOutcome;
use crate::outbox::{OutboxTrouble, Session};
use crate::relay::{HEARTBEAT, KAFKA, POSTGRES, Shared};
use recant_schema::service::retry::Retry;
use std::time::Duration;
use tracing::debug;

/// First and longest delay after a failure. A claim that fails on Kafka has waited for its time-outs already, and a server that returns should find
/// the relay back within a second.
const RETRY_FIRST: Duration = Duration::from_millis(50);
pub(crate) const RETRY_LONGEST: Duration = Duration::from_secs(1);

/// Lost races and sessions in a row before one counts as an outage: a deadlock resolves itself at the first repetition.
const IMMEDIATE_RETRIES: u32 = 3;

/// What one task remembers of its failures.
pub(crate) struct Patience {
    retry: Retry,
    immediate: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self { retry: Retry::new(RETRY_FIRST, RETRY_LONGEST), immediate: 0 }
    }
}

impl Patience {
    /// Acts on how a turn went: goes on, waits, or gives up.
    pub(crate) async fn settle(&mut self, shared: &Shared, turn: Result<(), Error>, session: &mut Option<Session>) -> Result<(), Error> {
        let Err(error) = turn else {
            self.retry.reset();
            self.immediate = 0;
            return Ok(());
        };
        // Whatever went wrong, rows may be free again below the start of the scan; and after a failure in Postgres the session is not to be trusted.
        shared.pace().reset();
        let mut disposition = disposition::of(&error);
        if component(&error) == POSTGRES {
            shared.metrics.claim(ClaimOutcome::Failed);
            // A session that was open and is lost is replaced at once: opening the next one tells whether this is an outage, or was one
            // that is over already (the look-behind may notice seconds later).
            if session.take().is_some() && error.outbox_fault().is_some_and(|fault| fault.trouble() == OutboxTrouble::Unreachable) {
                disposition = Disposition::RetryNow;
            }
        }
        match disposition {
            Disposition::Fatal => return Err(error),
            Disposition::RetryNow if self.immediate < IMMEDIATE_RETRIES => {
                self.immediate += 1;
                debug!(error = error.line(), "trying again at once");
                return Ok(());
            }
            Disposition::RetryNow | Disposition::BackOff => shared.report(component(&error), &error),
        }
        shared.health.turn();
        tokio::select! {
            () = shared.shutdown.wait() => {}
            () = tokio::time::sleep(self.retry.next_delay()) => {}
        }
        Ok(())
    }
}

/// Which component of `/readyz` an error belongs to.
fn component(error: &Error) -> &'static str {
    match (error.outbox_fault(), error.broker_fault()) {
        (Some(_), _) => POSTGRES,
        (None, Some(_)) => KAFKA,
        (None, None) => HEARTBEAT,
    }
}
