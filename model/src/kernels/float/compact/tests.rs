//! Compact weights give the same bits as plain ones, escapes included, and are refused where packing does not pay off.

use half::bf16;
use proptest::prelude::*;

use super::format::Escape;
use super::*;
use crate::kernels::float::tests::numbers;
use crate::kernels::float::{Packed, Rows, Type, product};
use crate::kernels::products::{self, Weight};
use crate::kernels::threads::Threads;

/// Returns weights of nearly equal magnitude, and their bytes; every `rare`-th weight has another magnitude.
fn weights(len: usize, seed: u32, rare: usize) -> (Vec<bf16>, Vec<u8>) {
    let mut all: Vec<bf16> = numbers(len, seed).iter().map(|v| bf16::from_f32((v + 0.01) * 0.1)).collect();
    let others = numbers(len, seed ^ 3);
    for (w, other) in all.iter_mut().zip(&others).skip(1).step_by(rare) {
        *w = bf16::from_bits(((other.to_bits() >> 3) as u16) & 0xbf7f);
    }
    let bytes = all.iter().flat_map(|v| v.to_le_bytes()).collect();
    (all, bytes)
}

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn products_have_the_bits_of_plain_weights(
        rows in 1usize..140,
        n in 1usize..210,
        steps in 1usize..140,
        coded in 0usize..17,
        rare in prop::sample::select(&[7usize, 701][..]),
        seed: u32,
    ) {
        let k = 2 * steps;
        let (all, bytes) = weights(n * k, seed, rare);
        // With no code at all, every weight is an escape.
        let table = std::array::from_fn(|code| if code < coded { all[code % all.len()].to_le_bytes()[1] } else { 0xff });
        let first = n / 3 * k * 2;
        let parts = [&bytes[..first], &[], &bytes[first..]].map(|bytes| Rows { kind: Type::Bf16, bytes });
        let compact = Compact::coded(&format::rows(&parts, k), k, table);
        for p in 0..n.div_ceil(64) {
            let real = compact.escapes(p).iter().all(|escape| p * 64 + usize::from(escape.row) < n);
            prop_assert!(real, "rows that pad a panel have no escapes");
        }
        let compact = Packed::of_compact(compact);
        let plain = Packed::pack_plain(&parts, k);
        let x = numbers(rows * k, seed ^ 1);
        let mut want = vec![f32::NAN; rows * n];
        product(Isa::detect(), &x, &plain, &mut want);
        for isa in Isa::available() {
            let mut got = vec![f32::NAN; rows * n];
            product(isa, &x, &compact, &mut got);
            prop_assert_eq!(bits(&got), bits(&want), "{:?}", isa);
        }
        let mut row = vec![0.0; k];
        for i in [0, n / 3, n - 1] {
            compact.row(i, &mut row);
            prop_assert_eq!(&row, &all[i * k..(i + 1) * k].iter().map(|v| v.to_f32()).collect::<Vec<_>>());
        }
        let (compact, bias) = (Weight::Float(compact), numbers(n, seed ^ 2));
        let mut got = vec![f32::NAN; rows * n];
        let product = products::Product::new(&compact, Some(&bias), &x, &mut got);
        products::run(Isa::detect(), &[product], &mut Vec::new(), &Threads::new(3));
        for (i, want) in want.iter_mut().enumerate() {
            *want += bias[i % n];
        }
        prop_assert_eq!(bits(&got), bits(&want), "on three threads, with a bias");
    }
}

#[test]
fn large_matrices_are_packed_where_there_is_a_kernel() {
    let (n, k) = (1024, 1024);
    let (_, bytes) = weights(n * k, 8, 3001);
    let packed = Packed::pack(&[Rows { kind: Type::Bf16, bytes: &bytes }], k);
    assert_eq!(packed.bytes() < n * k * 2, has_kernel(Isa::detect()));
    let small = Packed::pack(&[Rows { kind: Type::Bf16, bytes: &bytes[..n * k] }], k);
    assert_eq!(small.bytes(), n * k);
}

#[test]
fn every_weight_comes_back_and_three_quarters_of_the_bytes_remain() {
    let (n, k) = (192, 96);
    let (all, bytes) = weights(n * k, 5, 701);
    let compact = Compact::pack(&[Rows { kind: Type::Bf16, bytes: &bytes }], k).unwrap();
    let escapes: usize = (0..3).map(|p| compact.escapes(p).len()).sum();
    assert!(escapes > 5, "only {escapes} escapes");
    assert_eq!(compact.bytes(), n * k * 3 / 2 + escapes * size_of::<Escape>());
    let mut row = vec![0.0; k];
    for (i, weights) in all.chunks_exact(k).enumerate() {
        compact.row(i, &mut row);
        assert_eq!(row, weights.iter().map(|w| w.to_f32()).collect::<Vec<_>>());
    }
}

#[test]
fn weights_of_many_magnitudes_and_odd_columns_stay_plain() {
    let (_, bytes) = weights(64 * 64, 6, 21);
    assert!(Compact::pack(&[Rows { kind: Type::Bf16, bytes: &bytes }], 64).is_none());
    let (_, bytes) = weights(64 * 63, 6, 10_001);
    assert!(Compact::pack(&[Rows { kind: Type::Bf16, bytes: &bytes }], 63).is_none());
    let (_, bytes) = weights(16 * 64, 6, 10_001);
    assert!(Compact::pack(&[Rows { kind: Type::Bf16, bytes: &bytes }], 64).is_none(), "a panel of few rows");
    assert!(Compact::pack(&[], 64).is_none());
}

#[test]
fn a_matrix_whose_rows_differ_is_judged_by_all_of_them() {
    // With this many rows, the sample for the table takes every fifth row.
    let (n, k) = (8192, 128);
    let (_, mut bytes) = weights(n * k, 7, 10_001);
    let pack = |bytes: &[u8]| Compact::pack(&[Rows { kind: Type::Bf16, bytes }], k);
    assert!(pack(&bytes).is_some());
    for row in bytes.chunks_exact_mut(2 * k).skip(1).step_by(5) {
        row.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x20);
    }
    assert!(pack(&bytes).is_none());
}
