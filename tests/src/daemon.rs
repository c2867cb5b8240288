//! One child process: the relay or a subscriber, unmodified, with its settings in the environment and its log in a file.

use crate::wait::{DEADLINE, eventually, eventually_blocking, free_port};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longest wait for an HTTP answer.
const HTTP_PATIENCE: Duration = Duration::from_secs(5);

/// Where the built binaries are: beside the folder of the running test or example.
///
/// # Panics
/// With the command that builds them.
pub fn binary(name: &str) -> PathBuf {
    let here = std::env::current_exe().expect("a running program knows its path");
    let path = here.parent().and_then(Path::parent).expect("tests run in target/<profile>/deps").join(name);
    assert!(path.is_file(), "{} is missing; build it: make build", path.display());
    path
}

/// Runs one of the commands that end by themselves, with these settings and no other variable but `PATH`.
///
/// # Panics
/// When it cannot be started.
pub fn run_to_end(program: &str, arguments: &[&str], settings: &[(String, String)]) -> Output {
    let mut command = command(program, settings);
    command.args(arguments).stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("start {program}: {error}"))
}

fn command(program: &str, settings: &[(String, String)]) -> Command {
    let mut command = Command::new(binary(program));
    // A developer's own RELAY_… variables must not change what is tested.
    command.env_clear().envs(settings.iter().map(|(name, value)| (name, value)));
    command
}

/// An HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Such as 200.
    pub status: u16,
    /// Head and body.
    pub text: String,
}

/// One child process, running or not.
#[derive(Debug)]
pub struct Daemon {
    program: &'static str,
    settings: Vec<(String, String)>,
    http_port: u16,
    log: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// A process to be started with `<program> run`. `name` names its log.
    pub fn new(program: &'static str, name: &str, folder: &Path, mut settings: Vec<(String, String)>) -> Self {
        let http_port = free_port();
        let prefix = program.to_uppercase();
        settings.push((format!("{prefix}_HTTP_ADDRESS"), format!("127.0.0.1:{http_port}")));
        // One JSON object a line: what is an ERROR can be told for certain, and so can what is no log line at all (a panic).
        settings.push((format!("{prefix}_LOG_FORMAT"), "json".to_owned()));
        Self { program, settings, http_port, log: folder.join(format!("{name}.log")), child: None }
    }

    /// The settings, for commands beside it.
    pub fn settings(&self) -> &[(String, String)] {
        &self.settings
    }

    /// Changes a setting for the next start.
    pub fn set(&mut self, name: &str, value: &str) {
        let name = format!("{}_{}", self.program.to_uppercase(), name.to_uppercase());
        self.settings.retain(|(known, _)| *known != name);
        self.settings.push((name, value.to_owned()));
    }

    /// Starts it; does not wait until it is ready.
    ///
    /// # Panics
    /// When it runs already or cannot be started.
    pub fn start(&mut self) {
        assert!(self.child.is_none(), "{} runs already", self.program);
        let log = File::options().create(true).append(true).open(&self.log).expect("the log's folder is there");
        let mut command = command(self.program, &self.settings);
        command.arg("run").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().unwrap_or_else(|error| panic!("start {}: {error}", self.program)));
    }

    /// Whether it has been started and not been seen to end.
    pub fn is_started(&self) -> bool {
        self.child.is_some()
    }

    /// The process id.
    ///
    /// # Panics
    /// When it does not run.
    pub fn id(&self) -> u32 {
        self.child.as_ref().expect("the process was started").id()
    }

    /// Waits for `/readyz`.
    ///
    /// # Panics
    /// With the end of the log.
    pub async fn await_ready(&self) {
        let last = std::sync::Mutex::new(String::from("no answer"));
        let ready = async {
            loop {
                match self.http("/readyz").await {
                    Some(Answer { status: 200, .. }) => return,
                    Some(other) => *last.lock().expect("not poisoned") = other.text,
                    None => {}
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(DEADLINE, ready).await.is_err() {
            let last = last.lock().expect("not poisoned").clone();
            panic!("{} is not ready after {DEADLINE:?}: {last}\n{}", self.program, self.log_end());
        }
    }

    /// Asks for a path; `None` when nothing answers.
    pub async fn http(&self, path: &str) -> Option<Answer> {
        let ask = async {
            let mut stream = TcpStream::connect(("127.0.0.1", self.http_port)).await.ok()?;
            let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            let status = text.split(' ').nth(1)?.parse().ok()?;
            Some(Answer { status, text })
        };
        tokio::time::timeout(HTTP_PATIENCE, ask).await.ok().flatten()
    }

    /// The text of `/metrics`.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn metrics(&self) -> String {
        self.http("/metrics").await.unwrap_or_else(|| panic!("{} does not answer /metrics\n{}", self.program, self.log_end())).text
    }

    /// The sum of all series of a metric whose labels contain `label` (all, when empty).
    pub async fn metric(&self, name: &str, label: &str) -> f64 {
        sum(&self.metrics().await, name, label)
    }

    /// Waits until a metric is as wanted; its value.
    ///
    /// # Panics
    /// When it is not in time.
    pub async fn await_metric(&self, name: &str, label: &str, wanted: impl Fn(f64) -> bool) -> f64 {
        eventually(&format!("{name}{{{label}}} of {} is as wanted", self.program), async || {
            // A process that is just starting does not answer yet.
            let value = sum(&self.http("/metrics").await?.text, name, label);
            wanted(value).then_some(value)
        })
        .await
    }

    /// kill -9, and gone when this returns.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("the process was started");
        child.kill().expect("a child can be killed");
        child.wait().expect("a killed child ends");
    }

    /// Sends a signal by name, such as `TERM`.
    ///
    /// # Panics
    /// When it cannot be sent.
    pub fn signal(&self, name: &str) {
        signal(self.id(), name);
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn await_end(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the process was started");
        let what = format!("{} ends", self.program);
        eventually_blocking(DEADLINE, &what, || child.try_wait().expect("a child can be waited for"))
    }

    /// SIGTERM, then waits for the end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.await_end()
    }

    /// Everything it has logged, starts before included.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the log contains this text.
    ///
    /// # Panics
    /// When it does not in time.
    pub async fn await_log(&self, text: &str) {
        eventually(&format!("{} logs {text:?}", self.program), async || self.log().contains(text).then_some(())).await;
    }

    fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Lines that say ERROR, and lines that are no log lines.
    pub fn errors(&self) -> Vec<String> {
        let log = self.log();
        log.lines().filter(|line| !line.starts_with('{') || line.contains("\"level\":\"ERROR\"")).map(str::to_owned).collect()
    }

    /// Ends it, whatever state it is in.
    pub(crate) fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sends a signal by name to any process of the test's.
///
/// # Panics
/// When it cannot be sent.
pub fn signal(id: u32, name: &str) {
    // The shell's own kill: there is no safe call for it in the standard library, and not every machine has the program.
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {id}")]).status();
    assert!(sent.is_ok_and(|status| status.success()), "could not send {name} to {id}");
}

/// The sum of all series of a metric in OpenMetrics text whose labels contain `label`.
pub fn sum(text: &str, name: &str, label: &str) -> f64 {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.split_once("} ")?,
            None => ("", rest.strip_prefix(' ')?),
        };
        labels.contains(label).then(|| value.parse::<f64>().ok())?
    });
    values.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_the_series_that_match() {
        let text = "a_total{outcome=\"x\"} 1\na_total{outcome=\"y\"} 2\na_total_b 9\nb 4\n";
        assert_eq!((sum(text, "a_total", ""), sum(text, "a_total", "\"y\""), sum(text, "b", "")), (3.0, 2.0, 4.0));
    }
}
