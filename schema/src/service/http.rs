//! `/metrics` (OpenMetrics text), `/healthz` and `/readyz`.

use super::health::Health;
use super::shutdown::Shutdown;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;

/// The media type that OpenMetrics 1.0 asks for.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

struct Surface {
    registry: Registry,
    health: Health,
}

/// Takes the address. Separate from [`serve`], so that a port in use is known before anything else starts.
///
/// # Errors
/// One line with the remedy.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    TcpListener::bind(address).await.map_err(|error| format!("could not listen on {address}: {error}; set http_address to a free address"))
}

/// Serves until `shutdown`.
///
/// # Errors
/// When the listener itself fails.
pub async fn serve(listener: TcpListener, registry: Registry, health: Health, shutdown: Shutdown) -> std::io::Result<()> {
    let surface = Arc::new(Surface { registry, health });
    let routes =
        Router::new().route("/metrics", get(metrics)).route("/healthz", get(healthz)).route("/readyz", get(readyz)).with_state(surface);
    axum::serve(listener, routes).with_graceful_shutdown(async move { shutdown.wait().await }).await
}

async fn metrics(State(surface): State<Arc<Surface>>) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &surface.registry) {
        Ok(()) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("could not encode metrics: {error}\n")).into_response(),
    }
}

async fn healthz(State(surface): State<Arc<Surface>>) -> Response {
    match surface.health.alive() {
        Ok(()) => "ok\n".into_response(),
        Err(trouble) => (StatusCode::SERVICE_UNAVAILABLE, format!("{trouble}\n")).into_response(),
    }
}

async fn readyz(State(surface): State<Arc<Surface>>) -> Response {
    match surface.health.ready() {
        Ok(()) => "ok\n".into_response(),
        Err(troubles) => (StatusCode::SERVICE_UNAVAILABLE, troubles.join("\n") + "\n").into_response(),
    }
}
