//! The command line `tidegate-experiments`: arguments, progress bars, and the files that each command writes.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Parser};
use serde_json::{Map, Value, json};
use tidegate_experiments::approximation::inputs::{Shape, Source, descriptions};
use tidegate_experiments::approximation::{self, Options};
use tidegate_experiments::record::Record;
use tidegate_experiments::report::report;
use tidegate_experiments::{cost, denominators, plot, translation_cost};
use tidegate_model::Threads;
use tidegate_weights::terminal::progress_bar;

/// Measures estimators of attention and the cost of mixers, and reports on all experiments.
#[derive(Debug, Parser)]
#[command(name = "tidegate-experiments", version)]
enum Command {
    /// Measures random estimates of softmax attention (RFA, FAVOR+, LARA, RA) against samples; writes approximation.json.
    Approximation(Approximation),
    /// Counts clamped denominators by sigma and number of random vectors; writes denominators.json.
    Denominators {
        /// The folder to write into.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Measures an encoder-decoder's decode speed by source length, with random features and with softmax attention,
    /// random weights; writes translation-cost.json.
    TranslationCost(TranslationCost),
    /// Turns the output of `tidegate bench --output json` into cost.json.
    Cost {
        /// Files that bench wrote, with one shape, one weight type and one number of threads.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// The folder to write into.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Prints an SVG of tokens per second from the output of `tidegate bench --output json`.
    PlotBench {
        /// Files that bench wrote.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Prints an SVG of the time to a turn's first token from the output of the benchmark `resume`.
    PlotResume {
        /// The file named by the benchmark's `--out`.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Writes plots (SVG) and tables (REPORT.md) of all experiments in a folder.
    Report {
        /// The folder with the experiments' JSON files.
        #[arg(long, value_name = "FOLDER", default_value = "weights/experiments/reports")]
        dir: PathBuf,
    },
}

#[derive(Args, Debug)]
struct Approximation {
    /// Queries, keys and values of a trained model: tensors q, k and v, (cases, heads, tokens, d).
    #[arg(long, value_name = "FILE")]
    qkv: Option<PathBuf>,
    /// The folder to write into.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Numbers of random vectors, landmarks, or samples per query.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256")]
    samples: Vec<usize>,
    /// Seeds; each is measured at every number of samples.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
}

#[derive(Args, Debug)]
struct TranslationCost {
    /// The folder to write into.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Source lengths.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "16,64,256,1024,4096")]
    lengths: Vec<usize>,
    /// Sources translated together.
    #[arg(long, value_name = "ROWS", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Tokens per row in one measurement.
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    tokens: u16,
    /// Repetitions of each measurement.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

/// Runs the command; prints the paths of the files written, or a plot.
fn main() -> Result<()> {
    let written = match Command::parse() {
        Command::Approximation(arguments) => vec![arguments.run()?],
        Command::Denominators { out } => vec![count_denominators(&out)?],
        Command::TranslationCost(arguments) => vec![arguments.run()?],
        Command::Cost { files, out } => vec![cost::gather(&files, &command().join(" "), named)?.write(&out)?],
        Command::PlotBench { files } => {
            print!("{}", plot::throughput(&files)?);
            Vec::new()
        }
        Command::PlotResume { file } => {
            print!("{}", plot::turns(&file)?);
            Vec::new()
        }
        Command::Report { dir } => report(&dir)?,
    };
    for path in written {
        println!("{}", path.display());
    }
    Ok(())
}

/// The command line, without paths that only exist on this machine.
fn command() -> Vec<String> {
    let words = std::env::args().skip(1).map(|word| match word.split_once('=') {
        Some((option, value)) => format!("{option}={}", named(Path::new(value))),
        None => named(Path::new(&word)),
    });
    std::iter::once("tidegate-experiments".into()).chain(words).collect()
}

/// Returns a path relative to the current folder, or for an absolute path elsewhere, its last component.
fn named(path: &Path) -> String {
    let here = std::env::current_dir().ok();
    let inside = here.and_then(|here| path.strip_prefix(here).ok()).filter(|path| !path.as_os_str().is_empty());
    let own = || if path.is_absolute() { path.file_name().map(Path::new) } else { None };
    inside.or_else(own).unwrap_or(path).display().to_string()
}

fn settings(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

impl Approximation {
    fn run(self) -> Result<PathBuf> {
        let Self { qkv, out, samples, seeds, tokens } = self;
        let shape = Shape { cases: 4, heads: 2, tokens: tokens as usize, d: 32 };
        let mut sources = vec![Source::Correlated, Source::Independent];
        if let Some(path) = qkv {
            sources.insert(0, Source::Model(path));
        }
        let options = Options { samples, seeds };
        // Reports an unreadable file before anything is measured.
        let inputs = sources.iter().map(|source| source.load(shape)).collect::<Result<Vec<_>, _>>()?;
        let bar = progress_bar(approximation::steps(&options) * sources.len() as u64);
        let mut common = settings(json!({
            "error": "Mean over all outputs of (estimate - softmax attention)^2, not normalized by the size of the \
                      outputs.",
            "spread": format!("error_low and error_high are the lowest and highest error of {seeds} seeds."),
            "tokens": tokens,
            "rfa": "Sine and cosine features of q and k, both scaled by d^(-1/4). Keys are weighted by exp(|k|^2 / 2). \
                    Denominators have a floor of 0.02 times the total weight of the keys, and most of the error comes \
                    from denominators at that floor.",
            "favor": "Positive features from orthogonal random vectors, whose norms follow the chi distribution with d \
                      degrees of freedom.",
            "lara": "Query-specific weights, and as many landmarks as samples. lara-balance uses the weights of the \
                     balance heuristic alone.",
            "lara_means": "Like lara, but each sample is the mean of its proposal distribution, as in evaluation with \
                           the PyTorch code. Nothing is random.",
            "landmarks": "Each landmark pairs the mean of a segment of queries with the mean of the corresponding \
                          segment of keys. With -tokens, the middle token of each segment replaces the mean. With \
                          -crossed, every segment of queries is paired with every segment of keys, so the number of \
                          segments of each is about the square root of the number of landmarks.",
            "ra": "All numbers of samples use the same draw: a smaller number uses its first samples.",
        }));
        for (name, text) in descriptions() {
            common.insert(name.into(), text.into());
        }
        let mut rows = Vec::new();
        for (source, inputs) in sources.iter().zip(&inputs) {
            bar.set_message(source.name());
            common.insert(format!("{}_shape", source.name()), json!(inputs.q().dims()));
            rows.extend(approximation::measure(source.name(), inputs, &options, &mut || bar.inc(1))?);
        }
        bar.finish_and_clear();
        Ok(Record::of_now("approximation", &command(), common, rows).write(&out)?)
    }
}

impl TranslationCost {
    fn run(self) -> Result<PathBuf> {
        let Self { out, lengths, batch, tokens, rounds } = self;
        let (batch, tokens, rounds) = (batch.into(), tokens.into(), rounds.into());
        let options = translation_cost::Options { lengths, batch, tokens, rounds, ..Default::default() };
        let bar = progress_bar(translation_cost::steps(&options));
        let mut started = 0;
        let rows = translation_cost::measure(&options, &mut |what| {
            bar.set_position(started);
            bar.set_message(what.to_owned());
            started += 1;
        })?;
        bar.finish_and_clear();
        let shape = &options.shape;
        let parameters = |mixer| translation_cost::config(mixer, &options).map(|config| config.parameters());
        let common = settings(json!({
            "tokens_per_second": "The total of all rows, for decode steps only: the median over the rounds. low and \
                                  high are the lowest and highest round.",
            "shape": format!(
                "{0} encoder and {0} decoder layers, hidden size {1}, SwiGLU size {2}, {3} heads of size {4} with {4} \
                 random vectors each, vocabulary of {5} tokens",
                shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.head_dim, shape.vocabulary
            ),
            "weights": format!("random, {}", shape.weights),
            "state": "f32",
            "parameters": { "rfa-gate": parameters("rfa-gate")?, "softmax": parameters("softmax")? },
            "target": format!("{tokens} timed tokens per row, after two untimed ones"),
            "threads": Threads::global().count(),
            "rounds": format!(
                "{rounds}, with the mixers measured in turn at every length. over_softmax is the median over the \
                 rounds of the ratio within a round."
            ),
            "state_bytes": format!(
                "Softmax reserves room for a source of {} tokens, but a step reads only the filled part.",
                options.lengths.iter().max().unwrap_or(&0)
            ),
            "read_ms": "The time to run one source through the encoder and to compute the state that cross-attention \
                        keeps of it.",
        }));
        Ok(Record::of_now("translation-cost", &command(), common, rows).write(&out)?)
    }
}

fn count_denominators(out: &Path) -> Result<PathBuf> {
    let options = denominators::Options::default();
    let bar = progress_bar((options.sigmas.len() * options.proj_dims.len()) as u64);
    let rows = denominators::count(&options, &mut || bar.inc(1))?;
    bar.finish_and_clear();
    let common = settings(json!({
        "clamped": format!("denominator <= {} c", options.eps),
        "queries_and_keys": "random unit vectors, Gaussian feature map",
        "head_dim": options.head_dim,
        "denominators": options.heads * options.tokens,
        "heads": options.heads,
        "tokens": options.tokens,
    }));
    Ok(Record::of_now("denominators", &command(), common, rows).write(out)?)
}
