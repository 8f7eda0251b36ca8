//! A model and its text files, without an engine: for the draft model and for `eval`.

use std::path::Path;

use tidegate_model::{Backend, LanguageModel, ModelRunner};

#[cfg(feature = "cuda")]
use super::choice::DeviceChoice;
#[cfg(feature = "cuda")]
use super::cuda::{is_of_the_device, unable};
use super::device::OpenDevice;
use super::error::OpenError;
#[cfg(feature = "cuda")]
use super::load::on_cuda;
use super::load::{Loaded, TextFiles, by_candle, on_cpu, resident_weights};
use super::options::OpenOptions;
use super::supported;

/// A loaded model.
pub struct Model {
    /// The model, with empty slots.
    pub model: Box<dyn LanguageModel>,
    /// Its tokenizer, chat template and default sampling parameters.
    pub text: TextFiles,
    /// Bytes that the weights take where the model runs.
    pub weights: u64,
}

/// Loads the checkpoint in `folder`, or the file that holds the whole model.
///
/// # Errors
/// The device is not available or cannot run the model, or a file is missing or wrong.
pub fn open_model(folder: &Path, options: &OpenOptions) -> Result<Model, OpenError> {
    supported::check(folder)?;
    let (slots, state) = (options.slots, options.state);
    match options.backend.open(options.device, folder)? {
        OpenDevice::Cpu => with_text(folder, options, on_cpu(folder, slots, state)?),
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(device) => match on_cuda(folder, &device, slots, state) {
            Err(error) if options.device == DeviceChoice::Auto && is_of_the_device(&error) => {
                tracing::warn!(%device, "using the CPU: {error}");
                with_text(folder, options, on_cpu(folder, slots, state)?)
            }
            loaded => with_text(folder, options, loaded.map_err(|error| unable(error, &device))?),
        },
        OpenDevice::Candle(device) => with_text(folder, options, by_candle(folder, &device, slots, state)?),
    }
}

fn with_text<B: Backend + 'static>(
    folder: &Path,
    options: &OpenOptions,
    (decoder, pool): Loaded<B>,
) -> Result<Model, OpenError> {
    let text = TextFiles::load(folder, options.vocabulary.as_deref(), decoder.vocab_size(), decoder.eos())?;
    let weights = resident_weights(folder, &decoder);
    Ok(Model { model: Box::new(ModelRunner::new(decoder, pool)), text, weights })
}
