//! States that take their time to move: a request whose state is on its way waits alone, its slot is nobody else's
//! until the state is there, and what comes of it is what comes of states that move at once.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use crate::common::fake::{Calls, Fake, rules};
use crate::common::runs::{LIMITS, Run, collect, greedy, run};
use crate::common::slow::{Moves, Slow};
use crate::common::{checkpoint, runs};
use tidegate_model::{Decoder, Device, LanguageModel, ModelRunner, SamplingParams};
use tidegate_server::engine::{
    EngineHandle, EngineOptions, EngineThread, Event, EventStream, Failure, FinishReason, Limits, Request,
    RequestParameters, Snapshots, Start, TextRules, share_prompt, spawn,
};
use tidegate_server::session::Snapshot;

const END: Snapshots = Snapshots { prompt: false, end: true };

/// A scripted model of so many slots whose states move when the test says so.
struct Stage {
    engine: EngineHandle,
    thread: EngineThread,
    moves: Arc<Moves>,
    calls: Arc<Calls>,
}

fn stage(slots: usize) -> Stage {
    staged(slots, EngineOptions::default())
}

fn staged(slots: usize, options: EngineOptions) -> Stage {
    let fake = Fake::new(slots);
    let calls = fake.calls();
    let (model, moves) = Slow::new(fake);
    let (engine, thread) = spawn(model, rules(), options).unwrap();
    Stage { engine, thread, moves, calls }
}

fn submit(engine: &EngineHandle, parameters: RequestParameters) -> EventStream {
    engine.submit(Request::new(parameters, &LIMITS).unwrap()).unwrap()
}

/// A turn after token 9.
fn turn(prompt: &[u32], max_tokens: usize) -> RequestParameters {
    let start = Start::Session(Arc::new(Snapshot { state: vec![9.0], read: 1, ..Snapshot::empty(0) }));
    RequestParameters { start, snapshots: END, ..greedy(prompt, max_tokens) }
}

/// A text that goes on for as long as it is read.
fn endless(engine: &EngineHandle) -> EventStream {
    submit(engine, RequestParameters { ignore_eos: true, ..greedy(&[1], 1_000_000) })
}

/// Reads on until so many tokens have come: more than wait anywhere, so that the engine must have made some since.
fn goes_on(stream: &mut EventStream) {
    let mut tokens = 0;
    while tokens < 1_000 {
        match stream.blocking_next() {
            Some(Event::Delta(delta)) => tokens += delta.token_ids.len(),
            other => panic!("{other:?}"),
        }
    }
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the engine has come round a few times more.
fn turns(moves: &Moves) {
    let asked = moves.asked();
    wait_for("the engine's loop", || moves.asked() > asked + 3);
}

/// Whether nothing has come that was not read.
fn is_silent(stream: &mut EventStream) -> bool {
    stream.poll_next(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// What is to be the same however long the states move.
fn outcome(run: &Run) -> impl PartialEq + std::fmt::Debug + use<> {
    let end = run.end.as_ref().map(|end| end.as_ref().map(|finish| (finish.reason, finish.snapshot.clone())));
    let end = format!("{end:?}");
    (run.text.clone(), run.ids.clone(), run.logprobs.clone(), run.read.clone(), run.prompt_logprobs.clone(), end)
}

/// A request, how many moves it has before the one that is looked at, and how many tokens come before that.
fn all_kinds() -> [(RequestParameters, usize, usize); 4] {
    let prompt = RequestParameters { snapshots: Snapshots { prompt: true, end: false }, ..greedy(&[1, 2, 3], 2) };
    // Its fourth token may be the beginning of the stop string.
    let marked = RequestParameters { stop: vec!["ez".into()], ..turn(&[u32::from(b'a')], 6) };
    let end = RequestParameters { snapshots: END, ..greedy(&[1, 2, 3], 2) };
    [(turn(&[3], 2), 0, 0), (prompt, 0, 0), (marked, 1, 4), (end, 0, 2)]
}

/// Submits a request, and holds it at its move after so many others and tokens.
fn held(stage: &Stage, (parameters, moves, tokens): (RequestParameters, usize, usize)) -> (EventStream, usize) {
    let begun = stage.moves.begun();
    stage.moves.hold();
    let mut stream = submit(&stage.engine, parameters);
    for before in 0..moves {
        wait_for("a move", || stage.moves.begun() > begun + before);
        stage.moves.under_way().into_iter().for_each(|slot| stage.moves.let_end(slot));
    }
    let mut come = 0;
    while come < tokens {
        let Some(Event::Delta(delta)) = stream.blocking_next() else { panic!("no text") };
        come += delta.token_ids.len();
    }
    wait_for("the move", || stage.moves.begun() > begun + moves);
    assert!(is_silent(&mut stream));
    (stream, come)
}

#[test]
fn others_go_on_while_a_state_moves_and_what_it_is_for_comes_after() {
    for kind in all_kinds() {
        let stage = stage(2);
        let expected = run(&stage.engine, kind.0.clone());
        let mut other = endless(&stage.engine);
        goes_on(&mut other);
        let (mut stream, come) = held(&stage, kind);
        goes_on(&mut other);
        assert!(is_silent(&mut stream));
        stage.moves.release(false);
        let rest = collect(stream);
        assert_eq!((&rest.ids[..], &rest.read), (&expected.ids[come..], &expected.read));
        assert_eq!(rest.finish().snapshot, expected.finish().snapshot);
        goes_on(&mut other);
        stage.moves.check();
    }
}

#[test]
fn a_move_that_fails_ends_its_own_request_alone() {
    for kind in all_kinds() {
        let stage = stage(2);
        let expected = run(&stage.engine, kind.0.clone());
        let mut other = endless(&stage.engine);
        let (stream, _) = held(&stage, kind.clone());
        stage.moves.release(true);
        assert_eq!(collect(stream).end, Some(Err(Failure::Internal)));
        goes_on(&mut other);
        stage.moves.release(false);
        assert_eq!(outcome(&run(&stage.engine, kind.0)), outcome(&expected));
        assert_eq!(stage.engine.stats().failed, 1);
        stage.moves.check();
    }
}

#[test]
fn a_slot_is_nobodys_until_the_state_that_nobody_waits_for_has_moved() {
    for (kind, fails) in all_kinds().into_iter().zip([false, true, true, false]) {
        let stage = stage(1);
        let Stage { engine, moves, .. } = &stage;
        drop(held(&stage, kind));
        wait_for("the cancellation", || engine.stats().cancelled == 1);
        let next = submit(engine, greedy(&[5], 2));
        turns(moves);
        let stats = engine.stats();
        assert_eq!((stats.running, stats.waiting, moves.under_way()), (1, 1, vec![0]));
        moves.release(fails);
        assert_eq!(collect(next).ids, [6, 7]);
        moves.check();
        wait_for("the end", || engine.stats().running == 0);
    }
}

#[test]
fn an_interruption_waits_for_the_state() {
    let [start, .., end] = all_kinds();
    for (kind, reason) in [(start, FinishReason::Interrupted), (end, FinishReason::Length)] {
        let stage = stage(1);
        let (mut stream, _) = held(&stage, kind);
        stream.interrupt().now();
        turns(&stage.moves);
        assert!(is_silent(&mut stream));
        stage.moves.release(false);
        let rest = collect(stream);
        let snapshot = rest.finish().snapshot.as_ref().unwrap();
        assert_eq!((rest.ids.len(), rest.finish().reason), (0, reason));
        let kept = if reason == FinishReason::Length { (4, vec![4.0]) } else { (1, vec![9.0]) };
        assert_eq!((snapshot.read, snapshot.state.clone()), kept);
        stage.moves.check();
    }
}

#[test]
fn draining_waits_for_states_and_aborting_does_not() {
    let [start, .., end] = all_kinds();
    let drained = stage(2);
    let (mut stream, _) = held(&drained, end.clone());
    drained.engine.drain();
    turns(&drained.moves);
    assert!(is_silent(&mut stream));
    drained.moves.release(false);
    assert!(collect(stream).finish().snapshot.is_some());
    drained.thread.join();
    let aborted = stage(2);
    let streams = [held(&aborted, start).0, held(&aborted, end).0];
    aborted.engine.abort();
    aborted.thread.join();
    for stream in streams {
        assert_eq!(collect(stream).end, Some(Err(Failure::ShuttingDown)));
    }
}

#[test]
fn an_engine_ends_with_a_device_that_is_lost_in_a_move() {
    for (kind, leaves) in all_kinds().into_iter().flat_map(|kind| [(kind.clone(), false), (kind, true)]) {
        let stage = stage(2);
        let (stream, _) = held(&stage, kind);
        let stream = if leaves { None } else { Some(stream) };
        stage.calls.lost.store(true, SeqCst);
        stage.moves.release(false);
        stage.thread.join();
        assert!(!stage.engine.is_ready());
        let end = stream.map(|stream| collect(stream).end);
        assert!(end.is_none_or(|end| matches!(end, Some(Err(_)))));
    }
}

#[test]
fn no_reader_is_late_while_the_engine_waits_for_a_state() {
    // The last of its tokens finds no room: the reader is behind from then on, and at once for too long.
    let stage = staged(1, EngineOptions { stall_limit: Duration::ZERO, ..EngineOptions::default() });
    stage.moves.hold();
    let begun = stage.moves.begun();
    let _unread = submit(&stage.engine, RequestParameters { snapshots: END, ..greedy(&[1], 33) });
    wait_for("the end", || stage.moves.begun() == begun + 1);
    turns(&stage.moves);
    stage.moves.release(false);
    wait_for("its account", || stage.engine.stats().running == 0);
    assert_eq!((stage.engine.stats().finished, stage.engine.stats().failed), (1, 0));
}

#[test]
fn an_engine_whose_states_do_not_arrive_is_not_ready_until_one_does() {
    let stage = staged(2, EngineOptions { step_limit: Duration::from_millis(200), ..EngineOptions::default() });
    stage.moves.hold();
    let stream = submit(&stage.engine, turn(&[1], 2));
    wait_for("the move to be late", || !stage.engine.is_ready());
    stage.moves.release(false);
    wait_for("the engine to be ready again", || stage.engine.is_ready());
    assert_eq!(collect(stream).ids, [2, 3]);
}

#[test]
fn a_conversation_that_goes_on_in_its_slot_has_nothing_to_move_there() {
    let Stage { engine, moves, thread: _thread, .. } = stage(2);
    let begun = moves.begun();
    let first = run(&engine, RequestParameters { snapshots: END, ..greedy(&[1, 2], 3) });
    let start = Start::Session(first.finish().snapshot.clone().unwrap());
    let second = run(&engine, RequestParameters { start, snapshots: END, ..greedy(&[8], 2) });
    assert_eq!((second.ids.as_slice(), moves.begun()), (&[9, 10][..], begun + 2));
    moves.check();
}

/// Requests of one prompt, which go on from one state.
fn shared(engine: &EngineHandle, count: usize) -> Vec<EventStream> {
    let start = Start::Prefix(Arc::new(Snapshot { state: vec![9.0], read: 2, ..Snapshot::default() }));
    let of = |_| RequestParameters { start: start.clone(), ..greedy(&[&[1; 600][..], &[40]].concat(), 2) };
    let mut requests: Vec<_> = (0..count).map(|at| Request::new(of(at), &LIMITS).unwrap()).collect();
    share_prompt(&mut requests);
    engine.submit_all(requests).unwrap()
}

#[test]
fn a_prompt_is_handed_to_one_whose_own_start_is_still_on_its_way() {
    let Stage { engine, moves, calls, thread: _thread } = stage(3);
    calls.chunks.lock().unwrap().clear();
    moves.hold();
    let mut streams = shared(&engine, 4);
    wait_for("three starts", || moves.under_way() == [0, 1, 2]);
    // The first reads, the second waits for it; of the third not even the start is there.
    moves.let_end(0);
    moves.let_end(1);
    wait_for("the prompt's end", || moves.under_way() == [2, 0]);
    moves.let_end(0);
    assert_eq!(collect(streams.remove(0)).ids, [41, 42]);
    // The fourth takes the first one's slot, and finds the prompt there. It leaves before it has it.
    wait_for("the handovers", || moves.under_way() == [2, 1, 0]);
    drop(streams.pop());
    wait_for("the cancellation", || engine.stats().cancelled == 1);
    moves.let_end(2);
    wait_for("the third's handover", || moves.under_way() == [1, 0, 2]);
    moves.release(false);
    for stream in streams {
        assert_eq!(collect(stream).ids, [41, 42]);
    }
    assert_eq!(*calls.chunks.lock().unwrap(), [256, 256, 86], "it was read once");
    moves.check();
}

#[test]
fn where_its_reader_leaves_before_the_prompt_is_out_the_next_reads_it() {
    let Stage { engine, moves, calls, thread: _thread } = stage(3);
    calls.chunks.lock().unwrap().clear();
    moves.hold();
    let mut streams = shared(&engine, 3);
    wait_for("three starts", || moves.under_way() == [0, 1, 2]);
    moves.let_end(0);
    moves.let_end(2);
    wait_for("the prompt's end", || moves.under_way() == [1, 0]);
    drop(streams.remove(0));
    wait_for("the cancellation", || engine.stats().cancelled == 1);
    turns(&moves);
    assert_eq!(calls.chunks.lock().unwrap().len(), 3, "the next has not even its start");
    moves.release(false);
    for stream in streams {
        assert_eq!(collect(stream).ids, [41, 42]);
    }
    assert_eq!(calls.chunks.lock().unwrap().len(), 6);
    moves.check();
}

/// An engine around the shipped decoder.
fn decoder<M: LanguageModel + 'static>(wrap: impl FnOnce(ModelRunner<Decoder>) -> M) -> EngineHandle {
    let decoder = tidegate_model::checkpoint::load(&checkpoint(), &Device::Cpu).unwrap();
    let pool = decoder.new_pool(4).unwrap();
    let tokenizer = Arc::clone(&runs::shipped().tokenizer);
    let rules = TextRules {
        vocabulary: Arc::clone(tokenizer.vocabulary()),
        eos: Arc::clone(tokenizer.eos()),
        encode: Arc::new(move |text: &str| tokenizer.encode_more(text).unwrap()),
    };
    let model = wrap(ModelRunner::new(decoder, pool));
    spawn(model, rules, EngineOptions::default()).unwrap().0
}

/// Prompts that are shared, scored and gone on from; answers that are cut by stop strings or may be; two turns of each.
fn conversations(engine: &EngineHandle, limits: &Limits) -> Vec<Run> {
    let encode = |text: &str| runs::shipped().tokenizer.encode(text).unwrap();
    let snapshots = Snapshots { prompt: true, end: true };
    let sampling = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    let stop: Vec<String> = ["the", " a", "and the", ". He", "ing "].map(str::to_owned).into();
    let first = |seed: u64| RequestParameters {
        snapshots,
        prompt: encode(["Once upon a time there was a café. ", "It was"][seed as usize % 2]),
        max_tokens: 4 + seed as usize,
        sampling: sampling(seed),
        stop: if seed < 5 { stop.clone() } else { Vec::new() },
        prompt_logprobs: (seed == 5).then_some(1),
        logprobs: Some(1),
        ignore_eos: true,
        ..RequestParameters::default()
    };
    let all = |parameters: Vec<RequestParameters>| -> Vec<Run> {
        let mut requests: Vec<_> = parameters.into_iter().map(|one| Request::new(one, limits).unwrap()).collect();
        share_prompt(&mut requests);
        engine.submit_all(requests).unwrap().into_iter().map(collect).collect()
    };
    let mut runs = all((0..10).map(first).collect());
    let next = runs.iter().zip(0..).map(|(run, seed)| RequestParameters {
        start: Start::Session(run.finish().snapshot.clone().unwrap()),
        prompt: if seed < 5 { encode("Then") } else { Vec::new() },
        prompt_logprobs: None,
        ..first(seed)
    });
    let next = next.collect();
    runs.extend(all(next));
    runs
}

#[test]
fn no_answer_depends_on_how_long_states_move() {
    let limits = &runs::shipped().limits;
    let expected: Vec<_> = conversations(&decoder(|model| model), limits).iter().map(outcome).collect();
    for seed in 1..6 {
        let mut moves = None;
        let engine = decoder(|model| {
            let (model, those) = Slow::new(model);
            moves = Some(those);
            model
        });
        let moves = moves.unwrap();
        moves.take_turns(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let found: Vec<_> = conversations(&engine, limits).iter().map(outcome).collect();
        assert!(found == expected, "seed {seed}");
        assert!(moves.begun() > 30, "{}", moves.begun());
        moves.check();
    }
}
