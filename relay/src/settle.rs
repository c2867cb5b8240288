//! PURE: what the broker said about a claim's records decides what becomes of its rows.
//!
//! | acknowledgements | settlement |
//! | --- | --- |
//! | all in | retire every row |
//! | some refused for good, the others in | set the refused ones' rows aside, retire the others |
//! | at least one failed in a way that a retry can cure, or is unknown | release all: somebody claims them again |
//!
//! A record whose fate is unknown may have been stored; publishing it again is harmless, retiring its row is not.

use crate::plan::{Planned, Reason};

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
    /// Roll the claim back.
    Release,
}

/// Settles a claim: the rows that planning set aside, and for each published record its index and one outcome per topic.
pub fn settle(records: &[Planned], aside: &[(usize, Reason)], outcomes: impl IntoIterator<Item = (usize, Outcome)>) -> Settlement {
    let mut answered = vec![0usize; records.len()];
    let mut set_aside = aside.to_vec();
    for (record, outcome) in outcomes {
        match outcome {
            Outcome::Failed => return Settlement::Release,
            Outcome::Acknowledged => {}
            Outcome::Refused(reason) => set_aside.extend(records[record].rows.iter().map(|row| (*row, reason))),
        }
        answered[record] += 1;
    }
    // An acknowledgement that is missing altogether counts as unknown.
    if records.iter().zip(&answered).any(|(record, answers)| *answers < record.pins.len()) {
        return Settlement::Release;
    }
    // A row is set aside once, with the first reason found for it: two topics may refuse the same record.
    set_aside.sort_by_key(|(row, _)| *row);
    set_aside.dedup_by_key(|(row, _)| *row);
    Settlement::Retire { set_aside }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Context, Row, plan};
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
    fn rows_are_retired_only_when_every_record_is_answered() {
        let records = records(&["a", "b"], None);
        let retired = Settlement::Retire { set_aside: vec![] };
        assert_eq!(settle(&records, &[], [(0, Acknowledged), (1, Acknowledged)]), retired);
        assert_eq!(settle(&records, &[], [(0, Acknowledged)]), Settlement::Release);
        assert_eq!(settle(&[], &[], []), retired);
    }

    #[test]
    fn a_pinned_record_has_to_arrive_in_each_of_its_regions() {
        let records = records(&["a"], Some(r#"["eu","us"]"#));
        assert_eq!(settle(&records, &[], [(0, Acknowledged)]), Settlement::Release);
        assert_eq!(settle(&records, &[], [(0, Acknowledged), (0, Acknowledged)]), Settlement::Retire { set_aside: vec![] });
    }

    #[test]
    fn one_failure_releases_the_whole_claim() {
        let records = records(&["a", "b"], None);
        assert_eq!(settle(&records, &[(1, Reason::BadClass)], [(0, Refused(Reason::TooLarge)), (1, Failed)]), Settlement::Release);
    }

    #[test]
    fn a_record_refused_for_good_sets_all_its_rows_aside_and_the_others_are_retired() {
        let records = records(&["a", "b", "a"], None);
        let outcomes = [(0, Refused(Reason::TooLarge)), (1, Acknowledged)];
        let expected = Settlement::Retire { set_aside: vec![(0, Reason::TooLarge), (1, Reason::BadClass), (2, Reason::TooLarge)] };
        assert_eq!(settle(&records, &[(1, Reason::BadClass)], outcomes), expected);
    }
}
