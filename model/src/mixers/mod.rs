//! Mixers, which move information between tokens, and the registry of them: a folder for each, with its config checks,
//! weights, state, forward pass and plain reference. `layer` is the interface to the decoder, for families whose blocks
//! differ; `mixer` the one within a pre-norm block with q, k and v.

mod attention_layer;
mod conv;
pub(crate) mod cross;
pub mod hybrid;
pub(crate) mod layer;
mod mixer;
mod projections;
pub mod rfa;
pub(crate) mod rotary;
pub mod softmax;

use attention_layer::AttentionLayer;

use crate::config::Attention;
use layer::Family;
pub use layer::SlotState;

/// The family that a config names: the only place that lists them all.
pub(crate) fn family(attention: Attention) -> &'static Family {
    match attention {
        Attention::Rfa => const { &Family::of::<AttentionLayer<rfa::Rfa>>() },
        Attention::Softmax => const { &Family::of::<AttentionLayer<softmax::Softmax>>() },
        Attention::Hybrid => const { &Family::of::<AttentionLayer<hybrid::Hybrid>>() },
    }
}
