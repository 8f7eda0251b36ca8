//! Decode steps: whole steps at two depths and many batch sizes, and their kernels one by one.

use serde_json::json;
use tidegate_model::cuda::measure::{Kernel, Recording, Task, spread};
use tidegate_model::cuda::{CudaDecoder, CudaPool};
use tidegate_model::{Backend, StateType};

use super::choose::Chooser;
use super::clock::{Times, once};
use super::{Bench, Result, say};

/// Tokens of a prompt that only prepares a state.
const BEFORE: usize = 32;
/// Bytes that a device's cache may keep between repetitions (the L2 of an H200): a kernel that reads fewer says nothing
/// about the memory, and gets no share of a copy's bandwidth.
const CACHE: usize = 50 << 20;

/// A pool, and the state of its first slot after a few tokens.
pub(super) fn pool(bench: &Bench, decoder: &CudaDecoder, slots: usize) -> Result<(CudaPool, Vec<f32>)> {
    let mut pool = decoder.new_pool(slots, StateType::Bf16)?;
    decoder.prefill(&bench.subject.ids(0, BEFORE), &mut pool, 0)?;
    let state = pool.export(0)?;
    Ok((pool, state))
}

/// Imports a state that has read so many tokens into all slots.
pub(super) fn deepen(pool: &mut CudaPool, state: &[f32], tokens: u64) -> Result<()> {
    pool.import(0, state, tokens)?;
    Ok(spread(pool, 0)?)
}

/// Bytes that a step must move: the weights, and each row's state twice.
pub(super) fn step_bytes(decoder: &CudaDecoder, pool: &CudaPool, rows: usize) -> usize {
    decoder.weight_bytes() + 2 * rows * pool.state_bytes()
}

/// A step of the first `rows` slots in three forms (recorded, called with sampling on the device, and called for its
/// logits), and the repetitions of each.
pub(super) struct Step {
    ids: Vec<u32>,
    slots: Vec<usize>,
    recording: Recording,
    chooser: Chooser,
    times: [usize; 3],
}

impl Step {
    pub(super) fn new(bench: &Bench, decoder: &CudaDecoder, pool: &mut CudaPool, rows: usize) -> Result<Self> {
        let (ids, slots) = (bench.subject.ids(rows, rows), (0..rows).collect::<Vec<_>>());
        let recording = Task::step(pool, &ids, &slots).record(decoder, pool, None)?;
        let chooser = Chooser::new(rows, decoder.config().vocab_size)?;
        let mut step = Self { ids, slots, recording, chooser, times: [0; 3] };
        let device = bench.budget.pace(|times| Ok(step.recording.run(decoder, pool, times)?))?;
        let call = bench.budget.pace(|times| step.calls(decoder, pool, times))?;
        let mut logits = Vec::new();
        let by_logits = bench.budget.pace(|times| step.for_logits(decoder, pool, &mut logits, times))?;
        step.times = [device, call, by_logits];
        Ok(step)
    }

    fn calls(&mut self, decoder: &CudaDecoder, pool: &mut CudaPool, times: usize) -> Result<()> {
        (0..times).try_for_each(|_| self.chooser.step(decoder, pool, &self.ids, &self.slots))
    }

    fn for_logits(
        &self,
        decoder: &CudaDecoder,
        pool: &mut CudaPool,
        logits: &mut Vec<f32>,
        times: usize,
    ) -> Result<()> {
        (0..times).try_for_each(|_| Ok(decoder.decode_into(&self.ids, pool, &self.slots, logits)?))
    }

    /// Seconds of a step on the device alone, and of a call that samples there.
    pub(super) fn measure(&mut self, decoder: &CudaDecoder, pool: &mut CudaPool) -> Result<(f64, f64)> {
        let times = self.times;
        let device = once(|times| Ok(self.recording.run(decoder, pool, times)?), times[0])?;
        let call = once(|times| self.calls(decoder, pool, times), times[1])?;
        Ok((device, call))
    }

    /// Seconds of a call that copies its logits to the host, without sampling.
    pub(super) fn measure_logits(&self, decoder: &CudaDecoder, pool: &mut CudaPool) -> Result<f64> {
        let mut logits = Vec::with_capacity(self.ids.len() * decoder.config().vocab_size);
        self.for_logits(decoder, pool, &mut logits, 1)?; // allocates the buffer
        let seconds = once(|times| self.for_logits(decoder, pool, &mut logits, times), self.times[2])?;
        if !logits.iter().all(|v| v.is_finite()) {
            return Err("a step gave logits that are no numbers".into());
        }
        Ok(seconds)
    }
}

/// Steps of all batch sizes, with empty slots and with slots that have read a million tokens.
pub(super) fn decode(bench: &Bench, decoder: &CudaDecoder) -> Result<()> {
    let (batches, deep) = (bench.subject.batches, bench.subject.deep);
    let fresh = decoder.new_pool(bench.subject.rows(), StateType::Bf16)?;
    let (mut far, state) = pool(bench, decoder, bench.subject.rows())?;
    deepen(&mut far, &state, deep)?;
    let mut pools = [(0, fresh), (deep, far)];
    let cases: Vec<(usize, usize)> = batches.iter().flat_map(|&rows| [(rows, 0), (rows, 1)]).collect();
    let mut steps = Vec::new();
    for &(rows, pool) in &cases {
        steps.push(Step::new(bench, decoder, &mut pools[pool].1, rows)?);
    }
    let mut seconds = vec![(Vec::new(), Vec::new(), Vec::new()); cases.len()];
    for round in 0..bench.subject.rounds {
        say(&format!("decode: round {} of {}", round + 1, bench.subject.rounds));
        for ((step, &(_, pool)), seconds) in steps.iter_mut().zip(&cases).zip(&mut seconds) {
            let (device, call) = step.measure(decoder, &mut pools[pool].1)?;
            seconds.0.push(device);
            seconds.1.push(call);
            seconds.2.push(step.measure_logits(decoder, &mut pools[pool].1)?);
        }
    }
    for (&(rows, pool), (device, call, logits)) in cases.iter().zip(&seconds) {
        let (depth, pool) = (pools[pool].0, &pools[pool].1);
        let (device, call) = (Times::one(device), Times::one(call));
        let bytes = step_bytes(decoder, pool, rows);
        let logits = Times::one(logits).ms();
        let ([ms, least, most], [call_ms, call_least, call_most]) = (device.ms(), call.ms());
        bench.line(
            "decode",
            json!({"batch": rows, "depth": depth, "ms": ms, "least": least, "most": most, "call_ms": call_ms,
                "call_least": call_least, "call_most": call_most, "logits_ms": logits[0], "bytes": bytes, "rounds": bench.subject.rounds,
                "share": bench.share(bytes, device.median), "call_share": bench.share(bytes, call.median),
                "state_bytes": pool.state_bytes()}),
        );
    }
    Ok(())
}

/// Measures the kernels of a task one by one, each as often as the task launches it. `state`: bytes that a recurrence of
/// the task must move.
pub(super) fn apart(
    bench: &Bench,
    decoder: &CudaDecoder,
    pool: &mut CudaPool,
    (of, task): (&str, &Task),
    state: usize,
) -> Result<()> {
    let kernels = task.kernels(decoder, pool)?;
    let mut recordings = vec![task.record(decoder, pool, None)?];
    for kernel in &kernels {
        recordings.push(task.record(decoder, pool, Some(kernel))?);
    }
    let mut paces = Vec::new();
    for recording in &recordings {
        paces.push(bench.budget.pace(|times| Ok(recording.run(decoder, pool, times)?))?);
    }
    let mut seconds = vec![Vec::new(); recordings.len()];
    for _ in 0..bench.subject.rounds {
        for ((recording, &times), seconds) in recordings.iter().zip(&paces).zip(&mut seconds) {
            seconds.push(once(|times| Ok(recording.run(decoder, pool, times)?), times)?);
        }
    }
    let times = Times::of(&seconds);
    let [ms, least, most] = times[0].ms();
    bench.line("whole", json!({"of": of, "ms": ms, "least": least, "most": most, "rounds": bench.subject.rounds}));
    for (kernel, times) in kernels.iter().zip(&times[1..]) {
        let [ms, least, most] = times.ms();
        let mut line = json!({"of": of, "kernel": kernel.name, "grid": kernel.grid, "threads": kernel.threads,
            "times": kernel.times, "ms": ms, "least": least, "most": most, "product": kernel.product});
        if let Some((bytes, held)) = moved(kernel, state) {
            line["bytes"] = bytes.into();
            if held > CACHE {
                line["share"] = bench.share(bytes, times.median).into();
            } else {
                line["in_cache"] = true.into();
            }
        }
        if let Some(operations) = operations(kernel) {
            line["operations_per_second"] = (operations as f64 / times.median).into();
        }
        bench.line("kernel", line);
    }
    Ok(())
}

/// Bytes that all launches of a kernel must move (a product's weights, a recurrence's states twice), and bytes of the memory
/// that they touch.
fn moved(kernel: &Kernel, state: usize) -> Option<(usize, usize)> {
    if kernel.name.starts_with("recurrence_") {
        return Some((state, state / 2));
    }
    let width = if kernel.name.starts_with("linear_f32") { 4 } else { 2 };
    let weights = |[_, ins, outs]: [usize; 3]| kernel.times * ins * outs * width;
    kernel.product.map(|product| (weights(product), weights(product)))
}

fn operations(kernel: &Kernel) -> Option<usize> {
    kernel.product.map(|[rows, ins, outs]| kernel.times * 2 * rows * ins * outs)
}

/// Measures the kernels of a step one by one. With many rows, the recurrence alone touches far more states than any cache
/// holds.
pub(super) fn kernels(bench: &Bench, decoder: &CudaDecoder) -> Result<()> {
    let (mut pool, state) = pool(bench, decoder, bench.subject.rows())?;
    deepen(&mut pool, &state, BEFORE as u64)?;
    for &rows in bench.subject.taken_apart {
        say(&format!("kernels: a step of {rows} rows"));
        let (ids, slots) = (bench.subject.ids(rows, rows), (0..rows).collect::<Vec<_>>());
        let task = Task::step(&pool, &ids, &slots);
        let state = 2 * rows * pool.state_bytes();
        apart(bench, decoder, &mut pool, (&format!("decode {rows}"), &task), state)?;
    }
    Ok(())
}
