//! `tidegate bench`: tokens per second of a checkpoint on this machine, at several depths and batches.
//!
//! All cases are measured in turn, round after round, so that a machine whose speed drifts is the same to all; the
//! table gives the median and the spread over the rounds.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use tidegate_model::{Decoder, Device, StatePool, checkpoint};

use crate::cli::{BenchArgs, BenchOutput};

/// Tokens taken in at a time on the way to a depth.
const PIECE: usize = 512;

/// What is measured.
#[derive(Clone, Copy)]
enum Case {
    /// One row that has read so many tokens.
    Depth { tokens: usize, slot: usize },
    /// So many rows at once, each a short text.
    Batch(usize),
    /// A prompt of so many tokens.
    Prefill(usize),
}

impl Case {
    fn kind(self) -> &'static str {
        if matches!(self, Self::Prefill(_)) { "prefill" } else { "decode" }
    }

    fn rows(self) -> usize {
        if let Self::Batch(rows) = self { rows } else { 1 }
    }

    fn depth(self) -> usize {
        if let Self::Depth { tokens, .. } = self { tokens } else { 0 }
    }
}

/// Token ids that repeat no pattern a model could be fast on.
fn ids(count: usize, vocab: usize) -> Vec<u32> {
    (0..count as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u32 % vocab as u32).collect()
}

/// Measures and prints.
pub(crate) fn run(args: &BenchArgs, folder: &Path) -> Result<()> {
    let decoder = checkpoint::load(folder, &Device::Cpu)?;
    let largest = args.batch.iter().copied().max().unwrap_or(1);
    let mut pool = decoder.new_pool(largest + args.depths.len()).context("the states cannot be allocated")?;
    let mut cases = Vec::new();
    for (i, &tokens) in args.depths.iter().enumerate() {
        say(&format!("reading {tokens} tokens"));
        for piece in ids(tokens, decoder.config().vocab_size).chunks(PIECE) {
            decoder.absorb(piece, &mut pool, largest + i)?;
        }
        cases.push(Case::Depth { tokens, slot: largest + i });
    }
    cases.extend(args.batch.iter().map(|&rows| Case::Batch(rows)));
    cases.push(Case::Prefill(args.prompt));

    let mut rates = vec![Vec::with_capacity(args.rounds); cases.len()];
    for round in 0..args.rounds {
        say(&format!("round {} of {}", round + 1, args.rounds));
        for (case, rates) in cases.iter().zip(&mut rates) {
            rates.push(measure(*case, args.steps, &decoder, &mut pool)?);
        }
    }
    say("");
    print(args, &decoder, &pool, &cases, rates);
    Ok(())
}

/// Progress on a terminal; a log file gets none of it.
fn say(text: &str) {
    let mut out = std::io::stderr().lock();
    if out.is_terminal() {
        // Progress that cannot be shown is no reason to stop.
        let _ = write!(out, "\r\x1b[K{text}").and_then(|()| out.flush());
    }
}

/// Tokens a second of one case, once.
fn measure(case: Case, steps: usize, decoder: &Decoder, pool: &mut StatePool) -> Result<f64> {
    let vocab = decoder.config().vocab_size;
    let slots: Vec<usize> = match case {
        Case::Depth { slot, .. } => vec![slot],
        Case::Batch(rows) => (0..rows).collect(),
        Case::Prefill(tokens) => {
            let prompt = ids(tokens, vocab);
            pool.reset(0)?;
            let clock = Instant::now();
            decoder.prefill(&prompt, pool, 0)?;
            return Ok(tokens as f64 / clock.elapsed().as_secs_f64());
        }
    };
    let tokens = ids(slots.len(), vocab);
    let clock = Instant::now();
    for _ in 0..steps {
        decoder.decode(&tokens, pool, &slots)?;
    }
    Ok((steps * slots.len()) as f64 / clock.elapsed().as_secs_f64())
}

fn print(args: &BenchArgs, decoder: &Decoder, pool: &StatePool, cases: &[Case], rates: Vec<Vec<f64>>) {
    let threads = rayon::current_num_threads();
    if args.output == BenchOutput::Markdown {
        let (parameters, state) = (decoder.config().parameters(), pool.state_bytes());
        println!("{parameters} parameters, {state} bytes of state, {threads} threads, {} rounds\n", args.rounds);
        println!("| kind | rows | depth | tokens/s, median | least | most |\n| --- | --- | --- | --- | --- | --- |");
    }
    for (case, mut rates) in cases.iter().zip(rates) {
        rates.sort_by(f64::total_cmp);
        let (least, median, most) = (rates[0], rates[rates.len() / 2], rates[rates.len() - 1]);
        let (kind, rows, depth) = (case.kind(), case.rows(), case.depth());
        match args.output {
            BenchOutput::Markdown => {
                println!("| {kind} | {rows} | {depth} | {median:.0} | {least:.0} | {most:.0} |");
            }
            BenchOutput::Json => println!(
                "{}",
                json!({
                    "kind": kind, "batch": rows, "depth": depth, "threads": threads, "tokens_per_second": median,
                    "least": least, "most": most, "state_bytes": pool.state_bytes(),
                })
            ),
        }
    }
}
