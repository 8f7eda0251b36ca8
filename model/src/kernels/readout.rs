//! Cross attention in two halves: `add` sums the keys and values of a source, `read` answers a query from the sums.
//!
//! Each column of the output is one chain of fused multiply-adds over the rows of S, whatever the instruction set.

use half::bf16;

use super::element::Element;
use super::plain::dot;
use super::{Isa, multiversion};

/// Columns whose sums stay in registers from the first row to the last.
const COLUMNS: usize = 64;

#[inline(always)]
fn columns<S: Element, const N: usize>(s: &[S], stride: usize, phi: &[f32], scale: f32, out: &mut [f32]) {
    let mut sums = [0.0f32; N];
    for (row, &q) in phi.iter().enumerate() {
        let row = &s[row * stride..][..N];
        for l in 0..N {
            sums[l] = q.mul_add(row[l].widen(), sums[l]);
        }
    }
    let out = &mut out[..N];
    for l in 0..N {
        out[l] = sums[l] * scale;
    }
}

#[inline(always)]
fn body<S: Element>(s: &[S], sums: &[f32], phi: &[f32], eps: f32, out: &mut [f32], clamped: &mut u64) {
    let d = out.len();
    let (z, c) = sums.split_at(phi.len());
    let denominator = dot(phi, z);
    let floor = (eps * c[0]).max(f32::MIN_POSITIVE);
    *clamped += u64::from(denominator < floor);
    let scale = 1.0 / denominator.max(floor);
    let mut at = 0;
    while d - at >= COLUMNS {
        columns::<S, COLUMNS>(&s[at..], d, phi, scale, &mut out[at..at + COLUMNS]);
        at += COLUMNS;
    }
    while d - at >= 32 {
        columns::<S, 32>(&s[at..], d, phi, scale, &mut out[at..at + 32]);
        at += 32;
    }
    while d - at >= 16 {
        columns::<S, 16>(&s[at..], d, phi, scale, &mut out[at..at + 16]);
        at += 16;
    }
    while at < d {
        columns::<S, 1>(&s[at..], d, phi, scale, &mut out[at..=at]);
        at += 1;
    }
}

#[inline(always)]
fn add_body(s: &mut [f32], sums: &mut [f32], phi: &[f32], v: &[f32]) {
    let (z, c) = sums.split_at_mut(phi.len());
    for ((s, z), &k) in s.chunks_exact_mut(v.len()).zip(z).zip(phi) {
        for (s, &v) in s.iter_mut().zip(v) {
            *s = k.mul_add(v, *s);
        }
        *z += k;
    }
    c[0] += 1.0;
}

multiversion! {
    /// Adds a key and its value to the sums: the recurrence without a gate.
    ///
    /// s: (F, d); sums: z (F), then c (1); phi: (F); v: (d)
    pub(crate) fn add(s: &mut [f32], sums: &mut [f32], phi: &[f32], v: &[f32]) = add_body;
}

multiversion! {
    fn floats(s: &[f32], sums: &[f32], phi: &[f32], eps: f32, out: &mut [f32], clamped: &mut u64) = body::<f32>;
}

multiversion! {
    fn halves(s: &[bf16], sums: &[f32], phi: &[f32], eps: f32, out: &mut [f32], clamped: &mut u64) = body::<bf16>;
}

/// Types of S that a query can read.
pub(crate) trait Readable: Element {
    /// Computes `phi S / max(phi . z, eps c)`.
    ///
    /// s: (F, d); sums: z (F), then c (1); phi: (F) -> out: (d); `clamped` counts the denominators that were raised to
    /// their floor.
    fn read(isa: Isa, s: &[Self], sums: &[f32], phi: &[f32], eps: f32, out: &mut [f32], clamped: &mut u64);
}

impl Readable for f32 {
    fn read(isa: Isa, s: &[Self], sums: &[f32], phi: &[f32], eps: f32, out: &mut [f32], clamped: &mut u64) {
        floats(isa, s, sums, phi, eps, out, clamped);
    }
}

impl Readable for bf16 {
    fn read(isa: Isa, s: &[Self], sums: &[f32], phi: &[f32], eps: f32, out: &mut [f32], clamped: &mut u64) {
        halves(isa, s, sums, phi, eps, out, clamped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_gives_the_plain_bits_and_the_sums_in_f64() {
        let wave = |n: usize, f: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * f).sin()).collect() };
        for (features, d) in [(128, 64), (20, 37), (3, 1), (64, 128)] {
            let (s, phi) = (wave(features * d, 0.37), wave(features, 1.3));
            let half: Vec<bf16> = s.iter().map(|&v| bf16::from_f32(v)).collect();
            let sums: Vec<f32> = phi.iter().map(|v| v + 0.1).chain([7.0]).collect();
            let read = |isa| {
                let (mut a, mut b, mut clamped) = (vec![f32::NAN; d], vec![f32::NAN; d], 0);
                f32::read(isa, &s, &sums, &phi, 0.02, &mut a, &mut clamped);
                bf16::read(isa, &half, &sums, &phi, 0.02, &mut b, &mut clamped);
                (a, b, clamped)
            };
            let (a, b, clamped) = read(Isa::Plain);
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for isa in Isa::available() {
                let got = read(isa);
                assert_eq!(
                    (bits(&got.0), bits(&got.1), got.2),
                    (bits(&a), bits(&b), clamped),
                    "{isa:?} {features} {d}"
                );
            }
            let divisor: f64 = phi.iter().zip(&sums).map(|(p, z)| f64::from(*p) * f64::from(*z)).sum();
            for (column, got) in a.iter().enumerate() {
                let sum: f64 = (0..features).map(|f| f64::from(phi[f]) * f64::from(s[f * d + column])).sum();
                assert!((sum / divisor.max(0.14) - f64::from(*got)).abs() < 1e-5, "{features} {d} {column}");
            }
        }
    }

    #[test]
    fn keys_are_added_with_the_same_bits_by_every_instruction_set() {
        let (features, d) = (20, 37);
        let wave = |n: usize, f: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * f).sin()).collect() };
        let added = |isa| {
            let (mut s, mut sums) = (vec![0.0; features * d], vec![0.0; features + 1]);
            for t in 0..3 {
                add(isa, &mut s, &mut sums, &wave(features, 0.3 + t as f32), &wave(d, 1.1 + t as f32));
            }
            (s, sums)
        };
        let (s, sums) = added(Isa::Plain);
        assert!(
            (f64::from(s[d + 1])
                - (0..3).map(|t| { (0.3 + f64::from(t)).sin() * (1.1 + f64::from(t)).sin() }).sum::<f64>())
            .abs()
                < 1e-6
        );
        assert!((sums[features] - 3.0).abs() < f32::EPSILON);
        for isa in Isa::available() {
            assert_eq!(added(isa), (s.clone(), sums.clone()), "{isa:?}");
        }
    }

    #[test]
    fn a_denominator_below_its_floor_is_held_there_and_counted() {
        let (mut out, mut clamped) = ([f32::NAN; 2], 0);
        f32::read(Isa::detect(), &[1.0, 2.0], &[-3.0, 10.0], &[1.0], 0.5, &mut out, &mut clamped);
        assert_eq!((out, clamped), ([0.2, 0.4], 1));
    }
}
