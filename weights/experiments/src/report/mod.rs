//! Plots and tables of the experiments in a folder: reads their JSON files, and writes an SVG for each and one
//! `REPORT.md` with all tables, each with its command, machine and date. Nothing here measures.
//!
//! Each experiment has a module that interprets its rows; `curves` is for training curves, `crate::svg` for drawing.

mod approximation;
mod cost;
mod curves;
mod denominators;
mod language;
mod listops;
mod translation;
mod translation_cost;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::record::{Record, RecordError};
use crate::svg::Picture;

/// The report on one file.
struct Section {
    title: String,
    picture: Picture,
    /// Markdown: tables and notes.
    text: String,
}

/// Why no report was written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file cannot be read, written or parsed.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The folder has no result file.
    #[error(
        "{0}: holds no experiment: language-*.json, approximation.json, denominators.json, listops.json, cost.json, \
         translation.json, translation-cost.json"
    )]
    Nothing(PathBuf),
}

/// Reads the experiments in `folder`, writes their plots and `REPORT.md` into it, and returns the paths written.
///
/// # Errors
/// [`ReportError`] if there is no experiment, a file is malformed, or one cannot be read or written.
pub fn report(folder: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let mut written = Vec::new();
    let mut text =
        "# Measurements\n\nWritten by `tidegate-experiments report` from the JSON files beside it.\n".to_owned();
    for name in experiments(folder)? {
        let path = folder.join(format!("{name}.json"));
        let (section, source) = match name.as_str() {
            "approximation" => section(&path, "approximation", approximation::section)?,
            "denominators" => section(&path, "denominators", denominators::section)?,
            "listops" => section(&path, "listops", listops::section)?,
            "cost" => section(&path, "cost", cost::section)?,
            "translation" => section(&path, "translation", translation::section)?,
            "translation-cost" => section(&path, "translation-cost", translation_cost::section)?,
            _ => section(&path, "language", language::section)?,
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
    let rank = |name: &str| match name {
        "approximation" => Some(1),
        "denominators" => Some(2),
        "listops" => Some(3),
        "cost" => Some(4),
        "translation" => Some(5),
        "translation-cost" => Some(6),
        name if name.starts_with("language-") => Some(0),
        _ => None, // not a result file
    };
    let mut found: Vec<(u8, String)> = names.into_iter().filter_map(|name| Some((rank(&name)?, name))).collect();
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// Reads one file; `interpret` makes its section, and takes the path for errors.
fn section<R: DeserializeOwned + serde::Serialize>(
    path: &Path,
    experiment: &str,
    interpret: impl FnOnce(&Path, &Record<R>) -> Result<Section, RecordError>,
) -> Result<(Section, String), RecordError> {
    let record = Record::read(path, experiment)?;
    Ok((interpret(path, &record)?, origin(&record)))
}

/// Settings, command, machine and date.
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

/// A Markdown table, the first column left-aligned and the others right-aligned.
fn table(headings: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule: Vec<String> = (0..headings.len()).map(|i| if i == 0 { "---" } else { "---:" }.into()).collect();
    line(headings) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

/// Refuses a mixer that appears twice or has no seeds. rows: each mixer's name and number of seeds
fn each_once<'a>(path: &Path, rows: impl Iterator<Item = (&'a str, usize)>) -> Result<(), RecordError> {
    let mut names = Vec::new();
    for (at, (mixer, seeds)) in rows.enumerate() {
        if names.contains(&mixer) {
            return Err(RecordError::malformed(path, format!("rows[{at}].mixer"), format!("{mixer} appears twice")));
        }
        if seeds == 0 {
            return Err(RecordError::malformed(path, format!("rows[{at}].seeds"), "must not be empty"));
        }
        names.push(mixer);
    }
    Ok(())
}

/// Returns `value` if it is finite and allowed.
fn checked(path: &Path, field: &str, value: f64, allowed: impl Fn(f64) -> bool) -> Result<f64, RecordError> {
    if value.is_finite() && allowed(value) {
        Ok(value)
    } else {
        Err(RecordError::malformed(path, field, format!("{value} cannot have been measured")))
    }
}

/// A mixer or estimator has the same colour in every plot.
fn color(name: &str) -> &'static str {
    match name {
        "softmax" => "#24292f",
        "rfa-gate" => "#0969da",
        "rfa-gate-stateful" | "lara" => "#cf222e",
        "hybrid" | "ra" => "#8250df",
        "rfa" => "#4a9bd9",
        "rfa-gate-no-positions" => "#1b7c83",
        "rfa-arccos" => "#d4a72c",
        "rfa-arccos-gate" => "#9a6700",
        "elu" => "#e08855",
        "elu-gate" => "#bc4c00",
        "favor" => "#4ac26b",
        "favor-gate" => "#1a7f37",
        "lara-balance" => "#bf3989",
        _ => "#57606a",
    }
}

/// The mean, the least and the greatest value; none of an empty slice.
fn spread(values: &[f64]) -> Option<(f64, f64, f64)> {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (!values.is_empty()).then(|| (values.iter().sum::<f64>() / values.len() as f64, low, high))
}

/// The mean; none of an empty slice.
fn mean(values: &[f64]) -> Option<f64> {
    spread(values).map(|(mean, ..)| mean)
}

/// `1.780 (1.771 to 1.790)`, or the value itself if there is one.
fn with_spread(values: &[f64], places: usize) -> String {
    match spread(values) {
        None => "-".into(),
        Some((mean, ..)) if values.len() == 1 => format!("{mean:.places$}"),
        Some((mean, low, high)) => format!("{mean:.places$} ({low:.places$} to {high:.places$})"),
    }
}
