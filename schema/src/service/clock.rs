//! The one place that reads the wall clock. Nothing is ordered by it: it measures and it names epochs.

use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since 1970 on this machine's clock.
#[expect(clippy::disallowed_methods, reason = "this is the module that the ban points to")]
pub fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}
