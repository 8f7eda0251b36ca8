//! Tests the hybrid of window and recurrence: it agrees with the reference in f64 and with its limiting cases, and
//! texts in any pieces have the same bits.

use crate::common::Numbers;
use proptest::prelude::*;
use tidegate_model::feature_map::{Features, GaussianFeatures};
use tidegate_model::mixers::SlotState;
use tidegate_model::mixers::hybrid::attend::{Inputs, Params, Shape, attend_alone};
use tidegate_model::mixers::hybrid::naive;
use tidegate_model::mixers::hybrid::{HybridMemory, HybridShape};
use tidegate_model::mixers::rfa::{Sums, SumsShape};
use tidegate_model::mixers::softmax::Cache;
use tidegate_model::mixers::{rfa::recurrent, softmax::attend as softmax};
use tidegate_model::{Device, StateType, Tensor};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Queries, keys, values and gate logits of some rows, and a layer's parameters.
#[derive(Clone)]
struct Case {
    shape: Shape,
    window: usize,
    batch: usize,
    time: usize,
    qkv: Vec<f32>,          // (batch, time, 3, heads, d)
    gate: Option<Vec<f32>>, // (batch, time, heads)
    w: Vec<f32>,            // (heads, D, d)
    far_bias: Vec<f32>,     // (heads)
}

impl Case {
    fn new(shape: Shape, window: usize, (batch, time): (usize, usize), gate: Option<f32>, seed: u64) -> Self {
        let (Shape { heads, head_dim: d, .. }, proj_dim) = (shape, shape.features / 2);
        let mut numbers = Numbers::new(seed);
        let mut qkv = numbers.vec(batch * time * 3 * heads * d);
        // Long queries make the attention so sharp that some keys dominate.
        qkv.chunks_exact_mut(3 * heads * d).for_each(|token| token[..heads * d].iter_mut().for_each(|q| *q *= 3.0));
        let w = numbers.normals(heads * proj_dim * d);
        let gate = gate.map(|width| numbers.vec(batch * time * heads).iter().map(|a| a * width).collect());
        let far_bias = numbers.vec(heads).iter().map(|b| 2.0 * b).collect();
        Self { shape, window, batch, time, qkv, gate, w, far_bias }
    }

    fn features(&self) -> Features {
        let Shape { heads, head_dim, features, .. } = self.shape;
        let w = Tensor::from_slice(&self.w, (heads, features / 2, head_dim), &Device::Cpu).unwrap();
        let one = Tensor::ones((heads, head_dim), w.dtype(), &Device::Cpu).unwrap();
        Features::Gaussian(GaussianFeatures::new(&w, &one).unwrap())
    }

    fn sums(&self) -> SumsShape {
        let Shape { heads, head_dim, features, .. } = self.shape;
        SumsShape { heads, features, head_dim, maximum: false }
    }

    fn memory(&self, kind: StateType) -> HybridMemory {
        let shape = HybridShape { sums: self.sums(), window: self.window, gate: self.gate.is_some() };
        HybridMemory::zeros(2 * self.batch, shape, kind)
    }

    /// Returns q, k or v of one token and head, rounded as a memory of this type stores it.
    fn part(&self, (b, t): (usize, usize), which: usize, head: usize, kind: StateType) -> Vec<f64> {
        let Shape { heads, head_dim: d, .. } = self.shape;
        let stored = |v: f32| if kind == StateType::F32 || which == 0 { v } else { half::bf16::from_f32(v).to_f32() };
        let at = (((b * self.time + t) * 3 + which) * heads + head) * d;
        self.qkv[at..][..d].iter().map(|&v| f64::from(stored(v))).collect()
    }

    /// Computes h (batch, time, heads, d) with the reference.
    fn truth(&self, kind: StateType) -> Vec<f64> {
        let Shape { heads, head_dim: d, features, eps } = self.shape;
        let mut out = vec![0.0; self.batch * self.time * heads * d];
        for b in 0..self.batch {
            for head in 0..heads {
                let w = self.w[head * features / 2 * d..][..features / 2 * d].iter().map(|&v| f64::from(v)).collect();
                let far_bias = f64::from(self.far_bias[head]);
                let own = naive::Head { w, window: self.window, far_bias, eps };
                let mut history = Vec::new();
                for t in 0..self.time {
                    let [q, k, v] = [0, 1, 2].map(|which| self.part((b, t), which, head, kind));
                    let gate = self.gate.as_ref().map(|g| f64::from(g[(b * self.time + t) * heads + head]));
                    history.push(naive::Token { q, k, v, gate });
                    let h = naive::last(&own, &history);
                    out[((b * self.time + t) * heads + head) * d..][..d].copy_from_slice(&h);
                }
            }
        }
        out
    }

    /// Reads `len` tokens of each row, each from its own position, in scattered slots. Returns h (rows, len, heads d)
    /// and the number of clamped denominators.
    fn feed(&self, memory: &mut HybridMemory, rows: &[usize], (from, len): (&[usize], usize)) -> (Vec<f32>, u64) {
        let Shape { heads, head_dim: d, .. } = self.shape;
        let numbers = |all: &[f32], width: usize| -> Vec<f32> {
            let of = |(&row, &from): (&usize, &usize)| all[(row * self.time + from) * width..][..len * width].to_vec();
            rows.iter().zip(from).flat_map(of).collect()
        };
        let (qkv, gate) = (numbers(&self.qkv, 3 * heads * d), self.gate.as_ref().map(|gate| numbers(gate, heads)));
        let slots: Vec<usize> = rows.iter().map(|row| 2 * (self.batch - row) - 1).collect();
        let positions: Vec<u64> = from.iter().map(|&from| from as u64).collect();
        let inputs = Inputs { qkv: &qkv, gate: gate.as_deref(), slots: &slots, positions: &positions, layer: 0 };
        let mut out = vec![f32::NAN; rows.len() * len * heads * d];
        let params = Params { shape: self.shape, features: &self.features(), far_bias: &self.far_bias };
        let held = attend_alone(params, memory, inputs, &mut out).unwrap();
        (out, held)
    }

    /// Reads all rows together, in pieces of `lens` tokens. Returns h (batch, time, heads d), the memory and the number
    /// of clamped denominators.
    fn cut(&self, kind: StateType, lens: &[usize]) -> (Vec<f32>, HybridMemory, u64) {
        let inner = self.shape.heads * self.shape.head_dim;
        let (mut memory, mut out) = (self.memory(kind), vec![f32::NAN; self.batch * self.time * inner]);
        let rows: Vec<usize> = (0..self.batch).collect();
        let (mut first, mut lens, mut held) = (0, lens.iter().cycle(), 0);
        while first < self.time {
            let len = (*lens.next().unwrap()).min(self.time - first);
            let (h, clamped) = self.feed(&mut memory, &rows, (&vec![first; self.batch], len));
            for (b, h) in h.chunks_exact(len * inner).enumerate() {
                out[(b * self.time + first) * inner..][..len * inner].copy_from_slice(h);
            }
            first += len;
            held += clamped;
        }
        (out, memory, held)
    }

    /// Returns the state of a row's slot.
    fn state(&self, memory: &HybridMemory, row: usize) -> Vec<f32> {
        let mut numbers = Vec::new();
        memory.read(2 * (self.batch - row) - 1, &mut numbers);
        numbers
    }
}

fn shape(heads: usize, head_dim: usize, proj_dim: usize) -> Shape {
    // A floor of 0.2 c limits how much the division magnifies rounding errors, as in `forms_agree.rs`.
    Shape { heads, head_dim, features: 2 * proj_dim, eps: 0.2 }
}

fn error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).map(|(&g, &w)| (f64::from(g) - w).abs());
    errors.fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn it_agrees_with_the_reference_and_pieces_change_no_bit(
        batch in 1usize..3, heads in 1usize..4, head_dim in 1usize..40, proj_dim in 1usize..24,
        window in prop_oneof![1usize..4, 4usize..90, 250usize..270],
        time in prop_oneof![9 => 1usize..150, 1 => 250usize..400],
        gate in prop::option::of(prop::sample::select(vec![0.5f32, 3.0, 12.0])),
        lens in prop::collection::vec(1usize..200, 1..4), seed: u64,
    ) {
        let case = Case::new(shape(heads, head_dim, proj_dim), window, (batch, time), gate, seed);
        for (kind, tolerance) in [(StateType::F32, 1e-4), (StateType::Bf16, 0.1)] {
            let (whole, memory, held) = case.cut(kind, &[time]);
            let wrong = error(&whole, &case.truth(kind));
            prop_assert!(wrong < tolerance, "{kind:?}: {wrong}");
            for lens in [&lens[..], &[1]] {
                let (cut, other, clamped) = case.cut(kind, lens);
                prop_assert!(bits(&cut) == bits(&whole), "cut into {lens:?}");
                prop_assert_eq!(clamped, held);
                for row in 0..batch {
                    prop_assert!(bits(&case.state(&other, row)) == bits(&case.state(&memory, row)), "{:?}", lens);
                }
            }
        }
    }
}

#[test]
fn the_table_of_errors() {
    println!("| window | tokens | D = d | gate | f32 | bf16 |\n| --- | --- | --- | --- | --- | --- |");
    for (window, time, d, gate) in
        [(1, 200, 64, Some(3.0)), (64, 300, 64, Some(3.0)), (64, 300, 64, None), (16, 600, 16, Some(12.0))]
    {
        let case = Case::new(Shape { eps: 0.02, ..shape(1, d, d) }, window, (1, time), gate, 7);
        let errors = [StateType::F32, StateType::Bf16].map(|kind| error(&case.cut(kind, &[time]).0, &case.truth(kind)));
        println!("| {window} | {time} | {d} | {gate:?} | {:.1e} | {:.1e} |", errors[0], errors[1]);
        assert!(errors[0] < 1e-4 && errors[1] < 0.05, "{errors:?}");
    }
}

#[test]
fn rows_of_different_lengths_do_not_affect_each_other() {
    let case = Case::new(shape(2, 20, 9), 10, (2, 60), Some(3.0), 3);
    let want = case.truth(StateType::F32);
    let (row, inner) = (60 * 40, 40);
    for (short, len) in [(0, 30), (3, 1), (9, 1), (10, 7), (11, 40)] {
        let mut memory = case.memory(StateType::F32);
        case.feed(&mut memory, &[0], (&[0], 18));
        if short > 0 {
            case.feed(&mut memory, &[1], (&[0], short));
        }
        let (h, _) = case.feed(&mut memory, &[1, 0], (&[short, 18], len));
        let (one, other) = h.split_at(len * inner);
        assert!(error(one, &want[row + short * inner..][..len * inner]) < 1e-4, "after {short}");
        assert!(error(other, &want[18 * inner..][..len * inner]) < 1e-4, "after 18");
    }
}

/// Computes the output of the window alone: (batch, time, heads d).
fn near(case: &Case) -> Vec<f32> {
    let Shape { heads, head_dim, .. } = case.shape;
    let mut cache = Cache::zeros(case.batch, heads, case.window, head_dim, StateType::F32);
    let (slots, positions) = ((0..case.batch).collect::<Vec<_>>(), vec![0; case.batch]);
    let mut out = vec![f32::NAN; case.qkv.len() / 3];
    let inputs = softmax::Inputs { qkv: &case.qkv, slots: &slots, positions: &positions };
    softmax::attend_alone(softmax::Shape { heads, head_dim }, &mut cache, inputs, &mut out).unwrap();
    out
}

#[test]
fn a_far_part_without_weight_leaves_softmax_over_the_window() {
    for gate in [Some(3.0), None] {
        let mut case = Case::new(shape(2, 12, 7), 17, (2, 90), gate, 5);
        let with = case.cut(StateType::F32, &[31]).0;
        assert!(
            crate::common::distance(&with, &near(&case)) > 0.01,
            "the far part counts for nothing: the test shows nothing"
        );
        case.far_bias.fill(f32::NEG_INFINITY);
        assert!(bits(&case.cut(StateType::F32, &[31]).0) == bits(&near(&case)));
        case.far_bias.fill(-60.0);
        assert!(crate::common::distance(&case.cut(StateType::F32, &[31]).0, &near(&case)) < 1e-6);
        // If gates are near 1, c is too small to divide by, so the far part has no weight, whatever the bias.
        if let Some(gate) = &mut case.gate {
            gate.fill(200.0);
            case.far_bias.fill(20.0);
            assert!(crate::common::distance(&case.cut(StateType::F32, &[31]).0, &near(&case)) < 1e-6);
        }
    }
}

#[test]
fn a_window_longer_than_the_text_is_softmax_over_all_of_it() {
    let case = Case::new(shape(2, 12, 7), 90, (1, 90), Some(3.0), 6);
    let (h, memory, held) = case.cut(StateType::F32, &[13]);
    assert!(bits(&h) == bits(&near(&case)) && held == 0);
    for head in case.state(&memory, 0).chunks_exact(14 * 13 + 1 + 2 * 90 * 12 + 90) {
        assert!(head[..=14 * 13].iter().all(|&v| v == 0.0), "something is in S, z or c");
    }
}

/// Returns a case with queries moved `by` tokens earlier, so that the recurrence has read as many tokens as the
/// hybrid's far part.
fn earlier(case: &Case, by: usize) -> Case {
    let inner = case.shape.heads * case.shape.head_dim;
    let mut moved = case.clone();
    for t in by..case.time {
        let q = case.qkv[t * 3 * inner..][..inner].to_vec();
        moved.qkv[(t - by) * 3 * inner..][..inner].copy_from_slice(&q);
    }
    moved
}

/// Runs the recurrence over the first tokens in one pass. Returns its output (tokens, heads d) and its state.
fn recurrence(case: &Case, tokens: usize) -> (Vec<f32>, Vec<f32>) {
    let Shape { heads, head_dim: d, .. } = case.shape;
    let mut memory = Sums::zeros(1, case.sums(), StateType::F32);
    let mut out = vec![f32::NAN; tokens * heads * d];
    let gate = case.gate.as_ref().map(|gate| &gate[..tokens * heads]);
    let qkv = &case.qkv[..tokens * 3 * heads * d];
    let inputs = Inputs { qkv, gate, slots: &[0], positions: &[0], layer: 0 };
    recurrent::scan_alone(case.shape, &case.features(), &mut memory, inputs, &mut out).unwrap();
    let mut state = Vec::new();
    memory.read(0, &mut state);
    (out, state)
}

#[test]
fn a_far_part_with_all_the_weight_is_the_recurrence_delayed_by_the_window() {
    for (window, gate) in [(1, Some(3.0)), (1, None), (20, Some(3.0)), (20, None)] {
        let mut case = Case::new(shape(2, 12, 7), window, (1, 90), gate, 8);
        case.far_bias.fill(60.0);
        let (h, memory, _) = case.cut(StateType::F32, &[29]);
        let (want, state) = recurrence(&earlier(&case, window), 90 - window);
        let wrong = crate::common::distance(&h[window * 24..], &want);
        assert!(wrong < 1e-5, "window {window}: {wrong}");
        // The sums equal those of the recurrence alone.
        let (head, sums) = (case.state(&memory, 0).len() / 2, 14 * 13 + 1);
        for (own, want) in case.state(&memory, 0).chunks_exact(head).zip(state.chunks_exact(sums)) {
            assert_eq!(bits(&own[..sums]), bits(want), "window {window}");
        }
    }
}

#[test]
fn a_nan_bias_gives_nan() {
    let mut case = Case::new(shape(2, 12, 7), 17, (1, 40), Some(3.0), 5);
    case.far_bias.fill(f32::NAN);
    for len in [40, 1] {
        let h = case.cut(StateType::F32, &[len]).0;
        let (near, far) = h.split_at(17 * 24);
        assert!(near.iter().all(|v| v.is_finite()) && far.iter().all(|v| v.is_nan()), "{len} at a time");
    }
}

#[test]
fn imported_sums_of_negative_weight_are_ignored() {
    for gate in [Some(3.0), None] {
        let case = Case::new(shape(2, 12, 7), 8, (1, 60), gate, 9);
        let mut memory = case.memory(StateType::F32);
        case.feed(&mut memory, &[0], (&[0], 20));
        let mut numbers = case.state(&memory, 0);
        let head = numbers.len() / 2;
        numbers.chunks_exact_mut(head).for_each(|head| head[14 * 13] = -1e30);
        memory.write(1, &numbers, 20);
        let (h, held) = case.feed(&mut memory, &[0], (&[20], 15));
        assert_eq!(bits(&h), bits(&near(&case)[20 * 24..35 * 24]));
        assert_eq!(held, 0);
    }
}

#[test]
fn a_slot_out_of_range_or_named_twice_and_gates_that_do_not_fit_are_refused() {
    let case = Case::new(shape(1, 4, 3), 8, (2, 2), Some(1.0), 1);
    let gate = case.gate.as_deref();
    for time in [1, 2] {
        for (slots, gate, word) in
            [([0, 4], gate, "slot 4"), ([1, 1], gate, "twice"), ([0, 1], None, "gates do not fit"), ([0, 1], gate, "")]
        {
            let mut memory = case.memory(StateType::F32);
            let gate = gate.map(|gate| &gate[..2 * time]);
            let inputs = Inputs { qkv: &case.qkv[..2 * time * 12], gate, slots: &slots, positions: &[0, 0], layer: 0 };
            let params = Params { shape: case.shape, features: &case.features(), far_bias: &case.far_bias };
            let done = attend_alone(params, &mut memory, inputs, &mut vec![0.0; 2 * time * 4]);
            let message = done.map_or_else(|error| error.to_string(), |_| String::new());
            assert!(message.contains(word) && message.is_empty() == word.is_empty(), "{slots:?}: {message}");
        }
    }
}
