//! Logs: one line an occurrence, on standard error, as text or JSON. `RUST_LOG` narrows or widens them (default `info`).

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For collectors: one JSON object a line.
    Json,
}

impl LogFormat {
    /// Reads `text` or `json`.
    ///
    /// # Errors
    /// Names the two.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is not a log format; use text or json")),
        }
    }
}

/// Starts logging for the whole process; a second call changes nothing.
pub fn init(format: LogFormat) {
    // These clients report each attempt of their own; the services report outages themselves, once each.
    let quiet = "info,librdkafka=off,rdkafka=off,pgwire_replication=off";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(quiet));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    let result = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if result.is_err() {
        tracing::debug!("logging was started before");
    }
}
