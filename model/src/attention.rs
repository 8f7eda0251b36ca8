//! The mixers: what moves information between tokens. One interface, chosen by the config.

mod rfa;
mod rotary;

use candle_core::{Result, Tensor};

use crate::config::{Attention, DecoderConfig};
use crate::probe::LayerProbe;
use crate::state::LayerState;
use crate::weights::{LoadError, Weights};

pub(crate) use rfa::RfaAttention;

/// Which slots a batch's rows belong to, and how many tokens each has seen before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    /// One slot for each row, all different.
    pub(crate) slots: &'a [usize],
    /// The position of each row's first new token.
    pub(crate) positions: &'a [u64],
}

/// A layer that mixes tokens along time, with a state of constant size.
pub(crate) trait Mixer: std::fmt::Debug + Send + Sync {
    /// x: (batch, time, hidden) f32 -> (batch, time, hidden); the rows' slots of `state` are taken forward.
    fn forward(&self, x: &Tensor, state: &LayerState, rows: Rows<'_>, probe: Option<&mut LayerProbe>)
    -> Result<Tensor>;
}

/// The mixer that the config asks for.
pub(crate) fn build(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Box<dyn Mixer>, LoadError> {
    match config.attention {
        Attention::Rfa => Ok(Box::new(RfaAttention::new(config, weights)?)),
    }
}
