// test_cuda_program.c: what the CUDA program promises to its users. Its kernels are
// emulated (test/simt), so no GPU is needed. The sections are the promises:
//
//   Bits      fp32 on a GPU trains as the CPU does; the order of events and the way that
//             vectors travel, through the host or through NCCL's stand-in, change no bit
//   Choices   which ranks get a GPU, whether NCCL is used, how much is recomputed;
//             what cannot be had is refused
//   Products  algorithms that were timed and kept repeat bit for bit; files of them are
//             checked
//   Plan      a plan prints what a run reserves, also where there is no GPU
//   eval      gives the same numbers wherever they are computed
//   Reports   tell the share of the GPU's peak, its clock and its power, and profilers the
//             names of spans
//
// EMULATED is the binary.
#include "test/program/fleet.h"

// The GPUs that programs find from now on, as SIMT_GPUS says them, and the memory of
// each. NULL, NULL: one GPU of 4 GB.
static void set_gpus(const char *gpus, const char *megabytes) {
    unsetenv("SIMT_GPUS");
    unsetenv("SIMT_OWN_GPUS");
    unsetenv("SIMT_MEMORY_MB");
    unsetenv("SIMT_FAIL_LAUNCH");
    unsetenv("SIMT_FAIL_PRODUCT");
    unsetenv("SIMT_NO_ALGORITHM");
    unsetenv("SIMT_SAY_LOADING");
    unsetenv("SIMT_PLANS_DIFFER");
    unsetenv("SIMT_OFFER");
    unsetenv("CUDA_MODULE_LOADING");
    unsetenv("SIMT_DRIVER");
    unsetenv("SIMT_CAPABILITY");
    unsetenv("SIMT_NO_CODE");
    unsetenv("SIMT_KIND");
    unsetenv("SIMT_NAME");
    unsetenv("SIMT_RANGES");
    if (gpus != NULL) { setenv("SIMT_GPUS", gpus, 1); }
    if (megabytes != NULL) { setenv("SIMT_MEMORY_MB", megabytes, 1); }
}

static int times_in(const char *text, const char *part) {
    int times = 0;
    assert_non_null(text);
    for (const char *at = text; (at = strstr(at, part)) != NULL; at += strlen(part)) { times++; }
    return times;
}

// The validation loss at the end.
static double fleet_loss(const Fleet *fleet, int i) {
    return fleet_number(fleet, i, "validation", -1, "loss");
}

static void check_losses(const Fleet *fleet, int a, int b, double tolerance) {
    double difference = fabs(fleet_loss(fleet, a) - fleet_loss(fleet, b));
    if (!(difference <= tolerance)) {
        fail_msg("%s ends at %.7f, %s at %.7f", fleet->trainings[a].what, fleet_loss(fleet, a),
                 fleet->trainings[b].what, fleet_loss(fleet, b));
    }
}

// ---- Bits -----------------------------------------------------------------------------

// In fp32 a GPU trains as the CPU does, but for rounding.
static void a_gpu_trains_as_the_cpu_does(void **state) {
    for (int i = 0; i < RULES_TESTED; i++) {
        Fleet *fleet = fleet_new(stage_of(state));
        fleet_start(fleet, 0, "--precision fp32 --lr 0.003 %s", rule_cases[i].options);
        fleet_start(fleet, 0, "--device cpu --lr 0.003 %s", rule_cases[i].options);
        fleet_finish(fleet);
        check_losses(fleet, 0, 1, 2e-3);
        stage_end_all(stage_of(state));
    }
}

// In bf16 it learns too, and two runs end with the same bits; also where a step writes the weights,
// be it a commit or a worker's own.
static void bf16_learns_and_repeats(void **state) {
    static const char *const rules[] = {"acco", "ddp", "diloco --diloco-H 3"};
    for (int rule = 0; rule < 3; rule++) {
        Fleet *fleet = fleet_new(stage_of(state));
        for (int i = 0; i < 2; i++) { fleet_start(fleet, 0, "--optimizer %s --lr 0.01", rules[rule]); }
        fleet_start(fleet, 0, "--optimizer %s --lr 0.01 --precision fp32", rules[rule]);
        fleet_finish(fleet);
        check_same(fleet, 0, 1);
        check_losses(fleet, 0, 2, 0.1);
        assert_true(fleet_loss(fleet, 0) < fleet_number(fleet, 0, "report", 0, "loss") - 0.3);
        assert_non_null(strstr(fleet_output(fleet, 0), "bf16"));
        stage_end_all(stage_of(state));
    }
}

// The order of events and the way that vectors travel change no bit. And the ranks train
// as on CPUs, but for rounding.
static void check_ranks(Stage *stage, int ranks, const RuleCase *rule, const char *megabytes,
                        const char *more) {
    char delayed[64];
    snprintf(delayed, sizeof delayed, "--chaos-ms %d --gpu-exchange host", rule->chaos_ms / 2);
    const char *ways[] = {"--gpu-exchange nccl", "--overlap off --gpu-exchange nccl", delayed};
    Fleet *fleet = fleet_new(stage);
    set_gpus("4", megabytes);
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, ranks, "--precision fp32 --lr 0.003 %s %s %s", rule->options, more, ways[i]);
    }
    fleet_start(fleet, ranks, "--device cpu --lr 0.003 %s %s", rule->options, more);
    fleet_finish(fleet);
    for (int i = 1; i < 3; i++) { check_same(fleet, 0, i); }
    check_losses(fleet, 0, 3, 2e-3);
    stage_end_all(stage);
}

static void two_gpus_give_the_same_bits_in_any_order(void **state) {
    for (int i = 0; i < RULES_TESTED; i++) {
        check_ranks(stage_with_ranks(state), 2, &rule_cases[i], NULL, "");
    }
}

static void narrow_wires_give_the_same_bits_in_any_order(void **state) {
    Stage *stage = stage_with_ranks(state);
    check_ranks(stage, 3, &rule_cases[ZERO1], NULL, "--wire bf16");
    check_ranks(stage, 2, &rule_cases[ACCO], NULL, "--wire int8 --estimate-wire int4");
    check_ranks(stage, 3, &rule_cases[STREAMING_DILOCO], NULL, "--wire e3m0");
    check_ranks(stage, 3, &rule_cases[ZERO1], NULL, "--wire int4");
}

// Of a saved model a part is trained on GPUs, frozen tensors or adapters beside it: as on CPUs
// but for rounding; in bf16 with the same bits when it is resumed.
static void a_part_of_a_model_is_trained_on_gpus(void **state) {
    static const char *const parts[] = {"--lora-rank 4 --lr 0.03", "--freeze 'wte,h.0.*' --lr 0.003"};
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("2", NULL);
    fleet_start(fleet, 0, "--lr 0.01");
    fleet_finish(fleet);
    char start[80], options[2][200];
    snprintf(start, sizeof start, "%.60s", fleet->trainings[0].out);
    for (int i = 0; i < 2; i++) {
        snprintf(options[i], sizeof options[i], "--from %.60s --optimizer zero1 --save-every 2 --keep 99 %s",
                 start, parts[i]);
    }
    fleet = fleet_new(stage_of(state));
    for (int i = 0; i < 2; i++) {
        fleet_start(fleet, 2, "%s --precision fp32", options[i]);
        fleet_start(fleet, 2, "%s --device cpu", options[i]);
        fleet_start(fleet, 2, "%s", options[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 2; i++) {
        char resume[300];
        Fingerprint whole = fleet->prints[3 * i + 2];
        check_losses(fleet, 3 * i, 3 * i + 1, 2e-3);
        check_losses(fleet, 3 * i, 3 * i + 2, 0.05);
        snprintf(resume, sizeof resume, "%.199s --resume %.60s/checkpoints/commit-2", options[i],
                 fleet->trainings[3 * i + 2].out);
        Training resumed = training_start(stage_of(state), 2, resume);
        Fingerprint print = training_fingerprint(stage_of(state), &resumed);
        assert_string_equal(print.text, whole.text);
    }
}

// Where all ranks compute in bf16, a sharded rule gathers casts of the parameters: the
// weights are those of ddp, where every rank has made the same step itself, bit for bit,
// with 6 bytes a parameter instead of 8.
static void casts_travel_and_change_no_bit(void **state) {
    static const char *const ways[] = {"ddp", "zero1", "zero1 --gpu-exchange host", "zero1 --overlap off"};
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("2", NULL);
    for (int i = 0; i < 4; i++) { fleet_start(fleet, 2, "--lr 0.01 --optimizer %s", ways[i]); }
    fleet_finish(fleet);
    for (int i = 1; i < 4; i++) { check_same(fleet, 0, i); }
    double bytes[2], kept[2];
    for (int i = 0; i < 2; i++) {
        bytes[i] = fleet_number(fleet, i, "report", -1, "bytes_sent");
        kept[i] =
            log_number(json_object_get(log_event_of(fleet->events[i], "start", 0), "memory"), "parameters");
    }
    // At the last report the last all-gather may still be under way.
    assert_true(bytes[1] < 0.77 * bytes[0] && bytes[1] > 0.69 * bytes[0]);
    assert_true(kept[1] < 0.34 * kept[0] && kept[1] > 0.32 * kept[0]); // casts instead of floats and casts
}

// Ranks on GPUs own whole matrices under Muon, and exchange through the host: the weights of zero1
// are those of ddp, in bf16 and fp32; in fp32 they train as on CPUs; and local rules have NCCL.
static void muon_steps_whole_matrices_on_gpus(void **state) {
    static const char *const ways[] = {"ddp",
                                       "zero1",
                                       "zero1 --overlap off --chaos-ms 2",
                                       "ddp --precision fp32",
                                       "zero1 --precision fp32 --bucket-mb 0.01",
                                       "zero1 --device cpu",
                                       "acco --accumulate 4",
                                       "acco --accumulate 4 --chaos-ms 5",
                                       "diloco --diloco-H 4 --gpu-exchange nccl"};
    enum { WAYS = sizeof ways / sizeof ways[0] };
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("2", NULL);
    for (int i = 0; i < WAYS; i++) {
        fleet_start(fleet, 2, "--inner muon --lr 0.01 --optimizer %s", ways[i]);
    }
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
    check_same(fleet, 0, 2);
    check_same(fleet, 3, 4);
    check_same(fleet, 6, 7);
    check_losses(fleet, 4, 5, 5e-3);
    check_losses(fleet, 1, 5, 0.05);
    text_check(fleet_output(fleet, 1), "ranks own whole matrices", ways[1]);
}

// Casts travel in twos. A matrix that has an odd number of elements, or begins at an odd one, would
// lose one of them, so then floats travel.
static void no_element_of_an_odd_matrix_is_lost(void **state) {
    Stage *stage = stage_with_ranks(state);
    stage_write(stage, "odd.json",
                "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 5, \"n_head\": 1, "
                "\"n_positions\": 16, \"vocab_size\": 256}");
    Fleet *fleet = fleet_new(stage);
    set_gpus("2", NULL);
    fleet_start(fleet, 0, "--model odd.json --lr 0.01");
    fleet_finish(fleet);
    char start[80];
    snprintf(start, sizeof start, "%.60s", fleet->trainings[0].out);
    fleet = fleet_new(stage);
    for (int i = 0; i < 2; i++) {
        fleet_start(fleet, 2, "--from %s --freeze 'w*,ln_*,c_proj,c_fc,*.bias' --inner muon --lr 0.1 %s",
                    start, i == 0 ? "--optimizer ddp" : "--optimizer zero1");
    }
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
}

// With products in FP8 matrices are cast again after every commit: weights are those of
// ddp whether casts or floats arrive, in any order of events, and after a run was
// resumed. They train as bf16 does, but for rounding.
static void products_in_fp8_train_as_those_of_bf16_do(void **state) {
    static const char *const ways[] = {"ddp --products fp8",
                                       "zero1 --products fp8",
                                       "acco --accumulate 4 --products fp8 --save-every 2",
                                       "acco --accumulate 4 --products fp8 --chaos-ms 5 --recompute block",
                                       "ddp",
                                       "acco --accumulate 4"};
    char resume[512];
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("2", NULL);
    for (int i = 0; i < 6; i++) { fleet_start(fleet, 2, "--lr 0.01 --tokens 640 --optimizer %s", ways[i]); }
    fleet_finish(fleet);
    for (int i = 0; i < 4; i += 2) {
        check_same(fleet, i, i + 1);
        check_losses(fleet, i, 4 + i / 2, 0.02);
        assert_true(strcmp(fleet->prints[i].text, fleet->prints[4 + i / 2].text) != 0);
        assert_true(fleet_loss(fleet, i) < fleet_number(fleet, i, "report", 0, "loss") - 0.2);
        text_check(fleet_output(fleet, i), "; bf16, products of the layers in FP8", ways[i]);
    }
    snprintf(resume, sizeof resume,
             "--lr 0.01 --tokens 640 --optimizer %s --resume %.100s/checkpoints/commit-4", ways[2],
             fleet->trainings[2].out);
    Training resumed = training_start(stage_of(state), 2, resume);
    Fingerprint print = training_fingerprint(stage_of(state), &resumed);
    assert_string_equal(print.text, fleet->prints[2].text);
}

// In overlapped rules casts arrive beside those in use: of the master, of an estimate, of a
// prediction. They train as fp32 on CPUs does, but for the rounding of bf16.
static void arriving_casts_train_as_floats_do(void **state) {
    static const char *const rules[] = {"acco", "acco-wp", "dpu"};
    for (int i = 0; i < 3; i++) {
        char options[100];
        Fleet *fleet = fleet_new(stage_with_ranks(state));
        set_gpus("2", NULL);
        snprintf(options, sizeof options, "--lr 0.01 --tokens 640 --optimizer %s", rules[i]);
        fleet_start(fleet, 2, "%s", options);
        fleet_start(fleet, 2, "%s --gpu-exchange host --chaos-ms 5", options);
        fleet_start(fleet, 2, "%s --device cpu", options);
        fleet_finish(fleet);
        check_same(fleet, 0, 1);
        check_losses(fleet, 0, 2, 0.02);
        assert_true(fleet_loss(fleet, 0) < fleet_number(fleet, 0, "report", 0, "loss") - 0.3);
        stage_end_all(stage_of(state));
    }
}

// Where only casts are kept, exact parameters are gathered into the gradient accumulator,
// and what it held comes back: validation and checkpoints in between change no bit. The
// same where a coarse estimate needs floats, and after a run was resumed; moments in bf16 come
// back, too.
static void looking_at_exact_parameters_changes_no_bit(void **state) {
    static const char *const rules[] = {"zero1 --moments bf16", "acco",
                                        "acco --estimate-wire int4 --moments bf16", "acco-wp"};
    for (int i = 0; i < 4; i++) {
        char options[200], resume[512], from[200];
        Fleet *fleet = fleet_new(stage_with_ranks(state));
        set_gpus("2", NULL);
        snprintf(options, sizeof options, "--lr 0.01 --accumulate 4 --tokens 640 --optimizer %s", rules[i]);
        fleet_start(fleet, 2, "%s --val-every end", options);
        fleet_start(fleet, 2, "%s --val-every 1 --save-every 2", options);
        fleet_finish(fleet);
        check_same(fleet, 0, 1);
        snprintf(from, sizeof from, "%.100s/checkpoints/commit-4", fleet->trainings[1].out);
        snprintf(resume, sizeof resume, "%s --resume %s", options, from);
        Training resumed = training_start(stage_of(state), 2, resume);
        Fingerprint print = training_fingerprint(stage_of(state), &resumed);
        assert_string_equal(print.text, fleet->prints[0].text);
        // Whoever does not compute with casts goes on from what they are casts of.
        snprintf(from, sizeof from, "%.100s/checkpoints/commit-%d", fleet->trainings[1].out,
                 (int)fleet_number(fleet, 1, "end", -1, "commit"));
        snprintf(resume, sizeof resume, "%s --resume %s --device cpu", options, from);
        resumed = training_start(stage_of(state), 2, resume);
        print = training_fingerprint(stage_of(state), &resumed);
        assert_string_equal(print.text, fleet->prints[0].text);
        stage_end_all(stage_of(state));
    }
}

// Where the library plans a product that leaves processors to NCCL in another way, bits depend
// on which products do. That follows from the schedule: with overlap or without, none where
// nothing travels, all of a micro-batch beside a job, and of two of three where zero1 sends
// behind the last and gathers beside the first.
static void products_beside_an_exchange_follow_the_schedule(void **state) {
    static const char *const rules[] = {"diloco --diloco-H 2", "ddp --accumulate 3", "zero1 --accumulate 3",
                                        "acco --accumulate 4", "co2 --co2-tau 2"};
    for (int i = 0; i < 5; i++) {
        Fleet *fleet = fleet_new(stage_with_ranks(state));
        set_gpus("2", NULL);
        setenv("SIMT_PLANS_DIFFER", "1", 1);
        fleet_start(fleet, 2, "--lr 0.01 --optimizer %s", rules[i]);
        fleet_start(fleet, 2, "--lr 0.01 --optimizer %s --overlap off", rules[i]);
        fleet_start(fleet, 2, "--lr 0.01 --optimizer %s --gpu-exchange host", rules[i]);
        fleet_finish(fleet);
        check_same(fleet, 0, 1);
        assert_int_equal(strcmp(fleet->prints[0].text, fleet->prints[2].text) == 0, i == 0);
        stage_end_all(stage_of(state));
    }
}

// The number in a training's checkpoint of commit 5.
static double saved_number(Stage *stage, const Training *training, const char *name) {
    char path[STAGE_PATH_SIZE], file[256];
    snprintf(file, sizeof file, "%.100s/checkpoints/commit-5/checkpoint.json", training->out);
    return text_number(stage_read_text(stage, stage_path(stage, file, path)), name, file);
}

// How many micro-batches an exchange runs beside is measured with what else is auto, and
// kept: a resumed run has the same numbers, and ends in the same bits.
static void a_measured_share_of_products_is_kept(void **state) {
    static const char options[] = "--lr 0.01 --tokens 640 --optimizer acco --accumulate 4 --acco-split auto "
                                  "--precision fp32";
    static const char *const numbers[] = {"\"beside_commit\":", "\"beside_estimate\":"};
    char resume[512];
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("2", NULL);
    setenv("SIMT_PLANS_DIFFER", "1", 1);
    fleet_start(fleet, 2, "%s --save-every 2", options);
    fleet_finish(fleet);
    snprintf(resume, sizeof resume, "%s --resume %.100s/checkpoints/commit-4", options,
             fleet->trainings[0].out);
    Training resumed = training_start(stage_of(state), 2, resume);
    Fingerprint print = training_fingerprint(stage_of(state), &resumed);
    assert_string_equal(print.text, fleet->prints[0].text);
    for (int i = 0; i < 2; i++) {
        double measured = saved_number(stage_of(state), &fleet->trainings[0], numbers[i]);
        assert_true(measured >= 1);
        assert_true(saved_number(stage_of(state), &resumed, numbers[i]) == measured);
    }
}

// Hosts that begin with different models are noticed, although masters and casts would be
// the same everywhere after the first exchange. (A host reads its model once.)
static void hosts_with_other_models_are_refused(void **state) {
    Stage *stage = stage_with_ranks(state);
    char path[STAGE_PATH_SIZE], program[STAGE_PATH_SIZE], text[2 * STAGE_PATH_SIZE];
    set_gpus("2", NULL);
    for (int rank = 0; rank < 2; rank++) {
        char options[64], target[200], link[64];
        snprintf(options, sizeof options, "--tokens 64 --seed %d", rank + 1);
        Training training = training_start(stage, 0, options);
        json_decref(training_finish(stage, &training));
        snprintf(target, sizeof target, "../%.100s/checkpoints/commit-2/model", training.out);
        snprintf(link, sizeof link, "rank-%d", rank);
        assert_int_equal(mkdir(stage_path(stage, link, path), 0777), 0);
        snprintf(link, sizeof link, "rank-%d/model", rank);
        assert_int_equal(symlink(target, stage_path(stage, link, path)), 0);
    }
    snprintf(text, sizeof text, "#!/bin/sh\ncd rank-" RANK_IN_SHELL " && exec %.1000s \"$@\"\n",
             stage->binary);
    stage_write(stage, "script", text);
    assert_int_equal(chmod(stage_path(stage, "script", path), 0777), 0);
    memcpy(program, stage->binary, sizeof program);
    memcpy(stage->binary, path, sizeof path);
    Outcome outcome = program_run(
        stage, 2, "--config ../base.json --from model --optimizer zero1 --ranks-per-host 1 --out ../others");
    memcpy(stage->binary, program, sizeof program);
    outcome_check(&outcome, 3, "two models");
    text_check(outcome.errors, "the parameters of rank 1 differ from rank 0's", "two models");
}

// NCCL's own collectives, here a stand-in that adds in the opposite order, end within
// rounding of ours, with as many bytes, but for our messages' multiples of 128.
static void the_library_is_within_rounding_of_ours(void **state) {
    static const char *const options[] = {"--optimizer zero1", "--optimizer ddp --wire bf16",
                                          "--optimizer acco --accumulate 4 --precision fp32",
                                          "--optimizer diloco --diloco-H 2 --wire bf16"};
    for (int i = 0; i < 4; i++) {
        Fleet *fleet = fleet_new(stage_with_ranks(state));
        set_gpus("4", i % 2 == 0 ? NULL : "40"); // in one batch, and in several
        fleet_start(fleet, 3, "--lr 0.003 --exchange library %s", options[i]);
        fleet_start(fleet, 3, "--lr 0.003 --exchange flat %s", options[i]);
        fleet_finish(fleet);
        check_losses(fleet, 0, 1, strstr(options[i], "bf16") != NULL ? 2e-2 : 2e-3);
        text_check(fleet_output(fleet, 0), "by NCCL's own collectives", options[i]);
        double bytes[2];
        for (int j = 0; j < 2; j++) { bytes[j] = fleet_number(fleet, j, "report", -1, "bytes_sent"); }
        // At the last report the last all-gather, one of ten collectives, may be under way.
        assert_true(bytes[0] < 1.25 * bytes[1] && bytes[0] > 0.75 * bytes[1]);
        stage_end_all(stage_of(state));
    }
}

// On GPUs with little memory a vector travels in several batches.
static void two_levels_give_the_same_bits_in_any_order(void **state) {
    Stage *stage = stage_with_ranks(state);
    check_ranks(stage, 4, &rule_cases[ZERO1], NULL, "--ranks-per-host 2");
    check_ranks(stage, 4, &rule_cases[ZERO1], "40", "--ranks-per-host 2");
    check_ranks(stage, 3, &rule_cases[ACCO], "40", "--ranks-per-host 2 --wire int8 --estimate-wire int4");
    check_ranks(stage, 4, &rule_cases[DDP], "40", "--ranks-per-host 2 --wire bf16");
    check_ranks(stage, 4, &rule_cases[DDP], "40", "--ranks-per-host 2 --wire int4");
    check_ranks(stage, 4, &rule_cases[STREAMING_DILOCO], "40", "--ranks-per-host 3 --wire e3m0");
    check_ranks(stage, 3, &rule_cases[ACCO], "40,4096,1024", ""); // messages are those of the smallest
}

// ---- Choices --------------------------------------------------------------------------

static void ranks_with_and_without_a_gpu_train_together(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("1,0", NULL);
    fleet_start(fleet, 2, "--lr 0.003 --precision fp32 --optimizer zero1");
    fleet_start(fleet, 2, "--lr 0.003 --device cpu --optimizer zero1");
    set_gpus("0,1", NULL);
    fleet_start(fleet, 2, "--lr 0.003 --precision fp32 --optimizer acco");
    fleet_finish(fleet);
    check_losses(fleet, 0, 1, 2e-3);
    assert_non_null(strstr(fleet_output(fleet, 0), "through host memory: not every rank has a GPU"));
    assert_non_null(strstr(fleet_output(fleet, 2), "this node has no GPU"));
}

static void nccl_is_used_where_every_rank_has_a_gpu(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_gpus("2", NULL);
    fleet_start(fleet, 2, "--tokens 200 --nccl-ctas 2");
    set_gpus("1", NULL);
    fleet_start(fleet, 2, "--tokens 200");
    set_gpus("2", NULL);
    fleet_start(fleet, 2, "--tokens 200 --link-mbit 1000");
    set_gpus("1", NULL);
    setenv("SIMT_OWN_GPUS", "1", 1); // the launcher shows every rank one GPU of its own
    fleet_start(fleet, 2, "--tokens 200");
    set_gpus("4", NULL);
    fleet_start(fleet, 4, "--tokens 200 --ranks-per-host 2");
    fleet_finish(fleet);
    assert_non_null(
        strstr(fleet_output(fleet, 0), "by NCCL, which takes at most 2 of 4 processors; products"));
    assert_non_null(strstr(fleet_output(fleet, 1), "several ranks share a GPU, which NCCL refuses"));
    assert_non_null(strstr(fleet_output(fleet, 2), "through host memory: links are emulated in host memory"));
    assert_non_null(
        strstr(fleet_output(fleet, 3), "by NCCL, which takes at most 1 of 4 processors; products"));
    assert_non_null(
        strstr(fleet_output(fleet, 4), "by NCCL, which takes at most 2 of 4 processors; products"));
    Outcome outcome =
        program_run(stage_of(state), 2, "--config base.json --tokens 200 --out c --nccl-ctas 3");
    outcome_check(&outcome, 2, "too many processors for NCCL");
    text_check(
        outcome.errors,
        "--nccl-ctas 3 leaves less than half of this GPU's 4 processors to the computation, with 1 level "
        "of exchange: at most 2",
        "too many processors for NCCL");
}

// Each level keeps less in memory than the one before.
static void recomputation_changes_no_bit(void **state) {
    static const char *const levels[] = {"none", "gelu", "layernorm", "block"};
    Fleet *fleet = fleet_new(stage_of(state));
    for (int i = 0; i < 4; i++) { fleet_start(fleet, 0, "--tokens 500 --recompute %s", levels[i]); }
    fleet_finish(fleet);
    for (int i = 1; i < 4; i++) {
        check_same(fleet, 0, i);
        json_t *less = json_object_get(log_event_of(fleet->events[i], "start", 0), "memory");
        json_t *more = json_object_get(log_event_of(fleet->events[i - 1], "start", 0), "memory");
        assert_true(log_number(less, "activations") < log_number(more, "activations"));
    }
}

// The level of recomputation that a plan for a GPU of so many megabytes prints, from 4
// (none) to 1 (whole blocks). 0: nothing fits.
static int planned_level(Stage *stage, int megabytes) {
    static const char *const choices[] = {
        "recompute        none (the least that fits", "recompute        gelu (the least that fits",
        "recompute        layernorm (the least that fits", "recompute        block (the least that fits"};
    char text[32];
    snprintf(text, sizeof text, "%d", megabytes);
    set_gpus("1", text);
    Outcome outcome = program_run(stage, 0, "plan --config base.json --device cuda --micro-batch 16384");
    for (int i = 0; i < 4; i++) {
        if (strstr(outcome.output, choices[i]) != NULL) { return 4 - i; }
    }
    outcome_check(&outcome, 0, "a plan for a GPU that is too small");
    text_check(outcome.output, "\nfits             no: ", "a plan for a GPU that is too small");
    return 0;
}

// The less memory there is, the more is recomputed; every level occurs.
static void no_more_is_recomputed_than_needed(void **state) {
    int level = 5, seen = 0;
    for (int megabytes = 2400; level > 0; megabytes -= 15) {
        int now = planned_level(stage_of(state), megabytes);
        assert_true(megabytes > 0 && now <= level);
        seen |= 1 << now;
        level = now;
    }
    assert_int_equal(seen, 31);
}

static void what_cannot_be_had_is_refused(void **state) {
    typedef struct Refused {
        const char *gpus, *arguments, *part;
        int ranks;
    } Refused;
    static const Refused refused[] = {
        {"0", "--device cuda", "--device cuda: this node has no GPU", 0},
        {"1", "--device cpu --recompute gelu", "the CPU program has none and block", 0},
        {"1", "--gpu-exchange nccl", "several ranks share a GPU", 2},
        {"2", "--gpu-exchange nccl --link-mbit 100", "links are emulated in host memory", 2},
        {"1", "--model wide.json --device cuda", "a head at most 256 wide", 0},
        {"0", "--products fp8",
         "--products fp8 needs a GPU of compute capability 8.9 or more; this rank has: CPU (this node", 0},
        {"1,0", "--products fp8 --optimizer zero1", "--products fp8 needs a GPU of compute capability 8.9",
         2},
        {"1", "--products fp8 --device cpu", "--products fp8 does not go together with --device cpu", 0},
        {"1", "--products fp8 --precision fp32", "does not go together with --precision fp32", 0},
        {"1", "--products fp8 --seq-len 8", "must be multiples of 16", 0},
        {"1", "--products fp8 --model narrow.json", "has 32, 48, 32 and 8", 0},
        {"1", "--products fp8 --model six.json", "head_dim must be a multiple of 8 in qwen3; six.json has 6",
         0},
        {"1,0", "--optimizer ddp", "round them differently", 2},
        {"1,0", "--optimizer diloco", "round them differently", 2},
        {"1,0", "--gpu-exchange nccl --optimizer zero1", "not every rank has a GPU", 2},
        {"1", "--exchange library", "which cannot be used here: several ranks share a GPU", 2},
        {"2", "--exchange library --gpu-exchange host", "--gpu-exchange is host", 2},
        {"2", "--exchange library --estimate-wire int8", "does not go together", 2},
    };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        char arguments[256];
        if (refused[i].ranks > 0 && !stage_of(state)->has_mpi) { continue; }
        set_gpus(refused[i].gpus, NULL);
        snprintf(arguments, sizeof arguments, "--config base.json --out refused %s", refused[i].arguments);
        Outcome outcome = program_run(stage_of(state), refused[i].ranks, arguments);
        outcome_check(&outcome, 2, refused[i].arguments);
        text_check(outcome.errors, refused[i].part, refused[i].arguments);
        assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
    }
}

// ---- What goes wrong with a GPU -------------------------------------------------------

// Emulators of other GPUs and drivers; until set_gpus.
static void set_trouble(const char *name, const char *value) {
    set_gpus("4", NULL);
    setenv(name, value, 1);
}

// A CUDA error on one rank ends all ranks at once, with rank, operation and commit.
static void a_cuda_error_ends_the_job(void **state) {
    for (int ranks = 0; ranks <= 2; ranks += 2) {
        Stage *stage = ranks > 0 ? stage_with_ranks(state) : stage_of(state);
        set_trouble("SIMT_FAIL_LAUNCH", ranks > 0 ? "0,4000" : "4000");
        double began = program_clock();
        Outcome outcome =
            program_run(stage, ranks, "--config base.json --tokens 100M --timeout-s 100 --out broken");
        outcome_check(&outcome, 3, "a kernel that cannot be started");
        assert_true(program_clock() - began < 60);
        text_check(outcome.errors, ranks > 0 ? "train_gpt: [rank 1 of 2 on " : "train_gpt: [rank 0 of 1 on ",
                   "a CUDA error");
        text_check(outcome.errors, "CUDA: unspecified launch failure: cudaLaunchKernelEx", "a CUDA error");
        text_check(outcome.errors, "the latest operation between ranks was: ", "a CUDA error");
        if (strstr(outcome.errors, "commit 0]") != NULL) { fail_msg("too early: %s", outcome.errors); }
        shell(stage, "rm -rf broken");
    }
}

// An error of the library of matrix products is one, too.
static void a_failing_product_ends_the_job(void **state) {
    set_trouble("SIMT_FAIL_PRODUCT", "2000");
    Outcome outcome = program_run(stage_of(state), 0, "--config base.json --tokens 100M --out broken");
    outcome_check(&outcome, 3, "a failing product");
    text_check(outcome.errors, "train_gpt: [rank 0 of 1 on ", "a failing product");
    text_check(outcome.errors, "cuBLASLt: status 13: cannot compute a product of m ", "a failing product");
    if (strstr(outcome.errors, "commit 0]") != NULL) { fail_msg("too early: %s", outcome.errors); }
}

// The first product is that of queries, keys and values.
static void a_product_without_an_algorithm_is_named(void **state) {
    set_trouble("SIMT_NO_ALGORITHM", "1");
    Outcome outcome = program_run(stage_of(state), 0, "--config base.json --tokens 100M --out lacking");
    outcome_check(&outcome, 3, "a product that the library lacks");
    text_check(outcome.errors, "cuBLASLt: status 15: no algorithm for a product of m ",
               "a product that the library lacks");
    text_check(outcome.errors, ", a transposed, of bf16, the result bf16",
               "a product that the library lacks");
}

// Where the library refuses its own first offers, all ranks take the next ones, and say so.
static void refused_offers_give_way_on_all_ranks(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    set_trouble("SIMT_OFFER", "run");
    for (int i = 0; i < 2; i++) {
        fleet_start(fleet, 2, "--optimizer ddp --inner muon --overlap %s", i == 0 ? "on" : "off");
    }
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
    const char *said = "train_gpt: cuBLASLt refuses its own first offer for a product of m ";
    const char *errors = stage_read_text(fleet->stage, fleet->trainings[0].program.error_path);
    assert_true(times_in(errors, said) >= 2);
    stage_end_all(stage_of(state));
}

// Where ranks may send by NCCL all kernels are loaded before any of them runs, unless the user
// says otherwise; elsewhere each when it is first used.
static void kernels_are_loaded_at_the_start_for_nccl(void **state) {
    static const struct {
        int ranks;
        const char *wish, *exchange, *loaded;
    } cases[] = {{0, NULL, "auto", "by default"}, {0, "EAGER", "auto", "EAGER"},
                 {2, NULL, "auto", "EAGER"},      {2, "LAZY", "auto", "LAZY"},
                 {2, NULL, "nccl", "EAGER"},      {2, NULL, "host", "by default"}};
    for (int i = 0; i < 6; i++) {
        char expected[64], options[128];
        Stage *stage = cases[i].ranks > 0 ? stage_with_ranks(state) : stage_of(state);
        set_trouble("SIMT_SAY_LOADING", "1");
        if (cases[i].wish != NULL) { setenv("CUDA_MODULE_LOADING", cases[i].wish, 1); }
        snprintf(options, sizeof options, "--config base.json --tokens 64 --out loaded%d --gpu-exchange %s",
                 i, cases[i].exchange);
        Outcome outcome = program_run(stage, cases[i].ranks, options);
        outcome_check(&outcome, 0, options);
        snprintf(expected, sizeof expected, "emulator: kernels are loaded %s\n", cases[i].loaded);
        text_check(outcome.errors, expected, options);
        assert_int_equal(times_in(outcome.errors, "kernels are loaded "), times_in(outcome.errors, expected));
    }
}

static void a_driver_or_program_that_does_not_fit_is_named(void **state) {
    set_trouble("SIMT_DRIVER", "11040");
    Outcome outcome = program_run(stage_of(state), 0, "--config base.json --device cuda --out refused");
    outcome_check(&outcome, 2, "an old driver");
    text_check(outcome.errors, "the driver is for CUDA 11.4, and this program was built with 12.4",
               "an old driver");
    set_trouble("SIMT_NO_CODE", "1");
    outcome = program_run(stage_of(state), 0, "--config base.json --device cuda --out refused");
    outcome_check(&outcome, 2, "no code");
    text_check(outcome.errors,
               "no code for GPU 0, emulator, of compute capability 9.0: build it with ARCH=90", "no code");
    set_trouble("SIMT_CAPABILITY", "75");
    outcome = program_run(stage_of(state), 0, "--config base.json --device cuda --out refused");
    outcome_check(&outcome, 2, "an old GPU");
    text_check(outcome.errors,
               "--device cuda: GPU 0, emulator, has compute capability 7.5; at least 8.0 is needed",
               "an old GPU");
}

static void older_gpus_have_no_products_of_fp8(void **state) {
    set_trouble("SIMT_CAPABILITY", "86");
    Outcome outcome = program_run(stage_of(state), 0, "--config base.json --products fp8 --out refused");
    outcome_check(&outcome, 2, "a GPU of 8.6");
    text_check(outcome.errors, "8.9 or more; this rank has: GPU 0 of 4, emulator", "a GPU of 8.6");
    set_trouble("SIMT_CAPABILITY", "89");
    outcome = program_run(stage_of(state), 0, "--config base.json --products fp8 --out trained");
    outcome_check(&outcome, 0, "a GPU of 8.9");
}

// The odd one among the GPUs is named, whether that is allowed or not.
static void a_gpu_that_is_unlike_the_others_is_named(void **state) {
    Stage *stage = stage_with_ranks(state);
    set_trouble("SIMT_KIND", "1,1,2");
    Outcome outcome = program_run(stage, 3, "--config base.json --optimizer zero1 --tokens 200 --out mixed");
    outcome_check(&outcome, 0, "mixed GPUs");
    text_check(outcome.output, "computes on emulator 2, 2 of 3 ranks on emulator 1", "mixed GPUs");
    text_check(outcome.output, "rank 2 on ", "mixed GPUs");
    set_gpus("1,0", NULL);
    outcome = program_run(stage, 2, "--config base.json --optimizer ddp --out refused");
    outcome_check(&outcome, 2, "a GPU and a CPU");
    text_check(outcome.errors, " computes on the CPU, 1 of 2 ranks on emulator)", "a GPU and a CPU");
}

// ---- Plan -----------------------------------------------------------------------------

// On a machine with a GPU and on one without.
static void check_plan(Stage *stage, int ranks, const char *options) {
    char run[200], plan[300], expected[64];
    set_gpus("2", NULL);
    snprintf(run, sizeof run, "--tokens 200 %s", options);
    json_t *events = train(stage, ranks, run);
    json_t *memory = json_object_get(log_event_of(events, "start", 0), "memory");
    snprintf(expected, sizeof expected, " %lld  with alignment", (long long)log_number(memory, "total"));
    for (int gpus = 0; gpus < 2; gpus++) {
        set_gpus(gpus == 0 ? "0" : "1", NULL);
        snprintf(plan, sizeof plan, "plan --config base.json --device cuda --ranks %d %s",
                 ranks > 0 ? ranks : 1, options);
        Outcome outcome = program_run(stage, 0, plan);
        outcome_check(&outcome, 0, "a plan");
        text_check(outcome.output, expected, "a plan");
    }
    json_decref(events);
}

static void a_plan_prints_what_a_run_reserves(void **state) {
    check_plan(stage_of(state), 0, "");
    Stage *stage = stage_with_ranks(state);
    check_plan(stage, 2, "--optimizer zero1 --products fp8");
    check_plan(stage, 2, "--optimizer acco");
    check_plan(stage, 2, "--optimizer acco --estimate-wire int4 --gpu-exchange host");
}

// A program that was built for CPUs prints the same plan for a GPU.
static void a_program_for_cpus_plans_the_same(void **state) {
    static const char *const plans[] = {
        "--model 125M --gpu-memory 24G", "--model 125M --gpu-memory 24G --ranks 8 --optimizer acco",
        "--model 2.7B --gpu-memory 8G --ranks 8 --optimizer zero1 --ranks-per-host 4"};
    Stage *stage = stage_of(state), for_cpus = *stage;
    snprintf(for_cpus.binary, sizeof for_cpus.binary, "%s", getenv("TRAIN_GPT_FOR_CPUS"));
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "plan %s", plans[i]);
        Outcome one = program_run(stage, 0, arguments), other;
        stage->count++; // both stages number the files of their programs
        for_cpus.count = stage->count;
        other = program_run(&for_cpus, 0, arguments);
        stage->count = for_cpus.count;
        outcome_check(&one, 0, arguments);
        assert_string_equal(one.output, other.output);
        stage_end_all(&for_cpus);
    }
}

// A start says what a plan says.
static void a_start_says_what_would_fit(void **state) {
    set_gpus("1", "100");
    Outcome outcome = program_run(stage_of(state), 0,
                                  "--config base.json --micro-batch 16384 --out too-large --tokens 10M");
    outcome_check(&outcome, 2, "a GPU that is too small");
    text_check(outcome.errors, " on the GPU for a rank, and 99.6 MB are available: --micro-batch ",
               "a GPU that is too small");
    text_check(outcome.errors, " fits\n", "a GPU that is too small");
    assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
}

// ---- eval -----------------------------------------------------------------------------

// The number behind `name` in the output of train_gpt eval.
static double evaluated(Stage *stage, int ranks, const char *options, const char *name) {
    char arguments[512];
    snprintf(arguments, sizeof arguments, "eval --threads 1 --micro-batch 2 %s", options);
    Outcome outcome = program_run(stage, ranks, arguments);
    outcome_check(&outcome, 0, arguments);
    return text_number(outcome.output, name, arguments);
}

// Evaluates on the CPU, on a GPU in fp32 and in bf16, and with two ranks. bf16: the
// relative error it may have.
static void check_evaluation(Stage *stage, const char *model, const char *task, const char *name,
                             double bf16) {
    char options[3][400];
    static const char *const places[] = {"--device cpu", "--device cuda --precision fp32", "--device cuda"};
    for (int i = 0; i < 3; i++) {
        snprintf(options[i], sizeof options[i], "--from %s %s %s", model, task, places[i]);
    }
    double cpu = evaluated(stage, 0, options[0], name), gpu = evaluated(stage, 0, options[1], name);
    assert_close(gpu, cpu, 1e-5 * fabs(cpu), name);
    assert_close(evaluated(stage, 0, options[2], name), cpu, bf16 * fabs(cpu), name);
    if (stage->has_mpi) { assert_true(evaluated(stage, 2, options[1], name) == gpu); }
}

// What a model is worth depends neither on where it is computed nor on how many ranks
// share the work.
static void a_gpu_evaluates_as_the_cpu_does(void **state) {
    Stage *stage = stage_of(state);
    Training training = training_start(stage, 0, "--lr 0.01 --tokens 1600 --device cpu");
    json_decref(training_finish(stage, &training));
    char model[128];
    snprintf(model, sizeof model, "%s/checkpoints/commit-50", training.out);
    stage_write(
        stage, "held.txt",
        "One day a little cat saw a red ball. \"Is it yours?\" asked the cat. So they played all day.\n");
    stage_write(stage, "words.jsonl",
                "{\"text\": \"a little cat saw a cat\"}\n"
                "{\"text\": \"they played all day\"}\n"
                "{\"text\": \"a a a a a a a\"}\n");
    check_evaluation(stage, model, "--data held.txt", "nats per token", 5e-3);
    check_evaluation(stage, model, "--task lambada --data words.jsonl", "perplexity", 5e-2);
    check_evaluation(stage, model, "--task lambada --data words.jsonl", "acc", 1e-9);
}

// Texts of many lengths, two of each: every batch is another shape for the library of
// matrix products, and they are more than its plans.
static void a_gpu_evaluates_texts_of_any_length(void **state) {
    Stage *stage = stage_of(state);
    char model[128], texts[8192];
    size_t at = 0;
    stage_write(stage, "long.json",
                "{\"model_type\": \"gpt_neo\", \"num_layers\": 1, \"hidden_size\": 32, \"num_heads\": 2,\n"
                " \"intermediate_size\": 48, \"window_size\": 8, \"max_position_embeddings\": 64,\n"
                " \"vocab_size\": 256, \"attention_types\": [[[\"global\"], 1]]}\n");
    Training training = training_start(stage, 0, "--model long.json --tokens 128 --device cpu");
    json_decref(training_finish(stage, &training));
    snprintf(model, sizeof model, "%s/checkpoints/commit-1", training.out);
    for (int i = 64; i < 128; i++) {
        at += (size_t)snprintf(texts + at, sizeof texts - at, "{\"text\": \"%0*d cat\"}\n", i / 2 - 3, 7);
    }
    stage_write(stage, "lengths.jsonl", texts);
    check_evaluation(stage, model, "--task lambada --data lengths.jsonl", "perplexity", 5e-2);
}

// Models with rotary positions, RMSNorm, SwiGLU and heads that share keys: a Llama and a Qwen3.
// What is trained on one device is evaluated on the other.
static void models_of_other_families_train_on_gpus(void **state) {
    static const char *const models[2] = {"llama.json", "qwen3.json"};
    Stage *stage = stage_of(state);
    for (int i = 0; i < 2; i++) {
        char model[STAGE_PATH_SIZE];
        Fleet *fleet = fleet_new(stage);
        fleet_start(fleet, 0, "--model %s --optimizer acco --inner muon --precision fp32 --lr 0.003",
                    models[i]);
        fleet_start(fleet, 0, "--model %s --optimizer acco --inner muon --device cpu --lr 0.003", models[i]);
        fleet_start(fleet, 0, "--model %s --lr 0.01", models[i]);
        fleet_start(fleet, 0, "--model %s --lr 0.01 --recompute gelu", models[i]);
        fleet_start(fleet, 0, "--model %s --lr 0.01 --recompute block", models[i]);
        fleet_start(fleet, 0, "--model %s --lr 0.01 --products fp8", models[i]);
        fleet_finish(fleet);
        check_losses(fleet, 0, 1, 2e-3);
        check_same(fleet, 2, 3);
        check_same(fleet, 2, 4);
        check_losses(fleet, 2, 5, 0.1);
        assert_true(fleet_loss(fleet, 2) < fleet_number(fleet, 2, "report", 0, "loss") - 0.3);
        snprintf(model, sizeof model, "%s/checkpoints/commit-10", fleet->trainings[0].out);
        stage_write(stage, "held.txt", "One day a little cat saw a red ball, and they played all day.\n");
        check_evaluation(stage, model, "--data held.txt", "nats per token", 5e-3);
        stage_end_all(stage);
    }
}

// ---- The stage's files ----------------------------------------------------------------

// 16 channels a head, for which attention in bf16 uses tensor cores.
static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE], base[2 * STAGE_PATH_SIZE];
    stage_write(stage, "model.json",
                "{\"model_type\": \"gpt_neo\", \"num_layers\": 2, \"hidden_size\": 32, \"num_heads\": 2,\n"
                " \"intermediate_size\": 48, \"window_size\": 8, \"max_position_embeddings\": 16,\n"
                " \"vocab_size\": 256, \"attention_types\": [[[\"global\", \"local\"], 1]]}\n");
    snprintf(base, sizeof base,
             "{\"model\": \"%s\", \"micro-batch\": 1, \"tokens\": 320, \"report-every\": 2, "
             "\"val-batches\": 2, \"sample-tokens\": \"none\", \"threads\": 1, \"timeout-s\": 100}\n",
             stage_path(stage, "model.json", path));
    stage_write(stage, "base.json", base);
    static const struct {
        const char *file, *type;
        int heads, keys, head_dim;
    } models[] = {{"llama.json", "llama", 2, 1, 16},
                  {"qwen3.json", "qwen3", 4, 1, 16},
                  {"narrow.json", "llama", 4, 1, 8},
                  {"six.json", "qwen3", 8, 8, 6}};
    for (int i = 0; i < 4; i++) {
        char config[512];
        snprintf(config, sizeof config,
                 "{\"model_type\": \"%s\", \"num_hidden_layers\": 2, \"hidden_size\": 32,\n"
                 " \"num_attention_heads\": %d, \"num_key_value_heads\": %d, \"head_dim\": %d,\n"
                 " \"intermediate_size\": 48, \"max_position_embeddings\": 16, \"vocab_size\": 256,\n"
                 " \"tie_word_embeddings\": %s}\n",
                 models[i].type, models[i].heads, models[i].keys, models[i].head_dim,
                 i == 0 ? "false" : "true");
        stage_write(stage, models[i].file, config);
    }
    stage_write(stage, "wide.json",
                "{\"model_type\": \"gpt_neo\", \"num_layers\": 1, \"hidden_size\": 640, \"num_heads\": 2,\n"
                " \"window_size\": 8, \"max_position_embeddings\": 16, \"vocab_size\": 256,\n"
                " \"attention_types\": [[[\"global\"], 1]]}\n");
}

// ---- Reports --------------------------------------------------------------------------

// The share of what the maker states for bf16; unknown for other GPUs and in fp32.
static void reports_tell_the_share_of_the_peak(void **state) {
    static const struct {
        const char *name, *options;
        double peak; // TFLOP/s; 0: not known
    } cases[] = {{"emulator", "", 0},
                 {"NVIDIA H100 80GB HBM3", "", 989},
                 {"NVIDIA H100 PCIe", "", 756},
                 {"NVIDIA GH200 480GB", "", 989},
                 {"NVIDIA A100-SXM4-80GB", "", 312},
                 {"NVIDIA RTX A1000 Laptop GPU", "", 0},
                 {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "", 0},
                 {"GRID A100-10C", "", 0},
                 {"NVIDIA H100 80GB HBM3", "--precision fp32", 0}};
    enum { CASES = sizeof cases / sizeof cases[0] };
    Fleet *fleet = fleet_new(stage_of(state));
    for (int i = 0; i < CASES; i++) {
        setenv("SIMT_NAME", cases[i].name, 1);
        fleet_start(fleet, 0, "--lr 0.01 --tokens 64 %s", cases[i].options);
    }
    fleet_finish(fleet);
    for (int i = 0; i < CASES; i++) {
        json_t *report = log_event_of(fleet->events[i], "report", -1);
        double rate = log_number(report, "model_tflops");
        assert_true(rate > 0);
        assert_int_equal(times_in(fleet_output(fleet, i), "TFLOP/s over all ranks"), cases[i].peak > 0);
        if (cases[i].peak > 0) {
            assert_true(fabs(log_number(report, "mfu") * cases[i].peak / rate - 1) <= 1e-6);
        } else {
            assert_null(json_object_get(report, "mfu"));
        }
    }
}

// A profiler is told of the spans that --trace writes, by the same names.
static void profilers_see_the_spans_of_a_trace(void **state) {
    Stage *stage = stage_of(state);
    static const char *const names[] = {"micro-batch", "boundary", "reduce-scatter",
                                        "all-gather",  "step",     "summary"};
    char ranges[STAGE_PATH_SIZE], trace[STAGE_PATH_SIZE], part[64];
    setenv("SIMT_RANGES", stage_path(stage, "ranges", ranges), 1);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--lr 0.01 --optimizer acco --accumulate 4 --trace %s",
                stage_path(stage, "trace", trace));
    fleet_finish(fleet);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(part, sizeof part, "\"name\":\"%s\"", names[i]);
        int spans = times_in(stage_read_text(stage, trace), part);
        snprintf(part, sizeof part, "%s\n", names[i]);
        assert_true(spans > 0);
        assert_int_equal(times_in(stage_read_text(stage, ranges), part), spans);
    }
}

static int end_test(void **state) {
    set_gpus(NULL, NULL);
    return stage_end_test(state);
}

#define GPU_TEST(function) cmocka_unit_test_prestate_setup_teardown(function, NULL, end_test, &stage)

// test_cuda_program PATTERN runs the tests whose names match, as '*bits*'.
int main(int argc, char **argv) {
    static Stage stage;
    setenv("TRAIN_GPT_FOR_CPUS", stage_variable("TRAIN_GPT", "./train_gpt"), 1);
    setenv("TRAIN_GPT", stage_variable("EMULATED", "build/emulated/train_gpt"), 1);
    const struct CMUnitTest tests[] = {
        GPU_TEST(a_gpu_trains_as_the_cpu_does),
        GPU_TEST(bf16_learns_and_repeats),
        GPU_TEST(two_gpus_give_the_same_bits_in_any_order),
        GPU_TEST(narrow_wires_give_the_same_bits_in_any_order),
        GPU_TEST(a_part_of_a_model_is_trained_on_gpus),
        GPU_TEST(casts_travel_and_change_no_bit),
        GPU_TEST(muon_steps_whole_matrices_on_gpus),
        GPU_TEST(no_element_of_an_odd_matrix_is_lost),
        GPU_TEST(products_in_fp8_train_as_those_of_bf16_do),
        GPU_TEST(arriving_casts_train_as_floats_do),
        GPU_TEST(looking_at_exact_parameters_changes_no_bit),
        GPU_TEST(products_beside_an_exchange_follow_the_schedule),
        GPU_TEST(a_measured_share_of_products_is_kept),
        GPU_TEST(hosts_with_other_models_are_refused),
        GPU_TEST(two_levels_give_the_same_bits_in_any_order),
        GPU_TEST(the_library_is_within_rounding_of_ours),
        GPU_TEST(ranks_with_and_without_a_gpu_train_together),
        GPU_TEST(nccl_is_used_where_every_rank_has_a_gpu),
        GPU_TEST(recomputation_changes_no_bit),
        GPU_TEST(no_more_is_recomputed_than_needed),
        GPU_TEST(what_cannot_be_had_is_refused),
        GPU_TEST(a_cuda_error_ends_the_job),
        GPU_TEST(a_failing_product_ends_the_job),
        GPU_TEST(a_product_without_an_algorithm_is_named),
        GPU_TEST(refused_offers_give_way_on_all_ranks),
        GPU_TEST(kernels_are_loaded_at_the_start_for_nccl),
        GPU_TEST(a_driver_or_program_that_does_not_fit_is_named),
        GPU_TEST(older_gpus_have_no_products_of_fp8),
        GPU_TEST(a_gpu_that_is_unlike_the_others_is_named),
        GPU_TEST(a_plan_prints_what_a_run_reserves),
        GPU_TEST(a_program_for_cpus_plans_the_same),
        GPU_TEST(a_start_says_what_would_fit),
        GPU_TEST(a_gpu_evaluates_as_the_cpu_does),
        GPU_TEST(a_gpu_evaluates_texts_of_any_length),
        GPU_TEST(models_of_other_families_train_on_gpus),
        GPU_TEST(reports_tell_the_share_of_the_peak),
        GPU_TEST(profilers_see_the_spans_of_a_trace),
    };
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    stage_open(&stage);
    write_stage(&stage);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
