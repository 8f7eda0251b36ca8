//! The definitions: a dot product over sixteen lanes and the order in which the lanes are added.

use super::LANES;

/// A weight as it is stored; `widen` is exact.
pub(crate) trait Element: Copy + Send + Sync {
    /// The value in f32.
    fn widen(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Element for half::bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Element for half::f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// The lanes' sum, halves onto halves: 16, 8, 4, 2, 1.
#[inline(always)]
pub(crate) fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `sum_i x_i w_i`: element i goes to lane i mod 16, fused, in the order of i. The truth of every matrix product.
#[inline(always)]
pub(crate) fn dot<W: Element>(x: &[f32], w: &[W]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (x_blocks, x_rest) = x.as_chunks::<LANES>();
    let (w_blocks, w_rest) = w.as_chunks::<LANES>();
    for (xb, wb) in x_blocks.iter().zip(w_blocks) {
        for l in 0..LANES {
            lanes[l] = xb[l].mul_add(wb[l].widen(), lanes[l]);
        }
    }
    for (l, (x, w)) in x_rest.iter().zip(w_rest).enumerate() {
        lanes[l] = x.mul_add(w.widen(), lanes[l]);
    }
    reduce(lanes)
}

#[cfg(test)]
/// `out (rows, n) = x (rows, k) . w (n, k)^T`, one dot product after another.
pub(crate) fn matmul_nt<W: Element>(x: &[f32], w: &[W], k: usize, out: &mut [f32]) {
    let n = w.len() / k;
    for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (w, out) in w.chunks_exact(k).zip(out) {
            *out = dot(x, w);
        }
    }
}
