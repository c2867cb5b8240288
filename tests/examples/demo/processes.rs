//! The relays and subscribers, as processes of their own: started, waited for, looked after, stopped.

use crate::http;
use crate::settings::{REGIONS, Settings};
use crate::stage::Stage;
use crate::tally::Tally;
use anyhow::{Context as _, bail};
use std::fs::File;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};

/// Number of relays: two claim side by side.
const RELAYS: usize = 2;
/// The first join of a group takes some three seconds on a new broker; an unoptimised build beside a compiler takes several times as long.
const READY_DEADLINE: Duration = Duration::from_secs(60);
/// Each service stops within its grace period of 10 s; a little more, then it is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(12);
/// How often a process is asked whether it is ready, or gone.
const LOOK: Duration = Duration::from_millis(50);
/// Lines of a log shown with an error.
const TAIL_LINES: usize = 12;

/// A relay or a subscriber.
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    log: PathBuf,
    child: Child,
    pid: u32,
}

/// All that the demo has started.
pub(crate) struct Processes {
    /// Where the binaries are: beside the folder of this example.
    pub(crate) binaries: PathBuf,
    /// Logs, and the process ids of the demo that runs or was left running.
    folder: PathBuf,
    to_remove: Vec<String>,
    /// Whether Ctrl-C at the terminal must not reach them later.
    keep: bool,
    pub(crate) all: Vec<Process>,
}

impl Processes {
    /// Nothing started yet; what an earlier demo left running is stopped.
    pub(crate) async fn none(settings: &Settings) -> anyhow::Result<Self> {
        let example = std::env::current_exe().context("could not find this program's own file")?;
        let binaries = example.parent().and_then(Path::parent).context("this program is not below target/")?.to_owned();
        let release = if binaries.ends_with("release") { "--release " } else { "" };
        for name in ["relay", "subscriber"] {
            if !binaries.join(name).is_file() {
                bail!("{} is missing; build it: cargo build {release}--workspace --bins   (make demo does)", binaries.join(name).display());
            }
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(".dev").join("demo");
        std::fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
        let processes = Self { binaries, folder, to_remove: settings.to_remove.clone(), keep: settings.keep, all: Vec::new() };
        processes.stop_left_over().await?;
        Ok(processes)
    }

    /// Runs one command of the relay to its end.
    pub(crate) async fn relay(&self, settings: &Settings, stage: &Stage, command: &str) -> anyhow::Result<()> {
        let mut relay = self.command("relay", stage.relay_environment(settings));
        let output = relay.arg(command).stdin(Stdio::null()).kill_on_drop(true).output().await.context("could not start relay")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
            bail!("relay {command} failed:\n{}", tail(&said));
        }
        Ok(())
    }

    /// Starts the relays and one subscriber per region.
    pub(crate) fn start(&mut self, settings: &Settings, stage: &Stage) -> anyhow::Result<()> {
        let mut addresses = free_addresses(RELAYS + REGIONS.len())?.into_iter();
        let mut address = || addresses.next().context("as many addresses as processes");
        for number in 1..=RELAYS {
            let (name, address) = (format!("relay-{number}"), address()?);
            let mut environment = stage.relay_environment(settings);
            environment.push(("RELAY_RELAY_NAME", format!("demo-{name}")));
            environment.push(("RELAY_HTTP_ADDRESS", address.to_string()));
            self.launch("relay", name, address, environment)?;
        }
        for (region, name) in REGIONS.iter().enumerate() {
            let (name, address) = (format!("subscriber-{name}"), address()?);
            let mut environment = stage.subscriber_environment(settings, region);
            environment.push(("SUBSCRIBER_HTTP_ADDRESS", address.to_string()));
            self.launch("subscriber", name, address, environment)?;
        }
        Ok(())
    }

    fn launch(&mut self, binary: &str, name: String, address: SocketAddr, environment: Vec<(&'static str, String)>) -> anyhow::Result<()> {
        let log = self.folder.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("could not write {}", log.display()))?;
        let mut command = self.command(binary, environment);
        // Logs that people read with any tool: no colour codes.
        command.env("NO_COLOR", "1");
        command.arg("run").stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).kill_on_drop(true);
        if self.keep {
            command.process_group(0);
        }
        let child = command.spawn().with_context(|| format!("could not start {binary}"))?;
        let pid = child.id().context("a process that has just started has an id")?;
        self.all.push(Process { name, address, log, child, pid });
        // At once and for all so far: whatever ends this program, the next demo finds them.
        std::fs::write(self.pid_file(), self.pids().join("\n")).context("could not note the process ids")
    }

    fn command(&self, binary: &str, environment: Vec<(&'static str, String)>) -> Command {
        let mut command = Command::new(self.binaries.join(binary));
        for name in &self.to_remove {
            command.env_remove(name);
        }
        command.envs(environment);
        command
    }

    /// Returns once all four say that they can do their work.
    pub(crate) async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_DEADLINE;
        let mut looks = tokio::time::interval(LOOK);
        let mut waiting: Vec<usize> = (0..self.all.len()).collect();
        while !waiting.is_empty() {
            looks.tick().await;
            self.all_run()?;
            let mut still = Vec::new();
            for index in waiting {
                let process = &self.all[index];
                // No answer at all is the same as not ready: it may not listen yet.
                let answer = http::get(process.address, "/readyz").await;
                match answer {
                    Ok((200, _)) => println!("{:<13} ready, http://{}/metrics", process.name, process.address),
                    _ if Instant::now() >= deadline => {
                        let said = answer.map_or_else(|error| error.to_string(), |(_, body)| body.trim_end().replace('\n', "; "));
                        bail!("{} is not ready after {} s ({said}); {}", process.name, READY_DEADLINE.as_secs(), process.log_tail());
                    }
                    _ => still.push(index),
                }
            }
            waiting = still;
        }
        Ok(())
    }

    /// An error when one has ended.
    pub(crate) fn all_run(&mut self) -> anyhow::Result<()> {
        for process in &mut self.all {
            if let Some(status) = process.child.try_wait()? {
                bail!("{} has ended ({status}); {}", process.name, process.log_tail());
            }
        }
        Ok(())
    }

    /// Asks the subscribers how many invalidations they applied. Without an answer the older number stays.
    pub(crate) async fn scrape(&self, tally: &Tally) {
        for (region, process) in self.all.iter().skip(RELAYS).enumerate() {
            if let Ok((200, metrics)) = http::get(process.address, "/metrics").await {
                tally.regions[region].applied.set(applied(&metrics));
            }
        }
    }

    /// Lets them run on after this program. Returns their process ids.
    pub(crate) fn leave_running(self) -> Vec<String> {
        let pids = self.pids();
        // Dropping a child would kill it.
        self.all.into_iter().for_each(std::mem::forget);
        pids
    }

    /// Asks all to stop, and waits until they have.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        if self.all.is_empty() {
            return Ok(());
        }
        let running = self.all.iter_mut().filter_map(|process| process.child.id()).map(|pid| pid.to_string());
        terminate(&running.collect::<Vec<_>>()).await?;
        let mut slow = Vec::new();
        for process in &mut self.all {
            if timeout(STOP_DEADLINE, process.child.wait()).await.is_err() {
                process.child.kill().await?;
                slow.push(format!(
                    "{} did not stop within {} s and was killed; {}",
                    process.name,
                    STOP_DEADLINE.as_secs(),
                    process.log_tail()
                ));
            }
        }
        std::fs::remove_file(self.pid_file())?;
        if slow.is_empty() { Ok(()) } else { bail!("{}", slow.join("\n")) }
    }

    fn pids(&self) -> Vec<String> {
        self.all.iter().map(|process| process.pid.to_string()).collect()
    }

    fn pid_file(&self) -> PathBuf {
        self.folder.join("pids")
    }

    /// Stops what a demo with KEEP=1, or one that was killed, left running.
    async fn stop_left_over(&self) -> anyhow::Result<()> {
        let noted = match std::fs::read_to_string(self.pid_file()) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error).context("could not read the process ids of an earlier demo"),
        };
        let mut running = Vec::new();
        for pid in noted.lines() {
            if is_ours(pid).await {
                running.push(pid.to_owned());
            }
        }
        if running.is_empty() {
            return Ok(());
        }
        println!("stopping what an earlier demo left running: {}", running.join(" "));
        terminate(&running).await?;
        let deadline = Instant::now() + STOP_DEADLINE;
        let mut looks = tokio::time::interval(LOOK);
        for pid in &running {
            while is_ours(pid).await {
                if Instant::now() >= deadline {
                    bail!("process {pid} of an earlier demo does not stop; end it: kill -9 {pid}");
                }
                looks.tick().await;
            }
        }
        Ok(())
    }
}

impl Process {
    fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        format!("the end of {}:\n{}", self.log.display(), tail(&text))
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
    let shown: Vec<_> = lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)).map(|line| format!("  {line}")).collect();
    if shown.is_empty() { "  (nothing)".to_owned() } else { shown.join("\n") }
}

/// Loopback addresses that were free a moment ago; all are held at once, so that they differ.
fn free_addresses(count: usize) -> anyhow::Result<Vec<SocketAddr>> {
    let held = (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<Vec<_>, _>>().context("no free port")?;
    Ok(held.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?)
}

/// Sends SIGTERM. By the shell's own kill: the program of that name is not on every machine. That one of them is gone already is no failure.
async fn terminate(pids: &[String]) -> anyhow::Result<()> {
    let script = "for pid; do kill -TERM \"$pid\" 2>/dev/null || true; done";
    Command::new("sh").args(["-c", script, "sh"]).args(pids).status().await.context("could not start sh")?;
    Ok(())
}

/// Whether a process with this id runs, and is one of ours and not a later one with the same number.
async fn is_ours(pid: &str) -> bool {
    let line = match std::fs::read_to_string(format!("/proc/{pid}/cmdline")) {
        Ok(line) => line.replace('\0', " "),
        // No such process, or a system without /proc.
        Err(_) => match Command::new("ps").args(["-o", "command=", "-p", pid]).stderr(Stdio::null()).output().await {
            Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
            Err(_) => return false,
        },
    };
    let line = line.trim_end();
    line.ends_with("/relay run") || line.ends_with("/subscriber run")
}

/// The sum of `subscriber_applied_total` over all outcomes but repeats, which changed nothing.
fn applied(metrics: &str) -> u64 {
    let counts = metrics.lines().filter(|line| line.starts_with("subscriber_applied_total{") && !line.contains("outcome=\"repeated\""));
    counts.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}
