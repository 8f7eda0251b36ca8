//! Norms and the residual sum, on rows.

use super::multiversion;
use super::plain::{dot, sum};

#[inline(always)]
fn rms_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let len = weight.len();
    for (x, out) in x.chunks_exact(len).zip(out.chunks_exact_mut(len)) {
        let scale = 1.0 / (dot(x, x) / len as f32 + eps).sqrt();
        for ((x, w), out) in x.iter().zip(weight).zip(out) {
            *out = x * scale * w;
        }
    }
}

multiversion! {
    /// Normalizes each row of as many numbers as `weight` has: `x / sqrt(mean(x^2) + eps) * weight`.
    pub(crate) fn rms(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_body;
}

#[inline(always)]
fn groups_body(x: &[f32], width: usize, weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let affine = weight.chunks_exact(width).zip(bias.chunks_exact(width)).cycle();
    for ((x, out), (weight, bias)) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).zip(affine) {
        let mean = sum(x) / width as f32;
        for (x, out) in x.iter().zip(&mut *out) {
            *out = x - mean;
        }
        let scale = 1.0 / (dot(out, out) / width as f32 + eps).sqrt();
        for ((out, weight), bias) in out.iter_mut().zip(weight).zip(bias) {
            *out = (*out * scale).mul_add(*weight, *bias);
        }
    }
}

multiversion! {
    /// Normalizes each `width` numbers: `(x - mean) / sqrt(variance + eps) * weight + bias`. This is a layer norm where
    /// `weight` and `bias` have `width` numbers, and a group norm where they have a multiple of that.
    pub(crate) fn groups(x: &[f32], width: usize, weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = groups_body;
}

#[inline(always)]
fn add_body(to: &mut [f32], x: &[f32]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += x;
    }
}

multiversion! {
    /// `to += x`.
    pub(crate) fn add(to: &mut [f32], x: &[f32]) = add_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    #[test]
    fn against_f64_and_the_same_bits_on_every_set() {
        let (len, eps) = (37, 1e-5f32);
        let x: Vec<f32> = (0..3 * len).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let weight: Vec<f32> = (0..len).map(|i| 1.0 + (i as f32 * 0.3).cos()).collect();
        let mut first = Vec::new();
        for isa in Isa::available() {
            let mut out = vec![f32::NAN; x.len()];
            rms(isa, &x, &weight, eps, &mut out);
            for (x, out) in x.chunks_exact(len).zip(out.chunks_exact(len)) {
                let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / len as f64;
                for ((x, w), out) in x.iter().zip(&weight).zip(out) {
                    let want = f64::from(*x) / (mean + f64::from(eps)).sqrt() * f64::from(*w);
                    assert!((f64::from(*out) - want).abs() < 1e-6, "{isa:?}");
                }
            }
            let bits: Vec<u32> = out.iter().map(|v| v.to_bits()).collect();
            if first.is_empty() {
                first.clone_from(&bits);
            }
            assert_eq!(bits, first, "{isa:?}");
        }
    }

    #[test]
    fn groups_against_f64_and_the_same_bits_on_every_set() {
        // A mean far from 0: the variance must not be a difference of large squares.
        let (rows, n, eps) = (3, 74, 1e-5f32);
        let x: Vec<f32> = (0..rows * n).map(|i| 100.0 + (i as f32 * 0.7).sin()).collect();
        let weight: Vec<f32> = (0..n).map(|i| 1.0 + (i as f32 * 0.3).cos()).collect();
        let bias: Vec<f32> = (0..n).map(|i| (i as f32 * 1.1).cos()).collect();
        for width in [n, 37] {
            let run = |isa| {
                let mut out = vec![f32::NAN; x.len()];
                groups(isa, &x, width, &weight, &bias, eps, &mut out);
                out
            };
            let plain = run(Isa::Plain);
            for (group, (x, out)) in x.chunks_exact(width).zip(plain.chunks_exact(width)).enumerate() {
                let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / width as f64;
                let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / width as f64;
                for (i, (x, out)) in x.iter().zip(out).enumerate() {
                    let at = (group * width + i) % n;
                    let unit = (f64::from(*x) - mean) / (variance + f64::from(eps)).sqrt();
                    assert!((f64::from(*out) - unit * f64::from(weight[at]) - f64::from(bias[at])).abs() < 1e-4);
                }
            }
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(Isa::available().into_iter().all(|isa| bits(&run(isa)) == bits(&plain)));
        }
    }
}
