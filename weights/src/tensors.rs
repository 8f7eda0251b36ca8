//! `model.safetensors` without a model: names, shapes, and single tensors as f32, whatever the file's size.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde::Deserialize;

/// Why a weight file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TensorsError {
    /// Opening or reading failed.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is no SafeTensors file.
    #[error("{path}: {message}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
}

/// What the header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TensorInfo {
    /// `F32`, `F16`, `BF16`, ...
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// First byte, and the byte after the last, counted from the header's end.
    data_offsets: (u64, u64),
}

impl TensorInfo {
    /// How many numbers it has.
    pub fn numbers(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.data_offsets.1 - self.data_offsets.0
    }
}

/// An open weight file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    data: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Reads the header of `model.safetensors` in a checkpoint folder.
    ///
    /// # Errors
    /// [`TensorsError`] names the file and what is wrong with it.
    pub fn open(folder: &Path) -> Result<Self, TensorsError> {
        let path = folder.join("model.safetensors");
        let read = |source| TensorsError::Read { path: path.clone(), source };
        let format = |message: String| TensorsError::Format { path: path.clone(), message };
        let mut file = File::open(&path).map_err(read)?;
        let size = file.metadata().map_err(read)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(read)?;
        let data = u64::from_le_bytes(length).saturating_add(8);
        if data > size {
            return Err(format(format!("the header ends at byte {data}, the file at {size}")));
        }
        let mut header = vec![0; (data - 8) as usize];
        file.read_exact(&mut header).map_err(read)?;
        let mut all: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|e| format(format!("header: {e}")))?;
        all.remove("__metadata__");
        let mut tensors = BTreeMap::new();
        for (name, value) in all {
            let info: TensorInfo = serde_json::from_value(value).map_err(|e| format(format!("{name}: {e}")))?;
            let (from, to) = info.data_offsets;
            if from > to || to > size - data {
                return Err(format(format!(
                    "{name}: bytes {from} to {to} lie outside of the {} there are",
                    size - data
                )));
            }
            // No dtype has less than a bit: a product that overflows, or that the bytes cannot hold, is refused.
            let numbers = info.shape.iter().try_fold(1_u64, |n, &side| n.checked_mul(side as u64));
            if numbers.is_none_or(|n| n.div_ceil(8) > to - from) {
                return Err(format(format!("{name}: {} bytes do not hold the shape {:?}", to - from, info.shape)));
            }
            tensors.insert(name, info);
        }
        Ok(Self { path, file, data, tensors })
    }

    /// Names and descriptions, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The numbers of one tensor, row-major; `None` where there is none of that name.
    ///
    /// # Errors
    /// [`TensorsError`] where reading fails, or the tensor is neither F32, F16 nor BF16 of its shape.
    pub fn read_f32(&mut self, name: &str) -> Result<Option<Vec<f32>>, TensorsError> {
        let Some(info) = self.tensors.get(name) else { return Ok(None) };
        let read = |source| TensorsError::Read { path: self.path.clone(), source };
        let mut bytes = vec![0; info.bytes() as usize];
        self.file.seek(SeekFrom::Start(self.data + info.data_offsets.0)).map_err(read)?;
        self.file.read_exact(&mut bytes).map_err(read)?;
        let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        let values: Vec<f32> = match info.dtype.as_str() {
            "F32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            "F16" => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            "BF16" => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            other => {
                let message = format!("{name}: expected F32, F16 or BF16, found {other}");
                return Err(TensorsError::Format { path: self.path.clone(), message });
            }
        };
        if values.len() as u64 != info.numbers() {
            let message = format!("{name}: {} numbers do not fill the shape {:?}", values.len(), info.shape);
            return Err(TensorsError::Format { path: self.path.clone(), message });
        }
        Ok(Some(values))
    }
}
