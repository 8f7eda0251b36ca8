//! The exponential function and what is built on it: SiLU, SwiGLU and the short convolution that ends in SiLU.

use super::{LANES, multiversion};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2, split in two. The first part has few bits, so its product with an integer is exact.
const LN_2_A: f32 = 0.693_359_375;
const LN_2_B: f32 = -2.121_944_4e-4;
/// 1.5 * 2^23: adding and then subtracting it rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// Returns e^x for one lane, relative error about 1e-7; clamps x where f32 would over- or underflow (Cephes `expf`).
#[inline(always)]
pub(crate) fn exp_lane(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-n).mul_add(LN_2_B, (-n).mul_add(LN_2_A, x));
    let p = r.mul_add(1.987_569_1e-4, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3).mul_add(r, 4.166_579_6e-2).mul_add(r, 1.666_666_5e-1).mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    // The low bits of `shifted` hold n; adding n to the exponent multiplies by 2^n.
    f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23))
}

#[inline(always)]
pub(super) fn silu_lane(x: f32) -> f32 {
    x / (1.0 + exp_lane(-x))
}

#[inline(always)]
fn swiglu_body(gate_up: &[f32], width: usize, out: &mut [f32]) {
    for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        let ((gates, gate_rest), (ups, up_rest)) = (gate.as_chunks::<LANES>(), up.as_chunks::<LANES>());
        let (outs, out_rest) = out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            for l in 0..LANES {
                out[l] = silu_lane(gate[l]) * up[l];
            }
        }
        for ((gate, up), out) in gate_rest.iter().zip(up_rest).zip(out_rest) {
            *out = silu_lane(*gate) * up;
        }
    }
}

multiversion! {
    /// `silu(gate) * up` for each row: gate_up (rows, 2 width) -> out (rows, width).
    pub(crate) fn swiglu(gate_up: &[f32], width: usize, out: &mut [f32]) = swiglu_body;
}

#[inline(always)]
fn conv_row(
    tail: &mut [f32],
    (x, stride): (&[f32], usize),
    (weight, bias): (&[f32], &[f32]),
    channels: usize,
    out: &mut [f32],
) {
    let (before, steps) = (tail.len() / channels, out.len() / channels);
    for (t, out) in out.chunks_exact_mut(channels).enumerate() {
        if bias.is_empty() {
            out.fill(0.0);
        } else {
            out.copy_from_slice(bias);
        }
        for (j, weight) in weight.chunks_exact(channels).enumerate() {
            // Tap j reads the input from `before - j` tokens ago; inputs before the start of the text are zeros.
            let at = t + j;
            let source =
                if at < before { &tail[at * channels..][..channels] } else { &x[(at - before) * stride..][..channels] };
            for ((out, w), x) in out.iter_mut().zip(weight).zip(source) {
                *out = x.mul_add(*w, *out);
            }
        }
        for out in out {
            *out = silu_lane(*out);
        }
    }
    let new = steps.min(before);
    tail.copy_within(new * channels.., 0);
    for (i, tail) in tail.chunks_exact_mut(channels).skip(before - new).enumerate() {
        tail.copy_from_slice(&x[(steps - new + i) * stride..][..channels]);
    }
}

multiversion! {
    /// Applies a depthwise causal convolution and SiLU to the tokens of one row; `tail` keeps the last inputs.
    ///
    /// tail: (kernel - 1, channels), oldest first; inputs: x and its stride, where each token is the first `channels`
    /// of `stride` numbers; taps: weight (kernel, channels) and bias (channels), which may be empty; out: (time,
    /// channels).
    pub(crate) fn conv_silu(
        tail: &mut [f32],
        inputs: (&[f32], usize),
        taps: (&[f32], &[f32]),
        channels: usize,
        out: &mut [f32],
    ) = conv_row;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    #[test]
    fn silu_against_f64() {
        for i in -2000..2000 {
            let x = i as f32 * 0.05;
            let want = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(silu_lane(x)) - want).abs();
            assert!(error <= 4e-7 * want.abs() + 1e-30, "{x}: {error}");
        }
        // The clamp of the exponential leaves 6e-9 instead of 0.
        assert!(silu_lane(-1e30).abs() < 1e-8);
        assert!(silu_lane(f32::NAN).is_nan());
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        let wave: Vec<f32> = (0..2 * 75).map(|i| (i as f32 * 0.7).sin() * 8.0).collect();
        let runs: Vec<Vec<u32>> = Isa::available()
            .into_iter()
            .map(|isa| {
                let (mut a, mut b, mut tail) = (vec![0.0; 75], vec![0.0; 2 * 75], wave[..3 * 75 / 3 * 2].to_vec());
                swiglu(isa, &wave, 75, &mut a);
                conv_silu(isa, &mut tail, (&wave, 75), (&wave.repeat(2)[..3 * 75], &[]), 75, &mut b);
                a.iter().chain(&b).chain(&tail).map(|v| v.to_bits()).collect()
            })
            .collect();
        assert!(runs.iter().all(|bits| *bits == runs[0]));
    }

    #[test]
    fn a_convolution_cut_anywhere_is_the_same() {
        let (channels, steps) = (5, 9);
        let x: Vec<f32> = (0..steps * channels).map(|i| (i as f32).sin()).collect();
        let weight: Vec<f32> = (0..4 * channels).map(|i| (i as f32 * 1.7).cos()).collect();
        let mut whole = vec![0.0; x.len()];
        let mut tail = vec![0.0; 3 * channels];
        conv_silu(Isa::Plain, &mut tail, (&x, channels), (&weight, &[]), channels, &mut whole);
        // Computed by hand for one output: token 5, channel 2.
        let sum: f32 = (0..4).map(|j| weight[j * channels + 2] * x[(2 + j) * channels + 2]).sum();
        assert!((whole[5 * channels + 2] - sum / (1.0 + (-sum).exp())).abs() < 1e-6);
        for cut in 0..=steps {
            let mut parts = vec![0.0; x.len()];
            let mut part_tail = vec![0.0; 3 * channels];
            let at = cut * channels;
            conv_silu(Isa::Plain, &mut part_tail, (&x[..at], channels), (&weight, &[]), channels, &mut parts[..at]);
            conv_silu(Isa::Plain, &mut part_tail, (&x[at..], channels), (&weight, &[]), channels, &mut parts[at..]);
            assert_eq!((parts, part_tail), (whole.clone(), tail.clone()), "cut at {cut}");
        }
    }

    #[test]
    fn a_bias_is_added_and_inputs_may_lie_apart() {
        let (channels, stride, steps) = (5, 8, 9);
        let x: Vec<f32> = (0..steps * stride).map(|i| (i as f32).sin()).collect();
        let weight: Vec<f32> = (0..4 * channels).map(|i| (i as f32 * 1.7).cos()).collect();
        let bias: Vec<f32> = (0..channels).map(|i| i as f32 - 1.5).collect();
        let (mut out, mut tail) = (vec![0.0; steps * channels], vec![0.0; 3 * channels]);
        conv_silu(Isa::Plain, &mut tail, (&x, stride), (&weight, &bias), channels, &mut out);
        for (t, c) in (3..steps).flat_map(|t| (0..channels).map(move |c| (t, c))) {
            let sum = (0..4).map(|j| weight[j * channels + c] * x[(t - 3 + j) * stride + c]).sum::<f32>() + bias[c];
            assert!((out[t * channels + c] - sum / (1.0 + (-sum).exp())).abs() < 1e-6, "{t} {c}");
        }
        let kept: Vec<f32> = x.chunks_exact(stride).skip(steps - 3).flat_map(|x| x[..channels].to_vec()).collect();
        assert_eq!(tail, kept);
    }
}
