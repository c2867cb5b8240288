//! How the demo connects to Redis.

use anyhow::Context as _;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, IntoConnectionInfo as _};
use std::time::Duration;

/// A loopback server answers in less than a millisecond; a machine that compiles beside the demo may need seconds. Not a sign of anything else.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The address, with small packets sent at once: what waits for a full packet waits up to 40 ms.
pub(crate) fn address(url: &str) -> anyhow::Result<ConnectionInfo> {
    // The parser's words could repeat a password.
    let info = url.into_connection_info().ok().context("REDIS_URL or REDIS_URL_US is not a Redis URL such as redis://127.0.0.1:6379")?;
    Ok(info.set_tcp_settings(TcpSettings::default().set_nodelay(true)))
}

pub(crate) fn settings() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(Some(ANSWER_TIMEOUT)).set_response_timeout(Some(ANSWER_TIMEOUT))
}

/// One connection that many tasks share.
pub(crate) async fn connect(url: &str) -> anyhow::Result<MultiplexedConnection> {
    let address = address(url)?;
    let place = address.addr().to_string();
    let client = Client::open(address)?;
    let connected = client.get_multiplexed_async_connection_with_config(&settings()).await;
    connected.with_context(|| format!("could not connect to Redis at {place}; `make up` starts one"))
}
