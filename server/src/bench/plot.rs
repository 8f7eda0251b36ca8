//! The picture: tokens a second against depth, against rows at once where there are several numbers of them, and of
//! prompts against depth. SVG by hand, on white, with a label at the end of every line.

use std::fmt::Write;

use super::report::{Row, grouped, rate};
use super::scale::{Scale, apart, bounds, ticks};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 262.0;
/// Height of the words above all panels.
const HEAD: f64 = 64.0;
/// Height of a panel's title, and of what is below its axis.
const TITLE: f64 = 44.0;
const FOOT: f64 = 64.0;
/// Height of a panel's lines: at least, and for each label.
const LINES: f64 = 240.0;
const LABEL: f64 = 19.0;
/// Least width between the middles of two words at an axis.
const WORD: f64 = 50.0;
/// Colours that are told apart on white, one for each model, from the first on again where there are more.
const COLORS: [&str; 8] = ["#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#1b7c83", "#bf3989", "#57606a"];
/// Strokes, one for each number of threads.
const DASHES: [&str; 4] = ["", "7 4", "2 4", "9 3 2 3"];

/// One set of axes.
struct Panel<'a> {
    title: String,
    axis: &'static str,
    lines: Vec<Line<'a>>,
}

/// What was measured of one model on one number of threads, by what the axis says.
struct Line<'a> {
    label: String,
    color: &'static str,
    dash: &'static str,
    points: Vec<(f64, &'a Row)>,
}

/// All rows as one picture.
pub(super) fn svg(rows: &[Row]) -> String {
    let panels = panels(rows);
    let height = HEAD + panels.iter().map(Panel::height).sum::<f64>();
    let mut out = String::new();
    let mut top = HEAD;
    // A string takes everything: no write to it fails.
    let _ = writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#24292f">
<title>Tokens per second</title>
<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>
<text x="24" y="32" font-size="18" font-weight="bold">Tokens per second</text>
<text x="24" y="54" fill="#57606a">{}</text>"##,
        escaped(&subtitle(rows))
    );
    for panel in &panels {
        let _ = panel.draw(top, &mut out);
        top += panel.height();
    }
    out + "</svg>\n"
}

/// What is the same for all.
fn subtitle(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut words = vec![first.shape.clone()];
    let [mixers, weights, threads] = varied(rows);
    if !mixers {
        words.push(first.mixer.clone());
    }
    if !weights {
        words.push(format!("{} weights", first.weights));
    }
    words.push(format!("{} state", first.state));
    if !threads {
        words.push(first.computes());
    }
    words.push(match first.rounds {
        1 => "one round".into(),
        rounds => format!("medians of {rounds} rounds, with the least and the most"),
    });
    words.join(", ")
}

/// Whether mixers, weights and numbers of threads are several.
fn varied(rows: &[Row]) -> [bool; 3] {
    let Some(first) = rows.first() else { return [false; 3] };
    [
        rows.iter().any(|row| row.mixer != first.mixer),
        rows.iter().any(|row| row.weights != first.weights),
        rows.iter().any(|row| row.threads != first.threads),
    ]
}

fn panels(rows: &[Row]) -> Vec<Panel<'_>> {
    let (mut batches, mut depths): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for row in rows {
        depths.push(row.depth);
        if row.kind == "decode" {
            batches.push(row.batch);
        }
    }
    let (Some(&one), Some(&depth)) = (batches.iter().min(), depths.iter().min()) else { return Vec::new() };
    let several = |numbers: &[usize]| numbers.iter().any(|&number| number != numbers[0]);
    let mut panels = Vec::new();
    // Of one depth and several batches all is said by the second.
    if several(&depths) || !several(&batches) {
        let rows_at_once = if one == 1 { "one row".into() } else { format!("{} rows at once", grouped(one as u64)) };
        panels.push(Panel {
            title: format!("decoding, {rows_at_once}"),
            axis: "tokens read before",
            lines: lines(rows, |row| (row.kind == "decode" && row.batch == one).then_some(row.depth)),
        });
    }
    if several(&batches) {
        panels.push(Panel {
            title: format!("decoding several rows at once, all together, at depth {}", grouped(depth as u64)),
            axis: "rows",
            lines: lines(rows, |row| (row.kind == "decode" && row.depth == depth).then_some(row.batch)),
        });
    }
    if let Some(prompt) = rows.iter().find(|row| row.kind == "prefill") {
        panels.push(Panel {
            title: format!("reading a prompt of {} tokens", grouped(prompt.tokens as u64)),
            axis: "tokens read before it",
            lines: lines(rows, |row| (row.kind == "prefill").then_some(row.depth)),
        });
    }
    panels
}

/// One line for each model and number of threads, of the rows that have a place on the axis.
fn lines(rows: &[Row], place: impl Fn(&Row) -> Option<usize>) -> Vec<Line<'_>> {
    let (mut models, mut counts, mut lines) = (Vec::new(), Vec::new(), Vec::<((usize, usize), Line<'_>)>::new());
    let [mixers, weights, threads] = varied(rows);
    for row in rows {
        let model = number(&mut models, (&row.mixer, &row.weights));
        let count = number(&mut counts, row.threads);
        let Some(place) = place(row) else { continue };
        let point = (place as f64, row);
        if let Some((_, line)) = lines.iter_mut().find(|(of, _)| *of == (model, count)) {
            line.points.push(point);
            continue;
        }
        let parts = [(mixers, row.mixer.clone()), (weights, row.weights.clone()), (threads, row.computes())];
        let label: Vec<String> = parts.into_iter().filter(|(varies, _)| *varies).map(|(_, word)| word).collect();
        let (color, dash) = (COLORS[model % COLORS.len()], DASHES[count % DASHES.len()]);
        lines.push(((model, count), Line { label: label.join(", "), color, dash, points: vec![point] }));
    }
    let mut lines: Vec<Line<'_>> = lines.into_iter().map(|(_, line)| line).collect();
    for line in &mut lines {
        line.points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    }
    lines
}

/// Which one it is of all that came before, in their order.
fn number<T: PartialEq>(known: &mut Vec<T>, one: T) -> usize {
    known.iter().position(|other| *other == one).unwrap_or_else(|| {
        known.push(one);
        known.len() - 1
    })
}

impl Panel<'_> {
    fn height(&self) -> f64 {
        TITLE + self.inside() + FOOT
    }

    fn inside(&self) -> f64 {
        LINES.max(self.lines.len() as f64 * LABEL)
    }

    fn draw(&self, top: f64, out: &mut String) -> std::fmt::Result {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let (low, high) = bounds(points().flat_map(|(_, row)| [row.least, row.most]));
        let (top, bottom, right) = (top + TITLE, top + TITLE + self.inside(), WIDTH - RIGHT);
        let rates = Scale::new((low, high), bottom, top);
        let mut places: Vec<f64> = points().map(|(place, _)| *place).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        // A little room beside the outermost points.
        let across = Scale::fit(&places, LEFT + 16.0, right - 16.0);

        writeln!(out, r#"<text x="24" y="{:.1}" font-weight="bold">{}</text>"#, top - 18.0, escaped(&self.title))?;
        for tick in ticks((low, high)) {
            let y = rates.at(tick);
            writeln!(out, r##"<path d="M{LEFT} {y:.1}H{right}" stroke="#d8dee4"/>"##)?;
            let (x, y) = (LEFT - 10.0, y + 5.0);
            writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="end">{}</text>"#, short(tick))?;
        }
        writeln!(out, r##"<path d="M{LEFT} {bottom}H{right}" stroke="#57606a"/>"##)?;
        if let Some(x) = across.broken_at() {
            let (x, y) = (x - 5.0, bottom + 6.0);
            writeln!(out, r##"<path d="M{x:.1} {y:.1}l4 -12h6l-4 12z" fill="#ffffff"/>"##)?;
            writeln!(out, r##"<path d="M{x:.1} {y:.1}l4 -12m6 0l-4 12" stroke="#57606a"/>"##)?;
        }
        let mut last = f64::NEG_INFINITY;
        for &place in &places {
            let x = across.at(place);
            writeln!(out, r##"<path d="M{x:.1} {bottom}v6" stroke="#57606a"/>"##)?;
            // What would be written over the word before it is not written.
            if x - last >= WORD {
                last = x;
                let y = bottom + 23.0;
                writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle">{}</text>"#, short(place))?;
            }
        }
        let (x, y) = (f64::midpoint(LEFT, right), bottom + 45.0);
        writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle">{}</text>"#, self.axis)?;

        let ends: Vec<f64> = self.lines.iter().map(|line| rates.at(line.last().tokens_per_second)).collect();
        for (line, label) in self.lines.iter().zip(apart(&ends, LABEL, top, bottom)) {
            line.draw(&across, &rates, label, out)?;
        }
        Ok(())
    }
}

impl Line<'_> {
    /// The rightmost point; a line has one at least.
    fn last(&self) -> &Row {
        self.points[self.points.len() - 1].1
    }

    /// `label` is where the label's middle lies.
    fn draw(&self, across: &Scale, rates: &Scale, label: f64, out: &mut String) -> std::fmt::Result {
        let Self { color, dash, points, .. } = self;
        let at = |(place, row): &(f64, &Row)| (across.at(*place), rates.at(row.tokens_per_second));
        let path: Vec<String> = points.iter().map(at).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        let path = path.join("L");
        writeln!(
            out,
            r#"<path d="M{path}" fill="none" stroke="{color}" stroke-width="2.2" stroke-dasharray="{dash}"/>"#
        )?;
        for point in points {
            let ((x, y), row) = (at(point), point.1);
            let (least, most) = (rates.at(row.least), rates.at(row.most));
            writeln!(out, r#"<path d="M{x:.1} {least:.1}V{most:.1}" stroke="{color}" stroke-opacity="0.45"/>"#)?;
            writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.5" fill="{color}"/>"#)?;
        }
        let (x, y) = at(&points[points.len() - 1]);
        let begin = WIDTH - RIGHT + 14.0;
        let (from, to, text) = (x + 6.0, begin - 5.0, begin + 1.0);
        writeln!(out, r#"<path d="M{from:.1} {y:.1}L{to:.1} {label:.1}" stroke="{color}" stroke-opacity="0.45"/>"#)?;
        let (name, value, y) = (escaped(&self.label), rate(self.last().tokens_per_second), label + 5.0);
        writeln!(
            out,
            r#"<text x="{text:.1}" y="{y:.1}" fill="{color}"><tspan font-weight="bold">{value}</tspan> {name}</text>"#
        )
    }
}

/// A whole number in few characters: `32,768`, `100 k`, `1 M`.
fn short(value: f64) -> String {
    match value.round() as u64 {
        _ if value > 0.0 && value < 1.0 => value.to_string(),
        whole if whole >= 1_000_000 && whole.is_multiple_of(100_000) => format!("{} M", whole as f64 / 1e6),
        whole if whole >= 100_000 && whole.is_multiple_of(1000) => format!("{} k", grouped(whole / 1000)),
        whole => grouped(whole),
    }
}

/// Text that may stand in a file of XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(weights: &str, threads: usize, kind: &'static str, batch: usize, depth: usize) -> Row {
        let speed = (threads * batch) as f64 * 100.0;
        Row {
            shape: "a <shape> & more".into(),
            parameters: 1,
            weights: weights.into(),
            mixer: "rfa-gate".into(),
            state: "f32",
            device: "cpu".into(),
            threads: Some(threads),
            batch,
            depth,
            past: "read",
            kind,
            tokens: 512,
            tokens_per_second: speed,
            least: speed * 0.9,
            most: speed * 1.1,
            rounds: 3,
            state_bytes: 1,
            weight_bytes: 1,
            roof_share: Some(0.5),
            read_bandwidth: Some(1.0),
            fma_peak: Some(1.0),
        }
    }

    fn titles(rows: &[Row]) -> Vec<String> {
        panels(rows).into_iter().map(|panel| panel.title).collect()
    }

    #[test]
    fn a_panel_for_depths_one_for_batches_one_for_prompts() {
        let decode = |batch, depth| row("bf16", 1, "decode", batch, depth);
        assert_eq!(titles(&[decode(1, 0)]), ["decoding, one row"]);
        assert_eq!(titles(&[decode(8, 0), decode(8, 512)]), ["decoding, 8 rows at once"]);
        assert_eq!(
            titles(&[decode(1, 2048), decode(8, 2048)]),
            ["decoding several rows at once, all together, at depth 2,048"]
        );
        let all = [decode(1, 0), decode(1, 9), decode(2, 0), decode(2, 9), row("bf16", 1, "prefill", 1, 0)];
        assert_eq!(titles(&all).len(), 3);
        assert_eq!(titles(&all)[2], "reading a prompt of 512 tokens");
    }

    #[test]
    fn a_line_for_each_model_and_number_of_threads_labelled_by_what_varies() {
        let mut rows = Vec::new();
        for weights in ["bf16", "q8_0"] {
            for threads in [1, 2] {
                rows.extend([512, 0].map(|depth| row(weights, threads, "decode", 1, depth)));
            }
        }
        let panels = panels(&rows);
        let labels: Vec<&str> = panels[0].lines.iter().map(|line| line.label.as_str()).collect();
        assert_eq!(labels, ["bf16, 1 thread", "bf16, 2 threads", "q8_0, 1 thread", "q8_0, 2 threads"]);
        let points: Vec<f64> = panels[0].lines[0].points.iter().map(|(place, _)| *place).collect();
        assert_eq!(points, [0.0, 512.0], "from left to right");
        let [a, b, c, _] = &panels[0].lines[..] else { panic!("four lines") };
        assert!(a.color == b.color && a.color != c.color && a.dash != b.dash && a.dash == c.dash);
    }

    #[test]
    fn a_name_cannot_break_the_file() {
        let text = svg(&[row("bf16", 2, "decode", 1, 0)]);
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        assert!(text.contains("a &lt;shape&gt; &amp; more, rfa-gate, bf16 weights, f32 state, 2 threads"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn numbers_at_axes_are_short() {
        let said = [0.0, 0.5, 512.0, 32_768.0, 100_000.0, 1_000_000.0, 1_500_000.0, 1_048_576.0].map(short);
        assert_eq!(said, ["0", "0.5", "512", "32,768", "100 k", "1 M", "1.5 M", "1,048,576"]);
    }
}
