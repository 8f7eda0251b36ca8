//! The operations around Mamba-2's recurrence: time steps and the decays they cause, and the gated norm.

use super::activation::{exp_lane, silu_lane};
use super::multiversion;
use super::plain::dot;

/// Below this exponent a decay is 0, because e^x is not a normal number.
const LEAST: f32 = -87.0;

/// 1, 1/3, 1/5 to 1/19: for s^2 <= 1/9 the rest of the series of atanh is below the precision of f32.
const SERIES: [f32; 10] = {
    let mut series = [1.0; 10];
    let mut n = 1;
    while n < series.len() {
        series[n] = 1.0 / (2 * n + 1) as f32;
        n += 1;
    }
    series
};

/// Returns `log(1 + e^x)` with a relative error of about 1e-6.
#[inline(always)]
fn softplus_lane(x: f32) -> f32 {
    // log(1 + u) = 2 atanh(u / (2 + u)), whose argument is at most 1/3. The system's logarithm differs between
    // machines.
    let u = exp_lane(-x.abs());
    let s = u / (2.0 + u);
    let series = SERIES.iter().rev().fold(0.0f32, |sum, factor| sum.mul_add(s * s, *factor));
    let log = 2.0 * s * series;
    if x > 0.0 { x + log } else { log }
}

/// The constants of a layer's time steps, each (heads) except the limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape<'a> {
    /// The bias of dt.
    pub(crate) bias: &'a [f32],
    /// A: the logarithm of the decay over a step of 1.
    pub(crate) a: &'a [f32],
    /// The smallest and the largest step, in this order.
    pub(crate) limits: (f32, f32),
}

#[inline(always)]
fn time_steps_body((raw, stride): (&[f32], usize), shape: StepShape<'_>, (dt, keep): (&mut [f32], &mut [f32])) {
    let heads = shape.bias.len();
    let (least, most) = shape.limits;
    for ((raw, dt), keep) in raw.chunks(stride).zip(dt.chunks_exact_mut(heads)).zip(keep.chunks_exact_mut(heads)) {
        for ((dt, raw), bias) in dt.iter_mut().zip(raw).zip(shape.bias) {
            let step = softplus_lane(raw + bias);
            // NaN stays NaN.
            let step = if step < least { least } else { step };
            *dt = if step > most { most } else { step };
        }
        for ((keep, dt), a) in keep.iter_mut().zip(&*dt).zip(shape.a) {
            let exponent = dt * a;
            *keep = if exponent < LEAST { 0.0 } else { exp_lane(exponent) };
        }
    }
}

multiversion! {
    /// Computes `dt = clamp(softplus(raw + bias), limits)` and `exp(dt A)`, the share of the memory that remains, per
    /// head.
    ///
    /// raw: the first `heads` of every `stride` numbers -> dt, keep: (tokens, heads)
    pub(crate) fn time_steps(
        raw: (&[f32], usize),
        shape: StepShape<'_>,
        out: (&mut [f32], &mut [f32]),
    ) = time_steps_body;
}

/// The inputs of [`gated_rms`] besides the readout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gated<'a> {
    /// The convolved input and its stride: the first n of every `stride` numbers.
    pub(crate) x: (&'a [f32], usize),
    /// The gate and its stride: the first n of every `stride` numbers.
    pub(crate) gate: (&'a [f32], usize),
    /// The share of the input that bypasses the memory: (n).
    pub(crate) skip: &'a [f32],
    /// (n)
    pub(crate) weight: &'a [f32],
    /// How many numbers are normalized together; divides n.
    pub(crate) group: usize,
    /// Added to the mean square.
    pub(crate) eps: f32,
}

#[inline(always)]
fn gated_rms_body(of: Gated<'_>, y: &mut [f32]) {
    let (n, group) = (of.weight.len(), of.group);
    let rows = of.x.0.chunks(of.x.1).zip(of.gate.0.chunks(of.gate.1));
    for (y, (x, gate)) in y.chunks_exact_mut(n).zip(rows) {
        for (((y, x), gate), skip) in y.iter_mut().zip(x).zip(gate).zip(of.skip) {
            *y = skip.mul_add(*x, *y) * silu_lane(*gate);
        }
        for (y, weight) in y.chunks_exact_mut(group).zip(of.weight.chunks_exact(group)) {
            let scale = 1.0 / (dot(y, y) / group as f32 + of.eps).sqrt();
            for (y, weight) in y.iter_mut().zip(weight) {
                *y = *y * scale * weight;
            }
        }
    }
}

multiversion! {
    /// Computes `norm((y + skip x) silu(gate)) weight` in place; the norm scales each `group` numbers to a mean square
    /// of 1.
    ///
    /// y: (tokens, n)
    pub(crate) fn gated_rms(of: Gated<'_>, y: &mut [f32]) = gated_rms_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    fn wave(len: usize, f: f32, height: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * f).sin() * height).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn softplus_against_f64() {
        for i in -8000..8000 {
            let x = i as f32 * 0.01;
            let want = f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
            let error = (f64::from(softplus_lane(x)) - want).abs();
            assert!(error <= 1e-6 * want, "{x}: {error} of {want}");
        }
        assert!(softplus_lane(f32::NAN).is_nan());
        assert!(softplus_lane(f32::MAX) == f32::MAX && softplus_lane(f32::MIN) < 1e-37);
    }

    #[test]
    fn steps_of_time_against_f64_and_the_same_bits_on_every_set() {
        let (heads, stride, tokens) = (21, 30, 5);
        let (raw, bias) = (wave(stride * tokens, 0.7, 9.0), wave(heads, 1.3, 2.0));
        let a: Vec<f32> = wave(heads, 0.4, 1.0).iter().map(|v| -(v.exp())).collect();
        for limits in [(0.0, f32::INFINITY), (0.01, 0.5)] {
            let shape = StepShape { bias: &bias, a: &a, limits };
            let run = |isa| {
                let (mut dt, mut keep) = (vec![f32::NAN; heads * tokens], vec![f32::NAN; heads * tokens]);
                time_steps(isa, (&raw, stride), shape, (&mut dt, &mut keep));
                (dt, keep)
            };
            let (dt, keep) = run(Isa::Plain);
            for (i, (dt, keep)) in dt.iter().zip(&keep).enumerate() {
                let (token, head) = (i / heads, i % heads);
                let x = f64::from(raw[token * stride + head]) + f64::from(bias[head]);
                let want = (x.max(0.0) + (-x.abs()).exp().ln_1p()).clamp(f64::from(limits.0), f64::from(limits.1));
                assert!((f64::from(*dt) - want).abs() <= 1e-5 * want, "{dt} {want}");
                assert!((f64::from(*keep) - (want * f64::from(a[head])).exp()).abs() < 1e-5, "{keep}");
            }
            for isa in Isa::available() {
                let other = run(isa);
                assert_eq!((bits(&other.0), bits(&other.1)), (bits(&dt), bits(&keep)), "{isa:?}");
            }
        }
        let shape = StepShape { bias: &[0.0], a: &[-1.0], limits: (0.0, f32::INFINITY) };
        let (mut dt, mut keep) = ([0.0; 2], [1.0; 2]);
        time_steps(Isa::detect(), (&[1e30, f32::NAN], 1), shape, (&mut dt, &mut keep));
        assert!(keep[0] == 0.0 && dt[1].is_nan() && keep[1].is_nan());
    }

    #[test]
    fn the_gated_norm_against_f64_and_the_same_bits_on_every_set() {
        let (n, tokens) = (48, 3);
        let (x, gate) = (wave(tokens * 60, 0.7, 2.0), wave(tokens * 50, 0.3, 4.0));
        let (before, skip, weight) = (wave(tokens * n, 1.1, 3.0), wave(n, 0.2, 1.0), wave(n, 0.9, 1.5));
        for group in [n, 16, 12] {
            let of = Gated { x: (&x, 60), gate: (&gate, 50), skip: &skip, weight: &weight, group, eps: 1e-5 };
            let run = |isa| {
                let mut y = before.clone();
                gated_rms(isa, of, &mut y);
                y
            };
            let y = run(Isa::Plain);
            let f = |v: f32| f64::from(v);
            let gated = |t: usize, i: usize| {
                let (x, gate) = (f(x[t * 60 + i]), f(gate[t * 50 + i]));
                (f(before[t * n + i]) + f(skip[i]) * x) * gate / (1.0 + (-gate).exp())
            };
            for (t, i) in (0..tokens).flat_map(|t| (0..n).map(move |i| (t, i))) {
                let own = i / group * group..(i / group + 1) * group;
                let square = own.map(|i| gated(t, i).powi(2)).sum::<f64>() / group as f64;
                let want = gated(t, i) / (square + 1e-5).sqrt() * f(weight[i]);
                assert!((f(y[t * n + i]) - want).abs() < 1e-5, "{group} {t} {i}");
            }
            assert!(Isa::available().into_iter().all(|isa| bits(&run(isa)) == bits(&y)), "{group}");
        }
    }
}
