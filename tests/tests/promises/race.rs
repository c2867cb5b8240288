//! Writers and readers of a small shop, racing through one region's cache; used by tests of several areas.

use recant_schema::key::Key;
use recant_schema::scripts::FillReply;
use recant_tests::source::{connect, invalidate};
use recant_tests::{Cache, Pipeline};
use sqlx::{Connection, Executor, PgConnection};
use std::time::{Duration, Instant};

/// Few enough to be written and read at the same time all the time.
const PRODUCTS: usize = 6;
const WRITERS: usize = 3;
const READERS: usize = 6;

/// How slow the slowest reader is: many writes long, so that when the writers end nearly every reader holds a value from before the last write.
const SLOWEST: Duration = Duration::from_millis(200);

/// How a reader puts into the cache what it has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filling {
    /// By `fill`, with the mark.
    Protocol,
    /// By a plain SET, as many services do: the race has to find that.
    PlainSet,
}

/// What came of the readers' loads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) filled: u32,
    pub(crate) refused: u32,
}

/// The products' keys and their table.
pub(crate) struct Race {
    keys: Vec<Key>,
}

impl Race {
    pub(crate) async fn prepare(pipeline: &Pipeline) -> Self {
        let statement = "create table product as select id, 0 as price from generate_series(0, 5) id";
        pipeline.product().await.execute(statement).await.unwrap();
        Self { keys: pipeline.keys(PRODUCTS) }
    }

    /// Writers and readers for so long. Both talk to their servers directly, whatever stands before relay and subscriber.
    pub(crate) async fn run(&self, url: &str, cache: &Cache, lasting: Duration, filling: Filling) -> Counts {
        let mut products = Vec::new();
        for _ in 0..WRITERS + READERS {
            products.push(connect(url).await);
        }
        // The race begins when all are connected, which takes its time in an unoptimised build.
        let until = Instant::now() + lasting;
        let readers = products.split_off(WRITERS).into_iter().enumerate();
        let readers = readers.map(|(first, product)| read(product, cache, &self.keys, until, first, filling));
        let writers = products.into_iter().enumerate();
        let writers: Vec<_> = writers.map(|(first, product)| tokio::spawn(write(product, self.keys.clone(), until, first))).collect();
        let counts = futures::future::join_all(readers).await;
        for writer in writers {
            writer.await.unwrap();
        }
        counts
            .into_iter()
            .fold(Counts::default(), |sum, one| Counts { filled: sum.filled + one.filled, refused: sum.refused + one.refused })
    }

    /// Products whose cached price is not the row's. To be asked once every invalidation is applied.
    pub(crate) async fn stale(&self, pipeline: &Pipeline) -> Vec<String> {
        let mut product = pipeline.product().await;
        let prices: Vec<(i32, i32)> = sqlx::query_as("select id, price from product order by id").fetch_all(&mut product).await.unwrap();
        let mut stale = Vec::new();
        for (id, price) in prices {
            if let Some(cached) = pipeline.eu().cache.get(&self.keys[id as usize]).await.filter(|cached| *cached != price.to_string()) {
                stale.push(format!("product {id} is {price}, the cache says {cached}"));
            }
        }
        stale
    }
}

async fn write(mut product: PgConnection, keys: Vec<Key>, until: Instant, first: usize) {
    for number in first.. {
        if Instant::now() >= until {
            return;
        }
        let id = number % PRODUCTS;
        let mut transaction = product.begin().await.unwrap();
        sqlx::query("update product set price = price + 1 where id = $1").bind(id as i32).execute(&mut *transaction).await.unwrap();
        invalidate(&mut transaction, keys[id].as_str()).await.unwrap();
        if number % 7 == 0 {
            transaction.rollback().await.unwrap()
        } else {
            transaction.commit().await.unwrap()
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Between its load and its fill every third reading takes its time, as slow readers do.
async fn read(mut product: PgConnection, cache: &Cache, keys: &[Key], until: Instant, first: usize, filling: Filling) -> Counts {
    let mut counts = Counts::default();
    for number in first.. {
        if Instant::now() >= until {
            break;
        }
        let (id, key) = (number % PRODUCTS, &keys[number % PRODUCTS]);
        if cache.get(key).await.is_some() {
            continue;
        }
        let Some(mark) = cache.read(key).await.mark else { continue };
        let price: i32 =
            sqlx::query_scalar("select price from product where id = $1").bind(id as i32).fetch_one(&mut product).await.unwrap();
        if number % 3 == 0 {
            tokio::time::sleep(SLOWEST * (number % 8) as u32 / 8).await;
        }
        match filling {
            Filling::PlainSet => cache.put(key, &price.to_string()).await,
            Filling::Protocol => match cache.fill(key, &mark, &price.to_string()).await {
                FillReply::Filled => counts.filled += 1,
                FillReply::MarkGone | FillReply::BelowFloor => counts.refused += 1,
            },
        }
    }
    counts
}
