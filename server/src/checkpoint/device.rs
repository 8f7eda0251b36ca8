//! Where a model computes: what was asked for, and what of it this build and this machine have.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "cuda")]
use tracing::warn;

#[cfg(feature = "cuda")]
use super::cuda::OpenCuda;

/// Where a model is to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device, or the CPU where the build, the machine or the model is not made for it.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device of this number, and nothing else.
    Cuda(usize),
    /// CUDA's kernels on the CPU, thread by thread: for tests.
    #[cfg(feature = "cuda-emulator")]
    Emulator,
}

/// A text that names no [`DeviceChoice`].
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

/// Why the device that was asked for does not serve.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The build has the CPU alone.
    #[error(
        "--device {0}: this build has no CUDA; choose cpu or auto, or a build with it \
         (cargo build --release --features tidegate-server/cuda)"
    )]
    NotBuilt(DeviceChoice),
    /// The machine has no such device, or does not give it.
    #[error("--device {choice}: {reason}; choose cpu or auto, or one of the devices that nvidia-smi lists")]
    Absent {
        /// What was asked for.
        choice: DeviceChoice,
        /// What was found.
        reason: String,
    },
    /// The device has too little memory, or has failed.
    #[error("{device} cannot serve this model: {reason}")]
    Unable {
        /// The device.
        device: String,
        /// Why not.
        reason: String,
    },
    /// The model needs what the device has no kernels for.
    #[error("{device} does not take this model: {reason}; --device cpu does")]
    Refused {
        /// The device.
        device: String,
        /// What it has no kernels for.
        reason: String,
    },
}

/// A device that is there.
#[derive(Clone, Debug)]
pub enum OpenDevice {
    /// The CPU.
    Cpu,
    /// A CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(OpenCuda),
}

impl DeviceChoice {
    /// The device that was asked for; where any would do, the CPU for want of a better one, with a warning in a build
    /// that could have used one.
    ///
    /// # Errors
    /// A CUDA device was asked for, and the build has no CUDA, or the machine no such device.
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
                    warn!("the CPU computes: {error}");
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
    /// What is the same for all devices on which a request's text is the same. Sums of floats have another order on a
    /// GPU than on the CPU, and matrix units round in a way of their own from one kind of GPU to the next.
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
    fn a_choice_is_read_as_it_is_written() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(0), DeviceChoice::Cuda(12)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn other_words_are_told_the_forms() {
        for text in ["", "gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda: 1", "cuda1", "cpu:0", "auto:0"] {
            assert_eq!(text.parse::<DeviceChoice>(), Err(DeviceChoiceError), "{text}");
        }
        assert!("cuda:99999999999999999999999".parse::<DeviceChoice>().is_err());
        for form in ["cpu", "cuda", "cuda:N", "auto"] {
            assert!(DeviceChoiceError.to_string().contains(form));
        }
    }

    #[test]
    fn the_cpu_is_always_there() {
        assert!(matches!(DeviceChoice::Cpu.open(), Ok(OpenDevice::Cpu)));
        assert_eq!((OpenDevice::Cpu.to_string(), OpenDevice::Cpu.class()), ("cpu".into(), "cpu".into()));
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_by_its_name() {
        let error = DeviceChoice::Cuda(4096).open().unwrap_err();
        assert!(error.to_string().starts_with("--device cuda:4096: "), "{error}");
        assert_eq!(matches!(error, DeviceError::NotBuilt(_)), cfg!(not(feature = "cuda")), "{error}");
    }
}
