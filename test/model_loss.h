// model_loss.h: passes of a GPT-Neo that wait and return the mean loss over the targets
// (B, T) >= 0, which is 0 where there is none.
#pragma once

#include "models.h"

static inline float gpt_loss_and_gradients(Gpt *model, Stream *stream, const void *parameters,
                                           float *gradients, const int32_t *tokens, const int32_t *targets,
                                           const Pace *pace) {
    const float *losses = gpt_gradients(model, stream, parameters, gradients, tokens, targets, pace);
    return losses_mean(stream, losses, targets, gpt_rows(model));
}

static inline float gpt_loss(Gpt *model, Stream *stream, const void *parameters, const int32_t *tokens,
                             const int32_t *targets) {
    ModelQuery query = {.B = model->settings.B, .T = model->settings.T, .tokens = tokens, .targets = targets};
    query.count = query.B * query.T;
    const float *losses = gpt_losses(model, stream, parameters, &query, NULL);
    return losses_mean(stream, losses, targets, (size_t)query.count);
}
