//! PURE: the cache scripts, their arguments and their replies.
//!
//! Each script is one atomic step of the cache protocol on one cache key. [`crate::tombstone`] states the same rules in Rust; an
//! integration test runs both side by side on a real Redis.
//!
//! | script | keys | arguments, all text | reply |
//! | --- | --- | --- | --- |
//! | [`READ`] | value, entry | nonce, mark ttl in ms, `1` to refresh or empty | array: value or nil; with a mark also the mark and 1 (left now) or 0 (found) |
//! | [`FILL`] | value, entry | mark, value, value ttl in ms, source, epoch, position (the last three empty without a version) | [`FillReply`] |
//! | [`INVALIDATE`] | value, entry | source, epoch, position, floor ttl in ms, [`Tombstones::as_str`] | [`InvalidateReply`] |
//! | [`OWE`] | entry | source, epoch, position, floor ttl in ms | [`OweReply`] |
//! | [`FORGET`] | value, entry | none | [`ForgetReply`] |
//!
//! A ttl is 1 to 9,999,999,999,999 ms. Epoch and position are canonical decimals (`u64` formatted by Rust is). An argument that breaks
//! these rules is answered with an error and changes nothing.
//!
//! **The entry** is a hash: `s`, `e`, `p` the floor's source, epoch and position; `m` the mark, absent or empty for none; `u` is `1` while
//! an unlink is owed. Its name is [`Key::entry`](crate::key::Key::entry).
//!
//! **Single-key steps** stand in where a script over both keys cannot run. While a cluster slot moves: `OWE`, then `UNLINK value`; and for
//! `FORGET`: `HDEL entry m`, then `UNLINK value` (`u` stays, or somebody else's owed unlink could be lost in a crash between the two).
//! When memory is full and `INVALIDATE` is refused: `UNLINK entry`, then `UNLINK value`. The entry always comes first, or a fill that
//! still holds its mark puts the old value back in between.

use serde::Deserialize;

/// A hit, or a miss with the mark that a fill needs.
pub const READ: &str = include_str!("../lua/read.lua");
/// A cache write after a miss, refused when an invalidation came in between.
pub const FILL: &str = include_str!("../lua/fill.lua");
/// Raises the floor, erases the mark, unlinks the value.
pub const INVALIDATE: &str = include_str!("../lua/invalidate.lua");
/// Raises the floor, erases the mark, and notes that the value is still to be unlinked.
pub const OWE: &str = include_str!("../lua/owe.lua");
/// Unlinks the value and erases the mark; the floor stays.
pub const FORGET: &str = include_str!("../lua/forget.lua");

/// Every script with its name, to be loaded at the head of each new connection: a new or promoted node knows none of them.
pub const ALL: [(&str, &str); 5] = [("read", READ), ("fill", FILL), ("invalidate", INVALIDATE), ("owe", OWE), ("forget", FORGET)];

/// Longest ttl that the scripts take, in milliseconds (317 years). `PEXPIRE` fails once ttl and clock together leave 64 bits.
pub const MAX_TTL_MS: u64 = 9_999_999_999_999;

/// When an invalidation leaves a tombstone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tombstones {
    /// For every invalidation. Needed where readers fill from replicas.
    #[default]
    Always,
    /// Only when a value or an entry is there. Saves memory where all readers read from the primary.
    WhenCached,
}

impl Tombstones {
    /// The word in the configuration and in the arguments of [`INVALIDATE`].
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::WhenCached => "when-cached",
        }
    }
}

/// A script answered with a number that this version does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {script} script replied {code}, which has no meaning")]
pub struct UnknownReply {
    /// Which script.
    pub script: &'static str,
    /// What it replied.
    pub code: i64,
}

/// Declares the replies of one script, each with its number on the wire.
macro_rules! replies {
    ($(#[$doc:meta])* $name:ident of $script:literal { $($(#[$case_doc:meta])* $case:ident = $code:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i64)]
        pub enum $name { $($(#[$case_doc])* $case = $code,)+ }

        impl $name {
            /// The number on the wire.
            pub const fn code(self) -> i64 {
                self as i64
            }
        }

        impl TryFrom<i64> for $name {
            type Error = UnknownReply;

            fn try_from(code: i64) -> Result<Self, UnknownReply> {
                match code {
                    $($code => Ok(Self::$case),)+
                    _ => Err(UnknownReply { script: $script, code }),
                }
            }
        }
    };
}

replies! {
    /// What [`FILL`] did.
    FillReply of "fill" {
        /// The value is set.
        Filled = 1,
        /// Refused: the entry does not hold this mark. It was erased by an invalidation, or the entry was evicted, expired or lost.
        MarkGone = 0,
        /// Refused: the version is below the floor, or of another source and so not comparable with it.
        BelowFloor = -1,
    }
}

replies! {
    /// What [`INVALIDATE`] did.
    InvalidateReply of "invalidate" {
        /// The floor of this source was already there or above, and no unlink was owed: nothing changed.
        Repeat = 0,
        /// Applied; no value was there.
        Applied = 1,
        /// Applied, and a value was unlinked.
        Deleted = 2,
        /// Neither value nor entry was there and [`Tombstones::WhenCached`] asked to write nothing then.
        NothingThere = 3,
    }
}

replies! {
    /// What [`OWE`] did.
    OweReply of "owe" {
        /// The floor of this source was already there or above, and no unlink was owed: leave the value alone.
        Repeat = 0,
        /// The unlink is noted as owed: unlink the value now.
        Owed = 1,
    }
}

replies! {
    /// What [`FORGET`] did.
    ForgetReply of "forget" {
        /// No value was there; a mark, if there was one, is erased.
        NothingThere = 0,
        /// A value was unlinked.
        Deleted = 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of a script from the line that begins with `from` through the line that is `to`.
    fn fragment<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
        let start = text.find(from).expect("the script holds the fragment");
        let length = text[start..].find(to).expect("the fragment ends") + to.len();
        &text[start..start + length]
    }

    #[test]
    fn every_script_compares_versions_by_the_same_lines() {
        for (from, to) in [("local function canonical", "\nend\n"), ("local function below", "\nend\n")] {
            let rule = fragment(INVALIDATE, from, to);
            assert_eq!(fragment(FILL, from, to), rule);
            assert_eq!(fragment(OWE, from, to), rule);
        }
    }

    #[test]
    fn owe_skips_by_the_same_lines_as_invalidate() {
        let (from, to) = ("if floor_source == source then", "\n  else\n    covered = below(epoch, floor_epoch)\n  end\n");
        assert_eq!(fragment(OWE, from, to), fragment(INVALIDATE, from, to));
    }

    #[test]
    fn no_script_has_a_shebang_so_that_redis_judges_memory_at_the_first_write() {
        for (name, text) in ALL {
            assert!(!text.starts_with("#!"), "{name}");
        }
    }

    #[test]
    fn no_script_turns_a_version_into_a_lua_number() {
        for (name, text) in ALL {
            for call in text.match_indices("tonumber(") {
                assert!(text[call.0..].starts_with("tonumber(ttl)"), "{name}");
            }
        }
    }

    #[test]
    fn every_reply_reads_back_as_what_was_meant() {
        for reply in [FillReply::Filled, FillReply::MarkGone, FillReply::BelowFloor] {
            assert_eq!(FillReply::try_from(reply.code()), Ok(reply));
        }
        for reply in [InvalidateReply::Repeat, InvalidateReply::Applied, InvalidateReply::Deleted, InvalidateReply::NothingThere] {
            assert_eq!(InvalidateReply::try_from(reply.code()), Ok(reply));
        }
        for reply in [OweReply::Repeat, OweReply::Owed] {
            assert_eq!(OweReply::try_from(reply.code()), Ok(reply));
        }
        for reply in [ForgetReply::NothingThere, ForgetReply::Deleted] {
            assert_eq!(ForgetReply::try_from(reply.code()), Ok(reply));
        }
    }

    #[test]
    fn an_unknown_reply_names_its_script() {
        let error = InvalidateReply::try_from(9).unwrap_err();
        assert_eq!(error.to_string(), "the invalidate script replied 9, which has no meaning");
    }
}
