// choose.h: the choices of a rule that are left to a measurement, such as --acco-split auto.
// They are made when a run could start to train, and before anything is printed about it.
#ifndef ACCO_PLAN_CHOOSE_H
#define ACCO_PLAN_CHOOSE_H

#include "program/start.h"

// Makes the choices that are left to a measurement. The scheduler, checkpoints and the
// configuration, which was saved before, get to know what was chosen.
static inline void choose_by_measurement(Run *run) {
    const Rule *rule = run->rule;
    Options *options = &run->options;
    Error error = {""};
    if (options_left_to_measure(options)) {
        if (run_is_main(run)) {
            printf("measuring  a micro-batch and the exchanges, to choose what is auto\n");
        }
        fflush(stdout);
        rule->measure(options_of_rule(options), &run->scheduler, run->rule_reason);
        share_from_rank_zero(&run->transport, &options->rules, sizeof options->rules);
    }
    if (run->rule_reason[0] != '\0') { // now, or before the run was resumed
        rule->configure(options_of_rule(options), &run->scheduler.settings);
        bool saved = !run_is_main(run) || save_configuration(run, &error);
        agree_or_exit(run, saved ? 0 : EXIT_SYSTEM_FAILURE, &error);
    }
    run->checkpointed.options = options_as_json(options); // from here on they do not change
    run->checkpointed.measured = run->rule_reason;
}

#endif
