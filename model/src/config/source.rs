//! The source of an encoder-decoder: its keys in `config.json` and their bounds.

use super::{Attention, ConfigError, DecoderConfig, PROJ_DIM_MAX, within};

/// The `model_type` of an encoder-decoder.
pub(crate) const ENCODER_DECODER: &str = "rfa_seq2seq";

/// The source side of an encoder-decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceConfig {
    /// Number of encoder layers.
    pub layers: usize,
    /// Maximum number of source tokens.
    pub max_positions: usize,
    /// The token that the decoder starts with.
    pub start: u32,
}

impl DecoderConfig {
    /// The source side of an encoder-decoder; `None` for a decoder-only model.
    pub fn source(&self) -> Option<SourceConfig> {
        match (self.encoder_layers, self.max_source_positions, self.decoder_start_token_id) {
            (Some(layers), Some(max_positions), Some(start)) => Some(SourceConfig { layers, max_positions, start }),
            _ => None,
        }
    }

    /// Number of random vectors per head of cross attention.
    pub(crate) fn cross_vectors(&self) -> usize {
        self.cross_proj_dim.unwrap_or(self.proj_dim)
    }

    /// Checks `model_type`, and that the keys of an encoder-decoder are present for one and absent for a decoder-only
    /// model. `decoder` is the `model_type` of the family's decoder.
    pub(crate) fn check_source(&self, decoder: &str) -> Result<(), ConfigError> {
        let given = [
            ("encoder_layers", self.encoder_layers, 1024),
            ("max_source_positions", self.max_source_positions, 1 << 16),
            ("decoder_start_token_id", self.decoder_start_token_id.map(|id| id as usize), self.vocab_size - 1),
        ];
        let optional = ("cross_proj_dim", self.cross_proj_dim, PROJ_DIM_MAX);
        match self.model_type.as_str() {
            found if found == decoder => {
                let found = given.into_iter().chain([optional]).find_map(|(field, value, _)| Some((field, value?)));
                let absent = format!("absent where model_type is {decoder}");
                found.map_or(Ok(()), |(field, value)| Err(ConfigError::bound(field, absent, value)))
            }
            ENCODER_DECODER => {
                for (field, value, max) in given {
                    let min = usize::from(field != "decoder_start_token_id");
                    let absent = || ConfigError::bound(field, format!("between {min} and {max}"), "none");
                    within(field, value.ok_or_else(absent)?, min, max)?;
                }
                let here = |field, bound: &str, found: String| {
                    let bound = format!("{bound} where model_type is {ENCODER_DECODER}");
                    Err(ConfigError::Bound { field, bound, found })
                };
                if let (field, Some(value), max) = optional {
                    if self.attention == Attention::Softmax || !self.feature_map.has_random_matrices() {
                        return here(field, "absent without random vectors", value.to_string());
                    }
                    within(field, value, 1, max)?;
                }
                if self.output_norm {
                    return here("output_norm", "false", "true".into());
                }
                if !self.head_dim.is_multiple_of(2) {
                    return here("head_dim", "even", self.head_dim.to_string());
                }
                Ok(())
            }
            other => Err(ConfigError::bound("model_type", format!("{decoder:?} or {ENCODER_DECODER:?}"), other)),
        }
    }
}
