//! PURE: cache keys, their tombstone entries, and the cluster slot both share.

use std::fmt;

/// Longest key, in bytes; the storefront's limit for cache keys, and the check in `recant.invalidate`.
pub const MAX_KEY_BYTES: usize = 250;

/// Every Redis key that Recant makes for itself begins so; no product key may.
pub const RESERVED_PREFIX: &str = "recant:";

/// What a tombstone entry's name begins with.
pub const ENTRY_PREFIX: &str = "recant:t:";

/// Number of hash slots in a Redis Cluster (Redis Cluster specification, "Key distribution model").
pub const SLOTS: u16 = 16_384;

/// Why a text is not a cache key. The same rules, in the same order, stand in `recant.check_key` (SQLSTATEs in class `RC`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Nothing there.
    #[error("the key is empty; name the cache entry, for example v2:shop:product:7")]
    Empty,
    /// Longer than [`MAX_KEY_BYTES`].
    #[error("the key has {0} bytes; at most {MAX_KEY_BYTES} are allowed, so hash the long part")]
    TooLong(usize),
    /// Control characters and white space make keys that look alike and break tools.
    #[error("the key has a space or control character at byte {0}; percent-encode it")]
    Forbidden(usize),
    /// Key and tombstone would live in different cluster slots.
    #[error(
        "the key has a closing brace outside a hash tag, so its tombstone cannot share its slot; use {{tag}} with a non-empty tag first, or no braces"
    )]
    Braces,
    /// Below [`RESERVED_PREFIX`].
    #[error("keys that begin with {RESERVED_PREFIX} belong to Recant itself; choose another prefix")]
    Reserved,
}

/// A cache key that Recant can invalidate: 1 to 250 bytes of UTF-8, no white space or control characters, not below `recant:`, and with
/// braces only where the tombstone entry can share its cluster slot.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Box<str>);

impl Key {
    /// Checks and takes a key.
    ///
    /// # Errors
    /// The first rule that the text breaks.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if text.len() > MAX_KEY_BYTES {
            return Err(KeyError::TooLong(text.len()));
        }
        if let Some(at) = text.find(|c: char| c.is_control() || c.is_whitespace()) {
            return Err(KeyError::Forbidden(at));
        }
        // A key that is one hash tag and nothing else, {a}, would have the same entry as the key a.
        let tag_bytes = hash_tag(text.as_bytes()).map(<[u8]>::len);
        if text.contains('}') && tag_bytes.is_none_or(|tag| tag + 2 == text.len()) {
            return Err(KeyError::Braces);
        }
        if text.starts_with(RESERVED_PREFIX) {
            return Err(KeyError::Reserved);
        }
        Ok(Self(text.into()))
    }

    /// The key as the product service knows it, and as Kafka and Redis hold it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the tombstone entry beside this key, in the same cluster slot: the prefix and the key when the key has a hash tag of
    /// its own, the prefix and the whole key as a hash tag otherwise.
    pub fn entry(&self) -> String {
        if hash_tag(self.0.as_bytes()).is_some() { format!("{ENTRY_PREFIX}{}", self.0) } else { format!("{ENTRY_PREFIX}{{{}}}", self.0) }
    }

    /// The key whose entry has this name; `None` when it is no entry's name.
    pub fn of_entry(name: &str) -> Option<Self> {
        let rest = name.strip_prefix(ENTRY_PREFIX)?;
        let whole = rest.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        let candidates = [whole, Some(rest)].into_iter().flatten();
        candidates.filter_map(|text| Self::parse(text).ok()).find(|key| key.entry() == name)
    }

    /// The cluster slot of the key, and of its entry.
    pub fn slot(&self) -> u16 {
        slot(self.0.as_bytes())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self.0)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The key prefixes that one region's subscriber may touch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPrefixes(Vec<String>);

impl KeyPrefixes {
    /// Takes a list of prefixes.
    ///
    /// # Errors
    /// Says which prefix is wrong: the list must not be empty, a prefix must not be empty, hold white space or control characters, or overlap `recant:`.
    pub fn parse(prefixes: &[String]) -> Result<Self, String> {
        if prefixes.is_empty() {
            return Err("name at least one key prefix, for example v2:".to_owned());
        }
        for prefix in prefixes {
            let overlaps = RESERVED_PREFIX.starts_with(prefix.as_str()) || prefix.starts_with(RESERVED_PREFIX);
            if overlaps || prefix.contains(|c: char| c.is_control() || c.is_whitespace()) {
                return Err(format!("{prefix:?} is not a key prefix: it must not be empty, hold spaces, or overlap {RESERVED_PREFIX}"));
            }
        }
        Ok(Self(prefixes.to_vec()))
    }

    /// Whether the key lies below one of the prefixes.
    pub fn allow(&self, key: &Key) -> bool {
        self.0.iter().any(|prefix| key.as_str().starts_with(prefix.as_str()))
    }

    /// The prefixes as configured.
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }
}

/// The cluster slot of any Redis key.
pub fn slot(key: &[u8]) -> u16 {
    crc16(hash_tag(key).unwrap_or(key)) % SLOTS
}

/// The part that Redis Cluster hashes instead of the whole key: between the first `{` and the first `}` after it, when not empty.
fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let open = key.iter().position(|byte| *byte == b'{')?;
    let rest = &key[open + 1..];
    let close = rest.iter().position(|byte| *byte == b'}')?;
    (close > 0).then(|| &rest[..close])
}

/// CRC-16/XMODEM: polynomial 0x1021, initial value 0 (Redis Cluster specification, appendix A).
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ CRC16_TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const CRC16_TABLE: [u16; 256] = {
    let mut table = [0u16; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        // Read from CLUSTER KEYSLOT.
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
        assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
    }

    #[test]
    fn a_bad_key_says_which_rule_it_breaks() {
        let long = "k".repeat(MAX_KEY_BYTES + 1);
        for (text, error) in [
            ("", KeyError::Empty),
            (long.as_str(), KeyError::TooLong(251)),
            ("a b", KeyError::Forbidden(1)),
            ("a\u{0}", KeyError::Forbidden(1)),
            ("a\u{a0}b", KeyError::Forbidden(1)),
            ("ab\u{85}", KeyError::Forbidden(2)),
            ("a}b", KeyError::Braces),
            ("a{}b", KeyError::Braces),
            ("{}{tag}", KeyError::Braces),
            ("{tag}", KeyError::Braces),
            ("recant:t:x", KeyError::Reserved),
        ] {
            assert_eq!(Key::parse(text), Err(error), "{text:?}");
        }
    }

    #[test]
    fn a_good_key_is_taken_as_it_is() {
        for text in ["v2:shop:product:7", "v2:{shop}:p", "a{b", "{a}}", "v2:größe:日本", &"é".repeat(125)] {
            assert_eq!(Key::parse(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn prefixes_never_cover_what_belongs_to_recant() {
        for bad in ["", "rec", "recant:", "recant:t:", "a b"] {
            assert!(KeyPrefixes::parse(&[bad.to_owned()]).is_err(), "{bad:?}");
        }
        let prefixes = KeyPrefixes::parse(&["v2:".to_owned()]).unwrap();
        assert!(prefixes.allow(&Key::parse("v2:a").unwrap()));
        assert!(!prefixes.allow(&Key::parse("v1:a").unwrap()));
    }

    proptest! {
        #[test]
        fn every_accepted_key_shares_its_slot_with_its_entry(text in "[ab{}:é]{1,12}") {
            if let Ok(key) = Key::parse(&text) {
                prop_assert_eq!(key.slot(), slot(key.entry().as_bytes()));
                prop_assert!(Key::parse(&key.entry()).is_err());
                prop_assert_eq!(Key::of_entry(&key.entry()), Some(key));
            }
        }
    }

    #[test]
    fn two_keys_never_share_an_entry() {
        // Every text of up to six of these characters: what can collide, collides here.
        let mut texts = vec![String::new()];
        let mut entries = std::collections::HashMap::new();
        for _ in 0..6 {
            texts = texts.iter().flat_map(|text| ["a", "b", "{", "}"].map(|next| format!("{text}{next}"))).collect();
            for key in texts.iter().filter_map(|text| Key::parse(text).ok()) {
                assert_eq!(entries.insert(key.entry(), key.clone()), None, "{key:?}");
            }
        }
    }
}
