//! The choices that a `config.json` has words for.

use serde::{Deserialize, Serialize};

/// The family of the attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Random feature attention (Peng et al., ICLR 2021), with or without the gate.
    Rfa,
    /// Softmax attention to the last `sliding_window` tokens, whose keys and values are the state. Of the keys below,
    /// `feature_map`, `gate`, `proj_dim` and `denominator_eps` say nothing to it.
    Softmax,
    /// Both in one normaliser: softmax attention to the last `sliding_window` tokens, random feature attention to all
    /// that were before them.
    Hybrid,
}

/// How queries and keys become features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureMap {
    /// `sqrt(1/D) [sin(W x), cos(W x)]` on unit-length `x` (Peng et al., 2021, equation 2).
    Gaussian,
    /// `sqrt(1/D) ReLU(W x)` on unit-length `x` (Peng et al., 2021, appendix A; Cho and Saul, 2009).
    ArcCosine,
    /// `elu(x) + 1`, number by number, with nothing random (Katharopoulos et al., 2020, equation 7).
    Elu,
    /// FAVOR+: `sqrt(1/D) exp(W y - |y|^2 / 2)` with `y = x d^(-1/4)`, rows of W orthogonal (Choromanski et al., 2021,
    /// equation 7).
    Favor,
}

impl FeatureMap {
    /// Its name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "gaussian",
            Self::ArcCosine => "arc_cosine",
            Self::Elu => "elu",
            Self::Favor => "favor",
        }
    }

    /// Whether `x` is made unit length and `W = sigma . W~`, with a learned sigma: elsewhere there is none.
    pub fn has_sigma(self) -> bool {
        matches!(self, Self::Gaussian | Self::ArcCosine)
    }

    /// Whether there are random vectors, which the checkpoint keeps.
    pub fn has_random_matrices(self) -> bool {
        self != Self::Elu
    }

    /// Whether products of features may be negative, and the denominator near 0 or below it while values are added:
    /// then it has a floor, a share of the weight seen. Where no feature is negative the output is a mean of values,
    /// however small the denominator, and the least normal number is floor enough.
    pub fn has_floor(self) -> bool {
        self == Self::Gaussian
    }

    /// Whether a head remembers the maximum of its keys: the logarithm of their greatest feature, which S and z are
    /// relative to.
    pub fn has_maximum(self) -> bool {
        self == Self::Favor
    }
}

/// Where a token's position enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// Nowhere: the recurrence and the gate know the order.
    None,
    /// Rotary angles on `q` and `k`, which keep their length.
    Rope,
}

/// One token id or several: Hugging Face writes `eos_token_id` either way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TokenIds {
    /// `null` or absent.
    #[default]
    None,
    /// A single id.
    One(u32),
    /// A list of ids.
    Many(Vec<u32>),
}

impl TokenIds {
    /// The ids as a slice.
    pub fn as_slice(&self) -> &[u32] {
        match self {
            Self::None => &[],
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}
