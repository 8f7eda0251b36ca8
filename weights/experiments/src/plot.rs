//! Plots of what the server's benchmarks write as JSON: `tidegate bench` and the benchmark `resume`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tidegate_weights::terminal::grouped;

use crate::bench::{self, BenchError, Line, Phase};
use crate::scale::Kind;
use crate::svg::{Axis, Lines, Panel, Picture, Point, Series};

/// Colors that are distinct on white, one per model, reused if there are more models.
const COLORS: [&str; 8] = ["#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#1b7c83", "#bf3989", "#57606a"];
/// Stroke patterns, one per number of threads.
const DASHES: [&str; 4] = ["", "7 4", "2 4", "9 3 2 3"];

/// Returns an SVG of tokens per second against depth, against the number of rows if that varies, and of prompts against
/// depth. files: lines of `tidegate bench --output json`
///
/// # Errors
/// [`BenchError`] with the file and the line.
pub fn throughput(files: &[PathBuf]) -> Result<String, BenchError> {
    let mut lines = Vec::new();
    for path in files {
        lines.extend(bench::read(path, |_| Ok(()))?);
    }
    let varied = Varied::of(&lines);
    let title = "Tokens per second".into();
    Ok(Picture { title, subtitle: varied.subtitle(&lines[0]), panels: panels(&lines, &varied) }.svg())
}

/// Which properties differ between lines. The others are named once, above all panels.
struct Varied {
    mixers: bool,
    weights: bool,
    processors: bool,
}

impl Varied {
    fn of(lines: &[Line]) -> Self {
        let varies = |of: fn(&Line) -> String| lines.iter().any(|line| of(line) != of(&lines[0]));
        Self {
            mixers: varies(|line| line.mixer.clone()),
            weights: varies(|line| line.weights.clone()),
            processors: varies(Line::processor),
        }
    }

    fn subtitle(&self, first: &Line) -> String {
        let mut parts = vec![first.shape.clone()];
        parts.extend((!self.mixers).then(|| first.mixer.clone()));
        parts.extend((!self.weights).then(|| format!("{} weights", first.weights)));
        parts.push(format!("{} state", first.state));
        parts.extend((!self.processors).then(|| first.processor()));
        parts.push(match first.rounds {
            1 => "one round".into(),
            rounds => format!("medians of {rounds} rounds, with the least and the most"),
        });
        parts.join(", ")
    }

    fn label(&self, line: &Line) -> String {
        let parts = [
            self.mixers.then(|| line.mixer.clone()),
            self.weights.then(|| line.weights.clone()),
            self.processors.then(|| line.processor()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

fn panels(lines: &[Line], varied: &Varied) -> Vec<Panel> {
    let batches: BTreeSet<u64> =
        lines.iter().filter(|line| line.kind == Phase::Decode).map(|line| line.batch).collect();
    let depths: BTreeSet<u64> = lines.iter().map(|line| line.depth).collect();
    let panel = |title: String, axis: &str, place: &dyn Fn(&Line) -> Option<u64>| {
        Panel::Lines(Lines {
            title,
            across: Axis { label: axis.into(), kind: Kind::Log },
            up: Axis { label: "tokens a second".into(), kind: Kind::Log },
            series: series(lines, varied, place),
        })
    };
    let mut panels = Vec::new();
    let (Some(&fewest), Some(&shallowest)) = (batches.first(), depths.first()) else { return panels };
    // With one depth and several batches, the second panel says it all.
    if depths.len() > 1 || batches.len() == 1 {
        let rows = if fewest == 1 { "one row".into() } else { format!("{} rows at once", grouped(fewest)) };
        panels.push(panel(format!("decoding, {rows}"), "tokens read before", &|line| {
            (line.kind == Phase::Decode && line.batch == fewest).then_some(line.depth)
        }));
    }
    if batches.len() > 1 {
        let title = format!("decoding several rows at once, all together, at depth {}", grouped(shallowest));
        panels.push(panel(title, "rows", &|line| {
            (line.kind == Phase::Decode && line.depth == shallowest).then_some(line.batch)
        }));
    }
    if let Some(prompt) = lines.iter().find(|line| line.kind == Phase::Prefill) {
        let title = format!("reading a prompt of {} tokens", grouped(prompt.tokens));
        panels.push(panel(title, "tokens read before it", &|line| (line.kind == Phase::Prefill).then_some(line.depth)));
    }
    panels
}

/// Makes one series per model and processor, from the lines that have a place on the axis.
fn series(lines: &[Line], varied: &Varied, place: &dyn Fn(&Line) -> Option<u64>) -> Vec<Series> {
    let mut known: Vec<(usize, usize)> = Vec::new();
    let mut all: Vec<Series> = Vec::new();
    let (mut models, mut processors) = (Vec::new(), Vec::new());
    for line in lines {
        let key =
            (index(&mut models, (line.mixer.clone(), line.weights.clone())), index(&mut processors, line.processor()));
        let Some(x) = place(line) else { continue };
        let at = index(&mut known, key);
        if at == all.len() {
            let (color, dash) = (COLORS[key.0 % COLORS.len()], DASHES[key.1 % DASHES.len()]);
            all.push(Series { label: varied.label(line), color, dash, points: Vec::new() });
        }
        all[at].points.push(Point { x: x as f64, y: line.tokens_per_second, low: line.least, high: line.most });
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    all
}

/// Returns the index of an item among the distinct ones so far, adding it if it is new.
fn index<T: PartialEq>(known: &mut Vec<T>, item: T) -> usize {
    known.iter().position(|other| *other == item).unwrap_or_else(|| {
        known.push(item);
        known.len() - 1
    })
}

/// Times to the first token of a turn, in milliseconds, in a conversation of one length.
#[derive(Deserialize)]
struct Turns {
    tokens: u64,
    memory: Vec<f64>,
    disk: Vec<f64>,
    again: Vec<f64>,
}

/// Returns an SVG of the time to a turn's first token against the tokens before it. file: lines of the benchmark
/// `resume`
///
/// # Errors
/// [`BenchError`] with the file and the line.
pub fn turns(file: &Path) -> Result<String, BenchError> {
    let text = std::fs::read_to_string(file).map_err(|source| BenchError::File { path: file.into(), source })?;
    let parse = |(at, line): (usize, &str)| {
        let wrong = |problem| BenchError::Line { path: file.into(), line: at + 1, problem };
        let turns: Turns = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        let times = [&turns.memory, &turns.disk, &turns.again];
        let valid = times.iter().all(|times| !times.is_empty() && times.iter().all(|&time| time > 0.0));
        if valid { Ok(turns) } else { Err(wrong("memory, disk and again must hold times above 0".into())) }
    };
    let all = text.lines().enumerate().map(parse).collect::<Result<Vec<_>, _>>()?;
    let series = |label: &str, color, times: fn(&Turns) -> &[f64]| {
        let point = |turns: &Turns| {
            let mut sorted = times(turns).to_vec();
            sorted.sort_by(f64::total_cmp);
            let (low, high) = (sorted[0], sorted[sorted.len() - 1]);
            Point { x: turns.tokens as f64, y: sorted[(sorted.len() - 1) / 2], low, high }
        };
        Series { label: label.into(), color, dash: "", points: all.iter().map(point).collect() }
    };
    let panel = Panel::Lines(Lines {
        title: "time to the first token of the next turn".into(),
        across: Axis { label: "tokens before it".into(), kind: Kind::Log },
        up: Axis { label: "milliseconds".into(), kind: Kind::Log },
        series: vec![
            series("ms, history sent again", "#cf222e", |turns| &turns.again),
            series("ms, session from disk", "#0969da", |turns| &turns.disk),
            series("ms, session from memory", "#1a7f37", |turns| &turns.memory),
        ],
    });
    let subtitle = "medians, with the least and the most; both axes are logarithmic".into();
    Ok(Picture { title: "Resuming a conversation".into(), subtitle, panels: vec![panel] }.svg())
}
