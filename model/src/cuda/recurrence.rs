//! Token mixing on the device: the recurrence of one layer's heads and the choice of its kernel
//! (model/cuda/recurrence.cuh); the short convolution and rotary positions before it.

use super::device::CudaDevice;
use super::gpu::{Arg, Fields, Result};
use super::ops::{Rows, launch};
use super::plan::rows_of_a_thread;
use super::pool::{Layer, Step};
use super::weights::Kind;
use crate::config::{DecoderConfig, FeatureMap};
use crate::cuda_error::CudaError;
use crate::memory::StateType;

/// Columns per thread of a scan, and tokens per block of the features kernel.
const SCAN_COLUMNS: usize = 2;
const FEATURE_TOKENS: usize = 8;
/// The most threads in a block of a step; in a block of a scan, the most threads that have columns, and the others.
const STEP_THREADS: usize = 256;
const SCAN_THREADS: usize = 128;
const SCAN_HELPERS: usize = 128;

/// The recurrence of one layer's heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recurrence {
    pub(super) heads: usize,
    pub(super) d: usize,
    pub(super) features: usize,
    pub(super) proj_dim: usize,
    /// The feature map; as `Map` in model/cuda/recurrence.cuh.
    pub(super) map: usize,
    /// The floor of the denominator, as a share of c.
    pub(super) eps: f32,
    /// The layer's index, on which the rounding of a bf16 state depends.
    pub(super) layer: usize,
}

/// The addresses of the recurrence's inputs and outputs on the device; 0 for those that the layer lacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) qkv: u64,     // (rows, time, 3 heads d)
    pub(super) gate: u64,    // logits (rows, time, heads)
    pub(super) w: u64,       // (heads, d, D)
    pub(super) phi: u64,     // scratch (rows time, heads, 2, F)
    pub(super) sums: u64,    // scratch (heads, F + 1)
    pub(super) clamped: u64, // a 64-bit counter
    pub(super) out: Rows,    // (rows, time, out.stride) as `kind`
    pub(super) kind: Kind,
}

impl Recurrence {
    pub(super) fn new(config: &DecoderConfig, layer: usize) -> Self {
        Self {
            heads: config.num_attention_heads,
            d: config.head_dim,
            features: config.features(),
            proj_dim: config.proj_dim,
            map: match config.feature_map {
                FeatureMap::Gaussian | FeatureMap::Favor => 0,
                FeatureMap::ArcCosine => 1,
                FeatureMap::Elu => 2,
            },
            eps: config.denominator_floor() as f32,
            layer,
        }
    }

    /// Updates the states of the step's slots and reads them out. A step of several tokens has one slot.
    pub(super) fn forward(&self, device: &CudaDevice, step: Step, layer: Layer, at: Addresses) -> Result<()> {
        let (rows, time, one) = (step.rows, step.time, step.time == 1);
        // With many rows, a separate kernel computes the features and reads a head's W once for eight rows.
        let fused = one && rows < FEATURE_TOKENS;
        let part = rows_of_a_thread(self.features);
        let columns = if part == 16 { 4 } else { 8 };
        let (columns, most) = if one { (columns, STEP_THREADS) } else { (SCAN_COLUMNS, SCAN_THREADS) };
        let wanted = (self.d.div_ceil(columns) * 16).next_multiple_of(32);
        let threads = wanted.min(most);
        let blocks = wanted.div_ceil(threads);
        // If blocks share a head, z and c are written to scratch, and copied back when all blocks have read them.
        let beside = if blocks > 1 { at.sums } else { 0 };
        let of = Fields::default()
            .pointers(&[
                layer.s,
                layer.sums,
                beside,
                at.qkv,
                at.gate,
                at.w,
                at.phi,
                step.slots,
                step.positions,
                at.out.at,
            ])
            .pointers(&[at.clamped, layer.s_stride as u64, layer.sums_stride as u64])
            .numbers(&[self.heads, self.d, self.features, self.proj_dim, time, self.map, self.layer])
            .numbers(&[at.kind as usize, at.out.stride])
            .real(self.eps);
        if !fused {
            let args = [Arg::Struct(&of), Arg::Number((rows * time) as u32)];
            let grid = [self.heads, (rows * time).div_ceil(FEATURE_TOKENS), 1];
            launch(device, "features", grid, 128, 2 * FEATURE_TOKENS * self.d * size_of::<f32>(), &args)?;
        }
        let state = if layer.state == StateType::F32 { "f32" } else { "bf16" };
        let kernel = format!(
            "recurrence_{state}_{part}_{}",
            match (one, fused) {
                (true, true) => "step",
                (true, false) => "row",
                _ => "scan",
            }
        );
        let (threads, numbers) = match (one, fused) {
            (true, true) => (threads, 2 * (self.d + self.features)),
            (true, false) => (threads, 0),
            _ => (threads + SCAN_HELPERS, scan_numbers(part)),
        };
        let shared = numbers * size_of::<f32>();
        launch(device, &kernel, [self.heads, rows, blocks], threads, shared, &[Arg::Struct(&of)])?;
        if blocks > 1 {
            // Only a scan has several blocks per head.
            let Some(slot) = step.one_slot else {
                return Err(CudaError::Unsupported("a scan must have one slot".into()));
            };
            let sums = layer.sums + (slot * layer.sums_stride * size_of::<f32>()) as u64;
            device.0.copy(sums, at.sums, self.heads * (self.features + 1) * size_of::<f32>())?;
        }
        Ok(())
    }
}

/// Returns the numbers of shared memory in a block of a scan: `Stages` in model/cuda/scan.cuh.
fn scan_numbers(part: usize) -> usize {
    let tokens = match part {
        16 => 4,
        8 => 16,
        _ => 8,
    };
    let columns = SCAN_THREADS / 16 * SCAN_COLUMNS;
    // Two stages hold q, `take k`, z, v, a part of each readout from sixteen threads, c and a scale; three hold a gate.
    let of_a_token = 2 * (3 * 16 * part + columns + 16 * columns + 2) + 3 * 4;
    tokens * of_a_token
}

/// Applies the short convolution and SiLU to each row's tokens: x -> y, both (rows, time, channels); updates the slots'
/// last inputs.
///
/// weight: (taps, channels), and taps; tails: the address of slot 0's last inputs, and the numbers from slot to slot.
pub(super) fn conv_silu(
    device: &CudaDevice,
    step: Step,
    (weight, taps): (u64, usize),
    (x, y): (u64, u64),
    channels: usize,
    (tails, stride): (u64, usize),
) -> Result<()> {
    let args = [
        Arg::Pointer(x),
        Arg::Pointer(weight),
        Arg::Pointer(tails),
        Arg::Pointer(step.slots),
        Arg::Pointer(y),
        Arg::Number(channels as u32),
        Arg::Number(taps as u32),
        Arg::Number(step.time as u32),
        Arg::Pointer(stride as u64),
    ];
    launch(device, "conv_silu", [channels.div_ceil(256), step.rows, 1], 256, 0, &args)
}

/// Rotates q and k of every token. qkv: (tokens, 3 heads d); angles: (tokens, d / 2, 2)
pub(super) fn rotate(
    device: &CudaDevice,
    tokens: usize,
    qkv: u64,
    angles: u64,
    (heads, d): (usize, usize),
) -> Result<()> {
    let args = [Arg::Pointer(qkv), Arg::Pointer(angles), Arg::Number(heads as u32), Arg::Number(d as u32)];
    launch(device, "rotate", [tokens, 1, 1], 256, 0, &args)
}
