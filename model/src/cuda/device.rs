//! What is asked of a device: memory, kernels by name, a recorded step. Knows nothing of layers, and no `unsafe`: that
//! is in `driver`, a GPU through its driver, and in `host`, the emulator of the tests.

use std::fmt::Debug;
use std::sync::Arc;

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

/// A struct as C lays it out, whose fields of eight bytes come first.
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

    /// The struct's bytes in words of eight, which it is aligned to.
    pub(super) fn words(&self) -> Vec<u64> {
        let word = |pair: &[u32]| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
        self.0.chunks(2).map(word).collect()
    }
}

impl Arg<'_> {
    /// The argument's bytes in words of eight, low bytes first.
    pub(super) fn words(&self) -> Vec<u64> {
        match self {
            Self::Pointer(v) => vec![*v],
            Self::Number(v) => vec![u64::from(*v)],
            Self::Real(v) => vec![u64::from(v.to_bits())],
            Self::Struct(fields) => fields.words(),
        }
    }
}

/// A kernel's launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch<'a> {
    pub(super) kernel: &'a str,
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
    /// Bytes of dynamic shared memory.
    pub(super) shared: usize,
    pub(super) args: &'a [Arg<'a>],
}

/// Host memory that a device copies from and into while the host goes on.
pub(super) trait Pinned: Send + Debug {
    /// The bytes, once the device is done with them.
    fn bytes(&mut self) -> Result<&mut [u8]>;
    /// Has the device take `len` bytes, from byte `at` on, to `to`.
    fn send(&self, at: usize, to: u64, len: usize) -> Result<()>;
    /// Has the device put `len` bytes from `from` here, from byte `at` on.
    fn receive(&mut self, at: usize, from: u64, len: usize) -> Result<()>;
}

/// A step that was recorded.
pub(super) trait Recorded: Send + Debug {
    /// Does it again, on what is then in the memory that it reads.
    fn replay(&self) -> Result<()>;
}

/// A moment in what is asked of a device.
pub(super) trait Moment: Send + Debug {
    /// Waits, on any thread, until all is done that was asked for before it.
    fn wait(&self) -> Result<()>;
}

/// One device with one stream: what is asked for is done in order, but for what [`Self::pinned_beside`] copies.
pub(super) trait Gpu: Send + Sync + Debug {
    fn name(&self) -> String;
    /// Multiprocessors.
    fn processors(&self) -> usize;
    /// Free and all bytes.
    fn memory(&self) -> Result<(usize, usize)>;
    /// So many zeroed bytes.
    fn allocate(&self, bytes: usize) -> Result<u64>;
    fn free(&self, at: u64);
    /// Zeroes some bytes.
    fn clear(&self, at: u64, bytes: usize) -> Result<()>;
    /// Copies to the device; the bytes may go when this returns.
    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()>;
    /// Copies from the device, once all before is done.
    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()>;
    /// Copies on the device.
    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()>;
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>>;
    /// Memory in pieces of so many bytes, which copies by a stream of its own, one for all pieces: no step waits for it,
    /// and it waits for none. For another thread than the one that steps; also while that one records.
    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>>;
    /// The moment after all that was asked for so far.
    fn moment(&self) -> Result<Box<dyn Moment>>;
    fn launch(&self, launch: Launch<'_>) -> Result<()>;
    /// Records what `work` asks for, which is not done now. It may only launch and copy.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded>>;
}

/// A device that decoders are put on.
#[derive(Clone, Debug)]
pub struct CudaDevice(pub(super) Arc<dyn Gpu>);

impl CudaDevice {
    /// Opens a GPU, counted from 0.
    ///
    /// # Errors
    /// [`CudaError::Absent`] where there is no driver or no such device, [`CudaError::Failed`] where it takes no kernels.
    pub fn open(ordinal: usize) -> std::result::Result<Self, CudaError> {
        Ok(Self(super::driver::open(ordinal)?))
    }

    /// The same kernels on the CPU, thread by thread: for tests, thousands of times slower.
    #[cfg(feature = "cuda-emulator")]
    pub fn emulated() -> Self {
        Self(super::host::open())
    }

    /// The maker's name of it.
    pub fn name(&self) -> String {
        self.0.name()
    }

    /// Free and all bytes of its memory.
    ///
    /// # Errors
    /// [`CudaError::Failed`]
    pub fn memory(&self) -> std::result::Result<(usize, usize), CudaError> {
        self.0.memory()
    }

    pub(super) fn buffer(&self, what: &str, bytes: usize) -> Result<Buffer> {
        let (free, _) = self.0.memory()?;
        if bytes > free {
            return Err(CudaError::Memory { what: what.into(), wanted: bytes, free });
        }
        // A pointer to nothing is none.
        Ok(Buffer { at: self.0.allocate(bytes.max(16))?, bytes, gpu: Arc::clone(&self.0) })
    }

    pub(super) fn with(&self, what: &str, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.buffer(what, bytes.len())?;
        self.0.upload(buffer.at, bytes)?;
        Ok(buffer)
    }

    pub(super) fn floats(&self, what: &str, numbers: &[f32]) -> Result<Buffer> {
        self.with(what, &bytes_of(numbers))
    }
}

pub(super) fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Memory of a device, given back when it goes.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) at: u64,
    pub(super) bytes: usize,
    gpu: Arc<dyn Gpu>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.gpu.free(self.at);
    }
}
