//! The command line.

use crate::broker::topics::{self, Finding};
use crate::config::{Config, FIELDS, PREFIX};
use crate::error::Error;
use crate::outbox::Session;
use crate::outbox::admin::{self, Call};
use crate::{check, relay, status};
use clap::{Parser, Subcommand};
use recant_schema::service::config::{help, process_environment};
use recant_schema::service::shutdown::Shutdown;
use recant_schema::service::telemetry;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

const FIRST_STEPS: &str = "First steps:  relay migrate;  relay topics;  relay check;  relay run
Settings: a TOML file and RELAY_… variables; --help lists them.
Exit codes: 0 fine, 64 the configuration or the command line cannot be used, 1 anything else.";

/// Publishes committed cache invalidations from Postgres to Kafka.
#[derive(Debug, Parser)]
#[command(name = "relay", version, after_help = FIRST_STEPS, after_long_help = format!("{FIRST_STEPS}\n\n{}", help(FIELDS, PREFIX)))]
pub struct Cli {
    /// TOML file with the settings; variables RELAY_… override it [default: RELAY_CONFIG, or none]
    #[arg(long, global = true, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Claim, publish and retire until stopped. Any number of relays may run side by side
    Run,
    /// Create or update the schema recant, and register the configured regions. Needs a login that owns the database; safe to repeat
    Migrate,
    /// Create missing topics, add partitions, and name settings that differ
    Topics,
    /// Check configuration, Postgres and Kafka; every line that says FAIL names its remedy
    Check,
    /// Invalidate keys by hand, through the same function that product services call
    Invalidate {
        /// Cache keys
        #[arg(required = true)]
        keys: Vec<String>,
        /// Isolation label
        #[arg(long)]
        tenant: Option<String>,
        /// Freshness class: C1 to C4
        #[arg(long)]
        class: Option<String>,
        /// Only this region; may be repeated [default: all]
        #[arg(long = "region")]
        regions: Vec<String>,
        /// realtime or bulk
        #[arg(long)]
        lane: Option<String>,
    },
    /// Show epoch, outbox and topics
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// How a command ended, when not with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// As asked.
    Fine,
    /// It ran, and found something that has to be repaired; the lines are printed.
    FoundTrouble,
}

/// Loads the configuration and runs the command.
///
/// # Errors
/// Configuration problems, and whatever the command ran into.
pub async fn execute(cli: Cli) -> Result<Done, Error> {
    let environment = process_environment();
    let file = cli.config.or_else(|| {
        let named = environment.iter().find(|(name, _)| *name == format!("{PREFIX}CONFIG"));
        named.map(|(_, path)| PathBuf::from(path))
    });
    let config = Config::read(file.as_deref(), &environment)?;
    match cli.command {
        Command::Run => {
            telemetry::init(config.log_format);
            let shutdown = Shutdown::on_signals().map_err(Error::Signals)?;
            relay::run(config, shutdown).await?;
        }
        Command::Migrate => {
            let count = admin::migrate(&config.database_url, &config.regions).await.map_err(Error::OutboxMigrate)?;
            print(&format!("migrated: {count} migrations are applied, {} regions are registered\n", config.regions.len()));
        }
        Command::Topics => return make_topics(&config).await,
        Command::Check => {
            let report = check::run(&config).await;
            print(&(report.lines.join("\n") + "\n"));
            return Ok(if report.failed { Done::FoundTrouble } else { Done::Fine });
        }
        Command::Invalidate { keys, tenant, class, regions, lane } => {
            let count = keys.len();
            let call = Call { keys, tenant, class, regions: (!regions.is_empty()).then_some(regions), lane };
            let mut session = Session::open(&config.database_url, &config.relay_name, "invalidate").await.map_err(Error::OutboxConnect)?;
            session.invalidate(&call).await.map_err(Error::OutboxInvalidate)?;
            session.close().await;
            print(&format!("committed: {count} keys; a running relay publishes them\n"));
        }
        Command::Status { json } => {
            let status = status::read(&config).await?;
            print(&if json { format!("{:#}\n", status.json()) } else { status.text() });
        }
    }
    Ok(Done::Fine)
}

async fn make_topics(config: &Config) -> Result<Done, Error> {
    let mut done = Done::Fine;
    let mut text = String::new();
    for (topic, finding) in topics::create(config).await.map_err(Error::BrokerTopics)? {
        let _ = match finding {
            Finding::AsConfigured => writeln!(text, "ok       {topic}"),
            Finding::Created => writeln!(text, "created  {topic}"),
            Finding::PartitionsRaised(before) => {
                writeln!(text, "changed  {topic}: partitions from {before} to {}", config.topic_settings.partitions)
            }
            Finding::Missing => writeln!(text, "missing  {topic}"),
            Finding::Differs(differences) => {
                done = Done::FoundTrouble;
                writeln!(text, "DIFFERS  {topic}: {}; correct the topic or the configuration", differences.join(", "))
            }
        };
    }
    print(&text);
    Ok(done)
}

/// A reader that went away (a closed pipe) is no failure.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
