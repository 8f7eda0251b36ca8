//! Cost against text length: turns the lines of `tidegate bench --output json` into a record. Nothing here measures.
//! All lines must have the same shape, types and threads.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::bench::{self, BenchError, Line, Phase};
use crate::record::{Record, machine};

/// The cost of one mixer at one depth.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// The mixer's name.
    pub mixer: String,
    /// Decoding or reading a prompt.
    pub kind: Phase,
    /// Rows computed at once; 1 for a prompt.
    pub batch: u64,
    /// Tokens that each row has read so far.
    pub depth: u64,
    /// Tokens per second of all rows together: the median over all rounds.
    pub tokens_per_second: f64,
    /// The lowest of any round.
    pub low: f64,
    /// The highest of any round.
    pub high: f64,
    /// Bytes of state for one row. Softmax attention reserves room for the longest text of the run.
    pub state_bytes: u64,
}

/// The properties that all lines must share.
fn shared(line: &Line) -> [(&'static str, String); 4] {
    let Line { shape, weights, state, threads, .. } = line;
    let threads = threads.map_or_else(|| "-".into(), |threads| threads.to_string());
    [("shape", shape.clone()), ("weights", weights.clone()), ("state", state.clone()), ("threads", threads)]
}

fn row(line: &Line) -> Row {
    Row {
        mixer: line.mixer.clone(),
        kind: line.kind,
        batch: line.batch,
        depth: line.depth,
        tokens_per_second: line.tokens_per_second,
        low: line.least,
        high: line.most,
        state_bytes: line.state_bytes,
    }
}

/// Reads the files that `bench` wrote into a record. The record's command consists of the command for each file, with
/// the file name that `name` gives, followed by `command`.
///
/// # Errors
/// [`BenchError`] with the file and the line.
pub fn gather(files: &[PathBuf], command: &str, name: impl Fn(&Path) -> String) -> Result<Record<Row>, BenchError> {
    let mut all: Vec<Line> = Vec::new();
    let (mut commands, mut written) = (Vec::new(), SystemTime::UNIX_EPOCH);
    for path in files {
        let own = bench::read(path, |line| {
            fits(line, &all)?;
            all.push(line.clone());
            Ok(())
        })?;
        let changed = std::fs::metadata(path).and_then(|of| of.modified());
        written = written.max(changed.map_err(|source| BenchError::File { path: path.clone(), source })?);
        commands.extend(own[0].command.clone().or_else(|| run(&own)).map(|run| format!("{run} > {}", name(path))));
    }
    commands.push(command.to_owned());
    let distinct = |of: fn(&Line) -> &Option<String>| each_once(all.iter().filter_map(|line| of(line).clone()));
    let (machines, dates) = (distinct(|line| &line.machine), distinct(|line| &line.date));
    let mut settings = settings(&all);
    if machines.is_empty() || dates.is_empty() || all.iter().all(|line| line.command.is_none()) {
        let text = "What the output of bench does not state is filled in: the command is reconstructed from the \
                    numbers in the output, the machine is the one that gathered the files, and the date is that of the \
                    newest file.";
        settings.insert("origin".into(), text.into());
    }
    let written = chrono::DateTime::<chrono::Utc>::from(written).format("%Y-%m-%d").to_string();
    Ok(Record {
        experiment: "cost".into(),
        command: commands.join(" && "),
        machine: if machines.is_empty() { machine() } else { machines.join("; ") },
        date: dates.into_iter().max().unwrap_or(written),
        settings,
        rows: all.iter().map(row).collect(),
    })
}

/// Checks that a line can be compared with the earlier ones.
fn fits(line: &Line, all: &[Line]) -> Result<(), String> {
    if line.threads.is_none() {
        return Err(format!("threads must be a number: only runs on a CPU are compared, found {}", line.device));
    }
    let Some(first) = all.first() else { return Ok(()) };
    for ((field, found), (_, wanted)) in shared(line).into_iter().zip(shared(first)) {
        if found != wanted {
            return Err(format!("{field} must be {wanted}, as in the first line of all, found {found}"));
        }
    }
    let case = |line: &Line| (line.mixer.clone(), line.kind, line.batch, line.depth);
    if all.iter().any(|other| case(other) == case(line)) {
        let Line { mixer, batch, depth, .. } = line;
        return Err(format!("{mixer} with batch {batch} at depth {depth} appears twice"));
    }
    Ok(())
}

fn each_once<T: PartialEq>(list: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for item in list {
        if !once.contains(&item) {
            once.push(item);
        }
    }
    once
}

/// The options of a `bench` run, in the order of its lines.
struct Lists {
    mixers: Vec<String>,
    depths: Vec<u64>,
    batches: Vec<u64>,
    steps: Vec<u64>,
    /// Tokens per prompt.
    prompts: Vec<u64>,
    rounds: Vec<u64>,
}

impl Lists {
    fn of(lines: &[Line]) -> Self {
        let of = |kind: Phase| lines.iter().filter(move |line| line.kind == kind);
        Self {
            mixers: each_once(lines.iter().map(|line| line.mixer.clone())),
            depths: each_once(lines.iter().map(|line| line.depth)),
            batches: each_once(of(Phase::Decode).map(|line| line.batch)),
            steps: each_once(of(Phase::Decode).map(|line| line.tokens / line.batch)),
            prompts: each_once(of(Phase::Prefill).map(|line| line.tokens)),
            rounds: each_once(lines.iter().map(|line| line.rounds)),
        }
    }
}

/// Returns the command that measured these lines, if they are a complete run: every mixer with every batch, and a
/// prompt if there is one, at every depth.
fn run(lines: &[Line]) -> Option<String> {
    let Lists { mixers, depths, batches, steps, prompts, rounds } = Lists::of(lines);
    let complete = mixers.len() * (batches.len() + prompts.len()) * depths.len() == lines.len();
    let [[steps], [rounds]] = [&steps[..], &rounds[..]] else { return None };
    if !complete || prompts.len() > 1 {
        return None;
    }
    let [(_, shape), (_, weights), (_, state), (_, threads)] = shared(&lines[0]);
    let model = if ["12m", "125m", "350m"].contains(&shape.as_str()) { "shape" } else { "model" };
    let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    Some(format!(
        "tidegate bench --{model} {shape} --weights {weights} --mixer {} --threads {threads} --state {state} \
         --depths {} --batch {} --prompt {} --steps {steps} --rounds {rounds} --output json",
        mixers.join(","),
        list(&depths),
        list(&batches),
        prompts.first().unwrap_or(&0),
    ))
}

/// The settings that the rows share.
fn settings(lines: &[Line]) -> Map<String, Value> {
    let list = |numbers: Vec<u64>| if let [one] = numbers[..] { json!(one) } else { json!(numbers) };
    let Lists { steps, prompts, rounds, .. } = Lists::of(lines);
    let mut settings: Map<String, Value> =
        lines.first().map(shared).into_iter().flatten().map(|(name, value)| (name.into(), value.into())).collect();
    for (name, numbers) in [("steps", steps), ("prompt", prompts), ("rounds", rounds)] {
        if !numbers.is_empty() {
            settings.insert(name.into(), list(numbers));
        }
    }
    settings.insert(
        "tokens_per_second".into(),
        "The total of all rows: the median over the rounds. low and high are the lowest and highest round.".into(),
    );
    let drawn = each_once(lines.iter().filter(|line| line.past == "drawn").map(|line| line.mixer.clone()));
    if !drawn.is_empty() {
        let text = format!("For {}, the keys and values of earlier tokens are random numbers.", drawn.join(" and "));
        settings.insert("past".into(), text.into());
    }
    if lines.iter().any(|line| line.mixer == "softmax") {
        settings.insert("state_bytes".into(), "Softmax reserves room for the longest text of the run.".into());
    }
    settings
}
