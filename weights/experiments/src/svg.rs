//! The plotter for all plots: SVG on white, with panels of lines that are labeled at their ends, and panels of dots in
//! rows. It is hand-written because no available plotting library labels lines at their ends and keeps those labels
//! apart.

use std::fmt::{Result, Write};

use crate::scale::{Kind, Scale, apart, bounds, digits, short, ticks};

const WIDTH: f64 = 880.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 232.0;
/// Width of the names next to rows of dots.
const NAMES: f64 = 212.0;
/// Height of the title above all panels.
const HEAD: f64 = 66.0;
/// Height of a panel's title, and of the labels below its axis.
const TITLE: f64 = 64.0;
const FOOT: f64 = 64.0;
/// Height of a line panel: the minimum, per decade, and per label; and height of a row of dots.
const LINES: f64 = 260.0;
const DECADE: f64 = 72.0;
const LABEL: f64 = 19.0;
const ROW: f64 = 27.0;
/// Minimum distance between the centers of two axis labels.
const WORD: f64 = 52.0;
/// Lines with more points than this show their spread as a band; others as whiskers.
const MANY: usize = 16;
const GREY: &str = "#57606a";
const GRID: &str = "#d8dee4";

/// A whole plot.
#[derive(Clone, Debug)]
pub(crate) struct Picture {
    /// The heading.
    pub(crate) title: String,
    /// What all panels have in common.
    pub(crate) subtitle: String,
    /// The panels from top to bottom.
    pub(crate) panels: Vec<Panel>,
}

/// One set of axes.
#[derive(Clone, Debug)]
pub(crate) enum Panel {
    /// Values against a quantity.
    Lines(Lines),
    /// Values of several subjects.
    Dots(Dots),
}

/// An axis: its label and scale.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    /// The quantity and its unit.
    pub(crate) label: String,
    /// Linear or logarithmic.
    pub(crate) kind: Kind,
}

/// Values against a quantity.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    /// The panel's heading.
    pub(crate) title: String,
    /// The horizontal axis.
    pub(crate) across: Axis,
    /// The vertical axis.
    pub(crate) up: Axis,
    /// Lines without points are omitted.
    pub(crate) series: Vec<Series>,
}

/// One line.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// Text at the line's end, after the last value.
    pub(crate) label: String,
    /// An SVG color.
    pub(crate) color: &'static str,
    /// An SVG dash pattern; empty for a solid line.
    pub(crate) dash: &'static str,
    /// Sorted by x.
    pub(crate) points: Vec<Point>,
}

/// A value and its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    /// The horizontal value.
    pub(crate) x: f64,
    /// The vertical value.
    pub(crate) y: f64,
    /// The lowest measured value.
    pub(crate) low: f64,
    /// The highest measured value.
    pub(crate) high: f64,
}

/// Values of several subjects, one row each.
#[derive(Clone, Debug)]
pub(crate) struct Dots {
    /// The panel's heading.
    pub(crate) title: String,
    /// The horizontal axis.
    pub(crate) axis: Axis,
    /// The rows from top to bottom.
    pub(crate) rows: Vec<DotRow>,
    /// A reference value and its name.
    pub(crate) mark: Option<(f64, String)>,
}

/// One subject's values.
#[derive(Clone, Debug)]
pub(crate) struct DotRow {
    /// The subject's name.
    pub(crate) label: String,
    /// An SVG color.
    pub(crate) color: &'static str,
    /// At least one value. Each is a dot; their mean is a stroke.
    pub(crate) values: Vec<f64>,
}

impl Picture {
    /// Returns the text of the SVG file.
    pub(crate) fn svg(&self) -> String {
        let height = HEAD + self.panels.iter().map(Panel::height).sum::<f64>();
        let (title, subtitle) = (escaped(&self.title), escaped(&self.subtitle));
        let mut out = format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#24292f">
<title>{title}</title>
<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>
<text x="24" y="32" font-size="18" font-weight="bold">{title}</text>
<text x="24" y="54" font-size="13" fill="{GREY}">{subtitle}</text>
"##
        );
        let mut top = HEAD;
        for panel in &self.panels {
            panel.draw(top, &mut out).expect("writing to a string cannot fail");
            top += panel.height();
        }
        out + "</svg>\n"
    }
}

impl Panel {
    fn height(&self) -> f64 {
        TITLE
            + FOOT
            + match self {
                Self::Lines(lines) => lines.inside(),
                Self::Dots(dots) => dots.inside(),
            }
    }

    fn draw(&self, top: f64, out: &mut String) -> Result {
        match self {
            Self::Lines(lines) => lines.draw(top, out),
            Self::Dots(dots) => dots.draw(top, out),
        }
    }
}

/// A panel's title and, in gray, the label of its vertical axis.
fn heading(top: f64, title: &str, axis: &str, out: &mut String) -> Result {
    let (first, second) = (top + 22.0, top + 42.0);
    writeln!(out, r#"<text x="24" y="{first:.1}" font-weight="bold">{}</text>"#, escaped(title))?;
    writeln!(out, r#"<text x="24" y="{second:.1}" font-size="13" fill="{GREY}">{}</text>"#, escaped(axis))
}

impl Lines {
    fn shown(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| !series.points.is_empty())
    }

    /// The range of the vertical axis.
    fn range(&self) -> (f64, f64) {
        let points = self.shown().flat_map(|series| &series.points);
        bounds(self.up.kind, points.flat_map(|point| [point.low, point.y, point.high]))
    }

    fn inside(&self) -> f64 {
        let (low, high) = self.range();
        let decades = if self.up.kind == Kind::Log { (high / low).log10() } else { 0.0 };
        LINES.max(decades * DECADE).max(self.shown().count() as f64 * LABEL).round()
    }

    fn draw(&self, top: f64, out: &mut String) -> Result {
        heading(top, &self.title, &self.up.label, out)?;
        let points = || self.shown().flat_map(|series| &series.points);
        let range = self.range();
        let (top, bottom, right) = (top + TITLE, top + TITLE + self.inside(), WIDTH - RIGHT);
        let up = Scale::new(self.up.kind, range, bottom, top);
        let mut places: Vec<f64> = points().map(|point| point.x).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        // Leaves a margin next to the outermost points.
        let across = Scale::fit(self.across.kind, &places, LEFT + 16.0, right - 16.0);
        for tick in ticks(self.up.kind, range) {
            let y = up.at(tick);
            writeln!(out, r#"<path d="M{LEFT} {y:.1}H{right}" stroke="{GRID}"/>"#)?;
            let (x, y) = (LEFT - 10.0, y + 5.0);
            writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="end">{}</text>"#, short(tick))?;
        }
        writeln!(out, r#"<path d="M{LEFT} {bottom:.1}H{right}" stroke="{GREY}"/>"#)?;
        // A few points are labeled at their values, many at round values.
        let marks = match (places.first(), places.last()) {
            (Some(&low), Some(&high)) if places.len() > MANY => {
                let within = |tick: &f64| *tick >= low && *tick <= high;
                ticks(self.across.kind, bounds(self.across.kind, [low, high])).into_iter().filter(within).collect()
            }
            _ => places,
        };
        foot(&across, &marks, bottom, out)?;
        caption(&self.across.label, f64::midpoint(LEFT, right), bottom, out)?;
        // All lines of a panel have the same style, regardless of their number of points.
        let many = self.shown().any(|series| series.points.len() > MANY);
        let ends: Vec<f64> = self.shown().filter_map(|series| series.points.last()).map(|end| up.at(end.y)).collect();
        for (series, label) in self.shown().zip(apart(&ends, LABEL, top, bottom)) {
            series.draw((&across, &up), many, label, out)?;
        }
        Ok(())
    }
}

/// Draws ticks and labels below an axis. A label that would overlap the previous one is omitted.
fn foot(across: &Scale, marks: &[f64], bottom: f64, out: &mut String) -> Result {
    let mut last = f64::NEG_INFINITY;
    for &mark in marks {
        let x = across.at(mark);
        writeln!(out, r#"<path d="M{x:.1} {bottom:.1}v6" stroke="{GREY}"/>"#)?;
        if x - last >= WORD {
            last = x;
            let y = bottom + 23.0;
            writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle">{}</text>"#, short(mark))?;
        }
    }
    Ok(())
}

fn caption(label: &str, x: f64, bottom: f64, out: &mut String) -> Result {
    let y = bottom + 45.0;
    writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle" fill="{GREY}">{}</text>"#, escaped(label))
}

impl Series {
    /// Draws a line. `many` draws the spread as a band instead of dots and whiskers; `label` is the vertical center of
    /// the label.
    fn draw(&self, (across, up): (&Scale, &Scale), many: bool, label: f64, out: &mut String) -> Result {
        let Self { color, dash, points, .. } = self;
        let path = |place: &dyn Fn(&Point) -> f64, reversed: bool| {
            let pair = |point: &Point| format!("{:.1} {:.1}", across.at(point.x), place(point));
            let mut pairs: Vec<String> = points.iter().map(pair).collect();
            if reversed {
                pairs.reverse();
            }
            pairs.join("L")
        };
        if many && points.iter().any(|point| point.high > point.low) {
            let (above, below) = (path(&|p| up.at(p.high), false), path(&|p| up.at(p.low), true));
            writeln!(out, r#"<path d="M{above}L{below}Z" fill="{color}" fill-opacity="0.15"/>"#)?;
        }
        let line = path(&|point| up.at(point.y), false);
        let width = if many { 1.6 } else { 2.2 };
        writeln!(
            out,
            r#"<path d="M{line}" fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"/>"#
        )?;
        for point in points.iter().filter(|_| !many) {
            let (x, y) = (across.at(point.x), up.at(point.y));
            let (low, high) = (up.at(point.low), up.at(point.high));
            writeln!(out, r#"<path d="M{x:.1} {low:.1}V{high:.1}" stroke="{color}" stroke-opacity="0.45"/>"#)?;
            if dash.is_empty() {
                writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.5" fill="{color}"/>"#)?;
            }
        }
        let Some(end) = points.last() else { return Ok(()) };
        let begin = WIDTH - RIGHT + 14.0;
        let (x, y, to, text, base) = (across.at(end.x) + 6.0, up.at(end.y), begin - 5.0, begin + 1.0, label + 5.0);
        writeln!(out, r#"<path d="M{x:.1} {y:.1}L{to:.1} {label:.1}" stroke="{color}" stroke-opacity="0.45"/>"#)?;
        let (name, value) = (escaped(&self.label), digits(end.y));
        writeln!(
            out,
            r#"<text x="{text:.1}" y="{base:.1}" fill="{color}"><tspan font-weight="bold">{value}</tspan> {name}</text>"#
        )
    }
}

impl Dots {
    fn inside(&self) -> f64 {
        self.rows.len() as f64 * ROW
    }

    fn draw(&self, top: f64, out: &mut String) -> Result {
        heading(top, &self.title, "a dot for each seed; the stroke and the number are their mean", out)?;
        let (top, bottom) = (top + TITLE, top + TITLE + self.inside());
        let (left, right) = (NAMES, WIDTH - 100.0);
        let values = self.rows.iter().flat_map(|row| row.values.iter().copied());
        let range = bounds(self.axis.kind, values.chain(self.mark.iter().map(|(value, _)| *value)));
        let across = Scale::new(self.axis.kind, range, left, right);
        let marks = ticks(self.axis.kind, range);
        for &tick in &marks {
            let x = across.at(tick);
            writeln!(out, r#"<path d="M{x:.1} {top:.1}V{bottom:.1}" stroke="{GRID}"/>"#)?;
        }
        writeln!(out, r#"<path d="M{left} {bottom:.1}H{right}" stroke="{GREY}"/>"#)?;
        foot(&across, &marks, bottom, out)?;
        caption(&self.axis.label, f64::midpoint(left, right), bottom, out)?;
        if let Some((value, name)) = &self.mark {
            let (x, above) = (across.at(*value), top - 6.0);
            writeln!(
                out,
                r#"<path d="M{x:.1} {top:.1}V{bottom:.1}" stroke="{GREY}" stroke-width="1.4" stroke-dasharray="5 4"/>"#
            )?;
            let name = escaped(name);
            writeln!(
                out,
                r#"<text x="{x:.1}" y="{above:.1}" font-size="13" text-anchor="middle" fill="{GREY}">{name}</text>"#
            )?;
        }
        for (number, row) in self.rows.iter().enumerate() {
            let (y, color) = (top + (number as f64 + 0.5) * ROW, row.color);
            let (name_x, base, name) = (left - 12.0, y + 5.0, escaped(&row.label));
            writeln!(out, r#"<text x="{name_x:.1}" y="{base:.1}" text-anchor="end" fill="{color}">{name}</text>"#)?;
            let mean = row.values.iter().sum::<f64>() / row.values.len() as f64;
            let low = row.values.iter().copied().fold(f64::INFINITY, f64::min);
            let high = row.values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (from, to, at) = (across.at(low), across.at(high), across.at(mean));
            writeln!(out, r#"<path d="M{from:.1} {y:.1}H{to:.1}" stroke="{color}" stroke-opacity="0.45"/>"#)?;
            for &value in &row.values {
                let x = across.at(value);
                writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4.5" fill="{color}" fill-opacity="0.6"/>"#)?;
            }
            let up = y - 9.0;
            writeln!(out, r#"<path d="M{at:.1} {up:.1}v18" stroke="{color}" stroke-width="2.4"/>"#)?;
            let (x, value) = (right + 14.0, digits_of(mean));
            writeln!(out, r#"<text x="{x:.1}" y="{base:.1}" font-weight="bold" fill="{color}">{value}</text>"#)?;
        }
        Ok(())
    }
}

/// Losses differ only slightly, so they get one more digit.
fn digits_of(value: f64) -> String {
    if (1.0..10.0).contains(&value) { format!("{value:.3}") } else { digits(value) }
}

/// Escapes XML's special characters.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
