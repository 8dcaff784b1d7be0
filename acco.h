// acco.h: Accumulate while you Communicate (Nabli et al., NeurIPS 2025, arXiv
// 2406.02613).
//
// A batch is two halves. While the communication stream turns half A into an estimate of
// the next parameters, the compute stream adds half B at the true parameters; while the
// stream commits both halves, compute already gathers the next half A at the estimate:
//
//   compute         | half B at theta(t)                | half A of t+1 at theta~(t+1)         | half B at theta(t+1) ...
//   communication   | ESTIMATE theta~(t+1) from half A  | COMMIT theta(t+1) from halves A + B  | ESTIMATE ...
//                                                       ^ hand_over CLEAR                      ^ hand_over KEEP
//
//   theta~(t+1) = Opt?(theta(t), A / count(A))               an estimate: the optimizer state does not move
//   theta (t+1) = Opt (theta(t), (A + B) / count(A + B))     the commit starts from the same theta(t)
//
// KEEP: after a commit the accumulator holds the new half A, which is given to the
// estimate and stays, so that half B grows on top of it. Counts are of all workers
// together, so workers may contribute different numbers of micro-batches. Where
// the wire of the estimate is coarser, only theta~ is touched by it: the commit still has
// every gradient in full. Traffic per commit is twice zero1's. The first half A is
// computed at theta(0) before anything is sent, so the first commit is exactly zero1's.
// The half A that the last round computes is not used.
#ifndef ACCO_ACCO_H
#define ACCO_ACCO_H

#include "scheduler.h"

static inline void acco_commit(Scheduler *s) {
    if (sequential_commit(s)) { return; }
    if (!is_handed_over(s)) {
        accumulate_count(s, s->settings.first_round_size > 0 ? s->settings.first_round_size
                                                             : s->settings.round_size);
        hand_over(s, KEEP);
    }
    launch(s, ESTIMATE);
    accumulate(s);
    hand_over(s, CLEAR);

    launch(s, COMMIT);
    accumulate(s);
    hand_over(s, KEEP);
}

#endif
