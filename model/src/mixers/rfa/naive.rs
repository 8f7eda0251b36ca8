//! The reference implementation: one head, token by token, in the paper's notation. It is slow, simple, and generic
//! over the float type.

use std::ops::{Add, Div, Mul, Sub};

/// The float operations that the reference needs; tests use f64.
pub trait Float:
    Copy + PartialOrd + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The nearest value of this type.
    fn of(value: f64) -> Self;
    /// e to the power of `self`.
    #[must_use]
    fn exp(self) -> Self;
    /// The square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// Sine and cosine.
    fn sin_cos(self) -> (Self, Self);
}

macro_rules! float {
    ($t:ty) => {
        impl Float for $t {
            fn of(value: f64) -> Self {
                value as Self
            }
            fn exp(self) -> Self {
                <$t>::exp(self)
            }
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            fn sin_cos(self) -> (Self, Self) {
                <$t>::sin_cos(self)
            }
        }
    };
}
float!(f32);
float!(f64);

/// The memory of a head: S (F, d), z (F) and c, the weight seen so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory<F> {
    /// S, row by row: (F, d).
    pub s: Vec<F>,
    /// z: (F).
    pub z: Vec<F>,
    /// The sum of all weights so far, decayed like S and z.
    pub c: F,
}

impl<F: Float> Memory<F> {
    /// The memory of an empty text.
    pub fn new(features: usize, head_dim: usize) -> Self {
        let zero = F::of(0.0);
        Self { s: vec![zero; features * head_dim], z: vec![zero; features], c: zero }
    }
}

pub(in crate::mixers) fn dot<F: Float>(a: &[F], b: &[F]) -> F {
    a.iter().zip(b).fold(F::of(0.0), |sum, (&a, &b)| sum + a * b)
}

/// `x / (|x| + 1e-3)`. x: (d)
fn unit<F: Float>(x: &[F]) -> Vec<F> {
    let length = dot(x, x).sqrt() + F::of(1e-3);
    x.iter().map(|&v| v / length).collect()
}

/// Computes `sqrt(1/D) f(w . x)` for each row of w. x: (d), w: (D, d) -> (D)
fn random<F: Float>(x: &[F], w: &[F], f: impl Fn(F) -> F) -> Vec<F> {
    let scale = F::of(x.len() as f64 / w.len() as f64).sqrt();
    w.chunks_exact(x.len()).map(|w| scale * f(dot(w, x))).collect()
}

/// `phi(x) = sqrt(1/D) [sin(W x^), cos(W x^)]`, `x^ = x / (|x| + 1e-3)` (equation 2).
///
/// x: (d), w: (D, d), multiplied by sigma -> (2D)
pub fn gaussian_features<F: Float>(x: &[F], w: &[F]) -> Vec<F> {
    let unit = unit(x);
    [random(&unit, w, |v| v.sin_cos().0), random(&unit, w, |v| v.sin_cos().1)].concat()
}

/// `phi(x) = sqrt(1/D) ReLU(W x^)`, `x^ = x / (|x| + 1e-3)` (Peng et al., 2021, appendix A).
///
/// x: (d), w: (D, d), multiplied by sigma -> (D)
pub fn arc_cosine_features<F: Float>(x: &[F], w: &[F]) -> Vec<F> {
    let zero = F::of(0.0);
    random(&unit(x), w, |v| if v > zero { v } else { zero })
}

/// `phi(x) = elu(x) + 1`: `x + 1` for x > 0, else `exp(x)` (Katharopoulos et al., 2020, equation 7).
///
/// x: (d) -> (d)
pub fn elu_features<F: Float>(x: &[F]) -> Vec<F> {
    x.iter().map(|&v| if v > F::of(0.0) { v + F::of(1.0) } else { v.exp() }).collect()
}

/// `phi(x) = sqrt(1/D) exp(W y - |y|^2 / 2)`, `y = x d^(-1/4)` (Choromanski et al., 2021, equation 7). No maximum is
/// subtracted, because in f64 projections up to about 300 do not overflow.
///
/// x: (d), w: (D, d) -> (D)
pub fn favor_features<F: Float>(x: &[F], w: &[F]) -> Vec<F> {
    let scale = F::of(x.len() as f64).sqrt().sqrt();
    let y: Vec<F> = x.iter().map(|&v| v / scale).collect();
    let half = dot(&y, &y) / F::of(2.0);
    random(&y, w, |v| (v - half).exp())
}

/// Reads one token: `S <- g S + (1-g) phi_k v^T`, `z <- g z + (1-g) phi_k`, `c <- g c + (1-g)` (equation 7), then
/// `h = phi_q S / max(phi_q . z, eps c)` (equation 5; the clamp is our addition, and scales with c so that early tokens
/// are right). If the denominator is 0, h is 0.
///
/// phi_q, phi_k: (F), v: (d), gate: the gate logit, or `None` for RFA without a gate, where g and 1-g are both 1.
pub fn step<F: Float>(memory: &mut Memory<F>, phi_q: &[F], phi_k: &[F], v: &[F], gate: Option<F>, eps: f64) -> Vec<F> {
    let (zero, one) = (F::of(0.0), F::of(1.0));
    let (keep, take) = gate.map_or((one, one), |a| (one / (one + (zero - a).exp()), one / (one + a.exp())));
    for ((row, z), &k) in memory.s.chunks_exact_mut(v.len()).zip(&mut memory.z).zip(phi_k) {
        for (s, &v) in row.iter_mut().zip(v) {
            *s = keep * *s + take * k * v;
        }
        *z = keep * *z + take * k;
    }
    memory.c = keep * memory.c + take;
    let (den, floor) = (dot(phi_q, &memory.z), F::of(eps) * memory.c);
    let den = if den > floor { den } else { floor };
    let column = |i| memory.s.chunks_exact(v.len()).zip(phi_q).fold(zero, |sum, (row, &q)| sum + q * row[i]);
    (0..v.len()).map(|i| if den == zero { zero } else { column(i) / den }).collect()
}

/// Computes softmax attention of one query to some keys and values: `sum_j exp(q k_j / sqrt(d)) v_j`, divided by the
/// sum of the weights.
///
/// q: (d); keys, values: (tokens, d), at least one -> (d)
pub fn softmax<F: Float>(q: &[F], keys: &[F], values: &[F]) -> Vec<F> {
    let (zero, scale) = (F::of(0.0), F::of(q.len() as f64).sqrt());
    let scores: Vec<F> = keys.chunks_exact(q.len()).map(|k| dot(q, k) / scale).collect();
    // The largest score is subtracted from all, so that no exponential overflows.
    let most = scores.iter().fold(scores[0], |most, &score| if score > most { score } else { most });
    let weights: Vec<F> = scores.iter().map(|&score| (score - most).exp()).collect();
    let sum = weights.iter().fold(zero, |sum, &weight| sum + weight);
    let column = |i| values.chunks_exact(q.len()).zip(&weights).fold(zero, |sum, (v, &weight)| sum + weight * v[i]);
    (0..q.len()).map(|i| column(i) / sum).collect()
}
