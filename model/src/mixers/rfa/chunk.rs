//! The recurrence over many tokens as matrix products, one chunk at a time; for evaluation.
//!
//! Inside a chunk, with `b = cumsum(log g)` and `lam = log (1-g)`:
//! `M_ij = exp(b_i - b_j + lam_j)` for j <= i, else 0; `O = ((Phi_q Phi_k^T) . M) V+ + exp(b_i) Phi_q S`;
//! `S <- exp(b_C) S + (Phi_k . exp(b_C - b_j + lam_j))^T V+`, where V+ is V with a column of ones and S has z as
//! its last column. `exp(b_i - b_j)` is never two exponentials: apart they overflow.
//!
//! For FAVOR+, the features of key j are relative to its largest feature, whose logarithm is m_j, and the sums that
//! token i reads are relative to the largest so far, n_i. So in the sums, but not in c, M_ij has the factor
//! `exp(m_j - n_i)` and `exp(b_i)` the factor `exp(n_0 - n_i)`.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};

use crate::error::{ModelError, Result};
use crate::feature_map::Keys;
use crate::kernels::{Isa, decay};

/// Number of tokens that are computed as one block.
pub const CHUNK: usize = 64;

/// Features, values and gates of some tokens.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// (batch, heads, time, F)
    pub phi_q: Tensor,
    /// The features of keys and their maxima: (batch, heads, time, F) and (batch, heads, time)
    pub keys: Keys,
    /// (batch, heads, time, d)
    pub v: Tensor,
    /// Gate logits (batch, heads, time), or `None` for RFA without a gate.
    pub gate: Option<Tensor>,
}

/// The state carried from chunk to chunk.
#[derive(Clone, Debug)]
pub struct Carry {
    /// S with z as its last column: (batch, heads, F, d + 1)
    pub s: Tensor,
    /// (batch, heads, 1)
    pub c: Tensor,
    /// The largest maximum of the keys so far, which S is relative to; arbitrary while c is 0: (batch, heads, 1).
    /// `None` for features without maxima.
    pub maximum: Option<Tensor>,
}

/// The outputs of all tokens.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// (batch, heads, time, d)
    pub h: Tensor,
    /// `phi_q . z` before the clamp: (batch, heads, time, 1)
    pub denominator: Tensor,
    /// `eps c`, or the smallest normal number if that is larger, which the denominator is clamped to from below:
    /// (batch, heads, time, 1)
    pub floor: Tensor,
}

/// Computes all tokens in chunks of at most `chunk`, and advances `carry`.
///
/// # Errors
/// When the shapes do not fit, there are no tokens, or `chunk` is 0.
pub fn forward(inputs: &Inputs, carry: &mut Carry, eps: f64, chunk: usize) -> Result<Outputs> {
    let (batch, heads, time, _) = inputs.phi_q.dims4()?;
    if time == 0 || chunk == 0 {
        return Err(ModelError::shape("chunked recurrence", "tokens and chunk", "at least 1", (time, chunk)));
    }
    let ones = Tensor::ones((batch, heads, time, 1), inputs.v.dtype(), inputs.v.device())?;
    let v_plus = Tensor::cat(&[&inputs.v, &ones], 3)?; // (batch, heads, time, d + 1)
    let mut parts = Vec::with_capacity(time.div_ceil(chunk));
    for at in (0..time).step_by(chunk) {
        let len = chunk.min(time - at);
        let rows = |x: &Tensor| x.narrow(2, at, len)?.contiguous();
        let decays = match &inputs.gate {
            Some(logits) => Decays::of(&rows(logits)?)?,
            None => Decays::none(batch, heads, len, inputs.v.device())?,
        };
        let raised = match (&inputs.keys.maxima, &mut carry.maximum) {
            (Some(maxima), Some(maximum)) => Some(decays.raised(&rows(maxima)?, &carry.c, maximum)?),
            (None, None) => None,
            (keys, carry) => {
                let found = (keys.is_some(), carry.is_some());
                return Err(ModelError::shape("chunked recurrence", "maxima", "those of keys and carry", found));
            }
        };
        let (phi_q, phi_k) = (rows(&inputs.phi_q)?, rows(&inputs.keys.phi)?);
        let chunk = Chunk { phi_q, phi_k, v_plus: rows(&v_plus)?, decays, raised };
        parts.push(chunk.forward(carry, eps)?);
    }
    let cat = |pick: fn(&Outputs) -> &Tensor| match parts.as_slice() {
        [one] => Ok(pick(one).clone()),
        many => Tensor::cat(&many.iter().map(pick).collect::<Vec<_>>(), 2),
    };
    Ok(Outputs { h: cat(|o| &o.h)?, denominator: cat(|o| &o.denominator)?, floor: cat(|o| &o.floor)? })
}

/// The weights that the gates of a chunk of C tokens give to the earlier state and to the chunk's tokens.
struct Decays {
    m: Tensor,     // M: (batch, heads, C, C)
    carry: Tensor, // exp(b_i), the weight of the state before the chunk: (batch, heads, C, 1)
    tail: Tensor,  // exp(b_C - b_j + lam_j), the weight of each token at the end: (batch, heads, C, 1)
}

impl Decays {
    /// logits: (batch, heads, C)
    fn of(logits: &Tensor) -> Result<Self> {
        let len = logits.dim(2)?;
        let all = logits.apply_op1_no_bwd(&DecayOp)?; // (batch, heads, C + 2, C)
        let column = |i: usize| all.narrow(2, len + i, 1)?.t()?.contiguous();
        Ok(Self { m: all.narrow(2, 0, len)?.contiguous()?, carry: column(0)?, tail: column(1)? })
    }

    /// Without a gate, everything is kept and every token has weight 1.
    fn none(batch: usize, heads: usize, len: usize, device: &Device) -> Result<Self> {
        let past = Tensor::tril2(len, DType::F32, device)?;
        let ones = Tensor::ones((batch, heads, len, 1), DType::F32, device)?;
        Ok(Self { m: past.broadcast_as((batch, heads, len, len))?.contiguous()?, carry: ones.clone(), tail: ones })
    }
}

impl Decays {
    /// The decays for S and z, whose maximum rises within the chunk. maxima: those of the keys (batch, heads, C); c:
    /// its value before the chunk (batch, heads, 1); maximum: the one so far (batch, heads, 1), which is raised.
    fn raised(&self, maxima: &Tensor, c: &Tensor, maximum: &mut Tensor) -> Result<Self> {
        let numbers = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (keys, c, mut most) = (numbers(maxima)?, numbers(c)?, numbers(maximum)?);
        // If no token has been seen, the maximum means nothing.
        most.iter_mut().zip(c).filter(|(_, c)| *c == 0.0).for_each(|(most, _)| *most = f32::NEG_INFINITY);
        let before = Tensor::from_slice(&most, maximum.shape(), maxima.device())?;
        let heads = keys.chunks_exact(maxima.dim(2)?).zip(&mut most);
        let running = heads.flat_map(|(keys, most)| {
            keys.iter().map(|&key| {
                *most = most.max(key);
                *most
            })
        });
        let running = Tensor::from_vec(running.collect(), maxima.shape(), maxima.device())?.unsqueeze(3)?;
        *maximum = Tensor::from_vec(most, maximum.shape(), maxima.device())?;
        // For later keys, which M masks out, the difference could be positive and its exponential infinite.
        let apart = maxima.unsqueeze(2)?.broadcast_sub(&running)?.minimum(0f32)?; // (batch, heads, C, C)
        let fallen = before.unsqueeze(3)?.broadcast_sub(&running)?; // (batch, heads, C, 1)
        let left = maxima.broadcast_sub(maximum)?.unsqueeze(3)?; // (batch, heads, C, 1)
        Ok(Self {
            m: (&self.m * apart.exp()?)?,
            carry: (&self.carry * fallen.exp()?)?,
            tail: (&self.tail * left.exp()?)?,
        })
    }
}

struct DecayOp;

impl CustomOp1 for DecayOp {
    fn name(&self) -> &'static str {
        "gate-decays"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (batch, heads, len) = layout.shape().dims3()?;
        let mut out = vec![0.0; batch * heads * (len + 2) * len];
        let (start, end) =
            layout.contiguous_offsets().ok_or_else(|| candle_core::Error::msg("logits must be contiguous"))?;
        let rows = logits.as_slice::<f32>()?[start..end].chunks_exact(len);
        for (logits, out) in rows.zip(out.chunks_exact_mut((len + 2) * len)) {
            decay::decay(Isa::detect(), logits, out);
        }
        Ok((CpuStorage::F32(out), (batch, heads, len + 2, len).into()))
    }
}

/// The inputs of one chunk of C tokens.
struct Chunk {
    phi_q: Tensor,  // (batch, heads, C, F)
    phi_k: Tensor,  // (batch, heads, C, F)
    v_plus: Tensor, // (batch, heads, C, d + 1)
    decays: Decays,
    raised: Option<Decays>, // of S and z, where they are not those of c
}

impl Chunk {
    fn forward(&self, memory: &mut Carry, eps: f64) -> Result<Outputs> {
        let Decays { m, carry, tail } = self.raised.as_ref().unwrap_or(&self.decays);
        let scores = (self.phi_q.matmul(&self.phi_k.t()?.contiguous()?)? * m)?;
        let inside = scores.matmul(&self.v_plus)?;
        let before = self.phi_q.matmul(&memory.s)?.broadcast_mul(carry)?;
        let sums = (inside + before)?; // (batch, heads, C, d + 1)
        let counted = &self.decays;
        // (batch, heads, C, 1)
        let c = (counted.m.sum_keepdim(3)? + counted.carry.broadcast_mul(&memory.c.unsqueeze(2)?)?)?;

        let d = sums.dim(3)? - 1;
        let denominator = sums.narrow(3, d, 1)?;
        // As in the one-step form, the floor is at least the smallest normal number: if a text's gates took nothing in,
        // the output is 0.
        let floor = (c * eps)?.maximum(f32::MIN_POSITIVE)?;
        let h = sums.narrow(3, 0, d)?.broadcast_div(&denominator.maximum(&floor)?)?;

        let last = carry.dim(2)? - 1;
        let decay = carry.narrow(2, last, 1)?; // (batch, heads, 1, 1)
        let added = self.phi_k.broadcast_mul(tail)?.t()?.contiguous()?.matmul(&self.v_plus)?;
        memory.s = (memory.s.broadcast_mul(&decay)? + added)?;
        memory.c = (memory.c.broadcast_mul(&counted.carry.narrow(2, last, 1)?.squeeze(3)?)? + counted.tail.sum(2)?)?;
        Ok(Outputs { h, denominator, floor })
    }
}
