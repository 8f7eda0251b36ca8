//! A small thread pool that runs one job after another, each split into pieces. It is made for steps of a millisecond
//! with dozens of jobs each, on cores that other programs may use too.
//!
//! The caller works as well. Threads claim pieces one by one from an atomic word, so the caller never waits for a
//! worker that has not started. The caller and every second worker claim from the first piece on, the others from the
//! last: if all jobs of a step list the same rows or heads in the same order, a core finds in its own caches what it
//! wrote in the previous job.
//!
//! An idle worker spins for a while, then sleeps. If a worker keeps a piece for long, because the system gave its core
//! to another program, the caller waits for it once and then suspends the workers for sixteen times as long. So a busy
//! neighbor costs part of a thread, not a stalled step each time.

mod open;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use open::{End, Open};

/// How many times a worker checks for the next job before it sleeps: for about 70 microseconds, longer than the caller
/// works alone between two jobs of a step. Waking a worker takes about as long.
const LOOKS: u32 = 2000;
/// How many times the caller checks for others' pieces before it yields its core: for about twenty microseconds.
const CALLER_LOOKS: u32 = 600;
/// How long the caller waits for others' pieces, beyond its own work, before it counts them as late.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long the caller then sleeps between two checks.
const NAP: Duration = Duration::from_micros(50);
/// The workers are suspended for this many times the wait for a late one, at most for [`LONGEST_SUSPENSION`].
const SUSPENSION: u32 = 16;
const LONGEST_SUSPENSION: Duration = Duration::from_secs(1);

/// Does piece `i` of a job.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// A pointer to the work, which outlives all of its pieces.
#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
}

// SAFETY: the pointee is `Sync`, and `Threads::run` keeps it alive until its last piece is done.
unsafe impl Send for Job {}

struct Shared {
    /// An [`Open`] as a word.
    open: AtomicU64,
    /// The number of pieces that are done.
    done: AtomicUsize,
    /// The job whose number is in `open`; written only while nothing is open.
    job: Mutex<Option<Job>>,
    panicked: AtomicBool,
    ended: AtomicBool,
    sleeping: AtomicUsize,
}

impl Shared {
    /// Claims a piece of the open job; returns the job's number and the piece.
    fn claim(&self, end: End) -> Option<(u32, usize)> {
        let mut seen = self.open.load(Ordering::Acquire);
        loop {
            let open = Open::of(seen);
            if open.is_empty() {
                return None;
            }
            let (piece, rest) = open.claimed(end);
            match self.open.compare_exchange_weak(seen, rest.word(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((open.number, piece)),
                Err(now) => seen = now,
            }
        }
    }

    /// Returns whether a piece is unclaimed.
    fn is_open(&self, order: Ordering) -> bool {
        !Open::of(self.open.load(order)).is_empty()
    }

    /// Works on pieces until none is open.
    fn work(&self, end: End) {
        let mut known: Option<(u32, Job)> = None;
        while let Some((number, piece)) = self.claim(end) {
            // The job stays until this piece is done: `run` waits for it.
            let job = match known {
                Some((of, job)) if of == number => job,
                _ => match *self.job.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
                    Some(job) => job,
                    // A job is written before its pieces are open. Returning would leave the caller waiting.
                    None => std::process::abort(),
                },
            };
            known = Some((number, job));
            // SAFETY: the claimed piece is not done, so `run` has not returned and the job lives.
            let work = unsafe { &*job.work };
            // Claims go up or down in order, so that pieces adjacent in memory follow one another.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(piece))) {
                self.panicked.store(true, Ordering::Relaxed);
                // Dropping the payload may panic, and this piece is not counted yet.
                std::mem::forget(payload);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    fn serve(&self, end: End) {
        while !self.ended.load(Ordering::Acquire) {
            self.work(end);
            let mut looks = 0;
            while !self.is_open(Ordering::Relaxed) {
                looks += 1;
                if looks < LOOKS {
                    std::hint::spin_loop();
                    continue;
                }
                // Counted before the last check: `run` opens the job first, then checks for sleepers.
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                if !self.is_open(Ordering::SeqCst) && !self.ended.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
                if self.ended.load(Ordering::Acquire) {
                    return;
                }
                looks = 0;
            }
        }
    }
}

/// The state of the caller that has the workers.
struct Caller {
    number: u32,
    suspended_until: Option<Instant>,
}

/// A thread pool: the caller of [`Threads::run`] and its workers.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<Caller>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl Threads {
    /// Starts `count` threads, the caller included; fewer if the system refuses more. That is no error, because fewer
    /// threads compute the same bits, only more slowly. Callers that need or show a number compare [`Self::count`].
    pub fn new(count: usize) -> Self {
        let shared = Arc::new(Shared {
            open: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            job: Mutex::new(None),
            panicked: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
        });
        let worker = |i: usize| {
            let shared = Arc::clone(&shared);
            let end = if i.is_multiple_of(2) { End::First } else { End::Last };
            std::thread::Builder::new().name(format!("compute-{i}")).spawn(move || shared.serve(end)).ok()
        };
        let workers = (1..count).map_while(worker).collect();
        Self { shared, workers, caller: Mutex::new(Caller { number: 0, suspended_until: None }) }
    }

    /// Returns the threads of this process: as many as [`Threads::configure`] set, or one per core.
    pub fn global() -> &'static Arc<Self> {
        Self::global_of(None)
    }

    /// Sets the number of threads of [`Threads::global`]; returns false if they are in use with another number, or if
    /// the system refuses that many.
    #[must_use]
    pub fn configure(count: usize) -> bool {
        Self::global_of(Some(count)).count() == count.max(1)
    }

    fn global_of(count: Option<usize>) -> &'static Arc<Self> {
        static GLOBAL: OnceLock<Arc<Threads>> = OnceLock::new();
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        GLOBAL.get_or_init(|| Arc::new(Self::new(count.unwrap_or_else(cores))))
    }

    /// Returns the number of threads, the caller included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work(i)` for every `i` below `pieces`, in any order, on any of the threads, and returns when all are done.
    ///
    /// If the workers are busy for another caller, or the call comes from inside a piece, the caller works alone.
    ///
    /// # Panics
    /// If a piece panics: at once if the caller works alone, otherwise after all pieces.
    pub fn run(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        let alone = || (0..pieces).for_each(work);
        if pieces < 2 || self.workers.is_empty() {
            return alone();
        }
        if pieces > Open::MOST {
            return (0..pieces).step_by(Open::MOST).for_each(|first| {
                self.run(Open::MOST.min(pieces - first), &|i| work(first + i));
            });
        }
        let mut caller = match self.caller.try_lock() {
            Ok(caller) => caller,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return alone(),
        };
        let began = Instant::now();
        if caller.suspended_until.is_some_and(|until| began < until) {
            return alone();
        }
        caller.suspended_until = None;
        #[allow(clippy::transmute_ptr_to_ptr, reason = "a cast cannot lengthen the lifetime of a trait object")]
        // SAFETY: only the lifetime changes. Every claimed piece is done before this function returns (also if one
        // panics: `work` catches it), and none can be claimed afterwards, because none is open.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        let job = Job { work };
        *self.shared.job.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(job);
        caller.number = caller.number.wrapping_add(1);
        self.shared.done.store(0, Ordering::Relaxed);
        self.shared.open.store(Open::all(caller.number, pieces).word(), Ordering::SeqCst);
        if self.shared.sleeping.load(Ordering::SeqCst) > 0 {
            for worker in self.workers.iter().take(pieces - 1) {
                worker.thread().unpark();
            }
        }
        self.shared.work(End::First);
        self.wait(pieces, began, &mut caller);
        if self.shared.panicked.swap(false, Ordering::Relaxed) {
            drop(caller);
            panic!("a piece of a shared job panicked");
        }
    }

    /// Waits for the pieces that others have claimed; suspends the workers if that took too long.
    fn wait(&self, pieces: usize, began: Instant, caller: &mut Caller) {
        let all_done = || self.shared.done.load(Ordering::Acquire) == pieces;
        let mut looks = 0u32;
        let mut waiting = None;
        while !all_done() {
            // Must not panic: workers may still use the job, which this frame keeps alive.
            looks = looks.saturating_add(1);
            if looks.is_multiple_of(64) {
                let (since, _) = *waiting.get_or_insert_with(|| (Instant::now(), began.elapsed()));
                if since.elapsed() > PATIENCE {
                    // The worker has no core; spinning on this one would not help.
                    std::thread::sleep(NAP);
                } else if looks > CALLER_LOOKS {
                    // In case the worker waits for this core.
                    std::thread::yield_now();
                }
            }
            std::hint::spin_loop();
        }
        if let Some((since, worked)) = waiting {
            let waited = since.elapsed();
            if waited > PATIENCE + worked {
                caller.suspended_until = Some(Instant::now() + (waited * SUSPENSION).min(LONGEST_SUSPENSION));
            }
        }
    }

    #[cfg(test)]
    fn suspended(&self) -> bool {
        self.caller.lock().is_ok_and(|caller| caller.suspended_until.is_some_and(|until| Instant::now() < until))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Cannot fail: panics of pieces are caught.
            let _ = worker.join();
        }
    }
}
