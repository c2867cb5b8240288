//! What `/healthz` and `/readyz` answer. Alive: the loop makes progress. Ready: every component can do its work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A loop that has not turned for so long is stuck: both loops turn at least once a second, and no single step may take longer than the
/// longest time-out in either service (20 s).
const STALLED_AFTER: Duration = Duration::from_secs(30);

/// State shared between the loop and the HTTP server. Clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    last_turn: Instant,
    components: BTreeMap<&'static str, Component>,
}

#[derive(Debug)]
enum Component {
    /// It has not reported yet, so neither its first trouble nor its first success is old news.
    Awaited,
    Fine,
    Failed(String),
}

impl Health {
    /// Alive from now on; not ready until each of these components has reported itself fine.
    pub fn new(components: &[&'static str]) -> Self {
        let components = components.iter().map(|name| (*name, Component::Awaited)).collect();
        Self { state: Arc::new(Mutex::new(State { last_turn: Instant::now(), components })) }
    }

    /// The loop has turned.
    pub fn turn(&self) {
        self.lock().last_turn = Instant::now();
    }

    /// A component can do its work again. Returns whether it could not before: the moment for one log line.
    pub fn recovered(&self, component: &'static str) -> bool {
        !matches!(self.lock().components.insert(component, Component::Fine), None | Some(Component::Fine))
    }

    /// A component cannot do its work. Returns whether that is news: the moment for one log line.
    pub fn failed(&self, component: &'static str, trouble: String) -> bool {
        !matches!(self.lock().components.insert(component, Component::Failed(trouble)), Some(Component::Failed(_)))
    }

    /// `Err` with the reason when the loop is stuck.
    ///
    /// # Errors
    /// One line for a person.
    pub fn alive(&self) -> Result<(), String> {
        let still = self.lock().last_turn.elapsed();
        if still < STALLED_AFTER { Ok(()) } else { Err(format!("the loop has not turned for {} s", still.as_secs())) }
    }

    /// `Err` with one line per component that cannot do its work.
    ///
    /// # Errors
    /// The lines, for a person.
    pub fn ready(&self) -> Result<(), Vec<String>> {
        let state = self.lock();
        let trouble = |(name, component): (&&str, &Component)| match component {
            Component::Fine => None,
            Component::Awaited => Some(format!("{name}: not connected yet")),
            Component::Failed(trouble) => Some(format!("{name}: {trouble}")),
        };
        let troubles: Vec<_> = state.components.iter().filter_map(trouble).collect();
        if troubles.is_empty() { Ok(()) } else { Err(troubles) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic while the lock is held leaves plain data behind; it stays usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_news_once_and_so_is_its_end() {
        let health = Health::new(&["kafka", "redis"]);
        assert_eq!(health.ready().unwrap_err().len(), 2);
        assert!(health.recovered("kafka"));
        assert!(!health.recovered("kafka"));
        assert!(health.failed("redis", "refused".into()));
        assert!(!health.failed("redis", "refused again".into()));
        assert_eq!(health.ready().unwrap_err(), ["redis: refused again"]);
        assert!(health.recovered("redis"));
        assert!(health.ready().is_ok() && health.alive().is_ok());
    }
}
