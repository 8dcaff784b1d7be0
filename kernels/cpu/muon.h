// muon.h: the elementwise parts of a step of Muon (Jordan et al., 2024) on one matrix. The
// products between them, and the formulas of the whole step, are in scheduler/muon.h.
//
//   muon_norm        partials: the sum of squares of  X = (1 - mu) g + mu m',
//                    m' = mu m + (1 - mu) g,  g = gradient / divisor * scale
//   muon_direction   X = the same / max(its norm, 1e-7); a commit stores m'
//   muon_polynomial  P = a I + b A + c P, where P holds A A
//   muon_apply       out = master decay_factor - step X; a commit stores it as master, too, and
//                    casts, if they are wanted, are `out` in bf16
//
// The matrix is (rows, columns), row-major; its elements are (count). gradient, master and out
// are fp32, the momentum m is fp32 or bf16 (rounded at random when it is stored, as AdamW's
// moments are: kernels/moments.h). X, A and P are in the stream's precision. X is computed
// twice, because it is divided by its norm before it is rounded. A task takes BUFFER_BLOCK
// elements; partial sums are added in the order of blocks.
#pragma once

#include "kernels/cpu/adamw.h"
#include "kernels/cpu/buffers.h"

// The quintic polynomial p(x) = a x + b x^3 + c x^5 takes singular values from (0, 1] to about 1.
static const float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;

static const double MUON_LEAST = 1e-7; // a norm below it counts as this

// X before it is divided by its norm, and m'.
REAL_LOOP float muon_element(const StepRange *range, size_t i, float *moved, Precision moments) {
    float g = range->gradient[i] / range->step.divisor * range->step.scale;
    *moved = range->step.beta1 * real_load(range->first_moment, i, moments) + range->step.one_minus_beta1 * g;
    return range->step.one_minus_beta1 * g + range->step.beta1 * *moved;
}

REAL_LOOP void muon_norm_block(const StepRange *range, int block, Precision moments) {
    size_t begin = (size_t)block * BUFFER_BLOCK, end = size_min(begin + BUFFER_BLOCK, range->count);
    double sums[SUM_LANES] = {0};
    LANE_LOOP(i, lane, end - begin, {
        float moved, x = muon_element(range, begin + i, &moved, moments);
        sums[lane] += (double)x * (double)x;
    });
    range->partials[block] = lanes_sum_doubles(sums);
}

REAL_KERNEL(cpu_muon_norm, StepRange, moments, muon_norm_block, (int)buffer_blocks(work->count))

REAL_LOOP void muon_direction_elements(const StepRange *range, int block, Precision precision,
                                       Precision moments) {
    size_t begin = (size_t)block * BUFFER_BLOCK, end = size_min(begin + BUFFER_BLOCK, range->count);
    for (size_t i = begin; i < end; i++) {
        float moved, x = muon_element(range, i, &moved, moments);
        real_store(range->direction, i, x * range->factor, precision);
        if (range->keeps) {
            bool rounds = moments == PRECISION_BF16;
            moved = rounds ? moment_round(moved, moment_noise(range->key, range->flat + i)) : moved;
            real_store(range->first_moment, i, moved, moments);
        }
    }
}

REAL_LOOP void muon_direction_block(const StepRange *range, int block, Precision precision) {
    REAL_CALL(range->moments, muon_direction_elements, range, block, precision);
}

REAL_KERNEL(muon_direction_blocks, StepRange, precision, muon_direction_block,
            (int)buffer_blocks(work->count))

static inline void cpu_muon_direction(Stream *stream, const StepRange *range) {
    double sum = 0;
    for (size_t i = 0; i < buffer_blocks(range->count); i++) { sum += range->partials[i]; }
    StepRange here = *range;
    here.factor = (float)(1 / fmax(sqrt(sum), MUON_LEAST));
    muon_direction_blocks(stream, &here);
}

typedef struct MuonPolynomial {
    Real *polynomial;   // (count, side, side): A A, then P
    const Real *square; // (count, side, side): A
    int side, count;
    Precision precision;
} MuonPolynomial;

REAL_LOOP void muon_polynomial_row(const MuonPolynomial *work, int row, Precision precision) {
    size_t begin = (size_t)row * work->side;
    for (size_t i = begin; i < begin + (size_t)work->side; i++) {
        float value = MUON_B * real_load(work->square, i, precision) +
                      MUON_C * real_load(work->polynomial, i, precision);
        bool diagonal = i - begin == (size_t)(row % work->side);
        real_store(work->polynomial, i, diagonal ? MUON_A + value : value, precision);
    }
}

REAL_KERNEL(muon_polynomial_rows, MuonPolynomial, precision, muon_polynomial_row, work->count * work->side)

static inline void cpu_muon_polynomial(Stream *stream, Real *polynomial, const Real *square, int side,
                                       int count) {
    MuonPolynomial work = {polynomial, square, side, count, stream->precision};
    muon_polynomial_rows(stream, &work);
}

REAL_LOOP void muon_apply_block(const StepRange *range, int block, Precision precision) {
    size_t begin = (size_t)block * BUFFER_BLOCK, end = size_min(begin + BUFFER_BLOCK, range->count);
#pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float theta = range->master[i] * range->step.decay_factor -
                      range->step.learning_rate * real_load(range->direction, i, precision);
        if (range->keeps) { range->master[i] = theta; }
        range->out[i] = theta;
    }
    step_cast(range, begin, end);
}

REAL_KERNEL(cpu_muon_apply, StepRange, precision, muon_apply_block, (int)buffer_blocks(work->count))
