//! Feature maps of whole sequences as chains of tensors: differentiable, and for any float type. The causal layers have
//! fused versions (`tidegate_model::feature_map`).

use candle_core::{D, Result, Tensor, bail};

use super::inputs::Inputs;

/// A feature map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// `sqrt(1/D) [sin(W u), cos(W u)]` of `u = x / (|x| + 1e-3)`: RFA's own kernel (Peng et al. 2021, section 3.1).
    Gaussian,
    /// `sqrt(1/D) ReLU(W u)`: the arc-cosine kernel of order 1 (Peng et al. 2021, section 3.1; Cho and Saul 2009).
    ArcCosine,
    /// `x + 1` above 0, else `exp(x)` (Katharopoulos et al. 2020, equation 7).
    Elu,
    /// `sqrt(1/D) exp(W y - |y|^2 / 2)` of `y = x d^(-1/4)`: positive estimates of softmax attention's kernel
    /// (Choromanski et al. 2021, lemma 1).
    Favor,
    /// `sqrt(1/D) exp(|y|^2 / 2) [sin(W y), cos(W y)]` of `y = x d^(-1/4)`: signed estimates of the same kernel
    /// (Peng et al. 2021, equation 4).
    Trigonometric,
}

/// Features of queries and keys, without factors that cancel in the quotient of a query.
#[derive(Clone, Debug)]
pub struct Features {
    /// (batch, heads, queries, F)
    pub phi_q: Tensor,
    /// (batch, heads, keys, F)
    pub phi_k: Tensor,
    /// For maps with negative products, the sum of the keys' weights, (batch, heads, 1, 1): the denominators' floor is
    /// a share of it.
    pub weight: Option<Tensor>,
}

/// Computes the features of all queries and keys.
///
/// w: (heads, D, d), multiplied by sigma; `None` for elu.
///
/// # Errors
/// If `w` is absent or has the wrong shape.
pub fn features(map: Map, inputs: &Inputs, w: Option<&Tensor>) -> Result<Features> {
    let (q, k) = (inputs.q(), inputs.k());
    let w = match (map, w) {
        (Map::Elu, _) => return Ok(Features { phi_q: elu(q)?, phi_k: elu(k)?, weight: None }),
        (_, Some(w)) => w,
        (_, None) => bail!("attention: the map {map:?} needs random matrices"),
    };
    let (_, heads, _, d) = q.dims4()?;
    let (w_heads, proj_dim, w_d) = w.dims3()?;
    if (w_heads, w_d) != (heads, d) || proj_dim == 0 {
        bail!("attention: random matrices of {heads} heads of {d} are needed, found {:?}", w.dims());
    }
    let w = w.t()?.contiguous()?.unsqueeze(0)?; // (1, heads, d, D)
    let project = |x: &Tensor| x.broadcast_matmul(&w);
    let scale = (1.0 / proj_dim as f64).sqrt();
    let waves = |u: &Tensor| Tensor::cat(&[u.sin()?, u.cos()?], D::Minus1)? * scale;
    // Each key has weight 1, except in the trigonometric map.
    let count = || Tensor::full(k.dim(2)? as f64, (1, 1, 1, 1), k.device())?.to_dtype(k.dtype());
    Ok(match map {
        Map::Gaussian => {
            let map = |x: &Tensor| waves(&project(&unit(x)?)?);
            Features { phi_q: map(q)?, phi_k: map(k)?, weight: Some(count()?) }
        }
        Map::ArcCosine => {
            let map = |x: &Tensor| project(&unit(x)?)?.relu()? * scale;
            Features { phi_q: map(q)?, phi_k: map(k)?, weight: None }
        }
        Map::Favor => {
            let scaled = inputs.scaled()?;
            let (in_q, in_k) = (project(scaled.q())?, project(scaled.k())?);
            // Maxima cancel: a query's own in its quotient, the keys' shared one in all quotients. A key's maximum is
            // taken over whole exponents, because the projections of a long key are far above them.
            let phi_q = in_q.broadcast_sub(&in_q.max_keepdim(D::Minus1)?.detach())?.exp()?;
            let in_k = in_k.broadcast_sub(&half_square(scaled.k())?)?;
            let most = in_k.max_keepdim(D::Minus1)?.max_keepdim(2)?.detach();
            let phi_k = in_k.broadcast_sub(&most)?.exp()?;
            Features { phi_q, phi_k, weight: None }
        }
        Map::Trigonometric => {
            let scaled = inputs.scaled()?;
            let half = half_square(scaled.k())?; // (batch, heads, keys, 1)
            let weight = half.broadcast_sub(&half.max_keepdim(2)?.detach())?.exp()?;
            Features {
                phi_q: waves(&project(scaled.q())?)?,
                phi_k: waves(&project(scaled.k())?)?.broadcast_mul(&weight)?,
                weight: Some(weight.sum_keepdim(2)?),
            }
        }
        Map::Elu => bail!("attention: elu is handled above"),
    })
}

/// `|x|^2 / 2`: (..., d) -> (..., 1)
pub(super) fn half_square(x: &Tensor) -> Result<Tensor> {
    x.sqr()?.sum_keepdim(D::Minus1)? * 0.5
}

/// Computes `x / (|x| + 1e-3)` with a finite gradient at zero.
fn unit(x: &Tensor) -> Result<Tensor> {
    let length = (x.sqr()?.sum_keepdim(D::Minus1)? + 1e-12)?.sqrt()?;
    x.broadcast_div(&(length + 1e-3)?)
}

/// `x + 1` above 0, else `exp(x)`, computed as ReLU(x) + exp(-ReLU(-x)), which overflows on neither side.
fn elu(x: &Tensor) -> Result<Tensor> {
    x.relu()? + x.neg()?.relu()?.neg()?.exp()?
}
