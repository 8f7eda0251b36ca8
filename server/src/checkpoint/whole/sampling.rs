//! The sampling parameters that a GGUF file recommends: llama.cpp's converter copies them from
//! `generation_config.json`.

use tidegate_model::checkpoint::{Metadata, MetadataError};

use crate::text::GenerationDefaults;

/// Returns the recommended parameters. The parameters of llama.cpp's other samplers (XTC, Mirostat, their order, and
/// how far back a penalty looks) have no counterpart here.
pub(super) fn recommended(metadata: &Metadata) -> Result<GenerationDefaults, MetadataError> {
    let number = |name: &str| {
        let key = format!("general.sampling.{name}");
        // The number may be stored as an integer.
        metadata.float(&key).or_else(|error| {
            let whole = metadata.number(&key).map_err(|_| error)?;
            Ok(whole.map(|number| number as f64))
        })
    };
    let top_k = match metadata.number("general.sampling.top_k") {
        // In llama.cpp, -1 means all tokens, like 0.
        Err(error) if error.found.starts_with('-') => Some(0),
        found => found?,
    };
    Ok(GenerationDefaults {
        // In llama.cpp, a temperature below 0 also means greedy sampling.
        temperature: number("temp")?.map(|temperature| temperature.max(0.0)),
        top_p: number("top_p")?,
        top_k: top_k.map(|top_k| usize::try_from(top_k).unwrap_or(usize::MAX)),
        min_p: number("min_p")?,
        repetition_penalty: number("penalty_repeat")?,
        ..GenerationDefaults::default()
    })
}
