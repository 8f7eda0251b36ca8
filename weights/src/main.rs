//! The command line `tidegate-weights`: arguments, the progress bar, and reports as tables or JSON.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate_model::Device;
use tidegate_weights::eval::{Checkpoint, EvalReport, Progress, evaluate};
use tidegate_weights::inspect::{InspectReport, inspect, observe};
use tidegate_weights::table::{Table, grouped};

/// Evaluates and inspects the checkpoints that `tidegate` serves.
#[derive(Debug, Parser)]
#[command(name = "tidegate-weights", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Perplexity and bits per byte of a text, the state carried through the whole of it.
    Eval {
        #[command(flatten)]
        common: Common,
        /// UTF-8 text, `<|endoftext|>` between documents.
        #[arg(long, value_name = "FILE")]
        text: PathBuf,
    },
    /// Parameters by group, state bytes, sigma and gate half-life per head; with a text also what the gates and
    /// denominators did on it.
    Inspect {
        #[command(flatten)]
        common: Common,
        /// UTF-8 text, `<|endoftext|>` between documents.
        #[arg(long, value_name = "FILE")]
        text: Option<PathBuf>,
    },
}

#[derive(Args, Debug)]
struct Common {
    /// Checkpoint folder: config.json, model.safetensors, tokenizer.json.
    #[arg(long, value_name = "FOLDER", env = "TIDEGATE_MODEL")]
    model: PathBuf,
    /// Predict only the first so many tokens of the text.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Eval { common, text } => {
            let checkpoint = Checkpoint::load(&common.model, &Device::Cpu)?;
            let start = Instant::now();
            let report = with_bar(&text, common.limit, |tick| evaluate(&checkpoint, &text, common.limit, tick))??;
            let seconds = start.elapsed().as_secs_f64();
            if common.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print!("{}", eval_table(&report, seconds));
            }
        }
        Command::Inspect { common, text } => {
            let mut report = inspect(&common.model)?;
            if let Some(text) = text {
                let checkpoint = Checkpoint::load(&common.model, &Device::Cpu)?;
                with_bar(&text, common.limit, |tick| observe(&mut report, &checkpoint, &text, common.limit, tick))??;
            }
            if common.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print!("{}", inspect_tables(&report));
            }
        }
    }
    Ok(())
}

/// Runs `work` under a progress bar on stderr: over the limit's tokens, or else the file's bytes.
fn with_bar<T>(text: &Path, limit: Option<u64>, work: impl FnOnce(&mut dyn FnMut(Progress)) -> T) -> Result<T> {
    // A file that cannot be looked at is reported by the work itself, in its own words.
    let length = limit.or_else(|| std::fs::metadata(text).ok().map(|m| m.len())).unwrap_or(0);
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr_with_hz(5));
    bar.set_style(ProgressStyle::with_template("{bar:30} {percent:>3}% {elapsed_precise} {msg}")?);
    let start = Instant::now();
    let result = work(&mut |p| {
        bar.set_position(if limit.is_some() { p.tokens } else { p.bytes_read });
        let speed = p.tokens as f64 / start.elapsed().as_secs_f64();
        let nats = p.nats / p.tokens.max(1) as f64;
        bar.set_message(format!("{} tokens, {speed:.0} tokens/s, {nats:.4} nats", grouped(p.tokens)));
    });
    bar.finish_and_clear();
    Ok(result)
}

fn eval_table(report: &EvalReport, seconds: f64) -> Table {
    let speed = report.tokens as f64 / seconds;
    let mut table = Table::new(["documents", &grouped(report.documents)]);
    table.row(["tokens".into(), grouped(report.tokens)]);
    table.row(["bytes".into(), grouped(report.bytes)]);
    table.row(["nats per token".into(), format!("{:.4}", report.nats)]);
    table.row(["perplexity".into(), format!("{:.3}", report.perplexity)]);
    table.row(["bits per byte".into(), format!("{:.4}", report.bits_per_byte)]);
    table.row(["state bytes".into(), grouped(report.state_bytes as u64)]);
    table.row(["seconds".into(), format!("{seconds:.1}")]);
    table.row(["tokens/s".into(), format!("{speed:.0}")]);
    table
}

/// Three digits are enough for a half-life, from a fraction of a token to millions.
fn tokens(x: Option<f64>) -> String {
    match x {
        None => "-".into(),
        Some(x) if x >= 1e9 => "> 1e9".into(),
        Some(x) if x >= 100.0 => grouped(x.round() as u64),
        Some(x) => format!("{x:.1}"),
    }
}

fn percent(x: Option<f64>) -> String {
    x.map_or_else(|| "-".into(), |x| format!("{:.2} %", 100.0 * x))
}

fn inspect_tables(report: &InspectReport) -> String {
    let mut groups = Table::new(["group", "tensors", "numbers", "bytes"]);
    for g in &report.groups {
        groups.row([g.name.into(), g.tensors.to_string(), grouped(g.numbers), grouped(g.bytes)]);
    }
    let sum = |f: fn(&tidegate_weights::inspect::Group) -> u64| grouped(report.groups.iter().map(f).sum());
    groups.row(["all".into(), sum(|g| g.tensors), sum(|g| g.numbers), sum(|g| g.bytes)]);
    let mut totals = Table::new(["parameters (trained)", &grouped(report.parameters)]);
    totals.row(["state bytes per conversation".into(), grouped(report.state_bytes as u64)]);

    let mut heads = Table::new(["layer.head", "sigma min", "mean", "max", "half-life (bias)", "on text", "clamped"]);
    for h in &report.heads {
        heads.row([
            format!("{}.{}", h.layer, h.head),
            format!("{:.3}", h.sigma_min),
            format!("{:.3}", h.sigma_mean),
            format!("{:.3}", h.sigma_max),
            tokens(h.half_life),
            tokens(h.measured_half_life),
            percent(h.clamped),
        ]);
    }
    let on_text = report.on_text.as_ref().map_or_else(String::new, |seen| {
        let mut layers = Table::new(["layer", "clamped denominators"]);
        for layer in &seen.layers {
            layers.row([layer.layer.to_string(), percent(Some(layer.clamped))]);
        }
        format!("\n{} tokens of text\n{layers}", grouped(seen.tokens))
    });
    format!("{groups}\n{totals}\n{heads}{on_text}")
}
