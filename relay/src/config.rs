//! The relay's settings: one TOML file, then `RELAY_…` variables.

use crate::broker::option_problem;
use crate::tail::Login;
use recant_schema::key::MAX_KEY_BYTES;
use recant_schema::service::config::{Default as Preset, Field, Problems, Secret, Settings, process_environment};
use recant_schema::service::telemetry::LogFormat;
use recant_schema::topics::{Region, Topics};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// What the variables begin with.
pub const PREFIX: &str = "RELAY_";

/// Every setting; also the reference table in the documentation.
pub const FIELDS: &[Field] = &[
    field(
        "database_url",
        Preset::Required,
        true,
        "Postgres, as postgres://user:password@host:port/database; connect directly, not through a pooler.",
    ),
    field(
        "wake",
        Preset::Value("auto"),
        false,
        "auto: from the write-ahead log, if tail_url is set and while that works, else from the timer; timer: never from the log.",
    ),
    field(
        "tail_url",
        Preset::Unset,
        true,
        "The same database with a login that has REPLICATION, for wake-ups from the log. That right can copy the whole cluster; relay check says more.",
    ),
    field(
        "tail_retained_mb",
        Preset::Value("1024"),
        false,
        "Most log, in MB, that the tail may keep the server from recycling, 16 to 1048576; beyond it the tail closes itself.",
    ),
    field(
        "timer_longest_ms",
        Preset::Value("20"),
        false,
        "Longest wait of the timer while idle, 1 to 60000; five times as long while the tail wakes.",
    ),
    field("brokers", Preset::Required, false, "Kafka bootstrap servers, host:port separated by commas."),
    field(
        "source_name",
        Preset::Unset,
        false,
        "Name of this source of truth; versions compare only within one. Default: the database's name.",
    ),
    field("relay_name", Preset::Unset, false, "Name of this relay, for people. Default: host name and process id."),
    field("regions", Preset::Unset, false, "Required. Every region that keys may be pinned to, at least one."),
    field("topic_prefix", Preset::Value("recant"), false, "What all topic names begin with."),
    field("claims_in_flight", Preset::Value("2"), false, "How many claims overlap, 1 to 4. One publishes while the next is taken."),
    field(
        "claim_limit",
        Preset::Value("2000"),
        false,
        "Most rows in one claim, 1 to 10000. Claims start at 128 and grow while they come back full.",
    ),
    field("heartbeat_interval_ms", Preset::Value("1000"), false, "How often every partition gets a heartbeat, 100 to 60000."),
    field("message_timeout_ms", Preset::Value("10000"), false, "How long one record may take to be acknowledged, 1000 to 15000."),
    field("shutdown_grace_ms", Preset::Value("10000"), false, "How long stopping may take before claims are rolled back, 0 to 60000."),
    field("partitions", Preset::Value("12"), false, "Partitions per topic, for relay topics, 1 to 1000."),
    field("replication_factor", Preset::Value("1"), false, "Replicas per partition, for relay topics, 1 to 16. Use 3 in production."),
    field(
        "min_insync_replicas",
        Preset::Value("1"),
        false,
        "Replicas that must have a record, for relay topics; at most replication_factor. Use 2 in production.",
    ),
    field(
        "retention_ms",
        Preset::Value("604800000"),
        false,
        "How long topics keep records, for relay topics; a region that is away longer has a gap. Default 7 days.",
    ),
    field("http_address", Preset::Value("127.0.0.1:9464"), false, "Where /metrics, /healthz and /readyz listen; off for none."),
    field("log_format", Preset::Value("text"), false, "text or json."),
    field(
        "kafka_options",
        Preset::Unset,
        false,
        "More librdkafka options, such as security.protocol; those that the relay depends on are refused.",
    ),
];

/// librdkafka options that the relay's promises rest on, or that have a setting of their own.
const OWN_OPTIONS: &[&str] = &[
    "bootstrap.servers",
    "metadata.broker.list",
    "acks",
    "request.required.acks",
    "enable.idempotence",
    "enable.gapless.guarantee",
    "transactional.id",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "linger.ms",
    "queue.buffering.max.ms",
    "queue.buffering.max.messages",
    "partitioner",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.partition.eof",
    "group.id",
    "allow.auto.create.topics",
];

/// Longest wait for an acknowledgement. Below the outbox session's 20 s limit for idle transactions, with room for the claim and the commit.
const LONGEST_MESSAGE_TIMEOUT_MS: u64 = 15_000;

/// Longest name for a source, a relay or a topic prefix: names appear in every record, and topics have 249 characters at most.
const MAX_NAME_BYTES: usize = 100;

const fn field(name: &'static str, default: Preset, secret: bool, help: &'static str) -> Field {
    Field { name, default, secret, help }
}

/// The settings, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the outbox is.
    pub database_url: Secret,
    /// Where wake-ups may come from.
    pub wake: WakeChoice,
    /// Who follows the log; `None` where nobody does.
    pub tail: Option<Login>,
    /// Most log that the tail may retain. The default, 1 GB, is that of Postgres' `max_wal_size`: room that a server keeps between two checkpoints anyway.
    pub tail_retained_bytes: u64,
    /// Longest wait of the timer. 20 ms are 50 looks a second, about 1% of a core.
    pub timer_longest: Duration,
    /// Kafka bootstrap servers.
    pub brokers: String,
    /// The source's name in every record.
    pub source_name: String,
    /// This relay's name in every record.
    pub relay_name: String,
    /// Every region that rows may be pinned to; sorted, not empty.
    pub regions: Vec<Region>,
    /// Topic names.
    pub topics: Topics,
    /// 1 to 4.
    pub claims_in_flight: u32,
    /// At least 1.
    pub claim_limit: u32,
    /// How often heartbeats go out.
    pub heartbeat_interval: Duration,
    /// How long one record may take.
    pub message_timeout: Duration,
    /// How long stopping may take.
    pub shutdown_grace: Duration,
    /// What `relay topics` creates.
    pub topic_settings: TopicSettings,
    /// `None`: no HTTP at all.
    pub http_address: Option<SocketAddr>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// More librdkafka options. Their values are never printed: some are passwords.
    pub kafka_options: BTreeMap<String, Secret>,
}

/// Where wake-ups may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeChoice {
    /// The log, where it can be had.
    Auto,
    /// The timer alone.
    Timer,
}

/// How topics are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// Partitions per topic.
    pub partitions: i32,
    /// Replicas per partition.
    pub replication_factor: i32,
    /// Replicas that must acknowledge.
    pub min_insync_replicas: i32,
    /// How long records are kept.
    pub retention_ms: u64,
}

impl Config {
    /// Reads the file (if any) and this process's environment.
    ///
    /// # Errors
    /// Every problem, one line each.
    pub fn load(file: Option<&Path>) -> Result<Self, Problems> {
        Self::read(file, &process_environment())
    }

    /// Reads the file (if any) and the given environment.
    ///
    /// # Errors
    /// Every problem, one line each.
    pub fn read(file: Option<&Path>, environment: &[(String, String)]) -> Result<Self, Problems> {
        let mut settings = Settings::load(FIELDS, PREFIX, file, environment);
        let database_url = settings.secret("database_url");
        let database = database_url.as_ref().and_then(|url| check_url(&mut settings, url));
        let database_url = database_url.unwrap_or_else(|| Secret::new(String::new()));
        let brokers = settings.parsed("brokers", brokers).unwrap_or_default();
        let wake = settings.parsed("wake", wake).unwrap_or(WakeChoice::Auto);
        let tail = tail_login(&mut settings, database.as_deref()).filter(|_| wake == WakeChoice::Auto);
        let source_name = settings.parsed("source_name", name).or(database).unwrap_or_default();
        let relay_name = settings.parsed("relay_name", name).unwrap_or_else(default_relay_name);
        let regions = regions(&mut settings);
        let topic_prefix = settings.parsed("topic_prefix", topic_prefix).unwrap_or_default();
        let config = Self {
            database_url,
            wake,
            tail,
            tail_retained_bytes: settings.whole("tail_retained_mb", 16..=1_048_576) << 20,
            timer_longest: settings.milliseconds("timer_longest_ms", 1..=60_000),
            brokers,
            source_name,
            relay_name,
            regions,
            topics: Topics::new(&topic_prefix),
            claims_in_flight: small(settings.whole("claims_in_flight", 1..=4)),
            claim_limit: small(settings.whole("claim_limit", 1..=10_000)),
            heartbeat_interval: settings.milliseconds("heartbeat_interval_ms", 100..=60_000),
            message_timeout: settings.milliseconds("message_timeout_ms", 1_000..=LONGEST_MESSAGE_TIMEOUT_MS),
            shutdown_grace: settings.milliseconds("shutdown_grace_ms", 0..=60_000),
            topic_settings: topic_settings(&mut settings),
            http_address: settings.parsed("http_address", http_address).flatten(),
            log_format: settings.parsed("log_format", LogFormat::parse).unwrap_or(LogFormat::Text),
            kafka_options: kafka_options(&mut settings),
        };
        settings.finish()?;
        Ok(config)
    }
}

/// Bounds above keep these far below the type's limit.
fn small(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Notes what is wrong with the URL, without printing it; returns the database's name.
fn check_url(settings: &mut Settings, url: &Secret) -> Option<String> {
    match crate::outbox::database_name(url) {
        Ok(database) => Some(database),
        Err(problem) => {
            settings.problem("database_url", problem);
            None
        }
    }
}

fn wake(text: &str) -> Result<WakeChoice, String> {
    match text {
        "auto" => Ok(WakeChoice::Auto),
        "timer" => Ok(WakeChoice::Timer),
        other => Err(format!("{other:?} is neither auto nor timer")),
    }
}

/// The log is that of a cluster, but what is decoded from it that of one database: another one's would announce nothing.
fn tail_login(settings: &mut Settings, database: Option<&str>) -> Option<Login> {
    let login = Login::parse(&settings.secret("tail_url")?).map_err(|problem| settings.problem("tail_url", problem)).ok()?;
    if database.is_some_and(|database| database != login.database()) {
        settings.problem("tail_url", "must name the same database as database_url");
    }
    Some(login)
}

fn brokers(text: &str) -> Result<String, String> {
    let good = |part: &str| part.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    match text.split(',').map(str::trim).find(|part| !good(part)) {
        None => Ok(text.to_owned()),
        Some(part) => Err(format!("{part:?} is not of the form host:port")),
    }
}

fn name(text: &str) -> Result<String, String> {
    let good = (1..=MAX_NAME_BYTES).contains(&text.len()) && !text.contains(char::is_control);
    if good { Ok(text.to_owned()) } else { Err(format!("must have 1 to {MAX_NAME_BYTES} bytes and no control characters")) }
}

fn topic_prefix(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let good = (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(allowed);
    if good { Ok(text.to_owned()) } else { Err(format!("{text:?} is not 1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9, ., _ and -")) }
}

fn http_address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == "off" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| format!("{text:?} is not an address such as 127.0.0.1:9464, nor off"))
}

fn regions(settings: &mut Settings) -> Vec<Region> {
    let mut regions = Vec::new();
    let names = settings.list("regions");
    for name in &names {
        match Region::parse(name) {
            Ok(region) => regions.push(region),
            Err(error) => settings.problem("regions", error),
        }
    }
    if names.is_empty() {
        settings.problem("regions", format_args!("name at least one region (key regions in the file, or {PREFIX}REGIONS)"));
    }
    regions.sort();
    regions.dedup();
    regions
}

fn topic_settings(settings: &mut Settings) -> TopicSettings {
    let count = |number: u64| i32::try_from(number).unwrap_or(i32::MAX);
    let wanted = TopicSettings {
        partitions: count(settings.whole("partitions", 1..=1_000)),
        replication_factor: count(settings.whole("replication_factor", 1..=16)),
        min_insync_replicas: count(settings.whole("min_insync_replicas", 1..=16)),
        // At least a minute: shorter than any outage worth the name. At most ten years.
        retention_ms: settings.whole("retention_ms", 60_000..=315_360_000_000),
    };
    if wanted.min_insync_replicas > wanted.replication_factor {
        settings.problem("min_insync_replicas", "must not exceed replication_factor, or nothing can be published");
    }
    wanted
}

fn kafka_options(settings: &mut Settings) -> BTreeMap<String, Secret> {
    let options = settings.table("kafka_options");
    for (option, value) in &options {
        if OWN_OPTIONS.contains(&option.as_str()) {
            settings.problem("kafka_options", format_args!("{option} is the relay's own; remove it"));
        }
        // Asked here, so that a typing error is a configuration problem.
        if let Some(problem) = option_problem(option, value) {
            settings.problem("kafka_options", problem);
        }
    }
    options.into_iter().map(|(option, value)| (option, Secret::new(value))).collect()
}

fn default_relay_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let host = if host.is_empty() { "relay" } else { host };
    format!("{}-{}", host.chars().filter(|c| !c.is_control()).take(MAX_NAME_BYTES / 4).collect::<String>(), std::process::id())
}

// A record must stay far below the topics' message size: a key, a tenant and names are all that varies.
const _: () = assert!(MAX_KEY_BYTES + 2 * MAX_NAME_BYTES < 1_000);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config, Problems> {
        let environment: Vec<_> = pairs.iter().map(|(key, value)| (format!("{PREFIX}{key}"), (*value).to_owned())).collect();
        Config::read(None, &environment)
    }

    const GOOD: [(&str, &str); 3] =
        [("DATABASE_URL", "postgres://u:hunter2@localhost:5432/shop"), ("BROKERS", "localhost:9092"), ("REGIONS", "us,eu")];

    #[test]
    fn the_defaults_hold_and_the_source_is_named_after_the_database() {
        let config = read(&GOOD).unwrap();
        assert_eq!((config.source_name.as_str(), config.claims_in_flight, config.claim_limit), ("shop", 2, 2_000));
        assert_eq!(config.regions.iter().map(Region::as_str).collect::<Vec<_>>(), ["eu", "us"]);
        assert!(!config.relay_name.is_empty());
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn the_values_of_kafka_options_are_never_printed() {
        let mut pairs = GOOD.to_vec();
        pairs.push(("KAFKA_OPTIONS", "sasl.password=swordfish"));
        let config = read(&pairs).unwrap();
        assert_eq!(config.kafka_options["sasl.password"].expose(), "swordfish");
        let printed = format!("{config:?}");
        assert!(printed.contains("sasl.password") && !printed.contains("swordfish"), "{printed}");
        pairs[3].1 = "sasl.password=swordfish,socket.timeout.ms=swordfish";
        let problems = read(&pairs).unwrap_err().0;
        assert!(!problems.join(" ").contains("swordfish"), "{problems:?}");
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let problems = read(&[
            ("DATABASE_URL", "mysql://u:hunter2@localhost/shop"),
            ("BROKERS", "localhost"),
            ("REGIONS", "eu,EU"),
            ("CLAIMS_IN_FLIGHT", "9"),
            ("HTTP_ADDRESS", "here"),
            ("MIN_INSYNC_REPLICAS", "2"),
            ("KAFKA_OPTIONS", "acks=1,no.such.option=1"),
            ("LOG_FORMAT", "xml"),
            ("WAKE", "notify"),
            ("TAIL_URL", "postgres://t:hunter2@localhost/other?sslmode=perhaps"),
            ("TAIL_RETAINED_MB", "0"),
            ("TIMER_LONGEST_MS", "0"),
        ])
        .unwrap_err()
        .0;
        for name in [
            "wake",
            "tail_url",
            "tail_retained_mb",
            "timer_longest_ms",
            "database_url",
            "brokers",
            "regions",
            "claims_in_flight",
            "http_address",
            "min_insync",
            "acks",
            "no.such.option",
            "log",
        ] {
            assert!(problems.iter().any(|problem| problem.contains(name)), "{name} in {problems:?}");
        }
        assert!(!problems.join(" ").contains("hunter2"));
    }

    #[test]
    fn the_tail_follows_the_same_database_and_only_if_wake_ups_may_come_from_it() {
        let with = |more: &[(&str, &str)]| read(&[&GOOD[..], more].concat());
        assert!(read(&GOOD).unwrap().tail.is_none());
        let url = ("TAIL_URL", "postgres://tail:hunter2@localhost/shop");
        assert_eq!(with(&[url]).unwrap().tail.unwrap().user(), "tail");
        assert!(with(&[url, ("WAKE", "timer")]).unwrap().tail.is_none());
        let problems = with(&[("TAIL_URL", "postgres://tail@localhost/other")]).unwrap_err().0;
        assert!(problems.len() == 1 && problems[0].contains("same database"), "{problems:?}");
    }

    #[test]
    fn what_is_required_is_asked_for() {
        let problems = read(&[]).unwrap_err().0;
        assert_eq!(problems.len(), 3, "{problems:?}");
    }

    #[test]
    fn the_http_server_can_be_switched_off() {
        let mut pairs = GOOD.to_vec();
        pairs.push(("HTTP_ADDRESS", "off"));
        assert_eq!(read(&pairs).unwrap().http_address, None);
    }
}
