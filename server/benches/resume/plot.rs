//! The plot: a flat line against a rising one, both axes logarithmic.

use std::fmt::Write;

use super::{Case, median};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 62.0;

/// Where values lie on paper.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn new(cases: &[Case]) -> Self {
        let times = || cases.iter().flat_map(|case| [&case.memory, &case.disk, &case.again]).map(|times| median(times));
        let tokens = || cases.iter().map(|case| case.tokens as f64);
        let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
        let x = (tokens().fold(f64::INFINITY, f64::min).log10(), tokens().fold(0.0, f64::max).log10());
        Self { x, y: (least.log10().floor(), most.log10().ceil()) }
    }

    fn at(&self, tokens: f64, milliseconds: f64) -> (f64, f64) {
        let part = |value: f64, (low, high): (f64, f64)| (value.log10() - low) / (high - low);
        let x = LEFT + part(tokens, self.x) * (WIDTH - LEFT - RIGHT);
        (x, HEIGHT - BOTTOM - part(milliseconds, self.y) * (HEIGHT - TOP - BOTTOM))
    }
}

fn time(milliseconds: f64) -> String {
    match milliseconds {
        ..10.0 => format!("{milliseconds:.1} ms"),
        10.0..1e3 => format!("{milliseconds:.0} ms"),
        1e3..1e5 => format!("{:.1} s", milliseconds / 1e3),
        _ => format!("{:.0} s", milliseconds / 1e3),
    }
}

fn length(tokens: usize) -> String {
    match tokens {
        0..1_000 => tokens.to_string(),
        1_000..1_000_000 => format!("{} k", tokens / 1_000),
        _ => format!("{} M", tokens / 1_000_000),
    }
}

/// The plot as a file.
pub(crate) fn svg(cases: &[Case]) -> String {
    let mut out = String::new();
    draw(cases, &mut out).expect("a string takes everything");
    out
}

fn draw(cases: &[Case], out: &mut String) -> std::fmt::Result {
    let axes = Axes::new(cases);
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#24292f">
<title>Time to the first token of a turn, by the tokens behind it</title>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<text x="{LEFT}" y="32" font-size="18" font-weight="bold">Time to the first token of the next turn</text>"##
    )?;
    for decade in axes.y.0 as i32..=axes.y.1 as i32 {
        let value = 10f64.powi(decade);
        let (_, y) = axes.at(1.0, value);
        let said = if value < 1e3 { format!("{value} ms") } else { format!("{} s", value / 1e3) };
        writeln!(out, r##"<path d="M{LEFT} {y:.1}H{right}" stroke="#d8dee4"/>"##)?;
        writeln!(out, r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{said}</text>"#, LEFT - 10.0, y + 5.0)?;
    }
    for case in cases {
        let (x, _) = axes.at(case.tokens as f64, 1.0);
        writeln!(out, r##"<path d="M{x:.1} {bottom}v6" stroke="#57606a"/>"##)?;
        let y = bottom + 24.0;
        writeln!(out, r#"<text x="{x:.1}" y="{y}" text-anchor="middle">{}</text>"#, length(case.tokens))?;
    }
    let (middle, y) = (f64::midpoint(LEFT, right), HEIGHT - 14.0);
    writeln!(out, r#"<text x="{middle}" y="{y}" text-anchor="middle">tokens behind it</text>"#)?;
    line(&axes, cases, "history sent again", "#cf222e", -4.0, |case| &case.again, out)?;
    line(&axes, cases, "session, from disk", "#0969da", -12.0, |case| &case.disk, out)?;
    line(&axes, cases, "session, from memory", "#1a7f37", 24.0, |case| &case.memory, out)?;
    writeln!(out, "</svg>")
}

fn line(
    axes: &Axes,
    cases: &[Case],
    name: &str,
    color: &str,
    shift: f64,
    times: impl Fn(&Case) -> &Vec<f64>,
    out: &mut String,
) -> std::fmt::Result {
    let points: Vec<(f64, f64)> = cases.iter().map(|case| axes.at(case.tokens as f64, median(times(case)))).collect();
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    writeln!(out, r#"<path d="M{}" fill="none" stroke="{color}" stroke-width="2.5"/>"#, path.join("L"))?;
    for (x, y) in &points {
        writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{color}"/>"#)?;
    }
    let (Some((x, y)), Some(last)) = (points.last(), cases.last()) else { return Ok(()) };
    let (x, y, last) = (x + 12.0, y + shift, time(median(times(last))));
    writeln!(
        out,
        r#"<text x="{x:.1}" y="{y:.1}" fill="{color}" font-weight="bold">{name}<tspan x="{x:.1}" dy="17" font-weight="normal">{last}</tspan></text>"#
    )
}
