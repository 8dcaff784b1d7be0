// rules.h: the table of update rules. A new rule is a page of its own and one line here.
#ifndef ACCO_RULES_H
#define ACCO_RULES_H

#include "acco.h"
#include "co2.h"
#include "ddp.h"
#include "diloco.h"
#include "dpu.h"
#include "zero.h"

static const Rule RULES[] = {
    // name, summary, kind, replicated, rounds per commit, commit, finish, committed, job_in_flight_between_commits
    {"ddp", "all-reduce behind the last backward pass, then every rank steps everything", RULE_SYNCHRONOUS,
     true, 1, ddp_commit, NULL, NULL, false},
    {"zero1",
     "reduce-scatter behind the last backward pass, each rank steps its shard, all-gather before the next "
     "forward pass",
     RULE_SYNCHRONOUS, false, 1, zero1_commit, NULL, NULL, false},
    {"dpu", "communicates a gradient while it computes the next: updates are one commit late",
     RULE_OVERLAPPED, false, 1, dpu_commit, drain, NULL, false},
    {"acco-wp", "as dpu, but computes at a prediction of the next parameters", RULE_OVERLAPPED, false, 1,
     acco_wp_commit, drain, acco_wp_committed, false},
    {"acco", "communicates one half of the batch while it computes the other", RULE_OVERLAPPED, false, 2,
     acco_commit, NULL, NULL, false},
    {"co2", "local steps; their mean is exchanged during the next round", RULE_LOCAL, false, 1, co2_commit,
     co2_finish, local_committed, true},
    {"diloco", "local steps, then an outer step with their mean", RULE_LOCAL, false, 1, diloco_commit, NULL,
     local_committed, false},
    {"streaming-diloco", "local steps; fragments of the model are averaged in turn, behind further steps",
     RULE_LOCAL, false, 1, streaming_diloco_commit, streaming_diloco_finish, local_committed, false},
};

enum { RULE_COUNT = sizeof RULES / sizeof RULES[0] };

// NULL for an unknown name.
static inline const Rule *rule_find(const char *name) {
    for (int i = 0; i < RULE_COUNT; i++) {
        if (strcmp(RULES[i].name, name) == 0) { return &RULES[i]; }
    }
    return NULL;
}

#endif
