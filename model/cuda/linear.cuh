// y = x W^T on tensor cores, and in plain f32. The result is stored, added to the residual stream, or passed through
// SwiGLU.
//
// The sums of a row of x have one order, whatever the other rows: the inner dimension is cut into eight slices, each
// summed tile by tile, then the slices are added in order. So eight warps with a slice each (few rows, bound by the bytes
// of W) and one warp with all slices (many rows, bound by the products) give the same bits.
//
// W is stored in tiles of 16 rows by 32 columns, in the order of the fragments' registers: 2 halves x 32 lanes x 16 bytes.
// Lane 4 g + t has columns 8 t .. 8 t + 7 of rows g and g + 8. With this permutation of the columns in a tile, a lane's
// part of x is sixteen contiguous bytes. model/src/cuda/weights.rs packs it.
#pragma once
#include "maths.cuh"

// How a product is stored; as in model/src/cuda/ops.rs.
enum Mode {
    STORE = 0,  // y = x W^T (f32)
    ADD = 1,    // y += x W^T (f32)
    SWIGLU = 2, // y = silu(gate) * up; rows 0-7 of a tile are gates, 8-15 their ups; y has the type of x
};

// The argument of the kernels below. Widths count numbers, not bytes.
struct Linear {
    const void *w;      // packed, or for f32 (outs, ins) row by row
    const float *bias;  // (outs) of f32 weights, or null
    const void *x;      // (rows, x_stride), 0 after `ins`
    void *y;            // (rows, y_stride)
    unsigned rows, ins, outs;
    unsigned x_stride, y_stride;
    unsigned mode;
};

#define SLICES 8

template <class T> __device__ __forceinline__ void put(const Linear &of, unsigned row, unsigned out, float v) {
    float *y = static_cast<float *>(of.y) + static_cast<size_t>(row) * of.y_stride + out;
    *y = of.mode == ADD ? *y + v : v;
}

// out: the gate's row among the tiles' gates
template <class T>
__device__ __forceinline__ void put_swiglu(const Linear &of, unsigned row, unsigned out, float gate, float up) {
    typename T::Stored *y = static_cast<typename T::Stored *>(of.y);
    y[static_cast<size_t>(row) * of.y_stride + out] = T::narrow(silu(gate) * up);
}

// Few rows: 16 outputs of 8 N rows a block, a slice a warp. grid: (outs / 16, rows / (8 N)), 256 threads.
template <class T, int N> __device__ __forceinline__ void linear_few(const Linear &of) {
    SHARED(float, parts, SLICES * N * 128); // (slices, 8 N rows, 16 outputs)
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned tiles = (of.ins + 31) / 32, tile = blockIdx.x, first_row = blockIdx.y * 8 * N;
    const unsigned begin = tiles * warp / SLICES, end = tiles * (warp + 1) / SLICES;
    const uint4 *w = static_cast<const uint4 *>(of.w) + (static_cast<size_t>(tile) * tiles + begin) * 64 + lane;
    const unsigned short *x = static_cast<const unsigned short *>(of.x);
    float sums[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
    // Four tiles of W are loaded before the first is used.
    for (unsigned at = begin; at < end; at += 4) {
        uint4 a[4][2];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            if (at + u < end) {
                a[u][0] = load_stream(w + u * 64);
                a[u][1] = load_stream(w + u * 64 + 32);
            }
        }
        w += 4 * 64;
#pragma unroll
        for (int u = 0; u < 4; u++) {
            if (at + u >= end) break;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const unsigned row = first_row + n * 8 + g;
                uint4 b = make_uint4(0, 0, 0, 0);
                if (row < of.rows)
                    b = *reinterpret_cast<const uint4 *>(x + static_cast<size_t>(row) * of.x_stride + (at + u) * 32 + t * 8);
                T::mma(sums[n], a[u][0], b.x, b.y);
                T::mma(sums[n], a[u][1], b.z, b.w);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float *part = parts + (warp * N + n) * 128;
        part[(2 * t) * 16 + g] = sums[n][0];
        part[(2 * t + 1) * 16 + g] = sums[n][1];
        part[(2 * t) * 16 + g + 8] = sums[n][2];
        part[(2 * t + 1) * 16 + g + 8] = sums[n][3];
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < N * 128; i += blockDim.x) {
        const unsigned row = first_row + i / 16, m = i % 16;
        if (row >= of.rows || (of.mode == SWIGLU && m >= 8)) continue;
        float sum = 0.0f, up = 0.0f;
        for (int slice = 0; slice < SLICES; slice++) sum += parts[slice * N * 128 + i];
        if (of.mode == SWIGLU) {
            for (int slice = 0; slice < SLICES; slice++) up += parts[slice * N * 128 + i + 8];
            if (tile * 8 + m < of.outs / 2) put_swiglu<T>(of, row, tile * 8 + m, sum, up);
        } else if (tile * 16 + m < of.outs) {
            put<T>(of, row, tile * 16 + m, sum);
        }
    }
}

// Many rows: D x A warps a block, each of 16 M outputs by 8 N rows, the inner dimension through shared memory in STAGES of
// 32. grid: (outs / (16 M D), rows / (8 N A)), 32 D A threads, 64 (16 M D + 8 N A) bytes of shared memory a stage.
#define STAGES 3

template <class T, int D, int A, int M, int N> struct Tiles {
    static const unsigned THREADS = 32 * D * A, OUT_TILES = M * D, ROWS = 8 * N * A;
    static const unsigned W = OUT_TILES * 64, X = ROWS * 4; // pieces of sixteen bytes in a stage
    const Linear &of;
    uint4 *w, *x; // (STAGES, W), (STAGES, X)
    unsigned tiles;

    // Starts to copy one step's tiles of W and pieces of x, with 0 out of bounds.
    __device__ __forceinline__ void fetch(unsigned at) const {
        if (at < tiles) {
            const unsigned stage = at % STAGES, out_tiles = (of.outs + 15) / 16;
            const uint4 *from_w = static_cast<const uint4 *>(of.w);
            const unsigned short *from_x = static_cast<const unsigned short *>(of.x);
            for (unsigned i = threadIdx.x; i < W; i += THREADS) {
                const unsigned tile = blockIdx.x * OUT_TILES + i / 64;
                uint4 *to = w + stage * W + i;
                if (tile < out_tiles) cp_async16(to, from_w + (static_cast<size_t>(tile) * tiles + at) * 64 + i % 64);
                else *to = make_uint4(0, 0, 0, 0);
            }
            for (unsigned i = threadIdx.x; i < X; i += THREADS) {
                const unsigned row = blockIdx.y * ROWS + i / 4;
                uint4 *to = x + stage * X + i;
                if (row < of.rows) cp_async16(to, from_x + static_cast<size_t>(row) * of.x_stride + at * 32 + i % 4 * 8);
                else *to = make_uint4(0, 0, 0, 0);
            }
        }
        cp_async_commit(); // an empty group too: they are counted
    }
};

template <class T, int D, int A, int M, int N> __device__ __forceinline__ void linear_many(const Linear &of) {
    typedef Tiles<T, D, A, M, N> Stage;
    DYNAMIC_SHARED(memory);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned down = warp / A, across = warp % A;
    uint4 *w = reinterpret_cast<uint4 *>(memory), *x = w + STAGES * Stage::W;
    const Stage of_step = {of, w, x, (of.ins + 31) / 32};
    const unsigned tiles = of_step.tiles;
    float sums[M][N][4], slice[M][N][4]; // (tiles of outputs, tiles of rows, fragment)
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) (&sums[0][0][0])[i] = (&slice[0][0][0])[i] = 0.0f;
    unsigned of_slice = 0, end = tiles / SLICES;
    for (unsigned at = 0; at < STAGES - 1; at++) of_step.fetch(at);
    for (unsigned at = 0; at < tiles; at++) {
        cp_async_wait<STAGES - 2>();
        // All threads' pieces have arrived, and no thread still reads the stage that is filled next.
        __syncthreads();
        of_step.fetch(at + STAGES - 1);
        const uint4 *from_w = w + at % STAGES * Stage::W + down * M * 64 + lane;
        const uint4 *from_x = x + at % STAGES * Stage::X + (across * N * 8 + g) * 4 + t;
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = from_x[n * 32];
        // With few tiles a slice may be empty: it is added all the same.
        while (at >= end) {
#pragma unroll
            for (int i = 0; i < M * N * 4; i++) {
                (&sums[0][0][0])[i] += (&slice[0][0][0])[i];
                (&slice[0][0][0])[i] = 0.0f;
            }
            of_slice++;
            end = tiles * (of_slice + 1) / SLICES;
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint4 a0 = from_w[m * 64], a1 = from_w[m * 64 + 32];
#pragma unroll
            for (int n = 0; n < N; n++) {
                T::mma(slice[m][n], a0, b[n].x, b[n].y);
                T::mma(slice[m][n], a1, b[n].z, b[n].w);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        const unsigned tile = blockIdx.x * Stage::OUT_TILES + down * M + m;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned row = blockIdx.y * Stage::ROWS + (across * N + n) * 8 + 2 * t + half;
                const float low = sums[m][n][half] + slice[m][n][half];
                const float high = sums[m][n][half + 2] + slice[m][n][half + 2];
                if (row >= of.rows) continue;
                if (of.mode == SWIGLU) {
                    if (tile * 8 + g < of.outs / 2) put_swiglu<T>(of, row, tile * 8 + g, low, high);
                } else {
                    if (tile * 16 + g < of.outs) put<T>(of, row, tile * 16 + g, low);
                    if (tile * 16 + g + 8 < of.outs) put<T>(of, row, tile * 16 + g + 8, high);
                }
            }
        }
    }
}

// f32 weights, without tensor cores: gates, which need the precision, and checkpoints in f32. One warp per output (for
// SwiGLU a pair), eight rows at a time. grid: (outs / 8, rows / 8), 256 threads.
__device__ __forceinline__ void linear_f32_rows(const Linear &of) {
    const unsigned out = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * 8;
    const bool pair = of.mode == SWIGLU;
    const unsigned outs = pair ? of.outs / 2 : of.outs;
    if (out >= outs) return;
    const float *w = static_cast<const float *>(of.w) + static_cast<size_t>(out) * of.ins;
    const float *up = w + static_cast<size_t>(outs) * of.ins;
    const float *x = static_cast<const float *>(of.x);
    float sums[8], ups[8];
#pragma unroll
    for (int r = 0; r < 8; r++) sums[r] = ups[r] = 0.0f;
    // Many loads at a time: there are too few warps to hide the latency.
#pragma unroll 4
    for (unsigned i = lane; i < of.ins; i += 32) {
        const float weight = w[i], other = pair ? up[i] : 0.0f;
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float v = first + r < of.rows ? x[static_cast<size_t>(first + r) * of.x_stride + i] : 0.0f;
            sums[r] = fmaf(weight, v, sums[r]);
            ups[r] = fmaf(other, v, ups[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float sum = lane_sum(sums[r], 32) + (of.bias ? of.bias[out] : 0.0f), beside = lane_sum(ups[r], 32);
        if (lane != 0 || first + r >= of.rows) continue;
        if (pair) put_swiglu<F32>(of, first + r, out, sum, beside);
        else put<F32>(of, first + r, out, sum);
    }
}

#define TIDEGATE_LINEAR(T, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_8(Linear of) { linear_few<T, 1>(of); }       \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_16(Linear of) { linear_few<T, 2>(of); }      \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_32(Linear of) { linear_few<T, 4>(of); }      \
    /* 64 outputs by 64 rows: where larger tiles would leave processors without work. */                          \
    extern "C" __global__ void __launch_bounds__(128) linear_##name##_some(Linear of) {                            \
        linear_many<T, 2, 2, 2, 4>(of);                                                                            \
    }                                                                                                              \
    /* 128 by 128. */                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) linear_##name##_many(Linear of) {                         \
        linear_many<T, 2, 4, 4, 4>(of);                                                                            \
    }
TIDEGATE_LINEAR(Bf16, bf16)
TIDEGATE_LINEAR(F16, f16)
#undef TIDEGATE_LINEAR
extern "C" __global__ void __launch_bounds__(256) linear_f32(Linear of) { linear_f32_rows(of); }
