// wire.cuh: messages in the formats of the wire, encoded, decoded and added on a GPU. A
// message holds pieces of a vector (WirePieces); one kernel does all of them.
//
// The contract is in kernels/wire.h, and the bits are the same: what one machine encodes
// on its GPU another may decode on its CPU. Only the NaNs that arithmetic on NaNs makes
// (with a base, or in a sum) have the machine's own bits. How one element is converted is
// in kernels/wire.h, for both. With a base, differences to it are encoded and added again.
//
// A warp does one block of the wire. Lane l has eight of its elements: 4l to 4l + 3 of
// the lower part and the same of the upper part, which begins at half of the block. The
// bytes of codes of 4 bits pair them in this way. So in every format a lane reads and writes
// whole words of its own, and each byte is read once and written once. Warps share nothing.
#pragma once

#include "kernels/cuda/language.cuh"

#include "kernels/wire.h"

enum {
    WIRE_WARPS = 8,               // of a block of threads: each does one block of the wire
    WIRE_LANE = WIRE_BLOCK / WARP // elements of a lane
};

// ---- Words of a lane ------------------------------------------------------------------

// words <- place[first] and the next ones, zeros from place[end] on.
template <int COUNT, typename T> DEVICE void wire_load(T words[COUNT], const T *place, int first, int end) {
    const T *mine = place + first;
    if (first + COUNT <= end && (uintptr_t)mine % sizeof(Piece<T, COUNT>) == 0) {
        Piece<T, COUNT> piece = piece_load<COUNT>(mine);
        for (int i = 0; i < COUNT; i++) { words[i] = piece.values[i]; }
        return;
    }
    for (int i = 0; i < COUNT; i++) { words[i] = first + i < end ? mine[i] : T(0); }
}

template <int COUNT, typename T> DEVICE void wire_store(T *place, const T words[COUNT], int first, int end) {
    T *mine = place + first;
    if (first + COUNT <= end && (uintptr_t)mine % sizeof(Piece<T, COUNT>) == 0) {
        Piece<T, COUNT> piece;
        for (int i = 0; i < COUNT; i++) { piece.values[i] = words[i]; }
        if (sizeof piece == sizeof(uint4)) {
            store_16_bytes(mine, &piece);
        } else {
            piece_store<COUNT>(mine, piece);
        }
        return;
    }
    for (int i = 0; i < COUNT; i++) {
        if (first + i < end) { mine[i] = words[i]; }
    }
}

// Where the upper part of a block of n begins.
template <WireFormat FORMAT> DEVICE int wire_half(int n) {
    return FORMAT == WIRE_E3M0 || FORMAT == WIRE_INT4 ? (n + 1) / 2 : WIRE_BLOCK / 2;
}

// The lane's elements of `block` (n); zeros where there are none.
DEVICE void wire_values_load(float values[WIRE_LANE], const float *block, int half, int n) {
    int first = 4 * lane_index();
    wire_load<4>(values, block, first, half < n ? half : n);
    wire_load<4>(values + 4, block, half + first, n);
}

DEVICE void wire_values_store(float *block, const float values[WIRE_LANE], int half, int n) {
    int first = 4 * lane_index();
    wire_store<4>(block, values, first, half < n ? half : n);
    wire_store<4>(block, values + 4, half + first, n);
}

DEVICE void wire_warp_encode_bf16(char *out, const float values[WIRE_LANE], int n) {
    uint32_t words[4], *place = (uint32_t *)out;
    for (int i = 0; i < 4; i++) {
        words[i] = bf16_from_float(values[2 * i]) | (uint32_t)bf16_from_float(values[2 * i + 1]) << 16;
    }
    wire_store<2>(place, words, 2 * lane_index(), (n + 1) / 2);
    wire_store<2>(place, words + 2, WIRE_BLOCK / 4 + 2 * lane_index(), (n + 1) / 2);
}

DEVICE void wire_warp_decode_bf16(float values[WIRE_LANE], const char *in, int n) {
    const uint32_t *place = (const uint32_t *)in;
    uint32_t words[4];
    wire_load<2>(words, place, 2 * lane_index(), (n + 1) / 2);
    wire_load<2>(words + 2, place, WIRE_BLOCK / 4 + 2 * lane_index(), (n + 1) / 2);
    for (int i = 0; i < WIRE_LANE; i++) {
        values[i] = bf16_to_float((uint16_t)(words[i / 2] >> (i % 2 * 16)));
    }
}

// ---- Coarse formats -------------------------------------------------------------------

// The bits of the largest magnitude of so many neighbouring lanes, a NaN's above all, for each of
// them.
DEVICE uint32_t wire_warp_largest(const float values[WIRE_LANE], int lanes) {
    uint32_t largest = 0;
    for (int i = 0; i < WIRE_LANE; i++) {
        uint32_t magnitude = wire_magnitude(values[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
        largest = other > largest ? other : largest;
    }
    return largest;
}

// Words of codes of a lane: codes of int8 lie as the elements do, codes of 4 bits in pairs.
template <WireFormat FORMAT> static constexpr int WIRE_WORDS = FORMAT == WIRE_INT8 ? 2 : 1;

// The place of the code of element i in these words.
template <WireFormat FORMAT> DEVICE int wire_shift(int i) {
    return i % 4 * 8 + (FORMAT == WIRE_INT8 ? 0 : i / 4 * 4);
}

// The lanes whose codes share a scale: 4 bytes of codes of 4 bits are a lane's.
template <WireFormat FORMAT>
static constexpr int WIRE_GROUP_LANES = WARP / (FORMAT == WIRE_INT4 ? WIRE_GROUPS : 1);

template <WireFormat FORMAT>
DEVICE void wire_warp_encode_coarse(char *out, const float values[WIRE_LANE], int n) {
    enum { WORDS = WIRE_WORDS<FORMAT>, LANES = WIRE_GROUP_LANES<FORMAT> };
    uint32_t largest = wire_warp_largest(values, LANES), words[WORDS] = {};
    uint32_t *place = (uint32_t *)(out + wire_scale_bytes(FORMAT));
    float scale = wire_float_from_bits(WIRE_NAN_BITS);
    if (wire_is_finite(largest)) {
        scale = wire_scale(FORMAT, largest);
        for (int i = 0; i < WIRE_LANE; i++) {
            words[i * WORDS / WIRE_LANE] |= (uint32_t)wire_code(FORMAT, scale, values[i])
                                            << wire_shift<FORMAT>(i);
        }
    }
    if (lane_index() % LANES == 0) { wire_store_scale(FORMAT, out, (uint32_t)(lane_index() / LANES), scale); }
    for (int word = 0; word < WORDS; word++) {
        wire_store<1>(place, words + word, word * WARP + lane_index(), (n * WORDS + 7) / 8);
    }
}

// A scale that is a NaN keeps its bits, which arithmetic on a GPU would not.
template <WireFormat FORMAT>
DEVICE void wire_warp_decode_coarse(float values[WIRE_LANE], const char *in, int n) {
    enum { WORDS = WIRE_WORDS<FORMAT> };
    const uint32_t *place = (const uint32_t *)(in + wire_scale_bytes(FORMAT));
    uint32_t words[WORDS];
    float scale = wire_load_scale(FORMAT, in, (uint32_t)(lane_index() / WIRE_GROUP_LANES<FORMAT>));
    for (int word = 0; word < WORDS; word++) {
        wire_load<1>(words + word, place, word * WARP + lane_index(), (n * WORDS + 7) / 8);
    }
    for (int i = 0; i < WIRE_LANE; i++) {
        float level = wire_level(FORMAT, words[i * WORDS / WIRE_LANE] >> wire_shift<FORMAT>(i));
        values[i] = scale == scale ? level * scale : scale;
    }
}

// ---- Blocks ---------------------------------------------------------------------------

// out <- a block of n elements. The lanes of this warp have them in `values`, with zeros
// behind the n-th.
template <WireFormat FORMAT> DEVICE void wire_warp_encode(char *out, const float values[WIRE_LANE], int n) {
    if (FORMAT == WIRE_FP32) { wire_values_store((float *)out, values, wire_half<FORMAT>(n), n); }
    if (FORMAT == WIRE_BF16) { wire_warp_encode_bf16(out, values, n); }
    if constexpr (FORMAT > WIRE_BF16) { wire_warp_encode_coarse<FORMAT>(out, values, n); }
}

template <WireFormat FORMAT> DEVICE void wire_warp_decode(float values[WIRE_LANE], const char *in, int n) {
    if (FORMAT == WIRE_FP32) { wire_values_load(values, (const float *)in, wire_half<FORMAT>(n), n); }
    if (FORMAT == WIRE_BF16) { wire_warp_decode_bf16(values, in, n); }
    if constexpr (FORMAT > WIRE_BF16) { wire_warp_decode_coarse<FORMAT>(values, in, n); }
}

// The block of this warp.
struct WireBlock {
    size_t begin;  // its first element in the vector
    size_t base;   // and in the base
    size_t offset; // of its encoded bytes
    int n;         // its elements; 0: there is no such block
};

// stride: the bytes of an encoded block.
DEVICE WireBlock wire_block_of_warp(const WirePieces &pieces, size_t stride) {
    WireBlock block;
    size_t index = (size_t)blockIdx.x * WIRE_WARPS + warp_index();
    size_t per_piece = (pieces.count + WIRE_BLOCK - 1) / WIRE_BLOCK;
    size_t piece = index / per_piece, inside = index % per_piece * WIRE_BLOCK;
    size_t place = piece / pieces.cells, cell = piece % pieces.cells;
    size_t rest = place < pieces.owner_count ? pieces.count - inside : 0;
    size_t owner = pieces.owners != NULL && rest > 0 ? (size_t)pieces.owners[place] : place;
    block.begin = cell * pieces.cell_stride + owner * pieces.owner_stride + inside;
    block.base = cell * pieces.base_stride + owner * pieces.owner_stride + inside;
    block.offset = place * pieces.owner_bytes + cell * pieces.bytes + inside / WIRE_BLOCK * stride;
    block.n = rest < (size_t)WIRE_BLOCK ? (int)rest : (int)WIRE_BLOCK;
    return block;
}

// Launches a kernel with a warp for each block of the wire. Behind `arguments` it gets the
// pieces and the bytes of an encoded block.
template <typename... Parameters, typename... Arguments>
static inline void wire_launch(Stream *stream, void (*kernel)(Parameters...), WireFormat format,
                               const WirePieces *pieces, Arguments... arguments) {
    size_t blocks = (pieces->count + WIRE_BLOCK - 1) / WIRE_BLOCK * pieces->cells * pieces->owner_count;
    if (blocks == 0) { return; }
    dim3 grid(cuda_blocks(blocks, WIRE_WARPS)), threads(WIRE_WARPS * WARP);
    cuda_launch(stream, kernel, grid, threads, 0, arguments..., *pieces, wire_bytes(format, WIRE_BLOCK));
}

// ---- Messages -------------------------------------------------------------------------

// A kernel for each format, in the order of WireFormat.
#define WIRE_KERNELS(kernel) \
    { kernel<WIRE_FP32>, kernel<WIRE_BF16>, kernel<WIRE_INT8>, kernel<WIRE_INT4>, kernel<WIRE_E3M0> }

template <WireFormat FORMAT>
static __global__ void wire_encode_kernel(char *message, const float *values, const float *base,
                                          WirePieces pieces, size_t stride) {
    WireBlock block = wire_block_of_warp(pieces, stride);
    int half = wire_half<FORMAT>(block.n);
    if (block.n == 0) { return; }
    float mine[WIRE_LANE];
    wire_values_load(mine, values + block.begin, half, block.n);
    if (base != NULL) {
        float from[WIRE_LANE];
        wire_values_load(from, base + block.base, half, block.n);
        for (int i = 0; i < WIRE_LANE; i++) { mine[i] -= from[i]; }
    }
    if (pieces.unsent == NULL) {
        wire_warp_encode<FORMAT>(message + block.offset, mine, block.n);
        return;
    }
    float unsent[WIRE_LANE], arrives[WIRE_LANE];
    wire_values_load(unsent, pieces.unsent + block.begin, half, block.n);
    for (int i = 0; i < WIRE_LANE; i++) { unsent[i] += mine[i]; }
    wire_warp_encode<FORMAT>(message + block.offset, unsent, block.n);
    __syncwarp();
    wire_warp_decode<FORMAT>(arrives, message + block.offset, block.n);
    for (int i = 0; i < WIRE_LANE; i++) { unsent[i] -= arrives[i]; }
    wire_values_store(pieces.unsent + block.begin, unsent, half, block.n);
}

// message = the pieces of `values` encoded, or of values - base if there is a base. pieces->unsent
// begins like `values`.
static inline void cuda_wire_encode(Stream *stream, WireFormat format, void *message, const float *values,
                                    const float *base, const WirePieces *pieces) {
    static decltype(&wire_encode_kernel<WIRE_FP32>) const kernels[] = WIRE_KERNELS(wire_encode_kernel);
    wire_launch(stream, kernels[format], format, pieces, (char *)message, values, base);
}

template <WireFormat FORMAT>
static __global__ void wire_decode_kernel(float *out, const char *message, const float *base,
                                          WirePieces pieces, size_t stride) {
    WireBlock block = wire_block_of_warp(pieces, stride);
    int half = wire_half<FORMAT>(block.n);
    if (block.n == 0) { return; }
    float mine[WIRE_LANE];
    wire_warp_decode<FORMAT>(mine, message + block.offset, block.n);
    if (base != NULL) {
        float from[WIRE_LANE];
        wire_values_load(from, base + block.base, half, block.n);
        for (int i = 0; i < WIRE_LANE; i++) { mine[i] = from[i] + mine[i]; }
    }
    wire_values_store(out + block.begin, mine, half, block.n);
}

// The pieces of `out` = the message decoded, plus base if there is one. out may be base.
static inline void cuda_wire_decode(Stream *stream, WireFormat format, float *out, const void *message,
                                    const float *base, const WirePieces *pieces) {
    static decltype(&wire_decode_kernel<WIRE_FP32>) const kernels[] = WIRE_KERNELS(wire_decode_kernel);
    wire_launch(stream, kernels[format], format, pieces, out, (const char *)message, base);
}

template <WireFormat FORMAT>
static __global__ void wire_sum_kernel(float *out, const char *messages, size_t message_stride, int count,
                                       WirePieces pieces, size_t stride) {
    WireBlock block = wire_block_of_warp(pieces, stride);
    if (block.n == 0) { return; }
    float sums[WIRE_LANE] = {};
    for (int i = 0; i < count; i++) {
        float mine[WIRE_LANE];
        wire_warp_decode<FORMAT>(mine, messages + (size_t)i * message_stride + block.offset, block.n);
        for (int j = 0; j < WIRE_LANE; j++) { sums[j] += mine[j]; }
    }
    wire_values_store(out + block.begin, sums, wire_half<FORMAT>(block.n), block.n);
}

// The pieces of `out` = the sum, from 0 and in their order, of `count` messages. They begin
// message_stride bytes apart.
static inline void cuda_wire_sum(Stream *stream, WireFormat format, float *out, const void *messages,
                                 size_t message_stride, int count, const WirePieces *pieces) {
    static decltype(&wire_sum_kernel<WIRE_FP32>) const kernels[] = WIRE_KERNELS(wire_sum_kernel);
    wire_launch(stream, kernels[format], format, pieces, out, (const char *)messages, message_stride, count);
}
