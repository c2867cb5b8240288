//! PURE: the order of all invalidations of one source.

use std::fmt;

/// A point in the history of one source: the epoch, then the log position within it.
///
/// Versions of one source are totally ordered, epoch first. Versions of two sources never compare; callers keep the source beside the version.
/// Both parts use the whole range of `u64`: scripts compare them as canonical decimal strings, since Lua numbers lose bits beyond 2^53.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// One unbroken run of one database; rises with every crash, promotion, restart and restore.
    pub epoch: u64,
    /// The source's log position, in bytes, when the committed row was claimed.
    pub position: u64,
}

impl Version {
    /// A version from its parts.
    pub const fn new(epoch: u64, position: u64) -> Self {
        Self { epoch, position }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch, self.position)
    }
}

/// Reads a decimal number in the one spelling that the scripts can compare: digits only, no sign, no leading zero.
pub fn parse_canonical(text: &str) -> Option<u64> {
    let digits_only = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let leading_zero = text.len() > 1 && text.starts_with('0');
    if digits_only && !leading_zero { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_decides_before_the_position() {
        assert!(Version::new(2, 0) > Version::new(1, u64::MAX));
        assert!(Version::new(1, 10) > Version::new(1, 9));
        assert!(Version::new(1, (1 << 53) + 1) > Version::new(1, 1 << 53));
    }

    #[test]
    fn only_the_canonical_spelling_of_a_number_is_read() {
        assert_eq!(parse_canonical("0"), Some(0));
        assert_eq!(parse_canonical("18446744073709551615"), Some(u64::MAX));
        for text in ["", "01", "+1", "-1", " 1", "1 ", "1e3", "18446744073709551616", "１"] {
            assert_eq!(parse_canonical(text), None, "{text:?}");
        }
    }
}
