// rules.h: the table of update rules. A new rule is a page of its own and one line here.
#ifndef ACCO_RULES_H
#define ACCO_RULES_H

#include "acco.h"
#include "ddp.h"
#include "zero.h"

static const Rule RULES[] = {
    // name, summary, overlapped, replicated, rounds per commit, begin, commit
    {"ddp", "all-reduce, then every rank steps everything", false, true, 1, NULL, ddp_commit},
    {"zero1", "reduce-scatter, each rank steps its shard, all-gather", false, false, 1, NULL, zero1_commit},
    {"acco", "communicates one half of the batch while it computes the other", true, false, 2, acco_begin, acco_commit},
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
