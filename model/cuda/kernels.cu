// All kernels of a decoder on CUDA, in one piece: what build.rs compiles, and the host's emulator.
#include "choose.cuh"
#include "linear.cuh"
#include "recurrence.cuh"
#include "rows.cuh"
