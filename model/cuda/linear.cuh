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
    // Four tiles of W are loaded before the first is used; the first four before there are inputs.
    uint4 a[4][2];
    const auto load = [&](unsigned at) {
#pragma unroll
        for (int u = 0; u < 4; u++) {
            if (at + u < end) {
                a[u][0] = load_stream(w + u * 64);
                a[u][1] = load_stream(w + u * 64 + 32);
            }
        }
        w += 4 * 64;
    };
    start_next();
    load(begin);
    await_inputs();
    for (unsigned at = begin; at < end; at += 4) {
        if (at != begin) load(at);
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
// K tiles. grid: (outs / (16 M D), rows / (8 N A)), 32 D A threads, 64 K (16 M D + 8 N A) bytes of shared memory a stage.
// With one tile a stage, the barrier and the start of the copies would take as long as the products.
#define STAGES 3

template <class T, int D, int A, int M, int N, int K> struct Tiles {
    static constexpr unsigned THREADS = 32 * D * A, OUT_TILES = M * D, ROWS = 8 * N * A;
    static constexpr unsigned W = OUT_TILES * 64, X = ROWS * 4; // pieces of sixteen bytes of a tile
    static constexpr unsigned OWN_W = K * W / THREADS, OWN_X = K * X / THREADS;
    static_assert(OWN_W * THREADS == K * W && OWN_X * THREADS == K * X, "every thread copies as much");
    uint4 *stages; // (STAGES, K (W + X))
    // The pieces that this thread copies next, and a bit for each that is in bounds.
    const uint4 *w[OWN_W], *x[OWN_X];
    unsigned w_there, x_there, tiles;

    __device__ __forceinline__ Tiles(const Linear &of, unsigned char *memory)
        : stages(reinterpret_cast<uint4 *>(memory)), w_there(0), x_there(0), tiles((of.ins + 31) / 32) {
#pragma unroll
        for (unsigned j = 0; j < OWN_W; j++) {
            const unsigned i = threadIdx.x + j * THREADS, tile = blockIdx.x * OUT_TILES + i / (64 * K);
            const bool there = tile < (of.outs + 15) / 16;
            w_there |= static_cast<unsigned>(there) << j;
            w[j] = static_cast<const uint4 *>(of.w) + (there ? static_cast<size_t>(tile) * tiles * 64 : 0) + i % (64 * K);
        }
#pragma unroll
        for (unsigned j = 0; j < OWN_X; j++) {
            const unsigned i = threadIdx.x + j * THREADS, row = blockIdx.y * ROWS + i / (4 * K);
            const bool there = row < of.rows;
            x_there |= static_cast<unsigned>(there) << j;
            const unsigned short *from = static_cast<const unsigned short *>(of.x);
            x[j] = reinterpret_cast<const uint4 *>(from + (there ? static_cast<size_t>(row) * of.x_stride : 0)) + i % (4 * K);
        }
    }

    // Start to copy the next stage's tiles of W, and pieces of x, with 0 out of bounds. at: its number
    __device__ __forceinline__ void fetch_w(unsigned at) {
        if (at * K >= tiles) return;
        uint4 *to = stages + at % STAGES * (K * (W + X));
#pragma unroll
        for (unsigned j = 0; j < OWN_W; j++) {
            const unsigned i = threadIdx.x + j * THREADS;
            cp_async16((w_there >> j & 1) && at * K + i / 64 % K < tiles, to + i, w[j]);
            w[j] += 64 * K;
        }
    }
    __device__ __forceinline__ void fetch_x(unsigned at) {
        if (at * K >= tiles) return;
        uint4 *to = stages + at % STAGES * (K * (W + X)) + K * W;
#pragma unroll
        for (unsigned j = 0; j < OWN_X; j++) {
            const unsigned i = threadIdx.x + j * THREADS, k = i / 4 % K;
            cp_async16((x_there >> j & 1) && at * K + k < tiles, to + k * X + i / (4 * K) * 4 + i % 4, x[j]);
            x[j] += 4 * K;
        }
    }
};

template <class T, int D, int A, int M, int N, int K> __device__ __forceinline__ void linear_many(const Linear &of) {
    typedef Tiles<T, D, A, M, N, K> Own;
    DYNAMIC_SHARED(memory);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned down = warp / A, across = warp % A;
    Own copies(of, memory);
    const unsigned tiles = copies.tiles;
    float sums[M][N][4], slice[M][N][4]; // (tiles of outputs, tiles of rows, fragment)
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) (&sums[0][0][0])[i] = (&slice[0][0][0])[i] = 0.0f;
    unsigned of_slice = 0, end = tiles / SLICES;
    // Adds the slices that end before a tile. With few tiles a slice may be empty: it is added all the same.
    const auto finish = [&](unsigned tile) {
        while (tile >= end) {
#pragma unroll
            for (int i = 0; i < M * N * 4; i++) {
                (&sums[0][0][0])[i] += (&slice[0][0][0])[i];
                (&slice[0][0][0])[i] = 0.0f;
            }
            of_slice++;
            end = tiles * (of_slice + 1) / SLICES;
        }
    };
    // stage: of the tiles; k: which of them
    const auto multiply = [&](const uint4 *stage, int k) {
        const uint4 *from_w = stage + (down * M * K + k) * 64 + lane;
        const uint4 *from_x = stage + K * Own::W + k * Own::X + across * N * 32 + lane;
        uint4 b[N];
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = from_x[n * 32];
#pragma unroll
        for (int m = 0; m < M; m++) {
            const uint4 a0 = from_w[m * 64 * K], a1 = from_w[m * 64 * K + 32];
#pragma unroll
            for (int n = 0; n < N; n++) T::mma(slice[m][n], a0, b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < N; n++) T::mma(slice[m][n], a1, b[n].z, b[n].w);
        }
    };
    start_next();
    for (unsigned at = 0; at < STAGES - 1; at++) copies.fetch_w(at);
    await_inputs();
    for (unsigned at = 0; at < STAGES - 1; at++) {
        copies.fetch_x(at);
        cp_async_commit(); // an empty group too: they are counted
    }
    for (unsigned at = 0; at * K < tiles; at++) {
        cp_async_wait<STAGES - 2>();
        // All threads' pieces have arrived, and no thread still reads the stage that is filled next.
        __syncthreads();
        copies.fetch_w(at + STAGES - 1);
        copies.fetch_x(at + STAGES - 1);
        cp_async_commit();
        const uint4 *stage = copies.stages + at % STAGES * (K * (Own::W + Own::X));
        const unsigned tile = at * K;
        finish(tile);
        if (tile + K <= end) { // all of one slice
#pragma unroll
            for (int k = 0; k < K; k++) multiply(stage, k);
        } else {
#pragma unroll 1
            for (int k = 0; k < K && tile + k < tiles; k++) {
                finish(tile + k);
                multiply(stage, k);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) (&sums[0][0][0])[i] += (&slice[0][0][0])[i];
    // What a sum is added to is read before anything is written: one after the other, each would wait for memory.
    const bool add = of.mode == ADD;
    float *y = static_cast<float *>(of.y);
    const unsigned first_tile = blockIdx.x * Own::OUT_TILES + down * M, first_row = blockIdx.y * Own::ROWS + across * N * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / (N * 4), n = i / 4 % N, of_fragment = i % 4;
        const unsigned out = (first_tile + m) * 16 + g + of_fragment / 2 * 8, row = first_row + n * 8 + of_fragment % 2;
        const bool there = add && row < of.rows && out < of.outs;
        slice[m][n][of_fragment] = there ? y[static_cast<size_t>(row) * of.y_stride + out] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / (N * 4), n = i / 4 % N, of_fragment = i % 4;
        const unsigned out = (first_tile + m) * 16 + g + of_fragment / 2 * 8, row = first_row + n * 8 + of_fragment % 2;
        if (row >= of.rows) continue;
        const float *sum = sums[m][n];
        if (of.mode == SWIGLU) {
            const unsigned gate = (first_tile + m) * 8 + g;
            if (of_fragment < 2 && gate < of.outs / 2) put_swiglu<T>(of, row, gate, sum[of_fragment], sum[of_fragment + 2]);
        } else if (out < of.outs) {
            y[static_cast<size_t>(row) * of.y_stride + out] = add ? slice[m][n][of_fragment] + sum[of_fragment] : sum[of_fragment];
        }
    }
}

// f32 weights, without tensor cores: gates, which need the precision, and checkpoints in f32. A block of eight warps has O
// outputs (for SwiGLU pairs) of eight rows. Thread i sums columns 4 i to 4 i + 3 of every 1,024, then the lanes of a warp
// are added, then the warps. grid: (outs / O, rows / 8), 256 threads.
template <int O> __device__ __forceinline__ void linear_f32_rows(const Linear &of) {
    const bool pair = of.mode == SWIGLU;
    const unsigned outs = pair ? of.outs / 2 : of.outs, first_out = blockIdx.x * O, first = blockIdx.y * 8;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    SHARED(float, parts, 8 * O * 16); // (warps, outputs, their ups after them, rows)
    const float *w = static_cast<const float *>(of.w), *x = static_cast<const float *>(of.x) + static_cast<size_t>(first) * of.x_stride;
    const auto load = [&](unsigned out, unsigned column) {
        const float *from = w + static_cast<size_t>(out) * of.ins + column;
        if (of.ins % 4 == 0) return *reinterpret_cast<const float4 *>(from);
        const unsigned left = of.ins - column;
        return make_float4(from[0], left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f, left > 3 ? from[3] : 0.0f);
    };
    begin();
    // Twice where there are pairs: the registers of both would not fit.
    for (unsigned up = 0; up < (pair ? 2 : 1); up++) {
        float sums[O][8];
#pragma unroll
        for (int i = 0; i < O * 8; i++) (&sums[0][0])[i] = 0.0f;
        for (unsigned column = threadIdx.x * 4; column < of.ins; column += 1024) {
            float4 weights[O];
#pragma unroll
            for (int o = 0; o < O; o++)
                weights[o] = first_out + o < outs ? load(up * outs + first_out + o, column) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int r = 0; r < 8; r++) {
                // Beyond the last column a row has zeros.
                const float4 v = first + r < of.rows
                                     ? *reinterpret_cast<const float4 *>(x + static_cast<size_t>(r) * of.x_stride + column)
                                     : make_float4(0, 0, 0, 0);
#pragma unroll
                for (int o = 0; o < O; o++)
                    sums[o][r] = fmaf(weights[o].w, v.w, fmaf(weights[o].z, v.z, fmaf(weights[o].y, v.y, fmaf(weights[o].x, v.x, sums[o][r]))));
            }
        }
        // Each step leaves a lane half of its sums, which it adds to those of the lane with the other half.
        float *own = &sums[0][0];
        unsigned held = 0; // the first sum that this lane still has
#pragma unroll
        for (int half = O * 4, step = 16; step > 0; step /= 2, half /= 2) {
            if (half > 0) {
                const bool upper = lane & step;
#pragma unroll
                for (int i = 0; i < half; i++) {
                    const float sent = upper ? own[i] : own[i + half], kept = upper ? own[i + half] : own[i];
                    own[i] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
                }
                held += upper ? half : 0;
            } else {
                own[0] += __shfl_xor_sync(0xffffffffu, own[0], step);
            }
        }
        const unsigned each = 32 / (O * 8); // lanes with the same sum
        if (lane % each == 0) parts[(warp * 2 + up) * O * 8 + held] = own[0];
    }
    __syncthreads();
    if (threadIdx.x >= O * 8) return;
    const unsigned out = first_out + threadIdx.x / 8, row = first + threadIdx.x % 8;
    if (out >= outs || row >= of.rows) return;
    float sum = 0.0f, beside = 0.0f;
    for (unsigned i = 0; i < 8; i++) {
        sum += parts[i * 2 * O * 8 + threadIdx.x];
        if (pair) beside += parts[(i * 2 + 1) * O * 8 + threadIdx.x];
    }
    if (pair) put_swiglu<F32>(of, row, out, sum, beside);
    else put<F32>(of, row, out, sum + (of.bias ? of.bias[out] : 0.0f));
}

#define TIDEGATE_LINEAR(T, name)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_8(Linear of) { linear_few<T, 1>(of); }       \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_16(Linear of) { linear_few<T, 2>(of); }      \
    extern "C" __global__ void __launch_bounds__(256) linear_##name##_32(Linear of) { linear_few<T, 4>(of); }      \
    /* 64 outputs by 64 rows: where larger tiles would leave processors without work. */                          \
    extern "C" __global__ void __launch_bounds__(128, 2) linear_##name##_some(Linear of) {                         \
        linear_many<T, 2, 2, 2, 4, 2>(of);                                                                            \
    }                                                                                                              \
    /* 128 by 64. */                                                                                               \
    extern "C" __global__ void __launch_bounds__(128, 2) linear_##name##_many(Linear of) {                         \
        linear_many<T, 2, 2, 4, 4, 2>(of);                                                                         \
    }
TIDEGATE_LINEAR(Bf16, bf16)
TIDEGATE_LINEAR(F16, f16)
#undef TIDEGATE_LINEAR
extern "C" __global__ void __launch_bounds__(256) linear_f32_1(Linear of) { linear_f32_rows<1>(of); }
extern "C" __global__ void __launch_bounds__(256, 2) linear_f32_4(Linear of) { linear_f32_rows<4>(of); }
