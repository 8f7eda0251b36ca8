//! A model whose state transfers take as long as a test decides. It checks that the engine uses no slot during its
//! transfer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tidegate_model::{LanguageModel, ModelError, SharedState, Transfer};

/// Observes and controls a model's transfers.
#[derive(Default)]
pub(crate) struct Moves(Mutex<State>);

#[derive(Default)]
struct State {
    /// Whether only the transfers of slots in `may_end` can end.
    held: bool,
    may_end: Vec<usize>,
    /// Whether transfers end with a failure.
    fails: bool,
    /// Determines how often the engine has to poll before a transfer ends; 0: it ends at once.
    patience: u64,
    /// Slots being transferred.
    under_way: Vec<usize>,
    begun: usize,
    asked: usize,
    /// Violations by the engine.
    broken: Option<String>,
    wake: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Moves {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Holds all transfers from now on.
    pub(crate) fn hold(&self) {
        self.lock().held = true;
    }

    /// Lets the transfer of one slot end.
    pub(crate) fn let_end(&self, slot: usize) {
        self.change(|state| state.may_end.push(slot));
    }

    /// Lets all transfers end, with a failure if `fails`.
    pub(crate) fn release(&self, fails: bool) {
        self.change(|state| (state.held, state.fails) = (false, fails));
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

    /// Makes each transfer take a few iterations of the engine's loop, derived from `seed`.
    pub(crate) fn take_turns(&self, seed: u64) {
        self.lock().patience = seed;
    }

    /// How often the engine has to poll before the next transfer ends.
    fn turns(&self) -> u64 {
        let mut state = self.lock();
        state.patience = state.patience.wrapping_mul(6_364_136_223_846_793_005);
        (state.patience >> 40) % 7
    }

    pub(crate) fn under_way(&self) -> Vec<usize> {
        self.lock().under_way.clone()
    }

    /// How often the engine has polled for the end of a transfer.
    pub(crate) fn asked(&self) -> usize {
        self.lock().asked
    }

    /// Number of transfers started.
    pub(crate) fn begun(&self) -> usize {
        self.lock().begun
    }

    /// Fails if the engine violated the contract.
    pub(crate) fn check(&self) {
        assert_eq!(self.lock().broken, None);
    }
}

/// What a transfer will have changed when it ends, and how many polls it still takes.
struct Pending {
    comes: Option<(SharedState, u64)>,
    left: u64,
}

pub(crate) struct Slow<M> {
    model: M,
    moves: Arc<Moves>,
    pending: HashMap<usize, Pending>,
}

impl<M: LanguageModel> Slow<M> {
    pub(crate) fn new(model: M) -> (Self, Arc<Moves>) {
        let moves = Arc::<Moves>::default();
        (Self { model, moves: Arc::clone(&moves), pending: HashMap::new() }, moves)
    }

    /// Records a use of a slot during its transfer.
    fn named(&self, what: &str, slots: &[usize]) {
        if let Some(slot) = slots.iter().find(|slot| self.pending.contains_key(slot)) {
            let words = format!("{what} of slot {slot}, which is moving");
            self.moves.lock().broken = Some(words.clone());
            panic!("{words}");
        }
    }

    fn begin(&mut self, slot: usize, comes: Option<(SharedState, u64)>) -> Transfer {
        self.named("a move", &[slot]);
        let left = self.moves.turns();
        let mut state = self.moves.lock();
        state.under_way.push(slot);
        state.begun += 1;
        self.pending.insert(slot, Pending { comes, left });
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
        self.named("a reset", &[slot]);
        self.model.reset(slot)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        self.named("an export", &[slot]);
        self.model.export(slot)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        self.named("an import", &[slot]);
        self.model.import(slot, state, tokens)
    }

    fn start_export(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        Ok(self.begin(slot, None))
    }

    fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer, ModelError> {
        Ok(self.begin(slot, Some((state, tokens))))
    }

    fn poll_transfer(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        let mut state = self.moves.lock();
        state.asked += 1;
        let Some(pending) = self.pending.get_mut(&slot) else {
            state.broken = Some(format!("slot {slot} is not moving"));
            return Err(ModelError::other("no move"));
        };
        if pending.left > 0 {
            pending.left -= 1;
            return Ok(Transfer::Pending);
        }
        match state.may_end.iter().position(|other| *other == slot) {
            Some(at) => _ = state.may_end.remove(at),
            None if state.held => return Ok(Transfer::Pending),
            None => {}
        }
        state.under_way.retain(|other| *other != slot);
        let fails = state.fails;
        drop(state);
        let pending = self.pending.remove(&slot);
        if fails || self.model.is_lost() {
            return Err(ModelError::other("scripted failure of a move"));
        }
        match pending.and_then(|pending| pending.comes) {
            Some((state, tokens)) => {
                self.model.import(slot, (*state).as_ref(), tokens).map(|()| Transfer::Done(Vec::new()))
            }
            None => self.model.export(slot).map(Transfer::Done),
        }
    }

    fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.moves.lock().wake = Some(wake);
    }

    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.named("reading", &[slot]);
        self.model.absorb(ids, slot)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        self.named("a step", slots);
        self.model.decode(ids, slots, logits)
    }
}
