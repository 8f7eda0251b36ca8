//! Translates lines with an encoder-decoder, greedily, many sources at once.
//!
//! All sources are checked before the first one is read. Sources enter in line order; when a row finishes, the next
//! source takes its slot, so the batch stays full while sources wait. Other rows of the batch do not affect the bits of
//! a row's logits, so a translation does not depend on the batch size.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tidegate_model::{PoolOptions, SourceConfig, StatePool};

use crate::eval::Checkpoint;
use crate::text::{END_OF_TEXT, TextError};

/// Why a translation failed.
#[derive(Debug, thiserror::Error)]
pub enum TranslateError {
    /// The model has no encoder.
    #[error("the model cannot translate: it has no encoder, model_type must be rfa_seq2seq")]
    NoEncoder,
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A source exceeds the model's maximum.
    #[error("line {line}: must have at most {most} tokens including its first mark, found {found}")]
    TooLong {
        /// The line number, from 1.
        line: usize,
        /// The config's `max_source_positions`.
        most: usize,
        /// The number of tokens found.
        found: usize,
    },
    /// A source contains the end-of-text mark.
    #[error("line {line}: must not contain the mark {END_OF_TEXT}")]
    Mark {
        /// The line number, from 1.
        line: usize,
    },
    /// A tensor operation failed.
    #[error("model: {0}")]
    Model(#[from] tidegate_model::ModelError),
    /// The output cannot be written.
    #[error("out: {0}")]
    Write(#[from] std::io::Error),
}

/// How to translate.
#[derive(Clone, Copy, Debug)]
pub struct TranslateOptions {
    /// Sources translated together; at least 1.
    pub batch: usize,
    /// Maximum tokens of a translation, including its end; at least 1.
    pub max_tokens: usize,
}

/// Counts and times of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct TranslationStats {
    /// Finished translations.
    pub sentences: u64,
    /// Tokens of translations, including their ends.
    pub tokens: u64,
    /// Tokens of all sources read.
    pub source_tokens: u64,
    /// Time spent reading sources.
    pub reading: Duration,
    /// Time spent in decode steps.
    pub decoding: Duration,
    /// Translations cut at `max_tokens`.
    pub cut: u64,
}

/// Tokenized lines that fit the model.
#[derive(Clone, Debug)]
pub struct Sources {
    ids: Vec<Vec<u32>>,
    source: SourceConfig,
    /// The tokens that end a translation; at least one.
    ends: Vec<u32>,
}

impl Sources {
    /// Tokenizes one source per line, without surrounding blanks. An empty line gives only the first mark.
    ///
    /// # Errors
    /// [`TranslateError`] for a model without an encoder, or for the first line that does not fit.
    pub fn new(checkpoint: &Checkpoint, text: &str) -> Result<Self, TranslateError> {
        let config = checkpoint.decoder.config();
        let source = config.source().ok_or(TranslateError::NoEncoder)?;
        let mark = checkpoint.tokenizer.token_to_id(END_OF_TEXT).ok_or(TextError::NoEndMark)?;
        // An empty text has no lines; a single line feed is one empty line.
        let lines = text.strip_suffix('\n').unwrap_or(text).split('\n').skip(usize::from(text.is_empty()));
        let read = |(at, line): (usize, &str)| {
            if line.contains(END_OF_TEXT) {
                return Err(TranslateError::Mark { line: at + 1 });
            }
            let encoded = checkpoint.tokenizer.encode_fast(line.trim(), false);
            let encoded = encoded.map_err(|error| TextError::Encode(error.to_string()))?;
            let ids = [&[mark], encoded.get_ids()].concat();
            let (most, found) = (source.max_positions, ids.len());
            if found > most { Err(TranslateError::TooLong { line: at + 1, most, found }) } else { Ok(ids) }
        };
        let ids = lines.enumerate().map(read).collect::<Result<_, _>>()?;
        let ends = config.eos_token_id.as_slice();
        let ends = if ends.is_empty() { vec![mark] } else { ends.to_vec() };
        Ok(Self { ids, source, ends })
    }

    /// The number of sources.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no source.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// A source in progress.
struct Row {
    /// Its index among the sources.
    at: usize,
    slot: usize,
    /// The token to feed next.
    next: u32,
    /// The translation so far.
    written: Vec<u32>,
}

/// Translates all sources. Passes the translations to `write` in source order, one line each, as soon as all earlier
/// ones are finished, and calls `progress` after every step.
///
/// # Errors
/// [`TranslateError::Model`] if a step fails, and errors of `write`.
pub fn translate(
    checkpoint: &Checkpoint,
    sources: &Sources,
    options: TranslateOptions,
    write: &mut dyn FnMut(&str) -> std::io::Result<()>,
    progress: &mut dyn FnMut(&TranslationStats),
) -> Result<TranslationStats, TranslateError> {
    let slots = options.batch.clamp(1, sources.len().max(1));
    let options_of_pool = PoolOptions { state: checkpoint.state, ..PoolOptions::new(slots) };
    let mut pool = checkpoint.decoder.new_pool_with(options_of_pool)?;
    let (mut rows, mut free) = (Vec::with_capacity(slots), (0..slots).rev().collect::<Vec<_>>());
    let mut waiting = sources.ids.iter().enumerate();
    let mut done = TranslationStats::default();
    let mut logits = Vec::new();
    // Finished translations that wait for earlier ones.
    let (mut finished, mut written) = (BTreeMap::new(), 0);
    loop {
        while let Some(slot) = free.pop() {
            let Some((at, ids)) = waiting.next() else { break };
            read(checkpoint, ids, &mut pool, slot, &mut done)?;
            rows.push(Row { at, slot, next: sources.source.start, written: Vec::new() });
        }
        if rows.is_empty() {
            return Ok(done);
        }
        step(checkpoint, &mut rows, &mut pool, &mut logits, &mut done)?;
        let mut ended = Vec::new();
        rows.retain_mut(|row| {
            let end = sources.ends.contains(&row.next);
            if !end {
                row.written.push(row.next);
            }
            let cut = !end && row.written.len() >= options.max_tokens.max(1);
            if end || cut {
                done.sentences += 1;
                done.cut += u64::from(cut);
                free.push(row.slot);
                ended.push((row.at, std::mem::take(&mut row.written)));
            }
            !(end || cut)
        });
        for (at, ids) in ended {
            finished.insert(at, line(checkpoint, &ids)?);
        }
        while let Some(text) = finished.remove(&written) {
            write(&text)?;
            written += 1;
        }
        progress(&done);
    }
}

/// Reads one source into a slot.
fn read(
    checkpoint: &Checkpoint,
    ids: &[u32],
    pool: &mut StatePool,
    slot: usize,
    done: &mut TranslationStats,
) -> Result<(), TranslateError> {
    let clock = Instant::now();
    checkpoint.decoder.read_source(ids, pool, slot)?;
    done.reading += clock.elapsed();
    done.source_tokens += ids.len() as u64;
    Ok(())
}

/// Advances every row by one token.
fn step(
    checkpoint: &Checkpoint,
    rows: &mut [Row],
    pool: &mut StatePool,
    logits: &mut Vec<f32>,
    done: &mut TranslationStats,
) -> Result<(), TranslateError> {
    let clock = Instant::now();
    let (ids, slots): (Vec<u32>, Vec<usize>) = rows.iter().map(|row| (row.next, row.slot)).unzip();
    checkpoint.decoder.decode_into(&ids, pool, &slots, logits)?;
    for (row, logits) in rows.iter_mut().zip(logits.chunks_exact(checkpoint.decoder.config().vocab_size)) {
        row.next = likeliest(logits);
    }
    done.decoding += clock.elapsed();
    done.tokens += rows.len() as u64;
    Ok(())
}

/// Returns the index of the largest logit; the first one if several are equal.
fn likeliest(logits: &[f32]) -> u32 {
    let greatest = (0..logits.len()).reduce(|best, id| if logits[id] > logits[best] { id } else { best });
    greatest.unwrap_or(0) as u32
}

/// Decodes a translation to one line, without surrounding blanks.
fn line(checkpoint: &Checkpoint, ids: &[u32]) -> Result<String, TranslateError> {
    let text = checkpoint.tokenizer.decode(ids, true).map_err(|error| TextError::Decode(error.to_string()))?;
    Ok(text.trim().replace("\r\n", " ").replace(['\n', '\r'], " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_logits_is_likeliest() {
        assert_eq!(likeliest(&[-3.0, 1.0, 0.5, 1.0]), 1);
        assert_eq!(likeliest(&[f32::NEG_INFINITY, -9.0]), 1);
    }
}
