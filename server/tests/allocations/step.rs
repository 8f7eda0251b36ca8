//! Checks that a decode step allocates only the text and the token ids of each row's event, which another thread reads.

use std::alloc::System;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use stats_alloc::{Region, Stats};
use tidegate_model::sampling::TokenSet;
use tidegate_model::{LanguageModel, ModelError, SamplingParams, Threads};
use tidegate_server::engine::{
    Constraint, ConstraintError, EngineOptions, Event, Grammar, Limits, Request, RequestParameters, TextRules, spawn,
};
use tidegate_server::text::Vocabulary;

use super::{ALLOCATOR, alone};

const VOCAB: usize = 32_000;
/// Steps before counting starts, and steps that are counted.
const WARM: usize = 20;
const COUNTED: usize = 300;
/// Long enough that the list of a text's tokens, which doubles its size, does not grow during the count.
const PROMPT: usize = 400;

/// Allocations of one row's event: its text and its token ids.
const EVENT: usize = 2;
/// Number of messages in one block of a channel, or of the queue of the pool that computes masks. A block is allocated
/// if no earlier one can be used again.
const BLOCK: usize = 32;
/// Maximum number of allocations for a thread's sampling buffers: their number times how often each grows before it is
/// large enough.
const BUFFERS: usize = 9 * 12;

/// A model with random output. It allocates nothing, and records at the start of each step what has been allocated.
struct Noise {
    numbers: Vec<f32>,
    steps: usize,
    region: Region<'static, System>,
    notes: Arc<Mutex<Vec<(usize, Stats)>>>,
    counted: Sender<()>,
}

fn noise() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..2 * VOCAB).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 4.0).collect()
}

impl LanguageModel for Noise {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn slots(&self) -> usize {
        16
    }

    fn reset(&mut self, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn export(&self, _: usize) -> Result<Vec<f32>, ModelError> {
        Ok(Vec::new())
    }

    fn import(&mut self, _: usize, _: &[f32], _: u64) -> Result<(), ModelError> {
        Ok(())
    }

    fn prefill(&mut self, _: &[u32], _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        let mut notes = self.notes.lock().unwrap();
        if notes.len() < notes.capacity() {
            notes.push((slots.len(), self.region.change()));
        } else {
            // Counting is over. Later steps say so again, until the engine stops.
            let _ = self.counted.send(());
        }
        self.steps += 1;
        logits.clear();
        for (id, slot) in ids.iter().zip(slots) {
            let from = (*id as usize * 7 + slot * 131 + self.steps * 17) % VOCAB;
            logits.extend_from_slice(&self.numbers[from..from + VOCAB]);
        }
        Ok(())
    }
}

/// A grammar that allows every other word and allocates nothing per token.
#[derive(Clone, Copy, Debug)]
struct Even;

impl Grammar for Even {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(*self)
    }
}

impl Constraint for Even {
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError> {
        allowed.copy_from(&[0x5555_5555; VOCAB / 32]);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

/// Allocations of [`COUNTED`] steps with `rows` rows and these parameters.
fn allocations(rows: usize, parameters: &RequestParameters) -> usize {
    // The first rows may start to decode before the last prompt has been read, so there are up to `rows` more steps.
    let notes = Arc::new(Mutex::new(Vec::with_capacity(1 + rows + WARM + COUNTED + 1)));
    let (counted, is_counted): (Sender<()>, Receiver<()>) = channel();
    let region = Region::new(ALLOCATOR);
    let model = Noise { numbers: noise(), steps: 0, region, notes: Arc::clone(&notes), counted };
    let vocabulary = (0..VOCAB).map(|_| b"word ".as_slice().into()).collect();
    let encode = Arc::new(|_: &str| Vec::new());
    let rules = TextRules { vocabulary: Arc::new(Vocabulary::new(vocabulary)), eos: Arc::from([]), encode };
    let (engine, thread) = spawn(model, rules, EngineOptions::default()).unwrap();
    let limits = Limits { vocab_size: VOCAB, max_prompt_tokens: PROMPT, max_tokens: 100_000, sources: None };
    let request = |seed| {
        let mut parameters = parameters.clone();
        parameters.sampling.seed = seed;
        Request::new(parameters, &limits).unwrap()
    };
    let mut streams = engine.submit_all((0..rows as u64).map(request).collect()).unwrap();
    // Reads the events at once, without allocating.
    while is_counted.try_recv().is_err() {
        for stream in &mut streams {
            assert!(matches!(stream.blocking_next(), Some(Event::Delta(_))));
        }
    }
    drop(streams);
    engine.abort();
    thread.join();
    let notes = notes.lock().unwrap();
    let (from, to) = (notes[notes.len() - 1 - COUNTED], notes[notes.len() - 1]);
    assert_eq!((from.0, to.0), (rows, rows));
    let count = |stats: Stats| stats.allocations + stats.reallocations;
    count(to.1) - count(from.1)
}

#[test]
fn a_step_allocates_only_its_events() {
    let _alone = alone();
    // With only one thread besides the engine's, the tolerance for buffers is less than one allocation per step.
    assert!(Threads::configure(2));
    let of = |sampling| RequestParameters {
        prompt: (0..PROMPT as u32).map(|id| id * 101 % VOCAB as u32).collect(),
        max_tokens: 100_000,
        // Text is held back again and again, because each "word " may begin this stop string.
        stop: vec!["word word.".into()],
        sampling,
        ..RequestParameters::default()
    };
    let plain = SamplingParams::default();
    let penalties = SamplingParams {
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        logit_bias: vec![(7, 1.0)],
        ..plain.clone()
    };
    let cases = [
        ("greedy", of(SamplingParams { temperature: 0.0, ..plain.clone() }), EVENT),
        ("greedy with penalties", of(SamplingParams { temperature: 0.0, ..penalties.clone() }), EVENT),
        ("plain", of(plain.clone()), EVENT),
        ("top-k", of(SamplingParams { top_k: 40, ..penalties.clone() }), EVENT),
        ("top-p and min-p", of(SamplingParams { top_p: 0.95, min_p: 0.001, ..penalties }), EVENT),
        ("typical", of(SamplingParams { typical_p: 0.9, ..plain.clone() }), EVENT),
        // One more allocation notifies the thread that computes the mask.
        ("a grammar", RequestParameters { grammar: Some(Arc::new(Even)), ..of(plain.clone()) }, EVENT + 1),
        // Three more: the event's list of scores, its list of the likeliest tokens, and the buffer for both.
        ("log probabilities", RequestParameters { logprobs: Some(5), ..of(plain) }, EVENT + 3),
    ];
    for (case, parameters, per_row) in cases {
        for rows in [1, 16] {
            let found = allocations(rows, &parameters);
            let events = per_row * rows * COUNTED + (rows + 1) * COUNTED.div_ceil(BLOCK);
            // Each thread allocates its buffers when it first samples. The engine's own thread samples a single row.
            let threads = if rows > 1 { BUFFERS } else { 0 };
            println!("{case}, {rows} rows: {found} allocations in {COUNTED} steps, {events} for events");
            assert!(found <= events + threads, "{case}, {rows} rows: {found} allocations, {events} for events");
        }
    }
}
