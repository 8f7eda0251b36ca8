//! A context's stream: its work, waiting for it, and the page-locked memory for its copies.

#![allow(unsafe_code, reason = "the driver is C")]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::gpu::{Event, Pinned, Result};
use crate::cuda_error::CudaError;

thread_local! {
    /// Whether this thread is recording a step: its calls become part of the step.
    pub(super) static RECORDS: Cell<bool> = const { Cell::new(false) };
}

/// A context and its stream.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    /// Held for writing while a step is recorded: calls of other threads would become part of it.
    pub(super) recording: RwLock<()>,
    /// Whether a thread that waits for the stream sleeps. Polling notices the end sooner, but uses a core.
    sleeps: bool,
    /// The number of uses of page-locked memory, and how many of them the stream has finished.
    uses: AtomicU64,
    done: AtomicU64,
}

impl Queue {
    pub(super) fn new(context: Arc<CudaContext>, stream: Arc<CudaStream>, sleeps: bool) -> Self {
        let (uses, done) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { context, stream, recording: RwLock::new(()), sleeps, uses, done }
    }

    /// Returns an event that marks the end of the work queued so far.
    pub(super) fn event(&self) -> Result<StreamEvent> {
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        Ok(StreamEvent(self.stream.record_event(flags).map_err(failed("an event"))?))
    }

    /// Binds the context to this thread, and waits for a recording of another thread to end.
    pub(super) fn turn(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        self.context.bind_to_thread().map_err(failed("context"))?;
        Ok((!RECORDS.get()).then(|| self.recording.read().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Allocates page-locked memory for this stream's copies.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Box<dyn Pinned>> {
        let _turn = self.turn()?;
        // SAFETY: the context is bound, and the size is not 0.
        let at = unsafe { result::malloc_host(bytes.max(16), 0) }.map_err(failed("pinned memory"))?.cast::<u8>();
        // SAFETY: that many bytes were allocated.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Box::new(HostMemory { at, bytes, used: Cell::new(0), queue: Arc::clone(self) }))
    }

    pub(super) fn wait(&self, what: &str) -> Result<()> {
        let uses = self.uses.load(Ordering::Acquire);
        if self.sleeps {
            self.event()?.0.synchronize().map_err(failed(what))?;
        } else {
            self.stream.synchronize().map_err(failed(what))?;
        }
        self.done.fetch_max(uses, Ordering::AcqRel);
        Ok(())
    }

    /// Counts a use of page-locked memory that has just been queued: a wait that starts later covers it. A recorded use
    /// recurs with every launch of the graph, so it never ends.
    fn used(&self) -> u64 {
        if RECORDS.get() { u64::MAX } else { self.uses.fetch_add(1, Ordering::AcqRel) + 1 }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }
}

pub(super) fn failed(what: &str) -> impl FnOnce(DriverError) -> CudaError + '_ {
    move |error| {
        let (what, reason) = (what.into(), words(error));
        if is_fatal(error) { CudaError::Lost { what, reason } } else { CudaError::Failed { what, reason } }
    }
}

/// Returns whether every later call in this process will fail too.
fn is_fatal(error: DriverError) -> bool {
    use sys::CUresult as Code;
    matches!(
        error.0,
        Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_CONTAINED
            | Code::CUDA_ERROR_DEINITIALIZED
            | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
            | Code::CUDA_ERROR_EXTERNAL_DEVICE
            | Code::CUDA_ERROR_INVALID_CONTEXT
            | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Code::CUDA_ERROR_UNKNOWN
    )
}

/// Returns the driver's message for an error.
pub(super) fn words(error: DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
        _ => format!("{error:?}"),
    }
}

/// An event of a stream; a thread that waits for it sleeps.
#[derive(Debug)]
pub(super) struct StreamEvent(CudaEvent);

impl Event for StreamEvent {
    fn wait(&self) -> Result<()> {
        self.0.synchronize().map_err(failed("a step"))
    }
}

/// Page-locked memory.
#[derive(Debug)]
struct HostMemory {
    at: *mut u8,
    bytes: usize,
    /// The last use of this memory, as counted by [`Queue::used`]; a recorded use never ends.
    used: Cell<u64>,
    queue: Arc<Queue>,
}

// SAFETY: it owns this memory of the process.
unsafe impl Send for HostMemory {}

impl Pinned for HostMemory {
    fn bytes(&mut self) -> Result<&mut [u8]> {
        let _turn = self.queue.turn()?;
        // Waits only if the last use may not be finished.
        if self.used.get() > self.queue.done.load(Ordering::Acquire) {
            self.queue.wait("a step")?;
        }
        // SAFETY: that many initialized bytes, which the device no longer uses.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) })
    }

    fn send(&self, at: usize, to: u64, len: usize) -> Result<()> {
        let _turn = self.queue.turn()?;
        let at = at.min(self.bytes);
        // SAFETY: within the allocation; no thread writes to it until the stream is done (`bytes` waits).
        let bytes = unsafe { std::slice::from_raw_parts(self.at.add(at), len.min(self.bytes - at)) };
        // SAFETY: the buffer is long enough.
        let status = unsafe { result::memcpy_htod_async(to, bytes, self.queue.raw()) };
        self.used.set(self.used.get().max(self.queue.used()));
        status.map_err(failed("copy to the device"))
    }

    fn receive(&mut self, at: usize, from: u64, len: usize) -> Result<()> {
        let _turn = self.queue.turn()?;
        let at = at.min(self.bytes);
        // SAFETY: within the allocation; no thread reads it until the stream is done (`bytes` waits).
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.at.add(at), len.min(self.bytes - at)) };
        // SAFETY: the buffer is long enough.
        let status = unsafe { result::memcpy_dtoh_async(bytes, from, self.queue.raw()) };
        self.used.set(self.used.get().max(self.queue.used()));
        status.map_err(failed("copy from the device"))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Ok(_turn) = self.queue.turn() {
            let _ = self.queue.wait("the end");
            // SAFETY: it came from `malloc_host`, once, and no copy to it is pending.
            let _ = unsafe { result::free_host(self.at.cast()) };
        }
    }
}
