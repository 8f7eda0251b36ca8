//! The recurrence over many tokens as matrix products, a chunk at a time: prefill and evaluation.
//!
//! Inside a chunk, with `b = cumsum(log g)` and `lam = log (1-g)`:
//! `M_ij = exp(b_i - b_j + lam_j)` for j <= i, else 0; `O = ((Phi_q Phi_k^T) . M) V+ + exp(b_i) Phi_q S`;
//! `S <- exp(b_C) S + (Phi_k . exp(b_C - b_j + lam_j))^T V+`, where V+ is V with a column of ones and S has z as
//! its last column. `exp(b_i - b_j)` is never two exponentials: apart they overflow.

use candle_core::{D, Result, Tensor};

/// Tokens that are computed as one block.
pub const CHUNK: usize = 64;

/// Features, values and gates of some tokens.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// (batch, heads, time, 2D)
    pub phi_q: Tensor,
    /// (batch, heads, time, 2D)
    pub phi_k: Tensor,
    /// (batch, heads, time, d)
    pub v: Tensor,
    /// Gate logits (batch, heads, time), or none for RFA without a gate.
    pub gate: Option<Tensor>,
}

/// What is remembered between chunks.
#[derive(Clone, Debug)]
pub struct Memory {
    /// S with z as its last column: (batch, heads, 2D, d + 1)
    pub s: Tensor,
    /// (batch, heads, 1)
    pub c: Tensor,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// (batch, heads, time, d)
    pub h: Tensor,
    /// `phi_q . z` before the clamp: (batch, heads, time, 1)
    pub denominator: Tensor,
    /// `eps c`, at or above which the denominator is held: (batch, heads, time, 1)
    pub floor: Tensor,
}

/// `log sigmoid(a)`, stable at both ends.
fn log_sigmoid(a: &Tensor) -> Result<Tensor> {
    let softplus = (a.abs()?.neg()?.exp()? + 1.0)?.log()?;
    a.minimum(0.0)? - softplus
}

/// Runs over all tokens in chunks of at most `chunk`; the memory is taken forward.
///
/// # Errors
/// When the shapes do not fit.
pub fn forward(inputs: &Inputs, memory: &mut Memory, eps: f64, chunk: usize) -> Result<Outputs> {
    let (batch, heads, time, _) = inputs.phi_q.dims4()?;
    let ones = Tensor::ones((batch, heads, time, 1), inputs.v.dtype(), inputs.v.device())?;
    let v_plus = Tensor::cat(&[&inputs.v, &ones], 3)?; // (batch, heads, time, d + 1)
    let (keep, take) = match &inputs.gate {
        Some(a) => (log_sigmoid(a)?, log_sigmoid(&a.neg()?)?),
        None => (ones.zeros_like()?.squeeze(3)?, ones.zeros_like()?.squeeze(3)?),
    };
    let mut parts = Vec::with_capacity(time.div_ceil(chunk));
    for at in (0..time).step_by(chunk) {
        let len = chunk.min(time - at);
        let rows = |x: &Tensor| x.narrow(2, at, len)?.contiguous();
        let block = Block {
            phi_q: rows(&inputs.phi_q)?,
            phi_k: rows(&inputs.phi_k)?,
            v_plus: rows(&v_plus)?,
            keep: rows(&keep)?,
            take: rows(&take)?,
        };
        parts.push(block.forward(memory, eps)?);
    }
    let cat = |pick: fn(&Outputs) -> &Tensor| match parts.as_slice() {
        [one] => Ok(pick(one).clone()),
        many => Tensor::cat(&many.iter().map(pick).collect::<Vec<_>>(), 2),
    };
    Ok(Outputs { h: cat(|o| &o.h)?, denominator: cat(|o| &o.denominator)?, floor: cat(|o| &o.floor)? })
}

/// One chunk of C tokens.
struct Block {
    phi_q: Tensor,  // (batch, heads, C, 2D)
    phi_k: Tensor,  // (batch, heads, C, 2D)
    v_plus: Tensor, // (batch, heads, C, d + 1)
    keep: Tensor,   // log g: (batch, heads, C)
    take: Tensor,   // log (1-g): (batch, heads, C)
}

impl Block {
    fn forward(&self, memory: &mut Memory, eps: f64) -> Result<Outputs> {
        let (len, device) = (self.keep.dim(2)?, self.keep.device());
        let b = self.keep.cumsum(D::Minus1)?; // (batch, heads, C)
        let last = b.narrow(2, len - 1, 1)?; // (batch, heads, 1)

        // The difference first: for j near i it is small however large b has grown.
        let log_m = b.unsqueeze(3)?.broadcast_sub(&b.unsqueeze(2)?)?.broadcast_add(&self.take.unsqueeze(2)?)?;
        // To -inf before the exponential: above the diagonal it may overflow.
        let ceiling = |i: usize| if i % len > i / len { f32::NEG_INFINITY } else { f32::INFINITY };
        let ceiling = Tensor::from_vec((0..len * len).map(ceiling).collect(), (len, len), device)?;
        let log_m = log_m.broadcast_minimum(&ceiling)?;
        let m = log_m.exp()?; // (batch, heads, C, C)

        let scores = (self.phi_q.matmul(&self.phi_k.t()?.contiguous()?)? * &m)?;
        let carry = b.exp()?.unsqueeze(3)?; // (batch, heads, C, 1)
        let inside = scores.matmul(&self.v_plus)?;
        let before = self.phi_q.matmul(&memory.s)?.broadcast_mul(&carry)?;
        let sums = (inside + before)?; // (batch, heads, C, d + 1)
        let c = (m.sum_keepdim(3)? + carry.broadcast_mul(&memory.c.unsqueeze(2)?)?)?; // (batch, heads, C, 1)

        let d = sums.dim(3)? - 1;
        let denominator = sums.narrow(3, d, 1)?;
        let floor = (c * eps)?;
        let h = sums.narrow(3, 0, d)?.broadcast_div(&denominator.maximum(&floor)?)?;

        let tail = last.broadcast_sub(&b)?.add(&self.take)?.exp()?; // (batch, heads, C)
        let decay = last.exp()?; // (batch, heads, 1)
        let added = self.phi_k.broadcast_mul(&tail.unsqueeze(3)?)?.t()?.contiguous()?.matmul(&self.v_plus)?;
        memory.s = (memory.s.broadcast_mul(&decay.unsqueeze(3)?)? + added)?;
        memory.c = ((&memory.c * decay)? + tail.sum_keepdim(2)?)?;
        Ok(Outputs { h, denominator, floor })
    }
}
