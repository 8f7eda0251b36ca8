//! Encoder-decoders compared on equal terms: BLEU by seed, losses, and training curves.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::curves;
use super::section::{Section, above, checked, color, differences, each_once, mean, table, with_spread};
use crate::record::{Record, RecordError};
use crate::scale::Kind;
use crate::svg::{Axis, DotRow, Dots, Panel, Picture};
use tidegate_weights::terminal::grouped;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Row {
    mixer: String,
    parameters: u64,
    /// For a conversation with the longest source and target.
    state_bytes: u64,
    /// The part in use after a pair of average length.
    state_bytes_filled: Option<u64>,
    /// Sacrebleu's signature.
    bleu_signature: Option<String>,
    seeds: Vec<Run>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Run {
    seed: u64,
    bleu: f64,
    loss: f64,
    seconds: Option<f64>,
    #[serde(default)]
    curve: Vec<(f64, f64)>,
}

impl Row {
    fn bleu(&self) -> Vec<f64> {
        self.seeds.iter().map(|seed| seed.bleu).collect()
    }

    fn by_seed(&self) -> Vec<(u64, f64)> {
        self.seeds.iter().map(|run| (run.seed, run.bleu)).collect()
    }

    fn mean(&self) -> f64 {
        mean(&self.bleu()).unwrap_or(f64::NAN)
    }
}

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    each_once(path, "mixer", record.rows.iter().map(|row| (row.mixer.as_str(), row.seeds.len())))?;
    for (at, row) in record.rows.iter().enumerate() {
        let field = |rest: &str| format!("rows[{at}].{rest}");
        for (number, seed) in row.seeds.iter().enumerate() {
            let of = |rest: &str| field(&format!("seeds[{number}].{rest}"));
            checked(path, &of("bleu"), seed.bleu, |bleu| (0.0..=100.0).contains(&bleu))?;
            checked(path, &of("loss"), seed.loss, |loss| loss > 0.0)?;
            for (point, (_, loss)) in seed.curve.iter().enumerate() {
                checked(path, &of(&format!("curve[{point}]")), *loss, |loss| loss > 0.0)?;
            }
        }
    }
    let unit = record.settings.get("unit").and_then(Value::as_str).unwrap_or("nats per target token");
    let mut rows: Vec<&Row> = record.rows.iter().collect();
    rows.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
    let dot = |row: &&Row| DotRow { label: row.mixer.clone(), color: color(&row.mixer), values: row.bleu() };
    let softmax = rows.iter().copied().find(|row| row.mixer == "softmax");
    let mut panels = vec![Panel::Dots(Dots {
        title: "on the test, at the end of training".into(),
        axis: Axis { label: "BLEU; more is better".into(), kind: Kind::Linear },
        rows: rows.iter().map(dot).collect(),
        mark: softmax.map(|row| (row.mean(), "softmax".into())),
    })];
    let curve = |row: &&Row| {
        let seeds: Vec<&[(f64, f64)]> = row.seeds.iter().map(|seed| &seed.curve[..]).collect();
        (row.mixer.clone(), curves::mean(&seeds))
    };
    panels.extend(curves::panel("while training", rows.iter().map(curve).collect(), unit));
    Ok(Section {
        title: "Translation".into(),
        picture: Picture {
            title: "Translation by encoder-decoders".into(),
            subtitle:
                "the decoder's attentions to its own past and to the source are the mixer's; the encoder's are softmax"
                    .into(),
            panels,
        },
        text: markdown(&rows, softmax, unit),
    })
}

fn markdown(rows: &[&Row], softmax: Option<&Row>, unit: &str) -> String {
    let headings = [
        "mixer",
        "BLEU",
        "BLEU of each seed",
        "against softmax",
        &format!("loss, {unit}"),
        "parameters",
        "state bytes",
        "of them filled by a mean pair",
        "minutes a seed",
    ];
    let line = |row: &&Row| {
        let mut seeds: Vec<&Run> = row.seeds.iter().collect();
        seeds.sort_by_key(|seed| seed.seed);
        let each: Vec<String> = seeds.iter().map(|seed| format!("{:.2}", seed.bleu)).collect();
        let losses: Vec<f64> = seeds.iter().map(|seed| seed.loss).collect();
        let seconds: Vec<f64> = seeds.iter().filter_map(|seed| seed.seconds).collect();
        vec![
            row.mixer.clone(),
            format!("**{:.2}**", row.mean()),
            each.join(", "),
            softmax.map_or_else(|| "-".into(), |softmax| differences(&above(&row.by_seed(), &softmax.by_seed()), 2)),
            with_spread(&losses, 3),
            grouped(row.parameters),
            grouped(row.state_bytes),
            row.state_bytes_filled.map_or_else(|| "-".into(), grouped),
            mean(&seconds).map_or_else(|| "-".into(), |mean| format!("{:.1}", mean / 60.0)),
        ]
    };
    let table = table(&headings.map(String::from), &rows.iter().map(line).collect::<Vec<_>>());
    let mut signatures: Vec<&str> = rows.iter().filter_map(|row| row.bleu_signature.as_deref()).collect();
    signatures.dedup();
    let counted = if signatures.is_empty() {
        String::new()
    } else {
        format!(" SacreBLEU signature: `{}`.", signatures.join("`, `"))
    };
    format!(
        "{table}\nBLEU in bold is the mean over the seeds. Losses and differences are also means, with the lowest and \
         highest in parentheses. Differences are computed per seed, over the seeds that both mixers have.{counted}\n"
    )
}
