//! The loop: wake → claim → publish → settle → retire.
//!
//! A few workers, each with a session of its own, share a baton. Who holds it waits for the wake-up and runs its claim, then passes it on and publishes: within
//! one relay claims never run at the same time (they would step over each other's locks), and publishing overlaps with the next claim. A look-behind worker claims
//! what the quick scan passes over, and heartbeats go out beside them.

use crate::broker::producer::Publisher;
use crate::broker::{BrokerTrouble, tail as topic_tail};
use crate::config::Config;
use crate::error::Error;
use crate::failing::Failing;
use crate::heartbeat;
use crate::metrics::{ClaimOutcome, Metrics, WakeMode};
use crate::outbox::Session;
use crate::outbox::claim::{Claim, Claimed};
use crate::outbox::epoch::Raised;
use crate::pace::{Pace, period};
use crate::patience::Patience;
use crate::plan::{Context, Plan, Reason, Row, plan};
use crate::settle::{Outcome, Settlement, done, settle};
use crate::tail::{self, Tail, TailWake};
use crate::wake::{Sign, Timer, Wake};
use prometheus_client::registry::Registry;
use recant_schema::invalidation::Source;
use recant_schema::labels::EpochCause;
use recant_schema::service::health::Health;
use recant_schema::service::http;
use recant_schema::service::shutdown::Shutdown;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tracing::{debug, error, info, warn};
use uuid::Uuid;

/// Components of `/readyz`.
pub(crate) const POSTGRES: &str = "postgres";
pub(crate) const KAFKA: &str = "kafka";
pub(crate) const HEARTBEAT: &str = "heartbeat";

/// What all tasks of one relay share.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Metrics,
    pub(crate) health: Health,
    pub(crate) shutdown: Shutdown,
    /// A topic fails.
    pub(crate) topic_failed: Notify,
    failing: Mutex<Failing>,
    /// `None`: wake-ups come from the timer only.
    pub(crate) tail: Option<Arc<Tail>>,
    /// Claims that hold rows.
    in_flight: watch::Sender<u32>,
    pace: Mutex<Pace>,
    started: Instant,
}

/// Runs a relay until `shutdown`. Postgres or Kafka going away is survived; it shows in `/readyz`.
///
/// # Errors
/// When the HTTP address is taken, librdkafka refuses its options, or a task panics.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let health = Health::new(&[POSTGRES, KAFKA, HEARTBEAT]);
    let listener = match config.http_address {
        Some(address) => Some(http::bind(address).await.map_err(Error::Http)?),
        None => None,
    };
    let publisher = Publisher::new(&config).map_err(Error::BrokerSetUp)?;
    let pace = Mutex::new(Pace::new(config.claim_limit));
    let config = Arc::new(config);
    let shared = Arc::new(Shared {
        tail: config.tail.is_some().then(Arc::default),
        config,
        publisher,
        metrics,
        health,
        shutdown: shutdown.clone(),
        topic_failed: Notify::new(),
        failing: Mutex::default(),
        in_flight: watch::Sender::new(0),
        pace,
        started: Instant::now(),
    });

    let mut tasks = JoinSet::new();
    if let Some(listener) = listener {
        let serving = http::serve(listener, registry, shared.health.clone(), shutdown.clone());
        tasks.spawn(async move { serving.await.map_err(|error| Error::Http(error.to_string())) });
    }
    start_claims(&mut tasks, &shared);
    tasks.spawn(look_behind(shared.clone()));
    tasks.spawn(heartbeat::beat(shared.clone()));
    info!(relay = shared.config.relay_name, source = shared.config.source_name, "relay started");

    let (outcome, deadline) = supervise(&mut tasks, &shared).await;
    shared.publisher.flush(deadline.saturating_duration_since(Instant::now())).await;
    info!(relay = shared.config.relay_name, "relay stopped");
    outcome
}

/// Starts the workers, woken by the tail where one is configured, and by the timer alone otherwise.
fn start_claims(tasks: &mut JoinSet<Result<(), Error>>, shared: &Arc<Shared>) {
    let longest = shared.config.timer_longest;
    shared.metrics.wake_mode(WakeMode::Timer);
    match (&shared.tail, &shared.config.tail) {
        (Some(tail), Some(login)) => {
            let wake = TailWake::new(tail.clone(), longest, shared.in_flight.subscribe(), shared.metrics.clone());
            take_turns(tasks, shared, wake);
            tasks.spawn(tail::follow(shared.clone(), tail.clone(), login.clone()));
        }
        _ => take_turns(tasks, shared, Timer::new(longest)),
    }
}

fn take_turns<W: Wake>(tasks: &mut JoinSet<Result<(), Error>>, shared: &Arc<Shared>, wake: W) {
    let baton = Arc::new(tokio::sync::Mutex::new(wake));
    for number in 1..=shared.config.claims_in_flight {
        tasks.spawn(claim_in_turn(shared.clone(), baton.clone(), number));
    }
}

/// Waits for the request to stop, or for a task that ends by itself, which is a failure. Then gives all of them the grace period. Returns its end too: what
/// is left of it is all that may still be waited for.
async fn supervise(tasks: &mut JoinSet<Result<(), Error>>, shared: &Shared) -> (Result<(), Error>, Instant) {
    let first = tokio::select! {
        () = shared.shutdown.wait() => None,
        ended = tasks.join_next() => ended,
    };
    let mut outcome = flatten(first);
    shared.shutdown.request();
    let deadline = Instant::now() + shared.config.shutdown_grace;
    let finish = async {
        while let Some(ended) = tasks.join_next().await {
            if outcome.is_ok() {
                outcome = flatten(Some(ended));
            }
        }
    };
    if tokio::time::timeout_at(deadline.into(), finish).await.is_err() {
        warn!("the grace period is over; claims in flight are rolled back and will be repeated");
        // Dropping a claim's session ends its transaction.
        tasks.shutdown().await;
    }
    (outcome, deadline)
}

fn flatten(ended: Option<Result<Result<(), Error>, tokio::task::JoinError>>) -> Result<(), Error> {
    match ended {
        None => Ok(()),
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(Error::Task(error)),
    }
}

/// One worker: claims whenever it gets the baton.
async fn claim_in_turn<W: Wake>(shared: Arc<Shared>, baton: Arc<tokio::sync::Mutex<W>>, number: u32) -> Result<(), Error> {
    let mut session = None;
    let mut patience = Patience::default();
    while !shared.shutdown.requested() {
        let turn = shared.turn(&mut session, &baton, number).await;
        patience.settle(&shared, turn, &mut session).await?;
    }
    close(session).await;
    Ok(())
}

/// Claims what lies below the start of the quick scan: rows of long transactions, and what dead relays released.
async fn look_behind(shared: Arc<Shared>) -> Result<(), Error> {
    let mut session = None;
    let mut patience = Patience::default();
    let mut pause = period(Duration::ZERO);
    loop {
        tokio::select! {
            () = shared.shutdown.wait() => break,
            () = tokio::time::sleep(pause) => {}
        }
        let began = Instant::now();
        let turn = shared.turn_behind(&mut session).await;
        // At once again while it comes back full: rows that were passed over have waited long enough.
        pause = if matches!(turn, Ok(true)) { Duration::ZERO } else { period(began.elapsed()) };
        patience.settle(&shared, turn.map(drop), &mut session).await?;
    }
    close(session).await;
    Ok(())
}

async fn close(session: Option<Session>) {
    if let Some(session) = session {
        session.close().await;
    }
}

impl Shared {
    pub(crate) fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One line per outage.
    pub(crate) fn report(&self, component: &'static str, error: &Error) {
        let line = error.line();
        if self.health.failed(component, line.clone()) {
            warn!(component, error = line, "interrupted; trying again until it works");
        } else {
            debug!(component, error = line, "still interrupted");
        }
    }

    pub(crate) fn recovered(&self, component: &'static str) {
        if self.health.recovered(component) {
            info!(component, "working");
        }
    }

    fn failing(&self) -> MutexGuard<'_, Failing> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What claims leave alone.
    fn waiting(&self) -> Vec<String> {
        self.failing().pins(&self.config.topics, &self.config.regions)
    }

    /// These topics take no records. One line when there are new ones among them.
    pub(crate) fn topics_fail(&self, topics: &BTreeMap<String, BrokerTrouble>) {
        let (news, names) = {
            let mut failing = self.failing();
            let news = topics.iter().filter(|(topic, trouble)| failing.failed(topic, **trouble)).count();
            (news, failing.names())
        };
        if !topics.is_empty() {
            self.topic_failed.notify_one();
        }
        if news > 0 {
            warn!(component = KAFKA, error = Error::BrokerTopicsFailing(names).line(), "rows for some topics wait; the others go on");
        }
    }

    /// These topics take records.
    pub(crate) fn topics_work(&self, topics: &BTreeSet<String>) {
        for topic in topics {
            let news = self.failing().works(topic);
            if news {
                // Its rows lie below the start of the scan by now.
                self.pace().reset();
                info!(topic, "the topic takes records again");
            }
        }
    }

    /// Kafka answers: it works, except for topics that fail.
    pub(crate) fn kafka_answers(&self) {
        let names = self.failing().names();
        if names.is_empty() {
            self.recovered(KAFKA);
        } else {
            // Told when it was news.
            self.health.failed(KAFKA, Error::BrokerTopicsFailing(names).line());
        }
    }

    /// The task's session, opened if there is none.
    pub(crate) async fn session<'a>(&self, slot: &'a mut Option<Session>, purpose: &str) -> Result<&'a mut Session, Error> {
        if slot.is_none() {
            let open = Session::open(&self.config.database_url, &self.config.relay_name, purpose);
            *slot = Some(open.await.map_err(Error::OutboxConnect)?);
        }
        Ok(slot.as_mut().expect("filled above"))
    }

    /// One quick claim, from the wake-up to the retirement.
    async fn turn<W: Wake>(&self, slot: &mut Option<Session>, baton: &tokio::sync::Mutex<W>, number: u32) -> Result<(), Error> {
        let fresh = slot.is_none();
        let session = self.session(slot, &format!("claim {number}")).await?;
        if fresh {
            self.pace().reset();
        }
        let mut wake = tokio::select! {
            () = self.shutdown.wait() => return Ok(()),
            wake = baton.lock() => wake,
        };
        let sign = tokio::select! {
            () = self.shutdown.wait() => return Ok(()),
            sign = wake.wait() => sign,
        };
        self.health.turn();
        let (scan, idle) = {
            let pace = self.pace();
            (pace.quick(), pace.idle())
        };
        let peek = idle && sign == Sign::Silence;
        if peek && let Some(last_value) = session.nothing_above(scan.above).await.map_err(Error::OutboxClaim)? {
            wake.claimed(0, false, 0);
            self.recovered(POSTGRES);
            self.pace().claimed(scan, 0, last_value, self.now_ms());
            return Ok(());
        }
        let (claim, claimed) = session.claim(scan, &self.waiting()).await.map_err(Error::OutboxClaim)?;
        let rows = claimed.rows.len();
        let position = claimed.rows.iter().map(|row| row.position).max().unwrap_or(0);
        wake.claimed(rows, rows >= scan.limit as usize, position);
        let Some(epoch) = claimed.epoch else {
            claim.release().await.map_err(Error::OutboxClaim)?;
            self.metrics.claim(ClaimOutcome::NotValid);
            // Still holding the baton: nobody else of this relay can claim before that anyway.
            return self.raise(session).await;
        };
        self.recovered(POSTGRES);
        self.pace().claimed(scan, rows, claimed.last_value, self.now_ms());
        if rows == 0 {
            self.metrics.claim(ClaimOutcome::Empty);
            return claim.release().await.map_err(Error::OutboxClaim);
        }
        // Before the baton goes on: whoever has it next may want to wait for this claim.
        let in_flight = InFlight::new(self);
        drop(wake);
        self.deliver(claim, claimed, epoch, in_flight).await
    }

    /// One claim of the look-behind. Says whether it came back full.
    async fn turn_behind(&self, slot: &mut Option<Session>) -> Result<bool, Error> {
        let Some(scan) = self.pace().behind() else { return Ok(false) };
        let session = self.session(slot, "look-behind").await?;
        let (claim, claimed) = session.claim(scan, &self.waiting()).await.map_err(Error::OutboxClaim)?;
        let full = claimed.rows.len() >= scan.limit as usize;
        match claimed.epoch {
            Some(epoch) if !claimed.rows.is_empty() => self.deliver(claim, claimed, epoch, InFlight::new(self)).await?,
            // Nothing there, or not vouched for: the quick claims raise the epoch.
            _ => claim.release().await.map_err(Error::OutboxClaim)?,
        }
        Ok(full)
    }

    /// Publishes a claim, retires its rows, and gives back those whose records did not get through.
    async fn deliver(
        &self,
        mut claim: Claim<'_>,
        claimed: Claimed,
        (epoch, cause): (u64, Option<EpochCause>),
        _in_flight: InFlight<'_>,
    ) -> Result<(), Error> {
        let began = Instant::now();
        let source = Source { database: self.config.source_name.clone(), relay: self.config.relay_name.clone(), epoch_cause: cause };
        let plan = plan(&claimed.rows, &Context { epoch, source: &source, regions: &self.config.regions }, Uuid::now_v7);
        self.metrics.stamped_with(epoch);
        self.metrics.claimed_rows.inc_by(claimed.rows.len() as u64);

        let published = self.publisher.publish(&self.config.topics, &plan.records).await;
        for trouble in &published.failures {
            self.metrics.publish_failure(*trouble);
        }
        self.topics_fail(&published.failing);
        let with_reason =
            |set_aside: &[(usize, Reason)]| set_aside.iter().map(|(at, reason)| (&claimed.rows[*at], *reason)).collect::<Vec<_>>();
        match settle(&plan.records, &plan.set_aside, &published.outcomes) {
            Settlement::Retire { set_aside } => {
                let set_aside = with_reason(&set_aside);
                claim.set_aside(&set_aside).await.map_err(Error::OutboxRetire)?;
                claim.retire().await.map_err(Error::OutboxRetire)?;
                self.metrics.claimed_to_acked.observe(began.elapsed().as_secs_f64());
                self.metrics.claim(ClaimOutcome::Retired);
                self.count_retired(&claimed, &plan, &published.outcomes, &set_aside);
            }
            Settlement::Part { retired, set_aside } => {
                let set_aside = with_reason(&set_aside);
                let retired: Vec<_> = retired.iter().map(|at| &claimed.rows[*at]).collect();
                claim.retire_part(&retired, &set_aside).await.map_err(Error::OutboxRetire)?;
                self.metrics.claim(ClaimOutcome::Released);
                self.count_retired(&claimed, &plan, &published.outcomes, &set_aside);
            }
            Settlement::Release => {
                self.metrics.claim(ClaimOutcome::Released);
                claim.release().await.map_err(Error::OutboxRetire)?;
            }
        }
        // What was given back is claimed again at once where its topics are not known to fail; a broker that is away gets time.
        if let Some(fault) = published.fault {
            return Err(Error::BrokerPublish(fault));
        }
        if !plan.records.is_empty() {
            self.kafka_answers();
        }
        Ok(())
    }

    /// The claim found no epoch that is vouched for. The topics are read first: while Kafka is away, nothing could be published anyway.
    async fn raise(&self, session: &mut Session) -> Result<(), Error> {
        let config = self.config.clone();
        let published =
            tokio::task::spawn_blocking(move || topic_tail::read(&config)).await.map_err(Error::Task)?.map_err(Error::BrokerTail)?;
        match session.raise_epoch(published).await.map_err(Error::OutboxEpoch)? {
            Raised::Here(epoch, cause) if cause.loses_commits() => {
                self.metrics.raised(epoch, cause);
                error!(epoch, cause = cause.as_str(), "commits may be lost that caches still show; each region's gap policy has to run");
            }
            Raised::Here(epoch, cause) => {
                self.metrics.raised(epoch, cause);
                info!(epoch, cause = cause.as_str(), "epoch raised");
            }
            Raised::Elsewhere(epoch) => info!(epoch, "another relay raised the epoch"),
        }
        Ok(())
    }

    /// Counts what was published, once it is certain: what is given back and taken again must not be measured twice.
    fn count_retired(&self, claimed: &Claimed, plan: &Plan, outcomes: &[(usize, Outcome)], set_aside: &[(&Row, Reason)]) {
        let done = done(&plan.records, outcomes);
        for (record, _) in plan.records.iter().zip(&done).filter(|(_, done)| **done) {
            self.metrics.coalesced_rows.inc_by(record.rows.len() as u64 - 1);
            self.metrics.observe_commit_to_claimed(claimed.clock_us.saturating_sub(record.invalidation.committed_at_us));
        }
        for (index, outcome) in outcomes {
            if *outcome == Outcome::Acknowledged && done[*index] {
                let invalidation = &plan.records[*index].invalidation;
                self.metrics.published(invalidation.regions.is_some(), invalidation.lane, 1);
            }
        }
        for (_, reason) in set_aside {
            self.metrics.set_aside(*reason);
        }
        // One line per claim, however many rows: a person looks at the table anyway.
        if let Some((first, reason)) = set_aside.first() {
            let (count, row, reason) = (set_aside.len(), first.id, reason.as_str());
            error!(count, row, reason, "outbox rows cannot be published and were set aside; see recant.set_aside");
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Counts a claim while it holds rows, also when its task is dropped.
struct InFlight<'a>(&'a Shared);

impl<'a> InFlight<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.metrics.claims_in_flight.inc();
        shared.in_flight.send_modify(|claims| *claims += 1);
        Self(shared)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.metrics.claims_in_flight.dec();
        self.0.in_flight.send_modify(|claims| *claims -= 1);
    }
}
