//! Compares every instruction set with the plain definition, bit for bit, and the results with f64.

use proptest::prelude::*;

use super::*;
use crate::kernels::products::{self, Weight};
use crate::kernels::threads::Threads;

pub(crate) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Applies the definition to weights in their stored form.
fn truth<W: Element>(x: &[f32], w: &[W], k: usize) -> Vec<f32> {
    x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |w| plain::dot(x, w, 1))).collect()
}

fn half_bytes(bits: impl Iterator<Item = u16>) -> Vec<u8> {
    bits.flat_map(u16::to_le_bytes).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_instruction_set_gives_the_plain_bits(rows in 1usize..21, n in 1usize..210, k in 1usize..90, seed: u32) {
        let x = numbers(rows * k, seed);
        let w = numbers(n * k, seed ^ 1);
        let b: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
        let h: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
        let want = [truth(&x, &w, k), truth(&x, &b, k), truth(&x, &h, k)];
        let full: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
        let stored = [
            (Type::F32, full),
            (Type::Bf16, half_bytes(b.iter().map(|v| v.to_bits()))),
            (Type::F16, half_bytes(h.iter().map(|v| v.to_bits()))),
        ];
        for ((kind, bytes), want) in stored.iter().zip(&want) {
            let packed = Packed::pack(&[Rows { kind: *kind, bytes }], k);
            for isa in Isa::available() {
                let mut got = vec![f32::NAN; rows * n];
                product(isa, &x, &packed, &mut got);
                prop_assert_eq!(bits(&got), bits(want), "{:?}", isa);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_many_threads() {
    let (rows, n, k) = (301, 257, 96);
    let (x, w) = (numbers(rows * k, 7), numbers(n * k, 8));
    let packed = Weight::Float(Packed::of_f32(&w, k));
    let run = |x: &[f32], out: &mut [f32]| {
        let product = products::Product::new(&packed, None, x, out);
        products::run(Isa::detect(), &[product], &mut Vec::new(), &Threads::new(4));
    };
    let mut all = vec![0.0; rows * n];
    run(&x, &mut all);
    for row in [0, 1, 150, 300] {
        let mut one = vec![0.0; n];
        run(&x[row * k..(row + 1) * k], &mut one);
        assert_eq!(bits(&one), bits(&all[row * n..(row + 1) * n]));
    }
}

#[test]
fn against_f64() {
    let (rows, n, k) = (5, 9, 1000);
    let (x, w) = (numbers(rows * k, 3), numbers(n * k, 4));
    let mut got = vec![0.0; rows * n];
    product(Isa::detect(), &x, &Packed::of_f32(&w, k), &mut got);
    for r in 0..rows {
        for c in 0..n {
            let want: f64 = (0..k).map(|i| f64::from(x[r * k + i]) * f64::from(w[c * k + i])).sum();
            assert!((f64::from(got[r * n + c]) - want).abs() < 1e-4);
        }
    }
}

#[test]
fn parts_lie_one_under_another_and_rows_come_back() {
    let k = 7;
    let (a, b) = (numbers(70 * k, 1), numbers(3 * k, 2));
    let half: Vec<bf16> = b.iter().map(|&v| bf16::from_f32(v)).collect();
    let bytes = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let (a_bytes, b_bytes, half_bytes) = (bytes(&a), bytes(&b), half_bytes(half.iter().map(|v| v.to_bits())));
    let (first, second) = (Rows { kind: Type::F32, bytes: &a_bytes }, Rows { kind: Type::F32, bytes: &b_bytes });
    let same = Packed::pack(&[first, second], k);
    let mixed = Packed::pack(&[first, Rows { kind: Type::Bf16, bytes: &half_bytes }], k);
    assert_eq!((same.rows(), same.columns(), same.bytes()), (73, k, 80 * k * 4));
    let mut row = vec![0.0; k];
    for i in [0, 63, 64, 69] {
        same.row(i, &mut row);
        assert_eq!(row, a[i * k..(i + 1) * k]);
    }
    mixed.row(72, &mut row);
    assert_eq!(row, half[2 * k..].iter().map(|v| v.to_f32()).collect::<Vec<_>>());
}
