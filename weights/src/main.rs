//! The command line `tidegate-weights`: arguments, progress bars, and reports as tables or JSON.

mod translating;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use tidegate_model::{Device, StateType, Threads, WeightType};
use tidegate_weights::eval::{Checkpoint, EvalReport, Progress, evaluate};
use tidegate_weights::inspect::{Head, InspectReport, Sigma, inspect, observe};
use tidegate_weights::quantize::{Comparison, Draft, Misfit, QuantizeOptions, QuantizeReport};
use tidegate_weights::terminal::{Table, grouped, progress_bar};

/// Evaluates, inspects and quantizes the checkpoints that `tidegate` serves, and translates with them.
#[derive(Debug, Parser)]
#[command(name = "tidegate-weights", version)]
struct Cli {
    /// Compute threads [default: one per core].
    #[arg(long, global = true, value_name = "COUNT", env = "TIDEGATE_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measures perplexity and bits per byte of a text, with the state carried through it.
    Eval {
        #[command(flatten)]
        common: Common,
        /// UTF-8 text, `<|endoftext|>` between documents.
        #[arg(long, value_name = "FILE")]
        text: PathBuf,
        /// Type of the state in memory: f32 or bf16.
        #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = state)]
        state: StateType,
    },
    /// Shows parameters by group, state bytes, sigma and gate half-life per head; with a text also measured half-lives and
    /// clamped denominators.
    Inspect {
        #[command(flatten)]
        common: Common,
        /// UTF-8 text, `<|endoftext|>` between documents.
        #[arg(long, value_name = "FILE")]
        text: Option<PathBuf>,
    },
    /// Writes a quantized copy of a checkpoint (model.gguf); with a text, also compares the two on it.
    Quantize {
        #[command(flatten)]
        common: Common,
        /// Type of the matrices: q8_0, q4_0, q4_k, f16 or bf16. Matrices whose rows are not a multiple of its block become f16.
        #[arg(long, value_name = "TYPE", value_parser = smaller)]
        to: WeightType,
        /// The output folder; new or empty.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
        /// UTF-8 text, `<|endoftext|>` between documents.
        #[arg(long, value_name = "FILE")]
        text: Option<PathBuf>,
    },
    /// Translates lines with an encoder-decoder, greedily and in order.
    Translate(translating::Translate),
}

#[derive(Args, Debug)]
struct Common {
    /// Checkpoint folder: config.json, model.safetensors (or model.gguf), tokenizer.json.
    #[arg(long, value_name = "FOLDER", env = "TIDEGATE_MODEL")]
    model: PathBuf,
    /// Predict only the first tokens of the text.
    #[arg(long, value_name = "TOKENS", requires = "text", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

fn state(text: &str) -> Result<StateType, String> {
    match text {
        "f32" => Ok(StateType::F32),
        "bf16" => Ok(StateType::Bf16),
        _ => Err("must be f32 or bf16".into()),
    }
}

fn smaller(text: &str) -> Result<WeightType, String> {
    match text.parse() {
        Ok(WeightType::F32) => Err("must be smaller than f32".into()),
        kind => kind,
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(threads) = cli.threads {
        start_threads(threads.into())?;
    }
    match cli.command {
        Command::Eval { common, text, state } => {
            let mut checkpoint = Checkpoint::load(&common.model, &Device::Cpu)?;
            checkpoint.state = state;
            let start = Instant::now();
            let report = with_bar(&text, common.limit, |tick| evaluate(&checkpoint, &text, common.limit, tick))?;
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
                with_bar(&text, common.limit, |tick| observe(&mut report, &checkpoint, &text, common.limit, tick))?;
            }
            if common.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print!("{}", inspect_tables(&report));
            }
        }
        Command::Quantize { common, to, out, text } => {
            let report = quantize(&common, to, &out, text.as_deref())?;
            if common.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print!("{}", quantize_tables(&report));
            }
        }
        Command::Translate(translate) => translate.run()?,
    }
    Ok(())
}

fn start_threads(count: usize) -> Result<()> {
    ensure!(Threads::configure(count), "--threads {count}: the system allows {}", Threads::global().count());
    // rayon packs weights as they are loaded.
    rayon::ThreadPoolBuilder::new().num_threads(count).build_global().context("cannot start the compute threads")
}

fn quantize(common: &Common, to: WeightType, out: &Path, text: Option<&Path>) -> Result<QuantizeReport> {
    let measured = |folder: &Path, text: &Path| -> Result<EvalReport> {
        let checkpoint = Checkpoint::load(folder, &Device::Cpu)?;
        Ok(with_bar(text, common.limit, |tick| evaluate(&checkpoint, text, common.limit, tick))?)
    };
    let options = QuantizeOptions { model: &common.model, to, out };
    options.check()?;
    if let Some(misfit) = options.misfit()? {
        eprintln!("{}", warning(&misfit));
    }
    // Reports an unreadable text before quantizing anything.
    let before = text.map(|text| measured(&common.model, text)).transpose()?;
    let bar = progress_bar(0);
    let draft = Draft::write(&options, &mut |written| {
        bar.set_length(written.of);
        bar.set_position(written.bytes);
        bar.set_message(format!("{} of {} bytes", grouped(written.bytes), grouped(written.of)));
    })?;
    bar.finish_and_clear();
    let on_text = match text.zip(before) {
        Some((text, before)) => Some(Comparison::new(text, common.limit, before, measured(draft.folder(), text)?)),
        None => None,
    };
    Ok(draft.finish(on_text)?)
}

/// Returns a warning about a type whose blocks do not fit all matrices, and suggests a smaller type if there is one.
fn warning(misfit: &Misfit) -> String {
    let Misfit { to, matrices, bytes, smaller } = misfit;
    let matrices: Vec<String> =
        matrices.iter().map(|(name, columns)| format!("{name} (rows of {})", grouped(*columns as u64))).collect();
    let block = to.block().0;
    let suggestion = smaller.map_or_else(String::new, |(kind, smaller)| {
        format!("; --to {kind} fits more of them and takes {} bytes", grouped(smaller))
    });
    format!(
        "warning: {to} needs rows of a multiple of {block} numbers, so these become f16: {}; all matrices take {} bytes{suggestion}",
        matrices.join(", "),
        grouped(*bytes)
    )
}

/// Runs `work` with a progress bar on stderr that counts tokens up to the limit, or else bytes of the file.
fn with_bar<T>(text: &Path, limit: Option<u64>, work: impl FnOnce(&mut dyn FnMut(Progress)) -> T) -> T {
    // `work` reports an unreadable file.
    let length = limit.or_else(|| std::fs::metadata(text).ok().map(|m| m.len())).unwrap_or(0);
    let bar = progress_bar(length);
    let start = Instant::now();
    let result = work(&mut |p| {
        bar.set_position(if limit.is_some() { p.tokens } else { p.bytes_read });
        let speed = p.tokens as f64 / start.elapsed().as_secs_f64();
        let nats = p.nats / p.tokens.max(1) as f64;
        bar.set_message(format!("{} tokens, {speed:.0} tokens/s, {nats:.4} nats", grouped(p.tokens)));
    });
    bar.finish_and_clear();
    result
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

/// Formats a half-life with about three digits.
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

fn sigma(head: &Head, of: fn(&Sigma) -> f32) -> String {
    head.sigma.as_ref().map_or_else(|| "-".into(), |s| format!("{:.3}", of(s)))
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
    if let Some(source) = report.source {
        totals.row(["of them for the source".into(), grouped(source.state_bytes as u64)]);
        totals.row(["layers of the encoder".into(), source.encoder_layers.to_string()]);
        totals.row(["most tokens of a source".into(), grouped(source.max_tokens as u64)]);
    }

    let mut repacked = Table::new(["repacked", "to", "tensors", "relative error at most"]);
    for kind in &report.repacked {
        repacked.row([
            kind.from.clone(),
            kind.to.clone(),
            kind.tensors.to_string(),
            percent(Some(kind.relative_error)),
        ]);
    }
    let repacked = if report.repacked.is_empty() { String::new() } else { format!("{repacked}\n") };

    let mut heads = Table::new(["layer.head", "sigma min", "mean", "max", "half-life (bias)", "on text", "clamped"]);
    for h in &report.heads {
        heads.row([
            format!("{}.{}", h.layer, h.head),
            sigma(h, |s| s.min),
            sigma(h, |s| s.mean),
            sigma(h, |s| s.max),
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
    format!("{groups}\n{totals}\n{repacked}{heads}{on_text}")
}

fn quantize_tables(report: &QuantizeReport) -> String {
    let mut groups = Table::new(["group", "tensors", "bytes before", "bytes after"]);
    for g in &report.groups {
        groups.row([g.name.into(), g.tensors.to_string(), grouped(g.before), grouped(g.after)]);
    }
    let sum = |f: fn(&tidegate_weights::quantize::GroupBytes) -> u64| grouped(report.groups.iter().map(f).sum());
    groups.row(["all".into(), sum(|g| g.tensors), sum(|g| g.before), sum(|g| g.after)]);

    let mut matrices = Table::new(["matrices", "tensors", "columns", "stored as", "relative error"]);
    for m in &report.matrices {
        let error = format!("{:.3} %", 100.0 * m.relative_error);
        matrices.row([
            m.name.clone(),
            m.tensors.to_string(),
            grouped(m.columns as u64),
            m.stored_as.to_string(),
            error,
        ]);
    }
    let mut rest = String::new();
    let block = report.to.block().0;
    for m in report.in_f16() {
        let _ = writeln!(rest, "{}: f16, since rows of {} values are not a multiple of {block}", m.name, m.columns);
    }
    if let Some(seen) = &report.on_text {
        let heading = format!("{} tokens of {}", grouped(seen.before.tokens), seen.text);
        let mut table = Table::new([&heading, "before", "after", "difference"]);
        let mut row = |name: &str, before: f64, after: f64, difference: f64| {
            table.row([name.into(), format!("{before:.5}"), format!("{after:.5}"), format!("{difference:+.5}")]);
        };
        let (before, after) = (&seen.before, &seen.after);
        row("nats per token", before.nats, after.nats, after.nats - before.nats);
        row("perplexity", before.perplexity, after.perplexity, seen.perplexity_difference);
        row("bits per byte", before.bits_per_byte, after.bits_per_byte, seen.bits_per_byte_difference);
        let _ = write!(rest, "\n{table}");
    }
    format!("{groups}\n{matrices}{rest}")
}
