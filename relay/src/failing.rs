//! PURE: which topics take no records, and which rows wait for them.
//!
//! A topic that is missing, or that this login may not write to, is no reason to stop the others. Its rows are left out of the claims until it works
//! again: claimed, they would be given back each time, and hold up the rows beside them. Heartbeats find out, since they go to every topic all the time, and
//! when one is acknowledged the scan starts at the beginning again. Rows that were published to another of their topics meanwhile are published there
//! again, which is harmless.

use crate::broker::BrokerTrouble;
use recant_schema::labels::Lane;
use recant_schema::topics::{Region, Topics};
use std::collections::BTreeMap;

/// The topics that take no records, and why. At most as many as are published to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failing {
    topics: BTreeMap<String, BrokerTrouble>,
}

impl Failing {
    /// Whether all topics work, as far as is known.
    pub fn is_empty(&self) -> bool {
        self.topics.is_empty()
    }

    /// A topic did not take a record. Returns whether that is news.
    pub fn failed(&mut self, topic: &str, trouble: BrokerTrouble) -> bool {
        self.topics.insert(topic.to_owned(), trouble).is_none()
    }

    /// A topic took a record. Returns whether that is news.
    pub fn works(&mut self, topic: &str) -> bool {
        self.topics.remove(topic).is_some()
    }

    /// The pins and lanes whose rows wait, as the claim compares them: region (nothing for all regions), slash, lane.
    pub fn pins(&self, topics: &Topics, regions: &[Region]) -> Vec<String> {
        if self.is_empty() {
            return Vec::new();
        }
        let pins = std::iter::once(None).chain(regions.iter().map(Some));
        let all = pins.flat_map(|pin| Lane::ALL.iter().map(move |lane| (pin, *lane)));
        let waiting = all.filter(|(pin, lane)| self.topics.contains_key(&topics.invalidations(*pin, *lane)));
        waiting.map(|(pin, lane)| format!("{}/{}", pin.map_or("", Region::as_str), lane.as_str())).collect()
    }

    /// The topics with their troubles, for a person.
    pub fn names(&self) -> String {
        let reason = |trouble: &BrokerTrouble| if *trouble == BrokerTrouble::TopicMissing { "missing" } else { "not permitted" };
        self.topics.iter().map(|(topic, trouble)| format!("{topic} ({})", reason(trouble))).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_wait_for_exactly_the_topics_that_fail() {
        let topics = Topics::new("recant");
        let regions = [Region::parse("eu").unwrap(), Region::parse("us").unwrap()];
        let mut failing = Failing::default();
        assert!(failing.pins(&topics, &regions).is_empty());
        assert!(failing.failed(&topics.invalidations(Some(&regions[1]), Lane::Realtime), BrokerTrouble::TopicMissing));
        assert!(failing.failed(&topics.invalidations(None, Lane::Bulk), BrokerTrouble::NoPrivilege));
        assert_eq!(failing.pins(&topics, &regions), ["/bulk", "us/realtime"]);
        assert_eq!(failing.names(), "recant.invalidations.v1.bulk (not permitted), recant.invalidations.v1.us (missing)");
    }

    #[test]
    fn the_beginning_and_the_end_of_an_outage_are_news_once() {
        let mut failing = Failing::default();
        assert!(failing.failed("t", BrokerTrouble::TopicMissing) && !failing.failed("t", BrokerTrouble::NoPrivilege));
        assert!(failing.works("t") && !failing.works("t") && failing.is_empty());
    }
}
