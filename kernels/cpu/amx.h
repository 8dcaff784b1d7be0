// amx.h: products of bf16 matrices in the tile registers of recent Intel processors (AMX).
//
//   result[m][n] = scale sum over k of a_m[k] b_n[k]  [+ result]
//
// a_m is a line of the first operand, a row of the left matrix; b_n is one of the second, a
// column of the right one. So an operand is a set of lines, and either its rows in memory are the
// lines, or its columns are. Sums are fp32. An instruction adds up its 16 even and its 16 odd k,
// and adds both to the sum so far; units of 32 follow each other and are cut nowhere else. So the
// bits of an element do not depend on how a result is cut into tiles.
//
// Why not the library: of the 2,200 GFLOP/s that a core multiplies out of its first-level cache,
// oneDNN reaches 600 to 850 with the products of training at 125M, and this page 800 to 1,100
// (dev/results/amx-2026-11-28.md).
//
// An instruction multiplies 16 lines by 16 lines over a depth of 32: eight registers hold two
// times two blocks of sums, and the four operands that they need. So lines go in panels of 32.
// The right operand's panels are laid out in the workspace as the instruction wants them (pairs
// of k side by side), and stay in the second-level cache while panels of the left one pass by.
// A left operand whose rows are lines is read where it is. Depth is cut at AMX_DEPTH. Sums wait
// in the workspace meanwhile, but for whole blocks of an fp32 result, which are the sums. Where
// such a result is added to, the sums begin with it; elsewhere it is added to them at the end.
// Tiles are cut between blocks, so the bits stay the same.
//
// What limits is how operands reach the second-level cache. So while blocks are multiplied, the
// rows that the next ones need are fetched, and so is the place of their result.
//
// The instructions take denormal numbers for zero, and leave none, also in a result that they add
// to.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "runtime/numbers.h"
#include "runtime/precision.h"

typedef struct AmxOperand {
    const uint16_t *data;     // bf16
    int lines, depth, stride; // stride: elements from one row in memory to the next
    bool rows_are_lines;      // in memory; else columns are
} AmxOperand;

typedef struct AmxResult {
    Real *data; // (lines of a, lines of b)
    int stride;
    Precision precision;
    bool accumulate; // += instead of =
    float scale;
} AmxResult;

enum {
    AMX_PANEL = 32,      // lines
    AMX_UNIT = 32,       // of depth, in one instruction
    AMX_DEPTH = 1024,    // of operands in the workspace, at most
    AMX_ROWS = 2048,     // of a tile of the result, at most
    AMX_COLUMNS = 512,   // the same
    AMX_SUMS = 1 << 18,  // room for sums that are not in the result
    AMX_FETCHES = 8,     // units that make fetching ahead worth its instructions
    AMX_ALIGNMENT = 64,  // of the workspace, in bytes
    AMX_TILES = 2,       // of a result for each thread, at least,
    AMX_LEAST_SIDE = 256 // but no shorter side is cut off for that
};

// What a thread needs while it multiplies.
typedef struct AmxWorkspace {
    uint16_t right[AMX_COLUMNS * AMX_DEPTH]; // panels of b, as amx_lay_out makes them
    uint16_t left[AMX_PANEL * AMX_DEPTH];    // a panel of a
    float sums[AMX_SUMS];                    // ([panels of a,] panels of b, 32, 32), not in the result
} AmxWorkspace;

// Whether there may be several passes, between which sums wait.
static inline bool amx_sums_wait(int depth) { return depth > AMX_DEPTH || depth % AMX_UNIT != 0; }

// Whether the result is nothing but sums. Then whole blocks are computed where they are.
static inline bool amx_is_sum(const AmxResult *result) {
    return result->precision == PRECISION_FP32 && result->scale == 1.0f;
}

// Sides of the tiles into which a result is cut for threads, for which the workspace has room.
// Else nothing depends on them but speed. A left operand that must be laid out, too, is laid out
// for each column of tiles.
static inline void amx_choose_tile(const AmxOperand *a, const AmxOperand *b, const AmxResult *result,
                                   int threads, int *tile_M, int *tile_N) {
    int M = a->lines, N = b->lines, columns = AMX_COLUMNS, rows = AMX_ROWS;
    if (amx_sums_wait(a->depth)) {
        bool in_place = amx_is_sum(result);
        columns = in_place || !a->rows_are_lines ? AMX_COLUMNS : AMX_COLUMNS / 2;
        rows = in_place ? AMX_ROWS / 2 : AMX_SUMS / columns;
    }
    int across = (N + columns - 1) / columns, down = (M + rows - 1) / rows;
    while (threads > 1 && across * down < AMX_TILES * threads) {
        bool by_rows = M / down >= 2 * AMX_LEAST_SIDE;
        if (!by_rows && N / across < 2 * AMX_LEAST_SIDE) { break; }
        *(by_rows ? &down : &across) *= 2;
    }
    *tile_M = ((M + down - 1) / down + AMX_PANEL - 1) / AMX_PANEL * AMX_PANEL;
    *tile_N = ((N + across - 1) / across + AMX_PANEL - 1) / AMX_PANEL * AMX_PANEL;
}

// Not under nvcc, which does not know the instructions of some versions of gcc.
#if defined(__x86_64__) && defined(__linux__) && defined(__has_include) && !defined(__CUDACC__)
#if __has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>)
#define ACCO_HAVE_AMX
#endif
#endif

#ifndef ACCO_HAVE_AMX

static inline bool amx_is_there(void) { return false; }

static inline void amx_multiply(const AmxOperand *a, const AmxOperand *b, const AmxResult *result,
                                AmxWorkspace *workspace) {
    (void)a, (void)b, (void)result, (void)workspace;
}

#else

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// In C++ gcc 12 warns of its own intrinsics, which begin with numbers that nobody has set; clang
// does not know one of the warnings.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

// Compiled for these instructions whatever the rest of the program is compiled for.
#define AMX_FUNCTION static inline __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512bf16")))

// Whether this processor has the instructions, and the system lets this process use them.
static inline bool amx_is_there(void) {
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 }; // of arch_prctl
    const unsigned avx512 = 1u << 16 | 1u << 30, amx = 1u << 22 | 1u << 24, bf16 = 1u << 5;
    unsigned a, b, c, d, more;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & avx512) == avx512 && (d & amx) == amx &&
           __get_cpuid_count(7, 1, &more, &b, &c, &d) && (more & bf16) != 0 &&
           syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

// All eight registers: 16 rows of 64 bytes. Constant, because some versions of gcc believe that
// only its first bytes are read.
AMX_FUNCTION void amx_configure(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } registers = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&registers);
}

// ---- Layouts --------------------------------------------------------------------------

// Blocks are 32 rows of 32 numbers in memory, `stride` apart. Their rows are loaded in quarters, as
// the transposition needs them: loading is cheaper than moving quarters between registers.

// A quarter of each of four rows, `step` elements apart.
AMX_FUNCTION __m512i amx_gather(const uint16_t *from, size_t step) {
    __m512i quarters = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
    quarters = _mm512_inserti32x4(quarters, _mm_loadu_si128((const __m128i *)(from + step)), 1);
    quarters = _mm512_inserti32x4(quarters, _mm_loadu_si128((const __m128i *)(from + 2 * step)), 2);
    return _mm512_inserti32x4(quarters, _mm_loadu_si128((const __m128i *)(from + 3 * step)), 3);
}

AMX_FUNCTION void amx_copy_block(const uint16_t *from, size_t stride, uint16_t *to) {
    for (int i = 0; i < 32; i++) {
        _mm512_store_si512(to + 32 * i, _mm512_loadu_si512(from + (size_t)i * stride));
    }
}

// to (2, 16, 32): for each half of the columns, rows k and k + 1 side by side in pairs.
AMX_FUNCTION void amx_pair_rows(const uint16_t *from, size_t stride, uint16_t *to) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int i = 0; i < 16; i++, from += 2 * stride, to += 32) {
        __m512i row = _mm512_loadu_si512(from), next = _mm512_loadu_si512(from + stride);
        __m512i even = _mm512_unpacklo_epi16(row, next), odd = _mm512_unpackhi_epi16(row, next);
        _mm512_store_si512(to, _mm512_permutex2var_epi64(even, first, odd));
        _mm512_store_si512(to + 512, _mm512_permutex2var_epi64(even, second, odd));
    }
}

// to (2, 16, 32): for each half of the rows, their pairs of columns, transposed.
AMX_FUNCTION void amx_turn_pairs(const uint16_t *from, size_t stride, uint16_t *to) {
    for (int i = 0; i < 8; i++, to += 4 * 32) { // four pairs of 16 rows
        const uint16_t *quarter = from + (size_t)(i / 4) * 16 * stride + i % 4 * 8;
        __m512i rows[4];
        for (int j = 0; j < 4; j++) { rows[j] = amx_gather(quarter + (size_t)j * stride, 4 * stride); }
        __m512i early[2] = {_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1])},
                late[2] = {_mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3])};
        for (int j = 0; j < 2; j++) {
            _mm512_store_si512(to + 64 * j, _mm512_unpacklo_epi64(early[j], late[j]));
            _mm512_store_si512(to + 64 * j + 32, _mm512_unpackhi_epi64(early[j], late[j]));
        }
    }
}

// to (32, 32), transposed.
AMX_FUNCTION void amx_turn(const uint16_t *from, size_t stride, uint16_t *to) {
    for (int i = 0; i < 4; i++, from += 8, to += 8 * 32) { // eight columns of 32 rows
        __m512i low[4], high[4];                           // columns 0 to 3 and 4 to 7 of two rows each
        for (int j = 0; j < 4; j++) {
            __m512i even = amx_gather(from + (size_t)(2 * j) * stride, 8 * stride),
                    odd = amx_gather(from + (size_t)(2 * j + 1) * stride, 8 * stride);
            low[j] = _mm512_unpacklo_epi16(even, odd);
            high[j] = _mm512_unpackhi_epi16(even, odd);
        }
        for (int j = 0; j < 2; j++) { // columns 0 to 3, then 4 to 7
            __m512i *pairs = j == 0 ? low : high;
            __m512i fours[4] = {
                _mm512_unpacklo_epi32(pairs[0], pairs[1]), _mm512_unpackhi_epi32(pairs[0], pairs[1]),
                _mm512_unpacklo_epi32(pairs[2], pairs[3]), _mm512_unpackhi_epi32(pairs[2], pairs[3])};
            for (int k = 0; k < 2; k++) {
                uint16_t *row = to + (4 * j + 2 * k) * 32;
                _mm512_store_si512(row, _mm512_unpacklo_epi64(fours[k], fours[2 + k]));
                _mm512_store_si512(row + 32, _mm512_unpackhi_epi64(fours[k], fours[2 + k]));
            }
        }
    }
}

// panel (depth / AMX_UNIT, 2, 16, 32) <- 32 lines of the operand from `line` on, over `depth` from
// `begin` on, with zeros where it ends. Each block of 16 lines has a row for each line; paired: a
// row for each pair of k, with the 16 lines' numbers side by side.
AMX_FUNCTION void amx_lay_out(const AmxOperand *operand, int line, int begin, int depth, bool paired,
                              uint16_t *panel) {
    uint16_t edge[AMX_PANEL * AMX_UNIT] __attribute__((aligned(AMX_ALIGNMENT)));
    bool by_lines = operand->rows_are_lines;
    for (int k = begin; k < begin + depth; k += AMX_UNIT, panel += AMX_PANEL * AMX_UNIT) {
        size_t stride = (size_t)operand->stride, ahead = 2 * AMX_UNIT * (by_lines ? 1 : stride);
        int row = by_lines ? line : k, column = by_lines ? k : line;
        int rows = (by_lines ? operand->lines : operand->depth) - row,
            columns = (by_lines ? operand->depth : operand->lines) - column;
        const uint16_t *from = operand->data + (size_t)row * stride + column;
        if (rows < 32 || columns < 32) {
            __mmask32 mask = columns < 32 ? (1u << columns) - 1 : 0xFFFFFFFFu;
            for (int i = 0; i < 32; i++) {
                const uint16_t *numbers = from + (size_t)(i < rows ? i : 0) * stride;
                _mm512_store_si512(edge + 32 * i, _mm512_maskz_loadu_epi16(i < rows ? mask : 0, numbers));
            }
            from = edge;
            stride = 32;
        } else if (k < begin + depth - 2 * AMX_UNIT) { // each row may be on another page
            for (int i = 0; i < 32; i++) {
                _mm_prefetch((const char *)(from + (size_t)i * stride + ahead), _MM_HINT_T0);
            }
        }
        if (paired) {
            (by_lines ? amx_turn_pairs : amx_pair_rows)(from, stride, panel);
        } else {
            (by_lines ? amx_copy_block : amx_turn)(from, stride, panel);
        }
    }
}

// ---- Products -------------------------------------------------------------------------

// A panel of the left operand: blocks of 16 rows of 32 numbers.
typedef struct AmxPanel {
    const uint16_t *data;
    size_t row, half, unit; // elements from one row, block of rows or AMX_UNIT to the next
} AmxPanel;

// Memory to be fetched while panels are multiplied: with each unit, some rows of it.
typedef struct AmxAhead {
    const char *data;
    size_t row, unit; // bytes from one row, or unit, to the next
    int rows;         // of each unit; 0: none
} AmxAhead;

// sums (32, 32), rows `stride` apart, = or += the products of 32 lines and 32 lines, `units` of
// AMX_UNIT deep.
AMX_FUNCTION void amx_multiply_panels(const AmxPanel *left, const uint16_t *right, int units, bool adds,
                                      float *sums, int stride, const AmxAhead ahead[2]) {
    const uint16_t *a = left->data;
    const size_t row_bytes = left->row * sizeof *a, half = left->half, unit = left->unit,
                 sum_bytes = (size_t)stride * sizeof *sums;
    const AmxAhead operand = ahead[0], written = ahead[1];
    float *below = sums + 16 * (size_t)stride;
    __asm__ volatile("" : : : "memory"); // gcc does not know that the loads read what was laid out
    if (adds) {
        _tile_loadd(0, sums, sum_bytes);
        _tile_loadd(1, sums + 16, sum_bytes);
        _tile_loadd(2, below, sum_bytes);
        _tile_loadd(3, below + 16, sum_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < units; i++, a += unit, right += AMX_PANEL * AMX_UNIT) {
        _tile_loadd(6, right, 64);
        _tile_loadd(4, a, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        for (int row = 0; row < operand.rows; row++) {
            _mm_prefetch(operand.data + (size_t)i * operand.unit + (size_t)row * operand.row, _MM_HINT_T1);
        }
        _tile_loadd(7, right + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        for (int row = 0; row < written.rows && i * written.rows < AMX_PANEL; row++) {
            _mm_prefetch(written.data + (size_t)i * written.unit + (size_t)row * written.row, _MM_HINT_T1);
        }
        _tile_loadd(5, a + half, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + 16, sum_bytes);
    _tile_stored(2, below, sum_bytes);
    _tile_stored(3, below + 16, sum_bytes);
}

// Up to 32 `columns` of a row of the result at `place`, from sums (32).
AMX_FUNCTION void amx_write(const AmxResult *result, size_t place, int columns, const float *sums) {
    __mmask32 mask = columns >= 32 ? 0xFFFFFFFFu : (1u << columns) - 1;
    __mmask16 first = (__mmask16)mask, second = (__mmask16)(mask >> 16);
    const __m512 scale = _mm512_set1_ps(result->scale);
    __m512 one = _mm512_mul_ps(_mm512_load_ps(sums), scale),
           two = _mm512_mul_ps(_mm512_load_ps(sums + 16), scale);
    if (result->precision == PRECISION_FP32) {
        float *out = (float *)result->data + place;
        if (result->accumulate) {
            one = _mm512_add_ps(one, _mm512_maskz_loadu_ps(first, out));
            two = _mm512_add_ps(two, _mm512_maskz_loadu_ps(second, out + 16));
        }
        _mm512_mask_storeu_ps(out, first, one);
        _mm512_mask_storeu_ps(out + 16, second, two);
        return;
    }
    uint16_t *out = (uint16_t *)result->data + place;
    if (result->accumulate) {
        __m512i old = _mm512_maskz_loadu_epi16(mask, out),
                early = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(old)),
                late = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(old, 1));
        one = _mm512_add_ps(one, _mm512_castsi512_ps(_mm512_slli_epi32(early, 16)));
        two = _mm512_add_ps(two, _mm512_castsi512_ps(_mm512_slli_epi32(late, 16)));
    }
    _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(two, one));
}

// The rows of the result that panel `m` of the left operand gives, from column `first` on.
AMX_FUNCTION void amx_write_panel(const AmxResult *result, int m, int rows, int first, int columns,
                                  const float *sums) {
    for (int row = 0; row < int_min(rows - m, AMX_PANEL); row++) {
        size_t place = (size_t)(m + row) * (size_t)result->stride;
        for (int n = first; n < columns; n += AMX_PANEL) {
            amx_write(result, place + (size_t)n, columns - n, sums + (n - first + row) * AMX_PANEL);
        }
    }
}

// A pass over a part of the depth.
typedef struct AmxPass {
    const AmxOperand *a;
    const AmxResult *result;
    AmxWorkspace *workspace;
    int columns, panels; // of the right operand
    int begin, depth;
    bool is_whole; // the operands have all of the depth; else the rest is zeros
    bool is_last;
} AmxPass;

// Panels of an operand, from line `line` on, one behind the other. Rows in memory are read to
// their end before the next ones, which the hardware foresees.
AMX_FUNCTION void amx_lay_out_panels(const AmxOperand *operand, int line, int panels, const AmxPass *pass,
                                     bool paired, uint16_t *to) {
    int step = operand->rows_are_lines ? pass->depth : AMX_UNIT;
    for (int k = 0; k < pass->depth; k += step) {
        for (int n = 0; n < panels; n++) {
            amx_lay_out(operand, line + n * AMX_PANEL, pass->begin + k, int_min(step, pass->depth - k),
                        paired, to + n * AMX_PANEL * pass->depth + k * AMX_PANEL);
        }
    }
}

// What the next panel of the left operand needs: a share of it, 32 rows in all, with each block.
AMX_FUNCTION AmxAhead amx_next_left(const AmxPass *pass, int m) {
    const AmxOperand *a = pass->a;
    size_t stride = (size_t)a->stride * sizeof *a->data, element = sizeof *a->data;
    int next = m + AMX_PANEL, row = a->rows_are_lines ? next : pass->begin,
        column = a->rows_are_lines ? pass->begin : next;
    AmxAhead ahead = {(const char *)a->data + (size_t)row * stride + (size_t)column * element, stride,
                      AMX_UNIT * (a->rows_are_lines ? element : stride),
                      next < a->lines ? (AMX_PANEL + pass->panels - 1) / pass->panels : 0};
    return ahead;
}

// A block of the result, at (m, 0), with its rows spread over the units. Rows of fp32 have two
// lines of the cache; the second comes with the first.
AMX_FUNCTION AmxAhead amx_next_result(const AmxPass *pass, int m) {
    size_t stride = (size_t)pass->result->stride * precision_bytes(pass->result->precision);
    int units = pass->depth / AMX_UNIT, rows = (AMX_PANEL + units - 1) / units;
    AmxAhead ahead = {(const char *)pass->result->data + (size_t)m * stride, stride, (size_t)rows * stride,
                      rows};
    return ahead;
}

// The pass over panel m of the left operand.
AMX_FUNCTION void amx_multiply_row(const AmxPass *pass, int m) {
    const AmxOperand *a = pass->a;
    const AmxResult *result = pass->result;
    AmxWorkspace *workspace = pass->workspace;
    const int depth = pass->depth, units = depth / AMX_UNIT, panels = pass->panels, rows = a->lines;
    size_t stride = (size_t)a->stride;
    AmxPanel left = {a->data + (size_t)m * stride + pass->begin, stride, 16 * stride, AMX_UNIT};
    if (!a->rows_are_lines || !pass->is_whole || rows - m < AMX_PANEL) {
        AmxPanel laid_out = {workspace->left, AMX_UNIT, 16 * AMX_UNIT, AMX_PANEL * AMX_UNIT};
        amx_lay_out(a, m, pass->begin, depth, false, workspace->left);
        left = laid_out;
    }
    // Blocks of a row that are computed in place: all that are whole, if this row is.
    int whole = amx_is_sum(result) ? pass->columns / AMX_PANEL : 0, direct = rows - m < AMX_PANEL ? 0 : whole;
    bool first = pass->begin == 0;
    float *sums = workspace->sums + (amx_sums_wait(a->depth) ? m * (panels - whole) * AMX_PANEL : 0),
          *out = (float *)result->data + (size_t)m * (size_t)result->stride;
    // Little must happen between two blocks: the processor looks past few of these instructions.
    bool fetches = units >= AMX_FETCHES;
    AmxAhead ahead[2] = {amx_next_left(pass, m), amx_next_result(pass, m)};
    const char *next_row = ahead[1].data + AMX_PANEL * ahead[1].row;
    size_t share = (size_t)ahead[0].rows * ahead[0].row,
           block = AMX_PANEL * precision_bytes(result->precision);
    // A block that is computed in place is read at once, so the next one is fetched.
    if (direct > 0) { ahead[1].data += block; }
    if (!fetches) { ahead[0].rows = 0; }
    if (!fetches || !(direct > 0 ? first : pass->is_last)) { ahead[1].rows = 0; }
    for (int n = 0; n < panels; n++, ahead[0].data += share, ahead[1].data += block) {
        const uint16_t *right = workspace->right + n * AMX_PANEL * depth;
        if (direct > 0 && n == panels - 1) { ahead[1].data = next_row; }
        if (n < direct) {
            amx_multiply_panels(&left, right, units, !first || result->accumulate, out + n * AMX_PANEL,
                                result->stride, ahead);
        } else {
            amx_multiply_panels(&left, right, units, !first, sums + (n - direct) * AMX_PANEL * AMX_PANEL,
                                AMX_PANEL, ahead);
        }
    }
    if (pass->is_last) { amx_write_panel(result, m, rows, direct * AMX_PANEL, pass->columns, sums); }
}

// The result (lines of a, lines of b) on the calling thread, of a size that amx_choose_tile gives.
AMX_FUNCTION void amx_multiply(const AmxOperand *a, const AmxOperand *b, const AmxResult *result,
                               AmxWorkspace *workspace) {
    AmxPass pass = {a, result, workspace, b->lines, (b->lines + AMX_PANEL - 1) / AMX_PANEL,
                    0, 0,      false,     false};
    const int units = a->depth / AMX_UNIT, cuts = (a->depth + AMX_DEPTH - 1) / AMX_DEPTH;
    amx_configure();
    while (!pass.is_last) {
        // What is left of the last AMX_UNIT is a pass of its own, laid out with zeros behind it.
        int left = units - pass.begin / AMX_UNIT;
        pass.is_whole = left > 0;
        pass.depth = AMX_UNIT * (left > 0 ? int_min(left, (units + cuts - 1) / cuts) : 1);
        pass.is_last = pass.begin + pass.depth >= a->depth;
        amx_lay_out_panels(b, 0, pass.panels, &pass, true, workspace->right);
        for (int m = 0; m < a->lines; m += AMX_PANEL) { amx_multiply_row(&pass, m); }
        pass.begin += pass.depth;
    }
    _tile_release();
}

#endif
