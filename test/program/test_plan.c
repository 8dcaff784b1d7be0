// test_plan.c: train_gpt plan as a user meets it: whether a run fits, what would, how long its
// commits take under every rule, and which rule to take. test_program.c compares planned
// memory with what runs use; test_simulation.c has what the times rest on.
#include "test/program/program.h"

#include "program/terminal.h"
#include "rules.h"

// ---- Memory ---------------------------------------------------------------------------

// The last line of a plan that begins with `name`.
static const char *plan_line(Stage *stage, const char *arguments, const char *name) {
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    assert_string_equal(outcome.errors, "");
    char *line = strstr(outcome.output, name);
    if (line == NULL) { fail_msg("%s: no %s in %s", arguments, name, outcome.output); }
    return line;
}

// A plan says whether the run fits, and if not, what does: exactly the micro-batches up to
// the one that it names.
static void a_plan_ends_with_a_verdict(void **state) {
    Stage *stage = stage_of(state);
    static const char plan[] = "plan --model 125M --gpu-memory 12G --ranks 8 --optimizer acco";
    char arguments[256], expected[64];
    int largest = 0;
    const char *line = plan_line(stage, plan, "\nfits             yes: ");
    line = strstr(line, "the largest micro-batch that fits is ");
    assert_non_null(line);
    assert_int_equal(sscanf(line, "the largest micro-batch that fits is %d", &largest), 1);
    assert_true(largest > 8);
    snprintf(arguments, sizeof arguments, "%s --micro-batch %d", plan, largest);
    plan_line(stage, arguments, "\nfits             yes: ");
    snprintf(arguments, sizeof arguments, "%s --micro-batch %d", plan, largest + 1);
    snprintf(expected, sizeof expected, ": --micro-batch %d fits\n", largest);
    text_check(plan_line(stage, arguments, "\nfits             no: 125M with"), expected, arguments);
    // On CPUs all ranks may be on this machine.
    static const char *const together[] = {"plan --model tiny --ranks 2", "plan --model 36M --ranks 9000",
                                           "plan --model 36M --ranks 9000 --ranks-per-host 4"};
    for (int i = 0; i < 3; i++) {
        line = strstr(plan_line(stage, together[i], "\nfits             yes: "),
                      "ranks on this machine would need ");
        assert_non_null(line);
        assert_true((strstr(line, ", which fits, too\n") != NULL) == (i == 0));
    }
}

static void a_plan_says_what_would_fit(void **state) {
    static const struct {
        const char *arguments, *part;
    } cases[] = {
        {"--model 125M --gpu-memory 24G --recompute none --micro-batch 128",
         " fits, --recompute block fits\n"},
        {"--model 1.3B --gpu-memory 24G --ranks 64 --optimizer ddp --micro-batch 1",
         ": --optimizer zero1 fits\n"},
        {"--model 1.3B --gpu-memory 24G --ranks 64 --optimizer diloco --inner muon --micro-batch 1",
         ": --optimizer zero1 fits\n"},
        {"--model 125M --gpu-memory 2G --micro-batch 1 --recompute block",
         "on the GPU for a rank, and 1.90 GB are available"},
        {"--model 2.7B --gpu-memory 12G --ranks 64 --optimizer zero1",
         "choose a smaller --model, or more ranks"},
        {"--model 2.7B --gpu-memory 24G", "choose a smaller --model"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "plan %s", cases[i].arguments);
        text_check(plan_line(stage_of(state), arguments, "\nfits             no: "), cases[i].part,
                   arguments);
    }
    // What fits only with --recompute block is no reason to name a rule.
    const char *line = plan_line(stage_of(state),
                                 "plan --model 125M --gpu-memory 4500M --ranks 4 --optimizer ddp "
                                 "--micro-batch 8 --recompute none",
                                 "\nfits             no: ");
    text_check(line, "--recompute block fits", "a rule that does not fit");
    assert_null(strstr(line, "--optimizer"));
}

// --recompute auto is the first level with which the whole fits, optimizer and all.
static void as_little_is_recomputed_as_fits(void **state) {
    static const char *const levels[] = {"none", "gelu", "block"};
    static const char plan[] = "plan --model gpt2 --ranks 2 --gpu-tflops 100 --gpu-memory";
    for (int gigabytes = 4; gigabytes <= 6; gigabytes++) {
        char arguments[200], expected[64], takes[200];
        int first = 0;
        for (bool fits = false; !fits; first += !fits) {
            assert_true(first < 3);
            snprintf(arguments, sizeof arguments, "%s %dG --recompute %s", plan, gigabytes, levels[first]);
            Outcome given = program_run(stage_of(state), 0, arguments);
            outcome_check(&given, 0, arguments);
            fits = strstr(given.output, "\nfits             yes: ") != NULL;
            const char *line = strstr(given.output, "\ntime ");
            snprintf(takes, sizeof takes, "%.*s", (int)strcspn(line + 1, "\n") + 1, line);
        }
        snprintf(arguments, sizeof arguments, "%s %dG", plan, gigabytes);
        snprintf(expected, sizeof expected, "recompute        %s (", levels[first]);
        plan_line(stage_of(state), arguments, "\nfits             yes: ");
        plan_line(stage_of(state), arguments, expected);
        plan_line(stage_of(state), arguments, takes); // what is computed again takes time
    }
}

// --fit takes the largest micro-batch that the verdict names, less a margin, and
// recomputes only where a batch worth computing does not fit otherwise.
static void fit_takes_the_largest_micro_batch(void **state) {
    static const struct {
        const char *arguments, *recompute;
    } cases[] = {{"--model 125M --gpu-memory 24G", "none"},
                 {"--model gpt2-medium --gpu-memory 80G", "none"},
                 {"--model 1.3B --gpu-memory 24G --ranks 64", "block"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[256], expected[64];
        int largest = 0, chosen = 0;
        snprintf(arguments, sizeof arguments, "plan %s --fit on", cases[i].arguments);
        Outcome outcome = program_run(stage_of(state), 0, arguments);
        outcome_check(&outcome, 0, arguments);
        const char *name = strstr(outcome.output, "micro-batch "),
                   *line = strstr(outcome.output, "the largest micro-batch that fits is ");
        assert_true(name != NULL && sscanf(name, "micro-batch %d", &chosen) == 1);
        assert_true(line != NULL && sscanf(line, "the largest micro-batch that fits is %d", &largest) == 1);
        assert_true(chosen <= largest && chosen >= 0.9 * largest);
        assert_true(chosen * 1024 >= 8192);
        snprintf(expected, sizeof expected, "recompute        %s (", cases[i].recompute);
        text_check(outcome.output, expected, arguments);
    }
}

// ---- Time -----------------------------------------------------------------------------

// What --json FILE holds after the plan, for the caller to free.
static json_t *plan_json(Stage *stage, const char *arguments, Outcome *outcome) {
    char all[512], path[STAGE_PATH_SIZE];
    json_error_t problem;
    snprintf(all, sizeof all, "plan %s --json plan.json", arguments);
    *outcome = program_run(stage, 0, all);
    outcome_check(outcome, 0, all);
    assert_string_equal(outcome->errors, "");
    json_t *plan = json_load_file(stage_path(stage, "plan.json", path), 0, &problem);
    if (plan == NULL) { fail_msg("%s: %s", all, problem.text); }
    return plan;
}

static json_t *rule_of(json_t *plan, const char *rule) {
    json_t *rules = json_object_get(plan, "rules");
    for (size_t i = 0; i < json_array_size(rules); i++) {
        json_t *row = json_array_get(rules, i);
        if (strcmp(json_string_value(json_object_get(row, "rule")), rule) == 0) { return row; }
    }
    fail_msg("no rule %s in the plan", rule);
    return NULL;
}

// A format on the wire is part of what is recommended: fp32 where the link is fast, and where it is
// not, 8 or 4 bits.
static void a_plan_recommends_the_wire(void **state) {
    static const int mbits[2] = {100000, 200};
    for (int coarse = 0; coarse < 2; coarse++) {
        char arguments[256], command[512];
        Outcome outcome;
        snprintf(arguments, sizeof arguments, "--ranks 2 --compute-ms 10 --accumulate 32 --host-mbit %d",
                 mbits[coarse]);
        json_decref(plan_json(stage_of(state), arguments, &outcome));
        const char *line = strstr(strstr(outcome.output, "\nrecommended "), "./train_gpt ");
        snprintf(command, sizeof command, "%.*s", (int)strcspn(line, "\n"), line);
        if ((strstr(command, " --wire int") != NULL) != coarse) { fail_msg("%s: %s", arguments, command); }
        text_check(outcome.output,
                   coarse ? "\nloss             zero1 needs 1 to 1.08 times the tokens of plain "
                            "data-parallel training\n"
                          : "\nloss             the steps of zero1 equal plain data-parallel training's\n",
                   arguments);
    }
}

// Every rule has its row. Whichever is recommended is the first at a loss, or as soon there
// within 2 %, and has a line to be copied. A new model is trained with Muon, another one goes on
// with the optimizer that it has.
static void a_plan_recommends_the_first_rule_at_a_loss(void **state) {
    static const struct {
        const char *arguments, *recommended;
    } cases[] = {
        {"--model 125M --ranks 2 --host-mbit 1000000 --compute-ms 20000", "zero1"}, // auto: muon
        {"--model 125M --ranks 2 --host-mbit 1000000 --compute-ms 20000 --inner adamw", "zero1 --inner muon"},
        {"--ranks 16 --host-mbit 10 --compute-ms 50", NULL},
        {"--optimizer zero1 --ranks 8 --ranks-per-host 4 --host-mbit 100 --compute-ms 50 --accumulate 1",
         NULL},
        {"--ranks 4 --rank-accumulate 4,4,2,2 --host-mbit 1000 --compute-ms 5", NULL},
        {"--ranks 4 --accumulate auto --host-mbit 50 --compute-ms 20", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Outcome outcome;
        char arguments[256];
        snprintf(arguments, sizeof arguments, "%s --tokens 10G", cases[i].arguments);
        json_t *plan = plan_json(stage_of(state), arguments, &outcome);
        json_t *rules = json_object_get(plan, "rules");
        json_t *best = NULL;
        assert_int_equal(json_array_extend(rules, json_object_get(plan, "recipes")), 0);
        for (size_t j = 0; j < json_array_size(rules); j++) {
            json_t *row = json_array_get(rules, j);
            if (json_is_true(json_object_get(row, "recommended"))) { best = row; }
        }
        char name[128];
        snprintf(name, sizeof name, "%s%s%s", json_string_value(json_object_get(best, "rule")),
                 json_string_value(json_object_get(best, "options"))[0] == '\0' ? "" : " ",
                 json_string_value(json_object_get(best, "options")));
        double batch =
            log_number(rule_of(plan, json_string_value(json_object_get(plan, "rule"))), "micro_batches");
        double first = 0, speed = log_number(best, "tokens_per_second"),
               chosen = speed / log_number(best, "tokens_needed");
        assert_true(json_array_size(rules) >= 7);
        for (size_t j = 0; j < json_array_size(rules); j++) {
            json_t *row = json_array_get(rules, j);
            double commit = log_number(row, "commit_ms"), computing = log_number(row, "computing");
            assert_true(commit > 0 && computing > 0 && computing <= 1.0001);
            assert_true(log_number(row, "waiting_ms") >= -1e-6);
            assert_true(fabs(log_number(row, "micro_batches") - batch) <= 0.5 * log_number(plan, "ranks"));
            first = fmax(first, log_number(row, "tokens_per_second") / log_number(row, "tokens_needed"));
        }
        if (!(chosen >= 0.98 * first)) { fail_msg("%s: %s is not the first", cases[i].arguments, name); }
        if (cases[i].recommended != NULL) { assert_string_equal(name, cases[i].recommended); }
        char line[160], command[64];
        snprintf(line, sizeof line, "\nrecommended      %s: ", name);
        snprintf(command, sizeof command, "./train_gpt --optimizer %s ",
                 json_string_value(json_object_get(best, "rule")));
        text_check(outcome.output, line, cases[i].arguments);
        text_check(outcome.output, command, cases[i].arguments);
        char time[NUMBER_TEXT_SIZE], took[128];
        snprintf(took, sizeof took, "tokens/s, 10.0G tokens in %s", human_duration(1e10 / speed, time));
        text_check(outcome.output, took, cases[i].arguments);
        text_check(outcome.output, "\nloss             ", cases[i].arguments);
        json_decref(plan);
    }
}

// Workers with local steps share a batch, so more of them need more tokens; others do not.
static void more_workers_need_more_tokens_for_local_steps(void **state) {
    static const char *const rules[] = {"acco", "diloco"};
    double needed[2][2];
    for (int i = 0; i < 2; i++) {
        Outcome outcome;
        json_t *plan = plan_json(stage_of(state), i == 0 ? "--ranks 2" : "--ranks 8", &outcome);
        for (int j = 0; j < 2; j++) { needed[j][i] = log_number(rule_of(plan, rules[j]), "tokens_needed"); }
        json_decref(plan);
    }
    assert_true(needed[0][0] == needed[0][1]);
    // Four times what is above 1, of the least and of the most; needed is their geometric mean.
    double times = (needed[1][1] - 1) / (needed[1][0] - 1);
    assert_true(times > 3.5 && times < 4.01);
    // Two workers need what was measured of two: DiLoCo with AdamW 1.18 to 1.69 times the tokens.
    assert_close(needed[1][0], sqrt(1.18 * 1.69), 1e-6, "what DiLoCo needs on two ranks");
}

// Where nothing can be recommended the reason is the true one: here it is not the memory.
static void a_plan_says_why_nothing_is_recommended(void **state) {
    static const char arguments[] =
        "plan --ranks 16 --slow-rank 0 --slow-ms 1 --compute-ms 5 --accumulate 1000000";
    static const char adaptive[] = // 10^15 micro-batches hide an exchange
        "plan --ranks 2 --accumulate auto --compute-ms 1e-6 --host-mbit 1e-3 --threads 1";
    static const char reason[] = "micro-batches would have to be simulated, which takes too long";
    text_check(plan_line(stage_of(state), arguments, "\nrecommended      none: "), reason, arguments);
    text_check(plan_line(stage_of(state), adaptive, "\n* acco "), reason, adaptive);
}

// What a run does first does not decide what the whole of it takes.
static void sequential_commits_are_not_simulated(void **state) {
    static const char *const first[] = {"", "--sequential 100"};
    double seconds[2];
    for (int i = 0; i < 2; i++) {
        Outcome outcome;
        char arguments[128];
        snprintf(arguments, sizeof arguments, "--ranks 4 --compute-ms 50 --host-mbit 100 --threads 1 %s",
                 first[i]);
        json_t *plan = plan_json(stage_of(state), arguments, &outcome);
        seconds[i] = log_number(rule_of(plan, "acco"), "commit_ms");
        json_decref(plan);
    }
    assert_true(seconds[0] > 0 && seconds[0] == seconds[1]);
}

// With --fit every rule has what fits for it: each fills nearly all of the memory, and
// none lies out because another one's micro-batch would be too large for it.
static void fit_is_for_every_rule(void **state) {
    Outcome outcome;
    json_t *plan = plan_json(stage_of(state),
                             "--model 125M --ranks 2 --gpu-memory 24G --compute-ms 3000 --fit on", &outcome);
    json_t *rules = json_object_get(plan, "rules");
    double own = log_number(rule_of(plan, "acco"), "micro_batch"),
           local = log_number(rule_of(plan, "co2"), "micro_batch");
    for (size_t i = 0; i < json_array_size(rules); i++) {
        json_t *row = json_array_get(rules, i);
        double filled = log_number(row, "memory_bytes") / (24e9 * 0.95);
        assert_true(json_is_true(json_object_get(row, "fits")));
        if (!(filled > 0.93 && filled <= 0.981)) { fail_msg("filled %g", filled); }
    }
    assert_true(local < own);
    json_decref(plan);
}

// Whatever would be the quickest, it is recommended only if it fits.
static void what_does_not_fit_is_not_recommended(void **state) {
    static const char *const memory[] = {"80G", "24G"};
    for (int i = 0; i < 2; i++) {
        Outcome outcome;
        char arguments[256];
        snprintf(arguments, sizeof arguments,
                 "--model 1.3B --ranks 4 --ranks-per-host 1 --gpu-memory %s --gpu-tflops 100 --micro-batch 1 "
                 "--host-mbit 2000",
                 memory[i]);
        json_t *plan = plan_json(stage_of(state), arguments, &outcome);
        const char *recommended = json_string_value(json_object_get(plan, "recommended"));
        assert_string_equal(recommended, i == 0 ? "streaming-diloco" : "zero1");
        assert_true(json_is_true(json_object_get(rule_of(plan, recommended), "fits")));
        assert_true(json_is_true(json_object_get(rule_of(plan, "streaming-diloco"), "fits")) == (i == 0));
        json_decref(plan);
    }
}

// What a micro-batch takes on a GPU that is elsewhere is guessed from its peak, and the
// plan says so: 6 operations for a parameter and token, and those of attention, at 40 %
// of it.
static void the_time_of_a_gpu_is_guessed_from_its_peak(void **state) {
    static const char given[] = "--model 125M --ranks 2 --gpu-memory 24G --micro-batch 8 --recompute";
    static const char *const levels[] = {"none", "block"};
    for (int i = 0; i < 2; i++) {
        Outcome outcome;
        char arguments[256];
        snprintf(arguments, sizeof arguments, "%s %s --gpu-tflops 165", given, levels[i]);
        json_t *plan = plan_json(stage_of(state), arguments, &outcome);
        double least = 6 * 124e6 * 8 * 1024 / (0.4 * 165e12) * 1e3 * (i == 0 ? 1 : 4.0 / 3);
        double time = log_number(plan, "micro_batch_ms");
        if (!(time >= least && time <= 1.2 * least)) { fail_msg("%s: %g ms", arguments, time); }
        text_check(outcome.output, "(a guess: ", arguments);
        text_check(outcome.output, " TFLOP at 40 % of the GPU's peak of 165 TFLOP/s)", arguments);
        json_decref(plan);
    }
}

// A rule in a cell of a page has the numbers of the plan's row with its options, and of its rows it
// is the first at a loss, or as soon there within 2 %.
static void check_cell(json_t *plan, const char *name, json_t *cell) {
    const char *options = json_string_value(json_array_get(cell, 4));
    json_t *rows = json_object_get(plan, "rules"), *row;
    size_t i;
    double speed = 0, needed = 0, first = 0;
    json_array_foreach(rows, i, row) {
        if (strcmp(json_string_value(json_object_get(row, "rule")), name) != 0) { continue; }
        first = fmax(first, log_number(row, "tokens_per_second") / log_number(row, "tokens_needed"));
        if (strcmp(json_string_value(json_object_get(row, "options")), options) != 0) { continue; }
        speed = log_number(row, "tokens_per_second");
        needed = log_number(row, "tokens_needed");
        assert_close(json_number_value(json_array_get(cell, 2)), log_number(row, "computing"), 1e-6, name);
    }
    if (!(speed > 0)) { fail_msg("%s %s is not in the plan", name, options); }
    assert_close(json_number_value(json_array_get(cell, 0)) / speed, 1, 1e-6, name);
    assert_close(json_number_value(json_array_get(cell, 1)) / needed, 1, 1e-6, name);
    if (!(speed / needed >= 0.98 * first)) { fail_msg("%s %s is not the first", name, options); }
}

// The page has the numbers of the plan where it marks the plan, and those of another plan
// at another link and another number of micro-batches, which are on it however few cells a
// slow machine gives it.
static void a_page_shows_the_numbers_of_plans(void **state) {
    static const struct {
        const char *arguments;
        double mbit, count;
    } cases[] = {{"--host-mbit 300 --accumulate 3 --page page.html", 300, 3},
                 {"--host-mbit 10000 --accumulate 256", 10000, 256}};
    static const char begin[] = "<script type=\"application/json\" id=\"plan\">";
    json_t *page = NULL;
    for (int i = 0; i < 2; i++) {
        Outcome outcome;
        json_error_t problem;
        char arguments[256], path[STAGE_PATH_SIZE];
        snprintf(arguments, sizeof arguments, "--model 125M --ranks 4 --compute-ms 300 %s",
                 cases[i].arguments);
        json_t *plan = plan_json(stage_of(state), arguments, &outcome);
        if (i == 0) {
            char *text = stage_read_text(stage_of(state), stage_path(stage_of(state), "page.html", path));
            assert_null(strstr(text, "{{"));
            page = json_loads(strstr(text, begin) + sizeof begin - 1, JSON_DISABLE_EOF_CHECK, &problem);
            assert_non_null(page);
            assert_true(log_number(page, "own_mbit") == 300 && log_number(page, "own_count") == 3);
        }
        json_t *map = json_object_get(page, "map"), *cell = NULL, *counts = json_object_get(page, "counts");
        for (size_t row = 0; row < json_array_size(counts); row++) {
            json_t *links = json_object_get(page, "mbit");
            for (size_t j = 0; j < json_array_size(links); j++) {
                bool same = json_number_value(json_array_get(counts, row)) == cases[i].count &&
                            fabs(json_number_value(json_array_get(links, j)) / cases[i].mbit - 1) < 1e-9;
                if (same) { cell = json_array_get(json_array_get(map, row), j); }
            }
        }
        json_t *names = json_object_get(page, "rules"), *rules = json_object_get(cell, "rules");
        assert_true(json_array_size(rules) == RULE_COUNT && json_array_size(names) == RULE_COUNT);
        json_array_extend(json_object_get(plan, "rules"), json_object_get(plan, "recipes"));
        for (size_t rule = 0; rule < RULE_COUNT; rule++) {
            const char *name = json_string_value(json_object_get(json_array_get(names, rule), "name"));
            check_cell(plan, name, json_array_get(rules, rule));
            bool best = json_integer_value(json_object_get(cell, "recommended")) == (json_int_t)rule;
            assert_true(best == (strcmp(json_string_value(json_object_get(plan, "recommended")), name) == 0));
        }
        json_decref(plan);
    }
    json_decref(page);
}

// What a browser makes of the page of a plan with `after` behind it. Left out where there is none.
static const char *page_in_a_browser(Stage *stage, const char *plan, const char *after) {
    char arguments[512], path[STAGE_PATH_SIZE];
    if (system("command -v chromium > /dev/null") != 0) { leave_out("a browser (Debian: chromium)"); }
    snprintf(arguments, sizeof arguments, "%s --page page.html", plan);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    stage_write(stage, "after.html", after);
    shell(stage, "cat page.html after.html > both.html; timeout 120 chromium --headless --no-sandbox "
                 "--disable-gpu --dump-dom file://$PWD/both.html > seen.html 2> browser.errors");
    return stage_read_text(stage, stage_path(stage, "seen.html", path));
}

// In a real browser, where there is one: the page draws itself, shows what stands under
// the pointer, stays where it was clicked, and goes back to its plan.
static void a_page_follows_the_pointer(void **state) {
    static const char after[] =
        "<script>const seen = [], column = mbit => plan.mbit.findIndex(m => Math.abs(m / mbit - 1) < 1e-6);"
        "const look = () => seen.push([by('link-text').textContent, by('count-text').textContent, "
        "by('rules').rows.length, by('rules').rows[0].cells[2].textContent].join(', '));"
        "look();"
        "document.querySelectorAll('#chart .over')[column(1e4)].dispatchEvent(new "
        "PointerEvent('pointerenter')); "
        "look();"
        "document.querySelectorAll('#map .over')[(counts - 1) * links + column(1e3)].dispatchEvent(new "
        "MouseEvent('click')); "
        "look();"
        "by('map').dispatchEvent(new PointerEvent('pointerleave')); look();"
        "by('own').click(); look();"
        "const names = [...document.querySelectorAll('#map .strong')].map(text => text.textContent);"
        "const fills = [...document.querySelectorAll('#map .region')].map(box => box.getAttribute('fill'));"
        "seen.push(names.length > 0 && new Set(names).size === names.length && new Set(colours).size === "
        "plan.rules.length && names.every(name => fills.includes(colourOf[name])) ? 'named' : 'unnamed');"
        "document.body.append('SEEN ' + seen.join(' | ') + ' END');</script>";
    static const char places[] =
        "SEEN 300Mbit/s, yours, 3, yours, RULES, SPEED | 10Gbit/s, 3, yours, RULES, SPEED | "
        "1Gbit/s, 256, RULES, SPEED | 1Gbit/s, 256, RULES, SPEED | "
        "300Mbit/s, yours, 3, yours, RULES, SPEED | named END";
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    const char *text = page_in_a_browser(
        stage, "plan --model 125M --ranks 4 --compute-ms 300 --host-mbit 300 --accumulate 3", after);
    char *seen = strstr(text, "SEEN 300");
    if (seen == NULL) {
        fail_msg("no page: %s", stage_read_text(stage, stage_path(stage, "browser.errors", path)));
    }
    for (const char *expected = places; *expected != '\0';) {
        if (strncmp(expected, "SPEED", 5) == 0) {
            assert_true(strtod(seen, &seen) > 1);
            seen++; // the unit
            expected += 5;
        } else if (strncmp(expected, "RULES", 5) == 0) {
            assert_int_equal(strtol(seen, &seen, 10), RULE_COUNT);
            expected += 5;
        } else if (*seen++ != *expected++) {
            fail_msg("the page shows ...%s instead of ...%s", seen - 1, expected - 1);
        }
    }
}

// The same, of a plan in which nothing fits into the memory: the map is empty.
static void a_page_of_what_does_not_fit_is_drawn(void **state) {
    const char *text =
        page_in_a_browser(stage_of(state), "plan --model 125M --gpu-memory 1G --compute-ms 10 --ranks 2",
                          "<script>document.body.append('SEEN ' + counts + ' END');</script>");
    assert_non_null(strstr(text, " END"));
}

// The line below "recommended" is a command that trains. Rates given for AdamW are none for Muon.
static void a_recommended_command_trains(void **state) {
    static const char *const cases[] = {
        ("--config base.json --model small.json --ranks 2 --compute-ms 5 --host-mbit 1 --tokens 4k "
         "--out never --lr 1e-3 --inner muon"),
        ("--config base.json --model small.json --ranks 2 --compute-ms 5 --host-mbit 1000000 "
         "--accumulate auto --tokens 4k --lr 3e-4 --min-lr 3e-5"),
        ("--config base.json --model small.json --ranks 2 --compute-ms 5 --rank-accumulate 1,2 "
         "--optimizer zero1 --wire int8 --tokens 4k")};
    Stage *stage = stage_with_ranks(state);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[2048];
        Outcome outcome;
        json_decref(plan_json(stage, cases[i], &outcome));
        const char *command = strstr(strstr(outcome.output, "\nrecommended "), "./train_gpt ");
        assert_non_null(command);
        command += strlen("./train_gpt ");
        snprintf(arguments, sizeof arguments, "%.*s", (int)strcspn(command, "\n"), command);
        assert_null(strstr(arguments, "never"));
        assert_int_equal(strstr(arguments, "--lr 0.001") != NULL, i == 0);
        assert_non_null(strstr(arguments, "--inner muon"));
        assert_int_equal(strstr(arguments, "-lr ") != NULL, i == 0);
        Outcome run = program_run(stage, 2, arguments);
        outcome_check(&run, 0, arguments);
    }
}

// A slower link, or more hosts, never make a plan more hopeful.
static void a_plan_for_a_slower_link_is_slower(void **state) {
    double before[RULE_COUNT] = {0};
    for (int mbit = 50; mbit <= 800; mbit *= 4) {
        char arguments[256];
        Outcome outcome;
        snprintf(arguments, sizeof arguments, "--ranks 8 --compute-ms 10 --host-mbit %d", mbit);
        json_t *plan = plan_json(stage_of(state), arguments, &outcome);
        for (int i = 0; i < RULE_COUNT; i++) {
            double rate = log_number(rule_of(plan, RULES[i].rule->name), "tokens_per_second");
            if (!(rate >= before[i])) {
                fail_msg("%s: %s is slower than on a slower link", arguments, RULES[i].rule->name);
            }
            before[i] = rate;
        }
        json_decref(plan);
    }
}

// 1,024 ranks and 125 million parameters need no memory of their own.
static void a_plan_for_a_thousand_ranks_is_small(void **state) {
    Outcome outcome;
    json_decref(plan_json(stage_of(state),
                          "--model 125M --ranks 1024 --ranks-per-host 8 --compute-ms 70 --host-mbit 400000 "
                          "--slow-rank 5 --slow-ms 1",
                          &outcome));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct rusage usage;
    getrusage(RUSAGE_CHILDREN, &usage);
    assert_true(usage.ru_maxrss < 100000); // kB; the largest of all programs so far
#endif
}

// Computation as in a run, and what is left out as in it, too. Micro-batches that are twice as
// long take twice the time.
static void a_plan_takes_the_times_of_a_run(void **state) {
    Stage *stage = stage_with_ranks(state);
    Setting none;
    memset(&none, 0, sizeof none);
    Outcome outcome =
        program_run(stage, 2,
                    "--config base.json --optimizer zero1 --accumulate 3 --tokens 12k --report-every 2 "
                    "--out like");
    outcome_check(&outcome, 0, "the run");
    json_t *events = log_read(stage, "like");
    double sum = 0, weight = 0;
    for (int i = 1; log_event_of(events, "report", i) != NULL; i++) {
        json_t *report = log_event_of(events, "report", i);
        sum += log_number(report, "steps") * log_number(report, "micro_batch_ms");
        weight += log_number(report, "steps");
    }
    assert_true(weight > 0 && sum > 0);
    json_t *plan = plan_json(stage, "--like like --ranks 2", &outcome),
           *twice = plan_json(stage, "--like like --ranks 2 --micro-batch 4", &outcome);
    // The mean; longer where the ranks of the run shared cores and did not always compute.
    double planned = log_number(plan, "micro_batch_ms"), mean = sum / weight;
    assert_true(planned >= (1 - 1e-6) * mean && planned <= 3 * mean);
    assert_string_equal(json_string_value(json_object_get(plan, "rule")), "zero1");
    assert_true(fabs(log_number(rule_of(plan, "zero1"), "micro_batches") - 6) <= 1e-9);
    double ratio = log_number(twice, "micro_batch_ms") / log_number(plan, "micro_batch_ms");
    assert_true(fabs(ratio - 4.0 / log_number(json_object_get(log_event_of(events, "start", 0), "options"),
                                              "micro-batch")) <= 1e-6);
    static const char *const others[][2] = {
        {"plan --like like --ranks 2 --model 125M", "that run trained a model of "},
        {"plan --like like --ranks 2 --gpu-memory 80G", "that run computed on CPUs, this plan is for a GPU"}};
    for (int i = 0; i < 2; i++) {
        outcome = program_run(stage, 0, others[i][0]);
        outcome_check(&outcome, 2, others[i][0]);
        text_check(outcome.errors, others[i][1], others[i][0]);
    }
    json_t *again = plan_json(stage, "--like like", &outcome); // both ranks are on one host
    text_check(outcome.output, "bytes a second for an exchange (so that the simulation", "one host");
    assert_null(strstr(outcome.output, "a host sends"));
    json_decref(again);
    json_decref(plan);
    json_decref(twice);
    json_decref(events);
}

// A run that was resumed with more ranks has the times of these, and nothing of what was before.
static void a_plan_like_a_run_that_grew_knows_its_ranks(void **state) {
    Stage *stage = stage_with_ranks(state);
    static const char grows[] =
        "--config base.json --optimizer zero1 --report-every 2 --resume auto --out grown --tokens ";
    char arguments[256];
    for (int part = 1; part <= 2; part++) {
        snprintf(arguments, sizeof arguments, "%s%dk", grows, 12 * part);
        Outcome outcome = program_run(stage, 2 * part, arguments);
        outcome_check(&outcome, 0, arguments);
    }
    Outcome outcome = program_run(stage, 0, "plan --like grown");
    outcome_check(&outcome, 0, "plan --like grown");
    text_check(outcome.output, " -np 4 ", "plan --like grown");
    // As if its first part had been a thousand times slower.
    shell(stage, "cp -r grown slow && sed '/\"event\":\"resume\"/,$!s/\"micro_batch_ms\":/&1000/' "
                 "grown/log.jsonl > slow/log.jsonl && ! cmp -s grown/log.jsonl slow/log.jsonl");
    json_t *plans[2] = {plan_json(stage, "--like grown", &outcome),
                        plan_json(stage, "--like slow", &outcome)};
    assert_true(log_number(plans[0], "micro_batch_ms") == log_number(plans[1], "micro_batch_ms"));
    json_decref(plans[0]);
    json_decref(plans[1]);
}

// Four ranks of a thread each on two cores take turns for whole rounds, so no micro-batch shows it.
// A plan for the same four knows that they have half a core each, and one for four homes that they
// have one, though the run was as crowded.
static void a_plan_like_a_crowded_run_knows_its_cores(void **state) {
    Stage *stage = *state;
    static const char rank[] = "{\"host\": \"a\", \"threads\": 1, \"cores\": 2, \"device\": \"CPU\"}";
    char log[2048];
    int used = snprintf(log, sizeof log,
                        "{\"event\": \"start\", \"parameters\": 857344, \"options\": {\"micro-batch\": 1, "
                        "\"seq-len\": 64}, \"ranks\": [%s, %s, %s, %s]}\n",
                        rank, rank, rank, rank);
    for (int i = 1; i <= 3; i++) {
        used += snprintf(log + used, sizeof log - (size_t)used,
                         "{\"event\": \"report\", \"seconds\": %d, \"tokens\": %d, \"steps\": 10, "
                         "\"micro_batch_ms\": 3.0, \"micro_batch_cpu_ms\": 2.5, \"grads_per_commit\": 16, "
                         "\"compute_ms\": 12, \"tokens_per_second\": 10240}\n",
                         i, 10240 * i);
    }
    shell(stage, "mkdir -p crowded");
    stage_write(stage, "crowded/log.jsonl", log);
    static const struct {
        const char *options;
        double milliseconds;
    } cases[] = {{"--link-mbit 100", 5.0}, {"--host-mbit 100 --ranks-per-host 1", 2.5}};
    for (int i = 0; i < 2; i++) {
        char arguments[256];
        Outcome outcome;
        snprintf(arguments, sizeof arguments, "--like crowded --ranks 4 --seq-len 64 --micro-batch 1 %s",
                 cases[i].options);
        json_t *plan = plan_json(stage, arguments, &outcome);
        double found = log_number(plan, "micro_batch_ms");
        if (!(fabs(found - cases[i].milliseconds) < 1e-6)) { fail_msg("%s: %g ms", arguments, found); }
        json_decref(plan);
    }
}

enum { WAITING_MBIT = 20 };

// What a plan calls faster is told, the best first.
static void check_faster(const char *options, const json_t *faster, const char *output) {
    assert_true(json_array_size(faster) >= 2);
    double before = INFINITY;
    for (size_t i = 0; i < json_array_size(faster); i++) {
        json_t *entry = json_array_get(faster, i);
        double speedup = log_number(entry, "speedup");
        char shown[256];
        if (!(speedup > 1.1 && speedup <= before)) { fail_msg("%s: a speed-up of %g", options, speedup); }
        before = speedup;
        snprintf(shown, sizeof shown, "time: %s (", json_string_value(json_object_get(entry, "options")));
        text_check(output, shown, options);
    }
}

// Trains with the options, in `directory`, and plans like that run. Whether the plan has about
// the speed of the run and of its network, which a busy machine may disturb.
static bool plan_like_has_its_speed(Stage *stage, const char *directory, const char *options,
                                    const char *in_command) {
    char arguments[256];
    snprintf(arguments, sizeof arguments,
             "--config base.json --tokens 2k --link-mbit %d --report-every 1 --out %s %s", WAITING_MBIT,
             directory, options);
    Outcome outcome = program_run(stage, 2, arguments);
    outcome_check(&outcome, 0, arguments);
    json_t *events = log_read(stage, directory), *last = log_event_of(events, "report", -1);
    snprintf(arguments, sizeof arguments, "--like %s", directory);
    json_t *plan = plan_json(stage, arguments, &outcome);
    json_t *own = rule_of(plan, json_string_value(json_object_get(plan, "rule")));
    double ratio = log_number(own, "tokens_per_second") / log_number(last, "tokens_per_second");
    double fitted = 8e-6 * log_number(plan, "host_bytes_per_second") / WAITING_MBIT;
    assert_int_equal(log_number(plan, "ranks"), 2);
    assert_int_equal(log_number(plan, "hosts"), 2);
    text_check(outcome.output, in_command, options);
    check_faster(options, json_object_get(plan, "faster"), outcome.output);
    json_decref(plan);
    json_decref(events);
    printf("%s: %g of its speed, %g of its network's\n", options, ratio, fitted);
    return ratio > 0.7 && ratio < 1.4 && fitted > 0.6 && fitted < 1.4;
}

// A plan like a run that waited for its network, with no other option: it has the ranks and the
// options of that run, finds how fast its network was, and says what would take less time, the best
// first. One good measurement of three is enough.
static void a_plan_like_a_run_says_what_would_be_faster(void **state) {
    static const struct {
        const char *options, *in_command;
    } cases[] = {{"--optimizer zero1", "--link-mbit 20"},
                 {"--optimizer dpu --overlap off --wire int8", "--overlap off"},
                 {"--optimizer diloco --diloco-H 1", "--diloco-H 1"}};
    enum { CASES = sizeof cases / sizeof cases[0], TRIES = 3 };
    Stage *stage = stage_with_ranks(state);
    for (int i = 0; i < CASES; i++) {
        bool good = false;
        for (int try = 0; try < TRIES && !good; try++) {
            char directory[32];
            snprintf(directory, sizeof directory, "waits-%d-%d", i, try);
            good = plan_like_has_its_speed(stage, directory, cases[i].options, cases[i].in_command);
        }
        if (!good) { fail_msg("%s: the plan has another speed", cases[i].options); }
    }
    // For other ranks, or another network, it is no longer that run.
    static const char *const others[] = {"--like waits-0-0 --ranks 4", "--like waits-0-0 --host-mbit 100"};
    for (int i = 0; i < 2; i++) {
        Outcome outcome;
        json_t *plan = plan_json(stage, others[i], &outcome);
        assert_null(json_object_get(plan, "faster"));
        json_decref(plan);
    }
}

// Where nothing of the layers and embeddings is trained, too.
static void a_plan_of_the_last_layernorm_has_times(void **state) {
    static const char plan[] = "plan --model tiny --ranks 2 --host-mbit 100 --freeze 'wte,wpe,h.*'";
    Outcome outcome = program_run(stage_of(state), 0, plan);
    outcome_check(&outcome, 0, plan);
    if (strstr(outcome.output, "nan") != NULL) { fail_msg("%s: %s", plan, outcome.output); }
}

static void what_a_plan_cannot_use_is_refused(void **state) {
    static const struct {
        const char *arguments, *part;
    } cases[] = {
        {"plan --like nowhere", "--like nowhere: there is no log.jsonl of a run"},
        {"plan --like nowhere --ranks 2", "--like nowhere: there is no log.jsonl of a run"},
        {"plan --like empty --ranks 2", "--like empty: no report of its log says what a micro-batch took"},
        {"plan --ranks 2 --compute-ms 5 --json nowhere/plan.json",
         "--json nowhere/plan.json cannot be written"},
        {"plan --ranks 2 --compute-ms 5 --like x", "--like and --compute-ms: one takes the place"},
        {"plan --compute-ms 5 --json x", "--json has the times of exchanges"},
        {"plan --compute-ms 5 --page x", "--page has the times of exchanges"},
        {"plan --ranks 2 --ranks-per-host 2 --compute-ms 5 --page x",
         "all ranks of this plan are on one host"},
        {"plan --ranks 2 --gpu-memory 80G --page x", "--page: what a micro-batch takes is not known"},
        {"plan --ranks 2 --gpu-tflops 165", "--gpu-tflops needs --gpu-memory"},
        {"plan --ranks 2 --compute-ms 5 --page nowhere/x.html", "--page nowhere/x.html cannot be written"},
        {"plan --ranks 4 --slow-rank 9 --slow-ms 1", "--slow-rank 9: there are fewer ranks"},
        {"plan --ranks 2 --compute-ms 0", "--compute-ms: 0 is out of range"},
        {"plan --ranks 2 --host-mbit none", "--host-mbit: none"},
        {"--host-mbit 100", "--host-mbit has no effect on train_gpt train: it is for plan"},
        {"--like x", "--like has no effect on train_gpt train"},
        {"plan --fit on --model 2.7B --gpu-memory 8G", "--fit on: no --micro-batch of this model fits"},
    };
    Stage *stage = stage_of(state);
    shell(stage, "mkdir -p empty && echo '{\"event\":\"start\"}' > empty/log.jsonl");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Outcome outcome = program_run(stage, 0, cases[i].arguments);
        outcome_check(&outcome, 2, cases[i].arguments);
        text_check(outcome.errors, cases[i].part, cases[i].arguments);
    }
}

// ---- Under mpirun ---------------------------------------------------------------------

// The ranks measure the links that they would train over, and the plan is for these. The emulated
// link is never faster than it says; on a busy machine it may seem slower.
static void a_plan_under_mpirun_measures_the_network(void **state) {
    enum { RANKS = 3 };
    Stage *stage = stage_with_ranks(state);
    Outcome outcome = program_run(stage, RANKS, "plan --link-mbit 20 --link-us 2000 --json measured.json");
    outcome_check(&outcome, 0, "measuring");
    text_check(outcome.output, "\nnetwork          measured between 3 hosts", "measuring");
    text_check(outcome.output, "(measured by all ranks at once", "measuring");
    assert_true(strstr(outcome.output, "\n  rank 2 ") != NULL); // one machine: hosts are named by their ranks
    char path[STAGE_PATH_SIZE];
    json_t *plan = json_load_file(stage_path(stage, "measured.json", path), 0, NULL);
    assert_non_null(plan);
    json_t *network = json_object_get(plan, "network"), *pairs = json_object_get(network, "pairs");
    assert_int_equal(log_number(plan, "ranks"), RANKS);
    assert_int_equal(json_array_size(json_object_get(network, "hosts")), RANKS);
    assert_int_equal(json_array_size(pairs), RANKS * (RANKS - 1));
    for (size_t i = 0; i < json_array_size(pairs); i++) {
        json_t *pair = json_array_get(pairs, i);
        double rate = log_number(pair, "bits_per_second"), latency = log_number(pair, "latency_us");
        if (!(rate > 1e6 && rate < 1.3 * 20e6 && latency >= 2000)) { fail_msg("%g, %g", rate, latency); }
    }
    double host = 8 * log_number(plan, "host_bytes_per_second");
    if (!(host > 1e6 && host < 1.3 * 20e6)) { fail_msg("a host sends %g bits a second", host); }
    json_decref(plan);
    // What is said is not measured.
    outcome = program_run(stage, 2, "plan --host-mbit 7 --host-us 9 --compute-ms 5 --link-mbit 100");
    outcome_check(&outcome, 0, "said");
    text_check(outcome.output, "a micro-batch takes a rank 5.0ms (as --compute-ms says)", "said");
    text_check(outcome.output, "a host sends 6.70M bits a second to the others, a message takes 9 us\n",
               "said");
}

// A mistake that one rank finds, or all, ends all of them with one message.
static void a_plan_under_mpirun_refuses_as_one(void **state) {
    static const char *const cases[][2] = {
        {"plan --ranks 8", "--ranks: 2 ranks were started"},
        {"plan --like nowhere", "--like nowhere: there is no log.jsonl"},
        {"plan --page x.html", "--page draws the link between hosts"},
        {"plan --compute-ms 5 --json nowhere/x", "--json nowhere/x cannot be written"},
    };
    Stage *stage = stage_with_ranks(state);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Outcome outcome = program_run(stage, 2, cases[i][0]);
        outcome_check(&outcome, 2, cases[i][0]);
        text_check(outcome.errors, cases[i][1], cases[i][0]);
        assert_null(strstr(strstr(outcome.errors, cases[i][1]) + 1, "train_gpt: "));
    }
}

// ---------------------------------------------------------------------------------------

static Stage stage_of_all; // what every test gets

static int open_stage(void **state) {
    *state = &stage_of_all;
    stage_open(&stage_of_all);
    stage_write(&stage_of_all, "base.json",
                "{\"threads\": 1, \"seq-len\": 64, \"micro-batch\": 2, \"val-batches\": \"none\", "
                "\"sample-tokens\": \"none\"}\n");
    stage_write(
        &stage_of_all, "small.json",
        "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 64, \"n_head\": 2, \"n_positions\": 64, "
        "\"vocab_size\": 256}\n");
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        STAGE_TEST(
            stage_of_all,
            a_plan_for_a_thousand_ranks_is_small), // first: the memory of all programs before it counts
        STAGE_TEST(stage_of_all, a_plan_ends_with_a_verdict),
        STAGE_TEST(stage_of_all, a_plan_says_what_would_fit),
        STAGE_TEST(stage_of_all, as_little_is_recomputed_as_fits),
        STAGE_TEST(stage_of_all, fit_takes_the_largest_micro_batch),
        STAGE_TEST(stage_of_all, more_workers_need_more_tokens_for_local_steps),
        STAGE_TEST(stage_of_all, a_plan_says_why_nothing_is_recommended),
        STAGE_TEST(stage_of_all, sequential_commits_are_not_simulated),
        STAGE_TEST(stage_of_all, fit_is_for_every_rule),
        STAGE_TEST(stage_of_all, what_does_not_fit_is_not_recommended),
        STAGE_TEST(stage_of_all, the_time_of_a_gpu_is_guessed_from_its_peak),
        STAGE_TEST(stage_of_all, a_page_shows_the_numbers_of_plans),
        STAGE_TEST(stage_of_all, a_page_follows_the_pointer),
        STAGE_TEST(stage_of_all, a_page_of_what_does_not_fit_is_drawn),
        STAGE_TEST(stage_of_all, a_plan_recommends_the_first_rule_at_a_loss),
        STAGE_TEST(stage_of_all, a_plan_recommends_the_wire),
        STAGE_TEST(stage_of_all, a_recommended_command_trains),
        STAGE_TEST(stage_of_all, a_plan_for_a_slower_link_is_slower),
        STAGE_TEST(stage_of_all, a_plan_takes_the_times_of_a_run),
        STAGE_TEST(stage_of_all, a_plan_like_a_run_that_grew_knows_its_ranks),
        STAGE_TEST(stage_of_all, a_plan_like_a_crowded_run_knows_its_cores),
        STAGE_TEST(stage_of_all, a_plan_like_a_run_says_what_would_be_faster),
        STAGE_TEST(stage_of_all, a_plan_of_the_last_layernorm_has_times),
        STAGE_TEST(stage_of_all, what_a_plan_cannot_use_is_refused),
        STAGE_TEST(stage_of_all, a_plan_under_mpirun_measures_the_network),
        STAGE_TEST(stage_of_all, a_plan_under_mpirun_refuses_as_one),
    };
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    return cmocka_run_group_tests(tests, open_stage, stage_close_group);
}
