//! What a decoder remembers: a pool of slots, one conversation each, every slot of the same constant size.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};

use crate::block::Buffers;
use crate::compute::Compute;
use crate::config::DecoderConfig;
use crate::kernels::threads::Threads;
use crate::layout::StateLayout;
use crate::memory::{Denominators, StateType};
use crate::mixers::{LayerMemory, LayerState};

/// How a pool is made.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Conversations that fit.
    pub slots: usize,
    /// Who computes its steps.
    pub threads: Arc<Threads>,
    /// How its states are held.
    pub state: StateType,
}

impl PoolOptions {
    /// So many slots, states in f32, the process's threads.
    pub fn new(slots: usize) -> Self {
        Self { slots, threads: Arc::clone(Threads::global()), state: StateType::F32 }
    }
}

/// What a step holds on the way; it lies in the pool because a pool takes one step at a time.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) cx: Compute,
    /// The residual stream: (rows, hidden)
    pub(crate) x: Vec<f32>,
    /// The rows that logits are wanted of: (rows, hidden)
    pub(crate) last: Vec<f32>,
    pub(crate) positions: Vec<u64>,
    pub(crate) blocks: Buffers,
    pub(crate) angles: crate::mixers::rotary::Angles,
}

/// Slots for conversations, allocated once and addressed by index.
#[derive(Debug)]
pub struct StatePool {
    layers: Vec<LayerState>,
    workspace: Workspace,
    /// Tokens of each slot, those of its source among them.
    tokens: Vec<u64>,
    /// Tokens of each slot's source; 0 where none was read.
    source: Vec<u64>,
    /// Most tokens of a source; 0 of a decoder alone.
    most_source: usize,
    /// Slots whose layers a failed step may have left at different tokens: only a reset makes them usable.
    torn: Vec<bool>,
    layout: StateLayout,
    /// What no maximum of a head's keys is above: (layers, heads), or empty where heads remember none.
    greatest: Vec<f32>,
}

impl StatePool {
    /// A pool of empty texts. greatest: as [`crate::Decoder::greatest_maxima`].
    ///
    /// # Errors
    /// When `slots` is 0, or the system has not as much memory as they would take.
    pub(crate) fn new(config: &DecoderConfig, greatest: Vec<f32>, options: PoolOptions) -> Result<Self> {
        let PoolOptions { slots, threads, state } = options;
        // What a slot takes at least: a bf16 state keeps some numbers as f32.
        let least = match state {
            StateType::F32 => config.state_bytes(),
            StateType::Bf16 => config.state_bytes() / 2,
        };
        if slots == 0 || !slots.checked_mul(least).is_some_and(could_be_had) {
            bail!("slots must be at least 1 and fit into memory, found {slots} of {} bytes", config.state_bytes());
        }
        let layout = config.state_layout();
        let layer = |_| LayerState {
            memory: LayerMemory::zeros(config, slots, state),
            conv: vec![0.0; slots * layout.taps * layout.channels],
            cross: LayerMemory::of_source(config, slots, state),
            denominators: Denominators::default(),
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect();
        let workspace = Workspace {
            cx: Compute::new(threads),
            x: Vec::new(),
            last: Vec::new(),
            positions: Vec::new(),
            blocks: Buffers::default(),
            angles: crate::mixers::rotary::Angles::new(config.head_dim, config.rope_theta),
        };
        let (tokens, source, torn) = (vec![0; slots], vec![0; slots], vec![false; slots]);
        let most_source = config.source().map_or(0, |source| source.max_positions);
        Ok(Self { layers, workspace, tokens, source, most_source, torn, layout, greatest })
    }

    /// How many conversations fit.
    pub fn slots(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that a slot has taken in since it was last zeroed, those of its source among them.
    pub fn tokens(&self, slot: usize) -> u64 {
        self.tokens.get(slot).copied().unwrap_or(0)
    }

    /// Bytes of one slot, whatever it has seen; of a cache that is not full the system has given a part alone.
    pub fn state_bytes(&self) -> usize {
        let of = |layer: &LayerState| layer.memory.bytes() + layer.cross.as_ref().map_or(0, LayerMemory::bytes);
        let memories: usize = self.layers.iter().map(of).sum();
        memories + self.layout.conv() * size_of::<f32>()
    }

    /// The denominators of all slots since the pool was made; those of a probed step are the probe's.
    pub fn denominators(&self) -> Denominators {
        self.layers.iter().fold(Denominators::default(), |sum, LayerState { denominators: of, .. }| Denominators {
            all: sum.all + of.all,
            clamped: sum.clamped + of.clamped,
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
        let conv = self.layout.taps * self.layout.channels;
        for layer in &mut self.layers {
            layer.memory.reset(slot);
            layer.conv[slot * conv..][..conv].fill(0.0);
            if let Some(cross) = &mut layer.cross {
                cross.reset(slot);
            }
        }
        self.tokens[slot] = 0;
        self.source[slot] = 0;
        self.torn[slot] = false;
        Ok(())
    }

    /// One layer of a slot, copied: memory (heads, [`StateLayout::head`]) and the convolution's inputs.
    ///
    /// # Errors
    /// When there is no such slot or layer, or a step that failed has left the slot half way.
    pub fn layer(&self, layer: usize, slot: usize) -> Result<(Tensor, Option<Tensor>)> {
        self.check(slot)?;
        if self.torn[slot] {
            bail!("slot {slot} was left half way by a step that failed");
        }
        let Some(state) = self.layers.get(layer) else { bail!("layer {layer} is out of range") };
        let StateLayout { heads, head, taps, channels, .. } = self.layout;
        let mut numbers = Vec::with_capacity(heads * head);
        state.memory.read(slot, &mut numbers);
        let conv = (taps > 0).then(|| {
            Tensor::from_slice(&state.conv[slot * taps * channels..][..taps * channels], (taps, channels), &Device::Cpu)
        });
        Ok((Tensor::from_vec(numbers, (heads, head), &Device::Cpu)?, conv.transpose()?))
    }

    /// A slot's numbers, copied: memory (layers, heads, [`StateLayout::head`]), then the convolutions' inputs
    /// (layers, kernel - 1, 3 heads d), then of an encoder-decoder what cross attention keeps of the source (layers, heads,
    /// [`StateLayout::cross`]) and how many tokens it has.
    ///
    /// # Errors
    /// When there is no such slot, or a step that failed has left it half way.
    pub fn export(&self, slot: usize) -> Result<Vec<f32>> {
        self.check(slot)?;
        if self.torn[slot] {
            bail!("slot {slot} was left half way by a step that failed: there is nothing whole to export");
        }
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        self.layers.iter().for_each(|layer| layer.memory.read(slot, &mut numbers));
        let conv = self.layout.taps * self.layout.channels;
        self.layers.iter().for_each(|layer| numbers.extend_from_slice(&layer.conv[slot * conv..][..conv]));
        let sources = self.layers.iter().filter_map(|layer| layer.cross.as_ref());
        sources.for_each(|cross| cross.read(slot, &mut numbers));
        if self.most_source > 0 {
            // At most 65,536: exact.
            numbers.push(self.source[slot] as f32);
        }
        Ok(numbers)
    }

    /// Puts numbers that [`Self::export`] has given into a slot, which then has seen `tokens` tokens. A torn slot is
    /// whole again.
    ///
    /// # Errors
    /// When there is no such slot, `numbers` are not as many as a slot has, a maximum of keys is one that no keys have, or
    /// the source has another number of tokens than a source can: then nothing has changed. A maximum too low is let in: the next key takes its place, and what was before is lost.
    pub fn import(&mut self, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
        self.check(slot)?;
        if numbers.len() != self.layout.numbers() {
            bail!("a state must have {} numbers, found {}", self.layout.numbers(), numbers.len());
        }
        let (memories, rest) = numbers.split_at(self.layout.memory());
        let (tails, sources) = rest.split_at(self.layout.conv());
        let source = self.source_tokens(sources.last().copied(), tokens)?;
        self.check_counts(sources, source)?;
        let heads = memories.chunks_exact(self.layout.head).zip(&self.greatest);
        for (head, (maximum, &greatest)) in heads.map(|(head, most)| (head[head.len() - 1], most)).enumerate() {
            if maximum > greatest {
                let (layer, head) = (head / self.layout.heads, head % self.layout.heads);
                bail!("the maximum of layer {layer}, head {head} must be at most {greatest}, found {maximum}");
            }
        }
        let (memory, conv) = (self.layout.heads * self.layout.head, self.layout.taps * self.layout.channels);
        let cross = self.layout.heads * self.layout.cross;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            layer.memory.write(slot, &memories[i * memory..][..memory], tokens - source);
            layer.conv[slot * conv..][..conv].copy_from_slice(&tails[i * conv..][..conv]);
            if let Some(memory) = &mut layer.cross {
                memory.write(slot, &sources[i * cross..][..cross], source);
            }
        }
        self.tokens[slot] = tokens;
        self.source[slot] = source;
        self.torn[slot] = false;
        Ok(())
    }

    /// How many tokens a source has, as an exported state says it, of a text of so many.
    fn source_tokens(&self, found: Option<f32>, tokens: u64) -> Result<u64> {
        let Some(found) = found else { return Ok(0) };
        let most = (self.most_source as u64).min(tokens);
        // Whole, and in range where it is: the cast saturates.
        let (count, least) = (found as u64, u64::from(tokens > 0));
        if count as f32 != found || count < least || count > most {
            bail!("the source must have {least} to {most} tokens, found {found}");
        }
        Ok(count)
    }

    /// Refuses sums of a source whose c, the weight of all its tokens, is not their number: floors are a share of it.
    fn check_counts(&self, sources: &[f32], tokens: u64) -> Result<()> {
        let sums = matches!(self.layers.first(), Some(LayerState { cross: Some(LayerMemory::Sums(_)), .. }));
        let heads = sources.chunks_exact(self.layout.cross.max(1)).filter(|_| sums).enumerate();
        // Counts up to 65,536 are exact.
        match heads.map(|(head, own)| (head, own[own.len() - 1])).find(|&(_, c)| c != tokens as f32) {
            None => Ok(()),
            Some((head, c)) => {
                let (layer, head) = (head / self.layout.heads, head % self.layout.heads);
                bail!("c of the source in layer {layer}, head {head} must be its {tokens} tokens, found {c}")
            }
        }
    }

    /// Whether texts begin with a source.
    pub(crate) fn has_sources(&self) -> bool {
        self.most_source > 0
    }

    /// Empties a slot, which counts as torn until [`Self::source_was_read`].
    pub(crate) fn begin_source(&mut self, slot: usize) -> Result<()> {
        self.reset(slot)?;
        self.torn[slot] = true;
        Ok(())
    }

    /// Makes `tokens` tokens of a source the whole text of a slot that has been reset; what each layer's cross attention
    /// keeps of it has been written.
    pub(crate) fn source_was_read(&mut self, slot: usize, tokens: usize) {
        self.tokens[slot] = tokens as u64;
        self.source[slot] = tokens as u64;
        self.torn[slot] = false;
    }

    /// The layers in order, each to be handed to its own block, and the buffers of a step.
    pub(crate) fn parts(&mut self) -> (&mut [LayerState], &mut Workspace) {
        (&mut self.layers, &mut self.workspace)
    }

    /// Notes where the texts of these slots are, for the step's rows.
    pub(crate) fn place(&mut self, slots: &[usize]) {
        self.workspace.positions.clear();
        self.workspace.positions.extend(slots.iter().map(|&slot| self.tokens[slot] - self.source[slot]));
    }

    /// Begins a step of these slots: refuses any that are not there, named twice, torn by a step that failed, or without
    /// the source that a text begins with.
    ///
    /// Until [`Self::advance`] ends the step they count as torn.
    pub(crate) fn begin(&mut self, slots: &[usize]) -> Result<()> {
        let refused = slots.iter().enumerate().find_map(|(i, &slot)| {
            if let Err(error) = self.check(slot) {
                return Some(error);
            }
            let why = if slots[..i].contains(&slot) {
                "is named twice"
            } else if self.torn[slot] {
                "was left half way by a step that failed, and must be reset"
            } else if self.has_sources() && self.source[slot] == 0 {
                "has no source, which must be read first"
            } else {
                return None;
            };
            Some(candle_core::Error::msg(format!("slot {slot} {why}")))
        });
        if let Some(error) = refused {
            return Err(error);
        }
        for &slot in slots {
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

/// Whether the system would give so many bytes. Zeroed memory is taken as it is touched, and an allocation that fails
/// ends the process: it is asked for before, and given back.
pub(crate) fn could_be_had(bytes: usize) -> bool {
    let mut probe = Vec::<u8>::new();
    let there = probe.try_reserve_exact(bytes).is_ok();
    // An allocation that nobody looks at may be left out.
    std::hint::black_box(probe.as_ptr());
    there
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_torn_by_a_step_that_failed_is_refused_until_it_is_reset() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4,
            "num_hidden_layers": 1, "num_attention_heads": 1, "proj_dim": 2}"#;
        let mut pool =
            StatePool::new(&DecoderConfig::from_json(text).unwrap(), Vec::new(), PoolOptions::new(3)).unwrap();
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
