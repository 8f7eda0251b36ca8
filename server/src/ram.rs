//! Divides the memory of `--ram-budget`. The weights, the slots and a reserve for requests come first, because the
//! server cannot run without them; the rest is for caches.

/// Bytes of the model's weights and slots in this process; zeros for a model on another device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelMemory {
    /// The weights.
    pub weights: u64,
    /// The slots of all concurrent texts.
    pub slots: u64,
}

/// Reserved for the program and its requests: 256 MiB for the log probabilities of responses, 64 MiB for the pages of
/// the index, and 128 MiB for the program, request bodies (`api/memory.rs` limits those of one owner to 64 MiB), tokens
/// and grammars.
const REQUESTS: u64 = 448 << 20;

/// The minimum for caches: with less, most turns would read their states from disk.
const LEAST_CACHES: u64 = 64 << 20;

/// The parts of the process's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamSplit {
    /// The planned memory of the process.
    pub budget: u64,
    /// Taken by the model.
    pub model: ModelMemory,
    /// Reserved for the program and its requests.
    pub requests: u64,
    /// For the prefix cache.
    pub prefixes: u64,
    /// For cached states of sessions.
    pub states: u64,
}

impl RamSplit {
    /// Divides `budget`. The prefix cache gets up to `most_prefixes`, but no more than half of what is left for caches.
    /// With a budget of 0, there are no caches.
    pub fn new(budget: u64, model: ModelMemory, most_prefixes: u64) -> Self {
        let left = budget.saturating_sub(model.weights.saturating_add(model.slots).saturating_add(REQUESTS));
        let caches = if budget == 0 { 0 } else { left.max(LEAST_CACHES) };
        let prefixes = most_prefixes.min(caches / 2);
        Self { budget, model, requests: REQUESTS, prefixes, states: caches - prefixes }
    }

    /// Returns the sum of all parts.
    pub fn total(&self) -> u64 {
        let parts = [self.model.weights, self.model.slots, self.requests, self.prefixes, self.states];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Returns whether the parts exceed the budget, because too little is left for caches.
    pub fn is_over(&self) -> bool {
        self.budget > 0 && self.total() > self.budget
    }
}

/// The caches of several models get what the requests leave, divided by this.
const CACHES: u64 = 4;

/// How several models share the process's memory, in bytes. Which of them are loaded changes, so the sizes of the
/// caches do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRam {
    /// For the weights and slots of all loaded models.
    pub models: u64,
    /// For the prefix cache of each model.
    pub prefixes: u64,
    /// For cached states of the sessions of each model.
    pub states: u64,
}

impl SharedRam {
    /// Divides `budget` between `models`. Caches get a quarter of what requests leave; prefix caches get up to
    /// `most_prefixes` of it, but no more than half. With a budget of 0, there are no caches and no limit for models.
    pub fn new(budget: u64, models: usize, most_prefixes: u64) -> Self {
        if budget == 0 {
            return Self { models: u64::MAX, prefixes: 0, states: 0 };
        }
        let (left, count) = (budget.saturating_sub(REQUESTS), models.max(1) as u64);
        let caches = (left / CACHES).max(LEAST_CACHES);
        let prefixes = most_prefixes.min(caches / 2);
        let states = caches - prefixes;
        Self { models: left.saturating_sub(caches), prefixes: prefixes / count, states: states / count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_models_share_what_caches_leave() {
        let split = |budget: u64, models, most_prefixes: u64| {
            let SharedRam { models, prefixes, states } = SharedRam::new(budget * MIB, models, most_prefixes * MIB);
            (models / MIB, prefixes / MIB, states / MIB)
        };
        assert_eq!(split(1024, 2, 256), (432, 36, 36));
        assert_eq!(split(1024, 3, 0), (432, 0, 48));
        assert_eq!(split(448 + 100, 1, 256), (36, 32, 32));
        assert_eq!(split(448, 1, 256), (0, 32, 32), "no model fits");
        assert_eq!(SharedRam::new(0, 2, 7), SharedRam { models: u64::MAX, prefixes: 0, states: 0 });
    }

    const MIB: u64 = 1 << 20;

    fn split(budget: u64, (weights, slots): (u64, u64), most_prefixes: u64) -> (u64, u64, bool) {
        let model = ModelMemory { weights: weights * MIB, slots: slots * MIB };
        let split = RamSplit::new(budget * MIB, model, most_prefixes * MIB);
        (split.prefixes / MIB, split.states / MIB, split.is_over())
    }

    #[test]
    fn caches_get_what_the_model_and_the_requests_leave() {
        assert_eq!(split(1024, (12, 50), 256), (256, 258, false));
        assert_eq!(split(1024, (12, 50), 0), (0, 514, false));
        // The prefix cache gets at most half.
        assert_eq!(split(1024, (200, 176), 256), (100, 100, false));
        let model = ModelMemory { weights: 12 * MIB, slots: 50 * MIB };
        assert_eq!(RamSplit::new(1 << 30, model, 256 * MIB).total(), 1 << 30);
    }

    #[test]
    fn a_budget_that_is_too_small_leaves_small_caches() {
        assert_eq!(split(448 + 62 + 64, (12, 50), 256), (32, 32, false));
        assert_eq!(split(448 + 62 + 63, (12, 50), 256), (32, 32, true));
        assert_eq!(split(1, (12, 50), 8), (8, 56, true));
        assert_eq!(split(1024, (100_000, 50), 256), (32, 32, true));
        assert_eq!(split(0, (12, 50), 256), (0, 0, false), "no caches, as asked for");
    }
}
