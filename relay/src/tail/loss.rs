//! PURE: why there is no tail, from the words of the server, and what a person can do about it.

/// Why the tail ended or could not be made. A fixed set: these are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// `wal_level` is below `logical`.
    WalLevel,
    /// Wrong user, password or database, or `pg_hba.conf` has no line for it.
    Login,
    /// The login lacks REPLICATION.
    Privilege,
    /// All slots or WAL senders are in use.
    Slots,
    /// A transaction that is open elsewhere holds up the making of a slot.
    LongTransaction,
    /// The publication is missing.
    Publication,
    /// The server is a standby.
    Standby,
    /// The server would take the tail for a synchronous standby.
    Synchronous,
    /// The slot kept too much log.
    Retained,
    /// No connection could be made.
    Unreachable,
    /// A living stream broke or was ended.
    Ended,
    /// A living stream said nothing for too long.
    Silent,
    /// Anything else.
    Other,
}

impl Reason {
    /// Every reason, for metrics.
    pub const ALL: [Self; 13] = [
        Self::WalLevel,
        Self::Login,
        Self::Privilege,
        Self::Slots,
        Self::LongTransaction,
        Self::Publication,
        Self::Standby,
        Self::Synchronous,
        Self::Retained,
        Self::Unreachable,
        Self::Ended,
        Self::Silent,
        Self::Other,
    ];

    /// Its spelling in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::WalLevel => "wal_level",
            Self::Login => "login",
            Self::Privilege => "privilege",
            Self::Slots => "slots",
            Self::LongTransaction => "long_transaction",
            Self::Publication => "publication",
            Self::Standby => "standby",
            Self::Synchronous => "synchronous",
            Self::Retained => "retained",
            Self::Unreachable => "unreachable",
            Self::Ended => "ended",
            Self::Silent => "silent",
            Self::Other => "other",
        }
    }

    /// What a person can do, where something has to be done.
    pub const fn remedy(self) -> Option<&'static str> {
        match self {
            Self::WalLevel => Some("set wal_level = logical and restart Postgres, or set wake = \"timer\""),
            Self::Login => Some("correct user, password, host and database in tail_url, and let pg_hba.conf admit the login"),
            Self::Privilege => Some("alter role … replication for the login in tail_url, as an administrator"),
            Self::Slots => Some("raise max_replication_slots and max_wal_senders, or give tail_url to fewer relays: one or two are enough"),
            Self::LongTransaction => Some("end the oldest transaction in pg_stat_activity"),
            Self::Publication => Some("run relay migrate"),
            Self::Standby => Some("tail_url must name the primary"),
            Self::Synchronous => Some("name the standbys in synchronous_standby_names instead of *"),
            Self::Retained => Some("end the oldest transaction in pg_stat_activity, or raise tail_retained_mb"),
            Self::Unreachable | Self::Ended | Self::Silent | Self::Other => None,
        }
    }

    /// Whether it stays until a person has changed something; the others may pass by themselves.
    pub const fn lasts(self) -> bool {
        matches!(self, Self::WalLevel | Self::Login | Self::Privilege | Self::Publication | Self::Standby | Self::Synchronous)
    }
}

/// One loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Why.
    pub reason: Reason,
    /// The words for it, of the server where it had any.
    pub text: String,
}

impl Loss {
    /// A loss in our words.
    pub fn new(reason: Reason, text: impl Into<String>) -> Self {
        Self { reason, text: text.into() }
    }

    /// A loss in the server's words, which end with its SQLSTATE.
    pub fn of_server(text: &str) -> Self {
        let code = text.rsplit_once("(SQLSTATE ").and_then(|(_, rest)| rest.strip_suffix(')'));
        Self::new(code.map_or(Reason::Other, of_sqlstate), text)
    }

    /// One line for a person.
    pub fn line(&self) -> String {
        let text = self.text.replace('\n', " ");
        match self.reason.remedy() {
            Some(remedy) => format!("{text}; {remedy}"),
            None => text,
        }
    }
}

fn of_sqlstate(code: &str) -> Reason {
    match code {
        "28000" | "28P01" | "3D000" => Reason::Login,
        "42501" => Reason::Privilege,
        // Too many WAL senders; all slots are in use.
        "53300" | "53400" => Reason::Slots,
        // The lock that slot creation waits for is the end of another transaction.
        "55P03" => Reason::LongTransaction,
        "42704" => Reason::Publication,
        // Ended by an administrator, shutting down, crashed, starting up, database dropped.
        "57P01" | "57P02" | "57P03" | "57P04" | "57P05" => Reason::Ended,
        // wal_level and standbys are told apart beforehand; what is left is a slot that is in use or was invalidated.
        "55000" | "55006" => Reason::Ended,
        code if code.starts_with("08") => Reason::Ended,
        _ => Reason::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_told_apart_by_sqlstate() {
        for (text, reason) in [
            ("terminating connection due to administrator command (SQLSTATE 57P01)", Reason::Ended),
            ("the database system is starting up (SQLSTATE 57P03)", Reason::Ended),
            ("replication slot \"x\" is active for PID 7 (SQLSTATE 55006)", Reason::Ended),
            ("all replication slots are in use (SQLSTATE 53400)", Reason::Slots),
            ("must be superuser or replication role to start walsender (SQLSTATE 42501)", Reason::Privilege),
            ("canceling statement due to lock timeout (SQLSTATE 55P03)", Reason::LongTransaction),
            ("publication \"recant_tail\" does not exist (SQLSTATE 42704)", Reason::Publication),
            ("no code at all", Reason::Other),
        ] {
            assert_eq!(Loss::of_server(text).reason, reason, "{text}");
        }
    }

    #[test]
    fn what_lasts_until_somebody_acts_has_a_remedy() {
        for reason in Reason::ALL.into_iter().filter(|reason| reason.lasts()) {
            assert!(reason.remedy().is_some(), "{reason:?}");
        }
    }
}
