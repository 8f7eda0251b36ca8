//! What a decoder remembers: a pool of slots, one conversation each, every slot of the same constant size.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};

use crate::config::DecoderConfig;
use crate::layout::StateLayout;

/// One layer's part of the pool.
#[derive(Debug)]
pub(crate) struct LayerState {
    /// S (2D, d), z (2D) and c of every head: (slots, heads, 2D (d + 1) + 1), f32
    pub(crate) memory: Tensor,
    /// The last inputs of the convolutions of q, k and v, oldest first: (slots, conv_kernel - 1, 3 heads d), f32
    pub(crate) conv: Option<Tensor>,
    pub(crate) denominators: Tally,
}

/// Counts of the pool's whole life, behind the shared reference that a layer has of its state.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    all: AtomicU64,
    clamped: AtomicU64,
}

impl Tally {
    pub(crate) fn note(&self, all: usize, clamped: u64) {
        self.all.fetch_add(all as u64, Relaxed);
        self.clamped.fetch_add(clamped, Relaxed);
    }
}

/// Denominators (`phi_q . z`) that were divided by while texts were read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denominators {
    /// One for each token, layer and head.
    pub all: u64,
    /// Those of them that were below their floor, and were held there.
    pub clamped: u64,
}

/// Slots for conversations, allocated once and addressed by index.
#[derive(Debug)]
pub struct StatePool {
    layers: Vec<LayerState>,
    tokens: Vec<u64>,
    /// Slots whose layers a failed step may have left at different tokens: only a reset makes them usable.
    torn: Vec<bool>,
    layout: StateLayout,
}

impl StatePool {
    /// A pool of empty texts.
    ///
    /// # Errors
    /// When `slots` is 0 or their bytes are past what a machine can address, or the device has no room.
    pub fn new(config: &DecoderConfig, slots: usize, device: &Device) -> Result<Self> {
        let bytes = slots.checked_mul(config.state_bytes());
        if slots == 0 || bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            bail!("slots must be at least 1 and fit into memory, found {slots} of {} bytes", config.state_bytes());
        }
        let layer = || {
            let shape = (slots, config.num_attention_heads, config.head_state_len());
            let conv = (slots, config.conv_kernel.saturating_sub(1), 3 * config.inner_size());
            Ok(LayerState {
                memory: Tensor::zeros(shape, DType::F32, device)?,
                conv: (config.conv_kernel > 0).then(|| Tensor::zeros(conv, DType::F32, device)).transpose()?,
                denominators: Tally::default(),
            })
        };
        let layers = (0..config.num_hidden_layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Self { layers, tokens: vec![0; slots], torn: vec![false; slots], layout: config.state_layout() })
    }

    /// How many conversations fit.
    pub fn slots(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that a slot has taken in since it was last zeroed.
    pub fn tokens(&self, slot: usize) -> u64 {
        self.tokens.get(slot).copied().unwrap_or(0)
    }

    /// Bytes of one slot, whatever it has seen.
    pub fn state_bytes(&self) -> usize {
        self.layout.numbers() * size_of::<f32>()
    }

    /// The denominators of all slots since the pool was made; those of a probed step are the probe's.
    pub fn denominators(&self) -> Denominators {
        self.layers.iter().fold(Denominators::default(), |sum, LayerState { denominators: of, .. }| Denominators {
            all: sum.all + of.all.load(Relaxed),
            clamped: sum.clamped + of.clamped.load(Relaxed),
        })
    }

    /// How the numbers of [`Self::export`] lie.
    pub fn layout(&self) -> StateLayout {
        self.layout
    }

    /// Makes a slot an empty text again.
    ///
    /// # Errors
    /// When there is no such slot.
    pub fn reset(&mut self, slot: usize) -> Result<()> {
        self.check(slot)?;
        for layer in &self.layers {
            for tensor in std::iter::once(&layer.memory).chain(&layer.conv) {
                tensor.slice_set(&tensor.narrow(0, slot, 1)?.zeros_like()?, 0, slot)?;
            }
        }
        self.tokens[slot] = 0;
        self.torn[slot] = false;
        Ok(())
    }

    /// One layer of a slot, copied: memory (heads, 2D (d + 1) + 1) and the convolution's inputs.
    ///
    /// # Errors
    /// When there is no such slot or layer.
    pub fn layer(&self, layer: usize, slot: usize) -> Result<(Tensor, Option<Tensor>)> {
        self.check(slot)?;
        let Some(state) = self.layers.get(layer) else { bail!("layer {layer} is out of range") };
        let copy = |t: &Tensor| t.narrow(0, slot, 1)?.squeeze(0)?.copy();
        Ok((copy(&state.memory)?, state.conv.as_ref().map(copy).transpose()?))
    }

    /// A slot's numbers, copied: memory (layers, heads, 2D (d + 1) + 1), then the convolutions' inputs
    /// (layers, kernel - 1, 3 heads d).
    ///
    /// # Errors
    /// When there is no such slot, or a step that failed has left it half way.
    pub fn export(&self, slot: usize) -> Result<Vec<f32>> {
        self.check(slot)?;
        if self.torn[slot] {
            bail!("slot {slot} was left half way by a step that failed: there is nothing whole to export");
        }
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        for tensor in self.tensors() {
            let (storage, layout) = tensor.storage_and_layout();
            let (Storage::Cpu(CpuStorage::F32(all)), Some((start, end))) = (&*storage, layout.contiguous_offsets())
            else {
                bail!("states must be contiguous f32 on the CPU");
            };
            let len = (end - start) / self.slots();
            numbers.extend_from_slice(&all[start..end][slot * len..(slot + 1) * len]);
        }
        Ok(numbers)
    }

    /// Puts numbers that [`Self::export`] has given into a slot, which then has seen `tokens` tokens. A torn slot is
    /// whole again.
    ///
    /// # Errors
    /// When there is no such slot, or `numbers` are not as many as a slot has: then nothing has changed.
    pub fn import(&mut self, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
        self.check(slot)?;
        if numbers.len() != self.layout.numbers() {
            bail!("a state must have {} numbers, found {}", self.layout.numbers(), numbers.len());
        }
        let mut rest = numbers;
        for tensor in self.tensors() {
            let (own, others) = rest.split_at(tensor.elem_count() / self.slots());
            tensor.inplace_op1(&Overwrite { slot, numbers: own })?;
            rest = others;
        }
        self.tokens[slot] = tokens;
        self.torn[slot] = false;
        Ok(())
    }

    /// All tensors of the pool, in the order of [`StateLayout`].
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let memories = self.layers.iter().map(|layer| &layer.memory);
        memories.chain(self.layers.iter().filter_map(|layer| layer.conv.as_ref()))
    }

    /// The layers in order, each to be handed to its own block.
    pub(crate) fn layers(&self) -> &[LayerState] {
        &self.layers
    }

    /// Begins a step of these slots: refuses any that are not there, named twice, or torn by a step that failed.
    ///
    /// Until [`Self::advance`] ends the step they count as torn.
    pub(crate) fn begin(&mut self, slots: &[usize]) -> Result<()> {
        let mut sorted = slots.to_vec();
        sorted.sort_unstable();
        if let Some([slot, _]) = sorted.array_windows().find(|[a, b]| a == b) {
            bail!("slot {slot} is named twice");
        }
        sorted.last().map_or(Ok(()), |&last| self.check(last))?;
        if let Some(slot) = sorted.iter().find(|&&slot| self.torn[slot]) {
            bail!("slot {slot} was left half way by a step that failed, and must be reset");
        }
        for slot in sorted {
            self.torn[slot] = true;
        }
        Ok(())
    }

    /// Ends a step: counts the tokens that the slots have taken in.
    pub(crate) fn advance(&mut self, slots: &[usize], by: usize) {
        for &slot in slots {
            self.tokens[slot] += by as u64;
            self.torn[slot] = false;
        }
    }

    fn check(&self, slot: usize) -> Result<()> {
        if slot < self.tokens.len() {
            return Ok(());
        }
        bail!("slot {slot} is out of range: the pool has {}", self.tokens.len())
    }
}

/// Overwrites one slot of a tensor of slots.
struct Overwrite<'a> {
    slot: usize,
    numbers: &'a [f32],
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite-slot"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(all), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            bail!("states must be contiguous f32");
        };
        all[start..end][self.slot * self.numbers.len()..][..self.numbers.len()].copy_from_slice(self.numbers);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_torn_by_a_step_that_failed_is_refused_until_it_is_reset() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4,
            "num_hidden_layers": 1, "num_attention_heads": 1, "proj_dim": 2}"#;
        let mut pool = StatePool::new(&DecoderConfig::from_json(text).unwrap(), 3, &Device::Cpu).unwrap();
        pool.begin(&[0, 2]).unwrap();
        let error = pool.begin(&[1, 2]).unwrap_err().to_string();
        assert!(error.contains("slot 2") && error.contains("reset"), "{error}");
        pool.begin(&[1]).unwrap();
        pool.advance(&[1], 5);
        pool.begin(&[1]).unwrap();
        pool.reset(2).unwrap();
        pool.begin(&[2]).unwrap();
        assert_eq!((pool.tokens(0), pool.tokens(1)), (0, 5));
    }
}
