//! A text that resumes in another engine has the same bits as one that was never interrupted: tokens, log
//! probabilities, and final state.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tidegate_server::engine::{Begun, Drafters, EngineHandle, FinishReason, Request, RequestParameters, Start};
use tidegate_server::session::Snapshot;
use tidegate_server::text::GrammarSpec;

use crate::common::runs::{Run, collect, kept, shipped};
use crate::drafts::{draw, engine, outcome, plain};

/// Runs a request, which resumes after `begun` if that is given.
fn run(engine: &EngineHandle, one: &RequestParameters, begun: Option<&Run>) -> Run {
    let (one, taken) = kept(one.clone());
    let mut request = Request::new(one, &shipped().limits).unwrap();
    if let Some(run) = begun {
        let (token_ids, logprobs) = (run.ids.clone(), run.logprobs.clone());
        request.resume(Begun { end: run.finish().snapshot.clone().unwrap(), token_ids, logprobs });
    }
    let run = collect(engine.submit(request).unwrap());
    assert!(begun.is_none() || taken.all().is_empty(), "what is read first is no prompt");
    run
}

#[test]
fn a_text_that_is_cut_anywhere_and_resumed_is_the_whole_text() {
    let ((first, _one), (second, _two)) = (plain(), engine(16, Drafters::by_lookup(None)));
    let mut rng = StdRng::seed_from_u64(11);
    let mut before: Option<Arc<Snapshot>> = None;
    let (mut resumed, mut unsettled) = (0, 0);
    for round in 0..40 {
        let mut one = draw(&mut rng, before.as_ref());
        if !matches!(one.start, Start::Session(_)) {
            continue;
        }
        let mut whole = run(&first, &one, None);
        if round % 2 == 0 && one.grammar.is_none() && whole.text.len() > 40 {
            // Adds a stop string that several tokens of the text make up.
            one.stop.extend(whole.text.get(20..32).map(str::to_owned));
            whole = run(&first, &one, None);
        }
        let length = whole.ids.len();
        let mut begun: Option<Run> = None;
        // Generates up to the first cut, then up to the second, then to the end. Successive parts run on different
        // engines.
        let mut cuts = [(); 2].map(|()| rng.random_range(length.saturating_sub(5).max(1)..=length.max(1)));
        cuts[0] = cuts[0].min(rng.random_range(1..=length.max(1)));
        cuts.sort_unstable();
        for (cut, engine) in cuts.into_iter().zip([&first, &second]) {
            let part = RequestParameters { max_tokens: cut, min_tokens: one.min_tokens.min(cut), ..one.clone() };
            if cut >= length || begun.as_ref().is_some_and(|run| run.ids.len() == cut) {
                continue;
            }
            let part = run(engine, &part, begun.as_ref());
            if part.finish().reason != FinishReason::Length {
                break;
            }
            assert_eq!(part.ids, whole.ids[..cut], "round {round}, {one:?}");
            unsettled += usize::from(part.finish().snapshot.as_ref().unwrap().pending.len() > 1);
            begun = Some(part);
        }
        if let Some(begun) = begun {
            let read = first.stats().prompt_tokens;
            let found = run(&first, &one, Some(&begun));
            assert_eq!(outcome(&found), outcome(&whole), "round {round} after {} tokens, {one:?}", begun.ids.len());
            let pending = begun.finish().snapshot.as_ref().unwrap().pending.len();
            assert_eq!(first.stats().prompt_tokens - read, pending as u64, "the text so far was not read again");
            resumed += 1;
        }
        before = if round % 3 == 2 { None } else { whole.finish().snapshot.clone() };
    }
    assert!(resumed > 15 && unsettled > 2, "{resumed} resumed, {unsettled} amid what may be a stop string");
}

#[test]
fn a_long_text_that_follows_a_grammar_is_repeated_as_a_whole() {
    let (engine, _thread) = plain();
    let served = shipped();
    let spec = GrammarSpec::Regex("([0-9]{1,4}\\. [A-Za-z ,]{1,200}\n){1,100}".to_owned());
    let one = RequestParameters {
        start: Start::Session(Arc::new(Snapshot::empty(0))),
        prompt: vec![42],
        max_tokens: 1,
        grammar: Some(served.grammars.compile(&spec).unwrap()),
        snapshot: true,
        ..RequestParameters::default()
    };
    let mut begun = run(&engine, &one, None);
    // The lines differ, so that the parser finds something new in each.
    let lines = (0..90).map(|line| format!("{line}. {}\n", "Qu, zigzag elk ".repeat(3 + line % 10)));
    let text: String = lines.collect();
    assert!(text.len() > 8000, "{}", text.len());
    begun.ids = served.tokenizer.encode_more(&text).unwrap();
    let longer = RequestParameters { max_tokens: begun.ids.len() + 8, ..one };
    let found = run(&engine, &longer, Some(&begun));
    assert!(found.text.starts_with(&text));
    assert_eq!(found.ids.len(), longer.max_tokens);
}
