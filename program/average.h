// average.h: train_gpt average, the mean of the last checkpoints' weights as a model.
//
//     train_gpt average --from RUN --last 5 --out DIR
//
// With a constant or a slowly falling rate weights swing around a mean that is often better than
// any of them (stochastic weight averaging, arXiv 1803.05407). One process, on the host.
#ifndef ACCO_PROGRAM_AVERAGE_H
#define ACCO_PROGRAM_AVERAGE_H

#include "program/agreement.h"

// mean (table.parameter_count) <- the mean of itself, which is that of `count` models, and the one in
// the directory `model`. The first one allocates it, and opens *first. False with an error.
static inline bool average_add(HfModel *first, float **mean, int64_t count, const char *model, Error *error) {
    HfModel other;
    HfModel *opened = count == 0 ? first : &other;
    if (!hf_model_open(opened, model, error)) { return false; }
    size_t parameters = opened->table.parameter_count;
    bool same = parameters == first->table.parameter_count;
    float *values = (float *)memory_take(parameters, sizeof(float));
    if (count == 0) { *mean = (float *)memory_take(parameters, sizeof(float)); }
    if (same) { hf_model_read(opened, values); }
    for (size_t i = 0; i < parameters && same; i++) {
        (*mean)[i] += (values[i] - (*mean)[i]) / (float)(count + 1);
    }
    free(values);
    if (count > 0) { hf_model_close(&other); }
    return same || error_set(error, "%.300s is another model than the others", model);
}

// options->from: the model in a run's newest checkpoint (find_models), or in the one that
// was asked for: it and those before it are averaged.
static inline int command_average(const Options *options) {
    Error error = {""};
    HfModel first = {.files = NULL};
    float *mean = NULL;
    char folder[PATH_MAX], model[PATH_MAX + 64];
    const char *name = strstr(options->from, "/commit-"); // RUN/checkpoints/commit-N/model
    for (const char *next = name; next != NULL; next = strstr(next + 1, "/commit-")) { name = next; }
    if (name == NULL || strcmp(options->out, "auto") == 0) {
        error_set(&error, "average needs --from RUN, a run with checkpoints, and --out DIR for the model");
        exit_user_mistake(&error);
    }
    snprintf(folder, sizeof folder, "%.*s", (int)(name - options->from), options->from);
    int64_t count = 0, commit = strtoll(name + strlen("/commit-"), NULL, 10);
    // A name that cannot be made is not noticed after minutes of reading.
    bool good = (mkdir(options->out, 0777) == 0 && rmdir(options->out) == 0) ||
                error_set(&error, "cannot create the directory %.300s: %s", options->out, strerror(errno));
    for (; count < options->last && good && commit >= 0; count += good) {
        snprintf(model, sizeof model, "%s/commit-%lld/model", folder, (long long)commit);
        good = average_add(&first, &mean, count, model, &error);
        if (good) { printf("averaged   %s\n", model); }
        commit = checkpoint_newest_in(folder, commit);
    }
    if (good && count < options->last) {
        good = error_set(&error,
                         "--last %lld: %.300s has %lld checkpoint%s up to there (--keep says how many stay)",
                         (long long)options->last, folder, (long long)count, plural(count));
    }
    if (good &&
        !hf_model_save(options->out, &first.config, &first.table, mean, options->from, NULL, NULL, &error)) {
        tree_remove(options->out);
        good = false;
    }
    if (!good) { exit_user_mistake(&error); }
    printf("model      %s; eval, sample and --from take it\n", options->out);
    free(mean);
    hf_model_close(&first);
    return 0;
}

#endif
