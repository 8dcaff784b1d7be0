// run_directory.h: which directory a run writes to, and what it is called.
//
// Two runs never write into the same directory, unless the second goes on with the first.
// `--out auto` takes the next free number below runs/; a directory that the user names
// must not hold the log of another run.
#ifndef ACCO_PROGRAM_RUN_DIRECTORY_H
#define ACCO_PROGRAM_RUN_DIRECTORY_H

#include "runtime/log.h"

// mkdir -p.
static inline bool run_directory_make(const char *path, Error *error) {
    char partial[RUN_PATH_SIZE];
    size_t length = strlen(path);
    assert(length < sizeof partial);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') { continue; }
        memcpy(partial, path, i);
        partial[i] = '\0';
        if (mkdir(partial, 0777) != 0 && errno != EEXIST) {
            return error_set(error, "cannot create the directory %.400s: %s: choose another with --out",
                             partial, strerror(errno));
        }
    }
    return true;
}

// Whether this part of a path says where in a run or a model a file is, and not which.
static inline bool run_directory_is_inner(const char *part, size_t length) {
    static const char *const inner[] = {"config.json", "model", "checkpoints"};
    size_t digits = length > 7 && strncmp(part, "commit-", 7) == 0 ? strspn(part + 7, "0123456789") : 0;
    bool found = digits > 0 && digits + 7 == length;
    for (int i = 0; i < 3; i++) {
        found = found || (strlen(inner[i]) == length && strncmp(part, inner[i], length) == 0);
    }
    return found;
}

// The part of --model or --from that tells models apart, as a file name: "tiny" stays
// "tiny", my/gpt and my/gpt/config.json give "gpt", other.json gives "other", and
// runs/a/checkpoints/commit-7/model gives "a".
static inline void run_directory_model_name(const char *model, char name[64]) {
    const char *end = model + strlen(model), *start;
    for (;;) {
        while (end > model && end[-1] == '/') { end--; }
        start = end;
        while (start > model && start[-1] != '/') { start--; }
        if (start == model || !run_directory_is_inner(start, (size_t)(end - start))) { break; }
        end = start;
    }
    if (end - start > 5 && strncmp(end - 5, ".json", 5) == 0) { end -= 5; }
    int length = 0;
    for (; start < end && length < 63; start++) {
        unsigned char c = (unsigned char)*start;
        bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' ||
                     c == '_';
        name[length++] = plain ? (char)c : '-';
    }
    name[length] = '\0';
    if (length == 0 || name[0] == '.') { strcpy(name, "model"); }
}

static inline bool run_directory_create_numbered(const char *model, const char *rule,
                                                 char path[RUN_PATH_SIZE], Error *error) {
    char name[64];
    run_directory_model_name(model, name);
    if (!run_directory_make("runs", error)) { return false; }
    for (int number = 1; number < 1000000; number++) {
        snprintf(path, RUN_PATH_SIZE, "runs/%s-%.64s-%d", name, rule, number);
        // mkdir decides which number is free: two runs started at once get two numbers.
        if (mkdir(path, 0777) == 0) { return true; }
        if (errno != EEXIST) {
            return error_set(error, "cannot create the directory %.400s: %s: choose another with --out", path,
                             strerror(errno));
        }
    }
    return error_set(error, "runs/%s-%.64s-1 and so on are all taken: choose a directory with --out", name,
                     rule);
}

// Creates the directory of a run, with all its parents, and writes its path.
//   out       --out; "auto": runs/MODEL-RULE-N with the first N that is free
//   model     options_model
//   resumes   the directory may hold the log of an earlier part of this run
// Errors: the directory holds another run's log.jsonl, cannot be created, cannot be
// written to, or is not a directory.
static inline bool run_directory_create(const char *out, const char *model, const char *rule, bool resumes,
                                        char path[RUN_PATH_SIZE], Error *error) {
    if (strcmp(out, "auto") == 0) { return run_directory_create_numbered(model, rule, path, error); }
    if (strlen(out) + 64 > RUN_PATH_SIZE) {
        return error_set(error, "--out is longer than %d characters", RUN_PATH_SIZE - 65);
    }
    strcpy(path, out);
    struct stat status;
    char log_path[RUN_PATH_SIZE + 16];
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", out);
    if (stat(path, &status) == 0 && !S_ISDIR(status.st_mode)) {
        return error_set(error, "--out %.400s is not a directory", path);
    }
    if (!resumes && lstat(log_path, &status) == 0) {
        return error_set(error,
                         "--out %.400s already holds the log of a run: choose another directory, leave out "
                         "--out, or continue that run with --resume auto",
                         path);
    }
    if (!run_directory_make(path, error)) { return false; }
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) != 0) {
        return error_set(error, "cannot write to the directory %.400s: %s: choose another with --out", path,
                         strerror(errno));
    }
    return true;
}

#endif
