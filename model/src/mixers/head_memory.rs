//! The state of heads that keep one matrix S each, and how all heads advance: token by token, in place, for prompts and
//! generated tokens alike. A state therefore has the same bits however its text is divided into calls.
//!
//! Draft tokens advance a copy of S. The inputs of the recurrence are recorded, and accepted drafts are replayed in
//! place.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::layer::{Kept, Rows, SlotState};
use super::matrices::{Copies, Matrices, seed};
use super::rfa::recurrent::time_first;
use crate::compute::{Compute, run_heads, sized};
use crate::error::{ModelError, Result};
use crate::kernels::Isa;
use crate::kernels::parts::Parts;
use crate::kernels::recurrence::Number;
use crate::memory::StateType;

/// One head at one token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The index of the token among those of all rows: `row * time + t`.
    pub(super) token: usize,
    /// The index of the head in the layer.
    pub(super) head: usize,
    /// The seed for rounding a 16-bit state; it depends only on the position, the layer and the head.
    pub(super) seed: u64,
}

/// How a family updates and reads S.
pub(super) trait Recurrence: Sync {
    /// Advances S of a head by one token and reads it out. s: (head); out: (d)
    fn step<S: Number>(&self, isa: Isa, s: &mut [S], at: Place, out: &mut [f32]);
}

/// S of all heads of a layer.
#[derive(Debug)]
pub(crate) struct HeadMemory {
    s: Matrices, // (slots, heads, head)
    slots: usize,
    heads: usize,
    head: usize,
}

/// Intermediate results.
#[derive(Debug, Default)]
pub(super) struct HeadBuffers {
    heads_first: Vec<f32>, // (rows, heads, time, d)
    copies: Copies,
}

/// The inputs of the recurrence in the last draft step: arrays of (rows, time, elements per token).
#[derive(Debug)]
pub(super) struct Noted<const N: usize> {
    arrays: [Vec<f32>; N],
    tokens: usize,
}

impl<const N: usize> Default for Noted<N> {
    fn default() -> Self {
        Self { arrays: [const { Vec::new() }; N], tokens: 0 }
    }
}

impl<const N: usize> Noted<N> {
    /// Records the inputs of the recurrence if the rows' tokens are drafts.
    pub(super) fn note(&mut self, rows: Rows<'_>, arrays: [&[f32]; N]) {
        if rows.drafts {
            self.tokens = rows.slots.len() * rows.time;
            for (noted, array) in self.arrays.iter_mut().zip(arrays) {
                noted.clear();
                noted.extend_from_slice(array);
            }
        }
    }

    /// Returns the inputs of the tokens that a slot keeps: (count, elements per token)
    pub(super) fn of(&self, kept: Kept) -> [&[f32]; N] {
        self.arrays.each_ref().map(|array| {
            let numbers = array.len() / self.tokens.max(1);
            &array[kept.row * kept.time * numbers..][..kept.count * numbers]
        })
    }
}

impl HeadMemory {
    /// The memories of empty texts, with `head` elements per head.
    pub(super) fn zeros(slots: usize, heads: usize, head: usize, state: StateType) -> Self {
        Self { s: Matrices::zeros(slots * heads * head, state), slots, heads, head }
    }

    /// Elements per slot.
    fn numbers(&self) -> usize {
        self.heads * self.head
    }

    /// Advances the rows' slots, or copies of them if the tokens are drafts. out: (rows, time, heads d)
    ///
    /// # Errors
    /// A slot is out of range or named twice.
    pub(super) fn advance(
        &mut self,
        rows: Rows<'_>,
        recurrence: &impl Recurrence,
        (cx, HeadBuffers { heads_first, copies }): (&mut Compute, &mut HeadBuffers),
        out: &mut [f32],
    ) -> Result<()> {
        let Self { heads, head, .. } = *self;
        rows.slots.iter().try_for_each(|&slot| ModelError::check_slot(slot, self.slots))?;
        let copied = rows.slots.len() * self.numbers();
        let (drafts, of_head) = (rows.drafts, (heads, head));
        let mut run = |target: &mut [f32]| match &mut self.s {
            Matrices::F32(s) => {
                let copies = drafts.then(|| sized(&mut copies.f32, copied));
                advance_heads((s, copies), of_head, rows, recurrence, cx, target)
            }
            Matrices::Bf16(s) => {
                let copies = drafts.then(|| sized(&mut copies.bf16, copied));
                advance_heads((s, copies), of_head, rows, recurrence, cx, target)
            }
        };
        if rows.time == 1 {
            // With one token, (heads, time) and (time, heads) have the same order.
            return run(out);
        }
        let target = sized(heads_first, out.len());
        run(target)?;
        time_first(target, heads, rows.time, out.len() / (rows.slots.len() * rows.time * heads), out);
        Ok(())
    }

    /// Advances a slot by the drafts that it keeps; `recurrence` holds their inputs. d: length of a head's output
    ///
    /// # Errors
    /// The slot is out of range.
    pub(super) fn keep(&mut self, kept: Kept, recurrence: &impl Recurrence, cx: &mut Compute, d: usize) -> Result<()> {
        ModelError::check_slot(kept.slot, self.slots)?;
        let (numbers, head) = (self.numbers(), self.head);
        let own = kept.slot * numbers..(kept.slot + 1) * numbers;
        match &mut self.s {
            Matrices::F32(s) => keep_heads((&mut s[own], head), kept, recurrence, cx, d),
            Matrices::Bf16(s) => keep_heads((&mut s[own], head), kept, recurrence, cx, d),
        }
        Ok(())
    }
}

/// s: (slots, heads, head), and copies for drafts (rows, heads, head); out: (rows, heads, time, d)
fn advance_heads<S: Number>(
    (s, copies): (&mut [S], Option<&mut [S]>),
    (heads, head): (usize, usize),
    rows: Rows<'_>,
    recurrence: &impl Recurrence,
    cx: &mut Compute,
    out: &mut [f32],
) -> Result<()> {
    let (isa, time, pieces) = (cx.isa, rows.time, rows.slots.len() * heads);
    let d = out.len() / (pieces * time);
    let [a, b, c] = &mut cx.marks;
    let (matrices, outs) = (Parts::new(s, head, a), Parts::new(out, time * d, b));
    let copies = copies.map(|copies| Parts::new(copies, head, c));
    let done = AtomicUsize::new(0);
    let piece = |i: usize| {
        let (row, index) = (i / heads, i % heads);
        let (Some(mut s), Some(out)) = (matrices.take(rows.slots[row] * heads + index), outs.take(i)) else { return };
        if let Some(copies) = &copies {
            let Some(copy) = copies.take(i) else { return };
            copy.copy_from_slice(s);
            s = copy;
        }
        for (t, out) in out.chunks_exact_mut(d).enumerate() {
            let seed = seed(rows.positions[row] + t as u64, rows.layer, index, heads);
            recurrence.step(isa, s, Place { token: row * time + t, head: index, seed }, out);
        }
        done.fetch_add(1, Ordering::Relaxed);
    };
    run_heads(&cx.threads, pieces, pieces * time * head, &piece);
    // A slot that is named twice has no second part to take.
    if done.into_inner() == pieces { Ok(()) } else { Err(ModelError::repeated(rows.slots)) }
}

/// s: (heads, head), of the slot
fn keep_heads<S: Number>(
    (s, head): (&mut [S], usize),
    kept: Kept,
    recurrence: &impl Recurrence,
    cx: &mut Compute,
    d: usize,
) {
    thread_local! {
        static OUT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let (isa, heads, numbers) = (cx.isa, s.len() / head, s.len());
    let matrices = Parts::new(s, head, &mut cx.marks[0]);
    let piece = |index: usize| {
        let Some(s) = matrices.take(index) else { return };
        OUT.with_borrow_mut(|out| {
            for (token, position) in (kept.position..).take(kept.count).enumerate() {
                let seed = seed(position, kept.layer, index, heads);
                // The output is not needed: it was computed in the draft step.
                recurrence.step(isa, s, Place { token, head: index, seed }, sized(out, d));
            }
        });
    };
    run_heads(&cx.threads, heads, kept.count * numbers, &piece);
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
