//! Draft models: which tokens they propose, that no text depends on these tokens, and that a failing draft model harms
//! no request.

use std::sync::{Arc, Mutex};

use tidegate_model::{
    Decoder, LanguageModel, ModelError, ModelRunner, SamplingParams, WeightType, checkpoint as checkpoints,
};
use tidegate_server::engine::{DRAFT_SLOTS, DraftModel, Drafters, EngineHandle, Request, RequestParameters};

use super::drafts::{engine, outcome, plain};
use crate::common::checkpoint;
use crate::common::fake::Fake;
use crate::common::runs::{Run, collect, shipped};

pub(crate) fn by_model(model: impl LanguageModel + 'static) -> Drafters {
    let model = DraftModel::new(Box::new(model), shipped().limits.vocab_size).unwrap();
    Drafters { lookup: None, model: Some(model) }
}

fn runner(weights: WeightType, slots: usize) -> impl LanguageModel {
    let decoder = checkpoints::load_as(&checkpoint(), weights).unwrap();
    let pool = decoder.new_pool(slots).unwrap();
    ModelRunner::new(decoder, pool)
}

/// What [`Faulty`] does from now on.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    Error,
    Panic,
}

/// A model that fails on demand. It returns no logits after a chunk.
struct Faulty<M> {
    model: M,
    fault: Arc<Mutex<Fault>>,
}

impl<M: LanguageModel> LanguageModel for Faulty<M> {
    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn slots(&self) -> usize {
        self.model.slots()
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.model.reset(slot)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        self.model.export(slot)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        self.model.import(slot, state, tokens)
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.model.prefill(ids, slot)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        let fault = *self.fault.lock().unwrap();
        match fault {
            Fault::Nothing => self.model.decode(ids, slots, logits),
            Fault::Error => Err(ModelError::other("scripted")),
            Fault::Panic => panic!("scripted"),
        }
    }
}

/// Returns the shipped model with fewer bits. It often chooses the same tokens as the original.
pub(crate) fn quantised(slots: usize) -> impl LanguageModel {
    runner(WeightType::Q4_0, slots)
}

/// Returns a request for a sampled text without constraints.
fn story(seed: u64, max_tokens: usize) -> RequestParameters {
    RequestParameters {
        prompt: shipped().tokenizer.encode("Once upon a time").unwrap(),
        max_tokens,
        ignore_eos: true,
        snapshot: true,
        sampling: SamplingParams { seed, temperature: 0.8, ..SamplingParams::default() },
        ..RequestParameters::default()
    }
}

fn run(engine: &EngineHandle, parameters: RequestParameters) -> Run {
    collect(engine.submit(Request::new(parameters, &shipped().limits).unwrap()).unwrap())
}

#[test]
fn the_model_itself_proposes_every_token_of_a_sampled_text() {
    let (plain, _plain) = plain();
    let (engine, _thread) = engine(4, by_model(runner(WeightType::F32, DRAFT_SLOTS)));
    // The last text is longer than what a draft model reads anew, so the draft model must continue from its states.
    for (seed, max_tokens) in [(1, 2), (2, 40), (3, 601)] {
        let (found, want) = (run(&engine, story(seed, max_tokens)), run(&plain, story(seed, max_tokens)));
        assert_eq!(outcome(&found), outcome(&want));
        let drafts = found.finish().drafts;
        assert_eq!(drafts.accepted, drafts.drafted, "seed {seed}");
        // The prompt gives the first token, and each step gives one more than its draft tokens.
        assert!(drafts.accepted + 4 >= (max_tokens - 1) * 4 / 5, "{drafts:?} of {max_tokens}");
    }
}

#[test]
fn a_model_that_is_always_wrong_changes_nothing() {
    let (plain, _plain) = plain();
    let config = checkpoints::load_as(&checkpoint(), WeightType::F32).unwrap().config().clone();
    let random = Decoder::random(config, WeightType::F32, 1).unwrap();
    let pool = random.new_pool(DRAFT_SLOTS).unwrap();
    let (engine, _thread) = engine(3, by_model(ModelRunner::new(random, pool)));
    let (found, want) = (run(&engine, story(4, 60)), run(&plain, story(4, 60)));
    assert_eq!(outcome(&found), outcome(&want));
    let drafts = found.finish().drafts;
    assert!(drafts.drafted > 20 && drafts.accepted < 5, "{drafts:?}");
}

#[test]
fn a_text_with_tokens_that_the_draft_model_does_not_have_gets_none_and_others_go_on() {
    let (plain, _plain) = plain();
    let (engine, _thread) = engine(3, by_model(Fake::new(DRAFT_SLOTS)));
    let unknown = |prompt: &[u32]| RequestParameters { prompt: prompt.to_vec(), ..story(7, 1 + 255) };
    // The fake draft model has only 256 tokens.
    let found = run(&engine, unknown(&[4000]));
    assert_eq!(outcome(&found), outcome(&run(&plain, unknown(&[4000]))));
    assert_eq!(found.finish().drafts.drafted, 0);
    let short = RequestParameters { max_tokens: 2, prompt: vec![5, 6], ..story(8, 2) };
    run(&engine, short);
    assert_eq!(engine.stats().failed, 0);
}

#[test]
fn many_texts_share_a_draft_model() {
    let (plain, _plain) = plain();
    let (engine, _thread) = engine(4, by_model(quantised(DRAFT_SLOTS)));
    let request = |seed| Request::new(story(seed, 30 + 7 * seed as usize), &shipped().limits).unwrap();
    // In total, there are more texts than the draft model has states.
    for seeds in [0..8, 8..11, 11..19] {
        let runs: Vec<Run> =
            engine.submit_all(seeds.clone().map(request).collect()).unwrap().into_iter().map(collect).collect();
        for (seed, found) in seeds.zip(&runs) {
            let want = collect(plain.submit(request(seed)).unwrap());
            assert_eq!(outcome(found), outcome(&want), "seed {seed}");
        }
    }
    let stats = engine.stats();
    assert!(stats.accepted_drafts * 2 > stats.drafted_tokens, "{stats:?}");
}

#[test]
fn a_draft_model_that_fails_is_not_asked_again() {
    let (plain, _plain) = plain();
    for kind in [Fault::Nothing, Fault::Error, Fault::Panic] {
        let fault = Arc::new(Mutex::new(Fault::Nothing));
        let model = Faulty { model: runner(WeightType::F32, DRAFT_SLOTS), fault: Arc::clone(&fault) };
        let (engine, _thread) = engine(3, by_model(model));
        *fault.lock().unwrap() = kind;
        for seed in [5, 6] {
            let (found, want) = (run(&engine, story(seed, 50)), run(&plain, story(seed, 50)));
            assert_eq!(outcome(&found), outcome(&want));
            assert_eq!(found.finish().drafts.drafted > 0, kind == Fault::Nothing);
            // From now on, the draft model would answer if it were asked.
            *fault.lock().unwrap() = Fault::Nothing;
        }
    }
}

#[test]
fn a_draft_model_has_a_slot_for_each_text_of_a_step() {
    let error = DraftModel::new(Box::new(Fake::new(DRAFT_SLOTS - 1)), 256).err().unwrap().to_string();
    assert!(error.contains("needs 8 slots, it has 7"), "{error}");
}
