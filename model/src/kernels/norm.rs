//! Root-mean-square norm and the residual sum, on rows.

use super::{multiversion, plain::dot};

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
    /// `x / sqrt(mean(x^2) + eps) * weight` for each row of as many numbers as `weight` has.
    pub(crate) fn rms(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_body;
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
}
