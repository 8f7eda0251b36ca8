//! Products `x . w^T + bias` with weights of any type, for one matrix or for several in one job. Within a job, threads
//! need not wait for one another between small products, so they read the weights nearly as fast as in one large
//! product.

use super::panels::{Output, PANEL, Split};
use super::quantized::Activations;
use super::{Isa, float, norm, quantized, threads::Threads};

/// Weights (n, k) in the layout that the kernels use.
#[derive(Debug)]
pub(crate) enum Weight {
    Float(float::Packed),
    Quantised(quantized::Packed),
}

impl Weight {
    /// Returns n, the number of outputs.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Float(w) => w.rows(),
            Self::Quantised(w) => w.rows(),
        }
    }

    /// Returns k, the number of inputs.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Float(w) => w.columns(),
            Self::Quantised(w) => w.columns(),
        }
    }

    /// Returns the number of bytes held.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Float(w) => w.bytes(),
            Self::Quantised(w) => w.bytes(),
        }
    }

    /// Writes one row in f32. out: (k)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Float(w) => w.row(row, out),
            Self::Quantised(w) => w.row(row, out),
        }
    }
}

/// One product: x (rows, k), bias (n) -> out (rows, n)
pub(crate) struct Product<'a> {
    w: &'a Weight,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    rows: usize,
    out: Output<'a>,
}

impl<'a> Product<'a> {
    /// Describes the product of `x` with `w`.
    ///
    /// # Panics
    /// If the lengths do not fit; callers are layers, which know their widths.
    pub(crate) fn new(w: &'a Weight, bias: Option<&'a [f32]>, x: &'a [f32], out: &'a mut [f32]) -> Self {
        let (rows, n) = (x.len() / w.columns(), w.rows());
        let fits = x.len() == rows * w.columns() && out.len() == rows * n && bias.is_none_or(|bias| bias.len() == n);
        assert!(fits, "product: lengths do not fit");
        Self { w, bias, x, rows, out: Output::new(out, n.max(1)) }
    }

    fn split(&self, threads: &Threads) -> Split {
        Split::new(threads, self.rows, (self.w.rows(), self.w.columns()), self.w.bytes())
    }

    /// Computes piece `i`.
    ///
    /// # Safety
    /// Each piece is computed once, and `activations` holds `x` if the weights are quantized.
    unsafe fn piece(&self, isa: Isa, split: Split, i: usize, activations: &Activations) {
        let (rows, panels) = split.piece(i);
        // SAFETY: the pieces of a split do not overlap, and `new` has checked the lengths.
        unsafe {
            match self.w {
                Weight::Float(w) => float::panels(isa, self.x, rows.clone(), w, panels.clone(), self.out),
                Weight::Quantised(w) => quantized::panels(isa, activations, rows.clone(), w, panels.clone(), self.out),
            }
        }
        let Some(bias) = self.bias else { return };
        let columns = panels.start * PANEL..self.w.rows().min(panels.end * PANEL);
        for row in rows {
            // SAFETY: as above.
            norm::add(isa, unsafe { self.out.part(row, columns.clone()) }, &bias[columns.clone()]);
        }
    }
}

/// Computes all products, reusing `buffers` from call to call.
pub(crate) fn run(isa: Isa, products: &[Product<'_>], buffers: &mut Vec<Activations>, threads: &Threads) {
    if buffers.len() < products.len() {
        buffers.resize_with(products.len(), Activations::default);
    }
    let (mut pieces, mut first_half) = (0, 0);
    for (product, buffer) in products.iter().zip(&mut *buffers) {
        if let Weight::Quantised(w) = product.w {
            buffer.quantise(isa, product.x, w.columns(), threads);
        }
        let split = product.split(threads);
        pieces += split.pieces();
        first_half += split.first_half();
    }
    // All products' first half of rows comes first, then their second half, so that the threads at one end of the job
    // read one half.
    threads.run(pieces, &|i| {
        let second = i >= first_half;
        let mut i = if second { i - first_half } else { i };
        for (product, buffer) in products.iter().zip(&*buffers) {
            let split = product.split(threads);
            let pieces = if second { split.first_half()..split.pieces() } else { 0..split.first_half() };
            if i < pieces.len() {
                // SAFETY: `Threads::run` does each piece once, and the buffer was filled above.
                return unsafe { product.piece(isa, split, pieces.start + i, buffer) };
            }
            i -= pieces.len();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::float::tests::numbers;

    #[test]
    fn products_in_one_job_have_the_bits_of_each_alone() {
        let k = 96;
        let float = |n: usize, seed| Weight::Float(float::Packed::of_f32(&numbers(n * k, seed), k));
        let blocks = vec![0x11; 300 * k / 32 * 34];
        let quantised = quantized::Packed::pack(quantized::Kind::Q8_0, &blocks, 300, k, &Threads::new(1)).unwrap();
        let weights = [float(40, 1), Weight::Quantised(quantised), float(700, 2)];
        let bias = numbers(700, 3);
        for rows in [0, 1, 2, 60] {
            let x: Vec<Vec<f32>> = (0..3).map(|i| numbers(rows * k, 10 + i)).collect();
            let computed = |threads: &Threads, together: bool| {
                let mut out: Vec<Vec<f32>> = weights.iter().map(|w| vec![f32::NAN; rows * w.rows()]).collect();
                let biased = |w: &Weight| (w.rows() == bias.len()).then_some(&bias[..]);
                let products: Vec<_> = weights
                    .iter()
                    .zip(&x)
                    .zip(&mut out)
                    .map(|((w, x), out)| Product::new(w, biased(w), x, out))
                    .collect();
                let mut buffers = Vec::new();
                for products in products.chunks(if together { 3 } else { 1 }) {
                    run(Isa::detect(), products, &mut buffers, threads);
                }
                drop(products);
                out
            };
            let alone = computed(&Threads::new(1), false);
            assert!(alone.iter().flatten().all(|v| v.is_finite()));
            for count in [1, 2, 5] {
                assert_eq!(computed(&Threads::new(count), true), alone, "{rows} rows, {count} threads");
            }
        }
    }

    #[test]
    fn a_bias_is_added_once_to_every_number() {
        let (n, k) = (200, 3);
        let w = Weight::Float(float::Packed::of_f32(&vec![1.0; n * k], k));
        let bias: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let (x, mut out) = ([1.0, 2.0, 4.0, 1.0, 1.0, 1.0], vec![f32::NAN; 2 * n]);
        run(Isa::detect(), &[Product::new(&w, Some(&bias), &x, &mut out)], &mut Vec::new(), &Threads::new(3));
        assert!((0..n).all(|i| out[i] == 7.0 + bias[i] && out[n + i] == 3.0 + bias[i]));
    }
}
