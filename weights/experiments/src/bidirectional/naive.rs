//! The references: one head, query by query, as the papers write the formulas. They are slow, generic over the float
//! type, and lack the logarithms and maxima that keep the batched forms from overflowing.
//!
//! Queries, keys and values are slices of rows; a row of q or k has `d` elements. RA and LARA scale q and k by
//! d^(-1/4).

use super::randomized::{Landmarks, crossing};
use tidegate_model::mixers::rfa::naive::Float;

/// The rows of one head.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a, F> {
    /// (queries, d)
    pub q: &'a [F],
    /// (keys, d)
    pub k: &'a [F],
    /// (keys, width)
    pub v: &'a [F],
    /// Size of a row of q and k.
    pub d: usize,
}

fn dot<F: Float>(a: &[F], b: &[F]) -> F {
    a.iter().zip(b).fold(F::of(0.0), |sum, (&a, &b)| sum + a * b)
}

fn scaled<F: Float>(x: &[F], d: usize) -> Vec<F> {
    x.iter().map(|&x| x * F::of((d as f64).powf(-0.25))).collect()
}

fn plus<F: Float>(a: &[F], b: &[F]) -> Vec<F> {
    a.iter().zip(b).map(|(&a, &b)| a + b).collect()
}

/// `xi(x, w) = exp(w . x - |x|^2 / 2)`. The mean of xi(x, w) xi(y, w) over standard normal w is exp(x . y). It is also
/// N(w; x, I) / N(w; 0, I).
pub fn xi<F: Float>(x: &[F], w: &[F]) -> F {
    (dot(w, x) - dot(x, x) / F::of(2.0)).exp()
}

impl<F: Float> Head<'_, F> {
    fn width(&self) -> usize {
        self.v.len() / (self.k.len() / self.d)
    }

    /// `sum_m weight_m v_m / max(sum_m weight_m, floor)`, 0 if the divisor is 0: (width)
    fn average(&self, weights: &[F], floor: F) -> Vec<F> {
        let sum = weights.iter().fold(F::of(0.0), |sum, &w| sum + w);
        let sum = if sum > floor { sum } else { floor };
        let column = |i| self.v.chunks_exact(self.width()).zip(weights).fold(F::of(0.0), |s, (v, &w)| s + w * v[i]);
        (0..self.width()).map(|i| if sum == F::of(0.0) { sum } else { column(i) / sum }).collect()
    }

    /// q and k, multiplied by d^(-1/4).
    fn scaled(&self) -> (Vec<F>, Vec<F>) {
        (scaled(self.q, self.d), scaled(self.k, self.d))
    }

    /// `sum_m exp(q_n . k_m / sqrt(d)) v_m` divided by the sum of the weights -> (queries, width)
    pub fn softmax(&self) -> Vec<F> {
        let scale = F::of(self.d as f64).sqrt();
        let weights = |q| self.k.chunks_exact(self.d).map(move |k| (dot(q, k) / scale).exp()).collect::<Vec<F>>();
        self.q.chunks_exact(self.d).flat_map(|q| self.average(&weights(q), F::of(0.0))).collect()
    }

    /// `sum_m (phi(q_n) . phi(k_m)) v_m / max(sum_m phi(q_n) . phi(k_m), floor)` -> (queries, width)
    pub fn kernel(&self, phi: impl Fn(&[F]) -> Vec<F>, floor: impl Fn(&[F]) -> F) -> Vec<F> {
        let keys: Vec<Vec<F>> = self.k.chunks_exact(self.d).map(&phi).collect();
        let row = |q: &[F]| {
            let phi_q = phi(q);
            let weights: Vec<F> = keys.iter().map(|phi_k| dot(&phi_q, phi_k)).collect();
            self.average(&weights, floor(q))
        };
        self.q.chunks_exact(self.d).flat_map(row).collect()
    }

    /// RA (arXiv 2204.04667, section 3). For each sample and query, `k' ~ softmax(q . k)` by inverting the cumulative
    /// probabilities at a uniform number, `w = q + k' + normal`, and `sum_m xi(k_m, w) v_m / sum_m xi(k_m, w)`; the
    /// result is the mean of the samples.
    ///
    /// uniforms: (samples, queries); normals: (samples, queries, d) -> (queries, width)
    pub fn ra(&self, uniforms: &[F], normals: &[F]) -> Vec<F> {
        let (q, k) = self.scaled();
        let (d, queries) = (self.d, q.len() / self.d);
        let samples = uniforms.len() / queries;
        let mut out = vec![F::of(0.0); queries * self.width()];
        for (at, (&u, normal)) in uniforms.iter().zip(normals.chunks_exact(d)).enumerate() {
            let n = at % queries;
            let row = &q[n * d..][..d];
            let weights: Vec<F> = k.chunks_exact(d).map(|k| dot(row, k).exp()).collect();
            let whole = weights.iter().fold(F::of(0.0), |sum, &w| sum + w);
            let (mut sum, mut chosen) = (F::of(0.0), weights.len() - 1);
            for (m, &weight) in weights.iter().enumerate() {
                sum = sum + weight / whole;
                if sum > u {
                    chosen = m;
                    break;
                }
            }
            let w = plus(&plus(row, &k[chosen * d..][..d]), normal);
            let weights: Vec<F> = k.chunks_exact(d).map(|k| xi(k, &w)).collect();
            let sums = &mut out[n * self.width()..][..self.width()];
            for (sum, f) in sums.iter_mut().zip(self.average(&weights, F::of(0.0))) {
                *sum = *sum + f / F::of(samples as f64);
            }
        }
        out
    }

    /// `sum_c weight(n, c) xi(q_n, w_c) sum_m xi(k_m, w_c) v_m`, divided by the same sum with v = 1: self-normalized
    /// importance sampling (arXiv 2204.04667, section 3), the general form of RFA, LARA and RA.
    ///
    /// w: (samples, d) -> (queries, width)
    pub fn importance(&self, w: &[F], weight: impl Fn(usize, usize) -> F) -> Vec<F> {
        let (q, k) = self.scaled();
        let row = |(n, q): (usize, &[F])| {
            let samples: Vec<(F, &[F])> =
                w.chunks_exact(self.d).enumerate().map(|(c, w)| (weight(n, c) * xi(q, w), w)).collect();
            let of_key = |k| samples.iter().fold(F::of(0.0), |sum, &(weight, w)| sum + weight * xi(k, w));
            let weights: Vec<F> = k.chunks_exact(self.d).map(of_key).collect();
            self.average(&weights, F::of(0.0))
        };
        q.chunks_exact(self.d).enumerate().flat_map(row).collect()
    }

    /// LARA's landmarks `mu_c = q~_c + k~_c`, and their query parts `q~_c`, from scaled q and k: (C, d) each.
    pub fn landmarks(&self, count: usize, at: Landmarks) -> (Vec<F>, Vec<F>) {
        let ((q, k), d) = (self.scaled(), self.d);
        let (of_queries, of_keys) = match at {
            Landmarks::Segments => (segment_means(&q, d, count), segment_means(&k, d, count)),
            Landmarks::Tokens => (segment_middles(&q, d, count), segment_middles(&k, d, count)),
            Landmarks::Crossed => {
                let (rows, columns) = crossing(count);
                let (q, k) = (segment_means(&q, d, rows), segment_means(&k, d, columns));
                let pick = |x: &[F], i: usize| x[i * d..][..d].to_vec();
                (
                    (0..count).flat_map(|c| pick(&q, c / columns)).collect(),
                    (0..count).flat_map(|c| pick(&k, c % columns)).collect(),
                )
            }
        };
        (plus(&of_queries, &of_keys), of_queries)
    }

    /// LARA with the balance heuristic (arXiv 2204.04667, section 4): `w_c = mu_c + normal_c`, with weights
    /// `alpha_c N(w_c; 0, I) / N(w_c; mu_c, I)`, where `alpha_c = N(w_c; mu_c, I) / sum_c' N(w_c; mu_c', I)`.
    ///
    /// normals: (C, d) -> (queries, width)
    pub fn lara_balance(&self, normals: &[F]) -> Vec<F> {
        let (mu, _) = self.landmarks(normals.len() / self.d, Landmarks::Segments);
        let w = plus(&mu, normals);
        let balance = self.balance(&mu, &w);
        self.importance(&w, |_, c| balance[c] / xi(&mu[c * self.d..][..self.d], &w[c * self.d..][..self.d]))
    }

    /// LARA with query-specific weights (section 4): `alpha_nc = max(balance_c + t_nc - mean_c' t_nc', 1e-8)`,
    /// `t_nc = exp(q_n . q~_c) / sum_c' exp(q_n . q~_c')`.
    ///
    /// normals: (C, d), or zeros to sample the means of the proposals -> (queries, width)
    pub fn lara(&self, normals: &[F], at: Landmarks) -> Vec<F> {
        let (d, count) = (self.d, normals.len() / self.d);
        let (q, _) = self.scaled();
        let (mu, of_queries) = self.landmarks(count, at);
        let w = plus(&mu, normals);
        let balance = self.balance(&mu, &w);
        let score = |n: usize, c: usize| dot(&q[n * d..][..d], &of_queries[c * d..][..d]).exp();
        let near = |n: usize, c: usize| {
            let all = (0..count).fold(F::of(0.0), |sum, other| sum + score(n, other));
            score(n, c) / all
        };
        self.importance(&w, |n, c| {
            let mean = (0..count).fold(F::of(0.0), |sum, c| sum + near(n, c)) / F::of(count as f64);
            let (alpha, least) = (balance[c] + near(n, c) - mean, F::of(1e-8));
            let alpha = if alpha > least { alpha } else { least };
            alpha / xi(&mu[c * d..][..d], &w[c * d..][..d])
        })
    }

    /// The share of w_c's total density that comes from its own landmark: (C)
    fn balance(&self, mu: &[F], w: &[F]) -> Vec<F> {
        let (mus, ws) = (mu.chunks_exact(self.d), w.chunks_exact(self.d));
        let all = |w: &[F]| mu.chunks_exact(self.d).fold(F::of(0.0), |sum, mu| sum + xi(mu, w));
        mus.zip(ws).map(|(mu, w)| xi(mu, w) / all(w)).collect()
    }
}

/// Returns the rows of segment c. Row i is in segment `i count / rows`, rounded down.
fn segment<F>(x: &[F], d: usize, count: usize, c: usize) -> Vec<&[F]> {
    let rows = x.len() / d;
    x.chunks_exact(d).enumerate().filter(|(i, _)| i * count / rows == c).map(|(_, row)| row).collect()
}

/// The middle rows of `count` segments: (count, d)
fn segment_middles<F: Float>(x: &[F], d: usize, count: usize) -> Vec<F> {
    (0..count).map(|c| segment(x, d, count, c)).flat_map(|of| of[of.len() / 2].to_vec()).collect()
}

/// The means of `count` segments: (count, d)
pub fn segment_means<F: Float>(x: &[F], d: usize, count: usize) -> Vec<F> {
    let mean = |c: usize| {
        let of = segment(x, d, count, c);
        let column = |i: usize| of.iter().fold(F::of(0.0), |sum, row| sum + row[i]) / F::of(of.len() as f64);
        (0..d).map(column).collect::<Vec<F>>()
    };
    (0..count).flat_map(mean).collect()
}

/// `sqrt(1/D) exp(|y|^2 / 2) [sin(W y), cos(W y)]`, `y = x d^(-1/4)`; w: (D, d) -> (2D)
pub fn trigonometric<F: Float>(x: &[F], w: &[F]) -> Vec<F> {
    let y = scaled(x, x.len());
    let scale = F::of(x.len() as f64 / w.len() as f64).sqrt() * (dot(&y, &y) / F::of(2.0)).exp();
    let waves: Vec<(F, F)> = w.chunks_exact(x.len()).map(|w| dot(w, &y).sin_cos()).collect();
    waves.iter().map(|w| scale * w.0).chain(waves.iter().map(|w| scale * w.1)).collect()
}
