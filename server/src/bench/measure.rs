//! Models at their depths, and the time that a case takes.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tidegate_model::config::Attention;
use tidegate_model::{Decoder, Device, PoolOptions, StatePool, Threads, WeightType, checkpoint};

use super::past::{Past, Room};
use super::plan::{Case, Kind, Plan, Subject};
use super::say;
use crate::cli::word;

/// Tokens taken in at a time on the way to a depth.
const PIECE: usize = 512;
/// Seed of random weights: any, and the same in every run.
const SEED: u64 = 0;
/// Least time between two words of progress.
const PROGRESS: Duration = Duration::from_millis(200);

/// A model, and states that have read so many tokens.
pub(super) struct Model {
    /// The shape's name, or the checkpoint folder's.
    pub(super) shape: String,
    pub(super) weights: String,
    pub(super) mixer: String,
    pub(super) decoder: Decoder,
    /// One for each number of threads.
    pools: Vec<StatePool>,
    pub(super) past: Past,
    /// What the last step gave; kept, so that no step allocates it.
    logits: Vec<f32>,
}

impl Model {
    /// Loads or makes a model, and takes it to every depth.
    pub(super) fn open(subject: &Subject, plan: &Plan, threads: &[Arc<Threads>], room: &mut Room) -> Result<Self> {
        let (shape, weights, decoder) = match subject {
            Subject::Checkpoint { folder, weights, mixer } => {
                say(&format!("loading {}", folder.display()));
                let decoder = load(folder, *weights)?;
                if let Some(mixer) = mixer {
                    let (own, folder) = (decoder.config().mixer(), folder.display());
                    ensure!(own == word(mixer), "--mixer {}: {folder} is a model of {own}", word(mixer));
                }
                let weights = weights.unwrap_or(decoder.weight_type()).to_string();
                (name_of(folder), weights, decoder)
            }
            Subject::Shape { shape, weights, config } => {
                say(&format!("making random weights of {} as {weights}", word(shape)));
                let decoder = Decoder::random((**config).clone(), *weights, SEED)
                    .with_context(|| format!("--shape {} with {weights}", word(shape)))?;
                (word(shape), weights.to_string(), decoder)
            }
        };
        ensure!(
            decoder.config().source().is_none(),
            "bench measures decoders alone: {shape} reads a source before its text"
        );
        if decoder.config().attention == Attention::Softmax {
            let rows = (plan.slots() as u64).saturating_mul(threads.len() as u64);
            let named = match subject {
                Subject::Checkpoint { folder, mixer: None, .. } => folder.display().to_string(),
                _ => "--mixer softmax".to_owned(),
            };
            room.claim(decoder.config(), plan.state, rows).context(named)?;
        }
        let pool = |threads: &Arc<Threads>| {
            let options = PoolOptions { slots: plan.slots(), threads: Arc::clone(threads), state: plan.state };
            decoder.new_pool_with(options).context("the states cannot be allocated")
        };
        let mut pools = threads.iter().map(pool).collect::<Result<Vec<_>>>()?;
        if plan.prompt > 0 {
            say(&format!("{shape} with {weights}: reading a prompt that does not count"));
            let prompt = ids(0, plan.prompt, decoder.config().vocab_size);
            for pool in &mut pools {
                decoder.prefill(&prompt, pool, 0)?;
                pool.reset(0)?;
            }
        }
        let mixer = decoder.config().mixer().to_owned();
        let past = match decoder.config().attention {
            Attention::Rfa | Attention::Hybrid => {
                let most = (0..plan.threads.len()).max_by_key(|&i| plan.threads[i]).unwrap_or(0);
                read(&decoder, &mut pools[most], plan, &format!("{shape} with {weights}"))?
            }
            Attention::Softmax => Past::drawn(decoder.config(), plan.deepest()),
        };
        Ok(Self { shape, weights, mixer, decoder, pools, past, logits: Vec::new() })
    }

    /// Bytes of one row's state.
    pub(super) fn state_bytes(&self) -> usize {
        self.pools[0].state_bytes()
    }

    /// Tokens a second of one case, once.
    pub(super) fn measure(&mut self, case: &Case, plan: &Plan) -> Result<f64> {
        let (depth, vocab) = (plan.depths[case.depth], self.decoder.config().vocab_size);
        let pool = &mut self.pools[case.threads];
        let rows = if let Kind::Decode { rows } = case.kind { rows } else { 1 };
        let slots: Vec<usize> = (0..rows).collect();
        for &slot in &slots {
            pool.import(slot, self.past.at(case.depth), depth as u64)?;
        }
        let clock;
        let tokens = match case.kind {
            Kind::Decode { rows } => {
                // Rows differ from the first step on, and so do their states.
                let tokens = ids(depth, rows, vocab);
                self.decoder.decode_into(&tokens, pool, &slots, &mut self.logits)?;
                clock = Instant::now();
                for _ in 0..plan.steps {
                    self.decoder.decode_into(&tokens, pool, &slots, &mut self.logits)?;
                }
                plan.steps * rows
            }
            Kind::Prefill => {
                let prompt = ids(depth, plan.prompt, vocab);
                clock = Instant::now();
                self.decoder.prefill(&prompt, pool, 0)?;
                plan.prompt
            }
        };
        Ok(tokens as f64 / clock.elapsed().as_secs_f64())
    }
}

/// Reads up to the deepest depth, once, and keeps the state at each.
fn read(decoder: &Decoder, pool: &mut StatePool, plan: &Plan, name: &str) -> Result<Past> {
    let (vocab, deepest) = (decoder.config().vocab_size, plan.deepest());
    let (clock, mut said, mut read) = (Instant::now(), None, 0);
    let mut states = Vec::with_capacity(plan.depths.len());
    for &depth in &plan.depths {
        while read < depth {
            if said.is_none_or(|at: Instant| at.elapsed() > PROGRESS) {
                said = Some(Instant::now());
                let left = clock.elapsed().as_secs_f64() / (read.max(1) as f64) * (deepest - read) as f64;
                let left = if read == 0 { String::new() } else { format!(", {left:.0} s left") };
                say(&format!("{name}: read {read} of {deepest} tokens{left}"));
            }
            let piece = PIECE.min(depth - read);
            decoder.absorb(&ids(read, piece, vocab), pool, 0)?;
            read += piece;
        }
        states.push(pool.export(0)?);
    }
    Ok(Past::Read(states))
}

/// A checkpoint with its weights as they are stored, or as `weights`.
fn load(folder: &Path, weights: Option<WeightType>) -> Result<Decoder> {
    Ok(match weights {
        None => checkpoint::load(folder, &Device::Cpu)?,
        Some(weights) => checkpoint::load_as(folder, weights)?,
    })
}

/// The folder's own name.
fn name_of(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Token ids of a text that repeats no pattern a model could be fast on, from one of its places on.
fn ids(from: usize, count: usize, vocab: usize) -> Vec<u32> {
    let id = |i: usize| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocab as u64;
    (from..from + count).map(|i| id(i) as u32).collect()
}
