// acco_split.h: how ACCO (acco.h) divides a batch into its two rounds, and its options.
//
// In the paper both rounds have half of the micro-batches. Here round A has the share s of
// them (--acco-split). Three things depend on it:
//
//   time       Let a micro-batch take c, a commit's exchange S, an estimate's exchange E.
//              On equally fast ranks a commit takes max(A c, S) + max(B c, E). This is
//              least, max(k c, S + E), where A : B = S : E: equal rounds where both
//              exchanges are equally large, and a long A where the estimate travels in a
//              coarser format. Unequal ranks are simulated (plan/choose.h).
//   noise      Count A, B and k = A + B over all workers, and let micro-batch gradients be
//              independent with variance v. Then the mean over A differs from the mean
//              over the batch with variance v (1/A - 1/k) = v B / (A k). Under SGD that,
//              times the squared learning rate, is how far an estimate lies from its
//              commit. At s = 7/8 it is a seventh of what it is at s = 1/2; at s = 1
//              nothing would be left of it, but also nothing to hide the estimate behind.
//   stability  On a quadratic of curvature L, with exact gradients and h = learning rate
//              times L,
//                theta (t+1) = theta(t) - (1-s) h theta(t) - s h theta~(t)
//                theta~(t+1) = theta(t) - h theta~(t)
//              Where theta~ = theta both are multiplied by 1 - h, as under gradient
//              descent; their difference by -(1-s) h. So the rule is stable for
//              h < min(2, 1/(1-s)): as far as gradient descent for every s >= 1/2, less
//              far below, and no farther than dpu, 1, as s goes to 0.
//              Momentum changes that. With m = beta m + (1-beta) g the limit of gradient
//              descent is h = 2 (1+beta) / (1-beta), 38 for beta = 0.9; the difference is
//              multiplied by -(1-beta) (1-s) h, so equal rounds are stable up to 20 only,
//              and 38 is reached from s = 0.737 on. At the rates where AdamW trains best,
//              curvature grows up to the limit. There noise in the difference is amplified
//              by 1 / (1 - x^2), x = (1-beta) (1-s) h: without bound for equal rounds, by 10
//              at s = 3/4, by 1.3 at s = 7/8 (dev/results/rounds-2026-11-22.md).
//
// Noise and stability ask for a long A, time for one that suits the two exchanges. A
// coarse estimate argues for a short A, whose gradients are computed at the rounded
// theta~; the commit still adds up every gradient in full.
#pragma once

#include "scheduler/rule.h"

enum { ESTIMATE_WIRE_SAME, ESTIMATE_WIRE_AUTO, ESTIMATE_WIRE_FORMATS }; // the last: + a WireFormat

typedef struct AccoOptions {
    OptionText split;    // "wire", "auto", "half", or the share of round A
    int64_t first_round; // micro-batches per rank of the first round A; 0: as in the others
    int estimate_wire;   // ESTIMATE_WIRE_...
} AccoOptions;

// Reads the share of round A where the text is "half" or a number; otherwise returns false.
static inline bool acco_read_share(const char *text, double *share) {
    if (strcmp(text, "half") == 0) {
        *share = 0.5;
        return true;
    }
    char *end;
    *share = strtod(text, &end);
    bool plain = text[0] != '\0' && strspn(text, "0123456789.e-") == strlen(text); // no blanks, no "inf"
    return plain && *end == '\0' && *share > 0 && *share < 1;
}

// The share that hides both exchanges equally well, going by their bytes.
static inline double acco_share_of_wires(WireFormat commit, WireFormat estimate) {
    double bytes = (double)wire_bytes(commit, WIRE_BLOCK);
    return bytes / (bytes + (double)wire_bytes(estimate, WIRE_BLOCK));
}

// Micro-batches of round A, out of `count` >= 2: the nearest whole number, and at least
// one for each round. B has the others.
static inline int acco_round_a(double share, int count) {
    return (int)fmin(fmax(floor(share * count + 0.5), 1), count - 1);
}

static inline bool acco_check(const void *own, int layers, Error *error) {
    static const char *const words[] = {"wire", "auto", "half"};
    const char *split = ((const AccoOptions *)own)->split;
    double share;
    char excerpt[64], hint[NAME_HINT];
    (void)layers;
    if (strcmp(split, "wire") == 0 || strcmp(split, "auto") == 0 || acco_read_share(split, &share)) {
        return true;
    }
    return error_set(error,
                     "--acco-split %s is no split%s; allowed: wire, auto, half, or the share of the "
                     "micro-batches during the commit, above 0 and below 1, such as 0.875",
                     text_excerpt(split, excerpt), name_hint(split, words, 3, hint));
}

static inline void acco_configure(const void *own, SchedulerSettings *settings) {
    const AccoOptions *options = (const AccoOptions *)own;
    if (options->estimate_wire >= ESTIMATE_WIRE_FORMATS) {
        settings->estimate_wire = (WireFormat)(options->estimate_wire - ESTIMATE_WIRE_FORMATS);
    } else if (options->estimate_wire == ESTIMATE_WIRE_AUTO) { // until it is measured
        settings->estimate_wire = WIRE_INT4;                   // buffers are planned for a coarse format
    }
    double share;
    if (!acco_read_share(options->split, &share)) { // "wire"; "auto", until it is measured
        share = acco_share_of_wires(settings->wire, settings->estimate_wire);
    }
    settings->round_a = acco_round_a(share, settings->micro_batches);
    settings->first_round = options->first_round > 0 ? (int)options->first_round : settings->round_a;
}

static inline void acco_describe(const SchedulerSettings *settings, char text[RULE_TEXT]) {
    if (settings->adaptive) {
        snprintf(text, RULE_TEXT, "each round lasts as long as the exchange that it hides");
    } else {
        snprintf(text, RULE_TEXT,
                 "rank 0 computes %d of its %d micro-batches during a commit's exchange, the others during "
                 "an estimate's",
                 settings->round_a, settings->micro_batches);
    }
}

// What auto leaves to a measurement (Rule::choose), by preference: fine formats of the
// estimate before coarse ones, and a long round A before a short one. The formats end at
// int4: e3m0 has hardly fewer bits and rounds an estimate more (kernels/wire.h).
static inline bool acco_choose(void *own, const SchedulerSettings *settings, int format, int split) {
    AccoOptions *options = (AccoOptions *)own;
    bool any_format = options->estimate_wire == ESTIMATE_WIRE_AUTO,
         any_split = strcmp(options->split, "auto") == 0;
    int wire = (int)settings->wire + format, k = settings->micro_batches, a = k - 1 - split;
    if (format > 0 && (!any_format || wire > WIRE_INT4)) { return false; }
    if (split > 0 && (!any_split || a < 1)) { return false; }
    if (any_format) { options->estimate_wire = ESTIMATE_WIRE_FORMATS + wire; }
    if (any_split) { snprintf(options->split, sizeof options->split, "%.9g", (double)a / k); }
    return true;
}
