// All kernels of a decoder on CUDA, in one unit, which build.rs and the host's emulator compile.
#include "choose.cuh"
#include "linear.cuh"
#include "recurrence.cuh"
#include "scan.cuh"
#include "rows.cuh"
