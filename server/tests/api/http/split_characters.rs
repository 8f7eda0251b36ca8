//! Characters split between two turns: two turns give the same text as one request.

use std::sync::Arc;

use crate::common::fake::{Fake, rules};
use tidegate_model::SamplingParams;
use tidegate_server::engine::{
    EngineHandle, EngineOptions, Event, Finish, Limits, Request, RequestParameters, Start, spawn,
};
use tidegate_server::session::Snapshot;

fn run(engine: &EngineHandle, start: Start, prompt: &[u32], max_tokens: usize) -> (String, Finish) {
    let parameters = RequestParameters {
        start,
        prompt: prompt.into(),
        max_tokens,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        ignore_eos: true,
        snapshot: true,
        ..RequestParameters::default()
    };
    let limits = Limits { vocab_size: 256, max_prompt_tokens: 100, max_tokens: 100, sources: None };
    let mut events = engine.submit(Request::new(parameters, &limits).unwrap()).unwrap();
    let mut text = String::new();
    loop {
        match events.blocking_next() {
            Some(Event::Delta(delta)) => text.push_str(&delta.text),
            Some(Event::Finished(finish)) => return (text, finish),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_character_split_between_turns_is_not_lost() {
    let (engine, _thread) = spawn(Fake::new(1), rules(), EngineOptions::default()).unwrap();
    // The scripted model continues with 0x99.
    let whole = [1, 0xE2, 0x98];
    let (said, _) = run(&engine, Start::Empty, &whole, 1);
    assert_eq!(said, "☙");
    let (_, finish) = run(&engine, Start::Session(Arc::new(Snapshot::empty(0))), &whole[..2], 0);
    let begun = finish.snapshot.expect("a turn ends with a snapshot");
    assert_eq!(begun.pending, [0xE2]);
    assert_eq!(run(&engine, Start::Session(begun), &whole[2..], 1).0, said);
    // A character is not lost either when the second turn has no new text.
    let empty = || Start::Session(Arc::new(Snapshot::empty(0)));
    let (_, finish) = run(&engine, empty(), &[0xC2], 0);
    let begun = finish.snapshot.expect("a turn ends with a snapshot");
    assert_eq!(begun.pending, [0xC2]);
    assert_eq!(run(&engine, Start::Session(begun), &[], 1).0, run(&engine, empty(), &[0xC2], 1).0);
}
