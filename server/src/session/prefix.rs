//! Finds the longest stored prefix of a text: of a history that is sent again, or of instructions that many texts
//! share.
//!
//! The index is bounded in bytes and, per owner, in entries; the least recently used entry is evicted first. A prefix
//! may end at any token: entries are found by the digest of their tokens, and compared only with texts of the same
//! owner.
//!
//! A state cannot be truncated, so texts with the same beginning can only share a state that was kept inside their
//! common part. Prompts leave two kinds of such states: a long prompt leaves one a little before its end, where a
//! different question after the same instructions may begin; and a prompt leaves one where it diverges from an earlier
//! prompt, whose tokens are kept (the rule of Marconi, Pan et al., MLSys 2025).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::id::Owner;
use super::snapshot::{History, Snapshot};

/// The stored prefixes of all owners' texts.
#[derive(Debug)]
pub struct PrefixIndex {
    inner: Mutex<Inner>,
    max_bytes: AtomicUsize,
    max_per_owner: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    owners: HashMap<Owner, Entries>,
    /// Entries by time of last use on `clock`, oldest first.
    last_uses: BTreeMap<u64, (Owner, Key)>,
    clock: u64,
    bytes: usize,
}

/// One owner's prefixes, by length and digest.
type Entries = BTreeMap<Key, Entry>;
type Key = (u64, History);

#[derive(Debug)]
struct Entry {
    snapshot: Arc<Snapshot>,
    /// The tokens of the prompt, if the snapshot is at the end of one.
    prompt: Option<Arc<[u32]>>,
    used: u64,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.snapshot.bytes() + self.prompt.as_ref().map_or(0, |prompt| size_of_val(&**prompt))
    }
}

/// Minimum number of tokens that two prompts must share beyond what a known state covers, for a state to be kept where
/// they diverge. Fewer tokens save too little for an entry, which displaces another.
const SHORTEST_BRANCH: usize = 32;

/// Minimum number of unread tokens for a prompt to leave a state before its end, and how many tokens before the end.
const LONG: usize = 512;
const QUESTION: usize = 256;

impl PrefixIndex {
    /// Creates an index of at most `max_bytes`, with at most `max_per_owner` prefixes per owner. Zero disables it.
    pub fn new(max_bytes: usize, max_per_owner: usize) -> Self {
        let (hits, misses) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { inner: Mutex::default(), max_bytes: AtomicUsize::new(max_bytes), max_per_owner, hits, misses }
    }

    /// Returns the bound in bytes.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes.load(Relaxed)
    }

    /// Lowers the bound. Call this before anything is stored.
    pub fn limit(&self, max_bytes: usize) {
        self.max_bytes.fetch_min(max_bytes, Relaxed);
    }

    /// Removes all prefixes.
    pub fn clear(&self) {
        let mut inner = self.lock();
        while let Some(oldest) = inner.last_uses.keys().next().copied() {
            inner.forget(Some(oldest));
        }
    }

    /// Returns whether the index stores anything at all.
    pub fn is_on(&self) -> bool {
        self.max_bytes() > 0 && self.max_per_owner > 0
    }

    /// Stores `snapshot` as a prefix of its owner's texts, evicting others if necessary. `prompt` is the text that the
    /// snapshot is at the end of, if other prompts may share its beginning.
    pub fn keep(&self, owner: Owner, snapshot: &Arc<Snapshot>, prompt: Option<Arc<[u32]>>) {
        let entry = Entry { snapshot: Arc::clone(snapshot), prompt, used: 0 };
        if snapshot.read == 0 || entry.bytes() > self.max_bytes() || !self.is_on() {
            return;
        }
        let mut inner = self.lock();
        inner.insert(owner, entry);
        while inner.owners.get(&owner).is_some_and(|entries| entries.len() > self.max_per_owner) {
            let oldest = inner.last_uses.iter().find(|(_, (other, _))| *other == owner).map(|(used, _)| *used);
            inner.forget(oldest);
        }
        while inner.bytes > self.max_bytes() {
            let oldest = inner.last_uses.keys().next().copied();
            inner.forget(oldest);
        }
    }

    /// Returns the longest stored prefix of `tokens` that leaves at least one token to read.
    pub fn longest(&self, owner: Owner, tokens: &[u32]) -> Option<Arc<Snapshot>> {
        let found = self.find(owner, tokens);
        if self.is_on() {
            let counter = if found.is_some() { &self.hits } else { &self.misses };
            counter.fetch_add(1, Relaxed);
        }
        found
    }

    fn find(&self, owner: Owner, tokens: &[u32]) -> Option<Arc<Snapshot>> {
        let lengths: Vec<u64> = {
            let inner = self.lock();
            let mut lengths: Vec<u64> = inner.owners.get(&owner)?.keys().map(|key| key.0).collect();
            lengths.dedup();
            lengths.retain(|length| *length < tokens.len() as u64);
            lengths
        };
        // Hashing a long text takes time, so it happens outside the lock.
        let (mut history, mut at) = (History::default(), 0);
        let mut keys = Vec::with_capacity(lengths.len());
        for length in lengths {
            history = history.extended(&tokens[at..length as usize]);
            at = length as usize;
            keys.push((length, history));
        }
        let mut inner = self.lock();
        keys.iter().rev().find_map(|key| inner.touch(owner, *key))
    }

    /// Returns the number of tokens after which a state inside the prompt `tokens` may serve later prompts; `None` if
    /// it would not pay. A state after the first `known` tokens already exists.
    pub fn mark(&self, owner: Owner, tokens: &[u32], known: u64) -> Option<usize> {
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        let before_end = || (tokens.len().saturating_sub(known) >= LONG).then(|| tokens.len() - QUESTION);
        self.branch(owner, tokens, known).or_else(before_end)
    }

    /// Returns the largest number of tokens that `tokens` shares with an earlier prompt, if that is enough.
    fn branch(&self, owner: Owner, tokens: &[u32], known: usize) -> Option<usize> {
        let prompts: Vec<Arc<[u32]>> = {
            let inner = self.lock();
            inner.owners.get(&owner)?.values().filter_map(|entry| entry.prompt.clone()).collect()
        };
        // Comparing long texts takes time, so it happens outside the lock.
        let common = |prompt: &Arc<[u32]>| prompt.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let longest = prompts.iter().map(common).max()?;
        (longest.saturating_sub(known) >= SHORTEST_BRANCH).then_some(longest)
    }

    /// Returns the numbers of hits and misses.
    pub fn lookups(&self) -> (u64, u64) {
        (self.hits.load(Relaxed), self.misses.load(Relaxed))
    }

    /// Returns the number of prefixes, and their bytes.
    pub fn size(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.last_uses.len(), inner.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn insert(&mut self, owner: Owner, entry: Entry) {
        let key = (entry.snapshot.read, entry.snapshot.history);
        // The same text has the same state, so the existing entry stays. It takes the prompt if it had none.
        if self.touch(owner, key).is_some() {
            let known = self.owners.get_mut(&owner).and_then(|entries| entries.get_mut(&key));
            if let Some(known) = known.filter(|known| known.prompt.is_none()) {
                self.bytes -= known.bytes();
                known.prompt = entry.prompt;
                self.bytes += known.bytes();
            }
            return;
        }
        self.clock += 1;
        self.last_uses.insert(self.clock, (owner, key));
        self.bytes += entry.bytes();
        self.owners.entry(owner).or_default().insert(key, Entry { used: self.clock, ..entry });
    }

    /// Returns the snapshot under `key`, and marks it as most recently used.
    fn touch(&mut self, owner: Owner, key: Key) -> Option<Arc<Snapshot>> {
        let entry = self.owners.get_mut(&owner)?.get_mut(&key)?;
        self.clock += 1;
        self.last_uses.remove(&entry.used);
        self.last_uses.insert(self.clock, (owner, key));
        entry.used = self.clock;
        Some(Arc::clone(&entry.snapshot))
    }

    fn forget(&mut self, used: Option<u64>) {
        let Some((owner, key)) = used.and_then(|used| self.last_uses.remove(&used)) else { return };
        let Some(entries) = self.owners.get_mut(&owner) else { return };
        if let Some(entry) = entries.remove(&key) {
            self.bytes -= entry.bytes();
        }
        if entries.is_empty() {
            self.owners.remove(&owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: &[u32]) -> Arc<Snapshot> {
        let (read, history) = (tokens.len() as u64, History::default().extended(tokens));
        Arc::new(Snapshot { state: vec![0.0; 100], read, history, ..Snapshot::default() })
    }

    const ANN: Owner = Owner([1; 16]);
    const BEN: Owner = Owner([2; 16]);

    fn found(index: &PrefixIndex, owner: Owner, tokens: &[u32]) -> u64 {
        index.longest(owner, tokens).map_or(0, |snapshot| snapshot.read)
    }

    #[test]
    fn the_longest_prefix_that_leaves_a_token_is_found() {
        let index = PrefixIndex::new(1 << 20, 10);
        for text in [&[1, 2][..], &[1, 2, 3, 4], &[1, 9, 9]] {
            index.keep(ANN, &of(text), None);
        }
        assert_eq!(found(&index, ANN, &[1, 2, 3, 4, 5]), 4);
        assert_eq!(found(&index, ANN, &[1, 2, 3, 4]), 2, "at least one token is left to read");
        assert_eq!(found(&index, ANN, &[1, 2, 3, 5, 5]), 2);
        assert_eq!(found(&index, ANN, &[1, 9, 9, 9]), 3);
        assert_eq!(found(&index, ANN, &[2, 1, 3]), 0);
    }

    #[test]
    fn a_prompt_parts_from_the_one_that_it_is_like_for_longest() {
        let index = PrefixIndex::new(1 << 20, 10);
        let text = |alike: u32, rest: u32| -> Arc<[u32]> { (0..alike).chain([rest; 50]).collect() };
        for (alike, rest) in [(40, 1000), (100, 1001), (100, 1002)] {
            let prompt = text(alike, rest);
            index.keep(ANN, &of(&prompt[..prompt.len() - 1]), Some(prompt));
        }
        let bytes =
            of(&text(40, 1)[..89]).bytes() + 2 * of(&text(100, 1)[..149]).bytes() + (90 + 2 * 150) * size_of::<u32>();
        assert_eq!(index.size(), (3, bytes), "the prompts count");
        // An entry without a prompt does not create a branch.
        index.keep(ANN, &of(&text(140, 1003)), None);
        let branch = |alike, known| index.mark(ANN, &text(alike, 7), known);
        assert_eq!((branch(100, 0), branch(60, 0), branch(140, 0)), (Some(100), Some(60), Some(100)));
        assert_eq!((branch(100, 68), branch(100, 69), branch(100, 100)), (Some(100), None, None));
        assert_eq!((branch(32, 0), branch(31, 0)), (Some(32), None));
        assert_eq!(index.mark(BEN, &text(100, 7), 0), None);
        // A branch may be at the end of an earlier prompt, or at the end of this one.
        assert_eq!(
            (index.mark(ANN, &text(100, 1001), 0), index.mark(ANN, &text(100, 1001)[..90], 0)),
            (Some(150), Some(90))
        );
    }

    #[test]
    fn a_long_prompt_that_is_like_no_other_is_marked_before_its_end() {
        let index = PrefixIndex::new(1 << 20, 10);
        let long: Vec<u32> = (0..600).collect();
        assert_eq!((index.mark(ANN, &long, 0), index.mark(ANN, &long, 88)), (Some(344), Some(344)));
        assert_eq!((index.mark(ANN, &long, 89), index.mark(ANN, &long[..511], 0)), (None, None));
        index.keep(ANN, &of(&long[..40]), Some(long[..41].into()));
        assert_eq!(index.mark(ANN, &long, 0), Some(41), "where it parts from another one");
        assert_eq!(index.mark(ANN, &long, 40), Some(344));
    }

    #[test]
    fn an_entry_may_turn_out_to_end_a_prompt() {
        let index = PrefixIndex::new(1 << 20, 10);
        let prompt: Vec<u32> = (0..60).collect();
        let end = of(&prompt[..59]);
        index.keep(ANN, &end, None);
        assert_eq!(index.mark(ANN, &prompt, 0), None);
        for _ in 0..2 {
            index.keep(ANN, &end, Some(prompt[..].into()));
            assert_eq!(index.size(), (1, end.bytes() + 60 * size_of::<u32>()));
        }
        assert_eq!(index.mark(ANN, &prompt, 0), Some(60));
        index.clear();
        assert_eq!(index.size(), (0, 0));
    }

    #[test]
    fn owners_do_not_share_prefixes() {
        let index = PrefixIndex::new(1 << 20, 10);
        index.keep(ANN, &of(&[1, 2]), None);
        assert_eq!(found(&index, BEN, &[1, 2, 3]), 0);
        assert_eq!(found(&index, ANN, &[1, 2, 3]), 2);
    }

    #[test]
    fn the_least_recently_used_prefix_is_evicted_at_either_bound() {
        let index = PrefixIndex::new(1 << 20, 2);
        index.keep(ANN, &of(&[1]), None);
        index.keep(ANN, &of(&[2]), None);
        assert_eq!(found(&index, ANN, &[1, 0]), 1);
        index.keep(ANN, &of(&[3]), None);
        assert_eq!((found(&index, ANN, &[1, 0]), found(&index, ANN, &[2, 0])), (1, 0));

        let one = of(&[1]).bytes();
        let index = PrefixIndex::new(3 * one, 10);
        for (owner, token) in [(ANN, 1), (BEN, 1), (ANN, 2), (BEN, 2)] {
            index.keep(owner, &of(&[token]), None);
        }
        assert_eq!(index.size(), (3, 3 * one));
        assert_eq!((found(&index, ANN, &[1, 0]), found(&index, BEN, &[1, 0])), (0, 1));
        index.keep(BEN, &of(&[1]), None);
        assert_eq!(index.size(), (3, 3 * one), "the same text is stored once");
        let off = PrefixIndex::new(0, 10);
        off.keep(ANN, &of(&[1]), None);
        assert_eq!(off.size(), (0, 0));
        let index = PrefixIndex::new(3 * one, 10);
        index.limit(4 * one);
        assert_eq!(index.max_bytes(), 3 * one);
        index.limit(one);
        for token in 1..3 {
            index.keep(ANN, &of(&[token]), None);
        }
        assert_eq!(index.size(), (1, one));
    }
}
