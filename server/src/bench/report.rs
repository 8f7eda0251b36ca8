//! The results as rows, and the rows as JSON lines or a Markdown table.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::Result;
use serde::Serialize;
use tidegate_model::StateType;

use super::measure::Model;
use super::past::grouped;
use super::plan::{Case, Kind, Plan};
use super::roofline::{MachineLimits, Spread, prompt_operations, row_bytes, step_bytes};
use crate::cli::BenchOutput;

/// One case and its results.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) shape: String,
    pub(super) parameters: u64,
    pub(super) weights: String,
    pub(super) mixer: String,
    pub(super) state: &'static str,
    pub(super) device: String,
    /// Number of compute threads; `None` on a GPU.
    pub(super) threads: Option<usize>,
    /// Rows per step.
    pub(super) batch: usize,
    /// Tokens that each row has read before the measurement.
    pub(super) depth: usize,
    /// How the state was made: `read` if the model computed it, `drawn` if its keys and values are random.
    pub(super) past: &'static str,
    /// `decode` or `prefill`.
    pub(super) kind: &'static str,
    /// Tokens of one measurement, over all rows.
    pub(super) tokens: usize,
    pub(super) tokens_per_second: f64,
    pub(super) least: f64,
    pub(super) most: f64,
    pub(super) rounds: usize,
    /// Bytes of one row's state.
    pub(super) state_bytes: usize,
    pub(super) weight_bytes: usize,
    /// The rate as a fraction of the roofline; `None` on a GPU, like the limits below.
    pub(super) roof_share: Option<f64>,
    /// Bytes per second.
    pub(super) read_bandwidth: Option<f64>,
    /// Floating-point operations per second.
    pub(super) fma_peak: Option<f64>,
}

impl Row {
    pub(super) fn new(plan: &Plan, case: &Case, model: &Model, rates: Vec<f64>, limits: &MachineLimits) -> Self {
        let (about, config, rounds) = (&model.about, model.about.config.as_ref(), rates.len());
        let (weight_bytes, state_bytes) = (model.runner.weight_bytes(), model.runner.state_bytes());
        let Spread { least, median, most } = Spread::of(rates);
        let (read_bandwidth, fma_peak) = (limits.read_bandwidth(case.lane), limits.fma_peak(case.lane));
        let depth = plan.depths[case.depth];
        let (kind, batch, tokens, roof_share) = match case.kind {
            Kind::Decode { rows } => {
                // The depth in the middle of the measured steps.
                let tokens = depth + 1 + plan.steps.div_ceil(2);
                let bytes = config
                    .map(|config| step_bytes(weight_bytes, row_bytes(config, state_bytes, tokens), rows) / rows as f64);
                let share = bytes.zip(read_bandwidth).map(|(bytes, limit)| bytes * median / limit);
                ("decode", rows, rows * plan.steps, share)
            }
            Kind::Prefill => {
                let operations =
                    config.map(|config| prompt_operations(config, plan.prompt, depth) / plan.prompt as f64);
                let share = operations.zip(fma_peak).map(|(operations, limit)| operations * median / limit);
                ("prefill", 1, plan.prompt, share)
            }
        };
        let state = match plan.state {
            StateType::F32 => "f32",
            StateType::Bf16 => "bf16",
        };
        Self {
            shape: about.shape.clone(),
            parameters: about.parameters,
            weights: about.weights.clone(),
            mixer: about.mixer.clone(),
            state,
            device: plan.device.to_string(),
            threads: plan.threads.get(case.lane).copied(),
            batch,
            depth,
            past: model.past.word(),
            kind,
            tokens,
            tokens_per_second: median,
            least,
            most,
            rounds,
            state_bytes,
            weight_bytes,
            roof_share,
            read_bandwidth,
            fma_peak,
        }
    }

    /// Returns `1 thread`, `2 threads`, or the device.
    fn hardware(&self) -> String {
        match self.threads {
            Some(1) => "1 thread".into(),
            Some(threads) => format!("{threads} threads"),
            None => self.device.clone(),
        }
    }
}

/// Prints the rows to standard output.
pub(super) fn print(output: BenchOutput, rows: &[Row]) -> Result<()> {
    let text = match output {
        BenchOutput::Markdown => markdown(rows),
        BenchOutput::Json => json(rows)?,
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Returns one JSON object per line.
pub(super) fn json(rows: &[impl Serialize]) -> Result<String> {
    let mut text = String::new();
    for row in rows {
        text += &serde_json::to_string(row)?;
        text.push('\n');
    }
    Ok(text)
}

fn markdown(rows: &[Row]) -> String {
    let mut text = String::new();
    let Some(first) = rows.first() else { return text };
    let (shape, rounds) = (&first.shape, first.rounds);
    // Writing to a string cannot fail.
    let rounds = if rounds == 1 { "one round".into() } else { format!("medians of {rounds} rounds") };
    let by = if first.device.ends_with("by candle") { " by candle" } else { "" };
    let _ = writeln!(text, "{shape}{by}: {rounds}.");
    let (mut models, mut random_of, mut machine) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let numbers = [row.parameters, row.weight_bytes as u64, row.state_bytes as u64];
        let [parameters, weights, state] = numbers.map(grouped);
        let model = format!(
            "{} with {} weights: {parameters} parameters, {weights} bytes, and {state} of {} state a row.",
            row.mixer, row.weights, row.state
        );
        let machine_line = match (row.read_bandwidth, row.fma_peak) {
            (Some(read), Some(peak)) => {
                let (read, peak) = (read / 1e9, peak / 1e9);
                format!("{} of this machine: {read:.1} GB/s read, {peak:.0} GFLOP/s.", row.hardware())
            }
            _ => format!("On {}, whose limits are not measured.", row.hardware()),
        };
        let random = format!("The keys and values of {}'s past are random numbers.", row.mixer);
        let random = if row.past == "drawn" { random } else { String::new() };
        for (line, lines) in [(model, &mut models), (random, &mut random_of), (machine_line, &mut machine)] {
            if !line.is_empty() && !lines.contains(&line) {
                lines.push(line);
            }
        }
    }
    for line in models.iter().chain(&random_of).chain(&machine) {
        let _ = writeln!(text, "{line}");
    }
    text +=
        "\n| mixer | weights | threads | kind | rows | depth | tokens/s, median | least | most | of the roofline |\n";
    text += "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for row in rows {
        let Row { mixer, weights, kind, batch, .. } = row;
        let threads = row.threads.map_or_else(|| "–".into(), |threads| threads.to_string());
        let share = row.roof_share.map_or_else(|| "–".into(), |share| format!("{:.0} %", 100.0 * share));
        let [median, least, most] = [row.tokens_per_second, row.least, row.most].map(rate);
        let depth = grouped(row.depth as u64);
        let _ = writeln!(
            text,
            "| {mixer} | {weights} | {threads} | {kind} | {batch} | {depth} | {median} | {least} | {most} | {share} |"
        );
    }
    text
}

/// Formats a rate with three or more digits.
pub(super) fn rate(value: f64) -> String {
    match value {
        ..9.995 => format!("{value:.2}"),
        9.995..99.95 => format!("{value:.1}"),
        _ => grouped(value.round() as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        assert_eq!([0.5, 9.994, 9.996, 99.96, 1234.5].map(rate), ["0.50", "9.99", "10.0", "100", "1,235"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
