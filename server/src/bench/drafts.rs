//! `bench --draft`: generates texts alternately with and without draft tokens. The engine generates them, with
//! sampling, so the measured speed is what a request would see, without HTTP.

mod texts;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use tidegate_model::{Decoder, ModelRunner, PoolOptions, Threads};
use tidegate_server::checkpoint::{Files, OpenDevice, TextFiles, model_name, open_draft_model};
use tidegate_server::engine::{
    Drafters, EngineHandle, EngineOptions, EngineThread, Event, Finish, Limits, Request, TextRules, spawn_with,
};

use super::measure::{About, progress};
use super::plan::{Plan, Subject};
use super::report::{json, rate};
use super::roofline::Spread;
use super::runner;
use crate::cli::{BenchArgs, BenchOutput};
use texts::{Text, texts};

/// Number of slots of an engine: one text is generated at a time.
const SLOTS: usize = 1;

/// The results for one text and one model.
#[derive(Clone, Debug, Serialize)]
struct Row {
    shape: String,
    weights: String,
    draft_model: Option<String>,
    threads: usize,
    text: &'static str,
    /// Number of measured tokens: all but the first.
    tokens: usize,
    rounds: usize,
    /// Tokens per second without and with drafts.
    without: Rates,
    with: Rates,
    /// The ratio of the medians, with drafts to without.
    ratio: f64,
    /// In all rounds, the draft tokens that the model has read and those that it accepted.
    drafted: usize,
    accepted: usize,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Rates {
    median: f64,
    least: f64,
    most: f64,
}

/// Measures every model of the plan with every text, and prints the results. Models with random weights use the
/// tokenizer in `folder`.
pub(super) fn run(args: &BenchArgs, plan: &Plan, folder: &Path) -> Result<()> {
    ensure!(
        matches!(plan.device, OpenDevice::Cpu),
        "--draft: models read drafts on the CPU alone, with our own kernels"
    );
    if let [threads] = args.threads[..] {
        ensure!(Threads::configure(threads), "--threads {threads}: the system allows {}", Threads::global().count());
    }
    ensure!(plan.steps > 1 && plan.prompt > 0, "--draft: --steps must be at least 2, and --prompt at least 1");
    ensure!(args.threads.len() < 2, "--draft is measured with one number of threads; give --threads once");
    let mut rows = Vec::new();
    for subject in &plan.subjects {
        measure(args, plan, (subject, folder), &mut rows)?;
    }
    progress("");
    let text = match args.output {
        BenchOutput::Markdown => markdown(&rows),
        BenchOutput::Json => json(&rows)?,
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn measure(args: &BenchArgs, plan: &Plan, (subject, folder): (&Subject, &Path), rows: &mut Vec<Row>) -> Result<()> {
    let about = About::of(subject, plan)?;
    progress(&format!("{} in {}: loading", about.shape, about.weights));
    let decoder = Arc::new(runner::on_cpu(subject)?);
    ensure!(decoder.speculates(), "--draft: {} reads no drafts", about.mixer);
    let vocab_size = decoder.config().vocab_size;
    // With random weights, these are the text files of another model. No token ends a text here.
    let text = TextFiles::load(folder, None, vocab_size, &[])?;
    let writes = matches!(subject, Subject::Checkpoint { .. });
    let lengths = (plan.prompt, plan.steps);
    let texts = texts(&text.tokenizer, lengths, Some(&text.sampling).filter(|_| writes))?;
    let draft_model = args.draft_model.as_ref().map(|path| {
        let files = Files { path: path.clone(), vocabulary: None };
        open_draft_model(&files, text.tokenizer.vocabulary(), vocab_size).map(|(model, _)| model)
    });
    let drafters = Drafters::by_lookup(draft_model.transpose()?);
    let rules = || TextRules {
        vocabulary: Arc::clone(text.tokenizer.vocabulary()),
        eos: Arc::from([]),
        encode: Arc::new(|_: &str| Vec::new()),
    };
    // Both engines read the same weights: how fast memory is read depends on where it lies.
    let without = Engine::start(&decoder, plan, rules(), Drafters::default(), vocab_size)?;
    let with = Engine::start(&decoder, plan, rules(), drafters, vocab_size)?;
    for (name, text) in &texts {
        let (mut rates, mut drafted, mut accepted) = ([const { Vec::new() }; 2], 0, 0);
        // The first round warms up caches and lets the engine measure the cost of drafts. It is not counted.
        for round in 0..=plan.rounds {
            progress(&format!("{} in {}, {name}: round {round} of {}", about.shape, about.weights, plan.rounds));
            let (first, plain, _) = without.write(text, lengths, round)?;
            let (second, faster, finish) = with.write(text, lengths, round)?;
            ensure!(first == second, "{name}: the text with drafts is not that without: please report this");
            if round > 0 {
                rates[0].push(plain);
                rates[1].push(faster);
                drafted += finish.drafts.drafted;
                accepted += finish.drafts.accepted;
            }
        }
        let [without, with] = rates.map(|rates| {
            let Spread { least, median, most } = Spread::of(rates);
            Rates { median, least, most }
        });
        rows.push(Row {
            shape: about.shape.clone(),
            weights: about.weights.clone(),
            draft_model: args.draft_model.as_deref().map(model_name),
            threads: Threads::global().count(),
            text: name,
            tokens: plan.steps - 1,
            rounds: plan.rounds,
            ratio: with.median / without.median,
            without,
            with,
            drafted,
            accepted,
        });
    }
    Ok(())
}

/// A running engine, and the limits of its requests.
struct Engine {
    handle: EngineHandle,
    _thread: EngineThread,
    limits: Limits,
}

impl Engine {
    fn start(
        decoder: &Arc<Decoder>,
        plan: &Plan,
        rules: TextRules,
        drafters: Drafters,
        vocab_size: usize,
    ) -> Result<Self> {
        let pool = decoder.new_pool_with(PoolOptions { state: plan.state, ..PoolOptions::new(SLOTS) });
        let model = ModelRunner::shared(Arc::clone(decoder), pool.context("the states cannot be allocated")?);
        let (handle, thread) = spawn_with(model, rules, EngineOptions::default(), drafters)?;
        let limits = Limits { vocab_size, max_prompt_tokens: usize::MAX, max_tokens: usize::MAX, sources: None };
        Ok(Self { handle, _thread: thread, limits })
    }

    /// Generates a text. Returns its tokens, the tokens per second after the first one, and how the text ended.
    fn write(&self, text: &Text, lengths: (usize, usize), round: usize) -> Result<(Vec<u32>, f64, Finish)> {
        let request = Request::new(text.request(lengths, round as u64), &self.limits)?;
        let mut stream = self.handle.submit(request)?;
        let mut ids = Vec::new();
        loop {
            match stream.blocking_next() {
                Some(Event::Delta(delta)) => ids.extend(delta.token_ids),
                Some(Event::Finished(finish)) => {
                    let rate = (ids.len() - 1) as f64 / finish.timings.decode.as_secs_f64();
                    return Ok((ids, rate, finish));
                }
                Some(Event::Failed(failure)) => bail!("{failure}"),
                Some(Event::PromptLogprobs(_)) => {}
                None => bail!("the engine has stopped"),
            }
        }
    }
}

fn markdown(rows: &[Row]) -> String {
    let mut text = String::new();
    let Some(Row { shape, tokens, rounds, threads, draft_model, .. }) = rows.first() else { return text };
    let by = draft_model.as_ref().map_or(String::new(), |model| format!(" and by {model}"));
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{shape}: tokens per second of one text of {tokens} tokens, without drafts and with drafts by lookup{by}; threads: \
         {threads}; medians (least–most) of {rounds} rounds.\n"
    );
    text += "| weights | text | without | with | ratio | drafts accepted |\n";
    text += "| --- | --- | ---: | ---: | ---: | ---: |\n";
    let rates = |Rates { median, least, most }: Rates| format!("{} ({}–{})", rate(median), rate(least), rate(most));
    for Row { weights, text: name, without, with, ratio, drafted, accepted, .. } in rows {
        let [without, with] = [*without, *with].map(rates);
        let _ = writeln!(text, "| {weights} | {name} | {without} | {with} | {ratio:.2} | {accepted} of {drafted} |");
    }
    text
}
