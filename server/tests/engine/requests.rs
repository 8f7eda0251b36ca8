//! The engine with a scripted model: batches, cancellation, failures, draining and slow readers.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::common::fake::{Fake, NAN, POISON, SHORT, rules};
use crate::common::runs::{greedy, wait_for};
use tidegate_model::SamplingParams;
use tidegate_server::engine::{
    EngineHandle, EngineOptions, EngineThread, Event, EventStream, Failure, FinishReason, Limits, Request,
    RequestParameters, SubmitError, spawn,
};

fn start(fake: Fake, queue: usize) -> (EngineHandle, EngineThread) {
    spawn(fake, rules(), EngineOptions { queue, ..EngineOptions::default() }).unwrap()
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    with(RequestParameters { ignore_eos: true, ..greedy(prompt, max_tokens) })
}

fn with(parameters: RequestParameters) -> Request {
    Request::new(
        parameters,
        &Limits { vocab_size: 256, max_prompt_tokens: 10_000, max_tokens: 1_000_000, sources: None },
    )
    .unwrap()
}

/// Reads a stream to its end; returns the text, the token ids, and the last event.
fn collect(mut stream: EventStream) -> (String, Vec<u32>, Option<Event>) {
    let (mut text, mut ids) = (String::new(), Vec::new());
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Delta(delta) => {
                text.push_str(&delta.text);
                ids.extend(delta.token_ids);
            }
            last => return (text, ids, Some(last)),
        }
    }
    (text, ids, None)
}

#[test]
fn a_finished_text_reports_its_token_counts() {
    let (engine, _thread) = start(Fake::new(4), 8);
    let (text, ids, last) = collect(engine.submit(request(b"ab".map(u32::from).as_slice(), 3)).unwrap());
    assert_eq!(text, "cde");
    assert_eq!(ids, b"cde".map(u32::from));
    let Some(Event::Finished(finish)) = last else { panic!("{last:?}") };
    assert_eq!((finish.reason, finish.prompt_tokens, finish.completion_tokens), (FinishReason::Length, 2, 3));
    let stats = engine.stats();
    assert_eq!((stats.finished, stats.prompt_tokens, stats.generated_tokens), (1, 2, 3));
}

#[test]
fn an_end_of_text_token_ends_the_text_and_is_counted_but_not_shown() {
    let (engine, _thread) = start(Fake::new(1), 8);
    let parameters = |ignore_eos| RequestParameters { ignore_eos, ..greedy(&[253], 5) };
    // Token 255 ends a text. The fake counts up and continues with 0 after it.
    let (_, ids, last) = collect(engine.submit(with(parameters(false))).unwrap());
    assert_eq!(ids, [254, 255]);
    let Some(Event::Finished(finish)) = last else { panic!("{last:?}") };
    assert_eq!((finish.reason, finish.completion_tokens), (FinishReason::Stop, 2));
    let (_, ids, last) = collect(engine.submit(with(parameters(true))).unwrap());
    assert_eq!(ids, [254, 255, 0, 1, 2]);
    assert!(matches!(last, Some(Event::Finished(finish)) if finish.reason == FinishReason::Length));
}

#[test]
fn a_stop_string_ends_the_text_before_itself() {
    let (engine, _thread) = start(Fake::new(1), 8);
    let stop = vec!["ef".into(), "zz".into()];
    let parameters = RequestParameters { stop, ignore_eos: true, ..greedy(&[u32::from(b'a')], 20) };
    let (text, _, last) = collect(engine.submit(with(parameters)).unwrap());
    assert_eq!(text, "bcd");
    assert!(matches!(last, Some(Event::Finished(finish)) if finish.reason == FinishReason::Stop));
}

#[test]
fn prompts_are_read_in_chunks_that_depend_on_the_prompt_alone() {
    let fake = Fake::new(4);
    let calls = fake.calls();
    let (engine, _thread) = start(fake, 8);
    calls.chunks.lock().unwrap().clear();
    let long: Vec<u32> = vec![1; 600];
    let streams = engine.submit_all(vec![request(&long, 2), request(&[1; 10], 2)]).unwrap();
    streams.into_iter().map(collect).for_each(drop);
    // The short prompt gets its turn after one chunk of the long one.
    assert_eq!(*calls.chunks.lock().unwrap(), [256, 9, 256, 87]);
}

#[test]
fn a_long_prompt_does_not_stall_a_running_stream() {
    let fake = Fake::new(4).step(Duration::from_millis(2));
    let calls = fake.calls();
    let (engine, _thread) = start(fake, 8);
    let mut running = engine.submit(request(&[1], 10_000)).unwrap();
    assert!(running.blocking_next().is_some());
    let (chunks, steps) = (calls.chunks.lock().unwrap().len(), calls.steps.load(SeqCst));
    let (_, _, last) = collect(engine.submit(request(&vec![1; 256 * 20], 1)).unwrap());
    assert!(matches!(last, Some(Event::Finished(_))));
    let chunks = calls.chunks.lock().unwrap().len() - chunks;
    let steps = calls.steps.load(SeqCst) - steps;
    assert_eq!(chunks, 20);
    assert!(steps >= chunks - 1, "{steps} steps between {chunks} chunks");
}

#[test]
fn dropping_a_stream_cancels_within_one_step() {
    let fake = Fake::new(1).step(Duration::from_millis(20));
    let calls = fake.calls();
    let (engine, _thread) = start(fake, 8);
    let mut stream = engine.submit(request(&[1], 1_000_000)).unwrap();
    for _ in 0..3 {
        stream.blocking_next();
    }
    drop(stream);
    let steps = calls.steps.load(SeqCst);
    wait_for("the cancellation", || engine.stats().cancelled == 1);
    assert!(calls.steps.load(SeqCst) <= steps + 1);
    assert_eq!(engine.stats().running, 0);
    std::thread::sleep(Duration::from_millis(100));
    assert!(calls.steps.load(SeqCst) <= steps + 1, "no steps without requests");
    assert!(matches!(collect(engine.submit(request(&[1], 1)).unwrap()).2, Some(Event::Finished(_))));
}

#[test]
fn a_full_queue_refuses_requests_until_a_waiting_client_disconnects() {
    let fake = Fake::new(1).step(Duration::from_millis(5));
    let (engine, _thread) = start(fake, 2);
    let running = engine.submit(request(&[1], 1_000_000)).unwrap();
    wait_for("the first to run", || engine.stats().running == 1);
    let waiting = [engine.submit(request(&[1], 1)).unwrap(), engine.submit(request(&[2], 1)).unwrap()];
    assert_eq!(engine.submit(request(&[1], 1)).unwrap_err(), SubmitError::QueueFull);
    let [left, stays] = waiting;
    drop(left);
    let both = engine.submit_all(vec![request(&[1], 1), request(&[1], 1)]);
    assert_eq!(both.unwrap_err(), SubmitError::QueueFull, "requests of one call are accepted together or not at all");
    let also = engine.submit(request(&[3], 1)).unwrap();
    drop(running);
    assert_eq!(collect(stays).1, [3]);
    assert_eq!(collect(also).1, [4]);
}

#[test]
fn a_panic_or_nan_logits_end_only_their_own_request() {
    for fake in [Fake::new(4), Fake::new(4).scores_chunks()] {
        let (engine, _thread) = start(fake.step(Duration::from_millis(1)), 8);
        let healthy = engine.submit(request(&[1], 200)).unwrap();
        for prompt in [[POISON, 1], [1, NAN]] {
            // The first panics inside the model, the second gets only NaN logits.
            let sampling = SamplingParams::default();
            let parameters = RequestParameters { sampling, ignore_eos: true, ..greedy(&prompt, 5) };
            let (_, _, last) = collect(engine.submit(with(parameters)).unwrap());
            assert_eq!(last, Some(Event::Failed(Failure::Internal)));
        }
        let (_, ids, last) = collect(healthy);
        assert_eq!(ids.len(), 200);
        assert!(matches!(last, Some(Event::Finished(_))));
        assert_eq!(engine.stats().failed, 2);
        assert!(engine.is_ready());
    }
}

#[test]
fn a_step_with_too_few_logits_ends_its_batch_and_the_engine_continues() {
    for fake in [Fake::new(4), Fake::new(4).scores_chunks()] {
        let (engine, _thread) = start(fake, 8);
        let (_, _, last) = collect(engine.submit(request(&[1, SHORT], 5)).unwrap());
        assert_eq!(last, Some(Event::Failed(Failure::Internal)));
        assert_eq!(collect(engine.submit(request(&[1], 2)).unwrap()).1, [2, 3]);
    }
}

#[test]
fn a_panic_in_a_batched_step_ends_that_batch_and_the_engine_continues() {
    let fake = Fake::new(4).step(Duration::from_millis(1));
    let calls = fake.calls();
    let (engine, _thread) = start(fake, 8);
    let streams = engine.submit_all(vec![request(&[1], 100_000), request(&[1], 100_000)]).unwrap();
    wait_for("both to run", || calls.widest.load(SeqCst) == 2);
    calls.panic_next_step.store(true, SeqCst);
    for stream in streams {
        assert_eq!(collect(stream).2, Some(Event::Failed(Failure::Internal)));
    }
    let (text, _, last) = collect(engine.submit(request(&[u32::from(b'x')], 2)).unwrap());
    assert_eq!(text, "yz", "the slot was emptied");
    assert!(matches!(last, Some(Event::Finished(_))));
}

#[test]
fn the_engine_ends_when_its_device_is_lost() {
    let fake = Fake::new(2).step(Duration::from_millis(1));
    let calls = fake.calls();
    let (engine, thread) = start(fake, 8);
    let requests = (0..3).map(|_| request(&[1], 100_000)).collect();
    let streams = engine.submit_all(requests).unwrap();
    wait_for("two to run", || calls.widest.load(SeqCst) == 2);
    assert!(engine.is_ready());
    calls.lost.store(true, SeqCst);
    for stream in streams {
        // Running requests get an error; the waiting one's channel closes.
        assert!(!matches!(collect(stream).2, Some(Event::Finished(_))));
    }
    thread.join();
    assert!(!engine.is_ready());
    assert!(engine.submit(request(&[1], 1)).is_err());
}

#[test]
fn a_slow_client_pauses_only_its_own_request_and_loses_nothing() {
    let fake = Fake::new(4);
    let calls = fake.calls();
    let (engine, _thread) = start(fake, 8);
    let slow = engine.submit(request(&[0], 2_000)).unwrap();
    wait_for("the pause", || {
        let before = calls.steps.load(SeqCst);
        std::thread::sleep(Duration::from_millis(30));
        before > 1 && before == calls.steps.load(SeqCst)
    });
    assert!(engine.stats().generated_tokens < 400, "the paused sequence is bounded");
    let (_, ids, _) = collect(engine.submit(request(&[0], 1_000)).unwrap());
    assert_eq!(ids.len(), 1_000, "other requests continue");
    let (_, ids, last) = collect(slow);
    assert_eq!(ids, (1..=2_000).map(|n| n % 256).collect::<Vec<u32>>());
    assert!(matches!(last, Some(Event::Finished(_))));
}

#[test]
fn a_client_that_never_reads_loses_its_slot() {
    let options = EngineOptions { queue: 8, stall_limit: Duration::from_secs(2), ..EngineOptions::default() };
    let (engine, _thread) = spawn(Fake::new(1), rules(), options).unwrap();
    let stalled = engine.submit(request(&[0], 100_000)).unwrap();
    let (_, ids, _) = collect(engine.submit(request(&[0], 3)).unwrap());
    assert_eq!(ids, [1, 2, 3]);
    assert_eq!(engine.stats().failed, 1);
    // A client that reads later gets the text so far, and the reason for its end.
    let (_, ids, last) = collect(stalled);
    assert_eq!(last, Some(Event::Failed(Failure::Stalled)));
    assert_eq!(ids, (1..).take(ids.len()).map(|n| n % 256).collect::<Vec<u32>>());
}

#[test]
fn draining_finishes_accepted_requests_and_refuses_new_ones() {
    let fake = Fake::new(1).step(Duration::from_millis(1));
    let (engine, thread) = start(fake, 8);
    let streams = engine.submit_all(vec![request(&[0], 50), request(&[0], 50)]).unwrap();
    engine.drain();
    assert!(!engine.is_ready());
    assert_eq!(engine.submit(request(&[0], 1)).unwrap_err(), SubmitError::Closed);
    for stream in streams {
        assert!(matches!(collect(stream).2, Some(Event::Finished(finish)) if finish.completion_tokens == 50));
    }
    thread.join();
}

#[test]
fn aborting_ends_every_request_with_a_reason() {
    let fake = Fake::new(1).step(Duration::from_millis(1));
    let (engine, thread) = start(fake, 8);
    let streams = engine.submit_all(vec![request(&[0], 100_000), request(&[0], 100_000)]).unwrap();
    engine.abort();
    thread.join();
    for stream in streams {
        assert_eq!(collect(stream).2, Some(Event::Failed(Failure::ShuttingDown)));
    }
}

#[test]
fn an_idle_engine_does_not_step_and_wakes_at_once() {
    let fake = Fake::new(2);
    let calls = fake.calls();
    let (engine, _thread) = start(fake, 8);
    let steps = calls.steps.load(SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(calls.steps.load(SeqCst), steps);
    let start = Instant::now();
    collect(engine.submit(request(&[0], 5)).unwrap());
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_engine_is_not_ready_while_a_step_takes_too_long() {
    let options = EngineOptions { queue: 8, step_limit: Duration::from_millis(200), ..EngineOptions::default() };
    let (engine, _thread) = spawn(Fake::new(1).step(Duration::from_secs(1)), rules(), options).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    assert!(engine.is_ready(), "an idle engine is ready");
    let stream = engine.submit(request(&[0], 2)).unwrap();
    wait_for("the long step to be noticed", || !engine.is_ready());
    assert!(matches!(collect(stream).2, Some(Event::Finished(_))));
    wait_for("the engine to sleep again", || engine.is_ready());
}

#[test]
fn slots_are_reset_before_they_are_reused() {
    let (engine, _thread) = start(Fake::new(1), 64);
    let streams = (0..20).map(|n| (n, engine.submit(request(&[n], 3)).unwrap())).collect::<Vec<_>>();
    for (n, stream) in streams {
        // A state left over in the slot would change the text.
        assert_eq!(collect(stream).1, [n + 1, n + 2, n + 3]);
    }
}

#[test]
fn a_model_that_fails_at_warm_up_is_refused() {
    let fake = Fake::new(1);
    fake.calls().panic_next_step.store(true, SeqCst);
    let error = spawn(fake, rules(), EngineOptions::default()).err().unwrap();
    assert!(error.to_string().contains("first token"), "{error}");
}

#[test]
fn errors_name_the_bounds_of_a_request() {
    let limits = Limits { vocab_size: 256, max_prompt_tokens: 4, max_tokens: 10, sources: None };
    let refuse = |change: &dyn Fn(&mut RequestParameters)| {
        let mut parameters = greedy(&[1], 1);
        change(&mut parameters);
        let error = Request::new(parameters, &limits).unwrap_err();
        (error.parameter(), error.to_string())
    };
    assert_eq!(refuse(&|p| p.prompt.clear()).1, "prompt must be 1 to 4 tokens long, found 0 tokens");
    assert_eq!(refuse(&|p| p.prompt = vec![1; 5]).1, "prompt must be 1 to 4 tokens long, found 5 tokens");
    assert_eq!(refuse(&|p| p.prompt = vec![256]).1, "prompt must be made of token ids below 256, found 256");
    assert_eq!(refuse(&|p| p.max_tokens = 11).1, "max_tokens must be from 0 to 10, found 11");
    assert_eq!(refuse(&|p| p.stop = vec![String::new()]).0, "stop");
    assert_eq!(refuse(&|p| p.sampling.temperature = f32::NAN).0, "temperature");
    assert_eq!(refuse(&|p| p.sampling.logit_bias = vec![(256, 1.0)]).0, "logit_bias");
}
