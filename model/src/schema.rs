//! What a config means to its model family: its checks, the size of its states, and the tensors of its checkpoint.

use std::collections::BTreeMap;

use crate::config::{ConfigError, DecoderConfig, GivenKeys, parse};
use crate::encoder::Encoder;
use crate::layout::StateLayout;
pub(crate) use crate::mixers::{GGUF_FAMILIES, GgufFamily, TensorNames, native};
use crate::mixers::{family, translated};
use crate::weights::{Entry, TensorList};

impl DecoderConfig {
    /// Reads and checks the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] names the first key that is unknown, missing, of the wrong type or out of bounds.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let text = &*translated(text)?;
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
    /// [`ConfigError::Bound`] for the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let family = family(self.attention);
        self.check_shared()?;
        self.check_source(family.frame.model_type)?;
        let act = family.frame.hidden_act;
        if self.hidden_act != act {
            return Err(ConfigError::bound("hidden_act", format!("{act:?}"), &self.hidden_act));
        }
        for (key, given) in [("low_ranks", self.low_ranks.is_some()), ("state_space", self.state_space.is_some())] {
            if given && family.frame.own_key != Some(key) {
                let bound = format!("absent where model_type is {}", self.model_type);
                return Err(ConfigError::bound(key, bound, "some"));
            }
        }
        (family.validate)(self)
    }

    /// Number of features per head (F), the output size of its feature map; 0 without a feature map.
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

    /// Bytes of one conversation's state in f32, independent of the length of the text.
    pub fn state_bytes(&self) -> usize {
        self.state_layout().numbers() * size_of::<f32>()
    }

    /// State elements that each token of the `sliding_window` fills, in all layers; 0 without a cache.
    pub fn cached_numbers(&self) -> usize {
        self.num_hidden_layers * self.num_attention_heads * (family(self.attention).cached_numbers)(self)
    }

    /// Whether the heads' memory consists only of a cache.
    pub fn only_caches(&self) -> bool {
        self.cached_numbers() * self.window() == self.state_layout().memory()
    }

    /// Number of trained parameters, without the fixed random matrices.
    pub fn parameters(&self) -> u64 {
        let trained = tensors(self).all.into_values().filter(|tensor| tensor.trained);
        trained.map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum()
    }
}

/// Gives tensors that are published in another form the names and shapes of [`tensors`].
pub(crate) fn unpack(config: &DecoderConfig, entries: &mut BTreeMap<String, Entry>) {
    (family(config.attention).unpack)(config, entries);
}

/// The tensors that a config asks for.
pub(crate) fn tensors(config: &DecoderConfig) -> TensorList {
    let (mut list, hidden) = (TensorList::default(), config.hidden_size);
    let family = family(config.attention);
    list.at(family.frame.body, |list| family.frame.tensors(config, list));
    if !config.tie_word_embeddings {
        list.matrix("lm_head.weight", config.vocab_size, hidden);
    }
    if let Some(source) = config.source() {
        list.at("encoder", |list| Encoder::tensors(config, source.layers, list));
    }
    for layer in 0..config.num_hidden_layers {
        list.at(&format!("{}.layers.{layer}", family.frame.body), |list| (family.tensors)(config, layer, list));
    }
    list
}
