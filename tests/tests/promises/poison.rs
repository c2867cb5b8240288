//! Promise 7: what cannot be read is set aside with its reason, its key is forgotten all the same, and everything behind it moves on.

use recant_schema::version::Version;
use recant_tests::source::commit;
use recant_tests::{Pipeline, eventually, records};
use std::collections::BTreeMap;

#[tokio::test]
async fn a_poison_record_is_set_aside_and_the_partition_moves_on() {
    let pipeline = Pipeline::builder().relays(0).partitions(1).largest_record(4_000_000).start().await;
    let (cache, topic) = (&pipeline.eu().cache, pipeline.shared_topic());
    let good = |end: &str| String::from_utf8(records::invalidation(&pipeline.key(end), Version::new(1, 1))).expect("JSON is text");
    let cases: Vec<(&str, Option<String>, &str)> = vec![
        ("format", Some(good("format").replace("\"format\":1", "\"format\":2")), "unknown_format"),
        ("shape", Some(r#"{"format":9,"everything":"else"}"#.to_owned()), "unknown_format"),
        ("truncated", Some(good("truncated")[..60].to_owned()), "malformed"),
        ("garbage", Some("\u{0}\u{1}".to_owned()), "malformed"),
        ("large", Some(format!("{{\"x\":\"{}\"}}", "x".repeat(2 << 20))), "too_large"),
        ("null", None, "empty"),
        ("mismatch", Some(good("another")), "key_mismatch"),
        ("number", Some(good("number").replace("\"epoch\":\"1\"", "\"epoch\":\"01\"")), "bad_field"),
    ];
    let outside = format!("v1:{}:outside", pipeline.suffix);
    let () = cache.command(&["SET", &outside, "theirs", "PX", "600000"]).await;
    for (end, _, _) in &cases {
        cache.put(&pipeline.key(end), "old").await;
    }
    cache.put(&pipeline.key("another"), "kept").await;

    let mut expected = BTreeMap::new();
    for (end, value, reason) in &cases {
        let at = pipeline.kafka.produce(&topic, Some(pipeline.key(end).as_str().as_bytes()), value.as_ref().map(String::as_bytes)).await;
        expected.insert(at.1.to_string(), *reason);
    }
    let at = pipeline.kafka.produce(&topic, Some(outside.as_bytes()), Some(b"garbage")).await;
    expected.insert(at.1.to_string(), "malformed");
    let at = pipeline.kafka.produce(&topic, None, Some(good("another").as_bytes())).await;
    expected.insert(at.1.to_string(), "key_mismatch");
    let next = pipeline.key("next");
    cache.put(&next, "old").await;
    pipeline.produce(&[(next.clone(), Version::new(1, 1))]).await;

    cache.await_applied(&next).await;
    pipeline.await_consumed().await;
    for (end, _, _) in &cases {
        cache.await_gone(&pipeline.key(end)).await;
    }
    assert_eq!(cache.command::<String>(&["GET", &outside]).await, "theirs");
    assert_eq!(cache.get(&pipeline.key("another")).await.as_deref(), Some("kept"), "only the Kafka key says which key is meant");
    let letters = pipeline.kafka.read_all(&pipeline.topics.dead_letters(&pipeline.eu().name)).await;
    let reasons: BTreeMap<_, _> =
        letters.iter().map(|letter| (letter.headers["recant-offset"].clone(), letter.headers["recant-reason"].as_str())).collect();
    assert_eq!(reasons, expected);
    assert!(letters.iter().all(|letter| letter.headers["recant-topic"] == topic && !letter.headers["recant-detail"].is_empty()));
    let large = letters.iter().find(|letter| letter.headers["recant-reason"] == "too_large").expect("it is there");
    assert!(large.value.as_ref().is_some_and(|value| value.len() < 100_000), "a dead letter is bounded");
    let _: i64 = cache.command(&["DEL", &outside]).await;
    pipeline.finish().await;
}

/// The dead-letter topic takes what a broker takes by default, 1 MB, so the key is cut; compressible, or not, it is no cache key.
#[tokio::test]
async fn a_poison_record_with_a_key_of_three_megabytes_is_set_aside_and_the_partition_moves_on() {
    const KEY_BYTES: usize = 3_000_000;
    let pipeline = Pipeline::builder().relays(0).partitions(1).largest_record(4_000_000).start().await;
    let (cache, topic, next) = (&pipeline.eu().cache, pipeline.shared_topic(), pipeline.key("next"));
    let key = format!("{}{}", pipeline.key("").as_str(), "k".repeat(KEY_BYTES));
    pipeline.kafka.produce(&topic, Some(&key.as_bytes()[..KEY_BYTES]), Some(b"garbage")).await;
    cache.put(&next, "old").await;
    pipeline.produce(&[(next.clone(), Version::new(1, 1))]).await;
    cache.await_applied(&next).await;
    pipeline.await_consumed().await;
    let letters = pipeline.kafka.read_all(&pipeline.topics.dead_letters(&pipeline.eu().name)).await;
    let [letter] = letters.as_slice() else { panic!("{} dead letters", letters.len()) };
    assert_eq!((letter.headers["recant-reason"].as_str(), letter.headers["recant-key-bytes"].as_str()), ("malformed", "3000000"));
    assert!(letter.key.as_ref().is_some_and(|key| key.len() < 100_000), "a dead letter is bounded");
    pipeline.finish().await;
}

/// An invalidation that cannot be read erases marks too: a reader that was loading must not fill.
#[tokio::test]
async fn a_poison_record_erases_the_mark_of_its_key() {
    let pipeline = Pipeline::builder().relays(0).start().await;
    let (key, cache) = (pipeline.key("product:7"), &pipeline.eu().cache);
    let mark = cache.read(&key).await.mark.expect("a miss leaves a mark");
    pipeline.kafka.produce(&pipeline.shared_topic(), Some(key.as_str().as_bytes()), Some(b"garbage")).await;
    pipeline.await_consumed().await;
    assert_eq!(cache.fill(&key, &mark, "old").await, recant_schema::scripts::FillReply::MarkGone);
    pipeline.finish().await;
}

/// Rows that did not come through `recant.invalidate`.
#[tokio::test]
async fn a_poison_outbox_row_is_set_aside_and_the_rest_moves_on() {
    let mut pipeline = Pipeline::start().await;
    let mut product = pipeline.product().await;
    let readable = ["lane", "class", "tenant", "regions"].map(|end| pipeline.key(end));
    let eu = pipeline.eu().name.as_str().to_owned();
    pipeline.eu().cache.put_all(&readable, "old").await;
    let insert = "insert into recant.outbox (key, tenant, class, regions, lane) select * from unnest(
        array['', null, 'a b', repeat('k', 300), 'recant:t:x', $1, $2, $3, $4],
        array[null, null, null, null, null, null, null, 'white space', null],
        array[null, null, null, null, null, null, 'C9', null, null],
        array[null, null, null, null, null, null, null, null, null]::text[],
        array['realtime', 'realtime', 'realtime', 'realtime', 'realtime', 'express', 'realtime', 'realtime', 'realtime'])
        as t (key, tenant, class, regions, lane)";
    let insert = insert.replace("select * from", "select key, tenant, class, null::text[], lane from");
    let texts: Vec<_> = readable.iter().map(|key| key.as_str()).collect();
    sqlx::query(sqlx::AssertSqlSafe(insert))
        .bind(texts[0])
        .bind(texts[1])
        .bind(texts[2])
        .bind(texts[3])
        .execute(&mut product)
        .await
        .unwrap();
    let pinned = "insert into recant.outbox (key, regions) values ($1, array[$2, 'nowhere'])";
    sqlx::query(pinned).bind(texts[3]).bind(&eu).execute(&mut product).await.unwrap();
    let good = pipeline.key("good");
    commit(&mut product, good.as_str()).await;

    pipeline.eu().cache.await_applied(&good).await;
    for key in &readable {
        pipeline.eu().cache.await_applied(key).await;
    }
    let reasons = eventually("all bad rows are set aside", async || {
        let reasons: Vec<String> =
            sqlx::query_scalar("select reason from recant.set_aside order by 1").fetch_all(&mut product).await.unwrap();
        (reasons.len() >= 9).then_some(reasons)
    })
    .await;
    assert_eq!(reasons, ["bad_class", "bad_key", "bad_key", "bad_key", "bad_key", "bad_key", "bad_lane", "bad_tenant", "unknown_region"]);
    assert_eq!(pipeline.relays[0].metric("relay_set_aside_rows_total", "").await, 9.0);
    pipeline.expect_error("see recant.set_aside");
    pipeline.finish().await;
}
