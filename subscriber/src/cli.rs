//! The command line.

use crate::config::{FIELDS, PREFIX};
use clap::{Parser, Subcommand};
use recant_schema::service::config::help;
use std::path::PathBuf;

/// Deletes changed keys from one region's Redis.
///
/// A subscriber consumes invalidations from Kafka, deletes the keys in its region's cache and leaves floors, so that a slow reader cannot put an old
/// value back. Start with `check`: it says what is missing and what to do about it.
#[derive(Debug, Parser)]
#[command(name = "subscriber", version, after_help = FIRST_STEPS, after_long_help = format!("{FIRST_STEPS}\n\n{}", help(FIELDS, PREFIX)))]
pub struct Cli {
    /// Configuration file (TOML); every key can also be set as `SUBSCRIBER_KEY`.
    #[arg(long, short, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What a subscriber can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Consume and apply until SIGTERM or SIGINT.
    Run,
    /// Say what is missing for `run`, each with its remedy. Exit code 1 if anything is.
    Check,
    /// Show how far the region's cache is maintained, partition by partition.
    Status {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show what the cache holds for one key: value, floor, mark, times to live.
    Inspect {
        /// The cache key, such as v2:shop:product:7.
        key: String,
    },
}

const FIRST_STEPS: &str = "\
First steps:  subscriber check;  subscriber run
Needs at least region, redis_url and brokers, for example:
  SUBSCRIBER_REGION=eu SUBSCRIBER_REDIS_URL=redis://127.0.0.1:6379 SUBSCRIBER_BROKERS=127.0.0.1:9092 subscriber check
Settings: a TOML file and SUBSCRIBER_... variables; --help lists them.
Exit codes: 0 fine, 64 the configuration or the command line cannot be used, 130 a second signal, 1 anything else.";
