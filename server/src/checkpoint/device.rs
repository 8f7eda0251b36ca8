//! The device that computes. It is opened on request, if this build and this machine have it.

use std::fmt;

use tidegate_model::{Device, candle};

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
    /// A device of the candle backend.
    Candle(Device),
}

impl DeviceChoice {
    /// Opens the requested device; `auto` falls back to the CPU, with a warning if the build supports CUDA.
    ///
    /// # Errors
    /// A CUDA device was requested, but the build does not support CUDA or the machine has no such device.
    pub fn open(self) -> Result<OpenDevice, DeviceError> {
        match self {
            Self::Cpu => Ok(OpenDevice::Cpu),
            Self::Metal => Err(DeviceError::NotNative),
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

impl DeviceChoice {
    /// Opens the requested device for the candle backend. `auto` takes the first of CUDA, Metal and the CPU that both
    /// the build and the machine have.
    ///
    /// # Errors
    /// The candle backend was built without the device, or the machine does not have it.
    pub fn open_for_candle(self) -> Result<OpenDevice, DeviceError> {
        let not_built = |feature| Err(DeviceError::NotBuiltForCandle { choice: self, feature });
        let opened = match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => {
                let cuda = if cfg!(feature = "candle-cuda") { Device::new_cuda(0).ok() } else { None };
                let metal = || if cfg!(feature = "candle-metal") { Device::new_metal(0).ok() } else { None };
                Ok(cuda.or_else(metal).unwrap_or(Device::Cpu))
            }
            Self::Cuda(_) if cfg!(not(feature = "candle-cuda")) => return not_built("candle-cuda"),
            Self::Metal if cfg!(not(feature = "candle-metal")) => return not_built("candle-metal"),
            Self::Cuda(ordinal) => Device::new_cuda(ordinal),
            Self::Metal => Device::new_metal(0),
            #[cfg(feature = "cuda-emulator")]
            Self::Emulator => return not_built("candle-cuda"),
        };
        let absent = |error: &dyn fmt::Display| DeviceError::Absent { choice: self, reason: error.to_string() };
        opened.map(OpenDevice::Candle).map_err(|error| absent(&error))
    }
}

impl OpenDevice {
    /// Returns whether the CPU computes, in the memory of this process.
    pub fn is_cpu(&self) -> bool {
        match self {
            Self::Cpu => true,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => false,
            Self::Candle(device) => device.is_cpu(),
        }
    }

    /// Returns whether candle computes.
    pub fn is_candle(&self) -> bool {
        matches!(self, Self::Candle(_))
    }

    /// Returns the class of devices on which a request gives the same text. A GPU adds floats in another order than the
    /// CPU, and the matrix units of different kinds of GPU round differently.
    pub(super) fn class(&self) -> String {
        match self {
            Self::Cpu => "cpu".into(),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.class(),
            // Candle's matrix products may depend on the width of the CPU's vector registers.
            Self::Candle(Device::Cpu) => format!("{self} {}", candle::instruction_set()),
            Self::Candle(_) => self.to_string(),
        }
    }
}

impl fmt::Display for OpenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.fmt(f),
            Self::Candle(Device::Cpu) => f.write_str("cpu by candle"),
            Self::Candle(Device::Cuda(_)) => f.write_str("cuda by candle"),
            Self::Candle(Device::Metal(_)) => f.write_str("metal by candle"),
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
