// The parts of CUDA that kernels use, for g++ on the host: keywords, the index of a thread, shared memory, collectives,
// tensor-core products, asynchronous copies, number types. emulator.cpp runs the threads; registry.cpp lists the kernels.
//
// It is for tests: simple and strict, not fast. Undefined values are poison (0xFF bytes: NaN in every float type), other
// undefined behaviour is an error. Build with -fno-strict-aliasing (nvcc, too, lets one type be read through another),
// -ffp-contract=off (the same bits on every host) and -Wno-unknown-pragmas (for `#pragma unroll`).
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

// The running thread's; the scheduler updates it at each switch.
struct Position {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};
inline thread_local Position position{};

// What a thread waits for, if anything.
enum class Wait : unsigned char { nothing, block, warp, shuffle, product_bf16, product_f16, ended };
// The line in the kernel's source of the wait. All threads of a collective must wait at the same line.
struct Site {
    const char *file;
    int line;
};
// Operands of one lane, on its stack while it waits; the last lane to arrive does the work for all.
struct Shuffle {
    unsigned value, lane, result;
};
struct Product {
    float *d; // 4
    uint4 a;
    unsigned b0, b1;
};

void meet_block(Site site);
void meet_warp(Wait kind, Site site, unsigned mask, void *operands);
unsigned this_lane();
void *shared_array(const void *key, const char *name, size_t bytes, size_t alignment);
unsigned char *dynamic_shared();
void copy_later(void *shared, const void *global, Site site);
void copy_commit();
void awaited();
void copy_wait(unsigned groups);
// Ends the launch with an error, in printf's format.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

template <class T> T shuffle(unsigned mask, T value, unsigned lane, Site site) {
    static_assert(sizeof(T) == 4 && std::is_trivially_copyable<T>::value, "shuffles are of four bytes");
    Shuffle operands = {0, lane, 0};
    std::memcpy(&operands.value, &value, 4);
    meet_warp(Wait::shuffle, site, mask, &operands);
    std::memcpy(&value, &operands.result, 4);
    return value;
}

// An entry of the list of kernels; `call` takes cuLaunchKernel's arguments.
struct Kernel {
    const char *name;
    void (*call)(void **args);
    bool awaits; // whether each of its threads must call `await_inputs`
};
// Null if there is none of that name.
const Kernel *find_kernel(const char *name);

} // namespace emulator

#define threadIdx (static_cast<const uint3 &>(::emulator::position.thread))
#define blockIdx (static_cast<const uint3 &>(::emulator::position.block))
#define blockDim (static_cast<const dim3 &>(::emulator::position.block_dim))
#define gridDim (static_cast<const dim3 &>(::emulator::position.grid_dim))
inline constexpr int warpSize = 32;

// A shared array of one block. The key is unique for each place in the source and each template instance, as on a GPU.
#define SHARED(type, name, count)                                                                                      \
    static const char *name##_key = #name;                                                                             \
    type(&name)[count] = *static_cast<type(*)[count]>(                                                                 \
        ::emulator::shared_array(&name##_key, name##_key, sizeof(type[count]), alignof(type)))
#define DYNAMIC_SHARED(name) unsigned char *const name = ::emulator::dynamic_shared()

// The caller's line: a default argument is evaluated at the call.
#define TIDEGATE_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(TIDEGATE_SITE) { emulator::meet_block({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, TIDEGATE_SITE) {
    emulator::meet_warp(emulator::Wait::warp, {file, line}, mask, nullptr);
}
// A lane that does not take part gives poison.
template <class T> T __shfl_sync(unsigned mask, T value, int lane, TIDEGATE_SITE) {
    return emulator::shuffle(mask, value, static_cast<unsigned>(lane) % 32, {file, line});
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, TIDEGATE_SITE) {
    return emulator::shuffle(mask, value, emulator::this_lane() ^ static_cast<unsigned>(lanes), {file, line});
}
// Whether the condition holds in all lanes.
inline int __all_sync(unsigned mask, int holds, TIDEGATE_SITE) {
    unsigned all = holds != 0;
    for (unsigned lanes = 1; lanes < 32; lanes *= 2)
        all &= emulator::shuffle(mask, all, emulator::this_lane() ^ lanes, {file, line});
    return static_cast<int>(all);
}

// d += A B of mma.sync.aligned.m16n8k16.row.col.f32, fragments as PTX lays them out. The products are summed in double,
// from d on, in the order of the inner dimension, and rounded once.
inline void mma_bf16(float (&d)[4], const uint4 &a, unsigned b0, unsigned b1, TIDEGATE_SITE) {
    emulator::Product operands = {d, a, b0, b1};
    emulator::meet_warp(emulator::Wait::product_bf16, {file, line}, 0xffffffffu, &operands);
}
inline void mma_f16(float (&d)[4], const uint4 &a, unsigned b0, unsigned b1, TIDEGATE_SITE) {
    emulator::Product operands = {d, a, b0, b1};
    emulator::meet_warp(emulator::Wait::product_f16, {file, line}, 0xffffffffu, &operands);
}

// Launches of other host threads may update the same address.
inline unsigned atomicAdd(unsigned *at, unsigned v) { return __atomic_fetch_add(at, v, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long v) {
    return __atomic_fetch_add(at, v, __ATOMIC_RELAXED);
}

// The destination is poison until the wait for the copy's group, so that a missing wait shows.
inline void cp_async16(bool there, void *shared, const void *global, TIDEGATE_SITE) {
    static const uint4 zeros = {0, 0, 0, 0};
    emulator::copy_later(shared, there ? global : &zeros, {file, line});
}
// The emulator runs one kernel after the other, and checks that each waits for the one before it.
inline void start_next() {}
inline void await_inputs() { emulator::awaited(); }
inline void cp_async_commit() { emulator::copy_commit(); }
template <int N> void cp_async_wait() { emulator::copy_wait(N); }

inline uint4 load_stream(const uint4 *from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("load_stream from an address not aligned to 16");
    return *from;
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __float_as_uint(float v) {
    unsigned bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

inline float bf16_to_f32(unsigned short v) { return __uint_as_float(static_cast<unsigned>(v) << 16); }
// To the nearest, ties to even; NaN becomes the one that cvt.rn gives.
inline unsigned short f32_to_bf16(float v) {
    const unsigned bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_f32(unsigned short v) {
    // The exponents differ by 112, for subnormals too: multiplying by 2^112 corrects all of them.
    unsigned bits = __float_as_uint(__uint_as_float((v & 0x7fffu) << 13) * 0x1p112f);
    if (bits >= 0x47800000u) bits |= 0x7f800000u; // 65536 and above: infinity and NaN
    return __uint_as_float(bits | (v & 0x8000u) << 16);
}
// To the nearest, ties to even; NaN becomes the one that cvt.rn gives.
inline unsigned short f32_to_f16(float v) {
    const unsigned bits = __float_as_uint(v), sign = bits >> 16 & 0x8000u;
    const float size = std::fabs(v);
    if (v != v) return 0x7fff;
    if (size >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
    // Subnormals are multiples of 2^-24. Adding 1/2, whose neighbours are 2^-24 apart, rounds to them.
    if (size < 0x1p-14f) return static_cast<unsigned short>(sign | (__float_as_uint(size + 0.5f) - 0x3f000000u));
    const unsigned rebiased = (bits & 0x7fffffffu) - (112u << 23);
    return static_cast<unsigned short>(sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);
}
