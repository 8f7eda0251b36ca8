// Random feature attention, token by token (Peng et al., 2021, equations 5 to 7): features, gate, decay, rank-1 update,
// readout and normaliser, in one pass over a head's S.
//
// A head's S is stored column by column, each of 16 R numbers: its F features, then zeros. Thread (ty, tx) has R rows of
// S, from ty R on, of some columns; a column's readout is summed over the rows of a thread, then over the sixteen ty by
// shuffles. The columns per thread and the threads per block change no order of sums, so a prompt gives the same bits in
// one piece, in many, and by decode steps.
#pragma once
#include "maths.cuh"

enum Map { GAUSSIAN = 0, ARC_COSINE = 1, ELU = 2 }; // as in model/src/cuda/mixer.rs

// The argument of the kernels below.
struct Recurrence {
    void *s;                            // S of all slots, s_stride numbers apart; of this layer (heads, d, 16 R)
    float *sums;                        // z (F) and c of all slots, sums_stride numbers apart; (heads, F + 1)
    float *sums_after;                  // where the new ones are written: (heads, F + 1), or null for in place
    const float *qkv;                   // (rows, time, 3 heads d)
    const float *gate;                  // logits (rows, time, heads), or null
    const float *w;                     // W times sigma, column by column: (heads, d, D); null for elu
    float *phi;                         // of queries, then of keys: (rows time, heads, 2, F); unused if the step computes them
    const unsigned *slots;              // (rows); 0xffffffff for a padding row
    const unsigned long long *places;   // position of each row's first token in its text: (rows)
    void *out;                          // (rows, time, out_stride) as out_kind
    unsigned long long *clamped;        // counts denominators clamped to their floor
    unsigned long long s_stride, sums_stride;
    unsigned heads, d, features, proj_dim, time, map, layer, out_kind, out_stride;
    float eps;
};

// Features of V vectors of a head, V / 2 queries and as many keys. All threads of the block must call it.
// x: the first query, its key `inner` on, the next token's `stride` on; units: room for (V, d); phi: (V / 2, 2, F), `between`
// two tokens. count: valid tokens.
template <int V>
__device__ __forceinline__ void features_of(const Recurrence &of, unsigned head, const float *x, size_t stride,
                                            unsigned count, float *units, float *phi, size_t between) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, inner = of.heads * of.d;
    for (unsigned v = warp; v < V; v += warps) {
        const float *from = x + v / 2 * stride + v % 2 * inner;
        const bool there = v / 2 < count;
        float squares = 0.0f;
        for (unsigned i = lane; there && i < of.d; i += 32) squares = fmaf(from[i], from[i], squares);
        const float scale = of.map == ELU ? 1.0f : 1.0f / (sqrtf(lane_sum(squares, 32)) + 1e-3f);
        for (unsigned i = lane; i < of.d; i += 32) units[v * of.d + i] = there ? from[i] * scale : 0.0f;
    }
    __syncthreads();
    if (of.map == ELU) {
        for (unsigned i = threadIdx.x; i < V * of.d; i += blockDim.x) {
            const unsigned v = i / of.d;
            const float number = units[i], falling = number < -87.0f ? 0.0f : exp_of(number);
            if (v / 2 < count) phi[v / 2 * between + v % 2 * of.features + i % of.d] = number > 0.0f ? number + 1.0f : falling;
        }
        return;
    }
    const float scale = sqrtf(1.0f / static_cast<float>(of.proj_dim));
    const float *w = of.w + static_cast<size_t>(head) * of.d * of.proj_dim;
    for (unsigned j = threadIdx.x; j < of.proj_dim; j += blockDim.x) {
        float angles[V];
#pragma unroll
        for (int v = 0; v < V; v++) angles[v] = 0.0f;
#pragma unroll 8
        for (unsigned i = 0; i < of.d; i++) {
            const float weight = w[static_cast<size_t>(i) * of.proj_dim + j];
#pragma unroll
            for (int v = 0; v < V; v++) angles[v] = fmaf(weight, units[v * of.d + i], angles[v]);
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            if (static_cast<unsigned>(v / 2) >= count) break;
            float *to = phi + v / 2 * between + v % 2 * of.features + j;
            if (of.map == GAUSSIAN) {
                float sine, cosine;
                sin_cos(angles[v], sine, cosine);
                to[0] = sine * scale;
                to[of.proj_dim] = cosine * scale;
            } else {
                to[0] = angles[v] < 0.0f ? 0.0f : angles[v] * scale;
            }
        }
    }
}

#define FEATURE_TOKENS 8

// Features of all tokens of a prompt. grid: (heads, rows time / 8), 128 threads, 16 d numbers of shared memory.
extern "C" __global__ void __launch_bounds__(128) features(Recurrence of, unsigned tokens) {
    DYNAMIC_SHARED(memory);
    begin();
    const unsigned head = blockIdx.x, first = blockIdx.y * FEATURE_TOKENS, inner = of.heads * of.d;
    const float *x = of.qkv + static_cast<size_t>(first) * 3 * inner + head * of.d;
    const size_t between = static_cast<size_t>(of.heads) * 2 * of.features;
    float *phi = of.phi + first * between + static_cast<size_t>(head) * 2 * of.features;
    const unsigned count = tokens - first < FEATURE_TOKENS ? tokens - first : FEATURE_TOKENS;
    features_of<2 * FEATURE_TOKENS>(of, head, x, 3 * static_cast<size_t>(inner), count, reinterpret_cast<float *>(memory), phi, between);
}

// The seed of the rounding: depends only on the token's position in its text, the layer and the head.
__device__ __forceinline__ unsigned noise_of(unsigned long long place, unsigned layer_head) {
    unsigned long long x = (place ^ static_cast<unsigned long long>(layer_head) << 40) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return static_cast<unsigned>(x ^ x >> 31);
}

// Thirty-two bits for two numbers of S (a murmur finish).
__device__ __forceinline__ unsigned noise_at(unsigned noise, unsigned pair) {
    unsigned h = noise + pair * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

// The stored type of S; numbers are accessed in pairs.
struct StateF32 {
    typedef float2 Pair;
    static __device__ __forceinline__ float2 widen(float2 v) { return v; }
    static __device__ __forceinline__ float2 narrow(float2 v) { return v; }
    static __device__ __forceinline__ void round(float &, float &, unsigned, unsigned) {}
};
// Stochastic rounding: a slow gate often adds less than half a step of bf16, which rounding to the nearest would lose.
struct StateBf16 {
    typedef unsigned Pair;
    static __device__ __forceinline__ float2 widen(unsigned v) {
        return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    }
    static __device__ __forceinline__ unsigned narrow(float2 v) {
        return __float_as_uint(v.x) >> 16 | (__float_as_uint(v.y) & 0xffff0000u);
    }
    // The result is exactly a bf16; NaN need not stay NaN.
    static __device__ __forceinline__ void round(float &a, float &b, unsigned noise, unsigned pair) {
        const unsigned bits = noise_at(noise, pair);
        a = __uint_as_float((__float_as_uint(a) + (bits & 0xffffu)) & 0xffff0000u);
        b = __uint_as_float((__float_as_uint(b) + (bits >> 16)) & 0xffff0000u);
    }
};

// A thread's rows of one column of S, read and written in one access.
template <class P, int N> struct __align__(sizeof(P) * N > 16 ? 16 : sizeof(P) * N) Pieces {
    P pairs[N];
};

// token: counted over all rows. Two sigmoids, not 1 - g: near g = 1 the difference would lose all its bits.
__device__ __forceinline__ void open_gate(const Recurrence &of, size_t token, unsigned head, float &keep, float &take) {
    const float logit = of.gate ? of.gate[token * of.heads + head] : 0.0f;
    keep = of.gate ? sigmoid(logit) : 1.0f;
    take = of.gate ? sigmoid(-logit) : 1.0f;
}

// One token for R rows of C columns. w: take k. read: the readout, which uses S before it is rounded. The first number of
// column i is that of pair first + i between of S.
template <class S, int R, int C>
__device__ __forceinline__ void update(float (&state)[R][C], const float (&q)[R], const float (&w)[R],
                                       const float (&v)[C], float keep, unsigned noise, unsigned first,
                                       unsigned between, float (&read)[C]) {
#pragma unroll
    for (int i = 0; i < C; i++) read[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < C; i++) {
            state[r][i] = fmaf(w[r], v[i], keep * state[r][i]);
            read[i] = fmaf(q[r], state[r][i], read[i]);
        }
#pragma unroll
    for (int i = 0; i < C; i++)
#pragma unroll
        for (int r = 0; r < R; r += 2) S::round(state[r][i], state[r + 1][i], noise, first + i * between + r / 2);
}

// What a token's sums of S are multiplied by.
__device__ __forceinline__ float scale_of(const Recurrence &of, float denominator, float c, bool counts) {
    // A gate so near 1 that nothing was ever added leaves 0 / 0, or a subnormal whose reciprocal overflows.
    const float least = of.eps * c, floor = least > 1.17549435e-38f ? least : 1.17549435e-38f;
    if (denominator < floor && counts) atomicAdd(of.clamped, 1ull);
    return 1.0f / (denominator < floor ? floor : denominator);
}

template <class S, int R, int C>
__device__ __forceinline__ void take_column(float (&state)[R][C], int i, const Pieces<typename S::Pair, R / 2> &from) {
#pragma unroll
    for (int r = 0; r < R; r += 2) {
        const float2 pair = S::widen(from.pairs[r / 2]);
        state[r][i] = pair.x;
        state[r + 1][i] = pair.y;
    }
}
template <class S, int R, int C>
__device__ __forceinline__ Pieces<typename S::Pair, R / 2> column_of(const float (&state)[R][C], int i) {
    Pieces<typename S::Pair, R / 2> to;
#pragma unroll
    for (int r = 0; r < R; r += 2) to.pairs[r / 2] = S::narrow(make_float2(state[r][i], state[r + 1][i]));
    return to;
}

// One token of each row. grid: (heads, rows); 16 threads for every C columns, in whole warps: see
// model/src/cuda/recurrence.rs. FUSED: its features are computed here, in 2 (d + F) numbers of shared memory.
template <class S, int R, int C, bool FUSED> __device__ __forceinline__ void advance(const Recurrence &of) {
    DYNAMIC_SHARED(memory);
    const unsigned head = blockIdx.x, row = blockIdx.y, slot = of.slots[row];
    if (slot == 0xffffffffu) return;
    const unsigned d = of.d, features = of.features, inner = of.heads * d;
    const unsigned ty = threadIdx.x % 16, column = threadIdx.x / 16 * C;
    const unsigned first = ty * R, rows = first >= features ? 0 : (features - first < R ? features - first : R);
    const bool there = column < d;
    typedef Pieces<typename S::Pair, R / 2> Own;
    // In pieces; a column has sixteen.
    Own *s = static_cast<Own *>(of.s) + slot * of.s_stride / R + (static_cast<size_t>(head) * d + column) * 16 + ty;
    float *sums = of.sums + slot * of.sums_stride + static_cast<size_t>(head) * (features + 1);
    const float *x = of.qkv + static_cast<size_t>(row) * 3 * inner + head * d;

    // Loads the state first, so that the features are computed meanwhile.
    Own held[C];
    float z[R], c = sums[features];
#pragma unroll
    for (int i = 0; i < C; i++) held[i] = there ? s[i * 16] : Own();
#pragma unroll
    for (int r = 0; r < R; r++) z[r] = static_cast<unsigned>(r) < rows ? sums[first + r] : 0.0f;
    // No thread may write z and c while another still reads them. Computing the features has a barrier already.
    if (!FUSED) __syncthreads();
    const float *phi;
    if (FUSED) {
        float *room = reinterpret_cast<float *>(memory), *made = room + 2 * d;
        features_of<2>(of, head, x, 0, 1, room, made, 0);
        __syncthreads();
        phi = made;
    } else {
        phi = of.phi + (static_cast<size_t>(row) * of.heads + head) * 2 * features;
    }
    float q[R], k[R], v[C], keep, take, denominator = 0.0f, state[R][C], read[C];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const bool own = static_cast<unsigned>(r) < rows;
        q[r] = own ? phi[first + r] : 0.0f;
        k[r] = own ? phi[features + first + r] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < C; i++) v[i] = there ? x[2 * inner + column + i] : 0.0f;
    open_gate(of, row, head, keep, take);
    const unsigned noise = noise_of(of.places[row], of.layer * of.heads + head);
#pragma unroll
    for (int i = 0; i < C; i++) take_column<S>(state, i, held[i]);
#pragma unroll
    for (int r = 0; r < R; r++) {
        z[r] = fmaf(take, k[r], keep * z[r]);
        denominator = fmaf(q[r], z[r], denominator);
        k[r] = take * k[r];
    }
    update<S>(state, q, k, v, keep, noise, (column * 16 * R + first) / 2, 8 * R, read);
    c = fmaf(keep, c, take);
    const float scale = scale_of(of, lane_sum(denominator, 16), c, threadIdx.x == 0);
    const size_t to = static_cast<size_t>(row) * of.out_stride + head * d + column;
#pragma unroll
    for (int i = 0; i < C; i++) {
        const float sum = lane_sum(read[i], 16);
        if (ty == static_cast<unsigned>(i) && there) store_as(of.out, to + i, of.out_kind, sum * scale);
    }
#pragma unroll
    for (int r = 0; r < R; r++)
        if (column == 0 && static_cast<unsigned>(r) < rows) sums[first + r] = z[r];
#pragma unroll
    for (int i = 0; i < C; i++)
        if (there) s[i * 16] = column_of<S>(state, i);
    if (threadIdx.x == 0) sums[features] = c;
}

// All states: the type of S, its name, R, the columns of a thread in a step, and the tokens of a stage in a scan.
#define TIDEGATE_STATES(KERNELS)                                                                                   \
    KERNELS(StateF32, f32, 2, 8, 8) KERNELS(StateF32, f32, 4, 8, 8)                                                \
    KERNELS(StateF32, f32, 8, 8, 16) KERNELS(StateF32, f32, 16, 4, 4)                                              \
    KERNELS(StateBf16, bf16, 2, 8, 8) KERNELS(StateBf16, bf16, 4, 8, 8)                                            \
    KERNELS(StateBf16, bf16, 8, 8, 16) KERNELS(StateBf16, bf16, 16, 4, 4)

// A step computes its features itself; `row` gets them from a kernel that reads a head's W once for eight rows.
#define TIDEGATE_RECURRENCE(S, name, R, C, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1) recurrence_##name##_##R##_step(Recurrence of) {           \
        begin();                                                                                                   \
        advance<S, R, C, true>(of);                                                                                \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) recurrence_##name##_##R##_row(Recurrence of) {            \
        begin();                                                                                                   \
        advance<S, R, C, false>(of);                                                                               \
    }
TIDEGATE_STATES(TIDEGATE_RECURRENCE)
#undef TIDEGATE_RECURRENCE
