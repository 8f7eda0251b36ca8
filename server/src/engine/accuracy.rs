//! How often proposals are right: a running share, which follows a text as it changes.

/// The assumed share counts as much as this many proposals.
const ASSUMED: u32 = 4;
/// The least weight of one proposal in the share: only recent ones matter.
const WEIGHT: f64 = 1.0 / 16.0;
/// The smallest share: nothing would be tried again after one of zero.
pub(super) const LEAST: f64 = 0.05;

/// The share of proposals of one kind that were right, given that those before them were right.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accuracy {
    share: f64,
    proposals: u32,
}

impl Accuracy {
    /// Assumes a share until proposals show the true one.
    pub(super) const fn assumed(share: f64) -> Self {
        Self { share, proposals: 0 }
    }

    pub(super) fn share(self) -> f64 {
        self.share
    }

    /// Counts a proposal.
    pub(super) fn count(&mut self, right: bool) {
        self.proposals = self.proposals.saturating_add(1);
        let weight = WEIGHT.max(1.0 / f64::from(self.proposals.saturating_add(ASSUMED)));
        self.share = LEAST.max(self.share + (f64::from(u8::from(right)) - self.share) * weight);
    }

    /// Raises the share a little toward `share`.
    pub(super) fn rise(&mut self, share: f64, weight: f64) {
        self.share += (share - self.share).max(0.0) * weight;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_starts_as_assumed_and_follows_what_it_sees() {
        let mut accuracy = Accuracy::assumed(0.5);
        assert_eq!(accuracy.share(), 0.5);
        // The mean of four times the assumed share and what was seen.
        for right in [true, true, false] {
            accuracy.count(right);
        }
        assert!((accuracy.share() - 4.0 / 7.0).abs() < 1e-9);
        (0..200).for_each(|_| accuracy.count(true));
        assert!(accuracy.share() > 0.999);
        (0..11).for_each(|_| accuracy.count(false));
        assert!(accuracy.share() < 0.5, "the last proposals matter most");
        (0..200).for_each(|_| accuracy.count(false));
        assert_eq!(accuracy.share(), LEAST);
        accuracy.rise(0.25, 0.5);
        assert!((accuracy.share() - 0.15).abs() < 1e-9);
    }
}
