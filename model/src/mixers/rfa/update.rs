//! A token's update of a head's sums. It is applied at once or, while the token is a draft, recorded and applied if the
//! token is accepted. Both use the same kernel on the same values, so a state does not show which of its tokens were
//! drafts.

use std::cell::RefCell;

use super::sums::{Sums, SumsShape};
use crate::compute::{Compute, run_heads, sized};
use crate::error::{ModelError, Result};
use crate::kernels::Isa;
use crate::kernels::parts::Parts;
use crate::kernels::recurrence::{self, Number, Token};
use crate::mixers::layer::Kept;
use crate::mixers::matrices::{Matrices, seed};

/// A token's update of a head's sums.
#[derive(Clone, Copy)]
pub(super) struct Update<'a> {
    pub(super) phi_k: &'a [f32], // (F)
    pub(super) v: &'a [f32],     // (d)
    /// The weights of the old sums and of the token, before any correction for the maximum.
    pub(super) weights: (f32, f32),
    /// The maximum of the key.
    pub(super) maximum: f32,
}

impl<'a> Update<'a> {
    /// Elements per update.
    pub(super) fn numbers(of: SumsShape) -> usize {
        of.features + of.head_dim + 3
    }

    /// to: ([`Self::numbers`])
    pub(super) fn write(self, to: &mut [f32]) {
        let (phi_k, to) = to.split_at_mut(self.phi_k.len());
        let (v, rest) = to.split_at_mut(self.v.len());
        phi_k.copy_from_slice(self.phi_k);
        v.copy_from_slice(self.v);
        rest.copy_from_slice(&[self.weights.0, self.weights.1, self.maximum]);
    }

    /// Reads what [`Self::write`] has written.
    pub(super) fn read(of: SumsShape, from: &'a [f32]) -> Self {
        let (phi_k, from) = from.split_at(of.features);
        let (v, rest) = from.split_at(of.head_dim);
        Self { phi_k, v, weights: (rest[0], rest[1]), maximum: rest[2] }
    }

    /// Advances a head by the token, and reads it out for `phi_q` (F). s: (F, d); out: (d)
    pub(super) fn apply<S: Number>(
        self,
        (isa, eps, seed): (Isa, f64, u64),
        (s, sums): (&mut [S], &mut [f32]),
        phi_q: &[f32],
        out: &mut [f32],
        clamped: &mut u64,
    ) {
        let Self { phi_k, v, weights: counted, maximum: key } = self;
        let weights = match &mut sums[phi_k.len()..] {
            [c, maximum] => recurrence::raise(maximum, *c, key, counted),
            _ => counted,
        };
        let token = Token { phi_q, phi_k, v, weights, counted, eps: eps as f32, seed };
        recurrence::step(isa, s, sums, &token, out, clamped);
    }
}

/// Advances a slot by the first of the draft tokens that [`super::recurrent::scan_drafts`] has read.
///
/// # Errors
/// When the slot is out of range.
pub(crate) fn keep(sums: &mut Sums, eps: f64, kept: Kept, cx: &mut Compute) -> Result<()> {
    let (slots, own) = sums.dims();
    ModelError::check_slot(kept.slot, slots)?;
    let Sums { s, rest, drafts, .. } = sums;
    match s {
        Matrices::F32(s) => keep_heads((own, eps), (s, rest), drafts, kept, cx),
        Matrices::Bf16(s) => keep_heads((own, eps), (s, rest), drafts, kept, cx),
    }
    Ok(())
}

fn keep_heads<S: Number>(
    (own, eps): (SumsShape, f64),
    (s, sums): (&mut [S], &mut [f32]),
    drafts: &[f32],
    kept: Kept,
    cx: &mut Compute,
) {
    thread_local! {
        static OUT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let (heads, matrix, rest, isa) = (own.heads, own.matrix(), own.rest_len(), cx.isa);
    let (numbers, of_head, slot) = (Update::numbers(own), rest + kept.time * Update::numbers(own), kept.slot * heads);
    let [a, b, _] = &mut cx.marks;
    let matrices = Parts::new(&mut s[slot * matrix..][..heads * matrix], matrix, a);
    let sums = Parts::new(&mut sums[slot * rest..][..heads * rest], rest, b);
    let piece = |head: usize| {
        let (Some(s), Some(sums)) = (matrices.take(head), sums.take(head)) else { return };
        let updates = drafts[(kept.row * heads + head) * of_head + rest..].chunks_exact(numbers).take(kept.count);
        OUT.with_borrow_mut(|out| {
            let out = sized(out, own.head_dim);
            for (position, update) in (kept.position..).zip(updates) {
                let update = Update::read(own, update);
                let seed = seed(position, kept.layer, head, heads);
                // The output is not needed, so any query will do.
                update.apply((isa, eps, seed), (s, sums), update.phi_k, out, &mut 0);
            }
        });
    };
    run_heads(&cx.threads, heads, heads * kept.count * matrix, &piece);
}
