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

// How many times the tokens of plain data-parallel training a rule needs for the same loss:
// the lowest and the highest ratio measured with two workers. A local rule's excess over 1
// grows with the number of workers, as each has a smaller share of the batch (measured up to
// 8). Runs were cut off at twice the tokens; TOKENS_UNKNOWN marks those that had not reached
// the loss.
#define TOKENS_UNKNOWN 3.0

typedef struct TokensNeeded {
    double least, most;
} TokensNeeded;

// A way to run a rule, and what was measured of it (dev/results/tokens-to-a-loss-2026-11-25.md).
// A plan weighs speed against it.
typedef struct Recipe {
    const char *options; // "--name value ..."; "": the rule's defaults, or whatever the user says
    TokensNeeded with_adamw, with_muon; // over plain training with the same --inner
} Recipe;

enum { RULE_RECIPES = 3 }; // at most

typedef struct Rule {
    const char *name;             // of --optimizer
    const char *summary;          // one line for the start-up block
    RuleKind kind;                // what compute does while data travel (scheduler/state.h)
    Recipe recipes[RULE_RECIPES]; // the first is for the defaults; a NULL ends them
    bool replicated;              // every rank holds and steps the whole optimizer state
    int further_rounds; // calls of accumulate() per commit after the first; of a micro-batch at least
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
