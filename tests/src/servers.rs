//! Where the shared servers are.

use recant_schema::service::config::process_environment;
use std::time::Duration;

/// What `dev/env` prints for the native stack on its own ports.
const NATIVE_DATABASE: &str = "postgres://recant:recant@127.0.0.1:55432/recant";
const NATIVE_BROKERS: &str = "127.0.0.1:59092";
const NATIVE_REDIS: &str = "redis://127.0.0.1:56379";
const NATIVE_REDIS_US: &str = "redis://127.0.0.1:56380";

/// Longest wait for a server's port.
const PATIENCE: Duration = Duration::from_secs(5);

/// Addresses of Postgres, Kafka and the two regions' Redis.
#[derive(Clone, Debug)]
pub struct Servers {
    /// A login that may create databases and roles.
    pub database_url: String,
    /// Bootstrap servers.
    pub brokers: String,
    /// One Redis (or one database of it) a region.
    pub redis_urls: [String; 2],
}

impl Servers {
    /// From `DATABASE_URL`, `KAFKA_BROKERS`, `REDIS_URL` and `REDIS_URL_US`; what is not given is where the native stack has it. With
    /// `REDIS_URL` alone the second region gets that server's database 1.
    pub fn from_environment() -> Self {
        let environment = process_environment();
        let variable =
            |name: &str| environment.iter().find(|(known, value)| known == name && !value.is_empty()).map(|(_, value)| value.clone());
        let redis_urls = match (variable("REDIS_URL"), variable("REDIS_URL_US")) {
            (Some(eu), Some(us)) => [eu, us],
            (Some(eu), None) => [eu.clone(), with_path(&eu, "1")],
            (None, us) => [NATIVE_REDIS.to_owned(), us.unwrap_or_else(|| NATIVE_REDIS_US.to_owned())],
        };
        Self {
            database_url: variable("DATABASE_URL").unwrap_or_else(|| NATIVE_DATABASE.to_owned()),
            brokers: variable("KAFKA_BROKERS").unwrap_or_else(|| NATIVE_BROKERS.to_owned()),
            redis_urls,
        }
    }

    /// Fails at once and clearly where a server does not answer.
    ///
    /// # Panics
    /// Names the server and the command that starts it.
    pub async fn insist(&self) {
        let [eu, us] = &self.redis_urls;
        let broker = self.brokers.split(',').next().unwrap_or_default();
        for (what, address) in
            [("Postgres", authority(&self.database_url)), ("Kafka", broker), ("Redis", authority(eu)), ("Redis", authority(us))]
        {
            let connected = tokio::time::timeout(PATIENCE, tokio::net::TcpStream::connect(address)).await;
            assert!(matches!(connected, Ok(Ok(_))), "{what} does not answer at {address}; start the servers: make up");
        }
    }
}

/// `host:port` of a URL.
pub fn authority(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let rest = rest.split_once('/').map_or(rest, |(rest, _)| rest);
    rest.rsplit_once('@').map_or(rest, |(_, authority)| authority)
}

/// The URL with another `host:port`.
pub fn with_authority(url: &str, address: &str) -> String {
    url.replacen(authority(url), address, 1)
}

/// The URL with another path: the database, for Postgres and Redis alike.
pub fn with_path(url: &str, path: &str) -> String {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find('/').map_or(url.len(), |at| start + at);
    format!("{}/{path}", &url[..end])
}

/// The URL with another login.
pub fn with_login(url: &str, user: &str, password: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("postgres", url));
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    format!("{scheme}://{user}:{password}@{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_url_are_replaced_and_the_rest_stays() {
        let url = "postgres://u:p@127.0.0.1:5432/shop";
        assert_eq!(authority(url), "127.0.0.1:5432");
        assert_eq!(with_authority(url, "h:1"), "postgres://u:p@h:1/shop");
        assert_eq!(with_path(url, "other"), "postgres://u:p@127.0.0.1:5432/other");
        assert_eq!(with_path("redis://h:1", "1"), "redis://h:1/1");
        assert_eq!(with_login(url, "a", "b"), "postgres://a:b@127.0.0.1:5432/shop");
    }
}
