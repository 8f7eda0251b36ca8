//! A model whose state transfers take as long as a test decides. It checks that the engine does not use a slot while
//! its state is in transfer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tidegate_model::{LanguageModel, ModelError, SharedState, Transfer};

/// Observes and controls a model's transfers.
#[derive(Default)]
pub(crate) struct Transfers(Mutex<State>);

#[derive(Default)]
struct State {
    /// Whether transfers wait; those of the slots in `may_finish` do not.
    paused: bool,
    may_finish: Vec<usize>,
    /// Whether transfers fail when they end.
    fails: bool,
    /// Determines how many polls each transfer takes; with 0, transfers need none.
    seed: u64,
    /// Slots being transferred.
    in_progress: Vec<usize>,
    started: usize,
    polls: usize,
    /// How the engine last violated the contract.
    violation: Option<String>,
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Transfers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Pauses all transfers.
    pub(crate) fn pause(&self) {
        self.lock().paused = true;
    }

    /// Lets the transfer of one slot finish.
    pub(crate) fn finish(&self, slot: usize) {
        self.change(|state| state.may_finish.push(slot));
    }

    /// Lets all transfers finish, or fail.
    pub(crate) fn release(&self, fails: bool) {
        self.change(|state| (state.paused, state.fails) = (false, fails));
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let wake = state.wake.clone();
        drop(state);
        if let Some(wake) = wake {
            wake();
        }
    }

    /// Makes each transfer take a few polls, derived from `seed`.
    pub(crate) fn delay(&self, seed: u64) {
        self.lock().seed = seed;
    }

    /// Returns the number of polls that the next transfer takes.
    fn next_delay(&self) -> u64 {
        let mut state = self.lock();
        state.seed = state.seed.wrapping_mul(6_364_136_223_846_793_005);
        (state.seed >> 40) % 7
    }

    pub(crate) fn in_progress(&self) -> Vec<usize> {
        self.lock().in_progress.clone()
    }

    /// Returns how often the engine has polled for the end of a transfer.
    pub(crate) fn polls(&self) -> usize {
        self.lock().polls
    }

    /// Returns the number of transfers started.
    pub(crate) fn started(&self) -> usize {
        self.lock().started
    }

    /// Panics if the engine has violated the contract.
    pub(crate) fn check(&self) {
        assert_eq!(self.lock().violation, None);
    }
}

/// A transfer in progress: the state that an import writes when it ends, and the number of polls until then.
struct Pending {
    import: Option<(SharedState, u64)>,
    polls_left: u64,
}

pub(crate) struct Slow<M> {
    model: M,
    transfers: Arc<Transfers>,
    pending: HashMap<usize, Pending>,
}

impl<M: LanguageModel> Slow<M> {
    pub(crate) fn new(model: M) -> (Self, Arc<Transfers>) {
        let transfers = Arc::<Transfers>::default();
        (Self { model, transfers: Arc::clone(&transfers), pending: HashMap::new() }, transfers)
    }

    /// Records a violation and panics if one of the slots is in transfer.
    fn check_free(&self, what: &str, slots: &[usize]) {
        if let Some(slot) = slots.iter().find(|slot| self.pending.contains_key(slot)) {
            let words = format!("{what} of slot {slot} during its transfer");
            self.transfers.lock().violation = Some(words.clone());
            panic!("{words}");
        }
    }

    fn begin(&mut self, slot: usize, import: Option<(SharedState, u64)>) -> Transfer {
        self.check_free("another transfer", &[slot]);
        let polls_left = self.transfers.next_delay();
        let mut state = self.transfers.lock();
        state.in_progress.push(slot);
        state.started += 1;
        self.pending.insert(slot, Pending { import, polls_left });
        Transfer::Pending
    }
}

impl<M: LanguageModel> LanguageModel for Slow<M> {
    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn slots(&self) -> usize {
        self.model.slots()
    }

    fn is_lost(&self) -> bool {
        self.model.is_lost()
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.check_free("a reset", &[slot]);
        self.model.reset(slot)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        self.check_free("an export", &[slot]);
        self.model.export(slot)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        self.check_free("an import", &[slot]);
        self.model.import(slot, state, tokens)
    }

    fn start_export(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        Ok(self.begin(slot, None))
    }

    fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer, ModelError> {
        Ok(self.begin(slot, Some((state, tokens))))
    }

    fn poll_transfer(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        let mut state = self.transfers.lock();
        state.polls += 1;
        let Some(pending) = self.pending.get_mut(&slot) else {
            state.violation = Some(format!("poll of slot {slot}, which has no transfer"));
            return Err(ModelError::other("no transfer"));
        };
        if pending.polls_left > 0 {
            pending.polls_left -= 1;
            return Ok(Transfer::Pending);
        }
        match state.may_finish.iter().position(|other| *other == slot) {
            Some(at) => _ = state.may_finish.remove(at),
            None if state.paused => return Ok(Transfer::Pending),
            None => {}
        }
        state.in_progress.retain(|other| *other != slot);
        let fails = state.fails;
        drop(state);
        let pending = self.pending.remove(&slot);
        if fails || self.model.is_lost() {
            return Err(ModelError::other("scripted failure of a transfer"));
        }
        match pending.and_then(|pending| pending.import) {
            Some((state, tokens)) => {
                self.model.import(slot, (*state).as_ref(), tokens).map(|()| Transfer::Done(Vec::new()))
            }
            None => self.model.export(slot).map(Transfer::Done),
        }
    }

    fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.transfers.lock().wake = Some(wake);
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.check_free("reading", &[slot]);
        self.model.prefill(ids, slot)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        self.check_free("a step", slots);
        self.model.decode(ids, slots, logits)
    }
}
