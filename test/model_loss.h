// model_loss.h: passes that wait and return the mean loss over the targets
// (B, T) >= 0, which is 0 where there is none.
#pragma once

#include "models/decoder.h"
#include "models/families.h"

static inline float model_loss_and_gradients(Model *model, Stream *stream, const void *parameters,
                                             float *gradients, const int32_t *tokens, const int32_t *targets,
                                             const Pace *pace) {
    const float *losses = model_gradients(model, stream, parameters, gradients, tokens, targets, pace);
    return losses_mean(stream, losses, targets, model_rows(model));
}

static inline float model_loss(Model *model, Stream *stream, const void *parameters, const int32_t *tokens,
                               const int32_t *targets) {
    ModelQuery query = {.B = model->settings.B, .T = model->settings.T, .tokens = tokens, .targets = targets};
    query.count = query.B * query.T;
    const float *losses = model_losses(model, stream, parameters, &query, NULL);
    return losses_mean(stream, losses, targets, (size_t)query.count);
}
