//! Token shift: each token is mixed with the previous one, which for the first token of a step comes from the state.

use crate::compute::{Compute, sized};
use crate::error::Result;
use crate::kernels::elementwise;
use crate::mixers::last_inputs::LastInputs;
use crate::mixers::layer::Rows;

/// The inputs of a step, and the inputs before its first tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shift<'a> {
    x: &'a [f32],      // (rows, time, width)
    before: &'a [f32], // (rows, width)
    time: usize,
    width: usize,
}

impl<'a> Shift<'a> {
    /// Reads each slot's previous value of `input`, and replaces it with the step's last token unless the tokens are
    /// drafts.
    ///
    /// x: (rows, time, width)
    pub(super) fn new(
        (inputs, input): (&mut LastInputs, usize),
        rows: Rows<'_>,
        x: &'a [f32],
        width: usize,
        buffer: &'a mut Vec<f32>,
    ) -> Result<Self> {
        let Rows { slots, time, .. } = rows;
        let before = sized(buffer, slots.len() * width);
        inputs.step(input, rows, x.chunks_exact(width), |inputs| {
            let texts = before.chunks_exact_mut(width).zip(x.chunks_exact(time * width));
            for (&slot, (before, x)) in slots.iter().zip(texts) {
                let kept = inputs.of(slot, input)?;
                before.copy_from_slice(kept);
                kept.copy_from_slice(&x[x.len() - width..]);
            }
            Ok(())
        })?;
        Ok(Self { x, before, time, width })
    }

    /// Computes `x_t + (x_{t-1} - x_t) by`. by: (width) -> out: (rows, time, width)
    pub(super) fn mix(&self, cx: &mut Compute, by: &[f32], out: &mut [f32]) {
        let (isa, width) = (cx.isa, self.width);
        let at = |token: usize| &self.x[token * width..][..width];
        cx.each(out, width, &|first, out| {
            for (token, out) in (first..).zip(out.chunks_exact_mut(width)) {
                let (row, t) = (token / self.time, token % self.time);
                let before = if t == 0 { &self.before[row * width..][..width] } else { at(token - 1) };
                elementwise::mix(isa, at(token), before, by, out);
            }
        });
    }
}
