// ours.c: what test/llama_cpp/check.py compares llama.cpp with.
//
//     ours make CONFIG.json TOKENIZER DIR SEED    a random model, its norms and biases not at rest
//     ours run MODEL COUNT LOGITS < PROMPTS       a prompt (JSON) in each line; out a line of JSON:
//                                                 its tokens, COUNT that follow greedily, and, of the
//                                                 first LOGITS prompts, the logits behind the prompt
#include "evaluation/sample.h"
#include "program/training_problem.h"

static void give_up(const Error *error) {
    fprintf(stderr, "ours: %s\n", error->text);
    exit(1);
}

static void make(char **arguments) {
    Error error;
    ModelConfig config;
    ParameterTable table;
    Random random = {.state = strtoull(arguments[3], NULL, 10)};
    if (!model_config_load(arguments[0], &config, &error)) { give_up(&error); }
    parameter_table_make(&config, &table);
    float *parameters = (float *)memory_take(table.parameter_count, sizeof(float));
    for (int i = 0; i < table.count; i++) {
        const ParameterInfo *info = &table.entries[i];
        double width = info->is_matrix ? 2 / sqrt((double)info->columns) : 0.5;
        for (size_t j = 0; j < info->count; j++) {
            parameters[info->offset + j] =
                info->fill * !info->is_matrix + (float)(width * (2 * random_uniform(&random) - 1));
        }
    }
    if (!hf_model_save(arguments[2], &config, &table, parameters, arguments[1], NULL, NULL, &error)) {
        give_up(&error);
    }
    free(parameters);
    parameter_table_free(&table);
}

static json_t *numbers(const int32_t *ids, size_t count) {
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++) { json_array_append_new(list, json_integer(ids[i])); }
    return list;
}

static json_t *answer(Sample *sample, const char *prompt, int count, bool has_logits) {
    Error error;
    Sampling greedy = {.temperature = 0, .top_p = 1};
    TokenList tokens = {NULL, 0, 0}, follow = {NULL, 0, 0};
    json_t *logits = json_array();
    sample->sampler.length = 0;
    if (!text_codec_encode(&sample->codec, prompt, true, &tokens, &error)) { give_up(&error); }
    for (size_t i = 0; count > 0 && i < tokens.count; i++) {
        sampler_step(&sample->sampler, &sample->here, sample->parameters, tokens.ids[i]);
    }
    for (int v = 0; has_logits && v < sample->sampler.model.config.vocabulary; v++) {
        json_array_append_new(logits, json_real((double)sample->sampler.logits[v]));
    }
    for (int i = 0; i < count; i++) {
        token_list_add(&follow, sampler_choose(&sample->sampler, &greedy, &sample->random));
        sampler_step(&sample->sampler, &sample->here, sample->parameters, follow.ids[i]);
    }
    json_t *line = json_pack("{s:o, s:o, s:o}", "tokens", numbers(tokens.ids, tokens.count), "greedy",
                             numbers(follow.ids, follow.count), "logits", logits);
    token_list_free(&tokens);
    token_list_free(&follow);
    return line;
}

static void run(char **arguments) {
    Error error = {""};
    HfModel model;
    Options options;
    char line[65536];
    int count = atoi(arguments[1]), with_logits = atoi(arguments[2]);
    options_defaults(&options);
    snprintf(options.from, sizeof options.from, "%s", arguments[0]);
    Sample sample = {.options = &options, .commit = 0};
    if (!hf_model_open(&model, options.from, &error) ||
        !sample_open_codec(&sample, false, model.config.vocabulary, &error)) {
        give_up(&error);
    }
    float *parameters = (float *)memory_take(model.table.parameter_count, sizeof(float));
    hf_model_read(&model, parameters);
    sample.parameters = parameters;
    sample.here.pool = thread_pool_create(1, true);
    sampler_reserve(&sample.sampler, &sample.arena, &model.config, 1);
    if (!arena_commit(&sample.arena, &error)) { give_up(&error); }
    for (int i = 0; fgets(line, sizeof line, stdin) != NULL; i++) {
        json_t *prompt = json_loads(line, JSON_DECODE_ANY, NULL);
        json_t *out = answer(&sample, json_string_value(prompt), count, i < with_logits);
        json_dumpf(out, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
        printf("\n");
        json_decref(out);
        json_decref(prompt);
    }
    thread_pool_destroy(sample.here.pool);
    sample_close(&sample);
    hf_model_close(&model);
    free(parameters);
}

int main(int argc, char **argv) {
    bool makes = argc == 6 && strcmp(argv[1], "make") == 0, runs = argc == 5 && strcmp(argv[1], "run") == 0;
    if (makes) { make(argv + 2); }
    if (runs) { run(argv + 2); }
    return makes || runs ? 0 : 2;
}
