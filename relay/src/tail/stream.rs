//! One replication stream on a temporary slot: the only code that speaks the replication protocol.

use super::login::Login;
use super::loss::{Loss, Reason};
use crate::outbox::log::{NOTICE_A_LOST_CLIENT, PREFLIGHT, PUBLICATION};
use pgwire_replication::client::{QueryRow, ReplicationClient, ReplicationEvent};
use pgwire_replication::config::ReplicationConfig;
use pgwire_replication::error::PgWireError;
use std::time::Duration;
use uuid::Uuid;

/// Settings of the tail's session, in force from its first moment. Making a slot waits for the end of every transaction that is writing at that moment:
/// 5 s for one of them is more than a product's takes, and meanwhile the timer wakes. A relay that has stopped reading loses its slot after 10 s
/// without a sign of life, asked for after 5.
const SESSION: &str = "-c lock_timeout=5s -c wal_sender_timeout=10s -c statement_timeout=5s -c search_path=pg_catalog,pg_temp";

/// Most time for opening a stream: connecting (5 s as for other sessions) and three waits for older transactions, which is how often a slot's
/// making looks around.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);

/// The server speaks at least every 5 s, half of `wal_sender_timeout`; twice that means that it is gone.
const SILENCE: Duration = Duration::from_secs(10);

/// How often the server is told what has been received. Confirming costs it a little each time; a second of log is far below any bound for what is retained.
const CONFIRM_EVERY: Duration = Duration::from_secs(1);

/// Largest message: one row of ours has one number, and other programs' log messages come along unasked. A larger one ends the stream.
const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// Messages read ahead: 16 MB at the very most, a few KB with rows of ours.
const READ_AHEAD: usize = 64;

/// For a polite goodbye.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// What the stream says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// A transaction with so many outbox rows was committed, and the log is read up to this position.
    Committed { rows: u64, position: u64 },
    /// Nothing of ours up to this position.
    Nothing { position: u64 },
}

/// An open stream. Dropped, it breaks the connection at once, and the server drops the slot.
pub(super) struct Stream {
    client: ReplicationClient,
    slot: String,
    cluster: String,
    rows: u64,
}

impl Stream {
    /// Connects, makes a temporary slot and starts streaming from it, all on one session. `name` appears in `pg_stat_activity`.
    pub(super) async fn open(login: &Login, name: &str) -> Result<Self, Loss> {
        match tokio::time::timeout(OPEN_TIMEOUT, Self::start(login, name)).await {
            Ok(result) => result,
            Err(_) => Err(Loss::new(Reason::Unreachable, format!("no replication stream within {} s", OPEN_TIMEOUT.as_secs()))),
        }
    }

    async fn start(login: &Login, name: &str) -> Result<Self, Loss> {
        // A temporary slot still needs a name that nobody else in the cluster has.
        let slot = format!("recant_tail_{}", Uuid::now_v7().simple());
        let mut config = ReplicationConfig::new(&login.host, &login.user, login.password.expose(), &login.database, &slot, PUBLICATION)
            .with_port(login.port)
            .with_tls(login.tls.clone())
            .with_status_interval(CONFIRM_EVERY)
            .with_buffer_size(READ_AHEAD)
            .with_max_message_size(MAX_MESSAGE_BYTES)
            .with_options(SESSION)
            .with_application_name(format!("recant tail {name}"));
        // The silence of a quiet outbox is not worth a status of our own: the server asks for one in time.
        config.idle_wakeup_interval = SILENCE;
        let client = ReplicationClient::connect_gated(config).await.map_err(|error| opening(&error))?;
        let mut this = Self { client, slot, cluster: String::new(), rows: 0 };
        this.inspect().await?;
        // Nothing in it is needed but the slot itself, so it keeps no snapshot: an exported one would hold back vacuum while the making waits.
        let create = format!("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", this.slot);
        this.client.simple_query(&create).await.map_err(|error| opening(&error))?;
        this.client.start().await.map_err(|error| opening(&error))?;
        this.client.wait_started().await.map_err(|error| opening(&error))?;
        Ok(this)
    }

    /// What the server would refuse later with less clear words, or, the publication missing, only at the first commit.
    async fn inspect(&mut self) -> Result<(), Loss> {
        let rows = self.client.simple_query(PREFLIGHT).await.map_err(|error| opening(&error))?;
        // A platform without it notices a lost client later.
        let _ = self.client.simple_query(NOTICE_A_LOST_CLIENT).await;
        let [wal_level, standby, any_is_synchronous, published, cluster] = texts(rows)?;
        if standby == "true" {
            return Err(Loss::new(Reason::Standby, "the server is a standby"));
        }
        if wal_level != "logical" {
            return Err(Loss::new(Reason::WalLevel, format!("wal_level is {wal_level}")));
        }
        if any_is_synchronous == "true" {
            // Commits would wait for the tail's confirmation, and count as safe on a second machine when it has arrived.
            return Err(Loss::new(Reason::Synchronous, "synchronous_standby_names holds *, so the tail would be a synchronous standby"));
        }
        if published != "true" {
            return Err(Loss::new(Reason::Publication, format!("the publication {PUBLICATION} is missing")));
        }
        self.cluster = cluster;
        Ok(())
    }

    /// The slot's name.
    pub(super) fn slot(&self) -> &str {
        &self.slot
    }

    /// The cluster's system identifier.
    pub(super) fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Waits for the next word, and confirms what was received: nothing of it is needed again.
    ///
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Word, Loss> {
        loop {
            let event = match tokio::time::timeout(SILENCE, self.client.recv()).await {
                Ok(event) => event.map_err(|error| living(&error))?,
                Err(_) => return Err(Loss::new(Reason::Silent, format!("the server said nothing for {} s", SILENCE.as_secs()))),
            };
            match event {
                Some(ReplicationEvent::XLogData { data, .. }) => self.rows += u64::from(data.first() == Some(&b'I')),
                Some(ReplicationEvent::Commit { end_lsn, .. }) => {
                    self.client.update_applied_lsn(end_lsn);
                    return Ok(Word::Committed { rows: std::mem::take(&mut self.rows), position: end_lsn.as_u64() });
                }
                Some(ReplicationEvent::KeepAlive { wal_end, .. }) => {
                    self.client.update_applied_lsn(wal_end);
                    return Ok(Word::Nothing { position: wal_end.as_u64() });
                }
                Some(ReplicationEvent::Begin { .. } | ReplicationEvent::Message { .. } | ReplicationEvent::StoppedAt { .. }) => {}
                None => return Err(Loss::new(Reason::Ended, "the server ended the stream")),
            }
        }
    }

    /// Says goodbye.
    pub(super) async fn close(mut self) {
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.client.shutdown()).await;
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Not the client's own way: it lets the session go on until it is polite to end, and with it the slot.
        self.client.abort();
    }
}

/// The one row of a query, as texts.
fn texts<const N: usize>(rows: Vec<QueryRow>) -> Result<[String; N], Loss> {
    let row = rows.into_iter().next().unwrap_or_default();
    let texts: Vec<_> =
        row.into_iter().map(|value| value.map_or_else(String::new, |text| String::from_utf8_lossy(&text).into_owned())).collect();
    texts.try_into().map_err(|_| Loss::new(Reason::Other, "an answer of the server has another shape"))
}

/// The crate's own `is_transient` knows no SQLSTATEs, so losses are told apart here.
fn opening(error: &PgWireError) -> Loss {
    match error {
        PgWireError::Server(text) => match Loss::of_server(text) {
            // A server that starts up or shuts down is as good as away.
            Loss { reason: Reason::Ended, text } => Loss { reason: Reason::Unreachable, text },
            loss => loss,
        },
        PgWireError::Auth(text) => Loss::new(Reason::Login, text.clone()),
        PgWireError::Io(_) => Loss::new(Reason::Unreachable, error.to_string()),
        other => Loss::new(Reason::Other, other.to_string()),
    }
}

fn living(error: &PgWireError) -> Loss {
    match error {
        PgWireError::Server(text) => Loss::of_server(text),
        PgWireError::Io(_) => Loss::new(Reason::Ended, error.to_string()),
        other => Loss::new(Reason::Other, other.to_string()),
    }
}
