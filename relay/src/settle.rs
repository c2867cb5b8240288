//! PURE: what the broker said about a claim's records decides what becomes of its rows.
//!
//! | acknowledgements | settlement |
//! | --- | --- |
//! | all in | retire every row |
//! | some refused for good, the others in | set the refused ones' rows aside, retire the others |
//! | some failed in a way that a retry can cure, or unknown | retire the rows of the others, give these rows back |
//! | none in | release all: somebody claims them again |
//!
//! A record whose fate is unknown may have been stored; publishing it again is harmless, retiring its row is not.

use crate::plan::{Planned, Reason};
use std::collections::BTreeSet;

/// What the broker said about one record on one topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Stored on enough replicas.
    Acknowledged,
    /// Not stored, or not known to be; the same record may get through later.
    Failed,
    /// Refused in a way that no retry can change.
    Refused(Reason),
}

/// What becomes of the claim's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Commit the claim, with these rows (by index) set aside. In row order, once each.
    Retire {
        /// Index of the row, and why.
        set_aside: Vec<(usize, Reason)>,
    },
    /// Retire these rows and give the others back.
    Part {
        /// Indices of rows, those set aside included; in order, once each, not empty.
        retired: Vec<usize>,
        /// Index of the row, and why.
        set_aside: Vec<(usize, Reason)>,
    },
    /// Roll the claim back.
    Release,
}

/// Which records are done with: each of their topics has them, or has refused them for good. `outcomes`: a record's index and one outcome per topic.
pub fn done(records: &[Planned], outcomes: &[(usize, Outcome)]) -> Vec<bool> {
    let mut missing: Vec<usize> = records.iter().map(|record| record.pins.len()).collect();
    for (record, outcome) in outcomes {
        match outcome {
            // A failure never counts: the answer of this topic stays missing. So does one that never came.
            Outcome::Failed => {}
            Outcome::Acknowledged | Outcome::Refused(_) => missing[*record] = missing[*record].saturating_sub(1),
        }
    }
    missing.iter().map(|answers| *answers == 0).collect()
}

/// Settles a claim: the rows that planning set aside, and the outcomes of [`done`].
pub fn settle(records: &[Planned], aside: &[(usize, Reason)], outcomes: &[(usize, Outcome)]) -> Settlement {
    let done = done(records, outcomes);
    let rows_of = |wanted: bool| {
        let records = records.iter().zip(&done).filter(move |(_, done)| **done == wanted);
        records.flat_map(|(record, _)| record.rows.iter().copied())
    };
    let waiting: BTreeSet<usize> = rows_of(false).collect();
    let refused = outcomes.iter().filter_map(|(record, outcome)| match outcome {
        Outcome::Refused(reason) => Some((*record, *reason)),
        Outcome::Acknowledged | Outcome::Failed => None,
    });
    let refused = refused.flat_map(|(record, reason)| records[record].rows.iter().map(move |row| (*row, reason)));
    let mut set_aside: Vec<_> = aside.iter().copied().chain(refused).filter(|(row, _)| !waiting.contains(row)).collect();
    // A row is set aside once, with the first reason found for it: two topics may refuse the same record.
    set_aside.sort_by_key(|(row, _)| *row);
    set_aside.dedup_by_key(|(row, _)| *row);
    if waiting.is_empty() {
        return Settlement::Retire { set_aside };
    }
    let retired: BTreeSet<usize> = rows_of(true).chain(set_aside.iter().map(|(row, _)| *row)).collect();
    if retired.is_empty() { Settlement::Release } else { Settlement::Part { retired: retired.into_iter().collect(), set_aside } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Context, Row, plan};
    use proptest::prelude::*;
    use recant_schema::invalidation::Source;
    use recant_schema::labels::CommitBasis;
    use recant_schema::topics::Region;
    use uuid::Uuid;

    fn records(keys: &[&str], regions: Option<&str>) -> Vec<Planned> {
        let row = |key: &&str| Row {
            id: 1,
            key: Some((*key).to_owned()),
            tenant: None,
            class: None,
            regions: regions.map(str::to_owned),
            lane: None,
            traceparent: None,
            position: 1,
            committed_at_us: 0,
            commit_basis: CommitBasis::Commit,
        };
        let source = Source { database: "shop".into(), relay: "r1".into(), epoch_cause: None };
        let known = [Region::parse("eu").unwrap(), Region::parse("us").unwrap()];
        let rows: Vec<_> = keys.iter().map(row).collect();
        plan(&rows, &Context { epoch: 1, source: &source, regions: &known }, Uuid::nil).records
    }

    use Outcome::{Acknowledged, Failed, Refused};

    #[test]
    fn rows_are_retired_only_when_every_topic_of_their_record_has_answered() {
        let records = records(&["a", "b"], None);
        let retired = Settlement::Retire { set_aside: vec![] };
        assert_eq!(settle(&records, &[], &[(0, Acknowledged), (1, Acknowledged)]), retired);
        assert_eq!(settle(&records, &[], &[(0, Acknowledged)]), Settlement::Part { retired: vec![0], set_aside: vec![] });
        assert_eq!(settle(&records, &[], &[]), Settlement::Release);
        assert_eq!(settle(&[], &[], &[]), retired);
    }

    #[test]
    fn a_pinned_record_has_to_arrive_in_each_of_its_regions() {
        let records = records(&["a"], Some(r#"["eu","us"]"#));
        assert_eq!(settle(&records, &[], &[(0, Acknowledged)]), Settlement::Release);
        assert_eq!(settle(&records, &[], &[(0, Acknowledged), (0, Failed)]), Settlement::Release);
        assert_eq!(settle(&records, &[], &[(0, Acknowledged), (0, Acknowledged)]), Settlement::Retire { set_aside: vec![] });
    }

    #[test]
    fn a_failure_gives_its_own_rows_back_and_no_others() {
        let records = records(&["a", "b", "a", "c"], None);
        let outcomes = [(0, Failed), (1, Acknowledged), (2, Refused(Reason::TooLarge))];
        // Row 4 has no record; row 2 is broken, and waits with the record that it shares.
        let aside = [(2, Reason::BadClass), (4, Reason::BadKey)];
        let expected = Settlement::Part { retired: vec![1, 3, 4], set_aside: vec![(3, Reason::TooLarge), (4, Reason::BadKey)] };
        assert_eq!(settle(&records, &aside, &outcomes), expected);
    }

    #[test]
    fn a_record_refused_for_good_sets_all_its_rows_aside_and_the_others_are_retired() {
        let records = records(&["a", "b", "a"], None);
        let outcomes = [(0, Refused(Reason::TooLarge)), (1, Acknowledged)];
        let expected = Settlement::Retire { set_aside: vec![(0, Reason::TooLarge), (1, Reason::BadClass), (2, Reason::TooLarge)] };
        assert_eq!(settle(&records, &[(1, Reason::BadClass)], &outcomes), expected);
    }

    proptest! {
        #[test]
        fn every_row_is_retired_or_given_back_and_retired_only_with_all_its_answers(
            keys in proptest::collection::vec("[abc]", 1..12),
            answers in proptest::collection::vec((0usize..3, 0usize..3), 0..12),
        ) {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let records = records(&keys, Some(r#"["eu","us"]"#));
            let outcome = |number| [Acknowledged, Failed, Refused(Reason::Refused)][number];
            // At most one answer for each of a record's two topics.
            let mut left = vec![2; records.len()];
            let mut outcomes = vec![];
            for (record, answer) in answers {
                if record < records.len() && left[record] > 0 {
                    left[record] -= 1;
                    outcomes.push((record, outcome(answer)));
                }
            }
            let retired: BTreeSet<usize> = match settle(&records, &[], &outcomes) {
                Settlement::Retire { .. } => (0..keys.len()).collect(),
                Settlement::Part { retired, set_aside } => {
                    prop_assert!(set_aside.iter().all(|(row, _)| retired.contains(row)));
                    retired.into_iter().collect()
                }
                Settlement::Release => BTreeSet::new(),
            };
            for (index, record) in records.iter().enumerate() {
                let good = outcomes.iter().filter(|(at, outcome)| *at == index && *outcome != Failed).count() == 2;
                prop_assert!(record.rows.iter().all(|row| retired.contains(row) == good));
            }
        }
    }
}
