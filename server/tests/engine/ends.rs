//! How a text ends: stop tokens, stop strings, `min_tokens`, and the stop cause that the engine reports.

use crate::common::fake::Fake;
use crate::common::runs::{LIMITS, Run, collect, greedy, kept, run, shipped, start};
use std::sync::Arc;
use tidegate_model::sampling::SamplingParams;
use tidegate_server::engine::{FinishReason, Request, RequestParameters, Start, StopCause};
use tidegate_server::session::{Answer, History, Snapshot};

/// Returns the scripted model's tokens for `text`.
fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn shipped_run(parameters: RequestParameters) -> Run {
    let served = shipped();
    collect(served.engine.submit(Request::new(parameters, &served.limits).unwrap()).unwrap())
}

#[test]
fn no_end_is_chosen_before_min_tokens() {
    let (engine, _thread) = start(Fake::new(1));
    // Token 255 ends the text. While it is masked, all other tokens are equally likely, and greedy sampling takes the
    // first.
    for (min_tokens, expected) in [(0, vec![254, 255]), (1, vec![254, 255]), (2, vec![254, 0, 1, 2])] {
        let output = run(&engine, RequestParameters { min_tokens, ..greedy(&[253], 4) });
        assert_eq!(output.ids, expected, "{min_tokens}");
    }
    let stop = RequestParameters { min_tokens: 2, stop_token_ids: vec![3, 4], ..greedy(&[1], 5) };
    assert_eq!(run(&engine, stop).ids, [2, 0, 1, 2, 3]);
}

#[test]
fn a_stop_string_counts_only_if_it_ends_after_min_tokens() {
    let (engine, _thread) = start(Fake::new(1));
    let of = |stop: &str, min_tokens| {
        let output = run(&engine, RequestParameters { stop: vec![stop.into()], min_tokens, ..greedy(&ids("a"), 8) });
        (output.text.clone(), output.finish().stop.clone())
    };
    let found = |stop: &str| Some(StopCause::String(stop.into()));
    assert_eq!(of("ef", 0), ("bcd".into(), found("ef")));
    assert_eq!(of("ef", 4), ("bcd".into(), found("ef")));
    assert_eq!(of("ef", 5), ("bcdefghi".into(), None), "it ends within the first five tokens");
    assert_eq!(of("fg", 5), ("bcde".into(), found("fg")), "it only begins within them");
}

#[test]
fn a_stop_token_ends_the_text_and_is_not_shown() {
    let (engine, _thread) = start(Fake::new(1));
    for ignore_eos in [false, true] {
        let stop_token_ids = ids("de");
        let output = run(&engine, RequestParameters { stop_token_ids, ignore_eos, ..greedy(&ids("a"), 8) });
        assert_eq!((output.text.as_str(), &output.ids), ("bc", &ids("bcd")));
        let finish = output.finish();
        assert_eq!((finish.reason, finish.completion_tokens), (FinishReason::Stop, 3));
        assert_eq!(finish.stop, Some(StopCause::Token(u32::from(b'd'))));
    }
}

#[test]
fn the_engine_reports_what_ended_a_text() {
    let (engine, _thread) = start(Fake::new(1));
    let eos = greedy(&[253], 4);
    assert_eq!(run(&engine, eos.clone()).finish().stop, Some(StopCause::Eos(255)));
    let named = RequestParameters { ignore_eos: true, stop_token_ids: vec![255], ..eos };
    assert_eq!(run(&engine, named).finish().stop, Some(StopCause::Token(255)));
    let strings = RequestParameters { stop: vec!["f".into(), "def".into(), "ef".into()], ..greedy(&ids("a"), 9) };
    let output = run(&engine, strings);
    assert_eq!(output.finish().stop, Some(StopCause::String("def".into())));
    assert_eq!(output.text, "bc");
    assert_eq!(run(&engine, greedy(&ids("a"), 2)).finish().stop, None);
}

#[test]
fn text_is_held_back_at_the_end_only_for_a_next_turn() {
    let (engine, _thread) = start(Fake::new(1));
    let of = |snapshot| {
        let conversation = Start::Session(Arc::new(Snapshot::empty(1)));
        let parameters = RequestParameters { start: conversation, snapshot, ..greedy(&ids("a"), 3) };
        let output = run(&engine, RequestParameters { stop: vec!["dx".into()], ..parameters });
        let held = output.finish().snapshot.as_ref().and_then(|end| Some(end.answer.clone()?.held));
        (output.text.clone(), held)
    };
    assert_eq!(of(true), ("bc".into(), Some("d".into())));
    assert_eq!(of(false), ("bcd".into(), None), "nothing continues the text");
}

#[test]
fn a_snapshot_has_no_trace_of_the_stop_token() {
    let prompt = shipped().tokenizer.encode("Once upon a time").unwrap();
    let turn = |prompt: &[u32], max_tokens, stop: &[u32]| RequestParameters {
        start: Start::Session(Arc::new(Snapshot::empty(0))),
        snapshot: true,
        stop_token_ids: stop.into(),
        ..greedy(prompt, max_tokens)
    };
    let free = shipped_run(turn(&prompt, 8, &[]));
    let stop = (2..8).find(|i| !free.ids[..*i].contains(&free.ids[*i])).unwrap();
    let stopped = shipped_run(turn(&prompt, 8, &[free.ids[stop]]));
    assert_eq!(stopped.ids, free.ids[..=stop]);
    let snapshot = stopped.finish().snapshot.as_ref().unwrap();
    let text = [&prompt, &free.ids[..stop]].concat();
    assert_eq!((snapshot.read, &snapshot.pending), (text.len() as u64, &Vec::new()));
    assert_eq!(snapshot.history, History::default().extended(&text));
    assert_eq!(snapshot.answer, Some(Answer::default()));
    assert!(snapshot.sampler.counts.iter().all(|(token, _)| text.contains(token)));
    // The state is the same as after reading this text as a prompt.
    let (read, taken) = kept(greedy(&[&text[..], &[1]].concat(), 1));
    shipped_run(read);
    assert!(taken.all()[0].state == snapshot.state);
}

#[test]
fn a_long_text_before_a_stop_string_is_read_again_in_chunks() {
    let served = shipped();
    let encode = |text: &str| served.tokenizer.encode(text).unwrap();
    let (prompt, word) = (encode("Once upon a time"), encode(" the").last().copied().unwrap());
    // Every second token completes the stop string, but the text may not end so early: all of it is held back for a
    // while and then shown.
    let stopped = shipped_run(RequestParameters {
        start: Start::Session(Arc::new(Snapshot::empty(0))),
        snapshot: true,
        stop: vec![" the the".into()],
        min_tokens: 150,
        sampling: SamplingParams { logit_bias: vec![(word, 100.0)], temperature: 0.0, ..SamplingParams::default() },
        ..greedy(&prompt, 200)
    });
    let finish = stopped.finish();
    assert_eq!((finish.reason, &finish.stop), (FinishReason::Stop, &Some(StopCause::String(" the the".into()))));
    assert_eq!(stopped.text, " the".repeat(stopped.ids.len() - 2));
    assert!(finish.retokenized.len() >= 140 && encode(&stopped.text).ends_with(&finish.retokenized));
    let (snapshot, text) = (finish.snapshot.as_ref().unwrap(), [prompt, finish.retokenized.clone()].concat());
    assert_eq!((snapshot.read, &snapshot.pending), (text.len() as u64, &Vec::new()));
    assert_eq!(snapshot.history, History::default().extended(&text));
    let (read, taken) = kept(greedy(&[&text[..], &[1]].concat(), 1));
    shipped_run(read);
    assert!(taken.all()[0].state == snapshot.state);
}

#[test]
fn errors_name_the_bounds() {
    let refused = |change: fn(&mut RequestParameters)| {
        let mut parameters = greedy(&[1], 10);
        change(&mut parameters);
        Request::new(parameters, &LIMITS).unwrap_err().to_string()
    };
    let min_tokens = "min_tokens must be from 0 to max_tokens, which is 10, found";
    assert_eq!(refused(|p| p.min_tokens = 11), format!("{min_tokens} 11"));
    assert_eq!(refused(|p| p.min_tokens = usize::MAX), format!("{min_tokens} {}", usize::MAX));
    let stop = "stop_token_ids must be";
    assert_eq!(refused(|p| p.stop_token_ids = vec![0; 65]), format!("{stop} at most 64 token ids, found 65"));
    assert_eq!(refused(|p| p.stop_token_ids = vec![256]), format!("{stop} made of token ids below 256, found 256"));
    let most = RequestParameters { min_tokens: 10, stop_token_ids: vec![255; 64], ..greedy(&[1], 10) };
    assert!(Request::new(most, &LIMITS).is_ok());
}
