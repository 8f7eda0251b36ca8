//! The device that computes: what is requested, and what this build and this machine have.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "cuda")]
use tracing::warn;

#[cfg(feature = "cuda")]
use super::cuda::OpenCuda;

/// The requested device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device, or the CPU if the build, the machine or the model does not support it.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device of this number.
    Cuda(usize),
    /// CUDA's kernels on the CPU: for tests.
    #[cfg(feature = "cuda-emulator")]
    Emulator,
}

/// A text is not the name of a [`DeviceChoice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be cpu, cuda, cuda:N (N counts the devices from 0) or auto")]
pub struct DeviceChoiceError;

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            #[cfg(feature = "cuda-emulator")]
            "emulator" => Ok(Self::Emulator),
            _ => {
                let number = text.strip_prefix("cuda:").filter(|number| !number.starts_with('+'));
                number.and_then(|number| number.parse().ok()).map(Self::Cuda).ok_or(DeviceChoiceError)
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            #[cfg(feature = "cuda-emulator")]
            Self::Emulator => f.write_str("emulator"),
        }
    }
}

/// Why the requested device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The build supports the CPU alone.
    #[error(
        "--device {0}: this build does not support CUDA; choose cpu or auto, or build with \
         cargo build --release --features tidegate-server/cuda"
    )]
    NotBuilt(DeviceChoice),
    /// The machine has no such device, or it is not available.
    #[error("--device {choice}: {reason}; choose cpu or auto, or one of the devices that nvidia-smi lists")]
    Absent {
        /// The request.
        choice: DeviceChoice,
        /// The reason.
        reason: String,
    },
    /// The device has too little memory, or has failed.
    #[error("{device} cannot serve this model: {reason}")]
    Unable {
        /// The device.
        device: String,
        /// The reason.
        reason: String,
    },
    /// The device has no kernels for the model.
    #[error("{device} does not support this model: {reason}; --device cpu does")]
    Refused {
        /// The device.
        device: String,
        /// What is not supported.
        reason: String,
    },
}

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
    fn a_choice_is_parsed_as_it_is_displayed() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(0), DeviceChoice::Cuda(12)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn other_texts_are_refused_with_the_accepted_forms() {
        for text in ["", "gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda: 1", "cuda1", "cpu:0", "auto:0"] {
            assert_eq!(text.parse::<DeviceChoice>(), Err(DeviceChoiceError), "{text}");
        }
        assert!("cuda:99999999999999999999999".parse::<DeviceChoice>().is_err());
        for form in ["cpu", "cuda", "cuda:N", "auto"] {
            assert!(DeviceChoiceError.to_string().contains(form));
        }
    }

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
