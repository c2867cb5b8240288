//! Stopping: one signal asks for it, a second one ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Exit code after a second signal: 128 + SIGINT, as shells report it.
const EXIT_INTERRUPTED: i32 = 130;

/// A request to stop that every task can wait for. Clones share it.
#[derive(Clone, Debug)]
pub struct Shutdown {
    sender: watch::Sender<bool>,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { sender: watch::Sender::new(false) }
    }
}

impl Shutdown {
    /// A request that nothing has made yet; tests make it with [`Self::request`].
    pub fn new() -> Self {
        Self::default()
    }

    /// A request that SIGTERM or SIGINT makes; the second signal exits with 130 at once. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the process may not install signal handlers.
    pub fn on_signals() -> std::io::Result<Self> {
        let shutdown = Self::new();
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let request = shutdown.clone();
        tokio::spawn(async move {
            for attempt in 1.. {
                tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
                if attempt > 1 {
                    std::process::exit(EXIT_INTERRUPTED);
                }
                tracing::info!("stopping: finishing what is in flight; a second signal exits at once");
                request.request();
            }
        });
        Ok(shutdown)
    }

    /// Asks everybody to stop. Asking twice is harmless.
    pub fn request(&self) {
        self.sender.send_replace(true);
    }

    /// Whether stopping was asked for.
    pub fn requested(&self) -> bool {
        *self.sender.borrow()
    }

    /// Returns once stopping is asked for. Cancel safe.
    pub async fn wait(&self) {
        let mut receiver = self.sender.subscribe();
        // The sender lives in self, so waiting cannot fail.
        let _ = receiver.wait_for(|requested| *requested).await;
    }
}
