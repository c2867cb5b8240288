//! Promise 3: once every invalidation of a key is applied, the cache holds nothing for it or the newest value, however slow a reader was.

use crate::race::{Counts, Filling, Race};
use recant_schema::scripts::FillReply;
use recant_tests::source::outbox_rows;
use recant_tests::{Pipeline, eventually};
use std::time::Duration;

#[tokio::test]
async fn a_stale_fill_is_refused_after_an_invalidation() {
    let pipeline = Pipeline::start().await;
    let (key, cache) = (pipeline.key("product:7"), &pipeline.eu().cache);
    let slow = cache.read(&key).await.mark.expect("a miss leaves a mark");
    pipeline.commit(&key).await;
    cache.await_applied(&key).await;
    assert_eq!(cache.fill(&key, &slow, "old").await, FillReply::MarkGone);
    assert_eq!(cache.get(&key).await, None);
    assert_eq!(cache.load(&key, "new").await, FillReply::Filled);
    assert_eq!(cache.fill(&key, &slow, "old").await, FillReply::MarkGone);
    assert_eq!(cache.get(&key).await.as_deref(), Some("new"));
    pipeline.finish().await;
}

#[tokio::test]
async fn a_fill_is_refused_when_its_entry_was_evicted() {
    let pipeline = Pipeline::start().await;
    let (key, cache) = (pipeline.key("product:7"), &pipeline.eu().cache);
    let slow = cache.read(&key).await.mark.expect("a miss leaves a mark");
    pipeline.commit(&key).await;
    cache.await_applied(&key).await;
    let () = cache.command(&["DEL", &key.entry()]).await;
    assert_eq!(cache.fill(&key, &slow, "old").await, FillReply::MarkGone);
    assert_eq!(cache.get(&key).await, None);
    pipeline.finish().await;
}

/// How long writers and readers race. Some thousand reads, a few hundred writes.
const RACE: Duration = Duration::from_secs(3);

/// Races, and waits until every invalidation is applied.
async fn run(pipeline: &Pipeline, race: &Race, lasting: Duration, filling: Filling) -> Counts {
    let counts = race.run(&pipeline.database().url(), &pipeline.eu().cache, lasting, filling).await;
    let mut product = pipeline.product().await;
    eventually("every row is retired", async || (outbox_rows(&mut product).await == 0).then_some(())).await;
    pipeline.await_consumed().await;
    counts
}

#[tokio::test]
async fn readers_racing_writers_leave_nothing_or_the_newest_value() {
    let pipeline = Pipeline::builder().relays(2).start().await;
    let race = Race::prepare(&pipeline).await;
    let counts = run(&pipeline, &race, RACE, Filling::Protocol).await;
    let stale = race.stale(&pipeline).await;
    assert!(stale.is_empty(), "{stale:?}");
    assert!(counts.filled > 0 && counts.refused > 0, "a race that proves something fills and refuses: {counts:?}");
    pipeline.finish().await;
}

/// The same race finds the error when there is one: in one run or a few, since the last write of a product may happen to end well.
#[tokio::test]
async fn the_race_finds_readers_that_fill_without_a_mark() {
    let pipeline = Pipeline::start().await;
    let race = Race::prepare(&pipeline).await;
    eventually("plain SETs leave something stale", async || {
        run(&pipeline, &race, RACE / 6, Filling::PlainSet).await;
        (!race.stale(&pipeline).await.is_empty()).then_some(())
    })
    .await;
    pipeline.finish().await;
}
