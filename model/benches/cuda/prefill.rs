//! A prompt: its time as a whole, and the kernels of one chunk.

use serde_json::json;
use tidegate_model::cuda::CudaDecoder;
use tidegate_model::cuda::measure::{Task, wait};
use tidegate_model::{Backend, StateType};

use super::clock::{Times, once};
use super::{Bench, Result, decode, say};

pub(super) fn prefill(bench: &Bench, decoder: &CudaDecoder) -> Result<()> {
    let (tokens, piece) = bench.subject.prompt;
    let prompt = bench.subject.ids(0, tokens);
    let mut pool = decoder.new_pool(1, StateType::Bf16)?;
    let mut seconds = Vec::new();
    // A warm-up.
    for round in 0..=bench.subject.rounds {
        pool.reset(0)?;
        wait(&mut pool)?;
        let read = |_| {
            decoder.prefill(&prompt, &mut pool, 0)?;
            Ok(wait(&mut pool)?)
        };
        let took = once(read, 1)?;
        if round > 0 {
            seconds.push(took);
        }
    }
    let times = Times::one(&seconds);
    let operations = tokens * bench.subject.operations();
    bench.line(
        "prefill",
        json!({"tokens": tokens, "seconds": times.median, "least": times.least, "most": times.most,
            "rounds": bench.subject.rounds, "operations": operations,
            "operations_per_second": operations as f64 / times.median, "state_bytes": pool.state_bytes()}),
    );
    say(&format!("prefill: a piece of {piece} tokens"));
    let task = Task::piece(&pool, &bench.subject.ids(tokens, piece), 0);
    // A scan reads and writes each state only once: its bytes say little.
    let state = 2 * pool.state_bytes();
    decode::apart(bench, decoder, &mut pool, (&format!("prefill {piece}"), &task), state)
}
