//! Rotary positions (Su et al., 2021), halves rotated as Llama does; lengths are kept, so unit vectors stay unit.

use candle_core::{Device, Result, Tensor};

/// Cosines and sines of the angles of each row's tokens: two tensors (batch, 1, time, head_dim / 2).
///
/// Angles are made in f64: at position ten million an f32 angle would be off by whole turns.
pub(crate) fn angles(
    positions: &[u64],
    time: usize,
    head_dim: usize,
    theta: f64,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let half = head_dim / 2;
    let frequencies: Vec<f64> = (0..half).map(|i| theta.powf(-(i as f64) / half as f64)).collect();
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for &start in positions {
        for t in 0..time as u64 {
            for frequency in &frequencies {
                let angle = (start + t) as f64 * frequency;
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
    }
    let shape = (positions.len(), 1, time, half);
    Ok((Tensor::from_vec(cos, shape, device)?, Tensor::from_vec(sin, shape, device)?))
}

/// x: (batch, heads, time, head_dim) -> the same, rotated.
pub(crate) fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let half = x.dim(3)? / 2;
    let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Tensor::cat(&[first, second], 3)
}
