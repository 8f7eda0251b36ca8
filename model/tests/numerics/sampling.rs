//! Compares the sampler with `candle_transformers`, and tests seeds, penalties, parameter bounds and saved samplers.

use crate::common::Numbers;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use tidegate_model::{Device, Sampler, SamplingParams, Tensor};

const VOCAB: usize = 40;
const DRAWS: usize = 20_000;

fn shares(mut next: impl FnMut() -> u32) -> Vec<f64> {
    let mut counts = vec![0.0; VOCAB];
    for _ in 0..DRAWS {
        counts[next() as usize] += 1.0 / DRAWS as f64;
    }
    counts
}

#[test]
fn the_same_distribution_as_candle_transformers() {
    let logits: Vec<f32> = Numbers::new(5).normals(VOCAB).iter().map(|v| 1.5 * v).collect();
    let tensor = Tensor::from_slice(&logits, VOCAB, &Device::Cpu).unwrap();
    let of =
        |temperature, top_k, top_p| SamplingParams { temperature, top_k, top_p, seed: 3, ..SamplingParams::default() };
    for (params, oracle) in [
        (of(0.7, 0, 1.0), Sampling::All { temperature: 0.7 }),
        (of(1.0, 5, 1.0), Sampling::TopK { k: 5, temperature: 1.0 }),
        (of(1.3, 0, 0.6), Sampling::TopP { p: 0.6, temperature: 1.3 }),
    ] {
        let mut sampler = Sampler::new(params, VOCAB).unwrap();
        let ours = shares(|| sampler.sample(&mut logits.clone()).unwrap());
        let mut oracle = LogitsProcessor::from_sampling(9, oracle);
        let theirs = shares(|| oracle.sample(&tensor).unwrap());
        for (token, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            // Five standard errors of the difference between two shares.
            let bound = 5.0 * (2.0 * a.max(*b) / DRAWS as f64).sqrt() + 1e-3;
            assert!((a - b).abs() < bound, "token {token}: {a} against {b}");
        }
    }
}

#[test]
fn temperature_zero_is_greedy_whatever_the_seed() {
    let logits = Numbers::new(1).vec(VOCAB);
    let best = (0..VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32;
    for seed in 0..5 {
        let params = SamplingParams { temperature: 0.0, top_k: 3, seed, ..SamplingParams::default() };
        assert_eq!(Sampler::new(params, VOCAB).unwrap().sample(&mut logits.clone()), Some(best));
    }
}

#[test]
fn a_seed_gives_the_same_tokens_and_another_seed_others() {
    let logits = Numbers::new(1).vec(VOCAB);
    let run = |seed| {
        let mut sampler = Sampler::new(SamplingParams { seed, ..SamplingParams::default() }, VOCAB).unwrap();
        (0..50).map(|_| sampler.sample(&mut logits.clone())).collect::<Vec<_>>()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn penalties_and_bias_change_the_logits_as_documented() {
    let params = |repetition_penalty, frequency_penalty, presence_penalty| SamplingParams {
        temperature: 0.0,
        repetition_penalty,
        frequency_penalty,
        presence_penalty,
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params(2.0, 0.5, 0.25), 4).unwrap();
    sampler.observe_prompt(&[1, 2]);
    let mut logits = [5.0, 4.0, -1.0, 1.0];
    assert_eq!(sampler.sample(&mut logits), Some(0));
    // The repetition penalty covers the prompt. Frequency and presence penalties cover only the answer, which is empty.
    assert_eq!(logits, [5.0, 2.0, -2.0, 1.0]);
    let mut logits = [5.0, 4.0, -1.0, 1.0];
    assert_eq!(sampler.sample(&mut logits), Some(1));
    assert_eq!(logits, [5.0 / 2.0 - 0.75, 2.0, -2.0, 1.0]);
    let mut logits = [9.0, 9.0, 0.0, 0.0];
    sampler.sample(&mut logits);
    assert_eq!(logits[..2], [4.5 - 0.75, 4.5 - 0.75]);

    let bias =
        SamplingParams { temperature: 0.0, logit_bias: vec![(3, 100.0), (0, -100.0)], ..SamplingParams::default() };
    assert_eq!(Sampler::new(bias, 4).unwrap().sample(&mut [5.0, 4.0, 3.0, -5.0]), Some(3));
}

#[test]
fn a_parameter_out_of_its_bound_is_named() {
    let wrong = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        let error = Sampler::new(params, VOCAB).unwrap_err();
        assert!(error.to_string().starts_with(error.parameter()), "{error}");
        error.parameter()
    };
    assert_eq!(wrong(|p| p.temperature = 2.1), "temperature");
    assert_eq!(wrong(|p| p.temperature = f32::NAN), "temperature");
    assert_eq!(wrong(|p| p.top_p = 0.0), "top_p");
    assert_eq!(wrong(|p| p.min_p = -0.1), "min_p");
    assert_eq!(wrong(|p| p.typical_p = 1.1), "typical_p");
    assert_eq!(wrong(|p| p.repetition_penalty = 0.0), "repetition_penalty");
    assert_eq!(wrong(|p| p.frequency_penalty = f32::INFINITY), "frequency_penalty");
    assert_eq!(wrong(|p| p.presence_penalty = -2.5), "presence_penalty");
    assert_eq!(wrong(|p| p.logit_bias = vec![(1, 101.0)]), "logit_bias");
    assert_eq!(wrong(|p| p.logit_bias = vec![(VOCAB as u32, 1.0)]), "logit_bias");
}

#[test]
fn a_resumed_sampler_continues_with_the_same_tokens() {
    let logits: Vec<f32> = Numbers::new(6).normals(VOCAB);
    for temperature in [0.0, 0.9] {
        let params = SamplingParams {
            temperature,
            top_p: 0.9,
            repetition_penalty: 1.2,
            frequency_penalty: 0.4,
            presence_penalty: -0.3,
            seed: 77,
            ..SamplingParams::default()
        };
        let mut stayed = Sampler::new(params.clone(), VOCAB).unwrap();
        stayed.observe_prompt(&[3, 5, 3]);
        for _ in 0..23 {
            stayed.sample(&mut logits.clone()).unwrap();
        }
        let state = stayed.state();
        let mut moved = Sampler::resume(params.clone(), &state, VOCAB).unwrap();
        assert_eq!(moved.state(), state);
        for _ in 0..50 {
            assert_eq!(stayed.sample(&mut logits.clone()), moved.sample(&mut logits.clone()));
        }
        assert_eq!(stayed.state(), moved.state());
        assert_eq!(state.draws, if temperature == 0.0 { 0 } else { 23 });
    }
}

#[test]
fn a_token_that_is_taken_back_leaves_no_trace_in_the_counts() {
    const BEFORE: u32 = 1 << 31;
    let favour = |token: usize| {
        let mut logits = vec![0.0; VOCAB];
        logits[token] = 9.0;
        logits
    };
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, VOCAB).unwrap();
    sampler.observe_prompt(&[1]);
    for token in [1, 2, 2] {
        let before = sampler.state();
        assert_eq!(sampler.sample(&mut favour(token)), Some(token as u32));
        sampler.take_back(token as u32);
        assert_eq!(sampler.state(), before);
        sampler.sample(&mut favour(token));
    }
    assert_eq!(sampler.state().counts, [(1, BEFORE | 1), (2, 2)]);
    sampler.close_answer();
    assert_eq!(sampler.state().counts, [(1, BEFORE), (2, BEFORE)]);
}
