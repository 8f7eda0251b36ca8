//! The file of an experiment: what was run, on which machine and when, its settings, and a row for each thing measured.
//! One shape for all experiments, whoever writes them; `report` reads it back.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An experiment's file.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Record<R> {
    /// What was measured: `approximation`, `language`, ...
    pub experiment: String,
    /// The command line that measures it again.
    pub command: String,
    /// What it ran on.
    pub machine: String,
    /// YYYY-MM-DD.
    pub date: String,
    /// All that the rows have in common.
    pub settings: Map<String, Value>,
    /// What was measured.
    pub rows: Vec<R>,
}

/// Why a file of an experiment cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file system refused.
    #[error("{path}: {source}")]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No such JSON, or not this experiment's shape.
    #[error("{path}: {field}: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field, as `rows[3].error`.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl RecordError {
    /// A field that says something impossible.
    pub fn malformed(path: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.into(), field: field.into(), problem: problem.into() }
    }

    /// A refusal of the file system.
    pub fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::File { path: path.into(), source }
    }
}

impl<R: Serialize> Record<R> {
    /// A record of now, on this machine, by this command line.
    pub fn of_now(experiment: &str, command: &[String], settings: Map<String, Value>, rows: Vec<R>) -> Self {
        let date = chrono::Utc::now().format("%Y-%m-%d").to_string();
        Self { experiment: experiment.into(), command: command.join(" "), machine: machine(), date, settings, rows }
    }

    /// Writes `<experiment>.json` into a folder, which is made where it is not there.
    ///
    /// # Errors
    /// When the file system refuses.
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
    /// Reads an experiment's file.
    ///
    /// # Errors
    /// When it cannot be read, is no such record, has no rows, or is another experiment's.
    pub fn read(path: &Path, experiment: &str) -> Result<Self, RecordError> {
        let text = std::fs::read_to_string(path).map_err(RecordError::file(path))?;
        let json = &mut serde_json::Deserializer::from_str(&text);
        let record: Self = serde_path_to_error::deserialize(json)
            .map_err(|error| RecordError::malformed(path, error.path().to_string(), error.inner().to_string()))?;
        // `language-shakespeare` is a `language`; `translation-cost` is no `translation`.
        let family = experiment == "language" && record.experiment.starts_with("language-");
        if record.experiment != experiment && !family {
            let problem = format!("must be {experiment}, found {}", record.experiment);
            return Err(RecordError::malformed(path, "experiment", problem));
        }
        if record.rows.is_empty() {
            return Err(RecordError::malformed(path, "rows", "must not be empty"));
        }
        if chrono::NaiveDate::parse_from_str(&record.date, "%Y-%m-%d").is_err() {
            let problem = format!("must be a date as 2026-01-31, found {:?}", record.date);
            return Err(RecordError::malformed(path, "date", problem));
        }
        Ok(record)
    }
}

/// The processor's name and the cores that this program may use.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let name = name.unwrap_or(std::env::consts::ARCH);
    format!("{cores} {} of {}", if cores == 1 { "core" } else { "cores" }, name.trim())
}
