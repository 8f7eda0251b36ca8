//! The order in which prompts are read: round robin over the tenants, and over the prompts of each tenant, one chunk at
//! a time. So neither a long prompt nor many prompts delay another tenant's short prompt.

use std::collections::VecDeque;

/// The slots that read in chunks.
#[derive(Default)]
pub(super) struct PrefillOrder {
    /// Each tenant's index with its slots. The tenant and the slot whose turn it is come first.
    turns: VecDeque<(usize, VecDeque<usize>)>,
}

impl PrefillOrder {
    /// Adds a slot behind the others of its tenant.
    pub(super) fn add(&mut self, tenant: usize, slot: usize) {
        match self.turns.iter_mut().find(|(other, _)| *other == tenant) {
            Some((_, slots)) => slots.push_back(slot),
            None => self.turns.push_back((tenant, [slot].into())),
        }
    }

    /// Returns the slot whose turn it is, among those that can be read.
    pub(super) fn next(&self, can_read: impl Fn(usize) -> bool) -> Option<usize> {
        self.turns.iter().flat_map(|(_, slots)| slots).copied().find(|slot| can_read(*slot))
    }

    /// Returns the first slot of each tenant, among those that can be read.
    pub(super) fn firsts(&self, can_read: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
        self.turns.iter().filter_map(move |(_, slots)| slots.iter().copied().find(|slot| can_read(*slot)))
    }

    /// Moves a slot and its tenant behind the others after one of its chunks was read.
    pub(super) fn chunk_was_read(&mut self, slot: usize) {
        let Some(at) = self.turns.iter().position(|(_, slots)| slots.contains(&slot)) else { return };
        let Some((tenant, mut slots)) = self.turns.remove(at) else { return };
        slots.retain(|other| *other != slot);
        slots.push_back(slot);
        self.turns.push_back((tenant, slots));
    }

    /// Removes a slot whose prompt has been read, or whose request has ended.
    pub(super) fn remove(&mut self, slot: usize) {
        for (_, slots) in &mut self.turns {
            slots.retain(|other| *other != slot);
        }
        self.turns.retain(|(_, slots)| !slots.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_take_turns_and_so_do_their_prompts() {
        let mut order = PrefillOrder::default();
        for (tenant, slot) in [(0, 10), (0, 11), (0, 12), (1, 20), (2, 30), (2, 31)] {
            order.add(tenant, slot);
        }
        let mut read = Vec::new();
        for _ in 0..9 {
            let slot = order.next(|slot| slot != 11).unwrap();
            read.push(slot);
            order.chunk_was_read(slot);
            if slot == 20 {
                order.remove(slot);
            }
        }
        assert_eq!(read, [10, 20, 30, 12, 31, 10, 30, 12, 31], "slot 11 cannot be read");
        assert_eq!(order.next(|_| true), Some(11), "it is the first of its tenant by now");
        for slot in [10, 11, 12, 30, 31] {
            order.remove(slot);
        }
        assert_eq!(order.next(|_| true), None);
    }
}
