// Operations on each token's row alone: embedding, RMSNorm, the short convolution, rotary positions.
#pragma once
#include "maths.cuh"

// Row `id` of a packed table (see linear.cuh), or of a plain one of f32, for each token. x: (rows, hidden)
// grid: (rows), any number of threads.
template <class T> __device__ __forceinline__ float packed_at(const void *table, unsigned tiles, unsigned row, unsigned column) {
    const unsigned within = column % 32, piece = within % 8, lane = row % 8 * 4 + within / 8;
    const unsigned number = piece / 2 % 2 * 2 + row % 16 / 8; // of the fragment's four
    const size_t tile = static_cast<size_t>(row / 16) * tiles + column / 32;
    const size_t at = ((tile * 2 + piece / 4) * 32 + lane) * 8 + number * 2 + piece % 2;
    return T::widen(static_cast<const unsigned short *>(table)[at]);
}

extern "C" __global__ void embed(const void *table, const unsigned *ids, float *x, unsigned hidden, unsigned kind) {
    begin();
    const unsigned id = ids[blockIdx.x], tiles = (hidden + 31) / 32;
    float *to = x + static_cast<size_t>(blockIdx.x) * hidden;
    for (unsigned i = threadIdx.x; i < hidden; i += blockDim.x) {
        if (kind == KIND_F32) to[i] = static_cast<const float *>(table)[static_cast<size_t>(id) * hidden + i];
        else if (kind == KIND_BF16) to[i] = packed_at<Bf16>(table, tiles, id, i);
        else to[i] = packed_at<F16>(table, tiles, id, i);
    }
}

// The sum over a block of 256 threads in a fixed order; every thread gets the same bits. room: 8 numbers of shared memory
__device__ __forceinline__ float block_sum(float v, float *room) {
    const float own = lane_sum(v, 32);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = own;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += room[i];
    return sum;
}

// x / sqrt(mean(x^2) + eps) * weight of each row, as `kind`, and as f32 too if `plain` is not null.
// x: (rows, dim); y, plain: (rows, stride). grid: (rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const float *x, const float *weight, void *y, float *plain, unsigned dim, unsigned stride, float eps,
             unsigned kind) {
    SHARED(float, room, 8);
    begin();
    const float *from = x + static_cast<size_t>(blockIdx.x) * dim;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < dim; i += 256) squares = fmaf(from[i], from[i], squares);
    const float scale = 1.0f / sqrtf(block_sum(squares, room) / static_cast<float>(dim) + eps);
    for (unsigned i = threadIdx.x; i < dim; i += 256) {
        const size_t at = static_cast<size_t>(blockIdx.x) * stride + i;
        const float number = from[i] * scale * weight[i];
        store_as(y, at, kind, number);
        if (plain) plain[at] = number;
    }
}

// The same of each head of a row: x (rows, heads d) -> y (rows, y_stride). weight: (d)
// grid: (heads, rows), 32 threads.
extern "C" __global__ void __launch_bounds__(32)
    head_norm(const float *x, const float *weight, void *y, unsigned d, unsigned y_stride, float eps, unsigned kind) {
    begin();
    const unsigned heads = gridDim.x, head = blockIdx.x, row = blockIdx.y;
    const float *from = x + (static_cast<size_t>(row) * heads + head) * d;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < d; i += 32) squares = fmaf(from[i], from[i], squares);
    const float scale = 1.0f / sqrtf(lane_sum(squares, 32) / static_cast<float>(d) + eps);
    for (unsigned i = threadIdx.x; i < d; i += 32)
        store_as(y, static_cast<size_t>(row) * y_stride + head * d + i, kind, from[i] * scale * weight[i]);
}

// Depthwise causal convolution and SiLU over the tokens of each row; updates the slot's last inputs.
// x, y: (rows, time, channels); weight: (taps, channels); tails: (slots, tail_stride), of which (taps - 1, channels) are
// this layer's, oldest first. grid: (channels / 256, rows), 256 threads. Padding rows are skipped.
extern "C" __global__ void __launch_bounds__(256)
    conv_silu(const float *x, const float *weight, float *tails, const unsigned *slots, float *y, unsigned channels,
              unsigned taps, unsigned time, size_t tail_stride) {
    begin();
    const unsigned channel = blockIdx.x * 256 + threadIdx.x, slot = slots[blockIdx.y];
    if (channel >= channels || slot == 0xffffffffu) return;
    float *tail = tails + slot * tail_stride + channel;
    const float *from = x + static_cast<size_t>(blockIdx.y) * time * channels + channel;
    float *to = y + static_cast<size_t>(blockIdx.y) * time * channels + channel;
    float window[16];
#pragma unroll
    for (unsigned j = 0; j < 16; j++) window[j] = j + 1 < taps ? tail[static_cast<size_t>(j) * channels] : 0.0f;
    for (unsigned at = 0; at < time; at++) {
        const float newest = from[static_cast<size_t>(at) * channels];
        float sum = 0.0f;
#pragma unroll
        for (unsigned j = 0; j < 16; j++) {
            if (j + 1 == taps) window[j] = newest;
            if (j < taps) sum = fmaf(window[j], weight[static_cast<size_t>(j) * channels + channel], sum);
        }
        to[static_cast<size_t>(at) * channels] = silu(sum);
#pragma unroll
        for (unsigned j = 0; j < 15; j++) window[j] = window[j + 1];
    }
#pragma unroll
    for (unsigned j = 0; j < 16; j++)
        if (j + 1 < taps) tail[static_cast<size_t>(j) * channels] = window[j];
}

// Rotates the halves of every head of q and k. qkv: (rows, 3 heads d); angles: cosine and sine (rows, d / 2, 2).
// grid: (rows), any number of threads.
extern "C" __global__ void rotate(float *qkv, const float *angles, unsigned heads, unsigned d) {
    begin();
    const unsigned half = d / 2;
    float *row = qkv + static_cast<size_t>(blockIdx.x) * 3 * heads * d;
    const float *turn = angles + static_cast<size_t>(blockIdx.x) * d;
    for (unsigned i = threadIdx.x; i < 2 * heads * half; i += blockDim.x) {
        float *a = row + i / half * d + i % half, *b = a + half;
        const float cosine = turn[i % half * 2], sine = turn[i % half * 2 + 1], x = *a, y = *b;
        *a = x * cosine - y * sine;
        *b = y * cosine + x * sine;
    }
}
