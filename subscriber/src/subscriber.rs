//! The loop: wait for what happens, let [`State`] decide, perform what it decided. Waiting and doing are here, deciding is not.

use crate::broker::{DeadLetters, Live, LiveEvent, Locator, Replay, ReplayEvent};
use crate::cache::{Answer, Cache, Report, Request};
use crate::config::{Config, GapPolicy};
use crate::error::Error;
use crate::marker::{GapCause, Partition};
use crate::metrics::{Metrics, seconds};
use crate::progress::Point;
use crate::state::{Action, Effect, State, TICK_MS};
use crate::work::DeadLetter;
use prometheus_client::registry::Registry;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use recant_schema::service::health::Health;
use recant_schema::service::retry::Retry;
use recant_schema::service::shutdown::Shutdown;
use recant_schema::service::{clock, http};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until, timeout};

/// First and longest wait before asking Kafka again, or publishing a dead letter again.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Longest wait for the last marker to be written, and for the group to be left: both take milliseconds when the servers are there.
const MARKER_PATIENCE: Duration = Duration::from_secs(1);
const LEAVE_PATIENCE: Duration = Duration::from_secs(1);

/// At most one log line about poison records in this time; the metric counts them all.
const POISON_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// How often gauges are brought up to date.
const GAUGES: Duration = Duration::from_secs(1);

const KAFKA: &str = "kafka";
const REDIS: &str = "redis";

/// Runs until `shutdown`, then stops cleanly within the grace period.
///
/// Kafka or Redis being away is survived, shown in `/readyz` and logged once.
///
/// # Errors
/// [`Error::Http`] and [`Error::BrokerClient`] at the start; later [`Error::BrokerFatal`] and, with that policy, [`Error::Gap`].
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let listener = http::bind(config.http_address).await.map_err(Error::Http)?;
    let labels = [(Cow::Borrowed("region"), Cow::Owned(config.region.as_str().to_owned()))].into_iter();
    let mut registry = Registry::with_prefix_and_labels("subscriber", labels);
    let metrics = Metrics::new(&mut registry);
    let health = Health::new(&[KAFKA, REDIS]);
    let stop_serving = Shutdown::new();
    let serving = tokio::spawn(http::serve(listener, registry, health.clone(), stop_serving.clone()));
    let grace = config.shutdown_grace;
    tracing::info!(region = config.region.as_str(), group = config.group, "subscriber started");
    let mut subscriber = Subscriber::new(config, metrics, health)?;
    let deadline = async {
        shutdown.wait().await;
        sleep_until(Instant::now() + grace).await;
    };
    let result = tokio::select! {
        result = subscriber.turn_until_closed(&shutdown) => result,
        () = deadline => {
            tracing::warn!(grace_ms = grace.as_millis(), "the grace period is over; what is unfinished is read again at the next start");
            // Without a farewell: the group gives the partitions away when the session times out.
            std::mem::forget(subscriber);
            return Ok(());
        }
    };
    // Leaving the group is a courtesy to the other members; a broker that is away must not hold the process up.
    if timeout(LEAVE_PATIENCE.min(grace), tokio::task::spawn_blocking(move || drop(subscriber))).await.is_err() {
        tracing::warn!("Kafka did not answer while leaving the group");
    }
    stop_serving.request();
    serving.abort();
    tracing::info!("subscriber stopped");
    result
}

struct Subscriber {
    config: Config,
    state: State,
    cache: Cache,
    live: Live,
    replay: Replay,
    locator: Locator,
    dead_letters: DeadLetters,
    metrics: Metrics,
    health: Health,
    /// Questions to Kafka under way, with the partitions that they are about.
    locating: Vec<(BTreeSet<Partition>, JoinHandle<()>)>,
    /// Dead letters under way; as many as poison records may be in flight.
    setting_aside: JoinSet<()>,
    sender: mpsc::UnboundedSender<Action>,
    /// What tasks of ours have found out; at most one entry for each of them.
    inbox: mpsc::UnboundedReceiver<Action>,
    redis_lost: bool,
    /// The ends of the owned partitions as the broker last said, and the question under way.
    ends: Arc<Mutex<HashMap<Partition, i64>>>,
    asking_ends: Option<JoinHandle<()>>,
    /// Live records were taken last; records of a replay come first next time, so that neither starves.
    replay_first: bool,
    poison_logged: Option<Instant>,
    /// Why the loop stops by itself, once it has drained.
    failure: Option<Error>,
}

/// What the loop waits for.
enum Happening {
    Action(Action),
    Cache(Report),
    Live(LiveEvent),
    Replay(u32, ReplayEvent),
    GaugesDue,
}

impl Subscriber {
    fn new(config: Config, metrics: Metrics, health: Health) -> Result<Self, Error> {
        let (sender, inbox) = mpsc::unbounded_channel();
        Ok(Self {
            state: State::new(config.key_prefixes.clone(), config.consumed_topics(), config.gap_policy == GapPolicy::Sweep),
            cache: Cache::start(&config),
            live: Live::join(&config)?,
            replay: Replay::default(),
            locator: Locator::new(&config)?,
            dead_letters: DeadLetters::new(&config)?,
            metrics,
            health,
            locating: Vec::new(),
            setting_aside: JoinSet::new(),
            sender,
            inbox,
            redis_lost: true,
            ends: Arc::default(),
            asking_ends: None,
            replay_first: false,
            poison_logged: None,
            failure: None,
            config,
        })
    }

    async fn turn_until_closed(&mut self, shutdown: &Shutdown) -> Result<(), Error> {
        let (mut commit, mut marker, mut gauges) = (every(self.config.commit_interval), every(self.config.marker_interval), every(GAUGES));
        let mut tick = every(Duration::from_millis(TICK_MS));
        let mut stopping = false;
        loop {
            let wants = (self.state.wants_live(), self.state.wants_replay());
            let happening = tokio::select! {
                biased;
                () = shutdown.wait(), if !stopping => {
                    stopping = true;
                    Happening::Action(Action::Stop)
                }
                report = self.cache.next() => Happening::Cache(report),
                Some(action) = self.inbox.recv() => Happening::Action(action),
                _ = tick.tick() => Happening::Action(Action::Tick),
                _ = commit.tick() => Happening::Action(Action::CommitDue),
                _ = marker.tick() => Happening::Action(Action::MarkerDue),
                _ = gauges.tick() => Happening::GaugesDue,
                records = next_records(&mut self.live, &mut self.replay, wants, self.replay_first) => records,
            };
            self.replay_first = matches!(happening, Happening::Live(_));
            self.health.turn();
            let Some(action) = self.observe(happening)? else { continue };
            let mut effects = self.state.apply(action);
            if self.config.gap_policy == GapPolicy::Stop && effects.iter().any(|effect| matches!(effect, Effect::Gap { .. })) {
                // After draining: the marker written on the way out says that this gap was met, so the next start does not meet it again.
                effects.extend(self.state.apply(Action::Stop));
            }
            for effect in effects {
                if self.perform(effect).await? {
                    return self.failure.take().map_or(Ok(()), Err);
                }
            }
        }
    }

    /// Counts and logs what happened; what the state has to know of it comes back.
    fn observe(&mut self, happening: Happening) -> Result<Option<Action>, Error> {
        Ok(match happening {
            Happening::Action(action) => Some(action),
            Happening::Cache(report) => self.observe_cache(report),
            Happening::Live(event) => match event {
                LiveEvent::Assigned(partitions) => {
                    self.kafka_recovered();
                    tracing::info!(partitions = partitions.len(), "partitions assigned");
                    Some(Action::Assigned(partitions))
                }
                LiveEvent::Revoked => Some(Action::Revoked),
                LiveEvent::Records(records) => {
                    self.kafka_recovered();
                    Some(Action::Delivered(records))
                }
                LiveEvent::OutOfRange => {
                    tracing::warn!("the position in some partition is not in its log any more; looking where to go on");
                    Some(Action::LiveOutOfRange)
                }
                LiveEvent::Trouble(error) => {
                    self.kafka_failed(&error);
                    None
                }
                LiveEvent::Fatal(error) => return Err(Error::BrokerFatal(error)),
            },
            Happening::Replay(session, event) => match event {
                ReplayEvent::Records(records) => Some(Action::Replayed { session, records }),
                ReplayEvent::ReachedEnd(partition) => Some(Action::ReplayReachedEnd { session, partition }),
                ReplayEvent::OutOfRange => {
                    tracing::warn!("retention has overtaken a replay; looking where to go on");
                    Some(Action::ReplayOutOfRange { session })
                }
                ReplayEvent::Trouble(error) => {
                    self.kafka_failed(&error);
                    None
                }
            },
            Happening::GaugesDue => {
                self.set_gauges();
                None
            }
        })
    }

    fn observe_cache(&mut self, report: Report) -> Option<Action> {
        match report {
            Report::Answered(answers) => {
                self.metrics.answered(&answers);
                if !self.redis_lost && self.health.recovered(REDIS) {
                    tracing::info!("the cache answers again");
                }
                Some(Action::Answered(answers.iter().map(Answer::id).collect()))
            }
            Report::Connected { generation, marker } => Some(Action::CacheConnected { generation, marker }),
            Report::Recalled { generation, marker } => Some(Action::Recalled { generation, marker }),
            Report::Swept(number, forgotten) => {
                self.metrics.sweeps.inc();
                tracing::info!(forgotten, "the region is swept: every key below the prefixes was forgotten");
                Some(Action::Swept(number))
            }
            Report::Complete => {
                self.redis_lost = false;
                if self.health.recovered(REDIS) {
                    tracing::info!("every primary of the cache is connected");
                }
                None
            }
            Report::Lost(why) => {
                self.redis_lost = true;
                self.redis_failed(why);
                None
            }
            Report::Trouble(why) => {
                self.redis_failed(why);
                None
            }
        }
    }

    fn redis_failed(&self, why: String) {
        if self.health.failed(REDIS, why.clone()) {
            tracing::warn!(error = why, "the cache does not take invalidations; they wait");
        }
    }

    async fn perform(&mut self, effect: Effect) -> Result<bool, Error> {
        match effect {
            Effect::Apply(work) => self.cache.request(Request::Apply(work)),
            Effect::Recall => self.cache.request(Request::Recall),
            Effect::Remember { generation, marker } => {
                self.cache.request(Request::Remember { generation, marker, waiting: None });
            }
            Effect::Commit(next) => self.try_kafka(|live| live.commit(&next)),
            Effect::AssignLive(from) => self.try_kafka(|live| live.assign(&from)),
            Effect::Pause => {
                tracing::warn!("consumption is paused until the cache answers");
                self.try_kafka(Live::pause);
            }
            Effect::Resume => {
                tracing::info!("consumption goes on");
                self.try_kafka(Live::resume);
            }
            Effect::Replay { session, ranges } => {
                if !ranges.is_empty() {
                    let records: i64 = ranges.iter().map(|(_, range)| range.end - range.start).sum();
                    tracing::info!(partitions = ranges.len(), records, "replaying from the cache's marker");
                    self.metrics.replays.inc_by(ranges.len() as u64);
                }
                self.replay.restart(&self.config, session, ranges)?;
            }
            Effect::Locate { request, partitions } => self.locate(request, partitions),
            Effect::DeadLetter(letter) => self.set_aside(letter),
            Effect::Release { generation, marker, next } => {
                self.locating.drain(..).for_each(|(_, task)| task.abort());
                self.cache.remember(generation, marker, MARKER_PATIENCE).await;
                if let Err(error) = self.live.release(&next).await {
                    tracing::warn!(%error, "gave partitions up without a commit; whoever gets them starts at the marker");
                }
            }
            Effect::Gap { cause, detail } => self.gap(cause, detail),
            Effect::Sweep(number) => {
                tracing::warn!(keys_per_second = self.config.sweep_keys_per_second, "sweeping the region because of a gap");
                self.cache.request(Request::Sweep(number));
            }
            Effect::Beat { heartbeat, delivered_us, .. } => {
                self.metrics.heartbeats.inc();
                self.metrics.heartbeat_lag.set(seconds(delivered_us.saturating_sub(heartbeat.committed_at_us)));
            }
            Effect::Close => return Ok(true),
        }
        Ok(false)
    }

    fn try_kafka(&self, attempt: impl FnOnce(&Live) -> Result<(), Error>) {
        if let Err(error) = attempt(&self.live) {
            // Commits follow again at the next interval; assignments change with the next rebalance.
            tracing::warn!(%error, "Kafka refused");
        }
    }

    /// Asks until Kafka answers, unless a later question is about the same partitions.
    fn locate(&mut self, request: u32, partitions: Vec<(Partition, Option<Point>)>) {
        let about: BTreeSet<_> = partitions.iter().map(|(partition, _)| *partition).collect();
        self.locating.retain(|(earlier, task)| {
            if earlier.is_subset(&about) {
                task.abort();
            }
            !task.is_finished() && !earlier.is_subset(&about)
        });
        let (locator, sender, health) = (self.locator.clone(), self.sender.clone(), self.health.clone());
        let task = tokio::spawn(async move {
            let mut retry = Retry::new(FIRST_WAIT, LONGEST_WAIT);
            let mut left = partitions;
            while !left.is_empty() {
                let trouble = match locator.locate(left.clone()).await {
                    Ok(logs) => {
                        left.retain(|(partition, _)| logs.iter().all(|(located, _)| located != partition));
                        if !logs.is_empty() {
                            let _ = sender.send(Action::Located { request, logs });
                        }
                        format!("{} partitions cannot be described, for lack of a leader or of a right", left.len())
                    }
                    Err(error) => error.to_string(),
                };
                if !left.is_empty() {
                    if health.failed(KAFKA, trouble.clone()) {
                        tracing::warn!(error = trouble, "Kafka cannot tell where to start; trying again");
                    }
                    tokio::time::sleep(retry.next_delay()).await;
                }
            }
        });
        self.locating.push((about, task));
    }

    /// Publishes until Kafka takes it: an offset behind it is not committed before.
    fn set_aside(&mut self, letter: Box<DeadLetter>) {
        self.metrics.set_aside(letter.reason);
        while self.setting_aside.try_join_next().is_some() {}
        let (dead_letters, sender) = (self.dead_letters.clone(), self.sender.clone());
        let offset = letter.id.offset;
        if self.poison_logged.is_none_or(|at| at.elapsed() >= POISON_LOG_INTERVAL) {
            self.poison_logged = Some(Instant::now());
            let (topic, partition) = (&self.config.consumed_topics()[letter.id.partition.topic], letter.id.partition.number);
            tracing::warn!(reason = letter.reason.as_str(), detail = letter.detail, topic, partition, offset, "record set aside");
        }
        self.setting_aside.spawn(async move {
            let mut retry = Retry::new(FIRST_WAIT, LONGEST_WAIT);
            let mut reported = false;
            while let Err(error) = dead_letters.publish(&letter).await {
                if !std::mem::replace(&mut reported, true) {
                    tracing::warn!(%error, offset, "a dead letter waits for Kafka; create its topic with relay topics when it is missing");
                }
                tokio::time::sleep(retry.next_delay()).await;
            }
            let _ = sender.send(Action::SetAside(letter.id));
        });
    }

    fn gap(&mut self, cause: GapCause, detail: String) {
        self.metrics.gap(cause);
        tracing::error!(
            ?cause,
            detail,
            "invalidations may be missing: values cached before now may be stale until they expire or the region is swept"
        );
        if self.config.gap_policy == GapPolicy::Stop {
            self.failure.get_or_insert(Error::Gap(detail));
        }
    }

    fn kafka_recovered(&self) {
        if self.health.recovered(KAFKA) {
            tracing::info!("Kafka answers");
        }
    }

    fn kafka_failed(&self, error: &KafkaError) {
        let remedy = match error {
            KafkaError::MessageConsumption(RDKafkaErrorCode::UnknownTopicOrPartition) => "; create the topics with relay topics",
            KafkaError::MessageConsumption(RDKafkaErrorCode::TopicAuthorizationFailed | RDKafkaErrorCode::GroupAuthorizationFailed) => {
                "; grant READ on the topics and the group"
            }
            _ => "",
        };
        if self.health.failed(KAFKA, format!("{error}{remedy}")) {
            tracing::warn!(%error, "trouble with Kafka, trying again{remedy}");
        }
    }

    /// The broker is asked directly: what a consumer knows of the ends stands still while it fetches nothing.
    fn ask_ends(&mut self) {
        if self.asking_ends.as_ref().is_some_and(|asking| !asking.is_finished()) {
            return;
        }
        let partitions: Vec<_> = self.state.settled().map(|(partition, _)| partition).collect();
        let (locator, ends) = (self.locator.clone(), self.ends.clone());
        self.asking_ends = Some(tokio::spawn(async move {
            // What is asked in vain is asked again in a second; the last answer stands meanwhile, and can only be too low.
            if let Ok(answer) = locator.ends(partitions).await {
                *ends.lock().unwrap_or_else(PoisonError::into_inner) = answer;
            }
        }));
    }

    fn set_gauges(&mut self) {
        self.ask_ends();
        let (now_us, ends) = (clock::now_us(), self.ends.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let (mut behind, mut ages) = (0, Vec::new());
        for (partition, settled) in self.state.settled() {
            let next = settled.map_or(0, |point| point.offset + 1);
            behind += ends.get(&partition).map_or(0, |end| (end - next).max(0));
            ages.push(settled.map(|point| seconds(now_us.saturating_sub(point.time_ms.saturating_mul(1000)))));
        }
        // Where nothing is applied yet nobody knows how old the cache's state is, and a number would be a lie.
        let oldest = if ages.contains(&None) { f64::NAN } else { ages.iter().flatten().copied().fold(0.0, f64::max) };
        self.metrics.lag_records.set(behind);
        self.metrics.lag_seconds.set(oldest);
        self.metrics.partitions.set(ages.len() as i64);
        self.metrics.in_flight.set(self.state.in_flight() as i64);
        self.metrics.replaying.set(self.state.replaying() as i64);
        self.metrics.sweeping.set(i64::from(self.state.sweeping()));
        self.metrics.paused.set(i64::from(self.state.is_paused()));
    }
}

/// Fresh records and records of a replay, whichever are wanted; they take turns when both are there. Cancel safe.
async fn next_records(live: &mut Live, replay: &mut Replay, (wants_live, wants_replay): (bool, bool), replay_first: bool) -> Happening {
    let fresh = async { if wants_live { Happening::Live(live.next().await) } else { std::future::pending().await } };
    let replayed = async {
        if !wants_replay {
            std::future::pending::<()>().await;
        }
        let (session, event) = replay.next().await;
        Happening::Replay(session, event)
    };
    if replay_first {
        tokio::select! { biased; records = replayed => records, records = fresh => records }
    } else {
        tokio::select! { biased; records = fresh => records, records = replayed => records }
    }
}

fn every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
