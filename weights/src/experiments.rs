//! The commands that measure and report: `approximation`, `denominators` and `report`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};
use tidegate_weights::approximation::inputs::{Shape, Source, described};
use tidegate_weights::approximation::{self, Options};
use tidegate_weights::denominators;
use tidegate_weights::record::Record;
use tidegate_weights::report::report;

use crate::bar;

#[derive(Debug, Subcommand)]
pub(crate) enum Experiment {
    /// Errors of random estimates of softmax attention (RFA, FAVOR+, LARA, RA) against samples; writes
    /// approximation.json.
    Approximation(Approximation),
    /// Shares of denominators that the clamp holds, by sigma and number of random vectors; writes denominators.json.
    Denominators {
        /// The folder to write into.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Pictures (SVG) and tables (REPORT.md) of all experiments in a folder.
    Report {
        /// The folder with language-*.json, approximation.json, denominators.json, listops.json, cost.json.
        #[arg(long, value_name = "FOLDER", default_value = "weights/reports")]
        dir: PathBuf,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Approximation {
    /// Queries, keys and values of a trained model: tensors q, k and v, (cases, heads, tokens, d).
    #[arg(long, value_name = "FILE")]
    qkv: Option<PathBuf>,
    /// The folder to write into.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Random vectors, landmarks, or samples of each query.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256")]
    samples: Vec<usize>,
    /// Draws of random numbers, each measured at every number of samples.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
}

impl Experiment {
    /// Runs the command; prints the files written.
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Approximation(arguments) => arguments.run(),
            Self::Denominators { out } => count(&out),
            Self::Report { dir } => {
                for path in report(&dir)? {
                    println!("{}", path.display());
                }
                Ok(())
            }
        }
    }
}

/// The command line, as one types it again.
fn command() -> Vec<String> {
    std::iter::once("tidegate-weights".into()).chain(std::env::args().skip(1)).collect()
}

fn settings(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

impl Approximation {
    fn run(self) -> Result<()> {
        let Self { qkv, out, samples, seeds, tokens } = self;
        let shape = Shape { cases: 4, heads: 2, tokens: tokens as usize, d: 32 };
        let mut sources = vec![Source::Correlated, Source::Independent];
        if let Some(path) = qkv {
            sources.insert(0, Source::Model(path));
        }
        let options = Options { samples, seeds };
        // First, so that a file that cannot be read is found before anything is measured.
        let inputs = sources.iter().map(|source| source.load(shape)).collect::<Result<Vec<_>, _>>()?;
        let bar = bar(approximation::steps(&options) * sources.len() as u64)?;
        let mut said = settings(json!({
            "error": "mean over all outputs of (estimate - softmax attention)^2; values as given, not divided by their size",
            "spread": format!("error_low and error_high: least and most of {seeds} seeds"),
            "tokens": tokens,
            "rfa": "sines and cosines of q and k times d^(-1/4), keys weighed by exp(|k|^2 / 2), denominators floored at 0.02 of the keys' weight: most of its error is where they are held there",
            "favor": "positive features, orthogonal rows with norms of chi(d)",
            "lara": "query-specific weights (lara-balance: the balance heuristic alone), as many landmarks as samples",
            "ra": "first samples of one draw serve for fewer",
        }));
        for (name, text) in described() {
            said.insert(name.into(), text.into());
        }
        let mut rows = Vec::new();
        for (source, inputs) in sources.iter().zip(&inputs) {
            bar.set_message(source.name());
            said.insert(format!("{}_shape", source.name()), json!(inputs.q().dims()));
            rows.extend(approximation::measure(source.name(), inputs, &options, &mut || bar.inc(1))?);
        }
        bar.finish_and_clear();
        let path = Record::of_now("approximation", &command(), said, rows).write(&out)?;
        println!("{}", path.display());
        Ok(())
    }
}

fn count(out: &Path) -> Result<()> {
    let options = denominators::Options::default();
    let bar = bar((options.sigmas.len() * options.proj_dims.len()) as u64)?;
    let rows = denominators::count(&options, &mut || bar.inc(1))?;
    bar.finish_and_clear();
    let said = settings(json!({
        "clamped": format!("denominator <= {} c", options.eps),
        "queries_and_keys": "random, of unit length; Gaussian map",
        "head_dim": options.head_dim,
        "denominators": options.heads * options.tokens,
        "heads": options.heads,
        "tokens": options.tokens,
    }));
    let path = Record::of_now("denominators", &command(), said, rows).write(out)?;
    println!("{}", path.display());
    Ok(())
}
