//! The requested device.

use std::fmt;
use std::str::FromStr;

/// The requested device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device, or the CPU if the build, the machine or the model does not support it.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device with this number.
    Cuda(usize),
    /// The GPU of a Mac; for the candle backend only.
    Metal,
    /// The CUDA kernels, emulated on the CPU for tests.
    #[cfg(feature = "cuda-emulator")]
    Emulator,
}

/// The error for a text that is not the name of a [`DeviceChoice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be cpu, cuda, cuda:N (N counts the devices from 0), metal or auto")]
pub struct DeviceChoiceError;

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, DeviceChoiceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "metal" => Ok(Self::Metal),
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
            Self::Metal => f.write_str("metal"),
            #[cfg(feature = "cuda-emulator")]
            Self::Emulator => f.write_str("emulator"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_parsed_as_it_is_displayed() {
        let cuda = [0, 12].map(DeviceChoice::Cuda);
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Metal].into_iter().chain(cuda) {
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
        for form in ["cpu", "cuda", "cuda:N", "metal", "auto"] {
            assert!(DeviceChoiceError.to_string().contains(form));
        }
    }
}
