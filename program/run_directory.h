// run_directory.h: which directory a run writes to, and that no other run writes there: at the same
// time, or, unless this run continues it, before. Rank 0 only.
#pragma once

#include <ctype.h>
#include <regex.h>
#include <sys/file.h>

#include "runtime/device.h"
#include "runtime/json_files.h"
#include "runtime/log.h"

#define RUN_DIRECTORY_HINT ": choose another with --out"

// The part of --model or --from that tells models apart, as a file name: "tiny", "gpt" of
// my/gpt or my/gpt/config.json, "a" of runs/a/checkpoints/commit-7/model.
static inline void run_directory_model_name(const char *model, char name[64]) {
    // The last part but for those that say where in a run or a model a file is, and not which.
    static const char last[] = "([^/]*)(/+(config\\.json|model|checkpoints|commit-[0-9]+))*/*$";
    regmatch_t match[2] = {{0, 0}, {0, 0}};
    regex_t pattern;
    if (regcomp(&pattern, last, REG_EXTENDED) == 0) {
        regexec(&pattern, model, 2, match, 0);
        regfree(&pattern);
    }
    const char *start = model + match[1].rm_so, *end = model + match[1].rm_eo;
    if (end - start > 5 && strncmp(end - 5, ".json", 5) == 0) { end -= 5; }
    int length = 0;
    for (; start < end && length < 63; start++) {
        bool plain = isalnum((unsigned char)*start) || *start == '.' || *start == '_';
        name[length++] = plain ? *start : '-';
    }
    name[length] = '\0';
    if (length == 0 || name[0] == '.') { strcpy(name, "model"); }
}

// False: the directory, which is locked, holds the log of a run, or a model, whose config.json the
// run's own would replace. resumes: a log may be there.
static inline bool run_directory_check_files(const char *directory, bool resumes, Error *error) {
    struct stat status;
    char log_path[RUN_PATH_SIZE + 16], path[RUN_PATH_SIZE + 16];
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", directory);
    snprintf(path, sizeof path, "%s/config.json", directory);
    json_t *config = json_file_load(path, 0, NULL);
    bool is_model = json_object_get(config, "model_type") != NULL;
    json_decref(config);
    if (is_model) {
        return error_set(error,
                         "--out %.400s holds a model, whose config.json would be replaced by that of the "
                         "run" RUN_DIRECTORY_HINT,
                         directory);
    }
    return resumes || lstat(log_path, &status) != 0 ||
           error_set(
               error,
               "--out %.400s already holds the log of a run: choose another directory, leave out --out, or "
               "continue that run with --resume auto",
               directory);
}

// Creates the directory of a run, with all its parents, and writes its path. out: --out;
// "auto": runs/MODEL-RULE-N with the first N that is free. model: options_model.
static inline bool run_directory_create(const char *out, const char *model, const char *rule,
                                        char path[RUN_PATH_SIZE], Error *error) {
    char name[64];
    run_directory_model_name(model, name);
    bool numbered = strcmp(out, "auto") == 0;
    if (numbered && !directory_make("runs", RUN_DIRECTORY_HINT, error)) { return false; }
    for (int number = 1; numbered; number++) {
        snprintf(path, RUN_PATH_SIZE, "runs/%s-%.64s-%d", name, rule, number);
        // mkdir decides which number is free: two runs started at once get two numbers.
        if (mkdir(path, 0777) == 0) { return true; }
        if (errno != EEXIST) { return directory_make(path, RUN_DIRECTORY_HINT, error); }
    }
    if (strlen(out) + 64 > RUN_PATH_SIZE) {
        return error_set(error, "--out is longer than %d characters", RUN_PATH_SIZE - 65);
    }
    if (!directory_make(out, RUN_DIRECTORY_HINT, error)) { return false; }
    snprintf(path, RUN_PATH_SIZE, "%s/.", out); // which a file does not have
    bool writable = faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) == 0;
    strcpy(path, out);
    return writable || error_set(error, "cannot write to the directory %.400s: %s" RUN_DIRECTORY_HINT, path,
                                 strerror(errno));
}

// Locks OUT/lock until this process ends, however it ends; the file names the process for whoever
// comes second. False: another run holds it. A file system without locks locks nothing.
static inline bool run_directory_lock(const char *directory, const char *host, Error *error) {
    char path[RUN_PATH_SIZE + 16], owner[128] = "";
    snprintf(path, sizeof path, "%.*s/lock", RUN_PATH_SIZE - 1, directory);
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666); // stays open
    if (descriptor >= 0 && flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        ssize_t length = read(descriptor, owner, sizeof owner - 1);
        owner[length > 0 ? length : 0] = '\0';
        close(descriptor);
        return error_set(error,
                         "--out %.300s is in use by another run: %s. Wait for it, stop it, or choose another "
                         "--out",
                         directory, owner);
    }
    // On a full disk the file stays empty, and is a lock all the same.
    bool named = descriptor >= 0 && ftruncate(descriptor, 0) == 0 &&
                 dprintf(descriptor, "process %d on %.64s", (int)getpid(), host) > 0;
    (void)named;
    return true;
}
