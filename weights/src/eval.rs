//! Perplexity and bits per byte of a text, read as one stream with the state carried through.
//!
//! The trainer's `evaluate_folder` measures the same: every token but the first is predicted, end marks too; the state
//! is zeroed before each document's mark; the bytes are those of the documents without marks. Memory is bounded by a
//! piece of text and a segment of logits, whatever the file's size.

use std::io::Read;
use std::path::Path;

use candle_core::Tensor;
use serde::Serialize;
use tidegate_model::{Decoder, Device, PoolOptions, StatePool, StateType};
use tokenizers::Tokenizer;

use crate::text::{Documents, TextError, TokenStream, load_tokenizer};

/// Why a model could not be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The text or the tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The checkpoint folder.
    #[error(transparent)]
    Load(#[from] tidegate_model::checkpoint::LoadError),
    /// A tensor operation.
    #[error("model: {0}")]
    Model(#[from] candle_core::Error),
    /// Tokenizer and model do not belong together.
    #[error("tokenizer.json: must have ids below the model's {vocab_size}, has {highest}")]
    Vocabulary {
        /// The model's.
        vocab_size: usize,
        /// The tokenizer's highest id.
        highest: u32,
    },
    /// An encoder-decoder, which predicts nothing without a source.
    #[error(
        "a text alone cannot be read by an encoder-decoder: its predictions are of a source's translation, which \
         `tidegate-weights translate` writes"
    )]
    Source,
    /// A limit of zero tokens.
    #[error("limit: must be at least 1, found 0")]
    Limit,
}

/// A model and the tokenizer of its folder.
pub struct Checkpoint {
    /// The model.
    pub decoder: Decoder,
    /// The tokenizer, whose ids all lie in the model's vocabulary.
    pub tokenizer: Tokenizer,
    /// How its states are held: f32, until somebody says otherwise.
    pub state: StateType,
    device: Device,
}

impl Checkpoint {
    /// Loads a checkpoint folder.
    ///
    /// # Errors
    /// [`EvalError`] where a file is missing or wrong, or the tokenizer has an id that the model has not.
    pub fn load(folder: &Path, device: &Device) -> Result<Self, EvalError> {
        let tokenizer = load_tokenizer(folder)?;
        let decoder = tidegate_model::checkpoint::load(folder, device)?;
        let vocab_size = decoder.config().vocab_size;
        // The highest id, not the count: ids may have gaps.
        let highest = tokenizer.get_vocab(true).values().copied().max().unwrap_or(0);
        if highest as usize >= vocab_size {
            return Err(EvalError::Vocabulary { vocab_size, highest });
        }
        Ok(Self { decoder, tokenizer, state: StateType::F32, device: device.clone() })
    }
}

/// What a model scored on a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalReport {
    /// Documents in the part that was evaluated.
    pub documents: u64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of text: of all of it, or of the evaluated share of its tokens.
    pub bytes: u64,
    /// Mean loss per token.
    pub nats: f64,
    /// `exp(nats)`.
    pub perplexity: f64,
    /// Total loss in bits over the bytes of the evaluated share.
    pub bits_per_byte: f64,
    /// What the model remembered of the text at any point.
    pub state_bytes: usize,
}

/// How far an evaluation is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of the file read.
    pub bytes_read: u64,
    /// Total loss.
    pub nats: f64,
}

/// Numbers of logits that one forward pass may give: 8 MiB of f32.
const LOGITS: usize = 1 << 21;

/// Feeds a stream of tokens through a model, a segment at a time, and sums what each next token cost.
///
/// `forward` is [`Decoder::forward`] on one row, ids (1, time) to logits (1, time, vocab), or a form of it that looks
/// inside.
pub(crate) struct Walk<'a, F> {
    checkpoint: &'a Checkpoint,
    forward: F,
    pool: StatePool,
    segment: usize,
    limit: u64,
    /// Logits after the last token fed, which predict the next.
    last: Option<Vec<f32>>,
    seen: Seen,
}

/// What a [`Walk`] has counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) documents: u64,
    pub(crate) predicted: u64,
    pub(crate) nats: f64,
    /// Tokens and bytes of the whole text, past the limit too.
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
}

impl<'a, F> Walk<'a, F>
where
    F: FnMut(&Tensor, &mut StatePool) -> candle_core::Result<Tensor>,
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
        let (pool, limit) =
            (checkpoint.decoder.new_pool_with(options).map_err(candle_core::Error::from)?, limit.unwrap_or(u64::MAX));
        Ok(Self { checkpoint, forward, pool, segment, limit, last: None, seen: Seen::default() })
    }

    /// Reads the whole text; past the limit it is only counted, as its share of the bytes must be known.
    pub(crate) fn read<R: Read>(
        &mut self,
        mut stream: TokenStream<'_, R>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Seen, EvalError> {
        while let Some(tokens) = stream.next().transpose()? {
            self.seen.tokens += tokens.ids.len() as u64;
            self.seen.bytes += tokens.bytes;
            if self.seen.predicted < self.limit {
                // The mark that closes the stream begins no document.
                self.seen.documents += u64::from(tokens.first && tokens.bytes > 0);
                let bytes_read = stream.bytes_read();
                self.feed(&tokens.ids, tokens.first, &mut |seen| {
                    progress(Progress { tokens: seen.predicted, bytes_read, nats: seen.nats });
                })?;
            }
        }
        Ok(self.seen)
    }

    fn feed(&mut self, ids: &[u32], first: bool, progress: &mut dyn FnMut(&Seen)) -> candle_core::Result<()> {
        let vocab = self.checkpoint.decoder.config().vocab_size;
        for (n, segment) in ids.chunks(self.segment).enumerate() {
            if let Some(logits) = &self.last {
                self.seen.nats += loss(logits, segment[0]);
                self.seen.predicted += 1;
            }
            if first && n == 0 {
                self.pool.reset(0)?;
            }
            let left = self.limit - self.seen.predicted;
            if left == 0 {
                return Ok(());
            }
            let segment = &segment[..segment.len().min(usize::try_from(left).unwrap_or(usize::MAX).saturating_add(1))];
            let input = Tensor::new(segment, &self.checkpoint.device)?.unsqueeze(0)?;
            let mut logits = (self.forward)(&input, &mut self.pool)?.flatten_all()?.to_vec1::<f32>()?;
            for (row, &target) in logits.chunks_exact(vocab).zip(&segment[1..]) {
                self.seen.nats += loss(row, target);
                self.seen.predicted += 1;
            }
            self.last = Some(logits.split_off(logits.len() - vocab));
            progress(&self.seen);
            if self.seen.predicted == self.limit {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// What `target` costs under these logits, in nats: `log sum exp - logit`, in f64.
fn loss(logits: &[f32], target: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from((x - max).exp())).sum();
    sum.ln() + f64::from(max) - f64::from(logits[target as usize])
}

/// Reads the text at `path` and scores `checkpoint` on it; `limit`: predict the first so many tokens.
///
/// `progress` is called after every forward pass.
///
/// # Errors
/// [`EvalError`] where the text cannot be read or holds nothing, or `limit` is 0.
pub fn evaluate(
    checkpoint: &Checkpoint,
    path: &Path,
    limit: Option<u64>,
    progress: &mut dyn FnMut(Progress),
) -> Result<EvalReport, EvalError> {
    let stream = TokenStream::new(Documents::open(path)?, &checkpoint.tokenizer)?;
    let decoder = &checkpoint.decoder;
    let mut walk = Walk::new(checkpoint, limit, |ids, pool| decoder.forward(ids, pool, &[0]))?;
    let seen = walk.read(stream, progress)?;
    let nats = seen.nats / seen.predicted as f64;
    let bytes = seen.bytes as f64 * seen.predicted as f64 / (seen.tokens - 1) as f64;
    Ok(EvalReport {
        documents: seen.documents,
        tokens: seen.predicted,
        bytes: bytes.round() as u64,
        nats,
        perplexity: nats.exp(),
        bits_per_byte: seen.nats / std::f64::consts::LN_2 / bytes,
        state_bytes: walk.pool.state_bytes(),
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
