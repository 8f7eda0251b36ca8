//! Language models compared on equal terms: losses by seed, and training curves.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::curves;
use super::section::{Section, checked, color, differences, each_once, mean, table, with_spread};
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

/// How a text is read during evaluation. A mixer is judged by the way that it was trained to read.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Judged {
    /// In blocks of a context's length, each from an empty state.
    #[default]
    Loss,
    /// As one stream, with the state carried through it.
    StreamLoss,
}

impl Judged {
    const ALL: [Self; 2] = [Self::Loss, Self::StreamLoss];

    /// The reading in words, for headings.
    fn reading(self) -> &'static str {
        match self {
            Self::Loss => "in blocks, each from an empty state",
            Self::StreamLoss => "as one stream, the state carried",
        }
    }
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

impl Run {
    fn loss_of(&self, judged: Judged) -> Option<f64> {
        match judged {
            Judged::Loss => Some(self.loss),
            Judged::StreamLoss => self.stream_loss,
        }
    }
}

impl Row {
    /// One of the two losses, for every seed that has it.
    fn losses(&self, judged: Judged) -> Vec<f64> {
        self.seeds.iter().filter_map(|seed| seed.loss_of(judged)).collect()
    }

    /// How far the mixer is above another in one loss, for each seed that both have. Effects of a seed that all mixers
    /// share, such as the order of the text, cancel out.
    fn above(&self, other: &Row, judged: Judged) -> Vec<f64> {
        let pair = |seed: &Run| {
            let same = other.seeds.iter().find(|found| found.seed == seed.seed)?;
            Some(seed.loss_of(judged)? - same.loss_of(judged)?)
        };
        self.seeds.iter().filter_map(pair).collect()
    }
}

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    each_once(path, "mixer", record.rows.iter().map(|row| (row.mixer.as_str(), row.seeds.len())))?;
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
    let rows: Vec<&Row> = record.rows.iter().collect();
    let title = format!("Language models on {corpus}");
    let picture = Picture {
        title: title.clone(),
        subtitle: format!("validation loss, {unit}; each panel has one of the two losses, of {}", seeds(&rows)),
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

/// The softmax that a mixer is compared with: the one trained to read the same way, or else the one trained on blocks.
fn softmax<'a>(rows: &[&'a Row], judged: Judged) -> Option<&'a Row> {
    let named = |name: &str| rows.iter().copied().find(|row| row.mixer == name);
    let alike = match judged {
        Judged::Loss => None,
        Judged::StreamLoss => named("softmax-stateful"),
    };
    alike.or_else(|| named("softmax"))
}

/// The panels of final losses, then those of curves. Blocks and streams are different tasks and never share an axis.
fn panels(rows: &[&Row], unit: &str) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Judged::ALL.into_iter().filter_map(|judged| finals(rows, judged, unit)).collect();
    for judged in Judged::ALL {
        let curve = |row: &&Row| {
            let seeds: Vec<&[(f64, f64)]> = row.seeds.iter().map(|seed| &seed.curve[..]).collect();
            (row.mixer.clone(), curves::mean(&seeds))
        };
        // A curve shows the loss that judges the mixer. A single curve has nothing to be compared with.
        let curves: Vec<_> = rows.iter().filter(|row| row.judged == judged).map(curve).collect();
        if curves.len() == 1 && rows.len() > 1 {
            continue;
        }
        panels.extend(curves::panel(&format!("while training, {}", judged.reading()), curves, unit));
    }
    panels
}

/// The panel of one final loss, for the mixers that have it; `None` if no mixer does.
fn finals(rows: &[&Row], judged: Judged, unit: &str) -> Option<Panel> {
    let mut measured: Vec<(f64, &Row)> =
        rows.iter().filter_map(|&row| Some((mean(&row.losses(judged))?, row))).collect();
    measured.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best = measured.first()?.0;
    // A few far-off mixers would compress the differences between all others, so they are only named.
    let (near, far): (Vec<_>, Vec<_>) = measured.into_iter().partition(|(mean, _)| *mean <= curves::SHOWN * best);
    let dot = |&(_, row): &(f64, &Row)| DotRow {
        label: row.mixer.clone(),
        color: color(&row.mixer),
        values: row.losses(judged),
    };
    let names: Vec<String> = far.iter().map(|(mean, row)| format!("{} {mean:.3}", row.mixer)).collect();
    let absent = if names.is_empty() { String::new() } else { format!(". Not shown: {}", names.join(", ")) };
    let label = format!("{unit}; less is better{absent}");
    let mark = near.iter().find(|(_, row)| row.mixer == "softmax").map(|(mean, _)| (*mean, "softmax".into()));
    Some(Panel::Dots(Dots {
        title: format!("at the end of training, {}", judged.reading()),
        axis: Axis { label, kind: Kind::Linear },
        rows: near.iter().map(dot).collect(),
        mark,
    }))
}

fn markdown(rows: &[&Row], unit: &str) -> String {
    let headings = [
        "mixer",
        &format!("in blocks, {unit}"),
        "against softmax",
        "state carried",
        "against softmax",
        "parameters",
        "state bytes",
        "minutes a seed",
    ];
    let above = |row: &Row, judged: Judged| {
        softmax(rows, row.judged).map_or_else(Vec::new, |softmax| row.above(softmax, judged))
    };
    // Mixers without a counterpart come last.
    let rank = |row: &Row| mean(&above(row, row.judged)).unwrap_or(f64::INFINITY);
    let mut sorted = rows.to_vec();
    sorted.sort_by(|a, b| rank(a).total_cmp(&rank(b)));
    let line = |row: &&Row| {
        let bold = |text: String, judged: Judged| {
            if row.judged == judged && text != "-" { format!("**{text}**") } else { text }
        };
        let loss = |judged: Judged| bold(with_spread(&row.losses(judged), 3), judged);
        let difference = |judged: Judged| bold(differences(&above(row, judged), 3), judged);
        let seconds: Vec<f64> = row.seeds.iter().map(|seed| seed.seconds).collect();
        vec![
            row.mixer.clone(),
            loss(Judged::Loss),
            difference(Judged::Loss),
            loss(Judged::StreamLoss),
            difference(Judged::StreamLoss),
            grouped(row.parameters),
            grouped(row.state_bytes),
            mean(&seconds).map_or_else(|| "-".into(), |mean| format!("{:.1}", mean / 60.0)),
        ]
    };
    let table = table(&headings.map(String::from), &sorted.iter().map(line).collect::<Vec<_>>());
    let alike = if controlled(rows) { ", using the softmax that was trained in the same way" } else { "" };
    format!(
        "{table}\nLosses and differences are means over {}, with the lowest and highest in parentheses. Differences \
         are computed per seed, over the seeds that both mixers have. A mixer's block loss is compared with softmax's \
         block loss, and its stream loss with softmax's stream loss{alike}. The two losses are not comparable with \
         each other. Bold marks the loss that matches how a mixer was trained to read, and its difference from \
         softmax, by which the rows are sorted.\n{}",
        seeds(rows),
        [as_good(&sorted), uncontrolled(rows)].concat()
    )
}

/// Whether one softmax was trained on a stream.
fn controlled(rows: &[&Row]) -> bool {
    softmax(rows, Judged::StreamLoss).is_some_and(|row| row.judged == Judged::StreamLoss)
}

/// Lists mixers that are as good as others with at least twice their state, in the loss that both were trained for,
/// meaning ahead in at least one seed. Empty if there are none.
fn as_good(rows: &[&Row]) -> String {
    let ahead = |a: &Row, b: &Row| a.above(b, a.judged).iter().any(|above| *above < 0.0);
    let smaller = |row: &&Row| {
        let larger: Vec<String> = rows
            .iter()
            .filter(|other| other.judged == row.judged && 2 * row.state_bytes <= other.state_bytes && ahead(row, other))
            .map(|other| format!("{} ({})", other.mixer, grouped(other.state_bytes)))
            .collect();
        let own = format!("{} ({} bytes)", row.mixer, grouped(row.state_bytes));
        (!larger.is_empty()).then(|| format!("{own} matches {}", larger.join(", ")))
    };
    let found: Vec<String> = rows.iter().filter_map(smaller).collect();
    if found.is_empty() {
        return String::new();
    }
    format!(
        "\nA mixer matches another if it is ahead in at least one seed, in the loss that both were trained for. \
         Matches with at most half the state: {}.\n",
        found.join("; ")
    )
}

/// Notes that the mixers trained on a stream have no equally trained softmax to compare with. Empty if they do.
fn uncontrolled(rows: &[&Row]) -> String {
    let stream = || rows.iter().filter(|row| row.judged == Judged::StreamLoss);
    let names: Vec<&str> = stream().map(|row| row.mixer.as_str()).collect();
    if names.is_empty() || softmax(rows, Judged::Loss).is_none() || controlled(rows) {
        return String::new();
    }
    format!(
        "\nIn training, the state was carried only for {}, and softmax was trained on blocks. Their difference in \
         stream loss therefore reflects both the mixer and the way of training.\n",
        names.join(", ")
    )
}
