//! Language models compared on equal terms: losses by seed, and training curves.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::curves;
use super::section::{Section, checked, color, each_once, mean, table, with_spread};
use crate::record::{Record, RecordError};
use crate::scale::Kind;
use crate::svg::{Axis, DotRow, Dots, Panel, Picture};
use tidegate_weights::terminal::grouped;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Row {
    mixer: String,
    parameters: u64,
    state_bytes: u64,
    seeds: Vec<Run>,
    #[serde(default)]
    judged: Judged,
}

/// The loss that a mixer is compared by.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Judged {
    /// The text in blocks of a context, each from an empty state.
    #[default]
    Loss,
    /// The text as one stream, the state carried through it.
    StreamLoss,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Run {
    seed: u64,
    loss: f64,
    stream_loss: Option<f64>,
    seconds: f64,
    #[serde(default)]
    curve: Vec<(f64, f64)>,
}

impl Row {
    /// One of the two losses, of every seed that has it.
    fn losses(&self, judged: Judged) -> Vec<f64> {
        let loss = |seed: &Run| match judged {
            Judged::Loss => Some(seed.loss),
            Judged::StreamLoss => seed.stream_loss,
        };
        self.seeds.iter().filter_map(loss).collect()
    }

    /// The mean of the loss that the mixer is judged by.
    fn mean(&self) -> f64 {
        mean(&self.losses(self.judged)).unwrap_or(f64::NAN)
    }

    /// How far the mixer is above another in the loss it is judged by; none if the other has no such loss.
    fn above(&self, other: &Row) -> Option<f64> {
        Some(mean(&self.losses(self.judged))? - mean(&other.losses(self.judged))?)
    }
}

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    each_once(path, record.rows.iter().map(|row| (row.mixer.as_str(), row.seeds.len())))?;
    for (at, row) in record.rows.iter().enumerate() {
        let field = |rest: &str| format!("rows[{at}].{rest}");
        for (number, seed) in row.seeds.iter().enumerate() {
            checked(path, &field(&format!("seeds[{number}].loss")), seed.loss, |loss| loss > 0.0)?;
            match seed.stream_loss {
                Some(loss) => {
                    checked(path, &field(&format!("seeds[{number}].stream_loss")), loss, |loss| loss > 0.0)?;
                }
                None if row.judged == Judged::StreamLoss => {
                    let field = field(&format!("seeds[{number}].stream_loss"));
                    return Err(RecordError::malformed(path, field, "must be present: the row is judged by it"));
                }
                None => {}
            }
            for (point, (_, loss)) in seed.curve.iter().enumerate() {
                checked(path, &field(&format!("seeds[{number}].curve[{point}]")), *loss, |loss| loss > 0.0)?;
            }
        }
    }
    let setting = |name: &str, default: &str| match record.settings.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => default.into(),
    };
    let (corpus, unit) = (setting("corpus", "a text"), setting("unit", "nats"));
    let mut rows: Vec<&Row> = record.rows.iter().collect();
    rows.sort_by(|a, b| a.mean().total_cmp(&b.mean()));
    let title = format!("Language models on {corpus}");
    let picture = Picture {
        title: title.clone(),
        subtitle: format!("validation loss, {unit}; sorted by the mean of {}", seeds(&rows)),
        panels: panels(&rows, &unit),
    };
    Ok(Section { title, picture, text: markdown(&rows, &unit) })
}

/// The number of seeds in words; a range if it differs between rows.
fn seeds(rows: &[&Row]) -> String {
    let counts = || rows.iter().map(|row| row.seeds.len());
    match (counts().min().unwrap_or(0), counts().max().unwrap_or(0)) {
        (1, 1) => "one seed".into(),
        (least, most) if least == most => format!("{most} seeds"),
        (least, most) => format!("{least} to {most} seeds"),
    }
}

fn name(row: &Row) -> String {
    let stream =
        if row.judged == Judged::StreamLoss && !row.mixer.contains("stateful") { " (state carried)" } else { "" };
    format!("{}{stream}", row.mixer)
}

fn panels(rows: &[&Row], unit: &str) -> Vec<Panel> {
    let dot = |row: &&Row| DotRow { label: name(row), color: color(&row.mixer), values: row.losses(row.judged) };
    let softmax = rows.iter().find(|row| row.mixer == "softmax").map(|row| (row.mean(), "softmax".into()));
    let mut panels = vec![Panel::Dots(Dots {
        title: "at the end of training".into(),
        axis: Axis { label: format!("validation loss, {unit}; less is better"), kind: Kind::Linear },
        rows: rows.iter().map(dot).collect(),
        mark: softmax,
    })];
    let curve = |row: &&Row| {
        let seeds: Vec<&[(f64, f64)]> = row.seeds.iter().map(|seed| &seed.curve[..]).collect();
        (row.mixer.clone(), curves::mean(&seeds))
    };
    panels.extend(curves::panel(rows.iter().map(curve).collect(), unit));
    panels
}

fn markdown(rows: &[&Row], unit: &str) -> String {
    let headings = [
        "mixer",
        &format!("loss, {unit}"),
        "state carried",
        "against softmax",
        "parameters",
        "state bytes",
        "minutes a seed",
    ];
    let softmax = rows.iter().find(|row| row.mixer == "softmax");
    let line = |row: &&Row| {
        let bold = |text: String, judged: Judged| if row.judged == judged { format!("**{text}**") } else { text };
        let seconds: Vec<f64> = row.seeds.iter().map(|seed| seed.seconds).collect();
        vec![
            row.mixer.clone(),
            bold(with_spread(&row.losses(Judged::Loss), 3), Judged::Loss),
            bold(with_spread(&row.losses(Judged::StreamLoss), 3), Judged::StreamLoss),
            softmax.and_then(|softmax| row.above(softmax)).map_or_else(|| "-".into(), |above| format!("{above:+.3}")),
            grouped(row.parameters),
            grouped(row.state_bytes),
            mean(&seconds).map_or_else(|| "-".into(), |mean| format!("{:.1}", mean / 60.0)),
        ]
    };
    let table = table(&headings.map(String::from), &rows.iter().map(line).collect::<Vec<_>>());
    format!(
        "{table}\nThe mean of {} (least to most); in bold the loss that a mixer is judged and sorted by, and compared with \
         softmax in.\n",
        seeds(rows)
    )
}
