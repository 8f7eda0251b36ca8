// Fibers: a stack each, and the switch from one to another. Only emulator.cpp includes this; it schedules them.
//
// A switch is a dozen instructions on x86-64 and aarch64 (a launch makes one for each thread and collective, and
// swapcontext would make a system call in each); elsewhere, or with TIDEGATE_UCONTEXT, it is ucontext.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if !defined(__ELF__) || !(defined(__x86_64__) || defined(__aarch64__))
#define TIDEGATE_UCONTEXT
#endif

#if defined(TIDEGATE_UCONTEXT)
#include <ucontext.h>
#else
// Saves the callee's registers on the stack and the stack pointer in *from, and continues at `to`.
extern "C" void tidegate_fiber_switch(void **from, void *to);
#if defined(__x86_64__)
// By `ret`, not by a jump: all fibers switch in one call, so the processor predicts the return.
__asm__(".text\n"
        ".globl tidegate_fiber_switch\n"
        ".hidden tidegate_fiber_switch\n"
        ".type tidegate_fiber_switch, @function\n"
        "tidegate_fiber_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size tidegate_fiber_switch, . - tidegate_fiber_switch\n");
#else
__asm__(".text\n"
        ".globl tidegate_fiber_switch\n"
        ".hidden tidegate_fiber_switch\n"
        ".type tidegate_fiber_switch, %function\n"
        "tidegate_fiber_switch:\n"
        "  stp x29, x30, [sp, #-160]!\n"
        "  stp x19, x20, [sp, #16]\n  stp x21, x22, [sp, #32]\n  stp x23, x24, [sp, #48]\n"
        "  stp x25, x26, [sp, #64]\n  stp x27, x28, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp, #16]\n  ldp x21, x22, [sp, #32]\n  ldp x23, x24, [sp, #48]\n"
        "  ldp x25, x26, [sp, #64]\n  ldp x27, x28, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
        "  ldp x29, x30, [sp], #160\n"
        "  ret\n"
        ".size tidegate_fiber_switch, . - tidegate_fiber_switch\n");
#endif
#endif

namespace emulator {

// The stack of one fiber, with a guard page below it: a kernel that outgrows its stack crashes at once and does not write
// into its neighbour's.
class Stack {
  public:
    Stack() = default;
    Stack(const Stack &) = delete;
    Stack &operator=(const Stack &) = delete;
    ~Stack() {
        if (base) munmap(base, whole());
    }
    // Maps the stack at its first use. index: the fiber's. Tops a whole number of pages apart would map to the same cache
    // sets, so each of sixteen neighbours begins a little lower.
    void *top(unsigned index) {
        if (!base) {
            void *mapped = mmap(nullptr, whole(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (mapped == MAP_FAILED) throw std::bad_alloc();
            base = static_cast<unsigned char *>(mapped);
            if (mprotect(base, page(), PROT_NONE) != 0) throw std::bad_alloc();
        }
#if defined(__SANITIZE_ADDRESS__)
        // A failed launch abandons its threads, so the sanitizer's state of their stacks must be reset.
        ASAN_UNPOISON_MEMORY_REGION(bottom(), whole() - page());
#endif
        return base + whole() - index % 16 * 256;
    }
    void *bottom() const { return base + page(); }

  private:
    static size_t page() {
        static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        return bytes;
    }
    static size_t whole() { return 2 * page() + 65536; } // the guard, the staggered tops, and the stack
    unsigned char *base = nullptr;
};

// The saved context of a fiber, or of the thread that runs them.
class Context {
  public:
    // Starts at `entry`, which must never return.
    void start(Stack &stack, unsigned index, void (*entry)()) {
#if defined(TIDEGATE_UCONTEXT)
        char *top = static_cast<char *>(stack.top(index));
        getcontext(&at);
        at.uc_stack.ss_sp = stack.bottom();
        at.uc_stack.ss_size = static_cast<size_t>(top - static_cast<char *>(stack.bottom()));
        at.uc_link = nullptr;
        makecontext(&at, entry, 0);
#else
        uintptr_t *top = static_cast<uintptr_t *>(stack.top(index));
#if defined(__x86_64__)
        *--top = 0; // in place of a return address: the stack alignment that a function expects
        *--top = reinterpret_cast<uintptr_t>(entry);
        for (int i = 0; i < 6; i++) *--top = 0;
#else
        for (int i = 0; i < 20; i++) *--top = 0;
        top[1] = reinterpret_cast<uintptr_t>(entry);
#endif
        at = top;
#endif
    }
    // Continues at `to`; returns when another fiber switches back.
    void leave_for(Context &to) {
#if defined(TIDEGATE_UCONTEXT)
        swapcontext(&at, &to.at);
#else
        tidegate_fiber_switch(&at, to.at);
#endif
    }

  private:
#if defined(TIDEGATE_UCONTEXT)
    ucontext_t at;
#else
    void *at = nullptr;
#endif
};

} // namespace emulator
