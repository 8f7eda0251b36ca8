//! The result file of an experiment: its command, machine, date and settings, and one row per measurement. All
//! experiments, in Rust and in Python, write this format, and `report` reads it.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The result file of an experiment.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Record<R> {
    /// The name of the experiment: `approximation`, `language`, ...
    pub experiment: String,
    /// The command line that reproduces it.
    pub command: String,
    /// The processor.
    pub machine: String,
    /// YYYY-MM-DD.
    pub date: String,
    /// What all rows have in common.
    pub settings: Map<String, Value>,
    /// The measurements.
    pub rows: Vec<R>,
}

/// Why a result file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A file system error.
    #[error("{path}: {source}")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The JSON is invalid or has the wrong fields.
    #[error("{path}: {field}: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field, such as `rows[3].error`.
        field: String,
        /// What is wrong with the field.
        problem: String,
    },
}

impl RecordError {
    /// Makes an error about a field.
    pub fn malformed(path: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.into(), field: field.into(), problem: problem.into() }
    }

    /// Turns a file system error into one that names the path.
    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::File { path: path.into(), source }
    }
}

impl<R: Serialize> Record<R> {
    /// Creates a record with today's date and this machine.
    pub fn of_now(experiment: &str, command: &[String], settings: Map<String, Value>, rows: Vec<R>) -> Self {
        let date = chrono::Utc::now().format("%Y-%m-%d").to_string();
        Self { experiment: experiment.into(), command: command.join(" "), machine: machine(), date, settings, rows }
    }

    /// Writes `<experiment>.json` into a folder, creating it if needed. Returns the file's path.
    ///
    /// # Errors
    /// [`RecordError::File`] if the file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, RecordError> {
        std::fs::create_dir_all(folder).map_err(RecordError::file(folder))?;
        let path = folder.join(format!("{}.json", self.experiment));
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| RecordError::malformed(&path, "the record", error.to_string()))?;
        std::fs::write(&path, text + "\n").map_err(RecordError::file(&path))?;
        Ok(path)
    }
}

impl<R: DeserializeOwned> Record<R> {
    /// Reads a result file.
    ///
    /// # Errors
    /// [`RecordError`] if the file cannot be read, is malformed, has no rows, or belongs to another experiment.
    pub fn read(path: &Path, experiment: &str) -> Result<Self, RecordError> {
        let text = std::fs::read_to_string(path).map_err(RecordError::file(path))?;
        let json = &mut serde_json::Deserializer::from_str(&text);
        let record: Self = serde_path_to_error::deserialize(json)
            .map_err(|error| RecordError::malformed(path, error.path().to_string(), error.inner().to_string()))?;
        // `language-shakespeare` is a `language`, but `translation-cost` is not a `translation`.
        let family = experiment == "language" && record.experiment.starts_with("language-");
        if record.experiment != experiment && !family {
            let problem = format!("must be {experiment}, found {}", record.experiment);
            return Err(RecordError::malformed(path, "experiment", problem));
        }
        if record.rows.is_empty() {
            return Err(RecordError::malformed(path, "rows", "must not be empty"));
        }
        if chrono::NaiveDate::parse_from_str(&record.date, "%Y-%m-%d").is_err() {
            let problem = format!("must be a date such as 2026-01-31, found {:?}", record.date);
            return Err(RecordError::malformed(path, "date", problem));
        }
        Ok(record)
    }
}

/// The processor's name and the number of cores this process may use.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let name = name.unwrap_or(std::env::consts::ARCH);
    format!("{cores} {} of {}", if cores == 1 { "core" } else { "cores" }, name.trim())
}
