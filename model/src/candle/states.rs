//! The states of a pool's slots, as candle tensors.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::family::{LayerState, StateShape};
use crate::error::{ModelError, Result};
use crate::layout::StateLayout;
use crate::memory::Denominators;
use crate::pool::{Pool, SlotStates, TextLength};

/// A pool of slots for conversations that run on candle.
pub type CandlePool = Pool<CandleStates>;

/// The states of a pool's slots, as candle tensors.
#[derive(Debug)]
pub struct CandleStates {
    shape: StateShape,
    /// The state of an empty sequence.
    empty: Vec<LayerState>,
    pub(super) texts: Vec<Vec<LayerState>>,
    /// The threads that run candle's computations.
    pub(super) threads: Arc<ThreadPool>,
}

impl Pool<CandleStates> {
    pub(super) fn new(shape: StateShape, device: &Device, slots: usize, threads: usize) -> Result<Self> {
        if slots == 0 {
            return Err(ModelError::argument("slots", "at least 1", slots));
        }
        let zeros = || shape.tensors().map(|shape| Tensor::zeros(&shape[..], DType::F32, device)).collect();
        let empty = (0..shape.layers).map(|_| zeros()).collect::<candle_core::Result<Vec<_>>>()?;
        let threads = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("candle-{i}")).build();
        let threads = Arc::new(threads.map_err(ModelError::other)?);
        let texts = vec![empty.clone(); slots];
        Ok(Self::of(CandleStates { shape, empty, texts, threads }, slots, false))
    }
}

impl CandleStates {
    /// Splits a layer's tensors into memory and inputs.
    fn parts<'a>(&self, layer: &'a LayerState) -> [&'a [Tensor]; 2] {
        layer.split_at(self.shape.memory.len()).into()
    }
}

impl SlotStates for CandleStates {
    fn layout(&self) -> StateLayout {
        self.shape.layout()
    }

    fn slot_bytes(&self) -> usize {
        self.layout().numbers() * size_of::<f32>()
    }

    fn denominators(&self) -> Denominators {
        Denominators::default()
    }

    fn clear(&mut self, slot: usize) -> Result<()> {
        self.texts[slot].clone_from(&self.empty);
        Ok(())
    }

    fn read(&self, slot: usize, _: TextLength) -> Result<Vec<f32>> {
        let mut numbers = Vec::with_capacity(self.layout().numbers());
        for part in 0..2 {
            for tensor in self.texts[slot].iter().flat_map(|layer| self.parts(layer)[part]) {
                numbers.extend(tensor.flatten_all()?.to_vec1::<f32>()?);
            }
        }
        Ok(numbers)
    }

    fn write(&mut self, slot: usize, mut numbers: &[f32], _: TextLength) -> Result<()> {
        let mut text = self.empty.clone();
        let memories = self.shape.memory.len();
        for part in [0..memories, memories..memories + self.shape.inputs.0] {
            for tensor in text.iter_mut().flat_map(|layer| &mut layer[part.clone()]) {
                let (own, rest) = numbers.split_at(tensor.elem_count());
                *tensor = Tensor::from_slice(own, tensor.dims(), tensor.device())?;
                numbers = rest;
            }
        }
        self.texts[slot] = text;
        Ok(())
    }
}
