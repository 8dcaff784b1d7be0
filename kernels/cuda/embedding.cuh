// embedding.cuh: token embedding plus, where there is one, position embedding, and the gradients
// of both tables, on a GPU.
//
// Computes what kernels/cpu/embedding.h defines. Forward: a thread owns a Piece of columns
// (column_sums.cuh) in EMBEDDING_ROWS rows. d_wpe: one block for each position sums over the B
// rows there.
//
// d_wte: many positions may share a row, and atomic additions would not give the same bits
// twice. So the host sorts the positions by token (embedding_order in kernels/cpu/embedding.h),
// which makes the positions of a token a range of that order. Each block sums a segment of
// EMBEDDING_SEGMENT positions of the order. A range inside one segment is added to d_wte at
// once. A range that crosses segments leaves one partial sum in each, and a second kernel adds
// these up in order: many blocks share a frequent token. A segment has at most two partial sums:
// one for the range that it continues from the segment before, and one for the range that begins
// in it and continues in the next.
#pragma once

#include "kernels/cpu/embedding.h"
#include "kernels/cuda/column_sums.cuh"

enum { EMBEDDING_ROWS = 4, EMBEDDING_AHEAD = 4, EMBEDDING_CROSSING_THREADS = 256 };

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP) embedding_forward_kernel(Embedding work) {
    int c = strip_column(WIDTH), first = (int)blockIdx.x * EMBEDDING_ROWS, rows = work.B * work.T;
    size_t C = (size_t)work.channels;
    if (c >= work.channels) { return; }
    Piece<R, WIDTH> words[EMBEDDING_ROWS], positions[EMBEDDING_ROWS];
    UNROLL
    for (int i = 0; i < EMBEDDING_ROWS; i++) {
        if (first + i >= rows) { break; }
        words[i] = piece_load<WIDTH>(reals<R>(work.wte) + (size_t)work.tokens[first + i] * C + c);
        if (work.wpe == NULL) { continue; }
        positions[i] = piece_load<WIDTH>(reals<R>(work.wpe) + (size_t)((first + i) % work.T) * C + c);
    }
    UNROLL
    for (int i = 0; i < EMBEDDING_ROWS; i++) {
        if (first + i >= rows) { break; }
        float word[WIDTH], position[WIDTH];
        if (work.wpe != NULL) {
            piece_unpack(word, words[i]);
            piece_unpack(position, positions[i]);
            UNROLL
            for (int k = 0; k < WIDTH; k++) { word[k] += position[k]; }
            piece_pack(words[i], word);
        }
        piece_store<WIDTH>(reals<R>(work.output) + (size_t)(first + i) * C + c, words[i]);
    }
}

template <typename R> static inline void cuda_embedding_forward(Stream *stream, const Embedding *work) {
    bool packed =
        pack_fits((size_t)work->channels, reals<R>(work->output), reals<R>(work->wte), reals<R>(work->wpe));
    strips_launch(stream, packed ? embedding_forward_kernel<R, PACK<R>> : embedding_forward_kernel<R, 1>,
                  cuda_blocks((size_t)work->B * work->T, EMBEDDING_ROWS), work->channels,
                  packed ? PACK<R> : 1, 0, *work);
}

template <typename R, int WIDTH> DEVICE void piece_add(float sums[WIDTH], const Piece<R, WIDTH> &piece) {
    float values[WIDTH];
    piece_unpack(values, piece);
    UNROLL
    for (int k = 0; k < WIDTH; k++) { sums[k] += values[k]; }
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP) embedding_positions_kernel(Embedding work) {
    int c = strip_column(WIDTH);
    size_t C = (size_t)work.channels, position = blockIdx.x;
    if (c >= work.channels) { return; }
    float sums[WIDTH] = {};
    for (int b = 0; b < work.B; b++) {
        size_t row = (size_t)b * work.T + position;
        piece_add(sums, piece_load<WIDTH>(reals<R>(work.d_output) + row * C + c));
    }
    floats_write<WIDTH, true>(work.d_wpe + position * C + c, sums);
}

// Whether the positions at `place` - 1 and `place` of the order have the same token; false at
// both ends of the order.
DEVICE bool embedding_continues(const Embedding &work, int place) {
    return place > 0 && place < work.B * work.T &&
           work.tokens[work.order[place - 1]] == work.tokens[work.order[place]];
}

// A segment of the order as its block sees it, with tokens and positions in shared memory.
struct EmbeddingSegment {
    const int32_t *tokens, *places; // (count)
    int count;
    bool from_before, ends_later; // its first range began earlier; its last range ends later
    float *partials;              // (2, C)
};

// Adds the sum of the range that ends at index `last` of the segment to its destination,
// and clears it for the next range.
template <int WIDTH>
DEVICE void embedding_range_end(float sums[WIDTH], float *d_wte, const EmbeddingSegment &segment, int last,
                                int c, int C) {
    int32_t token = segment.tokens[last];
    bool continued = segment.from_before && token == segment.tokens[0];
    if (continued) {
        floats_write<WIDTH, false>(segment.partials + c, sums);
    } else if (segment.ends_later && last == segment.count - 1) {
        floats_write<WIDTH, false>(segment.partials + C + c, sums);
    } else {
        floats_write<WIDTH, true>(d_wte + (size_t)token * C + c, sums);
    }
    for (int k = 0; k < WIDTH; k++) { sums[k] = 0.0f; }
}

template <typename R, int WIDTH>
DEVICE void embedding_segment_sum(float *d_wte, const R *d_output, const EmbeddingSegment &segment, int c,
                                  int C) {
    float sums[WIDTH] = {};
    for (int first = 0; first < segment.count; first += EMBEDDING_AHEAD) {
        Piece<R, WIDTH> pieces[EMBEDDING_AHEAD];
        UNROLL
        for (int i = 0; i < EMBEDDING_AHEAD; i++) {
            if (first + i < segment.count) {
                pieces[i] = piece_load<WIDTH>(d_output + (size_t)segment.places[first + i] * C + c);
            }
        }
        UNROLL
        for (int i = 0; i < EMBEDDING_AHEAD; i++) {
            int index = first + i;
            if (index >= segment.count) { break; }
            piece_add(sums, pieces[i]);
            bool ends = index == segment.count - 1 || segment.tokens[index] != segment.tokens[index + 1];
            if (ends) { embedding_range_end<WIDTH>(sums, d_wte, segment, index, c, C); }
        }
    }
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP) embedding_segments_kernel(Embedding work) {
    int32_t *places = (int32_t *)cuda_shared(), *words = places + EMBEDDING_SEGMENT;
    int c = strip_column(WIDTH), begin = (int)blockIdx.x * EMBEDDING_SEGMENT, rows = work.B * work.T,
        C = work.channels;
    EmbeddingSegment segment;
    segment.tokens = words;
    segment.places = places;
    segment.count = rows - begin < EMBEDDING_SEGMENT ? rows - begin : EMBEDDING_SEGMENT;
    segment.from_before = embedding_continues(work, begin);
    segment.ends_later = embedding_continues(work, begin + segment.count);
    segment.partials = work.partials + (size_t)blockIdx.x * 2 * C;
    for (int i = (int)threadIdx.x; i < segment.count; i += (int)blockDim.x) {
        places[i] = work.order[begin + i];
        words[i] = work.tokens[places[i]];
    }
    __syncthreads();
    if (c < C) { embedding_segment_sum<R, WIDTH>(work.d_wte, reals<R>(work.d_output), segment, c, C); }
}

// Finishes the ranges that cross segments. The block of the segment in which such a range
// begins adds all its partial sums; the other blocks return.
static __global__ void __launch_bounds__(EMBEDDING_CROSSING_THREADS)
    embedding_crossing_kernel(Embedding work) {
    int c = strip_column(1), segment = (int)blockIdx.x, begin = segment * EMBEDDING_SEGMENT,
        next = begin + EMBEDDING_SEGMENT;
    size_t C = (size_t)work.channels;
    if (!embedding_continues(work, next)) { return; }
    int32_t token = work.tokens[work.order[next]];
    bool began_earlier = work.tokens[work.order[begin]] == token && embedding_continues(work, begin);
    if (began_earlier) { return; }
    // How many segments from the next one on begin with the token. In the sorted order
    // these come first. Each lane of a warp looks at one segment at a time.
    int others = 0;
    for (int found = WARP; found == WARP; others += found) {
        int other = segment + 1 + others + lane_index();
        bool begins = other < (int)gridDim.x && work.tokens[work.order[other * EMBEDDING_SEGMENT]] == token;
        found = __popc(__ballot_sync(0xffffffffu, begins));
    }
    if (c >= work.channels) { return; }
    const float *sums = work.partials + (size_t)segment * 2 * C + c;
    float sum = sums[C];
    for (int i = 1; i <= others; i++) { sum += sums[(size_t)i * 2 * C]; }
    work.d_wte[(size_t)token * C + c] += sum;
}

template <typename R, int WIDTH>
static inline void embedding_backward_start(Stream *stream, const Embedding *work) {
    int C = work->channels;
    unsigned segments = cuda_blocks((size_t)work->B * work->T, EMBEDDING_SEGMENT);
    if (work->d_wpe != NULL) {
        strips_launch(stream, embedding_positions_kernel<R, WIDTH>, (unsigned)work->T, C, WIDTH, 0, *work);
    }
    if (work->d_wte == NULL) { return; }
    strips_launch(stream, embedding_segments_kernel<R, WIDTH>, segments, C, WIDTH,
                  2 * EMBEDDING_SEGMENT * sizeof(int32_t), *work);
    dim3 crossing(segments, cuda_blocks((size_t)C, EMBEDDING_CROSSING_THREADS));
    cuda_launch(stream, embedding_crossing_kernel, crossing, dim3(EMBEDDING_CROSSING_THREADS), 0, *work);
}

template <typename R> static inline void cuda_embedding_backward(Stream *stream, const Embedding *work) {
    bool packed =
        pack_fits((size_t)work->channels, reals<R>(work->d_output), work->d_wte, work->d_wpe, work->partials);
    (packed ? embedding_backward_start<R, PACK<R>> : embedding_backward_start<R, 1>)(stream, work);
}
