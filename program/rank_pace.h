// rank_pace.h: which rank is slow, by how much, and what helps.
//
// Ranks that wait for a slow one seem to wait for the network: times of micro-batches tell.
#pragma once

#include "options/options_check.h"
#include "program/launch_checks.h"

#define RANK_IS_SLOW 1.3 // times the median of all ranks

// What each rank tells at the end.
typedef struct RankPace {
    double micro_batch; // mean seconds of one, in this part of the run; 0: it computed none
    double exposed;     // seconds in which it only waited for communication
} RankPace;

typedef struct SlowRank {
    int rank; // -1: none is slow
    double factor;
} SlowRank;

// Compares what ranks compute for a commit, of which --rank-accumulate gives each its own part.
// seconds (ranks): of a micro-batch of each.
static inline SlowRank rank_pace_find(const Options *options, const double *seconds, int ranks) {
    SlowRank slow = {-1, RANK_IS_SLOW};
    bool alike = options->rank_accumulate[0] == '\0';
    double *parts = MEMORY_OF(double, ranks), *sorted = MEMORY_OF(double, ranks);
    for (int rank = 0; rank < ranks; rank++) {
        sorted[rank] = parts[rank] = seconds[rank] * (alike ? 1 : options_rank_accumulate(options, rank));
    }
    qsort(sorted, ranks, sizeof *sorted, numbers_compare);
    double median = sorted[(ranks - 1) / 2];
    for (int rank = 0; rank < ranks && median > 0; rank++) {
        if (!(parts[rank] / median > slow.factor)) { continue; }
        slow.rank = rank;
        slow.factor = parts[rank] / median;
    }
    free(parts);
    free(sorted);
    return slow;
}

// text <- numbers for --rank-accumulate by which all ranks (at most 16) compute for as long: as
// many in all as now, and more where the slowest would have fewer than the rule needs.
static inline void rank_pace_list(const Options *options, const double *seconds, int ranks, char text[128]) {
    double speed = 0, total = 0, slowest = 0, least = 1 + options_rule(options)->further_rounds;
    text[0] = '\0';
    for (int rank = 0; rank < ranks; rank++) {
        speed += 1 / seconds[rank];
        slowest = fmax(slowest, seconds[rank]);
        total += options_rank_accumulate(options, rank);
    }
    total = fmax(total, least * slowest * speed);
    for (int rank = 0; rank < ranks; rank++) {
        text_join(text, 128, ",", "%.0f", fmax(rint(total / speed / seconds[rank]), least));
    }
}

// Prints which rank is slow, and what helps. where: its host, or "". width: of the margin.
static inline void rank_pace_print(const Options *options, const double *seconds, int ranks, SlowRank slow,
                                   const char *where, int width) {
    enum { MOST = 16 };
    const Rule *rule = options_rule(options);
    const OptionSpec *list = option_of(offsetof(Options, rank_accumulate));
    char numbers[128];
    bool alike = options->rank_accumulate[0] == '\0';
    printf("%-*srank %d%s%s takes %.1f times as long for %s as the median of all ranks, which wait for it\n",
           width, "slow", slow.rank, where[0] != '\0' ? " on " : "", where, slow.factor,
           alike ? "a micro-batch" : "its part of a commit");
    if (ranks > MOST) { return; }
    rank_pace_list(options, seconds, ranks, numbers);
    if (strcmp(numbers, options->rank_accumulate) == 0) { return; } // whole numbers share no better
    bool fits = option_is_of_rule(list, rule);
    printf("%-*s--%s %s%s%s shares the work by speed\n", width, "", list->name, numbers,
           fits ? "" : ", under ", fits ? "" : list->rules);
}
