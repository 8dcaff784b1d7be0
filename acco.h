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
// moments, master copy and number of steps stay as they are (see OptimizerStep in
// optimizer.h).
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
//   time       Let a micro-batch take c, the exchange of a commit S, that of an estimate
//              E. On equally fast ranks a commit takes max(A c, S) + max(B c, E). That is
//              least, max(k c, S + E), where A : B = S : E: equal rounds where both
//              exchanges are equally large, and a long A where the estimate travels in a
//              coarser format. acco_times() has the general formula.
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
// Noise and stability ask for a long A, time for one that suits the two exchanges.
// Against a long A speaks a coarse format of the estimate: A is computed where rounding
// has put the estimate, B at the exact parameters. A coarse format touches only theta~:
// the commit still adds up every gradient in full.
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
    if (strcmp(text, "half") == 0) {
        *share = 0.5;
        return true;
    }
    char *end;
    *share = strtod(text, &end);
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
                         "micro-batches beside the commit, above 0 and below 1, such as 0.875%s%s%s",
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
    int format = options->estimate_wire - ESTIMATE_WIRE_FORMATS; // negative: same, or auto
    bool coarse =
        format >= 0 ? wire_is_coarse((WireFormat)format) : options->estimate_wire == ESTIMATE_WIRE_AUTO;
    return !facts->by_library || !coarse ||
           error_set(error, "--exchange library carries fp32 and bf16 only: choose one of them for "
                            "--estimate-wire, or another --exchange");
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
    int k = settings->micro_batches;
    bool by_wires = strcmp(((const AccoOptions *)own)->split, "wire") == 0;
    if (settings->adaptive) {
        snprintf(text, RULE_TEXT, "each round lasts as long as the exchange beside it");
    } else {
        snprintf(
            text, RULE_TEXT,
            "rank 0 computes %d of its %d micro-batches beside the exchange of a commit, the others beside "
            "that of an estimate%s",
            acco_round_a(settings->split, k), k, by_wires ? " (as near to their bytes as possible)" : "");
    }
}

// ---------------------------------------------------------------------------------------
// What auto chooses

// Of one rank.
typedef struct AccoRank {
    int micro_batches; // per commit, 2 or more
    double seconds;    // of one
} AccoRank;

// Seconds.
typedef struct AccoTimes {
    double a, b;   // the two rounds, each on the rank where it lasts longest
    double commit; // from one commit to the next
} AccoTimes;

// How long commits take with a share of round A and exchanges of so many seconds: the
// longest of the cycles that keep each other waiting. A rank's own rounds follow each
// other; the estimate waits for the longest round A, the commit for the longest round B,
// and the two exchanges follow each other.
static inline AccoTimes acco_times(const AccoRank *ranks, int size, double share, double commit,
                                   double estimate) {
    AccoTimes times = {0, 0, commit + estimate};
    for (int rank = 0; rank < size; rank++) {
        int k = ranks[rank].micro_batches, a = acco_round_a(share, k);
        times.a = fmax(times.a, a * ranks[rank].seconds);
        times.b = fmax(times.b, (k - a) * ranks[rank].seconds);
        times.commit = fmax(times.commit, k * ranks[rank].seconds);
    }
    times.commit = fmax(times.commit, fmax(times.a + estimate, times.b + commit));
    return times;
}

// An exchange may take so much longer during training than it took when it was measured;
// and commits that differ by so much of the computation are equally good.
#define ACCO_MARGIN 1.1
#define ACCO_TOLERANCE 0.01

// The times with exchanges that take so much longer.
static inline AccoTimes acco_late_times(const AccoRank *ranks, int size, double share, double commit,
                                        double estimate) {
    return acco_times(ranks, size, share, ACCO_MARGIN * commit, ACCO_MARGIN * estimate);
}

// How long commits take, between exchanges as they were measured and slower ones. Slower
// ones alone would not tell splits apart that hide all that was measured from splits that
// hide none of an estimate.
static inline double acco_expected_commit(const AccoRank *ranks, int size, double share, double commit,
                                          double estimate) {
    double late = acco_late_times(ranks, size, share, commit, estimate).commit;
    return (acco_times(ranks, size, share, commit, estimate).commit + late) / 2;
}

// The share with which commits take least, and among those that are equally good, within
// `tolerance` seconds, the largest.
static inline double acco_best_share(const AccoRank *ranks, int size, double commit, double estimate,
                                     double tolerance) {
    int k = 2, best = 1;
    double least = INFINITY;
    for (int rank = 0; rank < size; rank++) {
        k = ranks[rank].micro_batches > k ? ranks[rank].micro_batches : k;
    }
    for (int a = 1; a < k; a++) {
        least = fmin(least, acco_expected_commit(ranks, size, (double)a / k, commit, estimate));
    }
    for (int a = 1; a < k; a++) {
        bool good = acco_expected_commit(ranks, size, (double)a / k, commit, estimate) <= least + tolerance;
        best = good ? a : best;
    }
    return (double)best / k;
}

// What a choice is made from. Times are in seconds.
typedef struct AccoMeasured {
    const AccoRank *ranks; // (size)
    int size;
    WireFormat wire;
    double commit;    // the exchange of a commit, in `wire`
    double computing; // what a rank computes per commit, the longest
} AccoMeasured;

// A format of the estimate, with the split that goes with it.
typedef struct AccoCandidate {
    WireFormat wire;
    double estimate; // seconds of the estimate's exchange
    double share;
    AccoTimes times;
} AccoCandidate;

// estimate: the seconds of an exchange in `wire`.
static inline AccoCandidate acco_candidate(const AccoOptions *options, const AccoMeasured *measured,
                                           WireFormat wire, double estimate) {
    AccoCandidate candidate = {wire, estimate, 0, {0, 0, 0}};
    if (strcmp(options->split, "auto") == 0) {
        candidate.share = acco_best_share(measured->ranks, measured->size, measured->commit, estimate,
                                          ACCO_TOLERANCE * measured->computing);
    } else if (!acco_read_share(options->split, &candidate.share)) {
        candidate.share = acco_share_of_wires(measured->wire, wire);
    }
    candidate.times =
        acco_late_times(measured->ranks, measured->size, candidate.share, measured->commit, estimate);
    return candidate;
}

// The first, and so the finest, whose commits take no longer than those of any other.
static inline const AccoCandidate *acco_choose(const AccoCandidate *list, int count, double computing) {
    double least = INFINITY;
    int chosen = 0;
    for (int i = 0; i < count; i++) { least = fmin(least, list[i].times.commit); }
    while (!(list[chosen].times.commit <= least + ACCO_TOLERANCE * computing)) { chosen++; }
    return &list[chosen];
}

// Measures from fine to coarse, as far as computation does not hide everything yet. Of
// the formats of 4 bits int4 rounds an estimate less (kernels/wire.h).
static inline void acco_measure(void *own, Scheduler *s, char reason[RULE_TEXT]) {
    AccoOptions *options = (AccoOptions *)own;
    bool any_wire = options->estimate_wire == ESTIMATE_WIRE_AUTO;
    AccoMeasured measured = {NULL, s->transport->size, s->settings.wire, 0, 0};
    MeasuredRound round = measure_round(s, measured.wire);
    AccoRank mine = {s->settings.micro_batches, round.micro_batch};
    AccoRank *ranks =
        (AccoRank *)transport_collect_records(s->transport, "measuring the ranks", &mine, sizeof mine);
    measured.ranks = ranks;
    measured.commit = round.exchange;
    for (int rank = 0; rank < measured.size; rank++) {
        measured.computing = fmax(measured.computing, ranks[rank].micro_batches * ranks[rank].seconds);
    }
    AccoCandidate list[WIRE_FORMAT_COUNT];
    int finest = any_wire ? measured.wire : s->settings.estimate_wire, count = 0;
    int coarsest = any_wire && measured.wire < WIRE_INT4 ? WIRE_INT4 : finest;
    for (int wire = finest; wire <= coarsest; wire++) {
        double estimate =
            wire == (int)measured.wire ? measured.commit : measure_round(s, (WireFormat)wire).exchange;
        list[count++] = acco_candidate(options, &measured, (WireFormat)wire, estimate);
        if (list[count - 1].times.commit <= (1 + ACCO_TOLERANCE) * measured.computing) { break; }
    }
    const AccoCandidate *chosen = acco_choose(list, count, measured.computing);
    if (strcmp(options->split, "auto") == 0) {
        snprintf(options->split, sizeof options->split, "%.9g", chosen->share);
    }
    if (any_wire) { options->estimate_wire = ESTIMATE_WIRE_FORMATS + (int)chosen->wire; }
    snprintf(
        reason, RULE_TEXT,
        "measured: the exchange of a commit takes %.3g s and the round beside it %.3g s, that of an estimate "
        "(%s) %.3g s and its round %.3g s",
        measured.commit, chosen->times.a, wire_name(chosen->wire), chosen->estimate, chosen->times.b);
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

static const Rule acco_rule = {
    .name = "acco",
    .summary = "communicates one part of the batch while it computes the other",
    .kind = RULE_OVERLAPPED,
    .departs = 2,
    .rounds_per_commit = 2,
    .commit = acco_commit,
    .check = acco_check,
    .configure = acco_configure,
    .measure = acco_measure,
    .describe = acco_describe,
};

#endif
