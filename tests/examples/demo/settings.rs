//! What the environment says: where the servers are, and how much load to make.

use recant_schema::service::config::{self, Default as Preset, Field, Problems, Secret, process_environment};
use std::time::Duration;

/// The two regions; the development stack has one Redis for each.
pub(crate) const REGIONS: [&str; 2] = ["eu", "us"];

const FIELDS: &[Field] = &[
    Field { name: "database_url", default: Preset::Unset, secret: true, help: "Postgres; a database of the demo's own is made there." },
    field("kafka_brokers", Preset::Unset, "Kafka bootstrap servers."),
    field("redis_url", Preset::Unset, "Redis of region eu."),
    field(
        "redis_url_us",
        Preset::Unset,
        "Redis of region us; a server of its own, since Redis reports changed keys of all its databases alike.",
    ),
    // Long enough to read the table and for some hundred probes, short enough to wait for.
    field("duration", Preset::Value("20"), "Seconds of load."),
    // A busy day of a small shop; two cores carry it beside the whole stack.
    field("rate", Preset::Value("200"), "Price changes committed per second."),
    field("reads", Preset::Value("1000"), "Reads per second and region."),
    field("keep", Preset::Value("0"), "1: leave relays and subscribers running."),
    field("plant", Preset::Value(""), "stale: one reader in eu fills without the protocol, so that the check can be seen to fail."),
];

const fn field(name: &'static str, default: Preset, help: &'static str) -> Field {
    Field { name, default, secret: false, help }
}

pub(crate) struct Settings {
    pub(crate) database_url: Secret,
    pub(crate) brokers: String,
    /// In the order of [`REGIONS`].
    pub(crate) redis_urls: [String; 2],
    pub(crate) duration: Duration,
    /// Commits per second.
    pub(crate) rate: u32,
    /// Reads per second and region.
    pub(crate) reads: u32,
    pub(crate) keep: bool,
    pub(crate) plant_stale: bool,
    /// The environment without what would change the settings of the processes that the demo starts.
    pub(crate) to_remove: Vec<String>,
}

impl Settings {
    pub(crate) fn load() -> Result<Self, Problems> {
        let environment = process_environment();
        let ours = |name: &str| FIELDS.iter().any(|field| field.name.to_uppercase() == name);
        let known: Vec<_> = environment.iter().filter(|(name, _)| ours(name)).cloned().collect();
        let foreign = |name: &str| name.starts_with("RELAY_") || name.starts_with("SUBSCRIBER_");
        let to_remove = environment.into_iter().map(|(name, _)| name).filter(|name| foreign(name)).collect();

        let mut settings = config::Settings::load(FIELDS, "", None, &known);
        let database_url = settings.secret("database_url").filter(|secret| !secret.expose().is_empty());
        if database_url.is_none() {
            absent(&mut settings, "database_url");
        }
        let brokers = address(&mut settings, "kafka_brokers");
        let redis_urls = [address(&mut settings, "redis_url"), address(&mut settings, "redis_url_us")];
        let read = Self {
            database_url: database_url.unwrap_or_else(|| Secret::new(String::new())),
            brokers,
            redis_urls,
            // Less than 5 s leaves too few hits on a cold cache. The probes' samples are kept for the whole run; an hour of them is a megabyte.
            duration: Duration::from_secs(settings.whole("duration", 5..=3_600)),
            rate: small(settings.whole("rate", 1..=5_000)),
            reads: small(settings.whole("reads", 1..=20_000)),
            keep: settings.whole("keep", 0..=1) == 1,
            plant_stale: settings.parsed("plant", plant).unwrap_or(false),
            to_remove,
        };
        settings.finish()?;
        Ok(read)
    }
}

fn address(settings: &mut config::Settings, name: &'static str) -> String {
    let text = settings.text(name).unwrap_or_default();
    if text.is_empty() {
        absent(settings, name);
    }
    text
}

fn absent(settings: &mut config::Settings, name: &str) {
    let variable = name.to_uppercase();
    settings.problem(&variable, "not set; `make demo` sets it, and so does: make up; eval \"$(dev/env)\"");
}

fn plant(text: &str) -> Result<bool, String> {
    match text {
        "" => Ok(false),
        "stale" => Ok(true),
        other => Err(format!("{other:?} is not known; the one error that can be planted is stale")),
    }
}

/// The bounds above keep these far below the type's limit.
fn small(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
