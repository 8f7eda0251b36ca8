//! Why a CUDA device cannot be had or has failed: beside `cuda`, for a checkpoint that is not loaded says it too.

/// Why a device is not there, or has failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No driver, no such device, or one that is too old.
    #[error("CUDA device {ordinal} is not there: {reason}")]
    Absent {
        /// The device that was asked for.
        ordinal: usize,
        /// What the driver says, or what is missing.
        reason: String,
    },
    /// The decoder has no kernels on CUDA.
    #[error("on CUDA {0}")]
    Unsupported(String),
    /// The device has not as much memory.
    #[error("{what} takes {wanted} bytes of the device's memory, of which {free} are free")]
    Memory {
        /// What it was for.
        what: String,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that are free.
        free: usize,
    },
    /// A call has failed.
    #[error("CUDA: {what}: {reason}")]
    Failed {
        /// The call.
        what: String,
        /// What the driver says.
        reason: String,
    },
    /// A call has failed, and all after it will: the process must be another one.
    #[error("the CUDA device is lost: {what}: {reason}")]
    Lost {
        /// The call.
        what: String,
        /// What the driver says.
        reason: String,
    },
}
