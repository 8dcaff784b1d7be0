// rule.h: what an update rule is. Each rule is one page (acco.h, ddp.h, ...), and rules.h
// lists them.
//
// A page opens with the rule's timeline and formulas; its commit is a few lines of the
// scheduler's verbs. All other code works through the `Rule` at the end of the page and
// knows no rule by its name.
#pragma once

#include "runtime/names.h"
#include "scheduler/state.h"

typedef char OptionText[1024]; // the text of an option, with its zero byte

enum { RULE_TEXT = sizeof(OptionText) + 256 };

typedef struct Rule {
    const char *name;    // of --optimizer
    const char *summary; // one line for the start-up block
    RuleKind kind;       // what compute does while data travel (scheduler/state.h)
    bool replicated;     // every rank holds and steps the whole optimizer state
    int further_rounds;  // calls of accumulate() per commit after the first; of a micro-batch at least
    // A job may still run after a commit, so a checkpoint must hold the sum that it makes.
    bool job_in_flight_between_commits;

    // One commit; of a local rule the inner steps up to its next exchange.
    void (*advance)(Scheduler *s);
    // After the last commit, unless the run failed: afterwards s->parameters is the
    // result, the same on every rank. Returns whether the committed parameters have changed.
    // NULL: s->parameters is the result already.
    bool (*finish)(Scheduler *s);
    // While a gradient sum waits for its launch (is_handed_over), compute uses a
    // prediction from the committed parameters.
    bool predicts;

    // What a user may ask of this rule alone. `own` is the rule's part of RuleOptions
    // (rules.h), a struct of its page. Each of these may be NULL.
    //
    // check: whether the options fit together. layers: of the model; 0: not known yet.
    // configure: the options as settings of the scheduler; they have passed check.
    // choose: options that are "auto" leave a choice to a measurement (plan/choose.h). Sets the
    // options in `own` to choice number (format, split), as a user would have; among equally
    // fast choices the lowest numbers win. False: there is no such choice.
    // settings: of the rank with the most micro-batches.
    // describe: what follows from the options, for the start-up block.
    bool (*check)(const void *own, int layers, Error *error);
    void (*configure)(const void *own, SchedulerSettings *settings);
    bool (*choose)(void *own, const SchedulerSettings *settings, int format, int split);
    void (*describe)(const SchedulerSettings *settings, char text[RULE_TEXT]);
} Rule;
