//! A device that calls a test's hook before each of its calls. The hook may wait or fail.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;

use super::device;
use crate::config::DecoderConfig;
use crate::cuda::device::CudaDevice;
use crate::cuda::gpu::{Event, Gpu, Graph, Launch, Pinned, Result};
use crate::cuda::{CudaDecoder, CudaPool};
use crate::memory::StateType;
use crate::weights::WeightType;

/// The hook. Its argument is the name of the call.
pub(super) type Call = Arc<dyn Fn(&str) -> Result<()> + Send + Sync>;

/// A wrapper that calls the hook first.
struct Watched<T> {
    inner: T,
    call: Call,
}

impl<T> Debug for Watched<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watched")
    }
}

impl Gpu for Watched<Arc<dyn Gpu>> {
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
        (self.call)("allocate")?;
        self.inner.allocate(bytes)
    }

    fn free(&self, at: u64) {
        self.inner.free(at);
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        (self.call)("clear")?;
        self.inner.clear(at, bytes)
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        (self.call)("upload")?;
        self.inner.upload(to, bytes)
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        (self.call)("download")?;
        self.inner.download(from, bytes)
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        (self.call)("copy")?;
        self.inner.copy(to, from, bytes)
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>> {
        (self.call)("pinned")?;
        self.inner.pinned(bytes)
    }

    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>> {
        (self.call)("pinned beside")?;
        let watched = |inner| Box::new(Watched { inner, call: Arc::clone(&self.call) }) as Box<dyn Pinned>;
        Ok(self.inner.pinned_beside(bytes)?.into_iter().map(watched).collect())
    }

    fn event(&self) -> Result<Box<dyn Event>> {
        (self.call)("event")?;
        Ok(Box::new(Watched { inner: self.inner.event()?, call: Arc::clone(&self.call) }))
    }

    fn launch(&self, launch: Launch<'_>) -> Result<()> {
        (self.call)("launch")?;
        self.inner.launch(launch)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        (self.call)("record")?;
        self.inner.record(work)
    }
}

impl Pinned for Watched<Box<dyn Pinned>> {
    fn bytes(&mut self) -> Result<&mut [u8]> {
        (self.call)("bytes beside")?;
        self.inner.bytes()
    }

    fn send(&self, at: usize, to: u64, len: usize) -> Result<()> {
        (self.call)("send beside")?;
        self.inner.send(at, to, len)
    }

    fn receive(&mut self, at: usize, from: u64, len: usize) -> Result<()> {
        (self.call)("receive beside")?;
        self.inner.receive(at, from, len)
    }
}

impl Event for Watched<Box<dyn Event>> {
    fn wait(&self) -> Result<()> {
        (self.call)("wait for an event")?;
        self.inner.wait()
    }
}

/// Returns a decoder with or without convolutions, and a pool of three slots, on a watched device.
pub(super) fn watched(conv: usize, state: StateType, call: Call) -> (CudaDecoder, CudaPool) {
    let text = format!(
        r#"{{"model_type": "rfa_gate", "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "proj_dim": 12, "conv_kernel": {conv}}}"#
    );
    let config = DecoderConfig::from_json(&text).unwrap();
    let gpu: Arc<dyn Gpu> = Arc::new(Watched { inner: Arc::clone(&device().0), call });
    let decoder = CudaDecoder::random(config, WeightType::F32, 3, &CudaDevice(gpu)).unwrap();
    let pool = decoder.new_pool(3, state).unwrap();
    (decoder, pool)
}
