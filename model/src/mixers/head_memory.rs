//! What the heads of a layer remember where it is one matrix S for each, and how all heads advance: token by token in
//! place, for prompts and generated tokens alike. So a state has the same bits wherever its text was cut.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::layer::{Rows, SlotState};
use super::matrices::Matrices;
use super::rfa::recurrent::time_first;
use crate::compute::{Compute, sized};
use crate::error::{ModelError, Result};
use crate::kernels::Isa;
use crate::kernels::parts::Parts;
use crate::kernels::recurrence::Number;
use crate::memory::StateType;

/// A step that touches fewer numbers of state than this runs on one thread.
const SERIAL: usize = 1 << 15;

/// One head of one token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The token among those of all rows: `row * time + t`.
    pub(super) token: usize,
    /// The head of the layer.
    pub(super) head: usize,
    /// For rounding a 16-bit state; depends on the position, the layer and the head alone.
    pub(super) seed: u64,
}

/// What a family does with S.
pub(super) trait Recurrence: Sync {
    /// Advances S of a head by one token and reads it out. s: (head); out: (d)
    fn step<S: Number>(&self, isa: Isa, s: &mut [S], at: Place, out: &mut [f32]);
}

/// S of every head of a layer.
#[derive(Debug)]
pub(crate) struct HeadMemory {
    s: Matrices, // (slots, heads, head)
    slots: usize,
    heads: usize,
    head: usize,
}

impl HeadMemory {
    /// The memories of empty texts, of `head` numbers for each head.
    pub(super) fn zeros(slots: usize, heads: usize, head: usize, state: StateType) -> Self {
        Self { s: Matrices::zeros(slots * heads * head, state), slots, heads, head }
    }

    /// Numbers of a slot.
    fn numbers(&self) -> usize {
        self.heads * self.head
    }

    /// Advances the rows' slots. out: (rows, time, heads d)
    ///
    /// # Errors
    /// A slot is out of range or named twice.
    pub(super) fn advance(
        &mut self,
        rows: Rows<'_>,
        recurrence: &impl Recurrence,
        (cx, heads_first): (&mut Compute, &mut Vec<f32>),
        out: &mut [f32],
    ) -> Result<()> {
        let Self { heads, head, .. } = *self;
        rows.slots.iter().try_for_each(|&slot| ModelError::check_slot(slot, self.slots))?;
        let mut run = |target: &mut [f32]| match &mut self.s {
            Matrices::F32(s) => advance_heads((&mut s[..], heads, head), rows, recurrence, cx, target),
            Matrices::Bf16(s) => advance_heads((&mut s[..], heads, head), rows, recurrence, cx, target),
        };
        if rows.time == 1 {
            // With one token, (heads, time) and (time, heads) are the same order.
            return run(out);
        }
        let target = sized(heads_first, out.len());
        run(target)?;
        time_first(target, heads, rows.time, out.len() / (rows.slots.len() * rows.time * heads), out);
        Ok(())
    }
}

/// s: (slots, heads, head); out: (rows, heads, time, d)
fn advance_heads<S: Number>(
    (s, heads, head): (&mut [S], usize, usize),
    rows: Rows<'_>,
    recurrence: &impl Recurrence,
    cx: &mut Compute,
    out: &mut [f32],
) -> Result<()> {
    let (isa, time, pieces) = (cx.isa, rows.time, rows.slots.len() * heads);
    let d = out.len() / (pieces * time);
    let [a, b, _] = &mut cx.marks;
    let (matrices, outs) = (Parts::new(s, head, a), Parts::new(out, time * d, b));
    let done = AtomicUsize::new(0);
    let piece = |i: usize| {
        let (row, index) = (i / heads, i % heads);
        let (Some(s), Some(out)) = (matrices.take(rows.slots[row] * heads + index), outs.take(i)) else { return };
        for (t, out) in out.chunks_exact_mut(d).enumerate() {
            let seed = (rows.positions[row] + t as u64) ^ ((rows.layer * heads + index) as u64) << 40;
            recurrence.step(isa, s, Place { token: row * time + t, head: index, seed }, out);
        }
        done.fetch_add(1, Ordering::Relaxed);
    };
    if pieces * time * head < SERIAL {
        (0..pieces).for_each(piece);
    } else {
        cx.threads.run(pieces, &piece);
    }
    // A slot that is named twice has no second part.
    if done.into_inner() == pieces { Ok(()) } else { Err(ModelError::repeated(rows.slots)) }
}

impl SlotState for HeadMemory {
    fn bytes(&self) -> usize {
        self.numbers() * self.s.number_bytes()
    }

    fn reset(&mut self, slot: usize) {
        self.s.clear(slot * self.numbers()..(slot + 1) * self.numbers());
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        self.s.read(slot * self.numbers()..(slot + 1) * self.numbers(), out);
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: u64) {
        let len = self.numbers();
        self.s.write(slot * len..(slot + 1) * len, numbers);
    }
}
