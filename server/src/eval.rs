//! The command `eval`: how well a model predicts a text, in perplexity and bits per byte.

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tidegate_model::LanguageModel;
use tidegate_model::sampling::LogSoftmax;
use tidegate_server::checkpoint::{self, Files, Model, OpenOptions, TextFiles};
use tidegate_server::text::{Tokenizer, Vocabulary};

use crate::cli::{EvalArgs, ModelsOutput};

/// The separator between documents in a file.
const END_OF_TEXT: &str = "<|endoftext|>";
/// The slot that reads the text.
const SLOT: usize = 0;
/// Maximum number of tokens read in one step.
const MOST_TOKENS: usize = 64;
/// Maximum number of logits of a step that reads several tokens: 16 MiB.
const MOST_LOGITS: usize = 4 << 20;

/// A document's tokens.
#[derive(Debug, PartialEq, Eq)]
struct Document {
    ids: Vec<u32>,
    /// Number of tokens in `ids` before its text.
    before: usize,
    /// Bytes of the document's text.
    bytes: usize,
}

impl Document {
    /// Tokenizes a text and adds the tokens that the model expects around it. Before the text come the tokens that begin
    /// every text or, if the model has none, the end-of-text token; after it comes the end-of-text token.
    fn new(tokenizer: &Tokenizer, text: &str) -> Result<Self> {
        let end = tokenizer.eos().first();
        let begin = if tokenizer.begin().is_empty() { end.as_slice() } else { &[] };
        let text_ids = tokenizer.encode_chat(text)?;
        let ids: Vec<u32> = begin.iter().map(|id| **id).chain(text_ids).chain(end.copied()).collect();
        Ok(Self { ids, before: tokenizer.begin().len().max(begin.len()), bytes: text.len() })
    }

    /// Number of tokens in `ids` before the first one that is predicted: nothing predicts the first token of all.
    fn given(&self) -> usize {
        self.before.max(1)
    }

    /// Number of tokens that are predicted.
    fn predicted(&self) -> usize {
        self.ids.len().saturating_sub(self.given())
    }

    /// Bytes of text in the first `count` predicted tokens.
    fn bytes_of(&self, count: usize, vocabulary: &Vocabulary) -> usize {
        let until = |end: usize| vocabulary.text_of(&self.ids[self.before..end], true).len();
        let all = if count == self.predicted() { self.bytes } else { until(self.given() + count) };
        all.saturating_sub(until(self.given()))
    }
}

/// The score of a model.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    documents: usize,
    /// Number of predicted tokens.
    tokens: usize,
    /// Bytes of text in the predicted tokens.
    bytes: usize,
    /// Mean loss per token, in nats.
    nats: f64,
    perplexity: f64,
    /// Loss of all tokens in bits, divided by `bytes`.
    bits_per_byte: f64,
    tokens_per_second: f64,
}

/// Scores a model and prints the report. `find` returns the model's files, and its name if it has one; it may download
/// them.
pub(crate) fn eval(args: &EvalArgs, find: impl FnOnce() -> Result<(Files, Option<String>)>) -> Result<()> {
    let what = || format!("--text {}", args.text.display());
    // Read the text first: a wrong file should fail before the model is downloaded and loaded.
    let text = text(&args.text).with_context(what)?;
    let (backend, device, state) = (args.model.backend, args.model.device, args.model.state.into());
    let (Files { path, vocabulary }, name) = find()?;
    let options = OpenOptions { vocabulary, backend, device, slots: 1, state, ..OpenOptions::default() };
    let Model { model, text: TextFiles { tokenizer, .. }, .. } = checkpoint::open_model(&path, &options)?;
    ensure!(model.source_start().is_none(), "an encoder-decoder predicts nothing without a source");
    let limit = args.limit.unwrap_or(usize::MAX);
    let documents = tokenized(&tokenizer, &text, limit).with_context(what)?;
    let name = name.unwrap_or_else(|| checkpoint::model_name(&path));
    let report = Scorer::new(model, tokenizer.vocabulary()).score(name, &documents, limit)?;
    let mut out = std::io::stdout().lock();
    match args.output {
        ModelsOutput::Json => writeln!(out, "{}", serde_json::to_string(&report)?)?,
        ModelsOutput::Table => write!(out, "{}", table(&report))?,
    }
    Ok(())
}

/// Returns the text of a file, with `\n` as line ends.
fn text(path: &Path) -> Result<String> {
    let text = String::from_utf8(std::fs::read(path)?)
        .map_err(|error| anyhow!("not UTF-8 at byte {}", error.utf8_error().valid_up_to()))?;
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    ensure!(documents(&text).next().is_some(), "the file has no text");
    Ok(text)
}

/// Returns the documents of a text, without the separators and the line breaks around them.
fn documents(text: &str) -> impl Iterator<Item = &str> {
    text.split(END_OF_TEXT).map(|document| document.trim_matches('\n')).filter(|document| !document.is_empty())
}

/// Returns the tokens of as many documents as `limit` predicted tokens need.
fn tokenized(tokenizer: &Tokenizer, text: &str, limit: usize) -> Result<Vec<Document>> {
    let (mut tokens, mut all) = (0, Vec::new());
    for text in documents(text) {
        if tokens >= limit {
            break;
        }
        let document = Document::new(tokenizer, text)?;
        if document.predicted() > 0 {
            tokens += document.predicted();
            all.push(document);
        }
    }
    ensure!(tokens > 0, "nothing to predict: no document has two tokens, and the model has none that begins a text");
    Ok(all)
}

/// A model that reads documents.
struct Scorer<'a> {
    model: Box<dyn LanguageModel>,
    vocabulary: &'a Vocabulary,
    /// Number of tokens that the model reads in one step.
    chunk: usize,
    /// (tokens, vocab)
    logits: Vec<f32>,
}

impl<'a> Scorer<'a> {
    fn new(model: Box<dyn LanguageModel>, vocabulary: &'a Vocabulary) -> Self {
        let most = (MOST_LOGITS / model.vocab_size()).clamp(1, MOST_TOKENS);
        let chunk = if model.speculates() { most } else { 1 };
        Self { model, vocabulary, chunk, logits: Vec::new() }
    }

    /// Reads documents until `limit` tokens are predicted.
    fn score(&mut self, model: String, documents: &[Document], limit: usize) -> Result<Report> {
        let limit = limit.min(documents.iter().map(Document::predicted).sum());
        let (bar, step) = (bar(limit), self.chunk);
        let (start, mut tokens, mut bytes, mut nats, mut read) = (Instant::now(), 0, 0, 0.0, 0);
        for document in documents {
            let count = document.predicted().min(limit - tokens);
            if count == 0 {
                break;
            }
            let ids = &document.ids[..document.given() + count];
            self.document(ids, document.given(), &mut |loss| {
                nats += loss;
                tokens += 1;
                bar.set_position(tokens as u64);
                if tokens.is_multiple_of(step) {
                    bar.set_message(format!("{:.4} nats", nats / tokens as f64));
                }
            })?;
            bytes += document.bytes_of(count, self.vocabulary);
            read += 1;
        }
        bar.finish_and_clear();
        let mean = nats / tokens as f64;
        Ok(Report {
            model,
            documents: read,
            tokens,
            bytes,
            nats: mean,
            perplexity: mean.exp(),
            bits_per_byte: nats / std::f64::consts::LN_2 / bytes as f64,
            tokens_per_second: tokens as f64 / start.elapsed().as_secs_f64(),
        })
    }

    /// Reads a document, and passes the loss of each token after the first `given` ones to `each`.
    fn document(&mut self, ids: &[u32], given: usize, each: &mut dyn FnMut(f64)) -> Result<()> {
        self.model.reset(SLOT)?;
        let vocab_size = self.model.vocab_size();
        let next = ids[1..].chunks(self.chunk);
        // The last token predicts nothing.
        for (chunk, (ids, next)) in ids[..ids.len() - 1].chunks(self.chunk).zip(next).enumerate() {
            self.read(ids)?;
            for (at, (logits, target)) in self.logits.chunks_exact(vocab_size).zip(next).enumerate() {
                ensure!(logits.iter().all(|logit| logit.is_finite()), "the model failed: a logit is not finite");
                if chunk * self.chunk + at + 1 >= given {
                    each(-LogSoftmax::new(logits).logprob(*target));
                }
            }
        }
        Ok(())
    }

    /// Reads tokens, and computes the logits after each of them.
    fn read(&mut self, ids: &[u32]) -> Result<()> {
        if self.chunk == 1 {
            return Ok(self.model.decode(ids, &[SLOT], &mut self.logits)?);
        }
        self.model.verify(ids, &[SLOT], &mut self.logits)?;
        Ok(self.model.keep(SLOT, ids.len())?)
    }
}

/// Returns a progress bar, which only terminals show.
fn bar(tokens: usize) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:30} {human_pos} of {human_len} tokens, {per_sec}, {msg}, {eta} left");
    let bar = ProgressBar::with_draw_target(Some(tokens as u64), ProgressDrawTarget::stderr_with_hz(5));
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn table(report: &Report) -> String {
    let Report { model, documents, tokens, bytes, nats, perplexity, bits_per_byte, tokens_per_second } = report;
    let rows = [
        ("model", model.clone()),
        ("documents", documents.to_string()),
        ("tokens", tokens.to_string()),
        ("bytes", bytes.to_string()),
        ("nats per token", format!("{nats:.4}")),
        ("perplexity", format!("{perplexity:.3}")),
        ("bits per byte", format!("{bits_per_byte:.4}")),
        ("tokens per second", format!("{tokens_per_second:.0}")),
    ];
    rows.map(|(name, value)| format!("{name:<18} {value}\n")).concat()
}

#[cfg(test)]
mod tests {
    use tidegate_model::ModelError;

    use super::*;

    /// A model with the same logits after every token.
    struct Constant([f32; 3]);

    impl LanguageModel for Constant {
        fn vocab_size(&self) -> usize {
            3
        }

        fn slots(&self) -> usize {
            1
        }

        fn reset(&mut self, _: usize) -> Result<(), ModelError> {
            Ok(())
        }

        fn export(&self, _: usize) -> Result<Vec<f32>, ModelError> {
            Ok(Vec::new())
        }

        fn import(&mut self, _: usize, _: &[f32], _: u64) -> Result<(), ModelError> {
            Ok(())
        }

        fn prefill(&mut self, _: &[u32], _: usize) -> Result<(), ModelError> {
            Ok(())
        }

        fn decode(&mut self, _: &[u32], _: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
            logits.clear();
            logits.extend(self.0);
            Ok(())
        }
    }

    fn scored(logits: [f32; 3], ids: &[u32], before: usize) -> Result<Report> {
        let vocabulary = Vocabulary::new(["", "a", "bc"].map(|token| token.as_bytes().into()).into());
        let bytes = vocabulary.text_of(&ids[before..], true).len();
        let documents = [Document { ids: ids.into(), before, bytes }];
        Scorer::new(Box::new(Constant(logits)), &vocabulary).score("m".into(), &documents, usize::MAX)
    }

    #[test]
    fn tokens_that_begin_a_text_are_not_predicted() {
        let logits = [0.0, 1.0, -2.0];
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        let report = scored(logits, &[0, 0, 1, 2, 0], 2).unwrap();
        let want = sum.ln() - (1.0 - 2.0 + 0.0) / 3.0;
        assert!((report.nats - want).abs() < 1e-6, "{report:?}");
        assert_eq!((report.tokens, report.bytes), (3, 3));
        let perplexity = format!("perplexity         {:.3}\n", want.exp());
        assert!(table(&report).contains(&perplexity), "{}", table(&report));
        let report = scored(logits, &[1, 2], 0).unwrap();
        assert_eq!((report.tokens, report.bytes), (1, 2), "nothing predicts the first token");
    }

    #[test]
    fn a_model_that_fails_gets_no_score() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = scored([0.0, wrong, 1.0], &[0, 1], 1).unwrap_err().to_string();
            assert!(error.contains("not finite"), "{error}");
        }
    }
}
