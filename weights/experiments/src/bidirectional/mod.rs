//! Attention of every query to every key, as self-attention or cross attention: softmax, random feature kernels, and
//! the estimators that sample where a query looks (RA and LARA).
//!
//! [`Attention`] is the interface; its random numbers are an argument ([`Draws`]), from a seeded [`Generator`] or from
//! the caller. [`naive`] has the references. `features`, `randomized` and this file have the batched forms: chains of
//! tensors of any float type, differentiable, and linear in the number of tokens except for softmax and RA. Nothing
//! here depends on layers, states or checkpoints.
//!
//! Sources: Peng et al. 2021 (RFA), Choromanski et al. 2021 (FAVOR+), Katharopoulos et al. 2020 (elu + 1), Zheng, Wang
//! and Kong 2022 (RA and LARA, arXiv 2204.04667).

mod draws;
mod features;
mod inputs;
pub mod naive;
mod randomized;

pub use draws::{Draws, Generator};
pub use features::{Features, Map, features};
pub use inputs::Inputs;
pub use randomized::{Landmarks, Weighting, crossing, estimate, lara, ra, segment_means};

use candle_core::{Result, Tensor, bail};

use inputs::softmax;

/// How queries attend to keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attention {
    /// `softmax(q k / sqrt(d)) v`, which the others estimate or replace. Quadratic.
    Softmax,
    /// `phi(q) . (sum phi(k) v) / (phi(q) . sum phi(k))`. Linear.
    Kernel {
        /// The feature map.
        map: Map,
        /// Number of random vectors (D); 0 for maps without any.
        samples: usize,
    },
    /// Randomized attention: unbiased, quadratic.
    Ra {
        /// Number of samples per query; their estimates are averaged.
        samples: usize,
    },
    /// Linear randomized attention.
    Lara {
        /// Number of landmarks (C) with one sample each; at most the number of queries, and of keys.
        landmarks: usize,
        /// How a query weights the samples of all landmarks.
        weighting: Weighting,
        /// Where the landmarks are.
        at: Landmarks,
        /// Whether a sample is drawn around its landmark. Otherwise it is the landmark itself, which is the mean of its
        /// proposal, and nothing is random, as in PyTorch's evaluation.
        noise: bool,
    },
}

/// The floor of denominators as a share of the keys' weight, because signed estimates can be zero or negative.
pub const DENOMINATOR_EPS: f64 = 0.02;

impl Attention {
    /// The names that [`Attention::named`] accepts.
    pub const NAMES: [&'static str; 13] = [
        "softmax",
        "rfa",
        "rfa-softmax",
        "rfa-arccos",
        "elu",
        "favor",
        "ra",
        "lara",
        "lara-balance",
        "lara-crossed",
        "lara-means",
        "lara-means-tokens",
        "lara-means-crossed",
    ];

    /// Returns an attention by name. `samples` is the number of random vectors, of RA's samples, or of LARA's
    /// landmarks; softmax and elu ignore it.
    ///
    /// `rfa` has RFA's kernel, with unit-length q and k; `rfa-softmax` estimates the kernel of softmax attention with
    /// the same sines and cosines. `lara` has query-specific weights. With `-means`, LARA's samples are the means of
    /// their proposals; `-tokens` and `-crossed` are other [`Landmarks`].
    pub fn named(name: &str, samples: usize) -> Option<Self> {
        let kernel = |map| Self::Kernel { map, samples };
        let lara = |weighting, at, noise| Self::Lara { landmarks: samples, weighting, at, noise };
        let specific = |at, noise| lara(Weighting::QuerySpecific, at, noise);
        Some(match name {
            "softmax" => Self::Softmax,
            "rfa" => kernel(Map::Gaussian),
            "rfa-softmax" => kernel(Map::Trigonometric),
            "rfa-arccos" => kernel(Map::ArcCosine),
            "elu" => kernel(Map::Elu),
            "favor" => kernel(Map::Favor),
            "ra" => Self::Ra { samples },
            "lara" => specific(Landmarks::Segments, true),
            "lara-balance" => lara(Weighting::Balance, Landmarks::Segments, true),
            "lara-crossed" => specific(Landmarks::Crossed, true),
            "lara-means" => specific(Landmarks::Segments, false),
            "lara-means-tokens" => specific(Landmarks::Tokens, false),
            "lara-means-crossed" => specific(Landmarks::Crossed, false),
            _ => return None,
        })
    }

    /// Whether [`Attention::draw`] draws anything.
    pub fn is_random(&self) -> bool {
        !matches!(self, Self::Softmax | Self::Kernel { map: Map::Elu, .. } | Self::Lara { noise: false, .. })
    }

    /// Draws the random numbers that [`Attention::forward`] needs for these inputs.
    ///
    /// # Errors
    /// If the device fails.
    pub fn draw(&self, inputs: &Inputs, generator: &mut Generator) -> Result<Draws> {
        let (batch, heads, queries, d) = inputs.q().dims4()?;
        let mut normals = |shape: &[usize]| generator.normals(shape, inputs.q());
        Ok(match *self {
            Self::Softmax | Self::Kernel { map: Map::Elu, .. } => Draws::None,
            Self::Kernel { map: Map::Favor, samples } => {
                Draws::Matrices(generator.orthogonal((heads, samples, d), inputs.q())?)
            }
            Self::Kernel { samples, .. } => Draws::Matrices(normals(&[heads, samples, d])?),
            Self::Lara { landmarks, noise: true, .. } => Draws::Landmarks(normals(&[batch, heads, landmarks, d])?),
            Self::Lara { landmarks, noise: false, .. } => {
                Draws::Landmarks(Tensor::zeros((batch, heads, landmarks, d), inputs.q().dtype(), inputs.q().device())?)
            }
            Self::Ra { samples } => Draws::Queries {
                normals: normals(&[batch, heads, samples, queries, d])?,
                uniforms: generator.uniforms(&[batch, heads, samples, queries], inputs.q())?,
            },
        })
    }

    /// Computes the attention -> (batch, heads, queries, width)
    ///
    /// # Errors
    /// If the draws are for another attention or other shapes, or if there are more landmarks than tokens.
    pub fn forward(&self, inputs: &Inputs, draws: &Draws) -> Result<Tensor> {
        match (self, draws) {
            (Self::Softmax, Draws::None) => softmax_attention(inputs),
            (Self::Kernel { map: Map::Elu, .. }, Draws::None) => {
                kernel(&features(Map::Elu, inputs, None)?, inputs.v(), DENOMINATOR_EPS)
            }
            (Self::Kernel { map, samples }, Draws::Matrices(w)) if w.dim(1)? == *samples => {
                kernel(&features(*map, inputs, Some(w))?, inputs.v(), DENOMINATOR_EPS)
            }
            (Self::Ra { samples }, Draws::Queries { normals, uniforms }) if normals.dim(2)? == *samples => {
                ra(inputs, uniforms, normals)
            }
            (Self::Lara { landmarks, weighting, at, .. }, Draws::Landmarks(normals))
                if normals.dim(2)? == *landmarks =>
            {
                lara(inputs, normals, *weighting, *at)
            }
            _ => bail!("attention: {self:?} cannot use these draws: {draws:?}"),
        }
    }
}

/// `softmax(q k / sqrt(d)) v`.
fn softmax_attention(inputs: &Inputs) -> Result<Tensor> {
    let scaled = inputs.scaled()?;
    softmax(&scaled.q().matmul(&scaled.k().t()?.contiguous()?)?)?.matmul(inputs.v())
}

/// `h_n = sum_m (phi_q_n . phi_k_m) v_m / max(sum_m phi_q_n . phi_k_m, floor)`, summing over keys first.
///
/// The floor is `eps` of the keys' weight for maps with negative products, and the smallest positive normal number for
/// others.
///
/// v: (batch, heads, keys, width) -> (batch, heads, queries, width)
///
/// # Errors
/// If the shapes do not fit.
pub fn kernel(features: &Features, v: &Tensor, eps: f64) -> Result<Tensor> {
    let s = features.phi_k.t()?.contiguous()?.matmul(v)?; // (batch, heads, features, width)
    let z = features.phi_k.sum_keepdim(2)?.t()?.contiguous()?; // (batch, heads, features, 1)
    let denominator = features.phi_q.matmul(&z)?.maximum(f64::from(f32::MIN_POSITIVE))?;
    let denominator = match &features.weight {
        Some(weight) => denominator.broadcast_maximum(&(weight * eps)?)?,
        None => denominator,
    };
    features.phi_q.matmul(&s)?.broadcast_div(&denominator)
}
