//! PURE: which topics exist and which rows travel on which.

use crate::labels::Lane;

/// Longest region name, in bytes: it becomes part of topic names, metric labels and group ids.
pub const MAX_REGION_BYTES: usize = 32;

/// Why a text is not a region name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a region name: 1 to {MAX_REGION_BYTES} of a-z, 0-9 and -, beginning with a letter or digit, and not \"bulk\"")]
pub struct RegionError(pub String);

/// A region's name. `bulk` is refused, since it ends the names of the bulk lane's topics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region(Box<str>);

impl Region {
    /// Checks and takes a region name.
    ///
    /// # Errors
    /// [`RegionError`] with the rule; the same rule is a check of the table `recant.region`.
    pub fn parse(text: &str) -> Result<Self, RegionError> {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let good = (1..=MAX_REGION_BYTES).contains(&text.len())
            && text.bytes().all(allowed)
            && !text.starts_with('-')
            && text != Lane::Bulk.as_str();
        if good { Ok(Self(text.into())) } else { Err(RegionError(text.to_owned())) }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The names of all topics below one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topics {
    prefix: String,
}

impl Topics {
    /// Topics below `prefix` (by default `recant`).
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned() }
    }

    /// The topic of one lane: shared by all regions, or pinned to one, in which case no other region's subscriber reads it.
    pub fn invalidations(&self, region: Option<&Region>, lane: Lane) -> String {
        let mut topic = format!("{}.invalidations.v1", self.prefix);
        if let Some(region) = region {
            topic.push('.');
            topic.push_str(region.as_str());
        }
        if lane == Lane::Bulk {
            topic.push_str(".bulk");
        }
        topic
    }

    /// Where a region's subscriber sets poison records aside.
    pub fn dead_letters(&self, region: &Region) -> String {
        format!("{}.dead-letters.v1.{}", self.prefix, region.as_str())
    }

    /// The topics that a region's subscriber consumes: shared and pinned, realtime and bulk.
    pub fn consumed_in(&self, region: &Region) -> Vec<String> {
        [None, Some(region)].into_iter().flat_map(|pin| Lane::ALL.iter().map(move |lane| self.invalidations(pin, *lane))).collect()
    }

    /// The topics that a relay publishes to when these regions exist.
    pub fn published_for(&self, regions: &[Region]) -> Vec<String> {
        let pins = std::iter::once(None).chain(regions.iter().map(Some));
        pins.flat_map(|pin| Lane::ALL.iter().map(move |lane| self.invalidations(pin, *lane))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_names_are_those_of_the_design() {
        let topics = Topics::new("recant");
        let eu = Region::parse("eu").unwrap();
        assert_eq!(
            topics.consumed_in(&eu),
            ["recant.invalidations.v1", "recant.invalidations.v1.bulk", "recant.invalidations.v1.eu", "recant.invalidations.v1.eu.bulk"]
        );
        assert_eq!(topics.dead_letters(&eu), "recant.dead-letters.v1.eu");
    }

    #[test]
    fn a_region_name_is_fit_for_a_topic_and_a_label() {
        for bad in ["", "EU", "eu_west", "-eu", "bulk", "eu.west", &"e".repeat(33)] {
            assert_eq!(Region::parse(bad), Err(RegionError(bad.to_owned())));
        }
        assert_eq!(Region::parse("eu-west-1").unwrap().as_str(), "eu-west-1");
    }
}
