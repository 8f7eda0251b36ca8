// The machine instructions that kernels use: the one place where a GPU and the host's emulator differ.
// On a GPU they are inline PTX. No CUDA header is included, so that NVRTC compiles this without the toolkit.
#pragma once

#if !defined(__CUDACC__)
#include "host/emulator.h"
#else

// Shared memory of a block; the emulator gives each block its own, poisoned.
#define SHARED(type, name, count) __shared__ type name[count]
extern __shared__ __align__(16) unsigned char dynamic_shared[];
#define DYNAMIC_SHARED(name) unsigned char *name = dynamic_shared

// d += A B, 16 x 8 x 16; lane = 4 g + t. a: rows g and g + 8, columns 2t.. and 2t + 8.. of A; b: those of B's column g.
#define TIDEGATE_MMA(name, type)                                                                                   \
    __device__ __forceinline__ void name(float (&d)[4], const uint4 &a, unsigned b0, unsigned b1) {                \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                       \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));                                  \
    }
TIDEGATE_MMA(mma_bf16, "bf16")
TIDEGATE_MMA(mma_f16, "f16")
#undef TIDEGATE_MMA

// Copies sixteen bytes from global to shared memory without registers, if `there`; else writes zeros and reads nothing, and
// `global` may be past the end, but at a multiple of sixteen. Complete after the wait for their group.
__device__ __forceinline__ void cp_async16(bool there, void *shared, const void *global) {
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared)), bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups are pending.
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// From compute capability 9.0 on, a kernel starts while the one before it still runs: `start_next` lets the next one start
// once all blocks of this one have, `await_inputs` waits until the one before has ended and all it wrote can be read. Every
// thread of every kernel calls both, so the kernels before that one have ended too. What no kernel writes, which is the
// weights, may be read earlier.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Weights are read once per step, so they need no place in the L1 cache.
__device__ __forceinline__ uint4 load_stream(const uint4 *from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ __forceinline__ float bf16_to_f32(unsigned short v) { return __uint_as_float(static_cast<unsigned>(v) << 16); }
__device__ __forceinline__ unsigned short f32_to_bf16(float v) {
    unsigned short to;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(v));
    return to;
}
__device__ __forceinline__ float f16_to_f32(unsigned short v) {
    float to;
    asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(v));
    return to;
}
__device__ __forceinline__ unsigned short f32_to_f16(float v) {
    unsigned short to;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to) : "f"(v));
    return to;
}
#endif
