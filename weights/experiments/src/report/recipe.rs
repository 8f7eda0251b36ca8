//! The shipped model's recipe: each change compared with the unchanged recipe, at equal training time.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::section::{Section, above, checked, differences, each_once, mean, table, with_spread};
use crate::record::{Record, RecordError};
use crate::scale::Kind;
use crate::svg::{Axis, DotRow, Dots, Panel, Picture};
use tidegate_weights::terminal::grouped;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Row {
    variant: String,
    /// The changes by table: settings, or the name of a mixer.
    changes: Map<String, Value>,
    /// Processor time per step, relative to the first variant.
    cost: f64,
    parameters: u64,
    steps: u64,
    seeds: Vec<Run>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Run {
    seed: u64,
    /// Bits per byte.
    loss: f64,
}

impl Row {
    fn losses(&self) -> Vec<f64> {
        self.seeds.iter().map(|seed| seed.loss).collect()
    }

    fn above(&self, other: &Row) -> Vec<f64> {
        let by_seed = |row: &Row| row.seeds.iter().map(|run| (run.seed, run.loss)).collect::<Vec<_>>();
        above(&by_seed(self), &by_seed(other))
    }

    /// The changes in words: `proj_dim 128`, ...
    fn changed(&self) -> String {
        let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
        let each = |(name, value): (&String, &Value)| match value {
            Value::Object(settings) => {
                settings.iter().map(|(name, value)| format!("{name} {}", plain(value))).collect::<Vec<_>>().join(", ")
            }
            other => format!("{name} {}", plain(other)),
        };
        self.changes.iter().map(each).collect::<Vec<_>>().join(", ")
    }
}

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    each_once(path, "variant", record.rows.iter().map(|row| (row.variant.as_str(), row.seeds.len())))?;
    for (at, row) in record.rows.iter().enumerate() {
        let field = |rest: &str| format!("rows[{at}].{rest}");
        checked(path, &field("cost"), row.cost, |cost| cost > 0.0)?;
        for (number, seed) in row.seeds.iter().enumerate() {
            checked(path, &field(&format!("seeds[{number}].loss")), seed.loss, |loss| loss > 0.0)?;
        }
    }
    let Some(unchanged) = record.rows.iter().find(|row| row.changes.is_empty()) else {
        return Err(RecordError::malformed(path, "rows", "must have one without changes"));
    };
    // A loss depends more on the seed, which determines what is read, than on most changes.
    let against = |row: &Row| mean(&row.above(unchanged)).unwrap_or(f64::INFINITY);
    let mut rows: Vec<&Row> = record.rows.iter().collect();
    rows.sort_by(|a, b| against(a).total_cmp(&against(b)));
    let compared = rows.iter().filter(|row| !row.changes.is_empty() && !row.above(unchanged).is_empty());
    let dot = |row: &&Row| DotRow { label: row.variant.clone(), color: "#0969da", values: row.above(unchanged) };
    let dots = Dots {
        title: "after equal time of training".into(),
        axis: Axis {
            label: "validation loss above that of the unchanged recipe, bits per byte; less is better".into(),
            kind: Kind::Linear,
        },
        rows: compared.map(dot).collect(),
        mark: Some((0.0, "unchanged".into())),
    };
    Ok(Section {
        title: "The shipped model's recipe".into(),
        picture: Picture {
            title: "One change of the shipped model's recipe at a time".into(),
            subtitle: "short runs; a change that makes a step dearer gets fewer steps".into(),
            panels: vec![Panel::Dots(dots)],
        },
        text: markdown(&rows, unchanged),
    })
}

fn markdown(rows: &[&Row], unchanged: &Row) -> String {
    let headings =
        ["variant", "change", "loss, bits per byte", "against the recipe", "cost of a step", "steps", "parameters"];
    let line = |row: &&Row| {
        let against = if row.changes.is_empty() { "-".into() } else { differences(&row.above(unchanged), 4) };
        vec![
            row.variant.clone(),
            row.changed(),
            with_spread(&row.losses(), 4),
            against,
            format!("{:.2}", row.cost),
            grouped(row.steps),
            grouped(row.parameters),
        ]
    };
    let table = table(&headings.map(String::from), &rows.iter().map(line).collect::<Vec<_>>());
    format!(
        "{table}\nLosses and differences are means over the seeds, with the lowest and highest in parentheses. \
         Differences are computed per seed.\n"
    )
}
