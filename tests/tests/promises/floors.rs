//! Promise 4: a floor never goes down while it lives, and versions compare exactly over their whole range.

use recant_schema::scripts::FillReply;
use recant_schema::version::Version;
use recant_tests::{Pipeline, records};

#[tokio::test]
async fn an_older_invalidation_never_lowers_the_floor() {
    let pipeline = Pipeline::builder().relays(0).start().await;
    let at = |position| Version::new(7, position);
    // Neighbours that a double cannot tell apart, both ends of signed and unsigned 64 bits, and numbers whose order as text is the other way round.
    let pairs = [
        (at((1 << 53) + 1), at(1 << 53)),
        (at((1 << 63) - 1), at((1 << 63) - 2)),
        (at(1 << 63), at((1 << 63) - 1)),
        (at(u64::MAX), at(u64::MAX - 1)),
        (at(u64::MAX), at(9)),
        (at(10), at(9)),
        (at(1_000), at(999)),
        (at(100_000_000_000_000_000), at(99_999_999_999_999_999)),
        (Version::new(10, 0), Version::new(9, u64::MAX)),
        (Version::new((1 << 53) + 1, 0), Version::new(1 << 53, u64::MAX)),
        (Version::new(u64::MAX, 1), Version::new(u64::MAX - 1, 2)),
    ];
    let keys = pipeline.keys(pairs.len());
    for (key, (newer, older)) in keys.iter().zip(pairs) {
        // Each above the one before: the older one counts first.
        pipeline.produce(&[(key.clone(), older), (key.clone(), newer)]).await;
    }
    pipeline.await_consumed().await;
    for (key, (newer, _)) in keys.iter().zip(pairs) {
        assert_eq!(pipeline.eu().cache.floor(key).await.expect("a floor").version, newer);
        assert_eq!(pipeline.eu().cache.load(key, "fresh").await, FillReply::Filled);
    }
    let again: Vec<_> = keys.iter().zip(pairs).flat_map(|(key, (newer, older))| [(key.clone(), older), (key.clone(), newer)]).collect();
    pipeline.produce(&again).await;
    pipeline.await_consumed().await;
    for (key, (newer, older)) in keys.iter().zip(pairs) {
        assert_eq!(pipeline.eu().cache.floor(key).await.expect("a floor").version, newer, "after {older}");
        assert_eq!(pipeline.eu().cache.get(key).await.as_deref(), Some("fresh"), "{older} is covered by {newer}");
    }
    pipeline.finish().await;
}

#[tokio::test]
async fn versions_of_two_sources_never_compare_so_each_applies() {
    let pipeline = Pipeline::builder().relays(0).start().await;
    let key = pipeline.key("product:7");
    let mut expected = Vec::new();
    for (source, position) in [("one", 900), ("other", 3), ("one", 5)] {
        pipeline.eu().cache.put(&key, "value").await;
        let value = records::invalidation_from(source, None, &key, Version::new(1, position));
        pipeline.kafka.produce(&pipeline.shared_topic(), Some(key.as_str().as_bytes()), Some(&value)).await;
        pipeline.eu().cache.await_gone(&key).await;
        pipeline.await_consumed().await;
        expected.push(pipeline.eu().cache.floor(&key).await.expect("a floor").version.position);
    }
    assert_eq!(expected, [900, 3, 5]);
    pipeline.finish().await;
}
