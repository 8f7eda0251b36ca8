//! Many rows with a large vocabulary, sampled by several threads or by the model. Batching does not change any text.

use std::ops::Range;
use std::sync::Arc;

use tidegate_model::sampling::{Plans, Sampled};
use tidegate_model::{LanguageModel, ModelError, SamplingParams};
use tidegate_server::engine::{
    EngineHandle, EngineOptions, EngineThread, Event, EventStream, Failure, Limits, Request, RequestParameters,
    TextRules, spawn,
};
use tidegate_server::text::Vocabulary;

const VOCAB: usize = 20_000;
const ROWS: u32 = 70;
/// A token after which all logits are NaN.
const NAN: u32 = 9;

/// A model whose logits depend only on the previous token. With `samples`, the model itself samples: always the
/// previous token + 1000.
struct Chain {
    samples: bool,
}

impl LanguageModel for Chain {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn slots(&self) -> usize {
        ROWS as usize
    }

    fn reset(&mut self, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn export(&self, _: usize) -> Result<Vec<f32>, ModelError> {
        Ok(Vec::new())
    }

    fn import(&mut self, _: usize, _: &[f32], _: u64) -> Result<(), ModelError> {
        Ok(())
    }

    fn prefill(&mut self, _: &[u32], _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn decode(&mut self, ids: &[u32], _: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        let of = |id: u32, token: usize| match id {
            NAN => f32::NAN,
            // NAN is never sampled.
            _ if token == NAN as usize => f32::NEG_INFINITY,
            _ => ((token * 7919 + id as usize * 104_729) % 1013) as f32 / 100.0,
        };
        logits.clear();
        logits.extend(ids.iter().flat_map(|id| (0..VOCAB).map(|token| of(*id, token))));
        Ok(())
    }

    fn samples(&self) -> bool {
        self.samples
    }

    fn decode_and_sample(
        &mut self,
        ids: &[u32],
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        (sampled, logits): (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> Result<(), ModelError> {
        let (mut plans, mut wanted) = (Plans::new(VOCAB, 1 << 20), Vec::new());
        sampled.clear();
        // Asks for the plans in parts, as a model on a GPU does while its step runs.
        for rows in (0..ids.len()).step_by(16).map(|at| at..ids.len().min(at + 16)) {
            plans.clear();
            plan(rows.clone(), &mut plans);
            assert_eq!(plans.len(), rows.len());
            for (row, id) in ids[rows].iter().enumerate() {
                sampled.push(match *id {
                    id if plans.wants_logits(row) => {
                        wanted.push(id);
                        Sampled::Logits
                    }
                    NAN => Sampled::Nothing { possible: true },
                    id => Sampled::Token(id + 1000),
                });
            }
        }
        self.decode(&wanted, slots, logits)
    }
}

/// Returns the length of the `row`th text. Texts end at different steps, which leaves gaps between used slots.
fn length(row: u32) -> usize {
    2 + row as usize % 5
}

/// Returns the `row`th request, with one of four kinds of sampling. Some ask for prompt log probabilities, so that
/// decode steps read their prompts.
fn request(row: u32) -> Request {
    let plain = SamplingParams { seed: u64::from(row), ..SamplingParams::default() };
    let sampling = match row % 4 {
        0 => SamplingParams { temperature: 0.0, frequency_penalty: 1.0, ..plain },
        1 => SamplingParams { top_k: 40, ..plain },
        2 => SamplingParams { top_p: 0.9, repetition_penalty: 1.2, ..plain },
        _ => plain,
    };
    let scored = row % 7 == 3;
    let parameters = RequestParameters {
        prompt: if scored { vec![row, row + 100, row + 200] } else { vec![row] },
        prompt_logprobs: scored.then_some(1),
        max_tokens: length(row),
        sampling,
        ..RequestParameters::default()
    };
    Request::new(parameters, &Limits { vocab_size: VOCAB, max_prompt_tokens: 10, max_tokens: 10, sources: None })
        .unwrap()
}

fn collect(mut stream: EventStream) -> Result<Vec<u32>, Failure> {
    let mut ids = Vec::new();
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Delta(delta) => ids.extend(delta.token_ids),
            Event::PromptLogprobs(scores) => assert_eq!(scores.len(), 3),
            Event::Failed(failure) => return Err(failure),
            Event::Finished(_) => break,
        }
    }
    Ok(ids)
}

fn texts(engine: &EngineHandle, rows: impl Iterator<Item = u32>) -> Vec<Result<Vec<u32>, Failure>> {
    let streams = engine.submit_all(rows.map(request).collect()).unwrap();
    streams.into_iter().map(collect).collect()
}

fn engine<M: LanguageModel + 'static>(model: M) -> (EngineHandle, EngineThread) {
    let vocabulary = Arc::new(Vocabulary::new((0..VOCAB).map(|_| b"a".as_slice().into()).collect()));
    let rules = TextRules { vocabulary, eos: Arc::from([]), encode: Arc::new(|_| Vec::new()) };
    spawn(model, rules, EngineOptions::default()).unwrap()
}

#[test]
fn the_model_samples_where_it_can_and_the_engine_elsewhere() {
    let ((sampler, _thread), (chain, _other)) = (engine(Chain { samples: true }), engine(Chain { samples: false }));
    let all = |row: u32| {
        let mut sampling = SamplingParams { seed: u64::from(row), ..SamplingParams::default() };
        if row % 3 == 1 {
            sampling.typical_p = 0.9;
        }
        let scored = row % 7 == 3;
        let parameters = RequestParameters {
            prompt: if scored { vec![row, row + 100, row + 200] } else { vec![row] },
            prompt_logprobs: scored.then_some(1),
            logprobs: (row % 5 == 4).then_some(0),
            max_tokens: length(row),
            sampling,
            ..RequestParameters::default()
        };
        let limits = Limits { vocab_size: VOCAB, max_prompt_tokens: 10, max_tokens: 10, sources: None };
        Request::new(parameters, &limits).unwrap()
    };
    let texts = |engine: &EngineHandle| -> Vec<_> {
        let streams = engine.submit_all((0..ROWS).map(all).collect()).unwrap();
        streams.into_iter().map(collect).collect()
    };
    let (found, by_logits) = (texts(&sampler), texts(&chain));
    for (row, (found, by_logits)) in (0..ROWS).zip(found.iter().zip(&by_logits)) {
        let last = if row % 7 == 3 { row + 200 } else { row };
        let expected = match row {
            NAN => Err(Failure::Internal),
            // The engine samples rows with `typical_p` or log probabilities from their logits.
            _ if row % 3 == 1 || row % 5 == 4 => by_logits.clone(),
            _ => Ok((1..=length(row) as u32).map(|step| last + 1000 * step).collect()),
        };
        assert_eq!(*found, expected, "{row}");
    }
}

#[test]
fn a_text_is_the_same_alone_and_in_a_batch_and_only_a_row_of_nans_fails() {
    let (engine, _thread) = engine(Chain { samples: false });
    let together = texts(&engine, 0..ROWS);
    for (row, text) in (0..ROWS).zip(&together) {
        if row == NAN {
            assert_eq!(*text, Err(Failure::Internal));
        } else {
            assert_eq!(text.as_ref().map(Vec::len), Ok(length(row)));
            assert_eq!(*text, texts(&engine, row..=row)[0], "{row}");
        }
    }
    // Texts differ between rows, so this test does not compare a constant with itself.
    assert_ne!(together[1], together[21]);
}
