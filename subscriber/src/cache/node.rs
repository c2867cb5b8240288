//! One primary: one connection at a time, pipelines in flight, and every refusal dealt with key by key.

use super::command::{Scripts, read_marker, reply, write_marker};
use super::topology::{PrimaryInfo, belongs_to_a_cluster, connect};
use super::{Answer, Report};
use crate::disposition::{Next, Step, next};
use crate::error::Error;
use crate::marker::Marker;
use crate::work::Work;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use recant_schema::service::clock;
use recant_schema::service::retry::Retry;
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisError, RedisResult, Value, cmd};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

/// Commands in one pipeline: 128 to 256 reach 0.85 to 0.93 of plain pipelined DEL and SET.
const PIPELINE: usize = 256;

/// Pipelines in flight on one connection: two to four keep the server busy while answers travel.
const PIPELINES: usize = 3;

/// How often a connected primary is asked whether it still is one.
const ROLE_CHECK: Duration = Duration::from_secs(1);

/// First and longest wait before connecting again, or before sending again what a server could not do now.
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// One order and where it stands.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) work: Work,
    pub(super) step: Step,
    /// Whether this node imports the slot and must be told ASKING first.
    pub(super) asking: bool,
}

/// Orders from the router besides tasks.
#[derive(Debug)]
pub(super) enum Control {
    /// Read the marker again.
    ReadMarker,
    /// Write the marker, unless there was a newer connection.
    WriteMarker {
        connection: u64,
        marker: Arc<Marker>,
        /// Dropped once it is written, or never will be.
        _waiting: Option<mpsc::Sender<()>>,
    },
}

/// Which node an event comes from.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) name: String,
    pub(super) incarnation: u64,
}

/// What a node tells the router.
#[derive(Debug)]
pub(super) enum NodeEvent {
    Connected {
        connection: u64,
        marker: Marker,
    },
    MarkerRead {
        connection: u64,
        marker: Marker,
    },
    /// The connection is lost or useless.
    Lost(String),
    /// The server cannot do its work for now.
    Trouble(String),
    /// Some other node owns these.
    Moved(Vec<Task>),
    /// Their next step begins at the slot's owner again.
    Onward(Vec<Task>),
    /// That node imports this one.
    AskAt(String, Task),
}

/// What a node is made of.
pub(super) struct Node {
    /// Tells this node from an earlier one for the same address.
    pub(super) incarnation: u64,
    /// Whether it is meant to be part of a cluster.
    pub(super) clustered: bool,
    pub(super) primary: PrimaryInfo,
    pub(super) marker_key: String,
    pub(super) topics: Arc<Vec<String>>,
    pub(super) scripts: Arc<Scripts>,
    pub(super) tasks: mpsc::UnboundedReceiver<Vec<Task>>,
    pub(super) control: mpsc::UnboundedReceiver<Control>,
    pub(super) events: mpsc::UnboundedSender<(Sender, NodeEvent)>,
    pub(super) reports: mpsc::Sender<Report>,
}

type Sent = (Vec<Task>, RedisResult<Vec<RedisResult<Value>>>);

/// The state of one connection's service.
struct Service {
    node: Node,
    backlog: VecDeque<Task>,
    connection: u64,
    /// Nothing is sent before this instant: the server asked for time.
    hold: Option<Instant>,
    wait: Retry,
}

/// Why a connection is not used any further.
enum End {
    /// It broke, or its server is no primary any more.
    Broken(String),
    /// The router has dropped this node.
    Dismissed,
}

/// Serves until the router drops the node; what is unfinished then goes back to it.
pub(super) async fn run(node: Node) {
    let mut service = Service { node, backlog: VecDeque::new(), connection: 0, hold: None, wait: Retry::new(FIRST_WAIT, LONGEST_WAIT) };
    let mut retry = Retry::new(FIRST_WAIT, LONGEST_WAIT);
    loop {
        let end = match service.open().await {
            Ok((connection, marker)) => {
                retry.reset();
                service.connection += 1;
                service.tell(NodeEvent::Connected { connection: service.connection, marker });
                service.serve(connection).await
            }
            Err(error) => End::Broken(error.to_string()),
        };
        match end {
            End::Dismissed => break,
            End::Broken(why) => service.tell(NodeEvent::Lost(why)),
        }
        if service.wait_or_dismissed(retry.next_delay()).await {
            break;
        }
    }
    service.node.tasks.close();
    while let Some(tasks) = service.node.tasks.recv().await {
        service.backlog.extend(tasks);
    }
    let unfinished = std::mem::take(&mut service.backlog).into();
    service.tell(NodeEvent::Moved(unfinished));
}

impl Service {
    fn tell(&self, event: NodeEvent) {
        // The router outlives its nodes, except at the end of the process.
        let _ = self.node.events.send((Sender { name: self.node.primary.name.clone(), incarnation: self.node.incarnation }, event));
    }

    /// Connects, checks that this is a primary, loads the scripts and reads the marker: all before anything is written.
    async fn open(&self) -> Result<(MultiplexedConnection, Marker), Error> {
        let mut connection = connect(self.node.primary.info.clone()).await?;
        if let Some(role) =
            foreign_role(&mut connection).await.map_err(|source| Error::Cache { attempt: "ask Redis for its role", source })?
        {
            return Err(Error::CacheTopology(format!("{} is a {role}, not a primary", self.node.primary.name)));
        }
        self.load_scripts(&mut connection).await.map_err(|source| Error::Cache { attempt: "load scripts", source })?;
        let marker = self.marker(&mut connection).await.map_err(|source| match source.code() {
            Some("MOVED" | "ASK") if !self.node.clustered => Error::CacheTopology(belongs_to_a_cluster(&self.node.primary.name)),
            _ => Error::Cache { attempt: "read the marker", source },
        })?;
        Ok((connection, marker))
    }

    async fn marker(&self, connection: &mut MultiplexedConnection) -> RedisResult<Marker> {
        let read: RedisResult<Vec<(Vec<u8>, Vec<u8>)>> = cmd("HGETALL").arg(&self.node.marker_key).query_async(connection).await;
        match read {
            Ok(fields) => Ok(read_marker(fields, &self.node.topics)),
            // Somebody put something else there. It would stay in the way of every marker, and the name is ours.
            Err(error) if error.code() == Some("WRONGTYPE") => {
                let removed: RedisResult<i64> = cmd("UNLINK").arg(&self.node.marker_key).query_async(connection).await;
                removed.map(|_| Marker::default())
            }
            Err(error) => Err(error),
        }
    }

    async fn wait_or_dismissed(&mut self, delay: Duration) -> bool {
        let until = Instant::now() + delay;
        loop {
            tokio::select! {
                () = sleep_until(until) => return false,
                tasks = self.node.tasks.recv() => match tasks {
                    Some(tasks) => self.backlog.extend(tasks),
                    None => return true,
                },
                // A marker that was meant for an earlier connection must not be written to the next one.
                Some(_) = self.node.control.recv() => {}
            }
        }
    }

    async fn serve(&mut self, mut connection: MultiplexedConnection) -> End {
        let mut running: FuturesUnordered<BoxFuture<'static, Sent>> = FuturesUnordered::new();
        let mut role_check = interval(ROLE_CHECK);
        role_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let end = loop {
            let held = self.hold.filter(|until| *until > Instant::now());
            while held.is_none() && running.len() < PIPELINES && !self.backlog.is_empty() {
                let tasks: Vec<_> = self.backlog.drain(..self.backlog.len().min(PIPELINE)).collect();
                running.push(Box::pin(send(self.node.scripts.clone(), connection.clone(), tasks)));
            }
            tokio::select! {
                Some(sent) = running.next() => if let Err(end) = self.settle(sent, &mut connection).await { break end },
                tasks = self.node.tasks.recv() => match tasks {
                    Some(tasks) => self.backlog.extend(tasks),
                    None => break End::Dismissed,
                },
                Some(control) = self.node.control.recv() => if let Err(end) = self.obey(control, &mut connection).await { break end },
                _ = role_check.tick() => match foreign_role(&mut connection).await {
                    Ok(None) => {}
                    Ok(Some(role)) => break End::Broken(format!("the primary has become a {role}")),
                    Err(error) => break End::Broken(format!("ask Redis for its role: {error}")),
                },
                () = sleep_until(held.unwrap_or_else(Instant::now)), if held.is_some() => {}
            }
        };
        // What is in flight is answered or fails within the answer time-out; either way nothing is forgotten.
        while let Some(sent) = running.next().await {
            let _ = self.settle(sent, &mut connection).await;
        }
        end
    }

    /// Takes a pipeline's answers, one task at a time.
    async fn settle(&mut self, (tasks, answers): Sent, connection: &mut MultiplexedConnection) -> Result<(), End> {
        let answers = match answers {
            Ok(answers) if answers.len() == tasks.len() => answers,
            Ok(_) => return Err(self.put_back(tasks, "a pipeline was answered in part".to_owned())),
            Err(error) => return Err(self.put_back(tasks, error.to_string())),
        };
        let applied_us = clock::now_us();
        let (mut done, mut moved, mut onward, mut end, mut reload) = (Vec::with_capacity(tasks.len()), Vec::new(), Vec::new(), None, false);
        for (mut task, answer) in tasks.into_iter().zip(answers) {
            let reply = match reply(answer) {
                Ok(reply) => reply,
                Err(error) => {
                    end = Some(End::Broken(error.to_string()));
                    self.backlog.push_front(task);
                    continue;
                }
            };
            match next(task.step, reply) {
                Next::Done(outcome) => done.push(Answer { work: task.work, outcome, applied_us }),
                // This node answered for one key of a moving slot; the other key may still be where the slot comes from.
                Next::Then(step) if task.asking => onward.push(Task { step, asking: false, ..task }),
                Next::Then(step) => {
                    task.step = step;
                    self.backlog.push_back(task);
                }
                Next::Reload => {
                    reload = true;
                    self.backlog.push_back(task);
                }
                Next::Reroute => {
                    task.asking = false;
                    moved.push(task);
                }
                Next::AskAt(address) => self.tell(NodeEvent::AskAt(address, task)),
                Next::Wait(why) => {
                    self.backlog.push_back(task);
                    self.ask_for_time(why);
                }
                Next::Reconnect => {
                    end = Some(End::Broken("the primary has become read-only".to_owned()));
                    self.backlog.push_back(task);
                }
            }
        }
        self.report(done, moved, onward).await;
        if let (true, None) = (reload, &end) {
            end = self.load_scripts(connection).await.err().map(|error| End::Broken(error.to_string()));
        }
        end.map_or(Ok(()), Err)
    }

    async fn report(&mut self, done: Vec<Answer>, moved: Vec<Task>, onward: Vec<Task>) {
        if !done.is_empty() {
            self.wait.reset();
            // The loop is gone only at the end of the process.
            let _ = self.node.reports.send(Report::Answered(done)).await;
        }
        if !moved.is_empty() {
            self.tell(NodeEvent::Moved(moved));
        }
        if !onward.is_empty() {
            self.tell(NodeEvent::Onward(onward));
        }
    }

    fn put_back(&mut self, tasks: Vec<Task>, why: String) -> End {
        for task in tasks.into_iter().rev() {
            self.backlog.push_front(task);
        }
        End::Broken(why)
    }

    fn ask_for_time(&mut self, why: String) {
        if self.hold.is_none_or(|until| until <= Instant::now()) {
            self.hold = Some(Instant::now() + self.wait.next_delay());
            self.tell(NodeEvent::Trouble(why));
        }
    }

    async fn load_scripts(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        let mut pipeline = Pipeline::new();
        self.node.scripts.load(&mut pipeline);
        pipeline.exec_async(connection).await
    }

    async fn obey(&mut self, control: Control, connection: &mut MultiplexedConnection) -> Result<(), End> {
        match control {
            Control::ReadMarker => {
                let marker = self.marker(connection).await.map_err(|error| End::Broken(format!("read the marker: {error}")))?;
                self.tell(NodeEvent::MarkerRead { connection: self.connection, marker });
            }
            Control::WriteMarker { connection: meant_for, marker, .. } if meant_for == self.connection => {
                let Some(command) = write_marker(&self.node.marker_key, &marker, &self.node.topics) else { return Ok(()) };
                match command.exec_async(connection).await {
                    Err(error) if error.code() == Some("MOVED") => return Err(End::Broken("the marker's slot has moved".to_owned())),
                    Err(error) if error.code().is_none() => return Err(End::Broken(format!("write the marker: {error}"))),
                    // Refused for now: a marker that is not written stays behind, which is safe, and the next one follows within a second.
                    Err(_) | Ok(()) => {}
                }
            }
            Control::WriteMarker { .. } => {}
        }
        Ok(())
    }
}

async fn send(scripts: Arc<Scripts>, mut connection: MultiplexedConnection, tasks: Vec<Task>) -> Sent {
    let mut pipeline = Pipeline::with_capacity(tasks.len());
    pipeline.ignore_errors();
    for task in &tasks {
        if task.asking {
            pipeline.cmd("ASKING").ignore();
        }
        pipeline.add_command(scripts.command(task.step, &task.work));
    }
    let answers = pipeline.query_async(&mut connection).await;
    (tasks, answers)
}

/// `Some(role)` unless the server is a primary. Servers whose ACL hides ROLE are taken for primaries: a replica refuses the first write.
pub(super) async fn foreign_role(connection: &mut MultiplexedConnection) -> RedisResult<Option<String>> {
    let asked = timeout(super::topology::ANSWER_TIMEOUT, cmd("ROLE").query_async::<Vec<Value>>(connection)).await;
    match asked.unwrap_or_else(|_| Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut)))) {
        Ok(answer) => match answer.first() {
            Some(Value::BulkString(role)) if role != b"master" => Ok(Some(String::from_utf8_lossy(role).into_owned())),
            _ => Ok(None),
        },
        Err(error) if matches!(error.code(), Some("NOPERM" | "ERR")) => Ok(None),
        Err(error) => Err(error),
    }
}
