// Samples the next token of each row on the device: the grammar's mask, ends, biases and penalties, temperature, top-k,
// top-p, min-p, draw, in the order and by the definitions of the CPU's sampler (model/src/sampling).
//
// Weights are 64-bit integers, so that a sum does not depend on the order of its terms. Every search is for the candidate
// at which the sum of weights, in the order of unique keys, reaches a goal. It first finds the bucket of near keys, then
// compares all candidates in the bucket with each other.
#pragma once
#include "maths.cuh"

#define CHOOSE_THREADS 1024
// Two for each thread.
#define CHOOSE_BUCKETS 2048
// Most candidates of a bucket that are compared with each other; more are first split by further bits of their keys.
#define CHOOSE_LIST 512
// As in model/src/sampling/exponential.rs: a token further below the best, in temperatures, is not a candidate.
#define CHOOSE_FURTHEST 41.58883f
#define CHOOSE_NONE 0xffffffffu

typedef unsigned long long Wide;

// How to sample one row; the layout of model/src/sampling/plan.rs. Offsets count 32-bit words after all rows.
struct Choice {
    Wide uniform;                       // the random number of the draw, in the highest 53 bits
    unsigned kind;                      // as Choosing
    unsigned top_k;                     // 0 for all
    float inverse, top_p, min_p;        // 1 / temperature; 1 and 0 for no top_p and min_p
    float repeat;                       // repetition penalty of the tokens in `penalties`
    unsigned biases, bias_count;        // (token, added number); biases of one token are adjacent
    unsigned penalties, penalty_count;  // (token, subtracted number); each token once
    unsigned ends, end_count;           // tokens that are chosen only if no other is possible; each once
    unsigned mask;                      // a bit for each allowed token; CHOOSE_NONE for all
    unsigned nothing;
};
enum Choosing { CHOOSE_NOT = 0, CHOOSE_BEST = 1, CHOOSE_DRAW = 2 };

// Shared memory of a block.
struct ChooseRoom {
    Wide *buckets, *keys, *weights; // (BUCKETS), (LIST), (LIST)
    Wide *totals, *found;           // (32), (2)
    unsigned *count;                // (1)
};

__device__ __forceinline__ Wide lane_of(Wide v, int lane) {
    const unsigned low = __shfl_sync(0xffffffffu, static_cast<unsigned>(v), lane);
    const unsigned high = __shfl_sync(0xffffffffu, static_cast<unsigned>(v >> 32), lane);
    return static_cast<Wide>(high) << 32 | low;
}

// The sum, or the maximum, over all threads; every thread gets it.
template <bool GREATEST> __device__ __forceinline__ Wide over_block(Wide v, Wide *totals) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        const Wide other = lane_of(v, lane ^ step);
        v = GREATEST ? (other > v ? other : v) : v + other;
    }
    __syncthreads(); // earlier totals have been read
    if (lane == 0) totals[threadIdx.x / 32] = v;
    __syncthreads();
    v = totals[0];
#pragma unroll 4
    for (int i = 1; i < CHOOSE_THREADS / 32; i++) v = GREATEST ? (totals[i] > v ? totals[i] : v) : v + totals[i];
    return v;
}

// An integer in the order of the floats; the two zeros are equal. Not for NaN.
__device__ __forceinline__ unsigned in_order(float v) {
    const unsigned bits = __float_as_uint(v + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The remaining candidates of a row; in shared memory.
struct Candidates {
    const float *logits;
    unsigned vocab;
    float best, inverse, scale, least;
    Wide by_logit, by_distance; // the last keys that remain
    unsigned shift;             // by token, a bucket has 2^shift tokens, whole warps
};

// The order of candidates: the likelier first, of equals the lower token; or by token.
enum Order { BY_LOGIT, BY_DISTANCE, BY_TOKEN };

struct Candidate {
    Wide key, weight;
    unsigned bucket; // does not decrease as the key grows
};

#define CHOOSE_ANY CHOOSE_NONE

// Whether a token is still a candidate and in this bucket. By logit each token weighs 1. Buckets by logit are those by
// distance: rounding keeps the order, so the distance never decreases as the logit falls.
__device__ __forceinline__ bool candidate(const Candidates &of, Order order, unsigned token, unsigned bucket,
                                          Candidate &to) {
    if (token >= of.vocab) return false;
    const float logit = of.logits[token], distance = (of.best - logit) * of.inverse;
    if (!(distance <= CHOOSE_FURTHEST)) return false; // false for NaN too
    // Adding 2^23 drops the fraction: the integer is in the lowest bits of the sum.
    const float shifted = distance * ((CHOOSE_BUCKETS - 1) / CHOOSE_FURTHEST) + 8388608.0f;
    to.bucket = order == BY_TOKEN ? token >> of.shift : __float_as_uint(shifted) % CHOOSE_BUCKETS;
    if (bucket != CHOOSE_ANY && bucket != to.bucket) return false;
    const Wide by_logit = static_cast<Wide>(~in_order(logit)) << 32 | token;
    const Wide by_distance = static_cast<Wide>(__float_as_uint(distance + 0.0f)) << 32 | token;
    if (by_logit > of.by_logit || by_distance > of.by_distance) return false;
    const float weight = exp_of(-distance);
    if (!(weight >= of.least)) return false;
    to.key = order == BY_LOGIT ? by_logit : order == BY_DISTANCE ? by_distance : token;
    to.weight = order == BY_LOGIT ? 1 : static_cast<Wide>(weight * of.scale);
    return true;
}

// Adds each lane's weight, which may be 0, to its bucket; all lanes of a warp must call it together. If they share a
// bucket, as they do by token and for equal logits, one lane adds for all: atomics on one address run one by one.
__device__ __forceinline__ void add(Wide *buckets, unsigned bucket, Wide weight) {
    const unsigned first = __shfl_sync(0xffffffffu, bucket, 0);
    if (__all_sync(0xffffffffu, weight == 0 || bucket == first)) {
        for (int step = 1; step < 32; step *= 2) weight += lane_of(weight, static_cast<int>(threadIdx.x % 32) ^ step);
        if (threadIdx.x % 32 == 0 && weight > 0) atomicAdd(&buckets[first], weight);
    } else if (weight > 0) {
        atomicAdd(&buckets[bucket], weight);
    }
}

// Whole warps, so the last lanes may have no token. One token at a time: more would spill registers.
#define CHOOSE_EACH(token, of)                                                                                         \
    _Pragma("unroll 1") for (unsigned token = threadIdx.x; token / 32 * 32 < (of).vocab; token += CHOOSE_THREADS)

// Changes a number in shared memory that all threads read.
template <class T> __device__ __forceinline__ void set(T &number, T to) {
    __syncthreads();
    if (threadIdx.x == 0) number = to;
    __syncthreads();
}

__device__ __forceinline__ void clear(const ChooseRoom &room) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < CHOOSE_BUCKETS; i += CHOOSE_THREADS) room.buckets[i] = 0;
    __syncthreads();
}

// Sums the weights of each bucket -> the sum of all.
__device__ Wide spread(const Candidates &of, Order order, const ChooseRoom &room) {
    clear(room);
    Wide own = 0;
    Candidate c;
    CHOOSE_EACH(token, of) {
        if (!candidate(of, order, token, CHOOSE_ANY, c)) {
            c.bucket = order == BY_TOKEN ? token >> of.shift : 0;
            c.weight = 0;
        }
        add(room.buckets, c.bucket, c.weight);
        own += c.weight;
    }
    return over_block<false>(own, room.totals);
}

// Sets the scale of weights to the greatest at which the sum of all stays below 2^63, so that unlikely tokens do not
// round to 0.
__device__ void weigh_finely(Candidates &of, const ChooseRoom &room) {
    Wide own = 0;
    Candidate c;
    CHOOSE_EACH(token, of)
        if (candidate(of, BY_TOKEN, token, CHOOSE_ANY, c)) own += c.weight;
    // Each weight lost less than 1 by rounding down.
    Wide most = over_block<false>(own, room.totals) + of.vocab;
    float scale = of.scale;
    for (; most < 1ull << 61; most *= 2) scale *= 2.0f;
    set(of.scale, scale);
}

// The bucket at which the sum reaches `goal`, and the sum before it. goal: 1 to the sum of all
__device__ unsigned bucket_of(const ChooseRoom &room, Wide goal, Wide &before) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Wide first = room.buckets[2 * threadIdx.x], own = first + room.buckets[2 * threadIdx.x + 1];
    Wide upto = own;
    for (unsigned step = 1; step < 32; step *= 2) {
        const Wide other = lane_of(upto, static_cast<int>((lane - step) % 32));
        if (lane >= step) upto += other;
    }
    __syncthreads();
    if (lane == 31) room.totals[warp] = upto;
    __syncthreads();
#pragma unroll 2
    for (unsigned i = 0; i < warp; i++) upto += room.totals[i];
    const Wide start = upto - own;
    if (start < goal && goal <= upto) {
        const bool second = goal > start + first;
        room.found[0] = 2 * threadIdx.x + second;
        room.found[1] = second ? start + first : start;
    }
    __syncthreads();
    before = room.found[1];
    return static_cast<unsigned>(room.found[0]);
}

// The key of the candidate at which the sum of weights reaches `goal`. The buckets must be in the same order; the call may
// change them.
__device__ Wide reach(const Candidates &of, Order order, const ChooseRoom &room, Wide goal) {
    Wide before, known = 0;
    const unsigned bucket = bucket_of(room, goal, before);
    unsigned unknown = 64; // bits of the key
    Candidate c;
    const auto inside = [&](unsigned token) {
        return candidate(of, order, token, bucket, c) && (unknown == 64 || c.key >> unknown == known);
    };
    unsigned count;
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) *room.count = 0;
        __syncthreads();
        CHOOSE_EACH(token, of) {
            if (!inside(token)) continue;
            const unsigned place = atomicAdd(room.count, 1u);
            if (place < CHOOSE_LIST) room.keys[place] = c.key, room.weights[place] = c.weight;
        }
        __syncthreads();
        count = *room.count;
        if (count <= CHOOSE_LIST) break;
        // Too many: split by the next bits of the keys. Keys are unique, so this ends.
        const unsigned bits = unknown < 11 ? unknown : 11, next = unknown - bits;
        clear(room);
        CHOOSE_EACH(token, of) {
            const bool is = inside(token);
            add(room.buckets, is ? (c.key >> next) % (1u << bits) : 0, is ? c.weight : 0);
        }
        __syncthreads();
        Wide inner;
        const unsigned digit = bucket_of(room, goal - before, inner);
        before += inner;
        known = known << bits | digit;
        unknown = next;
    }
    // The list has no order, so each is compared with all.
    if (threadIdx.x < count) {
        const Wide key = room.keys[threadIdx.x], upto = before + room.weights[threadIdx.x];
        Wide start = 0;
#pragma unroll 2
        for (unsigned i = 0; i < count; i++) start += room.keys[i] < key ? room.weights[i] : 0;
        if (before + start < goal && goal <= upto + start) room.found[0] = key;
    }
    __syncthreads();
    return room.found[0];
}

// Top-k, top-p, min-p and the draw for a row with a finite best logit. Each stage searches one candidate.
__device__ unsigned draw(Candidates &of, const ChooseRoom &room, const Choice &how) {
    Wide total = 0, key = 0;
    const bool nucleus = how.top_p < 1.0f;
    for (unsigned stage = 0; stage < 3; stage++) {
        if ((stage == 0 && (how.top_k == 0 || how.top_k >= of.vocab)) || (stage == 1 && !nucleus)) continue;
        // The draw goes by likelihood after top-p, as the nucleus was found, else by token.
        const Order order = stage == 0 ? BY_LOGIT : nucleus ? BY_DISTANCE : BY_TOKEN;
        if (stage == 2) set(of.least, how.min_p); // the likeliest token weighs 1
        if (stage == 1 || (stage == 2 && !nucleus)) weigh_finely(of, room);
        total = spread(of, order, room);
        Wide goal = how.top_k;
        if (stage == 1) {
            const double wanted = static_cast<double>(total) * static_cast<double>(how.top_p);
            goal = static_cast<Wide>(wanted);
            goal += static_cast<double>(goal) < wanted;
            goal = goal < 1 ? 1 : goal > total ? total : goal;
        } else if (stage == 2) {
            goal = __umul64hi(how.uniform, total) + 1;
        } else if (goal >= total) {
            continue;
        }
        key = reach(of, order, room, goal);
        if (stage == 0) set(of.by_logit, key);
        if (stage == 1) set(of.by_distance, key);
    }
    return static_cast<unsigned>(key);
}

// Applies mask, ends, biases and penalties to the logits -> whether any logit was above minus infinity before.
__device__ bool edit(float *logits, unsigned vocab, const Choice &how, const unsigned *words, Wide *totals) {
    const float impossible = __uint_as_float(0xff800000u);
    bool possible = true;
    if (how.mask != CHOOSE_NONE) {
        Wide any = 0;
        for (unsigned token = threadIdx.x; token < vocab; token += CHOOSE_THREADS) {
            any |= logits[token] > impossible;
            if (!(words[how.mask + token / 32] >> token % 32 & 1)) logits[token] = impossible;
        }
        possible = over_block<true>(any, totals) > 0;
    }
    if (how.end_count > 0) {
        Wide others = 0;
        for (unsigned token = threadIdx.x; token < vocab; token += CHOOSE_THREADS)
            others += logits[token] > impossible;
        // Subtracts the ends, each once. A thread's count may wrap around below 0; the sum over the block is right.
        for (unsigned i = threadIdx.x; i < how.end_count; i += CHOOSE_THREADS)
            others -= logits[words[how.ends + i]] > impossible;
        if (over_block<false>(others, totals) > 0)
            for (unsigned i = threadIdx.x; i < how.end_count; i += CHOOSE_THREADS)
                logits[words[how.ends + i]] = impossible;
        __syncthreads();
    }
    // One thread applies all biases of one token, in order.
    const unsigned *biases = words + how.biases, *penalties = words + how.penalties;
    for (unsigned i = threadIdx.x; i < how.bias_count; i += CHOOSE_THREADS) {
        const unsigned token = biases[2 * i];
        if (i > 0 && biases[2 * i - 2] == token) continue;
        float logit = logits[token];
        for (unsigned j = i; j < how.bias_count && biases[2 * j] == token; j++)
            logit += __uint_as_float(biases[2 * j + 1]);
        logits[token] = logit;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < how.penalty_count; i += CHOOSE_THREADS) {
        float &logit = logits[penalties[2 * i]];
        logit = logit > 0.0f ? logit / how.repeat : logit * how.repeat;
        logit -= __uint_as_float(penalties[2 * i + 1]);
    }
    __syncthreads();
    return possible;
}

// logits: (rows, vocab), changed in place; choices: (rows), then words -> to: (rows, 2), the token, or CHOOSE_NONE if no
// logit is above minus infinity, and whether one was before the mask. scale: 2^n at which the sum of all weights stays
// below 2^63. grid: (rows), 1024 threads. Rows that return their logits are not changed.
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS, 1)
    choose(float *logits, const Choice *choices, const unsigned *words, unsigned *to, unsigned vocab, float scale,
           unsigned shift) {
    SHARED(Wide, buckets, CHOOSE_BUCKETS);
    SHARED(Wide, keys, CHOOSE_LIST);
    SHARED(Wide, weights, CHOOSE_LIST);
    SHARED(Wide, totals, CHOOSE_THREADS / 32);
    SHARED(Wide, found, 2);
    SHARED(unsigned, count, 1);
    SHARED(Candidates, narrowed, 1);
    const ChooseRoom room = {buckets, keys, weights, totals, found, count};
    begin();
    const Choice &how = choices[blockIdx.x]; // read at each use: a copy would take sixteen registers
    if (how.kind == CHOOSE_NOT) return;
    float *row = logits + static_cast<size_t>(blockIdx.x) * vocab;
    const bool possible = edit(row, vocab, how, words, totals);
    // The highest logit; of equals, the lowest token.
    const float impossible = __uint_as_float(0xff800000u), infinite = __uint_as_float(0x7f800000u);
    Wide best = 0;
    for (unsigned token = threadIdx.x; token < vocab; token += CHOOSE_THREADS) {
        if (!(row[token] > impossible)) continue;
        const Wide packed = static_cast<Wide>(in_order(row[token])) << 32 | ~token;
        best = packed > best ? packed : best;
    }
    best = over_block<true>(best, totals);
    unsigned token = best == 0 ? CHOOSE_NONE : ~static_cast<unsigned>(best);
    // An infinite logit excludes all finite ones.
    if (how.kind == CHOOSE_DRAW && best != 0 && row[token] < infinite) {
        if (threadIdx.x == 0) narrowed[0] = {row, vocab, row[token], how.inverse, scale, 0.0f, ~0ull, ~0ull, shift};
        __syncthreads();
        token = draw(narrowed[0], room, how);
    }
    if (threadIdx.x == 0) to[2 * blockIdx.x] = token, to[2 * blockIdx.x + 1] = possible;
}
