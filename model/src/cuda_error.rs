//! Errors of CUDA devices. They are not in `cuda` because loading a checkpoint reports them too.

/// Why a device is not available, or has failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No driver, no such device, or one that is too old.
    #[error("CUDA device {ordinal} is not there: {reason}")]
    Absent {
        /// The number of the device.
        ordinal: usize,
        /// The driver's message, or what is missing.
        reason: String,
    },
    /// The decoder is not supported on CUDA.
    #[error("on CUDA {0}")]
    Unsupported(String),
    /// The device does not have enough free memory.
    #[error("{what} takes {wanted} bytes of the device's memory, of which {free} are free")]
    Memory {
        /// The purpose of the memory.
        what: String,
        /// Bytes asked for.
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
    /// A call failed, and so will all later ones: the process must restart.
    #[error("the CUDA device is lost: {what}: {reason}")]
    Lost {
        /// The call.
        what: String,
        /// What the driver says.
        reason: String,
    },
}
