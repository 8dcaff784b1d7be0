// head.h: the logits and the loss.
//
//   logits = W_head x;  loss = cross_entropy(logits), of each target >= 0
//
// W_head is the matrix that the table calls the head; a tied one is the embedding of tokens, too.
// Logits are computed in chunks; each chunk becomes its own gradient in place, and that is used at
// once for the gradients of the last hidden state and of W_head.
#pragma once

#include "models/layer.h"

enum {
    HEAD_LOGITS_BYTES = 256 << 20, // of a chunk of logits on the CPU, at most
    HEAD_GPU_CHUNK = 8192,         // rows of a chunk on a GPU, at most: bench_cuda variants times others
    HEAD_GPU_CHUNK_ROWS = 256,     // a chunk on a GPU has a multiple of them
    HEAD_LOGITS_UNIT = 64          // a row of logits on a GPU has a multiple of them
};

// Of a chunk on a GPU, at most, for large vocabularies.
static const size_t HEAD_GPU_LOGITS_BYTES = (size_t)2 << 30;

// The last hidden state (B, T, C) of the latest forward pass, which the head multiplies.
static inline Real *head_input(const Model *model) {
    return layer_norm(model, 2 * model->config.layers, NULL).output;
}

// How far apart rows of logits are.
static inline int head_logits_stride(int vocabulary, bool on_gpu) {
    return on_gpu ? (vocabulary + HEAD_LOGITS_UNIT - 1) / HEAD_LOGITS_UNIT * HEAD_LOGITS_UNIT : vocabulary;
}

// Rows of logits at a time: equal chunks, as few as the bytes allow, and on a GPU `most` rows.
// With more rows a product has whole waves of tiles, and fewer chunks pass over the fp32 gradient
// of W_head (at 125M 154 MB, read and written, for each); with all rows the logits would be the
// largest array of all. Chunks on a GPU are a multiple of HEAD_GPU_CHUNK_ROWS, because the library
// computes tiles of up to 256 rows. Bits of that gradient depend on the chunks, and those on
// nothing but the shape.
static inline int head_chunk_rows(int rows, int most, int logits_stride, Precision precision, bool on_gpu) {
    size_t bytes = on_gpu ? HEAD_GPU_LOGITS_BYTES : (size_t)HEAD_LOGITS_BYTES,
           fit = bytes / ((size_t)logits_stride * precision_bytes(precision));
    int limit = (int)size_min(fit, (size_t)(on_gpu ? most : rows));
    int unit = on_gpu && limit >= HEAD_GPU_CHUNK_ROWS ? HEAD_GPU_CHUNK_ROWS : 1;
    limit = limit < 1 ? 1 : limit / unit * unit;
    int chunks = (rows + limit - 1) / limit, chunk = ((rows + chunks - 1) / chunks + unit - 1) / unit * unit;
    return int_min(chunk, rows);
}

// How many columns of logits the head's products compute. On a GPU they compute as many
// as a row has room for, because V is odd in most models, and the library's fast products
// want the dimensions of their operands in multiples of 16 bytes. The weights of the
// columns from V on are the rows behind W_head (positions, perhaps the first layer); if there are
// too few, V columns are computed. cross_entropy does not read these columns and makes
// their gradients 0, so exact zeros are added to the gradients of those rows and of the
// hidden state. (NaN where they are not finite, but then W_head's gradient is NaN anyway.)
static inline int head_logits_columns(const Model *model) {
    const TensorPlace *place = &model->places[model->head];
    size_t needed = (size_t)model->logits_stride * model->config.channels,
           there = place->kind == TRAINED_WHOLE ? model->parameter_count - place->trained
                                                : model->settings.part->frozen_count - place->frozen;
    return needed <= there ? model->logits_stride : model->config.vocabulary;
}

// largest (count): the most probable token by each row of model->logits; -1 where a row
// has none, because its logits are not numbers.
static inline void head_largest(Model *model, Stream *stream, int count, int32_t *largest) {
    Precision precision = model->settings.precision;
    const Real *logits = model->logits;
    size_t stride = (size_t)model->logits_stride;
    if (stream_is_on_gpu(stream)) {
        stream_copy(stream, model->host_logits, logits, (size_t)count * stride * precision_bytes(precision));
        stream_settle(stream);
        logits = model->host_logits;
    }
    for (int i = 0; i < count; i++) {
        const Real *row = real_at_const(logits, (size_t)i * stride, precision);
        largest[i] = logits_largest(row, model->config.vocabulary, precision);
    }
}

// losses (rows) = cross_entropy(W_head hidden, targets) of hidden states and targets (rows),
// chunk by chunk. With gradients (NULL: none) also gradients of W_head += (model->begins: =) and
// model->branch = the gradient of the hidden state, both of the sum of the losses of targets >= 0,
// divided by all rows: so that every predicted token of a commit weighs the same (Tally). If none
// is predicted, they are 0. largest (rows): see ModelQuery; NULL: not asked for.
static inline void head_loss(Model *model, Stream *stream, const Real *hidden, const int32_t *targets,
                             int rows, int32_t *largest, float *gradients) {
    Precision precision = model->settings.precision;
    int C = model->config.channels, V = model->config.vocabulary, stride = model->logits_stride,
        columns = model->logits_columns;
    bool trains = gradients != NULL && weights_train(model, model->head);
    if (gradients != NULL && targets_predicted(targets, (size_t)rows) == 0) {
        if (trains && model->begins) {
            stream_clear(stream, weights_gradient(model, gradients, model->head),
                         (size_t)V * C * sizeof(float));
        }
        stream_clear(stream, model->branch, (size_t)rows * C * precision_bytes(precision));
        return;
    }
    const int32_t *batch = model_upload(model, stream, model->targets, targets, (size_t)rows);
    const Real *weight = weights_of(model, model->head);
    float scale = gradients != NULL ? 1.0f / (float)rows : 0.0f;
    for (int first = 0; first < rows; first += model->chunk) {
        int count = int_min(rows - first, model->chunk);
        size_t offset = (size_t)first * C;
        const Real *input = real_at_const(hidden, offset, precision);
        matmul_forward(stream, model->logits, stride, input, weight, count, C, columns);
        if (largest != NULL) { head_largest(model, stream, count, largest + first); }
        cross_entropy(stream, model->logits, stride, model->losses + first, batch + first, count, V, scale);
        if (gradients == NULL) { continue; }
        matmul_backward_input(stream, real_at(model->branch, offset, precision), C, model->logits, stride,
                              weight, count, C, columns);
        if (trains) {
            matmul_backward_weight(stream, weights_gradient(model, gradients, model->head), model->logits,
                                   stride, input, count, C, columns, model->begins && first == 0);
        }
    }
}

// The logits (V) of one hidden state, on the CPU.
static inline const float *head_logits(Model *model, Stream *stream, const Real *hidden) {
    int C = model->config.channels, V = model->config.vocabulary;
    matmul_forward(stream, model->logits, V, hidden, weights_of(model, model->head), 1, C, V);
    return real_floats(model->logits);
}
