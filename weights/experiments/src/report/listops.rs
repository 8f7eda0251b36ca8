//! Accuracy on ListOps by mixer.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::section::{Section, checked, color, mean, table, with_spread};
use crate::record::{Record, RecordError};
use crate::scale::Kind;
use crate::svg::{Axis, DotRow, Dots, Panel, Picture};
use tidegate_weights::terminal::grouped;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Row {
    mixer: String,
    parameters: u64,
    seeds: Vec<Run>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Run {
    seed: u64,
    accuracy: f64,
    loss: f64,
    steps: u64,
    sequences_per_second: f64,
}

impl Row {
    fn percent(&self) -> Vec<f64> {
        self.seeds.iter().map(|seed| 100.0 * seed.accuracy).collect()
    }

    fn mean(&self) -> f64 {
        mean(&self.percent()).unwrap_or(0.0)
    }
}

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    for (at, row) in record.rows.iter().enumerate() {
        if row.seeds.is_empty() {
            return Err(RecordError::malformed(path, format!("rows[{at}].seeds"), "must not be empty"));
        }
        for (number, seed) in row.seeds.iter().enumerate() {
            let field = |name: &str| format!("rows[{at}].seeds[{number}].{name}");
            checked(path, &field("accuracy"), seed.accuracy, |share| (0.0..=1.0).contains(&share))?;
            checked(path, &field("loss"), seed.loss, |loss| loss >= 0.0)?;
            checked(path, &field("sequences_per_second"), seed.sequences_per_second, |speed| speed > 0.0)?;
        }
    }
    let mut rows: Vec<&Row> = record.rows.iter().collect();
    rows.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
    let dot = |row: &&Row| DotRow { label: row.mixer.clone(), color: color(&row.mixer), values: row.percent() };
    let mark = rows.iter().find(|row| row.mixer == "softmax").map(|row| (row.mean(), "softmax".into()));
    let headings = ["mixer", "accuracy, %", "loss", "sequences a second", "steps", "parameters"];
    let line = |row: &&Row| {
        let of = |what: fn(&Run) -> f64| row.seeds.iter().map(what).collect::<Vec<f64>>();
        vec![
            row.mixer.clone(),
            with_spread(&row.percent(), 1),
            with_spread(&of(|seed| seed.loss), 3),
            with_spread(&of(|seed| seed.sequences_per_second), 1),
            grouped(row.seeds.iter().map(|seed| seed.steps).max().unwrap_or(0)),
            grouped(row.parameters),
        ]
    };
    Ok(Section {
        title: "ListOps".into(),
        picture: Picture {
            title: "ListOps: nested lists of digits, ten classes".into(),
            subtitle: "accuracy on sequences that training has not seen".into(),
            panels: vec![Panel::Dots(Dots {
                title: "at the end of training".into(),
                axis: Axis { label: "accuracy, %; more is better".into(), kind: Kind::Linear },
                rows: rows.iter().map(dot).collect(),
                mark,
            })],
        },
        text: table(&headings.map(String::from), &rows.iter().map(line).collect::<Vec<_>>()),
    })
}
