//! Texts that follow a scripted grammar: a test lists the tokens that each mask allows, and the calls that fail.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::fake::{Fake, ONLY_SEVEN};
use crate::common::runs::{LIMITS, Run, collect, greedy, run, shipped, start};
use tidegate_model::SamplingParams;
use tidegate_model::sampling::TokenSet;
use tidegate_server::engine::{
    Constraint, ConstraintError, Failure, FinishReason, Grammar, Request, RequestParameters, Start, StopCause,
};
use tidegate_server::session::{Answer, Snapshot};

/// A grammar that allows the listed tokens at each step. The text is complete after the last step.
#[derive(Clone, Debug, Default)]
pub(super) struct Script {
    steps: Vec<Vec<u32>>,
    /// The calls that fail.
    faults: Vec<Fault>,
    /// If present, each mask waits for a step of the model.
    rendezvous: Option<Arc<Rendezvous>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    StartPanics,
    MaskPanics(usize),
    MaskFails(usize),
    AcceptPanics(usize),
    AcceptFails(usize),
}

impl Grammar for Script {
    fn start(&self) -> Box<dyn Constraint> {
        assert!(!self.faults.contains(&Fault::StartPanics), "scripted panic");
        Box::new(Text { script: self.clone(), at: 0 })
    }
}

#[derive(Debug)]
struct Text {
    script: Script,
    at: usize,
}

impl Text {
    fn has(&self, fault: fn(usize) -> Fault) -> bool {
        self.script.faults.contains(&fault(self.at))
    }
}

impl Constraint for Text {
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError> {
        assert!(!self.has(Fault::MaskPanics), "scripted panic");
        if let Some(rendezvous) = &self.script.rendezvous {
            rendezvous.mask.meet();
        }
        if self.has(Fault::MaskFails) {
            return Err(ConstraintError::new("scripted error"));
        }
        allowed.clear();
        self.script.steps[self.at].iter().for_each(|token| allowed.insert(*token));
        Ok(())
    }

    /// Returns the only allowed token if the step before also allowed a single one. A mask that is meant to fail is
    /// never skipped.
    fn forced(&self) -> Option<u32> {
        let before = self.at.checked_sub(1)?;
        match (&*self.script.steps[before], &**self.script.steps.get(self.at)?) {
            ([_], [forced]) if !self.has(Fault::MaskFails) => Some(*forced),
            _ => None,
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        assert!(!self.has(Fault::AcceptPanics), "scripted panic");
        if self.has(Fault::AcceptFails) {
            return Err(ConstraintError::new("scripted error"));
        }
        assert!(self.script.steps[self.at].contains(&token), "{token} is not allowed at {}", self.at);
        self.at += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.at == self.script.steps.len()
    }
}

pub(super) fn script(steps: &[&[u32]]) -> Script {
    Script { steps: steps.iter().map(|step| step.to_vec()).collect(), ..Script::default() }
}

pub(super) fn following(script: Script, parameters: RequestParameters) -> RequestParameters {
    RequestParameters { grammar: Some(Arc::new(script)), ..parameters }
}

#[test]
fn every_token_is_allowed_by_its_mask_whatever_the_sampling_parameters() {
    let (engine, _thread) = start(Fake::new(2));
    let steps: &[&[u32]] = &[&[9, 40], &[10, 50], &[2, 3], &[60]];
    assert_eq!(run(&engine, following(script(steps), greedy(&[1], 9))).ids, [9, 10, 2, 60]);
    for seed in 0..20 {
        let logit_bias = vec![(4, 100.0), (9, -100.0), (2, 5.0)];
        let sampling = SamplingParams { seed, logit_bias, presence_penalty: -2.0, ..SamplingParams::default() };
        let output = run(&engine, following(script(steps), RequestParameters { sampling, ..greedy(&[1], 9) }));
        assert!(output.ids.iter().zip(steps).all(|(id, step)| step.contains(id)), "{:?}", output.ids);
        assert_eq!((output.ids.len(), output.ids[0]), (4, 40));
    }
}

#[test]
fn a_text_ends_with_its_grammar_and_shows_text_held_back_for_stop_strings() {
    let (engine, _thread) = start(Fake::new(1));
    let [a, b] = [b'a', b'b'].map(u32::from);
    let turn = RequestParameters {
        start: Start::Session(Arc::new(Snapshot::empty(0))),
        snapshot: true,
        // The engine holds back the last letter, because it may begin this string, and must show it at the end.
        stop: vec!["bc".into()],
        ..greedy(&[1], 9)
    };
    for max_tokens in [2, 9] {
        let output = run(&engine, following(script(&[&[a], &[b]]), RequestParameters { max_tokens, ..turn.clone() }));
        assert_eq!((output.text.as_str(), &output.ids), ("ab", &vec![a, b]));
        let finish = output.finish();
        assert_eq!((finish.reason, &finish.stop), (FinishReason::Stop, &Some(StopCause::Grammar)));
        let snapshot = finish.snapshot.as_ref().unwrap();
        assert_eq!((snapshot.read, &snapshot.pending, &snapshot.answer), (2, &vec![b], &Some(Answer::default())));
    }
}

#[test]
fn min_tokens_yields_to_a_mask_that_allows_only_the_end() {
    let (engine, _thread) = start(Fake::new(1));
    let parameters = RequestParameters { min_tokens: 5, ..greedy(&[1], 9) };
    let output = run(&engine, following(script(&[&[3], &[255], &[9]]), parameters.clone()));
    assert_eq!((&output.ids, &output.finish().stop), (&vec![3, 255], &Some(StopCause::Eos(255))));
    let output = run(&engine, following(script(&[&[3], &[255, 8], &[9]]), parameters));
    assert_eq!(output.ids, [3, 8, 9]);
}

#[test]
fn if_all_allowed_tokens_have_probability_zero_the_text_ends_where_the_grammar_allows_it() {
    let (engine, _thread) = start(Fake::new(1));
    let parameters = greedy(&[1, ONLY_SEVEN], 9);
    assert_eq!(run(&engine, following(script(&[&[7, 8], &[9]]), parameters.clone())).ids, [7, 9]);
    let output = run(&engine, following(script(&[&[8, 255], &[9]]), parameters.clone()));
    assert_eq!((&output.ids, &output.finish().stop), (&vec![255], &Some(StopCause::Eos(255))));
    assert_eq!(run(&engine, following(script(&[&[8], &[9]]), parameters)).end, Some(Err(Failure::Internal)));
}

#[test]
fn a_grammar_that_fails_ends_only_its_own_text() {
    let (engine, _thread) = start(Fake::new(4).step(Duration::from_millis(1)));
    let healthy = engine
        .submit_all(vec![
            Request::new(greedy(&[1], 60), &LIMITS).unwrap(),
            Request::new(
                following(
                    Script { steps: (0..60).map(|step| vec![2 + step, 5]).collect(), ..Script::default() },
                    greedy(&[1], 50),
                ),
                &LIMITS,
            )
            .unwrap(),
        ])
        .unwrap();
    let steps: &[&[u32]] = &[&[5], &[6], &[7]];
    let of = |faults: &[Fault]| Script { faults: faults.into(), ..script(steps) };
    let failing = [
        (of(&[Fault::StartPanics]), 0, Failure::Internal),
        (of(&[Fault::MaskPanics(0)]), 0, Failure::Internal),
        (of(&[Fault::MaskFails(2)]), 2, Failure::Grammar),
        (of(&[Fault::AcceptPanics(1)]), 1, Failure::Internal),
        (of(&[Fault::AcceptFails(1)]), 1, Failure::Grammar),
        (script(&[&[5], &[], &[7]]), 1, Failure::Grammar),
    ];
    let count = failing.len() as u64;
    for (script, tokens, failure) in failing {
        let name = format!("{script:?}");
        let output = run(&engine, following(script, greedy(&[1], 9)));
        assert_eq!((output.end, output.ids.len()), (Some(Err(failure)), tokens), "{name}");
    }
    let [free, bound]: [Run; 2] = healthy.into_iter().map(collect).collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(free.ids, (2..62).collect::<Vec<_>>());
    assert_eq!(bound.ids.len(), 50);
    assert_eq!(free.finish().reason, FinishReason::Length);
    assert_eq!((engine.stats().failed, engine.stats().finished), (count, 2));
}

/// Lets a mask and a step on two threads wait for each other, with a timeout. `missed` counts the steps that met no
/// mask.
#[derive(Debug)]
struct Rendezvous {
    mask: Side,
    missed: AtomicUsize,
}

#[derive(Debug)]
struct Side {
    here: Sender<()>,
    there: Mutex<Receiver<()>>,
    met: AtomicUsize,
}

impl Side {
    fn meet(&self) {
        self.here.send(()).unwrap();
        if self.there.lock().unwrap().recv_timeout(Duration::from_secs(10)).is_ok() {
            self.met.fetch_add(1, SeqCst);
        }
    }
}

#[test]
fn masks_are_computed_while_the_model_steps() {
    let (to_step, from_mask) = channel();
    let (to_mask, from_step) = channel();
    let side = |here, there| Side { here, there: Mutex::new(there), met: AtomicUsize::new(0) };
    let rendezvous = Arc::new(Rendezvous { mask: side(to_step, from_step), missed: AtomicUsize::new(0) });
    let fake = Fake::new(1);
    let calls = fake.calls();
    let (engine, _thread) = start(fake);
    let step = side(to_mask, from_mask);
    let missed = Arc::clone(&rendezvous);
    *calls.during_step.lock().unwrap() = Some(Box::new(move || {
        let before = step.met.load(SeqCst);
        step.meet();
        missed.missed.fetch_add(usize::from(step.met.load(SeqCst) == before), SeqCst);
    }));
    let script = Script { rendezvous: Some(Arc::clone(&rendezvous)), ..script(&[&[5, 9], &[6, 9], &[7, 9]]) };
    assert_eq!(run(&engine, following(script, greedy(&[1], 9))).ids, [5, 6, 7]);
    assert_eq!((rendezvous.mask.met.load(SeqCst), rendezvous.missed.load(SeqCst)), (3, 0));
}

#[test]
fn grammars_give_the_same_bits_alone_and_in_a_batch() {
    let served = shipped();
    let vocab = served.limits.vocab_size as u32;
    let thirds = |rest: u32| (0..vocab).filter(|id| id % 3 == rest).collect::<Vec<u32>>();
    let request = |i: u32| {
        let steps = (0..20).map(|step| thirds((step + i) % 3)).collect();
        let prompt = served.tokenizer.encode("Once upon a time").unwrap();
        let sampling = SamplingParams { temperature: 0.9, seed: u64::from(i), ..SamplingParams::default() };
        let parameters =
            RequestParameters { sampling, logprobs: Some(3), prompt, max_tokens: 20, ..Default::default() };
        let parameters = if i == 3 { parameters } else { following(Script { steps, ..Script::default() }, parameters) };
        Request::new(parameters, &served.limits).unwrap()
    };
    let together = served.engine.submit_all((0..4).map(request).collect()).unwrap();
    for (i, together) in (0..4).zip(together.into_iter().map(collect)) {
        let alone = collect(served.engine.submit(request(i)).unwrap());
        assert_eq!((&alone.ids, &alone.logprobs), (&together.ids, &together.logprobs));
        let follows = alone.ids.iter().zip(0..).all(|(id, step)| id % 3 == (step + i) % 3);
        assert_eq!(follows, i != 3);
        // Log probabilities are computed before the mask is applied, so the likeliest token need not be allowed.
        let top = |scored: &tidegate_server::engine::TokenLogprobs| scored.top[0].0 == scored.token;
        assert!(!alone.logprobs.iter().all(top));
    }
}

#[test]
fn requests_that_cannot_follow_a_grammar_are_refused() {
    let parameters = following(script(&[&[5]]), greedy(&[1], 5));
    let refused = |parameters: RequestParameters| {
        let error = Request::new(parameters, &LIMITS).unwrap_err();
        (error.parameter(), error.to_string())
    };
    let (parameter, words) = refused(RequestParameters { ignore_eos: true, ..parameters.clone() });
    assert_eq!(
        (parameter, words.as_str()),
        ("ignore_eos", "ignore_eos must be absent or false beside a grammar, a schema or tools, found true")
    );
    let (engine, _thread) = start(Fake::new(1));
    let session = Start::Session(Arc::new(Snapshot::empty(0)));
    let open = run(&engine, RequestParameters { start: session, snapshot: true, ..greedy(&[1], 2) });
    let start = Start::Session(open.finish().snapshot.clone().unwrap());
    let continues =
        RequestParameters { start: start.clone(), prompt: Vec::new(), snapshot: true, ..parameters.clone() };
    let (parameter, words) = refused(continues);
    assert_eq!(parameter, "grammar");
    assert_eq!(words, "grammar must be absent where the previous answer continues, found one");
    // A new answer in the same conversation can have a grammar.
    assert!(Request::new(RequestParameters { start, snapshot: true, ..parameters }, &LIMITS).is_ok());
}
