//! PURE: the small fixed sets that appear in records, rows and metric labels.

use serde::{Deserialize, Serialize};

macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every value, in the order of the definition.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The spelling used in records, rows and metric labels.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// Reads the spelling of [`Self::as_str`]; anything else is `None`.
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.as_str() == text)
            }
        }
    };
}

label! {
    /// How wrong a kind of data may be, and so what a lost invalidation costs.
    Class {
        /// Titles, descriptions, images: kept for minutes, may be served stale for a while.
        Descriptive = "C1",
        /// Prices on a card: a TTL as a backstop, invalidation lag is the freshness.
        Price = "C2",
        /// A display-only badge: kept for seconds.
        Badge = "C3",
        /// Reservations, payments, permissions: never cached by TTL alone.
        Authority = "C4",
    }
}

label! {
    /// Which topics a row travels on; bulk work does not stand in front of realtime work.
    Lane {
        /// The default.
        Realtime = "realtime",
        /// Imports and backfills.
        Bulk = "bulk",
    }
}

label! {
    /// What `committed_at` was read from.
    CommitBasis {
        /// Postgres' own commit timestamp (`track_commit_timestamp = on`).
        Commit = "commit",
        /// The clock at the insert: earlier than the commit, so times measured from it are upper bounds.
        Insert = "insert",
    }
}

label! {
    /// How an epoch came about.
    EpochCause {
        /// The first epoch of a source.
        First = "first",
        /// The server was restarted, or the database copied, without crash recovery.
        Restart = "restart",
        /// Crash recovery emptied the incarnation; only unflushed log was lost.
        Crash = "crash",
        /// The timeline rose: commits that readers had seen may be lost.
        Promoted = "promoted",
        /// The topics know a later history than the database: commits are lost.
        Restored = "restored",
        /// Somebody asked for it.
        ByHand = "by hand",
    }
}

impl EpochCause {
    /// Whether commits may be lost that readers had cached and that no invalidation will ever name.
    pub const fn loses_commits(self) -> bool {
        match self {
            Self::Promoted | Self::Restored => true,
            Self::First | Self::Restart | Self::Crash | Self::ByHand => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_reads_back_as_itself_and_nothing_else_reads() {
        for class in Class::ALL {
            assert_eq!(Class::parse(class.as_str()), Some(*class));
        }
        assert_eq!(Class::parse("c1"), None);
        assert_eq!(Lane::parse("Bulk"), None);
        assert_eq!(EpochCause::parse("by hand"), Some(EpochCause::ByHand));
    }
}
