//! Compares softmax attention with a cache to the reference in f64.

use crate::common::{Numbers, bits};
use proptest::prelude::*;
use tidegate_model::StateType;
use tidegate_model::mixers::rfa::naive;
use tidegate_model::mixers::softmax::Cache;
use tidegate_model::mixers::softmax::attend::{Inputs, Shape, attend_alone};

/// Queries, keys and values of some rows.
struct Case {
    shape: Shape,
    window: usize,
    batch: usize,
    time: usize,
    qkv: Vec<f32>, // (batch, time, 3, heads, d)
}

impl Case {
    fn new(shape: Shape, window: usize, (batch, time): (usize, usize), seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut qkv = numbers.vec(batch * time * 3 * shape.heads * shape.head_dim);
        // Long queries make the attention so sharp that some keys dominate.
        let inner = shape.heads * shape.head_dim;
        qkv.chunks_exact_mut(3 * inner).for_each(|token| token[..inner].iter_mut().for_each(|q| *q *= 6.0));
        Self { shape, window, batch, time, qkv }
    }

    /// Returns q, k or v of all tokens of one row and head, rounded as a cache of this type stores them.
    fn parts(&self, b: usize, which: usize, head: usize, kind: StateType) -> Vec<f64> {
        let Shape { heads, head_dim: d } = self.shape;
        let stored = |v: f32| if kind == StateType::F32 || which == 0 { v } else { half::bf16::from_f32(v).to_f32() };
        let at = |t: usize| (((b * self.time + t) * 3 + which) * heads + head) * d;
        (0..self.time).flat_map(|t| &self.qkv[at(t)..][..d]).map(|&v| f64::from(stored(v))).collect()
    }

    /// Computes the output (batch, time, heads, d) with the reference. Each token attends only to its window.
    fn truth(&self, kind: StateType) -> Vec<f64> {
        let Shape { heads, head_dim: d } = self.shape;
        let mut out = vec![0.0; self.batch * self.time * heads * d];
        for b in 0..self.batch {
            for head in 0..heads {
                let [q, k, v] = [0, 1, 2].map(|which| self.parts(b, which, head, kind));
                for t in 0..self.time {
                    let seen = (t + 1).saturating_sub(self.window) * d..(t + 1) * d;
                    let h = naive::softmax(&q[t * d..][..d], &k[seen.clone()], &v[seen]);
                    out[((b * self.time + t) * heads + head) * d..][..d].copy_from_slice(&h);
                }
            }
        }
        out
    }

    /// Reads all rows in scattered slots, in pieces of `lens` tokens. Returns the output and the cache.
    fn cut(&self, kind: StateType, lens: &[usize]) -> (Vec<f32>, Cache) {
        let inner = self.shape.heads * self.shape.head_dim;
        let mut cache = Cache::zeros(2 * self.batch, self.shape.heads, self.window, self.shape.head_dim, kind);
        let slots: Vec<usize> = (0..self.batch).map(|b| 2 * (self.batch - b) - 1).collect();
        let mut out = vec![f32::NAN; self.batch * self.time * inner];
        let (mut first, mut lens) = (0, lens.iter().cycle());
        while first < self.time {
            let len = (*lens.next().unwrap()).min(self.time - first);
            let tokens =
                |row: usize, width: usize| (row * self.time + first) * width..(row * self.time + first + len) * width;
            let qkv: Vec<f32> = (0..self.batch).flat_map(|b| &self.qkv[tokens(b, 3 * inner)]).copied().collect();
            let mut h = vec![f32::NAN; self.batch * len * inner];
            let positions = vec![first as u64; self.batch];
            attend_alone(self.shape, &mut cache, Inputs { qkv: &qkv, slots: &slots, positions: &positions }, &mut h)
                .unwrap();
            for (b, h) in h.chunks_exact(len * inner).enumerate() {
                out[tokens(b, inner)].copy_from_slice(h);
            }
            first += len;
        }
        (out, cache)
    }
}

fn error(got: &[f32], want: &[f64]) -> f64 {
    let errors = got.iter().zip(want).map(|(&g, &w)| (f64::from(g) - w).abs());
    errors.fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn the_cache_agrees_with_the_reference_and_pieces_change_no_bit(
        batch in 1usize..3, heads in 1usize..4, head_dim in 1usize..70,
        window in prop_oneof![1usize..80, 200usize..600], time in prop_oneof![9 => 1usize..200, 1 => 200usize..900],
        lens in prop::collection::vec(1usize..300, 1..4),
        kind in prop::sample::select(vec![StateType::F32, StateType::Bf16]), seed: u64,
    ) {
        let case = Case::new(Shape { heads, head_dim }, window, (batch, time), seed);
        let (whole, _) = case.cut(kind, &[time]);
        let wrong = error(&whole, &case.truth(kind));
        prop_assert!(wrong < 1e-4, "{wrong}");
        prop_assert!(bits(&case.cut(kind, &lens).0) == bits(&whole), "cut into {lens:?}");
        prop_assert!(bits(&case.cut(kind, &[1]).0) == bits(&whole), "one by one");
    }
}

#[test]
fn the_table_of_errors() {
    println!("| window | tokens | d | f32 | bf16 |\n| --- | --- | --- | --- | --- |");
    for (window, time, head_dim) in [(64, 300, 64), (700, 1500, 64), (2048, 1500, 128)] {
        let case = Case::new(Shape { heads: 1, head_dim }, window, (1, time), 7);
        let errors = [StateType::F32, StateType::Bf16].map(|kind| error(&case.cut(kind, &[time]).0, &case.truth(kind)));
        println!("| {window} | {time} | {head_dim} | {:.1e} | {:.1e} |", errors[0], errors[1]);
        assert!(errors.iter().all(|&error| error < 1e-4), "{errors:?}");
    }
}

#[test]
fn a_slot_out_of_range_or_named_twice_is_refused() {
    let case = Case::new(Shape { heads: 1, head_dim: 4 }, 8, (2, 2), 1);
    for time in [1, 2] {
        for slots in [[0, 4], [1, 1]] {
            let mut cache = Cache::zeros(4, 1, 8, 4, StateType::F32);
            let inputs = Inputs { qkv: &case.qkv[..2 * time * 12], slots: &slots, positions: &[0, 0] };
            let refused = attend_alone(case.shape, &mut cache, inputs, &mut vec![0.0; 2 * time * 4]);
            assert!(refused.unwrap_err().to_string().contains("slot"), "{slots:?}");
        }
    }
}
