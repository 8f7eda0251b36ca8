//! Prompts: a shared prompt is read once, and decode steps read a prompt with log probabilities.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::common::checkpoint;
use crate::common::fake::{Calls, Fake, POISON};
use crate::common::runs::{LIMITS, Run, collect, greedy, kept, kept_at, run, shipped, start, wait_for};
use tidegate_model::{Device, SamplingParams};
use tidegate_server::engine::{
    Constraint, EngineHandle, EventStream, Failure, FinishReason, Grammar, Keeper, Limits, Request, RequestParameters,
    Start, TokenLogprobs, share_prompt,
};
use tidegate_server::session::{History, Snapshot};

/// Submits requests that share their prompt.
fn submit_shared(
    engine: &EngineHandle,
    limits: &Limits,
    all: impl IntoIterator<Item = RequestParameters>,
) -> Vec<EventStream> {
    let mut requests: Vec<Request> = all.into_iter().map(|one| Request::new(one, limits).unwrap()).collect();
    share_prompt(&mut requests);
    engine.submit_all(requests).unwrap()
}

fn shared(engine: &EngineHandle, limits: &Limits, all: impl IntoIterator<Item = RequestParameters>) -> Vec<Run> {
    submit_shared(engine, limits, all).into_iter().map(collect).collect()
}

fn chunks(calls: &Calls) -> Vec<usize> {
    calls.chunks.lock().unwrap().clone()
}

/// Starts an engine that reads prompts slowly, because another text takes a step after each chunk.
fn slow(fake: Fake) -> (EngineHandle, Arc<Calls>, EventStream) {
    let fake = fake.step(Duration::from_millis(30));
    let calls = fake.calls();
    let (engine, _) = start(fake);
    let running = RequestParameters { ignore_eos: true, ..greedy(&[1], 100_000) };
    let running = engine.submit(Request::new(running, &LIMITS).unwrap()).unwrap();
    calls.chunks.lock().unwrap().clear();
    (engine, calls, running)
}

#[test]
fn a_prompt_that_requests_share_is_read_once_for_any_number_of_slots() {
    let prompt = [vec![1; 600], vec![40]].concat();
    for slots in [1, 2, 3, 8] {
        let fake = Fake::new(slots);
        let calls = fake.calls();
        let (engine, _thread) = start(fake);
        calls.chunks.lock().unwrap().clear();
        for output in shared(&engine, &LIMITS, (1..=5).map(|max_tokens| greedy(&prompt, max_tokens))) {
            assert_eq!(output.ids, (41..).take(output.finish().completion_tokens).collect::<Vec<_>>());
            assert_eq!(output.finish().prompt_tokens, 601);
        }
        assert_eq!(chunks(&calls), [256, 256, 88], "{slots} slots");
        assert_eq!(engine.stats().prompt_tokens, 600 + 5, "each request reads the last token itself");
        wait_for("the end", || (engine.stats().running, engine.stats().finished) == (0, 5));
    }
}

#[test]
fn the_last_chunk_of_a_prompt_gives_the_first_token_unless_the_state_before_its_last_token_is_needed() {
    let passes = |fake: Fake, parameters: RequestParameters| {
        let calls = fake.calls();
        let (engine, _thread) = start(fake);
        let steps = calls.steps.load(SeqCst);
        calls.chunks.lock().unwrap().clear();
        assert_eq!(run(&engine, parameters).ids, [41, 42]);
        assert_eq!(engine.stats().prompt_tokens, 301);
        (chunks(&calls), calls.steps.load(SeqCst) - steps)
    };
    let asked = || greedy(&[vec![1; 300], vec![40]].concat(), 2);
    assert_eq!(passes(Fake::new(1), asked()), (vec![256, 44], 2));
    assert_eq!(passes(Fake::new(1).scores_chunks(), asked()), (vec![256, 45], 1));
    assert_eq!(passes(Fake::new(1).scores_chunks(), kept(asked()).0), (vec![256, 44], 2));
}

#[test]
fn who_is_interrupted_while_the_prompt_is_read_gets_no_token() {
    let turn = Start::Session(Arc::new(Snapshot::empty(0)));
    for (start, is_turn) in [(RequestParameters::default().start, false), (turn, true)] {
        let (engine, calls, running) = slow(Fake::new(8).scores_chunks());
        let asked = RequestParameters { start, ..greedy(&[vec![1; 256 * 10], vec![40]].concat(), 2) };
        let stream = engine.submit(Request::new(asked, &LIMITS).unwrap()).unwrap();
        wait_for("the first chunk", || !chunks(&calls).is_empty());
        stream.interrupt().now();
        let found = collect(stream);
        assert_eq!((found.ids.len(), found.finish().reason), (0, FinishReason::Interrupted));
        // A turn's prompt is still read, except for its last token, because the conversation continues after it.
        let read = chunks(&calls);
        assert_eq!(read == [256; 10], is_turn, "{read:?}");
        drop(running);
    }
}

#[test]
fn only_equal_prompts_with_equal_starts_are_shared() {
    let fake = Fake::new(8);
    let calls = fake.calls();
    let (engine, _thread) = start(fake);
    calls.chunks.lock().unwrap().clear();
    let snapshot = Arc::new(Snapshot { state: vec![9.0], read: 2, ..Snapshot::default() });
    let known = RequestParameters { start: Start::Prefix(snapshot), ..greedy(&[1; 10], 1) };
    let all = [greedy(&[1; 10], 1), known.clone(), greedy(&[2; 10], 1), greedy(&[1; 10], 1), known];
    let outputs = shared(&engine, &LIMITS, all);
    assert_eq!(outputs.iter().map(|run| run.ids[0]).collect::<Vec<_>>(), [2, 2, 3, 2, 2]);
    assert_eq!(chunks(&calls), [9, 7, 9]);
}

#[test]
fn if_the_client_of_the_reading_request_disconnects_the_next_request_reads_the_prompt() {
    let (engine, calls, running) = slow(Fake::new(8));
    let prompt = [vec![1; 256 * 20], vec![40]].concat();
    let mut streams = submit_shared(&engine, &LIMITS, (0..3).map(|_| greedy(&prompt, 2)));
    wait_for("the first chunks", || chunks(&calls).len() >= 3);
    drop(streams.remove(0));
    for stream in streams {
        assert_eq!(collect(stream).ids, [41, 42]);
    }
    assert_eq!(engine.stats().cancelled, 1);
    let read = chunks(&calls).len();
    assert!((23..40).contains(&read), "{read} chunks");
    drop(running);
}

#[test]
fn an_interrupted_request_still_reads_the_prompt_for_the_others() {
    let (engine, calls, running) = slow(Fake::new(8));
    let prompt = [vec![1; 256 * 10], vec![40]].concat();
    let mut streams = submit_shared(&engine, &LIMITS, (0..3).map(|_| greedy(&prompt, 2)));
    wait_for("the first chunk", || !chunks(&calls).is_empty());
    streams[0].interrupt().now();
    let first = collect(streams.remove(0));
    assert_eq!((first.ids.len(), first.finish().reason), (0, FinishReason::Interrupted));
    for stream in streams {
        assert_eq!(collect(stream).ids, [41, 42]);
    }
    assert_eq!(chunks(&calls).len(), 10);
    drop(running);
}

#[derive(Debug)]
struct Broken;

impl Grammar for Broken {
    fn start(&self) -> Box<dyn Constraint> {
        panic!("scripted panic")
    }
}

#[test]
fn if_the_reading_request_fails_the_next_request_reads_the_prompt() {
    for slots in [1, 4] {
        let (engine, _thread) = start(Fake::new(slots));
        let broken = RequestParameters { grammar: Some(Arc::new(Broken)), ..greedy(&[1, 1, 40], 2) };
        let outputs = shared(&engine, &LIMITS, [broken, greedy(&[1, 1, 40], 2), greedy(&[1, 1, 40], 2)]);
        assert_eq!(outputs[0].end, Some(Err(Failure::Internal)));
        assert!(outputs[1..].iter().all(|run| run.ids == [41, 42]));
        // A prompt that cannot be read fails every request.
        let outputs = shared(&engine, &LIMITS, [(); 3].map(|()| greedy(&[POISON, 1], 1)));
        assert!(outputs.iter().all(|run| run.end == Some(Err(Failure::Internal))));
        assert_eq!(run(&engine, greedy(&[1], 2)).ids, [2, 3]);
    }
}

/// Returns a sampled request to the shipped model.
fn sampled(prompt: &[u32], seed: u64) -> RequestParameters {
    let sampling = SamplingParams { temperature: 0.9, repetition_penalty: 1.2, seed, ..SamplingParams::default() };
    RequestParameters { prompt: prompt.into(), max_tokens: 16, sampling, logprobs: Some(2), ..Default::default() }
}

#[test]
fn sharing_a_prompt_changes_no_bit() {
    let served = shipped();
    let more = |text: &str| served.tokenizer.encode_more(text).unwrap();
    let prompt = served.tokenizer.encode(&"Once upon a time there was a café. ".repeat(40)).unwrap();
    let (first, taken) = kept(RequestParameters { snapshot: true, ..sampled(&prompt, 3) });
    let conversation = run_shipped(first).finish().snapshot.clone().unwrap();
    let (known, length) = (Arc::clone(&taken.all()[0]), prompt.len());
    let longer = [&prompt[..length], &more(" And then she said: “Come in!”")[..]].concat();
    let starts =
        [(Start::Empty, prompt.clone()), (Start::Prefix(known), longer), (Start::Session(conversation), more(" Then"))];
    for (start, prompt) in starts {
        let of = |seed| kept(RequestParameters { start: start.clone(), snapshot: true, ..sampled(&prompt, seed) });
        let (asked, read): (Vec<_>, Vec<_>) = (0..4).map(of).unzip();
        let together = shared(&served.engine, &served.limits, asked);
        for ((seed, together), read) in (0..4).zip(&together).zip(&read) {
            let (alone, read_alone) = of(seed);
            let alone = run_shipped(alone);
            assert_eq!((&alone.ids, &alone.logprobs), (&together.ids, &together.logprobs));
            assert!(alone.finish().snapshot == together.finish().snapshot);
            // Only the request that read the prompt passes on the snapshot.
            assert!(read.all() == if seed == 0 { read_alone.all() } else { Vec::new() });
        }
    }
}

fn run_shipped(parameters: RequestParameters) -> Run {
    let served = shipped();
    collect(served.engine.submit(Request::new(parameters, &served.limits).unwrap()).unwrap())
}

#[test]
fn a_prompts_log_probabilities_come_before_its_text() {
    let fake = Fake::new(2);
    let calls = fake.calls();
    let (engine, _thread) = start(fake);
    calls.chunks.lock().unwrap().clear();
    let parameters = RequestParameters { prompt_logprobs: Some(1), ..greedy(&[5, 6, 9], 2) };
    let output = run(&engine, parameters.clone());
    let sum = (255.0 + 1f64.exp()).ln();
    let (likely, unlikely) = ((1.0 - sum) as f32, -sum as f32);
    let entry = |token, logprob, best| Some(TokenLogprobs { token, logprob, top: vec![(best, likely)] });
    let expected = vec![None, entry(6, likely, 6), entry(9, unlikely, 7)];
    assert_eq!(output.prompt_logprobs.as_ref(), Some(&expected));
    assert_eq!((&output.ids, output.logprobs.len()), (&vec![10, 11], 0));
    assert!(chunks(&calls).is_empty());
    assert_eq!((engine.stats().prompt_tokens, engine.stats().generated_tokens), (3, 2));

    // A request that generates no tokens, and one with a prompt of one token.
    let scored = run(&engine, RequestParameters { max_tokens: 0, ..parameters.clone() });
    assert_eq!((scored.prompt_logprobs.as_ref(), scored.ids.len()), (Some(&expected), 0));
    assert_eq!((scored.finish().reason, scored.finish().completion_tokens), (FinishReason::Length, 0));
    let one = run(&engine, RequestParameters { max_tokens: 0, prompt: vec![5], ..parameters.clone() });
    assert_eq!(one.prompt_logprobs, Some(vec![None]));

    // Requests that share the prompt share the steps.
    let steps = calls.steps.load(SeqCst);
    let all = shared(&engine, &LIMITS, [(); 4].map(|()| RequestParameters { max_tokens: 0, ..parameters.clone() }));
    assert!(all.iter().all(|run| run.prompt_logprobs.as_ref() == Some(&expected)));
    assert_eq!(calls.steps.load(SeqCst) - steps, 2);
}

#[test]
fn log_probabilities_of_a_prompt_change_no_bit_of_the_result() {
    let served = shipped();
    let prompt = served.tokenizer.encode("Once upon a time there was a café by the sea.").unwrap();
    let (plain, read) = kept(RequestParameters { snapshot: true, ..sampled(&prompt, 1) });
    let plain = run_shipped(plain);
    let known = Arc::new(Snapshot { pending: Vec::new(), ..(*read.all()[0]).clone() });
    for start in [Start::Empty, Start::Prefix(known)] {
        let scored = RequestParameters { start, snapshot: true, prompt_logprobs: Some(4), ..sampled(&prompt, 1) };
        let (scored, read_again) = kept(scored);
        let request = Request::new(scored.clone(), &served.limits).unwrap();
        assert_eq!(request.cached_tokens(), 0, "a cached prefix has no log probabilities");
        let scored = run_shipped(scored);
        assert_eq!((&plain.ids, &plain.logprobs), (&scored.ids, &scored.logprobs));
        assert!(read.all() == read_again.all() && plain.finish().snapshot == scored.finish().snapshot);

        let scores = scored.prompt_logprobs.unwrap();
        assert_eq!((scores.len(), &scores[0]), (prompt.len(), &None));
        let decoder = tidegate_model::checkpoint::load(&checkpoint(), &Device::Cpu).unwrap();
        let mut pool = decoder.new_pool(1).unwrap();
        for (pair, scored) in prompt.windows(2).zip(&scores[1..]) {
            let scored = scored.as_ref().unwrap();
            let logits = decoder.decode(&pair[..1], &mut pool, &[0]).unwrap();
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let expected = f64::from(logits[pair[1] as usize]) - sum.ln();
            assert_eq!((scored.token, scored.top.len()), (pair[1], 4));
            assert!((f64::from(scored.logprob) - expected).abs() < 1e-6);
        }
    }
}

#[test]
fn errors_name_the_bounds_of_prompt_logprobs() {
    let refused = |change: &dyn Fn(&mut RequestParameters)| {
        let mut parameters = RequestParameters { prompt_logprobs: Some(1), ..greedy(&[1], 1) };
        change(&mut parameters);
        Request::new(parameters, &LIMITS).unwrap_err().to_string()
    };
    assert_eq!(refused(&|p| p.prompt_logprobs = Some(21)), "prompt_logprobs must be from 0 to 20, found 21");
    assert!(refused(&|p| p.start = Start::Session(Arc::new(Snapshot::empty(0)))).starts_with("prompt_logprobs must"));
}

#[test]
fn snapshots_for_other_requests_are_taken_amid_the_prompt_at_its_end_and_at_the_end_of_the_text() {
    let fake = Fake::new(2);
    let calls = fake.calls();
    let (engine, _thread) = start(fake);
    calls.chunks.lock().unwrap().clear();
    let prompt = [&[7; 300][..], &[40]].concat();
    let taken_at = |at: Option<usize>, start: Start| {
        let (asked, taken) = kept_at(at, RequestParameters { start, ..greedy(&prompt, 2) });
        let keeper = asked.keeper.clone().map(|keeper| Keeper { end: true, ..keeper });
        let run = run(&engine, RequestParameters { keeper, ..asked });
        assert_eq!((&run.ids[..], &run.finish().snapshot), (&[41, 42][..], &None), "it was not asked for");
        taken.all()
    };
    let position = |snapshot: &Arc<Snapshot>| (snapshot.read, snapshot.pending.clone());
    let plain = taken_at(None, Start::Empty);
    assert_eq!(plain.iter().map(position).collect::<Vec<_>>(), [(300, vec![40]), (302, vec![42])]);
    assert_eq!(calls.chunks.lock().unwrap().drain(..).count(), 2);
    let all = taken_at(Some(270), Start::Empty);
    assert_eq!(position(&all[0]), (270, Vec::new()));
    assert_eq!(all[0].history, History::default().extended(&prompt[..270]));
    assert_eq!(all[1..], plain);
    assert_eq!(chunks(&calls), [256, 14, 30]);
    // Starts from this snapshot, with another mark, which still counts from the beginning of the prompt.
    calls.chunks.lock().unwrap().clear();
    let known = Start::Prefix(Arc::clone(&all[0]));
    let rest = taken_at(Some(290), known.clone());
    assert_eq!((rest[0].read, &rest[1..]), (290, &plain[..]));
    assert_eq!(chunks(&calls), [20, 10]);
    // These marks give no further snapshot: they are at or before the start, at the end, or beyond it.
    for at in [100, 270, 300, 301, 999] {
        assert_eq!(taken_at(Some(at), known.clone()), plain, "{at}");
    }
}

#[test]
fn the_first_turn_of_a_conversation_may_start_from_a_known_prefix() {
    let served = shipped();
    let prompt = served.tokenizer.encode(&"Once upon a time there was a café. ".repeat(10)).unwrap();
    let conversation = Arc::new(Snapshot::empty(9));
    let turn = |start| RequestParameters { start, snapshot: true, ..sampled(&prompt, 3) };
    let (plain, taken) = kept_at(Some(50), turn(Start::Session(Arc::clone(&conversation))));
    let plain = run_shipped(plain);
    let [amid, end] = &taken.all()[..] else { panic!("two snapshots") };
    for prefix in [amid, end].map(Arc::clone) {
        let read = prefix.read as usize;
        let known = turn(Start::FirstTurn { conversation: Arc::clone(&conversation), prefix });
        let request = Request::new(known.clone(), &served.limits).unwrap();
        assert_eq!((request.cached_tokens(), request.prompt_tokens()), (read, prompt.len()));
        let known = run_shipped(known);
        assert_eq!((&plain.ids, &plain.logprobs), (&known.ids, &known.logprobs));
        assert!(plain.finish().snapshot == known.finish().snapshot, "an open answer, and the same random numbers");
    }
    // A conversation that already has a text starts from its own state.
    let prefix = Arc::clone(amid);
    let start = Start::FirstTurn { conversation: plain.finish().snapshot.clone().unwrap(), prefix };
    assert_eq!(Request::new(turn(start), &served.limits).unwrap().cached_tokens(), 0);
}
