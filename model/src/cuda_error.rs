//! Errors of CUDA devices. Outside of `cuda`, since errors of loading a checkpoint contain them.

/// Why a device is not available, or has failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, no such device, or it is too old.
    #[error("CUDA device {ordinal} is not available: {reason}")]
    Absent {
        /// The requested device, counted from 0.
        ordinal: usize,
        /// The driver's message, or what is missing.
        reason: String,
    },
    /// There are no CUDA kernels for the decoder.
    #[error("on CUDA {0}")]
    Unsupported(String),
    /// The device has too little memory.
    #[error("{what} needs {wanted} bytes of the device's memory, of which {free} are free")]
    Memory {
        /// What the memory is for.
        what: String,
        /// Bytes requested.
        wanted: usize,
        /// Bytes that are free.
        free: usize,
    },
    /// A call failed.
    #[error("CUDA: {what}: {reason}")]
    Failed {
        /// The call.
        what: String,
        /// The driver's message.
        reason: String,
    },
    /// A call failed, and all later calls will: the process must be restarted.
    #[error("the CUDA device is lost: {what}: {reason}")]
    Lost {
        /// The call.
        what: String,
        /// The driver's message.
        reason: String,
    },
}
