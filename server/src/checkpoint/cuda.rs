//! Models on a CUDA device: opens the device, and tells models that it has no kernels for from broken checkpoints.

use std::fmt;
use std::path::Path;

use tidegate_model::checkpoint::{LoadError, Stored};
use tidegate_model::cuda::{self, CudaDecoder, CudaDevice, CudaError};
use tidegate_model::{DecoderConfig, WeightType};

use super::error::{DeviceError, OpenError};
use crate::engine::EngineError;

/// An open CUDA device.
#[derive(Clone)]
pub struct OpenCuda {
    ordinal: usize,
    device: CudaDevice,
}

impl OpenCuda {
    pub(super) fn new(ordinal: usize) -> Result<Self, CudaError> {
        Ok(Self { ordinal, device: CudaDevice::open(ordinal)? })
    }

    #[cfg(feature = "cuda-emulator")]
    pub(super) fn emulated() -> Self {
        Self { ordinal: 0, device: CudaDevice::emulated() }
    }

    /// Returns the class of the device: `cuda` and its product name.
    pub(super) fn class(&self) -> String {
        format!("cuda {}", self.device.name())
    }

    /// Loads the checkpoint in `folder` into the device's memory.
    ///
    /// # Errors
    /// [`DeviceError::Refused`] if the checkpoint is valid but the device has no kernels for it, [`LoadError`] if it is
    /// invalid or the device failed.
    pub fn load(&self, folder: &Path) -> Result<CudaDecoder, OpenError> {
        cuda::load(folder, &self.device).map_err(|error| self.sorted(error, || Stored::open(folder).is_ok()))
    }

    /// Creates a decoder with random weights, for measurements.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn random(&self, config: DecoderConfig, weights: WeightType, seed: u64) -> Result<CudaDecoder, OpenError> {
        let sound = config.validate().is_ok();
        CudaDecoder::random(config, weights, seed, &self.device).map_err(|error| self.sorted(error, || sound))
    }

    /// Tells errors of the model, of the device, and of their combination apart.
    fn sorted(&self, error: LoadError, sound: impl FnOnce() -> bool) -> OpenError {
        match error {
            LoadError::Cuda(CudaError::Unsupported(reason)) if sound() => {
                DeviceError::Refused { device: self.to_string(), reason }.into()
            }
            error => error.into(),
        }
    }
}

/// Returns whether another device might serve the same model.
pub(super) fn is_of_the_device(error: &OpenError) -> bool {
    matches!(
        error,
        OpenError::Device(_)
            | OpenError::Load(LoadError::Cuda(_))
            | OpenError::Slots { .. }
            | OpenError::Engine(EngineError::WarmUp(_))
    )
}

/// Converts an error that another device might not have into a [`DeviceError`]; other errors stay as they are.
pub(super) fn unable(error: OpenError, device: &OpenCuda) -> OpenError {
    match error {
        error @ OpenError::Device(_) => error,
        error if is_of_the_device(&error) => {
            DeviceError::Unable { device: device.to_string(), reason: error.to_string() }.into()
        }
        error => error,
    }
}

impl fmt::Display for OpenCuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({})", self.ordinal, self.device.name())
    }
}

impl fmt::Debug for OpenCuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenCuda({self})")
    }
}
