//! Mixers, which move information between tokens, and their registry. Each has a folder with its config checks,
//! weights, state, forward pass and reference implementation. `layer` is the interface to the decoder, for families
//! with different blocks; `mixer` is the interface inside a pre-norm block with q, k and v.

mod attention_layer;
mod conv;
pub(crate) mod cross;
mod generic_keys;
mod gguf;
mod head_memory;
pub mod hybrid;
mod last_inputs;
pub(crate) mod layer;
pub mod mamba2;
mod matrices;
mod mixer;
mod names;
mod projections;
pub mod rfa;
pub(crate) mod rotary;
pub mod rwkv7;
pub mod softmax;

use std::borrow::Cow;

use serde_json::{Map, Value};

use attention_layer::AttentionLayer;

use crate::config::{Attention, ConfigError};
pub(crate) use gguf::GgufFamily;
use layer::Family;
pub use layer::SlotState;
pub(crate) use names::TensorNames;
pub(crate) use rwkv7::native;

/// The family that a config names. This is the only place that lists all families.
pub(crate) fn family(attention: Attention) -> &'static Family {
    match attention {
        Attention::Rfa => const { &Family::of::<AttentionLayer<rfa::Rfa>>() },
        Attention::Softmax => const { &Family::of::<AttentionLayer<softmax::Softmax>>() },
        Attention::Hybrid => const { &Family::of::<AttentionLayer<hybrid::Hybrid>>() },
        Attention::Rwkv7 => const { &Family::of::<rwkv7::Rwkv7>() },
        Attention::Mamba2 => const { &Family::of::<mamba2::Mamba2>() },
    }
}

/// Translates the text of a `config.json` to our keys, if it is of a family that is published with other keys. What
/// cannot be translated stays, for the parser to report.
pub(crate) fn translated(text: &str) -> Result<Cow<'_, str>, ConfigError> {
    let plain = mamba2::published::without_infinities(text);
    let Ok(mut keys) = serde_json::from_str::<Map<String, Value>>(&plain) else { return Ok(text.into()) };
    if mamba2::published::is_of_the_package(&keys) {
        mamba2::published::translate_package(&mut keys)?;
    }
    let translate = match keys.get("model_type").and_then(Value::as_str) {
        Some(rwkv7::MODEL_TYPE) => rwkv7::published::translate,
        Some(mamba2::published::MODEL_TYPE) => mamba2::published::translate,
        _ => return Ok(text.into()),
    };
    generic_keys::remove(&mut keys);
    translate(&mut keys)?;
    Ok(Value::Object(keys).to_string().into())
}

/// The families that can be read from GGUF files as llama.cpp writes them.
pub(crate) static GGUF_FAMILIES: [GgufFamily; 2] = [rwkv7::gguf::GGUF, mamba2::gguf::GGUF];
