//! A scripted model that continues token `n` with `n + 1`. It counts its calls, can be slow, and panics on demand.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_model::{LanguageModel, ModelError};
use tidegate_server::engine::TextRules;
use tidegate_server::text::Vocabulary;

/// A prompt token on which the model panics.
pub(crate) const POISON: u32 = 250;
/// A token for which a step returns no logits if the token before it is 1.
pub(crate) const SHORT: u32 = 251;
/// A token after which only token 7 has a finite logit, if the token before it is 1.
pub(crate) const ONLY_SEVEN: u32 = 249;
/// A token for which a step returns NaN logits if the token before it is 1.
pub(crate) const NAN: u32 = 252;

/// Counts of a [`Fake`]'s calls, and switches that tests set.
#[derive(Default)]
pub(crate) struct Calls {
    pub(crate) steps: AtomicUsize,
    pub(crate) widest: AtomicUsize,
    pub(crate) chunks: Mutex<Vec<usize>>,
    pub(crate) panic_next_step: AtomicBool,
    /// Whether the model's device is lost, so that every step fails.
    pub(crate) lost: AtomicBool,
    /// Called in the middle of each step.
    pub(crate) during_step: Mutex<Option<Box<dyn Fn() + Send>>>,
}

pub(crate) struct Fake {
    /// The last token of each slot, or `None` for an empty slot.
    states: Vec<Option<u32>>,
    calls: Arc<Calls>,
    step: Duration,
    scores_chunks: bool,
}

/// Returns text rules in which token `n` is byte `n`, and token 255 ends a text.
pub(crate) fn rules() -> TextRules {
    let tokens = (0..=u8::MAX).map(|byte| [byte].as_slice().into()).collect();
    let encode = Arc::new(|text: &str| text.bytes().map(u32::from).collect());
    TextRules { vocabulary: Arc::new(Vocabulary::new(tokens)), eos: Arc::from([255]), encode }
}

impl Fake {
    pub(crate) fn new(slots: usize) -> Self {
        Self { states: vec![None; slots], calls: Arc::default(), step: Duration::ZERO, scores_chunks: false }
    }

    /// Makes prefill return logits after each chunk.
    pub(crate) fn scores_chunks(mut self) -> Self {
        self.scores_chunks = true;
        self
    }

    pub(crate) fn step(mut self, step: Duration) -> Self {
        self.step = step;
        self
    }

    pub(crate) fn calls(&self) -> Arc<Calls> {
        Arc::clone(&self.calls)
    }

    fn logits(after: u32) -> impl Iterator<Item = f32> {
        (0..256).map(move |token| f32::from(u8::from(token == (after + 1) % 256)))
    }
}

impl LanguageModel for Fake {
    fn vocab_size(&self) -> usize {
        256
    }

    fn slots(&self) -> usize {
        self.states.len()
    }

    fn is_lost(&self) -> bool {
        self.calls.lost.load(SeqCst)
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.states[slot] = None;
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        assert!(!ids.contains(&POISON), "scripted panic");
        self.calls.chunks.lock().unwrap().push(ids.len());
        self.states[slot] = ids.last().copied();
        Ok(())
    }

    fn scores_chunks(&self) -> bool {
        self.scores_chunks
    }

    fn prefill_logits(&mut self, ids: &[u32], slot: usize, logits: &mut Vec<f32>) -> Result<(), ModelError> {
        assert!(!ids.contains(&POISON), "scripted panic");
        self.calls.chunks.lock().unwrap().push(ids.len());
        let (last, before) = ids.split_last().unwrap();
        self.states[slot] = before.last().copied().or(self.states[slot]);
        logits.clear();
        self.answer(&[*last], &[slot], logits)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        Ok(vec![self.states[slot].map_or(-1.0, |token| token as f32)])
    }

    fn import(&mut self, slot: usize, state: &[f32], _: u64) -> Result<(), ModelError> {
        self.states[slot] = (state[0] >= 0.0).then_some(state[0] as u32);
        Ok(())
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        logits.clear();
        std::thread::sleep(self.step);
        self.answer(ids, slots, logits)?;
        self.calls.steps.fetch_add(1, SeqCst);
        self.calls.widest.fetch_max(slots.len(), SeqCst);
        Ok(())
    }
}

impl Fake {
    /// Reads one token into each slot, and appends the logits that follow.
    fn answer(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        assert!(!self.calls.panic_next_step.swap(false, SeqCst), "scripted panic");
        if self.is_lost() {
            return Err(ModelError::other("scripted loss"));
        }
        if let Some(during_step) = &*self.calls.during_step.lock().unwrap() {
            during_step();
        }
        // Every long text counts up to these tokens, but only special prompts put a 1 before them.
        let scripted = |id: u32, slot: usize, token: u32| id == token && self.states[slot] == Some(1);
        if ids.iter().zip(slots).any(|(id, slot)| scripted(*id, *slot, SHORT)) {
            return Ok(());
        }
        let row = |(id, slot): (&u32, &usize)| -> Vec<f32> {
            if scripted(*id, *slot, NAN) {
                vec![f32::NAN; 256]
            } else if scripted(*id, *slot, ONLY_SEVEN) {
                (0..256).map(|token| if token == 7 { 0.0 } else { f32::NEG_INFINITY }).collect()
            } else {
                Self::logits(*id).collect()
            }
        };
        logits.extend(ids.iter().zip(slots).flat_map(row));
        for (id, slot) in ids.iter().zip(slots) {
            self.states[*slot] = Some(*id);
        }
        Ok(())
    }
}
