//! Compares the recurrence, the convolution and rotary positions with plain implementations in f64.

use super::{close, device, normals, poisoned, read};
use crate::cuda::device::{Buffer, CudaDevice};
use crate::cuda::ops::Rows;
use crate::cuda::plan::column;
use crate::cuda::pool::{Layer, PADDING, Step};
use crate::cuda::recurrence::{Addresses, Recurrence, conv_silu, rotate};
use crate::cuda::weights::Kind;
use crate::memory::StateType;

fn words(device: &CudaDevice, all: &[u32]) -> Buffer {
    device.with("a test", &all.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).unwrap()
}

fn step(rows: usize, time: usize, slots: &Buffer, positions: &Buffer) -> Step {
    let one_slot = (rows == 1).then_some(1);
    Step { rows, time, ids: 0, slots: slots.at, positions: positions.at, angles: 0, one_slot }
}

/// Returns the features of one query or key, in f64. w: (d, D)
fn features(of: Recurrence, x: &[f32], w: &[f32]) -> Vec<f64> {
    let length = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let scale = (1.0 / of.proj_dim as f64).sqrt();
    let project = |j: usize| -> f64 {
        x.iter().enumerate().map(|(i, &v)| f64::from(v) / (length + 1e-3) * f64::from(w[i * of.proj_dim + j])).sum()
    };
    match of.map {
        0 => {
            let angles: Vec<f64> = (0..of.proj_dim).map(project).collect();
            angles.iter().map(|a| a.sin() * scale).chain(angles.iter().map(|a| a.cos() * scale)).collect()
        }
        1 => (0..of.proj_dim).map(|j| project(j).max(0.0) * scale).collect(),
        _ => x.iter().map(|&v| if v > 0.0 { f64::from(v) + 1.0 } else { f64::from(v).exp() }).collect(),
    }
}

/// Runs one head over some tokens and updates its state. Returns the readouts (time, d) and the number of clamped
/// denominators.
#[allow(clippy::too_many_arguments, reason = "a formula's letters")]
fn plain(
    of: Recurrence,
    s: &mut [f64],
    z: &mut [f64],
    c: &mut f64,
    qkv: &[Vec<f32>],
    gates: Option<&[f32]>,
    w: &[f32],
) -> (Vec<f64>, u64) {
    let (mut out, mut clamped) = (Vec::new(), 0);
    for (t, token) in qkv.chunks_exact(3).enumerate() {
        let (q, k, v) = (features(of, &token[0], w), features(of, &token[1], w), &token[2]);
        let (keep, take) = gates.map_or((1.0, 1.0), |gates| {
            let a = f64::from(gates[t]);
            (1.0 / (1.0 + (-a).exp()), 1.0 / (1.0 + a.exp()))
        });
        for f in 0..of.features {
            z[f] = keep * z[f] + take * k[f];
            for i in 0..of.d {
                s[f * of.d + i] = keep * s[f * of.d + i] + take * k[f] * f64::from(v[i]);
            }
        }
        *c = keep * *c + take;
        let denominator: f64 = q.iter().zip(z.iter()).map(|(a, b)| a * b).sum();
        let floor = f64::from(of.eps) * *c;
        clamped += u64::from(denominator < floor);
        let read = (0..of.d).map(|i| (0..of.features).map(|f| q[f] * s[f * of.d + i]).sum::<f64>());
        out.extend(read.map(|sum: f64| sum / denominator.max(floor)));
    }
    (out, clamped)
}

/// Compares a recurrence with the plain one, in `rows` slots of a pool of 10 slots and two layers.
fn held(of: Recurrence, gated: bool, rows: usize, time: usize) {
    let device = device();
    let (heads, d, f) = (of.heads, of.d, of.features);
    let (inner, what) = (heads * d, format!("{of:?}, {rows} rows of {time} tokens, gate: {gated}"));
    let seed = (f * 1000 + d * 10 + time) as u64;
    let w = normals(seed, heads * d * of.proj_dim);
    let qkv = normals(seed + 1, rows * time * 3 * inner);
    // Gate logits, whose gates span most of 0 to 1.
    let gate: Vec<f32> = normals(seed + 2, rows * time * heads).iter().map(|v| 3.0 * v + 1.0).collect();
    // A state of realistic size, with zeros as padding.
    let (s_stride, sums_stride) = (2 * heads * column(f) * d, 2 * heads * (f + 1));
    let padded = column(f);
    let mut before: Vec<f32> = normals(seed + 3, 10 * s_stride).iter().map(|v| 0.1 * v).collect();
    before.chunks_exact_mut(padded).for_each(|column| column[f..].fill(0.0));
    let sums: Vec<f32> = normals(seed + 4, 10 * sums_stride).iter().map(|v| 0.5 + 0.1 * v.abs()).collect();
    let slots: Vec<usize> = if rows == 1 { vec![1] } else { [3, 0, 1, 9, 4, 5, 8, 7, 2][..rows].to_vec() };
    let slot_words = words(&device, &slots.iter().map(|&slot| slot as u32).collect::<Vec<_>>());
    let positions = words(&device, &vec![0; 2 * rows]);
    let floats = |numbers: &[f32]| device.floats("a test", numbers).unwrap();
    let (s, z, x, g, matrices) = (floats(&before), floats(&sums), floats(&qkv), floats(&gate), floats(&w));
    let (phi, beside) = (poisoned(&device, rows * time * heads * 2 * f), poisoned(&device, heads * (f + 1)));
    let (out, clamped) = (poisoned(&device, rows * time * inner), device.buffer("a test", 8).unwrap());
    // The state of the second layer.
    let layer = Layer {
        state: StateType::F32,
        s: s.at + (s_stride / 2 * 4) as u64,
        s_stride,
        sums: z.at + (sums_stride / 2 * 4) as u64,
        sums_stride,
        tails: 0,
        tails_stride: 0,
    };
    let at = Addresses {
        qkv: x.at,
        gate: if gated { g.at } else { 0 },
        w: if of.map == 2 { 0 } else { matrices.at },
        phi: phi.at,
        sums: beside.at,
        clamped: clamped.at,
        out: Rows { at: out.at, stride: inner },
        kind: Kind::F32,
    };
    of.forward(&device, step(rows, time, &slot_words, &positions), layer, at).unwrap();

    let (mut want, mut all_clamped) = (vec![0.0; rows * time * inner], 0);
    let (mut want_s, mut want_sums) = (widened(&before), widened(&sums));
    for (row, &slot) in slots.iter().enumerate() {
        for head in 0..heads {
            let part = |t: usize, which: usize| qkv[((row * time + t) * 3 + which) * inner + head * d..][..d].to_vec();
            let tokens: Vec<_> = (0..time).flat_map(|t| [part(t, 0), part(t, 1), part(t, 2)]).collect();
            let gates: Vec<f32> = (0..time).map(|t| gate[(row * time + t) * heads + head]).collect();
            let own_s = slot * s_stride + (heads + head) * padded * d;
            let mut matrix: Vec<f64> = (0..f * d).map(|at| want_s[own_s + at % d * padded + at / d]).collect();
            let own = slot * sums_stride + (heads + head) * (f + 1);
            let (z, c) = want_sums[own..=own + f].split_at_mut(f);
            let w = &w[head * d * of.proj_dim..][..d * of.proj_dim];
            let (h, count) = plain(of, &mut matrix, z, &mut c[0], &tokens, gated.then_some(&gates), w);
            for (at, v) in matrix.into_iter().enumerate() {
                want_s[own_s + at % d * padded + at / d] = v;
            }
            all_clamped += count;
            for (t, h) in h.chunks_exact(d).enumerate() {
                want[(row * time + t) * inner + head * d..][..d].copy_from_slice(h);
            }
        }
    }
    // Compare the whole pool, because other slots must not change.
    close(&read(&device, s.at, before.len()), &want_s, 1e-4, &format!("S of {what}"));
    close(&read(&device, z.at, sums.len()), &want_sums, 1e-4, &format!("z and c of {what}"));
    let most = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    close(&read(&device, out.at, want.len()), &want, 1e-4 * most, &format!("readouts of {what}"));
    let mut bytes = [0; 8];
    device.0.download(clamped.at, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), all_clamped, "{what}");
}

fn widened(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&v| f64::from(v)).collect()
}

#[test]
fn recurrences_against_f64() {
    let of = |map, d, proj_dim, eps| {
        let features = [2 * proj_dim, proj_dim, d][map];
        Recurrence { heads: 2, d, features, proj_dim: if map == 2 { 0 } else { proj_dim }, map, eps, layer: 1 }
    };
    // All numbers of rows per thread (2, 4, 8, 16), full and partial; blocks that share a head or not; floors that are
    // reached or not.
    let all = [
        of(0, 8, 12, 0.02),
        of(0, 64, 64, 0.5),
        of(0, 128, 64, 0.02),
        of(0, 16, 128, 0.02),
        of(1, 24, 40, 0.0),
        of(1, 40, 27, 0.3),
        of(2, 24, 0, 0.0),
        of(2, 128, 0, 0.0),
    ];
    for of in all {
        for gated in [true, false] {
            held(of, gated, 3, 1);
            held(of, gated, 9, 1);
            held(of, gated, 1, 11);
        }
    }
}

#[test]
fn padding_rows_change_nothing() {
    let device = device();
    let of = Recurrence { heads: 2, d: 8, features: 8, proj_dim: 4, map: 0, eps: 0.02, layer: 0 };
    let (slots, positions) = (words(&device, &[PADDING; 3]), words(&device, &[0; 6]));
    let (s, sums) = (poisoned(&device, 512), poisoned(&device, 64));
    let (x, out) = (poisoned(&device, 3 * 48), poisoned(&device, 48));
    let layer = Layer {
        state: StateType::F32,
        s: s.at,
        s_stride: 2 * 8 * 32,
        sums: sums.at,
        sums_stride: 18,
        tails: s.at,
        tails_stride: 32,
    };
    let clamped = device.buffer("a test", 8).unwrap();
    let at = Addresses {
        qkv: x.at,
        gate: 0,
        w: x.at,
        phi: 0,
        sums: 0,
        clamped: clamped.at,
        out: Rows { at: out.at, stride: 16 },
        kind: Kind::F32,
    };
    let step = step(3, 1, &slots, &positions);
    of.forward(&device, step, layer, at).unwrap();
    conv_silu(&device, step, (x.at, 3), (x.at, out.at), 16, (layer.tails, layer.tails_stride)).unwrap();
    let untouched = |at, len| read(&device, at, len).iter().all(|v| v.is_nan());
    assert!(untouched(s.at, 512) && untouched(sums.at, 64) && untouched(out.at, 48));
}

#[test]
fn convolutions_against_f64() {
    let device = device();
    let (channels, rows) = (270, 2);
    for (taps, time) in [(2, 1), (3, 1), (4, 5), (16, 3), (16, 40)] {
        let (x, weight) = (normals(1, rows * time * channels), normals(2, taps * channels));
        let tails = normals(3, 3 * (taps - 1) * channels);
        let floats = |numbers: &[f32]| device.floats("a test", numbers).unwrap();
        let (from, kernel, memory) = (floats(&x), floats(&weight), floats(&tails));
        let to = poisoned(&device, x.len());
        let (slots, positions) = (words(&device, &[2, 0]), words(&device, &[0; 4]));
        let stride = (taps - 1) * channels;
        let step = step(rows, time, &slots, &positions);
        conv_silu(&device, step, (kernel.at, taps), (from.at, to.at), channels, (memory.at, stride)).unwrap();
        let (mut want, mut after) = (vec![0.0; x.len()], tails.clone());
        for (row, slot) in [2, 0].into_iter().enumerate() {
            for channel in 0..channels {
                let mut line: Vec<f32> = (0..taps - 1).map(|j| tails[slot * stride + j * channels + channel]).collect();
                line.extend((0..time).map(|t| x[(row * time + t) * channels + channel]));
                for t in 0..time {
                    let tap = |j: usize| f64::from(line[t + j]) * f64::from(weight[j * channels + channel]);
                    let sum: f64 = (0..taps).map(tap).sum();
                    want[(row * time + t) * channels + channel] = sum / (1.0 + (-sum).exp());
                }
                for j in 0..taps - 1 {
                    after[slot * stride + j * channels + channel] = line[time + j];
                }
            }
        }
        close(&read(&device, to.at, want.len()), &want, 1e-5, &format!("{taps} taps, {time} tokens"));
        assert_eq!(read(&device, memory.at, after.len()), after, "{taps} taps, {time} tokens");
    }
}

#[test]
fn rotations_against_f64() {
    let device = device();
    let (tokens, heads, d) = (3, 2, 10);
    let qkv = normals(5, tokens * 3 * heads * d);
    let turns: Vec<f32> = normals(6, tokens * d / 2);
    let angles: Vec<f32> = turns.iter().flat_map(|a| [a.cos(), a.sin()]).collect();
    let (x, by) = (device.floats("a test", &qkv).unwrap(), device.floats("a test", &angles).unwrap());
    rotate(&device, tokens, x.at, by.at, (heads, d)).unwrap();
    let mut want = widened(&qkv);
    for token in 0..tokens {
        for head in 0..2 * heads {
            for i in 0..d / 2 {
                let at = (token * 3 * heads + head) * d + i;
                let (a, b) = (f64::from(qkv[at]), f64::from(qkv[at + d / 2]));
                let (sin, cos) = f64::from(turns[token * d / 2 + i]).sin_cos();
                (want[at], want[at + d / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    close(&read(&device, x.at, want.len()), &want, 1e-5, "rotations");
}
