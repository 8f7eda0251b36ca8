//! The recurrence of one head at one token: scalar decay, rank-1 update and readout. It is the recurrence of random
//! feature attention with B and C in place of features, without the normalizer.

use crate::kernels::Isa;
use crate::kernels::recurrence::{self, Number, Token};
use crate::mixers::head_memory::{Place, Recurrence};

/// The sizes of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) heads: usize,
    /// Length of x in a head (d).
    pub(super) head_dim: usize,
    /// Length of B and C (N).
    pub(super) state_size: usize,
    /// Number of groups of heads that share B and C.
    pub(super) groups: usize,
    /// Number of channels that are normalized together.
    pub(super) norm_group: usize,
    /// The limits of dt.
    pub(super) limits: (f32, f32),
    pub(super) eps: f32,
}

impl Shape {
    /// Width of x and of the gate: heads d.
    pub(super) fn inner(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// The inputs of the heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs<'a> {
    pub(super) shape: Shape,
    /// (tokens, channels): x (heads d), B and C (groups N each) of each token
    pub(super) convolved: &'a [f32],
    pub(super) channels: usize,
    /// (tokens, heads)
    pub(super) dt: &'a [f32],
    /// (tokens, heads)
    pub(super) keep: &'a [f32],
}

impl Recurrence for Inputs<'_> {
    /// s: (N, d)
    fn step<S: Number>(&self, isa: Isa, s: &mut [S], at: Place, out: &mut [f32]) {
        let Shape { heads, head_dim: d, state_size: n, groups, .. } = self.shape;
        let (x, both) = self.convolved[at.token * self.channels..][..self.channels].split_at(heads * d);
        let group = at.head / (heads / groups);
        let (b, c) = both.split_at(groups * n);
        let number = at.token * heads + at.head;
        let weights = (self.keep[number], self.dt[number]);
        let token = Token {
            phi_q: &c[group * n..][..n],
            phi_k: &b[group * n..][..n],
            v: &x[at.head * d..][..d],
            weights,
            counted: weights,
            eps: 0.0,
            seed: at.seed,
        };
        recurrence::advance(isa, s, &mut [], &token, out, &mut 0);
    }
}
