//! What an encoder-decoder has besides its decoder: a source, which an encoder reads.

use super::{Attention, ConfigError, DecoderConfig, FeatureMap, within};

/// The `model_type` of a decoder alone.
const DECODER: &str = "rfa_gate";
/// The `model_type` of an encoder-decoder.
const ENCODER_DECODER: &str = "rfa_seq2seq";

/// How a source is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceConfig {
    /// Blocks of the encoder.
    pub layers: usize,
    /// Most tokens of a source.
    pub max_positions: usize,
    /// The token that the decoder reads first.
    pub start: u32,
}

impl DecoderConfig {
    /// How a source is read; none where there is a decoder alone.
    pub fn source(&self) -> Option<SourceConfig> {
        match (self.encoder_layers, self.max_source_positions, self.decoder_start_token_id) {
            (Some(layers), Some(max_positions), Some(start)) => Some(SourceConfig { layers, max_positions, start }),
            _ => None,
        }
    }

    /// Numbers of one layer's cross attention: of each head S (F, d), z (F) and c, or the source's keys and values.
    pub(crate) fn head_cross_len(&self) -> usize {
        self.source().map_or(0, |source| match self.attention {
            Attention::Softmax => 2 * source.max_positions * self.head_dim,
            Attention::Rfa | Attention::Hybrid => self.features() * (self.head_dim + 1) + 1,
        })
    }

    /// The keys that one `model_type` needs and the other refuses.
    pub(super) fn validate_source(&self) -> Result<(), ConfigError> {
        let bound = |field, bound: &str, found: String| Err(ConfigError::Bound { field, bound: bound.into(), found });
        let given = [
            ("encoder_layers", self.encoder_layers, 1024),
            ("max_source_positions", self.max_source_positions, 1 << 16),
        ];
        match self.model_type.as_str() {
            DECODER => {
                let start = self.decoder_start_token_id.map(|id| ("decoder_start_token_id", id as usize));
                let found = given.into_iter().find_map(|(field, value, _)| Some((field, value?))).or(start);
                found.map_or(Ok(()), |(field, value)| {
                    bound(field, &format!("absent where model_type is {DECODER}"), value.to_string())
                })
            }
            ENCODER_DECODER => {
                for (field, value, most) in given {
                    let Some(value) = value else {
                        return bound(field, &format!("between 1 and {most}"), "none".into());
                    };
                    within(field, value, 1, most)?;
                }
                let most = self.vocab_size - 1;
                match self.decoder_start_token_id {
                    None => bound("decoder_start_token_id", &format!("between 0 and {most}"), "none".into()),
                    Some(id) => within("decoder_start_token_id", id as usize, 0, most),
                }?;
                self.validate_around_source()
            }
            other => bound("model_type", &format!("{DECODER:?} or {ENCODER_DECODER:?}"), other.into()),
        }
    }

    /// What an encoder-decoder is made of.
    fn validate_around_source(&self) -> Result<(), ConfigError> {
        let here = |bound: &str| format!("{bound} where model_type is {ENCODER_DECODER}");
        let bound = |field, bound: &str, found: String| Err(ConfigError::Bound { field, bound: here(bound), found });
        if self.attention == Attention::Hybrid {
            return bound("attention", "rfa or softmax", "hybrid".into());
        }
        if self.attention == Attention::Rfa && self.feature_map != FeatureMap::Gaussian {
            return bound("feature_map", "gaussian", self.feature_map.name().into());
        }
        if self.conv_kernel > 0 {
            return bound("conv_kernel", "0", self.conv_kernel.to_string());
        }
        if self.output_norm {
            return bound("output_norm", "false", "true".into());
        }
        if !self.head_dim.is_multiple_of(2) {
            return bound("head_dim", "even", self.head_dim.to_string());
        }
        Ok(())
    }
}
