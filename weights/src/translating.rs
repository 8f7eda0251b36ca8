//! The command `translate`: its arguments, input, output and statistics.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Args;
use tidegate_model::Device;
use tidegate_weights::eval::Checkpoint;
use tidegate_weights::terminal::{Table, grouped, progress_bar};
use tidegate_weights::translate::{Sources, TranslateOptions, TranslationStats, translate};

#[derive(Args, Debug)]
pub(crate) struct Translate {
    /// Checkpoint folder of an encoder-decoder: config.json, model.safetensors (or model.gguf), tokenizer.json.
    #[arg(long, value_name = "FOLDER", env = "TIDEGATE_MODEL")]
    model: PathBuf,
    /// UTF-8 text with one source per line; - is stdin.
    #[arg(long, value_name = "FILE", default_value = "-")]
    source: PathBuf,
    /// The output file; stdout if absent.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Sources translated together; does not affect the translations.
    #[arg(long, value_name = "ROWS", default_value = "16", value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Maximum tokens of a translation, including its end; longer ones are cut.
    #[arg(long, value_name = "TOKENS", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
}

impl Translate {
    /// Translates, with progress and times on stderr.
    pub(crate) fn run(self) -> Result<()> {
        let checkpoint = Checkpoint::load(&self.model, &Device::Cpu)?;
        // Checks the input before translating anything, and before overwriting a file.
        let sources = Sources::new(&checkpoint, &text(&self.source)?)?;
        let options = TranslateOptions { batch: self.batch.into(), max_tokens: self.max_tokens as usize };
        let mut out: Box<dyn Write> = match &self.out {
            None => Box::new(std::io::stdout().lock()),
            Some(path) => Box::new(BufWriter::new(File::create(path).with_context(|| path.display().to_string())?)),
        };
        let (bar, clock) = (progress_bar(sources.len() as u64), Instant::now());
        let done = translate(&checkpoint, &sources, options, &mut |line| writeln!(out, "{line}"), &mut |done| {
            bar.set_position(done.sentences);
            let speed = rate(done.tokens, clock.elapsed().as_secs_f64());
            bar.set_message(format!("{} sentences, {} tokens, {speed} tokens/s", done.sentences, grouped(done.tokens)));
        })?;
        out.flush()?;
        bar.finish_and_clear();
        eprint!("{}", times(&done, clock.elapsed().as_secs_f64()));
        Ok(())
    }
}

/// Reads a file, or stdin.
fn text(path: &Path) -> Result<String> {
    let (mut text, name) = (String::new(), path.display().to_string());
    if name == "-" {
        std::io::stdin().lock().read_to_string(&mut text).context("stdin")?;
    } else {
        File::open(path).and_then(|mut file| file.read_to_string(&mut text)).context(name)?;
    }
    Ok(text)
}

/// Formats a rate per second; `-` if no time has passed.
fn rate(count: u64, seconds: f64) -> String {
    if seconds > 0.0 { format!("{:.0}", count as f64 / seconds) } else { "-".into() }
}

fn times(done: &TranslationStats, seconds: f64) -> Table {
    let mut table = Table::new(["sentences", &grouped(done.sentences)]);
    table.row(["tokens of sources".into(), grouped(done.source_tokens)]);
    table.row(["tokens of translations".into(), grouped(done.tokens)]);
    if done.cut > 0 {
        table.row(["translations cut at --max-tokens".into(), grouped(done.cut)]);
    }
    table.row(["seconds".into(), format!("{seconds:.2}")]);
    table.row(["seconds of reading sources".into(), format!("{:.2}", done.reading.as_secs_f64())]);
    table.row(["seconds of decode steps".into(), format!("{:.2}", done.decoding.as_secs_f64())]);
    table.row(["tokens/s of decode steps".into(), rate(done.tokens, done.decoding.as_secs_f64())]);
    table.row(["tokens/s of the whole".into(), rate(done.tokens, seconds)]);
    table
}
