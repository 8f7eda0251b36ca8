//! Pictures and tables of the experiments in a folder: reads their JSON files, and writes an SVG for each and one
//! `REPORT.md` with all tables, each with its command, machine and date.
//!
//! `language`, `approximation`, `denominators`, `listops`, `cost`, `translation` and `translation_cost` know what one
//! experiment's rows mean, `curves` what training curves are; `svg` and `scale` how pictures are drawn. Nothing here
//! measures.

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

/// What one file becomes.
struct Section {
    title: String,
    picture: Picture,
    /// Markdown: tables and what must be said beside them.
    text: String,
}

/// Why no report was written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file cannot be read, written, or understood.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// There is nothing to report on.
    #[error(
        "{0}: holds no experiment: language-*.json, approximation.json, denominators.json, listops.json, cost.json, \
         translation.json, translation-cost.json"
    )]
    Nothing(PathBuf),
}

/// Reads what is there of the experiments in `folder`, and writes its pictures and `REPORT.md` into it.
///
/// -> the files written
///
/// # Errors
/// When there is nothing to report on, a file is malformed, or the file system refuses.
pub fn report(folder: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let mut written = Vec::new();
    let mut text = "# Measurements\n\nWritten by `tidegate-experiments report` from the JSON files beside it.\n".to_owned();
    for name in experiments(folder)? {
        let path = folder.join(format!("{name}.json"));
        let (section, said) = match name.as_str() {
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
        // A string takes everything: no write to it fails.
        let _ = write!(text, "\n## {0}\n\n![{0}]({name}.svg)\n\n{1}\n{said}", section.title, section.text);
    }
    if written.is_empty() {
        return Err(ReportError::Nothing(folder.into()));
    }
    let path = folder.join("REPORT.md");
    std::fs::write(&path, text).map_err(RecordError::file(&path))?;
    written.push(path);
    Ok(written)
}

/// The names of the experiments' files that are there, without `.json`: language models first, then in a fixed order.
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
        _ => None, // another's file, which is let be
    };
    let mut found: Vec<(u8, String)> = names.into_iter().filter_map(|name| Some((rank(&name)?, name))).collect();
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// Reads one file; `what` says what its rows mean, and is given the path for its complaints.
fn section<R: DeserializeOwned + serde::Serialize>(
    path: &Path,
    experiment: &str,
    what: impl FnOnce(&Path, &Record<R>) -> Result<Section, RecordError>,
) -> Result<(Section, String), RecordError> {
    let record = Record::read(path, experiment)?;
    Ok((what(path, &record)?, origin(&record)))
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

/// A table of markdown, the first column left-aligned and the others right.
fn table(headings: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule: Vec<String> = (0..headings.len()).map(|i| if i == 0 { "---" } else { "---:" }.into()).collect();
    line(headings) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

/// Refuses a mixer that is there twice, or has no seeds. rows: each one's name, and how many seeds it has
fn each_once<'a>(path: &Path, rows: impl Iterator<Item = (&'a str, usize)>) -> Result<(), RecordError> {
    let mut names = Vec::new();
    for (at, (mixer, seeds)) in rows.enumerate() {
        if names.contains(&mixer) {
            return Err(RecordError::malformed(path, format!("rows[{at}].mixer"), format!("{mixer} is there twice")));
        }
        if seeds == 0 {
            return Err(RecordError::malformed(path, format!("rows[{at}].seeds"), "must not be empty"));
        }
        names.push(mixer);
    }
    Ok(())
}

/// Numbers that a measurement must be.
fn checked(path: &Path, field: &str, value: f64, allowed: impl Fn(f64) -> bool) -> Result<f64, RecordError> {
    if value.is_finite() && allowed(value) {
        Ok(value)
    } else {
        Err(RecordError::malformed(path, field, format!("{value} cannot have been measured")))
    }
}

/// What is told apart is told apart by the same colour in every picture.
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

/// The mean, the least and the most; of nothing, none.
fn spread(values: &[f64]) -> Option<(f64, f64, f64)> {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (!values.is_empty()).then(|| (values.iter().sum::<f64>() / values.len() as f64, low, high))
}

/// `1.780 (1.771 to 1.790)`; of one value, it alone.
fn with_spread(values: &[f64], places: usize) -> String {
    match spread(values) {
        None => "-".into(),
        Some((mean, ..)) if values.len() == 1 => format!("{mean:.places$}"),
        Some((mean, low, high)) => format!("{mean:.places$} ({low:.places$} to {high:.places$})"),
    }
}
