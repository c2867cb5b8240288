//! Bad input: each mistake gives one clear line with its remedy, the right exit code, and never a panic or a backtrace.

use recant_tests::daemon::run_to_end;
use recant_tests::{Pipeline, Servers};
use std::process::Output;

type Settings = Vec<(String, String)>;

/// What a mistake must look like: the exit code, and a text that each line of standard error contains.
struct Case {
    program: &'static str,
    arguments: &'static [&'static str],
    settings: Settings,
    code: i32,
    lines: &'static [&'static str],
}

/// Nothing listens on port 1.
const NOBODY: &str = "127.0.0.1:1";

fn settings(pairs: &[(&str, &str)]) -> Settings {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Settings that are right, with these instead of or beside them.
fn relay(changes: &[(&str, &str)]) -> Settings {
    let servers = Servers::from_environment();
    let right = [
        ("RELAY_DATABASE_URL", servers.database_url.as_str()),
        ("RELAY_BROKERS", &servers.brokers),
        ("RELAY_REGIONS", "eu,us"),
        ("RELAY_TOPIC_PREFIX", "absent"),
    ];
    changed(&right, changes)
}

fn subscriber(changes: &[(&str, &str)]) -> Settings {
    let servers = Servers::from_environment();
    let right = [
        ("SUBSCRIBER_REDIS_URL", servers.redis_urls[0].as_str()),
        ("SUBSCRIBER_BROKERS", &servers.brokers),
        ("SUBSCRIBER_REGION", "eu"),
        ("SUBSCRIBER_TOPIC_PREFIX", "absent"),
    ];
    changed(&right, changes)
}

fn changed(right: &[(&str, &str)], changes: &[(&str, &str)]) -> Settings {
    let kept = right.iter().filter(|(name, _)| !changes.iter().any(|(changed, _)| changed == name));
    settings(&kept.chain(changes).copied().collect::<Vec<_>>())
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Runs all at once: the slow ones wait for servers that are not there.
async fn check(cases: Vec<Case>) {
    let runs = cases.into_iter().map(|case| {
        tokio::task::spawn_blocking(move || {
            let output = run_to_end(case.program, case.arguments, &case.settings);
            (case, output)
        })
    });
    for run in futures::future::join_all(runs).await {
        let (case, output) = run.expect("starting a process does not panic");
        let what = format!("{} {:?}\n{}", case.program, case.arguments, text(&output));
        assert_eq!(output.status.code(), Some(case.code), "{what}");
        for sign in ["panicked", "backtrace", "RUST_BACKTRACE"] {
            assert!(!text(&output).contains(sign), "{what}");
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<_> = errors.lines().filter(|line| line.starts_with(case.program)).collect();
        for wanted in case.lines {
            assert!(lines.iter().any(|line| line.contains(wanted)), "{wanted:?} is missing in: {what}");
        }
        assert!(lines.len() <= case.lines.len(), "one line a mistake: {what}");
    }
}

#[tokio::test]
async fn a_wrong_command_line_exits_64_and_says_what_is_wrong() {
    for (program, arguments, wanted) in [
        ("relay", &["run", "--nope"][..], "unexpected argument '--nope'"),
        ("relay", &["fly"], "unrecognized subcommand 'fly'"),
        ("relay", &["invalidate"], "<KEYS>"),
        ("relay", &[], "Usage: relay"),
        ("subscriber", &["run", "--nope"], "unexpected argument '--nope'"),
        ("subscriber", &["inspect"], "<KEY>"),
        ("subscriber", &[], "Usage: subscriber"),
    ] {
        let output = run_to_end(program, arguments, &Vec::new());
        assert_eq!(output.status.code(), Some(64), "{program} {arguments:?}");
        assert!(text(&output).contains(wanted), "{program} {arguments:?}: {}", text(&output));
    }
}

#[tokio::test]
async fn a_wrong_configuration_exits_64_with_one_line_for_each_problem() {
    let case = |program, arguments, settings, lines| Case { program, arguments, settings, code: 64, lines };
    check(vec![
        case("relay", &["run"], Vec::new(), &["RELAY_DATABASE_URL", "RELAY_BROKERS", "RELAY_REGIONS"]),
        case("relay", &["run"], relay(&[("RELAY_DATABSE_URL", "x")]), &["RELAY_DATABSE_URL: unknown setting"]),
        case(
            "relay",
            &["check"],
            relay(&[("RELAY_CLAIM_LIMIT", "0"), ("RELAY_REGIONS", "EU")]),
            &["claim_limit", "\"EU\" is not a region name"],
        ),
        case("relay", &["migrate"], relay(&[("RELAY_DATABASE_URL", "mysql://h/x")]), &["database_url"]),
        case("relay", &["run"], relay(&[("RELAY_KAFKA_OPTIONS", "acks=1")]), &["acks"]),
        case("relay", &["run"], relay(&[("RELAY_HTTP_ADDRESS", "nowhere")]), &["http_address"]),
        case("relay", &["--config", "/not/there.toml", "run"], relay(&[]), &["/not/there.toml: could not be read"]),
        case("subscriber", &["run"], Vec::new(), &["SUBSCRIBER_REGION", "SUBSCRIBER_REDIS_URL", "SUBSCRIBER_BROKERS"]),
        case("subscriber", &["run"], subscriber(&[("SUBSCRIBER_REGOIN", "x")]), &["SUBSCRIBER_REGOIN: unknown setting"]),
        case(
            "subscriber",
            &["run"],
            subscriber(&[("SUBSCRIBER_REDIS_URL", "http://h"), ("SUBSCRIBER_FLOOR_TTL_MS", "1")]),
            &["redis_url", "floor_ttl_ms"],
        ),
        case("subscriber", &["run"], subscriber(&[("SUBSCRIBER_KEY_PREFIXES", "recant:")]), &["key_prefixes"]),
        case("subscriber", &["run"], subscriber(&[("SUBSCRIBER_KAFKA_OPTIONS", "group.id=x")]), &["group.id"]),
        case("subscriber", &["--config", "/not/there.toml", "run"], subscriber(&[]), &["/not/there.toml: could not be read"]),
    ])
    .await;
}

/// A comma inside a password splits it, and a misspelt option is unknown: what is complained about may be a secret.
#[tokio::test]
async fn a_bad_kafka_option_is_named_and_its_value_never_printed() {
    for (options, named) in [
        ("sasl.password=hunt,er2", "kafka_options"),
        ("sasl.pasword=hunter2", "sasl.pasword"),
        ("security.protocol=hunter2", "security.protocol"),
        ("acks=hunter2", "acks"),
    ] {
        for (program, settings) in
            [("relay", relay(&[("RELAY_KAFKA_OPTIONS", options)])), ("subscriber", subscriber(&[("SUBSCRIBER_KAFKA_OPTIONS", options)]))]
        {
            for command in ["run", "check"] {
                let output = run_to_end(program, &[command], &settings);
                let (text, what) = (text(&output), format!("{program} {command} with {options}"));
                assert_eq!(output.status.code(), Some(64), "{what}: {text}");
                assert!(text.contains(named), "{what}: {text}");
                assert!(!text.contains("hunt") && !text.contains("er2"), "{what} prints a part of it: {text}");
                assert!(output.stdout.is_empty(), "{what}: {text}");
                let lines = text.lines().count();
                // `acks` is refused for being set at all, and its value for being none: two problems.
                assert!(lines == 1 || (lines == 2 && named == "acks"), "{what}, one line a problem: {text}");
            }
        }
    }
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_named_with_the_remedy() {
    let url = format!("postgres://recant:recant@{NOBODY}/recant");
    let redis = format!("redis://{NOBODY}");
    let case = |program, arguments, settings, lines| Case { program, arguments, settings, code: 1, lines };
    check(vec![
        case("relay", &["migrate"], relay(&[("RELAY_DATABASE_URL", &url)]), &["; check that Postgres runs"]),
        case("relay", &["status"], relay(&[("RELAY_DATABASE_URL", &url)]), &["; check that Postgres runs"]),
        case("relay", &["invalidate", "v2:a"], relay(&[("RELAY_DATABASE_URL", &url)]), &["; check that Postgres runs"]),
        case("relay", &["topics"], relay(&[("RELAY_BROKERS", NOBODY)]), &["; check that Kafka runs"]),
        case("relay", &["check"], relay(&[("RELAY_DATABASE_URL", &url), ("RELAY_BROKERS", NOBODY)]), &[]),
        case("subscriber", &["check"], subscriber(&[("SUBSCRIBER_REDIS_URL", &redis), ("SUBSCRIBER_BROKERS", NOBODY)]), &[]),
        case("subscriber", &["status"], subscriber(&[("SUBSCRIBER_REDIS_URL", &redis)]), &["; check redis_url"]),
        case("subscriber", &["inspect", "v2:a"], subscriber(&[("SUBSCRIBER_REDIS_URL", &redis)]), &["; check redis_url"]),
        case("subscriber", &["status"], subscriber(&[("SUBSCRIBER_BROKERS", NOBODY)]), &["; check brokers"]),
        case("subscriber", &["inspect", "a b"], subscriber(&[]), &["percent-encode it"]),
    ])
    .await;
}

#[tokio::test]
async fn check_names_each_absent_topic_and_the_command_that_creates_it() {
    for (program, settings, topics) in [("relay", relay(&[]), 8), ("subscriber", subscriber(&[]), 5)] {
        let output = tokio::task::spawn_blocking(move || run_to_end(program, &["check"], &settings)).await.unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = text(&output);
        let missing =
            text.lines().filter(|line| line.starts_with("FAIL") && line.contains("topic absent.") && line.contains("relay topics"));
        assert_eq!(missing.count(), topics, "{text}");
    }
}

/// A login that may do nothing but connect.
#[tokio::test]
async fn a_missing_privilege_is_named_with_its_grant() {
    let pipeline = Pipeline::start().await;
    let login = pipeline.database().login().await;
    let mut relay = pipeline.relays[0].settings().to_vec();
    relay.retain(|(name, _)| name != "RELAY_DATABASE_URL");
    relay.push(("RELAY_DATABASE_URL".to_owned(), login.url().to_owned()));
    let case = |arguments, lines| Case { program: "relay", arguments, settings: relay.clone(), code: 1, lines };
    check(vec![
        case(&["invalidate", "v2:a"], &["[SQLSTATE 42501]"]),
        case(&["status"], &["; run relay check: it names each missing GRANT"]),
        case(&["migrate"], &["use a login that owns the database"]),
    ])
    .await;
    let output = tokio::task::spawn_blocking(move || run_to_end("relay", &["check"], &relay)).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).lines().any(|line| line.starts_with("FAIL") && line.contains("grant ")), "{}", text(&output));
    pipeline.finish().await;
}

#[tokio::test]
async fn a_wrong_password_is_named_with_the_remedy() {
    let pipeline = Pipeline::start().await;
    let login = pipeline.database().login().await;
    let wrong = recant_tests::servers::with_login(login.url(), login.name(), "wrong");
    let settings = relay(&[("RELAY_DATABASE_URL", &wrong)]);
    check(vec![Case { program: "relay", arguments: &["status"], settings, code: 1, lines: &["; correct user, password and database"] }])
        .await;
    pipeline.finish().await;
}

#[tokio::test]
async fn a_port_in_use_is_named_before_anything_else_starts() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("the loopback address has free ports");
    let address = taken.local_addr().expect("a bound socket has an address").to_string();
    let case = |program, settings| Case { program, arguments: &["run"], settings, code: 1, lines: &["set http_address to a free address"] };
    check(vec![
        case("relay", relay(&[("RELAY_HTTP_ADDRESS", &address)])),
        case("subscriber", subscriber(&[("SUBSCRIBER_HTTP_ADDRESS", &address)])),
    ])
    .await;
}
