//! PURE: claimed rows become records, topics are chosen, and rows that cannot be published are set aside.
//!
//! | a row that | becomes |
//! | --- | --- |
//! | is sound | one record, shared with every row of the claim that agrees in key, tenant, regions, class and lane |
//! | names regions | the same record on the topic of each of them, and on no other |
//! | is broken, but its key is a valid one | set aside, and a minimal invalidation: the key still has to be forgotten |
//! | is broken, and so is its key | set aside |
//! | is pinned to regions that cannot be read or are not known here | set aside alone: what is pinned is never published elsewhere |

use recant_schema::invalidation::{Invalidation, MAX_TENANT_BYTES, Source};
use recant_schema::key::Key;
use recant_schema::labels::{Class, CommitBasis, Lane};
use recant_schema::topics::Region;
use recant_schema::version::Version;
use std::collections::HashMap;
use uuid::Uuid;

/// A claimed outbox row, as untrusted as the table it comes from. Texts are cut by the claim, so its size is bounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Identity in the outbox.
    pub id: i64,
    /// Cache key.
    pub key: Option<String>,
    /// Isolation label.
    pub tenant: Option<String>,
    /// Freshness class.
    pub class: Option<String>,
    /// Residency, as a JSON array: a Postgres array can have shapes (nulls, dimensions) that a list of names has not.
    pub regions: Option<String>,
    /// Lane; null means realtime.
    pub lane: Option<String>,
    /// W3C trace context.
    pub traceparent: Option<String>,
    /// Log position at the claim.
    pub position: u64,
    /// Microseconds since 1970 on the source's clock.
    pub committed_at_us: i64,
    /// What that time was read from.
    pub commit_basis: CommitBasis,
}

/// Why a row was set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// No key, or one that breaks a rule.
    BadKey,
    /// Empty, too long, or with white space.
    BadTenant,
    /// None of C1 to C4.
    BadClass,
    /// Neither realtime nor bulk.
    BadLane,
    /// Not a list of region names, or an empty one.
    BadRegions,
    /// Names a region that this relay is not configured for.
    UnknownRegion,
    /// Kafka refuses the record for good because of its size.
    TooLarge,
    /// Kafka refuses the record for good.
    Refused,
}

impl Reason {
    /// Every reason.
    pub const ALL: &[Self] = &[
        Self::BadKey,
        Self::BadTenant,
        Self::BadClass,
        Self::BadLane,
        Self::BadRegions,
        Self::UnknownRegion,
        Self::TooLarge,
        Self::Refused,
    ];

    /// The spelling in `recant.set_aside` and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BadKey => "bad_key",
            Self::BadTenant => "bad_tenant",
            Self::BadClass => "bad_class",
            Self::BadLane => "bad_lane",
            Self::BadRegions => "bad_regions",
            Self::UnknownRegion => "unknown_region",
            Self::TooLarge => "too_large",
            Self::Refused => "refused",
        }
    }
}

/// What holds for a whole claim.
#[derive(Clone, Debug)]
pub struct Context<'a> {
    /// The epoch of every version.
    pub epoch: u64,
    /// Where the records come from.
    pub source: &'a Source,
    /// The regions that have topics.
    pub regions: &'a [Region],
}

/// One invalidation, and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// What is said.
    pub invalidation: Invalidation,
    /// The topics of its lane: shared (`None`) or pinned. Never empty.
    pub pins: Vec<Option<Region>>,
    /// Which rows of the claim it stands for, by index. Never empty.
    pub rows: Vec<usize>,
}

/// What is to be done with a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To publish.
    pub records: Vec<Planned>,
    /// To set aside: index of the row, and why.
    pub set_aside: Vec<(usize, Reason)>,
    /// Rows that travel in another row's record.
    pub coalesced: u64,
}

/// What rows must agree in to share a record.
#[derive(PartialEq, Eq, Hash)]
struct Group {
    key: Key,
    tenant: Option<String>,
    class: Option<Class>,
    regions: Option<Vec<Region>>,
    lane: Lane,
}

/// Plans a claim. `fresh_id` gives each record its identity.
pub fn plan(rows: &[Row], context: &Context<'_>, mut fresh_id: impl FnMut() -> Uuid) -> Plan {
    let mut plan = Plan::default();
    let mut known: HashMap<Group, usize> = HashMap::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        let group = match read(row, context.regions) {
            Ok(group) => group,
            Err((reason, rest)) => {
                plan.set_aside.push((index, reason));
                match rest {
                    Some(group) => group,
                    None => continue,
                }
            }
        };
        if let Some(at) = known.get(&group) {
            join(&mut plan.records[*at], index, row);
            plan.coalesced += 1;
        } else {
            plan.records.push(open(&group, index, row, context, fresh_id()));
            known.insert(group, plan.records.len() - 1);
        }
    }
    plan
}

/// A row's group; or why it is broken, with the group of the minimal invalidation where there can be one.
fn read(row: &Row, configured: &[Region]) -> Result<Group, (Reason, Option<Group>)> {
    let Some(key) = row.key.as_deref().and_then(|text| Key::parse(text).ok()) else { return Err((Reason::BadKey, None)) };
    let (regions, trouble) = read_regions(row.regions.as_deref(), configured);
    let lane = row.lane.as_deref().map_or(Some(Lane::Realtime), Lane::parse);
    let class = row.class.as_deref().map(|text| Class::parse(text).ok_or(Reason::BadClass)).transpose();
    let tenant_trouble = row.tenant.as_deref().is_some_and(|text| !is_tenant(text)).then_some(Reason::BadTenant);
    let lane_trouble = lane.is_none().then_some(Reason::BadLane);

    match trouble.or(tenant_trouble).or(class.err()).or(lane_trouble) {
        None => {
            Ok(Group { key, tenant: row.tenant.clone(), class: class.unwrap_or_default(), regions, lane: lane.unwrap_or(Lane::Realtime) })
        }
        Some(reason) => {
            let nowhere = regions.as_ref().is_some_and(Vec::is_empty);
            let minimal = Group { key, tenant: None, class: None, regions, lane: lane.unwrap_or(Lane::Realtime) };
            Err((reason, (!nowhere).then_some(minimal)))
        }
    }
}

/// The regions that can be published to (sorted, once each; `None` for all), and what is wrong with the rest.
fn read_regions(json: Option<&str>, configured: &[Region]) -> (Option<Vec<Region>>, Option<Reason>) {
    let Some(json) = json else { return (None, None) };
    let Ok(names) = serde_json::from_str::<Vec<String>>(json) else { return (Some(Vec::new()), Some(Reason::BadRegions)) };
    if names.is_empty() {
        return (Some(Vec::new()), Some(Reason::BadRegions));
    }
    let mut trouble = None;
    let mut regions = Vec::with_capacity(names.len());
    for name in &names {
        match Region::parse(name) {
            Ok(region) if configured.contains(&region) => regions.push(region),
            Ok(_) => trouble = trouble.or(Some(Reason::UnknownRegion)),
            Err(_) => trouble = Some(Reason::BadRegions),
        }
    }
    regions.sort();
    regions.dedup();
    (Some(regions), trouble)
}

fn is_tenant(text: &str) -> bool {
    (1..=MAX_TENANT_BYTES).contains(&text.len()) && !text.contains(|c: char| c.is_control() || c.is_whitespace())
}

fn open(group: &Group, index: usize, row: &Row, context: &Context<'_>, id: Uuid) -> Planned {
    let pins = match &group.regions {
        None => vec![None],
        Some(regions) => regions.iter().cloned().map(Some).collect(),
    };
    let invalidation = Invalidation {
        id,
        key: group.key.clone(),
        version: Version::new(context.epoch, row.position),
        tenant: group.tenant.clone(),
        class: group.class,
        regions: group.regions.clone(),
        lane: group.lane,
        committed_at_us: row.committed_at_us,
        commit_basis: row.commit_basis,
        source: context.source.clone(),
        traceparent: row.traceparent.as_deref().filter(|text| is_traceparent(text)).map(str::to_owned),
    };
    Planned { invalidation, pins, rows: vec![index] }
}

/// The highest position, so that the floor covers every row; the earliest commit, so that the time measured is that of the one who waited longest.
fn join(planned: &mut Planned, index: usize, row: &Row) {
    planned.rows.push(index);
    let invalidation = &mut planned.invalidation;
    invalidation.version.position = invalidation.version.position.max(row.position);
    if row.committed_at_us < invalidation.committed_at_us {
        invalidation.committed_at_us = row.committed_at_us;
        invalidation.commit_basis = row.commit_basis;
    }
    if invalidation.traceparent.is_none() {
        invalidation.traceparent = row.traceparent.as_deref().filter(|text| is_traceparent(text)).map(str::to_owned);
    }
}

/// The shape that `recant.invalidate` lets through; a row that got in otherwise may hold anything, and a bad trace context is ignored, never an error.
fn is_traceparent(text: &str) -> bool {
    let hex = |part: &str, length: usize| part.len() == length && part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let zero = |part: &str| part.bytes().all(|byte| byte == b'0');
    match text.split('-').collect::<Vec<_>>().as_slice() {
        [version, trace, parent, flags] => {
            hex(version, 2) && *version != "ff" && hex(trace, 32) && !zero(trace) && hex(parent, 16) && !zero(parent) && hex(flags, 2)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(key: &str, position: u64) -> Row {
        Row {
            id: i64::try_from(position).unwrap(),
            key: Some(key.to_owned()),
            tenant: None,
            class: None,
            regions: None,
            lane: Some("realtime".to_owned()),
            traceparent: None,
            position,
            committed_at_us: 1_000,
            commit_basis: CommitBasis::Commit,
        }
    }

    fn planned(rows: &[Row]) -> Plan {
        let source = Source { database: "shop".into(), relay: "r1".into(), epoch_cause: None };
        let regions = [Region::parse("eu").unwrap(), Region::parse("us").unwrap()];
        plan(rows, &Context { epoch: 7, source: &source, regions: &regions }, Uuid::nil)
    }

    #[test]
    fn rows_that_agree_travel_as_one_record_with_the_highest_position_and_the_earliest_commit() {
        let late = Row { committed_at_us: 500, position: 9, commit_basis: CommitBasis::Insert, ..row("a", 3) };
        let plan = planned(&[row("a", 10), late, row("b", 11)]);
        assert_eq!(plan.coalesced, 1);
        assert_eq!(plan.records.len(), 2);
        let first = &plan.records[0];
        assert_eq!(first.rows, [0, 1]);
        assert_eq!(first.invalidation.version, Version::new(7, 10));
        assert_eq!((first.invalidation.committed_at_us, first.invalidation.commit_basis), (500, CommitBasis::Insert));
    }

    #[test]
    fn rows_that_differ_in_anything_that_matters_travel_apart() {
        let base = row("a", 1);
        let different = [
            Row { key: Some("b".into()), ..base.clone() },
            Row { tenant: Some("t".into()), ..base.clone() },
            Row { class: Some("C2".into()), ..base.clone() },
            Row { regions: Some(r#"["eu"]"#.into()), ..base.clone() },
            Row { lane: Some("bulk".into()), ..base.clone() },
        ];
        for other in different {
            assert_eq!(planned(&[base.clone(), other.clone()]).records.len(), 2, "{other:?}");
        }
    }

    #[test]
    fn a_pinned_key_goes_to_its_regions_and_nowhere_else() {
        let plan = planned(&[Row { regions: Some(r#"["us","eu","us"]"#.into()), ..row("a", 1) }]);
        let pins: Vec<_> = plan.records[0].pins.iter().map(|pin| pin.as_ref().map(Region::as_str)).collect();
        assert_eq!(pins, [Some("eu"), Some("us")]);
        assert!(plan.set_aside.is_empty());
    }

    #[test]
    fn a_poison_row_is_set_aside_and_its_key_is_forgotten_all_the_same() {
        let base = row("a", 1);
        for (broken, reason) in [
            (Row { class: Some("C9".into()), ..base.clone() }, Reason::BadClass),
            (Row { lane: Some("slow".into()), ..base.clone() }, Reason::BadLane),
            (Row { tenant: Some("a b".into()), ..base.clone() }, Reason::BadTenant),
            (Row { regions: Some(r#"["eu","mars"]"#.into()), ..base.clone() }, Reason::UnknownRegion),
        ] {
            let plan = planned(&[broken]);
            assert_eq!(plan.set_aside, [(0, reason)]);
            let invalidation = &plan.records[0].invalidation;
            assert_eq!((invalidation.key.as_str(), &invalidation.tenant, invalidation.class), ("a", &None, None));
        }
    }

    #[test]
    fn a_poison_row_without_a_valid_key_or_region_is_only_set_aside() {
        let base = row("a", 1);
        for (broken, reason) in [
            (Row { key: None, ..base.clone() }, Reason::BadKey),
            (Row { key: Some("a b".into()), ..base.clone() }, Reason::BadKey),
            (Row { regions: Some(r#"["mars"]"#.into()), ..base.clone() }, Reason::UnknownRegion),
            (Row { regions: Some("[]".into()), ..base.clone() }, Reason::BadRegions),
            (Row { regions: Some(r#"[["eu"]]"#.into()), ..base.clone() }, Reason::BadRegions),
            (Row { regions: Some(r#"["eu",null]"#.into()), ..base.clone() }, Reason::BadRegions),
        ] {
            let plan = planned(std::slice::from_ref(&broken));
            assert_eq!(plan.set_aside, [(0, reason)], "{broken:?}");
            assert!(plan.records.is_empty(), "{broken:?}");
        }
    }

    #[test]
    fn an_invalid_trace_context_is_dropped() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (text, kept) in [(good, true), ("00-0-0-0", false), (&good.replace("00-4", "ff-4"), false), (&good.to_uppercase(), false)] {
            let plan = planned(&[Row { traceparent: Some(text.to_owned()), ..row("a", 1) }]);
            assert_eq!(plan.records[0].invalidation.traceparent.is_some(), kept, "{text}");
            assert!(plan.set_aside.is_empty());
        }
    }

    proptest! {
        #[test]
        fn every_row_is_published_or_set_aside(
            parts in proptest::collection::vec(("[ab }]{0,2}", proptest::option::of("[tx ]{0,2}"), 0u64..9, "realtime|bulk|x"), 0..40)
        ) {
            let rows: Vec<Row> = parts.into_iter().map(|(key, tenant, position, lane)| Row { tenant, lane: Some(lane), ..row(&key, position) }).collect();
            let plan = planned(&rows);
            for (index, row) in rows.iter().enumerate() {
                let published: Vec<_> = plan.records.iter().filter(|record| record.rows.contains(&index)).collect();
                let aside = plan.set_aside.iter().any(|(at, _)| *at == index);
                prop_assert!(published.len() <= 1);
                // A valid key is always invalidated, at a version no lower than its own claim.
                let valid = row.key.as_deref().is_some_and(|key| Key::parse(key).is_ok());
                prop_assert_eq!(valid, published.len() == 1);
                prop_assert!(aside || valid);
                for record in published {
                    prop_assert_eq!(Some(record.invalidation.key.as_str()), row.key.as_deref());
                    prop_assert!(record.invalidation.version.position >= row.position);
                }
            }
            let carried: usize = plan.records.iter().map(|record| record.rows.len()).sum();
            prop_assert_eq!(carried, plan.records.len() + usize::try_from(plan.coalesced).unwrap());
        }
    }
}
