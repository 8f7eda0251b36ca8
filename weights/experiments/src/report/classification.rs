//! Sequence classification with encoders, by mixer: the accuracies, which show whether the task was learned, and the
//! training speeds.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::section::{Section, checked, color, mean, table, with_spread};
use crate::record::{Record, RecordError};
use crate::scale::Kind;
use crate::svg::{Axis, DotRow, Dots, Panel, Picture};
use tidegate_weights::terminal::grouped;

/// The description of a task.
pub(super) struct Task {
    /// The name of its result file.
    pub(super) name: &'static str,
    title: &'static str,
    /// What is classified.
    subject: &'static str,
    /// The entry of `settings.baselines` that an accuracy must exceed.
    guess: &'static str,
    /// The same guess in words, as the start of a sentence.
    guessed: &'static str,
    /// Baselines to list next to the accuracies, with descriptions.
    beside: &'static [(&'static str, &'static str)],
}

pub(super) const TASKS: [Task; 2] = [
    Task {
        name: "listops",
        title: "ListOps",
        subject: "nested lists of digits, ten classes",
        guess: "first_operator",
        guessed: "Guessing the most common class for each outermost operator",
        beside: &[],
    },
    Task {
        name: "passages",
        title: "Passages",
        subject: "which book a passage is from, by its bytes",
        guess: "majority_class",
        guessed: "Always guessing the same book",
        beside: &[("byte_pairs", "naive Bayes on pairs of adjacent bytes")],
    },
];

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
    /// The error due to the test sequences only; seeds add their own.
    #[serde(default)]
    standard_error: f64,
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

    fn speeds(&self) -> Vec<f64> {
        self.seeds.iter().map(|seed| seed.sequences_per_second).collect()
    }

    /// The standard error of the mean accuracy, in percent. It combines the error due to the test sequences, which all
    /// seeds share, with that due to the seeds.
    fn standard_error(&self) -> f64 {
        let test = self.seeds.iter().map(|seed| 100.0 * seed.standard_error).fold(0.0, f64::max);
        let count = self.seeds.len() as f64;
        let squares: f64 = self.percent().iter().map(|percent| (percent - self.mean()).powi(2)).sum();
        let seeds = if count > 1.0 { squares / (count - 1.0) / count } else { 0.0 };
        (test * test + seeds).sqrt()
    }

    /// Whether the accuracy exceeds the task's guess by three standard errors. guess: in percent
    fn learned(&self, guess: Option<f64>) -> bool {
        guess.is_none_or(|guess| self.mean() - 3.0 * self.standard_error() > guess)
    }
}

pub(super) fn section(task: &Task, path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
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
    let percent = |name: &str| Some(100.0 * record.settings.get("baselines")?.get(name).and_then(Value::as_f64)?);
    let guess = percent(task.guess);
    let beside: Vec<String> = task
        .beside
        .iter()
        .filter_map(|&(name, words)| Some(format!("\nFor comparison, {words} reaches {:.1} %.\n", percent(name)?)))
        .collect();
    let mut rows: Vec<&Row> = record.rows.iter().collect();
    rows.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
    Ok(Section {
        title: task.title.into(),
        picture: Picture {
            title: format!("{}: {}", task.title, task.subject),
            subtitle: "accuracy on sequences that training has not seen, where the task was learned; speed of training"
                .into(),
            panels: panels(&rows, guess),
        },
        text: markdown(task, &rows, guess) + &beside.concat(),
    })
}

/// The panels of accuracies that count as learned, if any, and of speeds.
fn panels(rows: &[&Row], guess: Option<f64>) -> Vec<Panel> {
    let panel = |title: &str, label: &str, rows: &[&Row], values: fn(&Row) -> Vec<f64>| {
        let dot = |row: &&Row| DotRow { label: row.mixer.clone(), color: color(&row.mixer), values: values(row) };
        let softmax = rows.iter().find(|row| row.mixer == "softmax");
        Panel::Dots(Dots {
            title: title.into(),
            axis: Axis { label: format!("{label}; more is better"), kind: Kind::Linear },
            rows: rows.iter().map(dot).collect(),
            mark: softmax.and_then(|row| Some((mean(&values(row))?, "softmax".into()))),
        })
    };
    let learned: Vec<&Row> = rows.iter().copied().filter(|row| row.learned(guess)).collect();
    let mut panels = Vec::new();
    if !learned.is_empty() {
        panels.push(panel("at the end of training", "accuracy, %", &learned, Row::percent));
    }
    panels.push(panel("while training", "sequences a second", rows, Row::speeds));
    panels
}

fn markdown(task: &Task, rows: &[&Row], guess: Option<f64>) -> String {
    let headings = ["mixer", "accuracy, %", "loss", "sequences a second", "steps", "parameters"];
    let line = |row: &&Row| {
        let losses: Vec<f64> = row.seeds.iter().map(|seed| seed.loss).collect();
        let (accuracy, loss) = if row.learned(guess) {
            (with_spread(&row.percent(), 1), with_spread(&losses, 3))
        } else {
            ("withdrawn".into(), "-".into())
        };
        vec![
            row.mixer.clone(),
            accuracy,
            loss,
            with_spread(&row.speeds(), 1),
            grouped(row.seeds.iter().map(|seed| seed.steps).max().unwrap_or(0)),
            grouped(row.parameters),
        ]
    };
    let table = table(&headings.map(String::from), &rows.iter().map(line).collect::<Vec<_>>());
    let withdrawn: Vec<String> =
        rows.iter().filter(|row| !row.learned(guess)).map(|row| format!("{} {:.1}", row.mixer, row.mean())).collect();
    let Some(guess) = guess.filter(|_| !withdrawn.is_empty()) else { return table };
    format!(
        "{table}\n{} reaches {guess:.1} %. An accuracy that does not exceed this by more than three standard errors is \
         withdrawn, because it does not show that the task was learned. Withdrawn (%): {}. The speeds remain valid.\n",
        task.guessed,
        withdrawn.join(", ")
    )
}
