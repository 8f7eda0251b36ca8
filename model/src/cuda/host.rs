//! Runs the kernels on the CPU, with the emulator in `model/cuda/host`: for tests without a GPU.

#![allow(unsafe_code, reason = "the emulator is C++")]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use super::gpu::{Event, Gpu, Graph, Launch, Pinned, Result};
use crate::cuda_error::CudaError;

unsafe extern "C" {
    fn tidegate_emulate(
        kernel: *const c_char,
        grid: *const c_uint,
        block: *const c_uint,
        shared_bytes: c_uint,
        args: *mut *mut c_void,
        error: *mut c_char,
        error_len: c_uint,
    ) -> c_int;
}

/// Fills new memory: NaN as f32 and as bf16. [`Gpu::allocate`] zeroes only the requested bytes, so a kernel that reads
/// past them gives NaN.
const POISON: u8 = 0xff;
/// Guard bytes around each allocation.
const GUARD: usize = 256;

#[derive(Debug, Default)]
struct Host {
    /// The size of each allocation in bytes, by address.
    allocations: Mutex<HashMap<u64, usize>>,
    /// The recording in progress.
    record: Mutex<Option<Vec<Operation>>>,
}

/// An operation of a recorded step.
#[derive(Clone, Debug)]
enum Operation {
    Launch { kernel: CString, grid: [c_uint; 3], block: [c_uint; 3], shared: c_uint, args: Vec<Vec<u64>> },
    Copy { to: u64, from: u64, bytes: usize },
}

pub(super) fn open() -> Arc<dyn Gpu> {
    Arc::new(Arc::new(Host::default()))
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes + 2 * GUARD, 256).unwrap_or_else(|_| unreachable!("tests allocate little"))
}

impl Operation {
    fn run(&self) -> Result<()> {
        match self {
            Self::Copy { to, from, bytes } => {
                // SAFETY: both allocations live as long as the operation may run.
                unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes) };
                Ok(())
            }
            Self::Launch { kernel, grid, block, shared, args } => {
                let mut args = args.clone();
                let mut pointers: Vec<*mut c_void> = args.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
                let mut error = [0 as c_char; 512];
                // SAFETY: the arguments are as the kernel declares them; the error has room.
                let code = unsafe {
                    let (grid, block) = (grid.as_ptr(), block.as_ptr());
                    tidegate_emulate(
                        kernel.as_ptr(),
                        grid,
                        block,
                        *shared,
                        pointers.as_mut_ptr(),
                        error.as_mut_ptr(),
                        512,
                    )
                };
                if code == 0 {
                    return Ok(());
                }
                // SAFETY: the emulator terminates its message, and the last byte was 0 before.
                let reason = unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
                Err(CudaError::Failed { what: kernel.to_string_lossy().into_owned(), reason })
            }
        }
    }
}

impl Host {
    /// Runs the operation, or adds it to the recording in progress.
    fn queue(&self, operation: Operation) -> Result<()> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        match record.as_mut() {
            Some(all) => all.push(operation),
            None => operation.run()?,
        }
        Ok(())
    }
}

impl Gpu for Arc<Host> {
    fn name(&self) -> String {
        "emulator".into()
    }

    fn processors(&self) -> usize {
        // Few, so that small products use every way of splitting their work.
        2
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok((1 << 30, 1 << 30))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc(layout(bytes)) };
        assert!(!start.is_null(), "out of memory");
        // SAFETY: that many bytes were allocated.
        let at = unsafe {
            start.write_bytes(POISON, bytes + 2 * GUARD);
            start.add(GUARD).write_bytes(0, bytes);
            start.add(GUARD)
        };
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner).insert(at as u64, bytes);
        Ok(at as u64)
    }

    fn free(&self, at: u64) {
        let bytes = self.allocations.lock().unwrap_or_else(PoisonError::into_inner).remove(&at);
        let Some(bytes) = bytes else { return };
        // SAFETY: the whole allocation with its guards.
        let whole = unsafe {
            let start = (at as *mut u8).sub(GUARD);
            let all = std::slice::from_raw_parts(start, bytes + 2 * GUARD);
            let whole = all[..GUARD].iter().chain(&all[GUARD + bytes..]).all(|&byte| byte == POISON);
            dealloc(start, layout(bytes));
            whole
        };
        assert!(whole || std::thread::panicking(), "a kernel wrote past a buffer of {bytes} bytes");
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: the bytes belong to a buffer.
        unsafe { (at as *mut u8).write_bytes(0, bytes) };
        Ok(())
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the buffer is long enough.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the buffer is long enough.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.queue(Operation::Copy { to, from, bytes })
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>> {
        let at = self.allocate(bytes)?;
        Ok(Box::new(HostMemory { at, bytes, own_stream: false, host: Arc::clone(self) }))
    }

    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>> {
        let piece = |&bytes: &usize| -> Result<Box<dyn Pinned>> {
            Ok(Box::new(HostMemory { at: self.allocate(bytes)?, bytes, own_stream: true, host: Arc::clone(self) }))
        };
        bytes.iter().map(piece).collect()
    }

    fn event(&self) -> Result<Box<dyn Event>> {
        Ok(Box::new(Now))
    }

    fn launch(&self, launch: Launch<'_>) -> Result<()> {
        let Launch { kernel, grid, threads, shared, args } = launch;
        self.queue(Operation::Launch {
            kernel: CString::new(kernel).unwrap_or_default(),
            grid: grid.map(|n| n as c_uint),
            block: [threads as c_uint, 1, 1],
            shared: shared as c_uint,
            args: args.iter().map(super::gpu::Arg::words).collect(),
        })
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        let end = End(self);
        let outcome = work();
        let operations = end.now();
        outcome?;
        Ok(Box::new(Step(operations)))
    }
}

/// Ends a recording, even after a panic.
struct End<'a>(&'a Host);

impl End<'_> {
    fn now(&self) -> Vec<Operation> {
        self.0.record.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.now();
    }
}

#[derive(Debug)]
struct Step(Vec<Operation>);

impl Graph for Step {
    fn launch(&self) -> Result<()> {
        self.0.iter().try_for_each(Operation::run)
    }
}

/// An event that has always happened: every call of the emulator is finished when it returns.
#[derive(Debug)]
struct Now;

impl Event for Now {
    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct HostMemory {
    at: u64,
    bytes: usize,
    /// Whether copies run at once, on the calling thread, even during a recording.
    own_stream: bool,
    host: Arc<Host>,
}

impl HostMemory {
    fn copy(&self, to: u64, from: u64, len: usize) -> Result<()> {
        let copy = Operation::Copy { to, from, bytes: len.min(self.bytes) };
        if self.own_stream { copy.run() } else { self.host.queue(copy) }
    }
}

impl Pinned for HostMemory {
    fn bytes(&mut self) -> Result<&mut [u8]> {
        // SAFETY: an allocation of that many bytes, which only this value owns.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at as *mut u8, self.bytes) })
    }

    fn send(&self, at: usize, to: u64, len: usize) -> Result<()> {
        let at = at.min(self.bytes);
        self.copy(to, self.at + at as u64, len.min(self.bytes - at))
    }

    fn receive(&mut self, at: usize, from: u64, len: usize) -> Result<()> {
        let at = at.min(self.bytes);
        self.copy(self.at + at as u64, from, len.min(self.bytes - at))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.host.free(self.at);
    }
}
