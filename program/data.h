// data.h: what a run trains and validates on, and what its tokens mean.
//
// A text for a model with a tokenizer is tokenized before training by rank 0, into a token
// file in the run's directory (tokenizer/tokenize.h), which all ranks read.
#pragma once

#include "checkpoint/hf_model.h"
#include "program/setup.h"
#include "tokenizer/text.h"
#include "tokenizer/tokenize.h"

enum { DATA_PATH_SIZE = RUN_PATH_SIZE + 64, TOKENIZER_PATH_SIZE = 2048 };

// The directory of the model in the checkpoint that --resume names; empty if there is none.
static inline void resumed_model(const Options *options, char path[TOKENIZER_PATH_SIZE]) {
    const char *from = strcmp(options->resume, "auto") == 0 ? options->out : options->resume;
    snprintf(path, TOKENIZER_PATH_SIZE, "%.1800s", strcmp(from, "off") == 0 ? "" : from);
    checkpoint_find(path, TOKENIZER_PATH_SIZE);
    if (path[0] != '\0') { strcat(path, "/model"); }
}

// The path of the tokenizer: --tokenizer, or the tokenizer.json of the model that the run starts
// from or resumes; empty if there is none.
static inline const char *tokenizer_path(const Options *options, char path[TOKENIZER_PATH_SIZE]) {
    char resumed[TOKENIZER_PATH_SIZE];
    snprintf(path, TOKENIZER_PATH_SIZE, "%.1900s", options->tokenizer);
    if (path[0] != '\0') { return path; }
    resumed_model(options, resumed);
    const char *models[2] = {options_start(options), resumed};
    for (int i = 0; i < 2; i++) {
        snprintf(path, TOKENIZER_PATH_SIZE, "%.1900s/tokenizer.json", models[i]);
        if (models[i][0] != '\0' && access(path, F_OK) == 0) { return path; }
    }
    path[0] = '\0';
    return path;
}

static inline bool has_validation_data(const Options *options) { return options->val_data[0] != '\0'; }

static inline DataLoader *validation_loader(Run *run) {
    return has_validation_data(&run->options) ? &run->validation_data : &run->data;
}

// Finds the files of --data or --val-data, and divides them into windows. tokens: NULL, or the
// token files of its sources. tokenizer: its path; empty if there is none.
static inline bool open_side(Run *run, bool validation, const char *const *tokens, const char *tokenizer,
                             Error *error) {
    const Options *options = &run->options;
    DataLoader *loader = validation ? &run->validation_data : &run->data;
    int vocabulary = run->config.vocabulary;
    bool has_tokenizer = tokenizer[0] != '\0', starts_fresh = options_start(options)[0] == '\0';
    DataRequest request = {
        .path = validation ? options->val_data : options->data,
        .sequence_length = run->T,
        .vocabulary = vocabulary,
        .seed = (uint64_t)options->seed,
        .hold_out = !validation && !has_validation_data(options) && options->val_batches > 0,
        .tokens = tokens,
        .divides = options->attend == ATTEND_DOCUMENT,
        .encodes = has_tokenizer,
    };
    if (!data_loader_open(loader, &request, error)) { return false; }
    bool builtin = loader->builtin;
    if (builtin && (has_tokenizer || (vocabulary != 256 && !starts_fresh))) {
        return error_set(error,
                         "the model reads the tokens of a tokenizer, and the built-in corpus is made of "
                         "bytes: name a text or token files with --%sdata",
                         validation ? "val-" : "");
    }
    for (int i = 0; i < loader->file_count; i++) {
        if (!data_file_check_length(&loader->files[i], run->T, error)) { return false; }
    }
    return true;
}

// Opens --data and --val-data. Errors may be this rank's alone.
static inline bool open_data(Run *run, Error *error) {
    const Options *options = &run->options;
    const DataLoader *data = &run->data, *held = &run->validation_data;
    char path[TOKENIZER_PATH_SIZE];
    const char *tokenizer = tokenizer_path(options, path);
    if (!open_side(run, false, NULL, tokenizer, error)) { return false; }
    bool divided = data->builtin || data->training_windows > 0, text = data_loader_is_text(data);
    if (divided && !data_loader_require(data, run->transport.size, run->B, error)) { return false; }
    if (options->prompt[0] != '\0' && !text && tokenizer[0] == '\0') {
        return error_set(error,
                         "--prompt needs data that are text, or a --tokenizer: %s holds token ids, and there "
                         "is no vocabulary here to turn the prompt into ids",
                         options->data);
    }
    if (!has_validation_data(options)) { return true; }
    if (!open_side(run, true, NULL, tokenizer, error)) { return false; }
    for (int i = 0; i < held->file_count; i++) {
        for (int j = 0; j < data->file_count; j++) {
            if (!data_file_is_same(&held->files[i], &data->files[j])) { continue; }
            return error_set(
                error,
                "--val-data has %.300s, which is among --data, too: leave --val-data away, and the "
                "end of --data is held out",
                held->files[i].path);
        }
    }
    if (tokenizer[0] == '\0' && text != data_loader_is_text(held)) {
        return error_set(error,
                         "--data %.300s %s, but --val-data %.300s %s: both must be of one kind, or the model "
                         "needs a --tokenizer for the text",
                         options->data, text ? "is read as bytes" : "holds token ids", options->val_data,
                         text ? "holds token ids" : "is read as bytes");
    }
    return token_sums_agree(data_loader_tokenizer(data), data_loader_tokenizer(held)) ||
           error_set(error, "--data %.300s and --val-data %.300s were made by different tokenizers",
                     options->data, options->val_data);
}

// On rank 0: checks that the tokenizer can be read, suits the data, and can encode the prompt, and
// that the model can read that. Otherwise a run would fail at this when it has finished.
static inline bool check_tokenizer(Run *run, Error *error) {
    const DataLoader *loaders[2] = {&run->data, validation_loader(run)};
    TextCodec codec;
    TokenList prompt = {NULL, 0, 0};
    char path[TOKENIZER_PATH_SIZE];
    if (!run_is_main(run)) { return true; }
    if (!text_codec_open(&codec, tokenizer_path(&run->options, path), data_loader_is_text(&run->data),
                         run->config.vocabulary, error)) {
        return false;
    }
    bool good = true;
    for (int i = 0; good && i < 2 && codec.kind == TEXT_CODEC_TOKENIZER; i++) {
        const DataLoader *loader = loaders[i];
        if (!token_sums_agree(data_loader_tokenizer(loader), codec.tokenizer.sum)) {
            good = error_set(error, "%.400s is not the tokenizer that made %.400s", path, loader->name);
        } else if (data_loader_is_text(loader) && text_codec_end(&codec) < 0) {
            good = error_set(error, "%.400s " TOKENIZER_NO_END " of %.400s", path, loader->name);
        }
    }
    good = good && text_codec_encode(&codec, run->options.prompt, true, &prompt, error);
    if (good && prompt.count > (size_t)run->config.positions) {
        good = error_set(error, "--prompt has %zu tokens, and the model %d positions: shorten it",
                         prompt.count, run->config.positions);
    }
    token_list_free(&prompt);
    text_codec_close(&codec);
    return good;
}

// ---- Texts for a tokenizer ------------------------------------------------------------

typedef struct Tokenizing {
    Terminal *terminal;
    double bytes; // in all
    double began; // clock_seconds()
} Tokenizing;

static inline void tokenizing_progress(void *context, int64_t bytes) {
    const Tokenizing *tokenizing = (const Tokenizing *)context;
    double now = clock_seconds();
    Progress progress = {"tokenizing, ",          "bytes",      bytes, (int64_t)tokenizing->bytes,
                         now - tokenizing->began, QUIET_SECONDS};
    terminal_bar(tokenizing->terminal, &progress, now);
}

// Makes the token file of a source's texts in `directory`, unless it is there; path <- that.
static inline bool make_token_file(const DataLoader *loader, const DataSource *source, const char *directory,
                                   const Tokenizer *tokenizer, ThreadPool *pool, Terminal *terminal,
                                   char path[DATA_PATH_SIZE], Error *error) {
    char name[TEXTS_NAME_SIZE], total[NUMBER_TEXT_SIZE];
    int count = source->file_count;
    Tokenizing tokenizing = {terminal, 0, clock_seconds()};
    Text *texts = data_files_texts(loader->files + source->first_file, count);
    for (int i = 0; i < count; i++) { tokenizing.bytes += texts[i].size; }
    bool good = true;
    texts_name(texts, count, tokenizer, name);
    snprintf(path, DATA_PATH_SIZE, "%s/%s", directory, name);
    TokenFile file;
    Error ignored;
    size_t size = 0;
    void *bytes = file_map(path, "a token file", &size, &ignored);
    bool whole = bytes != NULL && token_file_open(&file, path, bytes, size, TOKEN_FILE_CHECK_ALL, &ignored) &&
                 file.tokenizer == tokenizer->sum;
    if (bytes != NULL) { munmap(bytes, size); }
    if (whole) {
        printf("tokens     %s, made before: text and tokenizer are the same\n", path);
    } else {
        printf("tokenizing %s: %.1f MB, with %d thread%s\n", source->name, tokenizing.bytes / 1e6,
               pool->threads, plural(pool->threads));
        fflush(stdout);
        TokenShards made = {.name = path, .progress = tokenizing_progress, .context = &tokenizing};
        good = tokenize_texts(&made, texts, count, tokenizer, pool, error);
        terminal_clear(terminal);
        if (good) {
            printf("tokens     %s: %s tokens of %llu document%s, made in %.1f s%s\n", path,
                   human_count(made.tokens[SHARDS_TRAIN], total), (unsigned long long)made.documents,
                   plural(made.documents), clock_seconds() - tokenizing.began,
                   made.documents == 1 ? "; no line <|endoftext|> divides the text" : "");
            token_shards_tell(&made, "tokens     ");
        }
    }
    fflush(stdout);
    free(texts);
    return good;
}

typedef char TokenPaths[DATA_SOURCES_MOST][DATA_PATH_SIZE];

// Rank 0: makes the token files of --data and --val-data, where these are texts for a tokenizer.
// paths: of the sources of both; empty where no file is needed. False: the system failed.
static inline bool make_token_files(Run *run, TokenPaths paths[2], Error *error) {
    const DataLoader *loaders[2] = {&run->data, &run->validation_data};
    int sides = has_validation_data(&run->options) ? 2 : 1;
    char path[TOKENIZER_PATH_SIZE], model[TOKENIZER_PATH_SIZE], from[PATH_MAX], to[PATH_MAX];
    Tokenizer tokenizer;
    if (tokenizer_path(&run->options, path)[0] == '\0') { return true; }
    resumed_model(&run->options, model);
    snprintf(from, sizeof from, "%s/tokenizer.json", model);
    if (model[0] != '\0' && strcmp(path, from) == 0) {
        // Only the checkpoint that the run resumes has the tokenizer, and it may be removed: later
        // checkpoints take a copy. Its config.json may be what names the end of a text.
        snprintf(run->tokenizer, sizeof run->tokenizer, "%s/tokenizer", run->directory);
        run->checkpointed.tokenizer = run->tokenizer;
        if (!directory_make(run->tokenizer, "", error) || !path_within(from, model, "config.json", error) ||
            !path_within(to, run->tokenizer, "config.json", error) || !hf_model_copy_file(from, to, error) ||
            !hf_model_copy_tokenizer(model, run->tokenizer, error)) {
            return false;
        }
    }
    if (!tokenizer_open(&tokenizer, path, error)) { return false; }
    ThreadPool *pool = thread_pool_create(run->threads.threads, false);
    bool good = true;
    for (int i = 0; good && i < sides; i++) {
        int sources = data_loader_is_text(loaders[i]) ? loaders[i]->source_count : 0;
        for (int k = 0; good && k < sources; k++) {
            good = make_token_file(loaders[i], &loaders[i]->sources[k], run->directory, &tokenizer, pool,
                                   &run->terminal, paths[i][k], error);
        }
    }
    thread_pool_destroy(pool);
    tokenizer_close(&tokenizer);
    return good;
}

// All ranks, once the run has a directory: gives texts for a tokenizer their tokens. Only here
// can it turn out that such data are too short.
static inline void tokenize_data(Run *run) {
    Transport *transport = &run->transport;
    TokenPaths paths[2] = {{""}, {""}};
    Error error = {""};
    bool good = !run_is_main(run) || make_token_files(run, paths, &error);
    wait_for_rank_zero(&run->transport, "tokenizing");
    agree_or_exit(run, good, EXIT_SYSTEM_FAILURE, &error);
    share_from_rank_zero(&run->transport, "sharing", paths, sizeof paths);
    for (int i = 0; good && i < 2; i++) {
        const char *tokens[DATA_SOURCES_MOST];
        if (paths[i][0][0] == '\0') { continue; }
        data_loader_close(i == 0 ? &run->data : &run->validation_data);
        for (int k = 0; k < DATA_SOURCES_MOST && good; k++) {
            tokens[k] = paths[i][k];
            good = tokens[k][0] == '\0' || access(tokens[k], R_OK) == 0 ||
                   error_set(&error,
                             "rank 0 has made %.400s, which is not here: let --out be in a directory that "
                             "all hosts share, or give token files (python -m tokenizer.prepare)",
                             tokens[k]);
        }
        good = good && open_side(run, i == 1, tokens, "", &error);
    }
    if (good && has_validation_data(&run->options) && run->data.separator != run->validation_data.separator) {
        good = error_set(&error,
                         "--attend document: other tokens divide the documents of --data and --val-data");
    }
    good = good && data_loader_require(&run->data, transport->size, run->B, &error) &&
           choose_length(run, &error);
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    char identities[2][DATA_IDENTITY_SIZE] = {"", ""}, first[2][DATA_IDENTITY_SIZE];
    data_loader_identify(&run->data, identities[0]);
    data_loader_identify(&run->validation_data, identities[1]);
    memcpy(first, identities, sizeof first);
    share_from_rank_zero(transport, "data", first, sizeof first);
    for (int i = 0; i < 2 && good; i++) {
        if (strcmp(identities[i], first[i]) == 0) { continue; }
        good =
            error_set(&error, "rank %d reads other data in %s than rank 0: %s instead of %s", transport->rank,
                      i == 0 ? run->data.name : run->validation_data.name, identities[i], first[i]);
    }
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    memcpy(run->data_identity, identities[0], sizeof run->data_identity);
    choose_schedule(&run->options, run->transport.size, &run->scheduler.settings);
}

// Looks whether the files are what they were: rank 0 at every report, all ranks before a
// checkpoint and at the end. One that was removed or replaced is named once, because the
// run still reads it. If the content of one has changed, the run saves itself and ends.
static inline void watch_data(Run *run) {
    static const char *const uses[2] = {"trained on it: commits", "validated on it: validations"};
    DataLoader *loaders[2] = {&run->data, &run->validation_data};
    for (int i = 0; i < 2 && !error_is_set(&run->training.lost); i++) {
        const DataFile *file;
        DataChange change;
        while ((change = data_loader_look(loaders[i], &file)) == DATA_GONE) {
            if (!run_is_main(run)) { continue; }
            terminal_clear(&run->terminal);
            printf("data       %s was removed or replaced: this run still reads the old file; a resumed run "
                   "would not\n",
                   file->path);
            fflush(stdout);
            report_event(&run->reports,
                         json_pack("{s:s, s:o}", "event", "data_gone", "file", log_text(file->path)));
        }
        if (change == DATA_SAME) { continue; }
        run->training.data_changed |= i == 0;
        Error error;
        error_set(&error, "%s was changed while the run %s since the last %s may have read its new content",
                  file->path, uses[i], run_is_main(run) ? "report" : "checkpoint");
        training_lose_data(&run->training, &error);
    }
}

// Micro-batches of a source in one validation: --val-batches, or what visits every window once.
static inline int64_t validation_batches(Run *run, int source) {
    uint64_t windows = validation_loader(run)->sources[source].validation_windows;
    uint64_t B = run->B, asked = run->options.val_batches;
    return windows == 0 ? asked : size_min(asked, (windows + B - 1) / B);
}
