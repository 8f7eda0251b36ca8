//! Plots and tables of the experiments in a folder: reads their JSON files, and writes an SVG for each and one
//! `REPORT.md` with all tables, each with its command, machine and date. Nothing here measures.
//!
//! Each experiment has a module that interprets its rows; `curves` is for training curves, `crate::svg` for drawing.

mod approximation;
mod classification;
mod cost;
mod curves;
mod denominators;
mod language;
mod recipe;
mod section;
mod translation;
mod translation_cost;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::record::{Record, RecordError};
use section::Section;

const HEAD: &str = "# Measurements

`tidegate-experiments report` writes this file from the JSON files beside it. `docs/experiments.md` explains the
results, and `docs/papers.md` compares them with published ones.
";

/// The experiments other than those on language models, in report order.
const OTHERS: [&str; 8] =
    ["recipe", "approximation", "denominators", "listops", "passages", "cost", "translation", "translation-cost"];

/// Why a report could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file cannot be read, written or parsed.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The folder has no result file.
    #[error("{0}: holds no experiment: language-*.json, {names}.json", names = OTHERS.join(".json, "))]
    Nothing(PathBuf),
}

/// Reads the experiments in `folder`, writes their plots and `REPORT.md` into it, and returns the paths written.
///
/// # Errors
/// [`ReportError`] if there is no experiment, a file is malformed, or one cannot be read or written.
pub fn report(folder: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let mut written = Vec::new();
    let mut text = HEAD.to_owned();
    for name in experiments(folder)? {
        let path = folder.join(format!("{name}.json"));
        let (section, source) = match name.as_str() {
            "approximation" => section(&path, "approximation", approximation::section)?,
            "recipe" => section(&path, "recipe", recipe::section)?,
            "denominators" => section(&path, "denominators", denominators::section)?,
            "cost" => section(&path, "cost", cost::section)?,
            "translation" => section(&path, "translation", translation::section)?,
            "translation-cost" => section(&path, "translation-cost", translation_cost::section)?,
            other => match classification::TASKS.iter().find(|task| task.name == other) {
                Some(task) => section(&path, task.name, |path, record| classification::section(task, path, record))?,
                None => section(&path, "language", language::section)?,
            },
        };
        let picture = folder.join(format!("{name}.svg"));
        std::fs::write(&picture, section.picture.svg()).map_err(RecordError::file(&picture))?;
        written.push(picture);
        let _ = write!(text, "\n## {0}\n\n![{0}]({name}.svg)\n\n{1}\n{source}", section.title, section.text);
    }
    if written.is_empty() {
        return Err(ReportError::Nothing(folder.into()));
    }
    let path = folder.join("REPORT.md");
    std::fs::write(&path, text).map_err(RecordError::file(&path))?;
    written.push(path);
    Ok(written)
}

/// The names of the result files, without `.json`: language models first, then in a fixed order.
fn experiments(folder: &Path) -> Result<Vec<String>, RecordError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(RecordError::file(folder))? {
        let name = entry.map_err(RecordError::file(folder))?.file_name().to_string_lossy().into_owned();
        names.extend(name.strip_suffix(".json").map(String::from));
    }
    // `None` means that it is not a result file.
    let rank = |name: &str| {
        let other = || OTHERS.iter().position(|other| *other == name);
        if name.starts_with("language-") { Some(0) } else { Some(1 + other()?) }
    };
    let mut found: Vec<(usize, String)> = names.into_iter().filter_map(|name| Some((rank(&name)?, name))).collect();
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// Reads one file. `interpret` makes its section, and takes the path for use in errors.
fn section<R: DeserializeOwned + serde::Serialize>(
    path: &Path,
    experiment: &str,
    interpret: impl FnOnce(&Path, &Record<R>) -> Result<Section, RecordError>,
) -> Result<(Section, String), RecordError> {
    let record = Record::read(path, experiment)?;
    Ok((interpret(path, &record)?, origin(&record)))
}

/// The settings, command, machine and date of a record.
fn origin<R>(record: &Record<R>) -> String {
    let value = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string().replace(',', ", "),
    };
    let settings: Vec<String> = record
        .settings
        .iter()
        .map(|(key, setting)| format!("- {}: {}", key.replace('_', " "), value(setting)))
        .collect();
    let settings = if settings.is_empty() { String::new() } else { settings.join("\n") + "\n\n" };
    format!("{settings}`{}`, on {}, {}.\n", record.command, record.machine, record.date)
}
