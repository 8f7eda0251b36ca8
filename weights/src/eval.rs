//! Perplexity and bits per byte of a text, read as one stream with the state carried through.
//!
//! The trainer's `evaluate_folder` measures the same: every token but the first is predicted, including end marks; the
//! state is zeroed before each document's mark; bytes are counted for documents without their marks. Memory is bounded
//! by a piece of text and a segment of logits, regardless of the file's size.

use std::io::Read;
use std::path::Path;

use candle_core::Tensor;
use serde::Serialize;
use tidegate_model::{Decoder, Device, ModelError, PoolOptions, StatePool, StateType};
use tokenizers::Tokenizer;

use crate::text::{Documents, TextError, TokenStream, load_tokenizer};

/// Why a model could not be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The text or tokenizer cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The checkpoint cannot be loaded.
    #[error(transparent)]
    Load(#[from] tidegate_model::checkpoint::LoadError),
    /// A tensor operation failed.
    #[error("model: {0}")]
    Model(#[from] ModelError),
    /// The tokenizer does not match the model.
    #[error("tokenizer.json: must have ids below the model's {vocab_size}, has {highest}")]
    Vocabulary {
        /// The model's vocabulary.
        vocab_size: usize,
        /// The tokenizer's highest id.
        highest: u32,
    },
    /// An encoder-decoder needs a source to predict anything.
    #[error("an encoder-decoder cannot be evaluated on a text alone; `tidegate-weights translate` translates with it")]
    Source,
    /// The limit is zero.
    #[error("limit: must be at least 1, found 0")]
    Limit,
}

/// A model and the tokenizer in its folder.
pub struct Checkpoint {
    /// The model.
    pub decoder: Decoder,
    /// The tokenizer; all its ids are in the model's vocabulary.
    pub tokenizer: Tokenizer,
    /// The type of its states, f32 unless changed.
    pub state: StateType,
    device: Device,
}

impl Checkpoint {
    /// Loads a checkpoint folder.
    ///
    /// # Errors
    /// [`EvalError`] if a file is missing or invalid, or the tokenizer has ids outside the model's vocabulary.
    pub fn load(folder: &Path, device: &Device) -> Result<Self, EvalError> {
        let tokenizer = load_tokenizer(folder)?;
        let decoder = tidegate_model::checkpoint::load(folder, device)?;
        let vocab_size = decoder.config().vocab_size;
        // Checks the highest id instead of the count, because ids may have gaps.
        let highest = tokenizer.get_vocab(true).values().copied().max().unwrap_or(0);
        if highest as usize >= vocab_size {
            return Err(EvalError::Vocabulary { vocab_size, highest });
        }
        Ok(Self { decoder, tokenizer, state: StateType::F32, device: device.clone() })
    }
}

/// A model's score on a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalReport {
    /// Documents in the evaluated part.
    pub documents: u64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of the evaluated part, estimated from its share of the tokens.
    pub bytes: u64,
    /// Mean loss per token.
    pub nats: f64,
    /// `exp(nats)`.
    pub perplexity: f64,
    /// Total loss in bits divided by `bytes`.
    pub bits_per_byte: f64,
    /// Size of the model's state in bytes.
    pub state_bytes: usize,
}

/// The progress of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of the file read.
    pub bytes_read: u64,
    /// Total loss so far.
    pub nats: f64,
}

/// The maximum number of logits in one forward pass: 8 MiB of f32.
const LOGITS: usize = 1 << 21;

/// Feeds a stream of tokens through a model, one segment at a time, and sums the losses.
///
/// `forward` is [`Decoder::forward`] on one row, ids (1, time) -> logits (1, time, vocab), or its probing form.
pub(crate) struct StreamScorer<'a, F> {
    checkpoint: &'a Checkpoint,
    forward: F,
    pool: StatePool,
    segment: usize,
    limit: u64,
    /// Logits after the last token, which predict the next one.
    last: Option<Vec<f32>>,
    totals: Totals,
}

/// The counts of a [`StreamScorer`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) documents: u64,
    pub(crate) predicted: u64,
    pub(crate) nats: f64,
    /// Tokens and bytes of the whole text, including those beyond the limit.
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
}

impl<'a, F> StreamScorer<'a, F>
where
    F: FnMut(&Tensor, &mut StatePool) -> Result<Tensor, ModelError>,
{
    pub(crate) fn new(checkpoint: &'a Checkpoint, limit: Option<u64>, forward: F) -> Result<Self, EvalError> {
        if limit == Some(0) {
            return Err(EvalError::Limit);
        }
        if checkpoint.decoder.config().source().is_some() {
            return Err(EvalError::Source);
        }
        let segment = (LOGITS / checkpoint.decoder.config().vocab_size).clamp(1, 512);
        let options = PoolOptions { state: checkpoint.state, ..PoolOptions::new(1) };
        let (pool, limit) = (checkpoint.decoder.new_pool_with(options)?, limit.unwrap_or(u64::MAX));
        Ok(Self { checkpoint, forward, pool, segment, limit, last: None, totals: Totals::default() })
    }

    /// Reads the whole text. Beyond the limit it only counts, to find the evaluated share of the bytes.
    pub(crate) fn read<R: Read>(
        &mut self,
        mut stream: TokenStream<'_, R>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Totals, EvalError> {
        while let Some(tokens) = stream.next().transpose()? {
            self.totals.tokens += tokens.ids.len() as u64;
            self.totals.bytes += tokens.bytes;
            if self.totals.predicted < self.limit {
                // The last mark does not start a document.
                self.totals.documents += u64::from(tokens.first && tokens.bytes > 0);
                let bytes_read = stream.bytes_read();
                self.feed(&tokens.ids, tokens.first, &mut |totals| {
                    progress(Progress { tokens: totals.predicted, bytes_read, nats: totals.nats });
                })?;
            }
        }
        Ok(self.totals)
    }

    fn feed(&mut self, ids: &[u32], first: bool, progress: &mut dyn FnMut(&Totals)) -> Result<(), ModelError> {
        let vocab = self.checkpoint.decoder.config().vocab_size;
        for (n, segment) in ids.chunks(self.segment).enumerate() {
            if let Some(logits) = &self.last {
                self.totals.nats += loss(logits, segment[0]);
                self.totals.predicted += 1;
            }
            if first && n == 0 {
                self.pool.reset(0)?;
            }
            let left = self.limit - self.totals.predicted;
            if left == 0 {
                return Ok(());
            }
            let segment = &segment[..segment.len().min(usize::try_from(left).unwrap_or(usize::MAX).saturating_add(1))];
            let input = Tensor::new(segment, &self.checkpoint.device)?.unsqueeze(0)?;
            let mut logits = (self.forward)(&input, &mut self.pool)?.flatten_all()?.to_vec1::<f32>()?;
            for (row, &target) in logits.chunks_exact(vocab).zip(&segment[1..]) {
                self.totals.nats += loss(row, target);
                self.totals.predicted += 1;
            }
            self.last = Some(logits.split_off(logits.len() - vocab));
            progress(&self.totals);
            if self.totals.predicted == self.limit {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Computes the loss of `target` in nats: `log sum exp - logit`, in f64.
fn loss(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from((x - max).exp())).sum();
    sum.ln() + f64::from(max) - f64::from(logits[target as usize])
}

/// Scores `checkpoint` on the text at `path`, or on its first `limit` tokens. Calls `progress` after every forward pass.
///
/// # Errors
/// [`EvalError`] if the text cannot be read or is empty, or `limit` is 0.
pub fn evaluate(
    checkpoint: &Checkpoint,
    path: &Path,
    limit: Option<u64>,
    progress: &mut dyn FnMut(Progress),
) -> Result<EvalReport, EvalError> {
    let stream = TokenStream::new(Documents::open(path)?, &checkpoint.tokenizer)?;
    let decoder = &checkpoint.decoder;
    let mut scorer = StreamScorer::new(checkpoint, limit, |ids, pool| decoder.forward(ids, pool, &[0]))?;
    let totals = scorer.read(stream, progress)?;
    let nats = totals.nats / totals.predicted as f64;
    let bytes = totals.bytes as f64 * totals.predicted as f64 / (totals.tokens - 1) as f64;
    Ok(EvalReport {
        documents: totals.documents,
        tokens: totals.predicted,
        bytes: bytes.round() as u64,
        nats,
        perplexity: nats.exp(),
        bits_per_byte: totals.nats / std::f64::consts::LN_2 / bytes,
        state_bytes: scorer.pool.state_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_that_of_a_softmax() {
        let logits = [1.0_f32, -2.0, 0.5, 3.0];
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for (target, &x) in logits.iter().enumerate() {
            let want = -(f64::from(x).exp() / sum).ln();
            assert!((loss(&logits, target as u32) - want).abs() < 1e-6);
        }
        assert!(loss(&[1e4, -1e4], 1).is_finite());
    }
}
