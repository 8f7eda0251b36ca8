//! Tests of the recurrence's step: every instruction set, extreme gates, stochastic rounding.

use super::*;

#[test]
fn gate_weights_are_right_at_both_ends() {
    for a in [-80.0f32, -12.0, -1.0, 0.0, 0.5, 12.0, 80.0] {
        let (keep, take) = gate_weights(Some(a));
        let want = 1.0 / (1.0 + (-f64::from(a)).exp());
        let other = 1.0 / (1.0 + f64::from(a).exp());
        assert!((f64::from(keep) - want).abs() <= 1e-6 * want, "{a}");
        assert!((f64::from(take) - other).abs() <= 1e-6 * other, "{a}");
    }
    assert_eq!(gate_weights(None), (1.0, 1.0));
}

fn small<'a>(phi_q: &'a [f32], phi_k: &'a [f32], v: &'a [f32], weights: (f32, f32)) -> Token<'a> {
    Token { phi_q, phi_k, v, weights, counted: weights, eps: 0.02, seed: 0 }
}

#[test]
fn a_gate_that_lets_nothing_in_leaves_no_nan() {
    // At 90 the weight is subnormal, at 200 it is 0.
    for logit in [90.0f32, 200.0] {
        let (mut s, mut sums, mut out) = (vec![0.0; 2 * 4], vec![0.0; 3], vec![f32::NAN; 4]);
        let phi = [0.6, 0.8];
        let token = small(&phi, &phi, &[1.0; 4], gate_weights(Some(logit)));
        step(Isa::detect(), &mut s, &mut sums, &token, &mut out, &mut 0);
        assert!(out.iter().all(|h| (0.0..=1.0).contains(h)), "{logit}: {out:?}");
    }
}

#[test]
fn clamped_denominators_are_counted() {
    let mut clamped = 0;
    for (sign, want) in [(1.0f32, 0), (-1.0, 1), (-1.0, 2), (1.0, 2)] {
        let (mut s, mut sums, mut out) = (vec![0.0; 2 * 4], vec![0.0; 3], vec![f32::NAN; 4]);
        let (phi_q, phi_k) = ([0.6 * sign, 0.8 * sign], [0.6, 0.8]);
        let token = small(&phi_q, &phi_k, &[1.0; 4], (1.0, 1.0));
        step(Isa::detect(), &mut s, &mut sums, &token, &mut out, &mut clamped);
        assert_eq!(clamped, want, "{sign}");
    }
}

#[test]
fn a_rising_maximum_shrinks_the_state() {
    let (keep, take) = (0.75, 0.25);
    // An empty head takes the key's maximum, lower or higher.
    for stored in [0.0, 7.0, -90.0] {
        let mut maximum = stored;
        assert_eq!((raise(&mut maximum, 0.0, -60.0, (keep, take)), maximum), ((0.0, take), -60.0));
    }
    let mut maximum = -60.0;
    // The maximum does not rise: only the key shrinks.
    let (kept, taken) = raise(&mut maximum, 0.5, -62.0, (keep, take));
    assert_eq!((maximum, kept), (-60.0, keep));
    assert!((taken - take * (-2.0f32).exp()).abs() < 1e-7);
    let (kept, taken) = raise(&mut maximum, 0.5, -57.0, (keep, take));
    assert_eq!((maximum, taken), (-57.0, take));
    assert!((kept - keep * (-3.0f32).exp()).abs() < 1e-7);
    // It rises so far that nothing of the old state remains. A NaN does not raise it.
    assert_eq!(raise(&mut maximum, 0.5, 300.0, (keep, take)), (0.0, take));
    let (kept, taken) = raise(&mut maximum, 0.5, f32::NAN, (keep, take));
    assert!(kept == keep && taken.is_nan());
    assert_eq!(maximum, 300.0);
    assert_eq!(raise(&mut maximum, 0.5, f32::MIN, (keep, take)), (keep, 0.0));
}

fn wave(n: usize, f: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * f).sin()).collect()
}

#[test]
fn every_instruction_set_gives_the_plain_bits() {
    for d in [1usize, 16, 37, 64, 100, 128] {
        let features = 22;
        let runs: Vec<Vec<u32>> = Isa::available()
            .into_iter()
            .map(|isa| {
                let mut s = wave(features * d, 0.37);
                let mut half: Vec<bf16> = s.iter().map(|&v| bf16::from_f32(v)).collect();
                let mut sums = wave(features + 1, 0.11);
                let (mut out, mut other) = (vec![f32::NAN; d], vec![f32::NAN; d]);
                let (q, k, v) = (wave(features, 0.9), wave(features, 1.3), wave(d, 0.7));
                let token = Token { seed: 77, ..small(&q, &k, &v, gate_weights(Some(1.5))) };
                step(isa, &mut half, &mut sums.clone(), &token, &mut other, &mut 0);
                step(isa, &mut s, &mut sums, &token, &mut out, &mut 0);
                let numbers = s.iter().chain(&sums).chain(&out).chain(&other).map(|v| v.to_bits());
                numbers.chain(half.iter().map(|v| u32::from(v.to_bits()))).collect()
            })
            .collect();
        assert!(runs.iter().all(|bits| *bits == runs[0]), "{d}");
    }
}

#[test]
fn a_bf16_state_follows_a_slow_gate() {
    // From 0 toward 1 in steps of a thousandth: rounding to nearest would stop where this is half a step of bf16.
    let (d, features) = (16, 2);
    let (mut s, mut sums) = (vec![bf16::ZERO; features * d], vec![0.0; features + 1]);
    let (q, k, v) = (vec![0.5; features], vec![1.0; features], vec![1.0; d]);
    let mut out = vec![0.0; d];
    for seed in 0..20_000 {
        let token = Token { seed, ..small(&q, &k, &v, (0.999, 0.001)) };
        step(Isa::detect(), &mut s, &mut sums, &token, &mut out, &mut 0);
    }
    let mean = s.iter().map(|v| f64::from(v.to_f32())).sum::<f64>() / s.len() as f64;
    assert!((mean - 1.0).abs() < 0.02, "{mean}");
    assert!(s.iter().all(|v| (v.to_f32() - 1.0).abs() < 0.15), "{s:?}");
}
