// The kernels as host functions, compiled from the same source as for a GPU, and the list by which a launch finds one by
// name. A kernel that is not listed here cannot be launched by the emulator.
//
// A test with kernels of its own defines KERNELS, and AWAITS, before it includes this file (selftest.cpp).
#include "emulator.h"

#include <utility>

#if !defined(KERNELS)
#include "../kernels.cu"
#define WITH_ROWS(KERNEL, name) KERNEL(name##_8) KERNEL(name##_16) KERNEL(name##_32)                             \
    KERNEL(name##_some) KERNEL(name##_many)
#define WITH_DIMS(KERNEL, name)                                                                                        \
    KERNEL(name##_2_step) KERNEL(name##_4_step) KERNEL(name##_8_step) KERNEL(name##_16_step)                           \
    KERNEL(name##_2_row) KERNEL(name##_4_row) KERNEL(name##_8_row) KERNEL(name##_16_row)                               \
    KERNEL(name##_2_scan) KERNEL(name##_4_scan) KERNEL(name##_8_scan) KERNEL(name##_16_scan)
#define KERNELS(KERNEL)                                                                                                \
    KERNEL(choose) KERNEL(embed) KERNEL(rms_norm) KERNEL(conv_silu) KERNEL(head_norm) KERNEL(rotate)                   \
    KERNEL(features)                                                                                                   \
    WITH_ROWS(KERNEL, linear_bf16) WITH_ROWS(KERNEL, linear_f16) KERNEL(linear_f32_1) KERNEL(linear_f32_4)                                     \
    WITH_DIMS(KERNEL, recurrence_f32) WITH_DIMS(KERNEL, recurrence_bf16)
// Whether each thread of a kernel must call `await_inputs`: without, it would race with the kernel before it on a GPU.
#define AWAITS(name) true
#endif

namespace emulator {
namespace {

template <class... Parameters, size_t... I>
void call_with(void (*kernel)(Parameters...), [[maybe_unused]] void **args, std::index_sequence<I...>) {
    kernel(*static_cast<const std::remove_cv_t<Parameters> *>(args[I])...);
}
template <class... Parameters> void call(void (*kernel)(Parameters...), void **args) {
    call_with(kernel, args, std::index_sequence_for<Parameters...>());
}

#define KERNEL(name) {#name, [](void **args) { call(::name, args); }, AWAITS(name)},
const Kernel LIST[] = {KERNELS(KERNEL){nullptr, nullptr, false}};
#undef KERNEL

} // namespace

const Kernel *find_kernel(const char *name) {
    for (const Kernel *of = LIST; of->name; of++)
        if (std::strcmp(of->name, name) == 0) return of;
    return nullptr;
}

} // namespace emulator
