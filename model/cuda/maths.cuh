// Functions of one number, and sums over a warp. The polynomials are those of the CPU's kernels: neither the toolkit's
// version nor its flags change a bit, and the emulator's results are nearly those of a GPU.
#pragma once
#include "intrinsics.cuh"

// The nearest f16, or the largest finite one in place of infinity; NaN stays NaN.
__device__ __forceinline__ unsigned short saturated_f16(float v) {
    return f32_to_f16(v > 65504.0f ? 65504.0f : (v < -65504.0f ? -65504.0f : v));
}

// Number types of weights and of their inputs.
struct F32 {
    typedef float Stored;
    static __device__ __forceinline__ float widen(float v) { return v; }
    static __device__ __forceinline__ float narrow(float v) { return v; }
};
struct Bf16 {
    typedef unsigned short Stored;
    static __device__ __forceinline__ float widen(Stored v) { return bf16_to_f32(v); }
    static __device__ __forceinline__ Stored narrow(float v) { return f32_to_bf16(v); }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint4 &a, unsigned b0, unsigned b1) {
        mma_bf16(d, a, b0, b1);
    }
};
struct F16 {
    typedef unsigned short Stored;
    static __device__ __forceinline__ float widen(Stored v) { return f16_to_f32(v); }
    static __device__ __forceinline__ Stored narrow(float v) { return saturated_f16(v); }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint4 &a, unsigned b0, unsigned b1) {
        mma_f16(d, a, b0, b1);
    }
};

// The type of a product's input; as in model/src/cuda/weights.rs.
enum Kind { KIND_F32 = 0, KIND_BF16 = 1, KIND_F16 = 2 };

// Stores one number as `kind`.
__device__ __forceinline__ void store_as(void *to, size_t at, unsigned kind, float v) {
    if (kind == KIND_F32) static_cast<float *>(to)[at] = v;
    else if (kind == KIND_BF16) static_cast<unsigned short *>(to)[at] = f32_to_bf16(v);
    else static_cast<unsigned short *>(to)[at] = saturated_f16(v);
}

// Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
#define TIDEGATE_ROUND 12582912.0f

// e^x, relative error about 1e-7; clamped where f32 would over- or underflow (Cephes `expf`).
__device__ __forceinline__ float exp_of(float x) {
    float in = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x); // NaN stays NaN
    float shifted = fmaf(in, 1.44269504f, TIDEGATE_ROUND);
    float n = shifted - TIDEGATE_ROUND;
    float r = fmaf(-n, -2.1219444e-4f, fmaf(-n, 0.693359375f, in));
    float p = fmaf(r, 1.9875691e-4f, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    float y = fmaf(p, r * r, r) + 1.0f;
    return __uint_as_float(__float_as_uint(y) + (__float_as_uint(shifted) << 23));
}

// Uses only the exponential of a negative number, so that nothing overflows.
__device__ __forceinline__ float sigmoid(float v) {
    float e = exp_of(-fabsf(v));
    return v >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + exp_of(-v)); }

// Sine and cosine of an angle of some thousands at most, to 1e-6 (Cephes `sinf`, `cosf`).
__device__ __forceinline__ void sin_cos(float x, float &sine, float &cosine) {
    float shifted = fmaf(x, 0.636619772f, TIDEGATE_ROUND);
    unsigned quadrant = __float_as_uint(shifted);
    float n = shifted - TIDEGATE_ROUND;
    float r = fmaf(-n, 1.5703125f, x);
    r = fmaf(-n, 4.837512969970703e-4f, r);
    r = fmaf(-n, 7.549789954891862e-8f, r);
    float r2 = r * r;
    float s = fmaf(fmaf(r2, -1.9515296e-4f, 8.332161e-3f), r2, -1.6666655e-1f);
    s = fmaf(s * r2, r, r);
    float c = fmaf(fmaf(r2, 2.4433157e-5f, -1.3887316e-3f), r2, 4.1666646e-2f);
    c = fmaf(c * r2, r2, fmaf(r2, -0.5f, 1.0f));
    float a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
    sine = __uint_as_float(__float_as_uint(a) ^ ((quadrant & 2) << 30));
    cosine = __uint_as_float(__float_as_uint(b) ^ (((quadrant + 1) & 2) << 30));
}

// The sum over groups of `width` lanes (a power of two), the same bits in each of them.
__device__ __forceinline__ float lane_sum(float v, int width) {
    for (int step = 1; step < width; step *= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// The beginning of a kernel that reads no weights first.
__device__ __forceinline__ void begin() {
    start_next();
    await_inputs();
}
