//! PURE: what a delivered record asks for.

use recant_schema::invalidation::{Heartbeat, Invalidation};
use recant_schema::key::{Key, KeyPrefixes};
use recant_schema::record::{Record, RecordError};

/// Why a record was set aside.
#[derive(Debug, thiserror::Error)]
pub enum Poison {
    /// The value is no record of a format that this code reads.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The key lies outside this region's prefixes.
    #[error("the key is outside the configured key_prefixes")]
    KeyNotAllowed,
    /// The Kafka key and the key inside the value disagree.
    #[error("the record's key and the key inside its value differ")]
    KeyMismatch,
}

impl Poison {
    /// A short fixed name for headers and metric labels.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Record(error) => match error {
                RecordError::Empty => Reason::Empty,
                RecordError::TooLarge(_) => Reason::TooLarge,
                RecordError::Malformed(_) => Reason::Malformed,
                RecordError::UnknownFormat(_) => Reason::UnknownFormat,
                RecordError::Field { .. } | RecordError::Region(_) => Reason::BadField,
                RecordError::Key(_) => Reason::BadKey,
            },
            Self::KeyNotAllowed => Reason::KeyNotAllowed,
            Self::KeyMismatch => Reason::KeyMismatch,
        }
    }
}

/// The label of a [`Poison`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each is explained where it is made: Poison and RecordError")]
pub enum Reason {
    Empty,
    TooLarge,
    Malformed,
    UnknownFormat,
    BadField,
    BadKey,
    KeyNotAllowed,
    KeyMismatch,
}

impl Reason {
    /// The spelling in headers and metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::TooLarge => "too_large",
            Self::Malformed => "malformed",
            Self::UnknownFormat => "unknown_format",
            Self::BadField => "bad_field",
            Self::BadKey => "bad_key",
            Self::KeyNotAllowed => "key_not_allowed",
            Self::KeyMismatch => "key_mismatch",
        }
    }
}

/// What to do with a record.
#[derive(Debug)]
pub enum Verdict {
    /// Apply it.
    Apply(Invalidation),
    /// Time it.
    Time(Heartbeat),
    /// Set it aside. An unreadable invalidation is still one: when its Kafka key is a valid, allowed cache key, that key is forgotten first.
    SetAside(Poison, Option<Key>),
}

/// Judges one record by its Kafka key and value.
pub fn judge(key: Option<&[u8]>, value: Option<&[u8]>, prefixes: &KeyPrefixes) -> Verdict {
    let named =
        key.and_then(|bytes| std::str::from_utf8(bytes).ok()).and_then(|text| Key::parse(text).ok()).filter(|key| prefixes.allow(key));
    match Record::decode(value.unwrap_or_default()) {
        Ok(Record::Heartbeat(heartbeat)) => Verdict::Time(heartbeat),
        Ok(Record::Invalidation(invalidation)) => {
            if key != Some(invalidation.key.as_str().as_bytes()) {
                Verdict::SetAside(Poison::KeyMismatch, named)
            } else if !prefixes.allow(&invalidation.key) {
                Verdict::SetAside(Poison::KeyNotAllowed, None)
            } else {
                Verdict::Apply(invalidation)
            }
        }
        Err(error) => Verdict::SetAside(error.into(), named),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUE: &str = r#"{"format":1,"kind":"invalidation","id":"01890a5d-ac96-774b-bcce-b302099a8057","key":"v2:a","epoch":"1","position":"9223372036854775807",
        "lane":"realtime","committed_at":1,"commit_basis":"commit","source":{"database":"shop","relay":"r","later":1},"later":{}}"#;

    fn judged(key: Option<&str>, value: &str) -> Verdict {
        judge(key.map(str::as_bytes), Some(value.as_bytes()), &KeyPrefixes::parse(&["v2:".to_owned()]).unwrap())
    }

    #[test]
    fn a_good_record_is_applied_and_unknown_fields_do_not_matter() {
        let Verdict::Apply(invalidation) = judged(Some("v2:a"), VALUE) else { panic!("not applied") };
        assert_eq!(invalidation.version.position, i64::MAX as u64);
    }

    #[test]
    fn a_poison_record_still_forgets_a_valid_key() {
        let unknown = VALUE.replace("\"format\":1", "\"format\":2");
        let elsewhere = VALUE.replace("v2:a", "v1:a");
        let huge = format!("{{\"x\":\"{}\"}}", "x".repeat(2 << 20));
        for (key, value, reason, forgets) in [
            (Some("v2:a"), unknown.as_str(), Reason::UnknownFormat, true),
            (Some("v2:a"), r#"{"format":7,"all":"else"}"#, Reason::UnknownFormat, true),
            (Some("v2:a"), &VALUE[..60], Reason::Malformed, true),
            (Some("v2:a"), "", Reason::Empty, true),
            (Some("v2:a"), huge.as_str(), Reason::TooLarge, true),
            (Some("v2:b"), VALUE, Reason::KeyMismatch, true),
            (Some("v1:a"), elsewhere.as_str(), Reason::KeyNotAllowed, false),
            (Some("v1:a"), "garbage", Reason::Malformed, false),
            (Some("v2:a b"), "garbage", Reason::Malformed, false),
            (None, VALUE, Reason::KeyMismatch, false),
            (Some("v2:a"), &VALUE.replace("\"1\",\"position", "\"01\",\"position"), Reason::BadField, true),
            (Some("v2:a"), &VALUE.replace("\"v2:a\"", "\"v2:}\""), Reason::BadKey, true),
        ] {
            let Verdict::SetAside(poison, forgotten) = judged(key, value) else { panic!("{key:?} was not set aside") };
            assert_eq!((poison.reason(), forgotten.is_some()), (reason, forgets), "{key:?} {poison}");
        }
    }
}
