//! The decoder on NVIDIA GPUs: our own kernels (`model/cuda`, CUDA C++), launched through the driver alone.
//!
//! A second implementation of [`crate::Decoder`] for random feature attention; tests compare the two. It loads the same
//! checkpoints and states. A row's sums are added in the same order whatever else is in the batch, so its bits do not
//! depend on the other rows, nor on how a prompt is divided. A GPU's bits differ from a CPU's: a text that moves to
//! another device continues with the same results up to rounding.
//!
//! gpu -> queue, kernels -> driver, host -> device -> weights -> ops -> plan -> choose, states -> transfer -> pool ->
//! recurrence -> mixer -> block -> decoder -> measure. Other modules of the crate use only this module's exports.

mod block;
mod choose;
mod decoder;
mod device;
mod driver;
mod gpu;
#[cfg(feature = "cuda-emulator")]
mod host;
mod kernels;
#[doc(hidden)]
pub mod measure;
mod mixer;
mod ops;
mod plan;
mod pool;
mod queue;
mod recurrence;
mod states;
#[cfg(all(test, feature = "cuda-emulator"))]
mod tests;
mod transfer;
mod weights;

use std::path::Path;

pub use decoder::CudaDecoder;
pub use device::CudaDevice;
pub use pool::{CudaPool, CudaStates};

use crate::checkpoint;
pub use crate::cuda_error::CudaError;
use crate::weights::LoadError;

/// Loads a checkpoint folder onto a device, with all the checks of [`checkpoint::load`]. Floats keep their type;
/// quantized weights become f16.
///
/// # Errors
/// As for [`checkpoint::load`]; [`LoadError::Cuda`] if there are no CUDA kernels for the decoder, or the device has too
/// little memory or fails.
pub fn load(folder: &Path, device: &CudaDevice) -> Result<CudaDecoder, LoadError> {
    checkpoint::load_onto(folder, |config, weights| CudaDecoder::new(config, weights, device))
}
