//! A scripted encoder-decoder. Each token depends on the whole source and on all of the text so far. The state has the
//! shape that snapshot files require.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_model::{LanguageModel, ModelError, StateLayout};
use tidegate_server::Served;
use tidegate_server::engine::{EngineHandle, EngineOptions, Limits, Sources, TextRules, spawn};
use tidegate_server::session::Codec;
use tidegate_server::text::Tokenizer;

use super::{checkpoint, codec, served};

const VOCABULARY: usize = 4096;
/// Number of tokens of the longest source.
pub(crate) const LONGEST: usize = 2000;
/// A token that makes a source fail to encode.
pub(crate) const BROKEN: u32 = 4000;
/// The first token of every text.
pub(crate) const FIRST: u32 = 7;

pub(crate) const LIMITS: Limits = Limits {
    vocab_size: VOCABULARY,
    max_prompt_tokens: 10_000,
    max_tokens: 100_000,
    sources: Some(Sources { longest: LONGEST, start: FIRST }),
};

/// A call to the model, with a number of tokens or rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Encodes a source of this many tokens.
    Source(usize),
    /// Reads this many tokens of a text.
    Text(usize),
    /// Decodes one token in each of this many rows.
    Step(usize),
}

/// A digest and the length of the text, and the same of the source; all are small enough to be exact as `f32`.
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

    fn numbers(self) -> Vec<f32> {
        [self.text, self.read, self.source, self.tokens].map(|number| number as f32).to_vec()
    }

    fn next(&self) -> u32 {
        300 + (self.source * 7 + self.text * 13 + self.read) % 3000
    }
}

/// Returns the model's output for a source.
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

/// Returns the numbers of the state after a source and these tokens of a text.
pub(crate) fn state_after(source: &[u32], text: &[u32]) -> Vec<f32> {
    let mut state = State::of(source);
    for id in text {
        state.read(*id);
    }
    state.numbers()
}

pub(crate) struct Translator {
    states: Vec<State>,
    calls: Arc<Mutex<Vec<Call>>>,
    step: Duration,
    source: Duration,
}

impl Translator {
    pub(crate) fn new(slots: usize, step: Duration) -> Self {
        Self { states: vec![State::default(); slots], calls: Arc::default(), step, source: Duration::ZERO }
    }

    /// Makes the encoding of each source take this long.
    pub(crate) fn source(self, source: Duration) -> Self {
        Self { source, ..self }
    }

    fn text(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        if self.states[slot].tokens == 0 {
            return Err(ModelError::other("the slot has no source"));
        }
        if self.states[slot].read == 0 && ids.first() != Some(&FIRST) {
            return Err(ModelError::other("a text must begin with FIRST"));
        }
        for id in ids {
            self.states[slot].read(*id);
        }
        Ok(())
    }

    fn record(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl LanguageModel for Translator {
    fn vocab_size(&self) -> usize {
        VOCABULARY
    }

    fn slots(&self) -> usize {
        self.states.len()
    }

    fn source_start(&self) -> Option<u32> {
        Some(FIRST)
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.states[slot] = State::default();
        Ok(())
    }

    fn read_source(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        if ids.contains(&BROKEN) || ids.is_empty() || ids.len() > LONGEST {
            return Err(ModelError::other("the source is broken or of the wrong length"));
        }
        std::thread::sleep(self.source);
        self.record(Call::Source(ids.len()));
        self.states[slot] = State::of(ids);
        Ok(())
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        if self.states[slot].tokens == 0 {
            return Err(ModelError::other("the slot has no source"));
        }
        Ok(self.states[slot].numbers())
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        let [text, read, source, of_source] = [0, 1, 2, 3].map(|at| state[at] as u32);
        if tokens != u64::from(read + of_source) {
            return Err(ModelError::other("tokens differs from the number that the state has read"));
        }
        self.states[slot] = State { text, read, source, tokens: of_source };
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.record(Call::Text(ids.len()));
        self.text(ids, slot)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        std::thread::sleep(self.step);
        self.record(Call::Step(slots.len()));
        logits.clear();
        for (id, slot) in ids.iter().zip(slots) {
            self.text(&[*id], *slot)?;
            let next = self.states[*slot].next();
            logits.extend((0..VOCABULARY as u32).map(|token| f32::from(u8::from(token == next))));
        }
        Ok(())
    }
}

/// Starts an engine with this model; also returns the calls to the model since warm-up.
pub(crate) fn start(model: Translator) -> (EngineHandle, Arc<Mutex<Vec<Call>>>) {
    start_with(model, EngineOptions::default())
}

/// Like [`start`], with options.
pub(crate) fn start_with(model: Translator, options: EngineOptions) -> (EngineHandle, Arc<Mutex<Vec<Call>>>) {
    let calls = Arc::clone(&model.calls);
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint(), VOCABULARY, &[]).unwrap());
    let rules = TextRules {
        vocabulary: Arc::clone(tokenizer.vocabulary()),
        eos: Arc::clone(tokenizer.eos()),
        encode: Arc::new(move |text| tokenizer.encode_more(text).unwrap()),
    };
    let (engine, _thread) = spawn(model, rules, options).unwrap();
    assert_eq!(std::mem::take(&mut *calls.lock().unwrap()), [Call::Source(1), Call::Text(1), Call::Step(1)]);
    (engine, calls)
}

/// Returns the codec for this model's snapshots.
pub(crate) fn files() -> Codec {
    let layout = StateLayout { layers: 1, heads: 1, head: 2, taps: 0, channels: 0, cross: 1 };
    Codec { layout, vocab_size: VOCABULARY, sources: LONGEST, ..codec() }
}

/// Starts an engine with this model as a server would serve it; also returns the calls to the model.
pub(crate) fn serving(model: Translator) -> (Served, Arc<Mutex<Vec<Call>>>) {
    let (engine, calls) = start(model);
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint(), VOCABULARY, &[]).unwrap());
    (Served { limits: LIMITS, tokenizer, codec: Arc::new(files()), ..served(engine) }, calls)
}
