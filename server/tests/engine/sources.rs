//! The engine with a scripted encoder-decoder: when and by which request sources are read, and what snapshots keep.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::runs::{Run, collect, greedy, wait_for};
use crate::common::translator::{
    BROKEN, Call, FIRST, LIMITS, LONGEST, Translator, files, start, start_with, state_after, translation,
};
use tidegate_model::SamplingParams;
use tidegate_server::engine::{
    Constraint, EngineHandle, EngineOptions, EventStream, Failure, FinishReason, Grammar, Request, RequestParameters,
    Start, share_prompt,
};
use tidegate_server::session::{FormatError, History, Snapshot};
use tidegate_server::text::Tokenizer;

fn engine(slots: usize) -> (EngineHandle, Arc<Mutex<Vec<Call>>>) {
    start(Translator::new(slots, Duration::ZERO))
}

fn submit(engine: &EngineHandle, parameters: RequestParameters) -> EventStream {
    engine.submit(Request::new(parameters, &LIMITS).unwrap()).unwrap()
}

fn run(engine: &EngineHandle, parameters: RequestParameters) -> Run {
    collect(submit(engine, parameters))
}

/// Runs a turn after `snapshot`, which is written to a file and read again first.
fn turn(engine: &EngineHandle, snapshot: &Snapshot, parameters: RequestParameters) -> (Run, Arc<Snapshot>) {
    let moved = files().decode(&files().encode(snapshot)).unwrap();
    assert_eq!(&moved, snapshot);
    let run = run(engine, RequestParameters { start: Start::Session(Arc::new(moved)), snapshot: true, ..parameters });
    let snapshot = run.finish().snapshot.clone().unwrap();
    (run, snapshot)
}

fn sources(calls: &Mutex<Vec<Call>>) -> Vec<Call> {
    calls.lock().unwrap().iter().filter(|call| matches!(call, Call::Source(_))).copied().collect()
}

fn source(from: u32, length: usize) -> Vec<u32> {
    (0..).map(|i| 5 + (from * 101 + i * i) % 900).take(length).collect()
}

#[test]
fn a_source_is_read_in_one_call_and_then_the_text_is_generated() {
    let (engine, calls) = engine(2);
    for (read, length) in [(1, 1), (601, 600), (601 + LONGEST as u64, LONGEST)] {
        let source = source(3, length);
        let output = run(&engine, greedy(&source, 5));
        assert_eq!(output.ids, translation(&source, 5), "{length} tokens");
        assert_eq!(output.finish().prompt_tokens, length);
        assert_eq!(engine.stats().prompt_tokens, read, "the text's first token is not counted");
    }
    let calls = calls.lock().unwrap();
    let expected = [1, 600, LONGEST].map(|length| [vec![Call::Source(length)], vec![Call::Step(1); 5]].concat());
    assert_eq!(*calls, expected.concat(), "no other calls");
}

#[test]
fn running_texts_take_a_step_between_two_sources() {
    let (engine, calls) = start(Translator::new(8, Duration::from_millis(2)));
    let running = submit(&engine, RequestParameters { ignore_eos: true, ..greedy(&[9], 10_000) });
    wait_for("the first step", || calls.lock().unwrap().contains(&Call::Step(1)));
    let streams: Vec<_> = (0..5).map(|from| submit(&engine, greedy(&source(from, 700), 3))).collect();
    for (from, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).ids, translation(&source(from, 700), 3));
    }
    drop(running);
    let calls = calls.lock().unwrap();
    assert_eq!(sources(&Mutex::new(calls.clone())).len(), 6);
    let waited = calls.windows(2).any(|pair| matches!(pair, [Call::Source(_), Call::Source(_)]));
    assert!(!waited, "running texts take a step between two sources: {calls:?}");
}

#[test]
fn a_source_that_requests_share_is_read_once_for_any_number_of_slots() {
    for slots in [1, 2, 3, 8] {
        let (engine, calls) = engine(slots);
        let (one, other) = (source(1, 400), source(2, 400));
        let all = [&one, &one, &other, &one, &one].into_iter().zip(1..);
        let mut requests: Vec<Request> =
            all.clone().map(|(source, tokens)| Request::new(greedy(source, tokens), &LIMITS).unwrap()).collect();
        share_prompt(&mut requests);
        let streams = engine.submit_all(requests).unwrap();
        for ((source, tokens), stream) in all.zip(streams) {
            assert_eq!(collect(stream).ids, translation(source, tokens), "{slots} slots");
        }
        assert_eq!(sources(&calls), [Call::Source(400); 2], "{slots} slots: each source is read once");
        assert_eq!(engine.stats().prompt_tokens, 800);
    }
}

/// Requests that have slots but wait for their sources, because the slow sources of ten other requests are read first.
struct Waiting {
    engine: EngineHandle,
    calls: Arc<Mutex<Vec<Call>>>,
    others: Vec<EventStream>,
    streams: Vec<EventStream>,
}

impl Waiting {
    fn of(requests: impl IntoIterator<Item = RequestParameters>) -> Self {
        let (engine, calls) = start(Translator::new(16, Duration::ZERO).source(Duration::from_millis(200)));
        let others = (0..10).map(|from| greedy(&source(from, 40), 1));
        let mut requests: Vec<Request> =
            others.chain(requests).map(|one| Request::new(one, &LIMITS).unwrap()).collect();
        share_prompt(&mut requests);
        let mut others = engine.submit_all(requests).unwrap();
        let streams = others.split_off(10);
        // The engine assigns all slots before it reads the first source.
        wait_for("the first source", || !sources(&calls).is_empty());
        Self { engine, calls, others, streams }
    }

    /// Waits for the other requests to end; returns how often a source of `length` tokens was read.
    fn times_read(self, length: usize) -> usize {
        for other in self.others {
            assert_eq!(collect(other).ids.len(), 1);
        }
        sources(&self.calls).iter().filter(|call| **call == Call::Source(length)).count()
    }
}

#[test]
fn a_request_interrupted_before_its_source_is_read_generates_nothing_and_its_session_can_continue() {
    let text = source(1, 300);
    let plain = RequestParameters { snapshot: true, ..greedy(&source(2, 301), 5) };
    let started = Start::Session(Arc::new(Snapshot::empty(1)));
    let of_session = RequestParameters { start: started, snapshot: true, ..greedy(&text, 5) };
    let mut waiting = Waiting::of([plain, of_session]);
    for stream in &waiting.streams {
        stream.interrupt().now();
    }
    let runs: Vec<Run> = waiting.streams.drain(..).map(collect).collect();
    for run in &runs {
        assert_eq!((run.finish().reason, run.ids.len()), (FinishReason::Interrupted, 0));
    }
    let kept = runs[1].finish().snapshot.clone().unwrap();
    assert_eq!((kept.read, &kept.pending), (300, &vec![FIRST]), "the source of a turn is read all the same");
    assert_eq!(turn(&waiting.engine, &kept, greedy(&[], 5)).0.ids, translation(&text, 5));
    assert_eq!(waiting.times_read(301), 0, "no other request needs it");
}

#[test]
fn if_the_client_of_the_reading_request_disconnects_the_next_request_reads_the_source() {
    let text = source(1, 300);
    let mut waiting = Waiting::of([(); 3].map(|()| greedy(&text, 4)));
    drop(waiting.streams.remove(0));
    wait_for("the cancellation", || waiting.engine.stats().cancelled == 1);
    assert!(!sources(&waiting.calls).contains(&Call::Source(300)), "the source's turn had not come");
    for stream in waiting.streams.drain(..) {
        assert_eq!(collect(stream).ids, translation(&text, 4));
    }
    assert_eq!(waiting.times_read(300), 1);
}

#[test]
fn an_interrupted_request_still_reads_the_source_for_the_others() {
    let text = source(1, 300);
    let mut waiting = Waiting::of([(); 3].map(|()| greedy(&text, 4)));
    waiting.streams[0].interrupt().now();
    assert!(!sources(&waiting.calls).contains(&Call::Source(300)), "the source's turn had not come");
    let first = collect(waiting.streams.remove(0));
    assert_eq!((first.finish().reason, first.ids.len()), (FinishReason::Interrupted, 0));
    for stream in waiting.streams.drain(..) {
        assert_eq!(collect(stream).ids, translation(&text, 4));
    }
    assert_eq!(waiting.times_read(300), 1);
}

#[derive(Debug)]
struct Broken;

impl Grammar for Broken {
    fn start(&self) -> Box<dyn Constraint> {
        panic!("scripted panic")
    }
}

#[test]
fn if_the_reading_request_fails_the_next_request_reads_the_source() {
    for slots in [1, 4] {
        let (engine, calls) = engine(slots);
        let shared = |all: [RequestParameters; 3]| {
            let mut requests = all.map(|one| Request::new(one, &LIMITS).unwrap());
            share_prompt(&mut requests);
            engine.submit_all(requests.into()).unwrap().into_iter().map(collect).collect::<Vec<Run>>()
        };
        let text = source(1, 300);
        let broken = RequestParameters { grammar: Some(Arc::new(Broken)), ..greedy(&text, 4) };
        let output = shared([broken, greedy(&text, 4), greedy(&text, 4)]);
        assert_eq!(output[0].end, Some(Err(Failure::Internal)));
        assert!(output[1..].iter().all(|run| run.ids == translation(&text, 4)), "{slots} slots");
        // A source that cannot be read fails every request.
        let output = shared([(); 3].map(|()| greedy(&[5, BROKEN], 4)));
        assert!(output.iter().all(|run| run.end == Some(Err(Failure::Internal))), "{slots} slots");
        assert_eq!(sources(&calls), [Call::Source(300)]);
        assert_eq!(run(&engine, greedy(&text, 2)).ids, translation(&text, 2));
    }
}

#[test]
fn an_engine_that_reads_a_long_source_stays_ready() {
    let options = EngineOptions { step_limit: Duration::from_secs(1), ..EngineOptions::default() };
    let model = Translator::new(1, Duration::ZERO).source(Duration::from_secs(3));
    let (engine, calls) = start_with(model, options);
    let text = source(1, 900);
    let stream = submit(&engine, greedy(&text, 2));
    wait_for("the source to be read", || {
        assert!(engine.is_ready(), "not ready while it reads");
        !sources(&calls).is_empty()
    });
    assert_eq!(collect(stream).ids, translation(&text, 2));
    assert!(engine.is_ready());
}

#[test]
fn a_source_read_in_an_earlier_turn_is_counted_once() {
    let (engine, _) = engine(1);
    let (_, read) = turn(&engine, &Snapshot::empty(1), greedy(&source(1, 500), 0));
    let (output, _) = turn(&engine, &read, greedy(&[], 3));
    assert_eq!((output.ids.len(), output.finish().prompt_tokens), (3, 0));
    assert_eq!(engine.stats().prompt_tokens, 500, "the text's first token is not counted");
}

#[test]
fn an_answer_in_two_turns_equals_the_answer_in_one() {
    let text = source(4, 500);
    let (here, calls) = engine(2);
    let (there, _) = engine(2);
    let (whole, kept) = turn(&here, &Snapshot::empty(5), greedy(&text, 12));
    assert_eq!(whole.ids, translation(&text, 12));
    assert_eq!((kept.read, kept.pending.len(), kept.tokens()), (512, 1, 513));
    assert_eq!(kept.history, History::of_source(&text).extended(&[FIRST]).extended(&whole.ids[..11]));
    // With a cut at 0, the first turn reads only the source.
    for cut in 0..12 {
        let (first, between) = turn(&here, &Snapshot::empty(5), greedy(&text, cut));
        let (second, end) = turn(&there, &between, greedy(&[], 12 - cut));
        assert_eq!([first.ids, second.ids].concat(), whole.ids, "cut after {cut}");
        assert!(*end == *kept, "cut after {cut}");
    }
    assert_eq!(sources(&calls), [Call::Source(500); 13]);
}

#[test]
fn a_new_source_replaces_the_previous_source_and_its_text() {
    let (engine, calls) = engine(1);
    let (one, other) = (source(1, 40), source(2, 30));
    let penalised = |source: &[u32]| RequestParameters {
        sampling: SamplingParams {
            temperature: 0.0,
            repetition_penalty: 1.9,
            presence_penalty: 1.5,
            ..Default::default()
        },
        ..greedy(source, 6)
    };
    let (_, after_one) = turn(&engine, &Snapshot::empty(3), penalised(&one));
    let (second, after_both) = turn(&engine, &after_one, penalised(&other));
    let (alone, after_other) = turn(&engine, &Snapshot::empty(3), penalised(&other));
    assert_eq!(second.ids, alone.ids);
    assert_eq!(*after_both, *after_other, "the state does not depend on the previous source");
    assert_ne!(after_both.history, after_one.history);
    assert_eq!(sources(&calls).len(), 3);
    // The previous version is unchanged.
    let (again, _) = turn(&engine, &after_one, greedy(&[], 3));
    assert_eq!(again.ids, translation(&one, 9)[6..]);

    // The random numbers continue from the previous turn.
    let sampled = |source: &[u32]| RequestParameters { sampling: SamplingParams::default(), ..greedy(source, 8) };
    let (_, first) = turn(&engine, &Snapshot::empty(3), sampled(&one));
    let (_, second) = turn(&engine, &first, sampled(&one));
    assert_eq!((first.sampler.draws, second.sampler.draws, second.sampler.seed), (8, 16, 3));
}

#[test]
fn a_state_after_a_stop_string_has_the_source_and_no_part_of_the_string() {
    let (engine, _) = engine(2);
    let tokenizer = Tokenizer::load(&crate::common::checkpoint(), LIMITS.vocab_size, &[]).unwrap();
    let mut stopped = 0;
    for from in 0..20 {
        let text = source(from, 50);
        let (free, _) = turn(&engine, &Snapshot::empty(1), greedy(&text, 10));
        let bytes: usize = free.ids[..4].iter().map(|id| tokenizer.vocabulary().bytes(*id).len()).sum();
        let Some(stop) = free.text.get(bytes..).map(|rest| rest.chars().take(2).collect::<String>()) else { continue };
        if stop.contains('\u{fffd}') || free.text.find(&stop) != Some(bytes) {
            continue;
        }
        let (output, kept) =
            turn(&engine, &Snapshot::empty(1), RequestParameters { stop: vec![stop], ..greedy(&text, 10) });
        assert_eq!((output.finish().reason, output.text.as_str()), (FinishReason::Stop, &free.text[..bytes]));
        assert_eq!((kept.read, kept.pending.len()), (50 + 1 + 4, 0));
        assert_eq!(kept.history, History::of_source(&text).extended(&[FIRST]).extended(&free.ids[..4]));
        let next = source(from + 1, 20);
        assert_eq!(turn(&engine, &kept, greedy(&next, 4)).0.ids, translation(&next, 4));
        stopped += 1;
    }
    assert!(stopped > 3, "only {stopped} texts could be stopped");
}

#[test]
fn a_state_after_a_stop_string_that_begins_within_a_token_has_the_source_and_the_text_before_it() {
    let (engine, _) = engine(2);
    let tokenizer = Tokenizer::load(&crate::common::checkpoint(), LIMITS.vocab_size, &[]).unwrap();
    let mut stopped = 0;
    for from in 0..60 {
        let text = source(from, 50);
        let (free, _) = turn(&engine, &Snapshot::empty(1), greedy(&text, 10));
        let bytes = |tokens: usize| -> usize {
            free.ids[..tokens].iter().map(|id| tokenizer.vocabulary().bytes(*id).len()).sum()
        };
        if !free.text.is_ascii() || bytes(10) != free.text.len() {
            continue;
        }
        // The stop string is the fifth token's last letter and the sixth token's first.
        let (start, end) = (bytes(4), bytes(5));
        let (shown, stop) = (&free.text[start..end - 1], &free.text[end - 1..=end]);
        let match_starts_earlier = free.text[..start].ends_with(&stop[..1]);
        if shown.is_empty() || match_starts_earlier || free.text.find(stop) != Some(end - 1) {
            continue;
        }
        let stops = RequestParameters { stop: vec![stop.to_owned()], ..greedy(&text, 10) };
        let (output, kept) = turn(&engine, &Snapshot::empty(1), stops);
        assert_eq!((output.finish().reason, output.text.as_str()), (FinishReason::Stop, &free.text[..end - 1]));
        let rest = tokenizer.encode_more(shown).unwrap();
        let read = [&[FIRST], &free.ids[..4], &rest[..]].concat();
        assert_eq!((kept.read, kept.pending.len()), (50 + read.len() as u64, 0));
        assert_eq!(kept.history, History::of_source(&text).extended(&read));
        assert_eq!(kept.state, state_after(&text, &read), "it has the source and the shown text");
        let next = source(from + 1, 20);
        assert_eq!(turn(&engine, &kept, greedy(&next, 4)).0.ids, translation(&next, 4));
        stopped += 1;
    }
    assert!(stopped > 3, "only {stopped} texts could be stopped");
}

#[test]
fn invalid_sources_are_refused() {
    let refused = |parameters| Request::new(parameters, &LIMITS).unwrap_err().to_string();
    let words = format!("prompt must be 1 to {LONGEST} tokens long, found");
    assert_eq!(refused(greedy(&source(1, LONGEST + 1), 1)), format!("{words} {} tokens", LONGEST + 1));
    assert_eq!(refused(greedy(&[], 1)), format!("{words} 0 tokens"));
    let scored = RequestParameters { prompt_logprobs: Some(1), ..greedy(&[5], 1) };
    let words =
        "prompt_logprobs must be absent where the prompt is a source, which the model does not predict, found it";
    assert_eq!(refused(scored), words);
    // A text without a source would make the step fail for all texts that share it.
    let crafted = Snapshot { pending: vec![5], ..Snapshot::empty(1) };
    for started in [Snapshot::empty(1), crafted] {
        let start = Start::Session(Arc::new(started));
        let words = "prompt must be at least one token long where no source has been read, found none";
        assert_eq!(refused(RequestParameters { start, ..greedy(&[], 1) }), words);
    }
    let started = Arc::new(Snapshot { state: vec![1.0; 4], read: 2, ..Snapshot::default() });
    let known = RequestParameters { start: Start::Prefix(started), ..greedy(&[5, 6, 7], 1) };
    let request = Request::new(known, &LIMITS).unwrap();
    assert_eq!(request.cached_tokens(), 0, "a source has no cached prefix");
}

#[test]
fn a_source_that_cannot_be_read_ends_only_its_own_request() {
    let (engine, _) = engine(4);
    let running = submit(&engine, greedy(&[9], 2000));
    let broken = run(&engine, greedy(&[5, BROKEN], 3));
    assert_eq!(broken.end, Some(Err(Failure::Internal)));
    assert_eq!(collect(running).ids, translation(&[9], 2000));
}

#[test]
fn a_file_with_an_impossible_source_length_is_refused() {
    let (engine, _) = engine(1);
    let (_, kept) = turn(&engine, &Snapshot::empty(1), greedy(&source(1, 40), 2));
    for (tokens, found) in [(0.0, "0"), (1.5, "1.5"), (-1.0, "-1"), (43.0, "43"), (1e9, "1000000000")] {
        let mut state = kept.state.clone();
        state[3] = tokens;
        let bytes = files().encode(&Snapshot { state, ..(*kept).clone() });
        assert_eq!(files().decode(&bytes), Err(FormatError::Source { found: found.into(), max: kept.read }));
    }
    let shorter = tidegate_server::session::Codec { sources: 39, ..files() };
    let refused = shorter.decode(&files().encode(&kept)).unwrap_err().to_string();
    assert_eq!(refused, "tensor source must be a number of tokens from 1 to 39, found 40");
}
