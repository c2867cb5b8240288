//! A real Redis, the scripts on it, and what it holds for one key in the words of the pure rules.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use recant_schema::key::Key;
use recant_schema::scripts::{self, FillReply, ForgetReply, InvalidateReply, OweReply, Tombstones};
use recant_schema::tombstone::{Entry, Floor, Mark, OutOfMemory, ReadReply, Slot};
use recant_schema::version::Version;
use redis::{Connection, ErrorKind, RedisError, RedisResult, Script, Value};
use uuid::Uuid;

/// Where the development stack has its first Redis.
const DEFAULT_URL: &str = "redis://127.0.0.1:56379";

/// How long filled values live: longer than any test runs, so that only the tests' own steps remove one.
pub(crate) const VALUE_TTL_MS: u64 = 3_600_000;

/// How much of a ttl may have run off when it is looked at: longer than any test runs, shorter than the steps between the ttls in use.
const TTL_SLACK_MS: u64 = 600_000;

/// A Redis server that was started for one test, for what must not be done to a shared one. Dropping it ends it.
pub(crate) struct PrivateServer {
    process: Child,
    socket: PathBuf,
}

impl PrivateServer {
    /// Starts one that refuses to grow beyond its memory limit instead of evicting.
    pub(crate) fn start() -> Self {
        let socket = std::env::temp_dir().join(format!("recant-{}.sock", Uuid::now_v7().simple()));
        let process = Command::new("redis-server")
            // A socket of its own name cannot collide with another test's, as a port could.
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--unixsocket"])
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("start redis-server: {error}; install it (Debian: apt-get install redis-server)"));
        let mut server = Self { process, socket };
        let log = BufReader::new(server.process.stdout.take().expect("stdout is piped"));
        let ready = log.lines().map_while(Result::ok).any(|line| line.contains("eady to accept connections"));
        assert!(ready, "redis-server ended before it was ready");
        server
    }

    pub(crate) fn connect(&self) -> Cache {
        Cache::open(&format!("redis+unix://{}", self.socket.display())).expect("the server has said that it is ready")
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        // Both fail only when the server is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// A connection, the scripts, and keys of this test's own, which are removed when it ends.
pub(crate) struct Cache {
    pub(crate) redis: Connection,
    prefix: String,
    made: Vec<Key>,
    read: Script,
    fill: Script,
    invalidate: Script,
    owe: Script,
    forget: Script,
}

impl Cache {
    /// The Redis at `REDIS_URL`, else that of the development stack.
    pub(crate) fn connect() -> Self {
        #[expect(clippy::disallowed_methods, reason = "a test finds its servers by the environment")]
        let url = std::env::var("REDIS_URL").unwrap_or_else(|_| DEFAULT_URL.to_owned());
        Self::open(&url).unwrap_or_else(|error| panic!("no Redis answers at {url} ({error}); start one: make up"))
    }

    fn open(url: &str) -> RedisResult<Self> {
        Ok(Self {
            redis: redis::Client::open(url)?.get_connection()?,
            prefix: format!("scripts-test:{}", Uuid::now_v7().simple()),
            made: Vec::new(),
            read: Script::new(scripts::READ),
            fill: Script::new(scripts::FILL),
            invalidate: Script::new(scripts::INVALIDATE),
            owe: Script::new(scripts::OWE),
            forget: Script::new(scripts::FORGET),
        })
    }

    /// A key that no other test knows.
    pub(crate) fn key(&mut self) -> Key {
        let key = Key::parse(&format!("{}:{}", self.prefix, self.made.len())).expect("a valid key");
        self.made.push(key.clone());
        key
    }

    pub(crate) fn read(&mut self, key: &Key, nonce: &str, ttl_ms: u64, refresh: bool) -> RedisResult<ReadReply<Vec<u8>, String>> {
        let refresh = if refresh { "1" } else { "" };
        let reply: Vec<Value> = pair(&self.read, key).arg(nonce).arg(ttl_ms).arg(refresh).invoke(&mut self.redis)?;
        Ok(match reply.as_slice() {
            [value] => ReadReply { value: redis::from_redis_value_ref(value)?, mark: None },
            [value, nonce, left] => {
                let left: i64 = redis::from_redis_value_ref(left)?;
                assert!(left == 0 || left == 1, "{left}");
                let mark = Mark { nonce: redis::from_redis_value_ref(nonce)?, left_now: left == 1 };
                ReadReply { value: redis::from_redis_value_ref(value)?, mark: Some(mark) }
            }
            other => panic!("read replied {other:?}"),
        })
    }

    /// A mark of none is sent as the empty text.
    pub(crate) fn fill(&mut self, key: &Key, mark: Option<&str>, version: Option<&Floor>, value: &[u8]) -> RedisResult<FillReply> {
        let mut call = pair(&self.fill, key);
        call.arg(mark.unwrap_or_default()).arg(value).arg(VALUE_TTL_MS);
        match version {
            Some(Floor { source, version }) => call.arg(source).arg(version.epoch).arg(version.position),
            None => call.arg("").arg("").arg(""),
        };
        call.invoke::<i64>(&mut self.redis).map(|code| FillReply::try_from(code).unwrap())
    }

    pub(crate) fn invalidate(&mut self, key: &Key, said: &Floor, ttl_ms: u64, tombstones: Tombstones) -> RedisResult<InvalidateReply> {
        let mut call = pair(&self.invalidate, key);
        call.arg(&said.source).arg(said.version.epoch).arg(said.version.position).arg(ttl_ms).arg(tombstones.as_str());
        call.invoke::<i64>(&mut self.redis).map(|code| InvalidateReply::try_from(code).unwrap())
    }

    pub(crate) fn owe(&mut self, key: &Key, said: &Floor, ttl_ms: u64) -> RedisResult<OweReply> {
        let mut call = self.owe.key(key.entry());
        call.arg(&said.source).arg(said.version.epoch).arg(said.version.position).arg(ttl_ms);
        call.invoke::<i64>(&mut self.redis).map(|code| OweReply::try_from(code).unwrap())
    }

    pub(crate) fn forget(&mut self, key: &Key) -> RedisResult<ForgetReply> {
        pair(&self.forget, key).invoke::<i64>(&mut self.redis).map(|code| ForgetReply::try_from(code).unwrap())
    }

    /// One plain command.
    pub(crate) fn command(&mut self, words: &[&str]) -> RedisResult<Value> {
        redis::cmd(words[0]).arg(&words[1..]).query(&mut self.redis)
    }

    /// Makes every write that could take memory fail, or lets them pass again. For a private server only.
    pub(crate) fn set_memory_full(&mut self, full: bool) {
        // One byte is less than an empty server uses; 0 is no limit.
        self.command(&["CONFIG", "SET", "maxmemory", if full { "1" } else { "0" }]).expect("the limit can be set");
    }

    /// What Redis holds for this key. The ttl of the entry is what is left of it.
    pub(crate) fn slot(&mut self, key: &Key) -> Slot {
        let (value, fields, ttl_ms, value_ttl_ms): (Option<Vec<u8>>, HashMap<String, String>, i64, i64) = redis::pipe()
            .get(key.as_str())
            .hgetall(key.entry())
            .pttl(key.entry())
            .pttl(key.as_str())
            .query(&mut self.redis)
            .expect("Redis answers");
        if value.is_some() {
            assert!((1..=VALUE_TTL_MS as i64).contains(&value_ttl_ms), "a value is left to live {value_ttl_ms} ms");
        }
        let entry = (!fields.is_empty()).then(|| entry(&fields, ttl_ms));
        Slot { value, entry }
    }

    /// Compares what Redis holds with what the pure rules say it holds, and gives the difference.
    pub(crate) fn differs_from(&mut self, key: &Key, model: &Slot) -> Option<String> {
        let mut real = self.slot(key);
        if let (Some(real), Some(model)) = (&mut real.entry, &model.entry) {
            let allowed = model.ttl_ms.saturating_sub(TTL_SLACK_MS)..=model.ttl_ms;
            if allowed.contains(&real.ttl_ms) {
                real.ttl_ms = model.ttl_ms;
            }
        }
        (real != *model).then(|| format!("Redis holds {real:?}, the rules say {model:?}"))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        for key in &self.made {
            // The keys expire by themselves where this fails.
            let _: RedisResult<Value> = redis::cmd("UNLINK").arg(key.as_str()).arg(key.entry()).query(&mut self.redis);
        }
    }
}

/// What the server said to a step that needed memory; any other error fails the test.
pub(crate) fn or_out_of_memory<T>(reply: RedisResult<T>) -> Result<T, OutOfMemory> {
    reply.map_err(|error| if is_out_of_memory(&error) { OutOfMemory } else { panic!("{error}") })
}

fn is_out_of_memory(error: &RedisError) -> bool {
    error.code() == Some("OOM") && error.kind() != ErrorKind::Io
}

fn pair<'a>(script: &'a Script, key: &Key) -> redis::ScriptInvocation<'a> {
    let mut call = script.key(key.as_str());
    call.key(key.entry());
    call
}

fn entry(fields: &HashMap<String, String>, ttl_ms: i64) -> Entry {
    for name in fields.keys() {
        assert!(["s", "e", "p", "m", "u"].contains(&name.as_str()), "an entry has no field {name}");
    }
    let number = |name: &str| fields[name].parse().expect("a canonical decimal");
    let floor = fields.get("s").map(|source| {
        let version = Version { epoch: number("e"), position: number("p") };
        Floor { source: source.clone(), version }
    });
    Entry {
        floor,
        mark: fields.get("m").filter(|mark| !mark.is_empty()).cloned(),
        unlink_owed: fields.get("u").is_some_and(|owed| owed == "1"),
        ttl_ms: u64::try_from(ttl_ms).expect("an entry always expires"),
    }
}
