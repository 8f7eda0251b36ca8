//! The chunked and the one-step form against the naive one in f64, over shapes, chunks and gates.

mod common;

use common::Numbers;
use proptest::prelude::*;
use tidegate_model::feature_map::GaussianFeatures;
use tidegate_model::ops::{chunk, naive, recurrent};
use tidegate_model::{Device, Tensor};

/// Absolute error that a fast form may have for values of unit scale.
const TOLERANCE: f64 = 1e-4;

/// Numbers of one recurrence: unit-scale q, k and v, random matrices with sigma in them, gate logits.
struct Case {
    batch: usize,
    shape: recurrent::Shape,
    time: usize,
    qkv: Vec<f32>,          // (batch, time, 3, heads, d)
    w: Vec<f32>,            // (heads, D, d)
    gate: Option<Vec<f32>>, // (batch, time, heads)
}

impl Case {
    fn new(batch: usize, time: usize, shape: recurrent::Shape, gate: Option<f32>, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let rows = batch * time;
        Self {
            batch,
            shape,
            time,
            qkv: numbers.vec(rows * 3 * shape.heads * shape.head_dim),
            w: numbers.normals(shape.heads * shape.proj_dim * shape.head_dim),
            gate: gate.map(|width| numbers.vec(rows * shape.heads).iter().map(|a| a * width).collect()),
        }
    }

    fn part(&self, b: usize, t: usize, which: usize, head: usize) -> &[f32] {
        let d = self.shape.head_dim;
        &self.qkv[(((b * self.time + t) * 3 + which) * self.shape.heads + head) * d..][..d]
    }

    /// h (batch, time, heads, d) by the truth.
    fn truth(&self) -> Vec<f64> {
        let recurrent::Shape { heads, head_dim: d, proj_dim, eps } = self.shape;
        let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
        let mut out = vec![0.0; self.batch * self.time * heads * d];
        for b in 0..self.batch {
            for head in 0..heads {
                let w = wide(&self.w[head * proj_dim * d..][..proj_dim * d]);
                let mut memory = naive::Memory::new(2 * proj_dim, d);
                for t in 0..self.time {
                    let phi = |which| naive::gaussian_features(&wide(self.part(b, t, which, head)), &w);
                    let gate = self.gate.as_ref().map(|g| f64::from(g[(b * self.time + t) * heads + head]));
                    let v = wide(self.part(b, t, 2, head));
                    let h = naive::step(&mut memory, &phi(0), &phi(1), &v, gate, eps);
                    out[((b * self.time + t) * heads + head) * d..][..d].copy_from_slice(&h);
                }
            }
        }
        out
    }

    fn features(&self) -> GaussianFeatures {
        let recurrent::Shape { heads, head_dim, proj_dim, .. } = self.shape;
        let w = Tensor::from_slice(&self.w, (heads, proj_dim, head_dim), &Device::Cpu).unwrap();
        let one = Tensor::ones((heads, head_dim), w.dtype(), &Device::Cpu).unwrap();
        GaussianFeatures::new(&w, &one).unwrap()
    }

    /// h by the chunked form.
    fn chunked(&self, chunk: usize) -> Vec<f32> {
        let recurrent::Shape { heads, head_dim: d, proj_dim, eps } = self.shape;
        let shape = (self.batch, self.time, 3, heads, d);
        let qkv = Tensor::from_slice(&self.qkv, shape, &Device::Cpu).unwrap().permute((2, 0, 3, 1, 4)).unwrap();
        let part = |i: usize| qkv.get(i).unwrap().contiguous().unwrap();
        let gate = self.gate.as_ref().map(|g| {
            let g = Tensor::from_slice(g, (self.batch, self.time, heads), &Device::Cpu).unwrap();
            g.transpose(1, 2).unwrap().contiguous().unwrap()
        });
        let features = self.features();
        let inputs = chunk::Inputs {
            phi_q: features.forward(&part(0)).unwrap(),
            phi_k: features.forward(&part(1)).unwrap(),
            v: part(2),
            gate,
        };
        let zeros = |shape: &[usize]| Tensor::zeros(shape, inputs.v.dtype(), &Device::Cpu).unwrap();
        let mut memory =
            chunk::Memory { s: zeros(&[self.batch, heads, 2 * proj_dim, d + 1]), c: zeros(&[self.batch, heads, 1]) };
        let outputs = chunk::forward(&inputs, &mut memory, eps, chunk).unwrap();
        outputs.h.transpose(1, 2).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    fn memory(&self) -> recurrent::Memory {
        let recurrent::Shape { heads, head_dim, proj_dim, .. } = self.shape;
        recurrent::Memory::zeros(2 * self.batch, heads, proj_dim, head_dim, recurrent::StateType::F32)
    }

    /// h by the one-step form, one token at a time, the rows in the slots of a larger pool, last row first.
    fn stepped(&self) -> Vec<f32> {
        let recurrent::Shape { heads, head_dim: d, .. } = self.shape;
        let (features, mut memory) = (self.features(), self.memory());
        let slots: Vec<usize> = (0..self.batch).map(|b| 2 * (self.batch - b) - 1).collect();
        let mut out = vec![f32::NAN; self.batch * self.time * heads * d];
        let mut h = vec![f32::NAN; self.batch * heads * d];
        // What belongs to token t of all rows, of numbers (batch, time, width).
        let at = |x: &[f32], width: usize, t: usize| -> Vec<f32> {
            x.chunks_exact(self.time * width).flat_map(|row| &row[t * width..][..width]).copied().collect()
        };
        for t in 0..self.time {
            let qkv = at(&self.qkv, 3 * heads * d, t);
            let gate = self.gate.as_ref().map(|gate| at(gate, heads, t));
            let positions = vec![t as u64; self.batch];
            let inputs =
                recurrent::Inputs { qkv: &qkv, gate: gate.as_deref(), slots: &slots, positions: &positions, layer: 0 };
            recurrent::scan_alone(self.shape, &features, &mut memory, inputs, &mut h).unwrap();
            for (b, h) in h.chunks_exact(heads * d).enumerate() {
                out[(b * self.time + t) * heads * d..][..heads * d].copy_from_slice(h);
            }
        }
        out
    }
}

fn error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(&g, &w)| (f64::from(g) - w).abs())
        .fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m })
}

impl Case {
    /// The same with the random matrices that a bounded sigma gives.
    fn with_sigma(mut self, sigma: f32) -> Self {
        self.w.iter_mut().for_each(|w| *w *= sigma);
        self
    }
}

fn shape(heads: usize, head_dim: usize, proj_dim: usize) -> recurrent::Shape {
    // A clamp at 0.2 of the weight bounds the division's magnification of rounding: the forms are compared, not
    // the conditioning of a denominator near zero.
    recurrent::Shape { heads, head_dim, proj_dim, eps: 0.2 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn fast_forms_agree_with_the_truth(
        batch in 1usize..4, heads in 1usize..4, time in prop_oneof![9 => 1usize..200, 1 => 200usize..1001],
        head_dim in 1usize..40, proj_dim in 1usize..40,
        chunk in prop::sample::select(vec![1usize, 16, 64, 100]),
        gate in prop::option::of(prop::sample::select(vec![0.5f32, 3.0, 12.0])), seed: u64,
    ) {
        let case = Case::new(batch, time, shape(heads, head_dim, proj_dim), gate, seed);
        let want = case.truth();
        let (chunked, stepped) = (error(&case.chunked(chunk), &want), error(&case.stepped(), &want));
        prop_assert!(chunked < TOLERANCE, "chunked: {chunked}");
        prop_assert!(stepped < TOLERANCE, "stepped: {stepped}");
    }
}

#[test]
fn the_table_of_errors() {
    println!("| T | D = d | eps | gate logits | chunks of 1 | 16 | 64 | 100 | one step |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (time, d, eps, gate) in [
        (1, 64, 0.02, Some(12.0)),
        (100, 64, 0.02, None),
        (1000, 64, 0.02, None),
        (1000, 64, 0.02, Some(3.0)),
        (1000, 64, 0.02, Some(12.0)),
        (1000, 16, 0.2, Some(12.0)),
    ] {
        let case = Case::new(1, time, recurrent::Shape { eps, ..shape(2, d, d) }, gate, 7).with_sigma(1.0);
        let want = case.truth();
        let mut errors: Vec<f64> = [1, 16, 64, 100].iter().map(|&c| error(&case.chunked(c), &want)).collect();
        errors.push(error(&case.stepped(), &want));
        let gate = gate.map_or("none".to_owned(), |g| format!("within ±{g}"));
        let cells: Vec<String> = errors.iter().map(|e| format!("{e:.1e}")).collect();
        println!("| {time} | {d} | {eps} | {gate} | {} |", cells.join(" | "));
        assert!(errors.iter().all(|&e| e < TOLERANCE), "{errors:?}");
    }
}

#[test]
fn a_slot_out_of_range_or_named_twice_is_refused() {
    let case = Case::new(2, 1, shape(1, 4, 4), None, 1);
    for slots in [[0, 4], [1, 1]] {
        let inputs = recurrent::Inputs { qkv: &case.qkv, gate: None, slots: &slots, positions: &[0, 0], layer: 0 };
        let mut out = vec![0.0; 8];
        let error = recurrent::scan_alone(case.shape, &case.features(), &mut case.memory(), inputs, &mut out);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("slot"), "{error}");
    }
}

#[test]
fn random_features_converge_to_the_gaussian_kernel() {
    // phi(x) . phi(y) -> exp(-|x^ - y^|^2 / 2): the root mean square error over pairs falls like 1 / sqrt(D).
    let d = 16;
    let rms = |proj_dim: usize| {
        let mut sum = 0.0;
        let trials = 200;
        for seed in 0..trials {
            let mut numbers = Numbers::new(seed);
            let (x, y) = (numbers.normals(d), numbers.normals(d));
            let w = numbers.normals(proj_dim * d);
            let pair: Vec<f32> = x.iter().chain(&y).copied().collect();
            let pair = Tensor::from_vec(pair, (1, 1, 2, d), &Device::Cpu).unwrap();
            let w = Tensor::from_vec(w, (1, proj_dim, d), &Device::Cpu).unwrap();
            let one = Tensor::ones((1, d), w.dtype(), &Device::Cpu).unwrap();
            let phi: Vec<f32> = GaussianFeatures::new(&w, &one)
                .unwrap()
                .forward(&pair)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1()
                .unwrap();
            let (a, b) = phi.split_at(2 * proj_dim);
            let estimate: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum();
            let unit = |v: &[f32]| {
                let length = v.iter().map(|v| f64::from(v * v)).sum::<f64>().sqrt() + 1e-3;
                v.iter().map(|v| f64::from(*v) / length).collect::<Vec<_>>()
            };
            let square: f64 = unit(&x).iter().zip(unit(&y)).map(|(a, b)| (a - b) * (a - b)).sum();
            sum += (estimate - (-square / 2.0).exp()).powi(2);
        }
        (sum / trials as f64).sqrt()
    };
    let errors: Vec<f64> = [16, 64, 256, 1024].iter().map(|&d| rms(d)).collect();
    println!("rms error at D = 16, 64, 256, 1024: {errors:.4?}");
    for pair in errors.windows(2) {
        let ratio = pair[0] / pair[1];
        assert!((1.6..2.5).contains(&ratio), "four times the features should halve the error: {errors:?}");
    }
}
