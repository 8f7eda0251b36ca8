//! Tests of the thread pool.

use std::sync::mpsc;

use super::*;

#[test]
fn every_piece_is_done_once() {
    for count in [1, 2, 3, 7] {
        let threads = Threads::new(count);
        for pieces in [0usize, 1, 2, 3, 64, 1000, Open::MOST, 2 * Open::MOST + 3] {
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
fn the_caller_gets_the_panic_of_a_piece_and_the_threads_survive() {
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
    // The workers are busy for another caller.
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
fn the_caller_does_not_wait_for_a_worker_that_never_starts() {
    // This worker never checks for a job, as if it had no core.
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
    assert!(!threads.suspended());
    release.send(()).unwrap();
}

#[test]
fn a_panic_payload_may_panic_when_dropped() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    let threads = Threads::new(2);
    for _ in 0..20 {
        let broken = catch_unwind(AssertUnwindSafe(|| threads.run(10, &|_| std::panic::panic_any(Bomb))));
        // If the workers were suspended, the payload is the bomb itself.
        std::mem::forget(broken.unwrap_err());
    }
}

#[test]
fn late_workers_are_suspended() {
    let threads = Threads::new(2);
    let main = std::thread::current().id();
    let (started, worker_started) = mpsc::channel();
    let (worker_started, first) = (Mutex::new(worker_started), AtomicBool::new(true));
    // The caller keeps its first piece until the worker has one. Then the worker takes longer than it took to start.
    threads.run(2, &|_| {
        if std::thread::current().id() == main {
            if first.swap(false, Ordering::SeqCst) {
                worker_started.lock().unwrap().recv().unwrap();
            }
        } else {
            started.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    assert!(threads.suspended());
    threads.run(100, &|_| assert_eq!(std::thread::current().id(), main));
}
