//! The errors of loading a checkpoint.

use std::path::PathBuf;

use super::matrix::WeightType;
use crate::config::ConfigError;
#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;
use crate::error::ModelError;

/// Why a checkpoint was refused.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is absent or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// `config.json` was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors differ from those that `config.json`, or the file itself, asks for.
    #[error("{file} does not fit {config}:\n  {}", .problems.join("\n  "))]
    Tensors {
        /// The file of weights.
        file: String,
        /// What it has to fit.
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
    /// The file breaks its format.
    #[error("{file}: {reason}")]
    Format {
        /// The file of weights.
        file: String,
        /// The rule that it breaks.
        reason: String,
    },
    /// A matrix whose bytes are not those of its shape, or whose shape the kernels cannot hold.
    #[error("weights: a {kind} matrix of {rows} x {columns}: {reason}")]
    Matrix {
        /// The type of the matrix.
        kind: WeightType,
        /// Its rows.
        rows: usize,
        /// Its columns.
        columns: usize,
        /// Why it was refused.
        reason: String,
    },
    /// Matrices of one input that differ in columns or in their quantised type.
    #[error("weights: matrices with the same input must have equal columns, and the same type if quantised, found {0}")]
    Stack(String),
    /// A tensor could not be made.
    #[error("weights: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The numbers of a feature map do not fit together.
    #[error("weights: {0}")]
    Model(#[from] ModelError),
}
