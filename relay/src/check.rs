//! `relay check`: everything the relay needs, one line each: `ok`, `note` or `FAIL` with the remedy.

use crate::broker::topics::{self, Finding};
use crate::config::{Config, WakeChoice};
use crate::error::Error;
use crate::outbox::Session;
use crate::outbox::admin::{Migrations, SchemaFacts, ServerFacts};
use crate::tail::{self, Login};

/// The lines, and whether everything is as it must be.
#[derive(Debug, Default)]
pub struct Report {
    /// For a person, in the order of the checks.
    pub lines: Vec<String>,
    /// Whether any line says FAIL.
    pub failed: bool,
}

impl Report {
    fn ok(&mut self, what: &str) {
        self.lines.push(format!("ok    {what}"));
    }

    fn note(&mut self, what: &str) {
        self.lines.push(format!("note  {what}"));
    }

    fn fail(&mut self, what: &str, remedy: &str) {
        self.failed = true;
        self.lines.push(format!("FAIL  {what}; {remedy}"));
    }

    fn error(&mut self, error: &Error) {
        self.failed = true;
        self.lines.push(format!("FAIL  {}", error.line()));
    }
}

/// Checks Postgres and Kafka with a configuration that is already known to be sound.
pub async fn run(config: &Config) -> Report {
    let mut report = Report::default();
    report.ok("configuration");
    postgres(config, &mut report).await;
    kafka(config, &mut report).await;
    report
}

async fn postgres(config: &Config, report: &mut Report) {
    let mut session = match Session::open(&config.database_url, &config.relay_name, "check").await {
        Ok(session) => session,
        Err(fault) => return report.error(&Error::OutboxConnect(fault)),
    };
    match session.server_facts().await {
        Ok(facts) => {
            if server(&facts, report) {
                match session.schema_facts().await {
                    Ok(found) => schema(config, &facts, &found, report),
                    Err(fault) => report.error(&Error::OutboxRead(fault)),
                }
                wake_ups(config, &facts, report).await;
            }
        }
        Err(fault) => report.error(&Error::OutboxRead(fault)),
    }
    session.close().await;
}

/// Returns whether the schema is there to be looked at.
fn server(facts: &ServerFacts, report: &mut Report) -> bool {
    let major = facts.version / 10_000;
    if (15..=18).contains(&major) {
        report.ok(&format!("PostgreSQL {major} as {}", facts.login));
    } else {
        report.fail(&format!("PostgreSQL {major}"), "use 15 to 18");
    }
    if facts.in_recovery {
        report.fail("the server is a standby", "database_url must name the primary");
    }
    if facts.encoding != "UTF8" {
        report.fail(&format!("the database has encoding {}", facts.encoding), "create one with encoding UTF8");
    }
    if !facts.commit_times {
        report.note("track_commit_timestamp is off: propagation time is measured from the insert, an upper bound; switch it on and restart Postgres");
    }
    match &facts.migrations {
        Migrations::Never => report.fail("the database is not migrated", "run relay migrate with a login that owns the database"),
        // The missing right is named below.
        Migrations::Unreadable => {}
        Migrations::Missing(missing) if missing.is_empty() => report.ok("migrations"),
        Migrations::Missing(missing) => {
            let text = format!("migrations {missing:?} are not applied as this relay carries them");
            report.fail(&text, "run relay migrate with the newest relay in use");
        }
    }
    facts.migrations != Migrations::Never
}

/// Where wake-ups will come from. Without the tail everything works, only later by some milliseconds; so only what was asked for and will not work until
/// somebody acts is a failure.
async fn wake_ups(config: &Config, facts: &ServerFacts, report: &mut Report) {
    let Some(login) = &config.tail else {
        let why = match config.wake {
            WakeChoice::Timer => "wake is timer",
            WakeChoice::Auto => "tail_url is not set",
        };
        let longest = config.timer_longest.as_millis();
        return report
            .note(&format!("wake-ups come from the timer, up to {longest} ms after a commit ({why}); {}", what_a_tail_needs(facts)));
    };
    match tail::probe(login, &config.relay_name).await {
        Ok(cluster) if cluster != facts.cluster => {
            report.fail("tail_url names another cluster than database_url", "both must name the same server");
        }
        Ok(_) => {
            report.ok(&format!("wake-ups come from the log, as {}", login.user()));
            report.note(&what_replication_means(login));
        }
        Err(loss) if loss.reason.lasts() => report.fail(
            &format!("no wake-ups from the log: {}", loss.text),
            &format!("{}; until then the timer wakes", loss.reason.remedy().unwrap_or("repair it")),
        ),
        Err(loss) => report.note(&format!("no wake-ups from the log at this moment, the timer wakes: {}", loss.line())),
    }
}

fn what_a_tail_needs(facts: &ServerFacts) -> String {
    let level = if facts.wal_level == "logical" { String::new() } else { format!(" and wal_level = logical (it is {})", facts.wal_level) };
    format!("from the log they come sooner, but that needs a login with REPLICATION, which can copy the whole cluster{level}")
}

fn what_replication_means(login: &Login) -> String {
    let user = login.user();
    format!(
        "{user} has REPLICATION, which can copy the whole cluster, every database in it: \
         use {user} for tail_url only, keep its password apart, and let pg_hba.conf admit it from the relays' hosts to this database only"
    )
}

fn schema(config: &Config, facts: &ServerFacts, found: &SchemaFacts, report: &mut Report) {
    for right in &found.missing_rights {
        let login = &facts.login;
        report.fail(&format!("{login} lacks a right"), &format!("grant {right} to {login} (or: grant recant_relay to {login})"));
    }
    if found.missing_rights.is_empty() {
        report.ok("rights in Postgres");
    }
    for writer in &found.unlimited_writers {
        report.note(&format!("{writer} may invalidate any key; rows in recant.writer_scope limit it"));
    }
    if !found.missing_rights.is_empty() {
        return;
    }
    let configured: Vec<&str> = config.regions.iter().map(|region| region.as_str()).collect();
    let unregistered: Vec<_> = configured.iter().filter(|name| !found.regions.iter().any(|known| known == *name)).collect();
    if !unregistered.is_empty() {
        report.fail(&format!("regions {unregistered:?} are not in recant.region"), "run relay migrate");
    }
    for extra in found.regions.iter().filter(|known| !configured.contains(&known.as_str())) {
        report.fail(
            &format!("writers may name region {extra}, which is not configured here"),
            "add it to regions, or delete it from recant.region",
        );
    }
    if unregistered.is_empty() && found.regions.len() == configured.len() {
        report.ok("regions");
    }
}

async fn kafka(config: &Config, report: &mut Report) {
    let findings = match topics::check(config).await {
        Ok(findings) => findings,
        Err(fault) => return report.error(&Error::BrokerMetadata(fault)),
    };
    for (topic, finding) in findings {
        match finding {
            Finding::AsConfigured | Finding::Created | Finding::PartitionsRaised(_) => report.ok(&format!("topic {topic}")),
            Finding::Missing => report.fail(&format!("topic {topic} does not exist"), "run relay topics"),
            Finding::Differs(differences) => {
                let essential =
                    differences.iter().any(|text| text.starts_with("message.timestamp.type") || text.starts_with("cleanup.policy"));
                let text = format!("topic {topic}: {}", differences.join(", "));
                if essential {
                    report.fail(&text, "correct it with kafka-configs.sh --alter --entity-type topics");
                } else {
                    report.note(&format!("{text}; correct the topic or the configuration"));
                }
            }
        }
    }
}
