//! Tenants, to whom requests belong, and the fair order of waiting requests.
//!
//! Weighted fair queueing by virtual time: a tenant's virtual time is the work that the engine has done for it, in
//! tokens read and generated, divided by its weight. A free slot goes to the waiting tenant with the lowest virtual
//! time. A tenant that returns after a pause starts no lower than those that were active meanwhile, so a pause earns no
//! credit.
//!
//! A text keeps its slot to its end, so the order alone cannot help a tenant that finds all slots taken by endless
//! texts. Therefore the last free slots are kept for tenants that have none: see [`Tenants::choose`].

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;

use super::submission::Submission;

/// The owner of a request. Tenants share slots and queue in proportion to their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Identifies the tenant.
    pub id: u128,
    /// Its share relative to the other tenants' shares.
    pub weight: NonZeroU32,
}

/// The only tenant of an engine whose caller does not distinguish tenants.
impl Default for Tenant {
    fn default() -> Self {
        Self { id: 0, weight: NonZeroU32::MIN }
    }
}

/// Virtual time of one token at weight 1. Large, so that dividing it by a weight loses little to rounding.
const TOKEN: i128 = 1 << 20;

/// One in this many slots is kept free for tenants that have no slot.
const KEPT_SHARE: usize = 4;

/// What each tenant uses of the engine, indexed by tenant. The engine writes it, and the queue reads it.
#[derive(Default)]
pub(super) struct Usage {
    slots: Vec<usize>,
    /// The tenants' weights at the time when they last got a slot.
    weights: Vec<f64>,
    /// Tokens since the queue last looked; negative if fewer were needed than had been counted in advance.
    work: Vec<i64>,
}

impl Usage {
    pub(super) fn take_slot(&mut self, tenant: usize, weight: NonZeroU32) {
        if self.slots.len() <= tenant {
            self.slots.resize(tenant + 1, 0);
            self.weights.resize(tenant + 1, 1.0);
            self.work.resize(tenant + 1, 0);
        }
        self.slots[tenant] += 1;
        self.weights[tenant] = f64::from(weight.get());
    }

    /// Notes that a slot is free again, and that `unused` of the tokens counted in advance were not needed.
    pub(super) fn free_slot(&mut self, tenant: usize, unused: usize) {
        self.slots[tenant] -= 1;
        self.work[tenant] -= unused as i64;
    }

    /// Counts tokens for a tenant that has a slot.
    pub(super) fn count(&mut self, tenant: usize, tokens: usize) {
        self.work[tenant] += tokens as i64;
    }

    pub(super) fn slots(&self, tenant: usize) -> usize {
        self.slots.get(tenant).copied().unwrap_or(0)
    }

    /// The weight of a tenant that has a slot.
    pub(super) fn weight(&self, tenant: usize) -> f64 {
        self.weights.get(tenant).copied().unwrap_or(1.0)
    }

    /// How many tenants have a slot.
    fn holders(&self) -> usize {
        self.slots.iter().filter(|slots| **slots > 0).count()
    }
}

/// The tenants that have come since the engine last had nothing to do, and their waiting requests.
#[derive(Default)]
pub(super) struct Tenants {
    entries: Vec<Entry>,
    indices: HashMap<u128, usize>,
    waiting: usize,
    /// The number of tenants that the engine's caller expects.
    expected: usize,
    /// Whether any entry has `returns` set.
    returning: bool,
}

struct Entry {
    weight: NonZeroU32,
    queue: VecDeque<Submission>,
    /// The tenant's virtual time.
    time: i128,
    /// Whether the queue was empty when the latest requests came, and [`Tenants::update`] has not run since.
    returns: bool,
}

impl Entry {
    fn advance(&mut self, tokens: i64) {
        self.time += i128::from(tokens) * TOKEN / i128::from(self.weight.get());
    }

    /// Whether the queue would be shorter than `other`'s, relative to the weights, even with `more` requests added.
    fn stays_below(&self, more: usize, other: &Self) -> bool {
        let share = |waiting: usize, weight: NonZeroU32| waiting as u64 * u64::from(weight.get());
        share(self.queue.len() + more, other.weight) < share(other.queue.len(), self.weight)
    }
}

impl Tenants {
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Sets the expected number of tenants. If more tenants have come, the actual number counts.
    pub(super) fn expect(&mut self, tenants: usize) {
        self.expected = tenants;
    }

    /// The number of tenants: those expected or those that have come, whichever is more.
    pub(super) fn count(&self) -> usize {
        self.expected.max(self.entries.len())
    }

    /// Adds `submissions` behind the tenant's others. At most `capacity` requests wait. If there are more, the newest
    /// requests of the tenant with the most waiting per weight are displaced, as long as it has more than this tenant
    /// will have. Returns the displaced requests; `None`, with no request added or displaced, if there is not enough
    /// room.
    pub(super) fn add(
        &mut self,
        tenant: Tenant,
        submissions: Vec<Submission>,
        capacity: usize,
    ) -> Option<Vec<Submission>> {
        let count = submissions.len();
        if self.waiting + count > capacity {
            // Requests of clients that have left must not keep others out.
            for entry in &mut self.entries {
                entry.queue.retain(|waiting| !waiting.is_abandoned());
            }
            self.waiting = self.entries.iter().map(|entry| entry.queue.len()).sum();
        }
        let index = self.index(tenant);
        let mut displaced = Vec::new();
        while self.waiting + count > capacity {
            if let Some(other) = self.largest_above(index, count) {
                displaced.extend(self.entries[other].queue.pop_back());
                self.waiting -= 1;
            } else {
                self.put_back(displaced);
                return None;
            }
        }
        let entry = &mut self.entries[index];
        entry.returns |= entry.queue.is_empty();
        entry.queue.extend(submissions.into_iter().map(|submission| Submission { tenant: index, ..submission }));
        self.returning |= entry.returns;
        self.waiting += count;
        Some(displaced)
    }

    fn index(&mut self, tenant: Tenant) -> usize {
        let next = self.entries.len();
        let index = *self.indices.entry(tenant.id).or_insert(next);
        if index == next {
            self.entries.push(Entry { weight: tenant.weight, queue: VecDeque::new(), time: 0, returns: false });
        }
        // The weight may have changed since the last request.
        self.entries[index].weight = tenant.weight;
        index
    }

    /// Returns the tenant with the most waiting per weight, if `index` stays below it even with `more` requests added.
    fn largest_above(&self, index: usize, more: usize) -> Option<usize> {
        let own = &self.entries[index];
        let above = |at: &usize| *at != index && own.stays_below(more, &self.entries[*at]);
        (0..self.entries.len()).filter(above).reduce(|largest, at| {
            let more = self.entries[largest].stays_below(0, &self.entries[at]);
            if more { at } else { largest }
        })
    }

    /// Puts back requests that were taken from the ends of their queues, the last one first.
    fn put_back(&mut self, taken: Vec<Submission>) {
        self.waiting += taken.len();
        for submission in taken.into_iter().rev() {
            self.entries[submission.tenant].queue.push_back(submission);
        }
    }

    /// Brings the virtual times up to date. Forgets all tenants once nothing waits or runs.
    pub(super) fn update(&mut self, usage: &mut Usage) {
        if self.waiting == 0 && usage.holders() == 0 {
            self.entries.clear();
            self.indices.clear();
            usage.work.fill(0);
            return;
        }
        for (entry, work) in self.entries.iter_mut().zip(&mut usage.work) {
            entry.advance(std::mem::take(work));
        }
        if std::mem::take(&mut self.returning) {
            self.admit_returning(usage);
        }
    }

    /// Raises the virtual time of tenants that return after a pause to the lowest time among those that were active.
    fn admit_returning(&mut self, usage: &Usage) {
        let is_active = |at: usize, entry: &Entry| usage.slots(at) > 0 || (!entry.queue.is_empty() && !entry.returns);
        let active = self.entries.iter().enumerate().filter(|(at, entry)| is_active(*at, entry));
        let lowest = active.map(|(_, entry)| entry.time).min();
        // If none was active, all begin at the same time.
        let least = lowest.or_else(|| self.entries.iter().map(|entry| entry.time).max()).unwrap_or(0);
        for (at, entry) in self.entries.iter_mut().enumerate() {
            if std::mem::take(&mut entry.returns) && usage.slots(at) == 0 {
                entry.time = entry.time.max(least);
            }
        }
    }

    /// Returns the tenant whose request gets one of `free` slots, out of `slots` in total: the one with the lowest
    /// virtual time among those that may have a slot.
    ///
    /// A tenant without a slot may have any free slot. A tenant that has a slot leaves one free for each tenant that
    /// has none, whether or not that tenant is waiting: up to a quarter of all slots, and at least one if there are two
    /// or more. If `more` is false, only tenants without a slot get one.
    pub(super) fn choose(&self, (free, slots): (usize, usize), usage: &Usage, more: bool) -> Option<usize> {
        if free == 0 || self.waiting == 0 {
            return None;
        }
        let without = self.count().saturating_sub(usage.holders());
        let kept = without.min((slots / KEPT_SHARE).max(1)).min(slots - 1);
        let may = |at: usize| usage.slots(at) == 0 || (more && free > kept);
        let waiting = self.entries.iter().enumerate().filter(|(at, entry)| !entry.queue.is_empty() && may(*at));
        waiting.min_by_key(|(_, entry)| (entry.time, entry.queue.front().map(|first| first.submitted))).map(|it| it.0)
    }

    /// Takes a tenant's next request out of the queue, and counts a slot for it unless its client has left.
    pub(super) fn take(&mut self, tenant: usize, usage: &mut Usage) -> Option<Submission> {
        let entry = &mut self.entries[tenant];
        let mut submission = entry.queue.pop_front()?;
        self.waiting -= 1;
        if !submission.is_abandoned() {
            submission.advance = submission.cost();
            entry.advance(submission.advance as i64);
            usage.take_slot(tenant, entry.weight);
        }
        Some(submission)
    }

    /// Takes all interrupted requests that need no slot out of the queue.
    pub(super) fn take_interrupted(&mut self) -> Vec<Submission> {
        let mut taken = Vec::new();
        for entry in &mut self.entries {
            if entry.queue.iter().any(Submission::is_interrupted) {
                let (interrupted, rest): (Vec<_>, _) =
                    std::mem::take(&mut entry.queue).into_iter().partition(Submission::is_interrupted);
                entry.queue = rest.into();
                taken.extend(interrupted);
            }
        }
        self.waiting -= taken.len();
        taken
    }

    /// Takes everything out of the queue.
    pub(super) fn take_all(&mut self) -> Vec<Submission> {
        self.waiting = 0;
        self.entries.iter_mut().flat_map(|entry| entry.queue.drain(..)).collect()
    }
}
