//! The only reader of settings: one TOML file, then `SUBSCRIBER_…` variables.

use crate::broker::option_problem;
use crate::cache::Address;
use recant_schema::key::KeyPrefixes;
use recant_schema::scripts::Tombstones;
use recant_schema::service::config::{Default, Field, Problems, Secret, Settings};
use recant_schema::service::telemetry::LogFormat;
use recant_schema::topics::{Region, Topics};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// What environment variables begin with.
pub const PREFIX: &str = "SUBSCRIBER_";

/// Every setting; the table in README.md is compared with this one by a test.
pub const FIELDS: &[Field] = &[
    required("region", "The region whose cache this maintains, as in `recant.region`."),
    Field { secret: true, ..required("redis_url", "`redis://`, `redis+cluster://a,b` or `redis+sentinel://a,b/NAME`; `rediss` for TLS.") },
    required("brokers", "Kafka bootstrap servers, separated by commas."),
    value("topic_prefix", "recant", "What topic names begin with; the relay's setting must agree."),
    unset("group", "Consumer group; unset: `recant-` and the region."),
    unset("instance_id", "Stable name of this process for static group membership, such as the pod's name; no two processes may share it."),
    value("key_prefixes", "v2:", "Key prefixes this region may touch; other keys are set aside."),
    value(
        "tombstones",
        "always",
        "`always`, or `when-cached`: write nothing when neither value nor entry is there (not with replica readers).",
    ),
    value("floor_ttl_ms", "600000", "How long a floor is kept, ms; above the replicas' worst lag."),
    value(
        "gap_policy",
        "alert",
        "`alert`, `stop`, or `sweep` (forget every key below the prefixes): what happens, besides counting and logging, when invalidations may be missing.",
    ),
    value("sweep_keys_per_second", "20000", "How many keys a sweep scans per second and primary."),
    value("replay_margin_ms", "10000", "How long before the marker's time a replay starts, ms."),
    value("commit_interval_ms", "200", "How often watermarks are committed to Kafka, ms."),
    value("marker_interval_ms", "1000", "How often the marker is written to every primary, ms."),
    value("session_timeout_ms", "6000", "After how long of silence the group gives this member's partitions away, ms."),
    value("shutdown_grace_ms", "10000", "Longest clean stop, ms."),
    value("http_address", "127.0.0.1:9465", "Address of /metrics, /healthz and /readyz."),
    value("log_format", "text", "`text` or `json`."),
    unset("kafka_options", "Further librdkafka options, such as `security.protocol`."),
];

const fn required(name: &'static str, help: &'static str) -> Field {
    Field { name, default: Default::Required, secret: false, help }
}

const fn value(name: &'static str, default: &'static str, help: &'static str) -> Field {
    Field { name, default: Default::Value(default), secret: false, help }
}

const fn unset(name: &'static str, help: &'static str) -> Field {
    Field { name, default: Default::Unset, secret: false, help }
}

/// What happens besides counting and logging when invalidations may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapPolicy {
    /// Nothing more: a person decides.
    Alert,
    /// The subscriber stops, so that nobody can overlook it.
    Stop,
    /// Every key below the prefixes is forgotten, at a pace; floors stay.
    Sweep,
}

fn parse_tombstones(text: &str) -> Result<Tombstones, String> {
    let known = [Tombstones::Always, Tombstones::WhenCached].into_iter().find(|known| known.as_str() == text);
    known.ok_or_else(|| format!("{text:?} is neither always nor when-cached"))
}

impl GapPolicy {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "alert" => Ok(Self::Alert),
            "stop" => Ok(Self::Stop),
            "sweep" => Ok(Self::Sweep),
            other => Err(format!("{other:?} is none of alert, stop and sweep")),
        }
    }
}

/// The subscriber's configuration, checked.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each field is explained in FIELDS")]
pub struct Config {
    pub region: Region,
    pub redis: Address,
    pub brokers: String,
    pub topics: Topics,
    pub group: String,
    pub instance_id: Option<String>,
    pub key_prefixes: KeyPrefixes,
    pub tombstones: Tombstones,
    pub floor_ttl: Duration,
    pub gap_policy: GapPolicy,
    pub sweep_keys_per_second: u64,
    pub replay_margin: Duration,
    pub commit_interval: Duration,
    pub marker_interval: Duration,
    pub session_timeout: Duration,
    pub shutdown_grace: Duration,
    pub http_address: SocketAddr,
    pub log_format: LogFormat,
    pub kafka_options: BTreeMap<String, Secret>,
}

/// librdkafka options that behaviour depends on; set by the code, with reasons, in `broker`.
const RESERVED_OPTIONS: &[&str] = &[
    "bootstrap.servers",
    "group.id",
    "group.instance.id",
    "group.protocol",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "auto.offset.reset",
    "enable.partition.eof",
    "enable.idempotence",
    "acks",
];

impl Config {
    /// Reads the file, if there is one, and the environment.
    ///
    /// # Errors
    /// Everything that is wrong, one line each.
    pub fn load(file: Option<&Path>, environment: &[(String, String)]) -> Result<Self, Problems> {
        let mut settings = Settings::load(FIELDS, PREFIX, file, environment);
        let read = Self::read(&mut settings);
        settings.finish()?;
        Ok(read.expect("a setting that could not be read is a problem"))
    }

    fn read(settings: &mut Settings) -> Option<Self> {
        let region = settings.parsed("region", Region::parse);
        let redis = settings
            .secret("redis_url")
            .and_then(|url: Secret| Address::parse(url.expose()).map_err(|error| settings.problem("redis_url", error)).ok());
        let brokers = settings.text("brokers");
        let topics = Topics::new(&settings.text("topic_prefix").unwrap_or_default());
        let group = settings.text("group");
        let instance_id = settings.text("instance_id");
        let prefixes = settings.list("key_prefixes");
        let key_prefixes = KeyPrefixes::parse(&prefixes).map_err(|error| settings.problem("key_prefixes", error)).ok();
        let tombstones = settings.parsed("tombstones", parse_tombstones);
        // A floor outlives at least the reader's mark (60 s by default); a month of floors is a memory leak.
        let floor_ttl = settings.milliseconds("floor_ttl_ms", 60_000..=2_592_000_000);
        let gap_policy = settings.parsed("gap_policy", GapPolicy::parse);
        // A Redis scans and forgets some 100,000 keys a second at most; the products need most of that.
        let sweep_keys_per_second = settings.whole("sweep_keys_per_second", 100..=1_000_000);
        let replay_margin = settings.milliseconds("replay_margin_ms", 0..=3_600_000);
        let commit_interval = settings.milliseconds("commit_interval_ms", 10..=60_000);
        let marker_interval = settings.milliseconds("marker_interval_ms", 10..=60_000);
        // Brokers accept 6 s to 30 min by default.
        let session_timeout = settings.milliseconds("session_timeout_ms", 6_000..=1_800_000);
        let shutdown_grace = settings.milliseconds("shutdown_grace_ms", 1_000..=600_000);
        let http_address = settings.parsed("http_address", |text| {
            text.parse::<SocketAddr>().map_err(|_| format!("{text:?} is not an address such as 127.0.0.1:9465"))
        });
        let log_format = settings.parsed("log_format", LogFormat::parse);
        let kafka_options = settings.table("kafka_options");
        for problem in kafka_options.iter().filter_map(|(name, value)| option_problem(name, value)) {
            settings.problem("kafka_options", problem);
        }
        let kafka_options: BTreeMap<_, _> = kafka_options.into_iter().map(|(name, value)| (name, Secret::new(value))).collect();
        for name in kafka_options.keys().filter(|name| RESERVED_OPTIONS.contains(&name.as_str())) {
            settings.problem("kafka_options", format_args!("{name} is set by the subscriber itself; remove it"));
        }
        let region = region?;
        let group = group.unwrap_or_else(|| format!("recant-{}", region.as_str()));
        Some(Self {
            redis: redis?,
            brokers: brokers?,
            topics,
            group,
            instance_id,
            key_prefixes: key_prefixes?,
            tombstones: tombstones?,
            floor_ttl,
            gap_policy: gap_policy?,
            sweep_keys_per_second,
            replay_margin,
            commit_interval,
            marker_interval,
            session_timeout,
            shutdown_grace,
            http_address: http_address?,
            log_format: log_format?,
            kafka_options,
            region,
        })
    }

    /// The topics that this region consumes; [`crate::marker::Partition::topic`] is an index into it.
    pub fn consumed_topics(&self) -> Vec<String> {
        self.topics.consumed_in(&self.region)
    }

    /// Where this region's poison goes.
    pub fn dead_letter_topic(&self) -> String {
        self.topics.dead_letters(&self.region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(environment: &[(&str, &str)]) -> Result<Config, Vec<String>> {
        let environment: Vec<_> = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Config::load(None, &environment).map_err(|problems| problems.0)
    }

    #[test]
    fn the_smallest_configuration_names_region_cache_and_brokers() {
        let config = load(&[("SUBSCRIBER_REGION", "eu"), ("SUBSCRIBER_REDIS_URL", "redis://h:1"), ("SUBSCRIBER_BROKERS", "h:2")]).unwrap();
        assert_eq!((config.group.as_str(), config.dead_letter_topic().as_str()), ("recant-eu", "recant.dead-letters.v1.eu"));
    }

    #[test]
    fn every_problem_of_a_configuration_is_reported() {
        let problems = load(&[
            ("SUBSCRIBER_REGION", "EU"),
            ("SUBSCRIBER_REDIS_URL", "http://h"),
            ("SUBSCRIBER_COMMIT_INTERVAL_MS", "0"),
            ("SUBSCRIBER_KAFKA_OPTIONS", "acks=1,sasl.pasword=hunter2"),
            ("SUBSCRIBER_TOMBSTONES", "never"),
        ]);
        let problems = problems.unwrap_err();
        assert_eq!(problems.len(), 7, "{problems:?}");
        assert!(!problems.concat().contains("hunter2"), "{problems:?}");
    }
}
