//! The write-ahead log, as far as the tail is concerned. The tail itself speaks the replication protocol (see [`crate::tail`]); what it asks in SQL is asked here.

use super::{OutboxFault, Session, answer, unsigned};
use sqlx::Row as _;

/// The publication that migration 0005 makes.
pub const PUBLICATION: &str = "recant_tail";

/// Asked on the tail's own session before it makes a slot, by the simple protocol, so every answer is a text: wal_level, whether the server is a
/// standby, whether any standby of any name is a synchronous one, whether the publication is there, and which cluster this is. Names are
/// qualified: the login's search_path is not ours.
pub(crate) const PREFLIGHT: &str = "
    select
        pg_catalog.current_setting('wal_level'),
        pg_catalog.pg_is_in_recovery()::pg_catalog.text,
        (pg_catalog.strpos(pg_catalog.current_setting('synchronous_standby_names'), '*') > 0)::pg_catalog.text,
        (exists (
            select from pg_catalog.pg_publication_tables
            where pubname = 'recant_tail' and schemaname = 'recant' and tablename = 'outbox'
        ))::pg_catalog.text,
        (select system_identifier::pg_catalog.text from pg_catalog.pg_control_system())";

/// Not every platform can look whether a client is still there while it waits; where it can, a slot that nobody waits for any more is given up within 2 s.
pub(crate) const NOTICE_A_LOST_CLIENT: &str = "set client_connection_check_interval = '2s'";

// From the oldest log that the slot keeps to the newest there is. That can be far more than what the tail has not read yet: a transaction that stays open
// keeps everything since its beginning.
const RETAINED: &str = "
    select greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint from pg_replication_slots where slot_name = $1";

impl Session {
    /// Bytes of log that a slot keeps the server from recycling; `None` when there is no such slot.
    ///
    /// # Errors
    /// From Postgres.
    pub async fn retained_by(&mut self, slot: &str) -> Result<Option<u64>, OutboxFault> {
        let row = answer(sqlx::query(RETAINED).bind(slot).fetch_optional(&mut self.connection)).await?;
        let Some(row) = row else { return Ok(None) };
        let bytes: Option<i64> = row.try_get(0).map_err(OutboxFault::new)?;
        Ok(bytes.map(unsigned))
    }
}
