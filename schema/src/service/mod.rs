//! What both daemons need to stand up and to be operated: the operational surface is the same for whoever runs either of them.
//!
//! Reading order: [`config`] (settings, secrets, exit code 64), [`telemetry`] (logs), [`shutdown`] (signals, grace period), [`health`]
//! and [`http`] (`/metrics`, `/healthz`, `/readyz`), [`retry`] (delays), [`clock`] (the only wall clock), [`tls`].

pub mod clock;
pub mod config;
pub mod health;
pub mod http;
pub mod retry;
pub mod shutdown;
pub mod telemetry;
pub mod tls;

/// Exit code for a configuration that cannot be used (`EX_USAGE` of BSD's sysexits).
pub const EXIT_CONFIGURATION: u8 = 64;
