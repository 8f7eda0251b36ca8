//! Seeded normal numbers, and matrices with orthogonal rows, for random features without a checkpoint.

/// A stream of standard normal numbers, which the seed determines.
#[derive(Clone, Debug)]
pub struct Normals {
    state: u64,
    spare: Option<f64>,
}

impl Normals {
    /// Starts the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed, spare: None }
    }

    /// Returns the next 64 bits: SplitMix64 (Steele, Lea and Flood, 2014).
    fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a uniform number in (0, 1], whose logarithm is finite.
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns a normal number. Box and Muller's method (1958) makes them in pairs.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Returns `len` normal numbers.
    pub fn vec(&mut self, len: usize) -> Vec<f64> {
        (0..len).map(|_| self.normal()).collect()
    }

    /// Returns a row-major matrix (rows, columns) with orthogonal rows in blocks of `columns` rows (Yu et al., 2016;
    /// Choromanski et al., 2021, section 3.2). Directions are those of normal vectors after Gram-Schmidt, and norms are
    /// distributed as chi(columns), so each row by itself is a normal vector. Empty if `columns` is 0.
    pub fn orthogonal_rows(&mut self, rows: usize, columns: usize) -> Vec<f64> {
        let mut out: Vec<f64> = Vec::with_capacity(rows * columns);
        if columns == 0 {
            return out;
        }
        for row in 0..rows {
            let before = row - row % columns;
            let norm = length(&self.vec(columns));
            let direction = loop {
                let mut x = self.vec(columns);
                // Twice, because one pass leaves rounding errors, which the second removes.
                for _ in 0..2 {
                    for other in out[before * columns..].chunks_exact(columns) {
                        let square: f64 = other.iter().map(|v| v * v).sum();
                        let share = x.iter().zip(other).map(|(a, b)| a * b).sum::<f64>() / square;
                        x.iter_mut().zip(other).for_each(|(a, b)| *a -= share * b);
                    }
                }
                // A vector in the span of the previous rows has no direction of its own, so another is drawn.
                if length(&x) > 1e-6 {
                    break x;
                }
            };
            let scale = norm / length(&direction);
            out.extend(direction.iter().map(|v| v * scale));
        }
        out
    }
}

fn length(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_moments_of_a_normal_distribution() {
        let n = 100_000;
        let numbers = Normals::new(7).vec(n);
        let moment = |power: i32| numbers.iter().map(|v| v.powi(power)).sum::<f64>() / n as f64;
        // Each within five standard errors: those of the powers are sqrt(1, 2, 15, 96) over sqrt(n).
        for (power, want, spread) in [(1, 0.0, 1.0f64), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let error = (moment(power) - want).abs();
            assert!(error < 5.0 * (spread / n as f64).sqrt(), "moment {power}: {}", moment(power));
        }
        assert_eq!(Normals::new(7).vec(10), numbers[..10]);
        assert_ne!(Normals::new(8).normal(), numbers[0]);
    }

    #[test]
    fn rows_are_orthogonal_in_blocks_and_as_long_as_normal_vectors() {
        let (rows, columns) = (41, 16);
        let w = Normals::new(3).orthogonal_rows(rows, columns);
        let row = |i: usize| &w[i * columns..][..columns];
        for i in 0..rows {
            for j in (i - i % columns)..i {
                let product: f64 = row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum();
                assert!(product.abs() < 1e-12, "rows {i} and {j}: {product}");
            }
        }
        assert!(Normals::new(3).orthogonal_rows(rows, 0).is_empty());
        assert!(Normals::new(3).orthogonal_rows(0, columns).is_empty());
        // chi(d)^2 has mean d and variance 2 d.
        let draws = 400;
        let mut normals = Normals::new(4);
        let squares: Vec<f64> =
            (0..draws).flat_map(|_| normals.orthogonal_rows(3, 5)).map(|v| v * v).collect::<Vec<_>>();
        let squares: Vec<f64> = squares.chunks_exact(5).map(|row| row.iter().sum()).collect();
        let mean = squares.iter().sum::<f64>() / squares.len() as f64;
        assert!((mean - 5.0).abs() < 5.0 * (10.0 / squares.len() as f64).sqrt(), "{mean}");
        let variance = squares.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / squares.len() as f64;
        assert!((variance / 10.0 - 1.0).abs() < 0.3, "{variance}");
    }
}
