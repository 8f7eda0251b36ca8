//! A device that fails at any of its calls: what a slot holds is whole, or the slot is refused until it is reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::device;
use crate::config::DecoderConfig;
use crate::cuda::device::{CudaDevice, Gpu, Launch, Pinned, Recorded, Result};
use crate::cuda::{CudaDecoder, CudaPool};
use crate::cuda_error::CudaError;
use crate::memory::StateType;
use crate::sampling::{Permitted, Plans, Sampler, SamplingParams};
use crate::weights::WeightType;

/// A device whose calls succeed `left` times; less than 0 for always.
#[derive(Debug)]
struct Failing {
    inner: Arc<dyn Gpu>,
    left: AtomicI64,
    fatal: bool,
}

impl Failing {
    fn call(&self) -> Result<()> {
        let left = self.left.load(Ordering::Relaxed);
        if left < 0 {
            return Ok(());
        }
        self.left.store((left - 1).max(0), Ordering::Relaxed);
        let (what, reason) = (String::from("a call"), String::from("it fails in this test"));
        match left {
            0 if self.fatal => Err(CudaError::Lost { what, reason }),
            0 => Err(CudaError::Failed { what, reason }),
            _ => Ok(()),
        }
    }
}

impl Gpu for Failing {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn processors(&self) -> usize {
        self.inner.processors()
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.call()?;
        self.inner.allocate(bytes)
    }

    fn free(&self, at: u64) {
        self.inner.free(at);
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        self.call()?;
        self.inner.clear(at, bytes)
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.call()?;
        self.inner.upload(to, bytes)
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.call()?;
        self.inner.download(from, bytes)
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.call()?;
        self.inner.copy(to, from, bytes)
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>> {
        self.call()?;
        self.inner.pinned(bytes)
    }

    fn launch(&self, launch: Launch<'_>) -> Result<()> {
        self.call()?;
        self.inner.launch(launch)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded>> {
        self.call()?;
        self.inner.record(work)
    }
}

fn config() -> DecoderConfig {
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "proj_dim": 12, "conv_kernel": 3}"#;
    DecoderConfig::from_json(text).unwrap()
}

fn failing(fatal: bool) -> (Arc<Failing>, CudaDecoder, CudaPool) {
    let gpu = Arc::new(Failing { inner: Arc::clone(&device().0), left: AtomicI64::new(-1), fatal });
    let own: Arc<dyn Gpu> = Arc::clone(&gpu) as Arc<dyn Gpu>;
    let decoder = CudaDecoder::random(config(), WeightType::F32, 3, &CudaDevice(own)).unwrap();
    let pool = decoder.new_pool(2, StateType::F32).unwrap();
    (gpu, decoder, pool)
}

/// What is asked of a slot, with the numbers of a whole state.
type Act = fn(&CudaDecoder, &mut CudaPool, &[f32]) -> candle_core::Result<()>;

#[test]
fn wherever_a_call_fails_no_slot_is_left_with_half_a_text() {
    let (_, decoder, mut pool) = failing(false);
    let ids = [1, 7, 4, 9, 2];
    decoder.absorb(&ids, &mut pool, 0).unwrap();
    let whole = pool.export(0).unwrap();
    let mut want = Vec::new();
    decoder.decode_into(&[3], &mut pool, &[0], &mut want).unwrap();
    let acts: [(&str, Act); 5] = [
        ("reset", |_, pool, _| pool.reset(0)),
        ("import", |_, pool, numbers| pool.import(0, numbers, 5)),
        ("absorb", |decoder, pool, _| decoder.absorb(&[1, 7, 4, 9, 2], pool, 0)),
        ("decode", |decoder, pool, _| decoder.decode_into(&[3, 3], pool, &[0, 1], &mut Vec::new())),
        ("choose", |decoder, pool, _| {
            let mut sampler = Sampler::new(SamplingParams::default(), 31).unwrap();
            // One is chosen, and the logits of the other come.
            let mut plan = |_: std::ops::Range<usize>, plans: &mut Plans| {
                sampler.plan(Permitted::default(), plans);
                plans.skip_to(2);
            };
            let outcome = (&mut Vec::new(), &mut Vec::new());
            decoder.decode_choosing(&[3, 3], pool, &[0, 1], &mut plan, outcome)
        }),
    ];
    for (what, act) in acts {
        let mut failures = 0;
        for calls in 0.. {
            let (gpu, decoder, mut pool) = failing(false);
            decoder.absorb(&ids, &mut pool, 0).unwrap();
            gpu.left.store(calls, Ordering::Relaxed);
            let outcome = act(&decoder, &mut pool, &whole);
            gpu.left.store(-1, Ordering::Relaxed);
            if outcome.is_ok() {
                break;
            }
            failures += 1;
            // Refused, each time, until it is emptied or filled whole.
            assert!(pool.export(0).is_err(), "{what}, after {calls} calls");
            assert!(decoder.absorb(&[1], &mut pool, 0).is_err(), "{what}, after {calls} calls");
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
fn a_device_that_has_failed_for_good_is_told_of() {
    let (gpu, decoder, mut pool) = failing(true);
    decoder.absorb(&[1], &mut pool, 0).unwrap();
    assert!(!pool.is_lost());
    gpu.left.store(0, Ordering::Relaxed);
    let error = decoder.decode_into(&[3], &mut pool, &[0], &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("lost"), "{error}");
    assert!(pool.is_lost());
}
