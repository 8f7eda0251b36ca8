// The next token of each row, chosen where its logits are: grammar's mask, ends, biases and penalties, temperature,
// top-k, top-p, min-p, draw, in the order and by the definitions of the CPU's sampler (model/src/sampling).
//
// Weights are whole numbers of 64 bits, so that a sum is the same in whichever order its terms come. Whatever is looked
// for is the candidate with which a sum of weights reaches a goal, in an order of unique keys: first by buckets of near
// keys, then, of those in the bucket, by comparing each with each.
#pragma once
#include "maths.cuh"

#define CHOOSE_THREADS 1024
// Two for each thread.
#define CHOOSE_BUCKETS 2048
// Candidates of a bucket that are compared each with each; more are told apart by further bits of their keys first.
#define CHOOSE_LIST 512
// As in model/src/sampling/exponential.rs: what lies further below the best, in temperatures, is no candidate.
#define CHOOSE_FURTHEST 41.58883f
#define CHOOSE_NOBODY 0xffffffffu

typedef unsigned long long Wide;

// How one row's token is chosen; lies as in model/src/sampling/plan.rs. Places are those of 32-bit words after all rows.
struct Choice {
    Wide uniform;                  // of the draw: 53 bits, the highest
    unsigned kind;                 // as Choosing
    unsigned top_k;                // 0 for all
    float inverse, top_p, min_p;   // of the temperature; 1 and 0 for none
    unsigned edits, edit_count;    // token, what is added, what divides or multiplies, what is taken away; by token
    unsigned ends, end_count;      // tokens that must not come if any other can; each once
    unsigned mask;                 // a bit for each token that may come; nobody for all
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

// The sum, or the greatest, over all threads, the same in each.
template <bool GREATEST> __device__ __forceinline__ Wide over_block(Wide v, Wide *totals) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        const Wide other = lane_of(v, lane ^ step);
        v = GREATEST ? (other > v ? other : v) : v + other;
    }
    __syncthreads(); // those of the time before have been read
    if (lane == 0) totals[threadIdx.x / 32] = v;
    __syncthreads();
    v = totals[0];
    for (int i = 1; i < CHOOSE_THREADS / 32; i++) v = GREATEST ? (totals[i] > v ? totals[i] : v) : v + totals[i];
    return v;
}

// The greater the number, the greater; the two zeros are equal. Not of what is no number.
__device__ __forceinline__ unsigned in_order(float v) {
    const unsigned bits = __float_as_uint(v + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A row's tokens, as far as they have been narrowed.
struct Candidates {
    const float *logits;
    unsigned vocab;
    float best, inverse, scale, least;
    Wide by_logit, by_distance; // the last keys that are kept
    unsigned shift;             // tokens of a bucket, where they go by token: 2^shift
};

// What they can be laid out by: likelier first, of equals the lower token; or by token.
enum Order { BY_LOGIT, BY_DISTANCE, BY_TOKEN };

struct Candidate {
    Wide key, weight;
    unsigned bucket; // of two keys, the greater one's is not the lower
};

// Whether a token is a candidate still; by its logit each counts 1.
template <Order ORDER> __device__ __forceinline__ bool candidate(const Candidates &of, unsigned token, Candidate &to) {
    const float logit = of.logits[token], distance = (of.best - logit) * of.inverse;
    if (!(distance <= CHOOSE_FURTHEST)) return false; // nor what is no number
    const Wide by_logit = static_cast<Wide>(~in_order(logit)) << 32 | token;
    const Wide by_distance = static_cast<Wide>(__float_as_uint(distance + 0.0f)) << 32 | token;
    if (by_logit > of.by_logit || by_distance > of.by_distance) return false;
    const float weight = exp_of(-distance);
    if (!(weight >= of.least)) return false;
    to.key = ORDER == BY_LOGIT ? by_logit : ORDER == BY_DISTANCE ? by_distance : token;
    to.weight = ORDER == BY_LOGIT ? 1 : static_cast<Wide>(weight * of.scale);
    // Adding 2^23 leaves no place for a fraction: the whole number is the lowest bits of the sum.
    const float shifted = distance * ((CHOOSE_BUCKETS - 1) / CHOOSE_FURTHEST) + 8388608.0f;
    to.bucket = ORDER == BY_TOKEN ? token >> of.shift : __float_as_uint(shifted) % CHOOSE_BUCKETS;
    return true;
}

__device__ __forceinline__ void clear(const ChooseRoom &room) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < CHOOSE_BUCKETS; i += CHOOSE_THREADS) room.buckets[i] = 0;
    __syncthreads();
}

// Weighs what falls into each bucket -> what all weigh.
template <Order ORDER> __device__ Wide spread(const Candidates &of, const ChooseRoom &room) {
    clear(room);
    Wide own = 0;
    Candidate c;
    for (unsigned token = threadIdx.x; token < of.vocab; token += CHOOSE_THREADS) {
        if (!candidate<ORDER>(of, token, c)) continue;
        atomicAdd(&room.buckets[c.bucket], c.weight);
        own += c.weight;
    }
    return over_block<false>(own, room.totals);
}

// The bucket with which the sum reaches `goal` -> it, and the sum before it. The goal is from 1 to the sum of all.
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

// The candidate with which the sum of weights reaches `goal` -> its key, and the sum up to it. The buckets have to be
// spread in the same order; `spoilt` where they are not any more.
template <Order ORDER>
__device__ Wide reach(const Candidates &of, const ChooseRoom &room, Wide goal, Wide &sum, bool &spoilt) {
    Wide before, known = 0;
    const unsigned bucket = bucket_of(room, goal, before);
    unsigned unknown = 64; // bits of the key
    const auto inside = [&](const Candidate &c) {
        return c.bucket == bucket && (unknown == 64 || c.key >> unknown == known);
    };
    Candidate c;
    unsigned count;
    while (true) {
        __syncthreads();
        if (threadIdx.x == 0) *room.count = 0;
        __syncthreads();
        for (unsigned token = threadIdx.x; token < of.vocab; token += CHOOSE_THREADS) {
            if (!candidate<ORDER>(of, token, c) || !inside(c)) continue;
            const unsigned place = atomicAdd(room.count, 1u);
            if (place < CHOOSE_LIST) room.keys[place] = c.key, room.weights[place] = c.weight;
        }
        __syncthreads();
        count = *room.count;
        if (count <= CHOOSE_LIST) break;
        // Too many: by the next bits of their keys. Keys are unique, so that they end.
        const unsigned bits = unknown < 11 ? unknown : 11, next = unknown - bits;
        spoilt = true;
        clear(room);
        for (unsigned token = threadIdx.x; token < of.vocab; token += CHOOSE_THREADS)
            if (candidate<ORDER>(of, token, c) && inside(c))
                atomicAdd(&room.buckets[(c.key >> next) % (1u << bits)], c.weight);
        __syncthreads();
        Wide inner;
        const unsigned digit = bucket_of(room, goal - before, inner);
        before += inner;
        known = known << bits | digit;
        unknown = next;
    }
    // In no order, but each is compared with all.
    if (threadIdx.x < count) {
        const Wide key = room.keys[threadIdx.x], upto = before + room.weights[threadIdx.x];
        Wide start = 0;
        for (unsigned i = 0; i < count; i++) start += room.keys[i] < key ? room.weights[i] : 0;
        if (before + start < goal && goal <= upto + start) room.found[0] = key, room.found[1] = upto + start;
    }
    __syncthreads();
    sum = room.found[1];
    return room.found[0];
}

// The draw among the candidates of a row whose best logit is a finite number.
__device__ unsigned drawn(Candidates &of, const ChooseRoom &room, const Choice &how) {
    Wide total = 0, sum;
    bool spoilt = true;
    if (how.top_k > 0 && how.top_k < of.vocab && spread<BY_LOGIT>(of, room) > how.top_k)
        of.by_logit = reach<BY_LOGIT>(of, room, how.top_k, sum, spoilt);
    if (how.top_p < 1.0f) {
        spoilt = false;
        total = spread<BY_DISTANCE>(of, room);
        const double wanted = static_cast<double>(total) * static_cast<double>(how.top_p);
        Wide goal = static_cast<Wide>(wanted);
        goal += static_cast<double>(goal) < wanted;
        goal = goal < 1 ? 1 : goal > total ? total : goal;
        of.by_distance = reach<BY_DISTANCE>(of, room, goal, total, spoilt);
    }
    if (how.min_p > 0.0f) of.least = how.min_p; // the likeliest one weighs 1
    // A nucleus is laid out for the draw by likelihood, as it was found; all else by token.
    if (how.top_p < 1.0f) {
        if (spoilt || how.min_p > 0.0f) total = spread<BY_DISTANCE>(of, room);
        return static_cast<unsigned>(reach<BY_DISTANCE>(of, room, __umul64hi(how.uniform, total) + 1, sum, spoilt));
    }
    total = spread<BY_TOKEN>(of, room);
    return static_cast<unsigned>(reach<BY_TOKEN>(of, room, __umul64hi(how.uniform, total) + 1, sum, spoilt));
}

// Makes impossible what may not come, and adds biases and penalties; whether any logit was above minus infinity before.
__device__ bool edit(float *logits, unsigned vocab, const Choice &how, const unsigned *words, Wide *totals) {
    const float impossible = __uint_as_float(0xff800000u);
    bool possible = true;
    if (how.mask != CHOOSE_NOBODY) {
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
        // Those that end the text are taken away again: less than none in one thread, but not in all.
        for (unsigned i = threadIdx.x; i < how.end_count; i += CHOOSE_THREADS)
            others -= logits[words[how.ends + i]] > impossible;
        if (over_block<false>(others, totals) > 0)
            for (unsigned i = threadIdx.x; i < how.end_count; i += CHOOSE_THREADS)
                logits[words[how.ends + i]] = impossible;
        __syncthreads();
    }
    // Those of one token lie together, and are done by one thread, one after the other.
    const unsigned *edits = words + how.edits;
    for (unsigned i = threadIdx.x; i < how.edit_count; i += CHOOSE_THREADS) {
        const unsigned token = edits[4 * i];
        if (i > 0 && edits[4 * i - 4] == token) continue;
        float logit = logits[token];
        for (unsigned j = i; j < how.edit_count && edits[4 * j] == token; j++) {
            const float repeat = __uint_as_float(edits[4 * j + 2]);
            logit += __uint_as_float(edits[4 * j + 1]);
            logit = logit > 0.0f ? logit / repeat : logit * repeat;
            logit -= __uint_as_float(edits[4 * j + 3]);
        }
        logits[token] = logit;
    }
    __syncthreads();
    return possible;
}

// logits: (rows, vocab), left changed; choices: (rows), then words -> to: (rows, 2), the token, or nobody where no logit
// is above minus infinity, and whether one was before the mask. scale: 2^n by which a sum of all weights stays below 2^63.
// grid: (rows), 1024 threads. A row that is not to be chosen for is left as it is.
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS)
    choose(float *logits, const Choice *choices, const unsigned *words, unsigned *to, unsigned vocab, float scale,
           unsigned shift) {
    SHARED(Wide, buckets, CHOOSE_BUCKETS);
    SHARED(Wide, keys, CHOOSE_LIST);
    SHARED(Wide, weights, CHOOSE_LIST);
    SHARED(Wide, totals, CHOOSE_THREADS / 32);
    SHARED(Wide, found, 2);
    SHARED(unsigned, count, 1);
    const ChooseRoom room = {buckets, keys, weights, totals, found, count};
    const Choice how = choices[blockIdx.x];
    if (how.kind == CHOOSE_NOT) return;
    float *row = logits + static_cast<size_t>(blockIdx.x) * vocab;
    const bool possible = edit(row, vocab, how, words, totals);
    // The highest, of equals the lowest token.
    const float impossible = __uint_as_float(0xff800000u), infinite = __uint_as_float(0x7f800000u);
    Wide best = 0;
    for (unsigned token = threadIdx.x; token < vocab; token += CHOOSE_THREADS) {
        if (!(row[token] > impossible)) continue;
        const Wide packed = static_cast<Wide>(in_order(row[token])) << 32 | ~token;
        best = packed > best ? packed : best;
    }
    best = over_block<true>(best, totals);
    unsigned token = best == 0 ? CHOOSE_NOBODY : ~static_cast<unsigned>(best);
    // An infinite logit leaves nothing beside it.
    if (how.kind == CHOOSE_DRAW && best != 0 && row[token] < infinite) {
        Candidates of = {row, vocab, row[token], how.inverse, scale, 0.0f, ~0ull, ~0ull, shift};
        token = drawn(of, room, how);
    }
    if (threadIdx.x == 0) to[2 * blockIdx.x] = token, to[2 * blockIdx.x + 1] = possible;
}
