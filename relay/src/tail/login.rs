//! Where the tail connects, from `tail_url`.

use pgwire_replication::config::{SslMode, TlsConfig};
use recant_schema::service::config::Secret;
use std::borrow::Cow;
use std::path::PathBuf;
use url::Url;

const SHAPE: &str = "is not of the form postgres://user:password@host:port/database";

/// Postgres' own port.
const DEFAULT_PORT: u16 = 5432;

/// A login that may replicate.
#[derive(Clone, Debug)]
pub struct Login {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) user: String,
    pub(super) password: Secret,
    pub(super) database: String,
    pub(super) tls: TlsConfig,
}

impl Login {
    /// Reads a URL. Of the options that Postgres URLs may have, `sslmode`, `sslrootcert`, `sslcert` and `sslkey` are known.
    ///
    /// # Errors
    /// What is wrong with it; the text does not repeat it, since it holds a password.
    pub fn parse(secret: &Secret) -> Result<Self, String> {
        let url = Url::parse(secret.expose()).map_err(|_| SHAPE.to_owned())?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(SHAPE.to_owned());
        }
        // A host that begins with a slash, percent-encoded in the URL, is the folder of a socket.
        let host = decode(url.host_str().unwrap_or_default())?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let (user, password) = (decode(url.username())?, decode(url.password().unwrap_or_default())?);
        let database = decode(url.path().trim_start_matches('/'))?;
        for (part, text) in [("host", &host), ("user", &user), ("database", &database)] {
            if text.is_empty() {
                return Err(format!("names no {part}; it {SHAPE}"));
            }
        }
        let port = url.port().unwrap_or(DEFAULT_PORT);
        let mut tls = TlsConfig { mode: SslMode::Prefer, ..TlsConfig::default() };
        for (name, value) in url.query_pairs() {
            match name.as_ref() {
                "sslmode" => tls.mode = mode(&value)?,
                "sslrootcert" => tls.ca_pem_path = Some(path(&value)),
                "sslcert" => tls.client_cert_pem_path = Some(path(&value)),
                "sslkey" => tls.client_key_pem_path = Some(path(&value)),
                other => return Err(format!("has the option {other}; known are sslmode, sslrootcert, sslcert and sslkey")),
            }
        }
        Ok(Self { host, port, user, password: Secret::new(password), database, tls })
    }

    /// Who logs in.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// To which database.
    pub fn database(&self) -> &str {
        &self.database
    }
}

fn decode(text: &str) -> Result<String, String> {
    percent_encoding::percent_decode_str(text).decode_utf8().map(Cow::into_owned).map_err(|_| SHAPE.to_owned())
}

fn path(text: &str) -> PathBuf {
    PathBuf::from(text)
}

fn mode(text: &str) -> Result<SslMode, String> {
    match text {
        "disable" => Ok(SslMode::Disable),
        "allow" | "prefer" => Ok(SslMode::Prefer),
        "require" => Ok(SslMode::Require),
        "verify-ca" => Ok(SslMode::VerifyCa),
        "verify-full" => Ok(SslMode::VerifyFull),
        _ => Err("has an unknown sslmode; use disable, prefer, require, verify-ca or verify-full".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Login, String> {
        Login::parse(&Secret::new(url.to_owned()))
    }

    #[test]
    fn a_url_is_read_with_its_escapes_and_its_tls_options() {
        let login = parse("postgres://tail:p%40ss@[::1]:6000/shop?sslmode=verify-full&sslrootcert=/ca.pem").unwrap();
        assert_eq!((login.host.as_str(), login.port, login.user(), login.password.expose()), ("::1", 6000, "tail", "p@ss"));
        assert_eq!((login.database(), login.tls.mode), ("shop", SslMode::VerifyFull));
        let login = parse("postgresql://tail@%2Frun%2Fpostgres/shop").unwrap();
        assert_eq!((login.host.as_str(), login.port, login.tls.mode), ("/run/postgres", 5432, SslMode::Prefer));
        assert!(!format!("{:?}", parse("postgres://tail:hunter2@h/d").unwrap()).contains("hunter2"));
    }

    #[test]
    fn what_is_wrong_is_named_without_repeating_the_secret() {
        for bad in ["", "shop", "mysql://u:hunter2@h/d", "postgres://u:hunter2@h", "postgres://h/d", "postgres://u:hunter2@h/d?sslmode=x"] {
            let problem = parse(bad).unwrap_err();
            assert!(!problem.contains("hunter2"), "{problem}");
        }
    }
}
