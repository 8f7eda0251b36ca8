//! The kernels' names and code: PTX built with nvcc, or else compiled with NVRTC at startup.

use super::gpu::Result;
#[cfg(any(test, not(tidegate_ptx)))]
use crate::cuda_error::CudaError;

/// The names of all kernels in `model/cuda/kernels.cu`.
pub(super) const NAMES: &[&str] = &[
    "choose",
    "conv_silu",
    "embed",
    "features",
    "head_norm",
    "linear_bf16_16",
    "linear_bf16_32",
    "linear_bf16_8",
    "linear_bf16_many",
    "linear_bf16_some",
    "linear_f16_16",
    "linear_f16_32",
    "linear_f16_8",
    "linear_f16_many",
    "linear_f16_some",
    "linear_f32_1",
    "linear_f32_4",
    "recurrence_bf16_16_row",
    "recurrence_bf16_16_scan",
    "recurrence_bf16_16_step",
    "recurrence_bf16_2_row",
    "recurrence_bf16_2_scan",
    "recurrence_bf16_2_step",
    "recurrence_bf16_4_row",
    "recurrence_bf16_4_scan",
    "recurrence_bf16_4_step",
    "recurrence_bf16_8_row",
    "recurrence_bf16_8_scan",
    "recurrence_bf16_8_step",
    "recurrence_f32_16_row",
    "recurrence_f32_16_scan",
    "recurrence_f32_16_step",
    "recurrence_f32_2_row",
    "recurrence_f32_2_scan",
    "recurrence_f32_2_step",
    "recurrence_f32_4_row",
    "recurrence_f32_4_scan",
    "recurrence_f32_4_step",
    "recurrence_f32_8_row",
    "recurrence_f32_8_scan",
    "recurrence_f32_8_step",
    "rms_norm",
    "rotate",
];

/// Returns the kernels as PTX, which the driver compiles to machine code. `chained`: for devices of compute capability
/// 9.0 or newer, where a kernel may start before the previous one has ended.
#[cfg(tidegate_ptx)]
#[allow(clippy::unnecessary_wraps, reason = "the other variant can fail")]
pub(super) fn ptx(chained: bool) -> Result<&'static str> {
    Ok(if chained {
        include_str!(concat!(env!("OUT_DIR"), "/kernels-90.ptx"))
    } else {
        include_str!(concat!(env!("OUT_DIR"), "/kernels-80.ptx"))
    })
}

/// Compiles the kernels to PTX.
#[cfg(not(tidegate_ptx))]
pub(super) fn ptx(chained: bool) -> Result<String> {
    compiled_now(chained)
}

#[cfg(any(test, not(tidegate_ptx)))]
fn compiled_now(chained: bool) -> Result<String> {
    use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
    let failed = |reason: String| CudaError::Failed { what: "compiling the kernels with NVRTC".into(), reason };
    // SAFETY: looks for a library by its usual names.
    #[allow(unsafe_code, reason = "the library is C")]
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        let reason = "this program was built without nvcc, and libnvrtc (of CUDA's toolkit) is not installed";
        return Err(failed(reason.into()));
    }
    // The same options as in build.rs.
    let architecture = if chained { "--gpu-architecture=compute_90" } else { "--gpu-architecture=compute_80" };
    let options = ["--std=c++17", "--fmad=false", architecture].map(String::from).into();
    let source = include_str!(concat!(env!("OUT_DIR"), "/kernels.cu"));
    let compiled = compile_ptx_with_opts(source, CompileOptions { options, ..CompileOptions::default() });
    Ok(compiled.map_err(|error| failed(format!("{error:?}")))?.to_src())
}

#[cfg(test)]
mod tests {
    use super::{CudaError, NAMES, compiled_now};

    #[test]
    fn every_kernel_of_the_source_is_named() {
        let source = include_str!(concat!(env!("OUT_DIR"), "/kernels.cu"));
        let plain = source.matches("extern \"C\" __global__").count() - source.matches("recurrence_##name##").count();
        // Macros define five products for two types, and a step, a row and a scan for eight states.
        let products = source.matches("linear_##name##").count();
        assert_eq!(plain - products + 2 * 5 + 8 * 3, NAMES.len());
        assert!(NAMES.is_sorted());
    }

    #[test]
    fn nvrtc_compiles_them_if_it_is_installed() {
        // NVRTC is optional unless the environment requires it.
        let wanted = std::env::var_os("TIDEGATE_REQUIRE_NVRTC").is_some();
        match compiled_now(false).and_then(|old| Ok([old, compiled_now(true)?])) {
            Ok(both) => {
                assert!(both.iter().all(|ptx| NAMES.iter().all(|name| ptx.contains(&format!(".entry {name}(")))));
            }
            Err(CudaError::Failed { reason, .. }) if !wanted && reason.contains("libnvrtc") => {}
            Err(error) => panic!("{error}"),
        }
    }
}
