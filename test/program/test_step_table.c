// test_step_table.c: dev/gpu/step-table on times that this test writes, and the predictions of a
// step (dev/gpu/predict) against the step that the model's shape asks for.
#include "models/families.h"
#include "test/program/program.h"

static Stage stage;

static const char *const predictions = "# a remark\n"
                                       "parameters | 3000\n"
                                       "products | by hand\n"
                                       "    product a, forward | 2 | 2000 | 1500\n"
                                       "    product b, d input | 1 | 2000.0 | 1000\n"
                                       "AdamW | 28 bytes\n"
                                       "    adamw, commit in place | P | 500 | 250\n"
                                       "gaps | 1.5 | 1.0 | guessed\n";

// 2 x 1500 us + 1000 us of products, of which the quickest take 1000 us less, and 3 x 250 us
// of AdamW, which is timed on a third of the parameters: 4.75 ms and 3.75 ms.
static const char *const times =
    "A GPU, 1 of them\n"
    "kernels at X, B 1, T 2, bf16; logits in chunks of 3 rows; vectors of 1000 elements\n"
    "product a, forward                     1500.0 us     1.0 TFLOP/s  10.0 %  (1.0 .. 2.0 us)\n"
    "product a, forward                     1000.0 us     1.0 TFLOP/s  10.0 %  (1.0 .. 2.0 us) tuned\n"
    "product b, d input                     1000.0 us     1.0 TFLOP/s  10.0 %  (1.0 .. 2.0 us)\n"
    "product b, d input                     1000.0 us     1.0 TFLOP/s  10.0 %  (1.0 .. 2.0 us) tuned\n"
    "adamw, commit in place                  250.0 us     1.0 GB/s     10.0 %  (1.0 .. 2.0 us)\n";

// Runs step-table with the two files and `arguments` in the stage.
static Outcome step_table(const char *kernels, const char *arguments, int exit_code) {
    stage_write(&stage, "predicted", predictions);
    stage_write(&stage, "kernels", kernels);
    Outcome outcome = program_run(&stage, 0, arguments);
    outcome_check(&outcome, exit_code, arguments);
    return outcome;
}

// The words of a table vary in the number of spaces between them.
static void check_line(const char *text, const char *expected) {
    char squeezed[16384];
    size_t length = 0;
    for (const char *at = text; *at != '\0' && length + 1 < sizeof squeezed; at++) {
        if (*at != ' ' || (length > 0 && squeezed[length - 1] != ' ')) { squeezed[length++] = *at; }
    }
    squeezed[length] = '\0';
    text_check(squeezed, expected, "step-table");
}

static void kernels_are_added_to_classes_and_to_a_step(void **state) {
    (void)state;
    const char *table = step_table(times, "predicted kernels 8", 0).output;
    check_line(table,
               "products 3 4.00 6.00 4.00 0.67 84.2 % by hand\n product a, forward 2 3.00 4.00 3.00 0.75\n");
    check_line(table, "AdamW 1 0.75 0.50 0.25 1.50 15.8 % 28 bytes\ngaps");
    check_line(table, "gaps 1.50 1.00 guessed\n");
    check_line(table, "all kernels 4.75 6.50 4.25 0.73\n");
    check_line(table, "with tuned products 3.75\n");
    check_line(table, "whole step 8.00 8.00 5.25 1.00\n beyond the kernels 3.25 1.50 1.00 2.17\n");
}

static void an_h200_has_predictions_of_its_own(void **state) {
    (void)state;
    char other[2048];
    snprintf(other, sizeof other, "NVIDIA H200, 1 of them\n%s", times);
    const char *table = step_table(other, "predicted kernels 8", 0).output;
    check_line(table, "products 3 4.00 6.00 4.00 1.00 84.2 % by hand\n");
    check_line(table, "whole step 8.00 8.00 5.25 1.52\n");
}

static void a_step_that_was_not_measured_is_left_out(void **state) {
    (void)state;
    const char *table = step_table(times, "predicted kernels -", 0).output;
    check_line(table, "all kernels 4.75 6.50 4.25 0.73\n");
    assert_null(strstr(table, "whole step"));
}

static void a_kernel_without_a_time_is_named(void **state) {
    (void)state;
    const char *end = strstr(times, "adamw");
    char most[1024];
    snprintf(most, sizeof most, "%.*s", (int)(end - times), times);
    const char *table = step_table(most, "predicted kernels 8", 1).output;
    check_line(table, "products 3 4.00 6.00 4.00 0.67 by hand\n");
    check_line(table, "AdamW 1 ? 0.50 0.25 28 bytes\n");
    check_line(table, "not measured: adamw, commit in place ");
    assert_null(strstr(table, "beyond the kernels"));
}

static void a_mistake_is_one_line(void **state) {
    (void)state;
    text_check(step_table(times, "predicted", 2).errors, "usage:", "one file");
    text_check(step_table(times, "predicted nowhere 8", 2).errors, "nowhere cannot be read", "no file");
}

// What a line "    kernel | launches" of the predictions says.
static double launches_of(const char *text, const char *kernel) {
    char line[128];
    snprintf(line, sizeof line, "\n    %s | ", kernel);
    const char *found = strstr(text, line);
    if (found == NULL) { fail_msg("no prediction of %s", kernel); }
    return atof(found + strlen(line));
}

static void the_predictions_are_of_this_model(void **state) {
    (void)state;
    static const char *const once_a_layer[] = {"product qkv, forward", "product out, d input",
                                               "product fc, d weight", "product proj, forward"};
    static const struct {
        const char *model, *shape, *activation, *norm;
    } models[] = {{"125M", "125M 32 1024", "gelu backward", "layernorm backward"},
                  {"llama-3.2-1B", "llama-3.2-1B 8 2048", "swiglu backward", "rmsnorm backward"},
                  {"qwen3-0.6B", "qwen3-0.6B 8 2048", "swiglu backward", "rmsnorm backward"}};
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        char table_path[STAGE_PATH_SIZE], *script = stage.binary;
        memcpy(table_path, script, sizeof table_path);
        snprintf(script, sizeof table_path, "%.400s/dev/gpu/predict", stage.root);
        const char *text = program_run(&stage, 0, models[m].shape).output;
        memcpy(script, table_path, sizeof table_path);
        ModelConfig config;
        Error error;
        assert_true(model_find(models[m].model, &config, &error));
        for (size_t i = 0; i < sizeof once_a_layer / sizeof once_a_layer[0]; i++) {
            assert_int_equal((int)launches_of(text, once_a_layer[i]), config.layers);
        }
        int local = 0;
        for (int l = 0; l < config.layers; l++) { local += config.local[l]; }
        if (local > 0) { assert_int_equal((int)launches_of(text, "attention backward, local"), local); }
        assert_int_equal((int)launches_of(text, "attention forward, global"), config.layers - local);
        assert_int_equal((int)launches_of(text, models[m].activation), config.layers);
        assert_int_equal((int)launches_of(text, models[m].norm), 2 * config.layers + 1);
        // No more than a sequence has tokens, as dev/gpu/bench trains GPT-Neo.
        if (config.rotary.theta == 0) { config.positions = 1024; }
        ParameterTable table;
        parameter_table_make(&config, &table);
        char parameters[64];
        snprintf(parameters, sizeof parameters, "\nparameters | %zu\n", table.parameter_count);
        text_check(text, parameters, "the number of parameters");
        parameter_table_free(&table);
    }
}

static int open_stage(void **state) {
    *state = &stage;
    char path[STAGE_PATH_SIZE];
    snprintf(path, sizeof path, "%.400s/dev/gpu/step-table", stage_variable("PROJECT_ROOT", "."));
    setenv("TRAIN_GPT", path, 1);
    stage_open(&stage);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        STAGE_TEST(stage, kernels_are_added_to_classes_and_to_a_step),
        STAGE_TEST(stage, an_h200_has_predictions_of_its_own),
        STAGE_TEST(stage, a_step_that_was_not_measured_is_left_out),
        STAGE_TEST(stage, a_kernel_without_a_time_is_named),
        STAGE_TEST(stage, a_mistake_is_one_line),
        STAGE_TEST(stage, the_predictions_are_of_this_model),
    };
    return cmocka_run_group_tests(tests, open_stage, stage_close_group);
}
