//! `tidegate bench`: tokens per second on this machine, at any depth, by device, weight type, mixer, threads and rows.
//!
//! `plan` lists what to measure, `runner` runs the models, `past` makes their states at each depth, `measure` takes the
//! times, `roofline` measures the machine's limits, and `report` prints lines and tables. `drafts` is a separate
//! benchmark: it measures the engine as it generates texts.

mod drafts;
mod measure;
mod past;
mod plan;
mod report;
mod roofline;
mod runner;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, ensure};
use tidegate_model::Threads;
use tidegate_server::checkpoint::BackendChoice;

use crate::cli::BenchArgs;
use measure::{Model, progress};
use past::MemoryBudget;
use plan::Plan;
use report::Row;
use roofline::MachineLimits;

/// Measures and prints. `default` returns the folder of the default model, for a command line that names none.
pub(crate) fn run(args: &BenchArgs, default: impl FnOnce() -> Result<PathBuf>) -> Result<()> {
    let (device, model) = match (args.shape, &args.model) {
        (Some(_), _) => {
            let own = args.backend != BackendChoice::Candle;
            ensure!(own, "--shape: random weights are for our own kernels; --backend candle measures a --model");
            // Models with random weights use another model's tokenizer.
            (args.device.open()?, if args.draft { default()? } else { PathBuf::new() })
        }
        (None, model) => {
            let model = model.clone().map_or_else(default, Ok)?;
            (args.backend.open(args.device, &model)?, model)
        }
    };
    let plan = Plan::new(args, device, &model)?;
    if args.draft {
        return drafts::run(args, &plan, &model);
    }
    let rows = measure(&plan);
    progress("");
    report::print(args.output, &rows?)
}

fn measure(plan: &Plan) -> Result<Vec<Row>> {
    let threads = plan.threads.iter().map(|&count| threads(count)).collect::<Result<Vec<_>>>()?;
    let (mut models, mut memory) = (Vec::with_capacity(plan.subjects.len()), MemoryBudget::default());
    for subject in &plan.subjects {
        models.push(Model::open(subject, plan, &threads, &mut memory)?);
    }
    let cases = plan.cases();
    let mut limits = MachineLimits::new(&threads);
    let mut rates = vec![Vec::new(); cases.len()];
    for round in 1..=plan.rounds {
        progress(&format!("round {round} of {}: the machine's limits", plan.rounds));
        limits.measure();
        for (i, (case, rates)) in cases.iter().zip(&mut rates).enumerate() {
            progress(&format!("round {round} of {}: case {} of {}", plan.rounds, i + 1, cases.len()));
            rates.push(models[case.subject].measure(case, plan)?);
        }
    }
    let rows = cases.iter().zip(rates);
    Ok(rows.map(|(case, rates)| Row::new(plan, case, &models[case.subject], rates, &limits)).collect())
}

/// Creates the thread pool. Fails if the system provides fewer threads, because the results state their number.
fn threads(count: usize) -> Result<Arc<Threads>> {
    let threads = Threads::new(count);
    ensure!(threads.count() == count, "--threads: the system cannot start {count} threads");
    Ok(Arc::new(threads))
}
