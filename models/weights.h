// weights.h: W x, the one place where passes meet parameters. A weight is the caller's, a copy of
// it in bf16 or FP8, frozen, or has an adapter beside it (trained.h).
//
// With ModelSettings::fp8 a model also keeps the layers' matrices in FP8, as they are and
// turned, cast when the parameters have changed. What they multiply is cast before each
// product. Gradients of weights and the head stay in bf16.
#pragma once

#include "models/state.h"

// Whether the caller's parameters can be used as they are.
static inline bool weights_are_given(const Model *model) {
    return model->settings.given_weights || model->settings.precision == PRECISION_FP32;
}

// A pass begins. Copies of weights of the same version stay valid.
static inline void weights_begin(Model *model, const void *parameters, const Pace *pace) {
    uint64_t version = pace != NULL ? pace->version : 0;
    bool copied = !weights_are_given(model), valid = version != 0 && version == model->copy.version;
    model->weights = copied ? model->copy.data : (const Real *)parameters;
    model->prepared = copied && !valid ? 0 : model->parameter_count;
    model->copy.version = version;
    model->fp8_changed = version == 0 || version != model->fp8_version;
    model->fp8_version = version;
}

// Waits until parameters [0, end) have arrived; then the weights [0, end) are up to date.
static inline void weights_need(Model *model, Stream *stream, const void *parameters, const Pace *pace,
                                size_t end) {
    pace_need(pace, end);
    if (model->prepared >= end) { return; }
    reals_from_floats(stream, real_at(model->copy.data, model->prepared, model->settings.precision),
                      (const float *)parameters + model->prepared, end - model->prepared);
    model->prepared = end;
}

// The offset of a layer's tensor in the flat array of what is trained, or where it would
// be there. Layer L's NORM_1 is the last norm.
static inline size_t weights_at(const Model *model, int layer, int role) {
    return model->places[model_tensor(layer, role)].trained;
}

static inline bool weights_train(const Model *model, int tensor) {
    return model->has[tensor] && model->places[tensor].kind == TRAINED_WHOLE;
}

// NULL: there is no such tensor.
static inline const Real *weights_of(const Model *model, int tensor) {
    const TensorPlace *place = &model->places[tensor];
    if (!model->has[tensor]) { return NULL; }
    bool trained = weights_train(model, tensor);
    return real_at_const(trained ? model->weights : model->settings.part->frozen,
                         trained ? place->trained : place->frozen, model->settings.precision);
}

// Where the gradient of a vector is added, or of a matrix that is trained. NULL: as weights_of.
static inline float *weights_gradient(const Model *model, float *gradients, int tensor) {
    if (!model->has[tensor]) { return NULL; }
    bool trained = weights_train(model, tensor);
    // An embedding is too large to discard.
    assert(trained || tensor < model_tensor(model->config.layers, TENSOR_EMBEDDING));
    return trained ? gradients + model->places[tensor].trained
                   : model->discarded + tensor % LAYER_TENSORS * model->widest;
}

// Forward output (B, T, outputs) = input (B, T, inputs) W^T for a matrix W of a layer; backward
// the gradients, rows their strides apart.
typedef struct Product {
    int tensor; // W's first
    const LayerMatrix *matrix;
    const Real *input;
    Real *output;
    const Real *d_output;
    Real *d_input;
    int d_output_stride, d_input_stride;
} Product;

// The adapters beside W.
static inline void weights_adapt(Model *model, Stream *stream, const Product *product, float *gradients) {
    const TrainedPart *part = model->settings.part;
    Precision precision = model->settings.precision;
    int inputs = product->matrix->inputs, outputs = product->matrix->outputs;
    size_t column = 0, width;
    for (int i = 0; i < product->matrix->tensors; i++, column += width) {
        const TensorPlace *place = &model->places[product->tensor + i];
        width = (size_t)product->matrix->parts[i];
        if (place->kind != TRAINED_ADAPTED) { continue; }
        size_t a = place->trained, b = a + (size_t)part->rank * inputs;
        LowRank work = {.a = real_at_const(model->weights, a, precision),
                        .b = real_at_const(model->weights, b, precision),
                        .d_a = gradients != NULL ? gradients + a : NULL,
                        .d_b = gradients != NULL ? gradients + b : NULL,
                        .begins = model->begins,
                        .inner = model->inner,
                        .rank = part->rank,
                        .rows = (int)model_rows(model),
                        .inputs = inputs,
                        .outputs = (int)width,
                        .scale = part->scale};
        if (gradients == NULL) {
            low_rank_forward(stream, &work, real_at(product->output, column, precision), outputs,
                             product->input);
        } else {
            low_rank_backward(stream, &work, product->d_input, product->d_input_stride,
                              real_at_const(product->d_output, column, precision), product->d_output_stride,
                              product->input);
        }
    }
}

// In FP8: the output or, backward, d_input.
static inline void weights_multiply_fp8(Model *model, Stream *stream, const Product *product, bool backward) {
    const LayerMatrix *matrix = product->matrix;
    int rows = (int)model_rows(model), inputs = matrix->inputs, outputs = matrix->outputs;
    size_t before = (size_t)(product->tensor / LAYER_TENSORS) * model->layer_elements + matrix->before;
    Fp8 operand = {model->fp8_operand, model->fp8_scales, backward ? PRECISION_E5M2 : PRECISION_E4M3};
    float *scale = model->fp8_scales + (1 + product->tensor) * FP8_SCALE_STRIDE;
    Fp8 codes = {model->fp8_weights + 2 * before, scale, PRECISION_E4M3};
    if (model->fp8_changed) {
        fp8_cast(stream, &codes, true, model->partials, weights_of(model, product->tensor), outputs, inputs,
                 inputs);
    }
    if (backward) {
        codes.codes += (size_t)inputs * outputs;
        fp8_cast(stream, &operand, false, model->partials, product->d_output, rows, outputs,
                 product->d_output_stride);
        matmul_fp8(stream, product->d_input, product->d_input_stride, &operand, &codes, rows, outputs,
                   inputs);
    } else {
        fp8_cast(stream, &operand, false, model->partials, product->input, rows, inputs, inputs);
        matmul_fp8(stream, product->output, outputs, &operand, &codes, rows, inputs, outputs);
    }
}

// With gradients (NULL: none) backward: that of W is added to them; with model->begins it is set.
static inline void weights_multiply(Model *model, Stream *stream, const Product *product, float *gradients) {
    int rows = (int)model_rows(model), inputs = product->matrix->inputs, outputs = product->matrix->outputs;
    bool backward = gradients != NULL;
    const Real *weight = weights_of(model, product->tensor);
    if (backward && weights_train(model, product->tensor)) {
        matmul_backward_weight(stream, weights_gradient(model, gradients, product->tensor), product->d_output,
                               product->d_output_stride, product->input, rows, inputs, outputs,
                               model->begins);
    }
    if (model->settings.fp8) {
        weights_multiply_fp8(model, stream, product, backward);
    } else if (backward) {
        matmul_backward_input(stream, product->d_input, product->d_input_stride, product->d_output,
                              product->d_output_stride, weight, rows, inputs, outputs);
    } else {
        matmul_forward(stream, product->output, outputs, product->input, weight, rows, inputs, outputs);
    }
    weights_adapt(model, stream, product, gradients);
}
