//! Reads the output of `tidegate bench --output json`: one object per line, in one or more files.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The kind of work that a model does.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Advances rows by one token, step after step.
    Decode,
    /// Reads a prompt.
    Prefill,
}

/// One measurement. Fields about the machine's limits are ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct Line {
    pub(crate) shape: String,
    pub(crate) weights: String,
    pub(crate) state: String,
    #[serde(default)]
    pub(crate) device: String,
    pub(crate) threads: Option<u64>, // none on a GPU
    pub(crate) mixer: String,
    pub(crate) kind: Phase,
    pub(crate) batch: u64,
    pub(crate) depth: u64,
    pub(crate) past: String,
    pub(crate) tokens: u64, // of one measurement, of all rows together
    pub(crate) tokens_per_second: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    pub(crate) rounds: u64,
    pub(crate) state_bytes: u64,
    // `bench` does not write these yet.
    pub(crate) command: Option<String>,
    pub(crate) machine: Option<String>,
    pub(crate) date: Option<String>,
}

impl Line {
    /// The processor that computed: `1 thread`, `2 threads`, or the device.
    pub(crate) fn processor(&self) -> String {
        match self.threads {
            Some(1) => "1 thread".into(),
            Some(threads) => format!("{threads} threads"),
            None => self.device.clone(),
        }
    }

    fn check(&self) -> Result<(), String> {
        let Self { tokens_per_second, least, most, batch, tokens, .. } = *self;
        if !(least > 0.0 && least <= tokens_per_second && tokens_per_second <= most && most.is_finite()) {
            return Err(format!(
                "least, tokens_per_second and most must rise from above 0, found {least}, {tokens_per_second}, {most}"
            ));
        }
        if batch == 0 || tokens == 0 || !tokens.is_multiple_of(batch) {
            return Err(format!("tokens must be steps of batch rows, found {tokens} and {batch}"));
        }
        Ok(())
    }
}

/// Why measurements cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A line is malformed or does not fit the others.
    #[error("{path}:{line}: {problem}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The field and what it must be.
        problem: String,
    },
    /// A file has no lines.
    #[error("{0}: holds no line of tidegate bench --output json")]
    Empty(PathBuf),
}

/// Reads the lines of one file, at least one. `accept` rejects lines that do not fit.
///
/// # Errors
/// [`BenchError`] with the file and the line.
pub fn read(path: &Path, mut accept: impl FnMut(&Line) -> Result<(), String>) -> Result<Vec<Line>, BenchError> {
    let text = std::fs::read_to_string(path).map_err(|source| BenchError::File { path: path.into(), source })?;
    let mut lines = Vec::new();
    for (at, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let wrong = |problem| BenchError::Line { path: path.into(), line: at + 1, problem };
        let line = parse(text).map_err(wrong)?;
        accept(&line).map_err(wrong)?;
        lines.push(line);
    }
    if lines.is_empty() { Err(BenchError::Empty(path.into())) } else { Ok(lines) }
}

fn parse(text: &str) -> Result<Line, String> {
    let json = &mut serde_json::Deserializer::from_str(text);
    let line: Line =
        serde_path_to_error::deserialize(&mut *json).map_err(|error| match error.path().to_string().as_str() {
            "." => format!("no line of tidegate bench --output json: {}", error.inner()),
            path => format!("{path}: {}", error.inner()),
        })?;
    json.end().map_err(|error| error.to_string())?;
    line.check()?;
    Ok(line)
}
