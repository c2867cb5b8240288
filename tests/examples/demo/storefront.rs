//! What a product service does: write with an invalidation, read through the cache. The part to copy from.
//!
//! Writing: call `recant.invalidate(key)` in the transaction that changes the row. Nothing else.
//!
//! Reading: plain GET; on a miss, in this order,
//! 1. `read` leaves a mark beside the key,
//! 2. a new statement loads the row from the primary,
//! 3. `fill` brings the value and the mark.
//!
//! The order is the whole protocol. Every invalidation erases the mark, so a fill whose row was read before a change finds its mark gone and is
//! refused. The row must not come from a snapshot older than the mark: no open repeatable read transaction, no replica.

use crate::redis_client;
use anyhow::{Context as _, bail};
use recant_schema::key::Key;
use recant_schema::scripts::{self, FillReply};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, Script, Value};
use serde_json::json;
use sqlx::{PgPool, Row as _};
use uuid::Uuid;

/// Every key of the demo begins so; its subscribers touch no others.
pub(crate) const KEY_PREFIX: &str = "v2:demo:";

/// A backstop only: invalidations keep the value right. Short enough for misses to be seen in a demo.
const VALUE_TTL_MS: u64 = 60_000;

/// How long a reader may take to load: the default of the design, far above any sane query.
const MARK_TTL_MS: u64 = 60_000;

/// The cache key of a product.
pub(crate) fn product_key(id: i64) -> anyhow::Result<Key> {
    Ok(Key::parse(&format!("{KEY_PREFIX}product:{id}"))?)
}

/// One row of `shop.product`.
pub(crate) struct Product {
    pub(crate) id: i64,
    pub(crate) title: String,
    pub(crate) price_cents: i64,
    /// Rises with every committed change. Recant does not need it; the demo's check does.
    pub(crate) revision: i64,
}

impl Product {
    fn encode(&self) -> String {
        json!({ "id": self.id, "title": self.title, "price_cents": self.price_cents, "revision": self.revision }).to_string()
    }

    pub(crate) fn decode(text: &str) -> anyhow::Result<Self> {
        let value: serde_json::Value = serde_json::from_str(text)?;
        let number = |name: &str| value[name].as_i64().with_context(|| format!("the cached product has no {name}"));
        let title = value["title"].as_str().unwrap_or_default().to_owned();
        Ok(Self { id: number("id")?, title, price_cents: number("price_cents")?, revision: number("revision")? })
    }

    /// Loads from the primary, in a statement and so a snapshot of its own.
    async fn load(database: &PgPool, id: i64) -> anyhow::Result<Self> {
        let row =
            sqlx::query("select id, title, price_cents, revision from shop.product where id = $1").bind(id).fetch_one(database).await?;
        Ok(Self { id: row.get(0), title: row.get(1), price_cents: row.get(2), revision: row.get(3) })
    }
}

/// How a writer's transaction ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Commit,
    RollBack,
}

/// Changes a price and invalidates the cached product, both or neither. Returns the new revision.
pub(crate) async fn change_price(database: &PgPool, id: i64, price_cents: i64, end: End) -> anyhow::Result<i64> {
    let key = product_key(id)?;
    let mut transaction = database.begin().await?;
    let update = "update shop.product set price_cents = $2, revision = revision + 1 where id = $1 returning revision";
    let revision = sqlx::query_scalar(update).bind(id).bind(price_cents).fetch_one(&mut *transaction).await?;
    sqlx::query("select recant.invalidate($1)").bind(key.as_str()).execute(&mut *transaction).await?;
    match end {
        End::Commit => transaction.commit().await?,
        End::RollBack => transaction.rollback().await?,
    }
    Ok(revision)
}

/// Where a product came from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The cache held it.
    Hit,
    /// Loaded, and the cache took it.
    Filled,
    /// Loaded, and the cache refused it: an invalidation came in between.
    Refused,
    /// Loaded; the cache was too full to leave a mark, so no fill was tried.
    NotFilled,
}

/// Reads products through one region's cache.
#[derive(Clone)]
pub(crate) struct Storefront {
    database: PgPool,
    cache: MultiplexedConnection,
    read: Script,
    fill: Script,
}

impl Storefront {
    pub(crate) async fn open(database: PgPool, redis_url: &str) -> anyhow::Result<Self> {
        let cache = redis_client::connect(redis_url).await?;
        Ok(Self { database, cache, read: Script::new(scripts::READ), fill: Script::new(scripts::FILL) })
    }

    /// The product with this id, from the cache where it is there.
    pub(crate) async fn product(&mut self, id: i64) -> anyhow::Result<(Product, Source)> {
        let key = product_key(id)?;
        // A hit costs one GET and no script.
        if let Some(text) = self.cache.get::<_, Option<String>>(key.as_str()).await? {
            return Ok((Product::decode(&text)?, Source::Hit));
        }
        let mark = match self.leave_mark(&key).await? {
            Miss::FilledMeanwhile(text) => return Ok((Product::decode(&text)?, Source::Hit)),
            Miss::Mark(mark) => Some(mark),
            Miss::NoMark => None,
        };
        // Only now: the row must be at least as new as the mark.
        let product = Product::load(&self.database, id).await?;
        let source = match mark {
            Some(mark) => self.fill(&key, &mark, &product).await?,
            None => Source::NotFilled,
        };
        Ok((product, source))
    }

    async fn leave_mark(&mut self, key: &Key) -> anyhow::Result<Miss> {
        // Unique is what it has to be, so that no fill of another miss is taken for this one's.
        let nonce = Uuid::now_v7().simple().to_string();
        let mut call = self.read.key(key.as_str());
        call.key(key.entry()).arg(nonce).arg(MARK_TTL_MS).arg("");
        let reply: Vec<Value> = call.invoke_async(&mut self.cache).await?;
        Ok(match reply.as_slice() {
            // Another reader left the mark or this one did (the third element): here everybody loads, and the first fill wins.
            [_, mark, _] => Miss::Mark(redis::from_redis_value_ref(mark)?),
            [Value::Nil] => Miss::NoMark,
            [value] => Miss::FilledMeanwhile(redis::from_redis_value_ref(value)?),
            other => bail!("the read script replied {other:?}"),
        })
    }

    async fn fill(&mut self, key: &Key, mark: &str, product: &Product) -> anyhow::Result<Source> {
        let mut call = self.fill.key(key.as_str());
        // The last three, a version, are for values read from a replica.
        call.key(key.entry()).arg(mark).arg(product.encode()).arg(VALUE_TTL_MS).arg("").arg("").arg("");
        let code: i64 = call.invoke_async(&mut self.cache).await?;
        Ok(match FillReply::try_from(code)? {
            FillReply::Filled => Source::Filled,
            FillReply::MarkGone | FillReply::BelowFloor => Source::Refused,
        })
    }
}

/// What `read` says when GET found nothing.
enum Miss {
    /// Another reader filled between GET and `read`.
    FilledMeanwhile(String),
    /// Load, then fill with this.
    Mark(String),
    /// Load, do not fill.
    NoMark,
}

/// The planted error, `PLANT=stale`: what caches do without a protocol. Reads a row, dawdles, and SETs it.
pub(crate) async fn fill_without_the_protocol(
    storefront: &mut Storefront,
    id: i64,
    dawdle: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let old = Product::load(&storefront.database, id).await?;
    dawdle.await;
    let () = storefront.cache.pset_ex(product_key(id)?.as_str(), old.encode(), VALUE_TTL_MS).await?;
    Ok(())
}
