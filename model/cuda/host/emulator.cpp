// Runs a launch on the CPU: block after block. The threads of a block are fibers, which switch at the collectives.
// emulator.h declares what kernels call; the switch is in fiber.h, mma in product.h.
//
// A fiber runs until it must wait. The last one to arrive at a collective does its work, makes the others ready and
// continues. If all wait and none is ready, the threads have diverged: an error says which wait where.
//
// TIDEGATE_EMULATOR_REVERSED=1, or tidegate_emulate_reversed, runs blocks and threads from the last to the first:
// results that change relied on an order that a GPU does not guarantee. TIDEGATE_EMULATOR_GREEDY=1 runs a warp as long as
// it can, which shows missing barriers between a read by one warp and a write by another.
#include "emulator.h"

#include "fiber.h"
#include "product.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace emulator {
namespace {

constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned LANES = 32;
// Shared memory of a block on the largest GPU (232448 bytes), and of static arrays on any.
// What a block of compute capability 8.6, 8.9 and 12.0 may have; others more.
constexpr size_t MAX_SHARED = 99 * 1024, MAX_STATIC = 48 * 1024;
// Poison after each array, which shows writes past its end.
constexpr size_t GUARD = 64;
constexpr size_t MAX_ARRAYS = 64;
// Every array is rounded up to 128 bytes.
constexpr size_t ARENA = MAX_SHARED + MAX_ARRAYS * (GUARD + 128);
constexpr unsigned char POISON = 0xff;

struct Copy {
    void *to;
    const void *from;
    unsigned group;
};

struct Fiber {
    Context context;
    uint3 index; // threadIdx
    unsigned rank;
    Wait wait;
    Site site;
    unsigned mask;
    void *operands;
    std::vector<Copy> copies; // pending, the oldest first
    unsigned groups;          // committed so far
    bool awaited;             // whether it has called `await_inputs`
};

// `bytes` from `start` of the arena on, then the guard.
struct Array {
    const void *key;
    const char *name;
    size_t start, bytes;
};

// The state of a launch; one for each host thread, reused for its stacks.
struct Machine {
    Context scheduler;
    std::unique_ptr<Fiber[]> fibers{new Fiber[MAX_THREADS]};
    std::unique_ptr<Stack[]> stacks{new Stack[MAX_THREADS]};
    Fiber *running = nullptr;
    unsigned threads = 0, at_barrier = 0, ended = 0;
    unsigned waiting[MAX_THREADS / LANES]; // of each warp, the lanes that wait for others of it
    unsigned ready[MAX_THREADS], ready_first = 0, ready_count = 0; // a ring of ranks

    alignas(128) unsigned char arena[ARENA];
    std::vector<Array> arrays; // the first is the dynamic one
    size_t used = 0, statics = 0;

    const Kernel *kernel = nullptr;
    void **args = nullptr;
    std::string error;
};

// A plain pointer: each collective reads it, and should not check whether it is initialised.
thread_local Machine *machine = nullptr;

Machine &of_this_thread() {
    static thread_local std::unique_ptr<Machine> own{new Machine}; // apart: it is too large for a thread's own storage
    return *own;
}

bool &reversed() {
    static const char *said = std::getenv("TIDEGATE_EMULATOR_REVERSED");
    static thread_local bool value = said && std::strcmp(said, "1") == 0;
    return value;
}

// Whether a warp runs as long as any of its threads can: one may end before another starts, as on a GPU.
bool greedy() {
    static const char *said = std::getenv("TIDEGATE_EMULATOR_GREEDY");
    return said && std::strcmp(said, "1") == 0;
}

// Leaves the running fiber for the next that is ready, or for the scheduler where none is. One place for all
// switches (see the `ret` in fiber.h), hence never inlined.
__attribute__((noinline)) void next() {
    Machine &m = *machine;
    Context &from = m.running->context, *to = &m.scheduler;
    if (m.ready_count > 0) {
        m.running = &m.fibers[m.ready[m.ready_first]];
        m.ready_first = (m.ready_first + 1) % MAX_THREADS;
        m.ready_count--;
        position.thread = m.running->index;
        to = &m.running->context;
    }
    from.leave_for(*to);
}

// Last in the queue; first if its warp is running and is greedy.
void make_ready(unsigned rank) {
    Machine &m = *machine;
    m.fibers[rank].wait = Wait::nothing;
    const bool first = greedy() && m.running && m.running->rank / LANES == rank / LANES;
    if (first) m.ready_first = (m.ready_first + MAX_THREADS - 1) % MAX_THREADS;
    m.ready[(m.ready_first + (first ? 0 : m.ready_count)) % MAX_THREADS] = rank;
    m.ready_count++;
}

void run_thread() {
    machine->kernel->call(machine->args);
    if (machine->kernel->awaits && !machine->running->awaited) fail("a thread ended without await_inputs");
    machine->running->wait = Wait::ended;
    machine->ended++;
    next();
    std::abort(); // a thread that has ended is never ready
}

const char *name_of(Wait wait) {
    switch (wait) {
    case Wait::block: return "__syncthreads";
    case Wait::warp: return "__syncwarp";
    case Wait::shuffle: return "a shuffle";
    case Wait::product_bf16: return "mma_bf16";
    case Wait::product_f16: return "mma_f16";
    default: return "";
    }
}

bool same(const Site &a, const Site &b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

const char *file_of(const Site &site) {
    const char *slash = std::strrchr(site.file, '/');
    return slash ? slash + 1 : site.file;
}

// Where the threads of the block wait, grouped by place: "31 threads (the first 0) wait at ...".
std::string whereabouts() {
    const Machine &m = *machine;
    std::string all;
    std::vector<bool> told(m.threads);
    for (unsigned first = 0; first < m.threads; first++) {
        if (told[first]) continue;
        const Fiber &of = m.fibers[first];
        const bool waits = of.wait != Wait::nothing && of.wait != Wait::ended;
        unsigned count = 0;
        for (unsigned rank = first; rank < m.threads; rank++) {
            const Fiber &other = m.fibers[rank];
            if (other.wait != of.wait || (waits && !same(other.site, of.site))) continue;
            told[rank] = true;
            count++;
        }
        char line[256];
        if (waits)
            std::snprintf(line, sizeof line, "%s%u of %u threads (from thread %u on) wait at %s (%s:%d)",
                          all.empty() ? "" : ", ", count, m.threads, first, name_of(of.wait), file_of(of.site),
                          of.site.line);
        else
            std::snprintf(line, sizeof line, "%s%u of %u (from thread %u on) %s", all.empty() ? "" : ", ", count,
                          m.threads, first, of.wait == Wait::ended ? "have ended" : "run on");
        all += line;
    }
    return all;
}

// Does the collective of the `lanes` of a warp.
void complete(Wait kind, const Fiber *warp, unsigned lanes) {
    if (kind == Wait::shuffle) {
        for (unsigned lane = 0; lane < LANES; lane++) {
            if (!(lanes >> lane & 1)) continue;
            Shuffle &of = *static_cast<Shuffle *>(warp[lane].operands);
            const bool there = of.lane < LANES && (lanes >> of.lane & 1);
            of.result = there ? static_cast<const Shuffle *>(warp[of.lane].operands)->value : 0xffffffffu;
        }
    } else if (kind != Wait::warp) {
        if (lanes != 0xffffffffu) fail("%s takes a whole warp of 32 threads", name_of(kind));
        const Product *operands[LANES];
        for (unsigned i = 0; i < LANES; i++) operands[i] = static_cast<const Product *>(warp[i].operands);
        kind == Wait::product_bf16 ? multiply<bf16_to_f32>(operands) : multiply<f16_to_f32>(operands);
    }
}

// Poisoned space in the arena with a guard after it, aligned for any type. The caller has checked that there is room.
size_t take(const void *key, const char *name, size_t bytes) {
    Machine &m = *machine;
    const size_t start = (m.used + 127) / 128 * 128;
    m.used = start + bytes + GUARD;
    std::memset(m.arena + start, POISON, bytes + GUARD);
    m.arrays.push_back({key, name, start, bytes});
    return start;
}

// Records the error that ends the launch; the first one counts.
void note(const std::string &what) {
    Machine &m = *machine;
    if (!m.error.empty()) return;
    const uint3 &block = position.block;
    char where[256];
    std::snprintf(where, sizeof where, "kernel %s, block (%u, %u, %u): ", m.kernel->name, block.x, block.y, block.z);
    m.error = where + what;
}

void check_guards() {
    for (const Array &of : machine->arrays)
        for (size_t i = 0; i < GUARD; i++)
            if (machine->arena[of.start + of.bytes + i] != POISON)
                return note(std::string("a thread wrote past the end of the shared array ") + of.name + " of " +
                            std::to_string(of.bytes) + " bytes");
}

void run_block() {
    Machine &m = *machine;
    const dim3 &dim = position.block_dim;
    std::memset(m.arena, POISON, m.used);
    std::memset(m.waiting, 0, sizeof m.waiting);
    m.at_barrier = m.ended = m.ready_first = m.ready_count = 0;
    m.running = nullptr;
    for (unsigned i = 0; i < m.threads; i++) {
        const unsigned rank = reversed() ? m.threads - 1 - i : i;
        Fiber &of = m.fibers[rank];
        of.context.start(m.stacks[rank], rank, run_thread);
        of.index = {rank % dim.x, rank / dim.x % dim.y, rank / dim.x / dim.y};
        of.rank = rank;
        of.copies.clear();
        of.groups = 0;
        of.awaited = false;
        make_ready(rank);
    }
    m.running = &m.fibers[m.ready[0]];
    m.ready_first = 1;
    m.ready_count--;
    position.thread = m.running->index;
    m.scheduler.leave_for(m.running->context);
    if (!m.error.empty()) return; // the other threads stay where they are
    if (m.ended < m.threads) return note("not all threads reach a collective: " + whereabouts());
    check_guards();
}

void run_grid(size_t shared_bytes) {
    Machine &m = *machine;
    const dim3 &grid = position.grid_dim;
    m.arrays.clear();
    m.used = m.statics = 0;
    take(nullptr, "of dynamic size", shared_bytes);
    const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks && m.error.empty(); i++) {
        const uint64_t at = reversed() ? blocks - 1 - i : i;
        position.block = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                          static_cast<unsigned>(at / grid.x / grid.y)};
        run_block();
    }
}

} // namespace

void fail(const char *format, ...) {
    char what[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(what, sizeof what, format, values);
    va_end(values);
    const uint3 &at = position.thread;
    char who[64];
    std::snprintf(who, sizeof who, " (thread (%u, %u, %u))", at.x, at.y, at.z);
    note(std::string(what) + who);
    machine->running->context.leave_for(machine->scheduler);
    std::abort(); // a failed launch makes no thread ready
}

unsigned this_lane() { return machine->running->rank % LANES; }

void meet_block(Site site) {
    Machine &m = *machine;
    m.running->wait = Wait::block;
    m.running->site = site;
    if (++m.at_barrier < m.threads) return next();
    for (unsigned rank = 0; rank < m.threads; rank++)
        if (!same(m.fibers[rank].site, site))
            fail("the threads of a block are at different barriers: %s", whereabouts().c_str());
    m.at_barrier = 0;
    for (unsigned rank = 0; rank < m.threads; rank++)
        if (&m.fibers[rank] != m.running) make_ready(rank);
    m.running->wait = Wait::nothing;
}

void meet_warp(Wait kind, Site site, unsigned mask, void *operands) {
    Machine &m = *machine;
    Fiber &self = *m.running;
    const unsigned lane = self.rank % LANES, first = self.rank - lane, there = m.threads - first;
    unsigned &waiting = m.waiting[first / LANES];
    if (!(mask >> lane & 1)) fail("%s whose mask %#x is without the lane %u that calls", name_of(kind), mask, lane);
    // A block's last warp may be incomplete: only existing lanes of the mask count.
    const unsigned lanes = there < LANES ? mask & ((1u << there) - 1) : mask;
    self.wait = kind;
    self.site = site;
    self.mask = mask;
    self.operands = operands;
    waiting |= 1u << lane;
    if ((waiting & lanes) != lanes) return next();
    for (unsigned other = 0; other < LANES; other++) {
        if (!(lanes >> other & 1)) continue;
        const Fiber &of = m.fibers[first + other];
        if (of.wait != kind || of.mask != mask || !same(of.site, site))
            fail("the threads of a warp meet at different places: %s", whereabouts().c_str());
    }
    complete(kind, &m.fibers[first], lanes);
    waiting &= ~lanes;
    for (unsigned other = 0; other < LANES; other++)
        if ((lanes >> other & 1) && other != lane) make_ready(first + other);
    self.wait = Wait::nothing;
}

void *shared_array(const void *key, const char *name, size_t bytes, size_t alignment) {
    Machine &m = *machine;
    for (const Array &of : m.arrays)
        if (of.key == key) return m.arena + of.start;
    m.statics += (bytes + alignment - 1) / alignment * alignment;
    if (m.statics > MAX_STATIC)
        fail("the static arrays up to %s take %zu bytes, the limit is %zu", name, m.statics, MAX_STATIC);
    if (m.statics + m.arrays[0].bytes > MAX_SHARED || m.arrays.size() == MAX_ARRAYS)
        fail("more shared memory than %zu bytes or %zu arrays", MAX_SHARED, MAX_ARRAYS);
    return m.arena + take(key, name, bytes);
}

unsigned char *dynamic_shared() { return machine->arena + machine->arrays[0].start; }

void copy_later(void *shared, const void *global, Site site) {
    Machine &m = *machine;
    const uintptr_t to = reinterpret_cast<uintptr_t>(shared), start = reinterpret_cast<uintptr_t>(m.arena);
    if (to < start || to + 16 > start + m.used)
        fail("cp_async16 (%s:%d) not into shared memory", file_of(site), site.line);
    if (to % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0)
        fail("cp_async16 (%s:%d) between addresses not aligned to 16", file_of(site), site.line);
    std::memset(shared, POISON, 16);
    m.running->copies.push_back({shared, global, m.running->groups});
}

void copy_commit() { machine->running->groups++; }

void awaited() { machine->running->awaited = true; }

void copy_wait(unsigned groups) {
    Fiber &self = *machine->running;
    size_t made = 0;
    for (; made < self.copies.size() && self.copies[made].group + groups < self.groups; made++)
        std::memcpy(self.copies[made].to, self.copies[made].from, 16);
    self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<std::ptrdiff_t>(made));
}

namespace {

// Launches that a driver would refuse.
std::string refusal(const char *kernel, const unsigned *grid, const unsigned *block, unsigned shared_bytes) {
    const auto threads = static_cast<uint64_t>(block[0]) * block[1] * block[2];
    if (!find_kernel(kernel)) return "is not in host/registry.cpp";
    if (threads == 0 || threads > MAX_THREADS || block[0] > MAX_THREADS || block[1] > MAX_THREADS || block[2] > 64)
        return "blocks are of 1 to 1024 threads";
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
        return "a grid is of 1 to 2147483647, 65535, 65535 blocks";
    if (shared_bytes > MAX_SHARED) return "more shared memory than 101376 bytes";
    return "";
}

} // namespace
} // namespace emulator

// Sets whether launches of this host thread run blocks and threads from the last to the first.
extern "C" void tidegate_emulate_reversed(int reversed) { emulator::reversed() = reversed != 0; }

// Runs a kernel to its end; args are cuLaunchKernel's. 0, or 1 with the reason in `error`.
extern "C" int tidegate_emulate(const char *kernel, const unsigned grid[3], const unsigned block[3],
                                unsigned shared_bytes, void **args, char *error, unsigned error_len) {
    using namespace emulator;
    std::string reason = refusal(kernel, grid, block, shared_bytes);
    if (reason.empty()) {
        machine = &of_this_thread();
        machine->kernel = find_kernel(kernel);
        machine->args = args;
        machine->error.clear();
        machine->threads = block[0] * block[1] * block[2];
        position.block_dim = {block[0], block[1], block[2]};
        position.grid_dim = {grid[0], grid[1], grid[2]};
        run_grid(shared_bytes);
        reason = machine->error;
    } else {
        reason = std::string("kernel ") + kernel + ": " + reason;
    }
    if (error_len > 0) std::snprintf(error, error_len, "%s", reason.c_str());
    return reason.empty() ? 0 : 1;
}
