//! Seeded random numbers: normal and uniform tensors, and orthogonal rows. A seed gives the same numbers on every
//! machine, up to the rounding of the logarithm and cosine.

use candle_core::{Device, Result, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

/// The random numbers of one forward pass.
#[derive(Clone, Debug)]
pub enum Draws {
    /// Nothing, for softmax and elu.
    None,
    /// Random vectors of every head, shared by the batch: (heads, D, d).
    Matrices(Tensor),
    /// LARA's noise, N(0, 1), or zeros to sample the means of its proposals: (batch, heads, C, d).
    Landmarks(Tensor),
    /// RA's noise, and the numbers by which keys are chosen.
    Queries {
        /// N(0, 1): (batch, heads, samples, queries, d).
        normals: Tensor,
        /// Uniform in [0, 1): (batch, heads, samples, queries).
        uniforms: Tensor,
    },
}

/// A seeded source of random numbers.
#[derive(Clone, Debug)]
pub struct Generator {
    bits: ChaCha8Rng,
    spare: Option<f64>, // the second normal of a pair
}

impl Generator {
    /// Starts the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self { bits: ChaCha8Rng::seed_from_u64(seed), spare: None }
    }

    /// Returns a uniform number in [0, 1), a multiple of 2^-53.
    pub fn uniform(&mut self) -> f64 {
        (self.bits.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a standard normal number (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        // In (0, 1], because the logarithm of 0 is infinite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Returns standard normal numbers in the float type of `like`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn normals(&mut self, shape: &[usize], like: &Tensor) -> Result<Tensor> {
        let count = shape.iter().product();
        tensor((0..count).map(|_| self.normal()).collect(), shape, like)
    }

    /// Returns numbers that are uniform in [0, 1). They are always f64, because rounding to fewer bits could reach 1.
    ///
    /// # Errors
    /// If the device fails.
    pub fn uniforms(&mut self, shape: &[usize], like: &Tensor) -> Result<Tensor> {
        let count: usize = shape.iter().product();
        let numbers: Vec<f64> = (0..count).map(|_| self.uniform()).collect();
        Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_device(like.device())
    }

    /// Returns rows that are orthogonal within blocks of d and have independent norms distributed as chi(d), so each
    /// row is standard normal (Choromanski et al. 2021, section 2.4).
    ///
    /// -> (heads, rows, d)
    ///
    /// # Errors
    /// If the device fails.
    pub fn orthogonal(&mut self, (heads, rows, d): (usize, usize, usize), like: &Tensor) -> Result<Tensor> {
        let mut numbers = Vec::with_capacity(heads * rows * d);
        for _ in 0..heads {
            for at in (0..rows).step_by(d) {
                let mut block: Vec<Vec<f64>> = Vec::with_capacity(d);
                while block.len() < d.min(rows - at) {
                    let mut row: Vec<f64> = (0..d).map(|_| self.normal()).collect();
                    // A second pass removes the rounding errors of nearly parallel rows.
                    for _ in 0..2 {
                        for other in &block {
                            let along = dot(&row, other);
                            row.iter_mut().zip(other).for_each(|(x, o)| *x -= along * o);
                        }
                    }
                    let length = dot(&row, &row).sqrt();
                    block.push(row.iter().map(|x| x / length).collect());
                }
                for row in block {
                    let length = (0..d).map(|_| self.normal().powi(2)).sum::<f64>().sqrt();
                    numbers.extend(row.iter().map(|x| x * length));
                }
            }
        }
        tensor(numbers, &[heads, rows, d], like)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn tensor(numbers: Vec<f64>, shape: &[usize], like: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_the_moments_of_a_standard_normal() {
        let mut generator = Generator::new(1);
        let n = 200_000;
        let numbers: Vec<f64> = (0..n).map(|_| generator.normal()).collect();
        // The moment estimates have variances of 1/n, 2/n, 15/n and 96/n.
        for (power, want, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let moment = numbers.iter().map(|x| x.powi(power)).sum::<f64>() / f64::from(n);
            let bound = 4.5 * (variance / f64::from(n)).sqrt();
            assert!((moment - want).abs() < bound, "moment {power}: {moment}, bound {bound}");
        }
        let mut again = Generator::new(1);
        assert!(numbers.iter().all(|&x| x == again.normal()));
        assert_ne!(Generator::new(2).normal(), numbers[0]);
    }

    #[test]
    fn rows_are_orthogonal_within_blocks_and_as_long_as_normal_vectors() {
        let (heads, rows, d) = (300, 10, 4);
        let like = Tensor::zeros(1, candle_core::DType::F64, &Device::Cpu).unwrap();
        let w: Vec<f64> =
            Generator::new(3).orthogonal((heads, rows, d), &like).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let mut squares = 0.0;
        for head in w.chunks_exact(rows * d) {
            let row = |i: usize| &head[i * d..(i + 1) * d];
            for (i, j) in (0..rows).flat_map(|i| (0..i).map(move |j| (i, j))) {
                let cosine = dot(row(i), row(j)) / (dot(row(i), row(i)) * dot(row(j), row(j))).sqrt();
                assert_eq!(cosine.abs() < 1e-12, i / d == j / d, "rows {i} and {j}: {cosine}");
            }
            squares += (0..rows).map(|i| dot(row(i), row(i))).sum::<f64>();
        }
        // |row|^2 is chi-squared: mean d, variance 2d.
        let n = (heads * rows) as f64;
        let bound = 4.5 * (2.0 * d as f64 / n).sqrt();
        assert!((squares / n - d as f64).abs() < bound, "{} for {d}, bound {bound}", squares / n);
    }
}
