//! The interface of a device: memory, kernels by name, steps recorded as graphs. It knows no layers and has no
//! `unsafe`; `driver` implements it for a GPU, `host` for the emulator in tests.

use std::fmt::Debug;

use crate::cuda_error::CudaError;

pub(super) type Result<T> = std::result::Result<T, CudaError>;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg<'a> {
    Pointer(u64),
    Number(u32),
    Real(f32),
    /// A struct by value.
    Struct(&'a Fields),
}

/// A struct in C's layout, with its eight-byte fields first.
#[derive(Clone, Debug, Default)]
pub(super) struct Fields(Vec<u32>);

impl Fields {
    pub(super) fn pointers(mut self, all: &[u64]) -> Self {
        self.0.extend(all.iter().flat_map(|v| [*v as u32, (v >> 32) as u32]));
        self
    }

    pub(super) fn numbers(mut self, all: &[usize]) -> Self {
        self.0.extend(all.iter().map(|&v| v as u32));
        self
    }

    pub(super) fn real(mut self, v: f32) -> Self {
        self.0.push(v.to_bits());
        self
    }

    /// Returns the struct's bytes as eight-byte words, its alignment.
    pub(super) fn words(&self) -> Vec<u64> {
        let word = |pair: &[u32]| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
        self.0.chunks(2).map(word).collect()
    }
}

impl Arg<'_> {
    /// Returns the argument's bytes as eight-byte words, low bytes first.
    pub(super) fn words(&self) -> Vec<u64> {
        match self {
            Self::Pointer(v) => vec![*v],
            Self::Number(v) => vec![u64::from(*v)],
            Self::Real(v) => vec![u64::from(v.to_bits())],
            Self::Struct(fields) => fields.words(),
        }
    }
}

/// The launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch<'a> {
    pub(super) kernel: &'a str,
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
    /// Bytes of dynamic shared memory.
    pub(super) shared: usize,
    pub(super) args: &'a [Arg<'a>],
}

/// Page-locked host memory, which a device copies from and to while the host continues.
pub(super) trait Pinned: Send + Debug {
    /// Returns the bytes, after waiting for the device to finish its copies.
    fn bytes(&mut self) -> Result<&mut [u8]>;
    /// Queues a copy of `len` bytes, from offset `at`, to `to` on the device.
    fn send(&self, at: usize, to: u64, len: usize) -> Result<()>;
    /// Queues a copy of `len` bytes, from `from` on the device, to offset `at`.
    fn receive(&mut self, at: usize, from: u64, len: usize) -> Result<()>;
}

/// A recorded step.
pub(super) trait Graph: Send + Debug {
    /// Runs the step on the current contents of the memory that it reads.
    fn launch(&self) -> Result<()>;
}

/// A point in the stream's work.
pub(super) trait Event: Send + Debug {
    /// Waits, on any thread, until all work before it is done.
    fn wait(&self) -> Result<()>;
}

/// One device with one stream, whose work is done in order. Copies of [`Self::pinned_beside`] use a separate stream.
pub(super) trait Gpu: Send + Sync + Debug {
    fn name(&self) -> String;
    /// Returns the number of multiprocessors.
    fn processors(&self) -> usize;
    /// Returns the free bytes and all bytes.
    fn memory(&self) -> Result<(usize, usize)>;
    /// Allocates zeroed bytes.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, at: u64);
    /// Zeroes bytes.
    fn clear(&self, at: u64, bytes: usize) -> Result<()>;
    /// Copies to the device; does not keep `bytes`.
    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()>;
    /// Copies from the device, after all work before it.
    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()>;
    /// Copies on the device.
    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()>;
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>>;
    /// Allocates pinned memory whose copies use a separate stream: no step waits for them, and they wait for no step.
    /// This is for a thread other than the one that steps; it may copy while that thread records.
    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>>;
    /// Returns an event that marks the end of the work queued so far.
    fn event(&self) -> Result<Box<dyn Event>>;
    fn launch(&self, launch: Launch<'_>) -> Result<()>;
    /// Records the launches and copies of `work` without running them.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>>;
}
