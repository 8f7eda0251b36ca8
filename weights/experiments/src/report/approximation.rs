//! The error of random estimates of softmax attention by number of samples.

use std::path::Path;

use super::section::{Section, checked, color, table};
use crate::approximation::Row;
use crate::record::{Record, RecordError};
use crate::scale::{Kind, digits};
use crate::svg::{Axis, Lines, Panel, Picture, Point, Series};

const BASELINE: &str = "mean-of-v";

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    for (at, row) in record.rows.iter().enumerate() {
        for (name, value) in [("error", row.error), ("error_low", row.error_low), ("error_high", row.error_high)] {
            checked(path, &format!("rows[{at}].{name}"), value, |value| value >= 0.0)?;
        }
    }
    let mut kinds: Vec<&str> = Vec::new();
    for row in &record.rows {
        if !kinds.contains(&row.inputs.as_str()) {
            kinds.push(&row.inputs);
        }
    }
    let of = |kind: &str| -> Vec<&Row> { record.rows.iter().filter(|row| row.inputs == kind).collect() };
    Ok(Section {
        title: "Approximation of softmax attention".into(),
        picture: Picture {
            title: "Random estimates of softmax attention against samples".into(),
            subtitle: "mean squared error of the outputs, values as given; whiskers: least and most of all seeds"
                .into(),
            panels: kinds.iter().map(|kind| panel(kind, &of(kind))).collect(),
        },
        text: kinds.iter().map(|kind| markdown(kind, &of(kind))).collect::<Vec<_>>().join("\n"),
    })
}

fn title(kind: &str) -> String {
    match kind {
        "model" => "queries, keys and values of a trained softmax model".into(),
        "correlated" => "correlated tokens: q and k share slowly varying means".into(),
        "independent" => "independent q and k: neighbours have nothing in common that landmarks could know of".into(),
        other => other.into(),
    }
}

/// The estimators in the order of their rows, without the baseline.
fn estimators<'a>(rows: &[&'a Row]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if row.estimator != BASELINE && !names.contains(&row.estimator.as_str()) {
            names.push(&row.estimator);
        }
    }
    names
}

/// The distinct numbers of samples, ascending.
fn counts(rows: &[&Row]) -> Vec<usize> {
    let mut counts: Vec<usize> = rows.iter().filter(|row| row.estimator != BASELINE).map(|row| row.samples).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

fn panel(kind: &str, rows: &[&Row]) -> Panel {
    let line = |name: &str| {
        let mut of: Vec<&&Row> = rows.iter().filter(|row| row.estimator == name).collect();
        of.sort_by_key(|row| row.samples);
        let point =
            |row: &&Row| Point { x: row.samples as f64, y: row.error, low: row.error_low, high: row.error_high };
        Series { label: name.into(), color: color(name), dash: "", points: of.into_iter().map(point).collect() }
    };
    let mut series: Vec<Series> = estimators(rows).into_iter().map(line).collect();
    if let Some(baseline) = rows.iter().find(|row| row.estimator == BASELINE) {
        let y = baseline.error;
        let points = counts(rows).into_iter().map(|x| Point { x: x as f64, y, low: y, high: y }).collect();
        series.push(Series { label: "mean of V".into(), color: color(BASELINE), dash: "5 4", points });
    }
    Panel::Lines(Lines {
        title: title(kind),
        across: Axis { label: "samples: random vectors, landmarks, or samples of each query".into(), kind: Kind::Log },
        up: Axis { label: "mean squared error".into(), kind: Kind::Log },
        series,
    })
}

fn markdown(kind: &str, rows: &[&Row]) -> String {
    let counts = counts(rows);
    let mut headings = vec![title(kind)];
    headings.extend(counts.iter().map(usize::to_string));
    headings.push("widest spread".into());
    let of = |name: &str| {
        let all = || rows.iter().filter(move |row| row.estimator == name);
        let cell =
            |count: &usize| all().find(|row| row.samples == *count).map_or_else(|| "-".into(), |row| digits(row.error));
        let widest = all().map(|row| (row.error_high - row.error_low) / row.error.max(f64::MIN_POSITIVE));
        let mut cells = vec![name.to_owned()];
        cells.extend(counts.iter().map(cell));
        cells.push(format!("{:.0} %", 100.0 * widest.fold(0.0, f64::max)));
        cells
    };
    let mut lines: Vec<Vec<String>> = estimators(rows).into_iter().map(of).collect();
    if let Some(baseline) = rows.iter().find(|row| row.estimator == BASELINE) {
        let mut cells = vec!["mean of V".to_owned()];
        cells.extend(counts.iter().map(|_| digits(baseline.error)));
        cells.push("-".into());
        lines.push(cells);
    }
    table(&headings, &lines)
}
