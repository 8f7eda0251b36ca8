//! The engine with an encoder-decoder, which here is a script: when sources are read, by whom, and what is kept of them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::runs::{Run, collect};
use crate::common::translator::{
    BROKEN, Did, FIRST, LIMITS, LONGEST, Translator, asked, files, start, start_with, state_after, translation,
};
use tidegate_model::SamplingParams;
use tidegate_server::engine::{
    Constraint, EngineHandle, EngineOptions, EventStream, Failure, FinishReason, Grammar, Request, RequestParameters,
    Snapshots, Start, share_prompt,
};
use tidegate_server::session::{FormatError, History, Snapshot};
use tidegate_server::text::Tokenizer;

const END: Snapshots = Snapshots { prompt: false, end: true };

fn engine(slots: usize) -> (EngineHandle, Arc<Mutex<Vec<Did>>>) {
    start(Translator::new(slots, Duration::ZERO))
}

fn submit(engine: &EngineHandle, parameters: RequestParameters) -> EventStream {
    engine.submit(Request::new(parameters, &LIMITS).unwrap()).unwrap()
}

fn run(engine: &EngineHandle, parameters: RequestParameters) -> Run {
    collect(submit(engine, parameters))
}

/// A turn after `snapshot`, which has travelled as a file.
fn turn(engine: &EngineHandle, snapshot: &Snapshot, parameters: RequestParameters) -> (Run, Arc<Snapshot>) {
    let moved = files().decode(&files().encode(snapshot)).unwrap();
    assert_eq!(&moved, snapshot);
    let run = run(engine, RequestParameters { start: Start::Session(Arc::new(moved)), snapshots: END, ..parameters });
    let snapshot = run.finish().snapshot.clone().unwrap();
    (run, snapshot)
}

fn sources(did: &Mutex<Vec<Did>>) -> Vec<Did> {
    did.lock().unwrap().iter().filter(|did| matches!(did, Did::Source(_))).copied().collect()
}

fn source(from: u32, length: usize) -> Vec<u32> {
    (0..).map(|i| 5 + (from * 101 + i * i) % 900).take(length).collect()
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_source_is_read_whole_and_the_text_begins_with_its_first_token() {
    let (engine, did) = engine(2);
    for (read, length) in [(1, 1), (601, 600), (601 + LONGEST as u64, LONGEST)] {
        let source = source(3, length);
        let said = run(&engine, asked(&source, 5));
        assert_eq!(said.ids, translation(&source, 5), "{length} tokens");
        assert_eq!(said.finish().prompt_tokens, length);
        assert_eq!(engine.stats().prompt_tokens, read, "the text's first token is none of the prompt's");
    }
    let did = did.lock().unwrap();
    let expected = [1, 600, LONGEST].map(|length| [vec![Did::Source(length)], vec![Did::Step(1); 5]].concat());
    assert_eq!(*did, expected.concat(), "and nothing else reads");
}

#[test]
fn sources_take_turns_with_the_steps_of_running_texts() {
    let (engine, did) = start(Translator::new(8, Duration::from_millis(2)));
    let running = submit(&engine, RequestParameters { ignore_eos: true, ..asked(&[9], 10_000) });
    wait_for("the first step", || did.lock().unwrap().contains(&Did::Step(1)));
    let streams: Vec<_> = (0..5).map(|from| submit(&engine, asked(&source(from, 700), 3))).collect();
    for (from, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).ids, translation(&source(from, 700), 3));
    }
    drop(running);
    let did = did.lock().unwrap();
    assert_eq!(sources(&Mutex::new(did.clone())).len(), 6);
    let waits = did.windows(2).any(|pair| matches!(pair, [Did::Source(_), Did::Source(_)]));
    assert!(!waits, "between two sources everybody takes a step: {did:?}");
}

#[test]
fn a_source_that_several_have_is_read_once_however_many_fit_at_a_time() {
    for slots in [1, 2, 3, 8] {
        let (engine, did) = engine(slots);
        let (one, other) = (source(1, 400), source(2, 400));
        let all = [&one, &one, &other, &one, &one].into_iter().zip(1..);
        let mut requests: Vec<Request> =
            all.clone().map(|(source, tokens)| Request::new(asked(source, tokens), &LIMITS).unwrap()).collect();
        share_prompt(&mut requests);
        let streams = engine.submit_all(requests).unwrap();
        for ((source, tokens), stream) in all.zip(streams) {
            assert_eq!(collect(stream).ids, translation(source, tokens), "{slots} slots");
        }
        assert_eq!(sources(&did), [Did::Source(400); 2], "{slots} slots: two sources, one of them for four");
        assert_eq!(engine.stats().prompt_tokens, 800);
    }
}

/// Requests that are in their slots, behind others whose sources are read slowly.
struct Waiting {
    engine: EngineHandle,
    did: Arc<Mutex<Vec<Did>>>,
    others: Vec<EventStream>,
    streams: Vec<EventStream>,
}

impl Waiting {
    fn of(requests: impl IntoIterator<Item = RequestParameters>) -> Self {
        let (engine, did) = start(Translator::new(16, Duration::ZERO).source(Duration::from_millis(60)));
        let others = (0..10).map(|from| asked(&source(from, 40), 1));
        let mut requests: Vec<Request> =
            others.chain(requests).map(|one| Request::new(one, &LIMITS).unwrap()).collect();
        share_prompt(&mut requests);
        let mut others = engine.submit_all(requests).unwrap();
        let streams = others.split_off(10);
        // Taken all at once: when the first has its source, all have their slots.
        wait_for("the first source", || !sources(&did).is_empty());
        Self { engine, did, others, streams }
    }

    /// How often a source of so many tokens was read by the time that the others have ended.
    fn read_in_all(self, length: usize) -> usize {
        for other in self.others {
            assert_eq!(collect(other).ids.len(), 1);
        }
        sources(&self.did).iter().filter(|did| **did == Did::Source(length)).count()
    }
}

#[test]
fn who_is_interrupted_before_the_source_is_read_gets_nothing_and_a_turn_goes_on_after() {
    let text = source(1, 300);
    let plain = RequestParameters { snapshots: END, ..asked(&source(2, 301), 5) };
    let begun = Start::Session(Arc::new(Snapshot::empty(1)));
    let of_session = RequestParameters { start: begun, snapshots: END, ..asked(&text, 5) };
    let mut waiting = Waiting::of([plain, of_session]);
    for stream in &waiting.streams {
        stream.interrupt().now();
    }
    let runs: Vec<Run> = waiting.streams.drain(..).map(collect).collect();
    for run in &runs {
        assert_eq!((run.finish().reason, run.ids.len()), (FinishReason::Interrupted, 0));
    }
    let kept = runs[1].finish().snapshot.clone().unwrap();
    assert_eq!((kept.read, &kept.pending), (300, &vec![FIRST]), "a turn has its source read");
    assert_eq!(turn(&waiting.engine, &kept, asked(&[], 5)).0.ids, translation(&text, 5));
    assert_eq!(waiting.read_in_all(301), 0, "nobody reads what nobody wants");
}

#[test]
fn where_its_reader_leaves_before_its_source_is_read_the_next_reads_it() {
    let text = source(1, 300);
    let mut waiting = Waiting::of([(); 3].map(|()| asked(&text, 4)));
    drop(waiting.streams.remove(0));
    wait_for("the reader to be gone", || waiting.engine.stats().cancelled == 1);
    assert!(!sources(&waiting.did).contains(&Did::Source(300)), "the source's turn had not come");
    for stream in waiting.streams.drain(..) {
        assert_eq!(collect(stream).ids, translation(&text, 4));
    }
    assert_eq!(waiting.read_in_all(300), 1);
}

#[test]
fn a_reader_that_is_interrupted_still_reads_the_source_for_the_others() {
    let text = source(1, 300);
    let mut waiting = Waiting::of([(); 3].map(|()| asked(&text, 4)));
    waiting.streams[0].interrupt().now();
    assert!(!sources(&waiting.did).contains(&Did::Source(300)), "the source's turn had not come");
    let first = collect(waiting.streams.remove(0));
    assert_eq!((first.finish().reason, first.ids.len()), (FinishReason::Interrupted, 0));
    for stream in waiting.streams.drain(..) {
        assert_eq!(collect(stream).ids, translation(&text, 4));
    }
    assert_eq!(waiting.read_in_all(300), 1);
}

#[derive(Debug)]
struct Broken;

impl Grammar for Broken {
    fn start(&self) -> Box<dyn Constraint> {
        panic!("scripted panic")
    }
}

#[test]
fn where_its_reader_fails_the_next_reads_the_source() {
    for slots in [1, 4] {
        let (engine, did) = engine(slots);
        let shared = |all: [RequestParameters; 3]| {
            let mut requests = all.map(|one| Request::new(one, &LIMITS).unwrap());
            share_prompt(&mut requests);
            engine.submit_all(requests.into()).unwrap().into_iter().map(collect).collect::<Vec<Run>>()
        };
        let text = source(1, 300);
        let broken = RequestParameters { grammar: Some(Arc::new(Broken)), ..asked(&text, 4) };
        let said = shared([broken, asked(&text, 4), asked(&text, 4)]);
        assert_eq!(said[0].end, Some(Err(Failure::Internal)));
        assert!(said[1..].iter().all(|run| run.ids == translation(&text, 4)), "{slots} slots");
        // What no one can read fails for each.
        let said = shared([(); 3].map(|()| asked(&[5, BROKEN], 4)));
        assert!(said.iter().all(|run| run.end == Some(Err(Failure::Internal))), "{slots} slots");
        assert_eq!(sources(&did), [Did::Source(300)]);
        assert_eq!(run(&engine, asked(&text, 2)).ids, translation(&text, 2));
    }
}

#[test]
fn an_engine_that_reads_a_long_source_is_not_stuck() {
    let options = EngineOptions { step_limit: Duration::from_millis(300), ..EngineOptions::default() };
    let model = Translator::new(1, Duration::ZERO).source(Duration::from_millis(1500));
    let (engine, did) = start_with(model, options);
    let text = source(1, 900);
    let stream = submit(&engine, asked(&text, 2));
    wait_for("the source to be read", || {
        assert!(engine.is_ready(), "it counts as stuck");
        !sources(&did).is_empty()
    });
    assert_eq!(collect(stream).ids, translation(&text, 2));
    assert!(engine.is_ready());
}

#[test]
fn a_source_that_was_read_before_its_turn_is_counted_once() {
    let (engine, _) = engine(1);
    let (_, read) = turn(&engine, &Snapshot::empty(1), asked(&source(1, 500), 0));
    let (said, _) = turn(&engine, &read, asked(&[], 3));
    assert_eq!((said.ids.len(), said.finish().prompt_tokens), (3, 0));
    assert_eq!(engine.stats().prompt_tokens, 500, "the text's first token is none of the prompt's");
}

#[test]
fn an_answer_cut_anywhere_is_the_answer_in_one_piece() {
    let text = source(4, 500);
    let (here, did) = engine(2);
    let (there, _) = engine(2);
    let (whole, kept) = turn(&here, &Snapshot::empty(5), asked(&text, 12));
    assert_eq!(whole.ids, translation(&text, 12));
    assert_eq!((kept.read, kept.pending.len(), kept.tokens()), (512, 1, 513));
    assert_eq!(kept.history, History::of_source(&text).extended(&[FIRST]).extended(&whole.ids[..11]));
    // At nothing: the source alone is read.
    for cut in 0..12 {
        let (first, between) = turn(&here, &Snapshot::empty(5), asked(&text, cut));
        let (second, end) = turn(&there, &between, asked(&[], 12 - cut));
        assert_eq!([first.ids, second.ids].concat(), whole.ids, "cut after {cut}");
        assert!(*end == *kept, "cut after {cut}");
    }
    assert_eq!(sources(&did), [Did::Source(500); 13]);
}

#[test]
fn a_new_source_takes_the_place_of_the_one_before_and_of_its_text() {
    let (engine, did) = engine(1);
    let (one, other) = (source(1, 40), source(2, 30));
    let penalised = |source: &[u32]| RequestParameters {
        sampling: SamplingParams {
            temperature: 0.0,
            repetition_penalty: 1.9,
            presence_penalty: 1.5,
            ..Default::default()
        },
        ..asked(source, 6)
    };
    let (_, after_one) = turn(&engine, &Snapshot::empty(3), penalised(&one));
    let (second, after_both) = turn(&engine, &after_one, penalised(&other));
    let (alone, after_other) = turn(&engine, &Snapshot::empty(3), penalised(&other));
    assert_eq!(second.ids, alone.ids);
    assert_eq!(*after_both, *after_other, "nothing is left of what was before, and it goes on alike");
    assert_ne!(after_both.history, after_one.history);
    assert_eq!(sources(&did).len(), 3);
    // The version before is as it was.
    let (again, _) = turn(&engine, &after_one, asked(&[], 3));
    assert_eq!(again.ids, translation(&one, 9)[6..]);

    // Of the conversation the random numbers go on.
    let drawn = |source: &[u32]| RequestParameters { sampling: SamplingParams::default(), ..asked(source, 8) };
    let (_, first) = turn(&engine, &Snapshot::empty(3), drawn(&one));
    let (_, second) = turn(&engine, &first, drawn(&one));
    assert_eq!((first.sampler.draws, second.sampler.draws, second.sampler.seed), (8, 16, 3));
}

#[test]
fn a_stop_string_leaves_nothing_of_itself_and_keeps_the_source() {
    let (engine, _) = engine(2);
    let tokenizer = Tokenizer::load(&crate::common::checkpoint(), LIMITS.vocab_size, &[]).unwrap();
    let mut stopped = 0;
    for from in 0..20 {
        let text = source(from, 50);
        let (free, _) = turn(&engine, &Snapshot::empty(1), asked(&text, 10));
        let bytes: usize = free.ids[..4].iter().map(|id| tokenizer.vocabulary().bytes(*id).len()).sum();
        let Some(stop) = free.text.get(bytes..).map(|rest| rest.chars().take(2).collect::<String>()) else { continue };
        if stop.contains('\u{fffd}') || free.text.find(&stop) != Some(bytes) {
            continue;
        }
        let (said, kept) =
            turn(&engine, &Snapshot::empty(1), RequestParameters { stop: vec![stop], ..asked(&text, 10) });
        assert_eq!((said.finish().reason, said.text.as_str()), (FinishReason::Stop, &free.text[..bytes]));
        assert_eq!((kept.read, kept.pending.len()), (50 + 1 + 4, 0));
        assert_eq!(kept.history, History::of_source(&text).extended(&[FIRST]).extended(&free.ids[..4]));
        let next = source(from + 1, 20);
        assert_eq!(turn(&engine, &kept, asked(&next, 4)).0.ids, translation(&next, 4));
        stopped += 1;
    }
    assert!(stopped > 3, "only {stopped} texts could be stopped");
}

#[test]
fn a_stop_string_that_begins_within_a_token_keeps_what_it_showed_before_and_the_source() {
    let (engine, _) = engine(2);
    let tokenizer = Tokenizer::load(&crate::common::checkpoint(), LIMITS.vocab_size, &[]).unwrap();
    let mut stopped = 0;
    for from in 0..60 {
        let text = source(from, 50);
        let (free, _) = turn(&engine, &Snapshot::empty(1), asked(&text, 10));
        let bytes = |tokens: usize| -> usize {
            free.ids[..tokens].iter().map(|id| tokenizer.vocabulary().bytes(*id).len()).sum()
        };
        if !free.text.is_ascii() || bytes(10) != free.text.len() {
            continue;
        }
        // The fifth token's last letter and the sixth's first.
        let (start, end) = (bytes(4), bytes(5));
        let (shown, stop) = (&free.text[start..end - 1], &free.text[end - 1..=end]);
        let held_before = free.text[..start].ends_with(&stop[..1]);
        if shown.is_empty() || held_before || free.text.find(stop) != Some(end - 1) {
            continue;
        }
        let stops = RequestParameters { stop: vec![stop.to_owned()], ..asked(&text, 10) };
        let (said, kept) = turn(&engine, &Snapshot::empty(1), stops);
        assert_eq!((said.finish().reason, said.text.as_str()), (FinishReason::Stop, &free.text[..end - 1]));
        let rest = tokenizer.encode_more(shown).unwrap();
        let read = [&[FIRST], &free.ids[..4], &rest[..]].concat();
        assert_eq!((kept.read, kept.pending.len()), (50 + read.len() as u64, 0));
        assert_eq!(kept.history, History::of_source(&text).extended(&read));
        assert_eq!(kept.state, state_after(&text, &read), "the source is in it, and all that was shown");
        let next = source(from + 1, 20);
        assert_eq!(turn(&engine, &kept, asked(&next, 4)).0.ids, translation(&next, 4));
        stopped += 1;
    }
    assert!(stopped > 3, "only {stopped} texts could be stopped");
}

#[test]
fn what_is_no_source_is_refused() {
    let refused = |parameters| Request::new(parameters, &LIMITS).unwrap_err().to_string();
    let words = format!("prompt must be 1 to {LONGEST} tokens long, found");
    assert_eq!(refused(asked(&source(1, LONGEST + 1), 1)), format!("{words} {} tokens", LONGEST + 1));
    assert_eq!(refused(asked(&[], 1)), format!("{words} 0 tokens"));
    let scored = RequestParameters { prompt_logprobs: Some(1), ..asked(&[5], 1) };
    let words =
        "prompt_logprobs must be absent where the prompt is a source, which the model does not predict, found it";
    assert_eq!(refused(scored), words);
    // A text that goes on without a source would fail in the step that it shares with others.
    let crafted = Snapshot { pending: vec![5], ..Snapshot::empty(1) };
    for begun in [Snapshot::empty(1), crafted] {
        let start = Start::Session(Arc::new(begun));
        let words = "prompt must be at least one token long where no source has been read, found none";
        assert_eq!(refused(RequestParameters { start, ..asked(&[], 1) }), words);
    }
    let begun = Arc::new(Snapshot { state: vec![1.0; 4], read: 2, ..Snapshot::default() });
    let known = RequestParameters { start: Start::Prefix(begun), ..asked(&[5, 6, 7], 1) };
    let request = Request::new(known, &LIMITS).unwrap();
    assert_eq!(request.cached_tokens(), 0, "what a source begins with is of no use");
}

#[test]
fn a_source_that_cannot_be_read_ends_its_own_request() {
    let (engine, _) = engine(4);
    let running = submit(&engine, asked(&[9], 2000));
    let broken = run(&engine, asked(&[5, BROKEN], 3));
    assert_eq!(broken.end, Some(Err(Failure::Internal)));
    assert_eq!(collect(running).ids, translation(&[9], 2000));
}

#[test]
fn a_file_whose_source_has_no_length_is_refused() {
    let (engine, _) = engine(1);
    let (_, kept) = turn(&engine, &Snapshot::empty(1), asked(&source(1, 40), 2));
    for (tokens, said) in [(0.0, "0"), (1.5, "1.5"), (-1.0, "-1"), (43.0, "43"), (1e9, "1000000000")] {
        let mut state = kept.state.clone();
        state[3] = tokens;
        let bytes = files().encode(&Snapshot { state, ..(*kept).clone() });
        assert_eq!(files().decode(&bytes), Err(FormatError::Source { found: said.into(), max: kept.read }));
    }
    let shorter = tidegate_server::session::Codec { sources: 39, ..files() };
    let refused = shorter.decode(&files().encode(&kept)).unwrap_err().to_string();
    assert_eq!(refused, "tensor source must be a number of tokens from 1 to 39, found 40");
}
