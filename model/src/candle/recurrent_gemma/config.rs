//! The config of a RecurrentGemma checkpoint.

use serde_json::{Map, Value, json};

use crate::candle::keys::Keys;
use crate::config::ConfigError;

/// The types of the layers unless the config names others.
const DEFAULT_BLOCKS: [&str; 3] = ["recurrent", "recurrent", "attention"];

/// The shape of a model.
#[derive(Clone, Debug)]
pub(in crate::candle) struct Config {
    pub(in crate::candle) vocab_size: usize,
    pub(super) hidden: usize,
    /// Number of channels of the gated MLP.
    pub(super) inner: usize,
    pub(super) heads: usize,
    pub(super) key_heads: usize,
    /// Number of channels of the recurrence.
    pub(super) lru: usize,
    /// Number of past inputs that the convolution reads.
    pub(super) taps: usize,
    /// Number of tokens that attention sees.
    pub(super) window: usize,
    /// For each layer: whether it has attention.
    pub(super) attention: Vec<bool>,
    pub(super) attention_bias: bool,
    pub(super) theta: f64,
    pub(super) norm_eps: f64,
    pub(super) soft_cap: f64,
}

impl Config {
    /// Number of channels of a head.
    pub(super) fn head(&self) -> usize {
        self.hidden / self.heads
    }
}

/// Reads a config. Rejects values that the blocks do not support, and names the key.
pub(in crate::candle) fn config(keys: &Keys<'_>) -> Result<Config, ConfigError> {
    let hidden = keys.number("hidden_size", 1 << 16)?;
    let heads = keys.number("num_attention_heads", 1024)?;
    if !hidden.is_multiple_of(4 * heads) {
        let bound = format!("a divisor of hidden_size ({hidden}) with heads of a multiple of 4");
        return Err(ConfigError::bound("num_attention_heads", bound, heads));
    }
    let key_heads = keys.number_or("num_key_value_heads", heads, 1024)?;
    let lru = keys.number_or("lru_width", hidden, 1 << 16)?;
    if !heads.is_multiple_of(key_heads) {
        let bound = format!("a divisor of num_attention_heads ({heads})");
        return Err(ConfigError::bound("num_key_value_heads", bound, key_heads));
    }
    if !lru.is_multiple_of(heads) {
        return Err(ConfigError::bound("lru_width", format!("a multiple of num_attention_heads ({heads})"), lru));
    }
    let inner = keys.number("intermediate_size", 1 << 19)?;
    if !inner.is_multiple_of(2) {
        return Err(ConfigError::bound("intermediate_size", "even", inner));
    }
    keys.only("head_dim", &json!(hidden / heads))?;
    keys.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
    keys.only("tie_word_embeddings", &json!(true))?;
    keys.only("embeddings_scale_by_sqrt_dim", &json!(true))?;
    keys.only("rope_scaling", &Value::Null)?;
    // Newer configs have these keys in an object of their own, which counts where both are given.
    let none = Map::new();
    let nested = match keys.get("rope_parameters") {
        None | Some(Value::Null) => &none,
        Some(Value::Object(nested)) => nested,
        Some(found) => return Err(ConfigError::bound("rope_parameters", "an object", found)),
    };
    let rotary: Map<String, Value> =
        keys.0.iter().chain(nested).map(|(key, value)| (key.clone(), value.clone())).collect();
    let rotary = Keys(&rotary);
    Keys(nested).only("type", &json!("default"))?;
    rotary.only("rope_type", &json!("default"))?;
    rotary.only("partial_rotary_factor", &json!(0.5))?;
    let window = given(keys, ["attention_window_size", "sliding_window"])?;
    let bias = keys.get("attention_bias").filter(|bias| !bias.is_null()).unwrap_or(&json!(false)).clone();
    Ok(Config {
        vocab_size: keys.number("vocab_size", 1 << 22)?,
        hidden,
        inner: inner / 2,
        heads,
        key_heads,
        lru,
        taps: keys.number_or("conv1d_width", 4, 16)? - 1,
        window: window.map_or(Ok(2048), |(key, _)| keys.number(key, 1 << 20))?,
        attention: attention(keys)?,
        attention_bias: bias.as_bool().ok_or_else(|| ConfigError::bound("attention_bias", "true or false", &bias))?,
        theta: rotary.float_or("rope_theta", 1e4, 1.0..=1e9)?,
        norm_eps: keys.float_or("rms_norm_eps", 1e-6, 1e-12..=0.1)?,
        soft_cap: keys.float_or("logits_soft_cap", 30.0, 1.0..=1e6)?,
    })
}

/// Returns a value that has two names in published configs, with the name that was used. Refuses two different values.
fn given<'a>(keys: &Keys<'a>, names: [&'static str; 2]) -> Result<Option<(&'static str, &'a Value)>, ConfigError> {
    let value = |name: &'static str| Some((name, keys.0.get(name).filter(|found| !found.is_null())?));
    match names.map(value) {
        [Some((name, found)), Some((other, found_there))] if found != found_there => {
            Err(ConfigError::bound(name, format!("{found_there}, as {other} is"), found))
        }
        [one, other] => Ok(one.or(other)),
    }
}

/// Returns for each layer whether it has attention: the block types are repeated for all layers.
fn attention(keys: &Keys<'_>) -> Result<Vec<bool>, ConfigError> {
    let default = json!(DEFAULT_BLOCKS);
    let (name, found) = given(keys, ["block_types", "_block_types"])?.unwrap_or(("block_types", &default));
    let kind = |kind: &Value| match kind.as_str() {
        Some("recurrent") => Some(false),
        Some("attention") => Some(true),
        _ => None,
    };
    let kinds = found.as_array().and_then(|kinds| kinds.iter().map(kind).collect::<Option<Vec<_>>>());
    let kinds = kinds
        .filter(|kinds| !kinds.is_empty())
        .ok_or_else(|| ConfigError::bound(name, "a list of \"recurrent\" and \"attention\"", found))?;
    Ok(kinds.iter().copied().cycle().take(keys.number("num_hidden_layers", 1024)?).collect())
}
