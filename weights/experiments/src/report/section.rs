//! What the reports of all experiments share: checks of rows, tables, colors and statistics.

use std::path::Path;

use crate::record::RecordError;
use crate::svg::Picture;

/// The report section for one file.
pub(super) struct Section {
    pub(super) title: String,
    pub(super) picture: Picture,
    /// Markdown: tables and notes.
    pub(super) text: String,
}

/// Makes a Markdown table. The first column is left-aligned, the others right-aligned.
pub(super) fn table(headings: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule: Vec<String> = (0..headings.len()).map(|i| if i == 0 { "---" } else { "---:" }.into()).collect();
    line(headings) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

/// How far one row is above another, for each seed that both have. ours and theirs: (seed, value) pairs
pub(super) fn above(ours: &[(u64, f64)], theirs: &[(u64, f64)]) -> Vec<f64> {
    let pair = |(seed, value): &(u64, f64)| Some(value - theirs.iter().find(|same| same.0 == *seed)?.1);
    ours.iter().filter_map(pair).collect()
}

/// Rejects a mixer or variant that appears twice or has no seeds. key: the name's key in a row; rows: the name and
/// number of seeds of each row
pub(super) fn each_once<'a>(
    path: &Path,
    key: &str,
    rows: impl Iterator<Item = (&'a str, usize)>,
) -> Result<(), RecordError> {
    let mut names = Vec::new();
    for (at, (name, seeds)) in rows.enumerate() {
        if names.contains(&name) {
            return Err(RecordError::malformed(path, format!("rows[{at}].{key}"), format!("{name} appears twice")));
        }
        if seeds == 0 {
            return Err(RecordError::malformed(path, format!("rows[{at}].seeds"), "must not be empty"));
        }
        names.push(name);
    }
    Ok(())
}

/// Returns `value` if it is finite and allowed.
pub(super) fn checked(path: &Path, field: &str, value: f64, allowed: impl Fn(f64) -> bool) -> Result<f64, RecordError> {
    if value.is_finite() && allowed(value) {
        Ok(value)
    } else {
        Err(RecordError::malformed(path, field, format!("{value} cannot have been measured")))
    }
}

/// The color of a mixer or estimator, the same in every plot.
pub(super) fn color(name: &str) -> &'static str {
    match name {
        "softmax" => "#24292f",
        "softmax-stateful" => "#8c959f",
        "rfa-gate" => "#0969da",
        "rfa-gate-stateful" | "lara" => "#cf222e",
        "hybrid" | "ra" | "rfa-gate-cross-512" => "#8250df",
        "rfa" => "#4a9bd9",
        "rfa-gate-no-positions" => "#1b7c83",
        "rfa-gate-pool" | "rfa-gate-sigma-2.5" => "#54aeff",
        "rfa-gate-d-16" => "#80ccff",
        "rfa-gate-d-16-stateful" => "#ff8182",
        "rfa-gate-d-256-stateful" | "rfa-gate-sigma-2.5-d-256" => "#82071e",
        "rfa-gate-fixed-sigma" => "#0550ae",
        "rfa-arccos" => "#d4a72c",
        "rfa-arccos-gate" => "#9a6700",
        "elu" => "#e08855",
        "elu-gate" => "#bc4c00",
        "elu-gate-stateful" | "lara-means" => "#e16f24",
        "favor" => "#4ac26b",
        "favor-gate" => "#1a7f37",
        "lara-balance" => "#bf3989",
        "lara-crossed" => "#0a3069",
        "lara-means-tokens" => "#7d4e00",
        "lara-means-crossed" | "rfa-gate-cross-512-conv" => "#116329",
        _ => "#57606a",
    }
}

/// The mean, lowest and highest value; `None` for an empty slice.
pub(super) fn spread(values: &[f64]) -> Option<(f64, f64, f64)> {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (!values.is_empty()).then(|| (values.iter().sum::<f64>() / values.len() as f64, low, high))
}

/// The mean; `None` for an empty slice.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    spread(values).map(|(mean, ..)| mean)
}

/// Formats `1.780 (1.771 to 1.790)`, or a single value by itself.
pub(super) fn with_spread(values: &[f64], places: usize) -> String {
    match spread(values) {
        None => "-".into(),
        Some((mean, ..)) if values.len() == 1 => format!("{mean:.places$}"),
        Some((mean, low, high)) => format!("{mean:.places$} ({low:.places$} to {high:.places$})"),
    }
}

/// Formats signed differences: `-0.018 (-0.026 to -0.002)`, or a single value if all are equal.
pub(super) fn differences(values: &[f64], places: usize) -> String {
    spread(values).map_or_else(
        || "-".into(),
        |(mean, low, high)| {
            let [mean, low, high] = [mean, low, high].map(|number| format!("{number:+.places$}"));
            if low == high { mean } else { format!("{mean} ({low} to {high})") }
        },
    )
}
