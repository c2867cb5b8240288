//! Redis servers that belong together, of a test's own: a cluster, and a primary with its replica and a Sentinel.

use crate::cache::Cache;
use crate::private::PrivateRedis;
use crate::wait::{eventually, free_port, fresh_name};
use recant_schema::key::{Key, SLOTS};
use std::path::PathBuf;

/// Primaries of a cluster: the fewest that can promote a replica, since a majority of them has to agree.
const PRIMARIES: usize = 3;

/// After how long of silence a cluster node counts as failed, and after how long a Sentinel calls a primary down, ms: short, so that a test
/// need not wait, and well above what a loaded machine takes to answer.
const NODE_TIMEOUT_MS: &str = "2000";
const DOWN_AFTER_MS: &str = "1000";

/// Keys that move from one primary to another at once.
const MIGRATED_AT_ONCE: &str = "20";

/// The name by which the Sentinel knows its primary.
const SENTINEL_NAME: &str = "main";

/// A folder that is removed with this value.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn create() -> Self {
        let path = std::env::temp_dir().join(format!("recant-redis-{}", fresh_name()));
        std::fs::create_dir(&path).expect("the temporary folder can be written");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One server of a set, with a reader's connection to it.
#[derive(Debug)]
pub struct Member {
    /// The server, to be killed or frozen.
    pub server: PrivateRedis,
    /// What it holds.
    pub cache: Cache,
}

impl Member {
    fn new(server: PrivateRedis) -> Self {
        Self { cache: Cache::new(&server.url()), server }
    }

    /// Waits until a section of INFO contains this text.
    ///
    /// # Panics
    /// When it does not in time.
    pub async fn await_info(&self, section: &str, text: &str) {
        let what = format!("{} says {text} of its {section}", self.cache.url());
        eventually(&what, async || self.cache.command::<String>(&["INFO", section]).await.contains(text).then_some(())).await;
    }

    /// Waits until its replica holds whatever was written through this value.
    ///
    /// # Panics
    /// When there is none, or it does not catch up.
    pub async fn await_replicated(&self) {
        let replicas: i64 = self.cache.command(&["WAIT", "1", "20000"]).await;
        assert_eq!(replicas, 1, "the replica has what its primary has");
    }

    /// Freezes the replica and drops its connection, so that it gets nothing of what follows, not even from a socket's buffer.
    pub async fn cut_off(&self, replica: &Self) {
        replica.server.freeze();
        let dropped: i64 = self.cache.command(&["CLIENT", "KILL", "TYPE", "replica"]).await;
        assert_eq!(dropped, 1, "there was a replica to cut off");
    }
}

/// A Redis Cluster of three primaries. Dropping it ends all servers.
#[derive(Debug)]
pub struct PrivateCluster {
    /// The primaries, and behind them the replica of the first, if there is one.
    pub members: Vec<Member>,
    ids: Vec<String>,
    /// Per slot, which member owns it.
    owners: Vec<usize>,
    _folder: Folder,
}

impl PrivateCluster {
    /// Three primaries with a third of the slots each.
    ///
    /// # Panics
    /// When they do not find together in time.
    pub async fn start() -> Self {
        Self::of(PRIMARIES).await
    }

    /// The same, and a replica of the first.
    ///
    /// # Panics
    /// When they do not find together in time.
    pub async fn start_with_replica() -> Self {
        let this = Self::of(PRIMARIES + 1).await;
        let replica = &this.members[PRIMARIES];
        let () = replica.cache.command(&["CLUSTER", "REPLICATE", &this.ids[0]]).await;
        replica.await_info("replication", "master_link_status:up").await;
        // Only a replica that the other primaries know of gets their votes.
        for member in &this.members[..PRIMARIES] {
            let known = format!("slave {}", this.ids[0]);
            eventually("the replica is known", async || {
                member.cache.command::<String>(&["CLUSTER", "NODES"]).await.contains(&known).then_some(())
            })
            .await;
        }
        // Reads from the replica are looked at, not sent away.
        let () = replica.cache.command(&["READONLY"]).await;
        this
    }

    async fn of(count: usize) -> Self {
        let folder = Folder::create();
        let buses: Vec<_> = (0..count).map(|_| free_port().to_string()).collect();
        let servers = buses.iter().map(|bus| {
            let (folder, file) = (folder.0.to_string_lossy().into_owned(), format!("nodes-{bus}.conf"));
            async move {
                let cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", NODE_TIMEOUT_MS, "--cluster-config-file", &file];
                // A replica may be promoted however old its data is: what it lacks is what is tested, and looked at while the cluster is down.
                let more = ["--cluster-port", bus, "--dir", &folder, "--cluster-replica-validity-factor", "0"];
                let reads = ["--cluster-allow-reads-when-down", "yes", "--repl-diskless-sync-delay", "0"];
                PrivateRedis::start(&[&cluster[..], &more, &reads].concat()).await
            }
        });
        let members: Vec<_> = futures::future::join_all(servers).await.into_iter().map(Member::new).collect();
        let owners = (0..usize::from(SLOTS)).map(|slot| slot * PRIMARIES / usize::from(SLOTS)).collect();
        let mut this = Self { members, ids: Vec::new(), owners, _folder: folder };
        this.join(&buses).await;
        this
    }

    /// What `redis-cli --cluster create` does, without its pauses.
    async fn join(&mut self, buses: &[String]) {
        for (at, member) in self.members.iter().enumerate() {
            self.ids.push(member.cache.command(&["CLUSTER", "MYID"]).await);
            let () = member.cache.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]).await;
            let own = |slot: &usize| self.owners[*slot] == at;
            let slots = 0..usize::from(SLOTS);
            if let (Some(first), Some(last)) = (slots.clone().find(own), slots.rev().find(own)) {
                let () = member.cache.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]).await;
            }
        }
        for (member, bus) in self.members.iter().zip(buses).skip(1) {
            let port = member.server.port().to_string();
            let () = self.members[0].cache.command(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]).await;
        }
        let everybody = format!("cluster_known_nodes:{}\r", self.members.len());
        for member in &self.members {
            eventually("the cluster has found together", async || {
                let info: String = member.cache.command(&["CLUSTER", "INFO"]).await;
                (info.contains("cluster_state:ok") && info.contains(&everybody)).then_some(())
            })
            .await;
        }
    }

    /// For a subscriber: two of its servers.
    pub fn url(&self) -> String {
        format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", self.members[1].server.port(), self.members[2].server.port())
    }

    /// Which member owns a key.
    pub fn owner(&self, key: &Key) -> &Member {
        &self.members[self.owners[usize::from(key.slot())]]
    }

    fn by_owner(&self, keys: &[Key]) -> impl Iterator<Item = (&Cache, Vec<Key>)> {
        let own = |at: usize| keys.iter().filter(|key| self.owners[usize::from(key.slot())] == at).cloned().collect::<Vec<_>>();
        let parts: Vec<_> = self.members.iter().enumerate().map(|(at, member)| (&member.cache, own(at))).collect();
        parts.into_iter().filter(|(_, keys)| !keys.is_empty())
    }

    /// Plain SETs, each at the key's owner.
    pub async fn put_all(&self, keys: &[Key], value: &str) {
        for (cache, keys) in self.by_owner(keys) {
            cache.put_all(&keys, value).await;
        }
    }

    /// Waits until none of these keys has a value at its owner.
    ///
    /// # Panics
    /// Says how many still have one.
    pub async fn await_all_gone(&self, keys: &[Key]) {
        for (cache, keys) in self.by_owner(keys) {
            cache.await_all_gone(&keys).await;
        }
    }

    /// Moves the slot of a key to another member, a few keys at a time; `meanwhile` runs before each few.
    ///
    /// # Panics
    /// When a server refuses.
    pub async fn move_slot(&mut self, key: &Key, to: usize, mut meanwhile: impl AsyncFnMut()) {
        let (slot, from) = (key.slot().to_string(), self.owners[usize::from(key.slot())]);
        let (source, target) = (&self.members[from].cache, &self.members[to].cache);
        let () = target.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]]).await;
        let () = source.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]]).await;
        let port = self.members[to].server.port().to_string();
        loop {
            meanwhile().await;
            let names: Vec<String> = source.command(&["CLUSTER", "GETKEYSINSLOT", &slot, MIGRATED_AT_ONCE]).await;
            if names.is_empty() {
                break;
            }
            let words: Vec<_> = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"].into_iter().collect();
            let _: String = source.command(&[words, names.iter().map(String::as_str).collect()].concat()).await;
        }
        for cache in [target, source] {
            let () = cache.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &self.ids[to]]).await;
        }
        self.owners[usize::from(key.slot())] = to;
    }

    /// The replica of the first primary.
    pub fn replica(&self) -> &Member {
        &self.members[PRIMARIES]
    }

    /// Waits until the replica of the first primary has taken its place.
    ///
    /// # Panics
    /// When it has not in time.
    pub async fn await_promoted(&mut self) {
        self.replica().await_info("replication", "role:master").await;
        eventually("the cluster is whole again", async || {
            self.replica().cache.command::<String>(&["CLUSTER", "INFO"]).await.contains("cluster_state:ok").then_some(())
        })
        .await;
        for owner in self.owners.iter_mut().filter(|owner| **owner == 0) {
            *owner = PRIMARIES;
        }
    }
}

/// A primary, its replica, and a Sentinel that watches both. Dropping it ends all three.
#[derive(Debug)]
pub struct SentinelSet {
    /// The primary at the start.
    pub first: Member,
    /// Its replica.
    pub second: Member,
    sentinel: PrivateRedis,
    _folder: Folder,
}

impl SentinelSet {
    /// Started, and the replica in step.
    ///
    /// # Panics
    /// When they do not find together in time.
    pub async fn start() -> Self {
        let at_once = ["--repl-diskless-sync-delay", "0"];
        let first = Member::new(PrivateRedis::start(&at_once).await);
        let port = first.server.port().to_string();
        let replica = [&["--replicaof", "127.0.0.1", &port], &at_once[..]].concat();
        let second = Member::new(PrivateRedis::start(&replica).await);
        second.await_info("replication", "master_link_status:up").await;
        let (folder, sentinel_port) = (Folder::create(), free_port());
        let file = folder.0.join("sentinel.conf");
        let text = format!(
            "port {sentinel_port}\nbind 127.0.0.1\ndir {}\nsentinel monitor {SENTINEL_NAME} 127.0.0.1 {port} 1\n\
             sentinel down-after-milliseconds {SENTINEL_NAME} {DOWN_AFTER_MS}\nsentinel failover-timeout {SENTINEL_NAME} 5000\n",
            folder.0.display(),
        );
        std::fs::write(&file, text).expect("the folder can be written");
        // A Sentinel keeps what it learns in its configuration file.
        let arguments = vec![file.to_string_lossy().into_owned(), "--sentinel".to_owned()];
        let sentinel = PrivateRedis::start_with(sentinel_port, arguments).await;
        let asked = Cache::new(&sentinel.url());
        eventually("the Sentinel has found the replica", async || {
            let info: String = asked.command(&["INFO", "sentinel"]).await;
            (info.contains("status=ok") && info.contains("slaves=1")).then_some(())
        })
        .await;
        Self { first, second, sentinel, _folder: folder }
    }

    /// For a subscriber.
    pub fn url(&self) -> String {
        format!("redis+sentinel://127.0.0.1:{}/{SENTINEL_NAME}", self.sentinel.port())
    }

    /// Waits until the replica has taken the primary's place.
    ///
    /// # Panics
    /// When it has not in time.
    pub async fn await_promoted(&self) {
        self.second.await_info("replication", "role:master").await;
    }
}
