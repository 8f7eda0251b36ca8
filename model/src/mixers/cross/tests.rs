//! Compares attention to a source with the f64 reference, for random features and for softmax.

use candle_core::{Device, Tensor};

use super::*;
use crate::compute::SERIAL;
use crate::config::FeatureMap;
use crate::feature_map::{ArcCosineFeatures, EluFeatures, GaussianFeatures};
use crate::kernels::threads::Threads;
use crate::memory::StateType;
use crate::mixers::layer::SlotState;
use crate::mixers::rfa::naive;
use crate::random::Normals;

const HEADS: usize = 3;
const EPS: f64 = 0.02;

/// Queries of two rows, and a source for each, in f32.
struct Case {
    d: usize,
    tokens: [usize; 2],
    time: usize,
    q: Vec<f32>,       // (2, time, heads d)
    kv: [Vec<f32>; 2], // (tokens, 2 heads d)
}

impl Case {
    fn new(d: usize, tokens: [usize; 2], time: usize) -> Self {
        let mut normals = Normals::new((d * 31 + tokens[0] * 7 + time) as u64);
        let mut vec = |len: usize| (0..len).map(|_| normals.normal() as f32).collect::<Vec<f32>>();
        Self { d, tokens, time, q: vec(2 * time * HEADS * d), kv: tokens.map(|len| vec(len * 2 * HEADS * d)) }
    }

    /// Computes every head and query with the f64 reference: (2, time, heads d). `of` takes a head, its query (d), and
    /// keys and values (tokens, d).
    fn truth(&self, of: impl Fn(usize, &[f64], &[f64], &[f64]) -> Vec<f64>) -> Vec<f64> {
        let (d, inner) = (self.d, HEADS * self.d);
        let mut out = vec![f64::NAN; self.q.len()];
        for row in 0..2 {
            for head in 0..HEADS {
                let part = |x: &[f32], stride: usize, at: usize| -> Vec<f64> {
                    x.chunks_exact(stride).flat_map(|x| x[at..at + d].iter().map(|&v| f64::from(v))).collect()
                };
                let q = part(&self.q[row * self.time * inner..][..self.time * inner], inner, head * d);
                let (k, v) =
                    (part(&self.kv[row], 2 * inner, head * d), part(&self.kv[row], 2 * inner, inner + head * d));
                for (t, q) in q.chunks_exact(d).enumerate() {
                    out[(row * self.time + t) * inner + head * d..][..d].copy_from_slice(&of(head, q, &k, &v));
                }
            }
        }
        out
    }

    fn queries<'a>(&'a self, slots: &'a [usize]) -> Queries<'a> {
        Queries { q: &self.q, stride: HEADS * self.d, slots }
    }
}

fn distance(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

fn compute(threads: usize) -> Compute {
    Compute::new(Threads::new(threads).into())
}

#[test]
fn random_features_agree_with_the_reference() {
    // Sources longer than a block of keys, a source of one token, and a width that does not fill a group of SIMD lanes.
    // The last case is large enough for several threads.
    let shapes = [(8, [70, 1], 5), (16, [300, 40], 1), (5, [25, 24], 30), (32, [60, 9], 40)];
    let maps = [FeatureMap::Gaussian, FeatureMap::ArcCosine, FeatureMap::Elu];
    for ((d, tokens, time), map) in shapes.into_iter().flat_map(|shape| maps.map(|map| (shape, map))) {
        let (case, proj) = (Case::new(d, tokens, time), 12);
        let mut normals = Normals::new(5);
        let numbers: Vec<f32> = (0..HEADS * proj * d).map(|_| normals.normal() as f32).collect();
        let w = Tensor::from_vec(numbers.clone(), (HEADS, proj, d), &Device::Cpu).unwrap();
        let sigma = Tensor::ones((HEADS, d), candle_core::DType::F32, &Device::Cpu).unwrap();
        let features = match map {
            FeatureMap::Gaussian => Features::Gaussian(GaussianFeatures::new(&w, &sigma).unwrap()),
            FeatureMap::ArcCosine => Features::ArcCosine(ArcCosineFeatures::new(&w, &sigma).unwrap()),
            _ => Features::Elu(EluFeatures::new(HEADS, d)),
        };
        let (f, eps) = (map.features(proj, d), if map.has_floor() { EPS } else { 0.0 });
        let of = SumsShape { heads: HEADS, features: f, head_dim: d, maximum: false };
        let want = case.truth(|head, q, k, v| {
            let w: Vec<f64> = numbers[head * proj * d..][..proj * d].iter().map(|&v| f64::from(v)).collect();
            let phi = |x: &[f64]| match map {
                FeatureMap::Gaussian => naive::gaussian_features(x, &w),
                FeatureMap::ArcCosine => naive::arc_cosine_features(x, &w),
                _ => naive::elu_features(x),
            };
            // Without a gate, what the query reads after the last key equals attention to all keys.
            let (mut memory, phi_q) = (naive::Memory::new(f, d), phi(q));
            let keys = k.chunks_exact(d).zip(v.chunks_exact(d));
            keys.map(|(k, v)| naive::step(&mut memory, &phi_q, &phi(k), v, None, eps)).last().unwrap()
        });
        assert_eq!(d == 32, 2 * HEADS * time * f * (d + 1) >= SERIAL);
        for (kind, bound) in [(StateType::F32, 2e-5), (StateType::Bf16, 0.03)] {
            let mut memory = Sums::zeros(4, of, kind);
            for (slot, kv) in [3, 1].into_iter().zip(&case.kv) {
                memory.write(slot, &sums(&features, kv, &mut compute(2)).unwrap(), 0);
            }
            let read = |threads: usize| {
                let (mut cx, mut buffer, mut out) = (compute(threads), Vec::new(), vec![f32::NAN; case.q.len()]);
                let queries = case.queries(&[3, 1]);
                read_sums(&features, eps, &memory, queries, (&mut cx, &mut buffer), &mut out).unwrap();
                out
            };
            let out = read(1);
            assert!(distance(&out, &want) < bound, "{map:?} {d} {tokens:?} {kind:?}: {}", distance(&out, &want));
            assert_eq!(read(3), out, "threads change no bit");
        }
    }
}

#[test]
fn softmax_agrees_with_the_reference() {
    for (d, tokens, time) in [(8, [70, 1], 5), (16, [300, 257], 1), (6, [600, 24], 30)] {
        let case = Case::new(d, tokens, time);
        let want = case.truth(|_, q, k, v| naive::softmax(q, k, v));
        for (kind, bound) in [(StateType::F32, 2e-5), (StateType::Bf16, 0.03)] {
            let window = 640;
            let mut cache = Cache::zeros(4, HEADS, window, d, kind);
            for (slot, (kv, tokens)) in [3, 1].into_iter().zip(case.kv.iter().zip(case.tokens)) {
                cache.fill(slot, kv, 2 * HEADS * d, 0);
                assert_eq!(cache.used(slot), tokens);
            }
            let read = |threads: usize| {
                let (mut cx, mut buffer, mut out) = (compute(threads), Vec::new(), vec![f32::NAN; case.q.len()]);
                read_cache(&cache, case.queries(&[3, 1]), (&mut cx, &mut buffer), &mut out).unwrap();
                out
            };
            let out = read(1);
            assert!(distance(&out, &want) < bound, "{d} {tokens:?} {kind:?}: {}", distance(&out, &want));
            assert_eq!(read(3), out, "threads change no bit");
        }
    }
}

#[test]
fn denominators_below_their_floor_are_counted() {
    let (d, time, case) = (8, 7, Case::new(8, [20, 9], 7));
    let w = Tensor::ones((HEADS, 4, d), candle_core::DType::F32, &Device::Cpu).unwrap();
    let sigma = Tensor::ones((HEADS, d), candle_core::DType::F32, &Device::Cpu).unwrap();
    let features = Features::Gaussian(GaussianFeatures::new(&w, &sigma).unwrap());
    let of = SumsShape { heads: HEADS, features: 8, head_dim: d, maximum: false };
    let mut memory = Sums::zeros(2, of, StateType::F32);
    for (slot, kv) in case.kv.iter().enumerate() {
        memory.write(slot, &sums(&features, kv, &mut compute(1)).unwrap(), 0);
    }
    // Products of features are at most 1, so denominators are at most c; most are far above 0.
    let clamped = |eps: f64| {
        let (mut cx, mut buffer, mut out) = (compute(1), Vec::new(), vec![f32::NAN; case.q.len()]);
        read_sums(&features, eps, &memory, case.queries(&[0, 1]), (&mut cx, &mut buffer), &mut out).unwrap()
    };
    let all = (2 * time * HEADS) as u64;
    assert_eq!(clamped(1.5), all);
    assert!(clamped(1e-6) < all / 2, "{} of {all}", clamped(1e-6));
}

#[test]
fn shapes_and_slots_that_do_not_fit_are_refused() {
    let case = Case::new(8, [4, 4], 2);
    let cache = Cache::zeros(2, HEADS, 8, 8, StateType::F32);
    let read = |slots: &[usize], len: usize| {
        let mut out = vec![0.0; len];
        let with = (&mut compute(1), &mut Vec::new());
        read_cache(&cache, case.queries(slots), with, &mut out).unwrap_err().to_string()
    };
    assert!(read(&[0, 1], case.q.len()).contains("slot 0 has no source"));
    assert!(read(&[0, 2], case.q.len()).contains("slot 2 is out of range"));
    assert!(read(&[0, 1], 1).contains("do not fit"));
}
