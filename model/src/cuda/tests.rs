//! Tests the kernels against f64 references (model/tests/cuda.rs tests bf16 states): random inputs, poisoned outputs,
//! sizes that fill no block. Runs on the emulator, or on the GPU that `TIDEGATE_TEST_DEVICE` names.

mod choosing;
mod failures;
mod mixing;
mod transfers;
mod watched;

use candle_core::{Device, Tensor};

use super::device::{Buffer, CudaDevice};
use super::ops::{Form, Inputs, Linear, Mode, RmsNorm, Rows};
use super::weights::Kind;
use crate::random::Normals;
use crate::weights::{Matrix, WeightType};

pub(super) fn device() -> CudaDevice {
    match std::env::var("TIDEGATE_TEST_DEVICE") {
        Ok(name) => CudaDevice::open(name.trim_start_matches("cuda:").parse().unwrap()).unwrap(),
        Err(_) => CudaDevice::emulated(),
    }
}

pub(super) fn normals(seed: u64, len: usize) -> Vec<f32> {
    let mut normals = Normals::new(seed);
    (0..len).map(|_| normals.normal() as f32).collect()
}

/// Returns a poisoned buffer: all NaN.
pub(super) fn poisoned(device: &CudaDevice, len: usize) -> Buffer {
    device.floats("a test", &vec![f32::NAN; len]).unwrap()
}

pub(super) fn read(device: &CudaDevice, at: u64, len: usize) -> Vec<f32> {
    let mut bytes = vec![0; len * 4];
    device.0.download(at, &mut bytes).unwrap();
    super::pool::floats(&bytes).collect()
}

/// Returns numbers rounded to a kind.
fn rounded(numbers: &[f32], kind: Kind) -> Vec<f32> {
    let round = |&v: &f32| match kind {
        Kind::F32 => v,
        Kind::Bf16 => half::bf16::from_f32(v).to_f32(),
        Kind::F16 => half::f16::from_f32(v).to_f32(),
    };
    numbers.iter().map(round).collect()
}

/// Returns a matrix (rows, columns) of a kind.
fn matrix(numbers: &[f32], rows: usize, kind: Kind) -> Matrix<'static> {
    let bytes: Vec<u8> = match kind {
        Kind::F32 => super::device::bytes_of(numbers),
        Kind::Bf16 => numbers.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        Kind::F16 => numbers.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
    };
    let stored = match kind {
        Kind::F32 => WeightType::F32,
        Kind::Bf16 => WeightType::Bf16,
        Kind::F16 => WeightType::F16,
    };
    Matrix { kind: stored, bytes: bytes.into(), rows, columns: numbers.len() / rows }
}

fn kind_bytes(kind: Kind) -> usize {
    if kind == Kind::F32 { 4 } else { 2 }
}

/// Returns x (rows, ins) as inputs of a product, with zeros as padding.
fn inputs(device: &CudaDevice, x: &[f32], rows: usize, kind: Kind) -> Inputs {
    let ins = x.len() / rows;
    let inputs = Inputs::new(device, rows, ins).unwrap();
    let at = inputs.rows(kind);
    for (row, x) in x.chunks_exact(ins).enumerate() {
        let bytes = matrix(x, 1, kind).bytes;
        device.0.upload(at.at + (row * at.stride * kind_bytes(kind)) as u64, &bytes).unwrap();
    }
    inputs
}

/// Returns `x W^T` in f64. x: (rows, ins), w: (outs, ins)
fn product(x: &[f32], w: &[f32], ins: usize) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    x.chunks_exact(ins).flat_map(|x| w.chunks_exact(ins).map(move |w| dot(x, w))).collect()
}

pub(super) fn close(got: &[f32], want: &[f64], bound: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    let worst =
        got.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, |m, d| if d >= m { d } else { m });
    let sum: f64 = got.iter().map(|v| f64::from(*v)).sum();
    assert!(worst < bound && sum.is_finite(), "{what}: {worst}");
}

const KINDS: [Kind; 3] = [Kind::F32, Kind::Bf16, Kind::F16];
/// Row counts that use all of the kernels and fill no block.
const ROWS: [usize; 5] = [1, 7, 13, 30, 139];

#[test]
fn products_are_stored_and_added() {
    let device = device();
    let outs = 51;
    // The widths: less than a tile per slice; stages whose tiles belong to one slice; more columns than a block of the
    // f32 kernels reads at once.
    for (kind, ins) in KINDS.into_iter().flat_map(|kind| [(kind, 88), (kind, 600), (kind, 1_030)]) {
        let w = rounded(&normals(1, outs * ins), kind);
        for (seed, rows) in ROWS.into_iter().enumerate() {
            let x = rounded(&normals(10 + seed as u64, rows * ins), kind);
            let (want, x) = (product(&x, &w, ins), inputs(&device, &x, rows, kind));
            let linear = Linear::new(&device, &[&matrix(&w, outs, kind)], Mode::Store).unwrap();
            let y = poisoned(&device, rows * outs);
            linear.forward(&device, rows, x.rows(kind), Rows { at: y.at, stride: outs }).unwrap();
            let got = read(&device, y.at, rows * outs);
            close(&got, &want, 2e-5 * (ins as f64 / 88.0), &format!("{kind:?}, {rows} rows of {ins}"));
            // Every kernel gives the same bits.
            for form in [Form::Eight, Form::Sixteen, Form::ThirtyTwo, Form::Some, Form::Many] {
                let y = poisoned(&device, rows * outs);
                linear.forward_by(&device, form, rows, (x.rows(kind), Rows { at: y.at, stride: outs })).unwrap();
                let same = read(&device, y.at, rows * outs).iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{kind:?}, {rows} rows by {form:?}");
            }
            // So does a row alone, for which another f32 kernel may be chosen.
            let last =
                Rows { at: x.rows(kind).at + ((rows - 1) * x.stride * kind_bytes(kind)) as u64, stride: x.stride };
            let alone = poisoned(&device, outs);
            linear.forward(&device, 1, last, Rows { at: alone.at, stride: outs }).unwrap();
            let same = read(&device, alone.at, outs)
                .iter()
                .zip(&got[(rows - 1) * outs..])
                .all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{kind:?}, the last of {rows} rows of {ins}");
            // Adding the same product again doubles the output.
            let linear = Linear::new(&device, &[&matrix(&w, outs, kind)], Mode::Add).unwrap();
            linear.forward(&device, rows, x.rows(kind), Rows { at: y.at, stride: outs }).unwrap();
            let twice: Vec<f32> = got.iter().map(|v| v + v).collect();
            assert_eq!(read(&device, y.at, rows * outs), twice, "{kind:?}, {rows} rows");
        }
    }
}

#[test]
fn swiglu_pairs_each_gate_with_its_value() {
    let device = device();
    // Neither width is a multiple of a tile.
    let (ins, width) = (40, 27);
    for kind in KINDS {
        let (gate, up) = (rounded(&normals(2, width * ins), kind), rounded(&normals(3, width * ins), kind));
        for rows in ROWS {
            let x = rounded(&normals(4 + rows as u64, rows * ins), kind);
            let (gates, ups) = (product(&x, &gate, ins), product(&x, &up, ins));
            let want: Vec<f64> = gates.iter().zip(&ups).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let x = inputs(&device, &x, rows, kind);
            let both = [matrix(&gate, width, kind), matrix(&up, width, kind)];
            let linear = Linear::new(&device, &[&both[0], &both[1]], Mode::Swiglu).unwrap();
            let y = Inputs::new(&device, rows, width).unwrap();
            linear.forward(&device, rows, x.rows(kind), y.rows(kind)).unwrap();
            let (at, got) = (y.rows(kind), |bytes: &[u8]| -> Vec<f32> {
                match kind {
                    Kind::F32 => super::pool::floats(bytes).collect(),
                    Kind::Bf16 => {
                        bytes.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()
                    }
                    Kind::F16 => {
                        bytes.as_chunks::<2>().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect()
                    }
                }
            });
            let mut bytes = vec![0; rows * at.stride * if kind == Kind::F32 { 4 } else { 2 }];
            device.0.download(at.at, &mut bytes).unwrap();
            let stored = got(&bytes);
            let relative = match kind {
                Kind::F32 => 1e-6,
                Kind::Bf16 => 4e-3,
                Kind::F16 => 5e-4,
            };
            for (row, (stored, want)) in stored.chunks_exact(at.stride).zip(want.chunks_exact(width)).enumerate() {
                for (got, want) in stored.iter().zip(want) {
                    assert!(
                        (f64::from(*got) - want).abs() < 2e-5 + relative * want.abs(),
                        "{kind:?}, row {row}: {got} {want}"
                    );
                }
                assert!(stored[width..].iter().all(|&v| v == 0.0), "the padding stays 0");
            }
        }
    }
}

#[test]
fn an_embedding_gives_its_rows() {
    let device = device();
    let (vocab, hidden) = (37, 72);
    let ids = [36u32, 0, 17, 36];
    for kind in KINDS {
        let table = rounded(&normals(5, vocab * hidden), kind);
        let linear = Linear::new(&device, &[&matrix(&table, vocab, kind)], Mode::Store).unwrap();
        let at = device.with("ids", &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        let x = poisoned(&device, ids.len() * hidden);
        linear.embed(&device, ids.len(), at.at, x.at).unwrap();
        let want: Vec<f32> =
            ids.iter().flat_map(|&id| table[id as usize * hidden..][..hidden].iter().copied()).collect();
        assert_eq!(read(&device, x.at, want.len()), want, "{kind:?}");
    }
}

#[test]
fn norms_against_f64() {
    let device = device();
    for dim in [24, 600] {
        let rows = 5;
        let (x, weight) = (normals(6, rows * dim), normals(7, dim));
        let norm = RmsNorm::new(&device, &weight, 1e-5).unwrap();
        let want: Vec<f64> = x
            .chunks_exact(dim)
            .flat_map(|x| {
                let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / dim as f64;
                x.iter().zip(&weight).map(move |(&v, &w)| f64::from(v) / (mean + 1e-5).sqrt() * f64::from(w))
            })
            .collect();
        let from = device.floats("a test", &x).unwrap();
        let y = Inputs::new(&device, rows, dim).unwrap();
        norm.forward(&device, rows, from.at, &y, (Kind::Bf16, true)).unwrap();
        let plain = read(&device, y.rows(Kind::F32).at, rows * y.stride);
        for (got, want) in plain.chunks_exact(y.stride).zip(want.chunks_exact(dim)) {
            close(&got[..dim], want, 2e-6, "a norm");
        }
        // The 16-bit output is the f32 output, rounded.
        let mut bytes = vec![0; rows * y.stride * 2];
        device.0.download(y.rows(Kind::Bf16).at, &mut bytes).unwrap();
        let halves: Vec<f32> =
            bytes.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect();
        assert_eq!(halves, rounded(&plain, Kind::Bf16));
        // The norm of each head: here (1, rows) heads of `dim`.
        let y = poisoned(&device, rows * dim);
        norm.heads(&device, 1, rows, from.at, Rows { at: y.at, stride: rows * dim }, Kind::F32).unwrap();
        close(&read(&device, y.at, rows * dim), &want, 2e-6, "heads");
    }
}

#[test]
fn quantised_weights_are_dequantised_like_candle_does() {
    let device = device();
    let (outs, ins) = (16, 64);
    let w = normals(8, outs * ins);
    let tensor = Tensor::from_slice(&w, (outs, ins), &Device::Cpu).unwrap();
    let quantised =
        candle_core::quantized::QTensor::quantize(&tensor, candle_core::quantized::GgmlDType::Q8_0).unwrap();
    let want = quantised.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bytes = quantised.data().unwrap().into_owned();
    let stored = Matrix { kind: WeightType::Q8_0, bytes: bytes.into(), rows: outs, columns: ins };
    let linear = Linear::new(&device, &[&stored], Mode::Store).unwrap();
    assert_eq!(linear.kind, Kind::F16);
    let ids: Vec<u8> = (0..outs as u32).flat_map(u32::to_le_bytes).collect();
    let (ids, x) = (device.with("ids", &ids).unwrap(), poisoned(&device, outs * ins));
    linear.embed(&device, outs, ids.at, x.at).unwrap();
    assert_eq!(read(&device, x.at, outs * ins), rounded(&want, Kind::F16));
}

#[test]
fn numbers_too_large_for_f16_become_the_largest_finite() {
    let device = device();
    let w: Vec<f32> = [400.0f32, -400.0].iter().flat_map(|&v| vec![v; 32]).collect();
    let (gate, up) = (matrix(&[1.0; 64], 2, Kind::F16), matrix(&w, 2, Kind::F16));
    let linear = Linear::new(&device, &[&gate, &up], Mode::Swiglu).unwrap();
    let (x, y) = (inputs(&device, &[3.0; 32], 1, Kind::F16), Inputs::new(&device, 1, 2).unwrap());
    linear.forward(&device, 1, x.rows(Kind::F16), y.rows(Kind::F16)).unwrap();
    let mut bytes = vec![0; 4];
    device.0.download(y.rows(Kind::F16).at, &mut bytes).unwrap();
    let got: Vec<f32> = bytes.as_chunks::<2>().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect();
    assert_eq!(got, [65504.0, -65504.0]);
}
