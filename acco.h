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
//   theta~(t+1) = Est(theta(t), A / count(A))
//   theta (t+1) = Opt(theta(t), (A + B) / count(A + B))     starts from the same theta(t)
//
// Opt is the optimizer's step. Est is the parameters that this step would give; the
// optimizer's state stays as it is.
//
// KEEP: after a commit the accumulator holds the new round A. It is given to the estimate
// and also stays in the accumulator, so that round B adds to it. Counts are sums over all
// workers, which may contribute different numbers of micro-batches. The first round A is
// computed at theta(0) before anything is sent, so the first commit is exactly zero1's (with
// --acco-init, of a smaller batch). The round A computed during the last commit is not used.
//
// acco_split.h divides the batch: it sets round_a and first_round.
#pragma once

#include "acco_split.h"
#include "scheduler.h"

static inline void acco_commit(Scheduler *s) {
    int a = s->settings.round_a, b = s->settings.micro_batches - a;
    if (sequential_commit(s)) { return; }
    if (!is_handed_over(s)) {
        accumulate(s, s->settings.first_round);
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
    .further_rounds = 1,
    .advance = acco_commit,
    .check = acco_check,
    .configure = acco_configure,
    .choose = acco_choose,
    .describe = acco_describe,
};
