//! Compares the chunked and the one-step form with the naive form in f64, for all feature maps, and many shapes, chunk
//! sizes and gates.

use crate::common::Numbers;
use proptest::prelude::*;
use tidegate_model::config::FeatureMap;
use tidegate_model::feature_map::{ArcCosineFeatures, EluFeatures, FavorFeatures, Features, GaussianFeatures};
use tidegate_model::mixers::rfa::{Sums, SumsShape, chunk, naive, recurrent};
use tidegate_model::random::Normals;
use tidegate_model::{Device, StateType, Tensor};

/// Maximum absolute error of a fast form for values of unit scale.
const TOLERANCE: f64 = 1e-4;
/// Like [`TOLERANCE`], for a state in bf16.
const HALF_TOLERANCE: f64 = 0.1;

const MAPS: [FeatureMap; 4] = [FeatureMap::Gaussian, FeatureMap::ArcCosine, FeatureMap::Elu, FeatureMap::Favor];

/// Inputs of one recurrence: q, k and v of unit scale, random matrices times sigma, and gate logits.
struct Case {
    map: FeatureMap,
    proj_dim: usize,
    batch: usize,
    shape: recurrent::Shape,
    time: usize,
    qkv: Vec<f32>,          // (batch, time, 3, heads, d)
    w: Vec<f32>,            // (heads, D, d)
    gate: Option<Vec<f32>>, // (batch, time, heads)
}

impl Case {
    /// Creates a case. `gate` bounds the absolute value of gate logits.
    fn new(
        (map, proj_dim): (FeatureMap, usize),
        (batch, time): (usize, usize),
        (heads, head_dim, eps): (usize, usize, f64),
        gate: Option<f32>,
        seed: u64,
    ) -> Self {
        let mut numbers = Numbers::new(seed);
        let rows = batch * time;
        let features = map.features(proj_dim, head_dim);
        let eps = if map.has_floor() { eps } else { 0.0 };
        let shape = recurrent::Shape { heads, head_dim, features, eps };
        Self {
            map,
            proj_dim,
            batch,
            shape,
            time,
            qkv: numbers.vec(rows * 3 * shape.heads * shape.head_dim),
            w: if map == FeatureMap::Favor {
                let mut normals = Normals::new(seed);
                (0..heads).flat_map(|_| normals.orthogonal_rows(proj_dim, head_dim)).map(|v| v as f32).collect()
            } else {
                numbers.normals(heads * proj_dim * head_dim)
            },
            gate: gate.map(|width| numbers.vec(rows * shape.heads).iter().map(|a| a * width).collect()),
        }
    }

    fn part(&self, b: usize, t: usize, which: usize, head: usize) -> &[f32] {
        let d = self.shape.head_dim;
        &self.qkv[(((b * self.time + t) * 3 + which) * self.shape.heads + head) * d..][..d]
    }

    /// Computes h (batch, time, heads, d) with the reference.
    fn truth(&self) -> Vec<f64> {
        let recurrent::Shape { heads, head_dim: d, features, eps } = self.shape;
        let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
        let features_of: fn(&[f64], &[f64]) -> Vec<f64> = match self.map {
            FeatureMap::Gaussian => naive::gaussian_features,
            FeatureMap::ArcCosine => naive::arc_cosine_features,
            FeatureMap::Elu => |x, _| naive::elu_features(x),
            FeatureMap::Favor => naive::favor_features,
        };
        let mut out = vec![0.0; self.batch * self.time * heads * d];
        for b in 0..self.batch {
            for head in 0..heads {
                let w = wide(&self.w[head * self.proj_dim * d..][..self.proj_dim * d]);
                let mut memory = naive::Memory::new(features, d);
                for t in 0..self.time {
                    let phi = |which| features_of(&wide(self.part(b, t, which, head)), &w);
                    let gate = self.gate.as_ref().map(|g| f64::from(g[(b * self.time + t) * heads + head]));
                    let v = wide(self.part(b, t, 2, head));
                    let h = naive::step(&mut memory, &phi(0), &phi(1), &v, gate, eps);
                    out[((b * self.time + t) * heads + head) * d..][..d].copy_from_slice(&h);
                }
            }
        }
        out
    }

    fn features(&self) -> Features {
        let recurrent::Shape { heads, head_dim, .. } = self.shape;
        let w = Tensor::from_slice(&self.w, (heads, self.proj_dim, head_dim), &Device::Cpu).unwrap();
        let one = Tensor::ones((heads, head_dim), w.dtype(), &Device::Cpu).unwrap();
        match self.map {
            FeatureMap::Gaussian => Features::Gaussian(GaussianFeatures::new(&w, &one).unwrap()),
            FeatureMap::ArcCosine => Features::ArcCosine(ArcCosineFeatures::new(&w, &one).unwrap()),
            FeatureMap::Elu => Features::Elu(EluFeatures::new(heads, head_dim)),
            FeatureMap::Favor => Features::Favor(FavorFeatures::new(&w).unwrap()),
        }
    }

    /// Computes h with the chunked form.
    fn chunked(&self, chunk: usize) -> Vec<f32> {
        let recurrent::Shape { heads, head_dim: d, features: width, eps } = self.shape;
        let shape = (self.batch, self.time, 3, heads, d);
        let qkv = Tensor::from_slice(&self.qkv, shape, &Device::Cpu).unwrap().permute((2, 0, 3, 1, 4)).unwrap();
        let part = |i: usize| qkv.get(i).unwrap().contiguous().unwrap();
        let gate = self.gate.as_ref().map(|g| {
            let g = Tensor::from_slice(g, (self.batch, self.time, heads), &Device::Cpu).unwrap();
            g.transpose(1, 2).unwrap().contiguous().unwrap()
        });
        let features = self.features();
        let inputs = chunk::Inputs {
            phi_q: features.queries(&part(0)).unwrap(),
            keys: features.keys(&part(1)).unwrap(),
            v: part(2),
            gate,
        };
        let zeros = |shape: &[usize]| Tensor::zeros(shape, inputs.v.dtype(), &Device::Cpu).unwrap();
        let mut memory = chunk::Carry {
            s: zeros(&[self.batch, heads, width, d + 1]),
            c: zeros(&[self.batch, heads, 1]),
            maximum: self.map.has_maximum().then(|| zeros(&[self.batch, heads, 1])),
        };
        let outputs = chunk::forward(&inputs, &mut memory, eps, chunk).unwrap();
        outputs.h.transpose(1, 2).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    fn memory(&self, state: StateType) -> Sums {
        let recurrent::Shape { heads, head_dim, features, .. } = self.shape;
        let sums = SumsShape { heads, features, head_dim, maximum: self.map.has_maximum() };
        Sums::zeros(2 * self.batch, sums, state)
    }

    /// Computes h with the one-step form, `cut` tokens at a time. The rows use slots of a larger pool in reverse order.
    fn stepped(&self, cut: usize, state: StateType) -> Vec<f32> {
        let recurrent::Shape { heads, head_dim: d, .. } = self.shape;
        let (features, mut memory) = (self.features(), self.memory(state));
        let slots: Vec<usize> = (0..self.batch).map(|b| 2 * (self.batch - b) - 1).collect();
        let mut out = vec![f32::NAN; self.batch * self.time * heads * d];
        for t in (0..self.time).step_by(cut) {
            let len = cut.min(self.time - t);
            let mut h = vec![f32::NAN; self.batch * len * heads * d];
            // Takes these tokens of all rows from (batch, time, width).
            let at = |x: &[f32], width: usize| -> Vec<f32> {
                x.chunks_exact(self.time * width).flat_map(|row| &row[t * width..][..len * width]).copied().collect()
            };
            let qkv = at(&self.qkv, 3 * heads * d);
            let gate = self.gate.as_ref().map(|gate| at(gate, heads));
            let positions = vec![t as u64; self.batch];
            let inputs =
                recurrent::Inputs { qkv: &qkv, gate: gate.as_deref(), slots: &slots, positions: &positions, layer: 0 };
            recurrent::scan_alone(self.shape, &features, &mut memory, inputs, &mut h).unwrap();
            for (b, h) in h.chunks_exact(len * heads * d).enumerate() {
                out[(b * self.time + t) * heads * d..][..len * heads * d].copy_from_slice(h);
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

/// A floor of 0.2 c limits how much the division magnifies rounding errors: the test compares forms, not the
/// conditioning of a denominator near zero.
const FLOOR: f64 = 0.2;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]
    #[test]
    fn fast_forms_agree_with_the_reference(
        map in prop::sample::select(MAPS.to_vec()),
        batch in 1usize..4, heads in 1usize..4, time in prop_oneof![9 => 1usize..200, 1 => 200usize..1001],
        head_dim in 1usize..40, proj_dim in 1usize..40,
        cut in 1usize..30, chunk in prop::sample::select(vec![1usize, 16, 64, 100]),
        gate in prop::option::of(prop::sample::select(vec![0.5f32, 3.0, 12.0])), seed: u64,
    ) {
        let case = Case::new((map, proj_dim), (batch, time), (heads, head_dim, FLOOR), gate, seed);
        let (want, steps) = (case.truth(), case.stepped(1, StateType::F32));
        let (chunked, stepped) = (error(&case.chunked(chunk), &want), error(&steps, &want));
        prop_assert!(chunked < TOLERANCE, "chunked: {chunked}");
        prop_assert!(stepped < TOLERANCE, "stepped: {stepped}");
        // Texts in any pieces have the same bits.
        prop_assert_eq!(case.stepped(cut, StateType::F32), steps);
        let half = case.stepped(1, StateType::Bf16);
        prop_assert_eq!(&case.stepped(cut, StateType::Bf16), &half);
        // A bf16 has 8 significant bits; without a gate, every step may round S again.
        let half = error(&half, &want);
        prop_assert!(half < HALF_TOLERANCE, "in bf16: {half}");
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
        let case = Case::new((FeatureMap::Gaussian, d), (1, time), (2, d, eps), gate, 7);
        let want = case.truth();
        let mut errors: Vec<f64> = [1, 16, 64, 100].iter().map(|&c| error(&case.chunked(c), &want)).collect();
        errors.push(error(&case.stepped(1, StateType::F32), &want));
        let gate = gate.map_or("none".to_owned(), |g| format!("within ±{g}"));
        let cells: Vec<String> = errors.iter().map(|e| format!("{e:.1e}")).collect();
        println!("| {time} | {d} | {eps} | {gate} | {} |", cells.join(" | "));
        assert!(errors.iter().all(|&e| e < TOLERANCE), "{errors:?}");
    }
}

#[test]
fn a_slot_out_of_range_or_named_twice_is_refused() {
    let case = Case::new((FeatureMap::Gaussian, 4), (2, 1), (1, 4, FLOOR), None, 1);
    for slots in [[0, 4], [1, 1]] {
        let inputs = recurrent::Inputs { qkv: &case.qkv, gate: None, slots: &slots, positions: &[0, 0], layer: 0 };
        let mut out = vec![0.0; 8];
        let error =
            recurrent::scan_alone(case.shape, &case.features(), &mut case.memory(StateType::F32), inputs, &mut out);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("slot"), "{error}");
    }
}

#[test]
fn growing_projections_stay_finite_and_accurate() {
    // Keys grow from token to token. With rows of W twenty times too long, exponentials of the projections overflow f32
    // but not f64. Queries stay short, because a head has one maximum for all its features, and features that matter to
    // a query must not be far below it.
    const TIME: usize = 150;
    for gate in [None, Some(3.0)] {
        let mut case = Case::new((FeatureMap::Favor, 24), (2, TIME), (2, 8, FLOOR), gate, 5);
        case.w.iter_mut().for_each(|w| *w *= 20.0);
        let d = 8;
        let mut most: f32 = 0.0;
        for (i, x) in case.qkv.chunks_exact_mut(2 * d).enumerate() {
            let (row, which) = (i / 3, i % 3);
            let factor = if which == 1 { (row % TIME) as f32 * 4.5 / TIME as f32 } else { 0.3 };
            if which < 2 {
                for x in x.iter_mut() {
                    *x *= factor;
                }
            }
            if which == 1 {
                for w in case.w[..24 * d].chunks_exact(d) {
                    let product: f32 = w.iter().zip(&x[..d]).map(|(w, x)| w * x).sum();
                    most = most.max(product / (d as f32).sqrt().sqrt());
                }
            }
        }
        assert!((200.0..600.0).contains(&most), "{most}");
        let want = case.truth();
        assert!(want.iter().all(|h| h.is_finite()), "the reference overflows f64");
        // A projection of 300 has an error of about 1e-5, and so has the logarithm of a feature.
        let steps = [1, 7].map(|cut| error(&case.stepped(cut, StateType::F32), &want));
        let chunks = [1, 9, 64].map(|chunk| error(&case.chunked(chunk), &want));
        assert!(steps.iter().chain(&chunks).all(|&error| error < 1e-3), "steps {steps:?}, chunks {chunks:?}");
        let half = error(&case.stepped(1, StateType::Bf16), &want);
        assert!(half < HALF_TOLERANCE, "{half}");
    }
}

/// Returns a case with keys of these lengths; all later keys have the last length.
fn with_lengths(map: FeatureMap, d: usize, proj_dim: usize, gate: Option<f32>, lengths: &[f32]) -> Case {
    let mut case = Case::new((map, proj_dim), (2, 90), (2, d, FLOOR), gate, 11);
    for (i, x) in case.qkv.chunks_exact_mut(d).enumerate() {
        let (token, which) = (i / 6 % 90, i / 2 % 3);
        let length = lengths[token.min(lengths.len() - 1)];
        if which == 1 {
            let own = x.iter().map(|v| v * v).sum::<f32>().sqrt();
            for v in x.iter_mut() {
                *v *= length / own;
            }
        }
    }
    case
}

#[test]
fn long_keys_do_not_kill_a_head() {
    // All keys are long, with features of e^-60 and less; one very long key is among ordinary ones; it is before them;
    // it is so long that without a maximum its features are 0 in f64.
    for (lengths, first) in [(&[40.0][..], 0), (&[8.0, 110.0, 8.0], 0), (&[110.0, 8.0], 0), (&[250.0, 8.0], 1)] {
        for gate in [None, Some(3.0)] {
            let case = with_lengths(FeatureMap::Favor, 64, 128, gate, lengths);
            let want = case.truth();
            let size = want.iter().map(|h| h.abs()).sum::<f64>() / want.len() as f64;
            assert!(size > 0.01, "{lengths:?}: the reference is nearly 0: {size}");
            let mut outs = vec![case.stepped(1, StateType::F32), case.stepped(7, StateType::F32)];
            outs.extend([1, 9, 64].map(|chunk| case.chunked(chunk)));
            for mut out in outs {
                // The features of these tokens underflow in the reference but not in the fast forms.
                for h in out.chunks_exact_mut(90 * 128).flat_map(|row| row[..first * 128].chunks_exact_mut(64)) {
                    assert!(h.iter().any(|h| h.abs() > 0.1), "{lengths:?}: {h:?}");
                    h.fill(0.0);
                }
                let error = error(&out, &want);
                assert!(error < 1e-3, "{lengths:?}, gate {gate:?}: {error}");
            }
        }
    }
}

#[test]
fn the_scale_of_sigma_does_not_change_the_arc_cosine() {
    // sigma scales the kernel but not c, so a floor of eps c would clamp denominators once sigma is small.
    for gate in [None, Some(3.0)] {
        let mut case = Case::new((FeatureMap::ArcCosine, 24), (2, 90), (2, 16, FLOOR), gate, 3);
        let forms = |case: &Case| [case.stepped(1, StateType::F32), case.chunked(1), case.chunked(64)];
        let before = forms(&case);
        case.w.iter_mut().for_each(|w| *w *= 0.1);
        let want = case.truth();
        for (after, before) in forms(&case).iter().zip(&before) {
            let wide: Vec<f64> = before.iter().map(|&h| f64::from(h)).collect();
            let (moved, wrong) = (error(after, &wide), error(after, &want));
            assert!(moved < 1e-5 && wrong < 1e-4, "{moved} {wrong}");
        }
    }
}

#[test]
fn a_denominator_of_0_gives_0_in_all_forms() {
    // If all projections of a key are negative, all its features are 0.
    let mut case = Case::new((FeatureMap::ArcCosine, 3), (1, 70), (1, 4, FLOOR), None, 3);
    case.w.iter_mut().for_each(|w| *w = w.abs());
    for token in case.qkv.chunks_exact_mut(3 * 4) {
        token[4..8].iter_mut().for_each(|k| *k = -k.abs());
    }
    assert!(case.truth().iter().all(|&h| h == 0.0));
    for out in [case.stepped(1, StateType::F32), case.chunked(1), case.chunked(64)] {
        assert!(out.iter().all(|&h| h == 0.0), "{out:?}");
    }
}

#[test]
fn empty_matrices_are_refused() {
    for shape in [(0, 2, 4), (2, 0, 4), (2, 2, 0)] {
        let w = Tensor::zeros(shape, tidegate_model::DType::F32, &Device::Cpu).unwrap();
        let error = FavorFeatures::new(&w).unwrap_err().to_string();
        assert!(error.contains("at least 1"), "{error}");
    }
}
