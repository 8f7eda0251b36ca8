//! Feature maps: they turn queries and keys into features whose products estimate a positive kernel.

mod arc_cosine;
mod elu;
mod favor;
mod gaussian;
mod matrices;

use candle_core::{Device, Tensor};

use crate::error::{ModelError, Result};
use crate::kernels::Isa;

pub use arc_cosine::ArcCosineFeatures;
pub use elu::EluFeatures;
pub use favor::FavorFeatures;
pub use gaussian::GaussianFeatures;

/// The feature map of a layer's heads.
#[derive(Debug)]
pub enum Features {
    /// Sine and cosine of random projections.
    Gaussian(GaussianFeatures),
    /// Rectified random projections.
    ArcCosine(ArcCosineFeatures),
    /// `elu(x) + 1`.
    Elu(EluFeatures),
    /// Exponentials of random projections.
    Favor(FavorFeatures),
}

/// Rows of one head, and the buffers for their features.
#[derive(Debug)]
pub(crate) struct FeatureRows<'a> {
    /// Queries and keys (rows, d), overwritten.
    pub(crate) x: &'a mut [f32],
    /// (rows, [`Features::scratch`])
    pub(crate) scratch: &'a mut [f32],
    /// The features: (rows, F)
    pub(crate) phi: &'a mut [f32],
    /// For FAVOR+, the maximum of each row: the logarithm of its largest feature, which all its features are relative
    /// to. (rows)
    pub(crate) maxima: &'a mut [f32],
}

/// The features of keys.
#[derive(Clone, Debug)]
pub struct Keys {
    /// (batch, heads, time, F)
    pub phi: Tensor,
    /// For FAVOR+, the maximum of each key: the logarithm of its largest feature. (batch, heads, time)
    pub maxima: Option<Tensor>,
}

impl Features {
    /// Number of heads, features per head (F), and length of queries and keys (d).
    pub fn dims(&self) -> (usize, usize, usize) {
        match self {
            Self::Gaussian(of) => {
                let (heads, proj_dim, d) = of.dims();
                (heads, 2 * proj_dim, d)
            }
            Self::ArcCosine(of) => of.dims(),
            Self::Elu(of) => of.dims(),
            Self::Favor(of) => of.dims(),
        }
    }

    /// Whether the features of a key are relative to its largest one, so that the sums need a maximum too.
    pub fn has_maximum(&self) -> bool {
        matches!(self, Self::Favor(_))
    }

    /// The upper bound of each head's key maximum: (heads), or empty if keys have no maximum.
    pub(crate) fn greatest_maxima(&self) -> &[f32] {
        if let Self::Favor(of) = self { of.greatest_maxima() } else { &[] }
    }

    /// Bytes of the matrices.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Gaussian(of) => of.bytes(),
            Self::ArcCosine(of) => of.bytes(),
            Self::Elu(_) => 0,
            Self::Favor(of) => of.bytes(),
        }
    }

    /// Scratch elements per row: the angles for sine and cosine; 0 for the other maps, which work in place.
    pub(crate) fn scratch(&self) -> usize {
        if let Self::Gaussian(of) = self { of.dims().1 } else { 0 }
    }

    /// Computes the features of one head's rows. All forms of the recurrence use it.
    pub(crate) fn rows(&self, isa: Isa, head: usize, rows: FeatureRows<'_>) {
        let FeatureRows { x, scratch, phi, maxima } = rows;
        match self {
            Self::Gaussian(of) => of.rows(isa, head, x, scratch, phi),
            Self::ArcCosine(of) => of.rows(isa, head, x, phi),
            Self::Elu(of) => of.rows(isa, x, phi),
            Self::Favor(of) => of.rows(isa, head, x, phi, maxima),
        }
    }

    /// Computes the features of queries. For FAVOR+ they are scaled by a factor per query, which the normalizer
    /// cancels.
    ///
    /// x: (batch, heads, time, d) f32, of any norm -> phi (batch, heads, time, F).
    ///
    /// # Errors
    /// [`ModelError::Shape`] when `x` has a different number of heads or width than the map.
    pub fn queries(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward(x)?.0)
    }

    /// Computes the features of keys. x: (batch, heads, time, d) f32, of any norm.
    ///
    /// # Errors
    /// [`ModelError::Shape`] when `x` has a different number of heads or width than the map.
    pub fn keys(&self, x: &Tensor) -> Result<Keys> {
        let (phi, maxima) = self.forward(x)?;
        Ok(Keys { phi, maxima: self.has_maximum().then_some(maxima) })
    }

    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let ((batch, heads, time, d), (own_heads, features, own_d)) = (x.dims4()?, self.dims());
        if (heads, d) != (own_heads, own_d) {
            return Err(ModelError::shape("features", "heads and d", (own_heads, own_d), (heads, d)));
        }
        let mut x: Vec<f32> = x.flatten_all()?.to_vec1()?;
        let mut scratch = vec![0.0; time * self.scratch()];
        let mut phi = vec![0.0; batch * heads * time * features];
        let mut maxima = vec![0.0; batch * heads * time];
        let rows = x.chunks_exact_mut((time * d).max(1)).zip(phi.chunks_exact_mut((time * features).max(1)));
        for (i, ((x, phi), maxima)) in rows.zip(maxima.chunks_exact_mut(time.max(1))).enumerate() {
            self.rows(Isa::detect(), i % heads, FeatureRows { x, scratch: &mut scratch, phi, maxima });
        }
        let maxima = Tensor::from_vec(maxima, (batch, heads, time), &Device::Cpu)?;
        Ok((Tensor::from_vec(phi, (batch, heads, time, features), &Device::Cpu)?, maxima))
    }
}
