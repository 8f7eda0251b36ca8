//! `config.json`: what a decoder is made of, with every bound checked before anything is allocated.
//!
//! Hugging Face names for all that Llama has too, then the attention's own. Unknown keys are refused: a
//! misspelt key must not silently mean its default.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::layout::StateLayout;

mod kinds;
mod source;

pub use kinds::{Attention, FeatureMap, PositionEmbedding, TokenIds};
pub use source::SourceConfig;

/// Why a `config.json` was refused; the message names the field and its bound.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, a missing or unknown key, or a value of the wrong type: with the key where there is one.
    #[error("config.json: {0}")]
    Key(#[from] serde_path_to_error::Error<serde_json::Error>),
    /// Something follows the JSON.
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A value out of its bounds.
    #[error("config.json: {field} must be {bound}, found {found}")]
    Bound {
        /// The key in `config.json`.
        field: &'static str,
        /// What is allowed.
        bound: String,
        /// What was there.
        found: String,
    },
}

/// A decoder's shape and kind, as in `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// `rfa_gate`, a decoder, or `rfa_seq2seq`, one that reads a source through an encoder and cross attention.
    pub model_type: String,
    /// Hugging Face's class names; not read.
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the SwiGLU.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Heads of each attention layer.
    pub num_attention_heads: usize,
    /// Length of a head's queries, keys and values (d); `hidden_size / num_attention_heads` when absent.
    #[serde(default)]
    pub head_dim: usize,
    /// Activation of the feed-forward part; `silu` is the one there is.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Added to the mean square under RMSNorm's root.
    #[serde(default = "rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the output head is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// The attention's family.
    #[serde(default = "rfa")]
    pub attention: Attention,
    /// The attention's feature map.
    #[serde(default = "gaussian")]
    pub feature_map: FeatureMap,
    /// Tokens that softmax attention reads back, the newest among them: for softmax and hybrid; absent for random
    /// feature attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Whether a learned gate forgets (RFA-Gate).
    #[serde(default = "yes")]
    pub gate: bool,
    /// Random vectors of a head (D). 0 for softmax and for the elu map, where it may be absent.
    #[serde(default)]
    pub proj_dim: usize,
    /// The denominator of gaussian features, which may be 0 or negative, is held at or above this share of the weight
    /// seen so far. The other maps have no negative features and no floor but the least normal number.
    #[serde(default = "denominator_eps")]
    pub denominator_eps: f64,
    /// Whether each head's output passes an RMSNorm.
    #[serde(default)]
    pub output_norm: bool,
    /// Taps of the causal convolution on q, k and v; 0 for none.
    #[serde(default)]
    pub conv_kernel: usize,
    /// Where positions enter; `rope` where it is absent and attention is softmax, as in a Llama, or hybrid.
    #[serde(default = "no_position")]
    pub position_embedding: PositionEmbedding,
    /// Base of the rotary angles.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// Blocks of the encoder, for `rfa_seq2seq` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_layers: Option<usize>,
    /// Most tokens of a source, for `rfa_seq2seq` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_source_positions: Option<usize>,
    /// The token that the decoder reads first, for `rfa_seq2seq` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_start_token_id: Option<u32>,
    /// The token that a text begins with.
    #[serde(default)]
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    #[serde(default)]
    pub eos_token_id: TokenIds,
    /// The dtype that the weights were written in; the tensors themselves say the same.
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

/// `value` if it lies in `low..=high`.
fn within<T: Copy + PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: T,
    low: T,
    high: T,
) -> Result<(), ConfigError> {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(ConfigError::Bound { field, bound: format!("between {low} and {high}"), found: value.to_string() })
}

/// Most tokens of a window.
const WINDOW_MAX: usize = 1 << 24;
/// Most random vectors of a head.
const PROJ_DIM_MAX: usize = 4096;

/// All of a text as JSON; an error knows its key.
fn parsed<T: DeserializeOwned>(text: &str) -> Result<T, ConfigError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

impl DecoderConfig {
    /// Reads and checks the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] names the first key that is unknown, missing, of the wrong type or out of bounds.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        /// What means something else where it is absent than its default says.
        #[derive(Deserialize)]
        struct Given {
            position_embedding: Option<IgnoredAny>,
            proj_dim: Option<IgnoredAny>,
        }
        let (mut config, given): (Self, Given) = (parsed(text)?, parsed(text)?);
        if config.attention != Attention::Rfa && given.position_embedding.is_none() {
            config.position_embedding = PositionEmbedding::Rope;
        }
        if config.attention == Attention::Softmax {
            (config.gate, config.proj_dim) = (false, 0);
        } else if config.feature_map.has_random_matrices() && given.proj_dim.is_none() {
            let bound = format!("between 1 and {PROJ_DIM_MAX}");
            return Err(ConfigError::Bound { field: "proj_dim", bound, found: "none".into() });
        }
        if config.head_dim == 0 {
            let heads = config.num_attention_heads.max(1);
            if !config.hidden_size.is_multiple_of(heads) {
                let bound = format!("given where {heads} heads do not divide hidden_size");
                return Err(ConfigError::Bound { field: "head_dim", bound, found: "none".into() });
            }
            config.head_dim = config.hidden_size / heads;
        }
        config.validate()?;
        Ok(config)
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// [`ConfigError::Bound`] for the first field out of its bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let equals = |field, found: &str, want: &str| {
            let bound = format!("{want:?}");
            (found == want).then_some(()).ok_or_else(|| ConfigError::Bound { field, bound, found: found.into() })
        };
        equals("hidden_act", &self.hidden_act, "silu")?;
        within("vocab_size", self.vocab_size, 1, 1 << 22)?;
        within("hidden_size", self.hidden_size, 1, 1 << 16)?;
        within("intermediate_size", self.intermediate_size, 1, 1 << 18)?;
        within("num_hidden_layers", self.num_hidden_layers, 1, 1024)?;
        within("num_attention_heads", self.num_attention_heads, 1, 1024)?;
        within("head_dim", self.head_dim, 1, 1024)?;
        self.validate_attention()?;
        self.validate_source()?;
        within("conv_kernel", self.conv_kernel, 0, 16)?;
        within("rms_norm_eps", self.rms_norm_eps, 1e-12, 1e-1)?;
        within("denominator_eps", self.denominator_eps, 1e-6, 1.0)?;
        within("rope_theta", self.rope_theta, 1.0, 1e9)?;
        if self.conv_kernel == 1 {
            let bound = "0 for none, or between 2 and 16".into();
            return Err(ConfigError::Bound { field: "conv_kernel", bound, found: "1".into() });
        }
        if self.position_embedding == PositionEmbedding::Rope && !self.head_dim.is_multiple_of(2) {
            let found = self.head_dim.to_string();
            return Err(ConfigError::Bound { field: "head_dim", bound: "even for rope".into(), found });
        }
        let ends = self.eos_token_id.as_slice().iter().map(|&id| ("eos_token_id", id));
        for (field, id) in self.bos_token_id.map(|id| ("bos_token_id", id)).into_iter().chain(ends) {
            within(field, id as usize, 0, self.vocab_size - 1)?;
        }
        Ok(())
    }

    /// The keys that some kinds of attention need and others refuse.
    fn validate_attention(&self) -> Result<(), ConfigError> {
        let refused = |field, bound: &str, found: String| Err(ConfigError::Bound { field, bound: bound.into(), found });
        match (self.attention, self.sliding_window) {
            (Attention::Rfa, None) => {}
            (Attention::Rfa, Some(window)) => {
                return refused("sliding_window", "absent where attention is rfa", window.to_string());
            }
            (Attention::Softmax | Attention::Hybrid, Some(window)) => {
                within("sliding_window", window, 1, WINDOW_MAX)?;
            }
            (Attention::Softmax | Attention::Hybrid, None) => {
                return refused("sliding_window", &format!("between 1 and {WINDOW_MAX}"), "none".into());
            }
        }
        match (self.attention, self.feature_map) {
            (Attention::Softmax, _) => Ok(()),
            (Attention::Hybrid, FeatureMap::ArcCosine | FeatureMap::Elu | FeatureMap::Favor) => {
                refused("feature_map", "gaussian where attention is hybrid", self.feature_map.name().into())
            }
            (_, FeatureMap::Elu) if self.proj_dim > 0 => {
                refused("proj_dim", "0 or absent where feature_map is elu", self.proj_dim.to_string())
            }
            (_, FeatureMap::Elu) => Ok(()),
            _ => within("proj_dim", self.proj_dim, 1, PROJ_DIM_MAX),
        }
    }

    /// Features of a head (F): what its feature map makes of a query or a key. 0 for softmax.
    pub fn features(&self) -> usize {
        match (self.attention, self.feature_map) {
            (Attention::Softmax, _) => 0,
            (_, FeatureMap::Gaussian) => 2 * self.proj_dim,
            (_, FeatureMap::ArcCosine | FeatureMap::Favor) => self.proj_dim,
            (_, FeatureMap::Elu) => self.head_dim,
        }
    }

    /// Width of all heads together: `num_attention_heads * head_dim`.
    pub fn inner_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Numbers that one head remembers: S (F, d), z (F) and c, for favor the maximum of its keys; or the
    /// window's keys and values; for hybrid all of them, and with a gate the logits of the window's tokens.
    pub fn head_state_len(&self) -> usize {
        let sums = self.features() * (self.head_dim + 1) + 1;
        let cache = 2 * self.window() * self.head_dim;
        match self.attention {
            Attention::Rfa => sums + usize::from(self.feature_map.has_maximum()),
            Attention::Softmax => cache,
            Attention::Hybrid => sums + cache + if self.gate { self.window() } else { 0 },
        }
    }

    /// Tokens that softmax attention reads back, at least 1.
    pub(crate) fn window(&self) -> usize {
        self.sliding_window.unwrap_or(1)
    }

    /// Bytes of one conversation's state, however long its text.
    pub fn state_bytes(&self) -> usize {
        self.state_layout().numbers() * size_of::<f32>()
    }

    /// What one conversation's state is made of.
    pub fn state_layout(&self) -> StateLayout {
        StateLayout {
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            head: self.head_state_len(),
            taps: self.conv_kernel.saturating_sub(1),
            channels: if self.conv_kernel > 1 { 3 * self.inner_size() } else { 0 },
            cross: self.head_cross_len(),
        }
    }

    /// What mixes the tokens, in one word as reports write it.
    pub fn mixer(&self) -> &'static str {
        match (self.attention, self.feature_map, self.gate) {
            (Attention::Softmax, ..) => "softmax",
            (Attention::Hybrid, _, true) => "hybrid",
            (Attention::Hybrid, _, false) => "hybrid-no-gate",
            (Attention::Rfa, FeatureMap::Gaussian, true) => "rfa-gate",
            (Attention::Rfa, FeatureMap::Gaussian, false) => "rfa",
            (Attention::Rfa, FeatureMap::ArcCosine, true) => "rfa-arccos-gate",
            (Attention::Rfa, FeatureMap::ArcCosine, false) => "rfa-arccos",
            (Attention::Rfa, FeatureMap::Elu, true) => "elu-gate",
            (Attention::Rfa, FeatureMap::Elu, false) => "elu",
            (Attention::Rfa, FeatureMap::Favor, true) => "favor-gate",
            (Attention::Rfa, FeatureMap::Favor, false) => "favor",
        }
    }

    /// Trained numbers; the fixed random matrices are not counted.
    pub fn parameters(&self) -> u64 {
        let (hidden, inner, heads) = (self.hidden_size, self.inner_size(), self.num_attention_heads);
        let sigma = if self.feature_map.has_sigma() { inner } else { 0 };
        let gate = if self.gate { heads * (hidden + 1) } else { 0 };
        let own = match self.attention {
            Attention::Rfa => sigma + gate,
            Attention::Softmax => 0,
            // What far tokens weigh against near ones.
            Attention::Hybrid => sigma + gate + heads,
        };
        let norm = if self.output_norm { self.head_dim } else { 0 };
        let attention = 4 * hidden * inner + own + norm + 3 * inner * self.conv_kernel;
        let mlp = 3 * hidden * self.intermediate_size;
        let source = self.source().map_or(0, |source| {
            let cross = 4 * hidden * inner + hidden + if self.attention == Attention::Softmax { 0 } else { sigma };
            source.layers * (4 * hidden * inner + mlp + 2 * hidden) + hidden + self.num_hidden_layers * cross
        });
        let block = attention + mlp + 2 * hidden;
        let head = if self.tie_word_embeddings { 1 } else { 2 } * self.vocab_size * hidden;
        (self.num_hidden_layers * block + source + head + hidden) as u64
    }
}

#[cfg(test)]
mod tests;
