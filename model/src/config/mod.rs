//! `config.json`: its keys, their defaults, and the bounds that all model families share. `schema` reads a config and
//! has its family check the rest.
//!
//! Keys that Llama also has use Hugging Face's names. Unknown keys are rejected: a misspelled key must not silently
//! mean its default.

use std::fmt::Display;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

mod kinds;
mod low_ranks;
mod source;
mod state_space;

pub use kinds::{Attention, FeatureMap, PositionEmbedding, TokenIds};
pub use low_ranks::LowRanks;
pub use source::SourceConfig;
pub use state_space::StateSpace;

/// Why a `config.json` was rejected. The message names the field and its bound.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, a missing or unknown key, or a value of the wrong type.
    #[error("config.json: {0}")]
    Key(#[from] serde_path_to_error::Error<serde_json::Error>),
    /// Trailing data after the JSON value.
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A value outside its bounds.
    #[error("config.json: {field} must be {bound}, found {found}")]
    Bound {
        /// The key in `config.json`.
        field: &'static str,
        /// The accepted values.
        bound: String,
        /// The value in the file.
        found: String,
    },
}

impl ConfigError {
    /// Makes a [`Self::Bound`] error.
    pub(crate) fn bound(field: &'static str, bound: impl Into<String>, found: impl Display) -> Self {
        Self::Bound { field, bound: bound.into(), found: format!("{found}") }
    }
}

/// Optional keys that mean something other than their default when absent.
#[derive(Deserialize)]
pub(crate) struct GivenKeys {
    pub(crate) position_embedding: Option<IgnoredAny>,
    pub(crate) proj_dim: Option<IgnoredAny>,
}

/// The shape and family of a decoder, as read from `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// `rfa_gate` for a decoder, `rfa_seq2seq` for an encoder-decoder, `rwkv7` for RWKV-7,
    /// `mamba2` for Mamba-2.
    pub model_type: String,
    /// Hugging Face's class names; ignored.
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward part. Mamba-2 has none; there it is the width of all heads.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of heads per attention layer.
    pub num_attention_heads: usize,
    /// Length of a head's queries, keys and values (d); defaults to `hidden_size / num_attention_heads`.
    #[serde(default)]
    pub head_dim: usize,
    /// Activation of the feed-forward part: `silu`, or `sqrelu` for RWKV-7.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Epsilon, added to the mean square in RMSNorm or to the variance in layer norm.
    #[serde(default = "rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the output head shares the embedding's matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// The mixer of every layer.
    #[serde(default = "rfa")]
    pub attention: Attention,
    /// The feature map of random feature attention.
    #[serde(default = "gaussian")]
    pub feature_map: FeatureMap,
    /// Tokens that softmax attention covers, including the newest. Required for `softmax` and `hybrid`, rejected for
    /// `rfa`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Whether a learned gate decays the state (RFA-Gate).
    #[serde(default = "yes")]
    pub gate: bool,
    /// Number of random vectors per head (D). 0 or absent for `softmax` and for the `elu` map.
    #[serde(default)]
    pub proj_dim: usize,
    /// Lower bound of the denominator for Gaussian features, as a share of the weight seen so far, because products of
    /// these features can be 0 or negative. Features of the other maps are not negative and need no bound.
    #[serde(default = "denominator_eps")]
    pub denominator_eps: f64,
    /// Whether each head's output goes through an RMSNorm.
    #[serde(default)]
    pub output_norm: bool,
    /// Kernel size of the causal convolution on q, k and v (Mamba-2: on x, B and C), 2 to 16; 0 for no convolution.
    #[serde(default)]
    pub conv_kernel: usize,
    /// The position encoding; defaults to `rope` for `softmax` and `hybrid`, to `none` for `rfa`.
    #[serde(default = "no_position")]
    pub position_embedding: PositionEmbedding,
    /// Base of the rotary frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// Ranks of the low-rank maps of RWKV-7; only for `rwkv7`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_ranks: Option<LowRanks>,
    /// The shape of Mamba-2's layers; only for `mamba2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_space: Option<StateSpace>,
    /// Number of encoder layers; only for `rfa_seq2seq`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_layers: Option<usize>,
    /// Maximum number of tokens of a source; only for `rfa_seq2seq`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_source_positions: Option<usize>,
    /// The token that the decoder starts with; only for `rfa_seq2seq`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_start_token_id: Option<u32>,
    /// Number of random vectors per head of cross attention; defaults to `proj_dim`. Only for `rfa_seq2seq`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cross_proj_dim: Option<usize>,
    /// The token that starts every text.
    #[serde(default)]
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    #[serde(default)]
    pub eos_token_id: TokenIds,
    /// The dtype of the weights when they were saved; ignored, because each tensor records its own.
    #[serde(default)]
    pub torch_dtype: Option<String>,
}

fn silu() -> String {
    "silu".into()
}
fn rms_norm_eps() -> f64 {
    1e-5
}
fn rfa() -> Attention {
    Attention::Rfa
}
fn gaussian() -> FeatureMap {
    FeatureMap::Gaussian
}
fn yes() -> bool {
    true
}
fn denominator_eps() -> f64 {
    0.02
}
fn no_position() -> PositionEmbedding {
    PositionEmbedding::None
}
fn rope_theta() -> f64 {
    10_000.0
}

/// Rejects a value outside `low..=high`.
pub(crate) fn within<T: Copy + PartialOrd + Display>(
    field: &'static str,
    value: T,
    low: T,
    high: T,
) -> Result<(), ConfigError> {
    let inside = value >= low && value <= high;
    inside.then_some(()).ok_or_else(|| ConfigError::bound(field, format!("between {low} and {high}"), value))
}

/// Maximum of `sliding_window`.
const WINDOW_MAX: usize = 1 << 24;
/// Maximum of `proj_dim`.
pub(crate) const PROJ_DIM_MAX: usize = 4096;

/// Parses the text of a `config.json` as JSON. Errors name the key.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, ConfigError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

impl DecoderConfig {
    /// Width of all heads together: `num_attention_heads * head_dim`.
    pub fn inner_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// The minimum denominator of random feature attention, as a share of the weight seen; 0 if no feature can be
    /// negative.
    pub(crate) fn denominator_floor(&self) -> f64 {
        if self.feature_map.has_floor() { self.denominator_eps } else { 0.0 }
    }

    /// Tokens that softmax attention covers, at least 1.
    pub(crate) fn window(&self) -> usize {
        self.sliding_window.unwrap_or(1)
    }

    /// Checks the bounds of `sliding_window`, for mixers that need one.
    pub(crate) fn check_window(&self) -> Result<(), ConfigError> {
        match self.sliding_window {
            Some(window) => within("sliding_window", window, 1, WINDOW_MAX),
            None => Err(ConfigError::bound("sliding_window", format!("between 1 and {WINDOW_MAX}"), "none")),
        }
    }

    /// Rejects keys that only apply to layers with q, k and v, for a family without such layers.
    pub(crate) fn check_without_attention(&self) -> Result<(), ConfigError> {
        let kind = &self.model_type;
        let refused = |field, bound: &str, found: &dyn Display| {
            Err(ConfigError::bound(field, format!("{bound} where model_type is {kind}"), found))
        };
        if self.source().is_some() {
            return Err(ConfigError::bound("model_type", "that of a decoder", kind));
        }
        if self.output_norm {
            return refused("output_norm", "false", &"true");
        }
        if self.position_embedding != PositionEmbedding::None {
            return refused("position_embedding", "\"none\"", &"\"rope\"");
        }
        self.sliding_window.map_or(Ok(()), |window| refused("sliding_window", "absent", &window))
    }

    /// Checks the bounds that every family shares.
    pub(crate) fn check_shared(&self) -> Result<(), ConfigError> {
        within("vocab_size", self.vocab_size, 1, 1 << 22)?;
        within("hidden_size", self.hidden_size, 1, 1 << 16)?;
        within("intermediate_size", self.intermediate_size, 1, 1 << 18)?;
        within("num_hidden_layers", self.num_hidden_layers, 1, 1024)?;
        within("num_attention_heads", self.num_attention_heads, 1, 1024)?;
        within("head_dim", self.head_dim, 1, 1024)?;
        within("conv_kernel", self.conv_kernel, 0, 16)?;
        within("rms_norm_eps", self.rms_norm_eps, 1e-12, 1e-1)?;
        within("denominator_eps", self.denominator_eps, 1e-6, 1.0)?;
        within("rope_theta", self.rope_theta, 1.0, 1e9)?;
        if self.conv_kernel == 1 {
            return Err(ConfigError::bound("conv_kernel", "0 for none, or between 2 and 16", 1));
        }
        if self.position_embedding == PositionEmbedding::Rope && !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::bound("head_dim", "even for rope", self.head_dim));
        }
        let ends = self.eos_token_id.as_slice().iter().map(|&id| ("eos_token_id", id));
        for (field, id) in self.bos_token_id.map(|id| ("bos_token_id", id)).into_iter().chain(ends) {
            within(field, id as usize, 0, self.vocab_size - 1)?;
        }
        Ok(())
    }
}
