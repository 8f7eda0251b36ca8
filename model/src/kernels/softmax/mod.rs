//! Softmax attention of some queries of one head to one block of cached keys and values, and the sum over blocks.
//!
//! Keys are stored in panels of sixty-four, coordinate by coordinate: a score is one chain of fused multiply-adds in a
//! lane of its own, and no sum crosses lanes. Values are stored row by row, and each column of the output is one chain
//! over the block's keys. So a query's sums have the same bits whichever queries are computed with it.

mod block;
mod tile;

use super::activation::exp_lane;
use super::element::Element;
pub(crate) use super::panels::PANEL;
use super::{Isa, multiversion, vector};
pub(crate) use block::{BLOCK, Block, Cached};
use tile::Queries;

/// Computes the attention of queries (each scaled) to the first `filled` keys of a block: the sums of `exp(q k - m) v`
/// and of `exp(q k - m)`, with m the largest `q k`.
///
/// q: (queries, d) -> out: (queries, [`Block::partial_len`])
///
/// # Panics
/// If the lengths do not fit.
pub(crate) fn attend_block<S: Cached>(isa: Isa, block: &[S], shape: Block, filled: usize, q: &[f32], out: &mut [f32]) {
    let Block { d, .. } = shape;
    assert!(
        filled > 0 && q.len().is_multiple_of(d) && out.len() == q.len() / d * shape.partial_len(),
        "softmax: lengths do not fit"
    );
    typed(Queries { block: S::loaded(block), shape, filled, q, out, isa });
}

fn typed<W: Element>(queries: Queries<'_, W>) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn two<W: Element>(queries: Queries<'_, W>) {
        // SAFETY: this function is called where the machine has AVX2.
        unsafe { tile::run::<vector::avx2::V, W, 8, 2, 2>(queries) };
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn five<W: Element>(queries: Queries<'_, W>) {
        // SAFETY: this function is called where the machine has AVX-512.
        unsafe { tile::run::<vector::avx512::V, W, 4, 4, 1>(queries) };
    }
    match queries.isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields this only where the machine has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { two(queries) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields these only where the machine has AVX-512 F, BW, DQ and VL.
        Isa::Avx512 | Isa::Avx512Vnni => unsafe { five(queries) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::available` yields this only where the machine has NEON.
        Isa::Neon | Isa::NeonDot => unsafe { tile::run::<vector::neon::V, W, 16, 4, 4>(queries) },
        // SAFETY: plain numbers need no instruction set.
        Isa::Plain => unsafe { tile::run::<vector::plain::V, W, 4, 1, 1>(queries) },
    }
}

#[inline(always)]
fn add_body(all: &mut [f32], next: &[f32]) {
    let columns = all.len() - 2;
    let most = all[columns].max(next[columns]);
    let (ours, theirs) = (exp_lane(all[columns] - most), exp_lane(next[columns] - most));
    for (all, next) in all[..columns].iter_mut().zip(next) {
        *all = all.mul_add(ours, next * theirs);
    }
    all[columns] = most;
    all[columns + 1] = all[columns + 1].mul_add(ours, next[columns + 1] * theirs);
}

multiversion! {
    /// Adds the sums of the next block; both are rescaled to the larger of the two largest scores.
    pub(crate) fn add(all: &mut [f32], next: &[f32]) = add_body;
}

/// Writes the weighted mean of the values. all: ([`Block::partial_len`]) -> out: (d)
pub(crate) fn mean(all: &[f32], out: &mut [f32]) {
    let scale = 1.0 / all[all.len() - 1];
    out.iter_mut().zip(all).for_each(|(out, sum)| *out = sum * scale);
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn wave(n: usize, f: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * f).sin()).collect()
    }

    fn block_of<S: Cached>(shape: Block, count: usize) -> Vec<S> {
        let mut block = vec![S::default(); shape.numbers()];
        for place in 0..count {
            let (k, v) = (wave(shape.d, 0.3 + place as f32), wave(shape.d, 0.7 + place as f32));
            shape.write(&mut block, place, &k, &v);
        }
        block
    }

    fn partial(isa: Isa, shape: Block, filled: usize, q: &[f32]) -> Vec<u32> {
        let mut out = vec![f32::NAN; 2 * q.len() / shape.d * shape.partial_len()];
        let (a, b) = out.split_at_mut(q.len() / shape.d * shape.partial_len());
        attend_block(isa, &block_of::<f32>(shape, filled), shape, filled, q, a);
        attend_block(isa, &block_of::<u16>(shape, filled), shape, filled, q, b);
        let next = b.to_vec();
        add(isa, &mut a[..shape.partial_len()], &next[..shape.partial_len()]);
        out.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        for (d, places, filled) in [(64, 256, 256), (64, 256, 1), (5, 64, 17), (37, 128, 70), (96, 256, 255)] {
            let shape = Block { d, places };
            for queries in [1, 2, 11] {
                let q = wave(queries * d, 1.1);
                let want = partial(Isa::Plain, shape, filled, &q);
                for isa in Isa::available() {
                    assert_eq!(partial(isa, shape, filled, &q), want, "{isa:?} {shape:?} {filled} {queries}");
                }
            }
        }
    }

    #[test]
    fn a_query_has_the_same_bits_alone_and_with_others() {
        let shape = Block { d: 40, places: 128 };
        let (q, block) = (wave(9 * 40, 1.1), block_of::<f32>(shape, 100));
        let partial = |q: &[f32]| {
            let mut out = vec![f32::NAN; q.len() / 40 * shape.partial_len()];
            attend_block(Isa::detect(), &block, shape, 100, q, &mut out);
            out
        };
        let alone: Vec<f32> = q.chunks_exact(40).flat_map(partial).collect();
        assert_eq!(partial(&q), alone);
    }

    #[test]
    fn written_keys_and_values_are_read_back() {
        let shape = Block { d: 5, places: 128 };
        let mut block = vec![0u16; shape.numbers()];
        let numbers = |place: usize, which: usize| (0..5).map(move |i| ((which * 128 + place) * 5 + i) as f32 / 8.0);
        let nearest = |v: f32| bf16::from_f32(v).to_f32();
        for place in 0..128 {
            let [k, v] = [0, 1].map(|which| numbers(place, which).collect::<Vec<f32>>());
            shape.write(&mut block, place, &k, &v);
        }
        for place in 0..128 {
            assert!(shape.key(&block, place).eq(numbers(place, 0).map(nearest)), "{place}");
            assert!(shape.value(&block, place).eq(numbers(place, 1).map(nearest)), "{place}");
        }
    }

    #[test]
    fn scores_of_any_size_leave_no_nan() {
        let shape = Block { d: 1, places: 64 };
        let mut block = vec![0.0f32; shape.numbers()];
        for (place, k) in [-3e38f32, 3e38, 0.0, -1.0].into_iter().enumerate() {
            shape.write(&mut block, place, &[k], &[place as f32]);
        }
        let (mut all, mut next) = (vec![0.0; shape.partial_len()], vec![0.0; shape.partial_len()]);
        attend_block(Isa::detect(), &block, shape, 4, &[1.0], &mut all);
        attend_block(Isa::detect(), &block, shape, 1, &[1.0], &mut next);
        add(Isa::detect(), &mut all, &next);
        let mut out = [f32::NAN];
        mean(&all, &mut out);
        assert!((out[0] - 1.0).abs() < 1e-6, "{out:?}");
    }
}
