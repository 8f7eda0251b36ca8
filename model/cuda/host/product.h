// The tensor core's product of a warp's fragments: mma.sync.aligned.m16n8k16.row.col.f32. Only emulator.cpp
// includes this; it collects the operands.
#pragma once
#include "emulator.h"

namespace emulator {

// d += A B of (16, 16) by (16, 8). Of lane 4 g + t the words a.x .. a.w are rows g, g + 8, g, g + 8 of A at columns
// 2 t, 2 t, 2 t + 8, 2 t + 8 and the next; b0, b1 those rows of B at column g; d rows g, g, g + 8, g + 8 at columns 2 t
// and the next in turns. Products of both types are exact in double, so that a fused multiply-add changes no bit.
template <float (*WIDEN)(unsigned short)> void multiply(const Product *const (&lanes)[32]) {
    typedef double Pair __attribute__((vector_size(16)));
    double a[16][16];
    Pair b[16][4], d[16][4];
    const auto low = [](unsigned v) { return static_cast<double>(WIDEN(static_cast<unsigned short>(v))); };
    const auto high = [](unsigned v) { return static_cast<double>(WIDEN(static_cast<unsigned short>(v >> 16))); };
    for (unsigned lane = 0; lane < 32; lane++) {
        const Product &of = *lanes[lane];
        const unsigned g = lane / 4, t = lane % 4;
        const unsigned words[2][2] = {{of.a.x, of.a.y}, {of.a.z, of.a.w}}, column[2] = {of.b0, of.b1};
        for (unsigned half = 0; half < 2; half++) {
            const unsigned k = 2 * t + 8 * half;
            for (unsigned down = 0; down < 2; down++) {
                a[g + 8 * down][k] = low(words[half][down]);
                a[g + 8 * down][k + 1] = high(words[half][down]);
            }
            b[k][g / 2][g % 2] = low(column[half]);
            b[k + 1][g / 2][g % 2] = high(column[half]);
            d[g + 8 * half][t] = Pair{of.d[2 * half], of.d[2 * half + 1]};
        }
    }
    // Two columns per vector, which every host supports; all of a row's in registers.
    for (unsigned row = 0; row < 16; row++) {
        Pair *of = d[row], s0 = of[0], s1 = of[1], s2 = of[2], s3 = of[3];
        for (unsigned k = 0; k < 16; k++) {
            const double v = a[row][k];
            s0 += v * b[k][0];
            s1 += v * b[k][1];
            s2 += v * b[k][2];
            s3 += v * b[k][3];
        }
        of[0] = s0, of[1] = s1, of[2] = s2, of[3] = s3;
    }
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned i = 0; i < 4; i++)
            lanes[lane]->d[i] = static_cast<float>(d[lane / 4 + i / 2 * 8][lane % 4][i % 2]);
}

} // namespace emulator
