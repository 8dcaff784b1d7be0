// choose.h: the choices of a rule that are left to a measurement, such as --acco-split auto.
// They are made when a run could start to train, and before anything is printed about it.
//
// The ranks measure a micro-batch and exchanges on the run itself (measure.h), and rank 0
// chooses by a simulation (choice.h). Formats are measured from the finest to coarser ones,
// and no further once computation hides the exchanges.
#ifndef ACCO_PLAN_CHOOSE_H
#define ACCO_PLAN_CHOOSE_H

#include "measure.h"
#include "plan/choice.h"
#include "plan/forecast.h"
#include "program/start.h"

// All ranks measure together; rank 0 chooses for all.
static inline void measure_and_choose(Run *run) {
    Scheduler *s = &run->scheduler;
    MeasuredRound round = measure_round(s, s->settings.wire);
    RankSpeed mine = {s->settings.micro_batches, round.micro_batch};
    RankSpeed *ranks =
        (RankSpeed *)transport_collect_records(&run->transport, "measuring the ranks", &mine, sizeof mine);
    Setup setup = setup_of_run(run);
    Machine machine = machine_of_setup(&setup, round.micro_batch);
    Measurements measured = {.rule = run->options.rule,
                             .settings = &s->settings,
                             .problem = &s->problem,
                             .transport = &run->transport,
                             .machine = &machine,
                             .ranks = ranks};
    Choice choices[WIRE_FORMAT_COUNT];
    int count = 0;
    measured.exchange[s->settings.wire] = round.exchange;
    for (bool enough = false; !enough; count++) {
        RuleOptions options = run->options.rules;
        if (!run->rule->choose(rule_own_options(measured.rule, &options), &s->settings, count, 0)) { break; }
        WireFormat wire = settings_of_rank(&measured, &options, 0).estimate_wire;
        if (measured.exchange[wire] == 0) { measured.exchange[wire] = measure_round(s, wire).exchange; }
        if (run_is_main(run)) {
            choices[count] = choose_split(&measured, &run->options.rules, count);
            enough = choice_hides_everything(&measured, &choices[count]);
        }
        wait_for_rank_zero(&run->transport, "choosing"); // with many ranks it simulates for a while
        share_from_rank_zero(&run->transport, &enough, sizeof enough);
    }
    if (run_is_main(run)) {
        const Choice *chosen = choose_format(&measured, choices, count);
        double a = 0, b = 0;
        SchedulerSettings settings = settings_of_rank(&measured, &chosen->options, 0);
        for (int rank = 0; rank < run->transport.size; rank++) {
            SchedulerSettings other = settings_of_rank(&measured, &chosen->options, rank);
            a = fmax(a, other.round_a * ranks[rank].seconds);
            b = fmax(b, (other.micro_batches - other.round_a) * ranks[rank].seconds);
        }
        snprintf(run->rule_reason, sizeof run->rule_reason,
                 "measured: the exchange of a commit takes %.3g s and the round beside it %.3g s, that of an "
                 "estimate (%s) %.3g s and its round %.3g s",
                 measured.exchange[settings.wire], a, wire_name(settings.estimate_wire),
                 measured.exchange[settings.estimate_wire], b);
        run->options.rules = chosen->options;
    }
    share_from_rank_zero(&run->transport, run->rule_reason, sizeof run->rule_reason);
    share_from_rank_zero(&run->transport, &run->options.rules, sizeof run->options.rules);
    free(ranks);
}

// Makes the choices that are left to a measurement. The scheduler, checkpoints and the
// configuration, which was saved before, get to know what was chosen.
static inline void choose_by_measurement(Run *run) {
    Options *options = &run->options;
    Error error = {""};
    if (options_left_to_measure(options)) {
        if (run_is_main(run)) {
            printf("measuring  a micro-batch and the exchanges, to choose what is auto\n");
        }
        fflush(stdout);
        measure_and_choose(run);
    }
    if (run->rule_reason[0] != '\0') { // now, or before the run was resumed
        run->rule->configure(options_of_rule(options), &run->scheduler.settings);
        bool saved = !run_is_main(run) || save_configuration(options, run->directory, &error);
        agree_or_exit(run, saved ? 0 : EXIT_SYSTEM_FAILURE, &error);
    }
    run->checkpointed.options = options_as_json(options); // from here on they do not change
    run->checkpointed.measured = run->rule_reason;
}

#endif
