//! Tests transfers of states while other slots step: bits do not change, no step waits, and no slot gets a partial
//! state. A gate stops the calls of the transferring thread until the test opens it, so no test depends on a clock.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};

use super::failures::failing;
use super::watched::{Call, watched};
use crate::cuda::{CudaDecoder, CudaPool};
use crate::error::ModelError;
use crate::language_model::Transfer;
use crate::memory::StateType;
use crate::runner::Backend;

type Result<T> = std::result::Result<T, ModelError>;

/// A gate that the transferring thread passes at each of its device calls.
#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    /// Number of calls that wait at the gate.
    waiting: usize,
    /// Number of transfers that have ended.
    ended: usize,
    /// Whether a step is being recorded, or has been.
    recording: bool,
    /// Called during the next recording.
    during_recording: Option<Box<dyn FnOnce() + Send>>,
    /// Whether the next call of the transferring thread panics.
    panics: bool,
}

impl Gate {
    fn call(self: &Arc<Self>) -> Call {
        let gate = Arc::clone(self);
        Arc::new(move |name: &str| {
            if name == "record" {
                gate.change(|state| state.recording = true);
            } else if name == "launch" {
                let mut state = gate.state.lock().unwrap();
                let run = if state.recording { state.during_recording.take() } else { None };
                drop(state);
                if let Some(run) = run {
                    run();
                }
            } else if name.ends_with("beside") {
                let panics = std::mem::take(&mut gate.state.lock().unwrap().panics);
                assert!(!panics, "scripted panic");
                gate.change(|state| state.waiting += 1);
                gate.until(|state| !state.closed);
                gate.change(|state| state.waiting -= 1);
            }
            Ok(())
        })
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn until(&self, mut holds: impl FnMut(&State) -> bool) {
        drop(self.changed.wait_while(self.state.lock().unwrap(), |state| !holds(state)).unwrap());
    }

    /// Closes the gate until the result is dropped, so that a failing test does not leave the thread at the gate.
    fn close(self: &Arc<Self>) -> Closed {
        self.change(|state| state.closed = true);
        Closed(Arc::clone(self))
    }

    fn open(&self) {
        self.change(|state| state.closed = false);
    }

    /// Returns a decoder and a pool whose transfers pass this gate.
    fn pool(self: &Arc<Self>, conv: usize, state: StateType) -> (CudaDecoder, CudaPool) {
        let (decoder, mut pool) = watched(conv, state, self.call());
        let gate = Arc::clone(self);
        pool.on_transfer_end(Arc::new(move || gate.change(|state| state.ended += 1)));
        (decoder, pool)
    }
}

struct Closed(Arc<Gate>);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.open();
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|v| v.to_bits()).collect()
}

/// Waits until a slot's transfer has ended, and returns its result.
fn finish(pool: &mut CudaPool, slot: usize) -> Result<Vec<f32>> {
    loop {
        match pool.poll_transfer(slot)? {
            Transfer::Done(numbers) => return Ok(numbers),
            Transfer::Pending => std::thread::yield_now(),
        }
    }
}

fn export(pool: &mut CudaPool, slot: usize) -> Result<()> {
    pool.start_export(slot).map(drop)
}

fn import(pool: &mut CudaPool, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
    pool.start_import(slot, Arc::new(numbers.to_vec()), tokens).map(drop)
}

fn step(decoder: &CudaDecoder, pool: &mut CudaPool, ids: &[u32], slots: &[usize]) -> Vec<u32> {
    let mut logits = Vec::new();
    decoder.decode_into(ids, pool, slots, &mut logits).unwrap();
    bits(&logits)
}

#[test]
fn a_transfer_changes_no_bit() {
    for (conv, state) in [(0, StateType::F32), (3, StateType::F32), (3, StateType::Bf16)] {
        let (decoder, mut pool) = watched(conv, state, Arc::new(|_| Ok(())));
        decoder.prefill(&[1, 7, 4, 9, 2], &mut pool, 0).unwrap();
        let exported = pool.export(0).unwrap();
        export(&mut pool, 0).unwrap();
        assert_eq!(bits(&finish(&mut pool, 0).unwrap()), bits(&exported), "{conv} {state:?}");
        // Old contents of the page-locked memory must have no effect.
        decoder.prefill(&[3], &mut pool, 2).unwrap();
        import(&mut pool, 1, &exported, 5).unwrap();
        assert_eq!(finish(&mut pool, 1).unwrap(), Vec::<f32>::new());
        export(&mut pool, 2).unwrap();
        assert_ne!(bits(&finish(&mut pool, 2).unwrap()), bits(&exported));
        pool.import(2, &exported, 5).unwrap();
        assert_eq!(pool.tokens(1), 5);
        assert_eq!(bits(&pool.export(1).unwrap()), bits(&exported), "{conv} {state:?}");
        let logits = step(&decoder, &mut pool, &[8, 8, 8], &[0, 1, 2]);
        let rows: Vec<_> = logits.chunks_exact(31).collect();
        assert!(rows[0] == rows[1] && rows[0] == rows[2], "{conv} {state:?}");
    }
}

/// Returns two pools whose slots have read the same tokens: one whose transfers pass the gate, and one without any.
fn twins(gate: &Arc<Gate>) -> [(CudaDecoder, CudaPool); 2] {
    [gate.pool(3, StateType::F32), watched(3, StateType::F32, Arc::new(|_| Ok(())))].map(|(decoder, mut pool)| {
        for slot in 0..3 {
            decoder.prefill(&[1 + slot as u32, 7, 4], &mut pool, slot).unwrap();
        }
        (decoder, pool)
    })
}

/// Starts the import of `other` into slot 0, or the export of slot 0.
fn begin(pool: &mut CudaPool, imports: bool, other: &[f32]) {
    if imports { import(pool, 0, other, 3).unwrap() } else { export(pool, 0).unwrap() }
}

#[test]
fn other_slots_step_during_a_transfer() {
    for imports in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(decoder, mut pool), (twin, mut reference)] = twins(&gate);
        let (own, other) = (reference.export(0).unwrap(), reference.export(2).unwrap());
        let _closed = gate.close();
        begin(&mut pool, imports, &other);
        gate.until(|state| state.waiting == 1);
        for id in 5..9 {
            let got = step(&decoder, &mut pool, &[id, id], &[1, 2]);
            assert_eq!(got, step(&twin, &mut reference, &[id, id], &[1, 2]));
            decoder.prefill(&[id, 3], &mut pool, 1).unwrap();
            twin.prefill(&[id, 3], &mut reference, 1).unwrap();
            assert!(matches!(pool.poll_transfer(0), Ok(Transfer::Pending)));
        }
        gate.open();
        let numbers = finish(&mut pool, 0).unwrap();
        assert_eq!(bits(&numbers), if imports { Vec::new() } else { bits(&own) });
        assert_eq!(bits(&pool.export(0).unwrap()), bits(if imports { &other } else { &own }));
        assert_eq!(bits(&pool.export(1).unwrap()), bits(&reference.export(1).unwrap()));
        assert_eq!([0, 1, 2].map(|slot| pool.tokens(slot)), [3, 15, 7]);
    }
}

#[test]
fn a_transfer_during_a_recording_is_not_recorded() {
    for imports in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(decoder, mut pool), (twin, mut reference)] = twins(&gate);
        let (own, other) = (reference.export(0).unwrap(), reference.export(2).unwrap());
        let _closed = gate.close();
        begin(&mut pool, imports, &other);
        // The first step of one row is recorded, and the transfer runs during the recording.
        let meanwhile = Arc::clone(&gate);
        let run = move || {
            meanwhile.open();
            meanwhile.until(|state| state.ended == 1);
        };
        gate.change(|state| state.during_recording = Some(Box::new(run)));
        assert_eq!(step(&decoder, &mut pool, &[5], &[1]), step(&twin, &mut reference, &[5], &[1]));
        gate.until(|state| state.ended == 1);
        let numbers = finish(&mut pool, 0).unwrap();
        assert_eq!(bits(&numbers), if imports { Vec::new() } else { bits(&own) });
        assert_eq!(bits(&pool.export(0).unwrap()), bits(if imports { &other } else { &own }));
        // Replaying the recorded step does not repeat the transfer.
        decoder.prefill(&[9], &mut pool, 0).unwrap();
        let expected = pool.export(0).unwrap();
        assert_eq!(step(&decoder, &mut pool, &[5], &[1]), step(&twin, &mut reference, &[5], &[1]));
        assert_eq!(bits(&pool.export(0).unwrap()), bits(&expected));
    }
}

#[test]
fn all_other_calls_refuse_a_slot_in_transfer() {
    for imports in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(decoder, mut pool), (twin, mut reference)] = twins(&gate);
        let (own, other) = (reference.export(0).unwrap(), reference.export(2).unwrap());
        let _closed = gate.close();
        begin(&mut pool, imports, &other);
        let refusals = [
            pool.reset(0),
            pool.import(0, &other, 1),
            pool.export(0).map(drop),
            export(&mut pool, 0),
            import(&mut pool, 0, &other, 1),
            decoder.prefill(&[1], &mut pool, 0),
            decoder.decode_into(&[1, 1], &mut pool, &[2, 0], &mut Vec::new()),
        ];
        for refusal in refusals {
            let words = refusal.unwrap_err().to_string();
            assert!(words.contains("slot 0 has a state transfer in progress"), "{words}");
        }
        gate.open();
        finish(&mut pool, 0).unwrap();
        assert!(pool.poll_transfer(0).unwrap_err().to_string().contains("no state transfer"));
        assert!(
            pool.poll_transfer(7).is_err() && pool.start_export(7).is_err() && import(&mut pool, 7, &other, 1).is_err()
        );
        assert!(import(&mut pool, 0, &other[1..], 1).unwrap_err().to_string().contains("numbers"));
        // The refused calls have changed neither this slot nor another.
        assert_eq!(bits(&pool.export(0).unwrap()), bits(if imports { &other } else { &own }));
        assert_eq!(step(&decoder, &mut pool, &[5], &[2]), step(&twin, &mut reference, &[5], &[2]));
    }
}

#[test]
fn a_transfer_that_fails_at_any_call_leaves_the_old_state_or_a_refused_slot() {
    for (fatal, imports) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut failures = 0;
        for calls in 0.. {
            let (left, decoder, mut pool) = failing(fatal);
            decoder.prefill(&[1, 7, 4, 9, 2], &mut pool, 0).unwrap();
            let own = pool.export(0).unwrap();
            decoder.prefill(&[3], &mut pool, 1).unwrap();
            let other = pool.export(1).unwrap();
            left.store(calls, Ordering::Relaxed);
            let start = if imports { import(&mut pool, 0, &other, 1) } else { export(&mut pool, 0) };
            let started = start.is_ok();
            let outcome = start.and_then(|()| finish(&mut pool, 0));
            left.store(-1, Ordering::Relaxed);
            if outcome.is_ok() {
                break;
            }
            failures += 1;
            assert_eq!(pool.is_lost(), fatal, "after {calls} calls");
            if imports && started {
                assert!(pool.export(0).is_err() && pool.start_export(0).is_err(), "after {calls} calls");
                assert!(decoder.prefill(&[1], &mut pool, 0).is_err(), "after {calls} calls");
            } else {
                assert_eq!(bits(&pool.export(0).unwrap()), bits(&own), "after {calls} calls");
            }
            // The next transfer by the same thread succeeds.
            import(&mut pool, 0, &other, 1).unwrap();
            finish(&mut pool, 0).unwrap();
            export(&mut pool, 0).unwrap();
            assert_eq!(bits(&finish(&mut pool, 0).unwrap()), bits(&other), "after {calls} calls");
        }
        assert!(failures >= 8, "{failures} failures");
    }
}

#[test]
fn a_panic_ends_only_its_transfer() {
    for imports in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(_, mut pool), (_, reference)] = twins(&gate);
        let (own, other) = (reference.export(0).unwrap(), reference.export(2).unwrap());
        gate.change(|state| state.panics = true);
        begin(&mut pool, imports, &other);
        assert!(finish(&mut pool, 0).unwrap_err().to_string().contains("thread that transfers states"));
        assert_eq!(pool.export(0).is_err(), imports);
        import(&mut pool, 1, &own, 3).unwrap();
        finish(&mut pool, 1).unwrap();
        import(&mut pool, 0, &other, 3).unwrap();
        finish(&mut pool, 0).unwrap();
        assert_eq!(bits(&pool.export(0).unwrap()), bits(&other));
        assert_eq!(bits(&pool.export(1).unwrap()), bits(&own));
    }
}

#[test]
fn dropping_a_pool_waits_for_the_transfer_in_progress() {
    let gate = Arc::new(Gate::default());
    let [(_, mut pool), (_, reference)] = twins(&gate);
    let shared: Arc<[f32]> = reference.export(2).unwrap().into();
    let closed = gate.close();
    for slot in 0..3 {
        pool.start_import(slot, Arc::new(Arc::clone(&shared)), 3).unwrap();
    }
    gate.until(|state| state.waiting == 1);
    let thread = std::thread::spawn(move || drop(closed));
    drop(pool);
    // All references to the states are dropped, including those of transfers that never started.
    assert_eq!((Arc::strong_count(&shared), gate.state.lock().unwrap().waiting), (1, 0));
    thread.join().unwrap();
}
