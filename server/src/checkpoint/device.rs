//! The device that computes: opened on request, if this build and this machine have it.

use std::fmt;

#[cfg(feature = "cuda")]
use tracing::warn;

use super::choice::DeviceChoice;
#[cfg(feature = "cuda")]
use super::cuda::OpenCuda;
use super::error::DeviceError;

/// An open device.
#[derive(Clone, Debug)]
pub enum OpenDevice {
    /// The CPU.
    Cpu,
    /// A CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(OpenCuda),
}

impl DeviceChoice {
    /// Opens the requested device; `auto` falls back to the CPU, with a warning if the build supports CUDA.
    ///
    /// # Errors
    /// A CUDA device was requested, and the build does not support CUDA or the machine has no such device.
    pub fn open(self) -> Result<OpenDevice, DeviceError> {
        match self {
            Self::Cpu => Ok(OpenDevice::Cpu),
            #[cfg(not(feature = "cuda"))]
            Self::Auto => Ok(OpenDevice::Cpu),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda(_) => Err(DeviceError::NotBuilt(self)),
            #[cfg(feature = "cuda")]
            Self::Auto => Ok(OpenCuda::new(0).map_or_else(
                |error| {
                    warn!("using the CPU: {error}");
                    OpenDevice::Cpu
                },
                OpenDevice::Cuda,
            )),
            #[cfg(feature = "cuda-emulator")]
            Self::Emulator => Ok(OpenDevice::Cuda(OpenCuda::emulated())),
            #[cfg(feature = "cuda")]
            Self::Cuda(ordinal) => match OpenCuda::new(ordinal) {
                Ok(device) => Ok(OpenDevice::Cuda(device)),
                Err(error) => Err(DeviceError::Absent { choice: self, reason: error.to_string() }),
            },
        }
    }
}

impl OpenDevice {
    /// The class of devices on which a request gives the same text. Sums of floats have another order on a GPU than on the
    /// CPU, and matrix units round differently from one kind of GPU to the next.
    pub(super) fn class(&self) -> String {
        match self {
            Self::Cpu => "cpu".into(),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.class(),
        }
    }
}

impl fmt::Display for OpenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_always_available() {
        assert!(matches!(DeviceChoice::Cpu.open(), Ok(OpenDevice::Cpu)));
        assert_eq!((OpenDevice::Cpu.to_string(), OpenDevice::Cpu.class()), ("cpu".into(), "cpu".into()));
    }

    #[test]
    fn a_missing_device_is_refused_by_its_name() {
        let error = DeviceChoice::Cuda(4096).open().unwrap_err();
        assert!(error.to_string().starts_with("--device cuda:4096: "), "{error}");
        assert_eq!(matches!(error, DeviceError::NotBuilt(_)), cfg!(not(feature = "cuda")), "{error}");
    }
}
