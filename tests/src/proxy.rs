//! A TCP proxy in front of Postgres or Redis, with faults that have names.
//!
//! Crashes at exact steps are made with it on unmodified binaries: a relay that has published and not yet retired is one whose COMMIT is held here
//! while it is killed.

use crate::wait::DEADLINE;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Bytes read at once.
const CHUNK: usize = 16 * 1024;

/// Bytes kept while nothing may pass; the sender's own buffers hold the rest.
const MAX_PENDING: usize = 1024 * 1024;

/// Which way bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToServer,
    ToClient,
}

/// What may pass.
#[derive(Clone, Debug, Default)]
struct Rules {
    cut: bool,
    /// How often connections were cut: one from before the newest cut ends, also when it only gets to look after the restore.
    cuts: u64,
    frozen: bool,
    hold: Option<(Direction, Vec<u8>)>,
    closed: bool,
}

/// A proxy for one server. Its own thread serves it, so a test may block.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    rules: watch::Sender<Rules>,
    held: watch::Receiver<usize>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// In front of `server` (`host:port`).
    ///
    /// # Panics
    /// When the machine gives no port or no thread.
    pub fn start(server: &str) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("the loopback address has free ports");
        listener.set_nonblocking(true).expect("a socket can be made non-blocking");
        let address = listener.local_addr().expect("a bound socket has an address");
        let (rules, changes) = watch::channel(Rules::default());
        let (counter, held) = watch::channel(0);
        let server = server.to_owned();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
            runtime.block_on(serve(listener, server, changes, counter));
        });
        Self { address, rules, held, thread: Some(thread) }
    }

    /// Where clients connect: `host:port`.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Drops all connections and takes no new ones, as if the server were gone.
    pub fn cut(&self) {
        self.rules.send_modify(|rules| {
            rules.cut = true;
            rules.cuts += 1;
        });
    }

    /// Takes connections again.
    pub fn restore(&self) {
        self.rules.send_modify(|rules| rules.cut = false);
    }

    /// Lets nothing pass in either direction, as a frozen server or a network that swallows packets; connections stay open.
    pub fn freeze(&self) {
        self.rules.send_modify(|rules| rules.frozen = true);
    }

    /// Stops forwarding to the server as soon as a client's bytes contain the pattern; they are not forwarded either.
    pub fn hold_on(&self, pattern: &[u8]) {
        self.rules.send_modify(|rules| rules.hold = Some((Direction::ToServer, pattern.to_vec())));
    }

    /// Stops forwarding to the client as soon as the server's bytes contain the pattern: done, but the client does not know.
    pub fn hold_replies_on(&self, pattern: &[u8]) {
        self.rules.send_modify(|rules| rules.hold = Some((Direction::ToClient, pattern.to_vec())));
    }

    /// Waits until something is held.
    ///
    /// # Panics
    /// When nothing was in time.
    pub async fn await_held(&self) {
        let mut held = self.held.clone();
        let waiting = held.wait_for(|connections| *connections > 0);
        assert!(matches!(tokio::time::timeout(DEADLINE, waiting).await, Ok(Ok(_))), "nothing was held within {DEADLINE:?}");
    }

    /// Waits until every connection on which something is held has ended: its client is gone, and what was held was never forwarded.
    ///
    /// # Panics
    /// When one stays.
    pub async fn await_dropped(&self) {
        let mut held = self.held.clone();
        let waiting = held.wait_for(|connections| *connections == 0);
        assert!(matches!(tokio::time::timeout(DEADLINE, waiting).await, Ok(Ok(_))), "a held connection is still open after {DEADLINE:?}");
    }

    /// Lets what is held or frozen go on.
    pub fn release(&self) {
        self.rules.send_modify(|rules| {
            rules.hold = None;
            rules.frozen = false;
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.rules.send_modify(|rules| rules.closed = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(listener: std::net::TcpListener, server: String, mut rules: watch::Receiver<Rules>, held: watch::Sender<usize>) {
    let listener = TcpListener::from_std(listener).expect("the socket is non-blocking");
    loop {
        tokio::select! {
            changed = rules.changed() => if changed.is_err() || rules.borrow().closed { return },
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                if rules.borrow().cut {
                    continue;
                }
                tokio::spawn(connect(client, server.clone(), rules.clone(), held.clone()));
            }
        }
    }
}

/// One connection, until either side ends it.
async fn connect(client: TcpStream, server: String, rules: watch::Receiver<Rules>, held: watch::Sender<usize>) {
    let cuts = rules.borrow().cuts;
    let Ok(upstream) = TcpStream::connect(&server).await else { return };
    let _ = (client.set_nodelay(true), upstream.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), upstream.into_split());
    // The end of one direction ends the other: halves that are dropped close the connection, and the server sees that its client is gone.
    tokio::select! {
        () = Pump::new(Direction::ToServer, cuts, rules.clone(), held.clone()).run(from_client, to_server) => {}
        () = Pump::new(Direction::ToClient, cuts, rules, held).run(from_server, to_client) => {}
    }
}

/// One direction of one connection.
struct Pump {
    direction: Direction,
    cuts: u64,
    rules: watch::Receiver<Rules>,
    held: watch::Sender<usize>,
    holding: bool,
    pending: Vec<u8>,
    /// The end of what was forwarded, for patterns that arrive in two pieces.
    tail: Vec<u8>,
}

impl Pump {
    fn new(direction: Direction, cuts: u64, rules: watch::Receiver<Rules>, held: watch::Sender<usize>) -> Self {
        Self { direction, cuts, rules, held, holding: false, pending: Vec::new(), tail: Vec::new() }
    }

    async fn run(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut chunk = vec![0; CHUNK];
        loop {
            let rules = self.rules.borrow_and_update().clone();
            if rules.cuts != self.cuts || rules.closed {
                return;
            }
            if !self.pending.is_empty() && !self.blocked(&rules) {
                if to.write_all(&self.pending).await.is_err() {
                    return;
                }
                self.forwarded(&rules);
            }
            tokio::select! {
                changed = self.rules.changed() => if changed.is_err() { return },
                // Also while nothing may pass: a client that was killed must be seen to be gone.
                read = from.read(&mut chunk), if self.pending.len() < MAX_PENDING => match read {
                    Ok(0) | Err(_) => return,
                    Ok(length) => self.pending.extend_from_slice(&chunk[..length]),
                },
            }
        }
    }

    fn blocked(&mut self, rules: &Rules) -> bool {
        let matches = match &rules.hold {
            Some((direction, pattern)) if *direction == self.direction => {
                self.holding || contains(&[&self.tail[..], &self.pending].concat(), pattern)
            }
            _ => false,
        };
        if matches != self.holding {
            self.holding = matches;
            self.held.send_modify(|connections| if matches { *connections += 1 } else { *connections -= 1 });
        }
        matches || rules.frozen
    }

    fn forwarded(&mut self, rules: &Rules) {
        let keep = rules.hold.as_ref().map_or(0, |(_, pattern)| pattern.len().saturating_sub(1));
        self.tail.append(&mut self.pending);
        self.tail.drain(..self.tail.len().saturating_sub(keep));
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        if self.holding {
            self.held.send_modify(|connections| *connections -= 1);
        }
    }
}

fn contains(bytes: &[u8], pattern: &[u8]) -> bool {
    bytes.windows(pattern.len().max(1)).any(|window| window == pattern)
}
