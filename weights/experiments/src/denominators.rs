//! The share of clamped denominators by sigma and number of random vectors, which shows why training bounds sigma.
//!
//! Queries and keys are random unit vectors with Gaussian features. The recurrence of z and c is the model's:
//! `z <- g z + (1 - g) phi(k)`, and likewise for c; a denominator `phi(q) . z <= eps c` is clamped. From about sigma 2,
//! the kernel itself, `exp(-sigma^2)` for orthogonal vectors, is as small as the floor.

use crate::bidirectional::{Features, Generator, Inputs, Map, features};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

/// The counts for one sigma, one number of random vectors and one gate.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// Scale of the random vectors.
    pub sigma: f64,
    /// Number of random vectors (D).
    pub proj_dim: usize,
    /// Tokens after which the gate has halved the state; `None` without a gate.
    pub gate_half_life: Option<f64>,
    /// Share of denominators at or below the floor.
    pub clamped: f64,
    /// Share at or below zero, if counted. The kernel is positive, so these are estimation errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_positive: Option<f64>,
}

/// What to count.
#[derive(Clone, Debug)]
pub struct Options {
    /// Values of sigma.
    pub sigmas: Vec<f64>,
    /// Values of D, each at least 1.
    pub proj_dims: Vec<usize>,
    /// Half-lives of the gates; `None` is no gate.
    pub half_lives: Vec<Option<f64>>,
    /// Number of sequences, each with its own random vectors.
    pub heads: usize,
    /// Tokens per sequence. Every token has one denominator, which is counted.
    pub tokens: usize,
    /// Size of a query or key.
    pub head_dim: usize,
    /// The floor as a share of c.
    pub eps: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sigmas: vec![0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0],
            proj_dims: vec![16, 32, 64, 128, 256],
            half_lives: vec![None, Some(64.0)],
            heads: 32,
            tokens: 512,
            head_dim: 64,
            eps: 0.02,
        }
    }
}

/// Counts clamped denominators. Calls `tick` after each pair of D and sigma.
///
/// # Errors
/// If a computation fails.
pub fn count(options: &Options, tick: &mut dyn FnMut()) -> candle_core::Result<Vec<Row>> {
    let Options { heads, tokens, head_dim, .. } = *options;
    let like = Tensor::zeros(1, DType::F64, &Device::Cpu)?;
    let mut generator = Generator::new(1);
    let x = |generator: &mut Generator| generator.normals(&[1, heads, tokens, head_dim], &like);
    let (q, k) = (x(&mut generator)?, x(&mut generator)?);
    let inputs = Inputs::new(&q, &k, &k)?;
    let mut rows = Vec::new();
    for &proj_dim in &options.proj_dims {
        let w = generator.normals(&[heads, proj_dim, head_dim], &like)?;
        for &sigma in &options.sigmas {
            // The map normalizes q and k.
            let Features { phi_q, phi_k, .. } = features(Map::Gaussian, &inputs, Some(&(&w * sigma)?))?;
            let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f64>();
            let (phi_q, phi_k) = (flat(&phi_q)?, flat(&phi_k)?);
            for &gate_half_life in &options.half_lives {
                let per_head = tokens * 2 * proj_dim;
                let heads_of = phi_q.chunks_exact(per_head).zip(phi_k.chunks_exact(per_head));
                let counts = heads_of.map(|(q, k)| counts(q, k, 2 * proj_dim, gate_half_life, options.eps));
                let (low, negative) = counts.fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
                let share = |count: usize| count as f64 / (heads * tokens) as f64;
                let (clamped, not_positive) = (share(low), Some(share(negative)));
                rows.push(Row { sigma, proj_dim, gate_half_life, clamped, not_positive });
            }
            tick();
        }
    }
    Ok(rows)
}

/// Counts the denominators of one head at or below the floor, and at or below zero. phi_q, phi_k: (tokens, width)
fn counts(phi_q: &[f64], phi_k: &[f64], width: usize, half_life: Option<f64>, eps: f64) -> (usize, usize) {
    let (keep, take) = half_life.map_or((1.0, 1.0), |life| {
        let gate = 0.5f64.powf(1.0 / life);
        (gate, 1.0 - gate)
    });
    let (mut z, mut c, mut low, mut negative) = (vec![0.0; width], 0.0, 0, 0);
    for (q, k) in phi_q.chunks_exact(width).zip(phi_k.chunks_exact(width)) {
        z.iter_mut().zip(k).for_each(|(z, k)| *z = keep * *z + take * k);
        c = keep * c + take;
        let denominator: f64 = q.iter().zip(&z).map(|(q, z)| q * z).sum();
        low += usize::from(denominator <= eps * c);
        negative += usize::from(denominator <= 0.0);
    }
    (low, negative)
}
