// test_checkpoint.c: runs that stop and are resumed, through the command line, as users
// do it. Under every rule a resumed run has the same bits as one that never stopped; with
// another number of ranks or another rule it trains on sensibly; and it survives being
// killed, a full disk, and damaged checkpoints.
//
// The model is so small that a checkpoint takes a millisecond. These tests mostly wait
// for ranks to start, so they start many at once.
#define _GNU_SOURCE // prlimit
#include "checkpoint/hf_model.h"
#include "scheduler/spike.h"
#include "test/program/fleet.h"
#include "test/program/masked.h"

#include <dirent.h>
#include <sys/mount.h>

enum { COMMITS = 24 }; // that base.json trains for: of two micro-batches each, on one rank

// A rule, possibly with a wire format, moments in bf16, or Muon.
typedef struct Variant {
    const char *options;
    int period; // inner steps between two checkpoints
} Variant;

static const Variant variants[] = {
    {"--optimizer ddp", 1},
    {"--optimizer zero1", 1},
    {"--optimizer dpu", 1},
    {"--optimizer acco-wp", 1},
    {"--optimizer acco --accumulate 4", 1},
    {"--optimizer co2 --co2-tau 3 --co2-beta 0.3 --co2-eager off", 3},
    {"--optimizer diloco --diloco-H 3", 3},
    {"--optimizer streaming-diloco --diloco-H 4", 2},
    {"--optimizer zero1 --wire bf16 --moments bf16", 1},
    {"--optimizer acco --accumulate 4 --wire int8 --estimate-wire e3m0", 1},
    {"--optimizer sparse-loco --sparse-H 2 --sparse-tau 1 --moments bf16", 2},
    {"--optimizer acco --accumulate 5 --acco-split 0.25 --acco-init 1 --estimate-wire int8", 1},
    {"--optimizer streaming-diloco --diloco-H 6 --wire e3m0 --moments bf16", 3},
    {"--optimizer zero1 --inner muon --moments bf16", 1},
    {"--optimizer acco --accumulate 4 --acco-split 0.75 --inner muon --estimate-wire int8", 1},
    {"--optimizer streaming-diloco --diloco-H 4 --inner muon", 2},
    {"--optimizer acco --accumulate 4 --acco-split 0.75 --moments bf16", 1},
    {"--optimizer zero1 --wire int4", 1},
    {"--optimizer acco --accumulate 4 --wire e3m0 --inner muon", 1},
};

enum { VARIANTS = sizeof variants / sizeof variants[0] };

// ---- Checkpoints on disk --------------------------------------------------------------

// What is in OUT/checkpoints.
typedef struct Saved {
    char text[512];  // the steps, as "8 16 24"
    long steps[128]; // (count), ascending
    int count;
    int strangers; // files and directories of other names
} Saved;

static int compare_longs(const void *left, const void *right) {
    long a = *(const long *)left, b = *(const long *)right;
    return a < b ? -1 : a > b;
}

static Saved saved_in(const Stage *stage, const char *out) {
    char name[128], path[STAGE_PATH_SIZE];
    Saved saved;
    memset(&saved, 0, sizeof saved);
    snprintf(name, sizeof name, "%s/checkpoints", out);
    DIR *directory = opendir(stage_path(stage, name, path));
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.') { continue; }
        bool known = sscanf(entry->d_name, "commit-%ld", &saved.steps[saved.count]) == 1 && saved.count < 127;
        if (known) { saved.count++; }
        if (!known) { saved.strangers++; }
    }
    if (directory != NULL) { closedir(directory); }
    qsort(saved.steps, (size_t)saved.count, sizeof(long), compare_longs);
    for (int i = 0; i < saved.count; i++) {
        size_t used = strlen(saved.text);
        snprintf(saved.text + used, sizeof saved.text - used, "%s%ld", i > 0 ? " " : "", saved.steps[i]);
    }
    return saved;
}

static void check_saved(const Stage *stage, const char *out, const char *expected) {
    Saved saved = saved_in(stage, out);
    if (strcmp(saved.text, expected) != 0) {
        fail_msg("%s has checkpoints %s, expected %s", out, saved.text, expected);
    }
    if (saved.strangers > 0) { fail_msg("%s/checkpoints has %d unfinished ones", out, saved.strangers); }
}

// The step of a checkpoint in the middle of those that a run has left.
static long middle_step(const Stage *stage, const char *out) {
    Saved saved = saved_in(stage, out);
    if (saved.count < 3) { fail_msg("%s has only these checkpoints: %s", out, saved.text); }
    return saved.steps[(saved.count - 1) / 2];
}

static const char *step_path(const Training *training, long step) {
    static char path[128];
    snprintf(path, sizeof path, "%.63s/checkpoints/commit-%ld", training->out, step);
    return path;
}

static json_t *manifest_read(const Stage *stage, const char *checkpoint) {
    char name[256], path[STAGE_PATH_SIZE];
    snprintf(name, sizeof name, "%s/checkpoint.json", checkpoint);
    json_t *manifest = json_load_file(stage_path(stage, name, path), 0, NULL);
    assert_non_null(manifest);
    return manifest;
}

// ---- Comparing runs -------------------------------------------------------------------

static json_t *resume_event(const Fleet *fleet, int i) {
    json_t *event = log_event_of(fleet->events[i], "resume", -1);
    if (event == NULL) { fail_msg("%s: the log says nothing about resuming", fleet->trainings[i].what); }
    return event;
}

static const char *remarks_of(const Fleet *fleet, int i) {
    return json_string_value(json_object_get(resume_event(fleet, i), "remarks"));
}

static double final_loss(const Fleet *fleet, int i) {
    return fleet_number(fleet, i, "validation", -1, "loss");
}

// Run i says that it was resumed at commit `step`, and whether that is exact.
static void check_resumed(Fleet *fleet, int i, long step, bool exact) {
    const char *what = fleet->trainings[i].what;
    json_t *event = resume_event(fleet, i);
    if (log_number(event, "commit") != (double)step) {
        fail_msg("%s: resumed at %g, not %ld", what, log_number(event, "commit"), step);
    }
    if (json_is_true(json_object_get(event, "exact")) != exact) {
        fail_msg("%s: exact is not %d: %s", what, exact, remarks_of(fleet, i));
    }
    text_check(fleet_output(fleet, i), exact ? "; exact\n" : "; not exact: ", what);
}

// The events of a kind say the same about training (about time they may differ). Run b
// was resumed from run a, and has only the last of a's events.
static void check_same_events(const Fleet *fleet, int a, int b, const char *kind) {
    static const char *const fields[] = {"commit", "tokens",    "loss", "perfect_loss",
                                         "lr",     "grad_norm", "grads"};
    int count = strcmp(kind, "report") == 0 ? 7 : 4;
    for (int n = -1; log_event_of(fleet->events[b], kind, n) != NULL; n--) {
        for (int i = 0; i < count; i++) {
            double one = fleet_number(fleet, a, kind, n, fields[i]),
                   other = fleet_number(fleet, b, kind, n, fields[i]);
            if (one == other) { continue; }
            fail_msg("%s, %s of %s %d: %.17g, but %.17g of %s", fleet->trainings[b].what, fields[i], kind, n,
                     other, one, fleet->trainings[a].what);
        }
    }
}

static void check_refused(Stage *stage, int ranks, const char *out, const char *arguments, const char *part) {
    char all[1024];
    snprintf(all, sizeof all, "--config base.json --out %s %s", out, arguments);
    Outcome outcome = program_run(stage, ranks, all);
    outcome_check(&outcome, 2, arguments);
    text_check(outcome.errors, part, arguments);
    if (text_count(outcome.errors, "train_gpt: ") != 1) {
        fail_msg("%s: not one line: %.1500s", arguments, outcome.errors);
    }
}

// ---- The same bits as without the interruption ----------------------------------------

// Every variant has an uninterrupted run, and one that is resumed from a checkpoint in its
// middle.
static void check_exact(Stage *stage, int ranks, const char *model, const char *data) {
    Fleet *fleet = fleet_new(stage);
    Fingerprint prints[VARIANTS];
    static Training whole[VARIANTS];
    long steps[VARIANTS];
    for (int i = 0; i < VARIANTS; i++) {
        fleet_start(fleet, ranks, "--save-every 1 --keep 100 --model %s %s %s", model, data,
                    variants[i].options);
    }
    fleet_finish(fleet);
    memcpy(prints, fleet->prints, sizeof prints);
    memcpy(whole, fleet->trainings, sizeof whole);
    double losses[VARIANTS];
    for (int i = 0; i < VARIANTS; i++) {
        steps[i] = middle_step(stage, whole[i].out);
        losses[i] = fleet_number(fleet, i, "report", -1, "loss");
        assert_true(steps[i] % variants[i].period == 0);
    }
    stage_end_all(stage);
    fleet = fleet_new(stage);
    for (int i = 0; i < VARIANTS; i++) {
        fleet_start(fleet, ranks, "%s --model %s %s --resume %s", variants[i].options, model, data,
                    step_path(&whole[i], steps[i]));
    }
    fleet_finish(fleet);
    for (int i = 0; i < VARIANTS; i++) {
        check_resumed(fleet, i, steps[i], true);
        if (strcmp(fleet->prints[i].text, prints[i].text) != 0) {
            fail_msg("%s: %s, without an interruption %s", fleet->trainings[i].what, fleet->prints[i].text,
                     prints[i].text);
        }
        if (fleet_number(fleet, i, "report", -1, "loss") != losses[i]) {
            fail_msg("%s: another last loss", fleet->trainings[i].what);
        }
    }
    stage_end_all(stage);
}

static void one_rank_goes_on_with_the_same_bits(void **state) {
    check_exact(stage_of(state), 0, "model.json", "");
}
static void two_ranks_go_on_with_the_same_bits(void **state) {
    check_exact(stage_with_ranks(state), 2, "gpt2.json", "");
}
static void three_ranks_go_on_with_the_same_bits(void **state) {
    check_exact(stage_with_ranks(state), 3, "model.json", "--data masked.bin");
}

// Resumed from each of a run's checkpoints, with the same reports and validations; also
// from the last one, where nothing is left to do.
static void every_checkpoint_will_do(void **state) {
    static const int chosen[] = {1, 4, 5, 7};
    for (int c = 0; c < 4; c++) {
        Stage *stage = stage_of(state);
        const char *options = variants[chosen[c]].options;
        Fleet *fleet = fleet_new(stage);
        fleet_start(fleet, 0, "%s --tokens 384 --save-every 1 --keep 100 --report-every 1 --val-every 2",
                    options);
        fleet_finish(fleet);
        Saved saved = saved_in(stage, fleet->trainings[0].out);
        for (int i = 0; i < saved.count; i++) {
            fleet->count =
                1 + fleet_start(fleet, 0, "%s --tokens 384 --report-every 1 --val-every 2 --resume %s",
                                options, step_path(&fleet->trainings[0], saved.steps[i]));
        }
        for (int i = 1; i < fleet->count; i++) {
            fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
            fleet->prints[i] = log_fingerprint(fleet->events[i]);
            bool last = i == fleet->count - 1;
            check_same(fleet, 0, i);
            check_resumed(fleet, i, saved.steps[i - 1], true);
            if (!last) { check_same_events(fleet, 0, i, "report"); }
            if (!last) { check_same_events(fleet, 0, i, "validation"); }
            if (fleet_number(fleet, i, "end", -1, "commit") != fleet_number(fleet, 0, "end", -1, "commit") ||
                fleet_number(fleet, i, "end", -1, "tokens") != fleet_number(fleet, 0, "end", -1, "tokens")) {
                fail_msg("%s: the end counts other commits or tokens", fleet->trainings[i].what);
            }
        }
        stage_end_all(stage);
    }
}

// A checkpoint of co2 is made after a sum was sent and before the boundary that applies
// it.
static void co2_is_saved_with_its_exchange_under_way(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "%s --save-every 1 --keep 100", variants[5].options);
    fleet_finish(fleet);
    json_t *manifest = manifest_read(stage, step_path(&fleet->trainings[0], 12));
    assert_true(json_is_true(json_object_get(manifest, "job_in_flight")));
    json_decref(manifest);
}

// ---------------------------------------------------------------------------------------
// Another number of ranks, another rule, other options: the run trains on, and says what
// is not exact

// The loss that a run reported at a commit, or else last before it.
static double loss_at(const Fleet *fleet, int i, double commit) {
    json_t *report, *found = NULL;
    for (int n = 0; (report = log_event_of(fleet->events[i], "report", n)) != NULL; n++) {
        if (log_number(report, "commit") <= commit) { found = report; }
    }
    assert_non_null(found);
    return log_number(found, "loss");
}

// Run i, which was resumed from run `whole`, trains on: its loss does not jump up and
// ends near that of the whole run. It remarks `remark`.
static void check_goes_on(Fleet *fleet, int i, int whole, double tolerance, const char *remark) {
    const char *what = fleet->trainings[i].what;
    double began = fleet_number(fleet, whole, "report", 0, "loss"), loss = final_loss(fleet, i);
    check_resumed(fleet, i, (long)log_number(resume_event(fleet, i), "commit"), false);
    text_check(remarks_of(fleet, i), remark, what);
    double there = loss_at(fleet, whole, log_number(resume_event(fleet, i), "commit"));
    if (!(loss < began - 0.5 && loss < there + 0.1)) {
        fail_msg("%s: ends at %.4f, was at %.4f when it was saved, began at %.4f", what, loss, there, began);
    }
    // Fewer ranks make more commits of the same tokens, and may end lower.
    if (!(loss - final_loss(fleet, whole) < tolerance)) {
        fail_msg("%s: ends at %.4f, the uninterrupted one at %.4f", what, loss, final_loss(fleet, whole));
    }
}

static const char *const longer = "--lr 0.01 --warmup 2 --tokens 3k --val-batches 8 --report-every 1";

// The position in the data that a checkpoint holds, in micro-batches of all ranks: where
// the worker which came furthest was.
static double saved_position(const Stage *stage, const char *checkpoint) {
    json_t *manifest = manifest_read(stage, checkpoint), *workers = json_object_get(manifest, "workers");
    double furthest = 0;
    for (size_t i = 0; i < json_array_size(workers); i++) {
        furthest = fmax(furthest, log_number(json_array_get(workers, i), "micro_batches_begun"));
    }
    double position = log_number(manifest, "data_base") + furthest * (double)json_array_size(workers);
    json_decref(manifest);
    return position;
}

static const char *last_step_path(const Stage *stage, const Training *training) {
    Saved saved = saved_in(stage, training->out);
    assert_true(saved.count > 0);
    return step_path(training, saved.steps[saved.count - 1]);
}

// Run i, which another number of ranks resumed from `checkpoint`, has used no data before
// the position there, and none twice.
static void check_position(const Stage *stage, const Fleet *fleet, int i, const char *checkpoint) {
    json_t *manifest = manifest_read(stage, last_step_path(stage, &fleet->trainings[i]));
    assert_close(log_number(manifest, "data_base"), saved_position(stage, checkpoint), 0,
                 fleet->trainings[i].what);
    json_decref(manifest);
}

// What CO2 exchanges when it is saved is a sum over the workers of then. However many go on, they
// commit the same mean. With a rate of next to nothing nothing else moves.
static void an_exchange_in_flight_has_the_workers_of_then(void **state) {
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    double losses[3];
    fleet_start(fleet, 2, "--optimizer co2 --co2-tau 3 --save-every 3 --keep 99");
    fleet_finish(fleet);
    char saved[128];
    strcpy(saved, step_path(&fleet->trainings[0], middle_step(stage, fleet->trainings[0].out)));
    for (int ranks = 1; ranks <= 3; ranks++) {
        fleet_start(
            fleet, ranks,
            "--optimizer co2 --co2-tau 3 --lr 1e-9 --min-lr 1e-9 --warmup 0 --val-batches 8 --resume %s",
            saved);
    }
    for (int i = 1; i <= 3; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        losses[i - 1] = fleet_number(fleet, i, "validation", -1, "loss");
    }
    for (int i = 1; i < 3; i++) {
        if (!(fabs(losses[i] - losses[0]) <= 1e-5)) { fail_msg("%.7f, %.7f", losses[0], losses[i]); }
    }
}

static void other_numbers_of_ranks_go_on(void **state) {
    static const char *const calm[] = {
        "--optimizer zero1", "--optimizer acco --accumulate 4", "--optimizer co2 --co2-tau 3",
        "--optimizer diloco --diloco-H 3 --diloco-mu 0", "--optimizer zero1 --inner muon"};
    Stage *stage = stage_with_ranks(state);
    for (int c = 0; c < 5; c++) {
        const char *options = calm[c];
        Fleet *fleet = fleet_new(stage);
        fleet_start(fleet, 4, "%s %s --save-every 1 --keep 100", longer, options);
        fleet_start(fleet, 0, "%s %s --save-every 1 --keep 100", longer, options);
        fleet_finish(fleet);
        char four[128], one[128];
        strcpy(four, step_path(&fleet->trainings[0], middle_step(stage, fleet->trainings[0].out)));
        strcpy(one, step_path(&fleet->trainings[1], middle_step(stage, fleet->trainings[1].out)));
        for (int ranks = 1; ranks <= 3; ranks++) {
            fleet_start(fleet, ranks, "%s %s --resume %s", longer, options, four);
        }
        fleet_start(fleet, 2, "%s %s --resume %s", longer, options, one);
        for (int i = 2; i < fleet->count; i++) {
            fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
            fleet->prints[i] = log_fingerprint(fleet->events[i]);
            check_goes_on(fleet, i, i == 5 ? 1 : 0, i == 5 ? 1.2 : 0.35, "another number of ranks");
            check_position(stage, fleet, i, i == 5 ? one : four);
        }
        stage_end_all(stage);
    }
}

// What was committed is the same for any number of ranks: where nothing is left to train,
// the same bits.
static void a_finished_run_is_the_same_on_other_ranks(void **state) {
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < RULES_TESTED; i++) { fleet_start(fleet, 4, "%s", rule_cases[i].options); }
    fleet_finish(fleet);
    for (int i = 0; i < RULES_TESTED; i++) {
        fleet_start(fleet, 1 + i % 3, "%s --resume %s", rule_cases[i].options,
                    last_step_path(stage, &fleet->trainings[i]));
    }
    for (int i = RULES_TESTED; i < fleet->count; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        fleet->prints[i] = log_fingerprint(fleet->events[i]);
        check_same(fleet, i - RULES_TESTED, i);
    }
}

// Fewer ranks with as many micro-batches in a commit continue with the same batches, so
// every commit has the same loss except for the order in which sums are rounded. What acco
// has handed over is dealt out to them.
static void the_same_batches_on_fewer_ranks_make_the_same_commits(void **state) {
    static const char *const rules[] = {"zero1", "dpu", "acco"};
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    char from[128];
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 4, "%s --optimizer %s --accumulate 2 --save-every 1 --keep 100", longer, rules[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 6; i++) {
        int ranks = 1 + i % 2;
        const Training *whole = &fleet->trainings[i / 2];
        strcpy(from, step_path(whole, middle_step(stage, whole->out)));
        fleet_start(fleet, ranks, "%s --optimizer %s --accumulate %d --resume %s", longer, rules[i / 2],
                    8 / ranks, from);
    }
    for (int i = 3; i < fleet->count; i++) {
        int whole = (i - 3) / 2, n = -1;
        json_t *report;
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        for (; (report = log_event_of(fleet->events[i], "report", n)) != NULL; n--) {
            assert_close(log_number(report, "loss"), fleet_number(fleet, whole, "report", n, "loss"), 1e-3,
                         fleet->trainings[i].what);
        }
        assert_true(n < -8);
        assert_close(final_loss(fleet, i), final_loss(fleet, whole), 1e-3, fleet->trainings[i].what);
    }
}

// Unequal ranks train on what equal ones would and leave nothing of it out, also where they go on.
static void unequal_ranks_leave_nothing_out(void **state) {
    static const char *const lists[] = {"--accumulate 4", "--rank-accumulate 2,6", "--rank-accumulate 7,1"};
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 2, "%s --optimizer zero1 %s --save-every 1 --keep 100", longer, lists[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) {
        const char *path = step_path(&fleet->trainings[i], 9);
        if (i > 0) {
            fleet_start(fleet, 2, "%s --optimizer zero1 %s --resume %s", longer, lists[3 - i], path);
        }
        fleet_start(fleet, 1, "%s --optimizer zero1 --accumulate 8 --rank-accumulate '' --resume %s", longer,
                    path);
    }
    for (int i = 1; i < fleet->count; i++) {
        const char *what = fleet->trainings[i].what;
        json_t *report;
        if (i >= 3) { fleet->events[i] = training_finish(stage, &fleet->trainings[i]); }
        for (int n = -1; (report = log_event_of(fleet->events[i], "report", n)) != NULL; n--) {
            assert_close(log_number(report, "loss"), fleet_number(fleet, 0, "report", n, "loss"), 1e-3, what);
        }
        if (i < 3) { continue; }
        json_t *manifest = manifest_read(stage, last_step_path(stage, &fleet->trainings[i]));
        assert_close(log_number(manifest, "data_base"), 9 * 8, 0, what);
        json_decref(manifest);
    }
}

// The sum of four workers that is in flight becomes the mean of four, also where one rank
// applies it.
static void a_sum_under_way_belongs_to_those_who_sent_it(void **state) {
    static const char *const options =
        "--optimizer co2 --co2-tau 6 --co2-beta 0 --lr 0.01 --warmup 0 --schedule constant --val-every 1";
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 4, "%s --tokens 2304 --save-every 1 --keep 100", options);
    fleet_finish(fleet);
    const char *path = step_path(&fleet->trainings[0], 6);
    fleet_start(fleet, 1, "%s --tokens 1200 --micro-batch 1 --resume %s", options, path);
    fleet->events[1] = training_finish(stage, &fleet->trainings[1]);
    // The first boundary after step 6 applies the sum of the four, whatever the one rank
    // has done since.
    double four = fleet_number(fleet, 0, "validation", 0, "loss"),
           one = fleet_number(fleet, 1, "validation", 0, "loss");
    assert_close(one, four, 1e-3, "the loss after a boundary that takes the sum of four workers");
}

// The moments of another inner optimizer mean nothing to this one: it refuses them, or begins with
// none where it is told to.
static void another_inner_optimizer_starts_anew(void **state) {
    Stage *stage = stage_with_ranks(state);
    for (int muon = 0; muon < 2; muon++) {
        Fleet *fleet = fleet_new(stage);
        const char *was = muon ? "muon" : "adamw", *is = muon ? "adamw" : "muon";
        fleet_start(fleet, 2, "%s --optimizer acco --accumulate 4 --inner %s --save-every 1 --keep 100",
                    longer, was);
        fleet_finish(fleet);
        char from[128], arguments[512], part[128];
        strcpy(from, step_path(&fleet->trainings[0], middle_step(stage, fleet->trainings[0].out)));
        snprintf(arguments, sizeof arguments, "--optimizer zero1 --inner %s --resume %s", is, from);
        snprintf(part, sizeof part,
                 "was trained with --inner %s: continue with that, or add --fresh-moments on", was);
        check_refused(stage, 2, "refused", arguments, part);
        fleet_start(fleet, 3, "%s --optimizer zero1 --inner %s --fresh-moments on --resume %s", longer, is,
                    from);
        fleet->events[1] = training_finish(stage, &fleet->trainings[1]);
        check_goes_on(fleet, 1, 0, 1.5, "the moments start from zero");
        stage_end_all(stage);
    }
}

// What --inner auto has chosen stays, although a commit of the resumed run has fewer tokens;
// fine-tuning chooses anew. The first run has 16,384 tokens a commit.
static void a_chosen_inner_optimizer_stays(void **state) {
    Stage *stage = stage_of(state);
    static const struct {
        const char *arguments;
        bool muon;
    } runs[] = {{"--out chosen --micro-batch 512 --tokens 16384", true},
                {"--out chosen --resume auto --micro-batch 4 --tokens 17k", true},
                {"--out chosen-2 --config chosen/config.json --micro-batch 4 --tokens 1k", false},
                {"--out chosen-3 --finetune chosen --micro-batch 512 --tokens 16384", false}};
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        char arguments[256];
        bool config = strstr(runs[i].arguments, "--config") != NULL;
        snprintf(arguments, sizeof arguments,
                 "--optimizer acco --accumulate 2 --threads 1 --val-batches none %s %s",
                 config || i == 3 ? "" : "--model model.json", runs[i].arguments);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        bool chosen =
            strstr(outcome.output, "\nmuon       chosen for a new model and large commits: steps ") != NULL;
        if (chosen != runs[i].muon) { fail_msg("%s: %s", arguments, outcome.output); }
    }
    check_refused(stage, 0, "chosen", "--resume auto --inner adamw", "was trained with --inner muon");
}

static void other_rules_go_on(void **state) {
    static const int pairs[][2] = {{1, 4}, {4, 1}, {0, 6}, {6, 0}, {5, 2}, {2, 7}};
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 6; i++) {
        fleet_start(fleet, 2, "%s %s --save-every 1 --keep 100", longer, variants[pairs[i][0]].options);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 6; i++) {
        long step = middle_step(stage, fleet->trainings[i].out);
        fleet_start(fleet, 2, "%s %s --resume %s", longer, variants[pairs[i][1]].options,
                    step_path(&fleet->trainings[i], step));
    }
    for (int i = 6; i < 12; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        check_goes_on(fleet, i, i - 6, 0.6, "another rule");
    }
}

// A run on two levels continues with the same bits on any hosts of as many ranks; on other
// numbers of ranks, or flat, it says that it adds in another order. If every rank is a host,
// both exchanges are the same.
static void other_hosts_are_named(void **state) {
    static const char *const options = "--optimizer acco --accumulate 4 --wire int8";
    static const char *const again[] = {"--ranks-per-host 2", "--exchange two-level --ranks-per-host 2",
                                        "--ranks-per-host 2 --exchange flat", "--ranks-per-host 3", ""};
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 4, "%s --ranks-per-host 2 --save-every 1 --keep 100", options);
    fleet_start(fleet, 2, "%s --ranks-per-host 1 --save-every 1 --keep 100", options);
    fleet_finish(fleet);
    char four[128], two[128];
    strcpy(four, step_path(&fleet->trainings[0], middle_step(stage, fleet->trainings[0].out)));
    strcpy(two, step_path(&fleet->trainings[1], middle_step(stage, fleet->trainings[1].out)));
    for (int i = 0; i < 5; i++) { fleet_start(fleet, 4, "%s %s --resume %s", options, again[i], four); }
    fleet_start(fleet, 2, "%s --exchange flat --resume %s", options, two);
    for (int i = 2; i < fleet->count; i++) {
        bool exact = i < 4 || i == 7;
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        fleet->prints[i] = log_fingerprint(fleet->events[i]);
        check_resumed(fleet, i, (long)log_number(resume_event(fleet, i), "commit"), exact);
        if (exact) {
            check_same(fleet, i == 7 ? 1 : 0, i);
        } else {
            text_check(remarks_of(fleet, i), "sums are rounded in another order", fleet->trainings[i].what);
        }
    }
}

// A change of an option that changes the bits is remarked, a change of any other is not.
static void other_options_are_named(void **state) {
    static const char *const rule = "--optimizer streaming-diloco";
    static const char *const changed[] = {"--diloco-H 6",
                                          "--diloco-H 4 --lr 0.001",
                                          "--diloco-H 4 --tokens 1600",
                                          "--diloco-H 4 --diloco-outer-lr 0.5",
                                          "--diloco-H 4 --val-batches none",
                                          "--diloco-H 4 --streaming-P 1",
                                          "--diloco-H 4 --moments bf16",
                                          "--diloco-H 4 --wire bf16"};
    static const char *const same[] = {"--report-every 3", "--overlap off", "--threads 2", "--keep 5"};
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    int count = sizeof changed / sizeof changed[0];
    fleet_start(fleet, 0, "%s --data text.txt --diloco-H 4 --save-every 1 --keep 100", rule);
    fleet_finish(fleet);
    const char *path = step_path(&fleet->trainings[0], 10);
    for (int i = 0; i < count; i++) {
        fleet_start(fleet, 0, "%s --data text.txt %s --resume %s", rule, changed[i], path);
    }
    for (int i = 0; i < 4; i++) {
        fleet_start(fleet, 0, "%s --data text.txt --diloco-H 4 %s --resume %s", rule, same[i], path);
    }
    for (int i = 1; i < fleet->count; i++) {
        char name[64];
        bool differs = i <= count;
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        check_resumed(fleet, i, 10, !differs);
        if (!differs) { continue; }
        const char *last = strrchr(changed[i - 1], '-'); // of the last option
        while (last > changed[i - 1] && last[-1] != ' ') { last--; }
        snprintf(name, sizeof name, "%.*s", (int)strcspn(last, " "), last);
        text_check(remarks_of(fleet, i), name, fleet->trainings[i].what);
    }
}

// The error of an eager run is in its workers' own parameters. A run that goes on without takes it
// from there, once: so the first exchange does not depend on what is kept of an error.
static void an_error_counts_once_where_eager_is_turned_off(void **state) {
    static const char *const rule = "--optimizer sparse-loco --sparse-H 2";
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "%s --save-every 1 --keep 100", rule);
    fleet_finish(fleet);
    Saved saved = saved_in(stage, fleet->trainings[0].out);
    const char *path = step_path(&fleet->trainings[0], saved.steps[saved.count - 2]);
    for (int i = 0; i < 2; i++) {
        fleet_start(fleet, 0, "%s --sparse-eager off --sparse-beta %d --resume %s", rule, i, path);
    }
    for (int i = 1; i < 3; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        fleet->prints[i] = log_fingerprint(fleet->events[i]);
        check_resumed(fleet, i, saved.steps[saved.count - 2], false);
    }
    check_same(fleet, 1, 2);
}

// Whether model/ of a checkpoint holds the master parameters that its state has.
static void check_model_is_state(const Stage *stage, const char *checkpoint) {
    static const char *const names[2] = {"model/model.safetensors", "state.safetensors"};
    char name[512], path[STAGE_PATH_SIZE], tensor[200];
    SafetensorsFile files[2];
    Error error = {""};
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%.300s/%s", checkpoint, names[i]);
        if (!safetensors_open(&files[i], stage_path(stage, name, path), &error)) {
            fail_msg("%s", error.text);
        }
    }
    assert_true(files[0].count > 0);
    for (size_t i = 0; i < files[0].count; i++) {
        const SafetensorsEntry *model = &files[0].entries[i];
        snprintf(tensor, sizeof tensor, "master/%.150s", model->name);
        const SafetensorsEntry *state = safetensors_find(&files[1], tensor);
        assert_non_null(state);
        assert_int_equal(model->bytes, state->bytes);
        if (memcmp(model->data, state->data, model->bytes) != 0) { fail_msg("%s: %s", checkpoint, tensor); }
    }
    safetensors_close(&files[0]);
    safetensors_close(&files[1]);
}

// Training that goes on while a checkpoint is written changes no part of it.
static void the_model_of_a_checkpoint_is_that_of_its_state(void **state) {
    static const char *const rules[] = {"ddp", "zero1", "acco --accumulate 2", "dpu", "diloco --diloco-H 2"};
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 5; i++) {
        fleet_start(fleet, i == 0 ? 0 : 2, "--save-every %d --keep 99 --optimizer %s", i == 4 ? 2 : 1,
                    rules[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 5; i++) {
        Saved saved = saved_in(stage, fleet->trainings[i].out);
        assert_true(saved.count >= 4);
        for (int j = 0; j < saved.count; j++) {
            check_model_is_state(stage, step_path(&fleet->trainings[i], saved.steps[j]));
        }
    }
}

// Bytes of the tensors of a vector in a run's newest checkpoint. They all have this type.
static size_t saved_size(const Stage *stage, const Training *training, const char *vector,
                         SafetensorsType type) {
    char name[256], path[STAGE_PATH_SIZE];
    SafetensorsFile file;
    Error error = {""};
    size_t bytes = 0;
    snprintf(name, sizeof name, "%s/state.safetensors", last_step_path(stage, training));
    if (!safetensors_open(&file, stage_path(stage, name, path), &error)) { fail_msg("%s", error.text); }
    for (size_t i = 0; i < file.count; i++) {
        if (strncmp(file.entries[i].name, vector, strlen(vector)) != 0) { continue; }
        assert_int_equal(file.entries[i].type, type);
        bytes += file.entries[i].bytes;
    }
    safetensors_close(&file);
    return bytes;
}

// bf16 becomes fp32 without a loss: the next commit, which is made with moments that are not
// yet rounded again, has the same bits. fp32 becomes bf16 with one: it has others.
static void moments_change_their_format(void **state) {
    static const char *const formats[] = {"fp32", "bf16"}, thirteen[] = "--optimizer zero1 --tokens 416";
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 2; i++) {
        fleet_start(fleet, 0, "%s --save-every 1 --moments %s", thirteen, formats[i]);
    }
    fleet_finish(fleet);
    size_t master = saved_size(stage, &fleet->trainings[0], "master/", SAFETENSORS_F32);
    assert_int_equal(saved_size(stage, &fleet->trainings[1], "master/", SAFETENSORS_F32), master);
    assert_int_equal(saved_size(stage, &fleet->trainings[0], "exp_avg", SAFETENSORS_F32), 2 * master);
    assert_int_equal(saved_size(stage, &fleet->trainings[1], "exp_avg", SAFETENSORS_BF16), master);
    for (int i = 0; i < 4; i++) {
        fleet_start(fleet, 0, "%s --moments %s --resume %s", thirteen, formats[i % 2],
                    step_path(&fleet->trainings[i / 2], 12));
    }
    for (int i = 2; i < 6; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        fleet->prints[i] = log_fingerprint(fleet->events[i]);
        check_resumed(fleet, i, 12, i == 2 || i == 5);
        text_check(remarks_of(fleet, i), i == 3 || i == 4 ? "another --moments" : "",
                   fleet->trainings[i].what);
    }
    check_same(fleet, 1, 4);
    check_same(fleet, 1, 5);
    check_same(fleet, 0, 2);
    assert_string_not_equal(fleet->prints[0].text, fleet->prints[3].text);
    assert_close(final_loss(fleet, 3), final_loss(fleet, 0), 0.001, "loss after one commit");
}

// What was done before a checkpoint counts with the batch that it had, not twice with twice the
// batch. It is so with the tokens, with the data, which come once each, and with the gradients
// that the first report of a resumed run has in it. The second run to be resumed has a position
// in the data from before as well as one of its own.
static void work_is_counted_on_with_another_batch(void **state) {
    static const struct {
        int batch, from; // of a run; and the commit of the run before from which it goes on
        int tokens;      // trained on until then
    } runs[] = {{1, 0, 0}, {2, 13, 13 * 32}, {4, 15, 13 * 32 + 2 * 64}};
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 3; i++) {
        const char *from = i == 0 ? "off" : step_path(&fleet->trainings[i - 1], runs[i].from);
        fleet_start(fleet, 0,
                    "--optimizer ddp --micro-batch %d --report-every 1 --save-every 1 --keep 100 --resume %s",
                    runs[i].batch, from);
        const char *what = fleet->trainings[i].what;
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        json_t *report, *manifest = manifest_read(stage, last_step_path(stage, &fleet->trainings[i]));
        int unit = runs[i].batch * 16; // tokens of a micro-batch; of one that is begun all are used
        assert_close(log_number(manifest, "data_base"), (runs[i].tokens + unit - 1) / unit, 0, what);
        json_decref(manifest);
        for (int n = 0; (report = log_event_of(fleet->events[i], "report", n)) != NULL; n++) {
            int before = runs[i].tokens / unit * unit;
            assert_close(log_number(report, "tokens"), before + (n + 1) * runs[i].batch * 32, 0, what);
            assert_close(log_number(report, "grads_per_commit"), 2, 0, what);
        }
    }
}

// Sums that were under way are of micro-batches as they were then. What is made of them first is
// what it would have been: dpu's commit, acco's of both batches, co2's outer step.
static void sums_under_way_have_the_batch_of_then(void **state) {
    static const char *const rules[] = {"dpu --sequential 0", "acco --acco-split 0.75 --accumulate 4",
                                        "co2 --co2-tau 4 --co2-gap 1 --lr 0.01 --val-every 1"};
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 2, "--optimizer %s --warmup 0 --tokens 1280 --save-every 1 --keep 100", rules[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 2,
                    "--optimizer %s --warmup 0 --tokens 2560 --micro-batch 4 --report-every 1 --resume %s",
                    rules[i], step_path(&fleet->trainings[i], 4));
    }
    for (int i = 3; i < 6; i++) {
        const char *what = fleet->trainings[i].what;
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        if (i == 5) {
            assert_close(fleet_number(fleet, 5, "validation", 0, "loss"),
                         fleet_number(fleet, 2, "validation", 0, "loss"), 0.02, what);
            continue;
        }
        double norm = fleet_number(fleet, i, "report", 0, "grad_norm"),
               next = fleet_number(fleet, i, "report", 1, "grad_norm");
        assert_close(norm / next, 1, 0.2, what);
        // 4 commits of before and the sum under way, which has a round B of now under acco.
        int tokens = i == 3 ? 5 * 4 * 16 : 4 * 8 * 16 + 6 * 16 + 2 * 64;
        assert_close(fleet_number(fleet, i, "report", 0, "tokens"), tokens / 64 * 64, 0, what);
    }
}

// ---- --resume auto --------------------------------------------------------------------

// Starts or resumes the run in OUT.
static Training auto_start(Stage *stage, int ranks, const char *out, const char *options) {
    char arguments[1024];
    Setting setting;
    Training training;
    memset(&setting, 0, sizeof setting);
    memset(&training, 0, sizeof training);
    snprintf(training.out, sizeof training.out, "%s", out);
    snprintf(training.what, sizeof training.what, "%d ranks, %.400s, in %.60s", ranks, options, out);
    snprintf(arguments, sizeof arguments, "--config base.json --out %s --resume auto %s", out, options);
    training.program = program_start(stage, ranks, &setting, arguments);
    return training;
}

static const char *training_output(Stage *stage, const Training *training) {
    return stage_read_text(stage, training->program.output_path);
}

static Fingerprint plain_fingerprint(Stage *stage, int ranks, const char *options) {
    Training training = training_start(stage, ranks, options);
    return training_fingerprint(stage, &training);
}

static void check_print(const Fingerprint *print, const Fingerprint *expected, const char *what) {
    if (strcmp(print->text, expected->text) != 0) {
        fail_msg("%s: %s, without an interruption %s", what, print->text, expected->text);
    }
}

static void auto_goes_on_where_the_log_is(void **state) {
    static const char *const options = "--optimizer acco --accumulate 4 --save-every 1 --keep 100";
    Stage *stage = stage_of(state);
    Fingerprint expected = plain_fingerprint(stage, 0, "--optimizer acco --accumulate 4");
    Training first = auto_start(stage, 0, "again", options);
    json_t *events = training_finish(stage, &first);
    Fingerprint print = log_fingerprint(events);
    check_print(&print, &expected, "with checkpoints");
    assert_null(log_event_of(events, "resume", 0));
    text_check(training_output(stage, &first), "a new run begins", "--resume auto with nothing there");
    json_decref(events);
    shell(stage, "rm -r again/checkpoints/commit-1? again/checkpoints/commit-[6-9]");
    Training second = auto_start(stage, 0, "again", options);
    events = training_finish(stage, &second);
    print = log_fingerprint(events);
    check_print(&print, &expected, second.what);
    json_t *resumed = log_event_of(events, "resume", -1);
    assert_true(log_number(resumed, "commit") == 5 && log_event_of(events, "resume", 1) == NULL);
    assert_true(log_event_of(events, "start", 1) != NULL && log_event_of(events, "end", 1) != NULL);
    check_saved(stage, "again", "1 2 3 4 5 6 7 8 9 10 11 12");
    assert_true(log_number(log_event_of(events, "end", 1), "seconds") >
                log_number(log_event_of(events, "report", 0), "seconds"));
    json_decref(events);
}

// The split and the wire that a run has measured stand in its log, its configuration and
// its checkpoints. So a resumed run, and another one with the same configuration, end in
// the same bits, and measure nothing.
static void what_was_measured_is_kept(void **state) {
    static const char *const options =
        "--optimizer acco --accumulate 6 --acco-split auto --estimate-wire auto --save-every 1 --keep 100 "
        "--link-mbit 20 --tokens 1536"; // 8 commits
    Stage *stage = stage_with_ranks(state);
    Training first = auto_start(stage, 2, "measured", options);
    json_t *events = training_finish(stage, &first), *start = log_event_of(events, "start", 0),
           *chosen = json_object_get(start, "options");
    Fingerprint expected = log_fingerprint(events);
    const char *split = json_string_value(json_object_get(chosen, "acco-split")),
               *wire = json_string_value(json_object_get(chosen, "estimate-wire"));
    double share = atof(split);
    assert_true(share > 0 && share < 1 && fabs(6 * share - nearbyint(6 * share)) < 1e-6);
    assert_string_not_equal(wire, "auto");
    text_check(json_string_value(json_object_get(start, "measured")), "measured: the exchange of a commit",
               "log");
    text_check(training_output(stage, &first), "measured: the exchange of a commit", "start block");
    char estimate[80];
    snprintf(estimate, sizeof estimate, "the exchange of an estimate (%.20s)", wire);
    assert_true(text_number(training_output(stage, &first), estimate, "start block") > 0);
    json_t *manifest = manifest_read(stage, "measured/checkpoints/commit-8");
    assert_true(json_equal(json_object_get(manifest, "options"), chosen));
    json_decref(manifest);
    shell(stage,
          "grep -q '\"acco-split\": \"0[.]' measured/config.json && ! grep -q '\"estimate-wire\": \"auto' "
          "measured/config.json && rm -r measured/checkpoints/commit-[5-8]");
    Training resumed = auto_start(stage, 2, "measured", options);
    json_t *later = training_finish(stage, &resumed);
    Fingerprint print = log_fingerprint(later);
    check_print(&print, &expected, "resumed");
    assert_true(json_is_true(json_object_get(log_event_of(later, "resume", 0), "exact")));
    start = log_event_of(later, "start", 1);
    assert_true(json_equal(json_object_get(start, "options"), chosen));
    assert_string_equal(json_string_value(json_object_get(start, "measured")), "");
    text_check(training_output(stage, &resumed), "options    where the program chooses, as in ",
               "start block");
    json_decref(later);
    Training again = {.out = "once-more", .what = "the configuration of that run"};
    Setting setting = {0};
    again.program =
        program_start(stage, 2, &setting, "--config measured/config.json --resume off --out once-more");
    later = training_finish(stage, &again);
    print = log_fingerprint(later);
    check_print(&print, &expected, "with the configuration of that run");
    start = log_event_of(later, "start", 0);
    assert_string_equal(json_string_value(json_object_get(start, "measured")), "");
    // What is sent to measure is not counted as sent by training.
    assert_true(log_number(log_event_of(events, "report", 0), "bytes_sent") <
                1.6 * log_number(log_event_of(later, "report", 0), "bytes_sent"));
    json_decref(events);
    json_decref(later);
}

// Resumes a run of --acco-split auto with `options`, and looks at what it says.
static void check_split(Stage *stage, int ranks, const char *checkpoint, const char *options,
                        const char *remark, const char *measured) {
    char arguments[512];
    snprintf(arguments, sizeof arguments, "--optimizer acco --resume %s %s", checkpoint, options);
    Training training = training_start(stage, ranks, arguments);
    json_t *events = training_finish(stage, &training), *resumed = log_event_of(events, "resume", 0);
    const char *remarks = json_string_value(json_object_get(resumed, "remarks")),
               *why = json_string_value(json_object_get(log_event_of(events, "start", 0), "measured"));
    if (strstr(remarks, remark) == NULL || (remark[0] == '\0' && remarks[0] != '\0')) {
        fail_msg("%s: the remark is not \"%s\" but \"%s\"", options, remark, remarks);
    }
    if (strncmp(why, measured, strlen(measured)) != 0 || (measured[0] == '\0' && why[0] != '\0')) {
        fail_msg("%s: measured \"%s\", not \"%s\"", options, why, measured);
    }
    json_decref(events);
}

// A share that the user names is used. A measured choice is kept unless what it was measured for
// is another one now; a choice that a user has made is no measurement.
static void a_measured_split_is_kept_where_batches_are_as_they_were(void **state) {
    Stage *stage = stage_with_ranks(state);
    Training first = training_start(
        stage, 2, "--optimizer acco --accumulate 4 --acco-split auto --save-every 1 --keep 100");
    Training by_hand = training_start(
        stage, 2, "--optimizer acco --accumulate 4 --acco-split 0.3 --save-every 1 --keep 100");
    json_decref(training_finish(stage, &first));
    json_decref(training_finish(stage, &by_hand));
    const char *path = step_path(&first, 2);
    check_split(stage, 2, path, "--accumulate 4 --acco-split auto", "", "");
    check_split(stage, 1, path, "--accumulate 4 --acco-split auto", "ranks", "measured: ");
    check_split(stage, 3, path, "--accumulate 4 --acco-split auto", "ranks", "measured: ");
    check_split(stage, 2, path, "--accumulate 4 --acco-split 0.6", "another --acco-split", "");
    check_split(stage, 2, path, "--accumulate 6 --acco-split auto", "another --accumulate", "measured: ");
    check_split(stage, 2, path, "--accumulate 4 --acco-split auto --wire bf16", "another --wire",
                "measured: ");
    check_split(stage, 2, step_path(&by_hand, 2), "--accumulate 4 --acco-split auto", "another --acco-split",
                "measured: ");
}

// The rank with the most micro-batches has the finest splits: among equally quick ones the largest
// round A is chosen, which is 7 of 8 here, where half is all that rank 0 could have.
static void a_split_is_chosen_by_the_rank_with_most_micro_batches(void **state) {
    Stage *stage = stage_with_ranks(state);
    char path[STAGE_PATH_SIZE];
    Outcome outcome =
        program_run(stage, 2,
                    "--config base.json --optimizer acco --rank-accumulate 2,8 --acco-split auto "
                    "--slow-rank 0 --slow-ms 30 --out split");
    outcome_check(&outcome, 0, "--acco-split auto");
    json_t *config = json_load_file(stage_path(stage, "split/config.json", path), 0, NULL);
    const char *share = json_string_value(json_object_get(config, "acco-split"));
    if (share == NULL || !(atof(share) > 0.55)) {
        fail_msg("--acco-split auto chose %s", share == NULL ? "nothing" : share);
    }
    json_decref(config);
}

typedef struct Damage {
    const char *command; // what is done to the newest checkpoint, of step 24
    const char *named;   // part of the message about it
    long from;           // the step from which the run is resumed then
} Damage;

// Commands run in the run's directory. $d: the checkpoint of step 24, $c: the folder of
// all of them.
static const Damage damages[] = {
    {"printf '\\377' | dd of=$d/state.safetensors bs=1 seek=50000 conv=notrunc 2>/dev/null", "is damaged",
     20},
    {"truncate -s 30000 $d/state.safetensors", "truncated", 20},
    {"truncate -s 0 $d/state.safetensors", "is empty", 20},
    {"rm $d/state.safetensors", "cannot read", 20},
    {"printf x >> $d/state.safetensors", "belong to no tensor", 20},
    {"rm $d/checkpoint.json", "checkpoint.json", 20},
    {"truncate -s 300 $d/checkpoint.json", "checkpoint.json", 20},
    {"printf '{}' > $d/checkpoint.json", "no checkpoint", 20},
    {"sed -i 's/\"gradients_done\": \"48\"/\"gradients_done\": \"49\"/' $d/checkpoint.json", "damaged", 20},
    {"rm -r $d && mkdir $d", "checkpoint.json", 20},
    {"rm -r $d && : > $d", "checkpoint.json", 20},
};

enum { DAMAGES = sizeof damages / sizeof damages[0] };

static void check_damage(Stage *stage, const Training *training, const Damage *damage,
                         const Fingerprint *expected) {
    json_t *events = training_finish(stage, training);
    Fingerprint print = log_fingerprint(events);
    const char *output = training_output(stage, training);
    check_print(&print, expected, damage->command);
    text_check(output, "resumed    not from commit-24: ", damage->command);
    text_check(output, damage->named, damage->command);
    json_t *resumed = log_event_of(events, "resume", -1);
    if (resumed == NULL || log_number(resumed, "commit") != (double)damage->from) {
        fail_msg("%s: not from step %ld: %.1500s", damage->command, damage->from, output);
    }
    json_decref(events);
}

static void damaged_checkpoints_are_named_and_passed_over(void **state) {
    Stage *stage = stage_of(state);
    Training trainings[DAMAGES], whole = training_start(stage, 0, "--save-every 4 --keep 100");
    Fingerprint expected = training_fingerprint(stage, &whole);
    for (int i = 0; i < DAMAGES; i++) {
        char out[64], command[1024];
        snprintf(out, sizeof out, "damaged-%d", i);
        snprintf(command, sizeof command,
                 "cp -r %s %s && cd %s && c=checkpoints d=checkpoints/commit-24 && %s", whole.out, out, out,
                 damages[i].command);
        shell(stage, "%s", command);
        trainings[i] = auto_start(stage, 0, out, "--save-every 4 --keep 100");
    }
    for (int i = 0; i < DAMAGES; i++) { check_damage(stage, &trainings[i], &damages[i], &expected); }
}

// A run that is resumed from before damaged checkpoints keeps those that it saves now,
// and does not count the damaged ones, which have larger numbers.
static void new_checkpoints_are_not_given_up_for_damaged_ones(void **state) {
    Stage *stage = stage_of(state);
    Training whole = training_start(stage, 0, "--save-every 8 --keep 100");
    json_decref(training_finish(stage, &whole));
    shell(stage,
          "cd %s/checkpoints && truncate -s 99 commit-16/state.safetensors && truncate -s 99 "
          "commit-24/state.safetensors",
          whole.out);
    Training again = auto_start(stage, 0, whole.out, "--save-every 2 --keep 2 --tokens 416"); // 13 commits
    json_decref(training_finish(stage, &again));
    Training last = auto_start(stage, 0, whole.out, "--tokens 416");
    json_t *events = training_finish(stage, &last);
    json_t *resumed = log_event_of(events, "resume", -1);
    if (resumed == NULL || log_number(resumed, "commit") != 13) {
        fail_msg("%.1500s", training_output(stage, &last));
    }
    json_decref(events);
}

// Where no checkpoint can be loaded, nothing is begun at zero in their place, and they stay.
static void a_run_of_damaged_checkpoints_is_not_begun_anew(void **state) {
    Stage *stage = stage_of(state);
    Training whole = training_start(stage, 0, "--save-every 8 --keep 100");
    json_decref(training_finish(stage, &whole));
    shell(stage, "cd %s/checkpoints && for i in commit-*; do truncate -s 99 $i/state.safetensors; done",
          whole.out);
    Training again = auto_start(stage, 0, whole.out, "--save-every 8 --keep 1");
    Outcome outcome = program_finish(stage, &again.program);
    outcome_check(&outcome, 2, again.what);
    text_check(outcome.errors, "no checkpoint in", again.what);
    assert_int_equal(text_count(outcome.output, "resumed    not from commit-"), 3);
    check_saved(stage, whole.out, "8 16 24");
}

// A damaged checkpoint does not count among those that are kept, and is not removed.
static void damaged_checkpoints_do_not_count_as_kept(void **state) {
    Stage *stage = stage_of(state);
    Training whole = training_start(stage, 0, "--save-every 8 --keep 100");
    json_decref(training_finish(stage, &whole));
    shell(stage, "cd %s/checkpoints && rm -r commit-24 && truncate -s 99 commit-16/state.safetensors",
          whole.out);
    Training again = auto_start(stage, 0, whole.out, "--save-every 17 --keep 2");
    json_decref(training_finish(stage, &again)); // saves at 17 and 24
    check_saved(stage, whole.out, "16 17 24");
}

// ---- When checkpoints are written -----------------------------------------------------

static void nothing_is_saved_where_nobody_wants_it(void **state) {
    Stage *stage = stage_of(state);
    Training training = training_start(stage, 0, "--save-every never");
    json_decref(training_finish(stage, &training));
    text_check(training_output(stage, &training), "not saved  because of --save-every never", training.what);
    shell(stage, "[ ! -e %s/checkpoints ]", training.out);
}

// A run of 24 commits and 3.6 s at least: rank 0's clock decides, for both ranks.
static void checkpoints_can_follow_the_clock(void **state) {
    Stage *stage = stage_with_ranks(state);
    double began = program_clock();
    Training training = training_start(
        stage, 2, "--save-every 1s --keep 100 --tokens 1536 --slow-rank 1 --slow-ms 75 --optimizer acco");
    json_decref(training_finish(stage, &training));
    Saved saved = saved_in(stage, training.out);
    // Each a second after the one before, however busy the machine is, but for that at the end.
    double most = program_clock() - began + 1;
    if (!(saved.count >= 3 && saved.count <= fmin(most, 24))) { fail_msg("checkpoints: %s", saved.text); }
}

// A finished run that is resumed trains nothing, writes no checkpoint, and loses nothing.
static void a_finished_run_stays_finished(void **state) {
    for (int i = 0; i < RULES_TESTED; i++) {
        Stage *stage = stage_of(state);
        char out[64];
        snprintf(out, sizeof out, "finished-%d", i);
        Training first = auto_start(stage, 0, out, rule_cases[i].options);
        Fingerprint expected = training_fingerprint(stage, &first);
        Training second = auto_start(stage, 0, out, rule_cases[i].options);
        json_t *events = training_finish(stage, &second);
        Fingerprint print = log_fingerprint(events);
        check_print(&print, &expected, second.what);
        json_t *one = log_event_of(events, "end", 0), *other = log_event_of(events, "end", 1);
        assert_true(log_number(one, "commit") == log_number(other, "commit"));
        assert_true(log_number(one, "tokens") == log_number(other, "tokens"));
        size_t written_again = 0;
        for (size_t n = json_array_size(events);
             n > 0 && log_event_of(events, "start", 1) != json_array_get(events, n - 1); n--) {
            const char *kind = json_string_value(json_object_get(json_array_get(events, n - 1), "event"));
            if (strcmp(kind, "checkpoint") == 0) { written_again++; }
        }
        if (written_again > 0) { fail_msg("%s: a checkpoint that was there is written again", out); }
        if (strstr(training_output(stage, &second), "loss       0.0000") != NULL) {
            fail_msg("%s: prints a loss that was not measured", out);
        }
        text_check(training_output(stage, &second), "nothing is left to do", out);
        assert_null(strstr(training_output(stage, &second), "tokens/s"));
        json_decref(events);
    }
}

// After the last commit some rules still change the parameters, and that is what stays on
// disk, also where a checkpoint of this commit was begun before.
static void the_end_is_saved_with_its_last_exchange(void **state) {
    static const char *const rules[] = {"dpu", "acco-wp", "co2 --co2-tau 4", "streaming-diloco --diloco-H 4",
                                        "streaming-diloco --diloco-H 4 --streaming-tau 0"};
    enum { RULES = sizeof rules / sizeof rules[0] };
    Fleet *fleet = fleet_new(stage_of(state));
    for (int i = 0; i < RULES; i++) {
        fleet_start(fleet, 0, "--optimizer %s --save-every 4", rules[i]);
        fleet_start(fleet, 0, "--optimizer %s --save-every end", rules[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 2 * RULES; i += 2) {
        char here[128];
        check_same(fleet, i, i + 1);
        snprintf(here, sizeof here, "%s", last_step_path(fleet->stage, &fleet->trainings[i]));
        shell(fleet->stage, "cmp %s/model/model.safetensors %s/model/model.safetensors", here,
              last_step_path(fleet->stage, &fleet->trainings[i + 1]));
    }
}

// ---- Runs that are asked to stop, and runs that are killed ----------------------------

static const char *const slow = "--slow-rank 0 --slow-ms 10 --report-every 1 --val-batches none";

// Waits until the log has `count` events of a kind since the latest start of the run.
// pids (ranks): the processes of that start.
static void wait_for_events(Stage *stage, const Training *training, const char *kind, int count,
                            pid_t *pids) {
    char path[STAGE_PATH_SIZE], name[128], wanted[64];
    double until = program_clock() + 60;
    int exit_code;
    snprintf(name, sizeof name, "%s/log.jsonl", training->out);
    snprintf(wanted, sizeof wanted, "{\"event\":\"%s\"", kind);
    for (;;) {
        char *text = file_read(stage_path(stage, name, path)), *start = NULL;
        for (char *found = text; found != NULL && (found = strstr(found, "{\"event\":\"start\"")) != NULL;
             found++) {
            start = found;
        }
        if (start != NULL && text_count(start, wanted) >= count) {
            json_t *event = json_loads(start, JSON_DISABLE_EOF_CHECK, NULL),
                   *list = json_object_get(event, "ranks");
            for (size_t i = 0; i < json_array_size(list); i++) {
                pids[i] = (pid_t)log_number(json_array_get(list, i), "pid");
            }
            json_decref(event);
            free(text);
            return;
        }
        free(text);
        if (program_clock() > until) { fail_msg("%s: no %s for 60 s", training->what, kind); }
        if (program_has_ended(stage, training->program.pid, 0, &exit_code)) {
            fail_msg("%s: ended early, %d: %.1500s", training->what, exit_code,
                     training_output(stage, training));
        }
        program_pause(0.005);
    }
}

// The run was asked to stop, said so, and saved its last commit.
static void check_stopped(Stage *stage, const Training *training) {
    Outcome outcome = program_finish(stage, &training->program);
    outcome_check(&outcome, 75, training->what);
    text_check(outcome.output, "--resume auto", training->what);
    json_t *events = log_read(stage, training->out), *end = log_event_of(events, "end", -1);
    assert_non_null(end);
    assert_string_equal(json_string_value(json_object_get(end, "reason")), "asked to stop");
    Saved saved = saved_in(stage, training->out);
    assert_true(saved.count > 0 && saved.strangers == 0 &&
                (double)saved.steps[saved.count - 1] == log_number(end, "commit"));
    json_decref(events);
}

// Rank `victim` is asked to stop by a signal: all ranks save and leave, and can be
// resumed.
static void check_stop(Stage *stage, int ranks, int victim, int signal_number) {
    Training stopped[RULES_TESTED], whole[RULES_TESTED];
    pid_t pids[2];
    for (int i = 0; i < RULES_TESTED; i++) {
        char options[256], out[64];
        snprintf(out, sizeof out, "stop-%d-%d-%d", ranks, signal_number, i);
        snprintf(options, sizeof options,
                 "--slow-rank 0 --slow-ms 300 --report-every 1 --val-batches none %s", rule_cases[i].options);
        whole[i] = training_start(stage, ranks, rule_cases[i].options);
        stopped[i] = auto_start(stage, ranks, out, options);
    }
    for (int i = 0; i < RULES_TESTED; i++) {
        wait_for_events(stage, &stopped[i], "report", 1, pids);
        assert_int_equal(kill(pids[victim], signal_number), 0);
    }
    Fingerprint expected[RULES_TESTED];
    for (int i = 0; i < RULES_TESTED; i++) { check_stopped(stage, &stopped[i]); }
    for (int i = 0; i < RULES_TESTED; i++) { expected[i] = training_fingerprint(stage, &whole[i]); }
    for (int i = 0; i < RULES_TESTED; i++) {
        stopped[i] = auto_start(stage, ranks, stopped[i].out, rule_cases[i].options);
    }
    for (int i = 0; i < RULES_TESTED; i++) {
        Fingerprint print = training_fingerprint(stage, &stopped[i]);
        check_print(&print, &expected[i], stopped[i].what);
        text_check(training_output(stage, &stopped[i]), "; exact\n", stopped[i].what);
    }
}

static void who_is_asked_to_stop_saves(void **state) { check_stop(stage_of(state), 0, 0, SIGTERM); }
static void one_rank_that_is_asked_stops_all(void **state) {
    check_stop(stage_with_ranks(state), 2, 1, SIGUSR1);
}

// A commit of 3 and 1 micro-batches of 150 ms each: a signal 50 ms after a report comes
// in the short round, one 350 ms after it in the long one.
static void a_stop_in_either_round_goes_on(void **state) {
    static const char *const options = "--optimizer acco --accumulate 4 --acco-split 0.75";
    Stage *stage = stage_with_ranks(state);
    Training stopped[2];
    pid_t pids[2];
    char slowly[256];
    snprintf(slowly, sizeof slowly, "--slow-rank 0 --slow-ms 150 --report-every 1 --val-batches none %s",
             options);
    Fingerprint expected = plain_fingerprint(stage, 2, options);
    for (int i = 0; i < 2; i++) {
        char out[64];
        snprintf(out, sizeof out, "stop-in-round-%d", i);
        stopped[i] = auto_start(stage, 2, out, slowly);
    }
    for (int i = 0; i < 2; i++) {
        wait_for_events(stage, &stopped[i], "report", 2, pids);
        program_pause(i == 0 ? 0.05 : 0.35);
        assert_int_equal(kill(pids[0], SIGTERM), 0);
    }
    for (int i = 0; i < 2; i++) {
        check_stopped(stage, &stopped[i]);
        Training resumed = auto_start(stage, 2, stopped[i].out, options);
        Fingerprint print = training_fingerprint(stage, &resumed);
        check_print(&print, &expected, resumed.what);
    }
}

// The steps left out in a row are counted over a stop: a run whose parameters are useless ends
// after SPIKE_PATIENCE of them, also where some were before it was resumed. What makes them so is
// as in check_not_finite of test_program.c.
static void bad_steps_in_a_row_are_counted_on(void **state) {
    static const char *const options = "--optimizer ddp --lr 100 --grad-clip off --warmup 0 --weight-decay 0 "
                                       "--beta2 0 --eps 1e-30 --val-batches none --on-spike skip";
    Stage *stage = stage_of(state);
    char slowly[512];
    pid_t pids[1];
    snprintf(slowly, sizeof slowly, "--slow-rank 0 --slow-ms 150 %s", options);
    Training training = auto_start(stage, 0, "useless", slowly);
    wait_for_events(stage, &training, "spike", 2, pids);
    assert_int_equal(kill(pids[0], SIGTERM), 0);
    check_stopped(stage, &training);
    training = auto_start(stage, 0, "useless", options);
    Outcome outcome = program_finish(stage, &training.program);
    outcome_check(&outcome, 3, training.what);
    text_check(outcome.errors, "; 10 in a row were left out; ", training.what);
    json_t *events = log_read(stage, "useless"), *spike;
    assert_non_null(log_event_of(events, "resume", 0));
    for (int i = 0; i < SPIKE_PATIENCE; i++) {
        spike = log_event_of(events, "spike", i);
        if (spike == NULL) { fail_msg("%s: ended after %d bad steps", training.what, i); }
        assert_close(log_number(spike, "count"), i + 1, 0, training.what);
    }
    spike = log_event_of(events, "spike", SPIKE_PATIENCE);
    if (spike != NULL) { fail_msg("%s: did not end after %d bad steps", training.what, SPIKE_PATIENCE); }
    json_decref(events);
}

// Killed three times, at moments that vary, in a run that saves after every commit, and
// so sometimes while it saves.
static void check_kills(Stage *stage, int ranks, const char *options) {
    char all[512];
    pid_t pids[2] = {0, 0};
    Fingerprint expected = plain_fingerprint(stage, ranks, options);
    snprintf(all, sizeof all, // slowly: it must not end before it is killed
             "--save-every 1 --keep 1 --slow-rank 0 --slow-ms 40 --report-every 1 --val-batches none %s",
             options);
    for (int kills = 0; kills < 3; kills++) {
        Training training = auto_start(stage, ranks, "killed", all);
        wait_for_events(stage, &training, "report", 1 + kills, pids);
        program_pause(0.001 * (double)(getpid() * 7 % 10 + 3 * kills));
        kill(pids[ranks > 0 ? 1 : 0], SIGKILL);
        Outcome outcome = program_finish(stage, &training.program);
        assert_int_not_equal(outcome.exit_code, 0);
    }
    Training training = auto_start(stage, ranks, "killed", all);
    Fingerprint print = training_fingerprint(stage, &training);
    check_print(&print, &expected, options);
    assert_int_equal(saved_in(stage, "killed").strangers, 0);
    shell(stage, "rm -r killed");
}

static void a_killed_run_goes_on(void **state) {
    check_kills(stage_of(state), 0, "--optimizer acco --accumulate 4");
    check_kills(stage_of(state), 0, "--optimizer co2 --co2-tau 2");
}

static void a_run_that_lost_a_rank_goes_on(void **state) {
    check_kills(stage_with_ranks(state), 2, "--optimizer zero1");
}

// What a failure costs is counted from the newest checkpoint on disk, not from the commit at which
// training learned that it is there: a checkpoint is written beside training, and all ranks learn
// of its end with a later commit. A commit takes 200 ms, so the next checkpoint is far away.
static void what_a_lost_rank_costs_is_counted_from_a_checkpoint(void **state) {
    Stage *stage = stage_with_ranks(state);
    pid_t pids[2];
    char lost[64];
    Training training = auto_start(stage, 2, "counted",
                                   "--tokens 1G --save-every 4 --keep 100 --optimizer zero1 --accumulate 2 "
                                   "--slow-rank 0 --slow-ms 100 --report-every 1 --val-batches none");
    wait_for_events(stage, &training, "checkpoint", 1, pids);
    wait_for_events(stage, &training, "report", 6, pids); // the checkpoint is of commit 4
    assert_int_equal(kill(pids[1], SIGKILL), 0);
    Outcome outcome = program_finish(stage, &training.program);
    assert_int_not_equal(outcome.exit_code, 0);
    Saved saved = saved_in(stage, "counted");
    assert_true(saved.count > 0);
    snprintf(lost, sizeof lost, "all after checkpoint commit-%ld is lost", saved.steps[saved.count - 1]);
    text_check(outcome.errors, lost, training.what);
}

// ---- Checkpoints that cannot be written -----------------------------------------------

// The run trains on, and the older checkpoint stays as it was.
static void a_full_disk_costs_the_new_checkpoint_only(void **state) {
    Stage *stage = stage_of(state);
    Setting setting = {.file_bytes = 60000, .ignore_xfsz = true}; // no file may be as long as the state
    Training whole = training_start(stage, 0, "--save-every 8 --keep 1 --optimizer zero1");
    Fingerprint expected = training_fingerprint(stage, &whole);
    Training half = auto_start(stage, 0, "full", "--save-every 8 --keep 100 --optimizer zero1");
    json_decref(training_finish(stage, &half));
    shell(stage, "rm -r full/checkpoints/commit-16 full/checkpoints/commit-24");
    Program program = program_start(stage, 0, &setting,
                                    "--config base.json --out full --resume auto --save-every 4 --keep 1");
    Outcome outcome = program_finish(stage, &program);
    outcome_check(&outcome, 3, "a full disk");
    text_check(outcome.output, "no checkpoint: ", "a full disk");
    text_check(outcome.output, "File too large", "a full disk");
    json_t *events = log_read(stage, "full"), *event = log_event_of(events, "checkpoint", -1);
    assert_true(json_is_false(json_object_get(event, "saved")));
    assert_true(strlen(json_string_value(json_object_get(event, "problem"))) > 0);
    Fingerprint print = log_fingerprint(events);
    json_decref(events);
    check_saved(stage, "full", "8");
    Training again = auto_start(stage, 0, "full", "--optimizer zero1");
    Fingerprint other = training_fingerprint(stage, &again);
    text_check(training_output(stage, &again), "from full/checkpoints/commit-8 at commit 8; exact",
               "after a full disk");
    check_print(&other, &expected, "after a full disk");
    assert_int_equal(strlen(print.text), 16);
}

// The checkpoint before stays until the next one is whole and has its name, whatever --keep says.
static void a_checkpoint_without_its_name_costs_no_other(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    Training half = auto_start(stage, 0, "nameless", "--save-every 8 --keep 100");
    json_decref(training_finish(stage, &half));
    shell(stage, "rm -r nameless/checkpoints/commit-24 && mkdir nameless/checkpoints/commit-32");
    // A file system under the name is in the way of the rename.
    if (mount("none", stage_path(stage, "nameless/checkpoints/commit-32", path), "tmpfs", 0, "size=64k") !=
        0) {
        leave_out("the right to mount a file system (root)");
    }
    Outcome outcome =
        program_run(stage, 0, "--out nameless --resume auto --keep 1 --save-every 32 --tokens 1024");
    assert_int_equal(umount2(path, MNT_DETACH), 0);
    outcome_check(&outcome, 3, "a name that cannot be had");
    text_check(outcome.output, "no checkpoint: ", "a name that cannot be had");
    shell(stage, "test -e nameless/checkpoints/commit-16/checkpoint.json");
}

// A run that is stopped in a validation owes it: resumed, it validates, and goes on or ends.
static void a_validation_that_was_not_finished_is_made_up_for(void **state) {
    Stage *stage = stage_of(state);
    pid_t pids[1];
    shell(stage, "for i in $(seq 8000); do echo \"$i ships sailed over the quiet sea\"; done > long.txt");
    Training run =
        auto_start(stage, 0, "owes", "--data long.txt --val-batches 16000 --val-every end --report-every 24");
    wait_for_events(stage, &run, "report", 1, pids); // of the last commit: then it validates
    kill(pids[0], SIGTERM);
    Outcome outcome = program_finish(stage, &run.program);
    outcome_check(&outcome, 75, "stopped in its last validation");
    json_t *events = log_read(stage, "owes");
    assert_null(log_event_of(events, "validation", -1));
    json_decref(events);
    Training again = auto_start(stage, 0, "owes", "--val-batches 16000");
    events = training_finish(stage, &again);
    assert_non_null(log_event_of(events, "validation", -1));
    json_decref(events);

    static const char often[] = "--data long.txt --val-batches 16000 --val-every 10 --report-every 10";
    run = auto_start(stage, 0, "owes-10", often);
    wait_for_events(stage, &run, "report", 1, pids);
    kill(pids[0], SIGTERM);
    outcome = program_finish(stage, &run.program);
    outcome_check(&outcome, 75, "stopped in its first validation");
    again = auto_start(stage, 0, "owes-10", often);
    events = training_finish(stage, &again);
    for (int i = 0; i < 3; i++) {
        static const double commits[] = {10, 20, 24};
        assert_true(log_number(log_event_of(events, "validation", i), "commit") == commits[i]);
    }
    json_decref(events);
}

// What the start says a checkpoint takes is what it takes, with what each worker keeps for itself.
static void the_size_of_a_checkpoint_is_said(void **state) {
    static const char *const runs[] = {"--model tiny --optimizer ddp",
                                       "--model tiny --optimizer acco",
                                       "--model tiny --optimizer co2",
                                       "--model tiny --optimizer diloco",
                                       "--model tiny --optimizer sparse-loco",
                                       "--model tiny --optimizer ddp --inner muon",
                                       "--from size-0 --lora-rank 16 --optimizer ddp"}; // adapters alone
    Stage *stage = stage_with_ranks(state);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        char arguments[256], path[STAGE_PATH_SIZE], unit = ' ';
        double said = 0;
        snprintf(
            arguments, sizeof arguments,
            "--seq-len 16 --micro-batch 1 --tokens 1k --val-batches none --sample-tokens none --threads 1 "
            "--out size-%zu %s",
            i, runs[i]);
        Outcome outcome = program_run(stage, 2, arguments);
        outcome_check(&outcome, 0, arguments);
        const char *line = strstr(outcome.output, "a checkpoint takes about ");
        assert_non_null(line);
        assert_int_equal(sscanf(line, "a checkpoint takes about %lf %c", &said, &unit), 2);
        assert_true(unit == 'M');
        shell(stage, "du -sb size-%zu/checkpoints/commit-* | tail -n 1 > size.txt", i);
        char *bytes = file_read(stage_path(stage, "size.txt", path));
        double takes = atof(bytes) / 1e6;
        free(bytes);
        if (!(fabs(said / takes - 1) < 0.15)) {
            fail_msg("%s: %g MB are said, %g taken", runs[i], said, takes);
        }
    }
}

// Whether a run prints `wanted` within a minute.
static bool prints(Stage *stage, const Training *training, const char *wanted) {
    double until = program_clock() + 60;
    while (strstr(stage_read_text(stage, training->program.output_path), wanted) == NULL) {
        if (program_clock() > until) { return false; }
        program_pause(0.01);
    }
    return true;
}

// A disk of its own is full for a while, so that the log does not fit either: the run goes
// on, and in the end no line is missing.
static void a_disk_that_is_full_for_a_while_costs_no_line_of_the_log(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    pid_t pids[1];
    shell(stage, "mkdir small");
    if (mount("none", stage_path(stage, "small", path), "tmpfs", 0, "size=4m") != 0) {
        leave_out("the right to mount a file system (root)");
    }
    Training training = auto_start(stage, 0, "small/run",
                                   "--tokens 1G --report-every 1 --save-every 2 --slow-rank 0 --slow-ms 10");
    wait_for_events(stage, &training, "checkpoint", 1, pids);
    shell(stage, "cat /dev/zero > small/ballast 2> cat-says.txt || true");
    bool full = prints(stage, &training, " no checkpoint: ");
    int saved = text_count(stage_read_text(stage, training.program.output_path), " checkpoint in ");
    shell(stage, "rm small/ballast");
    wait_for_events(stage, &training, "checkpoint", saved + 2, pids); // with the one that failed
    kill(pids[0], SIGTERM);
    Outcome outcome = program_finish(stage, &training.program);
    shell(stage,
          ". '%s/scripts/common' && column small/run steps | wc -l > rows.txt && cp -r small/run filled",
          stage->root);
    assert_int_equal(umount2(path, MNT_DETACH), 0); // before what may fail
    json_t *events = log_read(stage, "filled"), *report;
    assert_true(full);
    outcome_check(&outcome, 75, training.what);
    int count = 0;
    while ((report = log_event_of(events, "report", count)) != NULL) {
        count++;
        assert_true(log_number(report, "commit") == count);
    }
    assert_true(count > 2 && log_number(log_event_of(events, "end", -1), "commit") == count);
    char *rows = file_read(stage_path(stage, "rows.txt", path));
    assert_int_equal(atoi(rows), count);
    free(rows);
    json_decref(events);
}

static void a_folder_that_cannot_be_made_costs_only_checkpoints(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "mkdir blocked && : > blocked/checkpoints");
    Outcome outcome = program_run(stage, 0, "--config base.json --out blocked --save-every 8");
    outcome_check(&outcome, 3, "a file where the folder should be");
    assert_int_equal(text_count(outcome.output, "no checkpoint: "), 3);
}

// Only rank 1 cannot write: the others do not wait for it, and the message names it.
static void one_rank_without_room_is_named(void **state) {
    Stage *stage = stage_with_ranks(state);
    pid_t pids[2];
    char options[256];
    snprintf(options, sizeof options, "--optimizer diloco --diloco-H 1 --save-every 1 --keep 1 %s", slow);
    Training training = training_start(stage, 2, options);
    wait_for_events(stage, &training, "checkpoint", 1, pids);
    struct rlimit limit = {1000, 1000};
    assert_int_equal(prlimit(pids[1], RLIMIT_FSIZE, &limit, NULL), 0);
    Outcome outcome = program_finish(stage, &training.program);
    outcome_check(&outcome, 3, training.what);
    text_check(outcome.output, "no checkpoint: rank 1 on ", "one rank without room");
    text_check(outcome.errors, "the end of this run is not on disk", "one rank without room");
    Saved saved = saved_in(stage, training.out);
    assert_true(saved.count == 1 && saved.strangers == 0);
}

// On one rank.
static Outcome run_well(Stage *stage, const char *arguments) {
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    return outcome;
}

// ---- Which checkpoints are kept, and models as a start --------------------------------

static void some_checkpoints_are_kept(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp --save-every 2 --keep 2 --keep-every 8");
    fleet_start(fleet, 0, "--optimizer ddp --save-every 5 --keep 1");
    fleet_start(fleet, 0, "--optimizer ddp");
    fleet_start(
        fleet, 0,
        "--optimizer diloco --diloco-H 3 --save-every 6 --keep 1 --keep-every 8"); // saves at 6, 12, 18, 24
    fleet_finish(fleet);
    check_saved(stage, fleet->trainings[0].out, "8 16 22 24");
    check_saved(stage, fleet->trainings[1].out, "24");
    check_saved(stage, fleet->trainings[2].out, "24");
    check_saved(stage, fleet->trainings[3].out, "12 18 24"); // the first ones beyond 8 and 16
}

// The log tells which validation was the best, and which the last that was waited for. A run that
// is resumed has not forgotten either.
static void the_best_is_kept_and_the_end_is_seen(void **state) {
    Stage *stage = stage_of(state);
    static const char options[] = "--optimizer %s --lr 0.1 --schedule constant --warmup 0 --val-every 4 "
                                  "--stop-after 3 --keep-best on --keep 1 --tokens 100k";
    static const char *const rules[] = {"ddp", "acco", "diloco --diloco-H 4"};
    static const char *const windows[] = {"--val-batches 7", "--val-data text.txt", "--seed 3"};
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 3; i++) { fleet_start(fleet, 2, options, rules[i]); }
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) {
        double best = INFINITY, best_commit = 0, last = 0;
        for (int n = 0; log_event_of(fleet->events[i], "validation", n) != NULL; n++) {
            double loss = fleet_number(fleet, i, "validation", n, "loss");
            last = fleet_number(fleet, i, "validation", n, "commit");
            if (loss < best) { best_commit = last; }
            best = fmin(best, loss);
        }
        char expected[64], again[512];
        snprintf(expected, sizeof expected, "%g %g", best_commit, last);
        check_saved(stage, fleet->trainings[i].out, expected);
        if (last != best_commit + 12) { fail_msg("%s: ends at %g, best at %g", rules[i], last, best_commit); }
        json_t *end = log_event_of(fleet->events[i], "end", -1);
        assert_string_equal(json_string_value(json_object_get(end, "reason")), "no lower loss");
        int used = snprintf(again, sizeof again, "--config base.json --resume auto --out %s ",
                            fleet->trainings[i].out);
        snprintf(again + used, sizeof again - (size_t)used, options, rules[i]);
        Outcome outcome = program_run(stage, 2, again);
        outcome_check(&outcome, 0, again);
        text_check(outcome.output, "a larger --stop-after continues it", rules[i]);
        check_saved(stage, fleet->trainings[i].out, expected);
        // What is validated on other windows is no worse than what was: the run goes on.
        used += snprintf(again + used, sizeof again - (size_t)used, options, rules[i]);
        snprintf(again + used, sizeof again - (size_t)used, " %s --report-every 1", windows[i]);
        outcome = program_run(stage, 2, again);
        outcome_check(&outcome, 0, again);
        assert_null(strstr(outcome.output, "a larger --stop-after continues it"));
        text_check(outcome.output, " validation loss ", rules[i]);
    }
    static const char decays[] = "--config base.json --optimizer ddp --lr 0.1 --schedule constant --warmup 0 "
                                 "--val-every 4 --stop-after 3 --decay-now 256 --out branch --resume %s";
    char branch[512];
    snprintf(branch, sizeof branch, decays, fleet->trainings[0].out);
    Outcome outcome = program_run(stage, 2, branch);
    outcome_check(&outcome, 0, branch);
    assert_null(strstr(outcome.output, "nothing is left to do"));
}

// Only validations in a row count: in one of these runs some are worse before the best one. The
// only report is made where a run ends, and has all of its commits.
static void bad_validations_count_in_a_row(void **state) {
    Stage *stage = stage_of(state);
    int worse = 0;
    for (int seed = 1; seed <= 8 && worse <= 4; seed++) {
        char options[256];
        snprintf(options, sizeof options,
                 "--optimizer ddp --lr 0.02 --schedule constant --warmup 0 --val-every 1 --val-batches 2 "
                 "--stop-after 4 --tokens 20k --report-every 1000 --seed %d",
                 seed);
        Training run = training_start(stage, 0, options);
        json_t *events = training_finish(stage, &run), *event;
        double best = INFINITY;
        int in_a_row = worse = 0;
        for (int n = 0; (event = log_event_of(events, "validation", n)) != NULL; n++) {
            assert_true(in_a_row < 4);
            bool is_best = log_number(event, "loss") < best;
            best = fmin(best, log_number(event, "loss"));
            worse += !is_best;
            in_a_row = is_best ? 0 : in_a_row + 1;
        }
        assert_int_equal(in_a_row, 4);
        json_t *report = log_event_of(events, "report", 0);
        if (report == NULL) { fail_msg("%s: ended early, without a report", run.what); }
        assert_true(log_number(report, "commit") == log_number(log_event_of(events, "end", -1), "commit"));
        json_decref(events);
    }
    assert_true(worse > 4); // otherwise nothing has been shown
}

// What is under way when a run finds itself no better is committed behind that validation. The
// result is validated once more: as that of a run whose tokens end there.
static void the_result_of_an_early_end_is_validated(void **state) {
    static const char *const rules[] = {"co2 --co2-tau 4", "streaming-diloco --diloco-H 8 --streaming-tau 2",
                                        "sparse-loco --sparse-H 4 --sparse-tau 1"};
    Stage *stage = stage_with_ranks(state);
    for (int i = 0; i < 3; i++) {
        char options[200], more[300];
        snprintf(options, sizeof options,
                 "--optimizer %s --lr 1 --schedule constant --warmup 0 --val-every 4", rules[i]);
        snprintf(more, sizeof more, "%s --stop-after 1 --tokens 100k", options);
        json_t *early = train(stage, 2, more), *end = log_event_of(early, "end", -1);
        json_t *last = log_event_of(early, "validation", -1), *before = log_event_of(early, "validation", -2);
        assert_string_equal(json_string_value(json_object_get(end, "reason")), "no lower loss");
        assert_true(log_number(before, "commit") == log_number(end, "commit"));
        assert_true(log_number(before, "loss") != log_number(last, "loss"));
        snprintf(more, sizeof more, "%s --tokens %.0f", options, log_number(end, "tokens"));
        json_t *whole = train(stage, 2, more);
        assert_string_equal(log_fingerprint(early).text, log_fingerprint(whole).text);
        assert_true(log_number(last, "loss") == log_number(log_event_of(whole, "validation", -1), "loss"));
        json_decref(early);
        json_decref(whole);
    }
}

// A run that is killed while it saves leaves a directory, which is no hindrance.
static void what_an_interrupted_save_left_is_replaced(void **state) {
    Stage *stage = stage_of(state);
    run_well(stage, "--config base.json --optimizer ddp --tokens 320 --out left");
    shell(stage, "mkdir -p left/checkpoints/unfinished/model && echo half > "
                 "left/checkpoints/unfinished/state.safetensors");
    Outcome outcome =
        run_well(stage, "--config base.json --optimizer ddp --tokens 640 --resume auto --out left");
    text_check(outcome.output, "checkpoint in", "the resumed run");
    check_saved(stage, "left", "10 20");
}

// It is not said of the best checkpoint that it is kept where there is none.
static void a_best_that_was_not_kept_is_told(void **state) {
    Stage *stage = stage_of(state);
    static const char options[] =
        "--config base.json --optimizer ddp --lr 0.1 --schedule constant --warmup 0 "
        "--val-every 4 --stop-after 3 --keep 1 --tokens 100k --out unkept";
    char again[512];
    run_well(stage, options);
    snprintf(again, sizeof again, "%s --resume auto --keep-best on", options);
    text_check(run_well(stage, again).output, "(--keep-best on keeps such)", again);
}

static float *read_model(const Stage *stage, const char *name, size_t *count) {
    char path[STAGE_PATH_SIZE];
    HfModel model;
    Error error;
    assert_true(hf_model_open(&model, stage_path(stage, name, path), &error));
    *count = model.table.parameter_count;
    float *values = (float *)malloc(*count * sizeof(float));
    hf_model_read(&model, values);
    hf_model_close(&model);
    return values;
}

// Next to nothing goes through this model, so its loss is a number; its gradients grow from layer
// to layer.
static void a_tensor_whose_gradient_is_not_finite_is_named(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    HfModel model;
    Error error;
    run_well(stage, "--config base.json --optimizer ddp --out plain");
    assert_true(hf_model_open(&model, stage_path(stage, "plain/checkpoints/commit-24/model", path), &error));
    float *values = MEMORY_OF(float, model.table.parameter_count);
    hf_model_read(&model, values);
    for (int i = 0; i < model.table.count; i++) {
        const ParameterInfo *tensor = &model.table.entries[i];
        static const struct {
            const char *part;
            float factor;
        } factors[] = {{".ln_f.weight", 1e38f}, {".wte.", 1e-20f},
                       {".wpe.", 1e-20f},       {".bias", 0},
                       {".ln_", 1e15f},         {"", 1}};
        int which = 0;
        while (strstr(tensor->name, factors[which].part) == NULL) { which++; }
        for (size_t k = 0; k < tensor->count; k++) { values[tensor->offset + k] *= factors[which].factor; }
    }
    assert_true(hf_model_save(stage_path(stage, "steep", path), &model.config, &model.table, values, NULL,
                              NULL, NULL, &error));
    hf_model_close(&model);
    free(values);
    static const char command[] = "--config base.json --optimizer ddp --from steep --out broken";
    Outcome outcome = program_run(stage, 0, command);
    outcome_check(&outcome, 3, command);
    json_t *events = log_read(stage, "broken"), *spike = log_event_of(events, "spike", -1);
    assert_string_equal(json_string_value(json_object_get(spike, "kind")), "gradient");
    const char *tensor = json_string_value(json_object_get(spike, "tensor"));
    assert_non_null(tensor);
    text_check(outcome.errors, tensor, command);
    json_decref(events);
}

static void the_last_checkpoints_are_averaged(void **state) {
    Stage *stage = stage_of(state);
    run_well(stage, "--config base.json --optimizer ddp --save-every 6 --keep 9 --out swinging");
    run_well(stage, "average --from swinging --last 3 --out mean");
    static const char *const names[] = {"mean", "swinging/checkpoints/commit-12/model",
                                        "swinging/checkpoints/commit-18/model",
                                        "swinging/checkpoints/commit-24/model"};
    float *values[4];
    size_t count = 0;
    for (int i = 0; i < 4; i++) { values[i] = read_model(stage, names[i], &count); }
    for (size_t i = 0; i < count; i++) {
        double mean = ((double)values[1][i] + (double)values[2][i] + (double)values[3][i]) / 3;
        if (!(fabs((double)values[0][i] - mean) <= 1e-6 * fmax(1, fabs(mean)))) {
            fail_msg("parameter %zu: %.9g, expected %.9g", i, (double)values[0][i], mean);
        }
    }
    run_well(stage, "average --from swinging/checkpoints/commit-12 --last 1 --out twelfth");
    float *twelfth = read_model(stage, "twelfth", &count);
    assert_memory_equal(twelfth, values[1], count * sizeof(float));
    free(twelfth);
    for (int i = 0; i < 4; i++) { free(values[i]); }
    run_well(stage, "--config base.json --model wide.json --optimizer ddp --out strange");
    shell(stage, "cp -r swinging mixed && cd mixed/checkpoints && rm -r commit-18/model && cp -r "
                 "../../strange/checkpoints/commit-*/model commit-18/model");
    static const char *const refused[][2] = {
        {"average --from mixed --last 3 --out more",
         "mixed/checkpoints/commit-18/model is another model than the"},
        {"average --from swinging --last 9 --out more", "has 4 checkpoints"},
        {"average --from swinging --out mean", "cannot create the directory mean: File exists"},
        {"average --from swinging/checkpoints/commit-12 --out more", "has 2 checkpoints up to there"},
        {"average --from mean --out other", "average needs --from RUN"},
        {"average --from swinging", "average needs --from RUN"},
        {"average --from swinging --out other --lr 1", "--lr has no effect on train_gpt average"}};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        Outcome outcome = program_run(stage, 0, refused[i][0]);
        outcome_check(&outcome, 2, refused[i][0]);
        if (strstr(refused[i][0], "--out mean") != NULL) { assert_string_equal(outcome.output, ""); }
        text_check(outcome.errors, refused[i][1], refused[i][0]);
    }
}

// Somebody has moved a checkpoint away and left a link: only the link is removed.
static void links_are_not_followed(void **state) {
    Stage *stage = stage_of(state);
    Training first = training_start(stage, 0, "--optimizer ddp --save-every 8 --keep 9");
    json_decref(training_finish(stage, &first));
    shell(stage,
          "mv %s/checkpoints/commit-8 archive && ln -s ../../archive %s/checkpoints/commit-8 && rm -r "
          "%s/checkpoints/commit-24",
          first.out, first.out, first.out);
    Training again = auto_start(stage, 0, first.out, "--optimizer ddp --save-every 8 --keep 1");
    json_decref(training_finish(stage, &again));
    check_saved(stage, first.out, "24");
    shell(stage, "[ -s archive/state.safetensors ] && [ -s archive/model/config.json ]");
}

// Steps that are too small to change anything: the validation shows the loaded model.
static void a_saved_model_begins_another_run(void **state) {
    static const int chosen[] = {1, 3, 5, 7};
    static const char *const still = "--lr 1e-12 --tokens 64 --optimizer ddp";
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < 4; i++) {
        fleet_start(fleet, 0, "%s --save-every 1 --keep 100 --val-every 1", variants[chosen[i]].options);
    }
    fleet_finish(fleet);
    // By either option, from model/ in a checkpoint or from the checkpoint itself.
    for (int i = 0; i < 4; i++) {
        fleet_start(fleet, 0, "%s --%s %s%s", still, i < 2 ? "from" : "finetune",
                    step_path(&fleet->trainings[i], 12), i % 2 == 0 ? "/model" : "");
    }
    for (int i = 4; i < 8; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        json_t *then = NULL;
        for (int n = 0; (then = log_event_of(fleet->events[i - 4], "validation", n)) != NULL &&
                        log_number(then, "commit") != 12;
             n++) {}
        assert_non_null(then);
        assert_close(final_loss(fleet, i), log_number(then, "loss"), 1e-6, fleet->trainings[i].what);
    }
    // Log and directory name the model after what it is.
    json_t *start = log_event_of(fleet->events[4], "start", 0);
    assert_string_equal(json_string_value(json_object_get(start, "model")), fleet->trainings[0].out);
    assert_true(json_is_null(json_object_get(json_object_get(start, "options"), "model")));
    char arguments[256], directory[128];
    snprintf(arguments, sizeof arguments, "--config base.json %s --save-every never --from %.100s", still,
             fleet->trainings[0].out);
    snprintf(directory, sizeof directory, "\nrun        runs/%.60s-ddp-1\n", fleet->trainings[0].out);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    text_check(outcome.output, directory, arguments);
}

// Of a model that others have trained a part goes on, frozen tensors or adapters beside it.
static const Variant parts[] = {
    {"--optimizer zero1 --lora-rank 2 --lr 0.05", 1},
    {"--optimizer acco --accumulate 4 --lora-rank 3 --lora-alpha 4 --lora-on '*proj' --lr 0.05", 1},
    {"--optimizer streaming-diloco --diloco-H 4 --freeze 'wte,h.1.*'", 2},
    {"--optimizer sparse-loco --sparse-H 2 --inner muon --lora-rank 2 --moments bf16", 2},
};

enum { PARTS = sizeof parts / sizeof parts[0] };

static void a_trained_part_goes_on_with_the_same_bits(void **state) {
    static const char *const still = "--lr 1e-12 --tokens 64 --optimizer ddp";
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    Fingerprint prints[PARTS];
    static Training whole[PARTS];
    double losses[PARTS];
    fleet_start(fleet, 0, "--optimizer ddp");
    fleet_finish(fleet);
    char start[128];
    snprintf(start, sizeof start, "%s", step_path(&fleet->trainings[0], COMMITS));
    fleet = fleet_new(stage);
    for (int i = 0; i < PARTS; i++) {
        fleet_start(fleet, 2, "--save-every 1 --keep 100 --from %s %s", start, parts[i].options);
    }
    fleet_finish(fleet);
    memcpy(prints, fleet->prints, sizeof prints);
    memcpy(whole, fleet->trainings, sizeof whole);
    for (int i = 0; i < PARTS; i++) { losses[i] = final_loss(fleet, i); }
    fleet = fleet_new(stage);
    for (int i = 0; i < PARTS; i++) {
        long middle = middle_step(stage, whole[i].out);
        assert_true(middle % parts[i].period == 0);
        fleet_start(fleet, 2, "--from %s %s --resume %s", start, parts[i].options,
                    step_path(&whole[i], middle));
    }
    for (int i = 0; i < PARTS; i++) {
        fleet_start(fleet, 0, "%s --from %s", still, last_step_path(stage, &whole[i]));
    }
    fleet_finish(fleet);
    for (int i = 0; i < PARTS; i++) {
        check_resumed(fleet, i, middle_step(stage, whole[i].out), true);
        if (strcmp(fleet->prints[i].text, prints[i].text) != 0) {
            fail_msg("%s: %s, without an interruption %s", fleet->trainings[i].what, fleet->prints[i].text,
                     prints[i].text);
        }
        // The model on disk is the one with its adapters merged.
        assert_close(final_loss(fleet, PARTS + i), losses[i], 1e-5, fleet->trainings[PARTS + i].what);
        text_check(fleet_output(fleet, i), "\ntrains     ", fleet->trainings[i].what);
    }
    stage_end_all(stage);
}

static void a_part_that_does_not_fit_is_refused(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp --tokens 768 --save-every 6 --keep 9");
    fleet_finish(fleet);
    char start[128], adapted[128], arguments[1024];
    snprintf(start, sizeof start, "%s", step_path(&fleet->trainings[0], 12));
    fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp --from %s --lora-rank 2", start);
    fleet_finish(fleet);
    snprintf(adapted, sizeof adapted, "%s", last_step_path(stage, &fleet->trainings[0]));
    shell(stage, // another by one byte of its first tensor
          "cp -r %s/model near && rm near/checksums.json && printf '\\001' | dd of=near/model.safetensors "
          "bs=1 seek=$(($(od -An -tu8 -N8 near/model.safetensors) + 8)) conv=notrunc 2> dd.txt",
          start);
    const struct {
        const char *options, *from, *resume, *says;
    } cases[] = {
        {"--lora-rank 2 --model model.json", NULL, NULL, "--lora-rank needs a model that is trained"},
        {"--freeze wte --model model.json", NULL, NULL, "--freeze needs a model that is trained"},
        {"--freeze wte --lora-rank 2", start, NULL, "freeze"},
        {"--lora-alpha 3", start, NULL, "lora-rank"},
        {"--lora-rank 2 --lora-on wte", start, NULL, "no matrix of a layer matches \"wte\""},
        {"--freeze '*'", start, NULL, "leaves nothing to train"},
        {"--lora-rank 2", adapted, NULL, "has adapters already: merge them first, by train_gpt export"},
        {"--lora-rank 2", "near", adapted, "was trained with other frozen parameters than"},
        {"--lora-rank 3", start, adapted, "has other trained parameters, "},
        {"--lora-rank 2 --lora-on '[qkvo]*'", start, adapted, "has other trained parameters, "},
        {"", start, adapted, "has other trained parameters, "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(arguments, sizeof arguments, "--optimizer ddp %s%s%s%s%s", cases[i].options,
                 cases[i].from != NULL ? " --from " : "", cases[i].from != NULL ? cases[i].from : "",
                 cases[i].resume != NULL ? " --resume " : "", cases[i].resume != NULL ? cases[i].resume : "");
        check_refused(stage, 0, "apart", arguments, cases[i].says); // some once there is a log
    }
    // Nor is the configuration of a run changed by what it refuses.
    snprintf(arguments, sizeof arguments, "--optimizer ddp --resume auto --from %s --lora-rank 3", start);
    check_refused(stage, 0, fleet->trainings[0].out, arguments,
                  "--freeze and --lora-... must be as they were");
    shell(stage, "grep -q '\"lora-rank\": 2,' %s/config.json", fleet->trainings[0].out);
    // One model of both.
    snprintf(arguments, sizeof arguments, "average --from %.100s --last 1 --out merged",
             fleet->trainings[0].out);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    shell(stage, "[ -s merged/model.safetensors ] && [ ! -e merged/adapter_config.json ]");
    double loss = final_loss(fleet, 0);
    fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--lr 1e-12 --tokens 64 --optimizer ddp --from merged");
    fleet_finish(fleet);
    assert_close(final_loss(fleet, 0), loss, 1e-5, "the merged model");
}

// Adapters of peft lie beside no config.json, and one there says nothing of their model.
static void adapters_alone_begin_a_run(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp");
    fleet_finish(fleet);
    char start[128];
    snprintf(start, sizeof start, "%s", step_path(&fleet->trainings[0], COMMITS));
    fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp --from %s --lora-rank 2", start);
    fleet_finish(fleet);
    shell(stage, "cp -r %s/model alone && rm alone/checksums.json alone/config.json",
          last_step_path(stage, &fleet->trainings[0]));
    fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp --from alone");
    shell(stage,
          "cp -r alone other && sed 's/\"vocab_size\": [0-9]*/\"vocab_size\": 5/' %s/model/config.json > "
          "other/config.json",
          start);
    fleet_start(fleet, 0, "--optimizer ddp --from other");
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
    check_refused(stage, 0, "refused", "--optimizer ddp --from alone --lora-rank 2", "has adapters already");
    // Named by a path from here, the model is found from elsewhere, too.
    shell(stage, "mkdir elsewhere && cd elsewhere && \"$TRAIN_GPT\" sample --from ../alone --sample-tokens 2 "
                 "> sample.txt");
}

// Two hosts, each with a directory of that name.
static void ranks_beside_other_frozen_parameters_are_refused(void **state) {
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--optimizer ddp --tokens 768 --save-every 6 --keep 9");
    fleet_finish(fleet);
    shell(stage, "mkdir -p rank-0 rank-1 && ln -sfn \"$PWD\"/%s/model rank-0/base",
          step_path(&fleet->trainings[0], 12));
    shell(stage, "ln -sfn \"$PWD\"/%s/model rank-1/base", step_path(&fleet->trainings[0], 6));
    shell(stage,
          "! $MPIRUN -np 2 " IN_DIRECTORY_OF_RANK "\"$TRAIN_GPT\" --from base --lora-rank 2 --tokens 64 "
          "--seq-len 8 --micro-batch 2 --threads 1 --link-mbit 1000 --out \"$PWD\"/hosts > hosts.out 2>&1");
    shell(stage, "grep -q 'rank 1 reads another model in base than rank 0' hosts.out || ! cat hosts.out");
}

// llm.c's token file: a header of 256 words, then ids of two bytes.
static void write_tokens(const Stage *stage, const char *name, int vocabulary) {
    enum { COUNT = 2000 };
    char path[STAGE_PATH_SIZE];
    static unsigned char bytes[1024 + 2 * COUNT];
    int32_t header[3] = {20240520, 1, COUNT};
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < COUNT; i++) { bytes[1024 + 2 * i] = (unsigned char)(i * i % 7 * i % vocabulary); }
    file_write(stage_path(stage, name, path), bytes, sizeof bytes);
}

static void a_model_of_others_begins_a_run(void **state) {
    Stage *stage = stage_of(state);
    static const char *const still =
        "--data tokens.bin --val-batches 4 --lr 1e-12 --tokens 17 --optimizer ddp --accumulate 1";
    Training first, second;
    char options[2 * STAGE_PATH_SIZE];
    write_tokens(stage, "tokens.bin", 19);
    snprintf(options, sizeof options, "%s --from '%.300s/test/reference/pretrained'", still, stage->root);
    first = training_start(stage, 0, options);
    json_t *events = training_finish(stage, &first);
    snprintf(options, sizeof options, "%s --from %s/model", still, step_path(&first, 1));
    second = training_start(stage, 0, options);
    json_t *others = training_finish(stage, &second);
    double loss = log_number(log_event_of(events, "validation", 0), "loss");
    assert_close(log_number(log_event_of(others, "validation", 0), "loss"), loss, 1e-6,
                 "a model that went out and in");
    assert_true(loss > 1);
    json_decref(events);
    json_decref(others);
}

// The newest checkpoint is not the last one by name: 24 comes behind 6.
static void a_run_stands_for_its_newest_checkpoint(void **state) {
    Stage *stage = stage_of(state);
    Training run = training_start(stage, 0, "--optimizer ddp --save-every 6 --keep 9");
    json_decref(training_finish(stage, &run));
    static const char *const commands[][3] = {
        {"sample --from %s --sample-tokens 3", "model          ", "/model, the newest checkpoint of "},
        {"sample --from %s/checkpoints --sample-tokens 3", "model          ",
         "/model, the newest checkpoint of "},
        {"--config base.json --optimizer ddp --out from --from %s", "model      ", "/model/config.json: "},
        {"--config base.json --optimizer ddp --out on --tokens 3k --resume %s", "resumed    from ",
         " at commit 24"},
        {"--config base.json --optimizer ddp --out on-too --tokens 3k --resume %s/checkpoints",
         "resumed    from ", " at commit 24"},
    };
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char arguments[STAGE_COMMAND_SIZE], expected[STAGE_PATH_SIZE];
        const char *marker = strstr(commands[i][0], "%s");
        snprintf(arguments, sizeof arguments, "%.*s%s%s", (int)(marker - commands[i][0]), commands[i][0],
                 run.out, marker + 2);
        snprintf(expected, sizeof expected, "%s%s/checkpoints/commit-24%s", commands[i][1], run.out,
                 commands[i][2]);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        text_check(outcome.output, expected, arguments);
    }
    shell(stage, ". '%s/scripts/common' && [ $(newest_model %s) = %s/checkpoints/commit-24/model ]",
          stage->root, run.out, run.out);
}

static void save_one(Stage *stage, const char *options) {
    Training training = training_start(stage, 0, options);
    json_decref(training_finish(stage, &training));
    shell(stage, "rm -rf SAVED && cp -r %s/checkpoints/commit-24 SAVED && mkdir -p empty", training.out);
}

// The model has 16 positions, and a token is a byte.
static void a_text_longer_than_the_model_is_said(void **state) {
    Stage *stage = stage_of(state);
    static const char arguments[] = "sample --from SAVED --sample-tokens 600 --prompt ";
    static const char *const cases[][2] = {
        {"0123456789abcde", "ends after 2 of 600"},
        {"0123456789abcdef", "ends after 1 of 600"},
        {"0123456789abcdefg", "the prompt has 17 tokens, and the model 16 positions"},
    };
    save_one(stage, "--optimizer ddp");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char command[128];
        snprintf(command, sizeof command, "%s%s", arguments, cases[i][0]);
        Outcome outcome = program_run(stage, 0, command);
        outcome_check(&outcome, i == 2 ? 2 : 0, command);
        text_check(i == 2 ? outcome.errors : outcome.output, cases[i][1], command);
    }
}

// The most likely text is the same in one piece, line by line, and from a file.
static void a_text_goes_on_line_by_line(void **state) {
    Stage *stage = stage_of(state);
    static const char greedy[] =
        "\"$TRAIN_GPT\" sample --from SAVED --temperature 0 --threads 1 --sample-tokens";
    save_one(stage, "--optimizer ddp");
    shell(stage,
          "whole=$(%s 6 --prompt abc | tail -n 1 | cut -c 4-)\n"
          "a=$(printf %%s \"$whole\" | cut -c 1-3) b=$(printf %%s \"$whole\" | cut -c 4-)\n"
          "printf 'abc\\n\\n/reset\\nabc' | %s 3 --interactive on | grep '^> ' > got.txt\n"
          "printf '> %%s\\n' \"$a\" \"$b\" \"> $a\" '' | cmp - got.txt || exit 1\n"
          "printf 'abc\\nabc\\n' > prompts.txt\n"
          "test \"$(%s 6 --prompts prompts.txt | tail -n 2 | grep -c -F \"abc$whole\")\" = 2 || exit 1\n"
          "printf '0123456789abcdefg\\n' | %s 3 --interactive on | grep -q 'has 17 tokens'\n",
          greedy, greedy, greedy, greedy);
    shell(stage, "printf 'abc\\nab\\0cd\\n' > zero.txt");
    Outcome outcome = program_run(stage, 0, "sample --from SAVED --threads 1 --prompts zero.txt");
    outcome_check(&outcome, 2, "a byte of value 0");
    text_check(outcome.errors, "--prompts: line 2 has a byte of value 0", "a byte of value 0");
    outcome = program_run(stage, 0, "sample --from SAVED --threads 1 --prompts .");
    outcome_check(&outcome, 2, "a directory");
    text_check(outcome.errors, "cannot read .: Is a directory", "a directory");
}

// The rate in the last report of a run.
static double last_rate(Stage *stage, const char *out) {
    json_t *events = log_read(stage, out), *report = NULL, *next;
    for (int i = 0; (next = log_event_of(events, "report", i)) != NULL; i++) { report = next; }
    double rate = log_number(report, "lr");
    json_decref(events);
    return rate;
}

// A longer run has another schedule. The start says what that does to the rate, and how
// it would stay; rates that were chosen stay, except those that follow one that is given
// now.
static void a_longer_run_says_what_becomes_of_the_rate(void **state) {
    static const char *const lines[] = {
        "the schedule is another one: the learning rate goes from 0.0002 to 0.00",
        "(--schedule constant --lr 0.0002 --warmup 0 leaves it where it was)",
    };
    Stage *stage = stage_of(state);
    run_well(stage, "--config base.json --lr auto --min-lr auto --tokens 2k --out longer");
    shell(stage, "cp -r longer rest && cp -r longer faster && cp -r longer same");
    Outcome longer = run_well(stage, "--resume auto --out longer --tokens 4k --sample-tokens none");
    for (int i = 0; i < 2; i++) { text_check(longer.output, lines[i], "longer"); }
    Outcome rest = run_well(stage, "--resume auto --out rest --tokens 4k --sample-tokens none "
                                   "--schedule constant --lr 0.0002 --warmup 0");
    assert_null(strstr(rest.output, "the schedule is another one"));
    assert_true(fabs(last_rate(stage, "rest") - 0.0002) < 1e-12);
    Outcome faster = run_well(stage, "--resume auto --out faster --tokens 4k --lr 0.1 --sample-tokens none");
    text_check(faster.output, "rate       peak 0.1, cosine to 0.01,", "faster");
    Outcome same = run_well(stage, "--resume auto --out same --sample-tokens none");
    assert_null(strstr(same.output, "the schedule is another one"));
    // The advice is for every run, also where --min-lr was given; and a checkpoint
    // elsewhere knows what was chosen.
    run_well(stage, "--config base.json --lr auto --min-lr 0.0001 --tokens 2k --out given");
    run_well(stage, "--resume auto --out given --tokens 4k --schedule constant --lr 0.0001 --warmup 0");
    shell(stage, "rm -rf AWAY && cp -r same/checkpoints/commit-* AWAY");
    Outcome away = run_well(stage, "--resume AWAY --out away --tokens 4k --lr 0.0001 --sample-tokens none");
    text_check(away.output, "rate       peak 0.0001, cosine to 1e-05,", "a checkpoint elsewhere");
    // What was the length of the warm-up is that of the new one.
    run_well(
        stage,
        "--config base.json --optimizer acco --warmup 3 --sequential warmup --tokens 2k --out sequential");
    run_well(stage, "--resume auto --out sequential --warmup 5 --tokens 4k");
    shell(stage, "[ $(grep -c '\"sequential\": 5' sequential/config.json) = 2 ]"); // it is among the chosen
    // The configuration of the very run that is resumed is no template: its warm-up
    // stays.
    run_well(stage, "--config base.json --warmup auto --tokens 4k --out own");
    run_well(stage, "--out own --resume auto --tokens 6k");
    Outcome own = run_well(stage, "--config own/config.json --tokens 8k");
    text_check(own.output, "warm-up 6 commits", "its own configuration");
    // As a template for another model the file leaves to it what fits the model.
    Outcome other = run_well(stage, "--config longer/config.json --finetune longer "
                                    "--resume off --tokens 1k --out template --sample-tokens none");
    text_check(other.output, "rate       peak 0.0002, chosen for fine-tuning", "a template");
}

// A stable run whose end is not known, and a branch of it in which the rate falls: the bits are
// those of a run whose end was known from the beginning.
static void a_decay_branches_off_a_stable_run(void **state) {
    Stage *stage = stage_of(state);
    static const char *const rules[] = {"--optimizer ddp --inner muon", "--optimizer acco --accumulate 2",
                                        "--optimizer diloco --diloco-H 4 --lr-by commits"};
    Fleet *fleet = fleet_new(stage);
    Fingerprint planned[3];
    Training stable[3];
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 2, "%s --warmup 3 --min-lr auto --schedule wsd --decay-tokens 512 --tokens 1536",
                    rules[i]);
        fleet_start(fleet, 2, "%s --warmup 3 --schedule constant --save-every 4 --keep 100 --tokens 2k",
                    rules[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) {
        planned[i] = fleet->prints[2 * i];
        stable[i] = fleet->trainings[2 * i + 1];
    }
    fleet = fleet_new(stage);
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 2, "%s --schedule constant --warmup 3 --resume %s --decay-now 512", rules[i],
                    step_path(&stable[i], 16));
    }
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) { check_print(&fleet->prints[i], &planned[i], rules[i]); }
    char early[256];
    snprintf(early, sizeof early, "--optimizer ddp --inner muon --warmup 5 --resume %s --decay-now 512",
             step_path(&stable[0], 4));
    check_refused(stage, 2, "early", early, "the rate still rises, for 5 commits");
    static const char *const refused[][2] = {
        {"--warmup 9 --accumulate 64", "the rate still rises, for 9 commits"},
        {"--warmup 0 --lr-by commits --accumulate 64", "the rate has fallen already at commit 16"}};
    for (int i = 0; i < 2; i++) {
        snprintf(early, sizeof early, "--optimizer ddp --inner muon %s --resume %s --decay-now 9k",
                 refused[i][0], step_path(&stable[0], 16));
        check_refused(stage, 2, "early", early, refused[i][1]);
    }
    snprintf(early, sizeof early,
             "--optimizer ddp --inner muon --warmup 3 --resume %s --decay-now 9007199254740992",
             step_path(&stable[0], 16));
    check_refused(stage, 2, "early", early, "more than can be counted here");
}

// Batches that follow the time do not repeat, so no checkpoint of them goes on exactly.
static void adaptive_batches_are_not_exact(void **state) {
    Stage *stage = stage_of(state);
    run_well(stage, "--config base.json --optimizer acco --accumulate auto --out adaptive");
    Outcome outcome = run_well(stage, "--resume auto --out adaptive --tokens 2k");
    text_check(outcome.output, "with --accumulate auto batches follow the time", "adaptive");
}

// A user who resumes without naming the data again does not mean other data.
static void what_is_left_out_is_as_in_the_run(void **state) {
    Stage *stage = stage_of(state);
    Training run = training_start(stage, 0, "--optimizer acco --acco-split 0.5 --lr 0.003");
    json_decref(training_finish(stage, &run));
    static const char *const commands[][2] = {
        {"--out %s --resume auto", "at commit 24; exact"},
        {"--out left-out-1 --resume %s/checkpoints/commit-24 --tokens 3k", "not exact: another --tokens\n"},
        {"--out left-out-2 --resume %s --lr 0.002 --tokens 3k",
         "not exact: another --tokens; another --lr; another --min-lr\n"},
        {"--out left-out-3 --resume %s --optimizer zero1 --tokens 3k", "not exact: another rule: "},
        {"--out left-out-4 --config base.json --resume %s --optimizer acco --tokens 3k", "another --lr"},
    };
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char arguments[STAGE_COMMAND_SIZE];
        const char *marker = strstr(commands[i][0], "%s");
        snprintf(arguments, sizeof arguments, "%.*s%s%s --sample-tokens none", (int)(marker - commands[i][0]),
                 commands[i][0], run.out, marker + 2);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        text_check(outcome.output, commands[i][1], arguments);
        if (i < 4) { text_check(outcome.output, "options    where none are given, as in ", arguments); }
    }
    // A checkpoint that is copied away has the options of its run, too.
    shell(stage, "rm -rf SAVED && cp -r %s/checkpoints/commit-24 SAVED", run.out);
    Outcome copied =
        program_run(stage, 0, "--out left-out-5 --resume SAVED --tokens 3k --sample-tokens none");
    outcome_check(&copied, 0, "a copied checkpoint");
    text_check(copied.output, "SAVED/checkpoint.json\n", "a copied checkpoint");
    text_check(copied.output, "not exact: another --tokens\n", "a copied checkpoint");
    Training zero1 = training_start(stage, 0, "--optimizer zero1");
    json_decref(training_finish(stage, &zero1));
    char again[STAGE_COMMAND_SIZE];
    snprintf(again, sizeof again, "--out %s --resume auto --sample-tokens none", zero1.out);
    Outcome outcome = program_run(stage, 0, again);
    outcome_check(&outcome, 0, again);
    text_check(outcome.output, "\nrule       zero1: ", again);
    text_check(outcome.output, "at commit 24; exact", again);
}

// Nothing of model/ is read to go on, so the run is exact; but whoever wants that model must know.
static void a_damaged_model_is_named(void **state) {
    Stage *stage = stage_of(state);
    static const char *const damages[] = {": > $d/model.safetensors", ": > $d/config.json", "rm -r $d"};
    run_well(stage, "--config base.json --optimizer ddp --save-every 12 --keep 9 --out sound");
    for (int i = 0; i < 3; i++) {
        char path[STAGE_PATH_SIZE];
        shell(stage, "rm -rf hurt && cp -r sound hurt && d=hurt/checkpoints/commit-24/model && %s",
              damages[i]);
        Outcome outcome = run_well(stage, "--resume auto --out hurt --tokens 2k --save-every 12 --keep 1");
        text_check(outcome.output,
                   "from commit-24, whose model/ is damaged, so that --keep does not count it: ", damages[i]);
        text_check(outcome.output, "at commit 24; not exact: another --tokens\n", damages[i]);
        assert_int_equal(access(stage_path(stage, "hurt/checkpoints/commit-24", path), F_OK), 0);
    }
}

// A directory that somebody renames is made again, and the end of the run is not lost.
static void a_directory_that_vanishes_is_made_again(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    shell(stage, "{ ( while ! [ -d gone/checkpoints/commit-4 ]; do sleep 0.02; done; mv gone renamed ) & "
                 "\"$TRAIN_GPT\" --config base.json --optimizer ddp --save-every 4 --keep 9 --slow-rank 0 "
                 "--slow-ms 60 "
                 "--out gone > gone.txt && wait; }");
    assert_int_equal(access(stage_path(stage, "gone/checkpoints/commit-24/model/config.json", path), F_OK),
                     0);
    assert_int_equal(access(stage_path(stage, "renamed/checkpoints/commit-4", path), F_OK), 0);
    text_check(stage_read_text(stage, stage_path(stage, "gone.txt", path)),
               "gone was removed or renamed while the run trained", "its end");
}

// The same program on a processor with other instructions has other products.
static void another_processor_is_not_exact(void **state) {
    Stage *stage = stage_of(state);
    const char *before = library_instructions(stage);
    run_well(stage, "--config base.json --optimizer ddp --out moves");
    shell(stage,
          "ONEDNN_MAX_CPU_ISA=SSE41 \"$TRAIN_GPT\" --resume auto --out moves --tokens 2k > moved.txt && "
          "grep -q 'not exact: another processor or library rounds in another way (.*SSE4.1; before .*%s' "
          "moved.txt",
          before);
}

// Every option of the run stays, also those that change no bit: a second kill must not find
// that nothing was saved since the first, or that a checkpoint which was to stay is gone.
static void a_resumed_run_keeps_every_option(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    run_well(
        stage,
        "--config base.json --optimizer ddp --out all --tokens 3k --save-every 4 --keep 2 --keep-every 8 "
        "--keep-best on --val-every 2 --val-batches 2 --stop-after 90 --report-every 3 --threads 1 "
        "--timeout-s 77 --sample-tokens 9 --sample-every 11 --prompt It --temperature 0.5 --top-k 7 "
        "--top-p 0.9 --repetition-penalty 1.1 --slow-rank 0 --slow-ms 1");
    json_t *before = json_loads(stage_read_text(stage, stage_path(stage, "all/config.json", path)), 0, NULL);
    Outcome outcome = run_well(stage, "--resume auto --out all --tokens 4k");
    assert_null(strstr(outcome.output, "what only the former kept"));
    json_t *after = json_loads(stage_read_text(stage, stage_path(stage, "all/config.json", path)), 0, NULL);
    json_object_set_new(before, "tokens", json_integer(4000));
    json_object_set_new(before, "resume", json_string("auto"));
    char *texts[] = {json_dumps(before, JSON_INDENT(1)), json_dumps(after, JSON_INDENT(1))};
    assert_string_equal(texts[0], texts[1]);
    for (int i = 0; i < 2; i++) { free(texts[i]); }
    json_decref(before);
    json_decref(after);
    assert_true(access(stage_path(stage, "all/checkpoints/commit-8", path), F_OK) == 0);
    // What the command line makes senseless is left out, and what it takes from the disk is said.
    outcome = run_well(stage, "--resume auto --out all --tokens 5k --slow-rank none --sample-tokens none "
                              "--val-batches none --keep 1 --keep-every off");
    text_check(
        outcome.output,
        "           --keep 1 (was 2), --keep-every off (was 8), --keep-best off (was on): what only the "
        "former kept is removed when the next checkpoint is written\n",
        "--keep 1");
    assert_true(access(stage_path(stage, "all/checkpoints/commit-8", path), F_OK) != 0);
    // Without its config.json the run is not gone on with at the defaults.
    shell(stage, "rm all/config.json");
    outcome = program_run(stage, 0, "--resume auto --out all --tokens 6k");
    outcome_check(&outcome, 2, "no config.json");
    text_check(outcome.errors, "all has checkpoints, but no config.json with the options of its run",
               "no config.json");
}

// What the user has given stays, beside another --lr; what follows from it does not.
static void a_rate_that_was_given_stays(void **state) {
    Stage *stage = stage_of(state);
    static const char *const given[] = {"", "--min-lr 0.0005"};
    for (int i = 0; i < 2; i++) {
        char arguments[256], path[STAGE_PATH_SIZE];
        snprintf(arguments, sizeof arguments,
                 "--config base.json --optimizer ddp --lr 0.004 --out rate-%d %s", i, given[i]);
        run_well(stage, arguments);
        snprintf(arguments, sizeof arguments, "--out rate-%d --resume auto --lr 0.002 --tokens 2k", i);
        run_well(stage, arguments);
        snprintf(arguments, sizeof arguments, "rate-%d/config.json", i);
        json_t *config = json_load_file(stage_path(stage, arguments, path), 0, NULL),
               *chosen = json_object_get(json_object_get(config, "chosen"), "min-lr"),
               *own = json_object_get(config, "min-lr");
        assert_true((chosen != NULL) == (i == 0));
        assert_close(json_number_value(own), i == 0 ? 0.0002 : 0.0005, 1e-12, given[i]);
        json_decref(config);
    }
}

// The number format that was measured to be the fastest stays, whatever is faster today.
static void the_fastest_format_is_chosen_once(void **state) {
    Stage *stage = stage_of(state);
    Outcome can = program_run(stage, 0, "plan --precision bf16");
    static const char *const formats[] = {"fp32", "bf16"};
    for (int i = 0; i < (can.exit_code == 0 ? 2 : 1); i++) {
        char options[512], line[64];
        snprintf(options, sizeof options, "--optimizer ddp --precision %s", formats[i]);
        Training run = training_start(stage, 0, options);
        json_decref(training_finish(stage, &run));
        snprintf(line, sizeof line, "\"precision\": \"%s\",\n", formats[i]);
        shell(stage, "sed -i 's/\"chosen\": {/&\"precision\": \"%s\",/' %s/config.json", formats[i], run.out);
        for (int with_file = 0; with_file < 2; with_file++) {
            snprintf(options, sizeof options, "%s --optimizer ddp --out %s --resume auto --precision fastest",
                     with_file ? "--config base.json" : "", run.out);
            Outcome outcome = program_run(stage, 0, options);
            outcome_check(&outcome, 0, options);
            text_check(outcome.output, "; exact", options);
            text_check(outcome.output, "options    where ", options);
            char path[STAGE_PATH_SIZE];
            snprintf(options, sizeof options, "%s/config.json", run.out);
            text_check(stage_read_text(stage, stage_path(stage, options, path)), line, options);
        }
    }
}

// What --resume takes is all that counts, and the run says so.
static void a_start_beside_a_checkpoint_is_said_to_be_unused(void **state) {
    Stage *stage = stage_of(state);
    Training run = training_start(stage, 0, "--optimizer ddp");
    json_decref(training_finish(stage, &run));
    char options[2 * STAGE_PATH_SIZE];
    snprintf(options, sizeof options,
             "--config base.json --optimizer ddp --tokens 3k --out both --from %s --resume %s", run.out,
             run.out);
    Outcome outcome = program_run(stage, 0, options);
    outcome_check(&outcome, 0, options);
    text_check(outcome.output, "is not loaded", options);
}

// ---------------------------------------------------------------------------------------
// Refused: exit code 2, one line, and nothing left behind that would hinder the next
// attempt

typedef struct Refusal {
    const char *arguments, *part;
} Refusal;

static const Refusal refusals[] = {
    {"--resume nowhere", "nowhere"},
    {"--resume base.json", "base.json"},
    {"--resume SAVED/model", "SAVED/model"},
    {"--resume SAVED --model wide.json", "another model"},
    {"--resume SAVED --model heads.json", "another model"},
    {"--from nowhere", "nowhere"},
    {"--from SAVED/checkpoint.json", "SAVED"},
    {"--from empty", "config.json"},
};

enum { REFUSED = sizeof refusals / sizeof refusals[0] };

// Two runs in one directory: the second is refused while the first one lives, and only
// then.
static void a_directory_has_one_run_at_a_time(void **state) {
    Stage *stage = stage_of(state);
    pid_t pid;
    Training first = auto_start(stage, 0, "shared", "--tokens 1000G --report-every 1 --val-batches none");
    wait_for_events(stage, &first, "report", 1, &pid);
    check_refused(stage, 0, "shared", "--resume auto", "is in use by another run: process ");
    if (stage->has_mpi) {
        check_refused(stage, 2, "shared", "--resume auto", "is in use by another run: process ");
    }
    assert_int_equal(kill(pid, SIGKILL), 0);
    program_finish(stage, &first.program);
    Training second = auto_start(stage, 0, "shared", "");
    json_decref(training_finish(stage, &second));
}

static void mistakes_are_refused(void **state) {
    Stage *stage = stage_of(state);
    save_one(stage, "--optimizer ddp");
    for (int i = 0; i < REFUSED; i++) {
        check_refused(stage, 0, "refused", refusals[i].arguments, refusals[i].part);
        shell(stage, "[ ! -e refused/log.jsonl ] || { echo a refused run left a log: '%s'; exit 1; }",
              refusals[i].arguments);
    }
    shell(stage, "mkdir -p held/checkpoints && cp -r SAVED held/checkpoints/commit-24");
    check_refused(stage, 0, "held", "--resume auto --model wide.json", "another model");
    check_refused(stage, 0, "held", "--resume auto --inner muon", "commit-24 was trained with --inner adamw");
    // Without --out the run gets a new directory, in which there is nothing to resume.
    Outcome outcome = program_run(stage, 0, "--config base.json --resume auto");
    outcome_check(&outcome, 2, "--resume auto without --out");
    text_check(outcome.errors, "--out", "--resume auto without --out");
    assert_int_equal(text_lines(outcome.errors), 1);
    if (stage->has_mpi) { check_refused(stage, 2, "refused", refusals[0].arguments, refusals[0].part); }
}

// A change to checkpoint.json that makes it nonsense.
typedef struct Hostile {
    const char *key, *value; // "null": the key is removed
    const char *rule;        // for which it is nonsense; NULL: for all
} Hostile;

static const Hostile hostile[] = {
    {"checkpoint", "1", NULL},
    {"checkpoint", "\"2\"", NULL},
    {"optimizer", "7", NULL},
    {"parameters", "-1", NULL},
    {"parameters", "1e300", NULL},
    {"commit", "-5", NULL},
    {"commit", "9223372036854775807", NULL},
    {"commit", "\"12\"", NULL},
    {"commit", "null", NULL},
    {"gradients_done", "\"nan\"", NULL},
    {"gradients_done", "\"1e300\"", NULL},
    {"gradients_done", "\"-48\"", NULL},
    {"gradients_done", "48", NULL},
    {"gradients_done", "null", NULL},
    {"reports", "9223372036854775807", NULL},
    {"reported_commit", "-1", NULL},
    {"reported_gradients", "\"nan\"", NULL},
    {"data_base", "-7", NULL},
    {"data_base", "9223372036854775807", NULL},
    {"seconds", "\"inf\"", NULL},
    {"seconds", "-1", NULL},
    {"fragment", "5", "streaming-diloco"},
    {"fragment", "-1", "streaming-diloco"},
    {"applied_at", "[]", "streaming-diloco"},
    {"applied_at", "[-1, 24]", "streaming-diloco"},
    {"applied_at", "[24, 25]", "streaming-diloco"}, // it is of step 24
    {"sequences", "0", "zero1"},
    {"length", "-16", "zero1"},
    {"turn", "[0]", "zero1"},
    {"turn", "[1, 1]", "zero1"},
    {"turn", "[1000001]", "zero1"},
    {"optimizer", "\"sgd\"", "zero1"},
    {"job_in_flight", "true", NULL},
    {"workers", "[]", NULL},
    {"workers", "{}", NULL},
    {"workers", "[0]", NULL},
    {"workers", "[{}, {}, {}]", NULL},
    {"workers", "null", NULL},
    {"block_crc32", "[]", NULL},
    {"block_crc32", "[1, 2, 3]", NULL},
    {"block_crc32", "\"x\"", NULL},
    {"block_crc32", "null", NULL},
};

enum { HOSTILE = sizeof hostile / sizeof hostile[0] };

static void write_hostile(const Stage *stage, const json_t *good, const Hostile *change, bool is_signed) {
    char path[STAGE_PATH_SIZE];
    json_t *changed = json_deep_copy(good), *value = json_loads(change->value, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    if (json_is_null(value)) { json_object_del(changed, change->key); }
    if (!json_is_null(value)) { json_object_set(changed, change->key, value); }
    if (is_signed) { manifest_sign(changed); }
    assert_int_equal(json_dump_file(changed, stage_path(stage, "SAVED/checkpoint.json", path), 0), 0);
    json_decref(value);
    json_decref(changed);
}

// Every nonsense in checkpoint.json is refused with one line and exit code 2, whether or
// not its checksum is right.
static void check_hostile(Stage *stage, const char *rule, const char *options) {
    int faults = 0;
    save_one(stage, options);
    json_t *good = manifest_read(stage, "SAVED");
    for (int i = 0; i < 2 * HOSTILE; i++) {
        char arguments[512];
        const Hostile *change = &hostile[i / 2];
        if (change->rule != NULL && strcmp(change->rule, rule) != 0) { continue; }
        write_hostile(stage, good, change, i % 2 == 1);
        snprintf(arguments, sizeof arguments, "--config base.json --out hostile-%d %s --resume SAVED",
                 stage->count, options);
        Outcome outcome = program_run(stage, 0, arguments);
        bool refused = outcome.exit_code == 2 && text_count(outcome.errors, "train_gpt: ") == 1 &&
                       text_lines(outcome.errors) == 1;
        if (refused && strstr(outcome.errors, "SAVED") != NULL) { continue; }
        print_error("%s, %s = %s%s: exit code %d\n%.600s\n", rule, change->key, change->value,
                    i % 2 == 1 ? ", signed" : "", outcome.exit_code, outcome.errors);
        faults++;
    }
    json_decref(good);
    assert_int_equal(faults, 0);
}

// What else would have rounded otherwise, or brought other data, is a remark.
static void what_a_checkpoint_says_of_another_machine_is_remarked(void **state) {
    static const struct {
        const char *key, *value, *remark;
    } cases[] = {
        {"device", "\"cpu\"", "; exact\n"},
        {"device", "\"cuda\"", "not exact: another kind of device rounds in another way\n"},
        {"revision", "\"0123abc\"", "not exact: a program of another commit\n"},
        {"revision", "null", "not exact: a program of another commit\n"},
        {"rounding", "\"a pocket calculator\"",
         "not exact: another processor or library rounds in another way (%s; before a pocket calculator)\n"},
        {"product_processors", "9", "not exact: another share of the GPU for NCCL: matrix products may be "},
        {"data", "\"the attic\"", "not exact: other data\n"},
        {"data_changed", "true", "not exact: data changed while the run trained on them\n"}, // of worker 0
    };
    Stage *stage = stage_of(state);
    save_one(stage, "--optimizer zero1");
    json_t *good = manifest_read(stage, "SAVED");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Hostile change = {cases[i].key, cases[i].value, NULL};
        char arguments[256], remark[512];
        json_t *workers = json_deep_copy(json_object_get(good, "workers")),
               *first = json_array_get(workers, 0);
        char *text = NULL;
        if (json_object_get(first, change.key) != NULL) {
            json_object_set_new(first, change.key, json_true());
            change.key = "workers";
            change.value = text = json_dumps(workers, 0);
        }
        write_hostile(stage, good, &change, true);
        snprintf(remark, sizeof remark, cases[i].remark,
                 json_string_value(json_object_get(good, "rounding")));
        snprintf(arguments, sizeof arguments,
                 "--config base.json --optimizer zero1 --out remarked-%zu --resume SAVED", i);
        text_check(run_well(stage, arguments).output, remark, cases[i].value);
        json_decref(workers);
        free(text);
    }
    json_decref(good);
}

// Two hosts, each with a checkpoint of that name.
static void ranks_with_another_checkpoint_are_refused(void **state) {
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 2, "--optimizer zero1 --tokens 768 --save-every 6 --keep 9");
    fleet_finish(fleet);
    for (int rank = 0; rank < 2; rank++) {
        shell(stage, "mkdir -p rank-%d && ln -sfn \"$PWD\"/%s rank-%d/saved && cp base.json rank-%d", rank,
              step_path(&fleet->trainings[0], rank == 0 ? 12 : 6), rank, rank);
    }
    shell(stage,
          "! $MPIRUN -np 2 " IN_DIRECTORY_OF_RANK "\"$TRAIN_GPT\" --config base.json --optimizer zero1 "
          "--resume saved --out \"$PWD\"/others > others.out 2>&1");
    shell(stage, "grep -q 'rank 1 on .*: saved is another checkpoint than on rank 0' others.out || "
                 "! cat others.out");
}

static void hostile_manifests_are_refused(void **state) {
    check_hostile(stage_of(state), "streaming-diloco", "--optimizer streaming-diloco --diloco-H 4");
    check_hostile(stage_of(state), "zero1", "--optimizer zero1");
}

// ---- The stage ------------------------------------------------------------------------

static void write_model(const Stage *stage, const char *name, int channels, int heads) {
    char text[512];
    snprintf(text, sizeof text,
             "{\"model_type\": \"gpt_neo\", \"num_layers\": 2, \"hidden_size\": %d, \"num_heads\": %d, "
             "\"intermediate_size\": 32,\n"
             " \"window_size\": 8, \"max_position_embeddings\": 16, \"vocab_size\": 256,\n"
             " \"attention_types\": [[[\"global\", \"local\"], 1]]}\n",
             channels, heads);
    stage_write(stage, name, text);
}

static int predicted_in(int window) { return 1 + window * 7 % 16; }

static void open_stage(Stage *stage) {
    stage_open(stage);
    char path[STAGE_PATH_SIZE], base[2 * STAGE_PATH_SIZE];
    write_model(stage, "model.json", 16, 2);
    write_model(stage, "wide.json", 24, 2);
    write_model(stage, "heads.json", 16, 4);
    stage_write(stage, "gpt2.json",
                "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 16, \"n_head\": 2, "
                "\"n_positions\": 16, \"vocab_size\": 256}");
    snprintf(base, sizeof base,
             "{\"model\": \"%s\", \"micro-batch\": 1, \"tokens\": %d, \"report-every\": 2, "
             "\"val-batches\": 2, \"sample-tokens\": \"none\", \"threads\": 1, \"timeout-s\": 100, "
             "\"device\": \"cpu\"}\n",
             stage_path(stage, "model.json", path), COMMITS * 2 * 16);
    stage_write(stage, "base.json", base);
    char text[4096];
    for (size_t i = 0; i < sizeof text - 1; i++) {
        text[i] = "the small ship sailed over the quiet sea\n"[i * (i / 1000 + 1) % 41];
    }
    text[sizeof text - 1] = '\0';
    stage_write(stage, "text.txt", text);
    stage_write_masked(stage, "masked.bin", 200, 16, predicted_in);
}

static Stage stage_of_all;

#define CHECKPOINT_TEST(function) \
    cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage_of_all)

static const struct CMUnitTest tests[] = {
    CHECKPOINT_TEST(one_rank_goes_on_with_the_same_bits),
    CHECKPOINT_TEST(two_ranks_go_on_with_the_same_bits),
    CHECKPOINT_TEST(three_ranks_go_on_with_the_same_bits),
    CHECKPOINT_TEST(the_model_of_a_checkpoint_is_that_of_its_state),
    CHECKPOINT_TEST(every_checkpoint_will_do),
    CHECKPOINT_TEST(co2_is_saved_with_its_exchange_under_way),
    CHECKPOINT_TEST(other_numbers_of_ranks_go_on),
    CHECKPOINT_TEST(an_exchange_in_flight_has_the_workers_of_then),
    CHECKPOINT_TEST(a_finished_run_is_the_same_on_other_ranks),
    CHECKPOINT_TEST(the_same_batches_on_fewer_ranks_make_the_same_commits),
    CHECKPOINT_TEST(unequal_ranks_leave_nothing_out),
    CHECKPOINT_TEST(a_sum_under_way_belongs_to_those_who_sent_it),
    CHECKPOINT_TEST(another_inner_optimizer_starts_anew),
    CHECKPOINT_TEST(a_chosen_inner_optimizer_stays),
    CHECKPOINT_TEST(other_rules_go_on),
    CHECKPOINT_TEST(other_hosts_are_named),
    CHECKPOINT_TEST(other_options_are_named),
    CHECKPOINT_TEST(an_error_counts_once_where_eager_is_turned_off),
    CHECKPOINT_TEST(moments_change_their_format),
    CHECKPOINT_TEST(work_is_counted_on_with_another_batch),
    CHECKPOINT_TEST(sums_under_way_have_the_batch_of_then),
    CHECKPOINT_TEST(auto_goes_on_where_the_log_is),
    CHECKPOINT_TEST(what_was_measured_is_kept),
    CHECKPOINT_TEST(a_measured_split_is_kept_where_batches_are_as_they_were),
    CHECKPOINT_TEST(damaged_checkpoints_are_named_and_passed_over),
    CHECKPOINT_TEST(new_checkpoints_are_not_given_up_for_damaged_ones),
    CHECKPOINT_TEST(a_run_of_damaged_checkpoints_is_not_begun_anew),
    CHECKPOINT_TEST(damaged_checkpoints_do_not_count_as_kept),
    CHECKPOINT_TEST(a_directory_has_one_run_at_a_time),
    CHECKPOINT_TEST(nothing_is_saved_where_nobody_wants_it),
    CHECKPOINT_TEST(checkpoints_can_follow_the_clock),
    CHECKPOINT_TEST(a_finished_run_stays_finished),
    CHECKPOINT_TEST(the_end_is_saved_with_its_last_exchange),
    CHECKPOINT_TEST(who_is_asked_to_stop_saves),
    CHECKPOINT_TEST(one_rank_that_is_asked_stops_all),
    CHECKPOINT_TEST(a_stop_in_either_round_goes_on),
    CHECKPOINT_TEST(bad_steps_in_a_row_are_counted_on),
    CHECKPOINT_TEST(a_killed_run_goes_on),
    CHECKPOINT_TEST(a_run_that_lost_a_rank_goes_on),
    CHECKPOINT_TEST(what_a_lost_rank_costs_is_counted_from_a_checkpoint),
    CHECKPOINT_TEST(a_full_disk_costs_the_new_checkpoint_only),
    CHECKPOINT_TEST(a_checkpoint_without_its_name_costs_no_other),
    CHECKPOINT_TEST(a_validation_that_was_not_finished_is_made_up_for),
    CHECKPOINT_TEST(the_size_of_a_checkpoint_is_said),
    CHECKPOINT_TEST(a_disk_that_is_full_for_a_while_costs_no_line_of_the_log),
    CHECKPOINT_TEST(a_folder_that_cannot_be_made_costs_only_checkpoints),
    CHECKPOINT_TEST(one_rank_without_room_is_named),
    CHECKPOINT_TEST(some_checkpoints_are_kept),
    CHECKPOINT_TEST(the_best_is_kept_and_the_end_is_seen),
    CHECKPOINT_TEST(a_best_that_was_not_kept_is_told),
    CHECKPOINT_TEST(bad_validations_count_in_a_row),
    CHECKPOINT_TEST(the_result_of_an_early_end_is_validated),
    CHECKPOINT_TEST(what_an_interrupted_save_left_is_replaced),
    CHECKPOINT_TEST(a_rate_that_was_given_stays),
    CHECKPOINT_TEST(a_split_is_chosen_by_the_rank_with_most_micro_batches),
    CHECKPOINT_TEST(a_tensor_whose_gradient_is_not_finite_is_named),
    CHECKPOINT_TEST(the_last_checkpoints_are_averaged),
    CHECKPOINT_TEST(links_are_not_followed),
    CHECKPOINT_TEST(a_saved_model_begins_another_run),
    CHECKPOINT_TEST(a_trained_part_goes_on_with_the_same_bits),
    CHECKPOINT_TEST(a_part_that_does_not_fit_is_refused),
    CHECKPOINT_TEST(adapters_alone_begin_a_run),
    CHECKPOINT_TEST(ranks_beside_other_frozen_parameters_are_refused),
    CHECKPOINT_TEST(a_model_of_others_begins_a_run),
    CHECKPOINT_TEST(a_run_stands_for_its_newest_checkpoint),
    CHECKPOINT_TEST(a_start_beside_a_checkpoint_is_said_to_be_unused),
    CHECKPOINT_TEST(a_text_longer_than_the_model_is_said),
    CHECKPOINT_TEST(a_text_goes_on_line_by_line),
    CHECKPOINT_TEST(a_longer_run_says_what_becomes_of_the_rate),
    CHECKPOINT_TEST(a_decay_branches_off_a_stable_run),
    CHECKPOINT_TEST(adaptive_batches_are_not_exact),
    CHECKPOINT_TEST(what_is_left_out_is_as_in_the_run),
    CHECKPOINT_TEST(a_damaged_model_is_named),
    CHECKPOINT_TEST(a_directory_that_vanishes_is_made_again),
    CHECKPOINT_TEST(another_processor_is_not_exact),
    CHECKPOINT_TEST(a_resumed_run_keeps_every_option),
    CHECKPOINT_TEST(the_fastest_format_is_chosen_once),
    CHECKPOINT_TEST(mistakes_are_refused),
    CHECKPOINT_TEST(what_a_checkpoint_says_of_another_machine_is_remarked),
    CHECKPOINT_TEST(ranks_with_another_checkpoint_are_refused),
    CHECKPOINT_TEST(hostile_manifests_are_refused),
};

// test_checkpoint PATTERN runs only the tests whose names match PATTERN, such as
// '*rank*'.
int main(int argc, char **argv) {
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    open_stage(&stage_of_all);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage_of_all);
    return failed;
}
