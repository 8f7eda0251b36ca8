//! A background thread that copies states between the device and the host, through page-locked memory and on its own
//! stream. Neither the copies nor the conversion of the numbers delays a step of the other thread. The thread does not
//! check slots: the pool must ensure that a slot in transfer takes part in nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use super::gpu::{Event, Gpu, Pinned, Result};
use super::states::Shape;
use crate::cuda_error::CudaError;
use crate::language_model::{SharedState, Transfer};

/// The callback for the end of a transfer.
type Wake = Arc<dyn Fn() + Send + Sync>;

/// The direction in which a state is copied.
pub(super) enum Direction {
    ToHost,
    /// The numbers are kept until they are on the device.
    ToDevice(SharedState),
}

/// A transfer for the thread.
struct Job {
    /// The copies start after this event.
    after: Box<dyn Event>,
    /// The addresses of the slot's parts on the device.
    parts: [u64; 3],
    direction: Direction,
    /// Receives the state's numbers after a copy to the host, and no numbers after a copy to the device.
    result: Sender<Result<Vec<f32>>>,
}

/// The transfers of a pool's slots, at most one per slot.
pub(super) struct Transfers {
    gpu: Arc<dyn Gpu>,
    shape: Shape,
    /// `None` before the first transfer.
    thread: Option<TransferThread>,
    wake: Wake,
    pending: Vec<Option<Receiver<Result<Vec<f32>>>>>, // (slots)
}

impl std::fmt::Debug for Transfers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfers").field("pending", &self.pending).finish_non_exhaustive()
    }
}

impl Transfers {
    pub(super) fn new(gpu: &Arc<dyn Gpu>, shape: Shape, slots: usize) -> Self {
        let pending = (0..slots).map(|_| None).collect();
        Self { gpu: Arc::clone(gpu), shape, thread: None, wake: Arc::new(|| {}), pending }
    }

    /// Sets the callback that runs, on another thread, whenever a transfer ends. Takes effect only before the first
    /// transfer.
    pub(super) fn on_end(&mut self, wake: Wake) {
        self.wake = wake;
    }

    /// Starts the transfer of a slot whose parts are at these addresses.
    pub(super) fn start(&mut self, slot: usize, parts: [u64; 3], direction: Direction) -> Result<Transfer> {
        // Work that the stream has not finished may still read or write the slot.
        let after = self.gpu.event()?;
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => TransferThread::start(Arc::clone(&self.gpu), self.shape, Arc::clone(&self.wake))?,
        };
        let (result, pending) = channel();
        // A thread that has ended is dropped: the next transfer starts another.
        thread.send(Job { after, parts, direction, result })?;
        self.thread = Some(thread);
        self.pending[slot] = Some(pending);
        Ok(Transfer::Pending)
    }

    /// Returns the progress of a slot's transfer without waiting.
    pub(super) fn poll(&mut self, slot: usize) -> Result<Transfer> {
        let result = match self.pending[slot].as_ref().map(Receiver::try_recv) {
            Some(Ok(result)) => result,
            Some(Err(TryRecvError::Empty)) => return Ok(Transfer::Pending),
            Some(Err(TryRecvError::Disconnected)) | None => Err(thread_error("it ended before the transfer")),
        };
        self.pending[slot] = None;
        result.map(Transfer::Done)
    }
}

/// The background thread. On drop, it ends after the transfer in progress, without starting those that wait.
struct TransferThread {
    jobs: Option<Sender<Job>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TransferThread {
    fn start(gpu: Arc<dyn Gpu>, shape: Shape, wake: Wake) -> Result<Self> {
        let (sender, jobs) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("states".into())
            .spawn(move || run(&jobs, &*gpu, &shape, (&*wake, &stops)))
            .map_err(|error| thread_error(&error.to_string()))?;
        Ok(Self { jobs: Some(sender), stop, thread: Some(thread) })
    }

    /// Passes a job to the thread; fails if the thread has panicked.
    fn send(&self, job: Job) -> Result<()> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        sent.and_then(std::result::Result::ok).ok_or_else(|| thread_error("it panicked"))
    }
}

fn thread_error(reason: &str) -> CudaError {
    CudaError::Failed { what: "the thread that transfers states".into(), reason: reason.into() }
}

impl Drop for TransferThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The owners of transfers that a panic ended have received an error.
            let _ = thread.join();
        }
    }
}

fn run(jobs: &Receiver<Job>, gpu: &dyn Gpu, shape: &Shape, (wake, stop): (&(dyn Fn() + Send + Sync), &AtomicBool)) {
    let mut memory = Vec::new();
    while let Ok(Job { after, parts, direction, result }) = jobs.recv() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let copy = AssertUnwindSafe(|| transfer(gpu, shape, &mut memory, (&*after, parts, &direction)));
        let outcome = catch_unwind(copy).unwrap_or_else(|_| Err(thread_error("it panicked")));
        if outcome.is_err() {
            // A failed copy may still use the memory: it is freed once the copy is over.
            memory = Vec::new();
        }
        // The receiver may be gone.
        let _ = result.send(outcome);
        wake();
    }
}

/// Bytes per copy. A step's own copies take turns with these on the same bus, and wait for at most one of them.
const PIECE: usize = 1 << 20;

/// Returns the start and the length of each piece of `bytes` bytes.
fn pieces_of(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(PIECE).map(move |at| (at, PIECE.min(bytes - at)))
}

/// Makes one transfer, and returns when it has ended.
fn transfer(
    gpu: &dyn Gpu,
    shape: &Shape,
    memory: &mut Vec<Box<dyn Pinned>>,
    (after, parts, direction): (&dyn Event, [u64; 3], &Direction),
) -> Result<Vec<f32>> {
    after.wait()?;
    let lengths = shape.parts();
    if memory.is_empty() {
        *memory = gpu.pinned_beside(&lengths)?;
    }
    let [s, sums, tails] = &mut memory[..] else { return Err(thread_error("its memory has not three parts")) };
    // A model without convolutions has no convolution inputs.
    let pieces = || parts.into_iter().zip(lengths).filter(|(_, len)| *len > 0);
    match direction {
        Direction::ToHost => {
            for (memory, (from, len)) in [&mut *s, &mut *sums, &mut *tails].into_iter().zip(pieces()) {
                pieces_of(len).try_for_each(|(at, len)| memory.receive(at, from + at as u64, len))?;
            }
            Ok(shape.numbers([s.bytes()?, sums.bytes()?, tails.bytes()?].map(|part| &*part)))
        }
        Direction::ToDevice(numbers) => {
            shape.fill((**numbers).as_ref(), [s.bytes()?, sums.bytes()?, tails.bytes()?]);
            for (memory, (to, len)) in [&*s, &*sums, &*tails].into_iter().zip(pieces()) {
                pieces_of(len).try_for_each(|(at, len)| memory.send(at, to + at as u64, len))?;
            }
            // The copies are done when their memory can be accessed again.
            for memory in [s, sums, tails] {
                memory.bytes()?;
            }
            Ok(Vec::new())
        }
    }
}
