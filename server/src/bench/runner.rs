//! The decoders that a benchmark measures, with their pools.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tidegate_model::{Backend, Decoder, Device, Pool, PoolOptions, StateType, Threads, candle, checkpoint};
use tidegate_server::checkpoint::OpenDevice;

use super::plan::{Plan, Subject};
use crate::cli::word;

/// Seed of random weights; the same in every run.
const SEED: u64 = 0;

/// A decoder with one pool per lane: one lane for each thread count, or one on a GPU. A pool has a slot for each row of
/// the plan's largest batch.
pub(super) trait Runner {
    /// Returns the bytes of the weights that a step reads.
    fn weight_bytes(&self) -> usize;

    /// Returns the bytes of one row's state.
    fn state_bytes(&self) -> usize;

    /// Returns the state of the first slot.
    fn export(&self, lane: usize) -> Result<Vec<f32>>;

    /// Replaces the state of a slot with one from [`Self::export`], whose text has `tokens` tokens.
    fn import(&mut self, lane: usize, slot: usize, numbers: &[f32], tokens: u64) -> Result<()>;

    /// Resets the first slot.
    fn reset(&mut self, lane: usize) -> Result<()>;

    /// Reads tokens into the first slot, without computing logits.
    fn prefill(&mut self, lane: usize, ids: &[u32]) -> Result<()>;

    /// Reads tokens into the first slot, and computes the logits of the last one.
    fn prefill_logits(&mut self, lane: usize, ids: &[u32], logits: &mut Vec<f32>) -> Result<()>;

    /// Reads one token into each slot, and computes the logits.
    fn decode(&mut self, lane: usize, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<()>;
}

/// Loads or creates a model on the plan's device.
pub(super) fn open(subject: &Subject, plan: &Plan, threads: &[Arc<Threads>]) -> Result<Box<dyn Runner>> {
    let (slots, state) = (plan.slots(), plan.state);
    Ok(match &plan.device {
        OpenDevice::Cpu => {
            let decoder = on_cpu(subject)?;
            let pool = |threads: &Arc<Threads>| {
                let options = PoolOptions { slots, threads: Arc::clone(threads), state };
                decoder.new_pool_with(options).context("the states cannot be allocated")
            };
            let pools = threads.iter().map(pool).collect::<Result<_>>()?;
            Box::new(Lanes { decoder, pools })
        }
        OpenDevice::Candle(device) => by_candle(device, subject, plan, threads)?,
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(device) => {
            let decoder = match subject {
                Subject::Checkpoint { folder, weights: None, .. } => device.load(folder)?,
                Subject::Checkpoint { weights: Some(weights), .. } => {
                    anyhow::bail!("--weights {weights}: {device} cannot convert a checkpoint's weights")
                }
                Subject::Shape { shape, weights, config } => device
                    .random((**config).clone(), *weights, SEED)
                    .with_context(|| format!("--shape {} with {weights}", word(shape)))?,
            };
            let pool = decoder.new_pool(slots, state).context("the states cannot be allocated")?;
            Box::new(Lanes { decoder, pools: vec![pool] })
        }
    })
}

/// Returns a model that our own kernels compute on the CPU.
pub(super) fn on_cpu(subject: &Subject) -> Result<Decoder> {
    Ok(match subject {
        Subject::Checkpoint { folder, weights: None, .. } => checkpoint::load(folder, &Device::Cpu)?,
        Subject::Checkpoint { folder, weights: Some(weights), .. } => checkpoint::load_as(folder, *weights)?,
        Subject::Shape { shape, weights, config } => Decoder::random((**config).clone(), *weights, SEED)
            .with_context(|| format!("--shape {} with {weights}", word(shape)))?,
    })
}

fn by_candle(device: &Device, subject: &Subject, plan: &Plan, threads: &[Arc<Threads>]) -> Result<Box<dyn Runner>> {
    let Subject::Checkpoint { folder, weights: None, .. } = subject else {
        anyhow::bail!("--weights: the candle backend computes with weights in f32")
    };
    ensure!(plan.state == StateType::F32, "--state: the candle backend keeps states in f32");
    let decoder = candle::Checkpoint::open(folder)?.decoder(device)?;
    let counts = if threads.is_empty() { vec![1] } else { threads.iter().map(|threads| threads.count()).collect() };
    let pools = counts.into_iter().map(|count| decoder.new_pool(plan.slots(), count));
    let pools = pools.collect::<Result<_, _>>().context("the states cannot be allocated")?;
    Ok(Box::new(Lanes { decoder, pools }))
}

struct Lanes<B: Backend> {
    decoder: B,
    pools: Vec<Pool<B::States>>,
}

impl<B: Backend> Runner for Lanes<B> {
    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    fn state_bytes(&self) -> usize {
        self.pools[0].state_bytes()
    }

    fn export(&self, lane: usize) -> Result<Vec<f32>> {
        Ok(self.pools[lane].export(0)?)
    }

    fn import(&mut self, lane: usize, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
        Ok(self.pools[lane].import(slot, numbers, tokens)?)
    }

    fn reset(&mut self, lane: usize) -> Result<()> {
        Ok(self.pools[lane].reset(0)?)
    }

    fn prefill(&mut self, lane: usize, ids: &[u32]) -> Result<()> {
        Ok(self.decoder.prefill(ids, &mut self.pools[lane], 0)?)
    }

    fn prefill_logits(&mut self, lane: usize, ids: &[u32], logits: &mut Vec<f32>) -> Result<()> {
        Ok(self.decoder.prefill_logits(ids, &mut self.pools[lane], 0, logits)?)
    }

    fn decode(&mut self, lane: usize, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        Ok(self.decoder.decode_into(ids, &mut self.pools[lane], slots, logits)?)
    }
}
