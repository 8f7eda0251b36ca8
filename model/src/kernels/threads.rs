//! A few threads that share the pieces of one job after another: made for steps of a millisecond that hold dozens of
//! jobs, on cores that may be shared with others.
//!
//! The caller works too, and nobody waits for a thread that has not begun: pieces are claimed one by one from one
//! word, so that a worker which comes late finds nothing left. A worker looks for the next job for some microseconds,
//! then sleeps. Where a worker holds a piece for long (the system gave its core to somebody else), the caller waits
//! for it once, and then leaves the workers out for sixteen times as long: a busy neighbour costs a part of what one
//! thread would give, not a stalled step each time the neighbour wants its core.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Looks that a worker takes for the next job before it sleeps: some twenty microseconds.
const LOOKS: u32 = 600;
/// What a caller waits for others' pieces, beyond what it worked itself, before it counts them as late.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long it sleeps then between two looks.
const NAP: Duration = Duration::from_micros(50);
/// How many times the wait a late worker is left out for, and no longer than [`LONGEST_OUT`].
const OUT: u32 = 16;
const LONGEST_OUT: Duration = Duration::from_secs(1);

/// One job: what to do with piece `i`.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// A pointer to a job that outlives all of its pieces, and how many they are.
#[derive(Clone, Copy)]
struct Job {
    work: *const Work<'static>,
    pieces: usize,
}

// SAFETY: the pointee is `Sync`, and `Threads::run` keeps it alive until its last piece is done.
unsafe impl Send for Job {}

struct Shared {
    /// The job's number (upper half) and how many of its pieces nobody has claimed (lower half).
    open: AtomicU64,
    /// Pieces that are done.
    done: AtomicUsize,
    /// The job of `open`'s number; written only while nothing is open.
    job: Mutex<Option<Job>>,
    panicked: AtomicBool,
    ended: AtomicBool,
    sleeping: AtomicUsize,
}

impl Shared {
    /// Takes one piece of the job that is open -> the job's number and how many pieces were open, this one among them.
    fn claim(&self) -> Option<(u32, usize)> {
        let mut seen = self.open.load(Ordering::Acquire);
        while seen as u32 != 0 {
            match self.open.compare_exchange_weak(seen, seen - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(((seen >> 32) as u32, seen as u32 as usize)),
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Works on pieces until none is open.
    fn work(&self) {
        let mut known: Option<(u32, Job)> = None;
        while let Some((number, left)) = self.claim() {
            // While this piece is not done its job stays: `run` waits for it.
            let job = match known {
                Some((of, job)) if of == number => job,
                _ => match *self.job.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
                    Some(job) => job,
                    // A job is written before any of its pieces is open. To return would leave the caller waiting.
                    None => std::process::abort(),
                },
            };
            known = Some((number, job));
            // SAFETY: the claimed piece is not done, so `run` has not returned and the job lives.
            let work = unsafe { &*job.work };
            // The first piece first: neighbours in memory follow one another.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(job.pieces - left))) {
                self.panicked.store(true, Ordering::Relaxed);
                // What it carries may panic when it is dropped, and this piece is not counted yet.
                std::mem::forget(payload);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    fn serve(&self) {
        while !self.ended.load(Ordering::Acquire) {
            self.work();
            let mut looks = 0;
            while self.open.load(Ordering::Relaxed) as u32 == 0 {
                looks += 1;
                if looks < LOOKS {
                    std::hint::spin_loop();
                    continue;
                }
                // Counted before the last look: `run` opens a job first and counts the sleepers then.
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                if self.open.load(Ordering::SeqCst) as u32 == 0 && !self.ended.load(Ordering::SeqCst) {
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

/// What only the caller that has the threads changes.
struct Caller {
    number: u32,
    out_until: Option<Instant>,
}

/// Threads that share jobs: the caller of [`Threads::run`] and some workers.
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
    /// So many threads, the caller's own among them; fewer where the system gives no more.
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
            std::thread::Builder::new().name(format!("compute-{i}")).spawn(move || shared.serve()).ok()
        };
        let workers = (1..count).map_while(worker).collect();
        Self { shared, workers, caller: Mutex::new(Caller { number: 0, out_until: None }) }
    }

    /// The threads of this process: as many as [`Threads::configure`] was told, or one for each core.
    pub fn global() -> &'static Arc<Self> {
        Self::global_of(None)
    }

    /// Says how many threads [`Threads::global`] has -> whether it has so many: not where it was used before with
    /// another number, nor where the system gives fewer.
    #[must_use]
    pub fn configure(count: usize) -> bool {
        Self::global_of(Some(count)).count() == count.max(1)
    }

    fn global_of(count: Option<usize>) -> &'static Arc<Self> {
        static GLOBAL: OnceLock<Arc<Threads>> = OnceLock::new();
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        GLOBAL.get_or_init(|| Arc::new(Self::new(count.unwrap_or_else(cores))))
    }

    /// How many there are, the caller among them.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Does `work(i)` for every `i` below `pieces`, in any order, on any of the threads, and returns when all is done.
    ///
    /// Where the threads are at another caller's work, or a call comes from inside a piece, the caller works alone.
    ///
    /// # Panics
    /// When a piece has panicked: at once where the caller works alone, else when all others are done.
    pub fn run(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        let alone = || (0..pieces).for_each(work);
        if pieces < 2 || self.workers.is_empty() || pieces > u32::MAX as usize {
            return alone();
        }
        let mut caller = match self.caller.try_lock() {
            Ok(caller) => caller,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return alone(),
        };
        let began = Instant::now();
        if caller.out_until.is_some_and(|until| began < until) {
            return alone();
        }
        caller.out_until = None;
        #[allow(clippy::transmute_ptr_to_ptr, reason = "a cast cannot lengthen the lifetime of a trait object")]
        // SAFETY: only the lifetime changes. Every piece that is claimed is done before this function returns (also
        // when one panics: `work` catches it), and none can be claimed afterwards, for none is open.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        let job = Job { work, pieces };
        *self.shared.job.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(job);
        caller.number = caller.number.wrapping_add(1);
        self.shared.done.store(0, Ordering::Relaxed);
        self.shared.open.store(u64::from(caller.number) << 32 | pieces as u64, Ordering::SeqCst);
        if self.shared.sleeping.load(Ordering::SeqCst) > 0 {
            for worker in self.workers.iter().take(pieces - 1) {
                worker.thread().unpark();
            }
        }
        self.shared.work();
        self.wait(pieces, began, &mut caller);
        if self.shared.panicked.swap(false, Ordering::Relaxed) {
            drop(caller);
            panic!("a piece of a shared job panicked");
        }
    }

    /// Waits for the pieces that others have claimed; remembers where that took too long.
    fn wait(&self, pieces: usize, began: Instant, caller: &mut Caller) {
        let all_done = || self.shared.done.load(Ordering::Acquire) == pieces;
        let mut looks = 0u32;
        let mut waiting = None;
        while !all_done() {
            // Nothing here may panic: workers may still be at the job, which this frame keeps alive.
            looks = looks.saturating_add(1);
            if looks.is_multiple_of(64) {
                let (since, _) = *waiting.get_or_insert_with(|| (Instant::now(), began.elapsed()));
                if since.elapsed() > PATIENCE {
                    // A worker without a core: nobody is helped by a caller that burns another.
                    std::thread::sleep(NAP);
                } else if looks > LOOKS {
                    // Where the worker waits for this very core, it gets it.
                    std::thread::yield_now();
                }
            }
            std::hint::spin_loop();
        }
        if let Some((since, worked)) = waiting {
            let waited = since.elapsed();
            if waited > PATIENCE + worked {
                caller.out_until = Some(Instant::now() + (waited * OUT).min(LONGEST_OUT));
            }
        }
    }

    /// Whether the workers are left out for a while.
    #[cfg(test)]
    fn left_out(&self) -> bool {
        self.caller.lock().is_ok_and(|caller| caller.out_until.is_some_and(|until| Instant::now() < until))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // It ends well: panics of pieces are caught.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn every_piece_is_done_once() {
        for count in [1, 2, 3, 7] {
            let threads = Threads::new(count);
            for pieces in [0usize, 1, 2, 3, 64, 1000] {
                let hits: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..20 {
                    threads.run(pieces, &|i| {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 20), "{count} threads, {pieces} pieces");
            }
        }
    }

    #[test]
    fn a_job_from_inside_a_job_and_from_two_callers_is_done() {
        let threads = Threads::new(3);
        let sum = AtomicUsize::new(0);
        let add = |i: usize| {
            sum.fetch_add(i, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| threads.run(8, &|_| threads.run(5, &add))));
            }
        });
        assert_eq!(sum.into_inner(), 4 * 50 * 8 * 10);
    }

    #[test]
    fn a_panic_in_a_piece_is_the_callers_and_the_threads_go_on() {
        let threads = Threads::new(2);
        for round in 0..20 {
            let broken = catch_unwind(AssertUnwindSafe(|| threads.run(10, &|i| assert!(i != round % 10))));
            assert!(broken.is_err());
            let count = AtomicUsize::new(0);
            threads.run(10, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 10);
        }
    }

    #[test]
    fn a_second_caller_works_alone() {
        let threads = Threads::new(2);
        let (inside, entered) = mpsc::channel();
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let main = std::thread::current().id();
        // The threads are at a job that another caller has given.
        std::thread::scope(|scope| {
            let threads = &threads;
            let caught = scope.spawn(move || {
                threads.run(2, &|_| {
                    inside.send(()).unwrap();
                    held.lock().unwrap().recv().unwrap();
                });
            });
            entered.recv().unwrap();
            threads.run(100, &|_| assert_eq!(std::thread::current().id(), main));
            release.send(()).unwrap();
            release.send(()).unwrap();
            caught.join().unwrap();
        });
    }

    #[test]
    fn nobody_waits_for_a_worker_that_does_not_come() {
        // A worker that counts as one and never looks: it has no core.
        let (release, held) = mpsc::channel::<()>();
        let mut threads = Threads::new(1);
        threads.workers.push(std::thread::spawn(move || held.recv().unwrap()));
        let main = std::thread::current().id();
        let count = AtomicUsize::new(0);
        for _ in 0..10 {
            threads.run(100, &|_| {
                assert_eq!(std::thread::current().id(), main);
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.into_inner(), 1000);
        assert!(!threads.left_out());
        release.send(()).unwrap();
    }

    #[test]
    fn what_panics_once_more_when_it_is_dropped_does_no_harm() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        let threads = Threads::new(2);
        for _ in 0..20 {
            let broken = catch_unwind(AssertUnwindSafe(|| threads.run(10, &|_| std::panic::panic_any(Bomb))));
            // Where the workers were left out, it is the bomb itself that came through.
            std::mem::forget(broken.unwrap_err());
        }
    }

    #[test]
    fn a_worker_that_was_late_is_left_out_for_a_while() {
        let threads = Threads::new(2);
        let main = std::thread::current().id();
        let (begun, began) = mpsc::channel();
        let (began, first) = (Mutex::new(began), AtomicBool::new(true));
        // The caller holds its first piece until the worker has one, and the worker keeps that for long.
        threads.run(2, &|_| {
            if std::thread::current().id() == main {
                if first.swap(false, Ordering::SeqCst) {
                    began.lock().unwrap().recv().unwrap();
                }
            } else {
                begun.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        assert!(threads.left_out());
        threads.run(100, &|_| assert_eq!(std::thread::current().id(), main));
    }
}
