//! Tensors of a checkpoint by name, and why a checkpoint may be refused.

use std::path::PathBuf;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{Device, Tensor};

use crate::config::ConfigError;

/// Why a checkpoint was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is absent or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// `config.json` was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors are not those that `config.json` asks for: every difference, one a line.
    #[error("model.safetensors does not fit config.json:\n  {}", .0.join("\n  "))]
    Tensors(Vec<String>),
    /// The recurrence has kernels for the CPU alone so far.
    #[error("device must be the CPU")]
    Device,
    /// The file is no safetensors file, or the device refused.
    #[error("model.safetensors: {0}")]
    Candle(#[from] candle_core::Error),
}

/// Tensors by name below a prefix.
#[derive(Clone)]
pub(crate) struct Weights<'a> {
    file: &'a MmapedSafetensors,
    prefix: String,
    device: &'a Device,
}

impl<'a> Weights<'a> {
    /// All tensors of a file, to be loaded onto `device`.
    pub(crate) fn new(file: &'a MmapedSafetensors, device: &'a Device) -> Self {
        Self { file, prefix: String::new(), device }
    }

    /// The tensors below `prefix.name`.
    pub(crate) fn pp(&self, name: &str) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// The device that tensors are loaded onto.
    pub(crate) fn device(&self) -> &Device {
        self.device
    }

    /// One tensor in its stored dtype.
    pub(crate) fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        let name = format!("{}{name}", self.prefix);
        let tensor = self.file.load(&name, self.device)?;
        if tensor.dims() != shape {
            return Err(LoadError::Tensors(vec![format!("{name} has shape {:?}, expected {shape:?}", tensor.dims())]));
        }
        Ok(tensor)
    }
}
