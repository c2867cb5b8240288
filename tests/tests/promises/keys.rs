//! Promise 10: every allowed key goes through the whole pipeline, and no other key is ever touched.

use recant_schema::key::{Key, MAX_KEY_BYTES};
use recant_schema::version::Version;
use recant_tests::Pipeline;
use recant_tests::private::PrivateRedis;
use recant_tests::source::commit_all;

#[tokio::test]
async fn keys_with_braces_in_any_script_and_of_full_length_go_through_the_whole_pipeline() {
    let pipeline = Pipeline::start().await;
    let prefix = pipeline.key("").as_str().to_owned();
    let mut keys: Vec<_> =
        ["{shop}:product:7", "a{b", "{a}}", "x{tag}y{other}", "größe:日本語:🛒", "%20", "';drop/**/table-outbox;--", "\\", "\"quoted\""]
            .into_iter()
            .map(|end| pipeline.key(end))
            .collect();
    keys.push(pipeline.key(&"k".repeat(MAX_KEY_BYTES - prefix.len())));
    let wide = "é".repeat((MAX_KEY_BYTES - prefix.len()) / 2);
    keys.push(pipeline.key(&wide));
    for key in &keys {
        pipeline.eu().cache.load(key, "old").await;
    }
    let (one_by_one, at_once) = keys.split_at(6);
    for key in one_by_one {
        pipeline.commit(key).await;
    }
    let texts: Vec<_> = at_once.iter().map(|key| key.as_str().to_owned()).collect();
    commit_all(&mut pipeline.product().await, &texts).await;
    for key in &keys {
        pipeline.eu().cache.await_applied(key).await;
    }
    pipeline.finish().await;
}

/// A Redis with other people's keys: afterwards each is byte for byte what it was, and whatever is new is ours.
#[tokio::test]
async fn keys_outside_the_prefixes_are_never_touched() {
    let redis = PrivateRedis::start(&[]).await;
    let pipeline = Pipeline::builder().redis(&redis.url()).start().await;
    let cache = &pipeline.eu().cache;
    let foreign = ["v1:shop:1", "v2:", "v2", "session:9", "v2:other:1", "{v2:x}y", "recant"];
    for key in foreign {
        let () = cache.command(&["SET", key, "theirs"]).await;
    }
    let mut dumps = Vec::new();
    for key in foreign {
        dumps.push(cache.command::<Vec<u8>>(&["DUMP", key]).await);
    }
    let mut product = pipeline.product().await;
    commit_all(&mut product, &foreign.map(str::to_owned)).await;
    // By hand as well: keys that no relay would publish, readable and not.
    let entry = Key::parse("v2:other:1").expect("a good key").entry();
    for key in foreign.iter().copied().chain([entry.as_str(), "", "a b"]) {
        pipeline.kafka.produce(&pipeline.shared_topic(), Some(key.as_bytes()), Some(b"no record")).await;
    }
    for (number, key) in foreign.iter().enumerate() {
        let key = Key::parse(key).expect("a good key");
        pipeline.produce(&[(key, Version::new(1, number as u64))]).await;
    }
    let ours = pipeline.key("product:7");
    pipeline.commit(&ours).await;
    cache.await_applied(&ours).await;
    pipeline.await_consumed().await;

    for (key, dump) in foreign.iter().zip(dumps) {
        assert_eq!(cache.command::<Vec<u8>>(&["DUMP", key]).await, dump, "{key}");
    }
    let all: Vec<String> = cache.command(&["KEYS", "*"]).await;
    let marker = format!("recant:m:{}", pipeline.eu().group);
    for key in all.iter().filter(|key| !foreign.contains(&key.as_str())) {
        assert!(*key == ours.entry() || *key == marker, "{key} is not ours to make");
    }
    let letters = pipeline.kafka.read_all(&pipeline.topics.dead_letters(&pipeline.eu().name)).await;
    assert!(letters.iter().filter(|letter| letter.headers["recant-reason"] == "key_not_allowed").count() >= foreign.len());
    pipeline.finish().await;
}
