//! Where the primaries are, and which slots each owns.

use crate::error::Error;
use recant_schema::key::{SLOTS, slot};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Value, cmd};
use std::fmt;
use std::time::Duration;

/// Longest wait for a connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest wait for a pipeline's answers. A frozen primary is given up after it; a slow one answers 256 scripts in some 10 ms.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A region's cache, as its URL names it.
#[derive(Clone)]
pub struct Address {
    kind: Kind,
    /// Servers to start from, with credentials, database and TLS.
    seeds: Vec<ConnectionInfo>,
}

#[derive(Clone, PartialEq, Eq)]
enum Kind {
    Single,
    Sentinel { name: String },
    Cluster,
}

/// How often the map is learnt anew without being asked: Sentinels are asked who the primary is, for a resumed old primary does not say that it is not.
const SENTINEL_REFRESH: Duration = Duration::from_secs(1);

/// A cluster says MOVED by itself; this finds primaries that own no key of ours yet.
const CLUSTER_REFRESH: Duration = Duration::from_secs(5);

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({})", self.seeds.iter().map(|seed| seed.addr().to_string()).collect::<Vec<_>>().join(","))
    }
}

impl Address {
    /// Reads `redis://[user:password@]host:port[/db]`, `redis+cluster://…host,host`, or `redis+sentinel://…host,host/NAME[/db]`, each also with `rediss`.
    ///
    /// # Errors
    /// One line that names the forms.
    pub fn parse(url: &str) -> Result<Self, String> {
        const FORMS: &str =
            "use redis://host:port/db, redis+cluster://host:port,host:port or redis+sentinel://host:port,host:port/NAME (rediss for TLS)";
        let (scheme, rest) = url.split_once("://").ok_or_else(|| format!("not a URL; {FORMS}"))?;
        let (plain, kind) = match scheme.split_once('+') {
            None => (scheme, "single"),
            Some((plain, kind)) => (plain, kind),
        };
        if plain != "redis" && plain != "rediss" {
            return Err(format!("scheme {scheme} is not known; {FORMS}"));
        }
        let (credentials, rest) = rest.rsplit_once('@').map_or((String::new(), rest), |(before, after)| (format!("{before}@"), after));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (kind, database) = match kind {
            "single" => (Kind::Single, path),
            "cluster" => (Kind::Cluster, ""),
            "sentinel" => {
                let (name, database) = path.split_once('/').unwrap_or((path, ""));
                if name.is_empty() {
                    return Err(format!("the Sentinel URL names no primary; {FORMS}"));
                }
                (Kind::Sentinel { name: name.to_owned() }, database)
            }
            _ => return Err(format!("scheme {scheme} is not known; {FORMS}")),
        };
        // A Redis URL may hold a password, so what the parser says about it is not repeated.
        let seed = |host: &str| {
            format!("{plain}://{credentials}{host}/{database}").into_connection_info().map_err(|_| format!("not a Redis URL; {FORMS}"))
        };
        let seeds = hosts.split(',').map(seed).collect::<Result<Vec<_>, _>>()?;
        let tcp = TcpSettings::default().set_nodelay(true);
        let seeds = seeds.into_iter().map(|seed| seed.set_tcp_settings(tcp.clone())).collect();
        Ok(Self { kind, seeds })
    }

    /// Whether slots are spread over several primaries.
    pub fn is_cluster(&self) -> bool {
        self.kind == Kind::Cluster
    }

    pub(super) fn refresh_interval(&self) -> Option<Duration> {
        match self.kind {
            Kind::Single => None,
            Kind::Sentinel { .. } => Some(SENTINEL_REFRESH),
            Kind::Cluster => Some(CLUSTER_REFRESH),
        }
    }

    /// How to connect to one node of this cache.
    pub(super) fn node(&self, host: &str, port: u16) -> ConnectionInfo {
        let seed = &self.seeds[0];
        let host = host.to_owned();
        let address = match seed.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        seed.clone().set_addr(address)
    }

    /// Asks the servers, one after the other, until one knows.
    pub(super) async fn discover(&self) -> Result<Map, Error> {
        let mut last = Error::CacheTopology("the URL names no server".to_owned());
        for seed in &self.seeds {
            let found = match &self.kind {
                Kind::Single => return Ok(Map::single(seed.clone())),
                Kind::Sentinel { name } => self.ask_sentinel(seed, name).await,
                Kind::Cluster => self.ask_cluster(seed).await,
            };
            match found {
                Ok(map) => return Ok(map),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn ask_sentinel(&self, sentinel: &ConnectionInfo, name: &str) -> Result<Map, Error> {
        let plain = sentinel.redis_settings().clone().set_db(0);
        let mut connection = connect(sentinel.clone().set_redis_settings(plain)).await?;
        let answer: Option<(String, u16)> = cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(name)
            .query_async(&mut connection)
            .await
            .map_err(|source| Error::Cache { attempt: "ask a Sentinel for the primary", source })?;
        let (host, port) = answer
            .ok_or_else(|| Error::CacheTopology(format!("the Sentinels know no primary named {name}; check the end of redis_url")))?;
        Ok(Map::single(self.node(&host, port)))
    }

    async fn ask_cluster(&self, seed: &ConnectionInfo) -> Result<Map, Error> {
        let mut connection = connect(seed.clone()).await?;
        let answer: Value = cmd("CLUSTER")
            .arg("SLOTS")
            .query_async(&mut connection)
            .await
            .map_err(|source| Error::Cache { attempt: "ask the cluster for its slots", source })?;
        let (ConnectionAddr::Tcp(asked, _) | ConnectionAddr::TcpTls { host: asked, .. }) = seed.addr() else {
            return Err(Error::CacheTopology("a cluster is reached over TCP".to_owned()));
        };
        let mut map = Map { primaries: Vec::new(), owners: vec![None; usize::from(SLOTS)] };
        for range in cluster_ranges(&answer, asked) {
            map.add(&range, self.node(&range.host, range.port));
        }
        if map.primaries.is_empty() { Err(Error::CacheTopology("the cluster has no slots assigned".to_owned())) } else { Ok(map) }
    }
}

/// Opens one connection without any reconnecting inside: a reconnect must be seen, since it may be to a node that lost writes.
pub(super) async fn connect(info: ConnectionInfo) -> Result<MultiplexedConnection, Error> {
    let failed = |source| Error::Cache { attempt: "connect to Redis", source };
    let client = Client::open(info).map_err(failed)?;
    let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(Some(ANSWER_TIMEOUT));
    client.get_multiplexed_async_connection_with_config(&config).await.map_err(failed)
}

/// What a single address says that answers for a part of the keys only.
pub(super) fn belongs_to_a_cluster(name: &str) -> String {
    format!("{name} belongs to a Redis Cluster and owns only a part of the keys; use redis+cluster:// in redis_url")
}

struct Range {
    first: u16,
    last: u16,
    host: String,
    port: u16,
}

/// Reads CLUSTER SLOTS: `[first, last, [host, port, …] of the primary, replicas…]`; an empty host means the one that was asked.
fn cluster_ranges(answer: &Value, asked: &str) -> Vec<Range> {
    let Value::Array(rows) = answer else { return Vec::new() };
    let read = |row: &Value| {
        let Value::Array(parts) = row else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = parts.as_slice() else { return None };
        let [host, Value::Int(port), ..] = primary.as_slice() else { return None };
        let host = match host {
            Value::BulkString(bytes) if !bytes.is_empty() => String::from_utf8(bytes.clone()).ok()?,
            _ => asked.to_owned(),
        };
        Some(Range { first: u16::try_from(*first).ok()?, last: u16::try_from(*last).ok()?, host, port: u16::try_from(*port).ok()? })
    };
    rows.iter().filter_map(read).filter(|range| range.first <= range.last && range.last < SLOTS).collect()
}

/// One primary.
#[derive(Clone)]
pub(super) struct PrimaryInfo {
    /// `host:port`, its name in maps and logs.
    pub(super) name: String,
    pub(super) info: ConnectionInfo,
    /// A text that, as a hash tag, falls in a slot of this primary; `None` where slots do not matter.
    pub(super) tag: Option<String>,
}

/// Which primary owns which slot.
#[derive(Clone)]
pub(super) struct Map {
    pub(super) primaries: Vec<PrimaryInfo>,
    owners: Vec<Option<usize>>,
}

impl Map {
    fn single(info: ConnectionInfo) -> Self {
        let primary = PrimaryInfo { name: info.addr().to_string(), info, tag: None };
        Self { primaries: vec![primary], owners: vec![Some(0); usize::from(SLOTS)] }
    }

    fn add(&mut self, range: &Range, info: ConnectionInfo) {
        let name = info.addr().to_string();
        let at = self.primaries.iter().position(|primary| primary.name == name).unwrap_or_else(|| {
            self.primaries.push(PrimaryInfo { name, info, tag: None });
            self.primaries.len() - 1
        });
        self.owners[usize::from(range.first)..=usize::from(range.last)].fill(Some(at));
        if self.primaries[at].tag.is_none() {
            // Tags are tried in order, so a primary keeps its marker's name as long as it keeps that slot.
            self.primaries[at].tag =
                (0..u32::MAX).map(|number| number.to_string()).find(|tag| (range.first..=range.last).contains(&slot(tag.as_bytes())));
        }
    }

    /// Whether every slot has the same owner in both.
    pub(super) fn same_owners(one: &Self, other: &Self) -> bool {
        (0..SLOTS).all(|slot| one.owner(slot).map(|primary| &primary.name) == other.owner(slot).map(|primary| &primary.name))
    }

    /// The owner of a slot; `None` while nobody owns it.
    pub(super) fn owner(&self, slot: u16) -> Option<&PrimaryInfo> {
        self.owners.get(usize::from(slot)).copied().flatten().map(|at| &self.primaries[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_single_redis_a_cluster_or_a_sentinel_set() {
        assert!(Address::parse("redis://h:1").unwrap().kind == Kind::Single);
        let cluster = Address::parse("redis+cluster://u:p@w@a:1,b:2").unwrap();
        assert!(cluster.is_cluster());
        assert_eq!(format!("{cluster:?}"), "Address(a:1,b:2)");
        assert_eq!(cluster.node("c", 3).redis_settings().password(), Some("p@w"));
        let sentinel = Address::parse("redis+sentinel://a:1,b:2/main/3").unwrap();
        assert!(sentinel.kind == Kind::Sentinel { name: "main".into() });
        assert_eq!(sentinel.node("c", 3).redis_settings().db(), 3);
        assert!(matches!(Address::parse("rediss+cluster://a:1").unwrap().node("c", 3).addr(), ConnectionAddr::TcpTls { .. }));
        for bad in ["", "h:1", "http://h", "redis+x://h", "redis+sentinel://a:1", "redis://"] {
            assert!(Address::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_marker_lies_in_a_slot_of_its_own_primary() {
        let row = |first: i64, last: i64, host: &str| {
            let primary = Value::Array(vec![Value::BulkString(host.into()), Value::Int(7000)]);
            Value::Array(vec![Value::Int(first), Value::Int(last), primary])
        };
        let address = Address::parse("redis+cluster://a:1").unwrap();
        let answer = Value::Array(vec![row(0, 99, "one"), row(100, 16_382, "two"), row(16_383, 16_383, "")]);
        let mut map = Map { primaries: Vec::new(), owners: vec![None; usize::from(SLOTS)] };
        for range in cluster_ranges(&answer, "asked") {
            map.add(&range, address.node(&range.host, range.port));
        }
        assert_eq!(map.owner(99).unwrap().name, "one:7000");
        assert_eq!(map.owner(16_383).unwrap().name, "asked:7000");
        for primary in &map.primaries {
            let slot = slot(primary.tag.as_ref().unwrap().as_bytes());
            assert_eq!(map.owner(slot).unwrap().name, primary.name);
        }
    }
}
