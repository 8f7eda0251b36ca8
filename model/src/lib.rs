//! Decoders with a constant-size state: token ids in, logits out.
//!
//! The main family is RFA-Gate: layers of Random Feature Attention with a learned gate (Peng et al., ICLR 2021), which
//! keep a matrix S and a vector z however long the text is. The crate also has other feature maps (arc-cosine, elu,
//! FAVOR+), RFA without a gate, softmax attention over a window, the hybrid of both, the encoder-decoder, whose cross
//! attention keeps a source as another S and z, RWKV-7, and Mamba-2. It knows nothing about text, HTTP or global random
//! numbers.
//!
//! [`portable`] is the RFA-Gate decoder in one readable file of candle tensors. [`candle`] serves that decoder, and
//! those models of `candle-transformers` that have a constant-size state.
//!
//! ```no_run
//! use tidegate_model::{Device, checkpoint};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let decoder = checkpoint::load("weights/checkpoints/tidegate-tiny".as_ref(), &Device::Cpu)?;
//! let mut pool = decoder.new_pool(1)?;
//! let logits = decoder.prefill_logits(&[0, 42, 7], &mut pool, 0)?;
//! assert_eq!(logits.len(), decoder.config().vocab_size);
//! # Ok(())
//! # }
//! ```
//!
//! Module dependencies: kernels -> compute; layout, config, error, random, weights, memory, nn, feature_map -> mixers
//! -> encoder -> schema -> state -> decoder -> checkpoint -> candle; `sampling` uses only the kernels, `portable` only
//! the config.

pub mod candle;
pub mod checkpoint;
mod compute;
pub mod config;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
mod cuda_error;
mod decoder;
mod encoder;
mod error;
pub mod feature_map;
mod kernels;
mod language_model;
mod layout;
#[doc(hidden)]
pub mod measure;
mod memory;
pub mod mixers;
mod nn;
mod pool;
pub mod portable;
pub mod probe;
pub mod random;
mod runner;
pub mod sampling;
mod schema;
mod state;
mod weights;

pub use candle_core::{DType, Device, Tensor};
pub use config::{DecoderConfig, SourceConfig};
pub use decoder::Decoder;
pub use error::{ModelError, SlotError};
pub use kernels::roofline;
pub use kernels::threads::Threads;
pub use language_model::{LanguageModel, SharedState, Transfer};
pub use layout::StateLayout;
pub use memory::{Denominators, StateType};
pub use pool::{Pool, SlotStates, TextLength};
pub use runner::{Backend, ModelRunner};
pub use sampling::{Sampler, SamplerState, SamplingParams};
pub use state::{HostStates, PoolOptions, StatePool};
pub use weights::WeightType;
