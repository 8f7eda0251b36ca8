//! Randomized attention and its linear form (Zheng, Wang and Kong 2022, arXiv 2204.04667), in log space.
//!
//! With q and k multiplied by d^(-1/4) and `xi(x, w) = exp(w . x - |x|^2 / 2)`, softmax attention is the mean of
//! `f(w) = sum_m xi(k_m, w) v_m / sum_m xi(k_m, w)` over `w ~ p_n(w)`. This is a mixture over keys of N(q_n + k_m, I),
//! weighted by the attention probabilities, so `p_n(w)` is proportional to `N(w; 0, I) xi(q_n, w) sum_m xi(k_m, w)`
//! (section 3 of the paper). RA samples from `p_n`, RFA with positive features from N(0, I), and LARA from normals
//! around landmarks; the last two divide by the sum of their importance weights.

use candle_core::{D, Result, Tensor, bail};

use super::features::half_square;
use super::inputs::{Inputs, softmax};

/// How LARA weights the sample of a landmark for a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weighting {
    /// By the balance heuristic (Veach and Guibas 1995): the share of the sample's density that comes from its own landmark.
    Balance,
    /// By the balance heuristic plus the query's preference among landmarks, `softmax_c(q_n . q~_c)` minus its mean,
    /// which approximates the minimum-variance weights (section 4 of the paper). The authors' code takes this softmax
    /// over queries instead: the correction then vanishes as their number grows, and a query's output depends on the
    /// others.
    QuerySpecific,
}

/// Where LARA places its landmarks `mu_c = q~_c + k~_c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landmarks {
    /// At the means of segments: the c-th segment of queries with the c-th segment of keys, as in the paper.
    Segments,
    /// At the middle token of each segment, instead of the mean.
    Tokens,
    /// At every pair of a mean of a query segment and a mean of a key segment, in [`crossing`] segments: `p_n` is a
    /// mixture around `q_n + k_m` for all keys, near or far.
    Crossed,
}

/// The minimum query-specific weight: the correction can be negative, and the logarithm needs a positive number.
const LEAST_WEIGHT: f64 = 1e-8;

/// RA: for each query, `k' ~ softmax(q . k)` and `w ~ N(q + k', I)`; `f(w)` is averaged over the samples. Unbiased.
///
/// uniforms: (batch, heads, samples, queries) in [0, 1), which choose k' by its cumulative probabilities; normals:
/// (batch, heads, samples, queries, d) -> (batch, heads, queries, width)
///
/// # Errors
/// If the shapes do not fit.
pub fn ra(inputs: &Inputs, uniforms: &Tensor, normals: &Tensor) -> Result<Tensor> {
    let Inputs { q, k, v } = inputs.scaled()?;
    let (batch, heads, queries, d) = q.dims4()?;
    let samples = normals.dim(2)?;
    let want = [batch, heads, samples, queries, d];
    if samples == 0 || normals.dims() != want || uniforms.dims() != &want[..4] {
        bail!(
            "ra: normals must have shape {want:?} and uniforms {:?}, found {:?} and {:?}",
            &want[..4],
            normals.dims(),
            uniforms.dims()
        );
    }
    let chosen = choose(&softmax(&q.matmul(&k.t()?.contiguous()?)?)?, uniforms)?;
    let half = half_square(&k)?.t()?; // (batch, heads, 1, keys)
    let kt = k.t()?.contiguous()?;
    let mut sum: Option<Tensor> = None;
    for sample in 0..samples {
        let places = chosen.narrow(2, sample, 1)?.squeeze(2)?.unsqueeze(3)?.broadcast_as(q.dims())?.contiguous()?;
        let w = ((&q + k.gather(&places, 2)?)? + normals.narrow(2, sample, 1)?.squeeze(2)?)?;
        let f = softmax(&w.matmul(&kt)?.broadcast_sub(&half)?)?.matmul(&v)?;
        sum = Some(sum.map_or(Ok(f.clone()), |sum| sum + f)?);
    }
    sum.map_or_else(|| bail!("ra: no samples"), |sum| sum / samples as f64)
}

/// Returns the first key whose cumulative probability exceeds the uniform number, or the last key if rounding leaves
/// none.
///
/// probabilities: (batch, heads, queries, keys); uniforms: (batch, heads, samples, queries) -> key indices u32, in the
/// shape of uniforms
fn choose(probabilities: &Tensor, uniforms: &Tensor) -> Result<Tensor> {
    let (_, _, queries, keys) = probabilities.dims4()?;
    let samples = uniforms.dim(2)?;
    let flat = |x: &Tensor| x.to_dtype(candle_core::DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (mut cumulative, uniforms_flat) = (flat(probabilities)?, flat(uniforms)?);
    for row in cumulative.chunks_exact_mut(keys) {
        for i in 1..keys {
            row[i] += row[i - 1];
        }
    }
    let rows = uniforms_flat.chunks_exact(samples * queries).zip(cumulative.chunks_exact(queries * keys));
    let place = |(at, u): (usize, &f64), cumulative: &[f64]| {
        let row = &cumulative[at % queries * keys..][..keys];
        row.partition_point(|sum| sum <= u).min(keys - 1) as u32
    };
    let places: Vec<u32> =
        rows.flat_map(|(us, cumulative)| us.iter().enumerate().map(move |u| place(u, cumulative))).collect();
    Tensor::from_vec(places, uniforms.dims(), probabilities.device())
}

/// LARA: `C` landmarks `mu_c = q~_c + k~_c` (see [`Landmarks`]), each with one sample `w_c ~ N(mu_c, I)`, or `mu_c`
/// itself if the normals are zeros. All queries use all samples, weighted by `alpha_nc N(w_c; 0, I) / N(w_c; mu_c, I)`
/// in [`estimate`].
///
/// normals: (batch, heads, C, d), C at most the number of queries and of keys -> (batch, heads, queries, width)
///
/// # Errors
/// If the shapes do not fit, or there are more landmarks than tokens.
pub fn lara(inputs: &Inputs, normals: &Tensor, weighting: Weighting, at: Landmarks) -> Result<Tensor> {
    let scaled = inputs.scaled()?;
    let (batch, heads, _, d) = scaled.q.dims4()?;
    let landmarks = normals.dim(2)?;
    if normals.dims() != [batch, heads, landmarks, d] {
        bail!("lara: normals of {:?} are needed, found {:?}", [batch, heads, landmarks, d], normals.dims());
    }
    let (of_queries, of_keys) = landmarks_of(&scaled, landmarks, at)?; // (batch, heads, C, d)
    let mu = (&of_queries + of_keys)?;
    let w = (&mu + normals)?;
    // log N(w_c; mu_c', I) / N(w_c; 0, I): (batch, heads, C, C'); then summed over landmarks: (batch, heads, 1, C)
    let densities = w.matmul(&mu.t()?.contiguous()?)?.broadcast_sub(&half_square(&mu)?.t()?)?;
    let together = densities.log_sum_exp(D::Minus1)?.unsqueeze(2)?;
    let log_weights = match weighting {
        // alpha_c / density_c is one over the sum of all densities.
        Weighting::Balance => together.neg()?,
        Weighting::QuerySpecific => {
            let own = (&densities * diagonal(&densities)?)?.sum(D::Minus1)?.unsqueeze(2)?; // (batch, heads, 1, C)
            let balance = (&own - together)?.exp()?;
            let near = softmax(&scaled.q.matmul(&of_queries.t()?.contiguous()?)?)?; // (batch, heads, queries, C)
            let near = (near - 1.0 / landmarks as f64)?;
            near.broadcast_add(&balance)?.maximum(LEAST_WEIGHT)?.log()?.broadcast_sub(&own)?
        }
    };
    estimate_scaled(&scaled, &w, Some(&log_weights))
}

/// `q~_c` and `k~_c`: (batch, heads, count, d) each.
fn landmarks_of(scaled: &Inputs, count: usize, at: Landmarks) -> Result<(Tensor, Tensor)> {
    let Inputs { q, k, .. } = scaled;
    Ok(match at {
        Landmarks::Segments => (segment_means(q, count)?, segment_means(k, count)?),
        Landmarks::Tokens => (segment_middles(q, count)?, segment_middles(k, count)?),
        Landmarks::Crossed => {
            let (rows, columns) = crossing(count);
            let (batch, heads, _, d) = q.dims4()?;
            let pairs =
                |x: &Tensor| x.broadcast_as((batch, heads, rows, columns, d))?.reshape((batch, heads, count, d));
            (pairs(&segment_means(q, rows)?.unsqueeze(3)?)?, pairs(&segment_means(k, columns)?.unsqueeze(2)?)?)
        }
    })
}

/// Returns the numbers of query and key segments whose pairs are `count` crossed landmarks. They are as equal as its
/// divisors allow, with at least as many key segments.
pub fn crossing(count: usize) -> (usize, usize) {
    let rows = (1..=count.isqrt()).rev().find(|&rows| count.is_multiple_of(rows)).unwrap_or(1);
    (rows, count / rows)
}

/// Ones on the diagonal: (1, 1, C, C), in the type of `like` (.., C, C).
fn diagonal(like: &Tensor) -> Result<Tensor> {
    Tensor::eye(like.dim(D::Minus1)?, like.dtype(), like.device())?.broadcast_as(like.dims())
}

/// The estimate of RFA and LARA: samples `w`, shared by all queries, weighted by
/// `weight_nc xi(q_n, w_c) sum_m xi(k_m, w_c)`, with the weights divided by their sum. Constant weights and standard
/// normal samples give RFA with positive features; a weight of 1 for a query's own sample of `p_n` and 0 for all others
/// gives RA.
///
/// w: (batch, heads, C, d); log_weights: (batch, heads, queries or 1, C), or `None` for constant weights
/// -> (batch, heads, queries, width)
///
/// # Errors
/// If the shapes do not fit.
pub fn estimate(inputs: &Inputs, w: &Tensor, log_weights: Option<&Tensor>) -> Result<Tensor> {
    estimate_scaled(&inputs.scaled()?, w, log_weights)
}

fn estimate_scaled(scaled: &Inputs, w: &Tensor, log_weights: Option<&Tensor>) -> Result<Tensor> {
    let Inputs { q, k, v } = scaled;
    let w = w.contiguous()?;
    // log xi(k_m, w_c): (batch, heads, C, keys)
    let of_keys = w.matmul(&k.t()?.contiguous()?)?.broadcast_sub(&half_square(k)?.t()?)?;
    let f = softmax(&of_keys)?.matmul(v)?; // f(w_c): (batch, heads, C, width)
    let of_keys = of_keys.log_sum_exp(D::Minus1)?.unsqueeze(2)?; // (batch, heads, 1, C)
    // |q|^2 / 2 is the same for all of a query's samples and cancels.
    let mut logs = q.matmul(&w.t()?.contiguous()?)?.broadcast_add(&of_keys)?; // (batch, heads, queries, C)
    if let Some(weights) = log_weights {
        logs = logs.broadcast_add(weights)?;
    }
    softmax(&logs)?.matmul(&f)
}

/// The means of `count` nearly equal segments of the tokens. Token i is in segment `i count / tokens`, rounded down.
///
/// x: (batch, heads, tokens, d) -> (batch, heads, count, d)
///
/// # Errors
/// If there are no segments, or more than tokens.
pub fn segment_means(x: &Tensor, count: usize) -> Result<Tensor> {
    let tokens = x.dim(2)?;
    let mean = |(begin, end): (usize, usize)| x.narrow(2, begin, end - begin)?.mean_keepdim(2);
    let means: Vec<Tensor> = segments(tokens, count)?.into_iter().map(mean).collect::<Result<_>>()?;
    Tensor::cat(&means, 2)
}

/// The middle tokens of the segments of [`segment_means`]; the later one of two.
fn segment_middles(x: &Tensor, count: usize) -> Result<Tensor> {
    let middle = |(begin, end): (usize, usize)| x.narrow(2, usize::midpoint(begin, end), 1);
    let middles: Vec<Tensor> = segments(x.dim(2)?, count)?.into_iter().map(middle).collect::<Result<_>>()?;
    Tensor::cat(&middles, 2)
}

/// The first token of each segment, and the token after its last.
fn segments(tokens: usize, count: usize) -> Result<Vec<(usize, usize)>> {
    if count == 0 || count > tokens {
        bail!("landmarks: must be 1 to {tokens} segments, found {count}");
    }
    let begin = |c: usize| (c * tokens).div_ceil(count);
    Ok((0..count).map(|c| (begin(c), begin(c + 1))).collect())
}
