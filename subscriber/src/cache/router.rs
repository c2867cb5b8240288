//! Who gets what: the map of slots, one node per primary, and the region's marker put together from theirs.

use super::command::{Scripts, marker_key};
use super::node::{self, Control, Node, NodeEvent, Sender, Task};
use super::topology::{Map, PrimaryInfo, belongs_to_a_cluster};
use super::{Report, Request, sweep};
use crate::config::Config;
use crate::disposition::Step;
use crate::error::Error;
use crate::marker::Marker;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Slots are learnt anew at most so often, however many keys were moved.
const REFRESH_PACE: Duration = Duration::from_millis(100);

/// One node as the router knows it.
struct Handle {
    incarnation: u64,
    marker_key: String,
    tasks: mpsc::UnboundedSender<Vec<Task>>,
    control: mpsc::UnboundedSender<Control>,
    /// Its current connection, `None` while it has none.
    connection: Option<u64>,
    /// The marker last read from or written to it.
    marker: Marker,
}

struct Router {
    config: Config,
    topics: Arc<Vec<String>>,
    scripts: Arc<Scripts>,
    reports: mpsc::Sender<Report>,
    events: mpsc::UnboundedSender<(Sender, NodeEvent)>,
    map: Option<Map>,
    nodes: BTreeMap<String, Handle>,
    /// Tasks whose slot nobody owns yet. Bounded by the records in flight.
    homeless: Vec<Task>,
    generation: u64,
    incarnations: u64,
    /// While a recall is answered: the nodes still to be heard.
    recall: Option<BTreeSet<String>>,
    complete: bool,
    sweep: Option<JoinHandle<()>>,
}

/// Serves requests until the handle is dropped. Queues inside are bounded by the records in flight, which the loop's state bounds.
pub(super) async fn run(config: Config, mut requests: mpsc::Receiver<Request>, reports: mpsc::Sender<Report>) {
    let (events, mut from_nodes) = mpsc::unbounded_channel();
    let (found, mut discoveries) = mpsc::channel(1);
    let topics = Arc::new(config.consumed_topics());
    let scripts = Arc::new(Scripts::new(&config));
    let mut refresh_at = Some(Instant::now());
    let mut discovering = false;
    let mut router = Router {
        config,
        topics,
        scripts,
        reports,
        events,
        map: None,
        nodes: BTreeMap::new(),
        homeless: Vec::new(),
        generation: 0,
        incarnations: 0,
        recall: None,
        complete: false,
        sweep: None,
    };
    loop {
        let due = refresh_at.filter(|_| !discovering);
        tokio::select! {
            request = requests.recv() => match request {
                Some(request) => router.request(request).await,
                None => return,
            },
            Some((sender, event)) = from_nodes.recv() => {
                if router.node_event(&sender, event).await {
                    refresh_at = Some(refresh_at.unwrap_or_else(|| Instant::now() + REFRESH_PACE).min(Instant::now() + REFRESH_PACE));
                }
            }
            Some(discovered) = discoveries.recv() => {
                discovering = false;
                refresh_at = router.discovered(discovered).await.map(|delay| Instant::now() + delay);
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                discovering = true;
                let (address, found) = (router.config.redis.clone(), found.clone());
                tokio::spawn(async move { drop(found.send(address.discover().await).await) });
            }
        }
    }
}

impl Router {
    async fn report(&self, report: Report) {
        // The loop is gone only at the end of the process.
        let _ = self.reports.send(report).await;
    }

    async fn request(&mut self, request: Request) {
        match request {
            Request::Apply(work) => {
                let tasks = work.into_iter().map(|work| Task { step: Step::first(&work.order), work, asking: false }).collect();
                self.dispatch(tasks);
            }
            Request::Recall => {
                self.recall = Some(self.nodes.keys().cloned().collect());
                for handle in self.nodes.values().filter(|handle| handle.connection.is_some()) {
                    let _ = handle.control.send(Control::ReadMarker);
                }
                self.answer_recall().await;
            }
            Request::Remember { generation, marker, waiting } => self.remember(generation, marker, waiting),
            Request::Sweep(number) => {
                if let Some(earlier) = self.sweep.take() {
                    earlier.abort();
                }
                let (config, scripts, reports) = (self.config.clone(), self.scripts.clone(), self.reports.clone());
                self.sweep = Some(tokio::spawn(async move {
                    let forgotten = sweep::run(&config, &scripts).await;
                    let _ = reports.send(Report::Swept(number, forgotten)).await;
                }));
            }
        }
    }

    fn remember(&mut self, generation: u64, marker: Marker, waiting: Option<mpsc::Sender<()>>) {
        // Somebody connected since: that node may have lost what this marker claims.
        if generation != self.generation {
            return;
        }
        let marker = Arc::new(marker);
        for handle in self.nodes.values_mut() {
            if let Some(connection) = handle.connection {
                handle.marker.points.extend(&marker.points);
                handle.marker.epochs.clone_from(&marker.epochs);
                handle.marker.sweeps.clone_from(&marker.sweeps);
                let _ = handle.control.send(Control::WriteMarker { connection, marker: marker.clone(), _waiting: waiting.clone() });
            }
        }
    }

    fn dispatch(&mut self, tasks: Vec<Task>) {
        let mut by_node: BTreeMap<&str, Vec<Task>> = BTreeMap::new();
        for task in tasks {
            let owner = self.map.as_ref().and_then(|map| map.owner(task.work.key.slot()));
            match owner {
                Some(owner) => by_node.entry(&owner.name).or_default().push(task),
                None => self.homeless.push(task),
            }
        }
        for (name, tasks) in by_node {
            let handle = self.nodes.get(name).expect("every primary of the map has a node");
            // A node ends only when its handle is dropped.
            let _ = handle.tasks.send(tasks);
        }
    }

    /// Takes what a node says; `true` when the map should be learnt anew.
    async fn node_event(&mut self, sender: &Sender, event: NodeEvent) -> bool {
        let name = sender.name.as_str();
        // A dismissed node still gives its work back; what else it says is about the past, and must not be taken for its successor's word.
        let current = self.nodes.get(name).is_some_and(|handle| handle.incarnation == sender.incarnation);
        match event {
            NodeEvent::Moved(tasks) => self.moved(name, tasks).await,
            NodeEvent::Onward(tasks) => {
                self.dispatch(tasks);
                false
            }
            NodeEvent::AskAt(address, task) => {
                let task = Task { asking: true, ..task };
                match self.nodes.get(&address) {
                    Some(handle) => drop(handle.tasks.send(vec![task])),
                    None => self.homeless.push(Task { asking: false, ..task }),
                }
                true
            }
            _ if !current => false,
            NodeEvent::Connected { connection, marker } => {
                self.connected(name, connection, marker).await;
                false
            }
            NodeEvent::MarkerRead { connection, marker } => {
                if let Some(handle) = self.nodes.get_mut(name).filter(|handle| handle.connection == Some(connection)) {
                    handle.marker = marker;
                    self.heard(name).await;
                }
                false
            }
            NodeEvent::Lost(why) => {
                if let Some(handle) = self.nodes.get_mut(name) {
                    handle.connection = None;
                    if let Some(waiting) = &mut self.recall {
                        waiting.insert(name.to_owned());
                    }
                    self.complete = false;
                    self.report(Report::Lost(format!("{name}: {why}"))).await;
                }
                self.config.redis.refresh_interval().is_some()
            }
            NodeEvent::Trouble(why) => {
                self.report(Report::Trouble(format!("{name}: {why}"))).await;
                false
            }
        }
    }

    /// Keeps moved tasks until the map is new: dispatched before, they would go round in circles.
    async fn moved(&mut self, name: &str, tasks: Vec<Task>) -> bool {
        let any = !tasks.is_empty();
        self.homeless.extend(tasks);
        if any && !self.config.redis.is_cluster() && self.nodes.contains_key(name) {
            self.report(Report::Trouble(belongs_to_a_cluster(name))).await;
        }
        any
    }

    async fn connected(&mut self, name: &str, connection: u64, marker: Marker) {
        let others = self.nodes.iter().filter(|(other, _)| *other != name).map(|(_, handle)| &handle.marker);
        let oldest_of_others = others.fold(Marker::default(), Marker::oldest);
        let Some(handle) = self.nodes.get_mut(name) else { return };
        handle.connection = Some(connection);
        let own = if marker.points.is_empty() { oldest_of_others } else { marker.clone() };
        handle.marker = marker;
        self.generation += 1;
        self.report(Report::Connected { generation: self.generation, marker: own }).await;
        self.heard(name).await;
        self.complete_if_all_connected().await;
    }

    async fn complete_if_all_connected(&mut self) {
        if !self.complete && !self.nodes.is_empty() && self.nodes.values().all(|handle| handle.connection.is_some()) {
            self.complete = true;
            self.report(Report::Complete).await;
        }
    }

    async fn heard(&mut self, name: &str) {
        if let Some(waiting) = &mut self.recall {
            waiting.remove(name);
        }
        self.answer_recall().await;
    }

    async fn answer_recall(&mut self) {
        let all_connected = !self.nodes.is_empty() && self.nodes.values().all(|handle| handle.connection.is_some());
        if all_connected && self.recall.as_ref().is_some_and(BTreeSet::is_empty) {
            self.recall = None;
            let marker = self.nodes.values().fold(Marker::default(), |oldest, handle| oldest.oldest(&handle.marker));
            self.report(Report::Recalled { generation: self.generation, marker }).await;
        }
    }

    /// Takes a new map; returns when to ask again.
    async fn discovered(&mut self, discovered: Result<Map, Error>) -> Option<Duration> {
        match discovered {
            Ok(map) => self.redraw(map).await,
            Err(error) => {
                self.complete = false;
                self.report(Report::Lost(error.to_string())).await;
                // Whoever knows the map is away: ask again soon, whatever kind of cache it is.
                return Some(REFRESH_PACE * 5);
            }
        }
        self.config.redis.refresh_interval()
    }

    async fn redraw(&mut self, map: Map) {
        let wanted: BTreeMap<String, (PrimaryInfo, String)> = map
            .primaries
            .iter()
            .map(|primary| (primary.name.clone(), (primary.clone(), marker_key(&self.config.group, primary.tag.as_deref()))))
            .collect();
        // A primary whose marker must move to another slot starts over, and so reads what the new slot remembers before it writes there.
        self.nodes.retain(|name, handle| wanted.get(name).is_some_and(|(_, key)| *key == handle.marker_key));
        for (name, (primary, key)) in wanted {
            if !self.nodes.contains_key(&name) {
                let handle = self.start_node(primary, key);
                self.nodes.insert(name.clone(), handle);
                self.complete = false;
                if let Some(waiting) = &mut self.recall {
                    waiting.insert(name);
                }
            }
        }
        if let Some(waiting) = &mut self.recall {
            waiting.retain(|name| self.nodes.contains_key(name));
        }
        self.map = Some(map);
        let homeless = std::mem::take(&mut self.homeless);
        self.dispatch(homeless);
        self.answer_recall().await;
        self.complete_if_all_connected().await;
    }

    fn start_node(&mut self, primary: PrimaryInfo, marker_key: String) -> Handle {
        let (tasks, task_inbox) = mpsc::unbounded_channel();
        let (control, control_inbox) = mpsc::unbounded_channel();
        self.incarnations += 1;
        tokio::spawn(node::run(Node {
            incarnation: self.incarnations,
            clustered: self.config.redis.is_cluster(),
            primary,
            marker_key: marker_key.clone(),
            topics: self.topics.clone(),
            scripts: self.scripts.clone(),
            tasks: task_inbox,
            control: control_inbox,
            events: self.events.clone(),
            reports: self.reports.clone(),
        }));
        Handle { incarnation: self.incarnations, marker_key, tasks, control, connection: None, marker: Marker::default() }
    }
}
