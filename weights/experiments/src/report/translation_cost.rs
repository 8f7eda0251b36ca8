//! Decode speed and state of encoder-decoders by source length.

use std::path::Path;

use super::section::{Section, checked, color, table};
use crate::record::{Record, RecordError};
use crate::scale::{Kind, digits};
use crate::svg::{Axis, Lines, Panel, Picture, Point, Series};
use crate::translation_cost::Row;
use tidegate_weights::terminal::grouped;

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    for (at, row) in record.rows.iter().enumerate() {
        let field = |rest: &str| format!("rows[{at}].{rest}");
        let rates = [("tokens_per_second", row.tokens_per_second), ("low", row.low), ("high", row.high)];
        for (name, value) in rates.into_iter().chain([("read_ms", row.read_ms)]) {
            checked(path, &field(name), value, |value| value > 0.0)?;
        }
        if let Some(ratio) = row.over_softmax {
            checked(path, &field("over_softmax"), ratio, |ratio| ratio > 0.0)?;
        }
        let same = |other: &Row| (&other.mixer, other.source, other.batch) == (&row.mixer, row.source, row.batch);
        if record.rows[..at].iter().any(same) {
            let problem = format!("{} at {} appears twice", row.mixer, row.source);
            return Err(RecordError::malformed(path, field("source"), problem));
        }
    }
    let batch = record.rows[0].batch;
    if let Some(at) = record.rows.iter().position(|row| row.batch != batch) {
        let problem = format!("must be {batch}, as in rows[0], found {}", record.rows[at].batch);
        return Err(RecordError::malformed(path, format!("rows[{at}].batch"), problem));
    }
    let rows = &record.rows;
    let panel = |title: &str, up: String, point: &dyn Fn(&Row) -> Point| {
        Panel::Lines(Lines {
            title: title.into(),
            across: Axis { label: "tokens of the source".into(), kind: Kind::Log },
            up: Axis { label: up, kind: Kind::Log },
            series: series(rows, point),
        })
    };
    let speed = |row: &Row| Point { x: row.source as f64, y: row.tokens_per_second, low: row.low, high: row.high };
    let state = |row: &Row| {
        let bytes = row.state_bytes_filled as f64;
        Point { x: row.source as f64, y: bytes, low: bytes, high: bytes }
    };
    Ok(Section {
        title: "Cost of translating against the source's length".into(),
        picture: Picture {
            title: "Decoding a translation against the source's length".into(),
            subtitle: "random weights of one shape; whiskers: least and most of all rounds".into(),
            panels: vec![
                panel("decode steps", format!("tokens a second of {batch} rows together; more is better"), &speed),
                panel("what a row keeps of source and target", "bytes that hold something".into(), &state),
            ],
        },
        text: markdown(rows),
    })
}

fn mixers(rows: &[Row]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.mixer.as_str()) {
            names.push(&row.mixer);
        }
    }
    names
}

fn series(rows: &[Row], point: &dyn Fn(&Row) -> Point) -> Vec<Series> {
    let line = |name: &str| {
        let mut of: Vec<&Row> = rows.iter().filter(|row| row.mixer == name).collect();
        of.sort_by_key(|row| row.source);
        Series { label: name.into(), color: color(name), dash: "", points: of.into_iter().map(point).collect() }
    };
    mixers(rows).into_iter().map(line).collect()
}

fn markdown(rows: &[Row]) -> String {
    let names = mixers(rows);
    let mut lengths: Vec<usize> = rows.iter().map(|row| row.source).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let columns = |what: &str| names.iter().map(|name| format!("{name}, {what}")).collect::<Vec<_>>();
    let compared: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| rows.iter().any(|row| row.mixer == *name && row.over_softmax.is_some()))
        .collect();
    let ratios = compared.iter().map(|name| format!("{name} : softmax")).collect();
    let headings =
        [vec!["source".into()], columns("tokens/s"), ratios, columns("state bytes filled"), columns("ms to read it")];
    let line = |&length: &usize| {
        let of = |name: &str| rows.iter().find(|row| row.mixer == name && row.source == length);
        let cells = |names: &[&str], text: &dyn Fn(&Row) -> String| {
            names.iter().map(|name| of(name).map_or_else(|| "-".into(), text)).collect::<Vec<_>>()
        };
        let rate = |value: f64| if value < 1000.0 { digits(value) } else { grouped(value.round() as u64) };
        let speed = |row: &Row| format!("{} ({} to {})", rate(row.tokens_per_second), rate(row.low), rate(row.high));
        let ratio = |row: &Row| row.over_softmax.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
        [
            vec![grouped(length as u64)],
            cells(&names, &speed),
            cells(&compared, &ratio),
            cells(&names, &|row| grouped(row.state_bytes_filled)),
            cells(&names, &|row| digits(row.read_ms)),
        ]
        .concat()
    };
    table(&headings.concat(), &lengths.iter().map(line).collect::<Vec<_>>())
        + "\nTokens per second are medians over the rounds, with the lowest and highest in parentheses. A ratio is the \
           median over the rounds of the ratio within a round.\n"
}
