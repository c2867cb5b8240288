//! Waiting without sleeping blindly, and names and ports that nobody else has.

use std::net::TcpListener;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a test waits for anything that works: a hundred times what it takes on two quiet cores, since tests share them.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Between two looks. Short beside what is waited for, long beside a look.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Ports below the range that Linux takes for outgoing connections (32768 and up), so that no client's socket can sit on one.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Looks until there is something to return.
///
/// # Panics
/// With `what` when there was nothing within [`DEADLINE`].
pub async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Option<T>) -> T {
    eventually_within(DEADLINE, what, look).await
}

/// As [`eventually`], with a deadline of its own. A single look that takes longer is given up, too.
///
/// # Panics
/// With `what` when there was nothing in time.
pub async fn eventually_within<T>(deadline: Duration, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let looking = async {
        loop {
            if let Some(seen) = look().await {
                return seen;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    match tokio::time::timeout(deadline, looking).await {
        Ok(seen) => seen,
        Err(_) => panic!("not within {deadline:?}: {what}"),
    }
}

/// As [`eventually_within`], for code that is not asynchronous.
///
/// # Panics
/// With `what` when there was nothing in time.
pub fn eventually_blocking<T>(deadline: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(started.elapsed() < deadline, "not within {deadline:?}: {what}");
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Eight hexadecimal digits that no other test has.
pub fn fresh_name() -> String {
    // The last bytes of a UUID of version 7 are random; the first are the clock.
    let bytes = Uuid::now_v7().into_bytes();
    bytes[12..].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A port of the loopback address that was free a moment ago, and that this process gives to nobody else.
///
/// # Panics
/// When none is free.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    // Two test binaries at once start at different places.
    let next = NEXT.get_or_init(|| AtomicU16::new((std::process::id() % u32::from(PORTS.end - PORTS.start)) as u16));
    for _ in PORTS {
        let port = PORTS.start + next.fetch_add(1, Ordering::Relaxed) % (PORTS.end - PORTS.start);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port in {PORTS:?}");
}

/// Runs asynchronous work to its end from anywhere, a `Drop` inside a runtime included.
pub(crate) fn run_elsewhere(work: impl Future<Output = ()> + Send + 'static) {
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        if let Ok(runtime) = runtime {
            runtime.block_on(work);
        }
    });
    // What is cleaned up best-effort must not turn a passed test into a failed one.
    let _ = worker.join();
}
