// embedding.cuh: token embedding plus position embedding, and the gradients of both
// tables, on a GPU.
//
// Computes what kernels/cpu/embedding.h defines.
//
// Layout, forward: a thread owns a Piece of columns (column_sums.cuh) in EMBEDDING_ROWS
// rows.
// Layout, d_wpe: one block for each position sums over the B rows there.
// Layout, d_wte: many positions may share a row, and atomic additions would not give the
// same bits twice. So the host sorts the positions by token (embedding_order in
// kernels/cpu/embedding.h), which makes the positions of a token a range of that order. Each
// block sums a segment of EMBEDDING_SEGMENT positions of the order. A range inside one
// segment is added to d_wte at once. A range that crosses segments leaves one partial sum in
// each of them, and a second kernel adds those in order; thus many blocks share a frequent
// token, such as the space in a vocabulary of bytes. A segment has at most two such sums: one
// for the range that it continues from the segment before, and one for the range that begins
// in it and continues in the next.
// Limit: memory.
#ifndef ACCO_KERNELS_CUDA_EMBEDDING_CUH
#define ACCO_KERNELS_CUDA_EMBEDDING_CUH

#include "kernels/cpu/embedding.h"
#include "kernels/cuda/column_sums.cuh"

enum { EMBEDDING_ROWS = 4, EMBEDDING_AHEAD = 4, EMBEDDING_CROSSING_THREADS = 256 };

// ---------------------------------------------------------------------------------------
// Forward

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP)
    embedding_forward_kernel(R *output, const R *wte, const R *wpe, const int32_t *tokens, int rows, int T,
                             int C) {
    int c = strip_column(WIDTH), first = (int)blockIdx.x * EMBEDDING_ROWS;
    if (c >= C) { return; }
    Piece<R, WIDTH> words[EMBEDDING_ROWS], positions[EMBEDDING_ROWS];
    UNROLL
    for (int i = 0; i < EMBEDDING_ROWS; i++) {
        if (first + i >= rows) { break; }
        words[i] = piece_load<WIDTH>(wte + (size_t)tokens[first + i] * (size_t)C + c);
        positions[i] = piece_load<WIDTH>(wpe + (size_t)((first + i) % T) * (size_t)C + c);
    }
    UNROLL
    for (int i = 0; i < EMBEDDING_ROWS; i++) {
        if (first + i >= rows) { break; }
        float word[WIDTH], position[WIDTH];
        piece_unpack(word, words[i]);
        piece_unpack(position, positions[i]);
        UNROLL
        for (int k = 0; k < WIDTH; k++) { word[k] += position[k]; }
        piece_pack(words[i], word);
        piece_store<WIDTH>(output + (size_t)(first + i) * (size_t)C + c, words[i]);
    }
}

template <typename R> static inline void cuda_embedding_forward(Stream *stream, const Embedding *work) {
    R *sums = reals<R>(work->output);
    const R *words = reals<R>(work->wte), *positions = reals<R>(work->wpe);
    int rows = work->B * work->T, C = work->channels;
    bool packed = pack_fits((size_t)C, sums, words, positions);
    strips_launch(stream,
                  packed ? embedding_forward_kernel<R, Pack<R>::COUNT> : embedding_forward_kernel<R, 1>,
                  cuda_blocks((size_t)rows, EMBEDDING_ROWS), C, packed ? (int)Pack<R>::COUNT : 1, 0, sums,
                  words, positions, work->tokens, rows, work->T, C);
}

// ---------------------------------------------------------------------------------------
// Backward

// sums += piece
template <typename R, int WIDTH> DEVICE void piece_add(float sums[WIDTH], const Piece<R, WIDTH> &piece) {
    float values[WIDTH];
    piece_unpack(values, piece);
    UNROLL
    for (int k = 0; k < WIDTH; k++) { sums[k] += values[k]; }
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP)
    embedding_positions_kernel(float *d_wpe, const R *d_output, int B, int T, int C) {
    int c = strip_column(WIDTH), position = (int)blockIdx.x;
    if (c >= C) { return; }
    float sums[WIDTH] = {};
    for (int b = 0; b < B; b++) {
        Piece<R, WIDTH> piece =
            piece_load<WIDTH>(d_output + ((size_t)b * (size_t)T + (size_t)position) * (size_t)C + c);
        piece_add(sums, piece);
    }
    floats_write<WIDTH, true>(d_wpe + (size_t)position * (size_t)C + c, sums);
}

// Whether the positions at `place` - 1 and `place` of the order have the same token; false at
// both ends of the order.
DEVICE bool embedding_continues(const int32_t *tokens, const int32_t *order, int place, int rows) {
    return place > 0 && place < rows && tokens[order[place - 1]] == tokens[order[place]];
}

// A segment of the order as its block sees it, with tokens and positions in shared
// memory.
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
        floats_write<WIDTH, true>(d_wte + (size_t)token * (size_t)C + c, sums);
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
                pieces[i] = piece_load<WIDTH>(d_output + (size_t)segment.places[first + i] * (size_t)C + c);
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
static __global__ void __launch_bounds__(COLUMN_STRIP)
    embedding_segments_kernel(float *d_wte, float *partials, const R *d_output, const int32_t *tokens,
                              const int32_t *order, int rows, int C) {
    int32_t *places = (int32_t *)cuda_shared(), *words = places + EMBEDDING_SEGMENT;
    int c = strip_column(WIDTH), begin = (int)blockIdx.x * EMBEDDING_SEGMENT;
    EmbeddingSegment segment;
    segment.tokens = words;
    segment.places = places;
    segment.count = rows - begin < EMBEDDING_SEGMENT ? rows - begin : EMBEDDING_SEGMENT;
    segment.from_before = embedding_continues(tokens, order, begin, rows);
    segment.ends_later = embedding_continues(tokens, order, begin + segment.count, rows);
    segment.partials = partials + (size_t)blockIdx.x * 2 * (size_t)C;
    for (int i = (int)threadIdx.x; i < segment.count; i += (int)blockDim.x) {
        places[i] = order[begin + i];
        words[i] = tokens[places[i]];
    }
    __syncthreads();
    if (c < C) { embedding_segment_sum<R, WIDTH>(d_wte, d_output, segment, c, C); }
}

// Finishes the ranges that cross segments. The block of the segment in which such a range
// begins adds all its partial sums; the other blocks return.
static __global__ void __launch_bounds__(EMBEDDING_CROSSING_THREADS)
    embedding_crossing_kernel(float *d_wte, const float *partials, const int32_t *tokens,
                              const int32_t *order, int rows, int C) {
    int c = strip_column(1), segment = (int)blockIdx.x, begin = segment * EMBEDDING_SEGMENT,
        next = begin + EMBEDDING_SEGMENT;
    if (!embedding_continues(tokens, order, next, rows)) { return; }
    int32_t token = tokens[order[next]];
    bool began_earlier = tokens[order[begin]] == token && embedding_continues(tokens, order, begin, rows);
    if (began_earlier) { return; }
    // How many segments from the next one on begin with the token. In the sorted order
    // these come first. Each lane of a warp looks at one segment at a time.
    int others = 0;
    for (int found = WARP; found == WARP; others += found) {
        int other = segment + 1 + others + lane_index();
        bool begins = other < (int)gridDim.x && tokens[order[other * EMBEDDING_SEGMENT]] == token;
        found = __popc(__ballot_sync(0xffffffffu, begins));
    }
    if (c >= C) { return; }
    const float *sums = partials + (size_t)segment * 2 * (size_t)C + c;
    float sum = sums[C];
    for (int i = 1; i <= others; i++) { sum += sums[(size_t)i * 2 * (size_t)C]; }
    d_wte[(size_t)token * (size_t)C + c] += sum;
}

template <typename R, int WIDTH>
static inline void embedding_backward_start(Stream *stream, const Embedding *work) {
    const R *d_output = reals<R>(work->d_output);
    int T = work->T, C = work->channels, rows = work->B * T;
    unsigned segments = cuda_blocks((size_t)rows, EMBEDDING_SEGMENT);
    if (work->d_wpe != NULL) {
        strips_launch(stream, embedding_positions_kernel<R, WIDTH>, (unsigned)T, C, WIDTH, 0, work->d_wpe,
                      d_output, work->B, T, C);
    }
    if (work->d_wte == NULL) { return; }
    strips_launch(stream, embedding_segments_kernel<R, WIDTH>, segments, C, WIDTH,
                  2 * EMBEDDING_SEGMENT * sizeof(int32_t), work->d_wte, work->partials, d_output,
                  work->tokens, work->order, rows, C);
    dim3 crossing(segments, cuda_blocks((size_t)C, EMBEDDING_CROSSING_THREADS));
    cuda_launch(stream, embedding_crossing_kernel, crossing, dim3(EMBEDDING_CROSSING_THREADS), 0, work->d_wte,
                work->partials, work->tokens, work->order, rows, C);
}

template <typename R> static inline void cuda_embedding_backward(Stream *stream, const Embedding *work) {
    bool packed =
        pack_fits((size_t)work->channels, reals<R>(work->d_output), work->d_wte, work->d_wpe, work->partials);
    (packed ? embedding_backward_start<R, Pack<R>::COUNT> : embedding_backward_start<R, 1>)(stream, work);
}

#endif
