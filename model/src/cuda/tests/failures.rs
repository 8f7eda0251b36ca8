//! Tests a device that fails at any of its calls: afterward, a slot's state is either complete, or the slot is refused
//! until it is reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::watched::watched;
use crate::cuda::{CudaDecoder, CudaPool};
use crate::cuda_error::CudaError;
use crate::error::ModelError;
use crate::memory::StateType;
use crate::runner::Backend;
use crate::sampling::{Permitted, Plans, Sampler, SamplingParams};

/// Returns a counter, and a decoder and a pool whose device fails once the counter has fallen to 0. Below 0, it never
/// fails.
pub(super) fn failing(fatal: bool) -> (Arc<AtomicI64>, CudaDecoder, CudaPool) {
    let left = Arc::new(AtomicI64::new(-1));
    let counted = Arc::clone(&left);
    let call = move |_: &str| {
        let left = counted.load(Ordering::Relaxed);
        if left < 0 {
            return Ok(());
        }
        counted.store((left - 1).max(0), Ordering::Relaxed);
        let (what, reason) = (String::from("a call"), String::from("it fails in this test"));
        match left {
            0 if fatal => Err(CudaError::Lost { what, reason }),
            0 => Err(CudaError::Failed { what, reason }),
            _ => Ok(()),
        }
    };
    let (decoder, pool) = watched(3, StateType::F32, Arc::new(call));
    (left, decoder, pool)
}

/// An operation on a slot, given the numbers of a complete state.
type Act = fn(&CudaDecoder, &mut CudaPool, &[f32]) -> Result<(), ModelError>;

#[test]
fn whichever_call_fails_no_slot_has_half_a_step() {
    let (_, decoder, mut pool) = failing(false);
    let ids = [1, 7, 4, 9, 2];
    decoder.prefill(&ids, &mut pool, 0).unwrap();
    let whole = pool.export(0).unwrap();
    let mut want = Vec::new();
    decoder.decode_into(&[3], &mut pool, &[0], &mut want).unwrap();
    let acts: [(&str, Act); 5] = [
        ("reset", |_, pool, _| pool.reset(0)),
        ("import", |_, pool, numbers| pool.import(0, numbers, 5)),
        ("prefill", |decoder, pool, _| decoder.prefill(&[1, 7, 4, 9, 2], pool, 0)),
        ("decode", |decoder, pool, _| decoder.decode_into(&[3, 3], pool, &[0, 1], &mut Vec::new())),
        ("choose", |decoder, pool, _| {
            let mut sampler = Sampler::new(SamplingParams::default(), 31).unwrap();
            // One row is sampled, and the other returns its logits.
            let mut plan = |_: std::ops::Range<usize>, plans: &mut Plans| {
                sampler.plan(Permitted::default(), plans);
                plans.skip_to(2);
            };
            let outcome = (&mut Vec::new(), &mut Vec::new());
            decoder.decode_and_sample(&[3, 3], pool, &[0, 1], &mut plan, outcome)
        }),
    ];
    for (what, act) in acts {
        let mut failures = 0;
        for calls in 0.. {
            let (left, decoder, mut pool) = failing(false);
            decoder.prefill(&ids, &mut pool, 0).unwrap();
            left.store(calls, Ordering::Relaxed);
            let outcome = act(&decoder, &mut pool, &whole);
            left.store(-1, Ordering::Relaxed);
            if outcome.is_ok() {
                break;
            }
            failures += 1;
            // The slot is refused until it is reset or a complete state is imported.
            assert!(pool.export(0).is_err(), "{what}, after {calls} calls");
            assert!(decoder.prefill(&[1], &mut pool, 0).is_err(), "{what}, after {calls} calls");
            pool.import(0, &whole, 5).unwrap();
            let mut got = Vec::new();
            decoder.decode_into(&[3], &mut pool, &[0], &mut got).unwrap();
            assert_eq!(got, want, "{what}, after {calls} calls");
            assert!(!pool.is_lost());
        }
        assert!(failures >= 3, "{what} failed {failures} times");
    }
}

#[test]
fn a_lost_device_is_reported() {
    let (left, decoder, mut pool) = failing(true);
    decoder.prefill(&[1], &mut pool, 0).unwrap();
    assert!(!pool.is_lost());
    left.store(0, Ordering::Relaxed);
    let error = decoder.decode_into(&[3], &mut pool, &[0], &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("lost"), "{error}");
    assert!(pool.is_lost());
}
