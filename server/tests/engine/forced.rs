//! Tokens that a grammar forces take no decode step. The text, the random numbers and the final state are the same as
//! if each token were sampled, which is what a request with log probabilities does.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tidegate_model::SamplingParams;
use tidegate_server::engine::{FinishReason, Request, RequestParameters, Start, StopCause};
use tidegate_server::session::Snapshot;
use tidegate_server::text::{Call, Calls, GrammarSpec, Instead};

use super::grammar::{following, script};
use crate::common::fake::Fake;
use crate::common::runs::{Run, collect, greedy, run, shipped, start};

fn specs() -> Vec<GrammarSpec> {
    let order = json!({"type": "object", "required": ["customer", "inhabitants", "paid"], "additionalProperties": false,
        "properties": {"customer": {"type": "string", "maxLength": 12}, "inhabitants": {"type": "integer"},
        "paid": {"type": "boolean"}, "kind": {"const": "a constant text of some length, in which nothing is free"}}});
    let arguments = json!({"type": "object", "required": ["city"], "properties": {"city": {"enum": ["Rome", "Oslo"]}}});
    let tools = vec![Call { name: "weather_of_tomorrow".into(), arguments, strict: true }];
    vec![
        GrammarSpec::JsonSchema(order),
        GrammarSpec::JsonObject,
        GrammarSpec::Regex("[a-f]{2,6}, there is only one way to go on(!|\\?)( ?[0-9]){0,9}".into()),
        GrammarSpec::Choice(vec!["a long time ago".into(), "a long time ago there was".into(), "never".into()]),
        GrammarSpec::Calls(Calls { tools, max: 2, instead: Instead::Text }),
    ]
}

/// Draws a random request, which continues the conversation `before`, if there is one.
fn draw(rng: &mut StdRng, specs: &[GrammarSpec], before: Option<&Arc<Snapshot>>) -> RequestParameters {
    let grammar = shipped().grammars.compile(specs.choose(rng).unwrap()).unwrap();
    let texts = ["\"", "an", ", ", "}", "there is"];
    let count = rng.random_range(0..3);
    let stop = texts.choose_multiple(rng, count).map(ToString::to_string).collect();
    let max_tokens = rng.random_range(1..120);
    RequestParameters {
        start: before.map_or(Start::Session(Arc::new(Snapshot::empty(0))), |before| Start::Session(Arc::clone(before))),
        prompt: shipped().tokenizer.encode_more("Once upon a time").unwrap(),
        max_tokens,
        min_tokens: (*[0, 0, 20].choose(rng).unwrap()).min(max_tokens),
        stop: if rng.random_bool(0.5) { stop } else { Vec::new() },
        snapshot: true,
        grammar: Some(grammar),
        sampling: SamplingParams {
            seed: rng.random_range(0..1 << 40),
            temperature: *[0.0, 0.7, 1.3].choose(rng).unwrap(),
            repetition_penalty: *[1.0, 1.2].choose(rng).unwrap(),
            ..SamplingParams::default()
        },
        ..RequestParameters::default()
    }
}

/// Returns the parts of a result that must not depend on how its tokens were found.
fn outcome(run: &Run) -> (&str, &[u32], FinishReason, &Option<StopCause>, usize, &[u32], &Snapshot) {
    let finish = run.finish();
    let snapshot = finish.snapshot.as_deref().unwrap();
    let (reason, stop, tokens) = (finish.reason, &finish.stop, finish.completion_tokens);
    (&run.text, &run.ids, reason, stop, tokens, &finish.retokenized, snapshot)
}

#[test]
fn a_text_with_forced_tokens_is_the_one_that_sampling_gives() {
    let (served, specs) = (shipped(), specs());
    let request = |parameters: RequestParameters| Request::new(parameters, &served.limits).unwrap();
    let mut rng = StdRng::seed_from_u64(5);
    let (mut before, forced) = (None, served.engine.stats().forced_tokens);
    for round in 0..12 {
        let drawn: Vec<RequestParameters> = (0..6).map(|_| draw(&mut rng, &specs, before.as_ref())).collect();
        let sampled = |one: &RequestParameters| RequestParameters { logprobs: Some(0), ..one.clone() };
        let sampled: Vec<Run> =
            drawn.iter().map(|one| collect(served.engine.submit(request(sampled(one))).unwrap())).collect();
        let alone: Vec<Run> =
            drawn.iter().map(|one| collect(served.engine.submit(request(one.clone())).unwrap())).collect();
        // In a batch, a row reads one forced token per step.
        let together = served.engine.submit_all(drawn.iter().cloned().map(request).collect()).unwrap();
        for (i, (together, sampled)) in together.into_iter().map(collect).zip(&sampled).enumerate() {
            assert_eq!(outcome(&alone[i]), outcome(sampled), "round {round}, {:?}", drawn[i]);
            assert_eq!(outcome(&together), outcome(sampled), "round {round}, {:?}", drawn[i]);
        }
        before = if round % 3 == 2 { None } else { sampled[0].finish().snapshot.clone() };
    }
    assert!(served.engine.stats().forced_tokens > forced + 500);
}

/// Generates a text with forced tokens after the prompt 1; returns the number of steps, and the chunks' lengths.
fn passes(fake: Fake, logprobs: Option<usize>) -> (usize, Vec<usize>) {
    let calls = fake.calls();
    let (engine, _thread) = start(fake);
    let (steps, chunks) = (calls.steps.load(SeqCst), calls.chunks.lock().unwrap().len());
    let text = script(&[&[9], &[10], &[11], &[12], &[13, 14], &[20], &[21], &[22]]);
    let output = run(&engine, following(text, RequestParameters { logprobs, ..greedy(&[1], 9) }));
    assert_eq!(output.ids, [9, 10, 11, 12, 13, 20, 21, 22]);
    let chunks = calls.chunks.lock().unwrap().split_off(chunks);
    (calls.steps.load(SeqCst) - steps, chunks)
}

#[test]
fn forced_tokens_take_no_steps_and_are_read_in_one_chunk() {
    // Three steps: 1 gives 9, which is read in one chunk with the forced tokens 10 and 11; then 12 gives 13, and 13
    // gives 20. The rest is forced.
    assert_eq!(passes(Fake::new(1), None), (3, vec![3]));
    // The chunk also reads 12, and its logits give 13.
    assert_eq!(passes(Fake::new(1).scores_chunks(), None), (2, vec![4]));
    // If log probabilities are requested, each token needs its own step.
    assert_eq!(passes(Fake::new(1).scores_chunks(), Some(0)), (8, vec![]));
}

#[test]
fn no_more_tokens_are_taken_than_the_text_may_have() {
    let engines = [Fake::new(1), Fake::new(1).scores_chunks()].map(start);
    let text: Vec<Vec<u32>> = (0..200).map(|step| vec![2 + step]).collect();
    let counts = [1, 2, 3, 63, 64, 65, 66, 67, 130, 199, 200];
    for ((engine, _thread), max_tokens) in engines.iter().flat_map(|engine| counts.map(|count| (engine, count))) {
        let steps: Vec<&[u32]> = text.iter().map(Vec::as_slice).collect();
        let turn = RequestParameters {
            start: Start::Session(Arc::new(Snapshot::empty(0))),
            snapshot: true,
            ..greedy(&[1], max_tokens)
        };
        let output = run(engine, following(script(&steps), turn));
        assert_eq!(output.ids, (2..2 + max_tokens as u32).collect::<Vec<_>>());
        // The state has read all tokens but the last.
        let snapshot = output.finish().snapshot.clone().unwrap();
        assert_eq!((snapshot.read, &snapshot.pending), (max_tokens as u64, &vec![1 + max_tokens as u32]));
        assert_eq!(snapshot.state, [max_tokens as f32]);
    }
}
