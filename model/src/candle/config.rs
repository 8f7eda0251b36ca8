//! The config of a model that runs on candle: one of a family that also has native kernels, or one that only candle
//! has.

use candle_transformers::models::{mamba as mamba_model, mamba2 as mamba2_model, rwkv_v5, rwkv_v7};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::keys::Keys;
use super::{mamba, mamba2, recurrent_gemma, rfa, rwkv, rwkv7};
use crate::config::{Attention, ConfigError, DecoderConfig, TokenIds, within};

/// The `model_type`s that only candle supports.
pub const ONLY_CANDLE: [&str; 4] =
    [mamba::MODEL_TYPE, recurrent_gemma::MODEL_TYPE, rwkv::MODEL_TYPES[0], rwkv::MODEL_TYPES[1]];

/// The config of a model that runs on candle.
#[derive(Clone, Debug)]
pub struct Config {
    pub(super) family: Family,
    pub(super) vocab_size: usize,
    eos_token_id: TokenIds,
}

/// A model family with its shape, as candle's config type.
#[derive(Clone, Debug)]
pub(super) enum Family {
    Mamba(mamba_model::Config),
    Mamba2(mamba2_model::Config),
    RecurrentGemma(recurrent_gemma::Config),
    Rfa(Box<DecoderConfig>),
    /// One of `rwkv::MODEL_TYPES`.
    Rwkv(&'static str, rwkv_v5::Config),
    Rwkv7(rwkv_v7::Config),
}

/// Returns the model type and the keys of a config if its family runs only on candle.
fn only_candle(text: &str) -> Option<(&'static str, Map<String, Value>)> {
    let keys: Map<String, Value> = serde_json::from_str(text).ok()?;
    let named = keys.get("model_type").and_then(Value::as_str);
    let kind = ONLY_CANDLE.into_iter().find(|kind| named == Some(kind));
    let kind = kind.or_else(|| mamba::is_of_the_package(&keys).then_some(mamba::MODEL_TYPE))?;
    Some((kind, keys))
}

/// Returns whether the text of a `config.json` describes a family that runs only on candle.
pub fn is_only_candle(text: &str) -> bool {
    only_candle(text).is_some()
}

impl Config {
    /// Reads and checks the text of a `config.json`.
    ///
    /// # Errors
    /// A key is missing or wrong, or candle's model does not support its value.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let Some((kind, keys)) = only_candle(text) else { return Self::of(&DecoderConfig::from_json(text)?) };
        let (family, vocab_size) = match kind {
            mamba::MODEL_TYPE => {
                let config = mamba::config(&Keys(&keys))?;
                let vocab_size = mamba::vocab_size(&config);
                (Family::Mamba(config), vocab_size)
            }
            recurrent_gemma::MODEL_TYPE => {
                let config = recurrent_gemma::config(&Keys(&keys))?;
                let vocab_size = config.vocab_size;
                (Family::RecurrentGemma(config), vocab_size)
            }
            _ => {
                let config = rwkv::config(&Keys(&keys))?;
                let vocab_size = config.vocab_size;
                (Family::Rwkv(kind, config), vocab_size)
            }
        };
        let eos = if kind == recurrent_gemma::MODEL_TYPE { recurrent_gemma::EOS } else { 0 };
        let eos_token_id = match keys.get("eos_token_id") {
            None | Some(Value::Null) => TokenIds::One(eos),
            Some(found) => TokenIds::deserialize(found)
                .map_err(|_| ConfigError::bound("eos_token_id", "a token id or a list of them", found))?,
        };
        for &id in eos_token_id.as_slice() {
            within("eos_token_id", id as usize, 0, vocab_size - 1)?;
        }
        Ok(Self { family, vocab_size, eos_token_id })
    }

    /// Converts the config of a model that also has native kernels.
    ///
    /// # Errors
    /// Candle does not have the family, or does not support the value of a key.
    pub fn of(config: &DecoderConfig) -> Result<Self, ConfigError> {
        let family = match config.attention {
            Attention::Rwkv7 => Family::Rwkv7(rwkv7::config(config)?),
            Attention::Mamba2 => Family::Mamba2(mamba2::config(config)?),
            Attention::Rfa | Attention::Softmax | Attention::Hybrid => Family::Rfa(Box::new(rfa::config(config)?)),
        };
        Ok(Self { family, vocab_size: config.vocab_size, eos_token_id: config.eos_token_id.clone() })
    }

    /// The name of the family.
    pub fn family(&self) -> &'static str {
        match &self.family {
            Family::Mamba(_) => mamba::MODEL_TYPE,
            Family::Mamba2(_) => "mamba2",
            Family::RecurrentGemma(_) => recurrent_gemma::MODEL_TYPE,
            Family::Rfa(config) => config.mixer(),
            Family::Rwkv(kind, _) => kind,
            Family::Rwkv7(_) => "rwkv7",
        }
    }

    /// Bytes of one conversation's state, independent of the length of the text.
    pub fn state_bytes(&self) -> usize {
        let shape = match &self.family {
            Family::Mamba(config) => mamba::state(config),
            Family::Mamba2(config) => mamba2::state(config),
            Family::RecurrentGemma(config) => recurrent_gemma::state(config),
            Family::Rfa(config) => rfa::state(config),
            Family::Rwkv(_, config) => rwkv::state(config),
            Family::Rwkv7(config) => rwkv7::state(config),
        };
        shape.layout().numbers() * size_of::<f32>()
    }

    /// Number of tokens that have a logit.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The ids that end a text.
    pub fn eos(&self) -> &[u32] {
        self.eos_token_id.as_slice()
    }
}
