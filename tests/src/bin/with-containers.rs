//! Runs a command with servers of its own in containers: `with-containers cargo test --workspace`.
//!
//! Starts one Postgres, one Kafka and two Redis by testcontainers, gives the command `DATABASE_URL`, `KAFKA_BROKERS`,
//! `REDIS_URL` and `REDIS_URL_US`, waits for it, removes the containers and ends with the command's exit code. SIGINT
//! and SIGTERM end the command first; the containers are removed all the same. A SIGKILL leaves them behind.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, bail};
use testcontainers_modules::kafka::apache::{KAFKA_PORT, Kafka};
use testcontainers_modules::postgres::Postgres;
use testcontainers_modules::redis::{REDIS_PORT, Redis};
use testcontainers_modules::testcontainers::core::client::docker_client_instance;
use testcontainers_modules::testcontainers::runners::AsyncRunner;
use testcontainers_modules::testcontainers::{ContainerAsync, Image, ImageExt};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The same versions as in `docker-compose.yml`.
const POSTGRES_TAG: &str = "17";
/// See [`POSTGRES_TAG`].
const KAFKA_TAG: &str = "4.1.1";
/// See [`POSTGRES_TAG`].
const REDIS_TAG: &str = "7.4";

/// The images may have to be pulled first: about 500 MB in all.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// How long the command may take to end after it was asked to; then it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Exit code for a wrong call (`EX_USAGE` of sysexits).
const USAGE: u8 = 64;

#[tokio::main]
async fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let Some(program) = words.next() else {
        eprintln!("with-containers: give the command to run, for example: with-containers cargo test --workspace");
        return ExitCode::from(USAGE);
    };
    match Box::pin(run(program, words.collect())).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("with-containers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(program: OsString, arguments: Vec<OsString>) -> anyhow::Result<ExitCode> {
    // Registered before anything is started: a signal that arrives while containers start is acted on right after, so
    // that no half-started container is left behind.
    let mut stop = Stop::listen().context("listen for signals")?;
    require_engine().await?;
    let servers = Servers::start().await?;
    let outcome = run_beside(&servers, program, arguments, &mut stop).await;
    Box::pin(servers.remove()).await;
    outcome
}

/// A missing engine gets a line of its own; each container would only report a failed request.
async fn require_engine() -> anyhow::Result<()> {
    let answer = match docker_client_instance().await {
        Ok(client) => client.ping().await.map(drop).map_err(anyhow::Error::from),
        Err(error) => Err(error.into()),
    };
    answer.context("no Docker engine answers; start it, or use STACK=native")
}

struct Servers {
    postgres: ContainerAsync<Postgres>,
    kafka: ContainerAsync<Kafka>,
    redis_eu: ContainerAsync<Redis>,
    redis_us: ContainerAsync<Redis>,
}

impl Servers {
    async fn start() -> anyhow::Result<Self> {
        eprintln!("with-containers: starting Postgres {POSTGRES_TAG}, Kafka {KAFKA_TAG} and two Redis {REDIS_TAG}");
        // join and not try_join: a start that is cut off in the middle would leave its container behind.
        let (postgres, kafka, redis_eu, redis_us) = tokio::join!(start_postgres(), start_kafka(), start_redis(), start_redis());
        Ok(Self { postgres: postgres?, kafka: kafka?, redis_eu: redis_eu?, redis_us: redis_us? })
    }

    /// The variables by which relay, subscriber and tests find these servers.
    async fn environment(&self) -> anyhow::Result<[(&'static str, String); 4]> {
        let postgres = address(&self.postgres, 5432).await?;
        let kafka = address(&self.kafka, KAFKA_PORT.as_u16()).await?;
        let redis_eu = address(&self.redis_eu, REDIS_PORT).await?;
        let redis_us = address(&self.redis_us, REDIS_PORT).await?;
        Ok([
            ("DATABASE_URL", format!("postgres://recant:recant@{postgres}/recant")),
            ("KAFKA_BROKERS", kafka),
            ("REDIS_URL", format!("redis://{redis_eu}")),
            ("REDIS_URL_US", format!("redis://{redis_us}")),
        ])
    }

    async fn remove(self) {
        let (postgres, kafka, redis_eu, redis_us) =
            tokio::join!(self.postgres.rm(), self.kafka.rm(), self.redis_eu.rm(), self.redis_us.rm());
        for error in [postgres, kafka, redis_eu, redis_us].into_iter().filter_map(Result::err) {
            eprintln!("with-containers: a container could not be removed: {error}");
        }
    }
}

async fn start_postgres() -> anyhow::Result<ContainerAsync<Postgres>> {
    Postgres::default()
        .with_user("recant")
        .with_password("recant")
        .with_db_name("recant")
        .with_tag(POSTGRES_TAG)
        // As in docker-compose.yml. This also replaces the module's `fsync=off`, under which a killed server may lose
        // what it had promised to keep.
        .with_cmd([
            "-c",
            "wal_level=logical",
            "-c",
            "track_commit_timestamp=on",
            "-c",
            "max_connections=300",
            "-c",
            "max_wal_senders=40",
            "-c",
            "max_replication_slots=40",
        ])
        .with_startup_timeout(START_TIMEOUT)
        .start()
        .await
        .context("start Postgres")
}

async fn start_kafka() -> anyhow::Result<ContainerAsync<Kafka>> {
    Kafka::default()
        .with_jvm_image()
        .with_tag(KAFKA_TAG)
        // As in docker-compose.yml, where each is explained by dev/kafka/server.properties.
        .with_env_var("KAFKA_HEAP_OPTS", "-Xms512m -Xmx512m")
        .with_env_var("KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS", "8")
        .with_env_var("KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR", "1")
        .with_env_var("KAFKA_TRANSACTION_STATE_LOG_MIN_ISR", "1")
        .with_env_var("KAFKA_TRANSACTION_STATE_LOG_NUM_PARTITIONS", "8")
        .with_env_var("KAFKA_SHARE_COORDINATOR_STATE_TOPIC_REPLICATION_FACTOR", "1")
        .with_env_var("KAFKA_SHARE_COORDINATOR_STATE_TOPIC_MIN_ISR", "1")
        .with_env_var("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false")
        .with_env_var("KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS", "0")
        .with_env_var("KAFKA_MESSAGE_MAX_BYTES", "8388608")
        .with_env_var("KAFKA_REPLICA_FETCH_MAX_BYTES", "8388608")
        .with_env_var("KAFKA_LOG_SEGMENT_DELETE_DELAY_MS", "1000")
        .with_env_var("KAFKA_LOG_CLEANER_DEDUPE_BUFFER_SIZE", "16777216")
        .with_startup_timeout(START_TIMEOUT)
        .start()
        .await
        .context("start Kafka")
}

async fn start_redis() -> anyhow::Result<ContainerAsync<Redis>> {
    Redis::default()
        .with_tag(REDIS_TAG)
        .with_cmd(["redis-server", "--save", "", "--appendonly", "no"])
        .with_startup_timeout(START_TIMEOUT)
        .start()
        .await
        .context("start Redis")
}

/// `host:port` of a container's port as seen from here. An engine on this machine is reached by number: clients would
/// try `localhost` as `::1` first, where not every engine listens.
async fn address<I: Image>(container: &ContainerAsync<I>, port: u16) -> anyhow::Result<String> {
    let host = container.get_host().await.context("ask the engine for its host")?.to_string();
    let host = if host == "localhost" { "127.0.0.1" } else { &host };
    let port = container.get_host_port_ipv4(port).await.context("ask the engine for a port")?;
    Ok(format!("{host}:{port}"))
}

/// The two signals that end a run from outside.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for either and returns its number.
    async fn signalled(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
        }
    }
}

async fn run_beside(servers: &Servers, program: OsString, arguments: Vec<OsString>, stop: &mut Stop) -> anyhow::Result<ExitCode> {
    let mut child = Command::new(&program)
        .args(arguments)
        .envs(servers.environment().await?)
        // A process group of its own: a signal has to reach cargo, the test binaries and the services they started.
        .process_group(0)
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    tokio::select! {
        // A signal that is already here wins, also over a command that ends at once.
        biased;
        signal = stop.signalled() => {
            end_group(&mut child, signal).await?;
            Ok(ExitCode::from(code_of_signal(signal)))
        }
        status = child.wait() => Ok(ExitCode::from(code_of(status.context("wait for the command")?))),
    }
}

/// Passes the signal on to the command's whole group, waits, and kills what is left of it.
async fn end_group(child: &mut Child, signal: i32) -> anyhow::Result<()> {
    let Some(group) = child.id() else { return Ok(()) }; // it has ended already
    signal_group(group, signal).await?;
    if tokio::time::timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
        signal_group(group, 9).await?;
        child.wait().await.context("wait for the killed command")?;
    }
    Ok(())
}

/// The standard library signals single processes only; every shell's built-in `kill` knows groups.
async fn signal_group(group: u32, signal: i32) -> anyhow::Result<()> {
    let sent = Command::new("sh").arg("-c").arg(format!("kill -{signal} -{group}")).status().await;
    match sent.context("run sh")?.success() {
        true => Ok(()),
        false => bail!("signal {signal} could not be sent to the command"),
    }
}

/// A command's exit code, or what a shell makes of a death by signal.
fn code_of(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1),
        (None, Some(signal)) => code_of_signal(signal),
        (None, None) => 1,
    }
}

fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(1)
}
