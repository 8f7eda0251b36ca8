//! Cost against length, gathered from what `tidegate bench --output json` wrote: a line for each case, in one file or
//! several. Nothing here measures.
//!
//! Of one file of the experiment all lines must have been measured alike: the same shape, types and threads.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::record::{Record, machine};

/// One mixer at one depth.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// What mixes the tokens.
    pub mixer: String,
    /// What the model does.
    pub kind: Doing,
    /// Rows at once; 1 of a prompt.
    pub batch: u64,
    /// Tokens that each row has read before.
    pub depth: u64,
    /// Of all rows together: the median of all rounds.
    pub tokens_per_second: f64,
    /// The least of any round.
    pub low: f64,
    /// The most.
    pub high: f64,
    /// Of one row; of softmax attention room for the longest text of the run.
    pub state_bytes: u64,
}

/// What a model does with tokens.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Doing {
    /// Takes rows one token further, step after step.
    Decode,
    /// Reads a prompt.
    Prefill,
}

/// Why no file can be made.
#[derive(Debug, thiserror::Error)]
pub enum GatherError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is not what bench writes, or does not belong to the others.
    #[error("{path}:{line}: {problem}")]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1 on.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A file has no line.
    #[error("{0}: holds no line of tidegate bench --output json")]
    Empty(PathBuf),
}

/// What is read of a line; the rest of it is about the machine's roof.
#[derive(Clone, Debug, Deserialize)]
struct Line {
    shape: String,
    weights: String,
    state: String,
    threads: u64,
    mixer: String,
    kind: Doing,
    batch: u64,
    depth: u64,
    past: String,
    /// Of one measurement, of all rows together.
    tokens: u64,
    tokens_per_second: f64,
    least: f64,
    most: f64,
    rounds: u64,
    state_bytes: u64,
    // What bench does not say so far, and would be kept.
    command: Option<String>,
    machine: Option<String>,
    date: Option<String>,
}

impl Line {
    /// What must be the same in all lines.
    fn alike(&self) -> [(&'static str, String); 4] {
        let Self { shape, weights, state, threads, .. } = self;
        [
            ("shape", shape.clone()),
            ("weights", weights.clone()),
            ("state", state.clone()),
            ("threads", threads.to_string()),
        ]
    }

    fn row(&self) -> Row {
        Row {
            mixer: self.mixer.clone(),
            kind: self.kind,
            batch: self.batch,
            depth: self.depth,
            tokens_per_second: self.tokens_per_second,
            low: self.least,
            high: self.most,
            state_bytes: self.state_bytes,
        }
    }

    fn check(&self) -> Result<(), String> {
        let Self { tokens_per_second, least, most, batch, tokens, .. } = *self;
        if !(least > 0.0 && least <= tokens_per_second && tokens_per_second <= most && most.is_finite()) {
            return Err(format!(
                "least, tokens_per_second and most must rise from above 0, found {least}, {tokens_per_second}, {most}"
            ));
        }
        if batch == 0 || tokens == 0 || !tokens.is_multiple_of(batch) {
            return Err(format!("tokens must be steps of batch rows, found {tokens} and {batch}"));
        }
        Ok(())
    }
}

/// Reads what bench wrote; `name` says how a file is called in the record's command, and `command` how this is.
///
/// # Errors
/// [`GatherError`] with the file and the line.
pub fn gather(files: &[PathBuf], command: &str, name: impl Fn(&Path) -> String) -> Result<Record<Row>, GatherError> {
    let mut all: Vec<Line> = Vec::new();
    let (mut commands, mut written) = (Vec::new(), SystemTime::UNIX_EPOCH);
    for path in files {
        let failed = |source| GatherError::File { path: path.clone(), source };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        let changed = std::fs::metadata(path).and_then(|of| of.modified()).map_err(failed)?;
        written = written.max(changed);
        let before = all.len();
        for (at, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
            let wrong = |problem| GatherError::Line { path: path.clone(), line: at + 1, problem };
            let line = parsed(text).map_err(wrong)?;
            fits(&line, &all).map_err(wrong)?;
            all.push(line);
        }
        let own = &all[before..];
        if own.is_empty() {
            return Err(GatherError::Empty(path.clone()));
        }
        commands.extend(own[0].command.clone().or_else(|| run(own)).map(|run| format!("{run} > {}", name(path))));
    }
    commands.push(command.to_owned());
    let said = |of: fn(&Line) -> &Option<String>| each_once(all.iter().filter_map(|line| of(line).clone()));
    let (machines, dates) = (said(|line| &line.machine), said(|line| &line.date));
    let mut settings = settings(&all);
    if machines.is_empty() || dates.is_empty() || all.iter().all(|line| line.command.is_none()) {
        let text = "where bench's lines do not say them: bench's command is put together from their numbers, the machine is \
                    that which gathered them, the date the newest file's";
        settings.insert("origin".into(), text.into());
    }
    let written = chrono::DateTime::<chrono::Utc>::from(written).format("%Y-%m-%d").to_string();
    Ok(Record {
        experiment: "cost".into(),
        command: commands.join(" && "),
        machine: if machines.is_empty() { machine() } else { machines.join("; ") },
        date: dates.into_iter().max().unwrap_or(written),
        settings,
        rows: all.iter().map(Line::row).collect(),
    })
}

fn parsed(text: &str) -> Result<Line, String> {
    let json = &mut serde_json::Deserializer::from_str(text);
    let line: Line =
        serde_path_to_error::deserialize(&mut *json).map_err(|error| match error.path().to_string().as_str() {
            "." => format!("no line of tidegate bench --output json: {}", error.inner()),
            path => format!("{path}: {}", error.inner()),
        })?;
    json.end().map_err(|error| error.to_string())?;
    line.check()?;
    Ok(line)
}

/// Whether a line can stand beside those before it.
fn fits(line: &Line, all: &[Line]) -> Result<(), String> {
    let Some(first) = all.first() else { return Ok(()) };
    for ((field, found), (_, wanted)) in line.alike().into_iter().zip(first.alike()) {
        if found != wanted {
            return Err(format!("{field} must be {wanted}, as in the first line of all, found {found}"));
        }
    }
    let case = |line: &Line| (line.mixer.clone(), line.kind, line.batch, line.depth);
    if all.iter().any(|other| case(other) == case(line)) {
        let Line { mixer, batch, depth, .. } = line;
        return Err(format!("{mixer} with batch {batch} at depth {depth} is there twice"));
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

/// The lists that a run of bench was given, each in the lines' order.
struct Lists {
    mixers: Vec<String>,
    depths: Vec<u64>,
    batches: Vec<u64>,
    steps: Vec<u64>,
    /// Tokens of prompts.
    prompts: Vec<u64>,
    rounds: Vec<u64>,
}

impl Lists {
    fn of(lines: &[Line]) -> Self {
        let of = |kind: Doing| lines.iter().filter(move |line| line.kind == kind);
        Self {
            mixers: each_once(lines.iter().map(|line| line.mixer.clone())),
            depths: each_once(lines.iter().map(|line| line.depth)),
            batches: each_once(of(Doing::Decode).map(|line| line.batch)),
            steps: each_once(of(Doing::Decode).map(|line| line.tokens / line.batch)),
            prompts: each_once(of(Doing::Prefill).map(|line| line.tokens)),
            rounds: each_once(lines.iter().map(|line| line.rounds)),
        }
    }
}

/// The run that gives these lines again, where they are one run's: every mixer with every batch, and a prompt if there is
/// one, at every depth.
fn run(lines: &[Line]) -> Option<String> {
    let Lists { mixers, depths, batches, steps, prompts, rounds } = Lists::of(lines);
    let whole = mixers.len() * (batches.len() + prompts.len()) * depths.len() == lines.len();
    let [[steps], [rounds]] = [&steps[..], &rounds[..]] else { return None };
    if !whole || prompts.len() > 1 {
        return None;
    }
    let Line { shape, weights, state, threads, .. } = &lines[0];
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

/// What the rows have in common.
fn settings(lines: &[Line]) -> Map<String, Value> {
    let list = |numbers: Vec<u64>| if let [one] = numbers[..] { json!(one) } else { json!(numbers) };
    let Lists { steps, prompts, rounds, .. } = Lists::of(lines);
    let mut said: Map<String, Value> =
        lines.first().map(Line::alike).into_iter().flatten().map(|(name, value)| (name.into(), value.into())).collect();
    for (name, numbers) in [("steps", steps), ("prompt", prompts), ("rounds", rounds)] {
        if !numbers.is_empty() {
            said.insert(name.into(), list(numbers));
        }
    }
    said.insert(
        "tokens_per_second".into(),
        "of all rows together; the median of the rounds, low and high their ends".into(),
    );
    let drawn = each_once(lines.iter().filter(|line| line.past == "drawn").map(|line| line.mixer.clone()));
    if !drawn.is_empty() {
        let text = format!("the keys and values of what {} read before are random numbers", drawn.join(" and "));
        said.insert("past".into(), text.into());
    }
    if lines.iter().any(|line| line.mixer == "softmax") {
        said.insert("state_bytes".into(), "of softmax: room for the longest text of the run".into());
    }
    said
}
