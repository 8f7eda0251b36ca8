//! The requested backend: our own kernels, or candle.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::choice::DeviceChoice;
use super::device::OpenDevice;
use super::error::{DeviceError, OpenError};
use super::supported::{self, Described};

/// The requested backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// Our own kernels if they support the model's family, otherwise candle.
    #[default]
    Auto,
    /// Our own kernels.
    Native,
    /// Candle.
    Candle,
}

/// The error for a text that is not the name of a [`BackendChoice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be auto, native or candle")]
pub struct BackendChoiceError;

impl BackendChoice {
    /// Opens the device for a model, on the backend that can run the model.
    ///
    /// # Errors
    /// The backend does not support the model, or the device is not available to it.
    pub fn open(self, device: DeviceChoice, model: &Path) -> Result<OpenDevice, OpenError> {
        let only_candle = matches!(supported::checked(model)?, Some(Described::Candle(_)));
        match self {
            Self::Native if only_candle => Err(OpenError::Unsupported {
                path: model.into(),
                reason: "--backend native has no kernels for this family; --backend candle computes it".into(),
            }),
            Self::Auto | Self::Native if !only_candle => Ok(device.open()?),
            _ => Ok(device.open_for_candle()?),
        }
    }

    /// Checks whether the device is available, before any model is known.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn check(self, device: DeviceChoice) -> Result<(), DeviceError> {
        match self {
            Self::Candle => device.open_for_candle().map(drop),
            Self::Native => device.open().map(drop),
            Self::Auto if device == DeviceChoice::Metal => device.open_for_candle().map(drop),
            // Which backend a model needs is not known yet.
            Self::Auto => {
                device.open().map(drop).or_else(|error| device.open_for_candle().map(drop).map_err(|_| error))
            }
        }
    }
}

impl FromStr for BackendChoice {
    type Err = BackendChoiceError;

    fn from_str(text: &str) -> Result<Self, BackendChoiceError> {
        [Self::Auto, Self::Native, Self::Candle]
            .into_iter()
            .find(|choice| choice.to_string() == text)
            .ok_or(BackendChoiceError)
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Candle => "candle",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_parsed_as_it_is_displayed() {
        for choice in [BackendChoice::Auto, BackendChoice::Native, BackendChoice::Candle] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("Candle".parse::<BackendChoice>(), Err(BackendChoiceError));
    }

    #[test]
    fn a_device_that_candle_is_not_built_for_is_refused_with_the_feature() {
        for (device, feature) in [(DeviceChoice::Cuda(1), "candle-cuda"), (DeviceChoice::Metal, "candle-metal")] {
            if cfg!(all(not(feature = "candle-cuda"), not(feature = "candle-metal"))) {
                let error = BackendChoice::Candle.check(device).unwrap_err().to_string();
                let start = format!("--device {device}: this build's candle backend does not support");
                assert!(error.starts_with(&start) && error.contains(&format!("tidegate-server/{feature}")), "{error}");
            }
        }
        let error = BackendChoice::Native.check(DeviceChoice::Metal).unwrap_err().to_string();
        assert!(error.contains("--backend candle"), "{error}");
        assert!(BackendChoice::Candle.check(DeviceChoice::Auto).is_ok());
    }
}
