//! A GPU, used through NVIDIA's driver. The driver is loaded on demand, so the program also starts without one.

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

/// The oldest architecture that runs the kernels: 8.0, for bf16 on tensor cores and asynchronous copies.
const MIN_MAJOR: i32 = 8;
/// The oldest architecture where a kernel may start before the previous one has ended.
const CHAINED_MAJOR: i32 = 9;

#[derive(Debug)]
struct Driver {
    queue: Arc<Queue>,
    functions: HashMap<&'static str, sys::CUfunction>,
    module: sys::CUmodule,
    processors: usize,
    /// Whether a kernel may start before the previous one has ended (`start_next` in model/cuda/intrinsics.cuh).
    chained: bool,
}

// SAFETY: any thread may use the driver's handles; each call binds the context to its thread first.
unsafe impl Send for Driver {}
// SAFETY: as above; the stream orders all calls, and `Queue::turn` keeps them out of other threads' recordings.
unsafe impl Sync for Driver {}

pub(super) fn open(ordinal: usize) -> Result<Arc<dyn Gpu>> {
    let absent = |reason: String| CudaError::Absent { ordinal, reason };
    // SAFETY: looks for a library by its usual names.
    if !unsafe { sys::is_culib_present() } {
        return Err(absent("NVIDIA's driver (libcuda) is not installed".into()));
    }
    let count = CudaContext::device_count().map_err(|error| absent(words(error)))?;
    if ordinal >= count as usize {
        return Err(absent(format!("the driver finds {count} devices")));
    }
    let context = CudaContext::new(ordinal).map_err(|error| absent(words(error)))?;
    let (major, minor) = context.compute_capability().map_err(failed("compute capability"))?;
    if major < MIN_MAJOR {
        return Err(absent(format!("its architecture is {major}.{minor}, the kernels need {MIN_MAJOR}.0")));
    }
    // SAFETY: no buffer of cudarc is used, so its events have nothing to order.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().map_err(failed("stream"))?;
    let chained = major >= CHAINED_MAJOR;
    let image = CString::new(kernels::ptx(chained)?)
        .map_err(|error| CudaError::Failed { what: "kernels".into(), reason: error.to_string() })?;
    // SAFETY: PTX, ended by a zero byte.
    let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
        .map_err(failed("loading the kernels, which needs a driver as new as the compiler that built them"))?;
    let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let processors = context.attribute(count).map_err(failed("multiprocessors"))?.max(1) as usize;
    // From here on the module is unloaded with the device.
    let queue = Arc::new(Queue::new(context, stream, false));
    let mut driver = Driver { queue, functions: HashMap::new(), module, processors, chained };
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
        // Errors are ignored: nothing can be done about a device that fails here.
        if let Ok(_turn) = self.queue.turn() {
            let _ = self.queue.wait("the end");
            // SAFETY: nothing of the module is running any more, and only this driver has its functions.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// Bytes of shared memory that a kernel may use without requesting more.
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
            // SAFETY: `at` came from `allocate`, once, and no copy to it is pending.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    fn clear(&self, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _turn = self.queue.turn()?;
        // SAFETY: the bytes belong to a buffer.
        unsafe { result::memset_d8_async(at, 0, bytes, self.queue.raw()) }.map_err(failed("clearing memory"))
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _turn = self.queue.turn()?;
        // SAFETY: the bytes belong to a buffer, and live until the stream has copied them.
        unsafe { result::memcpy_htod_async(to, bytes, self.queue.raw()) }.map_err(failed("copy to the device"))?;
        self.queue.wait("copy to the device")
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _turn = self.queue.turn()?;
        // SAFETY: the bytes belong to a buffer, and live until the stream has filled them.
        unsafe { result::memcpy_dtoh_async(bytes, from, self.queue.raw()) }.map_err(failed("copy from the device"))?;
        self.queue.wait("copy from the device")
    }

    fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let _turn = self.queue.turn()?;
        // SAFETY: both buffers have that many bytes.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.queue.raw()) }.map_err(failed("copy on the device"))
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>> {
        self.queue.pinned(bytes)
    }

    fn pinned_beside(&self, bytes: &[usize]) -> Result<Vec<Box<dyn Pinned>>> {
        let context = Arc::clone(&self.queue.context);
        let stream = context.new_stream().map_err(failed("a second stream"))?;
        // This queue has its own lock, which is never held for writing: nothing is recorded on this stream. Another
        // thread's recording on the first stream neither includes nor restricts it: the capture mode in `record`
        // applies to that thread alone.
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
            // SAFETY: the function belongs to this context.
            unsafe { result::function::set_function_attribute(function, attribute, shared as i32) }
                .map_err(failed(kernel))?;
        }
        let mut words: Vec<Vec<u64>> = args.iter().map(super::gpu::Arg::words).collect();
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
        let [x, y, z] = grid.map(|n| n as u32);
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: self.queue.raw(),
            attrs: &raw mut early,
            numAttrs: u32::from(self.chained),
        };
        // SAFETY: the arguments are as the kernel declares them (the emulator's tests run the same source), and each
        // pointer points to its own word or struct. Every kernel waits for the previous one before it reads what that
        // one wrote, or overwrites what that one reads.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(failed(kernel))
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        let Queue { context, stream, recording, .. } = &*self.queue;
        context.bind_to_thread().map_err(failed("context"))?;
        let _alone = recording.write().unwrap_or_else(PoisonError::into_inner);
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(failed("recording a step"))?;
        // Ends the recording even after a panic, because the stream would stay unusable.
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

/// A stream that is being recorded.
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

// SAFETY: any thread may use the driver's graph, one at a time; it is not shared.
unsafe impl Send for StreamGraph {}

impl Graph for StreamGraph {
    fn launch(&self) -> Result<()> {
        let _turn = self.queue.turn()?;
        self.graph.launch().map_err(failed("a recorded step"))
    }
}
