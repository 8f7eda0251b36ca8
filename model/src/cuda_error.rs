//! Errors of CUDA devices. They are outside of `cuda` because checkpoint loading errors contain them.

/// Why a device is unavailable or has failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver or no such device, or it is too old.
    #[error("CUDA device {ordinal} is not available: {reason}")]
    Absent {
        /// The requested device, counted from 0.
        ordinal: usize,
        /// The driver's message, or what is missing.
        reason: String,
    },
    /// There are no CUDA kernels for this decoder.
    #[error("on CUDA {0}")]
    Unsupported(String),
    /// The device has too little memory.
    #[error("{what} needs {wanted} bytes of the device's memory, of which {free} are free")]
    Memory {
        /// What the memory is for.
        what: String,
        /// Bytes requested.
        wanted: usize,
        /// Free bytes.
        free: usize,
    },
    /// A driver call failed.
    #[error("CUDA: {what}: {reason}")]
    Failed {
        /// The call.
        what: String,
        /// The driver's message.
        reason: String,
    },
    /// A driver call failed, and every later call will fail too: the process must be restarted.
    #[error("the CUDA device is lost: {what}: {reason}")]
    Lost {
        /// The call.
        what: String,
        /// The driver's message.
        reason: String,
    },
}
