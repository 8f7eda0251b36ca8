//! Rotary positions (Su et al., 2021), halves rotated as Llama does; lengths are kept, so unit vectors stay unit.

/// Cosines and sines of the angles of some tokens, the same for every layer.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    frequencies: Vec<f64>,  // (head_dim / 2)
    pairs: Vec<(f32, f32)>, // cosine and sine: (tokens, head_dim / 2)
}

impl Angles {
    /// Angles of a head of `head_dim`, the slowest turning by `1 / theta` a token.
    pub(crate) fn new(head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let frequencies = (0..half).map(|i| theta.powf(-(i as f64) / half as f64)).collect();
        Self { frequencies, pairs: Vec::new() }
    }

    /// Those of `time` tokens of each row, from each row's position on.
    ///
    /// Made in f64: at position ten million an f32 angle would be off by whole turns.
    pub(crate) fn turn(&mut self, positions: &[u64], time: usize) {
        self.pairs.clear();
        for &start in positions {
            for t in 0..time as u64 {
                for frequency in &self.frequencies {
                    let (sin, cos) = ((start + t) as f64 * frequency).sin_cos();
                    self.pairs.push((cos as f32, sin as f32));
                }
            }
        }
    }

    /// Rotates every head of every token. x: (tokens, stride), the first `width` of each rotated head by head.
    pub(crate) fn rotate(&self, x: &mut [f32], stride: usize, width: usize) {
        let half = self.frequencies.len();
        for (x, pairs) in x.chunks_exact_mut(stride).zip(self.pairs.chunks_exact(half)) {
            for head in x[..width].chunks_exact_mut(2 * half) {
                let (a, b) = head.split_at_mut(half);
                for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(pairs) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}
