//! `recant.invalidate`: what it writes, what it refuses, and who may call it.

use crate::database::{OUTBOX, count, refusal, run, with_database};
use recant_schema::key::{Key, KeyError};
use sqlx::postgres::PgDatabaseError;
use sqlx::{Connection as _, Executor as _};

#[tokio::test]
async fn each_refusal_has_its_sqlstate_and_a_hint() {
    with_database("", async |database| {
        database.migrate().await;
        let (login, mut limited) = database.login(Some("recant_writer")).await;
        let mut connection = database.connect().await;
        run(&mut connection, &format!("insert into recant.writer_scope values ('{login}', 'v2:own:', null)")).await.unwrap();
        let long = format!("repeat('k', {})", 251);
        for (arguments, sqlstate) in [
            ("''", "RC001"),
            ("null::text", "RC001"),
            ("array['a', null]", "RC001"),
            (long.as_str(), "RC002"),
            ("repeat('é', 126)", "RC002"),
            ("'a b'", "RC003"),
            ("e'a\\u00a0b'", "RC003"),
            ("'a}b'", "RC004"),
            ("'a{}{b}'", "RC004"),
            ("'{tag}'", "RC004"),
            ("'a', lane => 'slow'", "RC005"),
            ("'a', class => 'c1'", "RC006"),
            ("'a', regions => '{mars}'", "RC007"),
            ("'a', regions => '{}'", "RC007"),
            ("'a', regions => '{eu,null}'", "RC007"),
            ("'a', regions => '{{eu},{us}}'", "RC007"),
            ("'a', tenant => ''", "RC009"),
            ("'a', tenant => repeat('t', 129)", "RC009"),
            ("'a', tenant => 'a b'", "RC009"),
            ("'recant:x'", "RC010"),
            ("array['a', 'recant:x']", "RC010"),
        ] {
            let (code, hint) = refusal(run(&mut connection, &format!("select recant.invalidate({arguments})")).await);
            assert_eq!(code, sqlstate, "{arguments}");
            assert!(hint.is_some_and(|hint| hint.len() > 10), "{arguments}");
        }
        for arguments in ["'v2:other:1'", "array['v2:own:1', 'v2:other:1']"] {
            let (code, hint) = refusal(run(&mut limited, &format!("select recant.invalidate({arguments})")).await);
            assert_eq!((code.as_str(), hint.is_some()), ("RC008", true));
        }
        assert_eq!(count(&mut connection, OUTBOX).await, 0, "a refused call leaves no row");
    })
    .await;
}

#[tokio::test]
async fn an_unknown_region_is_named_with_the_known_ones() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let error = run(&mut connection, "select recant.invalidate('a', regions => '{eu,mars}')").await.unwrap_err();
        let postgres = error.as_database_error().unwrap().downcast_ref::<PgDatabaseError>();
        assert!(postgres.message().contains("mars") && !postgres.message().contains("eu"), "{}", postgres.message());
        assert_eq!(postgres.detail(), Some("Known: eu, us."));
    })
    .await;
}

#[tokio::test]
async fn an_invalid_trace_context_is_dropped_and_never_an_error() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (text, kept) in [
            (good.to_owned(), true),
            (good.to_uppercase(), false),
            (good.replacen("00", "ff", 1), false),
            (good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)), false),
            (good.replace("00f067aa0ba902b7", &"0".repeat(16)), false),
            (format!("{good}-more"), false),
            (String::new(), false),
        ] {
            run(&mut connection, &format!("truncate recant.outbox; select recant.invalidate('a', traceparent => '{text}')")).await.unwrap();
            let with = count(&mut connection, "select count(traceparent) from recant.outbox").await;
            assert_eq!(with == 1, kept, "{text}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_call_that_raises_leaves_no_row_and_after_a_savepoint_the_transaction_goes_on() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        let mut transaction = connection.begin().await.unwrap();
        transaction.execute("select recant.invalidate('v2:first')").await.unwrap();
        transaction.execute("savepoint before").await.unwrap();
        transaction.execute("select recant.invalidate(array['v2:lost', 'bad key'])").await.unwrap_err();
        transaction.execute("rollback to savepoint before").await.unwrap();
        transaction.execute("select recant.invalidate('v2:second')").await.unwrap();
        transaction.commit().await.unwrap();
        let keys: Vec<String> = sqlx::query_scalar("select key from recant.outbox order by id").fetch_all(&mut connection).await.unwrap();
        assert_eq!(keys, ["v2:first", "v2:second"]);
    })
    .await;
}

#[tokio::test]
async fn a_rolled_back_transaction_leaves_no_row() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        run(&mut connection, "begin; select recant.invalidate('v2:a'); rollback").await.unwrap();
        assert_eq!(count(&mut connection, OUTBOX).await, 0);
    })
    .await;
}

#[tokio::test]
async fn a_writer_may_call_and_may_not_touch_the_tables() {
    with_database("", async |database| {
        database.migrate().await;
        let (_, mut writer) = database.login(Some("recant_writer")).await;
        run(&mut writer, "select recant.invalidate('v2:a', tenant => 't', class => 'C2', regions => '{eu}')").await.unwrap();
        run(&mut writer, "select recant.invalidate(array['v2:b', 'v2:c'])").await.unwrap();
        for forbidden in [
            "select * from recant.outbox",
            "insert into recant.outbox (key) values ('a b')",
            "delete from recant.outbox",
            "select * from recant.set_aside",
            "insert into recant.writer_scope values (session_user, '', null)",
            "select recant.check_key('a')",
        ] {
            assert_eq!(refusal(run(&mut writer, forbidden).await).0, "42501", "{forbidden}");
        }
        let mut connection = database.connect().await;
        assert_eq!(count(&mut connection, OUTBOX).await, 3);
    })
    .await;
}

#[tokio::test]
async fn nobody_may_call_without_the_writer_role() {
    with_database("", async |database| {
        database.migrate().await;
        let (login, mut stranger) = database.login(None).await;
        let mut connection = database.connect().await;
        run(&mut connection, &format!("grant usage on schema recant to {login}")).await.unwrap();
        for call in ["select recant.invalidate('a')", "select recant.invalidate(array['a'])", "select recant.replica_position()"] {
            assert_eq!(refusal(run(&mut stranger, call).await).0, "42501", "{call}");
        }
    })
    .await;
}

#[tokio::test]
async fn one_tenant_cannot_invalidate_another() {
    with_database("", async |database| {
        database.migrate().await;
        let (login, mut writer) = database.login(Some("recant_writer")).await;
        let mut connection = database.connect().await;
        let scope = format!("insert into recant.writer_scope values ('{login}', 'v2:a:', 'a'), ('{login}', 'v2:shared:', null)");
        run(&mut connection, &scope).await.unwrap();
        for (arguments, allowed) in [
            ("'v2:a:1', tenant => 'a'", true),
            ("array['v2:a:1', 'v2:a:2'], tenant => 'a'", true),
            ("'v2:shared:1'", true),
            ("'v2:shared:1', tenant => 'b'", true),
            ("'v2:a:1', tenant => 'b'", false),
            ("'v2:a:1'", false),
            ("'v2:b:1', tenant => 'a'", false),
            ("array['v2:a:1', 'v2:b:1'], tenant => 'a'", false),
            ("array['v2:a:1']", false),
        ] {
            let before = count(&mut connection, OUTBOX).await;
            let result = run(&mut writer, &format!("select recant.invalidate({arguments})")).await;
            if allowed {
                result.unwrap();
            } else {
                assert_eq!(refusal(result).0, "RC008", "{arguments}");
                assert_eq!(count(&mut connection, OUTBOX).await, before, "{arguments}");
            }
        }
        // Becoming the writer role for a while does not shed the limit: the login counts.
        run(&mut writer, "set role recant_writer").await.unwrap();
        assert_eq!(refusal(run(&mut writer, "select recant.invalidate('v2:b:1', tenant => 'a')").await).0, "RC008");
    })
    .await;
}

#[tokio::test]
async fn sql_and_rust_agree_on_every_key() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        // Both overloads, and what they say, or "ok".
        let verdict = "create function pg_temp.verdict(key text, several boolean) returns text language plpgsql as $$
            begin
                if several then perform recant.invalidate(array[key]); else perform recant.invalidate(key); end if;
                return 'ok';
            exception when others then return sqlstate;
            end $$";
        run(&mut connection, verdict).await.unwrap();
        let keys = generated_keys();
        assert!(keys.len() >= 2_000);
        for several in [false, true] {
            let found: Vec<String> =
                sqlx::query_scalar("select pg_temp.verdict(key, $2) from unnest($1::text[]) with ordinality as t (key, n) order by n")
                    .bind(&keys)
                    .bind(several)
                    .fetch_all(&mut connection)
                    .await
                    .unwrap();
            for (key, found) in keys.iter().zip(found) {
                assert_eq!(found, in_rust(key), "{key:?}");
            }
        }
    })
    .await;
}

fn in_rust(key: &str) -> &'static str {
    match Key::parse(key) {
        Ok(_) => "ok",
        Err(KeyError::Empty) => "RC001",
        Err(KeyError::TooLong(_)) => "RC002",
        Err(KeyError::Forbidden(_)) => "RC003",
        Err(KeyError::Braces) => "RC004",
        Err(KeyError::Reserved) => "RC010",
    }
}

/// Every character of the planes where white space and control characters lie, then random keys of the pieces that rules are about. Postgres texts
/// cannot hold NUL, so it is left out.
fn generated_keys() -> Vec<String> {
    let mut keys: Vec<String> = (1..0x3100u32).chain(0xfe00..0x10000).filter_map(char::from_u32).map(|c| format!("k{c}")).collect();
    let pieces = [
        "{",
        "}",
        "{}",
        "a",
        "é",
        "日",
        "🦀",
        ":",
        "recant:",
        "v2:",
        " ",
        "\u{85}",
        "\u{2003}",
        "~",
        "\u{7f}",
        "\u{200b}",
        "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkk",
    ];
    // A fixed seed: what fails once fails again. The multiplier is Knuth's for 64 bits.
    let mut state = 0x5eed_u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    for _ in 0..4_000 {
        let length = draw(12);
        keys.push((0..length).map(|_| pieces[draw(pieces.len())]).collect());
    }
    keys.extend([String::new(), "k".repeat(250), "k".repeat(251), "é".repeat(125), format!("{}é", "k".repeat(249))]);
    keys
}

#[tokio::test]
async fn several_keys_are_written_once_each_and_no_keys_are_no_rows() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        for nothing in ["'{}'::text[]", "null::text[]", "(select array_agg(name) from recant.region where false)"] {
            run(&mut connection, &format!("select recant.invalidate({nothing})")).await.unwrap();
        }
        assert_eq!(count(&mut connection, OUTBOX).await, 0);
        let call =
            "select recant.invalidate(array['b', 'a', 'b', 'c{x}'], tenant => 't', class => 'C4', regions => '{us}', lane => 'bulk')";
        run(&mut connection, call).await.unwrap();
        let rows = "select count(distinct key) from recant.outbox where (tenant, class, regions, lane) = ('t', 'C4', '{us}', 'bulk')";
        assert_eq!((count(&mut connection, OUTBOX).await, count(&mut connection, rows).await), (3, 3));
    })
    .await;
}

#[tokio::test]
async fn a_bare_text_reaches_the_single_key_function() {
    with_database("", async |database| {
        database.migrate().await;
        let mut connection = database.connect().await;
        run(&mut connection, "select recant.invalidate('{a,b}:c')").await.unwrap();
        let keys: Vec<String> = sqlx::query_scalar("select key from recant.outbox").fetch_all(&mut connection).await.unwrap();
        assert_eq!(keys, ["{a,b}:c"]);
    })
    .await;
}

#[tokio::test]
async fn nothing_in_the_callers_search_path_can_slip_under_the_functions() {
    with_database("", async |database| {
        database.migrate().await;
        let (login, mut writer) = database.login(Some("recant_writer")).await;
        let mut connection = database.connect().await;
        let attack = format!(
            "create schema evil authorization {login};
             grant temporary on database {} to {login};
             insert into recant.writer_scope values ('{login}', 'v2:', null)",
            database.name
        );
        run(&mut connection, &attack).await.unwrap();
        let shadows = "
            create table evil.outbox (like_this int);
            create temporary table outbox (like_this int);
            create temporary table writer_scope (role name, key_prefix text, tenant text);
            create function evil.yes(text, text) returns boolean language sql immutable as 'select true';
            create function evil.octet_length(text) returns int language sql immutable as 'select 1';
            create function evil.starts_with(text, text) returns boolean language sql immutable as 'select true';
            create function evil.strpos(text, text) returns int language sql immutable as 'select 0';
            create operator evil.~ (leftarg = text, rightarg = text, function = evil.yes);
            create operator evil.= (leftarg = text, rightarg = text, function = evil.yes);
            set search_path = evil, pg_temp, pg_catalog, recant";
        run(&mut writer, shadows).await.unwrap();
        for (arguments, sqlstate) in [("'a b'", "RC003"), ("repeat('k', 251)", "RC002"), ("'v1:a'", "RC008"), ("array['v1:a']", "RC008")] {
            assert_eq!(refusal(run(&mut writer, &format!("select recant.invalidate({arguments})")).await).0, sqlstate);
        }
        run(&mut writer, "select recant.invalidate('v2:a')").await.unwrap();
        assert_eq!(count(&mut connection, OUTBOX).await, 1);
        let open = "select count(*) from pg_proc where pronamespace = 'recant'::regnamespace
                    and (proconfig is null or array_to_string(proconfig, ',') not like 'search_path=%pg_temp')";
        assert_eq!(count(&mut connection, open).await, 0, "every function fixes its search_path, ending in pg_temp");
    })
    .await;
}
