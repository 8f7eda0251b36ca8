//! Translates lines with an encoder-decoder: the likeliest token each time, many sources at once.
//!
//! Every source is checked before the first is read. Slots are filled in the lines' order; a row whose translation has
//! ended leaves at once and the next source enters, so a batch stays full while sources wait. What else is in the batch
//! changes no bit of a row's logits, so a translation does not depend on the batch's size.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tidegate_model::{PoolOptions, SourceConfig, StatePool};

use crate::eval::Checkpoint;
use crate::text::{END_OF_TEXT, TextError};

/// Why nothing was translated, or not all.
#[derive(Debug, thiserror::Error)]
pub enum TranslateError {
    /// There is no encoder.
    #[error("the model cannot translate: it is a decoder alone, model_type must be rfa_seq2seq")]
    NoEncoder,
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A source is longer than the model can read.
    #[error("line {line}: must have at most {most} tokens, its first mark counted, found {found}")]
    TooLong {
        /// From 1 on.
        line: usize,
        /// The config's `max_source_positions`.
        most: usize,
        /// As many as it has.
        found: usize,
    },
    /// A source holds the mark that begins and ends texts.
    #[error("line {line}: must not hold the mark {END_OF_TEXT}")]
    Mark {
        /// From 1 on.
        line: usize,
    },
    /// A tensor operation.
    #[error("model: {0}")]
    Model(#[from] candle_core::Error),
    /// Nobody takes the translations any more.
    #[error("out: {0}")]
    Write(#[from] std::io::Error),
}

/// How it is done.
#[derive(Clone, Copy, Debug)]
pub struct TranslateOptions {
    /// Sources that are translated together; at least 1.
    pub batch: usize,
    /// Most tokens of a translation, its end counted; at least 1.
    pub max_tokens: usize,
}

/// What was done, and what it took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Translated {
    /// Sources whose translation is whole.
    pub sentences: u64,
    /// Tokens of translations, ends counted: one for each row of each step.
    pub tokens: u64,
    /// Tokens of sources that were read.
    pub source_tokens: u64,
    /// Of reading sources.
    pub reading: Duration,
    /// Of decode steps.
    pub decoding: Duration,
    /// Translations that `max_tokens` ended.
    pub cut: u64,
}

/// Lines as the model reads them, each within its bounds.
#[derive(Clone, Debug)]
pub struct Sources {
    ids: Vec<Vec<u32>>,
    source: SourceConfig,
    /// The tokens that end a translation; at least one.
    ends: Vec<u32>,
}

impl Sources {
    /// Reads a source a line; blanks around it are not part of it. A line without text is the first mark alone.
    ///
    /// # Errors
    /// [`TranslateError`] for a model without an encoder, and the first line that it cannot read.
    pub fn new(checkpoint: &Checkpoint, text: &str) -> Result<Self, TranslateError> {
        let config = checkpoint.decoder.config();
        let source = config.source().ok_or(TranslateError::NoEncoder)?;
        let mark = checkpoint.tokenizer.token_to_id(END_OF_TEXT).ok_or(TextError::NoEndMark)?;
        // Nothing at all is no line; a line feed alone is an empty one.
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

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// A source on its way.
struct Row {
    /// Its place among the sources.
    at: usize,
    slot: usize,
    /// The token to be read next.
    next: u32,
    /// What it was translated into.
    written: Vec<u32>,
}

/// Translates all sources; `write` takes the translations in the sources' order, each one line, as early as all before
/// it are whole, and `progress` is told after every step.
///
/// # Errors
/// [`TranslateError::Model`] where a step fails, and what `write` says.
pub fn translate(
    checkpoint: &Checkpoint,
    sources: &Sources,
    options: TranslateOptions,
    write: &mut dyn FnMut(&str) -> std::io::Result<()>,
    progress: &mut dyn FnMut(&Translated),
) -> Result<Translated, TranslateError> {
    let slots = options.batch.clamp(1, sources.len().max(1));
    let options_of_pool = PoolOptions { state: checkpoint.state, ..PoolOptions::new(slots) };
    let mut pool = checkpoint.decoder.new_pool_with(options_of_pool).map_err(candle_core::Error::from)?;
    let (mut rows, mut free) = (Vec::with_capacity(slots), (0..slots).rev().collect::<Vec<_>>());
    let mut waiting = sources.ids.iter().enumerate();
    let mut done = Translated::default();
    let mut logits = Vec::new();
    // Whole translations that one before them keeps waiting.
    let (mut whole, mut written) = (BTreeMap::new(), 0);
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
            whole.insert(at, line(checkpoint, &ids)?);
        }
        while let Some(text) = whole.remove(&written) {
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
    done: &mut Translated,
) -> Result<(), TranslateError> {
    let clock = Instant::now();
    checkpoint.decoder.read_source(ids, pool, slot)?;
    done.reading += clock.elapsed();
    done.source_tokens += ids.len() as u64;
    Ok(())
}

/// Takes every row one token further.
fn step(
    checkpoint: &Checkpoint,
    rows: &mut [Row],
    pool: &mut StatePool,
    logits: &mut Vec<f32>,
    done: &mut Translated,
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

/// The first of the greatest.
fn likeliest(logits: &[f32]) -> u32 {
    let greatest = (0..logits.len()).reduce(|best, id| if logits[id] > logits[best] { id } else { best });
    greatest.unwrap_or(0) as u32
}

/// A translation's text as one line, without blanks around it.
fn line(checkpoint: &Checkpoint, ids: &[u32]) -> Result<String, TranslateError> {
    let text = checkpoint.tokenizer.decode(ids, true).map_err(|error| TextError::Decode(error.to_string()))?;
    Ok(text.trim().replace("\r\n", " ").replace(['\n', '\r'], " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equals_the_first_is_likeliest() {
        assert_eq!(likeliest(&[-3.0, 1.0, 0.5, 1.0]), 1);
        assert_eq!(likeliest(&[f32::NEG_INFINITY, -9.0]), 1);
    }
}
