//! Compares sampling on the device with the CPU's sampler on the same logits. Both must choose the same tokens for all
//! parameters, with rows of all kinds in one launch.

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use super::{device, normals, read};
use crate::config::DecoderConfig;
use crate::cuda::choose::{Choices, Rows};
use crate::cuda::plan::ROWS;
use crate::cuda::{CudaDecoder, CudaPool};
use crate::memory::StateType;
use crate::runner::Backend;
use crate::sampling::{Permitted, Plans, Sampled, Sampler, SamplingParams, TokenSet};
use crate::weights::WeightType;

/// One row: its logits, sampler and limits.
struct Row {
    logits: Vec<f32>,
    sampler: Sampler,
    allowed: Option<TokenSet>,
    last_resort: Vec<u32>,
}

impl Row {
    fn new(logits: Vec<f32>, params: SamplingParams) -> Self {
        let sampler = Sampler::new(params, logits.len()).unwrap();
        Self { logits, sampler, allowed: None, last_resort: Vec::new() }
    }

    /// Returns the CPU's choice.
    fn expected(&self) -> Sampled {
        let (mut sampler, mut logits) = (self.sampler.clone(), self.logits.clone());
        let possible = logits.iter().any(|logit| *logit > f32::NEG_INFINITY);
        if let Some(allowed) = &self.allowed {
            allowed.apply(&mut logits);
        }
        let is_last = |token: usize| self.last_resort.contains(&(token as u32));
        if logits.iter().enumerate().any(|(token, logit)| *logit > f32::NEG_INFINITY && !is_last(token)) {
            let all = logits.iter_mut().enumerate().filter(|(token, _)| is_last(*token));
            all.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
        match sampler.sample(&mut logits) {
            Some(token) => Sampled::Token(token),
            // Without a mask, `possible` does not change.
            None => Sampled::Nothing { possible: possible || self.allowed.is_none() },
        }
    }
}

/// Samples all rows in one launch.
fn chosen(rows: &mut [Row]) -> Vec<Sampled> {
    let device = device();
    let vocab = rows[0].logits.len();
    let mut choices = Choices::new(&device, vocab, rows.len()).unwrap();
    for row in &mut *rows {
        let permitted = Permitted { allowed: row.allowed.as_ref(), last_resort: &row.last_resort };
        row.sampler.plan(permitted, &mut choices.plans);
    }
    let logits: Vec<f32> = rows.iter().flat_map(|row| row.logits.iter().copied()).collect();
    let logits = device.floats("logits", &logits).unwrap();
    let to = device.buffer("tokens", rows.len() * 8).unwrap();
    choices.forward(&device, Rows { logits: logits.at, chosen: to.at }).unwrap();
    let bytes: Vec<u8> = read(&device, to.at, rows.len() * 2).iter().flat_map(|v| v.to_bits().to_le_bytes()).collect();
    (0..rows.len()).map(|row| choices.sampled(row, &bytes)).collect()
}

/// A seeded random number generator.
struct Dice(ChaCha8Rng);

impl Dice {
    fn below(&mut self, bound: u32) -> u32 {
        self.0.next_u32() % bound
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u32) as usize]
    }

    fn share(&mut self) -> f32 {
        self.below(1 << 20) as f32 / (1 << 20) as f32
    }

    fn params(&mut self, vocab: u32) -> SamplingParams {
        let share = (self.share() + 1e-3).min(1.0);
        SamplingParams {
            temperature: self.one_of(&[0.0, 0.3, 0.8, 1.0, 1.0, 2.0]),
            top_k: self.one_of(&[0, 0, 1, 5, 40, 10_000]),
            top_p: self.one_of(&[1.0, 1.0, share, 0.95]),
            min_p: self.one_of(&[0.0, 0.0, 0.05, 1.0]),
            repetition_penalty: self.one_of(&[1.0, 1.0, 1.3]),
            frequency_penalty: self.one_of(&[0.0, 0.0, 0.7]),
            presence_penalty: self.one_of(&[0.0, 0.0, -0.4]),
            logit_bias: (0..self.one_of(&[0, 0, 3])).map(|i| (self.below(vocab), 2.0 - i as f32)).collect(),
            seed: u64::from(self.0.next_u32()),
            ..SamplingParams::default()
        }
    }

    fn row(&mut self, vocab: usize) -> Row {
        let few = [0.0, 1.0, -1.0, 2.5, f32::NEG_INFINITY, f32::NAN, -0.0];
        let spread = self.one_of(&[0.01, 1.0, 4.0, 30.0]);
        let own: Vec<f32> = normals(u64::from(self.0.next_u32()), vocab).iter().map(|v| v * spread).collect();
        let logits = match self.below(4) {
            0 => (0..vocab).map(|_| self.one_of(&few)).collect(),
            1 => vec![self.share(); vocab],
            _ => own,
        };
        let params = self.params(vocab as u32);
        let mut row = Row::new(logits, params);
        let seen: Vec<u32> = (0..self.below(40)).map(|_| self.below(vocab as u32)).collect();
        row.sampler.observe_prompt(&seen);
        (0..self.below(20)).for_each(|_| row.sampler.take(self.below(vocab as u32)));
        if self.below(3) == 0 {
            let mut allowed = TokenSet::new(vocab);
            (0..self.one_of(&[1, 7, vocab as u32])).for_each(|_| allowed.insert(self.below(vocab as u32)));
            row.allowed = Some(allowed);
        }
        if self.below(4) == 0 {
            // One token appears twice, and one is outside the vocabulary.
            row.last_resort = vec![self.below(vocab as u32), 3, 3, vocab as u32 + 7];
        }
        row
    }
}

#[test]
fn tokens_are_those_of_the_cpus_sampler() {
    let mut dice = Dice(ChaCha8Rng::seed_from_u64(11));
    // A vocabulary smaller than a block, one with too many equal tokens to compare at once, and one whose buckets have
    // several warps.
    for (vocab, count) in [(61, 300), (5003, 60), (70_001, 6)] {
        let mut rows: Vec<Row> = (0..count).map(|_| dice.row(vocab)).collect();
        let expected: Vec<Sampled> = rows.iter().map(Row::expected).collect();
        for (i, (found, expected)) in chosen(&mut rows).iter().zip(&expected).enumerate() {
            let state = rows[i].sampler.state();
            assert_eq!(found, expected, "row {i} of {vocab} tokens: {:?} {state:?}", rows[i].sampler);
        }
        assert!(expected.iter().any(|sampled| matches!(sampled, Sampled::Nothing { .. })) || vocab > 61);
    }
}

#[test]
fn draws_from_a_long_tail_are_those_of_the_cpu() {
    // The best token leads by far. Each of the others has a probability of about a billionth, so rounding these down
    // would shift all draws.
    let vocab = 70_001;
    let mut logits: Vec<f32> = normals(31, vocab).iter().map(|v| 2.0 * v).collect();
    logits[77] = 26.0;
    let row = |uniform| {
        let mut row = Row::new(logits.clone(), SamplingParams::default());
        row.sampler.draw_next(uniform);
        row
    };
    // The smallest random number with which the CPU draws `token` or a later one.
    let first = |token: u32| {
        let (mut low, mut high) = (0, 1 << 53);
        while low < high {
            let middle = low + (high - low) / 2;
            let is_later = matches!(row(middle).expected(), Sampled::Token(sampled) if sampled >= token);
            (low, high) = if is_later { (low, middle) } else { (middle + 1, high) };
        }
        low
    };
    let mut tokens = vec![3, 20_000, 35_111, 50_000, 64_321, 70_000];
    tokens.retain(|&token| first(token) + 9 < first(token + 1));
    assert!(tokens.len() > 3, "{tokens:?}");
    let mut rows: Vec<Row> = tokens.iter().map(|&token| row(u64::midpoint(first(token), first(token + 1)))).collect();
    let expected: Vec<Sampled> = tokens.into_iter().map(Sampled::Token).collect();
    assert_eq!(chosen(&mut rows), expected);
}

#[test]
fn draws_follow_the_probabilities() {
    let shares = [0.5f32, 0.25, 0.125, 0.0625, 0.0625];
    for (top_p, least) in [(1.0, [790, 390, 190, 95, 95]), (0.999_99, [790, 390, 190, 95, 95])] {
        let logits: Vec<f32> = shares.iter().map(|share| share.ln()).collect();
        let params = |seed| SamplingParams { top_p, seed, ..SamplingParams::default() };
        let mut rows: Vec<Row> = (0..1600).map(|seed| Row::new(logits.clone(), params(seed))).collect();
        let mut counts = [0; 5];
        for sampled in chosen(&mut rows) {
            let Sampled::Token(token) = sampled else { panic!("{sampled:?}") };
            counts[token as usize] += 1;
        }
        // Within four standard deviations.
        let apart = counts.iter().zip(least).all(|(count, least)| f64::from(*count - least).abs() < 85.0);
        assert!(apart && counts.iter().sum::<i32>() == 1600, "{counts:?}");
    }
}

#[test]
fn infinite_nan_and_masked_logits_are_handled_as_on_the_cpu() {
    let (none, infinite) = (f32::NEG_INFINITY, f32::INFINITY);
    let draw = || SamplingParams { top_p: 0.5, min_p: 0.1, top_k: 2, ..SamplingParams::default() };
    let best = || SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let cold = || SamplingParams { temperature: f32::MIN_POSITIVE, ..SamplingParams::default() };
    let bad: [[f32; 4]; 7] = [
        [f32::NAN; 4],
        [none; 4],
        [f32::NAN, -3.0, 2.0, f32::NAN],
        [0.0, infinite, f32::NAN, infinite],
        [-0.0, 0.0, none, -0.0],
        [f32::MIN, f32::MAX, f32::MAX, 1.0],
        [1e-40, 0.0, -1e-40, none],
    ];
    let params = [draw(), best(), cold()];
    let mut rows: Vec<Row> =
        bad.iter().flat_map(|logits| params.clone().map(|params| Row::new(logits.to_vec(), params))).collect();
    // The model excludes all allowed tokens; only the end remains.
    let mut only = TokenSet::new(4);
    only.insert(3);
    rows[12].allowed = Some(only.clone());
    rows[18].allowed = Some(only);
    rows[9].last_resort = vec![1, 3];
    let expected: Vec<Sampled> = rows.iter().map(Row::expected).collect();
    assert_eq!(chosen(&mut rows), expected);
    assert_eq!(expected[18], Sampled::Nothing { possible: true });
}

fn decoder() -> (CudaDecoder, CudaPool) {
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "proj_dim": 12}"#;
    let config = DecoderConfig::from_json(text).unwrap();
    let decoder = CudaDecoder::random(config, WeightType::F32, 3, &device()).unwrap();
    let pool = decoder.new_pool(7, StateType::F32).unwrap();
    (decoder, pool)
}

#[test]
fn a_step_samples_some_rows_and_returns_the_logits_of_others() {
    let (ids, slots) = ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 5, 6]);
    let (decoder, mut pool) = decoder();
    let mut all = Vec::new();
    decoder.decode_into(&ids, &mut pool, &slots, &mut all).unwrap();
    let rows: Vec<&[f32]> = all.chunks_exact(61).collect();
    // The rows that return their logits: one alone, two in a row, and one at the end.
    let wanted = [true, false, true, true, false, true];
    let sampler = |row: usize| Sampler::new(SamplingParams { seed: row as u64, ..SamplingParams::default() }, 61);
    let mut samplers: Vec<Sampler> = (0..6).map(|row| sampler(row).unwrap()).collect();
    let (decoder, mut pool) = self::decoder();
    let (mut sampled, mut logits) = (vec![Sampled::Logits; 9], vec![0.0; 3]);
    let mut plan = |range: std::ops::Range<usize>, plans: &mut Plans| {
        for row in range {
            if wanted[row] {
                plans.skip_to(row + 1);
            } else {
                assert!(samplers[row].plan(Permitted::default(), plans));
            }
        }
    };
    decoder.decode_and_sample(&ids, &mut pool, &slots, &mut plan, (&mut sampled, &mut logits)).unwrap();
    let expected: Vec<Sampled> = (0..6)
        .map(|row| match sampler(row).unwrap().sample(&mut rows[row].to_vec()) {
            Some(token) if !wanted[row] => Sampled::Token(token),
            _ => Sampled::Logits,
        })
        .collect();
    assert_eq!(sampled, expected);
    assert_eq!(logits, [rows[0], rows[2], rows[3], rows[5]].concat());
    // If no row is sampled, all logits are returned.
    let mut none = |range: std::ops::Range<usize>, plans: &mut Plans| plans.skip_to(range.len());
    let (decoder, mut pool) = self::decoder();
    decoder.decode_and_sample(&ids, &mut pool, &slots, &mut none, (&mut sampled, &mut logits)).unwrap();
    assert_eq!((sampled.as_slice(), &logits), (&[Sampled::Logits; 6][..], &all));
    // A row without a plan is an error, and the slots are refused until they are reset.
    let mut too_few = |_: std::ops::Range<usize>, _: &mut Plans| {};
    let outcome = decoder.decode_and_sample(&ids, &mut pool, &slots, &mut too_few, (&mut sampled, &mut logits));
    assert!(outcome.unwrap_err().to_string().contains("planned"));
    assert!(pool.export(0).is_err() && pool.export(4).is_ok());
}

#[test]
fn a_batch_larger_than_a_step_is_planned_in_parts() {
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 31, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "proj_dim": 4}"#;
    let config = DecoderConfig::from_json(text).unwrap();
    let decoder = CudaDecoder::random(config, WeightType::F32, 3, &device()).unwrap();
    let count = ROWS + 3;
    let (ids, slots): (Vec<u32>, Vec<usize>) = (0..count).map(|row| (row as u32 % 31, row)).unzip();
    let mut all = Vec::new();
    let mut pool = decoder.new_pool(count, StateType::F32).unwrap();
    decoder.decode_into(&ids, &mut pool, &slots, &mut all).unwrap();
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let mut sampler = Sampler::new(params, 31).unwrap();
    let mut planned = Vec::new();
    let mut plan = |range: std::ops::Range<usize>, plans: &mut Plans| {
        for row in range.clone() {
            // One row of the second part returns its logits.
            if row == ROWS + 1 { plans.skip_to(2) } else { assert!(sampler.plan(Permitted::default(), plans)) }
        }
        planned.push(range);
    };
    let (mut sampled, mut logits) = (Vec::new(), Vec::new());
    let mut pool = decoder.new_pool(count, StateType::F32).unwrap();
    decoder.decode_and_sample(&ids, &mut pool, &slots, &mut plan, (&mut sampled, &mut logits)).unwrap();
    assert_eq!(planned, [0..ROWS, ROWS..count]);
    for (row, (sampled, logits)) in sampled.iter().zip(all.chunks_exact_mut(31)).enumerate() {
        let best = sampler.sample(logits).unwrap();
        assert_eq!(*sampled, if row == ROWS + 1 { Sampled::Logits } else { Sampled::Token(best) }, "{row}");
    }
    assert_eq!(logits, all[(ROWS + 1) * 31..(ROWS + 2) * 31]);
}
