//! The models with their states at each depth, and the measurement of a case.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tidegate_model::checkpoint::Stored;
use tidegate_model::{DecoderConfig, Threads, candle};

use super::past::{MemoryBudget, Past};
use super::plan::{Case, Kind, Plan, Subject};
use super::runner::{self, Runner};
use crate::cli::{MixerArg, word};

/// Tokens per prefill call on the way to a depth.
const CHUNK: usize = 512;
/// Minimum time between two progress messages.
const PROGRESS: Duration = Duration::from_millis(200);

/// What the report says about a model.
pub(super) struct About {
    /// The name of the shape or of the checkpoint's folder.
    pub(super) shape: String,
    pub(super) weights: String,
    pub(super) mixer: String,
    pub(super) parameters: u64,
    vocab_size: usize,
    /// `None` for a model family that only candle supports.
    pub(super) config: Option<DecoderConfig>,
}

impl About {
    pub(super) fn of(subject: &Subject, plan: &Plan) -> Result<Self> {
        let of = |shape, weights, config: DecoderConfig| Self {
            shape,
            weights,
            mixer: config.mixer().to_owned(),
            parameters: config.parameters(),
            vocab_size: config.vocab_size,
            config: Some(config),
        };
        let about = match subject {
            Subject::Checkpoint { folder, mixer, .. } if plan.device.is_candle() => {
                let (candle, own) = (candle::Checkpoint::open(folder)?, Stored::open(folder).ok());
                let family = candle.config().family();
                check_mixer(*mixer, family, folder)?;
                Self {
                    shape: name_of(folder),
                    weights: "f32".into(),
                    mixer: family.to_owned(),
                    parameters: own.as_ref().map_or(candle.parameters(), |own| own.config().parameters()),
                    vocab_size: candle.config().vocab_size(),
                    config: own.map(|own| own.config().clone()),
                }
            }
            Subject::Checkpoint { folder, weights, mixer } => {
                let stored = Stored::open(folder)?;
                check_mixer(*mixer, stored.config().mixer(), folder)?;
                let weights = weights.map_or_else(|| own_weights(&stored), |weights| weights.to_string());
                of(name_of(folder), weights, stored.config().clone())
            }
            Subject::Shape { shape, weights, config } => of(word(shape), weights.to_string(), (**config).clone()),
        };
        let source = about.config.as_ref().and_then(DecoderConfig::source);
        ensure!(source.is_none(), "bench does not measure encoder-decoders such as {}", about.shape);
        Ok(about)
    }
}

fn check_mixer(asked: Option<MixerArg>, own: &str, folder: &Path) -> Result<()> {
    let Some(asked) = asked.map(|asked| word(&asked)) else { return Ok(()) };
    ensure!(own == asked, "--mixer {asked}: {} is a model of {own}", folder.display());
    Ok(())
}

/// A model and its states at each depth.
pub(super) struct Model {
    pub(super) about: About,
    pub(super) runner: Box<dyn Runner>,
    pub(super) past: Past,
    /// The logits of the last step, reused so that no step allocates.
    logits: Vec<f32>,
}

impl Model {
    /// Loads or creates a model, and computes its states at every depth.
    pub(super) fn open(
        subject: &Subject,
        plan: &Plan,
        threads: &[Arc<Threads>],
        memory: &mut MemoryBudget,
    ) -> Result<Self> {
        let about = About::of(subject, plan)?;
        let (name, vocab_size) = (format!("{} with {}", about.shape, about.weights), about.vocab_size);
        let cache = about.config.as_ref().filter(|config| config.only_caches());
        // A GPU checks its own memory.
        if let Some(config) = cache.filter(|_| plan.device.is_cpu()) {
            let rows = (plan.slots() as u64).saturating_mul(threads.len() as u64);
            let named = match subject {
                Subject::Checkpoint { folder, mixer: None, .. } => folder.display().to_string(),
                _ => "--mixer softmax".to_owned(),
            };
            memory.reserve(config, plan.state, rows).context(named)?;
        }
        progress(&format!("{name}: loading"));
        let mut runner = runner::open(subject, plan, threads)?;
        let mut logits = Vec::new();
        if plan.prompt > 0 {
            progress(&format!("{name}: warming up with a prompt"));
            let prompt = ids(0, plan.prompt, vocab_size);
            for lane in 0..plan.lanes() {
                runner.prefill_logits(lane, &prompt, &mut logits)?;
                runner.reset(lane)?;
            }
        }
        let past = if let Some(config) = cache {
            Past::random(config, plan.deepest())
        } else {
            let fastest = (0..plan.threads.len()).max_by_key(|&i| plan.threads[i]).unwrap_or(0);
            let text = |from, count| ids(from, count, vocab_size);
            read(&mut *runner, fastest, plan, text, &name)?
        };
        Ok(Self { about, runner, past, logits })
    }

    /// Measures one case once; returns tokens per second.
    pub(super) fn measure(&mut self, case: &Case, plan: &Plan) -> Result<f64> {
        let (depth, vocab) = (plan.depths[case.depth], self.about.vocab_size);
        let (runner, lane) = (&mut self.runner, case.lane);
        let rows = if let Kind::Decode { rows } = case.kind { rows } else { 1 };
        let slots: Vec<usize> = (0..rows).collect();
        for &slot in &slots {
            runner.import(lane, slot, self.past.at(case.depth), depth as u64)?;
        }
        let clock;
        let tokens = match case.kind {
            Kind::Decode { rows } => {
                // The tokens differ, so that the states of the rows differ.
                let tokens = ids(depth, rows, vocab);
                runner.decode(lane, &tokens, &slots, &mut self.logits)?;
                clock = Instant::now();
                for _ in 0..plan.steps {
                    runner.decode(lane, &tokens, &slots, &mut self.logits)?;
                }
                plan.steps * rows
            }
            Kind::Prefill => {
                let prompt = ids(depth, plan.prompt, vocab);
                clock = Instant::now();
                runner.prefill_logits(lane, &prompt, &mut self.logits)?;
                plan.prompt
            }
        };
        Ok(tokens as f64 / clock.elapsed().as_secs_f64())
    }
}

/// Reads tokens up to the greatest depth, and exports the state at each depth on the way.
fn read(
    runner: &mut dyn Runner,
    lane: usize,
    plan: &Plan,
    text: impl Fn(usize, usize) -> Vec<u32>,
    name: &str,
) -> Result<Past> {
    let deepest = plan.deepest();
    let (clock, mut reported, mut read) = (Instant::now(), None, 0);
    let mut states = Vec::with_capacity(plan.depths.len());
    for &depth in &plan.depths {
        while read < depth {
            if reported.is_none_or(|at: Instant| at.elapsed() > PROGRESS) {
                reported = Some(Instant::now());
                let left = clock.elapsed().as_secs_f64() / (read.max(1) as f64) * (deepest - read) as f64;
                let left = if read == 0 { String::new() } else { format!(", {left:.0} s left") };
                progress(&format!("{name}: read {read} of {deepest} tokens{left}"));
            }
            let chunk = CHUNK.min(depth - read);
            runner.prefill(lane, &text(read, chunk))?;
            read += chunk;
        }
        states.push(runner.export(lane)?);
    }
    Ok(Past::Read(states))
}

/// Returns the type of a checkpoint's output head, which is the type of most of its weights.
fn own_weights(stored: &Stored) -> String {
    // If the head is tied to the embedding, look at the embedding, which families name differently.
    let head = if stored.config().tie_word_embeddings { ".embed" } else { "lm_head." };
    stored
        .tensors()
        .find(|tensor| tensor.name.contains(head))
        .map_or_else(String::new, |tensor| tensor.kind.to_string())
}

/// Returns the name of the folder.
fn name_of(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Returns `count` token ids, starting at position `from` of a text without a pattern.
fn ids(from: usize, count: usize, vocab: usize) -> Vec<u32> {
    let id = |i: usize| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocab as u64;
    (from..from + count).map(|i| id(i) as u32).collect()
}

/// Shows progress if standard error is a terminal.
pub(super) fn progress(text: &str) {
    let mut out = std::io::stderr().lock();
    if out.is_terminal() {
        // It does not matter if progress cannot be shown.
        let _ = write!(out, "\r\x1b[K{text}").and_then(|()| out.flush());
    }
}
