// acco.h: Accumulate while you Communicate (Nabli et al., NeurIPS 2025, arXiv
// 2406.02613), with rounds of unequal length.
//
// A batch of k micro-batches a worker is computed in two rounds, A and B. While the
// communication stream makes an estimate of the next parameters from round A, the compute
// stream computes round B at the true parameters. While the communication stream commits
// both rounds, compute already works on round A of the next batch, at the estimate:
//
//   compute         | B at theta(t)          | A of t+1 at theta~(t+1)           | B ...
//   communication   | ESTIMATE theta~(t+1)   | COMMIT theta(t+1)                 | ESTIMATE ...
//                   |   from round A         |   from rounds A + B               |
//                                            ^ hand_over CLEAR                   ^ hand_over KEEP
//
//   theta~(t+1) = Opt?(theta(t), A / count(A))
//   theta (t+1) = Opt (theta(t), (A + B) / count(A + B))     starts from the same theta(t)
//
// Opt is the optimizer's step. Opt? is the parameters that this step would give, while
// moments, master copy and number of steps stay as they are (OptimizerStep in optimizer.h).
//
// KEEP: after a commit the accumulator holds the new round A. It is given to the estimate
// and also stays in the accumulator, so that round B adds to it. Counts are sums over all
// workers, so workers may contribute different numbers of micro-batches. The first round
// A is computed at theta(0) before anything is sent, so the first commit is exactly that
// of zero1. The round A that is computed beside the last commit is not used.
//
// How long the rounds are
//
// In the paper both rounds have half of the micro-batches. Here A has the share s of them
// (--acco-split). Three things depend on it:
//
//   time       A micro-batch takes c, the exchange of a commit S, that of an estimate E.
//              A commit takes max(A c, S) + max(B c, E). That is least, max(k c, S + E),
//              where A : B = S : E: equal rounds where both exchanges are equally large,
//              and a long A where the estimate travels in a coarser format.
//   noise      Where micro-batch gradients are independent with variance v, the mean over
//              A differs from the mean over the batch by v (1/A - 1/k) = v B / (A k). That
//              is how far, but for the learning rate, an estimate lies from its commit. At
//              s = 7/8 it is a seventh of what it is at s = 1/2; at s = 1 there would be
//              nothing left to hide behind, and the rule would be that of zero1.
//   stability  On a quadratic of curvature L, with exact gradients and h = learning rate
//              times L,
//                theta (t+1) = theta(t) - (1-s) h theta(t) - s h theta~(t)
//                theta~(t+1) = theta(t) - h theta~(t)
//              Where theta~ = theta both are multiplied by 1 - h, as under gradient
//              descent; their difference by -(1-s) h. So the rule is stable for
//              h < min(2, 1/(1-s)): as far as gradient descent for every s >= 1/2, less
//              far below, and for s = 0 as far as dpu, 1.
//
// All three speak for a long A. Against it speaks a coarse format of the estimate: A is
// computed where rounding has put the estimate, B at the exact parameters. A coarse
// format touches only theta~: the commit still adds up every gradient in full.
#ifndef ACCO_ACCO_H
#define ACCO_ACCO_H

#include "measure.h"
#include "rule.h"

// ---------------------------------------------------------------------------------------
// Options

enum { ESTIMATE_WIRE_SAME, ESTIMATE_WIRE_AUTO, ESTIMATE_WIRE_FORMATS }; // the last: + a WireFormat

typedef struct AccoOptions {
    OptionText split;    // "wire", "auto", "half", or the share of round A
    int64_t first_round; // micro-batches per rank of the first round A; 0: as in the others
    int estimate_wire;   // ESTIMATE_WIRE_...
} AccoOptions;

// The share of round A that a text says outright. Returns false for any other text.
static inline bool acco_read_share(const char *text, double *share) {
    char *end;
    *share = strcmp(text, "half") == 0 ? 0.5 : strtod(text, &end);
    if (strcmp(text, "half") == 0) { return true; }
    bool plain = text[0] != '\0' && strspn(text, "0123456789.e-") == strlen(text); // no blanks, no "inf"
    return plain && *end == '\0' && *share > 0 && *share < 1;
}

// The share with which both exchanges are equally well hidden, from their bytes.
static inline double acco_share_of_wires(WireFormat commit, WireFormat estimate) {
    double bytes = (double)wire_bytes(commit, WIRE_BLOCK);
    return bytes / (bytes + (double)wire_bytes(estimate, WIRE_BLOCK));
}

// Micro-batches of round A, out of `count` >= 2: the nearest whole number, and at least
// one for each round. B has the others.
static inline int acco_round_a(double share, int count) {
    return (int)fmin(fmax(floor(share * count + 0.5), 1), count - 1);
}

static inline bool acco_check(const void *own, const RuleFacts *facts, Error *error) {
    static const char *const words[] = {"wire", "auto", "half"};
    const AccoOptions *options = (const AccoOptions *)own;
    const char *split = options->split;
    double share;
    char excerpt[64];
    bool is_wire = strcmp(split, "wire") == 0;
    if (!is_wire && strcmp(split, "auto") != 0 && !acco_read_share(split, &share)) {
        const char *near = nearest_name(split, words, 3);
        return error_set(error,
                         "--acco-split %s is no split; allowed: wire, auto, half, or the share of the "
                         "micro-batches beside the commit, above 0 and below 1, as 0.875%s%s%s",
                         text_excerpt(split, excerpt), near != NULL ? "; did you mean " : "",
                         near != NULL ? near : "", near != NULL ? "?" : "");
    }
    if (facts->adaptive && !is_wire) {
        return error_set(error,
                         "--acco-split %s with --accumulate auto: both rounds last as long as what is "
                         "sent beside them, so there is nothing to divide; leave it at wire",
                         text_excerpt(split, excerpt));
    }
    if (facts->adaptive && options->estimate_wire == ESTIMATE_WIRE_AUTO) {
        return error_set(error, "--estimate-wire auto with --accumulate auto: the batch grows until every "
                                "exchange is hidden, so there is nothing to choose by; name a format");
    }
    return true;
}

static inline void acco_configure(const void *own, SchedulerSettings *settings) {
    const AccoOptions *options = (const AccoOptions *)own;
    settings->first_round_size = (int)options->first_round;
    if (options->estimate_wire >= ESTIMATE_WIRE_FORMATS) {
        settings->estimate_wire = (WireFormat)(options->estimate_wire - ESTIMATE_WIRE_FORMATS);
    } else if (options->estimate_wire == ESTIMATE_WIRE_AUTO) { // until it is measured
        settings->estimate_wire = WIRE_INT4;                   // buffers are planned for a coarse format
    }
    if (!acco_read_share(options->split, &settings->split)) { // "wire"; "auto", until it is measured
        settings->split = acco_share_of_wires(settings->wire, settings->estimate_wire);
    }
}

static inline void acco_describe(const void *own, const SchedulerSettings *settings, char text[RULE_TEXT]) {
    int k = settings->micro_batches, a = acco_round_a(settings->split, k);
    bool by_wires = strcmp(((const AccoOptions *)own)->split, "wire") == 0;
    if (settings->adaptive) {
        snprintf(text, RULE_TEXT, "rounds as long as what is sent beside them");
    } else {
        snprintf(text, RULE_TEXT,
                 "%d micro-batches beside the exchange of a commit, %d beside that of an estimate%s", a,
                 k - a, by_wires ? " (in proportion to their bytes)" : "");
    }
}

// ---------------------------------------------------------------------------------------
// What auto chooses

// Of one rank.
typedef struct AccoRank {
    double micro_batches; // per commit
    double seconds;       // of one
} AccoRank;

// Seconds of a commit, and of its two parts, that are left to wait for.
typedef struct AccoExposed {
    double a, b;    // the two rounds of the slowest rank
    double exposed; // of both exchanges, what lasts longer than its round
} AccoExposed;

static inline AccoExposed acco_exposed(const AccoRank *ranks, int size, double share, double commit,
                                       double estimate) {
    AccoExposed times = {0, 0, 0};
    for (int rank = 0; rank < size; rank++) {
        int k = (int)ranks[rank].micro_batches, a = acco_round_a(share, k);
        times.a = fmax(times.a, a * ranks[rank].seconds);
        times.b = fmax(times.b, (k - a) * ranks[rank].seconds);
    }
    times.exposed = fmax(commit - times.a, 0) + fmax(estimate - times.b, 0);
    return times;
}

// The share with the least exposed time, and among those that hide equally well, within
// `tolerance` seconds, the largest.
static inline double acco_best_share(const AccoRank *ranks, int size, double commit, double estimate,
                                     double tolerance) {
    int k = 2, best_a = 1;
    double least = INFINITY;
    for (int rank = 0; rank < size; rank++) { k = (int)fmax(k, ranks[rank].micro_batches); }
    for (int a = 1; a < k; a++) {
        least = fmin(least, acco_exposed(ranks, size, (double)a / k, commit, estimate).exposed);
    }
    for (int a = 1; a < k; a++) {
        AccoExposed times = acco_exposed(ranks, size, (double)a / k, commit, estimate);
        best_a = times.exposed <= least + tolerance ? a : best_a;
    }
    return (double)best_a / k;
}

typedef struct AccoCandidate {
    WireFormat wire;
    double estimate; // seconds of the estimate's exchange
    double share;
    AccoExposed times;
} AccoCandidate;

// A measured exchange may take so much longer during training.
#define ACCO_MARGIN 1.1

// All ranks, before training: the formats that an estimate may travel in, from fine to
// coarse, with the split of each. Returns their number.
static inline int acco_candidates(const AccoOptions *options, Scheduler *s, const MeasuredRound *commit,
                                  const AccoRank *ranks, double tolerance,
                                  AccoCandidate list[WIRE_FORMAT_COUNT]) {
    bool any_wire = options->estimate_wire == ESTIMATE_WIRE_AUTO;
    WireFormat wire = s->settings.wire;
    WireFormat finest = any_wire ? wire : s->settings.estimate_wire, coarsest = finest;
    if (any_wire && wire < WIRE_INT4) { coarsest = WIRE_INT4; } // e3m0 is as short, and rounds steps more
    int count = 0, size = s->transport->size;
    for (int format = finest; format <= (int)coarsest; format++) {
        AccoCandidate *candidate = &list[count++];
        candidate->wire = (WireFormat)format;
        candidate->estimate =
            candidate->wire == wire ? commit->exchange : measure_round(s, candidate->wire).exchange;
        double sent = ACCO_MARGIN * commit->exchange, estimated = ACCO_MARGIN * candidate->estimate;
        if (strcmp(options->split, "auto") == 0) {
            candidate->share = acco_best_share(ranks, size, sent, estimated, tolerance);
        } else if (!acco_read_share(options->split, &candidate->share)) {
            candidate->share = acco_share_of_wires(wire, candidate->wire);
        }
        candidate->times = acco_exposed(ranks, size, candidate->share, sent, estimated);
    }
    return count;
}

// The finest format that hides as well as the one that hides best, with its split.
static inline void acco_measure(void *own, Scheduler *s, char reason[RULE_TEXT]) {
    AccoOptions *options = (AccoOptions *)own;
    bool any_split = strcmp(options->split, "auto") == 0,
         any_wire = options->estimate_wire == ESTIMATE_WIRE_AUTO;
    if (!any_split && !any_wire) { return; }
    MeasuredRound commit = measure_round(s, s->settings.wire);
    AccoRank mine = {(double)s->settings.micro_batches, commit.micro_batch};
    AccoRank *ranks =
        (AccoRank *)transport_collect_records(s->transport, "measuring the ranks", &mine, sizeof mine);
    double longest = 0, least = INFINITY;
    for (int rank = 0; rank < s->transport->size; rank++) {
        longest = fmax(longest, ranks[rank].micro_batches * ranks[rank].seconds);
    }
    double tolerance = 0.01 * longest;
    AccoCandidate list[WIRE_FORMAT_COUNT];
    int count = acco_candidates(options, s, &commit, ranks, tolerance, list), chosen = 0;
    for (int i = 0; i < count; i++) { least = fmin(least, list[i].times.exposed); }
    while (!(list[chosen].times.exposed <= least + tolerance)) { chosen++; }
    const AccoCandidate *best = &list[chosen];
    if (any_split) { snprintf(options->split, sizeof options->split, "%.9g", best->share); }
    options->estimate_wire = ESTIMATE_WIRE_FORMATS + (int)best->wire;
    snprintf(reason, RULE_TEXT,
             "measured: a commit's exchange takes %.3g s, the round beside it %.3g s; an estimate's, in %s, "
             "%.3g s, its round %.3g s",
             commit.exchange, best->times.a, wire_name(best->wire), best->estimate, best->times.b);
    free(ranks);
}

// ---------------------------------------------------------------------------------------
// The rule

static inline void acco_commit(Scheduler *s) {
    const SchedulerSettings *settings = &s->settings;
    int a = acco_round_a(settings->split, settings->micro_batches), b = settings->micro_batches - a;
    if (sequential_commit(s)) { return; }
    if (!is_handed_over(s)) {
        accumulate(s, settings->first_round_size > 0 ? settings->first_round_size : a);
        hand_over(s, KEEP);
    }
    launch(s, ESTIMATE);
    accumulate(s, b);
    hand_over(s, CLEAR);

    launch(s, COMMIT);
    accumulate(s, a);
    hand_over(s, KEEP);
}

static const Rule acco_rule = {"acco",
                               "commits a batch and estimates the next parameters beside the computation",
                               RULE_OVERLAPPED,
                               false, // replicated
                               2,     // rounds per commit
                               false, // no job in flight between commits
                               acco_commit,
                               NULL,
                               NULL,
                               acco_check,
                               acco_configure,
                               acco_measure,
                               acco_describe};

#endif
