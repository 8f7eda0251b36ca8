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
use tidegate_server::text::Tokenizer;

use crate::cli::{EvalArgs, ModelsOutput};

/// The separator between documents in a file.
const END_OF_TEXT: &str = "<|endoftext|>";
/// The slot that reads the text.
const SLOT: usize = 0;
/// Maximum number of tokens read in one step.
const MOST_TOKENS: usize = 64;
/// Maximum number of logits held at once: 16 MiB.
const MOST_LOGITS: usize = 4 << 20;

/// A document's tokens.
#[derive(Debug, PartialEq, Eq)]
struct Document {
    ids: Vec<u32>,
    /// Number of tokens in `ids` before the first one that is predicted.
    given: usize,
    /// Bytes of the document's text.
    bytes: usize,
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

/// Scores the model in `files`, and prints the report.
pub(crate) fn eval(args: &EvalArgs, files: Files) -> Result<()> {
    // Read the text first: a wrong file should fail before the model is loaded.
    let text = text(&args.text).with_context(|| format!("--text {}", args.text.display()))?;
    let (backend, device, state) = (args.model.backend, args.model.device, args.model.state.into());
    let Files { path, vocabulary } = files;
    let options = OpenOptions { vocabulary, backend, device, slots: 1, state, ..OpenOptions::default() };
    let Model { model, text: TextFiles { tokenizer, .. }, .. } = checkpoint::open_model(&path, &options)?;
    ensure!(model.source_start().is_none(), "an encoder-decoder predicts nothing without a source");
    let documents = documents(&text).map(|text| tokens(&tokenizer, text)).collect::<Result<Vec<_>>>()?;
    let report = Scorer::new(model, &tokenizer).score(checkpoint::model_name(&path), &documents, args.limit)?;
    let mut out = std::io::stdout().lock();
    match args.output {
        ModelsOutput::Json => writeln!(out, "{}", serde_json::to_string(&report)?)?,
        ModelsOutput::Table => write!(out, "{}", table(&report))?,
    }
    Ok(())
}

/// Reads the text of a file, with line ends converted to `\n`.
fn text(path: &Path) -> Result<String> {
    let text = String::from_utf8(std::fs::read(path)?)
        .map_err(|error| anyhow!("not UTF-8 at byte {}", error.utf8_error().valid_up_to()))?;
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    ensure!(documents(&text).next().is_some(), "the file has no text");
    Ok(text)
}

/// Splits a text into documents, without the separators and the line breaks around them.
fn documents(text: &str) -> impl Iterator<Item = &str> {
    text.split(END_OF_TEXT).map(|document| document.trim_matches('\n')).filter(|document| !document.is_empty())
}

/// Tokenizes a document as the model should see it: after the begin-of-text tokens or, if there are none, the
/// end-of-text token; followed by the end-of-text token.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Result<Document> {
    let end = tokenizer.eos().first();
    let begin = if tokenizer.begin().is_empty() { end.as_slice() } else { &[] };
    let text_ids = tokenizer.encode_chat(text)?;
    let ids: Vec<u32> = begin.iter().map(|id| **id).chain(text_ids).chain(end.copied()).collect();
    // Without such tokens, nothing predicts the first token of the text.
    let given = tokenizer.begin().len().max(1);
    Ok(Document { ids, given, bytes: text.len() })
}

/// Reads documents with a model and scores it.
struct Scorer<'a> {
    model: Box<dyn LanguageModel>,
    tokenizer: &'a Tokenizer,
    /// Number of tokens read in one step.
    chunk: usize,
    /// (tokens, vocab)
    logits: Vec<f32>,
}

impl<'a> Scorer<'a> {
    fn new(model: Box<dyn LanguageModel>, tokenizer: &'a Tokenizer) -> Self {
        let most = (MOST_LOGITS / model.vocab_size()).clamp(1, MOST_TOKENS);
        let chunk = if model.speculates() { most } else { 1 };
        Self { model, tokenizer, chunk, logits: Vec::new() }
    }

    fn score(&mut self, model: String, documents: &[Document], limit: Option<usize>) -> Result<Report> {
        let all = documents.iter().map(|document| document.ids.len() - document.given).sum();
        ensure!(all > 0, "--text: one token has none before it that predicts it");
        let limit = limit.unwrap_or(all).min(all);
        let (bar, step) = (bar(limit), self.chunk);
        let (start, mut tokens, mut bytes, mut nats, mut read) = (Instant::now(), 0, 0, 0.0, 0);
        for document in documents {
            if tokens == limit {
                break;
            }
            let Document { ids, given, bytes: of_text } = document;
            let count = (ids.len() - given).min(limit - tokens);
            let ids = &ids[..given + count];
            self.document(ids, *given, &mut |loss| {
                nats += loss;
                tokens += 1;
                bar.set_position(tokens as u64);
                if tokens.is_multiple_of(step) {
                    bar.set_message(format!("{:.4} nats", nats / tokens as f64));
                }
            })?;
            bytes += if ids.len() == document.ids.len() { *of_text } else { self.bytes(&ids[*given..]) };
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

    /// Reads a document, and calls `each` with the loss of each token after the first `given` ones.
    fn document(&mut self, ids: &[u32], given: usize, each: &mut dyn FnMut(f64)) -> Result<()> {
        self.model.reset(SLOT)?;
        let vocab_size = self.model.vocab_size();
        let next = ids[1..].chunks(self.chunk);
        // The last token predicts nothing.
        for (chunk, (ids, next)) in ids[..ids.len() - 1].chunks(self.chunk).zip(next).enumerate() {
            self.read(ids)?;
            for (at, (logits, target)) in self.logits.chunks_exact(vocab_size).zip(next).enumerate() {
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

    fn bytes(&self, ids: &[u32]) -> usize {
        ids.iter().map(|id| self.tokenizer.vocabulary().bytes(*id).len()).sum()
    }
}

/// Returns a progress bar, which only terminals show.
fn bar(tokens: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {human_pos} of {human_len} tokens, {per_sec}, {msg} {eta}");
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
