//! The recurrence of one head at one token: the generalized delta rule.

use crate::kernels::Isa;
use crate::kernels::delta::{self, Token};
use crate::kernels::recurrence::Number;
use crate::mixers::head_memory::{Place, Recurrence};

/// The inputs of the heads, each (rows, time, heads d).
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs<'a> {
    pub(super) r: &'a [f32],
    pub(super) w: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) kappa: &'a [f32],
    pub(super) a: &'a [f32],
    /// Elements per token: heads d.
    pub(super) width: usize,
}

impl Recurrence for Inputs<'_> {
    /// s: (d, d)
    fn step<S: Number>(&self, isa: Isa, s: &mut [S], at: Place, out: &mut [f32]) {
        let d = out.len();
        let start = at.token * self.width + at.head * d;
        let token = Token {
            r: &self.r[start..start + d],
            w: &self.w[start..start + d],
            k: &self.k[start..start + d],
            v: &self.v[start..start + d],
            kappa: &self.kappa[start..start + d],
            a: &self.a[start..start + d],
            seed: at.seed,
        };
        delta::step(isa, s, &token, out);
    }
}
