//! The reference definitions of sums and dot products: over sixteen lanes, which are added in a fixed order.

use super::LANES;

/// Adds up the lanes, one half onto the other each time: 16, 8, 4, 2, 1.
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

/// Returns `sum_i x_i`: element i goes to lane i mod 16, in the order of i.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for l in 0..LANES {
            lanes[l] += block[l];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    reduce(lanes)
}

/// Returns `sum_i x_i y_i`: element i goes to lane i mod 16, fused, in the order of i.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (x_blocks, x_rest) = x.as_chunks::<LANES>();
    let (y_blocks, y_rest) = y.as_chunks::<LANES>();
    for (xb, yb) in x_blocks.iter().zip(y_blocks) {
        for l in 0..LANES {
            lanes[l] = xb[l].mul_add(yb[l], lanes[l]);
        }
    }
    for (l, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        lanes[l] = x.mul_add(*y, lanes[l]);
    }
    reduce(lanes)
}
