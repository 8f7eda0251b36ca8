//! Why a checkpoint cannot be served, or a device cannot be used.

use std::path::PathBuf;

use tidegate_model::ModelError;
use tidegate_model::checkpoint::LoadError;
use tidegate_model::config::ConfigError;
use tidegate_model::sampling::SamplingError;

use super::choice::DeviceChoice;
use crate::engine::EngineError;
use crate::session::KeyError;
use crate::text::{GrammarError, TextError};

/// Why a checkpoint cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path is not a supported checkpoint.
    #[error("{path}: {reason}")]
    Unsupported {
        /// The given path.
        path: PathBuf,
        /// Why it cannot be loaded, and what would be accepted.
        reason: String,
    },
    /// `config.json` is wrong.
    #[error("{path}: {source}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The requested device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The weights cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The tokenizer or the chat template cannot be loaded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The recommended sampling parameters are invalid.
    #[error("generation_config.json: {0}")]
    Sampling(#[from] SamplingError),
    /// The vocabulary cannot be used for grammars.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The slots cannot be allocated.
    #[error("the states of {slots} slots cannot be allocated: {source}")]
    Slots {
        /// Number of requested slots.
        slots: usize,
        /// The cause.
        source: ModelError,
    },
    /// The engine cannot be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The secret is invalid.
    #[error(transparent)]
    Secret(#[from] KeyError),
    /// A file could not be read for the fingerprint.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// Why the requested device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The build supports only the CPU.
    #[error(
        "--device {0}: this build does not support CUDA; choose cpu or auto, or build with \
         cargo build --release --features tidegate-server/cuda"
    )]
    NotBuilt(DeviceChoice),
    /// Only candle runs on Metal.
    #[error("--device metal: the kernels of our own do not run on Metal; add --backend candle, or choose cpu or auto")]
    NotNative,
    /// The candle backend was built without the device.
    #[error(
        "--device {choice}: this build's candle backend does not support it; choose cpu or auto, or build with \
         cargo build --release --features tidegate-server/{feature}"
    )]
    NotBuiltForCandle {
        /// The requested device.
        choice: DeviceChoice,
        /// The feature that would be needed.
        feature: &'static str,
    },
    /// The machine has no such device, or it is not available.
    #[error("--device {choice}: {reason}; choose cpu or auto, or one of the devices that nvidia-smi lists")]
    Absent {
        /// The requested device.
        choice: DeviceChoice,
        /// The reason.
        reason: String,
    },
    /// The device has too little memory, or it failed.
    #[error("{device} cannot serve this model: {reason}")]
    Unable {
        /// The device.
        device: String,
        /// The reason.
        reason: String,
    },
    /// The device has no kernels for the model.
    #[error("{device} does not support this model: {reason}; --device cpu does")]
    Refused {
        /// The device.
        device: String,
        /// What is not supported.
        reason: String,
    },
}
