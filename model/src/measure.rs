//! Benchmarks of single kernels, for `cargo bench`: one product, and one step of the recurrence.

use std::sync::Arc;

use half::bf16;

use crate::compute::Compute;
use crate::kernels::recurrence::{self, Token};
use crate::kernels::threads::Threads;
use crate::memory::StateType;
use crate::nn::Linear;
use crate::weights::{LoadError, Source, WeightType, Weights};

/// The product `x . w^T` with random weights.
#[derive(Debug)]
pub struct Product {
    weight: Linear,
    cx: Compute,
    x: Vec<f32>,
    out: Vec<f32>,
}

impl Product {
    /// Creates a product of weights (n, k) of type `kind` with `rows` rows of x.
    ///
    /// # Errors
    /// [`LoadError::Matrix`] when rows of k are not whole blocks of `kind`.
    pub fn new(kind: WeightType, (n, k): (usize, usize), rows: usize, threads: usize) -> Result<Self, LoadError> {
        let source = Source::Random(kind, 1);
        let weight = Linear::new(&Weights::new(&source).matrix("weight", n, k)?, None)?;
        let x = (0..rows * k).map(|i| (i as f32 * 0.37).sin()).collect();
        Ok(Self { weight, cx: Compute::new(Arc::new(Threads::new(threads))), x, out: vec![0.0; rows * n] })
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// Computes the product.
    pub fn run(&mut self) {
        self.weight.forward(&mut self.cx, &self.x, &mut self.out);
    }
}

/// One recurrence step of some heads with D = d = 64.
#[derive(Debug)]
pub struct Heads {
    full: Vec<f32>,
    half: Vec<bf16>,
    sums: Vec<f32>,
    phi: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    cx: Compute,
}

/// D and d of a head.
const SIDE: usize = 64;

impl Heads {
    /// Creates `count` heads.
    pub fn new(count: usize, state: StateType) -> Self {
        let numbers = |kind| if kind == state { count * 2 * SIDE * SIDE } else { 0 };
        let wave = |len: usize| (0..len).map(|i| (i as f32 * 0.9).sin() * 0.1).collect();
        Self {
            full: vec![0.5; numbers(StateType::F32)],
            half: vec![bf16::from_f32(0.5); numbers(StateType::Bf16)],
            sums: vec![0.5; 2 * SIDE + 1],
            phi: wave(2 * SIDE),
            v: wave(SIDE),
            out: vec![0.0; SIDE],
            cx: Compute::new(Arc::new(Threads::new(1))),
        }
    }

    /// Bytes that a step reads and writes.
    pub fn bytes(&self) -> usize {
        2 * (size_of_val(&*self.full) + size_of_val(&*self.half))
    }

    /// Advances all heads by one token.
    pub fn run(&mut self) {
        let Self { full, half, sums, phi, v, out, cx } = self;
        let token =
            Token { phi_q: phi, phi_k: phi, v, weights: (0.99, 0.01), counted: (0.99, 0.01), eps: 0.02, seed: 7 };
        for s in full.chunks_exact_mut(2 * SIDE * SIDE) {
            recurrence::step(cx.isa, s, sums, &token, out, &mut 0);
        }
        for s in half.chunks_exact_mut(2 * SIDE * SIDE) {
            recurrence::step(cx.isa, s, sums, &token, out, &mut 0);
        }
    }
}
