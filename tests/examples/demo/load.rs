//! The traffic: writers, readers in every region, probes.

use crate::ledger::Ledger;
use crate::probe::Prober;
use crate::redis_client;
use crate::settings::{REGIONS, Settings};
use crate::stage::{PRODUCTS, Stage};
use crate::storefront::{self, End, Product, Storefront, product_key};
use crate::tally::{LeftBehind, Tally};
use anyhow::{Context as _, anyhow};
use recant_schema::service::shutdown::Shutdown;
use recant_schema::version::{Version, parse_canonical};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

/// Writers at once: enough that commits overlap, few enough for two cores.
const WRITERS: u32 = 4;
/// Readers at once in each region; they share one connection.
const READERS: u32 = 8;
/// One transaction in so many rolls back, so that one can see that nothing comes of it.
const ROLLED_BACK_ONE_IN: u64 = 10;
/// 20 probes a second: 400 in a default run, so that the 99th percentile has four samples above it, at a tenth of the writers' load.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
/// How long the planted reader dawdles between load and SET: the hottest product changes several times meanwhile.
const DAWDLE: Duration = Duration::from_secs(1);
/// How long everything may take to arrive once the writers have stopped: the services' longest retry delays are shorter.
const SETTLE_DEADLINE: Duration = Duration::from_secs(10);
/// How often it is looked at whether it has.
const SETTLE_LOOK: Duration = Duration::from_millis(20);

/// The running traffic.
pub(crate) struct Load {
    stop: Shutdown,
    tasks: JoinSet<anyhow::Result<()>>,
    prober: Arc<Prober>,
}

impl Load {
    pub(crate) async fn start(settings: &Settings, stage: &Stage, tally: &Arc<Tally>) -> anyhow::Result<Self> {
        let prober = Arc::new(Prober::start(stage.database.clone(), &settings.redis_urls, tally).await?);
        let mut load = Self { stop: Shutdown::new(), tasks: JoinSet::new(), prober };
        let ledger = Arc::new(Ledger::new(PRODUCTS));
        for (region, url) in settings.redis_urls.iter().enumerate() {
            let storefront = Storefront::open(stage.database.clone(), url).await?;
            let floors = redis_client::connect(url).await?;
            for number in 0..READERS {
                let reader = Reader {
                    region,
                    storefront: storefront.clone(),
                    floors: floors.clone(),
                    ledger: Arc::clone(&ledger),
                    tally: Arc::clone(tally),
                };
                load.tasks.spawn(reader.run(Pace::new(settings.reads, READERS, number), load.stop.clone()));
            }
            if settings.plant_stale && region == 0 {
                load.tasks.spawn(plant_stale(storefront, load.stop.clone()));
            }
        }
        for number in 0..WRITERS {
            let writer = Writer { database: stage.database.clone(), ledger: Arc::clone(&ledger), tally: Arc::clone(tally) };
            load.tasks.spawn(writer.run(Pace::new(settings.rate, WRITERS, number), load.stop.clone()));
        }
        load.tasks.spawn(probe(Arc::clone(&load.prober), Arc::clone(tally), load.stop.clone()));
        Ok(load)
    }

    /// Returns when a task fails, and not otherwise: each of them runs until it is stopped. Cancel safe.
    pub(crate) async fn first_failure(&mut self) -> anyhow::Error {
        match self.tasks.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(Err(error)) => error.into(),
            Some(Ok(Ok(()))) | None => anyhow!("the load stopped by itself"),
        }
    }

    /// Ends all tasks, each after the transaction or read it is at.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.request();
        while let Some(ended) = self.tasks.join_next().await {
            ended??;
        }
        Ok(())
    }

    /// Waits until every cached product is as new as its row and every probe has arrived; what is not so at the deadline is left behind.
    pub(crate) async fn settle(&self, settings: &Settings, stage: &Stage) -> anyhow::Result<LeftBehind> {
        let rows: Vec<(i64, i64)> = sqlx::query_as("select id, revision from shop.product order by id").fetch_all(&stage.database).await?;
        let deadline = Instant::now() + SETTLE_DEADLINE;
        let mut looks = interval_at(Instant::now(), SETTLE_LOOK);
        loop {
            looks.tick().await;
            let mut products = [0; 2];
            for (region, url) in settings.redis_urls.iter().enumerate() {
                products[region] = older_than_their_rows(url, &rows).await?;
            }
            let missing = self.prober.missing();
            let left = LeftBehind { products, probes: [missing[0], missing[1]] };
            let settled = left.products.iter().chain(&left.probes).all(|count| *count == 0);
            if settled || Instant::now() >= deadline {
                return Ok(left);
            }
        }
    }
}

async fn older_than_their_rows(redis_url: &str, rows: &[(i64, i64)]) -> anyhow::Result<usize> {
    let keys = rows.iter().map(|(id, _)| Ok(product_key(*id)?.to_string())).collect::<anyhow::Result<Vec<_>>>()?;
    let cached: Vec<Option<String>> = redis_client::connect(redis_url).await?.mget(keys).await?;
    let mut older = 0;
    for ((_, revision), text) in rows.iter().zip(cached) {
        if let Some(text) = text
            && Product::decode(&text)?.revision < *revision
        {
            older += 1;
        }
    }
    Ok(older)
}

struct Writer {
    database: PgPool,
    ledger: Arc<Ledger>,
    tally: Arc<Tally>,
}

impl Writer {
    async fn run(self, mut pace: Pace, stop: Shutdown) -> anyhow::Result<()> {
        while pace.next(&stop).await {
            self.change(&mut pace.dice).await.context("a writer")?;
        }
        Ok(())
    }

    async fn change(&self, dice: &mut Dice) -> anyhow::Result<()> {
        let (id, price_cents) = (dice.product(), dice.price_cents());
        if dice.below(ROLLED_BACK_ONE_IN) == 0 {
            storefront::change_price(&self.database, id, price_cents, End::RollBack).await?;
            self.tally.rolled_back.raise();
            return Ok(());
        }
        let revision = storefront::change_price(&self.database, id, price_cents, End::Commit).await?;
        self.tally.committed.raise();
        // The receipt (see `ledger`): a statement of its own, after the commit. No epoch: no relay has claimed anything yet, so no floor exists.
        let receipt = "select (select epoch from recant.source), (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint";
        let (epoch, position): (Option<i64>, i64) = sqlx::query_as(receipt).fetch_one(&self.database).await?;
        if let Some(epoch) = epoch {
            self.ledger.note(id, revision, Version::new(u64::try_from(epoch)?, u64::try_from(position)?));
        }
        Ok(())
    }
}

struct Reader {
    region: usize,
    storefront: Storefront,
    floors: MultiplexedConnection,
    ledger: Arc<Ledger>,
    tally: Arc<Tally>,
}

impl Reader {
    async fn run(mut self, mut pace: Pace, stop: Shutdown) -> anyhow::Result<()> {
        while pace.next(&stop).await {
            self.read_and_judge(pace.dice.product()).await.with_context(|| format!("a reader in {}", REGIONS[self.region]))?;
        }
        Ok(())
    }

    /// The floor first, then the read as any product service does it, then the verdict of the ledger.
    async fn read_and_judge(&mut self, id: i64) -> anyhow::Result<()> {
        let floor = self.floor(id).await?;
        let (product, source) = self.storefront.product(id).await?;
        let tally = &self.tally.regions[self.region];
        tally.read_from(source);
        let Some(oldest) = floor.and_then(|floor| self.ledger.oldest_allowed(id, floor)) else { return Ok(()) };
        tally.judged.raise();
        if product.revision < oldest {
            tally.stale.raise();
            let text = || format!("product {id} at revision {} when {oldest} had been applied", product.revision);
            tally.first_stale.get_or_init(text);
        }
        Ok(())
    }

    async fn floor(&mut self, id: i64) -> anyhow::Result<Option<Version>> {
        let fields: (Option<String>, Option<String>) = self.floors.hmget(product_key(id)?.entry(), &["e", "p"]).await?;
        let (Some(epoch), Some(position)) = fields else { return Ok(None) };
        let number = |text: &str| parse_canonical(text).with_context(|| format!("{text:?} in a tombstone entry is no number"));
        Ok(Some(Version::new(number(&epoch)?, number(&position)?)))
    }
}

async fn probe(prober: Arc<Prober>, tally: Arc<Tally>, stop: Shutdown) -> anyhow::Result<()> {
    let mut ticks = ticks(PROBE_INTERVAL, Instant::now());
    for number in 0.. {
        tokio::select! { _ = ticks.tick() => {}, () = stop.wait() => break }
        if prober.send(number).await.context("a probe")? {
            tally.probes.raise();
        }
    }
    Ok(())
}

/// See [`storefront::fill_without_the_protocol`]; on the product that changes and is read most.
async fn plant_stale(mut storefront: Storefront, stop: Shutdown) -> anyhow::Result<()> {
    while !stop.requested() {
        let dawdle = async {
            tokio::select! { () = tokio::time::sleep(DAWDLE) => {}, () = stop.wait() => {} }
        };
        storefront::fill_without_the_protocol(&mut storefront, 1, dawdle).await?;
    }
    Ok(())
}

/// When one of several like tasks takes its next step, and its luck.
struct Pace {
    ticks: Interval,
    dice: Dice,
}

impl Pace {
    /// Task `number` of `tasks` that together make `rate` steps a second, evenly spread.
    fn new(rate: u32, tasks: u32, number: u32) -> Self {
        let step = Duration::from_secs(1) / rate;
        Self { ticks: ticks(step * tasks, Instant::now() + step * number), dice: Dice::new() }
    }

    /// Waits for the next step; `false` when it is time to stop.
    async fn next(&mut self, stop: &Shutdown) -> bool {
        tokio::select! { _ = self.ticks.tick() => !stop.requested(), () = stop.wait() => false }
    }
}

/// A slow machine gets fewer steps, not a burst of late ones.
fn ticks(period: Duration, first: Instant) -> Interval {
    let mut ticks = interval_at(first, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

/// Random numbers by xorshift64 (Marsaglia, shifts 13, 7, 17): plenty for traffic.
struct Dice(u64);

impl Dice {
    fn new() -> Self {
        // The low half of an identifier is random; the state must not be zero.
        Self(uuid::Uuid::now_v7().as_u64_pair().1 | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound
    }

    /// Skewed as a shop is: the cube of an even draw gives the first product a tenth of all visits and the last half of the catalogue a fifth.
    fn product(&mut self) -> i64 {
        let even = self.below(1 << 53) as f64 / (1u64 << 53) as f64;
        1 + (even.powi(3) * PRODUCTS as f64) as i64
    }

    fn price_cents(&mut self) -> i64 {
        100 + self.below(99_900) as i64
    }
}
