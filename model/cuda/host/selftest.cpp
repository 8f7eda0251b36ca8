// Tests of the emulator on small kernels: correct ones give correct numbers, and mistakes (a missing wait, a divergent
// barrier, a write past an array) show. The decoder's kernels are tested elsewhere.
//
//   g++ -std=c++17 -O2 -fno-strict-aliasing -Wno-unknown-pragmas -pthread selftest.cpp emulator.cpp -o t && ./t
//
// With an argument it also measures a switch and a product. TIDEGATE_EMULATOR_GREEDY=1 tests that order of threads.
#include "emulator.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

struct Scaled {
    const float *x;
    float *y;
    unsigned count;
};

// Sums of blocks of any shape: first in a warp, then over the warps.
extern "C" __global__ void __launch_bounds__(1024) block_sum(Scaled of, float scale, unsigned long long *sums) {
    SHARED(float, parts, 32);
    const unsigned rank = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    float v = block * threads + rank < of.count ? of.x[block * threads + rank] * scale : 0.0f;
    for (int step = 1; step < warpSize; step *= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    if (rank % 32 == 0) parts[rank / 32] = v;
    __syncthreads();
    if (rank == 0) {
        float sum = 0.0f;
        for (unsigned warp = 0; warp < threads / 32; warp++) sum += parts[warp];
        of.y[block] = sum;
        atomicAdd(sums, static_cast<unsigned long long>(sum));
    }
}

// Reverses each block's threads through dynamic shared memory; the last lane of each warp broadcasts its number.
extern "C" __global__ void turn(const unsigned *from, unsigned *to, unsigned *last) {
    DYNAMIC_SHARED(memory);
    unsigned *numbers = reinterpret_cast<unsigned *>(memory);
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    numbers[threadIdx.x] = from[at];
    __syncthreads();
    to[at] = numbers[blockDim.x - 1 - threadIdx.x];
    last[at] = __shfl_sync(0xffffffffu, threadIdx.x, 31);
}

template <bool BF16>
__device__ __forceinline__ void product(const unsigned short *a, const unsigned short *b, float *d) {
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto two = [](const unsigned short *at) { return at[0] | static_cast<unsigned>(at[1]) << 16; };
    float sums[4] = {d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1], d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1]};
#pragma unroll
    for (unsigned k = 0; k < 32; k += 16) {
        const unsigned short *at = a + k + 2 * t, *column = b + g * 32 + k + 2 * t;
        const uint4 rows = make_uint4(two(at + g * 32), two(at + (g + 8) * 32), two(at + g * 32 + 8),
                                      two(at + (g + 8) * 32 + 8));
        if (BF16) mma_bf16(sums, rows, two(column), two(column + 8));
        else mma_f16(sums, rows, two(column), two(column + 8));
    }
    for (unsigned i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}
// d (16, 8) += a (16, 32) times b, of which the 8 columns lie one after the other
extern "C" __global__ void product_bf16(const unsigned short *a, const unsigned short *b, float *d) {
    product<true>(a, b, d);
}
extern "C" __global__ void product_f16(const unsigned short *a, const unsigned short *b, float *d) {
    product<false>(a, b, d);
}

// Two groups of copies; waits for `wait` of them before it reads all.
extern "C" __global__ void copies(const float4 *from, float4 *to, int wait) {
    SHARED(float4, stages, 64);
    stages[threadIdx.x] = stages[threadIdx.x + 32] = make_float4(0, 0, 0, 0);
    for (int group = 0; group < 2; group++) {
        cp_async16(true, &stages[group * 32 + threadIdx.x], from + group * 32 + threadIdx.x);
        cp_async_commit();
    }
    if (wait == 1) cp_async_wait<1>();
    if (wait == 2) cp_async_wait<0>();
    for (int group = 0; group < 2; group++) to[group * 32 + threadIdx.x] = stages[group * 32 + threadIdx.x];
}

extern "C" __global__ void barrier_for_half() {
    if (threadIdx.x < blockDim.x / 2) __syncthreads();
}
extern "C" __global__ void two_barriers() {
    if (threadIdx.x % 2) __syncthreads();
    else __syncthreads();
}
extern "C" __global__ void shuffle_of_some(float *to) {
    if (threadIdx.x != 3) to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
// Halves of a warp apart; the second asks for a lane of the first.
extern "C" __global__ void shuffle_of_halves(unsigned *to) {
    if (threadIdx.x < 16) to[threadIdx.x] = __shfl_xor_sync(0xffffu, threadIdx.x, 1);
    else to[threadIdx.x] = __shfl_sync(0xffff0000u, threadIdx.x, threadIdx.x == 16 ? 0 : 31);
    __syncwarp();
}
extern "C" __global__ void past_the_end() {
    SHARED(float, few, 8);
    few[threadIdx.x] = 0.0f;
}
extern "C" __global__ void read_unwritten(unsigned *to) {
    SHARED(unsigned, one, 1);
    to[blockIdx.x] = one[0];
    one[0] = 0;
}
extern "C" __global__ void misaligned(const char *from, uint4 *to) {
    *to = load_stream(reinterpret_cast<const uint4 *>(from + 4));
}
// The last block and thread to run leave their numbers, so the result depends on the order.
extern "C" __global__ void by_order(unsigned *to) {
    to[0] = blockIdx.x;
    to[1] = threadIdx.x;
}
// Who runs when: warps that hand a number on among their lanes, and write theirs each time.
extern "C" __global__ void by_turns(unsigned *count, unsigned *to) {
    for (unsigned i = 0; i < 4; i++) {
        __shfl_sync(0xffffffffu, i, 0);
        if (threadIdx.x % 32 == 0) to[atomicAdd(count, 1u)] = threadIdx.x / 32;
    }
}
extern "C" __global__ void many_switches(unsigned count) {
    for (unsigned i = 0; i < count; i++) __syncthreads();
}
extern "C" __global__ void many_products(unsigned count, float *to) {
    float d[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i < count; i++) mma_bf16(d, make_uint4(i, i, i, i), i, i);
    to[threadIdx.x] = d[0];
}

extern "C" __global__ void inputs(unsigned awaiting) {
    if (threadIdx.x < awaiting) await_inputs();
}

#define AWAITS(name) (std::strcmp(#name, "inputs") == 0)
#define KERNELS(KERNEL)                                                                                                \
    KERNEL(block_sum) KERNEL(turn) KERNEL(product_bf16) KERNEL(product_f16) KERNEL(copies) KERNEL(barrier_for_half)    \
    KERNEL(two_barriers) KERNEL(shuffle_of_some) KERNEL(shuffle_of_halves) KERNEL(past_the_end)                        \
    KERNEL(read_unwritten) KERNEL(misaligned) KERNEL(by_order) KERNEL(by_turns) KERNEL(many_switches)                       \
    KERNEL(many_products) KERNEL(inputs)
#include "registry.cpp"

extern "C" int tidegate_emulate(const char *kernel, const unsigned grid[3], const unsigned block[3],
                                unsigned shared_bytes, void **args, char *error, unsigned error_len);
extern "C" void tidegate_emulate_reversed(int);

static void expect(bool holds, const std::string &what) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

// The error of a launch, or empty.
template <class... Args>
static std::string launch(const char *kernel, dim3 grid, dim3 block, unsigned shared, Args... args) {
    const unsigned blocks[3] = {grid.x, grid.y, grid.z}, threads[3] = {block.x, block.y, block.z};
    void *pointers[] = {static_cast<void *>(&args)..., nullptr};
    char error[512];
    const int code = tidegate_emulate(kernel, blocks, threads, shared, pointers, error, sizeof error);
    expect((code == 0) == (error[0] == 0), std::string("code and words disagree: ") + error);
    return error;
}

static void right(const std::string &error) { expect(error.empty(), error); }
static void wrong(const std::string &error, const char *words) {
    expect(error.find(words) != std::string::npos, "'" + error + "' is without '" + words + "'");
}

static void test_sums() {
    for (const dim3 block : {dim3(32), dim3(1024), dim3(64, 2, 3), dim3(8, 4, 4)}) {
        const unsigned threads = block.x * block.y * block.z;
        const dim3 grid(3, 2, 2);
        std::vector<float> x(12 * threads - 5), y(12);
        for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i % 7);
        unsigned long long total = 0;
        const Scaled of = {x.data(), y.data(), static_cast<unsigned>(x.size())};
        right(launch("block_sum", grid, block, 0, of, 2.0f, &total));
        unsigned long long all = 0;
        for (unsigned b = 0; b < 12; b++) {
            float sum = 0;
            for (unsigned i = b * threads; i < (b + 1) * threads && i < x.size(); i++) sum += 2 * x[i];
            expect(y[b] == sum, "sum of a block");
            all += static_cast<unsigned long long>(sum);
        }
        expect(total == all, "atomic sum of the blocks");
    }
}

static void test_turn() {
    std::vector<unsigned> from(2048), to(2048), last(2048);
    for (unsigned i = 0; i < 2048; i++) from[i] = i * i;
    right(launch("turn", 2, 1024, 4096, from.data(), to.data(), last.data()));
    for (unsigned i = 0; i < 2048; i++)
        expect(to[i] == from[i / 1024 * 1024 + 1023 - i % 1024] && last[i] == i % 1024 / 32 * 32 + 31, "turned block");
    wrong(launch("turn", 2, 1024, 4092, from.data(), to.data(), last.data()), "past the end of the shared array");
}

static void test_products() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (const bool bf16 : {true, false}) {
        std::vector<unsigned short> a(16 * 32), b(8 * 32);
        std::vector<float> d(16 * 8);
        for (auto *of : {&a, &b})
            for (auto &v : *of) v = bf16 ? f32_to_bf16(normal(random)) : f32_to_f16(normal(random));
        for (auto &v : d) v = normal(random);
        const std::vector<float> before = d;
        right(launch(bf16 ? "product_bf16" : "product_f16", 1, 32, 0, a.data(), b.data(), d.data()));
        const auto widen = bf16 ? bf16_to_f32 : f16_to_f32;
        for (unsigned row = 0; row < 16; row++)
            for (unsigned column = 0; column < 8; column++) {
                double sum = before[row * 8 + column];
                for (unsigned k = 0; k < 32; k++)
                    sum += static_cast<double>(widen(a[row * 32 + k])) * widen(b[column * 32 + k]);
                expect(std::fabs(sum - d[row * 8 + column]) < 1e-5, "product");
            }
        wrong(launch(bf16 ? "product_bf16" : "product_f16", 1, 16, 0, a.data(), b.data(), d.data()), "a whole warp");
    }
}

static void test_copies() {
    std::vector<float4> from(64, make_float4(1, 2, 3, 4)), to(64);
    for (int wait = 0; wait <= 2; wait++) {
        right(launch("copies", 1, 32, 0, from.data(), to.data(), wait));
        for (int i = 0; i < 64; i++) {
            const float4 v = to[static_cast<size_t>(i)];
            if (i / 32 < wait) expect(v.x == 1 && v.w == 4, "a copy that was waited for");
            else expect(v.x != v.x && v.w != v.w, "poison where no wait was");
        }
    }
}

static void test_errors() {
    wrong(launch("barrier_for_half", 2, 64, 0),
          "kernel barrier_for_half, block (0, 0, 0): not all threads reach a collective: "
          "32 of 64 threads (from thread 0 on) wait at __syncthreads (selftest.cpp:");
    wrong(launch("two_barriers", 1, 64, 0), "different barriers");
    std::vector<float> floats(64);
    wrong(launch("shuffle_of_some", 1, 64, 0, floats.data()), "31 of 64 threads (from thread 0 on) wait at a shuffle");
    wrong(launch("past_the_end", 1, 9, 0), "past the end of the shared array few of 32 bytes");
    right(launch("past_the_end", 1, 8, 0));
    alignas(16) char bytes[32] = {};
    uint4 four = {};
    wrong(launch("misaligned", 1, 1, 0, static_cast<const char *>(bytes), &four), "aligned to 16 (thread (0, 0, 0))");
    wrong(launch("inputs", 1, 40, 0, 39u), "ended without await_inputs");
    right(launch("inputs", 1, 40, 0, 40u));
    wrong(launch("nothing", 1, 1, 0), "kernel nothing: is not in");
    wrong(launch("barrier_for_half", 1, 1025, 0), "1024 threads");
    wrong(launch("barrier_for_half", dim3(1, 65536), 1, 0), "65535");
    wrong(launch("barrier_for_half", 1, 32, 1 << 18), "shared memory");
    std::vector<unsigned> to(32);
    right(launch("read_unwritten", 3, 1, 0, to.data()));
    for (size_t block = 0; block < 3; block++) expect(to[block] == 0xffffffffu, "poison in each block");
    right(launch("shuffle_of_halves", 1, 32, 0, to.data()));
    for (unsigned i = 0; i < 32; i++)
        expect(to[i] == (i < 16 ? i ^ 1 : i == 16 ? 0xffffffffu : 31), "shuffle among some lanes");
}

static void test_order() {
    std::vector<unsigned> to(2);
    for (const int reversed : {0, 1, 0}) {
        tidegate_emulate_reversed(reversed);
        right(launch("by_order", 5, 64, 0, to.data()));
        expect(to[0] == (reversed ? 0 : 4) && to[1] == (reversed ? 0 : 63), "order of blocks and threads");
    }
    tidegate_emulate_reversed(1);
    test_sums();
    test_turn();
    test_products();
    tidegate_emulate_reversed(0);
    std::vector<unsigned> counted(1), turns(8);
    right(launch("by_turns", 1, 64, 0, counted.data(), turns.data()));
    const char *order = std::getenv("TIDEGATE_EMULATOR_GREEDY");
    const bool greedy = order && std::string(order) == "1";
    unsigned changes = 0;
    for (size_t i = 1; i < turns.size(); i++) changes += turns[i] != turns[i - 1];
    expect(counted[0] == 8 && (greedy ? changes == 1 : changes > 1), "a greedy warp ends before the next starts");
}

static void test_numbers() {
    for (unsigned v = 0; v < 0x10000; v++) {
        const auto h = static_cast<unsigned short>(v);
        const int exponent = v >> 10 & 31, part = v & 1023;
        const double size = exponent == 31 ? (part ? NAN : INFINITY)
                            : exponent     ? std::ldexp(1024 + part, exponent - 25)
                                           : std::ldexp(part, -24);
        const float wide = f16_to_f32(h);
        if (size != size) {
            expect(wide != wide && f32_to_f16(wide) == 0x7fff, "NaN of f16");
            continue;
        }
        expect(wide == static_cast<float>(v & 0x8000 ? -size : size) && f32_to_f16(wide) == h, "f16 there and back");
        // Half way between two numbers: the even one. Just beside the middle: the nearer.
        if ((v & 0x7fff) < 0x7c00) {
            const double step = std::ldexp(1, exponent ? exponent - 25 : -24), sign = v & 0x8000 ? -1 : 1;
            const auto half = static_cast<float>(sign * (size + step / 2));
            expect(f32_to_f16(half) == h + (h & 1), "f16 half way");
            expect(f32_to_f16(std::nextafter(half, 0.0f)) == h, "f16 below the half");
            expect(f32_to_f16(std::nextafter(half, half * 2)) == h + 1, "f16 above the half");
        }
        const float back = bf16_to_f32(h);
        expect(f32_to_bf16(back) == (back == back ? h : 0x7fff), "bf16 there and back");
    }
    expect(f32_to_bf16(__uint_as_float(0x3f808000)) == 0x3f80 && f32_to_bf16(__uint_as_float(0x3f818000)) == 0x3f82 &&
               f32_to_bf16(__uint_as_float(0x7f7fffff)) == 0x7f80 && f32_to_f16(1e30f) == 0x7c00 &&
               f32_to_f16(-1e-30f) == 0x8000,
           "roundings");
}

static void measure() {
    const auto seconds = [](auto run) {
        const auto start = std::chrono::steady_clock::now();
        run();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    for (const unsigned threads : {32u, 256u, 1024u}) {
        const double time = seconds([&] { right(launch("many_switches", 1, threads, 0, 10000u)); });
        std::printf("%u threads: %.1f ns a switch\n", threads, time * 1e9 / 10000 / threads);
    }
    std::vector<float> to(1024);
    for (const unsigned threads : {32u, 256u, 1024u}) {
        const double time = seconds([&] { right(launch("many_products", 1, threads, 0, 10000u, to.data())); });
        std::printf("%u threads: %.0f ns a product of a warp\n", threads, time * 1e9 / 10000 / (threads / 32));
    }
    const double time = seconds([&] { right(launch("by_order", 1000, 256, 0, to.data())); });
    std::printf("%.0f ns for each thread of a block that starts and ends\n", time * 1e9 / 256000);
}

int main(int count, char **) {
    test_numbers();
    setenv("TIDEGATE_EMULATOR_REVERSED", "1", 1);
    std::vector<unsigned> to(2);
    right(launch("by_order", 5, 64, 0, to.data()));
    expect(to[0] == 0 && to[1] == 0, "order by the environment");
    tidegate_emulate_reversed(0);
    // Host threads launch at the same time; each has its own machine.
    std::vector<std::thread> both;
    for (int i = 0; i < 2; i++)
        both.emplace_back([] {
            tidegate_emulate_reversed(0);
            for (int again = 0; again < 3; again++) {
                test_sums();
                test_turn();
                test_products();
                test_copies();
                test_errors();
                test_order();
            }
        });
    for (auto &thread : both) thread.join();
    if (count > 1) measure();
    std::puts("ok");
}
