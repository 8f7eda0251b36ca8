//! Rotary position embedding (Su et al., 2021), which pairs the two halves of a head as in Llama. Rotation preserves
//! norms, so unit vectors stay unit.

/// Cosines and sines of the angles of some tokens, shared by all layers.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    frequencies: Vec<f64>,  // (head_dim / 2)
    pairs: Vec<(f32, f32)>, // cosine and sine: (tokens, head_dim / 2)
}

impl Angles {
    /// Angles for heads of length `head_dim`; the slowest turns by about `1 / theta` per token.
    pub(crate) fn new(head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let frequencies = (0..half).map(|i| theta.powf(-(i as f64) / half as f64)).collect();
        Self { frequencies, pairs: Vec::new() }
    }

    /// Computes the angles of `time` tokens of each row, starting at the row's position.
    ///
    /// Uses f64: at position ten million, an f32 angle is off by whole turns.
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

    /// Rotates every head of every token. x: (tokens, stride); the first `width` elements of each token are heads
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
