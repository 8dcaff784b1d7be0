// dataloader.h: token files in, batches of sequences out.
//
// A batch is inputs (B, T) and targets (B, T): targets[b, t] is the token that follows
// tokens[b, t], or -1 where a mask says that it is not to be predicted.
//
// Sources: the built-in corpus (tokenizer/corpus.h); plain text, one token a byte (for a model with
// a tokenizer, program/data.h makes a token file of it first); this program's own token files
// (tokenizer/token_file.h); nanoGPT's (".bin", uint16 ids and nothing else); llm.c's (a header of
// 256 int32, then uint16 or uint32 ids). Files are read in the order of their names.
//
// Window w of a file is its tokens from w * T on, T + 1 of them: the first T are the inputs, the
// last T the targets. The order of training is a pure function of the seed and of the index of the
// sample (data_loader_window; docs/data.md has it in Python): a run's position in its data is one
// number, and the samples of a step do not depend on how many ranks share them.
#pragma once

#include <glob.h>

#include "tokenizer/corpus.h"
#include "tokenizer/documents.h"
#include "tokenizer/text.h"
#include "tokenizer/token_file.h"

typedef struct DataRequest {
    const char *path;    // "builtin", a file, a directory of .bin files, a pattern; or such with weights
    int sequence_length; // T
    int vocabulary;      // of the model: every id must be below it
    uint64_t seed;
    bool hold_out;             // keep the last windows for validation
    const char *const *tokens; // of each source, which is a text: the token file to read instead; or NULL
    bool divides;              // token files must say which token divides their documents
    bool encodes;              // a tokenizer makes tokens of texts; otherwise their bytes are tokens
} DataRequest;

typedef struct DataFile {
    char *path;
    void *mapping;
    size_t bytes;          // of the mapping
    TokenFile content;     // token_bytes 1: text. Formats that say less leave the other members 0
    size_t first_window;   // windows in the files before this one
    struct stat opened;    // what the system said of the file
    size_t samples;        // of its bytes, by which it is known (data_sample_file)
    uint32_t sum, sum_now; // of them, when the data were identified and at the latest look
    bool is_gone;          // another file has the name now, or none; the mapping holds the old one
} DataFile;

enum { DATA_SOURCES_MOST = 8 };

typedef struct DataSource {
    char name[256]; // the path as it was asked for, for messages
    int first_file, file_count;
    uint64_t weight; // in millionths
    size_t first_window, training_windows;
    size_t validation_windows; // the last ones, or, if none are held out, all
} DataSource;

typedef struct DataLoader {
    char name[256];  // all of what was asked for, for messages
    bool builtin;    // endless, and no files
    DataFile *files; // of all sources, one after the other
    int file_count;
    DataSource sources[DATA_SOURCES_MOST];
    int source_count; // at least 1
    int sequence_length, vocabulary;
    uint64_t seed;
    size_t training_windows, validation_windows; // of all sources; 0 for the built-in corpus
    bool hold_out;                               // false: validation reads all windows in order
    uint32_t separator; // of all files, if documents are to be divided and it is known; else 0
} DataLoader;

// The weights of sources low .. high - 1 together.
static inline uint64_t data_loader_weights(const DataLoader *loader, int low, int high) {
    uint64_t sum = 0;
    for (int i = low; i < high; i++) { sum += loader->sources[i].weight; }
    return sum;
}

static inline double data_loader_share(const DataLoader *loader, int index) {
    return (double)loader->sources[index].weight /
           (double)data_loader_weights(loader, 0, loader->source_count);
}

// The built-in corpus takes its stream of this number.
typedef enum DataOrder { DATA_TRAINING = 0, DATA_VALIDATION = 1 } DataOrder;

enum {
    LLMC_HEADER_BYTES = 1024,
    LLMC_MAGIC_UINT16 = 20240520, // version 1, GPT-2 ids
    LLMC_MAGIC_UINT32 = 20240801, // version 7, Llama 3 ids
    LLMC_GPT2_END = 50256,        // begins each document of such GPT-2 ids
    HOLD_OUT_DIVISOR = 20,
    HOLD_OUT_MOST = 4096,
    DATA_SAMPLES = 64,   // of all files together
    DATA_SAMPLES_OF = 8, // but of each at least these; a file that is no larger is read whole
    DATA_SAMPLE_BYTES = 4096,
    DATA_IDENTITY_SIZE = 384
};

// At open, files are checked up to this many bytes; later ids when a batch uses them.
#define DATA_SCAN_BYTES ((size_t)1 << 30)

// ---- One file -------------------------------------------------------------------------

static inline bool data_token_error(const DataFile *file, size_t position, int vocabulary, Error *error) {
    return error_set(error,
                     "%s: token %u at position %zu is beyond the model's vocabulary of %d; it was made for "
                     "another tokenizer",
                     file->path, token_file_token(&file->content, position), position, vocabulary);
}

static inline bool data_file_scan(const DataFile *file, int vocabulary, Error *error) {
    for (size_t i = 0; i < file->content.token_count; i++) {
        if (token_file_token(&file->content, i) >= (uint32_t)vocabulary) {
            return data_token_error(file, i, vocabulary, error);
        }
    }
    return true;
}

// Maps file->path; on failure nothing stays mapped.
static inline bool data_file_map(DataFile *file, Error *error) {
    file->mapping = file_map(file->path, "data must be a file of text or token ids", &file->bytes, error);
    return file->mapping != NULL &&
           (stat(file->path, &file->opened) == 0 || error_set_file(error, "read", file->path));
}

// Whether windows of T tokens are the sequences to which the file's documents were padded; those
// of another length would cut documents and mix them.
static inline bool data_file_check_length(const DataFile *file, int T, Error *error) {
    int padded = file->content.padded;
    return padded == 0 || padded == T ||
           error_set(error, "%s was padded to sequences of %d tokens, and these have %d: give --seq-len %d",
                     file->path, padded, T, padded);
}

// Reads one of llm.c's token files, whose magic number has been recognised.
static inline bool data_file_read_llmc(DataFile *file, Error *error) {
    const int32_t *header = (const int32_t *)file->mapping; // magic, version, tokens
    TokenFile *content = &file->content;
    bool wide = header[0] == LLMC_MAGIC_UINT32;
    int32_t version = wide ? 7 : 1;
    if (header[1] != version) {
        return error_set(error,
                         "%s is a token file of llm.c in version %d, but only version %d can be read: write "
                         "it again with llm.c",
                         file->path, (int)header[1], (int)version);
    }
    content->token_bytes = wide ? 4 : 2;
    size_t body = file->bytes > LLMC_HEADER_BYTES ? file->bytes - LLMC_HEADER_BYTES : 0;
    if (body == 0 || header[2] < 0 || (size_t)header[2] * content->token_bytes != body) {
        return error_set(error,
                         "%s is truncated or damaged: its header promises %d tokens of %d bytes, and %zu "
                         "bytes follow",
                         file->path, (int)header[2], content->token_bytes, body);
    }
    content->tokens = (const uint8_t *)file->mapping + LLMC_HEADER_BYTES;
    content->token_count = (size_t)header[2];
    content->separator = wide ? 0 : LLMC_GPT2_END + 1;
    return true;
}

// The bits of an id in a file without a header: of four words of 16 bits, ids of 32 bits leave the
// second and the fourth 0, and ids of 64 bits also the third.
static inline int data_file_bits(const DataFile *file) {
    const uint16_t *ids = (const uint16_t *)file->mapping;
    size_t count = size_min(file->bytes / sizeof *ids, 4096) / 4 * 4;
    size_t used[4] = {0, 0, 0, 0}; // that are not 0, of each four
    for (size_t i = 0; i < count; i++) { used[i % 4] += ids[i] != 0; }
    bool wide = count >= 16 && used[0] > count / 8 && used[1] + used[3] == 0;
    return !wide ? 16 : used[2] > 0 ? 32 : 64;
}

// Recognises the format of a mapped file and fills in where its tokens are and how many.
// A file without a magic is uint16 ids if its name ends with .bin, and text otherwise.
static inline bool data_file_read(DataFile *file, int vocabulary, TokenFileCheck check, Error *error) {
    TokenFile *content = &file->content;
    if (token_file_recognise(file->mapping, file->bytes)) {
        return token_file_open(content, file->path, file->mapping, file->bytes, check, error) &&
               (content->vocabulary <= (uint32_t)vocabulary ||
                error_set(error,
                          "%s was made by a tokenizer of %u tokens, but the model has a vocabulary of %d: it "
                          "must have at least as many",
                          file->path, content->vocabulary, vocabulary));
    }
    int32_t header[2] = {0, 0};
    if (file->bytes >= sizeof header) { memcpy(header, file->mapping, sizeof header); }
    if (header[0] == LLMC_MAGIC_UINT16 || header[0] == LLMC_MAGIC_UINT32) {
        return data_file_read_llmc(file, error);
    }
    bool binary = text_format_has_ending(file->path, ".bin");
    if (binary && file->bytes % 2 != 0) {
        return error_set(error,
                         "%s has %zu bytes, an odd number, but .bin files hold uint16 ids: it is truncated, "
                         "or misnamed text",
                         file->path, file->bytes);
    }
    if (binary && data_file_bits(file) != 16) {
        return error_set(error, "%s looks like ids of %d bits; nanoGPT's files have 16: write them as uint16",
                         file->path, data_file_bits(file));
    }
    if (!binary && !text_format_check(file->path, file->mapping, file->bytes, error)) { return false; }
    size_t mark = binary ? 0 : utf8_mark(file->mapping, file->bytes);
    content->token_bytes = binary ? 2 : 1;
    content->tokens = (const uint8_t *)file->mapping + mark;
    content->token_count = (file->bytes - mark) / (size_t)content->token_bytes;
    return true;
}

// ---- Finding and opening the files ----------------------------------------------------

static inline int data_compare_files(const void *a, const void *b) {
    return strcmp(((const DataFile *)a)->path, ((const DataFile *)b)->path);
}

// Appends a file to the list, which then owns `path`, allocated.
static inline void data_loader_add(DataLoader *loader, char *path) {
    size_t bytes = ((size_t)loader->file_count + 1) * sizeof *loader->files;
    loader->files = (DataFile *)memory_grow(loader->files, bytes);
    memset(&loader->files[loader->file_count], 0, sizeof *loader->files);
    loader->files[loader->file_count++].path = path;
}

// The .bin files in a directory of that literal name. To be freed.
static inline char *data_directory_pattern(const char *path) {
    char *pattern = MEMORY_OF(char, 2 * strlen(path) + sizeof "/*.bin"), *end = pattern;
    for (const char *letter = path; *letter != '\0'; letter++) {
        if (strchr("*?[\\", *letter) != NULL) { *end++ = '\\'; }
        *end++ = *letter;
    }
    strcpy(end, text_format_has_ending(path, "/") ? "*.bin" : "/*.bin");
    return pattern;
}

// Adds to loader->files what `path` names, sorted by the bytes of their names: the
// order of the files is part of the data, so it must not depend on a locale.
static inline bool data_loader_list(DataLoader *loader, const char *path, Error *error) {
    struct stat status;
    bool exists = stat(path, &status) == 0; // first: a plain file may have brackets in its name
    bool directory = exists && S_ISDIR(status.st_mode);
    if (exists && !directory) {
        data_loader_add(loader, strdup(path));
        return true;
    }
    size_t first = (size_t)loader->file_count;
    glob_t matches = {0};
    char *pattern = directory ? data_directory_pattern(path) : strdup(path);
    int result = glob(pattern, GLOB_ERR, NULL, &matches);
    free(pattern);
    for (size_t i = 0; i < matches.gl_pathc && result == 0; i++) {
        data_loader_add(loader, strdup(matches.gl_pathv[i]));
    }
    globfree(&matches);
    if (result == 0) {
        size_t added = (size_t)loader->file_count - first;
        qsort(loader->files + first, added, sizeof *loader->files, data_compare_files);
        return true;
    }
    if (result != GLOB_NOMATCH) {
        return error_set(error, "cannot look for data in '%s': %s", path, strerror(errno));
    }
    if (directory) {
        return error_set(
            error, "the directory %s holds no .bin file: name a text file, or a pattern such as '%s/*.txt'",
            path, path);
    }
    const char *what = strpbrk(path, "*?[") != NULL ? "no file matches the pattern" : "there is no file";
    return error_set(
        error, "%s '%s': allowed: builtin, a text file, a .bin token file, a directory of them, a pattern",
        what, path);
}

// Divides request->path into sources, and lists their files. What exists, or matches
// files, is one source; otherwise commas divide, and a colon stands before each weight.
static inline bool data_loader_add_sources(DataLoader *loader, const DataRequest *request, Error *error) {
    struct stat status;
    glob_t matches = {0};
    const char *path = request->path;
    bool one = strpbrk(path, ",:") == NULL || stat(path, &status) == 0 || glob(path, 0, NULL, &matches) == 0;
    globfree(&matches);
    char *list = strdup(path), *rest = one ? NULL : list, *item = one ? list : strsep(&rest, ",");
    bool good = true;
    for (; good && item != NULL; item = strsep(&rest, ",")) {
        int index = loader->source_count++;
        char *colon = one ? NULL : strrchr(item, ':'), *end = item;
        double weight = colon != NULL && colon > item ? strtod(colon + 1, &end) : one ? 1 : 0;
        if (index == DATA_SOURCES_MOST) {
            good = error_set(error, "'%.300s' are more than %d sources", path, DATA_SOURCES_MOST);
        } else if (!(weight >= 1e-6 && weight <= 1e6) || (!one && *end != '\0')) {
            good =
                error_set(error,
                          "'%.300s' has no weight: '%.200s' is no file but a list of sources, and each needs "
                          "a weight from 0.000001 to 1000000 behind a colon, as in 'a.bin:0.7,b.bin:0.3'",
                          item, path);
        } else {
            DataSource *source = &loader->sources[index];
            if (colon != NULL) { *colon = '\0'; }
            snprintf(source->name, sizeof source->name, "%.255s", item);
            source->weight = (uint64_t)llround(1e6 * weight);
            source->first_file = loader->file_count;
            good = strcmp(item, "builtin") != 0 ||
                   error_set(error, "the built-in corpus cannot be mixed with files: 'builtin' stands alone");
            good = good &&
                   data_loader_list(loader, request->tokens == NULL ? item : request->tokens[index], error);
            source->file_count = loader->file_count - source->first_file;
        }
    }
    free(list);
    return good;
}

static inline bool data_loader_is_text(const DataLoader *loader) {
    return loader->builtin || loader->files[0].content.token_bytes == 1;
}

// Files as texts (count), for the caller to free.
static inline Text *data_files_texts(const DataFile *files, int count) {
    Text *texts = MEMORY_OF(Text, count);
    for (int i = 0; i < count; i++) {
        texts[i].bytes = files[i].content.tokens;
        texts[i].size = files[i].content.token_count;
    }
    return texts;
}

// The sum of the tokenizer that made the data; 0: the files do not say.
static inline uint32_t data_loader_tokenizer(const DataLoader *loader) {
    uint32_t sum = 0;
    for (int i = 0; i < loader->file_count && sum == 0; i++) { sum = loader->files[i].content.tokenizer; }
    return sum;
}

static inline bool data_file_is_same(const DataFile *a, const DataFile *b) {
    return a->opened.st_dev == b->opened.st_dev && a->opened.st_ino == b->opened.st_ino;
}

// Maps all listed files, checks their ids, and that they are of one kind and tokenizer.
static inline bool data_loader_map(DataLoader *loader, const DataRequest *request, Error *error) {
    size_t scanned = 0;
    const DataSource *source = loader->sources;
    for (int i = 0; i < loader->file_count; i++) {
        DataFile *file = &loader->files[i];
        const DataFile *first = &loader->files[0];
        if (!data_file_map(file, error)) { return false; }
        if (i == source->first_file + source->file_count) { source++; }
        // Texts of the same content have one token file, and are two sources all the same.
        for (int j = 0; j < source->first_file && request->tokens == NULL; j++) {
            if (!data_file_is_same(&loader->files[j], file)) { continue; }
            return error_set(error, "%.400s is in two sources: name it once, with the sum of their weights",
                             file->path);
        }
        TokenFileCheck check =
            file->bytes <= DATA_SCAN_BYTES - scanned ? TOKEN_FILE_CHECK_ALL : TOKEN_FILE_CHECK_HEADER;
        if (!data_file_read(file, loader->vocabulary, check, error)) { return false; }
        if (!token_sums_agree(data_loader_tokenizer(loader), file->content.tokenizer)) {
            return error_set(error,
                             "%s and the files before it were made by different tokenizers: a run needs one",
                             file->path);
        }
        if ((file->content.token_bytes == 1) != (first->content.token_bytes == 1)) {
            return error_set(error, "%s and %s cannot be mixed: one is text, the other holds token ids",
                             first->path, file->path);
        }
        if (file->content.token_bytes == 1) { continue; }
        loader->separator = request->divides ? first->content.separator : 0;
        if (request->divides && (loader->separator == 0 || file->content.separator != loader->separator)) {
            return error_set(error,
                             "%s does not say which token divides its documents%s. --attend document takes "
                             "files of tokenizer.prepare, except chats whose turns end with that token, "
                             "which --pad keeps apart; texts for a tokenizer; and llm.c's files of GPT-2",
                             file->path, file->content.separator == 0 ? "" : " as the file before it does");
        }
        if (check == TOKEN_FILE_CHECK_HEADER) { continue; }
        scanned += file->bytes;
        if (!data_file_scan(file, loader->vocabulary, error)) { return false; }
    }
    return true;
}

// ---- Windows --------------------------------------------------------------------------

// The file that window `window` lies in, and in *start its first token there.
static inline const DataFile *data_loader_find(const DataLoader *loader, uint64_t window, uint64_t *start) {
    const DataFile *file = &loader->files[loader->file_count - 1];
    while (file->first_window > window) { file--; }
    *start = (window - file->first_window) * (uint64_t)loader->sequence_length;
    return file;
}

// Whether one of the windows [first, first + count) has a token that no mask leaves out.
static inline bool data_loader_predicts(const DataLoader *loader, uint64_t first, uint64_t count) {
    for (uint64_t window = first, start; window < first + count; window++) {
        const uint8_t *mask = data_loader_find(loader, window, &start)->content.mask;
        for (int t = 1; t <= loader->sequence_length; t++) {
            if (token_mask_counts(mask, start + (uint64_t)t)) { return true; }
        }
    }
    return false;
}

// Divides the windows of each source into training and validation. An error: none to train on.
static inline bool data_loader_divide(DataLoader *loader, Error *error) {
    int T = loader->sequence_length;
    size_t all = 0;
    for (DataSource *source = loader->sources; source < loader->sources + loader->source_count; source++) {
        size_t tokens = 0, held = 0;
        source->first_window = all;
        for (int i = source->first_file; i < source->first_file + source->file_count; i++) {
            size_t count = loader->files[i].content.token_count;
            loader->files[i].first_window = all;
            tokens += count;
            all += count > 0 ? (count - 1) / (size_t)T : 0;
        }
        size_t windows = all - source->first_window;
        if (loader->hold_out) { held = size_min(size_max(windows / HOLD_OUT_DIVISOR, 1), HOLD_OUT_MOST); }
        if (windows <= held) {
            return error_set(error,
                             "%s is too short: of its %zu tokens %s takes %d at least, in one file: "
                             "lower --seq-len, or give more data",
                             source->name, tokens, held > 0 ? "training with a validation" : "a window",
                             (held > 0 ? 2 : 1) * T + 1);
        }
        source->training_windows = windows - held;
        source->validation_windows = loader->hold_out ? held : windows;
        loader->validation_windows += held;
        loader->training_windows += source->training_windows;
    }
    return true;
}

// Each source has something to predict, both to train on and to validate.
static inline bool data_loader_check_masks(const DataLoader *loader, Error *error) {
    for (const DataSource *source = loader->sources; source < loader->sources + loader->source_count;
         source++) {
        size_t begin = source->first_window, count = source->training_windows,
               held = loader->hold_out ? source->validation_windows : 0;
        bool learns = data_loader_predicts(loader, begin, count);
        if (learns && (held == 0 || data_loader_predicts(loader, begin + count, held))) { continue; }
        return error_set(
            error, "%s: masks leave out all that could be predicted in its %zu window%s of %d tokens%s",
            source->name, (learns ? held : count), plural(learns ? held : count), loader->sequence_length + 1,
            learns ? " for validation, the last ones: give --val-data, or --val-batches none" : "");
    }
    return true;
}

// ---- Opening and closing --------------------------------------------------------------

static inline void data_loader_close(DataLoader *loader) {
    for (int i = 0; i < loader->file_count; i++) {
        if (loader->files[i].mapping != NULL) { munmap(loader->files[i].mapping, loader->files[i].bytes); }
        free(loader->files[i].path);
    }
    free(loader->files);
    memset(loader, 0, sizeof *loader);
}

// What request->path names, ready for batches; of the ids the first GiB are checked. Texts that are
// still to be encoded get no windows yet. Keeps nothing of the request. On failure there is nothing
// to close.
static inline bool data_loader_open(DataLoader *loader, const DataRequest *request, Error *error) {
    assert(request->sequence_length >= 1 && request->vocabulary >= 1);
    memset(loader, 0, sizeof *loader);
    snprintf(loader->name, sizeof loader->name, "%.255s", request->path);
    loader->sequence_length = request->sequence_length;
    loader->vocabulary = request->vocabulary;
    loader->seed = request->seed;
    loader->hold_out = request->hold_out;
    loader->builtin = strcmp(request->path, "builtin") == 0;
    if (loader->builtin && loader->vocabulary < 256) {
        return error_set(error,
                         "the built-in corpus is made of bytes and needs a vocabulary of at least 256, but "
                         "the model has %d",
                         loader->vocabulary);
    }
    if (loader->builtin) { loader->sources[loader->source_count++].weight = 1; }
    bool good = loader->builtin ||
                (data_loader_add_sources(loader, request, error) && data_loader_map(loader, request, error));
    bool as_bytes = good && data_loader_is_text(loader) && !request->encodes;
    if (as_bytes && !loader->builtin && loader->vocabulary != 256) {
        good = error_set(error,
                         "%s is text, and the model has a vocabulary of %d: where that is 256, bytes are its "
                         "tokens; otherwise give --tokenizer DIR, or in its place 'PREFIX_train_*.bin', "
                         "which python -m tokenizer.prepare makes of it",
                         loader->files[0].path, loader->vocabulary);
    } else if (as_bytes && request->divides) {
        good = error_set(error,
                         "--attend document: %.300s is read as bytes, and no token divides its documents; "
                         "give token files, or a text and a --tokenizer",
                         loader->name);
    }
    bool waits = request->encodes && good && data_loader_is_text(loader);
    good = good && (loader->builtin || waits ||
                    (data_loader_divide(loader, error) && data_loader_check_masks(loader, error)));
    if (!good) { data_loader_close(loader); }
    return good;
}

// Whether one epoch has a micro-batch for every rank.
static inline bool data_loader_require(const DataLoader *loader, int ranks, int micro_batch, Error *error) {
    assert(ranks >= 1 && micro_batch >= 1);
    size_t have = loader->training_windows, need = (size_t)ranks * micro_batch;
    return loader->builtin || have >= need ||
           error_set(error,
                     "%s holds %zu window%s of %d tokens to train on, but %d rank%s x --micro-batch %d need "
                     "%zu: lower --micro-batch or --seq-len, %sor give more data",
                     loader->name, have, plural(have), loader->sequence_length + 1, ranks, plural(ranks),
                     micro_batch, need, ranks > 1 ? "start fewer ranks, " : "");
}

// One line for the start of a run: what is read and how much of it there is.
static inline void data_loader_describe(const DataLoader *loader, char *text, size_t size) {
    if (loader->builtin) {
        double entropy = corpus_entropy(loader->sequence_length);
        snprintf(text, size, "built-in corpus, endless, bytes as tokens, entropy %.3f nats per byte",
                 entropy);
        return;
    }
    static const char *const kinds[5] = {"", "text as bytes", "uint16 ids", "", "uint32 ids"};
    size_t tokens = 0;
    for (int i = 0; i < loader->file_count; i++) { tokens += loader->files[i].content.token_count; }
    snprintf(text, size, "%s: %d file%s, %s, %zu tokens, %zu window%s of %d to train on, %zu held out",
             loader->name, loader->file_count, plural(loader->file_count),
             kinds[loader->files[0].content.token_bytes], tokens, loader->training_windows,
             plural(loader->training_windows), loader->sequence_length + 1, loader->validation_windows);
}

// ---- Whether data are still the same --------------------------------------------------

// A CRC-32 of the file's size and of samples that are spread evenly over it. The first one holds
// the header of a token file, and so the checksum of all of its content.
static inline void data_sample_file(void *context) {
    DataFile *file = (DataFile *)context;
    uint64_t size = file->bytes;
    size_t samples = file->samples, length = DATA_SAMPLE_BYTES;
    uLong sum = crc32(0, (const Bytef *)&size, sizeof size);
    if (file->bytes <= samples * length) { samples = 1, length = file->bytes; }
    for (size_t i = 0; i < samples; i++) {
        size_t last = file->bytes - length, begin = i + 1 == samples ? last : last / (samples - 1) * i;
        sum = crc32(sum, (const Bytef *)file->mapping + begin, (uInt)length);
    }
    file->sum_now = (uint32_t)sum;
}

// What the data are, for a run that is resumed: "2 files, 5287668 bytes, samples 1f0c22ab"; of
// several sources also "; weights 1 files 0.7, 1 files 0.3". The names of files do not count, but
// their order does.
static inline void data_loader_identify(DataLoader *loader, char text[DATA_IDENTITY_SIZE]) {
    size_t bytes = 0;
    uLong all = crc32(0, NULL, 0);
    for (int i = 0; i < loader->file_count; i++) {
        DataFile *file = &loader->files[i];
        file->samples = size_max(DATA_SAMPLES / (size_t)loader->file_count, DATA_SAMPLES_OF);
        file_read_mapped(data_sample_file, file);
        file->sum = file->sum_now;
        bytes += file->bytes;
        all = crc32(all, (const Bytef *)&file->sum, sizeof file->sum);
    }
    snprintf(text, DATA_IDENTITY_SIZE, "%d file%s, %zu bytes, samples %08lx", loader->file_count,
             plural(loader->file_count), bytes, (unsigned long)all);
    for (int i = 0; i < loader->source_count && loader->source_count > 1; i++) {
        text_join(text, DATA_IDENTITY_SIZE, i == 0 ? "; weights " : ", ", "%d files %.15g",
                  loader->sources[i].file_count, data_loader_share(loader, i));
    }
    if (loader->builtin) { snprintf(text, DATA_IDENTITY_SIZE, "the built-in corpus"); }
}

// GONE: a file was removed or replaced, and what was opened is still read. CHANGED: one has other
// content, which was perhaps trained on.
typedef enum DataChange { DATA_SAME, DATA_GONE, DATA_CHANGED } DataChange;

// What has happened to the files since they were identified; *found: to the first of
// them. One that is gone is found once.
static inline DataChange data_loader_look(DataLoader *loader, const DataFile **found) {
    for (int i = 0; i < loader->file_count; i++) {
        DataFile *file = &loader->files[i];
        const struct stat *before = &file->opened;
        struct stat now;
        bool here =
            stat(file->path, &now) == 0 && now.st_ino == before->st_ino && now.st_dev == before->st_dev;
        bool same = !file->is_gone && here && now.st_size == before->st_size &&
                    file_changed_at(&now).tv_sec == file_changed_at(before).tv_sec &&
                    file_changed_at(&now).tv_nsec == file_changed_at(before).tv_nsec;
        *found = file;
        if (same) { continue; }
        bool cut = here && now.st_size != before->st_size;
        if (cut || !file_read_mapped(data_sample_file, file) || file->sum_now != file->sum) {
            return DATA_CHANGED;
        }
        if (here) {
            file->opened = now; // other rights, another time, or renamed and back again
        } else if (!file->is_gone) {
            file->is_gone = true;
            return DATA_GONE;
        }
    }
    return DATA_SAME;
}

// ---- Order ----------------------------------------------------------------------------

// Where the permutation of [0, n) that `key` names sends `index`. A Feistel network is a bijection
// of the words of 2h bits; applied until the word is below n, one of [0, n), in less than four
// applications on average, because 4^h < 4n. Black and Rogaway, "Ciphers with arbitrary finite
// domains", 2002. Four rounds would do for a large n; small ones profit from six.
static inline uint64_t data_permute(uint64_t key, uint64_t n, uint64_t index) {
    assert(index < n && n <= (UINT64_C(1) << 62));
    int half_bits = 1;
    while ((UINT64_C(1) << (2 * half_bits)) < n) { half_bits++; }
    uint64_t mask = (UINT64_C(1) << half_bits) - 1;
    do {
        uint64_t left = index >> half_bits, right = index & mask;
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t mixed = left ^ (random_hash(key + round, right) & mask);
            left = right;
            right = mixed;
        }
        index = left << half_bits | right;
    } while (index >= n);
    return index;
}

// The source that has sample *number; *number <- how many of the samples before it are of that
// source. `index`: the source to ask for instead, or -1. Halves of the sources share the samples by
// their weights, in exact integers, and so do halves of these. Each division adds less than one
// sample to the error: in a row of samples two sources have their shares to less than one, up to
// eight to less than three.
static inline int data_loader_source(const DataLoader *loader, int index, uint64_t *number) {
    int low = 0, high = loader->source_count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        unsigned __int128 below = data_loader_weights(loader, low, middle),
                          all = data_loader_weights(loader, low, high);
        uint64_t before = (uint64_t)(*number * below / all), after = (uint64_t)((*number + 1) * below / all);
        bool is_below = index < 0 ? after > before : index < middle;
        *number = is_below ? before : *number - before;
        *(is_below ? &high : &low) = middle;
    }
    return low;
}

// How many windows validation visits before it begins again; 0: endless.
static inline uint64_t data_loader_validation_samples(const DataLoader *loader) {
    return loader->hold_out ? loader->validation_windows : loader->training_windows;
}

// The window that is visited at `sample`. Validation visits what was held out, or all of its
// own data, source by source in the order of the files, and again from the beginning.
static inline uint64_t data_loader_window(const DataLoader *loader, DataOrder order, uint64_t sample) {
    const DataSource *source = loader->sources;
    if (order == DATA_TRAINING) {
        int index = data_loader_source(loader, -1, &sample);
        uint64_t n = source[index].training_windows, key = loader->seed + (uint64_t)index;
        return source[index].first_window + data_permute(random_hash(key, sample / n), n, sample % n);
    }
    sample %= data_loader_validation_samples(loader);
    for (; sample >= source->validation_windows; source++) { sample -= source->validation_windows; }
    return source->first_window + (loader->hold_out ? source->training_windows : 0) + sample;
}

// ---- Batches --------------------------------------------------------------------------

typedef struct WindowCopy {
    const DataFile *file;
    uint64_t start; // the first token
    int T, vocabulary;
    int32_t *tokens, *targets; // (T)
    int copied;                // tokens, of T + 1; the next one is beyond the vocabulary
} WindowCopy;

static inline void data_copy_window(void *context) {
    WindowCopy *copy = (WindowCopy *)context;
    int T = copy->T;
    for (copy->copied = 0; copy->copied <= T; copy->copied++) {
        int t = copy->copied;
        uint64_t position = copy->start + (uint64_t)t;
        uint32_t id = token_file_token(&copy->file->content, position);
        if (id >= (uint32_t)copy->vocabulary) { return; }
        if (t < T) { copy->tokens[t] = (int32_t)id; }
        bool counts = token_mask_counts(copy->file->content.mask, position);
        if (t > 0) { copy->targets[t - 1] = counts ? (int32_t)id : -1; }
    }
}

// Fills tokens (B, T) and targets (B, T) with B samples from first_sample on. *perfect_loss: of a
// perfect model on them, in nats per token; NaN for files. Any thread may call it. False: an id
// beyond the vocabulary, in data that were not checked at open, or a file that became shorter.
static inline bool data_loader_fill(const DataLoader *loader, DataOrder order, uint64_t first_sample, int B,
                                    int32_t *tokens, int32_t *targets, double *perfect_loss, Error *error) {
    int T = loader->sequence_length;
    double nats = 0.0;
    uint8_t *bytes = loader->builtin ? MEMORY_OF(uint8_t, T + 1) : NULL;
    bool good = true;
    for (int b = 0; good && b < B; b++) {
        uint64_t sample = first_sample + (uint64_t)b;
        int32_t *inputs = tokens + (size_t)b * T, *outputs = targets + (size_t)b * T; // (T)
        if (!loader->builtin) {
            WindowCopy copy = {
                .T = T, .vocabulary = loader->vocabulary, .tokens = inputs, .targets = outputs};
            copy.file = data_loader_find(loader, data_loader_window(loader, order, sample), &copy.start);
            assert(copy.start + (uint64_t)T < copy.file->content.token_count);
            if (!file_read_mapped(data_copy_window, &copy)) {
                good = error_set(error, "%s has become shorter while it was trained on", copy.file->path);
            } else if (copy.copied <= T) {
                uint64_t position = copy.start + (uint64_t)copy.copied;
                good = data_token_error(copy.file, position, loader->vocabulary, error);
            }
            continue;
        }
        nats += corpus_fill(random_hash(loader->seed, (uint64_t)order), sample, T, bytes, NULL);
        for (int t = 0; t < T; t++) {
            inputs[t] = bytes[t];
            outputs[t] = bytes[t + 1];
        }
    }
    free(bytes);
    *perfect_loss = loader->builtin ? nats / ((double)B * T) : NAN;
    return good;
}
