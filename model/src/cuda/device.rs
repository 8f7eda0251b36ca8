//! A device and its memory.

use std::sync::Arc;

use super::gpu::{Gpu, Result};
use crate::cuda_error::CudaError;

/// A device that decoders can be loaded onto.
#[derive(Clone, Debug)]
pub struct CudaDevice(pub(super) Arc<dyn Gpu>);

impl CudaDevice {
    /// Opens a GPU, counted from 0.
    ///
    /// # Errors
    /// [`CudaError::Absent`] if there is no driver or no such device, [`CudaError::Failed`] if it rejects the kernels.
    pub fn open(ordinal: usize) -> std::result::Result<Self, CudaError> {
        Ok(Self(super::driver::open(ordinal)?))
    }

    /// Opens an emulator that runs the same kernels on the CPU, thread by thread: for tests, thousands of times slower.
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated() -> Self {
        Self(super::host::open())
    }

    /// Returns the manufacturer's name for the device.
    pub fn name(&self) -> String {
        self.0.name()
    }

    /// Returns the free bytes and all bytes of the device's memory.
    ///
    /// # Errors
    /// [`CudaError::Failed`] if the driver does not report them.
    pub fn memory(&self) -> std::result::Result<(usize, usize), CudaError> {
        self.0.memory()
    }

    pub(super) fn buffer(&self, what: &str, bytes: usize) -> Result<Buffer> {
        let (free, _) = self.0.memory()?;
        if bytes > free {
            return Err(CudaError::Memory { what: what.into(), wanted: bytes, free });
        }
        // An allocation of no bytes has no address.
        Ok(Buffer { at: self.0.allocate(bytes.max(16))?, bytes, gpu: Arc::clone(&self.0) })
    }

    pub(super) fn with(&self, what: &str, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.buffer(what, bytes.len())?;
        self.0.upload(buffer.at, bytes)?;
        Ok(buffer)
    }

    pub(super) fn floats(&self, what: &str, numbers: &[f32]) -> Result<Buffer> {
        self.with(what, &bytes_of(numbers))
    }
}

pub(super) fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Memory of a device, freed on drop.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) at: u64,
    pub(super) bytes: usize,
    gpu: Arc<dyn Gpu>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.gpu.free(self.at);
    }
}
