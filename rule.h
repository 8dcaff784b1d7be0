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

typedef char OptionText[1024]; // the text of an option, with its zero byte

enum { RULE_TEXT = sizeof(OptionText) + 256 };

// What is known of the run when a rule checks its own options.
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
    // parameters; 0: not at all. Among equally fast rules a plan recommends the one that
    // departs least. Which rule with local steps departs least has not been measured.
    int departs;
    bool replicated;       // every rank holds and steps the whole optimizer state
    int rounds_per_commit; // calls of accumulate() per commit, of a micro-batch or more each
    // A job may still be under way after a commit, so a checkpoint must hold the sum that it
    // makes.
    bool job_in_flight_between_commits;

    // One commit; of a local rule the inner steps up to its next exchange.
    void (*commit)(Scheduler *s);
    // After the last commit, unless the run failed: afterwards s->parameters is the
    // result, the same on every rank. Returns whether the committed parameters have changed.
    // NULL: s->parameters is the result already.
    bool (*finish)(Scheduler *s);
    // While a gradient sum is handed over, compute uses a prediction from the committed
    // parameters.
    bool predicts;

    // What a user may ask of this rule alone. `own` is the rule's part of RuleOptions
    // (rules.h), a struct of its page. Each of these may be NULL.
    //
    // check: whether the options fit together, and to what else is known of the run.
    // configure: the options as settings of the scheduler; they have passed check.
    // choose: options that are "auto" leave a choice to a measurement (plan/choose.h). Writes
    // choice number (format, split) into `own`, as a user would have; both count from the
    // one that is preferred where several are as fast. False: there is no such choice.
    // settings: of the rank with the most micro-batches.
    // describe: the numbers of the rule, for the start-up block.
    bool (*check)(const void *own, const RuleFacts *facts, Error *error);
    void (*configure)(const void *own, SchedulerSettings *settings);
    bool (*choose)(void *own, const SchedulerSettings *settings, int format, int split);
    void (*describe)(const void *own, const SchedulerSettings *settings, char text[RULE_TEXT]);
} Rule;

// Whether compute uses a prediction from the committed parameters.
static inline bool rule_is_ahead(const Rule *rule, const Scheduler *s) {
    return rule->predicts && is_handed_over(s);
}

// ---------------------------------------------------------------------------------------
// The committed parameters, lent between two commits to be evaluated, saved or compared
//
// Compute may hold something else: a prediction, casts, or with local rules the parameters
// of one worker. Then the master copies of all ranks are gathered, exact ones into the
// gradient accumulator and casts beside the casts that compute uses. All ranks call these
// functions together, and give back what they borrowed with return_committed before the next
// commit.

typedef struct MasterGather {
    Scheduler *scheduler;
    Real *casts; // (padded); NULL: exact parameters into the gradient accumulator
} MasterGather;

static inline void gather_masters_task(void *context, Stream *stream) {
    const MasterGather *work = (const MasterGather *)context;
    Scheduler *s = work->scheduler;
    size_t cells = s->layout.cells;
    Collective collective = {
        .layout = &s->layout, .wire = WIRE_FP32, .buffer = s->gradients.data, .source = s->optimizer.master};
    if (work->casts != NULL) {
        comm_gather_casts(&s->comm, stream, &collective, work->casts, 0, cells);
    } else {
        comm_all_gather(&s->comm, stream, &collective, 0, cells);
    }
}

// The parameters (parameter_count), the same bits on every rank.
static inline const float *borrow_committed(Scheduler *s, const Rule *rule) {
    scheduler_settle(s);
    if (rule->kind == RULE_LOCAL) { return s->local.outer; }
    if (!s->settings.gathers_casts && !rule_is_ahead(rule, s)) { return s->parameters.data; }
    MasterGather work = {.scheduler = s, .casts = NULL};
    scheduler_call(s, s->communication, gather_masters_task, &work);
    return s->gradients.data;
}

// The same as what a micro-batch computes with (scheduler_weights): casts are good enough.
static inline const void *borrow_committed_weights(Scheduler *s, const Rule *rule) {
    bool ahead = rule_is_ahead(rule, s);
    if (rule->kind == RULE_LOCAL || (ahead && !s->settings.keeps_casts)) { return borrow_committed(s, rule); }
    scheduler_settle(s);
    if (!ahead) { return scheduler_weights(s); }
    MasterGather work = {.scheduler = s, .casts = s->arriving_casts};
    scheduler_call(s, s->communication, gather_masters_task, &work);
    return s->arriving_casts;
}

// The accumulator is empty between two commits, or holds what was handed over and is to be
// added to (hand_over).
static inline void return_committed(Scheduler *s, const void *committed) {
    if (committed != s->gradients.data) { return; }
    if (s->tally.micro_batches == 0) {
        scheduler_move_gradients(s, NULL, true);
    } else {
        assert(is_handed_over(s));
        stream_copy(s->compute, s->gradients.data, s->comm_buffer.data,
                    layout_padded(&s->layout) * sizeof(float));
        stream_settle(s->compute);
    }
}

#endif
