//! `subscriber inspect KEY`: what the cache holds for one key.

use crate::cache::Inspector;
use crate::config::Config;
use crate::error::Error;
use recant_schema::key::Key;

/// Prints value presence, floor, mark and times to live; `false` when the text is no key.
///
/// # Errors
/// When the cache cannot be asked.
pub async fn inspect(config: &Config, text: &str) -> Result<bool, Error> {
    let key = match Key::parse(text) {
        Ok(key) => key,
        Err(error) => {
            eprintln!("subscriber: {error}");
            return Ok(false);
        }
    };
    if !config.key_prefixes.allow(&key) {
        println!(
            "note    this key lies outside key_prefixes ({}); this subscriber never touches it",
            config.key_prefixes.as_slice().join(", ")
        );
    }
    let report = Inspector::new(config).await?.key(&key).await?;
    let field = |name: &str| report.entry.get(name).map(String::as_str).filter(|text| !text.is_empty());
    println!("key     {key}");
    println!("node    {} (slot {})", report.node, key.slot());
    match report.value_type.as_str() {
        "none" => println!("value   none"),
        kind => println!("value   a {kind}, {}", expiry(report.value_ttl_ms)),
    }
    match (field("s"), field("e"), field("p")) {
        (Some(source), Some(epoch), Some(position)) => {
            println!("floor   {epoch}/{position} of source {source}: fills of older versions are refused")
        }
        _ if report.entry.is_empty() => {
            println!("floor   none: no invalidation was applied within the floor's life, or the entry was evicted; fills need a new mark")
        }
        _ => println!("floor   none: no invalidation was applied since the entry was made"),
    }
    println!(
        "mark    {}",
        if field("m").is_some() {
            "held by a reader: its fill will be taken"
        } else {
            "none: a fill from before the last invalidation is refused"
        }
    );
    if field("u").is_some() {
        println!("owed    the value is still to be unlinked; the next invalidation does it");
    }
    if !report.entry.is_empty() {
        println!("entry   {}, {}", key.entry(), expiry(report.entry_ttl_ms));
    }
    Ok(true)
}

fn expiry(ttl_ms: i64) -> String {
    match ttl_ms {
        ..0 => "without expiry".to_owned(),
        ttl_ms => format!("expires in {:.1} s", crate::metrics::seconds(ttl_ms.saturating_mul(1000))),
    }
}
