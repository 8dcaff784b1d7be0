// warp.h: what the lanes of a warp do together.
//
// Fragments of matrices are those of the PTX ISA for mma.m16n8k16, as language.cuh says
// them.
#pragma once

#include "test/ptx/memory.h"

// Each lane gets the value of another one. BUTTERFLY: of the one whose number differs in
// the bits of the second operand; otherwise that operand is the number. The third
// operand cuts a warp into segments.
template <bool BUTTERFLY> static void exchange(Warp &warp, const Instruction &instruction, uint32_t mask) {
    u32 values[LANES];
    bool found[LANES];
    for (u32 lane = 0; lane < LANES; lane++) {
        u32 clamp = lane_value<u32>(warp, instruction.in[2], (int)lane), segment = clamp >> 8 & 31;
        u32 chosen = lane_value<u32>(warp, instruction.in[1], (int)lane) & 31;
        u32 from = BUTTERFLY ? lane ^ chosen : (lane & segment) | (chosen & ~segment);
        found[lane] = from <= ((lane & segment) | (clamp & 31 & ~segment));
        if (!found[lane]) { from = lane; }
        if (mask >> lane & 1 && !(mask >> from & 1)) {
            report("a value of a lane that takes no part", text_of("lane %u reads lane %u", lane, from));
        }
        values[lane] = lane_value<u32>(warp, instruction.in[0], (int)from);
    }
    put<u32>(warp, instruction.out[0], values, mask);
    put<bool>(warp, instruction.out[1], found, mask);
}

static void vote_ballot(Warp &warp, const Instruction &instruction, uint32_t mask) {
    u32 votes[LANES];
    std::fill_n(votes, LANES, *lanes_of<u32>(warp, instruction.in[0]) & mask);
    put<u32>(warp, instruction.out[0], votes, mask);
}

static void warp_barrier(Warp &warp, const Instruction &, uint32_t) { warp.epoch++; }

template <bool TRANSPOSED>
static void load_matrices(Warp &warp, const Instruction &instruction, uint32_t mask) {
    u16 matrices[4][8][8] = {};
    for (int lane = 0; lane < LANES; lane++) {
        u32 address = lane_value<u32>(warp, instruction.in[0], lane) + (u32)instruction.offset;
        const char *row = shared_access(warp, lane, address, 16, false);
        if (row != nullptr) { memcpy(matrices[lane / 8][lane % 8], row, 16); }
    }
    for (int k = 0; k < 4; k++) {
        u32 pairs[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            int row = lane / 4, column = lane % 4 * 2;
            u16 low = TRANSPOSED ? matrices[k][column][row] : matrices[k][row][column];
            u16 high = TRANSPOSED ? matrices[k][column + 1][row] : matrices[k][row][column + 1];
            pairs[lane] = (u32)high << 16 | low;
        }
        put<u32>(warp, instruction.out[k], pairs, mask);
    }
}

// d (16, 8) = a (16, 16) b (16, 8) + c (16, 8). Products and sums of bf16 are exact in
// double but for its last bits.
static void multiply_matrices(Warp &warp, const Instruction &instruction, uint32_t mask) {
    double a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < LANES; lane++) {
        int row = lane / 4, column = lane % 4 * 2;
        for (int k = 0; k < 4; k++) {
            u32 pair = lane_value<u32>(warp, instruction.in[k], lane);
            double *place = &a[row + k % 2 * 8][column + k / 2 * 8];
            place[0] = float_of(pair << 16), place[1] = float_of(pair & 0xffff0000u);
            d[row + k / 2 * 8][column + k % 2] = lane_value<float>(warp, instruction.in[6 + k], lane);
        }
        for (int k = 0; k < 2; k++) {
            u32 pair = lane_value<u32>(warp, instruction.in[4 + k], lane);
            b[column + k * 8][row] = float_of(pair << 16),
                           b[column + k * 8 + 1][row] = float_of(pair & 0xffff0000u);
        }
    }
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < 16; k++) {
            for (int j = 0; j < 8; j++) { d[i][j] += a[i][k] * b[k][j]; }
        }
    }
    for (int k = 0; k < 4; k++) {
        float results[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            double exact = d[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2];
            float nearest = (float)exact;
            bool away = fabs((double)nearest) > fabs(exact);
            results[lane] = number(away ? float_of(bits_of(nearest) - 1) : nearest);
        }
        put<float>(warp, instruction.out[k], results, mask);
    }
}

static inline void add_together(Operations &all) {
    all["shfl.sync.bfly.b32"] = {exchange<true>, "4p:4444", OF_MEMBERS};
    all["shfl.sync.idx.b32"] = {exchange<false>, "4p:4444", OF_MEMBERS};
    all["vote.sync.ballot.b32"] = {vote_ballot, "4:p4", OF_MEMBERS};
    all["bar.warp.sync"] = {warp_barrier, ":4", OF_MEMBERS};
    all["bar.sync"] = {nullptr, ":4", BLOCK_BARRIER};
    all["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] = {load_matrices<false>, "4444:4", OF_WARP};
    all["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = {load_matrices<true>, "4444:4", OF_WARP};
    all["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = {multiply_matrices, "4444:4444444444",
                                                                  OF_WARP};
}
