//! State transfers that take time. Only the request whose state is in transfer waits, no other request gets its slot
//! meanwhile, and the results are the same as with instant transfers.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Waker};
use std::time::Duration;

use crate::common::fake::{Calls, Fake, rules};
use crate::common::runs::{LIMITS, Run, Taken, collect, greedy, kept_at, run, wait_for};
use crate::common::slow::{Slow, Transfers};
use crate::common::{checkpoint, runs};
use tidegate_model::{Decoder, Device, LanguageModel, ModelRunner, SamplingParams};
use tidegate_server::engine::{
    EngineHandle, EngineOptions, EngineThread, Event, EventStream, Failure, FinishReason, Limits, Request,
    RequestParameters, Start, TextRules, share_prompt, spawn,
};
use tidegate_server::session::Snapshot;

/// An engine with a scripted model whose transfers the test controls.
struct Setup {
    engine: EngineHandle,
    thread: EngineThread,
    transfers: Arc<Transfers>,
    calls: Arc<Calls>,
}

fn setup(slots: usize) -> Setup {
    setup_with(slots, EngineOptions::default())
}

fn setup_with(slots: usize, options: EngineOptions) -> Setup {
    let fake = Fake::new(slots);
    let calls = fake.calls();
    let (model, transfers) = Slow::new(fake);
    let (engine, thread) = spawn(model, rules(), options).unwrap();
    Setup { engine, thread, transfers, calls }
}

fn submit(engine: &EngineHandle, parameters: RequestParameters) -> EventStream {
    engine.submit(Request::new(parameters, &LIMITS).unwrap()).unwrap()
}

/// Returns a turn of a session whose last token is 9.
fn turn(prompt: &[u32], max_tokens: usize) -> RequestParameters {
    let start = Start::Session(Arc::new(Snapshot { state: vec![9.0], read: 1, ..Snapshot::empty(0) }));
    RequestParameters { start, snapshot: true, ..greedy(prompt, max_tokens) }
}

/// Starts a text that continues until its stream is dropped.
fn endless(engine: &EngineHandle) -> EventStream {
    submit(engine, RequestParameters { ignore_eos: true, ..greedy(&[1], 1_000_000) })
}

/// Reads more tokens than the channel can hold, so the engine must have generated some of them meanwhile.
fn wait_for_tokens(stream: &mut EventStream) {
    let mut tokens = 0;
    while tokens < 1_000 {
        match stream.blocking_next() {
            Some(Event::Delta(delta)) => tokens += delta.token_ids.len(),
            other => panic!("{other:?}"),
        }
    }
}

/// Waits for a few more iterations of the engine's loop.
fn wait_for_polls(transfers: &Transfers) {
    let polls = transfers.polls();
    wait_for("the engine's loop", || transfers.polls() > polls + 3);
}

/// Returns whether the stream has no unread event.
fn is_silent(stream: &mut EventStream) -> bool {
    stream.poll_next(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// Returns the parts of a result that must not depend on how long transfers take.
fn outcome(run: &Run) -> impl PartialEq + std::fmt::Debug + use<> {
    let snapshot = run.end.as_ref().and_then(|end| end.as_ref().ok()?.snapshot.clone());
    let end = format!("{:?}", run.end.as_ref().map(|end| end.as_ref().map(|finish| finish.reason)));
    (run.text.clone(), run.ids.clone(), run.logprobs.clone(), run.prompt_logprobs.clone(), snapshot, end)
}

/// Returns requests, each with the number of transfers and of tokens before the transfer under test.
fn all_kinds() -> [(RequestParameters, usize, usize); 5] {
    let [amid, prompt] = [Some(1), None].map(|mark| kept_at(mark, greedy(&[1, 2, 3], 2)).0);
    // This request's fourth token may begin the stop string.
    let with_stop = RequestParameters { stop: vec!["ez".into()], ..turn(&[u32::from(b'a')], 6) };
    let end = RequestParameters { snapshot: true, ..greedy(&[1, 2, 3], 2) };
    [(turn(&[3], 2), 0, 0), (amid, 0, 0), (prompt, 0, 0), (with_stop, 1, 4), (end, 0, 2)]
}

/// Submits a request and waits for its transfer under test; returns its stream and the number of tokens read so far.
fn started_transfer(
    setup: &Setup,
    (parameters, transfers, tokens): (RequestParameters, usize, usize),
) -> (EventStream, usize) {
    let started = setup.transfers.started();
    setup.transfers.pause();
    let mut stream = submit(&setup.engine, parameters);
    for before in 0..transfers {
        wait_for("a transfer", || setup.transfers.started() > started + before);
        setup.transfers.in_progress().into_iter().for_each(|slot| setup.transfers.finish(slot));
    }
    let mut come = 0;
    while come < tokens {
        let Some(Event::Delta(delta)) = stream.blocking_next() else { panic!("no text") };
        come += delta.token_ids.len();
    }
    wait_for("the transfer", || setup.transfers.started() > started + transfers);
    assert!(is_silent(&mut stream));
    (stream, come)
}

#[test]
fn other_requests_continue_during_a_transfer_and_its_request_continues_after_it() {
    for kind in all_kinds() {
        let setup = setup(2);
        let expected = run(&setup.engine, kind.0.clone());
        let mut other = endless(&setup.engine);
        wait_for_tokens(&mut other);
        let (mut stream, come) = started_transfer(&setup, kind);
        wait_for_tokens(&mut other);
        assert!(is_silent(&mut stream));
        setup.transfers.release(false);
        let rest = collect(stream);
        assert_eq!(rest.ids, expected.ids[come..]);
        assert_eq!(rest.finish().snapshot, expected.finish().snapshot);
        wait_for_tokens(&mut other);
        setup.transfers.check();
    }
}

#[test]
fn a_transfer_that_fails_ends_only_its_own_request() {
    for kind in all_kinds() {
        let setup = setup(2);
        let expected = run(&setup.engine, kind.0.clone());
        let mut other = endless(&setup.engine);
        let (stream, _) = started_transfer(&setup, kind.clone());
        setup.transfers.release(true);
        assert_eq!(collect(stream).end, Some(Err(Failure::Internal)));
        wait_for_tokens(&mut other);
        setup.transfers.release(false);
        assert_eq!(outcome(&run(&setup.engine, kind.0)), outcome(&expected));
        assert_eq!(setup.engine.stats().failed, 1);
        setup.transfers.check();
    }
}

#[test]
fn a_cancelled_requests_slot_is_free_only_after_its_transfer() {
    for (kind, fails) in all_kinds().into_iter().zip([false, true, true, false]) {
        let setup = setup(1);
        let Setup { engine, transfers, .. } = &setup;
        drop(started_transfer(&setup, kind));
        wait_for("the cancellation", || engine.stats().cancelled == 1);
        let next = submit(engine, greedy(&[5], 2));
        wait_for_polls(transfers);
        let stats = engine.stats();
        assert_eq!((stats.running, stats.waiting, transfers.in_progress()), (1, 1, vec![0]));
        transfers.release(fails);
        assert_eq!(collect(next).ids, [6, 7]);
        transfers.check();
        wait_for("the end", || engine.stats().running == 0);
    }
}

#[test]
fn an_interruption_waits_for_the_transfer() {
    let [start, .., end] = all_kinds();
    for (kind, reason) in [(start, FinishReason::Interrupted), (end, FinishReason::Length)] {
        let setup = setup(1);
        let (mut stream, _) = started_transfer(&setup, kind);
        stream.interrupt().now();
        wait_for_polls(&setup.transfers);
        assert!(is_silent(&mut stream));
        setup.transfers.release(false);
        let rest = collect(stream);
        let snapshot = rest.finish().snapshot.as_ref().unwrap();
        assert_eq!((rest.ids.len(), rest.finish().reason), (0, reason));
        let expected = if reason == FinishReason::Length { (4, vec![4.0]) } else { (1, vec![9.0]) };
        assert_eq!((snapshot.read, snapshot.state.clone()), expected);
        setup.transfers.check();
    }
}

#[test]
fn draining_waits_for_transfers_and_aborting_does_not() {
    let [start, .., end] = all_kinds();
    let drained = setup(2);
    let (mut stream, _) = started_transfer(&drained, end.clone());
    drained.engine.drain();
    wait_for_polls(&drained.transfers);
    assert!(is_silent(&mut stream));
    drained.transfers.release(false);
    assert!(collect(stream).finish().snapshot.is_some());
    drained.thread.join();
    let aborted = setup(2);
    let streams = [started_transfer(&aborted, start).0, started_transfer(&aborted, end).0];
    aborted.engine.abort();
    aborted.thread.join();
    for stream in streams {
        assert_eq!(collect(stream).end, Some(Err(Failure::ShuttingDown)));
    }
}

#[test]
fn the_engine_ends_when_its_device_is_lost_during_a_transfer() {
    for (kind, disconnects) in all_kinds().into_iter().flat_map(|kind| [(kind.clone(), false), (kind, true)]) {
        let setup = setup(2);
        let (stream, _) = started_transfer(&setup, kind);
        let stream = if disconnects { None } else { Some(stream) };
        setup.calls.lost.store(true, SeqCst);
        setup.transfers.release(false);
        setup.thread.join();
        assert!(!setup.engine.is_ready());
        let end = stream.map(|stream| collect(stream).end);
        assert!(end.is_none_or(|end| matches!(end, Some(Err(_)))));
    }
}

#[test]
fn a_client_does_not_stall_while_the_engine_waits_for_a_transfer() {
    // The last token does not fit into the channel, so the client is behind. A limit of 0 makes that a stall at once.
    let setup = setup_with(1, EngineOptions { stall_limit: Duration::ZERO, ..EngineOptions::default() });
    setup.transfers.pause();
    let started = setup.transfers.started();
    let _unread = submit(&setup.engine, RequestParameters { snapshot: true, ..greedy(&[1], 33) });
    wait_for("the end", || setup.transfers.started() == started + 1);
    wait_for_polls(&setup.transfers);
    setup.transfers.release(false);
    wait_for("the end of the request", || setup.engine.stats().running == 0);
    assert_eq!((setup.engine.stats().finished, setup.engine.stats().failed), (1, 0));
}

#[test]
fn an_engine_is_not_ready_while_a_transfer_takes_too_long() {
    let setup = setup_with(2, EngineOptions { step_limit: Duration::from_millis(200), ..EngineOptions::default() });
    setup.transfers.pause();
    let stream = submit(&setup.engine, turn(&[1], 2));
    wait_for("the transfer to be late", || !setup.engine.is_ready());
    setup.transfers.release(false);
    wait_for("the engine to be ready again", || setup.engine.is_ready());
    assert_eq!(collect(stream).ids, [2, 3]);
}

#[test]
fn a_turn_that_continues_in_its_slot_needs_no_import() {
    let Setup { engine, transfers, thread: _thread, .. } = setup(2);
    let started = transfers.started();
    let first = run(&engine, RequestParameters { snapshot: true, ..greedy(&[1, 2], 3) });
    let start = Start::Session(first.finish().snapshot.clone().unwrap());
    let second = run(&engine, RequestParameters { start, snapshot: true, ..greedy(&[8], 2) });
    assert_eq!((second.ids.as_slice(), transfers.started()), (&[9, 10][..], started + 2));
    transfers.check();
}

/// Submits requests that share their prompt and start.
fn shared(engine: &EngineHandle, count: usize) -> Vec<EventStream> {
    let start = Start::Prefix(Arc::new(Snapshot { state: vec![9.0], read: 2, ..Snapshot::default() }));
    let of = |_| RequestParameters { start: start.clone(), ..greedy(&[&[1; 600][..], &[40]].concat(), 2) };
    let mut requests: Vec<_> = (0..count).map(|at| Request::new(of(at), &LIMITS).unwrap()).collect();
    share_prompt(&mut requests);
    engine.submit_all(requests).unwrap()
}

#[test]
fn a_shared_prompt_reaches_a_request_whose_own_start_is_still_in_transfer() {
    let Setup { engine, transfers, calls, thread: _thread } = setup(3);
    calls.chunks.lock().unwrap().clear();
    transfers.pause();
    let mut streams = shared(&engine, 4);
    wait_for("three starts", || transfers.in_progress() == [0, 1, 2]);
    // The first request reads the prompt, the second waits for it, and the third's start is still in transfer.
    transfers.finish(0);
    transfers.finish(1);
    wait_for("the prompt's end", || transfers.in_progress() == [2, 0]);
    transfers.finish(0);
    assert_eq!(collect(streams.remove(0)).ids, [41, 42]);
    // The fourth gets the first one's slot and waits for the prompt there. Its client disconnects before that.
    wait_for("the handovers", || transfers.in_progress() == [2, 1, 0]);
    drop(streams.pop());
    wait_for("the cancellation", || engine.stats().cancelled == 1);
    transfers.finish(2);
    wait_for("the third's handover", || transfers.in_progress() == [1, 0, 2]);
    transfers.release(false);
    for stream in streams {
        assert_eq!(collect(stream).ids, [41, 42]);
    }
    assert_eq!(*calls.chunks.lock().unwrap(), [256, 256, 86], "the prompt is read once");
    transfers.check();
}

#[test]
fn if_the_client_of_the_reading_request_disconnects_before_the_export_the_next_request_reads_the_prompt() {
    let Setup { engine, transfers, calls, thread: _thread } = setup(3);
    calls.chunks.lock().unwrap().clear();
    transfers.pause();
    let mut streams = shared(&engine, 3);
    wait_for("three starts", || transfers.in_progress() == [0, 1, 2]);
    transfers.finish(0);
    transfers.finish(2);
    wait_for("the prompt's end", || transfers.in_progress() == [1, 0]);
    drop(streams.remove(0));
    wait_for("the cancellation", || engine.stats().cancelled == 1);
    wait_for_polls(&transfers);
    assert_eq!(calls.chunks.lock().unwrap().len(), 3, "the next request has no start yet");
    transfers.release(false);
    for stream in streams {
        assert_eq!(collect(stream).ids, [41, 42]);
    }
    assert_eq!(calls.chunks.lock().unwrap().len(), 6);
    transfers.check();
}

/// Starts an engine with the shipped decoder, wrapped by `wrap`.
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

/// Runs two turns of several conversations: shared prompts, prompts with log probabilities, and answers with and
/// without stop strings. Returns each result with the snapshots of its prompt.
fn conversations(engine: &EngineHandle, limits: &Limits) -> Vec<(Run, Arc<Taken>)> {
    let encode = |text: &str| runs::shipped().tokenizer.encode(text).unwrap();
    let sampling = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    let stop: Vec<String> = ["the", " a", "and the", ". He", "ing "].map(str::to_owned).into();
    let first = |seed: u64| RequestParameters {
        snapshot: true,
        prompt: encode(["Once upon a time there was a café. ", "It was"][seed as usize % 2]),
        max_tokens: 4 + seed as usize,
        sampling: sampling(seed),
        stop: if seed < 5 { stop.clone() } else { Vec::new() },
        prompt_logprobs: (seed == 5).then_some(1),
        logprobs: Some(1),
        ignore_eos: true,
        ..RequestParameters::default()
    };
    let all = |parameters: Vec<RequestParameters>| -> Vec<(Run, Arc<Taken>)> {
        let (kept, taken): (Vec<_>, Vec<_>) = parameters.into_iter().map(|one| kept_at(Some(2), one)).unzip();
        let mut requests: Vec<_> = kept.into_iter().map(|one| Request::new(one, limits).unwrap()).collect();
        share_prompt(&mut requests);
        engine.submit_all(requests).unwrap().into_iter().map(collect).zip(taken).collect()
    };
    let mut runs = all((0..10).map(first).collect());
    let next = runs.iter().zip(0..).map(|((run, _), seed)| RequestParameters {
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
fn results_do_not_depend_on_how_long_transfers_take() {
    let limits = &runs::shipped().limits;
    let outcomes = |engine: &EngineHandle| -> Vec<_> {
        conversations(engine, limits).iter().map(|(run, taken)| (outcome(run), taken.all())).collect()
    };
    let expected = outcomes(&decoder(|model| model));
    for seed in 1..6 {
        let mut controls = None;
        let engine = decoder(|model| {
            let (model, transfers) = Slow::new(model);
            controls = Some(transfers);
            model
        });
        let transfers = controls.unwrap();
        transfers.delay(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        assert!(outcomes(&engine) == expected, "seed {seed}");
        assert!(transfers.started() > 30, "{}", transfers.started());
        transfers.check();
    }
}
