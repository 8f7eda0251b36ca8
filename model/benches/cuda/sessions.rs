//! Many conversations of a checkpoint at once, stepped in batches in turn; the device samples.

use std::path::Path;
use std::time::Instant;

use serde_json::json;
use tidegate_model::cuda;
use tidegate_model::cuda::measure::{Task, wait};
use tidegate_model::{Backend, StateType};

use super::choose::Chooser;
use super::clock::quantile;
use super::subject::ids;
use super::{Bench, Result, decode, say};

/// Tokens that each conversation has read before.
const PROMPT: usize = 4;
/// Least seconds for one batch size, and least turns of each conversation.
const LEAST: (f64, usize) = (3.0, 30);
/// Seconds for one batch size after which it is given up.
const MOST: f64 = 20.0;

pub(super) fn sessions(bench: &Bench, folder: &Path) -> Result<()> {
    let decoder = cuda::load(folder, &bench.device)?;
    let vocab = decoder.config().vocab_size;
    let (count, batches) = bench.subject.sessions;
    let clock = Instant::now();
    let (before, _) = bench.device.memory()?;
    let mut pool = decoder.new_pool(count, StateType::Bf16)?;
    let (after, _) = bench.device.memory()?;
    let pool_seconds = clock.elapsed().as_secs_f64();
    let clock = Instant::now();
    for slot in 0..count {
        decoder.prefill(&ids(slot * PROMPT, PROMPT, vocab), &mut pool, slot)?;
    }
    wait(&mut pool)?;
    let prompts = clock.elapsed().as_secs_f64();
    say(&format!("sessions: {count} of {PROMPT} tokens each, read in {prompts:.1} s"));
    let slots: Vec<usize> = (0..count).collect();
    let least = if bench.subject.name == "emulated" { (0.0, 2) } else { LEAST };
    for &batch in batches {
        let mut choosers =
            slots.chunks(batch).map(|slots| Chooser::new(slots.len(), vocab)).collect::<Result<Vec<_>>>()?;
        let (mut steps, mut gaps) = (Vec::new(), Vec::new());
        // When each batch got its last tokens; empty in the warm-up turn.
        let mut done = vec![None; count.div_ceil(batch)];
        let (mut clock, mut turns) = (Instant::now(), 0);
        // The first turn is a warm-up: it records the step of a new batch size.
        for turn in 0.. {
            if turn == 1 {
                clock = Instant::now();
                (steps, done) = (Vec::new(), vec![None; done.len()]);
            }
            turns = usize::saturating_sub(turn, 1);
            let so_far = clock.elapsed().as_secs_f64();
            // A gap lasts from one turn to the next, so there is one turn more than gaps.
            let enough = turns > least.1 && so_far > least.0;
            if enough || (turns > 1 && (so_far > MOST || bench.budget.is_spent())) {
                break;
            }
            for ((slots, done), chooser) in slots.chunks(batch).zip(&mut done).zip(&mut choosers) {
                let tokens = ids(turn * count + slots[0], slots.len(), vocab);
                let one = Instant::now();
                chooser.step(&decoder, &mut pool, &tokens, slots)?;
                steps.push(one.elapsed().as_secs_f64());
                if let Some(before) = done.replace(Instant::now()) {
                    gaps.push(before.elapsed().as_secs_f64());
                }
            }
        }
        let seconds = clock.elapsed().as_secs_f64();
        let sorted = |of: &[f64]| {
            let mut of = of.to_vec();
            of.sort_by(f64::total_cmp);
            of
        };
        let ms = |of: &[f64], share| quantile(&sorted(of), share) * 1e3;
        bench.line(
            "sessions",
            json!({"slots": count, "batch": batch, "checkpoint": folder.display().to_string(),
                "tokens_per_second": (turns * count) as f64 / seconds, "steps": steps.len(),
                "step_ms": {"p50": ms(&steps, 0.5), "p99": ms(&steps, 0.99), "most": ms(&steps, 1.0)},
                "gap": "of a session, from one token on the host to the next: a turn through all batches",
                "gap_ms": {"p50": ms(&gaps, 0.5), "p99": ms(&gaps, 0.99), "most": ms(&gaps, 1.0)}, "turns": turns,
                "state_bytes": pool.state_bytes(), "pool_bytes": before.saturating_sub(after),
                "pool_seconds": pool_seconds, "prompt_tokens_per_second": (count * PROMPT) as f64 / prompts}),
        );
    }
    // The device's share of a step, and the call's.
    let rows = batches[0];
    let task = Task::step(&pool, &ids(0, rows, vocab), &slots[..rows]);
    let state = 2 * rows * pool.state_bytes();
    decode::apart(bench, &decoder, &mut pool, (&format!("sessions {rows}"), &task), state)
}
