// diloco.h: DiLoCo (Douillard et al., 2023, arXiv 2311.08105) and Streaming DiLoCo
// (Douillard et al., 2025, arXiv 2501.18512).
//
//   diloco
//   compute         | H inner steps | idle                        | outer step | H inner steps ...
//   communication                   | sum of pseudo-gradients     |
//
//   D: weighted mean over the workers of the pseudo-gradient, outer - local (worker_weight)
//   buf = mu buf + D;  outer -= lr_outer (D + mu buf);  local = outer
//
//   The momentum multiplies the outer rate by up to 1 / (1 - mu). The papers have 0.7 and mu
//   0.9. Here DiLoCo ended lower with 1 and 0.3, over 40 and over 305 outer steps, so they are
//   its default (dev/results/local-rules-2026-11-25.md). Streaming DiLoCo keeps the papers':
//   its merge (alpha) damps what the momentum overshoots.
//
//   streaming-diloco: fragments p = 0, 1, .. P-1 in turn, one every H/P steps
//   compute         | H/P - tau inner steps | send p | tau inner steps | apply p | ...
//   communication                                    | sum of fragment p |
//
//   local = alpha local + (1 - alpha) outer, of the fragment
//
// Both rules exchange every element once in H inner steps. Streaming DiLoCo sends one fragment at a
// time, hidden by tau inner steps. D is of the moment of sending; the local parameters, which the
// tau steps have moved meanwhile, enter the result with weight alpha. All ranks count the same
// steps, so they agree without a message on which fragment is due.
//
// At the end of a run DiLoCo shortens its last period. Streaming DiLoCo sends no fragment
// that it could not apply before the end, and then exchanges every fragment once more
// but the one that was applied last, with the last step; the only one, too.
#pragma once

#include "local_steps.h"
#include "scheduler/rule.h"

// Only streaming-diloco has the last three.
typedef struct DilocoOptions {
    int64_t inner_steps;                        // H
    double outer_learning_rate, outer_momentum; // -1: what suits the rule
    int64_t fragments, delay;                   // P, tau
    double alpha;
} DilocoOptions;

// Fragments take turns: every H/P steps one is sent, and it arrives before the next one is sent.
static inline bool streaming_diloco_check(const void *own, int layers, Error *error) {
    const DilocoOptions *options = (const DilocoOptions *)own;
    long long H = (long long)options->inner_steps, P = (long long)options->fragments,
              tau = (long long)options->delay;
    if (H % P != 0) {
        return error_set(error,
                         "--diloco-H %lld is not a multiple of --streaming-P %lld: fragments are sent every "
                         "H/P steps; use %lld",
                         H, P, H - H % P + P);
    }
    if (tau >= H / P) {
        return error_set(error,
                         "--streaming-tau %lld is not below H/P = %lld: a fragment must arrive before the "
                         "next one is sent; use %s%lld",
                         tau, H / P, H / P == 1 ? "" : "0 .. ", H / P - 1);
    }
    if (layers > 0 && P > layers) {
        return error_set(error, "--streaming-P %lld: the model has only %d layer%s to make fragments of", P,
                         layers, plural(layers));
    }
    return true;
}

static inline void diloco_set_outer(const DilocoOptions *options, double rate, double momentum,
                                    SchedulerSettings *settings) {
    NesterovStep *outer = &settings->local.outer_nesterov;
    settings->local.steps = (int)options->inner_steps;
    outer->learning_rate = (float)(options->outer_learning_rate < 0 ? rate : options->outer_learning_rate);
    outer->momentum = (float)(options->outer_momentum < 0 ? momentum : options->outer_momentum);
}

static inline void diloco_configure(const void *own, SchedulerSettings *settings) {
    diloco_set_outer((const DilocoOptions *)own, 1, 0.3, settings);
}

static inline void streaming_diloco_configure(const void *own, SchedulerSettings *settings) {
    const DilocoOptions *options = (const DilocoOptions *)own;
    diloco_set_outer(options, 0.7, 0.9, settings);
    settings->local.fragments = (int)options->fragments;
    settings->local.delay = (int)options->delay;
    settings->local.outer_nesterov.alpha = (float)options->alpha;
}

static inline void diloco_describe(const SchedulerSettings *settings, char text[RULE_TEXT]) {
    snprintf(text, RULE_TEXT, "outer rate %g, mu %g", settings->local.outer_nesterov.learning_rate,
             settings->local.outer_nesterov.momentum);
}

static inline void diloco_period(Scheduler *s) {
    inner_steps(s, steps_left(s, s->settings.local.steps));
    send_fragment(s, 0);
    wait_for(s);
    apply_fragment(s, 0, 0);
}

static inline void streaming_diloco_period(Scheduler *s) {
    const LocalSettings *local = &s->settings.local;
    int interval = local->steps / local->fragments, left = steps_left(s, interval);
    if (left < interval) {
        inner_steps(s, left);
        return;
    }
    inner_steps(s, interval - local->delay);
    send_fragment(s, s->local.fragment);
    inner_steps(s, local->delay);
    wait_for(s);
    apply_fragment(s, s->local.fragment, local->outer_nesterov.alpha);
    s->local.fragment = (s->local.fragment + 1) % local->fragments;
}

// The steps since the latest sending are reported, and inspected for spikes, with the next one: the
// only fragment is exchanged for them although it has just been applied.
static inline bool streaming_diloco_finish(Scheduler *s) {
    const Tally *steps = &s->gradients.tally;
    bool changed = false, alone = s->settings.local.fragments == 1;
    for (int fragment = 0; fragment < s->settings.local.fragments && !scheduler_is_halted(s); fragment++) {
        bool reports = alone && steps->micro_batches + steps->left_out > 0;
        if (s->local.fragments[fragment].applied_at == s->optimizer.steps && !reports) { continue; }
        send_fragment(s, fragment);
        wait_for(s);
        apply_fragment(s, fragment, 0);
        changed = true;
    }
    stream_copy(s->compute, s->parameters.data, s->local.outer, s->problem.parameter_count * sizeof(float));
    stream_settle(s->compute);
    return changed;
}

static const Rule diloco_rule = {
    .name = "diloco",
    .summary = "local steps, then an outer step with their mean",
    .kind = RULE_LOCAL,
    .advance = diloco_period,
    .configure = diloco_configure,
    .describe = diloco_describe,
};

static const Rule streaming_diloco_rule = {
    .name = "streaming-diloco",
    .summary = "local steps; fragments of the model are averaged in turn, behind further steps",
    .kind = RULE_LOCAL,
    .advance = streaming_diloco_period,
    .finish = streaming_diloco_finish,
    .check = streaming_diloco_check,
    .configure = streaming_diloco_configure,
    .describe = diloco_describe,
};
