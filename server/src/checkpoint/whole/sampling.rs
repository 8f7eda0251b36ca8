//! The sampling that a GGUF file recommends: llama.cpp's converter writes there what a folder has in `generation_config.json`.

use tidegate_model::checkpoint::{Metadata, MetadataError};

use crate::text::GenerationDefaults;

/// The recommended parameters. Those of llama.cpp's other samplers (XTC, Mirostat, their order, and how far back a penalty
/// looks) have no counterpart here.
pub(super) fn recommended(metadata: &Metadata) -> Result<GenerationDefaults, MetadataError> {
    let number = |name: &str| {
        let key = format!("general.sampling.{name}");
        // A number may be written without a fraction.
        metadata.float(&key).or_else(|error| {
            let whole = metadata.number(&key).map_err(|_| error)?;
            Ok(whole.map(|number| number as f64))
        })
    };
    let top_k = match metadata.number("general.sampling.top_k") {
        // To llama.cpp, -1 means all tokens, as 0 does.
        Err(error) if error.found.starts_with('-') => Some(0),
        found => found?,
    };
    Ok(GenerationDefaults {
        // To llama.cpp, the likeliest token is meant below 0 as well.
        temperature: number("temp")?.map(|temperature| temperature.max(0.0)),
        top_p: number("top_p")?,
        top_k: top_k.map(|top_k| usize::try_from(top_k).unwrap_or(usize::MAX)),
        min_p: number("min_p")?,
        repetition_penalty: number("penalty_repeat")?,
        ..GenerationDefaults::default()
    })
}
