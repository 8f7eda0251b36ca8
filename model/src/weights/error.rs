//! Errors of loading a checkpoint.

use std::path::PathBuf;

use super::matrix::WeightType;
use crate::config::ConfigError;
#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;
use crate::error::ModelError;

/// Why a checkpoint was rejected.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is absent or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// `config.json` was rejected.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors differ from those that `config.json`, or the file itself, asks for.
    #[error("{file} does not fit {config}:\n  {}", .problems.join("\n  "))]
    Tensors {
        /// The weights file.
        file: String,
        /// What the tensors must match.
        config: &'static str,
        /// Every difference.
        problems: Vec<String>,
    },
    /// [`crate::checkpoint::load`] loads onto the CPU; `cuda::load` loads onto a GPU.
    #[error("device must be the CPU")]
    Device,
    /// The decoder is not supported on CUDA, or the device has too little memory or fails.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The file violates its format.
    #[error("{file}: {reason}")]
    Format {
        /// The weights file.
        file: String,
        /// The rule that it violates.
        reason: String,
    },
    /// A matrix whose byte length does not match its shape, or whose shape the kernels cannot handle.
    #[error("weights: a {kind} matrix of {rows} x {columns}: {reason}")]
    Matrix {
        /// The type of the matrix.
        kind: WeightType,
        /// The number of rows.
        rows: usize,
        /// The number of columns.
        columns: usize,
        /// Why it was rejected.
        reason: String,
    },
    /// Matrices of one input with different numbers of columns or different quantized types.
    #[error("weights: matrices with the same input must have equal columns, and the same type if quantised, found {0}")]
    Stack(String),
    /// Candle could not create a tensor.
    #[error("weights: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The parameters of a feature map do not fit together.
    #[error("weights: {0}")]
    Model(#[from] ModelError),
}
