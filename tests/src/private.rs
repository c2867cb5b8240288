//! Servers of a test's own, for what must not be done to shared ones: kill -9, FLUSHALL, a full memory.

use crate::daemon::signal;
use crate::source;
use crate::wait::{DEADLINE, eventually, eventually_blocking, free_port, fresh_name};
use redis::Client;
use sqlx::{Connection, Executor, PgConnection};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Whether this process is root, as whom Postgres refuses to run.
fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|this| this.uid() == 0)
}

/// A Postgres server from the newest installed binaries. Dropping it ends it and deletes its data.
#[derive(Debug)]
pub struct PrivatePostgres {
    folder: PathBuf,
    port: u16,
    settings: Vec<String>,
    server: Option<Child>,
}

impl PrivatePostgres {
    /// A new, empty cluster with these settings (`name=value`).
    ///
    /// # Panics
    /// Says what to install when there are no binaries.
    pub async fn start(settings: &[&str]) -> Self {
        let folder = std::env::temp_dir().join(format!("recant-postgres-{}", fresh_name()));
        let mut made = Command::new("install");
        made.args(["-d", "-m", "700"]);
        if is_root() {
            made.args(["-o", "postgres", "-g", "postgres"]);
        }
        assert!(made.arg(&folder).status().is_ok_and(|status| status.success()), "could not make {}", folder.display());
        let mut this =
            Self { folder, port: free_port(), settings: settings.iter().map(|&setting| setting.to_owned()).collect(), server: None };
        // -N: what a killed process loses does not depend on the disk, so nothing has to wait for it while the cluster is made.
        let initdb = this
            .command("initdb")
            .args(["-U", "recant", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N", "--no-instructions", "-D"])
            .arg(&this.folder)
            .output();
        let initdb = initdb.expect("initdb can be started");
        assert!(initdb.status.success(), "initdb: {}", String::from_utf8_lossy(&initdb.stderr));
        this.start_again().await;
        this
    }

    /// Starts a stopped or killed server on the same data.
    ///
    /// # Panics
    /// When it does not take connections in time.
    pub async fn start_again(&mut self) {
        assert!(self.server.is_none(), "the server runs already");
        let log = std::fs::File::options().create(true).append(true).open(self.log()).expect("the log can be opened");
        let mut command = self.command("postgres");
        command.arg("-D").arg(&self.folder).args(["-p", &self.port.to_string()]);
        for setting in ["listen_addresses=127.0.0.1", "unix_socket_directories=", "track_commit_timestamp=on", "max_connections=60"] {
            command.args(["-c", setting]);
        }
        for setting in &self.settings {
            command.args(["-c", setting]);
        }
        self.server = Some(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("postgres can be started"));
        let url = self.url();
        eventually(&format!("Postgres starts on {}; see {}", self.folder.display(), self.log().display()), async || {
            PgConnection::connect(&url).await.ok().map(drop)
        })
        .await;
    }

    /// For a login that may do anything.
    pub fn url(&self) -> String {
        format!("postgres://recant@127.0.0.1:{}/postgres", self.port)
    }

    /// A connection as that login.
    pub async fn connect(&self) -> PgConnection {
        source::connect(&self.url()).await
    }

    fn log(&self) -> PathBuf {
        self.folder.with_extension("log")
    }

    /// As whoever may run Postgres.
    fn command(&self, program: &str) -> Command {
        let path = newest_binaries().join(program);
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--init-groups"]).arg(path);
            command
        } else {
            Command::new(path)
        };
        // A working directory that the user postgres may not enter is an error to it.
        command.current_dir("/");
        command
    }

    /// Stops the server's log writer, so that nothing is flushed but what a commit waits for.
    ///
    /// # Panics
    /// When the server has none.
    pub async fn stop_log_writer(&self) {
        let query = "select pid from pg_stat_activity where backend_type = 'walwriter'";
        let id: i32 = sqlx::query_scalar(query).fetch_one(&mut self.connect().await).await.expect("there is a log writer");
        signal(u32::try_from(id).expect("a process id is positive"), "STOP");
    }

    /// kill -9 of all its processes: memory is lost, and what was not flushed with it.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let mut server = self.server.take().expect("the server runs");
        let children = children(server.id());
        server.kill().expect("a child can be killed");
        server.wait().expect("a killed child ends");
        for id in &children {
            // It may have ended by itself, having noticed.
            let _ = Command::new("sh").args(["-c", &format!("kill -KILL {id} 2>&1")]).output();
        }
        // A new server refuses to start while one of the old one's processes holds its shared memory.
        let alive = |id: &u32| Path::new(&format!("/proc/{id}/cwd")).exists();
        eventually_blocking(DEADLINE, "the killed server's processes are gone", || (!children.iter().any(alive)).then_some(()));
    }

    /// A clean stop, with everything flushed.
    ///
    /// # Panics
    /// When it does not run or does not stop.
    pub fn stop(&mut self) {
        let mut server = self.server.take().expect("the server runs");
        // SIGINT: fast shutdown; does not wait for clients.
        signal(server.id(), "INT");
        eventually_blocking(DEADLINE, "Postgres stops", || server.try_wait().expect("a child can be waited for"));
    }

    /// Runs one statement as the owner of everything.
    ///
    /// # Panics
    /// When it is refused.
    pub async fn execute(&self, statement: &'static str) {
        self.connect().await.execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        if self.server.is_some() {
            self.kill();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
        let _ = std::fs::remove_file(self.log());
    }
}

fn newest_binaries() -> PathBuf {
    let installed = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|entry| entry.path());
    let version = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
    let newest = installed.filter(|path| path.join("bin/postgres").exists()).max_by_key(version);
    newest.expect("no Postgres under /usr/lib/postgresql; install it: apt-get install postgresql, or make up").join("bin")
}

fn children(parent: u32) -> Vec<u32> {
    let parent = format!("PPid:\t{parent}\n");
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| std::fs::read_to_string(format!("/proc/{id}/status")).is_ok_and(|status| status.contains(&parent))).collect()
}

/// A Redis server without persistence. Dropping it ends it.
#[derive(Debug)]
pub struct PrivateRedis {
    port: u16,
    arguments: Vec<String>,
    server: Option<Child>,
}

impl PrivateRedis {
    /// A new, empty server with further arguments, such as `--maxmemory 4mb`.
    ///
    /// # Panics
    /// Says what to install when there is no binary.
    pub async fn start(settings: &[&str]) -> Self {
        let port = free_port();
        let port_text = port.to_string();
        let own = ["--bind", "127.0.0.1", "--port", &port_text, "--save", "", "--appendonly", "no", "--dir", "/"];
        Self::start_with(port, own.iter().chain(settings).map(|&word| word.to_owned()).collect()).await
    }

    /// A server with exactly these arguments, which make it listen on this port.
    ///
    /// # Panics
    /// Says what to install when there is no binary.
    pub(crate) async fn start_with(port: u16, arguments: Vec<String>) -> Self {
        let mut this = Self { port, arguments, server: None };
        this.start_again().await;
        this
    }

    /// Starts a killed server again: empty.
    ///
    /// # Panics
    /// When it does not take connections in time.
    pub async fn start_again(&mut self) {
        assert!(self.server.is_none(), "the server runs already");
        let mut command = Command::new("redis-server");
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null());
        let server = command
            .spawn()
            .unwrap_or_else(|error| panic!("start redis-server: {error}; install it: apt-get install redis-server, or make up"));
        self.server = Some(server);
        let client = Client::open(self.url()).expect("a good URL");
        eventually("redis-server starts", async || client.get_multiplexed_async_connection().await.ok().map(drop)).await;
    }

    /// Where it listens on the loopback address.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Stops it as it is: connections stay open, nothing is answered.
    ///
    /// # Panics
    /// When it does not run.
    pub fn freeze(&self) {
        signal(self.server.as_ref().expect("the server runs").id(), "STOP");
    }

    /// Lets a frozen server go on.
    ///
    /// # Panics
    /// When it does not run.
    pub fn thaw(&self) {
        signal(self.server.as_ref().expect("the server runs").id(), "CONT");
    }

    /// kill -9: everything in it is lost.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let mut server = self.server.take().expect("the server runs");
        server.kill().expect("a child can be killed");
        server.wait().expect("a killed child ends");
    }
}

impl Drop for PrivateRedis {
    fn drop(&mut self) {
        if self.server.is_some() {
            self.kill();
        }
    }
}
