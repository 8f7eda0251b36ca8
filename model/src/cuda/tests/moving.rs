//! States that move while others step: the same bits, nobody held up, and never half of one. Calls of the thread that
//! moves them are held up until a test lets them go, so that nothing here depends on a clock.

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

/// A gate that the calls of the mover come to.
#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    /// How many wait at it.
    waiting: usize,
    /// Moves that have ended.
    ended: usize,
    /// Whether a step is recorded, or has been.
    records: bool,
    /// What is called in the midst of the next recording.
    in_record: Option<Box<dyn FnOnce() + Send>>,
    /// Whether the next call of the mover panics.
    panics: bool,
}

impl Gate {
    fn call(self: &Arc<Self>) -> Call {
        let gate = Arc::clone(self);
        Arc::new(move |name: &str| {
            if name == "record" {
                gate.change(|state| state.records = true);
            } else if name == "launch" {
                let mut state = gate.state.lock().unwrap();
                let run = if state.records { state.in_record.take() } else { None };
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

    /// Closes it until what is returned goes: a test that fails must not leave the mover at it.
    fn close(self: &Arc<Self>) -> Closed {
        self.change(|state| state.closed = true);
        Closed(Arc::clone(self))
    }

    fn open(&self) {
        self.change(|state| state.closed = false);
    }

    /// A decoder and its pool, whose mover's calls come to this.
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

/// Waits for the end of a slot's transfer.
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
fn a_state_that_moves_is_the_same_bits() {
    for (conv, state) in [(0, StateType::F32), (3, StateType::F32), (3, StateType::Bf16)] {
        let (decoder, mut pool) = watched(conv, state, Arc::new(|_| Ok(())));
        decoder.absorb(&[1, 7, 4, 9, 2], &mut pool, 0).unwrap();
        let whole = pool.export(0).unwrap();
        export(&mut pool, 0).unwrap();
        assert_eq!(bits(&finish(&mut pool, 0).unwrap()), bits(&whole), "{conv} {state:?}");
        // What the page-locked memory has had before must not show.
        decoder.absorb(&[3], &mut pool, 2).unwrap();
        import(&mut pool, 1, &whole, 5).unwrap();
        assert_eq!(finish(&mut pool, 1).unwrap(), Vec::<f32>::new());
        export(&mut pool, 2).unwrap();
        assert_ne!(bits(&finish(&mut pool, 2).unwrap()), bits(&whole));
        pool.import(2, &whole, 5).unwrap();
        assert_eq!(pool.tokens(1), 5);
        assert_eq!(bits(&pool.export(1).unwrap()), bits(&whole), "{conv} {state:?}");
        let logits = step(&decoder, &mut pool, &[8, 8, 8], &[0, 1, 2]);
        let rows: Vec<_> = logits.chunks_exact(31).collect();
        assert!(rows[0] == rows[1] && rows[0] == rows[2], "{conv} {state:?}");
    }
}

/// Two pools whose slots have read the same: one whose moves come to a gate, one that moves nothing.
fn twins(gate: &Arc<Gate>) -> [(CudaDecoder, CudaPool); 2] {
    [gate.pool(3, StateType::F32), watched(3, StateType::F32, Arc::new(|_| Ok(())))].map(|(decoder, mut pool)| {
        for slot in 0..3 {
            decoder.absorb(&[1 + slot as u32, 7, 4], &mut pool, slot).unwrap();
        }
        (decoder, pool)
    })
}

/// Begins a move of slot 0: out of it, or `whole` into it.
fn begin(pool: &mut CudaPool, comes: bool, whole: &[f32]) {
    if comes { import(pool, 0, whole, 3).unwrap() } else { export(pool, 0).unwrap() }
}

#[test]
fn other_slots_step_while_a_state_is_on_its_way() {
    for comes in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(decoder, mut pool), (twin, mut still)] = twins(&gate);
        let (own, whole) = (still.export(0).unwrap(), still.export(2).unwrap());
        let _closed = gate.close();
        begin(&mut pool, comes, &whole);
        gate.until(|state| state.waiting == 1);
        for id in 5..9 {
            let got = step(&decoder, &mut pool, &[id, id], &[1, 2]);
            assert_eq!(got, step(&twin, &mut still, &[id, id], &[1, 2]));
            decoder.absorb(&[id, 3], &mut pool, 1).unwrap();
            twin.absorb(&[id, 3], &mut still, 1).unwrap();
            assert!(matches!(pool.poll_transfer(0), Ok(Transfer::Pending)));
        }
        gate.open();
        let numbers = finish(&mut pool, 0).unwrap();
        assert_eq!(bits(&numbers), if comes { Vec::new() } else { bits(&own) });
        assert_eq!(bits(&pool.export(0).unwrap()), bits(if comes { &whole } else { &own }));
        assert_eq!(bits(&pool.export(1).unwrap()), bits(&still.export(1).unwrap()));
        assert_eq!([0, 1, 2].map(|slot| pool.tokens(slot)), [3, 15, 7]);
    }
}

#[test]
fn what_moves_while_a_step_is_recorded_is_no_part_of_it() {
    for comes in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(decoder, mut pool), (twin, mut still)] = twins(&gate);
        let (own, whole) = (still.export(0).unwrap(), still.export(2).unwrap());
        let _closed = gate.close();
        begin(&mut pool, comes, &whole);
        // No step has been of one row: it is recorded, and the move is made in the midst of that.
        let meanwhile = Arc::clone(&gate);
        let run = move || {
            meanwhile.open();
            meanwhile.until(|state| state.ended == 1);
        };
        gate.change(|state| state.in_record = Some(Box::new(run)));
        assert_eq!(step(&decoder, &mut pool, &[5], &[1]), step(&twin, &mut still, &[5], &[1]));
        gate.until(|state| state.ended == 1);
        let numbers = finish(&mut pool, 0).unwrap();
        assert_eq!(bits(&numbers), if comes { Vec::new() } else { bits(&own) });
        assert_eq!(bits(&pool.export(0).unwrap()), bits(if comes { &whole } else { &own }));
        // Nor is it done again where the step is.
        decoder.absorb(&[9], &mut pool, 0).unwrap();
        let moved_on = pool.export(0).unwrap();
        assert_eq!(step(&decoder, &mut pool, &[5], &[1]), step(&twin, &mut still, &[5], &[1]));
        assert_eq!(bits(&pool.export(0).unwrap()), bits(&moved_on));
    }
}

#[test]
fn a_slot_on_its_way_is_refused_to_all_else() {
    for comes in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(decoder, mut pool), (twin, mut still)] = twins(&gate);
        let (own, whole) = (still.export(0).unwrap(), still.export(2).unwrap());
        let _closed = gate.close();
        begin(&mut pool, comes, &whole);
        let refusals = [
            pool.reset(0),
            pool.import(0, &whole, 1),
            pool.export(0).map(drop),
            export(&mut pool, 0),
            import(&mut pool, 0, &whole, 1),
            decoder.absorb(&[1], &mut pool, 0),
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
            pool.poll_transfer(7).is_err() && pool.start_export(7).is_err() && import(&mut pool, 7, &whole, 1).is_err()
        );
        assert!(import(&mut pool, 0, &whole[1..], 1).unwrap_err().to_string().contains("numbers"));
        // All that was refused has changed nothing, the row beside it neither.
        assert_eq!(bits(&pool.export(0).unwrap()), bits(if comes { &whole } else { &own }));
        assert_eq!(step(&decoder, &mut pool, &[5], &[2]), step(&twin, &mut still, &[5], &[2]));
    }
}

#[test]
fn a_move_that_fails_anywhere_leaves_what_was_there_or_nothing() {
    for (fatal, comes) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut failures = 0;
        for calls in 0.. {
            let (left, decoder, mut pool) = failing(fatal);
            decoder.absorb(&[1, 7, 4, 9, 2], &mut pool, 0).unwrap();
            let own = pool.export(0).unwrap();
            decoder.absorb(&[3], &mut pool, 1).unwrap();
            let other = pool.export(1).unwrap();
            left.store(calls, Ordering::Relaxed);
            let begun = if comes { import(&mut pool, 0, &other, 1) } else { export(&mut pool, 0) };
            let has_begun = begun.is_ok();
            let outcome = begun.and_then(|()| finish(&mut pool, 0));
            left.store(-1, Ordering::Relaxed);
            if outcome.is_ok() {
                break;
            }
            failures += 1;
            assert_eq!(pool.is_lost(), fatal, "after {calls} calls");
            if comes && has_begun {
                assert!(pool.export(0).is_err() && pool.start_export(0).is_err(), "after {calls} calls");
                assert!(decoder.absorb(&[1], &mut pool, 0).is_err(), "after {calls} calls");
            } else {
                assert_eq!(bits(&pool.export(0).unwrap()), bits(&own), "after {calls} calls");
            }
            // The next move makes it whole, the same thread's.
            import(&mut pool, 0, &other, 1).unwrap();
            finish(&mut pool, 0).unwrap();
            export(&mut pool, 0).unwrap();
            assert_eq!(bits(&finish(&mut pool, 0).unwrap()), bits(&other), "after {calls} calls");
        }
        assert!(failures >= 8, "{failures} failures");
    }
}

#[test]
fn a_panic_ends_its_move_alone() {
    for comes in [false, true] {
        let gate = Arc::new(Gate::default());
        let [(_, mut pool), (_, still)] = twins(&gate);
        let (own, whole) = (still.export(0).unwrap(), still.export(2).unwrap());
        gate.change(|state| state.panics = true);
        begin(&mut pool, comes, &whole);
        assert!(finish(&mut pool, 0).unwrap_err().to_string().contains("thread that transfers states"));
        assert_eq!(pool.export(0).is_err(), comes);
        import(&mut pool, 1, &own, 3).unwrap();
        finish(&mut pool, 1).unwrap();
        import(&mut pool, 0, &whole, 3).unwrap();
        finish(&mut pool, 0).unwrap();
        assert_eq!(bits(&pool.export(0).unwrap()), bits(&whole));
        assert_eq!(bits(&pool.export(1).unwrap()), bits(&own));
    }
}

#[test]
fn a_pool_that_goes_waits_for_the_move_under_way() {
    let gate = Arc::new(Gate::default());
    let [(_, mut pool), (_, still)] = twins(&gate);
    let whole: Arc<[f32]> = still.export(2).unwrap().into();
    let closed = gate.close();
    for slot in 0..3 {
        pool.start_import(slot, Arc::new(Arc::clone(&whole)), 3).unwrap();
    }
    gate.until(|state| state.waiting == 1);
    let thread = std::thread::spawn(move || drop(closed));
    drop(pool);
    // Nobody holds the states any more, those of the moves that were never made neither.
    assert_eq!((Arc::strong_count(&whole), gate.state.lock().unwrap().waiting), (1, 0));
    thread.join().unwrap();
}
