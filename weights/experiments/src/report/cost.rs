//! Time per token and bytes of state by number of tokens read so far.

use std::path::Path;

use super::section::{Section, checked, color, table};
use crate::bench::Phase;
use crate::cost::Row;
use crate::record::{Record, RecordError};
use crate::scale::{Kind, digits};
use crate::svg::{Axis, Lines, Panel, Picture, Point, Series};
use tidegate_weights::terminal::grouped;

/// Milliseconds per token.
fn milliseconds(tokens_per_second: f64) -> f64 {
    1000.0 / tokens_per_second
}

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    for (at, row) in record.rows.iter().enumerate() {
        let rates = [("tokens_per_second", row.tokens_per_second), ("low", row.low), ("high", row.high)];
        for (name, value) in rates {
            checked(path, &format!("rows[{at}].{name}"), value, |rate| rate > 0.0)?;
        }
    }
    let mut groups: Vec<(Phase, u64)> = Vec::new();
    for row in &record.rows {
        let batch = if row.kind == Phase::Decode { row.batch } else { 0 };
        if !groups.contains(&(row.kind, batch)) {
            groups.push((row.kind, batch));
        }
    }
    groups.sort_by_key(|&(kind, batch)| (kind == Phase::Prefill, batch));
    let of = |&(kind, batch): &(Phase, u64)| -> Vec<&Row> {
        record.rows.iter().filter(|row| row.kind == kind && (batch == 0 || row.batch == batch)).collect()
    };
    let mut panels: Vec<Panel> = groups.iter().map(|group| times(*group, &of(group))).collect();
    // The state of a row does not depend on the phase.
    if let Some(first) = groups.first() {
        panels.push(states(&of(first)));
    }
    let tables: Vec<String> = groups.iter().map(|group| markdown(*group, &of(group))).collect();
    Ok(Section {
        title: "Cost against length".into(),
        picture: Picture {
            title: "Time for a token and bytes of state against length".into(),
            subtitle: "whiskers: least and most of all rounds".into(),
            panels,
        },
        text: tables.join("\n") + note(&record.rows),
    })
}

fn note(rows: &[Row]) -> &'static str {
    if rows.iter().any(|row| row.mixer == "softmax") && rows.iter().any(|row| row.mixer != "softmax") {
        "\nIn parentheses: tokens per second relative to softmax at the same depth.\n"
    } else {
        ""
    }
}

fn title((kind, batch): (Phase, u64)) -> String {
    match (kind, batch) {
        (Phase::Prefill, _) => "reading a prompt".into(),
        (Phase::Decode, 1) => "decoding, one row".into(),
        (Phase::Decode, batch) => format!("decoding, {batch} rows at once"),
    }
}

fn mixers<'a>(rows: &[&'a Row]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.mixer.as_str()) {
            names.push(&row.mixer);
        }
    }
    names
}

fn lines(rows: &[&Row], point: impl Fn(&Row) -> Point) -> Vec<Series> {
    let line = |name: &str| {
        let mut of: Vec<&&Row> = rows.iter().filter(|row| row.mixer == name).collect();
        of.sort_by_key(|row| row.depth);
        let points = of.into_iter().map(|row| point(row)).collect();
        Series { label: name.into(), color: color(name), dash: "", points }
    };
    mixers(rows).into_iter().map(line).collect()
}

fn times(group: (Phase, u64), rows: &[&Row]) -> Panel {
    let point = |row: &Row| Point {
        x: row.depth as f64,
        y: milliseconds(row.tokens_per_second),
        low: milliseconds(row.high),
        high: milliseconds(row.low),
    };
    let together = if group.1 > 1 { ", the time of a step divided by its rows" } else { "" };
    Panel::Lines(Lines {
        title: title(group),
        across: Axis { label: "tokens read before".into(), kind: Kind::Log },
        up: Axis { label: format!("milliseconds a token{together}"), kind: Kind::Log },
        series: lines(rows, point),
    })
}

fn states(rows: &[&Row]) -> Panel {
    let point = |row: &Row| {
        let bytes = row.state_bytes as f64;
        Point { x: row.depth as f64, y: bytes, low: bytes, high: bytes }
    };
    // A cache is allocated in full before anything is read.
    let softmax: Vec<u64> = rows.iter().filter(|row| row.mixer == "softmax").map(|row| row.state_bytes).collect();
    let room = softmax.len() > 1 && softmax.iter().all(|bytes| *bytes == softmax[0]);
    let note = if room { "; softmax reserves room for the longest text of the run" } else { "" };
    Panel::Lines(Lines {
        title: "what a conversation keeps".into(),
        across: Axis { label: "tokens read before".into(), kind: Kind::Log },
        up: Axis { label: format!("bytes of state{note}"), kind: Kind::Log },
        series: lines(rows, point),
    })
}

/// One table row per mixer, with its tokens per second divided by softmax's at that depth in brackets.
fn markdown(group: (Phase, u64), rows: &[&Row]) -> String {
    let mut depths: Vec<u64> = rows.iter().map(|row| row.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let mut headings = vec![format!("{}, ms a token after", title(group))];
    headings.extend(depths.iter().map(|&depth| grouped(depth)));
    headings.push("state bytes at the longest".into());
    let line = |name: &str| {
        let of = |name: &str, depth: u64| rows.iter().find(|row| row.mixer == name && row.depth == depth);
        let ratio = |row: &Row| {
            let softmax = of("softmax", row.depth).filter(|_| name != "softmax");
            softmax.map_or_else(String::new, |softmax| {
                format!(" ({} x)", digits(row.tokens_per_second / softmax.tokens_per_second))
            })
        };
        let time = |&depth: &u64| {
            let text = |row: &&Row| digits(milliseconds(row.tokens_per_second)) + &ratio(row);
            of(name, depth).map_or_else(|| "-".into(), text)
        };
        let state = depths.iter().rev().find_map(|&depth| of(name, depth)).map_or(0, |row| row.state_bytes);
        [vec![name.to_owned()], depths.iter().map(time).collect(), vec![grouped(state)]].concat()
    };
    table(&headings, &mixers(rows).into_iter().map(line).collect::<Vec<_>>())
}
