//! Random weights for benchmarks, at the scale of a trained model, so that activations neither grow nor vanish.

use super::error::LoadError;
use super::matrix::{Matrix, WeightType};
use crate::random::Normals;

/// Derives the seed for a tensor's name.
fn start(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Returns matrices (heads, rows, columns) with orthogonal rows for FAVOR+, determined by seed and name.
pub(super) fn orthogonal(seed: u64, name: &str, [heads, rows, columns]: [usize; 3]) -> Vec<f32> {
    let mut normals = Normals::new(start(seed, name));
    (0..heads).flat_map(|_| normals.orthogonal_rows(rows, columns)).map(|v| v as f32).collect()
}

/// Returns approximately normal numbers, determined by seed and name.
fn normals(seed: u64, name: &str, len: usize, scale: f32) -> Vec<f32> {
    let mut state = start(seed, name);
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    // A sum of three uniforms on [-1, 1) has variance 1.
    (0..len).map(|_| (uniform() + uniform() + uniform()) * scale).collect()
}

/// Returns values with the mean and scale of a trained tensor of this name and shape.
pub(super) fn numbers(seed: u64, name: &str, shape: &[usize]) -> Vec<f32> {
    let len = shape.iter().product();
    let fan_in = shape.last().copied().unwrap_or(1) as f32;
    let (mean, scale) = match name.rsplit_once('.').map_or(name, |(_, last)| last) {
        "random_matrices" => (0.0, 1.0),
        "sigma" | "D" => (1.0, 0.1),
        "bias" if name.ends_with("norm.bias") => (0.0, 0.1),
        // Decays with half-lives from one token to a few dozen.
        "bias" if name.ends_with("lora.2.bias") => (-2.0, 2.0),
        "bias" if name.contains(".mixer.") => (0.0, 0.1),
        // Half-lives from a few to a few hundred tokens.
        "bias" => (4.0, 1.0),
        // Mamba-2: time steps of a few hundredths, and decays with half-lives from a few to a few hundred steps.
        "A_log" => (1.4, 0.7),
        "dt_bias" => (-4.0, 1.0),
        _ if name.ends_with("norm.weight") || name.ends_with("norm_f.weight") => (1.0, 0.1),
        _ => (0.0, fan_in.sqrt().recip()),
    };
    normals(seed, name, len, scale).into_iter().map(|v| v + mean).collect()
}

/// Makes a matrix of type `kind`, or of f16 if its rows are not whole blocks.
pub(super) fn matrix(
    kind: WeightType,
    seed: u64,
    name: &str,
    rows: usize,
    columns: usize,
) -> Result<Matrix<'static>, LoadError> {
    super::convert::matrix(&numbers(seed, name, &[rows, columns]), kind, rows, columns)
}
