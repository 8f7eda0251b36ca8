//! Tests all kinds and instruction sets against independent definitions.

use half::f16;
use proptest::prelude::*;

use super::*;

const KINDS: [Kind; 3] = [Kind::Q8_0, Kind::Q4_0, Kind::Q4K];

/// Returns a generator of pseudorandom words.
fn noise(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    }
}

fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut next = noise(seed);
    (0..len).map(|_| next() as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Returns a scale: of either sign, small, subnormal, zero or the largest.
fn scale(chance: u32) -> [u8; 2] {
    let value = match chance % 16 {
        0 => f16::from_bits(0),
        1 => f16::from_bits(1 + (chance >> 8) as u16 % 1023),
        2 => f16::from_bits(0x8000 | ((chance >> 8) as u16 % 1024)),
        3 => f16::MAX,
        _ => f16::from_f32((chance >> 4) as f32 / (1 << 20) as f32 * 0.02 - 0.01),
    };
    value.to_le_bytes()
}

/// Returns the stored blocks of a matrix (n, k). Their quants take every byte value, the extreme ones often.
fn matrix(kind: Kind, n: usize, k: usize, seed: u32) -> Vec<u8> {
    let mut next = noise(seed);
    let mut bytes = Vec::new();
    for _ in 0..n * k / kind.columns() {
        for _ in 0..kind.halves() {
            bytes.extend(scale(next()));
        }
        for _ in 0..4 * kind.words() {
            let chance = next() >> 4;
            bytes.push(match chance % 8 {
                0 => 0x80,
                1 => 0x7f,
                _ => (chance >> 4) as u8,
            });
        }
    }
    bytes
}

/// Converts a row of GGUF blocks to floats, by the formats' published definitions.
fn dequantise(kind: Kind, row: &[u8]) -> Vec<f32> {
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let mut out = Vec::new();
    for block in row.chunks_exact(kind.block_bytes()) {
        let d = half(block);
        match kind {
            Kind::Q8_0 => out.extend(block[2..].iter().map(|q| d * f32::from(q.cast_signed()))),
            Kind::Q4_0 => {
                out.extend(block[2..].iter().map(|q| d * (f32::from(q & 15) - 8.0)));
                out.extend(block[2..].iter().map(|q| d * (f32::from(q >> 4) - 8.0)));
            }
            Kind::Q4K => {
                let (least, s) = (half(&block[2..]), &block[4..16]);
                for part in 0..8 {
                    let (scale, minimum) = if part < 4 {
                        (s[part] & 63, s[part + 4] & 63)
                    } else {
                        (s[part + 4] & 15 | (s[part - 4] >> 6) << 4, s[part + 4] >> 4 | (s[part] >> 6) << 4)
                    };
                    let (scale, minimum) = (d * f32::from(scale), least * f32::from(minimum));
                    let quants = &block[16 + part / 2 * 32..][..32];
                    out.extend(quants.iter().map(|q| scale * f32::from(q >> (4 * (part % 2)) & 15) - minimum));
                }
            }
        }
    }
    out
}

fn pack(kind: Kind, blocks: &[u8], n: usize, k: usize) -> Packed {
    Packed::pack(kind, blocks, n, k, &Threads::new(1)).unwrap()
}

fn quantised(isa: Isa, x: &[f32], k: usize) -> Activations {
    let mut activations = Activations::default();
    activations.quantise(isa, x, k, &Threads::new(1));
    activations
}

/// Computes the whole product, panel after panel.
fn product(isa: Isa, x: &Activations, w: &Packed) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.rows() * w.rows()];
    let output = Output::new(&mut out, w.rows());
    // SAFETY: this thread has the whole output.
    unsafe { panels(isa, x, 0..x.rows(), w, 0..panels::count(w.rows()), output) };
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_instruction_set_gives_the_plain_bits(
        kind in prop::sample::select(&KINDS[..]), rows in 1usize..80, n in 1usize..150, blocks in 1usize..20, seed: u32,
    ) {
        let k = if kind == Kind::Q4K { blocks.div_ceil(4) * 256 } else { blocks * 32 };
        let w = pack(kind, &matrix(kind, n, k, seed), n, k);
        let mut x = numbers(rows * k, seed ^ 1);
        // Blocks of zeros, of numbers that become -127 and 127, and of numbers too small for a scale.
        for (i, block) in x.chunks_exact_mut(32).enumerate() {
            match i % 7 {
                3 => block.fill(0.0),
                5 => block.iter_mut().for_each(|v| *v = v.signum() * 3.0),
                6 => block.iter_mut().for_each(|v| *v *= 1e-41),
                _ => {}
            }
        }
        let plain = quantised(Isa::Plain, &x, k);
        let want = bits(&product(Isa::Plain, &plain, &w));
        for isa in Isa::available() {
            let activations = quantised(isa, &x, k);
            for (block, row) in (0..k / 32).flat_map(|block| (0..rows).map(move |row| (block, row))) {
                prop_assert_eq!(activations.quants(block, row), plain.quants(block, row));
                let (got, want) = (activations.block_sums(block, row), plain.block_sums(block, row));
                prop_assert_eq!((got.scale, got.total, got.negative), (want.scale, want.total, want.negative));
            }
            prop_assert_eq!(&bits(&product(isa, &activations, &w)), &want, "{:?} {:?}", isa, kind);
        }
    }

    #[test]
    fn packed_rows_have_the_values_of_their_blocks(
        kind in prop::sample::select(&KINDS[..]), n in 1usize..150, blocks in 1usize..4, seed: u32,
    ) {
        let k = blocks * kind.columns();
        let matrix = matrix(kind, n, k, seed);
        let w = Packed::pack(kind, &matrix, n, k, &Threads::new(3)).unwrap();
        prop_assert_eq!((w.rows(), w.columns()), (n, k));
        prop_assert_eq!(w.bytes(), matrix.len() / n * n.next_multiple_of(GROUP));
        let mut got = vec![f32::NAN; k];
        for (row, stored) in matrix.chunks_exact(matrix.len() / n).enumerate() {
            w.row(row, &mut got);
            prop_assert_eq!(&got, &dequantise(kind, stored));
        }
    }
}

#[test]
fn products_of_extreme_quants_are_exact() {
    for (kind, byte) in [(Kind::Q8_0, 0x80), (Kind::Q8_0, 0x7f), (Kind::Q4_0, 0), (Kind::Q4_0, 0xff)] {
        let (n, k) = (16, 64);
        let mut block = f16::ONE.to_le_bytes().to_vec();
        block.resize(kind.block_bytes(), byte);
        let w = pack(kind, &block.repeat(n * k / 32), n, k);
        let quant = match (kind, byte) {
            (Kind::Q8_0, byte) => f32::from(byte.cast_signed()),
            (_, byte) => f32::from(byte & 15) - 8.0,
        };
        for x in [127.0, -127.0] {
            for isa in Isa::available() {
                let out = product(isa, &quantised(isa, &[x; 64], k), &w);
                assert_eq!(out, vec![64.0 * x * quant; n], "{isa:?} {kind:?}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_on_one_thread_and_on_many() {
    let (rows, n, k) = (53, 257, 1024);
    let threads = Threads::new(3);
    for kind in KINDS {
        let w = pack(kind, &matrix(kind, n, k, 7), n, k);
        let x = numbers(rows * k, 8);
        for isa in Isa::available() {
            let mut activations = Activations::default();
            activations.quantise(isa, &x, k, &threads);
            let mut all = vec![f32::NAN; rows * n];
            let output = Output::new(&mut all, n);
            let pieces = panels::count(n);
            // Parts of panels and rows, in any order.
            threads.run(2 * pieces, &|i| {
                let part = if i % 2 == 0 { 0..20 } else { 20..rows };
                // SAFETY: the parts do not overlap.
                unsafe { panels(isa, &activations, part, &w, i / 2..i / 2 + 1, output) };
            });
            for row in 0..rows {
                // The buffers were last used by a larger call.
                activations.quantise(isa, &x[row * k..(row + 1) * k], k, &threads);
                assert_eq!(bits(&product(isa, &activations, &w)), bits(&all[row * n..(row + 1) * n]));
            }
        }
    }
}

#[test]
fn quantised_activations_change_results_by_less_than_a_hundredth() {
    let (rows, n, k) = (4, 96, 1024);
    let x = numbers(rows * k, 3);
    for kind in KINDS {
        let mut blocks = matrix(kind, n, k, 4);
        for block in blocks.chunks_exact_mut(kind.block_bytes()) {
            for half in block[..2 * kind.halves()].as_chunks_mut::<2>().0 {
                *half = f16::from_f32(0.01).to_le_bytes();
            }
        }
        let got = product(Isa::detect(), &quantised(Isa::detect(), &x, k), &pack(kind, &blocks, n, k));
        let (mut error, mut size) = (0.0, 0.0);
        for (row, x) in x.chunks_exact(k).enumerate() {
            for (column, w) in blocks.chunks_exact(blocks.len() / n).enumerate() {
                let w = dequantise(kind, w);
                let want: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                error += (f64::from(got[row * n + column]) - want).powi(2);
                size += want.powi(2);
            }
        }
        let relative = (error / size).sqrt();
        println!("{kind:?}: {relative:.5}");
        assert!(relative < 0.01, "{kind:?}: {relative}");
    }
}

#[test]
fn infinities_and_nans_give_nan() {
    let (n, k) = (20, 256);
    for kind in KINDS {
        let w = pack(kind, &matrix(kind, n, k, 5), n, k);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = numbers(2 * k, 6);
            x[k + 40] = bad;
            for isa in Isa::available() {
                let out = product(isa, &quantised(isa, &x, k), &w);
                assert!(out[..n].iter().all(|v| v.is_finite()) && out[n..].iter().all(|v| v.is_nan()));
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let threads = Threads::new(1);
    assert!(Packed::pack(Kind::Q8_0, &[0; 34], 1, 31, &threads).is_err());
    assert!(Packed::pack(Kind::Q4K, &[0; 18], 1, 32, &threads).is_err());
    assert!(Packed::pack(Kind::Q4_0, &[0; 19], 1, 32, &threads).is_err());
    assert!(Packed::pack(Kind::Q4_0, &[0; 18], usize::MAX, 64, &threads).is_err());
    assert_eq!(Packed::pack(Kind::Q8_0, &[], 0, 32, &threads).unwrap().bytes(), 0);
}
