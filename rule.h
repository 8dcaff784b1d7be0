// rule.h: what an update rule is. Each rule is one page (acco.h, ddp.h, ...), and rules.h
// lists them.
//
// A page opens with the rule's timeline and formulas. Then come its options, its checks,
// its settings and its commit, which is a few lines of the scheduler's verbs. A `Rule` at
// the end of the page lists them. All other code works through a Rule and knows no rule
// by its name.
#ifndef ACCO_RULE_H
#define ACCO_RULE_H

#include "runtime/names.h"
#include "scheduler.h"

typedef char OptionText[1024]; // a text that a user gave, with its zero byte

enum { RULE_TEXT = sizeof(OptionText) + 256 };

// What a rule's own options are checked against.
typedef struct RuleFacts {
    int layers;      // of the model; 0: not known yet
    bool adaptive;   // --accumulate auto
    bool by_library; // --exchange library, which carries fp32 and bf16 only
} RuleFacts;

typedef struct Rule {
    const char *name;    // of --optimizer
    const char *summary; // one line for the start-up block
    RuleKind kind;       // what compute does while data travel (scheduler_state.h)
    // How far it departs from steps with the mean gradient of a batch at the current
    // parameters, 0: not at all. Of rules that are equally fast a plan recommends the one with
    // the least. Which rule with local steps departs least has not been measured.
    int departs;
    bool replicated;       // every rank holds and steps the whole optimizer state
    int rounds_per_commit; // calls of accumulate() per commit, of a micro-batch or more each
    // After a commit a job may still be under way, so a checkpoint must hold the sum it
    // made.
    bool job_in_flight_between_commits;

    // One commit; of a local rule the inner steps up to its next exchange.
    void (*commit)(Scheduler *s);
    // After the last commit, unless the run failed: afterwards s->parameters is the
    // result, the same on every rank. Returns whether the committed parameters have changed.
    // NULL: s->parameters is the result already.
    bool (*finish)(Scheduler *s);
    // The committed parameters (parameter_count) between two commits, the same on every
    // rank. NULL: compute uses them or casts of them, or where is_ahead says so (NULL:
    // never), a prediction from them.
    const float *(*committed)(Scheduler *s);
    bool (*is_ahead)(const Scheduler *s);

    // What a user may ask of this rule alone. `own` is the rule's part of RuleOptions
    // (rules.h), a struct of its page. Each of these may be NULL.
    //
    // check: whether the options fit together, and to what else is known of the run.
    // configure: the options as settings of the scheduler; they have passed check.
    // measure: makes the choices that some options ("auto") leave to a measurement, before
    // training and while nothing else runs; all ranks call it together. It writes them
    // into `own` as a user would have, and why into `reason`; rank 0's are those that
    // count. describe: the numbers of the rule, for the start-up block.
    bool (*check)(const void *own, const RuleFacts *facts, Error *error);
    void (*configure)(const void *own, SchedulerSettings *settings);
    void (*measure)(void *own, Scheduler *s, char reason[RULE_TEXT]);
    void (*describe)(const void *own, const SchedulerSettings *settings, char text[RULE_TEXT]);
    // The inner steps that a rank takes between two exchanges; NULL: 1.
    int64_t (*exchange_steps)(const void *own);
} Rule;

// Whether compute uses a prediction from the committed parameters.
static inline bool rule_is_ahead(const Rule *rule, const Scheduler *s) {
    return rule->is_ahead != NULL && rule->is_ahead(s);
}

// Lends the committed parameters (parameter_count), the same bits on every rank, between
// two commits. All ranks call it together, and give them back with return_committed.
static inline const float *borrow_committed(Scheduler *s, const Rule *rule) {
    scheduler_settle(s);
    if (rule->committed != NULL) { return rule->committed(s); }
    return s->settings.gathers_casts || rule_is_ahead(rule, s) ? borrow_masters(s) : s->parameters.data;
}

// The same as what a micro-batch computes with (scheduler_weights): casts are good enough.
static inline const void *borrow_committed_weights(Scheduler *s, const Rule *rule) {
    scheduler_settle(s);
    if (rule->committed != NULL) { return rule->committed(s); }
    if (!rule_is_ahead(rule, s)) { return scheduler_weights(s); }
    return s->settings.keeps_casts ? (const void *)cast_masters(s) : borrow_masters(s);
}

static inline void return_committed(Scheduler *s, const void *committed) {
    if (committed == s->gradients.data) { restore_gradients(s); }
}

#endif
