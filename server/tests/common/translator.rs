//! A scripted encoder-decoder: each token it says depends on its whole source and on all of the text so far, and its state
//! is of the shape that session files have.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_model::{SamplingParams, StateLayout};
use tidegate_server::Served;
use tidegate_server::engine::{
    EngineHandle, EngineOptions, LanguageModel, Limits, ModelError, RequestParameters, TextRules, spawn,
};
use tidegate_server::session::Codec;
use tidegate_server::text::Tokenizer;

use super::{checkpoint, codec, served};

const VOCABULARY: usize = 4096;
/// Tokens of the longest source.
pub(crate) const LONGEST: usize = 2000;
/// A token that no source can be encoded with.
pub(crate) const BROKEN: u32 = 4000;
/// The token that every text begins with.
pub(crate) const FIRST: u32 = 0;

pub(crate) const LIMITS: Limits =
    Limits { vocab_size: VOCABULARY, max_prompt_tokens: LONGEST, max_tokens: 100_000, source_start: Some(FIRST) };

/// What a model was asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Did {
    /// A source of so many tokens.
    Source(usize),
    /// So many tokens of a text.
    Text(usize),
    /// A step of so many rows.
    Step(usize),
}

/// Digests of what was read, small enough to be exact as f32, and how much that was.
#[derive(Clone, Copy, Default)]
struct State {
    text: u32,
    read: u32,
    source: u32,
    tokens: u32,
}

fn mixed(digest: u32, id: u32) -> u32 {
    (digest * 31 + id + 1) % 65_521
}

impl State {
    fn of(source: &[u32]) -> Self {
        let digest = source.iter().fold(7, |digest, id| mixed(digest, *id));
        Self { source: digest, tokens: source.len() as u32, ..Self::default() }
    }

    fn read(&mut self, id: u32) {
        (self.text, self.read) = (mixed(self.text, id), self.read + 1);
    }

    fn next(&self) -> u32 {
        300 + (self.source * 7 + self.text * 13 + self.read) % 3000
    }
}

/// What the model says to a source.
pub(crate) fn translation(source: &[u32], tokens: usize) -> Vec<u32> {
    let mut state = State::of(source);
    state.read(FIRST);
    let mut next = || {
        let token = state.next();
        state.read(token);
        token
    };
    (0..tokens).map(|_| next()).collect()
}

pub(crate) struct Translator {
    states: Vec<State>,
    did: Arc<Mutex<Vec<Did>>>,
    step: Duration,
}

impl Translator {
    pub(crate) fn new(slots: usize, step: Duration) -> Self {
        Self { states: vec![State::default(); slots], did: Arc::default(), step }
    }

    fn text(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        if self.states[slot].tokens == 0 {
            return Err(ModelError::new("the slot has no source"));
        }
        ids.iter().for_each(|id| self.states[slot].read(*id));
        Ok(())
    }

    fn did(&self, what: Did) {
        self.did.lock().unwrap().push(what);
    }
}

impl LanguageModel for Translator {
    fn vocab_size(&self) -> usize {
        VOCABULARY
    }

    fn slots(&self) -> usize {
        self.states.len()
    }

    fn reads_sources(&self) -> bool {
        true
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.states[slot] = State::default();
        Ok(())
    }

    fn read_source(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        if ids.contains(&BROKEN) || ids.is_empty() || ids.len() > LONGEST {
            return Err(ModelError::new("no source"));
        }
        self.did(Did::Source(ids.len()));
        self.states[slot] = State::of(ids);
        Ok(())
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        let State { text, read, source, tokens } = self.states[slot];
        if tokens == 0 {
            return Err(ModelError::new("the slot has no source"));
        }
        Ok([text, read, source, tokens].map(|number| number as f32).to_vec())
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        let [text, read, source, of_source] = [0, 1, 2, 3].map(|at| state[at] as u32);
        if tokens != u64::from(read + of_source) {
            return Err(ModelError::new("another number of tokens than the state has read"));
        }
        self.states[slot] = State { text, read, source, tokens: of_source };
        Ok(())
    }

    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.did(Did::Text(ids.len()));
        self.text(ids, slot)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        std::thread::sleep(self.step);
        self.did(Did::Step(slots.len()));
        logits.clear();
        for (id, slot) in ids.iter().zip(slots) {
            self.text(&[*id], *slot)?;
            let next = self.states[*slot].next();
            logits.extend((0..VOCABULARY as u32).map(|token| f32::from(u8::from(token == next))));
        }
        Ok(())
    }
}

/// An engine around it, and what its model was asked to do since it was warm.
pub(crate) fn start(model: Translator) -> (EngineHandle, Arc<Mutex<Vec<Did>>>) {
    let did = Arc::clone(&model.did);
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint(), VOCABULARY, &[]).unwrap());
    let rules = TextRules {
        vocabulary: Arc::clone(tokenizer.vocabulary()),
        eos: Arc::clone(tokenizer.eos()),
        encode: Arc::new(move |text| tokenizer.encode_more(text).unwrap()),
    };
    let (engine, _thread) = spawn(model, rules, EngineOptions::default()).unwrap();
    assert_eq!(std::mem::take(&mut *did.lock().unwrap()), [Did::Source(1), Did::Text(1), Did::Step(1)]);
    (engine, did)
}

/// Files of its sessions.
pub(crate) fn files() -> Codec {
    let layout = StateLayout { layers: 1, heads: 1, head: 2, taps: 0, channels: 0, cross: 1 };
    Codec { layout, vocab_size: VOCABULARY, sources: LONGEST, ..codec() }
}

/// Its server.
pub(crate) fn serving(model: Translator) -> (Served, Arc<Mutex<Vec<Did>>>) {
    let (engine, did) = start(model);
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint(), VOCABULARY, &[]).unwrap());
    (Served { limits: LIMITS, tokenizer, codec: Arc::new(files()), ..served(engine) }, did)
}

/// Its likeliest tokens, that is all there are.
pub(crate) fn asked(source: &[u32], max_tokens: usize) -> RequestParameters {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    RequestParameters { prompt: source.into(), max_tokens, sampling, ..RequestParameters::default() }
}
