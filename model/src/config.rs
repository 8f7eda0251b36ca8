//! `config.json`: what a decoder is made of, with every bound checked before anything is allocated.
//!
//! Hugging Face names for all that Llama has too, then the attention's own. Unknown keys are refused: a
//! misspelt key must not silently mean its default.

use serde::{Deserialize, Serialize};

use crate::layout::StateLayout;

/// Why a `config.json` was refused; the message names the field and its bound.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, a missing or unknown key, or a value of the wrong type.
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

/// The family of the attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Random feature attention (Peng et al., ICLR 2021), with or without the gate.
    Rfa,
    /// Softmax attention to the last `sliding_window` tokens, whose keys and values are the state. Of the keys below,
    /// `feature_map`, `gate`, `proj_dim` and `denominator_eps` say nothing to it.
    Softmax,
}

/// How queries and keys become features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureMap {
    /// `sqrt(1/D) [sin(W x), cos(W x)]` on unit-length `x` (equation 2 of the paper).
    Gaussian,
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

/// A decoder's shape and kind, as in `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// Always `rfa_gate`.
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
    /// Tokens that softmax attention reads back, the newest among them; absent for random feature attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Whether a learned gate forgets (RFA-Gate).
    #[serde(default = "yes")]
    pub gate: bool,
    /// Random vectors of a head (D); a head has 2 D features. 0 for softmax, where it may be absent.
    #[serde(default)]
    pub proj_dim: usize,
    /// The denominator is held at or above this share of the weight seen so far.
    #[serde(default = "denominator_eps")]
    pub denominator_eps: f64,
    /// Whether each head's output passes an RMSNorm.
    #[serde(default)]
    pub output_norm: bool,
    /// Taps of the causal convolution on q, k and v; 0 for none.
    #[serde(default)]
    pub conv_kernel: usize,
    /// Where positions enter; `rope` where it is absent and attention is softmax, as in a Llama.
    #[serde(default = "no_position")]
    pub position_embedding: PositionEmbedding,
    /// Base of the rotary angles.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
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

impl DecoderConfig {
    /// Reads and checks the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] names the first key that is unknown, missing, of the wrong type or out of bounds.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        /// What has another default where attention is softmax.
        #[derive(Deserialize)]
        struct Given {
            position_embedding: Option<serde::de::IgnoredAny>,
        }
        let mut config: Self = serde_json::from_str(text)?;
        if config.attention == Attention::Softmax {
            let given: Given = serde_json::from_str(text)?;
            if given.position_embedding.is_none() {
                config.position_embedding = PositionEmbedding::Rope;
            }
            (config.gate, config.proj_dim) = (false, 0);
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
        equals("model_type", &self.model_type, "rfa_gate")?;
        equals("hidden_act", &self.hidden_act, "silu")?;
        within("vocab_size", self.vocab_size, 1, 1 << 22)?;
        within("hidden_size", self.hidden_size, 1, 1 << 16)?;
        within("intermediate_size", self.intermediate_size, 1, 1 << 18)?;
        within("num_hidden_layers", self.num_hidden_layers, 1, 1024)?;
        within("num_attention_heads", self.num_attention_heads, 1, 1024)?;
        within("head_dim", self.head_dim, 1, 1024)?;
        match (self.attention, self.sliding_window) {
            (Attention::Softmax, window) => within("sliding_window", window.unwrap_or(0), 1, 1 << 24)?,
            (Attention::Rfa, None) => within("proj_dim", self.proj_dim, 1, 4096)?,
            (Attention::Rfa, Some(window)) => {
                let bound = "absent where attention is rfa".into();
                return Err(ConfigError::Bound { field: "sliding_window", bound, found: window.to_string() });
            }
        }
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

    /// Width of all heads together: `num_attention_heads * head_dim`.
    pub fn inner_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Numbers that one head remembers: S (2D, d), z (2D) and c, or the window's keys and values.
    pub fn head_state_len(&self) -> usize {
        match self.attention {
            Attention::Rfa => 2 * self.proj_dim * (self.head_dim + 1) + 1,
            Attention::Softmax => 2 * self.window() * self.head_dim,
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
        }
    }

    /// Trained numbers; the fixed random matrices are not counted.
    pub fn parameters(&self) -> u64 {
        let (hidden, inner, heads) = (self.hidden_size, self.inner_size(), self.num_attention_heads);
        let own = match self.attention {
            // Sigma, and the gates.
            Attention::Rfa => inner + if self.gate { heads * (hidden + 1) } else { 0 },
            Attention::Softmax => 0,
        };
        let norm = if self.output_norm { self.head_dim } else { 0 };
        let attention = 4 * hidden * inner + own + norm + 3 * inner * self.conv_kernel;
        let block = attention + 3 * hidden * self.intermediate_size + 2 * hidden;
        let head = if self.tie_word_embeddings { 1 } else { 2 } * self.vocab_size * hidden;
        (self.num_hidden_layers * block + head + hidden) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"model_type": "rfa_gate", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "proj_dim": 16, "eos_token_id": [0, 3]}"#;

    fn changed(from: &str, to: &str) -> String {
        DecoderConfig::from_json(&SMALL.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_filled_in() {
        let config = DecoderConfig::from_json(SMALL).unwrap();
        assert_eq!((config.head_dim, config.gate, config.conv_kernel), (16, true, 0));
        assert_eq!(config.eos_token_id.as_slice(), [0, 3]);
        assert_eq!(config.state_bytes(), 2 * 2 * (2 * 16 * 17 + 1) * 4);
    }

    #[test]
    fn softmax_has_rope_and_the_windows_keys_and_values() {
        let text = SMALL.replace("\"proj_dim\": 16", "\"attention\": \"softmax\", \"sliding_window\": 24");
        let config = DecoderConfig::from_json(&text).unwrap();
        assert_eq!((config.position_embedding, config.gate, config.proj_dim), (PositionEmbedding::Rope, false, 0));
        assert_eq!(config.state_bytes(), 2 * 2 * (2 * 24 * 16) * 4);
        let block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32;
        assert_eq!(config.parameters(), 2 * block + 2 * 97 * 32 + 32);
        let again = DecoderConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
        let none = text.replace("\"sliding_window\"", "\"position_embedding\": \"none\", \"sliding_window\"");
        assert_eq!(DecoderConfig::from_json(&none).unwrap().position_embedding, PositionEmbedding::None);
    }

    #[test]
    fn an_unknown_key_is_named() {
        assert!(changed("\"proj_dim\"", "\"projdim\": 3, \"proj_dim\"").contains("projdim"));
    }

    #[test]
    fn a_bound_names_its_field() {
        for (from, to, field) in [
            ("\"vocab_size\": 97", "\"vocab_size\": 0", "vocab_size"),
            ("\"proj_dim\": 16", "\"proj_dim\": 5000", "proj_dim"),
            ("\"proj_dim\": 16", "\"gate\": true", "proj_dim"),
            ("\"proj_dim\": 16", "\"proj_dim\": 16, \"sliding_window\": 64", "sliding_window"),
            ("\"proj_dim\": 16", "\"attention\": \"softmax\"", "sliding_window"),
            ("\"proj_dim\": 16", "\"attention\": \"softmax\", \"sliding_window\": 0", "sliding_window"),
            ("\"proj_dim\": 16", "\"attention\": \"softmax\", \"sliding_window\": 8, \"head_dim\": 7", "head_dim"),
            ("rfa_gate", "llama", "model_type"),
            ("[0, 3]", "97", "eos_token_id"),
            ("\"proj_dim\": 16", "\"proj_dim\": 16, \"conv_kernel\": 1", "conv_kernel"),
            ("\"num_attention_heads\": 2", "\"num_attention_heads\": 3", "head_dim"),
            ("\"proj_dim\": 16", "\"proj_dim\": 16, \"head_dim\": 7, \"position_embedding\": \"rope\"", "head_dim"),
        ] {
            let message = changed(from, to);
            assert!(message.contains(field), "{message}");
        }
    }
}
