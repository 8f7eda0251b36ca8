//! Draft tokens change no bit. Whatever is proposed, the text, log probabilities, random numbers and final state equal
//! those of an engine that reads one token per step.

use std::sync::{Arc, Mutex};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tidegate_model::{Device, ModelRunner, SamplingParams, checkpoint as checkpoints};
use tidegate_server::engine::{
    Drafter, Drafters, EngineHandle, EngineOptions, EngineThread, Event, Finish, FinishReason, Grammar, PROPOSAL_KINDS,
    PassCost, PassCosts, Proposal, Request, RequestParameters, Start, StopCause, TextRules, TokenLogprobs,
    share_prompt, spawn_with,
};
use tidegate_server::session::{History, Recent, Snapshot};
use tidegate_server::text::GrammarSpec;

use super::draft_model::{by_model, quantised};
use crate::common::checkpoint;
use crate::common::runs::{Run, collect, shipped};

/// Pass costs with which draft tokens cost nothing, so the engine reads every proposed token.
const FREE: PassCosts = PassCosts { step: PassCost { base: 1.0, each: 0.0 }, chunk: PassCost { base: 1.0, each: 0.0 } };

/// Starts an engine with the shipped model and at most `draft_max` draft tokens for each row of a step.
pub(crate) fn engine(draft_max: usize, drafters: Drafters) -> (EngineHandle, EngineThread) {
    let decoder = checkpoints::load(&checkpoint(), &Device::Cpu).unwrap();
    let pool = decoder.new_pool(8).unwrap();
    let tokenizer = Arc::clone(&shipped().tokenizer);
    let (vocabulary, eos) = (Arc::clone(tokenizer.vocabulary()), Arc::clone(tokenizer.eos()));
    let encode = Arc::new(move |text: &str| tokenizer.encode_more(text).unwrap());
    let options = EngineOptions { draft_max, pass_costs: Some(FREE), ..EngineOptions::default() };
    let rules = TextRules { vocabulary, eos, encode };
    spawn_with(ModelRunner::new(decoder, pool), rules, options, drafters).unwrap()
}

pub(crate) fn plain() -> (EngineHandle, EngineThread) {
    engine(0, Drafters::default())
}

fn by_lookup(drafter: impl Drafter + 'static) -> Drafters {
    Drafters { lookup: Some(Box::new(drafter)), model: None }
}

/// Proposes a random number of the tokens that follow in a text of `known`, and then random tokens. This gives correct
/// drafts, wrong drafts, drafts that go wrong in the middle, and none.
struct Adversary {
    known: Arc<Mutex<Vec<Vec<u32>>>>,
    rng: StdRng,
}

impl Drafter for Adversary {
    fn draft(&mut self, recent: &[u32], most: usize, draft: &mut Vec<Proposal>) {
        let kind = self.rng.random_range(0..PROPOSAL_KINDS);
        let proposal = |token| Proposal { token, kind };
        let count = self.rng.random_range(0..=most);
        let right = *[0, count, self.rng.random_range(0..=count)].choose(&mut self.rng).unwrap();
        let known = self.known.lock().unwrap();
        let after = |length: usize| {
            let end = &recent[recent.len().checked_sub(length)?..];
            known.iter().find_map(|text| Some(&text[text.windows(length).position(|at| at == end)? + length..]))
        };
        if let Some(text) = (1..=8).rev().find_map(after) {
            draft.extend(text.iter().take(right).copied().map(proposal));
        }
        while draft.len() < count {
            draft.push(proposal(self.rng.random_range(0..4096)));
        }
    }
}

/// Draws a random request.
pub(crate) fn draw(rng: &mut StdRng, before: Option<&Arc<Snapshot>>) -> RequestParameters {
    let served = shipped();
    let schema = json!({"type": "object", "required": ["name", "age"], "additionalProperties": false,
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}});
    let specs = [GrammarSpec::JsonSchema(schema), GrammarSpec::Regex("[a-c]{2,9}(, the end| and so on)*[.!]".into())];
    let compile = |spec| -> Arc<dyn Grammar> { served.grammars.compile(spec).unwrap() };
    let grammar = rng.random_bool(0.3).then(|| compile(specs.choose(rng).unwrap()));
    let prompts = ["Once upon a time", "one two three one two three one two", "", "He said, \"I know.\" She said, \"I"];
    let prompt = served.tokenizer.encode_more(prompts.choose(rng).unwrap()).unwrap();
    let max_tokens = rng.random_range(1..60);
    let texts = ["\"", "an", ", ", "the ", "and then he"];
    let count = rng.random_range(0..3);
    let stop = if rng.random_bool(0.5) {
        texts.choose_multiple(rng, count).map(ToString::to_string).collect()
    } else {
        vec![]
    };
    // The request continues a conversation, or its text stands alone.
    let start = match before {
        _ if rng.random_bool(0.3) => Start::Empty,
        Some(before) => Start::Session(Arc::clone(before)),
        None => Start::Session(Arc::new(Snapshot::empty(0))),
    };
    let has_pending = before.is_some_and(|before| !before.pending.is_empty()) && matches!(start, Start::Session(_));
    let continues = prompt.is_empty() && has_pending;
    RequestParameters {
        prompt: if prompt.is_empty() && !has_pending { vec![42] } else { prompt },
        max_tokens,
        min_tokens: (*[0, 0, 20].choose(rng).unwrap()).min(max_tokens),
        stop,
        stop_token_ids: if rng.random_bool(0.2) { vec![rng.random_range(0..300)] } else { vec![] },
        ignore_eos: grammar.is_none() && rng.random_bool(0.3),
        snapshot: true,
        logprobs: rng.random_bool(0.3).then(|| rng.random_range(0..4)),
        grammar: grammar.filter(|_| !continues),
        reseed: rng.random_bool(0.5),
        start,
        sampling: SamplingParams {
            seed: rng.random_range(0..1 << 40),
            temperature: *[0.0, 0.0, 0.7, 1.3].choose(rng).unwrap(),
            top_k: *[0, 0, 40].choose(rng).unwrap(),
            top_p: *[1.0, 0.9].choose(rng).unwrap(),
            repetition_penalty: *[1.0, 1.2].choose(rng).unwrap(),
            frequency_penalty: *[0.0, 0.5].choose(rng).unwrap(),
            ..SamplingParams::default()
        },
        ..RequestParameters::default()
    }
}

pub(crate) type Outcome<'a> = (
    &'a str,
    &'a [u32],
    &'a [TokenLogprobs],
    FinishReason,
    &'a Option<StopCause>,
    Option<f64>,
    &'a [u32],
    &'a Snapshot,
);

/// Returns the parts of a result that must not depend on draft tokens.
pub(crate) fn outcome(run: &Run) -> Outcome<'_> {
    let Finish { reason, stop, cumulative_logprob, retokenized, snapshot, .. } = run.finish();
    assert_eq!(run.finish().completion_tokens, run.ids.len());
    (&run.text, &run.ids, &run.logprobs, *reason, stop, *cumulative_logprob, retokenized, snapshot.as_deref().unwrap())
}

#[test]
fn texts_with_drafts_are_those_without_bit_for_bit() {
    let known = Arc::new(Mutex::new(Vec::new()));
    let (plain, _thread) = plain();
    let adversary = Adversary { known: Arc::clone(&known), rng: StdRng::seed_from_u64(7) };
    let engines =
        [engine(6, by_lookup(adversary)), engine(16, Drafters::by_lookup(None)), engine(5, by_model(quantised(8)))];
    let limits = &shipped().limits;
    let request = |one: &RequestParameters| Request::new(one.clone(), limits).unwrap();
    let history = |one: &RequestParameters| match &one.start {
        Start::Session(before) => before.history,
        _ => History::default(),
    };
    let mut rng = StdRng::seed_from_u64(5);
    let mut before: Option<Arc<Snapshot>> = None;
    for round in 0..16 {
        let drawn: Vec<RequestParameters> = (0..5).map(|_| draw(&mut rng, before.as_ref())).collect();
        let want: Vec<Run> = drawn.iter().map(|one| collect(plain.submit(request(one)).unwrap())).collect();
        *known.lock().unwrap() =
            want.iter().zip(&drawn).map(|(run, one)| [&one.prompt[..], &run.ids].concat()).collect();
        for (engine, _) in &engines {
            for (one, want) in drawn.iter().zip(&want) {
                let found = collect(engine.submit(request(one)).unwrap());
                assert_eq!(outcome(&found), outcome(want), "round {round}, {one:?}");
                let kept = found.finish().snapshot.as_ref().unwrap();
                // The next turn looks up draft tokens in `recent`. It holds only this turn, because snapshots of
                // `plain` have none.
                assert_eq!(history(one).extended(&kept.recent.0), kept.history, "round {round}, {one:?}");
            }
            // Runs all requests together, the first one with three more choices.
            let mut requests: Vec<Request> = drawn.iter().chain([&drawn[0]; 3]).map(request).collect();
            share_prompt(&mut requests);
            let runs = engine.submit_all(requests).unwrap().into_iter().map(collect);
            for (found, want) in runs.zip(want.iter().chain([&want[0]; 3])) {
                assert_eq!(outcome(&found), outcome(want), "round {round}, together");
            }
        }
        before = if round % 3 == 2 { None } else { want[0].finish().snapshot.clone() };
    }
    assert_eq!(plain.stats().drafted_tokens, 0);
    for (engine, _) in &engines {
        let stats = engine.stats();
        let (drafted, accepted) = (stats.drafted_tokens, stats.accepted_drafts);
        assert!(accepted > 300 && drafted > accepted + 300, "{drafted} drafts, {accepted} accepted");
    }
}

/// Returns a greedy turn whose prompt repeats the same words.
fn repetitive(max_tokens: usize) -> RequestParameters {
    let text = "one two three four five. ".repeat(12);
    RequestParameters {
        start: Start::Session(Arc::new(Snapshot::empty(0))),
        prompt: shipped().tokenizer.encode_more(&text).unwrap(),
        max_tokens,
        ignore_eos: true,
        snapshot: true,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        ..RequestParameters::default()
    }
}

#[test]
fn a_repetitive_text_takes_fewer_steps_and_never_more_tokens_than_asked_for() {
    let (plain, _plain) = plain();
    let (engine, _thread) = engine(16, Drafters::by_lookup(None));
    for max_tokens in [1, 2, 3, 5, 17, 18, 64, 200] {
        let steps = engine.stats().steps;
        let request = || Request::new(repetitive(max_tokens), &shipped().limits).unwrap();
        let found = collect(engine.submit(request()).unwrap());
        assert_eq!(outcome(&found), outcome(&collect(plain.submit(request()).unwrap())));
        assert_eq!(found.ids.len(), max_tokens);
        let drafts = found.finish().drafts;
        let steps = (engine.stats().steps - steps) as usize;
        // The prompt's last chunk gives the first token. Each step gives one more, plus the draft tokens that it
        // accepts.
        assert_eq!(1 + steps + drafts.accepted, max_tokens);
        assert!(drafts.accepted <= drafts.drafted);
        assert!(max_tokens < 200 || steps < 100, "{steps} steps");
    }
}

/// Proposes nothing, and records the tokens in which it could look up drafts.
struct Recorder(Arc<Mutex<Vec<Vec<u32>>>>);

impl Drafter for Recorder {
    fn draft(&mut self, recent: &[u32], _: usize, _: &mut Vec<Proposal>) {
        self.0.lock().unwrap().push(recent.to_vec());
    }
}

#[test]
fn drafts_are_found_in_earlier_turns_while_their_state_is_in_memory() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (engine, _thread) = engine(16, by_lookup(Recorder(Arc::clone(&seen))));
    let run = |parameters| {
        seen.lock().unwrap().clear();
        let run = collect(engine.submit(Request::new(parameters, &shipped().limits).unwrap()).unwrap());
        (run, seen.lock().unwrap().first().cloned().unwrap())
    };
    let first = run(repetitive(9)).0;
    let kept = first.finish().snapshot.clone().unwrap();
    let forgotten = Snapshot { recent: Recent::default(), ..(*kept).clone() };
    let prompt = vec![42, 43];
    let [known, unknown] = [Arc::clone(&kept), Arc::new(forgotten)].map(|before| {
        run(RequestParameters { prompt: prompt.clone(), start: Start::Session(before), ..repetitive(8) })
    });
    assert_eq!(outcome(&known.0), outcome(&unknown.0));
    let end = [&prompt[..], &known.0.ids[..1]].concat();
    assert_eq!(known.1, [&repetitive(9).prompt[..], &first.ids, &end].concat());
    assert_eq!(unknown.1, [&kept.pending[..], &end].concat());
}

#[test]
fn an_interrupted_or_cancelled_text_leaves_no_drafts_behind() {
    let (plain, _plain) = plain();
    let (engine, _thread) = engine(16, Drafters::by_lookup(None));
    let limits = &shipped().limits;
    for _ in 0..8 {
        let mut stream = engine.submit(Request::new(repetitive(100_000), limits).unwrap()).unwrap();
        let Some(Event::Delta(first)) = stream.blocking_next() else { panic!("no text") };
        stream.interrupt().now();
        let rest = collect(stream);
        let tokens = [first.token_ids, rest.ids.clone()].concat();
        // The snapshot is the same as after a request for exactly this many tokens.
        let want = collect(plain.submit(Request::new(repetitive(tokens.len()), limits).unwrap()).unwrap());
        assert_eq!((&tokens, &rest.finish().snapshot), (&want.ids, &want.finish().snapshot));
        // The next client disconnects in the middle of its text.
        let mut stream = engine.submit(Request::new(repetitive(100_000), limits).unwrap()).unwrap();
        assert!(matches!(stream.blocking_next(), Some(Event::Delta(_))));
    }
    let request = || Request::new(repetitive(50), limits).unwrap();
    assert_eq!(
        outcome(&collect(engine.submit(request()).unwrap())),
        outcome(&collect(plain.submit(request()).unwrap()))
    );
}
