//! A thread beside the one that steps: it takes states off the device and puts them there, through page-locked memory
//! and by a stream of its own, so that neither the copies nor the work on the numbers hold up a step. It knows no
//! slots: that one which is on its way takes part in nothing else is the pool's business.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::device::{Gpu, Moment, Pinned, Result};
use super::states::Shape;
use crate::cuda_error::CudaError;
use crate::language_model::SharedState;

/// What is asked of the mover.
#[derive(Debug)]
pub(super) struct Job {
    /// The copies come after it.
    pub(super) after: Box<dyn Moment>,
    /// Where the slot's parts are on the device.
    pub(super) parts: [u64; 3],
    pub(super) way: Way,
    /// Takes the end of it: the state's numbers where they were taken out, none where they were put in.
    pub(super) told: Sender<Result<Vec<f32>>>,
}

/// Which way a state moves.
pub(super) enum Way {
    Out,
    In(SharedState),
}

impl std::fmt::Debug for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Out) { "Out" } else { "In" })
    }
}

/// What is called when a move has ended.
#[derive(Clone)]
pub(super) struct Wake(pub(super) Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Wake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wake")
    }
}

/// The thread, which ends with this: after the move that it is at, and before those that wait.
#[derive(Debug)]
pub(super) struct Mover {
    jobs: Option<Sender<Job>>,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    pub(super) fn start(gpu: Arc<dyn Gpu>, shape: Shape, wake: Wake) -> Result<Self> {
        let (jobs, asked) = channel();
        let stops = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stops);
        let thread = std::thread::Builder::new()
            .name("states".into())
            .spawn(move || run(&asked, &*gpu, &shape, (&wake, &stop)))
            .map_err(|error| ended(&error.to_string()))?;
        Ok(Self { jobs: Some(jobs), stops, thread: Some(thread) })
    }

    /// Asks for a move.
    ///
    /// # Errors
    /// The thread has ended, by a panic.
    pub(super) fn ask(&self, job: Job) -> Result<()> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        sent.and_then(std::result::Result::ok).ok_or_else(|| ended("it has panicked"))
    }
}

/// The error of a move that nobody makes.
pub(super) fn ended(reason: &str) -> CudaError {
    CudaError::Failed { what: "the thread that moves states".into(), reason: reason.into() }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been told to all whose moves it has ended.
            let _ = thread.join();
        }
    }
}

fn run(asked: &Receiver<Job>, gpu: &dyn Gpu, shape: &Shape, (wake, stops): (&Wake, &AtomicBool)) {
    let mut memory = Vec::new();
    while let Ok(Job { after, parts, way, told }) = asked.recv() {
        if stops.load(Ordering::Relaxed) {
            return;
        }
        let one = AssertUnwindSafe(|| moved(gpu, shape, &mut memory, (&*after, parts, &way)));
        let outcome = catch_unwind(one).unwrap_or_else(|_| Err(ended("it has panicked")));
        if outcome.is_err() {
            // What went wrong may still be on its way to or from it: it is given back once that is over.
            memory = Vec::new();
        }
        // Who asked may have left.
        let _ = told.send(outcome);
        (wake.0)();
    }
}

/// Bytes that are copied at a time: a step's own copies, which take turns with these on the same wires, wait for no more.
const PIECE: usize = 1 << 20;

/// Where each piece of so many bytes begins, and its length.
fn pieces_of(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(PIECE).map(move |at| (at, PIECE.min(bytes - at)))
}

/// Makes one move, and comes back when it has ended.
fn moved(
    gpu: &dyn Gpu,
    shape: &Shape,
    memory: &mut Vec<Box<dyn Pinned>>,
    (after, parts, way): (&dyn Moment, [u64; 3], &Way),
) -> Result<Vec<f32>> {
    after.wait()?;
    let lengths = shape.parts();
    if memory.is_empty() {
        *memory = gpu.pinned_beside(&lengths)?;
    }
    let [s, sums, tails] = &mut memory[..] else { return Err(ended("its memory has not three parts")) };
    // A model without convolutions keeps no inputs of theirs.
    let pieces = || parts.into_iter().zip(lengths).filter(|(_, len)| *len > 0);
    match way {
        Way::Out => {
            for (memory, (from, len)) in [&mut *s, &mut *sums, &mut *tails].into_iter().zip(pieces()) {
                pieces_of(len).try_for_each(|(at, len)| memory.receive(at, from + at as u64, len))?;
            }
            Ok(shape.numbers([s.bytes()?, sums.bytes()?, tails.bytes()?].map(|part| &*part)))
        }
        Way::In(numbers) => {
            shape.fill((**numbers).as_ref(), [s.bytes()?, sums.bytes()?, tails.bytes()?]);
            for (memory, (to, len)) in [&*s, &*sums, &*tails].into_iter().zip(pieces()) {
                pieces_of(len).try_for_each(|(at, len)| memory.send(at, to + at as u64, len))?;
            }
            // Those that may be touched again are there.
            for memory in [s, sums, tails] {
                memory.bytes()?;
            }
            Ok(Vec::new())
        }
    }
}
