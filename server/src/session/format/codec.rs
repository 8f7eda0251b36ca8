//! The description of a model that its snapshot files must match.

use serde::{Deserialize, Serialize};
use tidegate_model::StateLayout;

use crate::session::keys::Keys;

/// Identifies a model. A state is meaningless to any other model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// SHA-256 of the checkpoint's `config.json`, as 64 hexadecimal digits. The other two digests have the same form.
    pub architecture: String,
    /// The digest of the checkpoint's `model.safetensors` or `model.gguf`, whichever is loaded.
    pub weights: String,
    /// The digest of the checkpoint's `tokenizer.json`, or of RWKV's vocabulary file.
    pub tokenizer: String,
}

/// Writes and reads the snapshots of one model.
#[derive(Clone, Debug)]
pub struct Codec {
    /// The model.
    pub fingerprint: Fingerprint,
    /// The sizes of the model's state.
    pub layout: StateLayout,
    /// The size of the model's vocabulary.
    pub vocab_size: usize,
    /// Upper bounds of the key maxima that each head stores: (layers, heads), or empty if heads store none.
    pub greatest: Vec<f32>,
    /// Maximum number of tokens of a source, for translation models; otherwise 0.
    pub sources: usize,
    /// If set, files are signed, and unsigned files are refused.
    pub keys: Option<Keys>,
}
