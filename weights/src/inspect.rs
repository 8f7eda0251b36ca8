//! The contents of a checkpoint: parameters by group, state bytes, and sigma and gate half-life of every head; with a
//! text, also the measured half-lives and the share of clamped denominators.

use std::path::Path;

use candle_core::Tensor;
use serde::Serialize;
use tidegate_model::checkpoint::{LoadError, Repacked, Stored};
use tidegate_model::probe::Probe;

use crate::eval::{Checkpoint, EvalError, Progress, StreamScorer};
use crate::text::{Documents, TokenStream};

/// Why a checkpoint could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The checkpoint cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The text cannot be evaluated.
    #[error(transparent)]
    Eval(#[from] EvalError),
}

/// The tensors of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// The kind.
    pub name: &'static str,
    /// Number of tensors.
    pub tensors: u64,
    /// Number of elements.
    pub numbers: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

/// Statistics of a head's sigma vector. With Gaussian features, sigma sets the kernel's sharpness; with arc-cosine
/// features, it weights the dimensions of queries and keys, and a common factor cancels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sigma {
    /// The minimum.
    #[serde(rename = "sigma_min")]
    pub min: f32,
    /// The mean.
    #[serde(rename = "sigma_mean")]
    pub mean: f32,
    /// The maximum. Above about 1.3, denominators of Gaussian features begin to vanish.
    #[serde(rename = "sigma_max")]
    pub max: f32,
}

impl Sigma {
    /// Computes the statistics of sigma: (d)
    fn of(sigma: &[f32]) -> Self {
        Self {
            min: sigma.iter().copied().fold(f32::INFINITY, f32::min),
            mean: sigma.iter().sum::<f32>() / sigma.len() as f32,
            max: sigma.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        }
    }
}

/// One head's sigma and half-life.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Head {
    /// The layer, from 0.
    pub layer: usize,
    /// The head in the layer, from 0.
    pub head: usize,
    /// Statistics of sigma; `None` for feature maps without it.
    #[serde(flatten)]
    pub sigma: Option<Sigma>,
    /// Tokens until the gate has halved the state, from its bias alone; `None` without a gate.
    pub half_life: Option<f64>,
    /// The half-life measured on the text, from the mean of log g.
    pub measured_half_life: Option<f64>,
    /// Share of clamped denominators on the text; `None` without denominators, as for the hybrid on texts no longer
    /// than its window.
    pub clamped: Option<f64>,
}

/// A layer's statistics on the text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerStatistics {
    /// The layer, from 0.
    pub layer: usize,
    /// Share of clamped denominators of all heads.
    pub clamped: f64,
}

/// Statistics on the text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextStatistics {
    /// Tokens fed to the model.
    pub tokens: u64,
    /// The layers that have denominators.
    pub layers: Vec<LayerStatistics>,
}

/// An encoder-decoder's properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SourceReport {
    /// Number of encoder blocks.
    pub encoder_layers: usize,
    /// Maximum number of source tokens, including the first mark.
    pub max_tokens: usize,
    /// Bytes that cross attention keeps of a source: constant with random features; room for the longest source with
    /// softmax attention.
    pub state_bytes: usize,
}

/// Tensors of a type without a kernel, which are converted to another type while loading.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RepackedType {
    /// The type in the file.
    pub from: String,
    /// The type in memory.
    pub to: String,
    /// Number of tensors.
    pub tensors: usize,
    /// The largest relative error of a tensor.
    pub relative_error: f64,
}

/// The report on a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InspectReport {
    /// Trained parameters, without the fixed random matrices.
    pub parameters: u64,
    /// Tensors by kind.
    pub groups: Vec<Group>,
    /// Bytes of a conversation's state, including its source, regardless of length.
    pub state_bytes: usize,
    /// Properties of the source side; only for an encoder-decoder.
    pub source: Option<SourceReport>,
    /// Every head of every layer.
    pub heads: Vec<Head>,
    /// Stored types that have no kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub repacked: Vec<RepackedType>,
    /// Statistics on a text, if one was given.
    pub on_text: Option<TextStatistics>,
}

/// The kinds of tensors, by a part of their name; the first match applies.
const KINDS: [(&str, &str); 16] = [
    ("embed", "embedding"),
    ("lm_head", "output head"),
    ("encoder.", "encoder"),
    ("random_matrices", RANDOM),
    ("sigma", "sigma"),
    ("cross_attn.", "cross attention"),
    ("self_attn.gate.", "gates"),
    ("far_bias", "weights of far tokens"),
    ("conv1d", "convolutions"),
    ("norm", "norms"),
    ("mlp.", "feed-forward"),
    (".x_", "token shifts"),
    ("_lora.", "low-rank maps"),
    ("ffn.", "channel mixes"),
    ("mixer.", "mixers"),
    ("_proj.", "attention projections"),
];
const RANDOM: &str = "random matrices (fixed)";
const OTHER: &str = "other";

/// Returns the kind of a tensor.
pub(crate) fn kind(name: &str) -> &'static str {
    KINDS.iter().find(|(part, _)| name.contains(part)).map_or(OTHER, |&(_, kind)| kind)
}

/// All kinds, in report order.
pub(crate) fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|&(_, name)| name).chain([OTHER])
}

fn groups(stored: &Stored) -> Vec<Group> {
    let mut groups: Vec<Group> = kinds().map(|name| Group { name, tensors: 0, numbers: 0, bytes: 0 }).collect();
    for tensor in stored.tensors() {
        for group in groups.iter_mut().filter(|g| g.name == kind(tensor.name)) {
            group.tensors += 1;
            group.numbers += tensor.shape.iter().product::<usize>() as u64;
            group.bytes += tensor.bytes as u64;
        }
    }
    groups.retain(|g| g.tensors > 0);
    groups
}

/// Computes `ln 2 / -log g` tokens for a gate of `sigmoid(logit)`.
fn half_life(logit: f64) -> f64 {
    // -log sigmoid(a) = log(1 + exp(-a)), split at 0 so that no exponential overflows.
    let cost = if logit > 0.0 { (-logit).exp().ln_1p() } else { logit.exp().ln_1p() - logit };
    std::f64::consts::LN_2 / cost
}

/// Reads the config and weights of a checkpoint folder without building the model.
///
/// # Errors
/// [`InspectError`] if a file is missing or invalid.
pub fn inspect(folder: &Path) -> Result<InspectReport, InspectError> {
    let stored = Stored::open(folder)?;
    let config = stored.config();
    let mut heads = Vec::new();
    // Softmax attention heads have neither sigma nor gate.
    let layers = if config.features() == 0 { 0 } else { config.num_hidden_layers };
    for layer in 0..layers {
        let at = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let sigma = config.feature_map.has_sigma().then(|| stored.floats(&at("sigma"))).transpose()?;
        let bias = config.gate.then(|| stored.floats(&at("gate.bias"))).transpose()?;
        for head in 0..config.num_attention_heads {
            heads.push(Head {
                layer,
                head,
                sigma: sigma.as_ref().map(|all| Sigma::of(&all[head * config.head_dim..][..config.head_dim])),
                half_life: bias.as_ref().map(|b| half_life(f64::from(b[head]))),
                measured_half_life: None,
                clamped: None,
            });
        }
    }
    let groups = groups(&stored);
    let parameters = groups.iter().filter(|g| g.name != RANDOM).map(|g| g.numbers).sum();
    let source = config.source().map(|source| SourceReport {
        encoder_layers: source.layers,
        max_tokens: source.max_positions,
        state_bytes: config.state_layout().source() * size_of::<f32>(),
    });
    let repacked = stored.repacked()?.into_iter().map(|Repacked { from, to, tensors, relative_error }| RepackedType {
        from,
        to: to.to_string(),
        tensors,
        relative_error,
    });
    let (state_bytes, repacked) = (config.state_bytes(), repacked.collect());
    Ok(InspectReport { parameters, groups, state_bytes, source, heads, repacked, on_text: None })
}

/// Runs a text, or its first `limit` tokens, through the model, and adds the heads' statistics to `report`.
///
/// # Errors
/// [`InspectError::Eval`] if the text cannot be read or is empty, or `limit` is 0.
pub fn observe(
    report: &mut InspectReport,
    checkpoint: &Checkpoint,
    path: &Path,
    limit: Option<u64>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), InspectError> {
    let documents = Documents::open(path).map_err(EvalError::from)?;
    let stream = TokenStream::new(documents, &checkpoint.tokenizer).map_err(EvalError::from)?;
    let decoder = &checkpoint.decoder;
    let (mut probe, mut tokens) = (Probe::default(), 0);
    let forward = |ids: &Tensor, pool: &mut _| {
        tokens += ids.elem_count() as u64;
        decoder.forward_probed(ids, pool, &[0], &mut probe)
    };
    StreamScorer::new(checkpoint, limit, forward)?.read(stream, progress)?;

    let heads = decoder.config().num_attention_heads;
    let mut layers = Vec::with_capacity(probe.len());
    for (layer, seen) in probe.iter().enumerate() {
        let (tokens, all) = (seen.tokens as f64, seen.denominators as f64);
        for (head, out) in report.heads.iter_mut().filter(|h| h.layer == layer).enumerate() {
            out.clamped = (all > 0.0).then(|| seen.clamped[head] as f64 / all);
            out.measured_half_life = seen.log_gate.get(head).map(|sum| -std::f64::consts::LN_2 * tokens / sum);
        }
        if seen.denominators > 0 {
            let clamped = seen.clamped.iter().sum::<u64>() as f64 / (all * heads as f64);
            layers.push(LayerStatistics { layer, clamped });
        }
    }
    report.on_text = Some(TextStatistics { tokens, layers });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_lives_of_known_gates() {
        // g = 1/2 halves the state at each token, g = 2^(-1/100) in a hundred tokens.
        assert!((half_life(0.0) - 1.0).abs() < 1e-12);
        let g = 0.5_f64.powf(0.01);
        assert!((half_life((g / (1.0 - g)).ln()) - 100.0).abs() < 1e-9);
        assert!(half_life(-800.0) > 0.0 && half_life(40.0) > 1e16);
    }
}
