// acco.h: Accumulate while you Communicate (Nabli et al., NeurIPS 2025, arXiv
// 2406.02613).
//
// A batch is computed in two halves, A and B. While the communication stream makes an
// estimate of the next parameters from half A, the compute stream computes half B at the
// true parameters. While the communication stream commits both halves, compute already
// works on the next half A, at the estimate:
//
//   compute         | half B at theta(t)       | half A of t+1 at theta~(t+1)  | half B ...
//   communication   | ESTIMATE theta~(t+1)     | COMMIT theta(t+1)             | ESTIMATE ...
//                   |   from half A            |   from halves A + B           |
//                                              ^ hand_over CLEAR               ^ hand_over KEEP
//
//   theta~(t+1) = Opt?(theta(t), A / count(A))
//   theta (t+1) = Opt (theta(t), (A + B) / count(A + B))     starts from the same theta(t)
//
// Opt is the optimizer's step. Opt? is the parameters that this step would give, while
// moments, master copy and number of steps stay as they are (OptimizerStep in optimizer.h).
//
// KEEP: after a commit the accumulator holds the new half A. It is given to the estimate
// and also stays in the accumulator, so that half B adds to it. Counts are sums over all
// workers, so workers may contribute different numbers of micro-batches.
//
// The traffic of a commit is twice that of zero1. A coarser wire for the estimate touches
// only theta~: the commit still adds up every gradient in full. The first half A is
// computed at theta(0) before anything is sent, so the first commit is exactly that of
// zero1. The half A that the last round computes is not used.
#ifndef ACCO_ACCO_H
#define ACCO_ACCO_H

#include "rule.h"

typedef struct AccoOptions {
    int64_t first_round; // micro-batches per rank of the first half A; 0: as many as in the others
    int estimate_wire;   // 0: that of the commit; otherwise a WireFormat + 1
} AccoOptions;

static inline void acco_configure(const void *own, SchedulerSettings *settings) {
    const AccoOptions *options = (const AccoOptions *)own;
    settings->first_round_size = (int)options->first_round;
    if (options->estimate_wire > 0) { settings->estimate_wire = (WireFormat)(options->estimate_wire - 1); }
}

static inline void acco_commit(Scheduler *s) {
    int half = s->settings.round_size, first_half = s->settings.first_round_size;
    if (sequential_commit(s)) { return; }
    if (!is_handed_over(s)) {
        accumulate(s, first_half > 0 ? first_half : half);
        hand_over(s, KEEP);
    }
    launch(s, ESTIMATE);
    accumulate(s, half);
    hand_over(s, CLEAR);

    launch(s, COMMIT);
    accumulate(s, half);
    hand_over(s, KEEP);
}

static const Rule acco_rule = {"acco",
                               "communicates one half of the batch while it computes the other",
                               RULE_OVERLAPPED,
                               false, // replicated
                               2,     // rounds per commit
                               false, // no job in flight between commits
                               acco_commit,
                               NULL,
                               NULL,
                               NULL,
                               acco_configure,
                               NULL};

#endif
