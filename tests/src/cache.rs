//! One region's cache, as its readers use it: the scripts, and what they leave behind.

use crate::wait::{DEADLINE, eventually, run_elsewhere};
use recant_schema::key::Key;
use recant_schema::scripts::{self, FillReply};
use recant_schema::version::{Version, parse_canonical};
use redis::aio::MultiplexedConnection;
use redis::{Client, FromRedisValue, Pipeline, RedisResult, Value, cmd};
use tokio::sync::Mutex;
use uuid::Uuid;

/// How long filled values and marks live: longer than any test.
const TTL_MS: u64 = 600_000;

/// Keys asked for in one SCAN step, when a test's keys are removed.
const SCAN_STEP: usize = 2_000;

/// What a miss said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadReply {
    /// The value, on a hit.
    pub value: Option<String>,
    /// The permit to fill.
    pub mark: Option<String>,
}

/// The floor in a tombstone entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Floor {
    /// Whose versions it compares with.
    pub source: String,
    /// The version.
    pub version: Version,
}

/// A Redis server's data as one region's readers see them. Connects anew when the server was away.
#[derive(Debug)]
pub struct Cache {
    url: String,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl Cache {
    /// Not connected yet.
    pub fn new(url: &str) -> Self {
        Self { url: url.to_owned(), connection: Mutex::new(None) }
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = slot.as_ref() {
            return Ok(connection.clone());
        }
        let connection = Client::open(self.url.as_str())?.get_multiplexed_async_connection().await?;
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// Runs a pipeline; while the server is away, until it is back.
    ///
    /// # Panics
    /// When the server refuses, or is away for too long.
    pub async fn run<T: FromRedisValue>(&self, pipeline: &Pipeline) -> T {
        eventually(&format!("Redis answers at {}", self.url), async || match self.try_run(pipeline).await {
            Ok(answer) => Some(answer),
            Err(error) if error.is_io_error() || error.is_connection_dropped() || error.code() == Some("LOADING") => {
                *self.connection.lock().await = None;
                None
            }
            Err(error) => panic!("Redis refused: {error}"),
        })
        .await
    }

    async fn try_run<T: FromRedisValue>(&self, pipeline: &Pipeline) -> RedisResult<T> {
        let mut connection = self.connect().await?;
        pipeline.query_async(&mut connection).await
    }

    async fn one<T: FromRedisValue>(&self, command: redis::Cmd) -> T {
        let mut pipeline = Pipeline::new();
        pipeline.add_command(command);
        let (answer,): (T,) = self.run(&pipeline).await;
        answer
    }

    /// Any command.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = cmd(words[0]);
        command.arg(&words[1..]);
        self.one(command).await
    }

    /// A plain GET, a reader's first step.
    pub async fn get(&self, key: &Key) -> Option<String> {
        self.one(cmd("GET").arg(key.as_str()).take()).await
    }

    /// A plain SET, for something to delete: the protocol's readers would `read` and `fill`.
    pub async fn put(&self, key: &Key, value: &str) {
        let () = self.one(cmd("SET").arg(key.as_str()).arg(value).arg("PX").arg(TTL_MS).take()).await;
    }

    /// Plain SETs in one pipeline.
    pub async fn put_all(&self, keys: &[Key], value: &str) {
        for keys in keys.chunks(SCAN_STEP) {
            let mut pipeline = Pipeline::new();
            for key in keys {
                pipeline.cmd("SET").arg(key.as_str()).arg(value).arg("PX").arg(TTL_MS).ignore();
            }
            let () = self.run(&pipeline).await;
        }
    }

    /// `read`, a reader's second step after a miss.
    pub async fn read(&self, key: &Key) -> ReadReply {
        let nonce = Uuid::now_v7().simple().to_string();
        let reply: Vec<Value> = self.one(script(scripts::READ, key).arg(nonce).arg(TTL_MS).arg("").take()).await;
        let text = |at: usize| reply.get(at).and_then(|value| Option::<String>::from_redis_value_ref(value).expect("texts"));
        ReadReply { value: text(0), mark: text(1) }
    }

    /// `fill`, without a version: the reader read from the primary.
    ///
    /// # Panics
    /// When the script answers with what it does not know.
    pub async fn fill(&self, key: &Key, mark: &str, value: &str) -> FillReply {
        let code: i64 = self.one(script(scripts::FILL, key).arg(mark).arg(value).arg(TTL_MS).arg("").arg("").arg("").take()).await;
        FillReply::try_from(code).expect("a known reply")
    }

    /// A reader that misses, loads this value and fills: the whole protocol.
    ///
    /// # Panics
    /// When there is no miss.
    pub async fn load(&self, key: &Key, value: &str) -> FillReply {
        let mark = self.read(key).await.mark.expect("a miss leaves a mark");
        self.fill(key, &mark, value).await
    }

    /// The floor of a key.
    pub async fn floor(&self, key: &Key) -> Option<Floor> {
        let fields: (Option<String>, Option<String>, Option<String>) =
            self.one(cmd("HMGET").arg(key.entry()).arg("s").arg("e").arg("p").take()).await;
        let number = |text: Option<String>| text.as_deref().and_then(parse_canonical);
        Some(Floor { source: fields.0?, version: Version::new(number(fields.1)?, number(fields.2)?) })
    }

    /// Waits until an invalidation is applied: a floor, and no value.
    ///
    /// # Panics
    /// When it is not in time.
    pub async fn await_applied(&self, key: &Key) -> Floor {
        self.await_applied_above(key, None).await
    }

    /// Waits until an invalidation above an earlier floor is applied.
    ///
    /// # Panics
    /// When it is not in time.
    pub async fn await_applied_above(&self, key: &Key, earlier: Option<Version>) -> Floor {
        let what = format!("{key} is invalidated at {} above {earlier:?}", self.url);
        eventually(&what, async || {
            let floor = self.floor(key).await.filter(|floor| Some(floor.version) > earlier)?;
            self.get(key).await.is_none().then_some(floor)
        })
        .await
    }

    /// Waits until a value is gone, floor or not.
    ///
    /// # Panics
    /// When it is not in time.
    pub async fn await_gone(&self, key: &Key) {
        eventually(&format!("the value of {key} is gone at {}", self.url), async || self.get(key).await.is_none().then_some(())).await;
    }

    /// Which of these keys still have a value.
    pub async fn with_value(&self, keys: &[Key]) -> Vec<Key> {
        let mut left = Vec::new();
        for keys in keys.chunks(SCAN_STEP) {
            let mut pipeline = Pipeline::new();
            for key in keys {
                pipeline.cmd("EXISTS").arg(key.as_str());
            }
            let there: Vec<bool> = self.run(&pipeline).await;
            left.extend(keys.iter().zip(there).filter(|(_, there)| *there).map(|(key, _)| key.clone()));
        }
        left
    }

    /// Waits until none of these keys has a value.
    ///
    /// # Panics
    /// Says how many still have one.
    pub async fn await_all_gone(&self, keys: &[Key]) {
        let mut left = keys.to_vec();
        let waiting = async {
            while !left.is_empty() {
                left = self.with_value(&left).await;
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(DEADLINE, waiting).await.is_err() {
            panic!("{} of {} keys still have their value at {}, such as {:?}", left.len(), keys.len(), self.url, left.first());
        }
    }

    /// Removes every key whose name contains this text.
    pub(crate) fn remove_all_blocking(&self, part: &str) {
        let (url, pattern) = (self.url.clone(), format!("*{part}*"));
        run_elsewhere(async move {
            let _ = remove_all(&url, &pattern).await;
        });
    }
}

async fn remove_all(url: &str, pattern: &str) -> RedisResult<()> {
    let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
    let mut cursor = 0u64;
    loop {
        let scan = cmd("SCAN").arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_STEP).take();
        let (next, keys): (u64, Vec<Vec<u8>>) = scan.query_async(&mut connection).await?;
        if !keys.is_empty() {
            let () = cmd("UNLINK").arg(keys).query_async(&mut connection).await?;
        }
        if next == 0 {
            return Ok(());
        }
        cursor = next;
    }
}

/// A script over a key's value and entry. By EVALSHA would be faster; by EVAL it also works on a server that was just restarted.
fn script(text: &str, key: &Key) -> redis::Cmd {
    let mut command = cmd("EVAL");
    command.arg(text).arg(2).arg(key.as_str()).arg(key.entry());
    command
}
