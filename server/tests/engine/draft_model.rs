//! Draft models: what they propose, that a text does not depend on it, and that one which fails harms nobody.

use std::sync::atomic::Ordering::SeqCst;

use tidegate_model::{LanguageModel, ModelRunner, SamplingParams, WeightType, checkpoint as checkpoints};
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

/// The shipped model with fewer bits: it often chooses the same tokens.
pub(crate) fn quantised(slots: usize) -> impl LanguageModel {
    runner(WeightType::Q4_0, slots)
}

/// A text that the model writes freely.
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
    // Longer than what a draft model reads of a text at once, so that drafts are read on from its states.
    for (seed, max_tokens) in [(1, 2), (2, 40), (3, 601)] {
        let (found, want) = (run(&engine, story(seed, max_tokens)), run(&plain, story(seed, max_tokens)));
        assert_eq!(outcome(&found), outcome(&want));
        let drafts = found.finish().drafts;
        assert_eq!(drafts.accepted, drafts.drafted, "seed {seed}");
        // The prompt gives the first token, and each step one besides its drafts.
        assert!(drafts.accepted + 4 >= (max_tokens - 1) * 4 / 5, "{drafts:?} of {max_tokens}");
    }
}

#[test]
fn a_model_that_is_always_wrong_changes_nothing() {
    let (plain, _plain) = plain();
    let (engine, _thread) = engine(3, by_model(Fake::new(DRAFT_SLOTS)));
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
    // The fake has 256 tokens.
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
    // More texts one after the other than it has states.
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
    for panics in [true, false] {
        let fake = Fake::new(DRAFT_SLOTS);
        let calls = fake.calls();
        let (engine, _thread) = engine(3, by_model(fake));
        if panics {
            calls.panic_next_step.store(true, SeqCst);
        } else {
            calls.lost.store(true, SeqCst);
        }
        for seed in [5, 6] {
            let (found, want) = (run(&engine, story(seed, 50)), run(&plain, story(seed, 50)));
            assert_eq!(outcome(&found), outcome(&want));
            assert_eq!(found.finish().drafts.drafted, 0);
            // It would answer now.
            calls.lost.store(false, SeqCst);
        }
    }
}

#[test]
fn a_draft_model_has_a_slot_for_each_text_of_a_step() {
    let error = DraftModel::new(Box::new(Fake::new(DRAFT_SLOTS - 1)), 256).err().unwrap().to_string();
    assert!(error.contains("needs 8 slots, it has 7"), "{error}");
}
