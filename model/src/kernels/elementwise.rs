//! Elementwise operations on numbers, and on rows with weight vectors: what RWKV-7 needs around its matrix products and
//! its recurrence.

use super::activation::exp_lane;
use super::plain::{dot, reduce};
use super::positive::each;
use super::{LANES, multiversion};

/// `e^(-1/2)`: the decay of RWKV-7 is at least `exp(-e^(-1/2))` = 0.545.
const DECAY: f32 = 0.606_530_66;
/// The smallest length that a vector is divided by.
const SHORTEST: f32 = 1e-12;

#[inline(always)]
fn sigmoid_lane(x: f32) -> f32 {
    1.0 / (1.0 + exp_lane(-x))
}

#[inline(always)]
fn sigmoid_body(x: &mut [f32]) {
    each(x, sigmoid_lane);
}

multiversion! {
    /// `1 / (1 + exp(-x))` of every number, in place.
    pub(crate) fn sigmoid(x: &mut [f32]) = sigmoid_body;
}

#[inline(always)]
fn tanh_body(x: &mut [f32]) {
    each(x, |v| {
        let e = exp_lane(-2.0 * v.abs());
        ((1.0 - e) / (1.0 + e)).copysign(v)
    });
}

multiversion! {
    /// The hyperbolic tangent of every number, in place, to about 1e-7.
    pub(crate) fn tanh(x: &mut [f32]) = tanh_body;
}

#[inline(always)]
fn squared_relu_body(x: &mut [f32]) {
    // NaN stays NaN.
    each(x, |v| if v < 0.0 { 0.0 } else { v * v });
}

multiversion! {
    /// `max(x, 0)^2` of every number, in place.
    pub(crate) fn squared_relu(x: &mut [f32]) = squared_relu_body;
}

#[inline(always)]
fn decay_body(x: &mut [f32]) {
    each(x, |v| exp_lane(-DECAY * sigmoid_lane(v)));
}

multiversion! {
    /// `exp(-e^(-1/2) sigmoid(x))` of every number, in place.
    pub(crate) fn decay(x: &mut [f32]) = decay_body;
}

#[inline(always)]
fn mix_body(x: &[f32], other: &[f32], by: &[f32], out: &mut [f32]) {
    for (((x, other), by), out) in x.iter().zip(other).zip(by).zip(out) {
        *out = (other - x).mul_add(*by, *x);
    }
}

multiversion! {
    /// Interpolates: `out = x + (other - x) by`.
    pub(crate) fn mix(x: &[f32], other: &[f32], by: &[f32], out: &mut [f32]) = mix_body;
}

#[inline(always)]
fn approach_body(to: &[f32], by: &[f32], x: &mut [f32]) {
    for ((to, by), x) in to.iter().zip(by).zip(x) {
        *x = (to - *x).mul_add(*by, *x);
    }
}

multiversion! {
    /// Moves x towards `to`: `x <- x + (to - x) by`.
    pub(crate) fn approach(to: &[f32], by: &[f32], x: &mut [f32]) = approach_body;
}

#[inline(always)]
fn directions_body(k: &[f32], weight: &[f32], d: usize, out: &mut [f32]) {
    for (k, out) in k.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        for ((k, weight), out) in k.chunks_exact(d).zip(weight.chunks_exact(d)).zip(out.chunks_exact_mut(d)) {
            for ((k, weight), out) in k.iter().zip(weight).zip(&mut *out) {
                *out = k * weight;
            }
            let length = dot(out, out).sqrt();
            let scale = 1.0 / if length < SHORTEST { SHORTEST } else { length };
            for out in out {
                *out *= scale;
            }
        }
    }
}

multiversion! {
    /// Computes `k weight` and scales each `d` numbers to unit length. k: (rows, n), weight: (n) -> out: (rows, n)
    pub(crate) fn directions(k: &[f32], weight: &[f32], d: usize, out: &mut [f32]) = directions_body;
}

#[inline(always)]
fn scale_keys_body(a: &[f32], weight: &[f32], k: &mut [f32]) {
    for (a, k) in a.chunks_exact(weight.len()).zip(k.chunks_exact_mut(weight.len())) {
        for ((a, weight), k) in a.iter().zip(weight).zip(k) {
            *k *= (a - 1.0).mul_add(*weight, 1.0);
        }
    }
}

multiversion! {
    /// Scales keys: `k <- k (1 + (a - 1) weight)`. a, k: (rows, n), weight: (n)
    pub(crate) fn scale_keys(a: &[f32], weight: &[f32], k: &mut [f32]) = scale_keys_body;
}

/// The inputs of [`bonus`], each (rows, n).
#[derive(Clone, Copy)]
pub(crate) struct Bonus<'a> {
    pub(crate) r: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) gate: &'a [f32],
}

#[inline(always)]
fn bonus_body(of: Bonus<'_>, weight: &[f32], d: usize, out: &mut [f32]) {
    let groups = weight.len() / d;
    for (i, out) in out.chunks_exact_mut(d).enumerate() {
        let range = i * d..(i + 1) * d;
        let weight = &weight[i % groups * d..][..d];
        let blocks = of.r[range.clone()].as_chunks::<LANES>().0.iter().zip(of.k[range.clone()].as_chunks::<LANES>().0);
        let mut lanes = [0.0f32; LANES];
        for ((r, k), weight) in blocks.zip(weight.as_chunks::<LANES>().0) {
            for l in 0..LANES {
                lanes[l] = (r[l] * k[l]).mul_add(weight[l], lanes[l]);
            }
        }
        let sum = reduce(lanes);
        for ((out, v), gate) in out.iter_mut().zip(&of.v[range.clone()]).zip(&of.gate[range]) {
            *out = sum.mul_add(*v, *out) * gate;
        }
    }
}

multiversion! {
    /// Computes `out <- (out + sum(r k weight) v) gate`; each sum is over `d` numbers, a multiple of sixteen. weight:
    /// (n), out: (rows, n)
    pub(crate) fn bonus(of: Bonus<'_>, weight: &[f32], d: usize, out: &mut [f32]) = bonus_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    fn wave(len: usize, f: f32, height: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * f).sin() * height).collect()
    }

    fn close(got: f32, want: f64, bound: f64) {
        assert!((f64::from(got) - want).abs() <= bound, "{got} {want}");
    }

    #[test]
    fn maps_of_numbers_against_f64() {
        let sigmoid_of = |x: f64| 1.0 / (1.0 + (-x).exp());
        for isa in Isa::available() {
            let x = wave(101, 0.73, 30.0);
            let [mut a, mut b, mut c, mut d] = [(); 4].map(|()| x.clone());
            sigmoid(isa, &mut a);
            tanh(isa, &mut b);
            squared_relu(isa, &mut c);
            decay(isa, &mut d);
            for (i, x) in x.iter().map(|&x| f64::from(x)).enumerate() {
                close(a[i], sigmoid_of(x), 2e-7);
                close(b[i], x.tanh(), 3e-7);
                close(c[i], x.max(0.0).powi(2), 1e-4);
                close(d[i], (-(-0.5f64).exp() * sigmoid_of(x)).exp(), 2e-7);
            }
            let mut extremes = [f32::MAX, f32::MIN, 1e-8, -1e-8];
            tanh(isa, &mut extremes);
            assert!(extremes[0] == 1.0 && extremes[1] == -1.0 && extremes[2].abs() < 1e-7 && extremes[3] <= 0.0);
            for map in [sigmoid, tanh, squared_relu, decay] {
                let mut x = [f32::NAN];
                map(isa, &mut x);
                assert!(x[0].is_nan());
            }
        }
    }

    #[test]
    fn rows_against_f64() {
        let (rows, d, n) = (3, 32, 64);
        let [x, other, by] = [0.37, 1.3, 0.9].map(|f| wave(rows * n, f, 2.0));
        let weight = wave(n, 0.21, 1.5);
        let f = |v: f32| f64::from(v);
        for isa in Isa::available() {
            let (mut mixed, mut moved, mut keys) = (vec![f32::NAN; rows * n], x.clone(), x.clone());
            mix(isa, &x, &other, &by, &mut mixed);
            approach(isa, &other, &by, &mut moved);
            scale_keys(isa, &other, &weight, &mut keys);
            for i in 0..rows * n {
                let want = f(x[i]) + (f(other[i]) - f(x[i])) * f(by[i]);
                close(mixed[i], want, 2e-6);
                close(moved[i], want, 2e-6);
                close(keys[i], f(x[i]) * (1.0 + (f(other[i]) - 1.0) * f(weight[i % n])), 2e-6);
            }
            let (mut unit, mut out) = (vec![f32::NAN; rows * n], x.clone());
            directions(isa, &x, &weight, d, &mut unit);
            bonus(isa, Bonus { r: &other, k: &by, v: &mixed, gate: &keys }, &weight, d, &mut out);
            for group in 0..rows * n / d {
                let own = group * d..(group + 1) * d;
                let product = |i: usize| f(x[i]) * f(weight[i % n]);
                let length = own.clone().map(|i| product(i).powi(2)).sum::<f64>().sqrt();
                let sum: f64 = own.clone().map(|i| f(other[i]) * f(by[i]) * f(weight[i % n])).sum();
                for i in own {
                    close(unit[i], product(i) / length, 1e-6);
                    close(out[i], (f(x[i]) + sum * f(mixed[i])) * f(keys[i]), 1e-2);
                }
            }
            let mut none = [f32::NAN; 16];
            directions(isa, &[0.0; 16], &[1.0; 16], 16, &mut none);
            assert_eq!(none, [0.0; 16], "a row without a direction");
        }
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        let of = |isa| -> Vec<u32> {
            let (n, d) = (96, 48);
            let [mut a, mut b, mut c, mut e] = [0.3, 0.5, 0.7, 0.9].map(|f| wave(2 * n, f, 3.0));
            sigmoid(isa, &mut a);
            tanh(isa, &mut b);
            squared_relu(isa, &mut c);
            decay(isa, &mut e);
            let (mut mixed, mut unit, weight) = (vec![0.0; 2 * n], vec![0.0; 2 * n], wave(n, 0.2, 1.0));
            mix(isa, &a, &b, &c, &mut mixed);
            approach(isa, &a, &e, &mut b);
            directions(isa, &mixed, &weight, d, &mut unit);
            scale_keys(isa, &a, &weight, &mut mixed);
            let mut out = a.clone();
            bonus(isa, Bonus { r: &b, k: &c, v: &e, gate: &mixed }, &weight, d, &mut out);
            [a, b, c, e, mixed, unit, out].iter().flatten().map(|v| v.to_bits()).collect()
        };
        let plain = of(Isa::Plain);
        assert!(Isa::available().into_iter().all(|isa| of(isa) == plain));
    }
}
