//! Support for `cargo bench --bench cuda`, and for nothing else: copies on the device; a decoder's step or a chunk of a
//! prompt, recorded without its copies to the host, whole or one kernel alone. It reads no clock: its functions return
//! when the work is done.

use std::sync::{Arc, Mutex, PoisonError};

use super::decoder::CudaDecoder;
use super::device::{Buffer, CudaDevice};
use super::gpu::{Arg, Event, Gpu, Graph, Launch, Pinned, Result};
use super::plan::{PREFILL, ROWS};
use super::pool::{CudaPool, PADDING};
use crate::pool::TextLength;

/// Copies within the device: the upper bound for memory-bound work.
#[derive(Debug)]
pub struct Copies {
    device: CudaDevice,
    from: Buffer,
    to: Buffer,
}

/// Bytes of the pattern that fills the source.
const PATTERN: usize = 1 << 20;

impl Copies {
    /// Prepares copies of `bytes` bytes.
    ///
    /// # Errors
    /// If the device has too little memory, or fails.
    pub fn new(device: &CudaDevice, bytes: usize) -> Result<Self> {
        let what = "a copy";
        let (from, to) = (device.buffer(what, bytes)?, device.buffer(what, bytes)?);
        // Copies of zeros would be faster.
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let pattern: Vec<u8> = (0..PATTERN.min(bytes)).map(|_| next()).collect();
        device.0.upload(from.at, &pattern)?;
        let mut written = pattern.len();
        while written < bytes {
            let more = written.min(bytes - written);
            device.0.copy(from.at + written as u64, from.at, more)?;
            written += more;
        }
        Ok(Self { device: device.clone(), from, to })
    }

    /// Returns the bytes that one copy reads and writes.
    pub fn bytes(&self) -> usize {
        2 * self.from.bytes
    }

    /// Makes `times` copies.
    ///
    /// # Errors
    /// If the device fails.
    pub fn run(&self, times: usize) -> Result<()> {
        for _ in 0..times {
            self.device.0.copy(self.to.at, self.from.at, self.from.bytes)?;
        }
        // A download waits for all earlier work.
        self.device.0.download(self.to.at, &mut [0; 4])
    }
}

/// Waits for all work on the device.
///
/// # Errors
/// If the device fails.
pub fn wait(pool: &mut CudaPool) -> Result<()> {
    // A download waits for all earlier work.
    pool.states.device.0.download(pool.states.work.input.at, &mut [0; 4])
}

/// Copies one slot's state, which must be complete, to all other slots.
///
/// # Errors
/// If the device fails.
///
/// # Panics
/// If there is no such slot.
pub fn spread(pool: &mut CudaPool, from: usize) -> Result<()> {
    let length = TextLength { tokens: pool.tokens(from), source: 0 };
    for slot in (0..pool.slots()).filter(|&slot| slot != from) {
        pool.states.copy(from, slot)?;
        pool.set(slot, length);
    }
    wait(pool)
}

/// A kernel of a step with its launch parameters, and how often the step launches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name in `model/cuda`.
    pub name: String,
    /// Blocks in each dimension.
    pub grid: [usize; 3],
    /// Threads per block.
    pub threads: usize,
    /// The rows, inputs and outputs of a product.
    pub product: Option<[usize; 3]>,
    /// Launches per step.
    pub times: usize,
}

impl Kernel {
    fn of(launch: &Launch<'_>) -> Self {
        // The layout of `Linear` in model/cuda/linear.cuh: four pointers, then rows, ins, outs.
        let product = match launch.args {
            [Arg::Struct(of)] if launch.kernel.starts_with("linear_") => {
                let words = of.words();
                let low = |word: u64| (word & 0xffff_ffff) as usize;
                Some([low(words[4]), low(words[4] >> 32), low(words[5])])
            }
            _ => None,
        };
        Self { name: launch.kernel.into(), grid: launch.grid, threads: launch.threads, product, times: 1 }
    }

    fn is(&self, other: &Self) -> bool {
        Self { times: other.times, ..self.clone() } == *other
    }
}

/// A device that runs one kernel, or all, and lists the launched kernels.
#[derive(Debug)]
struct Filter {
    gpu: Arc<dyn Gpu>,
    only: Option<Kernel>,
    seen: Mutex<Vec<Kernel>>,
}

impl Gpu for Filter {
    fn name(&self) -> String {
        self.gpu.name()
    }

    fn processors(&self) -> usize {
        self.gpu.processors()
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.gpu.memory()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.gpu.allocate(bytes)
    }

    fn free(&self, at: u64) {
        self.gpu.free(at);
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.gpu.clear(at, bytes)
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.gpu.upload(to, bytes)
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.gpu.download(from, bytes)
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // A single kernel needs no copies.
        if self.only.is_some() { Ok(()) } else { self.gpu.copy(to, from, bytes) }
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>> {
        self.gpu.pinned(bytes)
    }

    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>> {
        self.gpu.pinned_beside(bytes)
    }

    fn event(&self) -> Result<Box<dyn Event>> {
        self.gpu.event()
    }

    fn launch(&self, launch: Launch<'_>) -> Result<()> {
        let kernel = Kernel::of(&launch);
        let passes = self.only.as_ref().is_none_or(|only| only.is(&kernel));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.iter_mut().find(|other| other.is(&kernel)) {
            Some(other) => other.times += 1,
            None => seen.push(kernel),
        }
        if passes { self.gpu.launch(launch) } else { Ok(()) }
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        self.gpu.record(work)
    }
}

/// Work of a decoder: a step of some slots, or a chunk of one slot's prompt. It does not change the pool's token
/// counts.
#[derive(Clone, Debug)]
pub struct Task {
    ids: Vec<u32>,
    slots: Vec<u32>,
    positions: Vec<u64>,
    piece_of: Option<usize>,
}

impl Task {
    /// Creates a step that reads one token into each slot; like every step, it is padded to a power of two rows.
    ///
    /// # Panics
    /// If there are no ids, more than a step's rows, not as many as slots, or no such slot.
    pub fn step(pool: &CudaPool, ids: &[u32], slots: &[usize]) -> Self {
        assert!(
            (1..=ROWS).contains(&ids.len())
                && ids.len() == slots.len()
                && slots.iter().all(|&slot| slot < pool.slots())
        );
        let rows = ids.len().next_power_of_two();
        let mut task = Self {
            ids: ids.to_vec(),
            slots: slots.iter().map(|&slot| slot as u32).collect(),
            positions: slots.iter().map(|&slot| pool.tokens(slot)).collect(),
            piece_of: None,
        };
        task.ids.resize(rows, 0);
        task.slots.resize(rows, PADDING);
        task.positions.resize(rows, 0);
        task
    }

    /// Creates a chunk that reads tokens of one slot's prompt, at most as many as the decoder reads at a time.
    ///
    /// # Panics
    /// If there are no tokens or too many, or there is no such slot.
    pub fn piece(pool: &CudaPool, ids: &[u32], slot: usize) -> Self {
        assert!((1..=PREFILL).contains(&ids.len()) && slot < pool.slots());
        Self { ids: ids.to_vec(), slots: vec![slot as u32], positions: vec![pool.tokens(slot)], piece_of: Some(slot) }
    }

    fn inputs(&self, decoder: &CudaDecoder, pool: &mut CudaPool) -> Result<()> {
        decoder.inputs(pool.states.input.bytes()?, &self.ids, &self.slots, &self.positions);
        Ok(())
    }

    fn send(&self, decoder: &CudaDecoder, pool: &CudaPool) -> Result<()> {
        let rows = self.slots.len();
        decoder.send(rows, self.ids.len() / rows, &pool.states)
    }

    fn work(&self, decoder: &CudaDecoder, device: &CudaDevice, pool: &CudaPool) -> Result<()> {
        match self.piece_of {
            Some(slot) => decoder.piece(device, slot, self.ids.len(), &pool.states),
            None => decoder.logits(device, self.ids.len(), &pool.states),
        }
    }

    /// Runs the task once, unrecorded; returns its kernels in the order of their first launches.
    ///
    /// # Errors
    /// If the device fails.
    pub fn kernels(&self, decoder: &CudaDecoder, pool: &mut CudaPool) -> Result<Vec<Kernel>> {
        let filter = Arc::new(Filter { gpu: Arc::clone(&decoder.device.0), only: None, seen: Mutex::default() });
        self.inputs(decoder, pool)?;
        self.send(decoder, pool)?;
        let gpu: Arc<dyn Gpu> = Arc::clone(&filter) as _;
        self.work(decoder, &CudaDevice(gpu), pool)?;
        wait(pool)?;
        Ok(filter.seen.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Records the task: either the whole, with the copy of its inputs to the device, or one of its kernels alone,
    /// which then works on the results of the last whole step.
    ///
    /// # Errors
    /// If the device fails.
    pub fn record(&self, decoder: &CudaDecoder, pool: &mut CudaPool, only: Option<&Kernel>) -> Result<Recording> {
        // The first run is not recorded: nothing may be loaded during a recording.
        self.inputs(decoder, pool)?;
        self.send(decoder, pool)?;
        self.work(decoder, &decoder.device, pool)?;
        wait(pool)?;
        let filter = Filter { gpu: Arc::clone(&decoder.device.0), only: only.cloned(), seen: Mutex::default() };
        let device = CudaDevice(Arc::new(filter));
        let whole = only.is_none();
        let recorded = device.0.record(&mut || {
            if whole {
                self.send(decoder, pool)?;
            }
            self.work(decoder, &device, pool)
        })?;
        Ok(Recording { task: self.clone(), whole, recorded, pool: pool.states.work.input.at })
    }
}

/// A task recorded on a pool's slots.
#[derive(Debug)]
pub struct Recording {
    task: Task,
    whole: bool,
    recorded: Box<dyn Graph>,
    pool: u64,
}

impl Recording {
    /// Runs the recording `times` times in sequence.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If it was recorded on another pool.
    pub fn run(&self, decoder: &CudaDecoder, pool: &mut CudaPool, times: usize) -> Result<()> {
        assert_eq!(self.pool, pool.states.work.input.at, "a recording runs on its own pool");
        // Other steps may have overwritten the inputs.
        self.task.inputs(decoder, pool)?;
        if !self.whole {
            // Sent only once, because only the kernel is measured.
            self.task.send(decoder, pool)?;
        }
        for _ in 0..times {
            self.recorded.launch()?;
        }
        wait(pool)
    }
}
