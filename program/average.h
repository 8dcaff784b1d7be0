// average.h: train_gpt average, the mean of the last checkpoints' weights as a model.
//
//     train_gpt average --from RUN --last 5 --out DIR
//
// With a constant or a slowly falling rate weights swing around a mean that is often better than
// any of them (stochastic weight averaging, arXiv 1803.05407). One process, on the host.
#pragma once

#include <regex.h>

#include "program/agreement.h"

// Whether `path` is FOLDER/commit-N/model, and which.
static inline bool average_find(const char *path, char folder[PATH_MAX], int64_t *commit) {
    regmatch_t match[3];
    regex_t pattern;
    if (regcomp(&pattern, "^(.*/)?commit-([0-9]+)/+model/*$", REG_EXTENDED) != 0) { return false; }
    bool found = regexec(&pattern, path, 3, match, 0) == 0;
    regfree(&pattern);
    if (!found) { return false; }
    int length = (int)match[1].rm_eo - 1; // without its slash; -2: it is the present directory
    snprintf(folder, PATH_MAX, "%.*s", length < 0 ? 1 : length, length < 0 ? "." : path);
    *commit = strtoll(path + match[2].rm_so, NULL, 10);
    return true;
}

// options->from: the model in a run's newest checkpoint (find_models), or in the one that
// was asked for: it and those before it are averaged.
static inline int command_average(const Options *options) {
    Error error = {""};
    HfModel first = {.files = NULL}, model; // the first names the parameters
    char folder[PATH_MAX], path[PATH_MAX + 64];
    int64_t count = 0, commit;
    if (!average_find(options->from, folder, &commit) || strcmp(options->out, "auto") == 0) {
        error_set(&error, "average needs --from RUN, a run with checkpoints, and --out DIR for the model");
        exit_user_mistake(&error);
    }
    // A name that cannot be made is not noticed after minutes of reading.
    bool good = (mkdir(options->out, 0777) == 0 && rmdir(options->out) == 0) ||
                error_set_file(&error, "create the directory", options->out);
    good = good && hf_model_open(&first, options->from, &error);
    size_t parameters = first.table.parameter_count;
    float *mean = MEMORY_OF(float, parameters), *values = MEMORY_OF(float, parameters);
    for (; count < options->last && good && commit >= 0; count += good) {
        snprintf(path, sizeof path, "%s/commit-%lld/model", folder, (long long)commit);
        HfModel *source = count == 0 ? &first : &model;
        good = count == 0 || hf_model_open(source, path, &error);
        if (!good) { break; }
        good = source->table.parameter_count == parameters ||
               error_set(&error, "%.300s is another model than the others", path);
        if (good) { hf_model_read(source, values); }
        if (count > 0) { hf_model_close(source); }
        for (size_t i = 0; i < parameters; i++) { mean[i] += (values[i] - mean[i]) / (float)(count + 1); }
        if (good) { printf("averaged   %s\n", path); }
        commit = checkpoint_newest_in(folder, commit);
    }
    if (good && count < options->last) {
        good = error_set(&error,
                         "--last %lld: %.300s has %lld checkpoint%s up to there (--keep says how many stay)",
                         (long long)options->last, folder, (long long)count, plural(count));
    }
    bool written = good && hf_model_save(options->out, &first.config, &first.table, mean, options->from, NULL,
                                         NULL, &error);
    if (good && !written) { tree_remove(options->out); }
    free(mean);
    free(values);
    if (!written) { exit_alone(good ? EXIT_SYSTEM_FAILURE : EXIT_USER_MISTAKE, &error); }
    printf("model      %s; eval, sample and --from take it\n", options->out);
    hf_model_close(&first);
    return 0;
}
