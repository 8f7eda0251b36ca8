// The recurrence over a prompt: the bits of its tokens' steps (recurrence.cuh), many tokens at a time.
#pragma once
#include "recurrence.cuh"

// A scan reads a prompt T tokens at a time: a stage. The first threads of a block have S, and do nothing but update it and
// read it out; its last 128, the helpers, do the rest, so that no thread waits for memory or for a sum over lanes. While
// stage n is added to S, they load stage n + 2, prepare n + 1, compute n's denominators, and write out n - 1.
#define SCAN_HELPERS 128

// What a token does to a head apart from its vectors: what the state keeps, the seed of its rounding, what it takes.
struct __align__(16) Gate {
    float keep;
    unsigned noise;
    float take;
    unsigned unused;
};

// Shared memory of a block of a scan, which has COLUMNS columns; as in model/src/cuda/recurrence.rs.
template <int R, int T, int COLUMNS> struct __align__(16) Stages {
    float q[2][T][16 * R], w[2][T][16 * R], z[2][T][16 * R]; // w: take k; numbers as `place` says
    float v[2][T][COLUMNS];
    float parts[2][T][COLUMNS][16]; // of the readouts, from each ty; groups of four as `group` says
    float c[2][T], scale[2][T];
    Gate gates[3][T];
};

// Where a row of S has its number: the sixteen ty read vectors side by side, from all banks, and so are the rows of a warp
// written.
template <int R> struct Places {
    static constexpr unsigned V = R < 4 ? R : 4;
    typedef Pieces<float, V> Vector;
    static __device__ __forceinline__ unsigned vector(unsigned ty, unsigned p) { return p * 16 + (ty ^ p * (32 / R)); }
    static __device__ __forceinline__ unsigned place(unsigned row) {
        return vector(row / R, row % R / V) * V + row % V;
    }
    static __device__ __forceinline__ void load(float (&to)[R], const float *from, unsigned ty) {
#pragma unroll
        for (unsigned p = 0; p < R / V; p++) {
            const Vector numbers = reinterpret_cast<const Vector *>(from)[vector(ty, p)];
#pragma unroll
            for (unsigned i = 0; i < V; i++) to[p * V + i] = numbers.pairs[i];
        }
    }
};

// What a thread with columns reads of a token.
template <int R, int C> struct Token {
    float q[R], w[R];
    Pieces<float, C> v;
    float keep;
    unsigned noise;
};

// Where a column's parts from four ty are, so that threads with a column each read them from all banks.
__device__ __forceinline__ unsigned group(unsigned column, unsigned of) { return of ^ (column / 2 & 3); }

// grid: (heads, rows, blocks of columns); 16 threads for every C columns, in whole warps, then the helpers. A warp has 2 C
// columns, of which one half-warp has the even ones.
template <class S, int R, int C, int T, int COLUMNS> __device__ __forceinline__ void scan(const Recurrence &of) {
    DYNAMIC_SHARED(memory);
    auto &room = *reinterpret_cast<Stages<R, T, COLUMNS> *>(memory);
    const unsigned head = blockIdx.x, row = blockIdx.y, slot = of.slots[row];
    if (slot == 0xffffffffu) return;
    const unsigned d = of.d, features = of.features, inner = of.heads * d, time = of.time;
    const unsigned mains = blockDim.x - SCAN_HELPERS, start = blockIdx.z * (mains / 16 * C);
    const size_t token = static_cast<size_t>(row) * time; // the first

    // Of a thread with columns.
    const unsigned ty = threadIdx.x % 16, half = threadIdx.x / 16 % 2, own = threadIdx.x / 32 * 2 * C + half;
    const bool main = threadIdx.x < mains, there = main && start + own < d;
    typedef Pieces<typename S::Pair, R / 2> Own;
    // In pieces; a column has sixteen.
    Own *s = static_cast<Own *>(of.s) + slot * of.s_stride / R + (static_cast<size_t>(head) * d + start + own) * 16 + ty;
    float state[R][C];
#pragma unroll
    for (int i = 0; i < C; i++) take_column<S>(state, i, there ? s[i * 32] : Own());

    // Of a helper: rows 128 apart, of which it has z; c, as all helpers have it; numbers of the stage that is loaded.
    constexpr int ROWS = (16 * R + SCAN_HELPERS - 1) / SCAN_HELPERS;
    constexpr int VALUES = (T * COLUMNS + SCAN_HELPERS - 1) / SCAN_HELPERS;
    const unsigned helper = threadIdx.x - mains;
    float *sums = of.sums + slot * of.sums_stride + static_cast<size_t>(head) * (features + 1);
    float z[ROWS] = {}, q[ROWS][T] = {}, k[ROWS][T] = {}, v[VALUES] = {}, c = 0.0f;
    if (!main) {
        c = sums[features];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const unsigned at = helper + j * SCAN_HELPERS;
            z[j] = at < features ? sums[at] : 0.0f;
        }
    }

    // Iteration n loads stage n. Iteration n + 2 adds it to S, n + 3 writes its outputs.
    const unsigned stages = (time + T - 1) / T;
    for (unsigned n = 0; n < stages + 3; n++) {
        const auto tokens = [&](unsigned stage) { return time - stage * T < T ? time - stage * T : T; };
        const unsigned now = n - 2, before = n - 3, odd = n % 2; // stages that are not there are huge
        if (there && now < stages) {
            Token<R, C> next;
            const auto load = [&](unsigned t) {
                next.keep = room.gates[now % 3][t].keep;
                next.noise = room.gates[now % 3][t].noise;
                Places<R>::load(next.q, room.q[odd][t], ty);
                Places<R>::load(next.w, room.w[odd][t], ty);
                next.v = reinterpret_cast<const Pieces<float, C> &>(room.v[odd][t][threadIdx.x / 16 * C]);
            };
            const auto add = [&](unsigned t) {
                const Token<R, C> token = next;
                float read[C];
                // Before this token's parts are written, which the compiler moves no read across.
                if (t + 1 < T) load(t + 1);
                update<S>(state, token.q, token.w, token.v.pairs, token.keep, token.noise,
                          ((start + own) * 16 * R + ty * R) / 2, 16 * R, read);
#pragma unroll
                for (int i = 0; i < C; i++) {
                    const unsigned column = own + 2 * i;
                    room.parts[odd][t][column][group(column, ty / 4) * 4 + ty % 4] = read[i];
                }
            };
            load(0);
            if (tokens(now) == T) {
#pragma unroll 4
                for (unsigned t = 0; t < T; t++) add(t);
            } else {
#pragma unroll 1
                for (unsigned t = 0; t < tokens(now); t++) add(t);
            }
        }
        if (!main) {
            const unsigned next = n - 1;
            if (next < stages) {
                float keep[T], take[T];
#pragma unroll
                for (unsigned t = 0; t < T; t++) {
                    keep[t] = room.gates[next % 3][t].keep;
                    take[t] = room.gates[next % 3][t].take;
                }
#pragma unroll
                for (unsigned t = 0; t < T; t++) {
                    if (t >= tokens(next)) break;
                    c = fmaf(keep[t], c, take[t]);
                    if (helper == 0) room.c[!odd][t] = c;
#pragma unroll
                    for (int j = 0; j < ROWS; j++) {
                        const unsigned at = helper + j * SCAN_HELPERS, place = Places<R>::place(at);
                        if (at >= 16 * R) break;
                        z[j] = fmaf(take[t], k[j][t], keep[t] * z[j]);
                        room.q[!odd][t][place] = q[j][t];
                        room.w[!odd][t][place] = take[t] * k[j][t];
                        room.z[!odd][t][place] = z[j];
                    }
                }
#pragma unroll
                for (int j = 0; j < VALUES; j++) {
                    const unsigned at = helper + j * SCAN_HELPERS;
                    if (at < T * COLUMNS) room.v[!odd][at / COLUMNS][at % COLUMNS] = v[j];
                }
            }
            if (n < stages) {
                const unsigned there = tokens(n);
                const size_t first = token + n * T;
#pragma unroll
                for (int j = 0; j < ROWS; j++) {
                    const unsigned at = helper + j * SCAN_HELPERS;
                    const float *phi = of.phi + (first * of.heads + head) * 2 * features + at;
#pragma unroll
                    for (unsigned t = 0; t < T; t++, phi += static_cast<size_t>(of.heads) * 2 * features) {
                        const bool given = t < there && at < features;
                        q[j][t] = given ? phi[0] : 0.0f;
                        k[j][t] = given ? phi[features] : 0.0f;
                    }
                }
#pragma unroll
                for (int j = 0; j < VALUES; j++) {
                    // A thread's columns are side by side.
                    const unsigned at = helper + j * SCAN_HELPERS, t = at / COLUMNS, i = at % COLUMNS;
                    const unsigned column = start + i / (2 * C) * (2 * C) + i % C * 2 + i / C % 2;
                    const float *from = of.qkv + (first + t) * 3 * inner + 2 * inner + head * d + column;
                    v[j] = t < there && column < d ? from[0] : 0.0f;
                }
            }
            if (now < stages) {
                for (unsigned at = helper; at < T * 16; at += SCAN_HELPERS) {
                    const unsigned t = at / 16;
                    float queries[R], own_z[R], denominator = 0.0f;
                    Places<R>::load(queries, room.q[odd][t], ty);
                    Places<R>::load(own_z, room.z[odd][t], ty);
#pragma unroll
                    for (int r = 0; r < R; r++) denominator = fmaf(queries[r], own_z[r], denominator);
                    denominator = lane_sum(denominator, 16);
                    if (ty == 0 && t < tokens(now))
                        room.scale[odd][t] = scale_of(of, denominator, room.c[odd][t], blockIdx.z == 0);
                }
            }
            if (before < stages) {
                for (unsigned at = helper; at < T * COLUMNS; at += SCAN_HELPERS) {
                    const unsigned t = at / COLUMNS, column = at % COLUMNS;
                    if (t >= tokens(before) || start + column >= d || column >= mains / 16 * C) continue;
                    float parts[16];
#pragma unroll
                    for (unsigned g = 0; g < 4; g++) {
                        const auto *groups = reinterpret_cast<const Pieces<float, 4> *>(room.parts[!odd][t][column]);
                        const Pieces<float, 4> numbers = groups[group(column, g)];
#pragma unroll
                        for (int i = 0; i < 4; i++) parts[4 * g + i] = numbers.pairs[i];
                    }
                    // In the pairs of `lane_sum`.
#pragma unroll
                    for (int step = 1; step < 16; step *= 2)
#pragma unroll
                        for (int i = 0; i < 16; i += 2 * step) parts[i] += parts[i + step];
                    const size_t to = (token + before * T + t) * of.out_stride + head * d + start + column;
                    store_as(of.out, to, of.out_kind, parts[0] * room.scale[!odd][t]);
                }
            }
            // Stage n, by two warps.
            if (n < stages && helper < tokens(n)) {
                Gate &gate = room.gates[n % 3][helper];
                open_gate(of, token + n * T + helper, head, gate.keep, gate.take);
            }
            if (n < stages && helper - 32 < tokens(n))
                room.gates[n % 3][helper - 32].noise =
                    noise_of(of.places[row] + n * T + helper - 32, of.layer * of.heads + head);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < C; i++)
        if (there) s[i * 32] = column_of<S>(state, i);
    if (!main && blockIdx.z == 0) {
        // Blocks of other columns may not have read them yet.
        float *after = of.sums_after ? of.sums_after + static_cast<size_t>(head) * (features + 1) : sums;
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            if (helper + j * SCAN_HELPERS < features) after[helper + j * SCAN_HELPERS] = z[j];
        if (helper == 0) after[features] = c;
    }
}

#define TIDEGATE_RECURRENCE(S, name, R, C, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1) recurrence_##name##_##R##_scan(Recurrence of) {           \
        begin();                                                                                                   \
        scan<S, R, 2, T, 16>(of);                                                                                  \
    }
TIDEGATE_STATES(TIDEGATE_RECURRENCE)
#undef TIDEGATE_RECURRENCE
