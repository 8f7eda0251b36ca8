//! A scripted model that generates given tokens of the shipped checkpoint's vocabulary.

use std::sync::{Arc, LazyLock};

use tidegate_model::{LanguageModel, ModelError};
use tidegate_server::engine::{EngineOptions, EngineThread, Limits, TextRules, spawn};
use tidegate_server::text::Tokenizer;
use tidegate_server::{ApiOptions, AppState, Served};

use crate::common::{checkpoint, served};

/// Size of the vocabulary.
const TOKENS: usize = 4096;

/// Returns the shipped tokenizer, which is loaded once.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::load(&checkpoint(), TOKENS, &[0]).unwrap()));
    Arc::clone(&TOKENIZER)
}

/// Returns the token for one byte.
pub(crate) fn byte_token(byte: u8) -> u32 {
    static TOKENS_OF_BYTES: LazyLock<Vec<u32>> = LazyLock::new(|| {
        let tokenizer = tokenizer();
        let of = |byte: u8| (0..TOKENS as u32).find(|id| tokenizer.vocabulary().bytes(*id) == [byte]).unwrap();
        (0..=u8::MAX).map(of).collect()
    });
    TOKENS_OF_BYTES[usize::from(byte)]
}

/// Returns one token for each byte.
pub(crate) fn byte_tokens(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|byte| byte_token(*byte)).collect()
}

/// A model that, after a prompt of as many tokens as there are lines, generates the last of `lines` and ends the text.
pub(crate) struct Script {
    lines: Vec<Vec<u32>>,
    /// Number of tokens read, per slot.
    read: Vec<usize>,
}

impl Script {
    pub(crate) fn new(lines: Vec<Vec<u32>>, slots: usize) -> Self {
        Self { lines, read: vec![0; slots] }
    }
}

impl LanguageModel for Script {
    fn vocab_size(&self) -> usize {
        TOKENS
    }

    fn slots(&self) -> usize {
        self.read.len()
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.read[slot] = 0;
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.read[slot] += ids.len();
        Ok(())
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        Ok(vec![self.read[slot] as f32])
    }

    fn import(&mut self, slot: usize, state: &[f32], _: u64) -> Result<(), ModelError> {
        self.read[slot] = state[0] as usize;
        Ok(())
    }

    fn decode(&mut self, _: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        logits.clear();
        for slot in slots {
            let read = &mut self.read[*slot];
            *read += 1;
            let said = read.checked_sub(self.lines.len());
            let next = said.and_then(|said| self.lines.last()?.get(said)).copied().unwrap_or(0);
            // The other tokens are less likely, and their logits differ between positions.
            let others = |token: usize| ((token * 7919 + *read * 31) % 97) as f32 / 50.0;
            logits.extend((0..TOKENS).map(|token| if token == next as usize { 12.0 } else { others(token) }));
        }
        Ok(())
    }
}

/// Returns an application whose model follows the script `lines`.
pub(crate) fn recited(lines: Vec<Vec<u32>>) -> (AppState, EngineThread) {
    let tokenizer = tokenizer();
    let encode = Arc::new(|text: &str| text.bytes().map(byte_token).collect());
    let rules = TextRules { vocabulary: Arc::clone(tokenizer.vocabulary()), eos: Arc::clone(tokenizer.eos()), encode };
    let (engine, thread) = spawn(Script::new(lines, 4), rules, EngineOptions::default()).unwrap();
    let state = AppState::new(ApiOptions::default());
    let limits = Limits { vocab_size: TOKENS, max_prompt_tokens: 1000, max_tokens: 10_000, sources: None };
    state.serve(Served { tokenizer, limits, ..served(engine) });
    (state, thread)
}
