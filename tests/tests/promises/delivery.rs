//! Promise 1: a committed write invalidates its key in every region it belongs to; a rolled-back one publishes nothing.

use recant_schema::key::Key;
use recant_schema::labels::Lane;
use recant_tests::source::{commit, invalidate, outbox_rows};
use recant_tests::{Pipeline, eventually};
use sqlx::{Connection, Executor, PgConnection};
use std::time::{Duration, Instant};

/// What a row that is left to the look-behind (period 1 s) cannot reach in the median, and one that is not left to it easily does, also on a loaded machine.
const WITHOUT_LOOK_BEHIND: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_committed_write_invalidates_the_key_in_every_region() {
    let pipeline = Pipeline::builder().two_regions().start().await;
    let key = pipeline.key("product:7");
    for region in &pipeline.regions {
        region.cache.load(&key, "old").await;
    }
    pipeline.commit(&key).await;
    let (eu, us) = (pipeline.eu().cache.await_applied(&key).await, pipeline.us().cache.await_applied(&key).await);
    assert_eq!(eu, us, "one record, one version, in every region");
    assert_eq!(eu.source, pipeline.database().name());
    let mut product = pipeline.product().await;
    eventually("the row is retired", async || (outbox_rows(&mut product).await == 0).then_some(())).await;
    pipeline.finish().await;
}

#[tokio::test]
async fn a_rolled_back_write_publishes_nothing() {
    let pipeline = Pipeline::start().await;
    let [whole, part, kept] = ["whole", "part", "kept"].map(|end| pipeline.key(end));
    pipeline.eu().cache.put_all(&[whole.clone(), part.clone(), kept.clone()], "value").await;
    let mut product = pipeline.product().await;

    let mut transaction = product.begin().await.unwrap();
    invalidate(&mut transaction, whole.as_str()).await.unwrap();
    transaction.rollback().await.unwrap();

    let mut transaction = product.begin().await.unwrap();
    transaction.execute("savepoint here").await.unwrap();
    invalidate(&mut transaction, part.as_str()).await.unwrap();
    transaction.execute("rollback to savepoint here").await.unwrap();
    invalidate(&mut transaction, kept.as_str()).await.unwrap();
    transaction.commit().await.unwrap();

    pipeline.eu().cache.await_applied(&kept).await;
    let records = pipeline.kafka.read_all(&pipeline.shared_topic()).await;
    assert_eq!(records.iter().filter(|record| record.invalidates(kept.as_str())).count(), 1);
    for key in [whole, part] {
        assert!(!records.iter().any(|record| record.invalidates(key.as_str())), "{key} was published");
        assert_eq!(pipeline.eu().cache.get(&key).await.as_deref(), Some("value"));
    }
    pipeline.finish().await;
}

/// Forty writers with five transactions each, all at once; every third transaction rolls back. Two relays claim side by side.
#[tokio::test]
async fn of_two_hundred_concurrent_transactions_the_committed_invalidate_everywhere_and_the_rolled_back_nowhere() {
    const WRITERS: usize = 40;
    let pipeline = Pipeline::builder().two_regions().relays(2).start().await;
    let keys = pipeline.keys(200);
    for region in &pipeline.regions {
        region.cache.put_all(&keys, "value").await;
    }
    let rolls_back = |number: usize| number.is_multiple_of(3);
    let writers = keys.chunks(keys.len() / WRITERS).enumerate().map(|(writer, own)| {
        let (url, own) = (pipeline.database().url(), own.to_vec());
        tokio::spawn(async move {
            let mut product = recant_tests::source::connect(&url).await;
            for (at, key) in own.iter().enumerate() {
                let mut transaction = product.begin().await.unwrap();
                invalidate(&mut transaction, key.as_str()).await.unwrap();
                if rolls_back(writer * own.len() + at) {
                    transaction.rollback().await.unwrap()
                } else {
                    transaction.commit().await.unwrap()
                }
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let (rolled_back, committed): (Vec<_>, Vec<_>) = keys.into_iter().enumerate().partition(|(number, _)| rolls_back(*number));
    let only_keys = |numbered: Vec<(usize, Key)>| numbered.into_iter().map(|(_, key)| key).collect::<Vec<_>>();
    let (rolled_back, committed) = (only_keys(rolled_back), only_keys(committed));
    for region in &pipeline.regions {
        region.cache.await_all_gone(&committed).await;
    }
    let records = pipeline.kafka.read_all(&pipeline.shared_topic()).await;
    for key in &rolled_back {
        assert!(!records.iter().any(|record| record.invalidates(key.as_str())), "{key} was published");
    }
    for region in &pipeline.regions {
        assert_eq!(region.cache.with_value(&rolled_back).await, rolled_back);
    }
    pipeline.finish().await;
}

#[tokio::test]
async fn a_pinned_key_is_published_to_its_region_only() {
    let pipeline = Pipeline::builder().two_regions().start().await;
    let [pinned, shared] = ["pinned", "shared"].map(|end| pipeline.key(end));
    for region in &pipeline.regions {
        region.cache.put_all(&[pinned.clone(), shared.clone()], "value").await;
    }
    let mut product = pipeline.product().await;
    let eu = pipeline.eu().name.as_str();
    let call = "select recant.invalidate($1::text, regions => array[$2::text])";
    sqlx::query(call).bind(pinned.as_str()).bind(eu).execute(&mut product).await.unwrap();
    commit(&mut product, shared.as_str()).await;

    pipeline.eu().cache.await_applied(&pinned).await;
    pipeline.us().cache.await_applied(&shared).await;
    assert_eq!(pipeline.us().cache.get(&pinned).await.as_deref(), Some("value"));
    for topic in pipeline.topics.consumed_in(&pipeline.us().name) {
        let records = pipeline.kafka.read_all(&topic).await;
        assert!(!records.iter().any(|record| record.invalidates(pinned.as_str())), "{topic} has what is pinned elsewhere");
    }
    let own = pipeline.kafka.read_all(&pipeline.topics.invalidations(Some(&pipeline.eu().name), Lane::Realtime)).await;
    assert!(own.iter().any(|record| record.invalidates(pinned.as_str())));
    pipeline.finish().await;
}

#[tokio::test]
async fn the_bulk_lane_reaches_the_same_caches_on_topics_of_its_own() {
    let pipeline = Pipeline::start().await;
    let key = pipeline.key("bulk");
    pipeline.eu().cache.load(&key, "old").await;
    let call = "select recant.invalidate($1::text, lane => 'bulk', class => 'C2', tenant => 'shop')";
    sqlx::query(call).bind(key.as_str()).execute(&mut pipeline.product().await).await.unwrap();
    pipeline.eu().cache.await_applied(&key).await;
    let records = pipeline.kafka.read_all(&pipeline.topics.invalidations(None, Lane::Bulk)).await;
    let record = records.iter().find(|record| record.invalidates(key.as_str())).expect("it is on the bulk topic");
    assert_eq!((record.json()["class"].as_str(), record.json()["tenant"].as_str()), (Some("C2"), Some("shop")));
    pipeline.finish().await;
}

/// An observer sees each floor as soon as it is there and at once reads the row in a new snapshot.
#[tokio::test]
async fn nothing_is_published_before_a_new_snapshot_can_see_the_write() {
    const WRITES: i32 = 100;
    let pipeline = Pipeline::start().await;
    let mut product = pipeline.product().await;
    product.execute("create table product (id int primary key, price int); insert into product values (1, 0)").await.unwrap();
    let mut observer = pipeline.product().await;
    let keys = pipeline.keys(WRITES as usize + 1);
    let write = async {
        for price in 1..=WRITES {
            let mut transaction = product.begin().await.unwrap();
            invalidate(&mut transaction, keys[price as usize].as_str()).await.unwrap();
            sqlx::query("update product set price = $1").bind(price).execute(&mut *transaction).await.unwrap();
            transaction.commit().await.unwrap();
        }
    };
    let observe = async {
        for price in 1..=WRITES {
            let key = &keys[price as usize];
            eventually("the write is applied", async || pipeline.eu().cache.floor(key).await).await;
            let seen: i32 = sqlx::query_scalar("select price from product").fetch_one(&mut observer).await.unwrap();
            assert!(seen >= price, "the invalidation of write {price} was applied while a new snapshot still read {seen}");
        }
    };
    tokio::join!(write, observe);
    pipeline.finish().await;
}

async fn time_to_apply(pipeline: &Pipeline, product: &mut PgConnection, key: &Key) -> Duration {
    let before = Instant::now();
    commit(product, key.as_str()).await;
    pipeline.eu().cache.await_applied(key).await;
    before.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[tokio::test]
async fn a_transaction_held_open_delays_nobody_else() {
    let pipeline = Pipeline::start().await;
    let (mut holder, mut product) = (pipeline.product().await, pipeline.product().await);
    let held = pipeline.key("held");
    let mut transaction = holder.begin().await.unwrap();
    invalidate(&mut transaction, held.as_str()).await.unwrap();

    // Longer than any window after which the relay's scan leaves old rows behind.
    let (started, mut times) = (Instant::now(), Vec::new());
    while started.elapsed() < Duration::from_secs(3) {
        times.push(time_to_apply(&pipeline, &mut product, &pipeline.key(&format!("free:{}", times.len()))).await);
    }
    assert!(median(times.clone()) < WITHOUT_LOOK_BEHIND, "{times:?}");
    assert_eq!(pipeline.eu().cache.floor(&held).await, None);

    transaction.commit().await.unwrap();
    pipeline.eu().cache.await_applied(&held).await;
    pipeline.finish().await;
}

/// Beside traffic that moves the relay's scan forward.
#[tokio::test]
async fn a_row_committed_half_a_second_after_its_call_is_not_left_to_the_look_behind() {
    let pipeline = Pipeline::start().await;
    let mut product = pipeline.product().await;
    let late = (0..9).map(|number| {
        let pipeline = &pipeline;
        async move {
            let key = pipeline.key(&format!("late:{number}"));
            let mut product = pipeline.product().await;
            // Spread, so that no single moment of the machine decides.
            tokio::time::sleep(Duration::from_millis(number * 150)).await;
            let mut transaction = product.begin().await.unwrap();
            invalidate(&mut transaction, key.as_str()).await.unwrap();
            // Not a wait for something: the product's transaction takes so long.
            tokio::time::sleep(Duration::from_millis(500)).await;
            transaction.commit().await.unwrap();
            let committed = Instant::now();
            pipeline.eu().cache.await_applied(&key).await;
            committed.elapsed()
        }
    });
    let late = futures::future::join_all(late);
    let traffic = async {
        for number in 0.. {
            time_to_apply(&pipeline, &mut product, &pipeline.key(&format!("traffic:{number}"))).await;
        }
    };
    let times = tokio::select! { times = late => times, () = traffic => unreachable!("traffic goes on") };
    assert!(median(times.clone()) < WITHOUT_LOOK_BEHIND, "{times:?}");
    pipeline.finish().await;
}
