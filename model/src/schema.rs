//! What a config means to its family: its checks, the size of its states, and the tensors of its checkpoint.

use crate::config::{ConfigError, DecoderConfig, GivenKeys, parse};
use crate::encoder::Encoder;
use crate::layout::StateLayout;
use crate::mixers::family;
use crate::weights::TensorList;

impl DecoderConfig {
    /// Reads and checks the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] names the first key that is unknown, missing, of the wrong type or out of bounds.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let (mut config, given): (Self, GivenKeys) = (parse(text)?, parse(text)?);
        (family(config.attention).complete)(&mut config, &given)?;
        if config.head_dim == 0 {
            let heads = config.num_attention_heads.max(1);
            if !config.hidden_size.is_multiple_of(heads) {
                let bound = format!("given where {heads} heads do not divide hidden_size");
                return Err(ConfigError::bound("head_dim", bound, "none"));
            }
            config.head_dim = config.hidden_size / heads;
        }
        config.validate()?;
        Ok(config)
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// [`ConfigError::Bound`] for the first field out of its bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_shared()?;
        self.check_source()?;
        (family(self.attention).validate)(self)
    }

    /// Features of a head (F), the output of its feature map; 0 without a feature map.
    pub fn features(&self) -> usize {
        (family(self.attention).features)(self)
    }

    /// The name of the mixer in reports, such as `rfa-gate`.
    pub fn mixer(&self) -> &'static str {
        (family(self.attention).name)(self)
    }

    /// The layout of one conversation's state.
    pub fn state_layout(&self) -> StateLayout {
        (family(self.attention).layout)(self)
    }

    /// Bytes of one conversation's state in f32. The length of the text does not matter.
    pub fn state_bytes(&self) -> usize {
        self.state_layout().numbers() * size_of::<f32>()
    }

    /// Trained numbers; the fixed random matrices are not counted.
    pub fn parameters(&self) -> u64 {
        let trained = tensors(self).all.into_values().filter(|tensor| tensor.trained);
        trained.map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum()
    }
}

/// The tensors that a config asks for.
pub(crate) fn tensors(config: &DecoderConfig) -> TensorList {
    let (mut list, hidden) = (TensorList::default(), config.hidden_size);
    list.matrix("model.embed_tokens.weight", config.vocab_size, hidden);
    list.floats("model.norm.weight", &[hidden]);
    if !config.tie_word_embeddings {
        list.matrix("lm_head.weight", config.vocab_size, hidden);
    }
    if let Some(source) = config.source() {
        list.at("encoder", |list| Encoder::tensors(config, source.layers, list));
    }
    for layer in 0..config.num_hidden_layers {
        list.at(&format!("model.layers.{layer}"), |list| (family(config.attention).tensors)(config, list));
    }
    list
}
