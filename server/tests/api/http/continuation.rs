//! Continuation: a conversation that is stored, moved and continued gives the same text as one that never stopped.

use std::sync::{Arc, LazyLock};

use crate::common::checkpoint;
use proptest::prelude::*;
use tidegate_model::SamplingParams;
use tidegate_server::Served;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{Event, Finish, FinishReason, Request, RequestParameters, Start};
use tidegate_server::session::Snapshot;

/// Two engines with the shipped checkpoint, between which conversations move.
static SERVED: LazyLock<[Served; 2]> =
    LazyLock::new(|| [(); 2].map(|()| open(&checkpoint(), &OpenOptions::default()).unwrap().0));

struct Turn {
    text: String,
    ids: Vec<u32>,
    finish: Finish,
}

impl Turn {
    fn snapshot(&self) -> &Arc<Snapshot> {
        self.finish.snapshot.as_ref().expect("a turn ends with a snapshot")
    }
}

fn run(served: &Served, parameters: RequestParameters) -> Turn {
    let mut events = served.engine.submit(Request::new(parameters, &served.limits).unwrap()).unwrap();
    let (mut text, mut ids) = (String::new(), Vec::new());
    loop {
        match events.blocking_next() {
            Some(Event::Delta(delta)) => {
                text.push_str(&delta.text);
                ids.extend(delta.token_ids);
            }
            Some(Event::Finished(finish)) => return Turn { text, ids, finish },
            other => panic!("{other:?}"),
        }
    }
}

/// Runs a turn that starts from `snapshot`, after converting it to bytes and back.
fn turn(engine: usize, snapshot: &Snapshot, parameters: &RequestParameters) -> Turn {
    let served = &SERVED[engine];
    let moved = served.codec.decode(&served.codec.encode(snapshot)).unwrap();
    assert_eq!(&moved, snapshot, "the bytes contain everything");
    run(served, RequestParameters { start: Start::Session(Arc::new(moved)), snapshot: true, ..parameters.clone() })
}

fn ids(text: &str) -> Vec<u32> {
    SERVED[0].tokenizer.encode(text).unwrap()
}

fn more(text: &str) -> Vec<u32> {
    SERVED[0].tokenizer.encode_more(text).unwrap()
}

fn prompts() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["Once upon a time", "“Where have you been?” said", "A", "The café was naïve… "])
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let penalties = (0.5f32..2.0, -1.0f32..1.5, -1.0f32..1.5);
    let filters = (prop::sample::select(vec![0, 3, 40]), 0.3f32..1.0, 0.0f32..0.2, 0.4f32..1.0);
    (prop::sample::select(vec![0.0f32, 0.7, 1.3, 2.0]), any::<u64>(), penalties, filters).prop_map(
        |(
            temperature,
            seed,
            (repetition_penalty, frequency_penalty, presence_penalty),
            (top_k, top_p, min_p, typical_p),
        )| {
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                typical_p,
                repetition_penalty,
                frequency_penalty,
                presence_penalty,
                logit_bias: vec![(17, 2.0), (300, -5.0)],
                seed,
            }
        },
    )
}

fn stops() -> impl Strategy<Value = Vec<String>> {
    // Common pieces of English, so that some are found and their beginnings are often held back.
    let pieces = ["the old", ", and the", "\n\nT", ". He", "é", "was a", "e t", "— “", "ing her "];
    prop::collection::vec(prop::sample::select(pieces.to_vec()).prop_map(str::to_owned), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn an_answer_interrupted_anywhere_and_moved_equals_the_uninterrupted_answer(
        prompt in prompts(),
        sampling in sampling(),
        stop in stops(),
        cuts in prop::collection::vec(1usize..12, 1..6),
        ignore_eos in any::<bool>(),
    ) {
        let empty = Snapshot::empty(sampling.seed);
        let parameters = RequestParameters {
            prompt: ids(prompt), max_tokens: cuts.iter().sum(), stop, sampling, ignore_eos, ..RequestParameters::default()
        };
        let whole = turn(0, &empty, &parameters);

        let (mut text, mut tokens, mut snapshot) = (String::new(), Vec::new(), Arc::new(empty));
        for (i, max_tokens) in cuts.iter().copied().enumerate() {
            let prompt = if i == 0 { parameters.prompt.clone() } else { Vec::new() };
            let piece = turn(i % 2, &snapshot, &RequestParameters { prompt, max_tokens, ..parameters.clone() });
            text.push_str(&piece.text);
            tokens.extend_from_slice(&piece.ids);
            snapshot = Arc::clone(piece.snapshot());
            if piece.finish.reason == FinishReason::Stop {
                prop_assert_eq!(whole.finish.reason, FinishReason::Stop);
                break;
            }
        }
        prop_assert_eq!(&tokens, &whole.ids);
        prop_assert_eq!(&text, &whole.text);
        // The state and everything else that the next turn needs are identical.
        prop_assert!(&snapshot == whole.snapshot());
    }

    #[test]
    fn a_turn_with_new_text_equals_one_request_with_the_whole_history(
        prompt in prompts(),
        first in sampling(),
        second in sampling(),
        stop in stops(),
        (one, two) in (1usize..30, 1usize..20),
    ) {
        let parameters = RequestParameters {
            prompt: ids(prompt), max_tokens: one, stop, sampling: first, ..RequestParameters::default()
        };
        let before = turn(0, &Snapshot::empty(1), &parameters);
        let new = more(" Then she said: “");
        let parameters = RequestParameters {
            prompt: new.clone(), max_tokens: two, sampling: second, reseed: true, ..parameters
        };
        let after = turn(1, before.snapshot(), &parameters);

        // The returned text, without the stop string or token that ended it.
        let said = match before.finish.reason {
            FinishReason::Stop => more(&before.text),
            _ => before.ids.clone(),
        };
        let history = [ids(prompt), said.clone(), new].concat();
        // Generated tokens may differ from those that the tokenizer produces for their text; such cases are skipped.
        prop_assume!(before.finish.reason != FinishReason::Stop || before.ids.starts_with(&said));
        let plain = run(&SERVED[0], RequestParameters { prompt: history.clone(), ..parameters });
        prop_assert_eq!(&after.ids, &plain.ids);
        prop_assert_eq!(before.snapshot().tokens() as usize, history.len() - more(" Then she said: “").len());
    }
}

#[test]
fn text_held_back_at_the_end_of_a_turn_is_returned_once_with_the_next() {
    let empty = Snapshot::empty(0);
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let base = RequestParameters { prompt: ids("Once upon a time"), sampling: greedy, ..RequestParameters::default() };
    let free = turn(0, &empty, &RequestParameters { max_tokens: 12, ..base.clone() });
    // A stop string that begins with the last characters of a turn of 6 tokens, but does not match what follows.
    let six = turn(0, &empty, &RequestParameters { max_tokens: 6, ..base.clone() });
    let tail: String = six.text.chars().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect();
    let stop = vec![format!("{tail}☃")];
    let held = turn(0, &empty, &RequestParameters { max_tokens: 6, stop: stop.clone(), ..base.clone() });
    assert_eq!(held.text, six.text.strip_suffix(&tail).unwrap());
    assert_eq!(held.snapshot().answer.as_ref().unwrap().held, tail);
    let parameters = RequestParameters { prompt: Vec::new(), max_tokens: 6, stop, ..base };
    let rest = turn(1, held.snapshot(), &parameters);
    assert_eq!(held.text + &rest.text, free.text);
}

#[test]
fn a_stop_string_is_removed_from_the_conversation() {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let base = RequestParameters {
        prompt: ids("Once upon a time"),
        max_tokens: 30,
        sampling: greedy,
        ..RequestParameters::default()
    };
    let empty = Snapshot::empty(0);
    let free = turn(0, &empty, &base);
    // Parts all over the unconstrained text as stop strings, including parts that begin or end within tokens.
    let boundaries: Vec<usize> = free.text.char_indices().map(|(at, _)| at).collect();
    for (&from, &to) in boundaries.iter().step_by(7).zip(boundaries.iter().skip(5).step_by(7)) {
        let stop = free.text[from..to].to_owned();
        let shown = &free.text[..free.text.find(&stop).unwrap()];
        let stopped = turn(0, &empty, &RequestParameters { stop: vec![stop.clone()], ..base.clone() });
        assert_eq!((stopped.text.as_str(), stopped.finish.reason), (shown, FinishReason::Stop), "{stop:?}");
        let snapshot = stopped.snapshot();
        assert!(snapshot.pending.is_empty());
        let vocabulary = SERVED[0].tokenizer.vocabulary();
        let prefix: Vec<u32> = stopped
            .ids
            .iter()
            .copied()
            .take_while({
                let mut length = 0;
                move |id| {
                    length += vocabulary.bytes(*id).len();
                    length <= shown.len()
                }
            })
            .collect();
        let straddling = &shown[prefix.iter().map(|id| vocabulary.bytes(*id).len()).sum()..];
        let read = [ids("Once upon a time"), prefix, more(straddling)].concat();
        assert_eq!(snapshot.read, read.len() as u64, "{stop:?}");
        let history = tidegate_server::session::History::default().extended(&read);
        assert_eq!(snapshot.history, history, "{stop:?}");
    }
}

/// Returns a greedy request without stop strings, its turn of 30 tokens, and where each token ends.
fn free() -> (RequestParameters, Turn, Vec<usize>) {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let prompt = ids("Once upon a time");
    let base = RequestParameters { prompt, max_tokens: 30, sampling: greedy, ..RequestParameters::default() };
    let free = turn(0, &Snapshot::empty(0), &base);
    let vocabulary = SERVED[0].tokenizer.vocabulary();
    let mut end = 0;
    let ends = free.ids.iter().map(|id| {
        end += vocabulary.bytes(*id).len();
        end
    });
    let ends = ends.collect();
    (base, free, ends)
}

#[test]
fn a_turn_that_ends_within_a_partly_returned_token_loses_nothing() {
    let (base, free, ends) = free();
    let mut cuts = 0;
    for cut in 2..12 {
        // The stop string begins within the last token of the first turn and ends with the next token.
        let (from, to) = (ends[cut - 1] - 1, ends[cut]);
        if !free.text.is_char_boundary(from) {
            continue;
        }
        let base = RequestParameters { stop: vec![free.text[from..to].to_owned()], ..base.clone() };
        let whole = turn(0, &Snapshot::empty(0), &base);
        let first = turn(0, &Snapshot::empty(0), &RequestParameters { max_tokens: cut, ..base.clone() });
        if first.finish.reason == FinishReason::Stop {
            continue;
        }
        let rest = RequestParameters { prompt: Vec::new(), max_tokens: 30 - cut, ..base };
        let second = turn(1, first.snapshot(), &rest);
        assert_eq!(first.text + &second.text, whole.text);
        assert!(second.snapshot() == whole.snapshot(), "cut after {cut} tokens, stop {:?}", &free.text[from..to]);
        cuts += 1;
    }
    assert!(cuts >= 5, "only {cuts} turns ended within a partly returned token");
}

#[test]
fn a_stop_string_found_in_held_text_is_removed() {
    let (base, free, ends) = free();
    let mut found = 0;
    for cut in 2..10 {
        // The last two characters of a turn are held back, and the next turn stops at the second.
        let tail = &free.text[ends[cut - 1] - 2..ends[cut - 1]];
        let holding = RequestParameters { stop: vec![format!("{tail}☃")], max_tokens: cut, ..base.clone() };
        let first = turn(0, &Snapshot::empty(0), &holding);
        if first.snapshot().answer.as_ref().is_none_or(|answer| answer.held != tail) || tail[..1] == tail[1..] {
            continue;
        }
        let rest = RequestParameters { prompt: Vec::new(), stop: vec![tail[1..].to_owned()], ..base.clone() };
        let second = turn(1, first.snapshot(), &rest);
        assert_eq!((second.text.as_str(), second.finish.reason), (&tail[..1], FinishReason::Stop));
        // The tokens before the one that ends in the tail, then the returned part of that token.
        let kept = first.snapshot().read as usize - ids("Once upon a time").len();
        let begun = if kept == 0 { 0 } else { ends[kept - 1] };
        let shown = more(&free.text[begun..ends[cut - 1] - 1]);
        let read = [ids("Once upon a time"), free.ids[..kept].to_vec(), shown].concat();
        let history = tidegate_server::session::History::default().extended(&read);
        assert_eq!((second.snapshot().read, second.snapshot().history), (read.len() as u64, history), "{tail:?}");
        found += 1;
    }
    assert!(found >= 3, "only {found} tails were held back");
}

#[test]
fn text_released_by_a_turn_with_other_stop_strings_occurs_once() {
    let (base, free, ends) = free();
    let mut carried = 0;
    for cut in 2..10 {
        let tail = &free.text[ends[cut - 1] - 1..ends[cut - 1]];
        let holding = RequestParameters { stop: vec![format!("{tail}☃")], max_tokens: cut, ..base.clone() };
        let first = turn(0, &Snapshot::empty(0), &holding);
        if first.snapshot().answer.as_ref().is_none_or(|answer| answer.held != tail) {
            continue;
        }
        // The next token completes a stop string at once.
        let stop = vec![free.text[ends[cut - 1]..ends[cut]].to_owned()];
        let rest = RequestParameters { prompt: Vec::new(), stop, max_tokens: 5, ..base.clone() };
        let second = turn(1, first.snapshot(), &rest);
        assert_eq!(second.text, tail);
        let read = [ids("Once upon a time").as_slice(), &free.ids[..cut]].concat();
        assert_eq!(second.snapshot().read, read.len() as u64);
        assert_eq!(second.snapshot().history, tidegate_server::session::History::default().extended(&read));
        carried += 1;
    }
    assert!(carried >= 3, "only {carried} turns released text held back by the previous one");
}

#[test]
fn the_same_seed_continues_and_another_restarts_the_random_numbers() {
    let sampling = SamplingParams { seed: 5, ..SamplingParams::default() };
    let prompt = ids("A");
    let base = RequestParameters { prompt, max_tokens: 20, sampling, reseed: true, ..RequestParameters::default() };
    let whole = turn(0, &Snapshot::empty(1), &base);
    let first = turn(0, &Snapshot::empty(1), &RequestParameters { max_tokens: 8, ..base.clone() });
    let rest = RequestParameters { prompt: Vec::new(), max_tokens: 12, ..base.clone() };
    let second = turn(0, first.snapshot(), &rest);
    assert_eq!([first.ids.as_slice(), &second.ids].concat(), whole.ids);
    let other = SamplingParams { seed: 6, ..base.sampling };
    assert_ne!(turn(0, first.snapshot(), &RequestParameters { sampling: other, ..rest }).ids, second.ids);
}

#[test]
fn a_finished_answer_needs_new_text() {
    let limits = &SERVED[0].limits;
    let parameters =
        RequestParameters { prompt: ids("A"), max_tokens: 40, stop: vec![" ".into()], ..RequestParameters::default() };
    let ended = turn(0, &Snapshot::empty(3), &parameters);
    assert_eq!(ended.finish.reason, FinishReason::Stop);
    let start = Start::Session(Arc::clone(ended.snapshot()));
    let error = Request::new(RequestParameters { start, prompt: Vec::new(), ..parameters }, limits).unwrap_err();
    assert_eq!(error.parameter(), "prompt");
}

#[test]
fn a_stored_prefix_changes_only_the_time() {
    let prompt = ids("Once upon a time there was a little girl who lived by the sea.");
    let parameters = RequestParameters {
        prompt: prompt.clone(),
        max_tokens: 20,
        sampling: SamplingParams {
            seed: 5,
            repetition_penalty: 1.3,
            frequency_penalty: 0.5,
            ..SamplingParams::default()
        },
        ..RequestParameters::default()
    };
    let plain = run(&SERVED[0], parameters.clone());
    for cut in 1..prompt.len() {
        let read = RequestParameters {
            prompt: prompt[..=cut].to_vec(),
            max_tokens: 0,
            snapshot: true,
            ..RequestParameters::default()
        };
        let beginning = run(&SERVED[0], read);
        assert_eq!(beginning.snapshot().read, cut as u64);
        let start = Start::Prefix(Arc::clone(beginning.snapshot()));
        let reused = run(&SERVED[1], RequestParameters { start, ..parameters.clone() });
        assert_eq!((&reused.ids, &reused.text), (&plain.ids, &plain.text));
    }
}
