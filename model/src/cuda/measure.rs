//! What `cargo bench --bench cuda` measures by: copies on the device; a decoder's step, or a piece of a prompt, recorded
//! without its way to the host, whole or one of its kernels alone. Not for anything else. Knows no clock: what runs so
//! many times is done when it returns.

use std::sync::{Arc, Mutex, PoisonError};

use super::decoder::CudaDecoder;
use super::device::{Buffer, CudaDevice};
use super::gpu::{Arg, Event, Gpu, Graph, Launch, Pinned, Result};
use super::plan::{PREFILL, ROWS};
use super::pool::{CudaPool, PADDING};
use crate::pool::TextLength;

/// Copies from one place of the device to another: the roof of what is bound by memory.
#[derive(Debug)]
pub struct Copies {
    device: CudaDevice,
    from: Buffer,
    to: Buffer,
}

/// Bytes of a pattern that the rest repeats.
const PATTERN: usize = 1 << 20;

impl Copies {
    /// Of so many bytes each.
    ///
    /// # Errors
    /// The device has not as much memory, or fails.
    pub fn new(device: &CudaDevice, bytes: usize) -> Result<Self> {
        let what = "a copy";
        let (from, to) = (device.buffer(what, bytes)?, device.buffer(what, bytes)?);
        // Zeros would cost the memory less than numbers do.
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

    /// Bytes read and written of one.
    pub fn bytes(&self) -> usize {
        2 * self.from.bytes
    }

    /// Copies so many times.
    ///
    /// # Errors
    /// The device fails.
    pub fn run(&self, times: usize) -> Result<()> {
        for _ in 0..times {
            self.device.0.copy(self.to.at, self.from.at, self.from.bytes)?;
        }
        // A read comes after all that was asked for before.
        self.device.0.download(self.to.at, &mut [0; 4])
    }
}

/// Returns when all is done that was asked for.
///
/// # Errors
/// The device fails.
pub fn wait(pool: &mut CudaPool) -> Result<()> {
    // A read comes after all that was asked for before.
    pool.states.device.0.download(pool.states.work.input.at, &mut [0; 4])
}

/// Copies one slot's state, which must be whole, into all other slots.
///
/// # Errors
/// The device fails.
///
/// # Panics
/// When there is no such slot.
pub fn spread(pool: &mut CudaPool, from: usize) -> Result<()> {
    let length = TextLength { tokens: pool.tokens(from), source: 0 };
    for slot in (0..pool.slots()).filter(|&slot| slot != from) {
        pool.states.copy(from, slot)?;
        pool.set(slot, length);
    }
    wait(pool)
}

/// A kernel of a step, with what it is launched with: how often it comes in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name in `model/cuda`.
    pub name: String,
    /// Blocks.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Of a product: rows, inputs, outputs.
    pub product: Option<[usize; 3]>,
    /// Launches in a step.
    pub times: usize,
}

impl Kernel {
    fn of(launch: &Launch<'_>) -> Self {
        // As `Linear` in model/cuda/linear.cuh lies: four pointers, then rows, ins, outs.
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

/// A device that lets one kernel pass, or all, and notes what has come.
#[derive(Debug)]
struct Sieve {
    gpu: Arc<dyn Gpu>,
    only: Option<Kernel>,
    seen: Mutex<Vec<Kernel>>,
}

impl Gpu for Sieve {
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
        // Of a step that is not whole, copies are of no use.
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

/// What a decoder is to do: a step of some slots, or a piece of one slot's prompt. What the pool counts of its slots'
/// tokens does not move on with it.
#[derive(Clone, Debug)]
pub struct Task {
    ids: Vec<u32>,
    slots: Vec<u32>,
    positions: Vec<u64>,
    piece_of: Option<usize>,
}

impl Task {
    /// A token of each slot; filled up to a power of two rows, as every step is.
    ///
    /// # Panics
    /// When there are no ids, more than a step has rows, not as many as slots, or a slot is not there.
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

    /// Some tokens of one slot's prompt, as many as are taken in at a time at most.
    ///
    /// # Panics
    /// When there are none or too many, or the slot is not there.
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

    /// Does it once, unrecorded -> its kernels, in the order in which they first come.
    ///
    /// # Errors
    /// The device fails.
    pub fn kernels(&self, decoder: &CudaDecoder, pool: &mut CudaPool) -> Result<Vec<Kernel>> {
        let sieve = Arc::new(Sieve { gpu: Arc::clone(&decoder.device.0), only: None, seen: Mutex::default() });
        self.inputs(decoder, pool)?;
        self.send(decoder, pool)?;
        let gpu: Arc<dyn Gpu> = Arc::clone(&sieve) as _;
        self.work(decoder, &CudaDevice(gpu), pool)?;
        wait(pool)?;
        Ok(sieve.seen.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Records it, whole with its inputs' way to the device, or one of its kernels and nothing else, which then works on
    /// what the last whole step has left.
    ///
    /// # Errors
    /// The device fails.
    pub fn record(&self, decoder: &CudaDecoder, pool: &mut CudaPool, only: Option<&Kernel>) -> Result<Recording> {
        // Once as it is, so that nothing is loaded while it is recorded.
        self.inputs(decoder, pool)?;
        self.send(decoder, pool)?;
        self.work(decoder, &decoder.device, pool)?;
        wait(pool)?;
        let sieve = Sieve { gpu: Arc::clone(&decoder.device.0), only: only.cloned(), seen: Mutex::default() };
        let device = CudaDevice(Arc::new(sieve));
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

/// A task that was recorded on a pool's slots.
#[derive(Debug)]
pub struct Recording {
    task: Task,
    whole: bool,
    recorded: Box<dyn Graph>,
    pool: u64,
}

impl Recording {
    /// Does it so many times, one after the other.
    ///
    /// # Errors
    /// The device fails.
    ///
    /// # Panics
    /// When it was recorded on another pool.
    pub fn run(&self, decoder: &CudaDecoder, pool: &mut CudaPool, times: usize) -> Result<()> {
        assert_eq!(self.pool, pool.states.work.input.at, "a recording is of its pool");
        // Steps of other rows have left their inputs.
        self.task.inputs(decoder, pool)?;
        if !self.whole {
            // Once, not each time: a kernel alone is what is measured.
            self.task.send(decoder, pool)?;
        }
        for _ in 0..times {
            self.recorded.launch()?;
        }
        wait(pool)
    }
}
