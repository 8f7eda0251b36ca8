//! A model that generates the same fixed text after every prompt, and a server for it with the shipped tokenizer. What
//! its chat template wrote is visible only in the number of prompt tokens.

use std::path::Path;
use std::sync::Arc;

use tidegate_model::{LanguageModel, ModelError};
use tidegate_server::engine::{EngineOptions, Limits, TextRules, spawn};
use tidegate_server::text::{ChatTemplate, Encode, Grammars, Tokenizer};
use tidegate_server::{ApiOptions, AppState, Served};

use super::{checkpoint, served};

/// The fixed text, and how many of its tokens each slot has generated.
struct Parrot {
    text: Vec<u32>,
    generated: Vec<usize>,
}

const VOCABULARY: usize = 4096;

impl LanguageModel for Parrot {
    fn vocab_size(&self) -> usize {
        VOCABULARY
    }

    fn slots(&self) -> usize {
        self.generated.len()
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.generated[slot] = 0;
        Ok(())
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        Ok(vec![self.generated[slot] as f32])
    }

    fn import(&mut self, slot: usize, state: &[f32], _: u64) -> Result<(), ModelError> {
        self.generated[slot] = state[0] as usize;
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        // Once a slot has generated something, this chunk is not a prompt but answer tokens that a grammar forced.
        if self.generated[slot] > 0 {
            self.generated[slot] += ids.len();
        }
        Ok(())
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        logits.clear();
        logits.resize(ids.len() * VOCABULARY, 0.0);
        for (row, slot) in slots.iter().enumerate() {
            let next = self.text.get(self.generated[*slot]).copied().unwrap_or(0);
            logits[row * VOCABULARY + next as usize] = 1.0;
            self.generated[*slot] += 1;
        }
        Ok(())
    }
}

/// Starts a server whose model generates `text` and then stops, with the chat template `template`.
pub(crate) fn parrot(text: &str, template: &str, folder: &Path) -> AppState {
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint(), VOCABULARY, &[]).unwrap());
    let encode: Encode = {
        let tokenizer = Arc::clone(&tokenizer);
        Arc::new(move |text| tokenizer.encode_more(text).unwrap())
    };
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    let model = Parrot { text: tokenizer.encode_more(text).unwrap(), generated: vec![0; 4] };
    let rules = TextRules {
        vocabulary: Arc::clone(tokenizer.vocabulary()),
        eos: Arc::clone(tokenizer.eos()),
        encode: Arc::clone(&encode),
    };
    let (engine, _thread) = spawn(model, rules, EngineOptions::default()).unwrap();
    let state = AppState::new(ApiOptions::default());
    state.serve(Served {
        limits: Limits { vocab_size: VOCABULARY, max_prompt_tokens: 10_000, max_tokens: 10_000, sources: None },
        grammars: Arc::new(Grammars::new(tokenizer.vocabulary(), tokenizer.eos(), &encode).unwrap()),
        template: ChatTemplate::load(folder).unwrap().map(Arc::new),
        tokenizer,
        ..served(engine)
    });
    state
}
