//! A scripted model: after token `n` comes `n + 1`; it counts its calls, is as slow as asked, and panics on demand.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_server::engine::{LanguageModel, ModelError, TextRules};
use tidegate_server::text::Vocabulary;

/// A prompt token on which the model panics.
pub(crate) const POISON: u32 = 250;
/// A prompt token on which the model answers with no logits.
pub(crate) const SHORT: u32 = 251;
/// A prompt token on which the model answers with logits that are no numbers.
pub(crate) const NAN: u32 = 252;

/// What a fake has been asked for.
#[derive(Default)]
pub(crate) struct Calls {
    pub(crate) steps: AtomicUsize,
    pub(crate) widest: AtomicUsize,
    pub(crate) chunks: Mutex<Vec<usize>>,
    pub(crate) panic_next_step: AtomicBool,
}

pub(crate) struct Fake {
    /// Per slot the last token seen, `None` when empty.
    states: Vec<Option<u32>>,
    calls: Arc<Calls>,
    step: Duration,
}

/// Token `n` is the byte `n`, and 255 ends a text.
pub(crate) fn rules() -> TextRules {
    let tokens = (0..=u8::MAX).map(|byte| [byte].as_slice().into()).collect();
    TextRules { vocabulary: Arc::new(Vocabulary::new(tokens)), eos: Arc::from([255]) }
}

impl Fake {
    pub(crate) fn new(slots: usize) -> Self {
        Self { states: vec![None; slots], calls: Arc::default(), step: Duration::ZERO }
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

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.states[slot] = None;
        Ok(())
    }

    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        assert!(!ids.contains(&POISON), "scripted panic");
        self.calls.chunks.lock().unwrap().push(ids.len());
        if self.states[slot].is_some_and(|seen| seen != ids[0]) {
            return Err(ModelError::new("the slot was not empty"));
        }
        self.states[slot] = ids.last().copied();
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<Vec<f32>, ModelError> {
        self.absorb(ids, slot)?;
        if ids.contains(&SHORT) {
            return Ok(Vec::new());
        }
        if ids.contains(&NAN) {
            return Ok(vec![f32::NAN; 256]);
        }
        Ok(Self::logits(ids[ids.len() - 1]).collect())
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize]) -> Result<Vec<f32>, ModelError> {
        std::thread::sleep(self.step);
        assert!(!self.calls.panic_next_step.swap(false, SeqCst), "scripted panic");
        self.calls.steps.fetch_add(1, SeqCst);
        self.calls.widest.fetch_max(slots.len(), SeqCst);
        for (id, slot) in ids.iter().zip(slots) {
            self.states[*slot] = Some(*id);
        }
        Ok(ids.iter().flat_map(|id| Self::logits(*id)).collect())
    }
}
