//! How the tenants share one iteration of the engine's loop, which is one chunk of a prompt and one decode step.
//!
//! If the tenants' rows and prompts cost equally much, or if there is only one tenant, everything that is ready takes
//! part. If one tenant has more than another, its rows take turns and its chunks are shorter. Then an iteration costs
//! at most
//!
//! ```text
//! 2 (base + tenants * least)
//! ```
//!
//! where `least` is the cost of what the tenant with the least to do wants, and `base` is the fixed cost of a step.
//! That is twice as much as if all tenants had as little to do. Within this budget the shares are max-min fair: no
//! tenant gets more than another that wants more. All of this is relative to the tenants' weights. Two things follow:
//!
//! - A tenant's rows advance at least half as fast as if all others had as many rows, apart from rounding to whole
//!   rows.
//! - At least half of the time goes into rows and chunks, because their part of the budget is at least `base`. So the
//!   engine generates at least half as much as with full steps.
//!
//! A tenant that has nothing left to do still counts for [`ABSENCE`] iterations. Otherwise a key that sends one request
//! after another would find a full iteration in progress each time.
//!
//! Three things may exceed the budget: each tenant has at least one row in a step; a chunk is never so short that its
//! fixed cost exceeds the cost of its tokens; and a text's last chunk may have one more token. Sources are read as a
//! whole.

use super::pass_costs::PassCosts;

/// A row that is ready for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) slot: usize,
    /// The token that it reads.
    pub(super) id: u32,
    pub(super) tenant: usize,
    /// When it last took part in a step or got its slot, counted in the engine's passes.
    pub(super) since: u64,
}

/// What one tenant wants of an iteration, and what it has used.
#[derive(Clone, Copy, Default)]
struct Share {
    /// Zero if it wants nothing.
    weight: f64,
    rows: f64,
    chunk: f64,
    used: f64,
}

impl Share {
    fn wanted(&self) -> f64 {
        self.rows + self.chunk
    }

    fn per_weight(&self) -> f64 {
        self.wanted() / self.weight
    }
}

/// Iterations for which a tenant that has nothing to do still counts.
const ABSENCE: u32 = 32;

/// What a tenant wanted when it last wanted something.
#[derive(Clone, Copy, Default)]
struct Past {
    share: Share,
    /// Iterations for which this still counts.
    left: u32,
}

/// The shares of one iteration.
#[derive(Default)]
pub(super) struct Shares {
    /// Indexed by tenant.
    tenants: Vec<Share>,
    past: Vec<Past>,
    /// The tenants that want something, in ascending order of what they want per weight.
    order: Vec<usize>,
    costs: Option<PassCosts>,
    /// What a tenant may use per unit of weight; infinite if there is enough for all.
    level: f64,
    /// What all tenants together may use.
    budget: f64,
    /// Buffers of `choose`.
    chosen: Vec<Row>,
    waiting: Vec<Row>,
}

impl Shares {
    /// Begins an iteration. Without `costs`, everything that is ready takes part.
    pub(super) fn begin(&mut self, costs: Option<PassCosts>) {
        self.past.resize(self.tenants.len(), Past::default());
        for (share, past) in self.tenants.iter_mut().zip(&mut self.past) {
            if share.weight > 0.0 {
                *past = Past { share: *share, left: ABSENCE };
            } else {
                past.left = past.left.saturating_sub(1);
            }
            *share = Share::default();
        }
        self.order.clear();
        (self.costs, self.level, self.budget) = (costs, f64::INFINITY, f64::INFINITY);
    }

    /// Notes a row that is ready.
    pub(super) fn want_row(&mut self, tenant: usize, weight: f64) {
        if let Some(costs) = self.costs {
            self.share(tenant, weight).rows += costs.step.each;
        }
    }

    /// Notes that a tenant's next chunk has `tokens` tokens; a tenant has at most one chunk.
    pub(super) fn want_chunk(&mut self, tenant: usize, weight: f64, tokens: usize) {
        if let Some(costs) = self.costs {
            self.share(tenant, weight).chunk = costs.chunk.of(tokens);
        }
    }

    fn share(&mut self, tenant: usize, weight: f64) -> &mut Share {
        if self.tenants.len() <= tenant {
            self.tenants.resize(tenant + 1, Share::default());
        }
        let share = &mut self.tenants[tenant];
        if share.weight == 0.0 {
            share.weight = weight;
            self.order.push(tenant);
        }
        share
    }

    /// Whether at most one tenant has anything to do or has had lately.
    pub(super) fn is_of_one(&self) -> bool {
        let other = |(tenant, past): (usize, &Past)| past.left > 0 && !self.order.contains(&tenant);
        self.order.len() < 2 && !self.past.iter().enumerate().any(other)
    }

    /// Divides the iteration among the tenants that want something.
    pub(super) fn divide(&mut self) {
        let Self { tenants, past, order, costs: Some(costs), .. } = self else { return };
        let per_weight = |tenant: &usize| tenants[*tenant].per_weight();
        order.sort_unstable_by(|a, b| per_weight(a).total_cmp(&per_weight(b)).then(a.cmp(b)));
        let Some(mut least) = order.first().map(per_weight) else { return };
        let mut weights: f64 = order.iter().map(|tenant| tenants[*tenant].weight).sum();
        let mut counted = weights;
        for (past, _) in past.iter().zip(&*tenants).filter(|(past, now)| past.left > 0 && now.weight == 0.0) {
            least = least.min(past.share.per_weight());
            counted += past.share.weight;
        }
        let wanted: f64 = order.iter().map(|tenant| tenants[*tenant].wanted()).sum();
        // The base in the budget is for rows and chunks; the step's own base comes on top.
        let budget = 2.0 * counted * least + costs.step.base;
        if wanted <= budget {
            return;
        }
        let mut left = budget;
        self.budget = budget;
        for tenant in order.iter() {
            self.level = left / weights;
            if per_weight(tenant) > self.level {
                break;
            }
            left -= tenants[*tenant].wanted();
            weights -= tenants[*tenant].weight;
        }
    }

    /// Returns the most tokens of the next chunk of `tenant`, which wants one. If the tenant also has rows, half of its
    /// share is left to them.
    pub(super) fn chunk_limit(&self, tenant: usize) -> usize {
        let (Some(share), Some(costs)) = (self.tenants.get(tenant), self.costs) else { return usize::MAX };
        let allowed = self.level * share.weight;
        if share.wanted() <= allowed {
            return usize::MAX;
        }
        costs.chunk.affords((allowed - share.rows).max(allowed / 2.0))
    }

    /// The number of tokens after which the engine checks, in the middle of a chunk, whether other requests are
    /// waiting.
    pub(super) fn piece(&self) -> usize {
        self.costs.map_or(usize::MAX, |costs| costs.chunk.efficient())
    }

    /// Notes that a piece of a chunk of `tenant` has been read.
    pub(super) fn use_chunk(&mut self, tenant: usize, tokens: usize) {
        if let (Some(share), Some(costs)) = (self.tenants.get_mut(tenant), self.costs) {
            share.used += costs.chunk.of(tokens);
        }
    }

    /// Removes the rows that do not take part in this iteration's step. `rows` are sorted by slot, before and after.
    ///
    /// Each tenant has at least one row in the step. A tenant's longest-waiting rows come first.
    pub(super) fn choose(&mut self, rows: &mut Vec<Row>) {
        let Self { tenants, costs: Some(costs), level, budget, chosen, waiting, .. } = self else { return };
        let each = costs.step.each;
        if level.is_infinite() || each == 0.0 {
            return;
        }
        rows.sort_unstable_by_key(|row| (row.tenant, row.since, row.slot));
        let mut used: f64 = tenants.iter().map(|share| share.used).sum();
        chosen.clear();
        waiting.clear();
        for of_tenant in rows.chunk_by(|a, b| a.tenant == b.tenant) {
            let share = of_tenant.first().and_then(|row| tenants.get(row.tenant)).copied().unwrap_or_default();
            // A tenant that has just finished its prompt was counted with its chunk.
            let count = ((*level * share.weight - share.used) / each + ROUNDING) as usize;
            let (now, later) = of_tenant.split_at(count.clamp(1, of_tenant.len()));
            chosen.extend_from_slice(now);
            waiting.extend_from_slice(later);
            used += now.len() as f64 * each;
        }
        // The rest is less than a whole row for each tenant, or was left by a chunk that was not read.
        let rest = ((*budget - used) / each + ROUNDING) as usize;
        waiting.sort_unstable_by_key(|row| (row.since, row.slot));
        chosen.extend(waiting.iter().take(rest));
        chosen.sort_unstable_by_key(|row| row.slot);
        std::mem::swap(rows, chosen);
    }
}

/// A fraction of a row, so that a share of whole rows is not rounded down to one less.
const ROUNDING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine::pass_costs::PassCost;

    /// Tenants whose rows cost 1 each.
    struct Simulation {
        shares: Shares,
        costs: PassCosts,
        /// (weight, rows) of each tenant.
        tenants: Vec<(u32, usize)>,
        /// For each slot: its tenant, when it last took part, and how often.
        rows: Vec<(usize, u64, usize)>,
        cost: f64,
    }

    impl Simulation {
        fn new(tenants: &[(u32, usize)], base: f64) -> Self {
            let cost = PassCost { base, each: 1.0 };
            let mut rows: Vec<_> = tenants.iter().enumerate().flat_map(|(at, (_, n))| vec![(at, 0, 0); *n]).collect();
            // Mix the tenants' slots.
            rows.sort_by_key(|(at, ..)| at % 2);
            let costs = PassCosts { step: cost, chunk: cost };
            Self { shares: Shares::default(), costs, tenants: tenants.into(), rows, cost: 0.0 }
        }

        /// The slots of step `now`.
        fn step(&mut self, now: u64) -> Vec<usize> {
            self.shares.begin(Some(self.costs));
            let row = |(slot, (tenant, since, _)): (usize, &(usize, u64, usize))| Row {
                slot,
                id: 0,
                tenant: *tenant,
                since: *since,
            };
            let mut rows: Vec<Row> = self.rows.iter().enumerate().map(row).collect();
            for row in &rows {
                self.shares.want_row(row.tenant, f64::from(self.tenants[row.tenant].0));
            }
            self.shares.divide();
            self.shares.choose(&mut rows);
            let chosen: Vec<usize> = rows.iter().map(|row| row.slot).collect();
            for slot in &chosen {
                (self.rows[*slot].1, self.rows[*slot].2) = (now, self.rows[*slot].2 + 1);
            }
            self.cost += self.costs.step.of(chosen.len());
            chosen
        }

        fn weights(&self) -> f64 {
            self.tenants.iter().map(|(weight, _)| f64::from(*weight)).sum()
        }
    }

    fn tenants() -> impl Strategy<Value = Vec<(u32, usize)>> {
        let rows = prop_oneof![1..4_usize, 1..80_usize];
        let weighted = proptest::collection::vec((1..5_u32, rows.clone()), 1..7);
        prop_oneof![proptest::collection::vec((Just(1), rows), 1..7), weighted]
    }

    #[test]
    fn light_tenants_never_wait_and_nobody_waits_for_more_than_its_share() {
        const STEPS: usize = 400;
        let config = ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(tenants in tenants(), base in prop_oneof![Just(0.0), 0.0..30.0_f64])| {
            let mut simulation = Simulation::new(&tenants, base);
            let per_weight = |(weight, rows): &(u32, usize)| *rows as f64 / f64::from(*weight);
            let least = tenants.iter().map(per_weight).fold(f64::INFINITY, f64::min);
            let budget = 2.0 * simulation.weights() * least + base;
            for now in 1..=STEPS {
                let chosen = simulation.step(now as u64);
                prop_assert!(chosen.is_sorted_by(|a, b| a < b));
                let all = chosen.len() == simulation.rows.len();
                // The step is full, and exceeds the budget only by the one row that each tenant has at least.
                prop_assert!(all || chosen.len() as f64 > budget - 1.0, "{} of {budget}", chosen.len());
                prop_assert!(all || chosen.len() as f64 <= budget + tenants.len() as f64, "{} of {budget}", chosen.len());
                for (tenant, of) in tenants.iter().enumerate() {
                    let rows = chosen.iter().filter(|slot| simulation.rows[**slot].0 == tenant).count();
                    prop_assert!(rows >= 1);
                    prop_assert!(per_weight(of) > least || rows == of.1, "a light tenant waits");
                }
            }
            for (tenant, steps) in simulation.rows.iter().map(|(tenant, _, steps)| (*tenant, *steps)) {
                let (weight, rows) = tenants[tenant];
                // What each row would cost if all others had as many rows for their weights.
                let fair = base + rows as f64 * simulation.weights() / f64::from(weight);
                let bound = if tenants.iter().all(|(weight, _)| *weight == 1) { 2.0 } else { 2.5 };
                let ratio = simulation.cost / steps as f64 / fair;
                // The last round of turns may be incomplete.
                prop_assert!(ratio <= bound * (1.0 + 1.0 / steps as f64), "{ratio} of tenant {tenant}");
            }
        });
    }

    #[test]
    fn one_tenant_and_equal_ones_take_part_with_all_rows() {
        for tenants in [&[(1, 100)][..], &[(1, 40), (1, 40), (1, 40)], &[(1, 20), (3, 60)], &[(2, 7), (2, 13)]] {
            let mut simulation = Simulation::new(tenants, 0.0);
            assert_eq!(simulation.step(1).len(), simulation.rows.len(), "{tenants:?}");
        }
        // The base of a large model, or of a model on a GPU, is worth many rows.
        let mut simulation = Simulation::new(&[(1, 1), (1, 60)], 57.0);
        assert_eq!(simulation.step(1).len(), 61);
        let mut simulation = Simulation::new(&[(1, 1), (1, 60)], 56.0);
        assert_eq!(simulation.step(1).len(), 60);
    }

    #[test]
    fn a_tenant_is_the_only_one_once_all_others_have_been_absent_for_long() {
        let cost = PassCost { base: 10.0, each: 1.0 };
        let mut shares = Shares::default();
        let mut iteration = |tenants: &[usize], reads: bool| {
            shares.begin((!tenants.is_empty()).then_some(PassCosts { step: cost, chunk: cost }));
            for tenant in tenants {
                shares.want_row(*tenant, 1.0);
            }
            if reads {
                shares.want_chunk(7, 1.0, 100);
            }
            shares.divide();
            shares.is_of_one()
        };
        assert!(iteration(&[], false), "nothing is divided where there is one tenant");
        assert!(iteration(&[3, 3], false));
        assert!(!iteration(&[3, 4], false));
        assert!(!iteration(&[3], true), "a tenant that reads a prompt counts too");
        let absent = (0..1000).position(|_| iteration(&[3], false)).unwrap();
        assert_eq!(absent, ABSENCE as usize);
    }

    #[test]
    fn rows_that_cost_nothing_all_take_part() {
        let mut simulation = Simulation::new(&[(1, 1), (1, 60)], 0.0);
        simulation.costs.step = PassCost { base: 0.0, each: 0.0 };
        assert_eq!(simulation.step(1).len(), 61);
        // A prompt may not be limited by a division by zero either.
        let shares = &mut simulation.shares;
        shares.begin(Some(simulation.costs));
        shares.want_row(0, 1.0);
        shares.want_chunk(1, 1.0, 256);
        shares.divide();
        let mut rows = vec![Row { slot: 0, id: 0, tenant: 0, since: 0 }; 3];
        shares.choose(&mut rows);
        assert_eq!(rows.len(), 3);
    }

    #[test]
    fn a_chunk_and_the_rows_of_its_tenant_share_what_the_tenant_has() {
        let cost = |base, each| PassCost { base, each };
        let mut shares = Shares::default();
        let mut divide = |heavy_rows: usize, tokens| {
            shares.begin(Some(PassCosts { step: cost(6.0, 1.0), chunk: cost(1.0, 0.5) }));
            shares.want_row(0, 1.0);
            (0..heavy_rows).for_each(|_| shares.want_row(1, 1.0));
            shares.want_chunk(1, 1.0, tokens);
            shares.divide();
            let limit = shares.chunk_limit(1);
            shares.use_chunk(1, limit.min(tokens));
            let row = |slot: usize| Row { slot, id: 0, tenant: usize::from(slot > 0), since: 0 };
            let mut rows: Vec<Row> = (0..=heavy_rows).map(row).collect();
            shares.choose(&mut rows);
            (limit, rows.len())
        };
        // The budget is 10, and the heavy tenant gets 9 of it.
        assert_eq!(divide(0, 256), (16, 1));
        assert_eq!(divide(2, 256), (12, 3), "what its rows leave");
        assert_eq!(divide(60, 256), (7, 1 + 4), "half");
        assert_eq!(divide(4, 4), (usize::MAX, 5), "enough for all");
    }
}
