//! A region whose cache is a Redis Cluster: keys go to whoever owns their slot, and each primary remembers by itself.

use recant_schema::key::Key;
use recant_schema::version::Version;
use recant_tests::redis_sets::PrivateCluster;
use recant_tests::{Pipeline, eventually};

fn versions(keys: &[Key], position: u64) -> Vec<(Key, Version)> {
    keys.iter().map(|key| (key.clone(), Version::new(1, position))).collect()
}

#[tokio::test]
async fn in_a_cluster_every_primary_loses_its_values_and_has_a_marker_of_its_own() {
    let cluster = PrivateCluster::start().await;
    let pipeline = Pipeline::builder().relays(0).redis(&cluster.url()).start().await;
    let keys = pipeline.keys(300);
    cluster.put_all(&keys, "old").await;
    pipeline.produce(&versions(&keys, 1)).await;
    cluster.await_all_gone(&keys).await;
    pipeline.await_consumed().await;
    for key in &keys {
        assert_eq!(cluster.owner(key).cache.floor(key).await.map(|floor| floor.version), Some(Version::new(1, 1)));
    }
    let prefix = format!("recant:m:{}:{{", pipeline.eu().group);
    for member in &cluster.members {
        // A node stores keys of its own slots only.
        let markers = eventually("the marker is written", async || {
            let markers: Vec<String> = member.cache.command(&["KEYS", "recant:m:*"]).await;
            (!markers.is_empty()).then_some(markers)
        })
        .await;
        assert!(markers.len() == 1 && markers[0].starts_with(&prefix), "{markers:?}");
    }
    pipeline.finish().await;
}

#[tokio::test]
async fn a_slot_that_moves_while_invalidations_flow_loses_none() {
    let mut cluster = PrivateCluster::start().await;
    let pipeline = Pipeline::builder().relays(0).redis(&cluster.url()).start().await;
    // One hash tag, one slot.
    let keys: Vec<_> = (0..400).map(|number| pipeline.key(&format!("{{cart}}:{number}"))).collect();
    let elsewhere = pipeline.keys(50);
    cluster.put_all(&keys, "old").await;
    cluster.put_all(&elsewhere, "old").await;
    let owner = cluster.owner(&keys[0]).server.port();
    let target = cluster.members.iter().position(|member| member.server.port() != owner).expect("there are three");
    let mut parts = keys.chunks(20);
    cluster
        .move_slot(&keys[0], target, async || {
            if let Some(part) = parts.next() {
                pipeline.produce(&versions(part, 1)).await;
            }
        })
        .await;
    for part in parts {
        pipeline.produce(&versions(part, 1)).await;
    }
    pipeline.produce(&versions(&elsewhere, 1)).await;
    cluster.await_all_gone(&keys).await;
    cluster.await_all_gone(&elsewhere).await;
    pipeline.await_consumed().await;

    // And once more where the slot is now.
    cluster.put_all(&keys, "old").await;
    pipeline.produce(&versions(&keys, 2)).await;
    cluster.await_all_gone(&keys).await;
    for key in &keys {
        let floor = cluster.owner(key).cache.floor(key).await;
        assert_eq!(floor.map(|floor| floor.version), Some(Version::new(1, 2)), "{key}");
    }
    pipeline.finish().await;
}

/// The replica is cut off while deletes go on, so it comes to power with values that its primary had deleted.
#[tokio::test]
async fn a_cluster_replica_promoted_without_the_newest_deletes_gets_them_from_its_own_marker() {
    let mut cluster = PrivateCluster::start_with_replica().await;
    let pipeline = Pipeline::builder().relays(0).redis(&cluster.url()).subscriber("marker_interval_ms", "50").start().await;
    let keys = pipeline.keys(300);
    let (before, after) = keys.split_at(100);
    let (missed, during) = after.split_at(100);
    cluster.put_all(&keys, "old").await;
    pipeline.produce(&versions(before, 1)).await;
    cluster.await_all_gone(before).await;
    let (primary, replica) = (&cluster.members[0], cluster.replica());
    primary.await_replicated().await;
    primary.cut_off(replica).await;
    pipeline.produce(&versions(missed, 1)).await;
    cluster.await_all_gone(missed).await;
    pipeline.await_consumed().await;

    cluster.members[0].server.kill();
    cluster.replica().server.thaw();
    let own: Vec<_> = missed.iter().filter(|key| cluster.owner(key).server.port() == cluster.members[0].server.port()).cloned().collect();
    assert!(!own.is_empty() && cluster.replica().cache.with_value(&own).await == own, "the replica missed the deletes");
    for part in during.chunks(20) {
        pipeline.produce(&versions(part, 1)).await;
    }
    cluster.await_promoted().await;
    cluster.await_all_gone(&keys).await;
    pipeline.await_consumed().await;
    pipeline.finish().await;
}

/// Whichever node is named, also one that does not own the slot of the marker's name.
#[tokio::test]
async fn a_plain_url_of_a_cluster_node_is_told_to_be_one_for_a_cluster() {
    let cluster = PrivateCluster::start().await;
    let mut pipeline = Pipeline::builder().relays(0).without_subscribers().start().await;
    for member in &cluster.members {
        pipeline.eu_mut().subscriber.set("redis_url", &member.server.url());
        pipeline.eu_mut().subscriber.start();
        pipeline.produce(&versions(&pipeline.keys(50), 1)).await;
        eventually(&format!("/readyz at {} names redis+cluster://", member.server.url()), async || {
            let answer = pipeline.eu().subscriber.http("/readyz").await?;
            (answer.status == 503 && answer.text.contains("redis+cluster://")).then_some(())
        })
        .await;
        pipeline.eu().subscriber.await_log("redis+cluster://").await;
        pipeline.eu_mut().subscriber.kill();
    }
    pipeline.finish().await;
}
