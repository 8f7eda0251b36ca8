//! The enums of `config.json`.

use serde::{Deserialize, Serialize};

/// The mixer of every layer. [`crate::mixers`] has a folder for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Random feature attention (Peng et al., ICLR 2021), with or without the gate.
    Rfa,
    /// Softmax attention over the last `sliding_window` tokens, whose keys and values are the state. It ignores
    /// `feature_map`, `gate`, `proj_dim` and `denominator_eps`.
    Softmax,
    /// Softmax attention over the last `sliding_window` tokens and random feature attention over all older ones, with a
    /// joint normalizer.
    Hybrid,
    /// RWKV-7 "Goose" (Peng et al., 2025): the generalized delta rule, token shift and a channel mix. Only if
    /// `model_type` is `rwkv7`.
    Rwkv7,
    /// Mamba-2 (Dao and Gu, 2024): a state-space model with one decay per head. Only if `model_type` is `mamba2`.
    Mamba2,
}

/// The map from queries and keys to features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureMap {
    /// `sqrt(1/D) [sin(W x), cos(W x)]` on unit-length `x` (Peng et al., 2021, equation 2).
    Gaussian,
    /// `sqrt(1/D) ReLU(W x)` on unit-length `x` (Peng et al., 2021, appendix A; Cho and Saul, 2009).
    ArcCosine,
    /// `elu(x) + 1` element-wise, without random vectors (Katharopoulos et al., 2020, equation 7).
    Elu,
    /// FAVOR+: `sqrt(1/D) exp(W y - |y|^2 / 2)` with `y = x d^(-1/4)` and orthogonal rows of W (Choromanski et al.,
    /// 2021, equation 7).
    Favor,
}

impl FeatureMap {
    /// The name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "gaussian",
            Self::ArcCosine => "arc_cosine",
            Self::Elu => "elu",
            Self::Favor => "favor",
        }
    }

    /// Whether `x` is normalized to unit length, and `W = sigma . W~` with a learned sigma.
    pub fn has_sigma(self) -> bool {
        matches!(self, Self::Gaussian | Self::ArcCosine)
    }

    /// Number of features per head (F), given its random vectors (D) and the length of its queries and keys (d).
    pub fn features(self, proj_dim: usize, head_dim: usize) -> usize {
        match self {
            Self::Gaussian => 2 * proj_dim,
            Self::ArcCosine | Self::Favor => proj_dim,
            Self::Elu => head_dim,
        }
    }

    /// Whether the checkpoint has random vectors.
    pub fn has_random_matrices(self) -> bool {
        self != Self::Elu
    }

    /// Whether products of features can be negative, so that the denominator can fall to 0 or below as values are
    /// added. Such maps need a floor, which is a share of the weight seen so far. If no feature is negative, the output
    /// is a mean of values however small the denominator is, and the smallest normal number is floor enough.
    pub fn has_floor(self) -> bool {
        self == Self::Gaussian
    }

    /// Whether a head keeps the maximum of its keys: the logarithm of their largest feature, which S and z are relative
    /// to.
    pub fn has_maximum(self) -> bool {
        self == Self::Favor
    }
}

/// How a token's position is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// No position encoding: the recurrence and the gate depend on the order of tokens.
    None,
    /// Rotary position embedding of `q` and `k`.
    Rope,
}

/// One token id or several: Hugging Face writes `eos_token_id` both ways.
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
