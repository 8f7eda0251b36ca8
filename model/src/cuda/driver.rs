//! A GPU through NVIDIA's driver, which is opened when it is asked for: a program with this in it starts without one.

#![allow(unsafe_code, reason = "the driver is C")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError, result, sys};

use super::gpu::{Event, Gpu, Graph, Launch, Pinned, Result};
use super::kernels;
use super::queue::{Queue, RECORDS, failed, words};
use crate::cuda_error::CudaError;

/// The oldest architecture that the kernels run on: 8.0, for bf16 on tensor cores and copies past the registers.
const OLDEST: i32 = 8;

#[derive(Debug)]
struct Driver {
    queue: Arc<Queue>,
    functions: HashMap<&'static str, sys::CUfunction>,
    module: sys::CUmodule,
    processors: usize,
}

// SAFETY: the handles are the driver's, which any thread may use; each call binds the context to its thread first.
unsafe impl Send for Driver {}
// SAFETY: as above; the stream orders what is asked for, and `Queue::turn` keeps it out of what another thread records.
unsafe impl Sync for Driver {}

pub(super) fn open(ordinal: usize) -> Result<Arc<dyn Gpu>> {
    let absent = |reason: String| CudaError::Absent { ordinal, reason };
    // SAFETY: looks for a library, by the names that the system's loader knows.
    if !unsafe { sys::is_culib_present() } {
        return Err(absent("NVIDIA's driver (libcuda) is not installed".into()));
    }
    let count = CudaContext::device_count().map_err(|error| absent(words(error)))?;
    if ordinal >= count as usize {
        return Err(absent(format!("the driver shows {count}")));
    }
    let context = CudaContext::new(ordinal).map_err(|error| absent(words(error)))?;
    let (major, minor) = context.compute_capability().map_err(failed("compute capability"))?;
    if major < OLDEST {
        return Err(absent(format!("its architecture is {major}.{minor}, the kernels need {OLDEST}.0")));
    }
    // SAFETY: no buffer of cudarc's own is used, so there is nothing that its events would have to order.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().map_err(failed("stream"))?;
    let image = CString::new(kernels::ptx()?)
        .map_err(|error| CudaError::Failed { what: "kernels".into(), reason: error.to_string() })?;
    // SAFETY: PTX, ended by a zero byte.
    let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
        .map_err(failed("loading the kernels, for which a driver must be as new as the compiler that made them"))?;
    let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let processors = context.attribute(count).map_err(failed("multiprocessors"))?.max(1) as usize;
    // From here on it is unloaded with the device.
    let queue = Arc::new(Queue::new(context, stream, false));
    let mut driver = Driver { queue, functions: HashMap::new(), module, processors };
    for &name in kernels::NAMES {
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, text) }.map_err(failed(name))?;
        driver.functions.insert(name, function);
    }
    Ok(Arc::new(driver))
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Nothing can be done about a device that fails here.
        if let Ok(_turn) = self.queue.turn() {
            let _ = self.queue.wait("the end");
            // SAFETY: nothing of the module is running any more, and nobody has its functions but this.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// Shared memory that a kernel may have without being asked for.
const PLAIN_SHARED: usize = 48 << 10;

impl Gpu for Driver {
    fn name(&self) -> String {
        self.queue.context.name().unwrap_or_else(|_| "CUDA device".into())
    }

    fn processors(&self) -> usize {
        self.processors
    }

    fn memory(&self) -> Result<(usize, usize)> {
        let _turn = self.queue.turn()?;
        self.queue.context.mem_get_info().map_err(failed("memory"))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let _turn = self.queue.turn()?;
        // SAFETY: the context is bound.
        let at = unsafe { result::malloc_sync(bytes) }.map_err(failed("allocation"))?;
        self.clear(at, bytes).inspect_err(|_| self.free(at))?;
        Ok(at)
    }

    fn free(&self, at: u64) {
        if let Ok(_turn) = self.queue.turn() {
            let _ = self.queue.wait("the end");
            // SAFETY: `at` came from `allocate`, once, and nothing is on its way to it.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _turn = self.queue.turn()?;
        // SAFETY: the bytes are a buffer's.
        unsafe { result::memset_d8_async(at, 0, bytes, self.queue.raw()) }.map_err(failed("clearing memory"))
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _turn = self.queue.turn()?;
        // SAFETY: the bytes are a buffer's, and stay until the stream has taken them.
        unsafe { result::memcpy_htod_async(to, bytes, self.queue.raw()) }.map_err(failed("copy to the device"))?;
        self.queue.wait("copy to the device")
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _turn = self.queue.turn()?;
        // SAFETY: the bytes are a buffer's, and stay until the stream has filled them.
        unsafe { result::memcpy_dtoh_async(bytes, from, self.queue.raw()) }.map_err(failed("copy from the device"))?;
        self.queue.wait("copy from the device")
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let _turn = self.queue.turn()?;
        // SAFETY: both are buffers of so many bytes.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.queue.raw()) }.map_err(failed("copy on the device"))
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>> {
        self.queue.pinned(bytes)
    }

    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>> {
        let context = Arc::clone(&self.queue.context);
        let stream = context.new_stream().map_err(failed("a second stream"))?;
        // Its own lock, which nobody holds for writing: nothing is recorded there. What another thread records on the
        // first stream takes in nothing of this one, and forbids it nothing: the mode of `record` is of that thread alone.
        let queue = Arc::new(Queue::new(context, stream, true));
        bytes.iter().map(|&bytes| queue.pinned(bytes)).collect()
    }

    fn event(&self) -> Result<Box<dyn Event>> {
        let _turn = self.queue.turn()?;
        Ok(Box::new(self.queue.event()?))
    }

    fn launch(&self, launch: Launch<'_>) -> Result<()> {
        let _turn = self.queue.turn()?;
        let Launch { kernel, grid, threads, shared, args } = launch;
        let function = *self
            .functions
            .get(kernel)
            .ok_or_else(|| CudaError::Failed { what: kernel.into(), reason: "there is no such kernel".into() })?;
        if shared > PLAIN_SHARED {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is this context's.
            unsafe { result::function::set_function_attribute(function, attribute, shared as i32) }
                .map_err(failed(kernel))?;
        }
        let mut words: Vec<Vec<u64>> = args.iter().map(super::gpu::Arg::words).collect();
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
        let ([x, y, z], threads) = (grid.map(|n| n as u32), threads as u32);
        // SAFETY: the arguments are those that the kernel declares (held to it by the emulator's tests, whose kernels are
        // the same source), each pointer to a word or a struct of its own.
        unsafe {
            let stream = self.queue.raw();
            result::launch_kernel(function, (x, y, z), (threads, 1, 1), shared as u32, stream, &mut pointers)
        }
        .map_err(failed(kernel))
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        let Queue { context, stream, recording, .. } = &*self.queue;
        context.bind_to_thread().map_err(failed("context"))?;
        let _alone = recording.write().unwrap_or_else(PoisonError::into_inner);
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(failed("recording a step"))?;
        // Ended whatever comes of it, a panic too, or the stream would stay unusable.
        let mut recorder = Recorder { stream: Some(stream) };
        RECORDS.set(true);
        let outcome = work();
        let graph = recorder.end();
        outcome?;
        let graph = graph.map_err(failed("recording a step"))?;
        let graph = graph.ok_or_else(|| CudaError::Failed {
            what: "recording a step".into(),
            reason: "nothing was recorded".into(),
        })?;
        Ok(Box::new(StreamGraph { graph, queue: Arc::clone(&self.queue) }))
    }
}

/// A stream that records, until it is told to end.
struct Recorder<'a> {
    stream: Option<&'a Arc<CudaStream>>,
}

impl Recorder<'_> {
    fn end(&mut self) -> std::result::Result<Option<CudaGraph>, DriverError> {
        RECORDS.set(false);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        self.stream.take().map_or(Ok(None), |stream| stream.end_capture(flags))
    }
}

impl Drop for Recorder<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

struct StreamGraph {
    graph: CudaGraph,
    queue: Arc<Queue>,
}

impl std::fmt::Debug for StreamGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamGraph")
    }
}

// SAFETY: a graph is the driver's, which any thread may use, one at a time; it is not shared.
unsafe impl Send for StreamGraph {}

impl Graph for StreamGraph {
    fn launch(&self) -> Result<()> {
        let _turn = self.queue.turn()?;
        self.graph.launch().map_err(failed("a recorded step"))
    }
}
