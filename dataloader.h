// dataloader.h: tokens in, batches out.
//
// Sources: the built-in corpus (corpus.h); plain text as bytes; our own shards of tokens
// (token_file.h), with a mask of what is to be predicted; nanoGPT's token files (".bin":
// uint16 ids and nothing else); llm.c's (a header of 256 int32 and uint16 or uint32 ids).
// One file, a directory of .bin files, or a glob; files are read in the order of their
// names and mapped read-only.
//
// A window is T inputs and, one further, T targets: window w of a file is tokens [w*T,
// w*T + T], so neighbours share one token and nothing is predicted twice; no window
// crosses from one file into the next. With hold_out the last 5 % of all windows (at
// least 1, at most 4096) are for validation and never trained on.
//
// Sample i of the training order is a pure function of (seed, epoch, index): epoch i / n
// of the n windows visits each once, in an order that a keyed permutation computes on the
// spot. Nothing is built, stored or exchanged; the position in the data is one number;
// rank r of N takes samples j*N + r, or any other split: the data of a step depend on the
// step alone, never on the number of ranks.
//
// Files that change while they are mapped are beyond us: a file that shrinks under a run
// ends it with SIGBUS.
#ifndef ACCO_DATALOADER_H
#define ACCO_DATALOADER_H

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/errors.h"
#include "runtime/files.h"
#include "runtime/random.h"
#include "tokenizer/corpus.h"
#include "tokenizer/token_file.h"

typedef struct DataRequest {
    const char *path;    // "builtin", a file, a directory of .bin files, or a glob
    int sequence_length; // T
    int vocabulary;      // of the model: every id must be below it
    uint64_t seed;
    bool hold_out; // keep the tail of a file source for validation
} DataRequest;

typedef struct DataFile {
    char *path;
    void *mapping;
    size_t bytes;          // of the mapping
    const uint8_t *tokens; // (token_count, token_bytes), little-endian
    const uint8_t
        *mask; // (token_count) bits, of a shard: 0 is read and not predicted; NULL: all are predicted
    const uint8_t *tokenizer_hash; // (SHARD_HASH_BYTES) of a shard; NULL: the file does not say
    int padded;                    // TokenFile::padded
    int token_bytes;               // 1: text, 2 or 4: token ids
    uint64_t token_count;
    uint64_t first_window; // windows in the files before this one
} DataFile;

typedef struct DataLoader {
    char name[256]; // the path as it was asked for, for messages
    bool builtin;   // endless, and no files
    DataFile *files;
    int file_count;
    int sequence_length, vocabulary;
    uint64_t seed;
    uint64_t training_windows, validation_windows; // 0 for the built-in corpus
    bool hold_out;                                 // false: validation reads all windows in order
} DataLoader;

enum {
    LLMC_HEADER_BYTES = 1024,
    LLMC_MAGIC_UINT16 = 20240520, // version 1, GPT-2 ids
    LLMC_MAGIC_UINT32 = 20240801, // version 7, Llama 3 ids
    HOLD_OUT_DIVISOR = 20,
    HOLD_OUT_MOST = 4096
};

#define DATA_SCAN_BYTES ((size_t)1 << 30) // token files are checked at open until this many bytes are read

// ------------------------------------------------------------------------------------------------------------------------ one file

static inline uint32_t data_token(const DataFile *file, uint64_t position) {
    if (file->token_bytes == 1) { return file->tokens[position]; }
    if (file->token_bytes == 2) { return ((const uint16_t *)(const void *)file->tokens)[position]; }
    return ((const uint32_t *)(const void *)file->tokens)[position];
}

static inline uint64_t data_file_windows(uint64_t token_count, int T) {
    return token_count > 0 ? (token_count - 1) / (uint64_t)T : 0;
}

static inline bool data_token_error(const DataFile *file, uint64_t position, int vocabulary, Error *error) {
    return error_set(error,
                     "%s: token %u at position %llu is beyond the model's vocabulary of %d; it was made for "
                     "another tokenizer",
                     file->path, data_token(file, position), (unsigned long long)position, vocabulary);
}

// Whether all ids are below the vocabulary. The maximum of a block vectorises; the
// position matters only when something is wrong.
static inline bool data_file_scan(const DataFile *file, int vocabulary, Error *error) {
    enum { BLOCK = 1 << 16 };
    for (uint64_t begin = 0; begin < file->token_count; begin += BLOCK) {
        uint64_t end = file->token_count - begin < BLOCK ? file->token_count : begin + BLOCK;
        uint32_t largest = 0;
        for (uint64_t i = begin; i < end; i++) {
            uint32_t id = data_token(file, i);
            largest = id > largest ? id : largest;
        }
        if (largest < (uint32_t)vocabulary) { continue; }
        while (data_token(file, begin) < (uint32_t)vocabulary) { begin++; }
        return data_token_error(file, begin, vocabulary, error);
    }
    return true;
}

static inline bool data_name_ends_with(const char *name, const char *ending) {
    size_t length = strlen(name), tail = strlen(ending);
    return length >= tail && strcmp(name + length - tail, ending) == 0;
}

// llm.c's files: the caller has seen that there is a whole header.
static inline bool data_file_read_header(DataFile *file, const int32_t *header, Error *error) {
    bool wide = header[0] == LLMC_MAGIC_UINT32;
    int32_t version = wide ? 7 : 1;
    if (header[1] != version) {
        return error_set(error,
                         "%s is a token file of llm.c in version %d, but only version %d can be read: write "
                         "it again with llm.c",
                         file->path, (int)header[1], (int)version);
    }
    file->token_bytes = wide ? 4 : 2;
    uint64_t body = file->bytes - LLMC_HEADER_BYTES;
    if (header[2] < 0 || (uint64_t)header[2] * (uint64_t)file->token_bytes != body) {
        return error_set(error,
                         "%s: the header promises %d tokens of %d bytes, but %llu bytes follow it: the file "
                         "is truncated or damaged",
                         file->path, (int)header[2], file->token_bytes, (unsigned long long)body);
    }
    file->tokens = (const uint8_t *)file->mapping + LLMC_HEADER_BYTES;
    file->token_count = (uint64_t)header[2];
    return true;
}

// llm.c marks its files with the date of their format, as a number. Read as uint16 ids
// that is 55013 to 56143, then 308, then a small one and 0: GPT-2 has no ids above 50256,
// so a nanoGPT file is not mistaken for one of these.
static inline bool data_looks_like_llmc(const int32_t *header) {
    return header[0] >= 20240101 && header[0] <= 20241231 && header[1] >= 0 && header[1] < 100;
}

// Our own files.
static inline bool data_file_read_shard(DataFile *file, int vocabulary, TokenFileCheck check, Error *error) {
    TokenFile shard;
    if (!token_file_open_memory(&shard, file->path, file->mapping, file->bytes, check, error)) {
        return false;
    }
    if (shard.vocabulary > (uint32_t)vocabulary) {
        return error_set(error,
                         "%s was made by a tokenizer of %u tokens, but the model has a vocabulary of %d: it "
                         "must have at least as many",
                         file->path, shard.vocabulary, vocabulary);
    }
    file->tokenizer_hash = (const uint8_t *)file->mapping + SHARD_HASH_AT;
    file->tokens = shard.tokens;
    file->mask = shard.mask;
    file->token_bytes = shard.token_bytes;
    file->token_count = shard.token_count;
    file->padded = shard.padded;
    return true;
}

// A sequence of another length would begin and end in the midst of documents, and see
// several.
static inline bool data_file_check_length(const DataFile *file, int T, Error *error) {
    if (file->padded == 0 || file->padded == T) { return true; }
    return error_set(error, "%s was padded to sequences of %d tokens, and these have %d: give --seq-len %d",
                     file->path, file->padded, T, file->padded);
}

// Recognises the format of a mapped file and fills tokens, mask, token_bytes and
// token_count.
static inline bool data_file_recognise(DataFile *file, int vocabulary, TokenFileCheck check, Error *error) {
    int32_t header[2] = {0, 0};
    if (token_file_recognise(file->mapping, file->bytes)) {
        return data_file_read_shard(file, vocabulary, check, error);
    }
    if (file->bytes >= sizeof header) { memcpy(header, file->mapping, sizeof header); }
    bool marked = header[0] == LLMC_MAGIC_UINT16 || header[0] == LLMC_MAGIC_UINT32;
    if (marked && file->bytes < LLMC_HEADER_BYTES) {
        return error_set(
            error,
            "%s is truncated: a token file of llm.c has a header of %d bytes, this file ends after %llu",
            file->path, (int)LLMC_HEADER_BYTES, (unsigned long long)file->bytes);
    }
    if (marked) { return data_file_read_header(file, (const int32_t *)file->mapping, error); }
    bool binary = data_name_ends_with(file->path, ".bin");
    if (binary && data_looks_like_llmc(header)) {
        return error_set(error,
                         "%s has llm.c's magic number %d, which is not that of a token file: that is %d "
                         "(uint16) or %d (uint32)",
                         file->path, (int)header[0], (int)LLMC_MAGIC_UINT16, (int)LLMC_MAGIC_UINT32);
    }
    if (binary && file->bytes % 2 != 0) {
        return error_set(error,
                         "%s has %llu bytes, an odd number, but .bin files hold uint16 ids: it is truncated, "
                         "or misnamed text",
                         file->path, (unsigned long long)file->bytes);
    }
    file->token_bytes = binary ? 2 : 1;
    file->tokens = (const uint8_t *)file->mapping;
    file->token_count = file->bytes / (uint64_t)file->token_bytes;
    return true;
}

// Maps file->path; on failure nothing stays mapped.
static inline bool data_file_map(DataFile *file, Error *error) {
    file->mapping = file_map(file->path, "data must be a file of text or token ids", &file->bytes, error);
    return file->mapping != NULL;
}

// -------------------------------------------------------------------------------------------------------------------- many files

static inline int data_compare_files(const void *a, const void *b) {
    return strcmp(((const DataFile *)a)->path, ((const DataFile *)b)->path);
}

// Takes over `path`, which may be NULL where memory ran out.
static inline bool data_loader_add(DataLoader *loader, char *path, Error *error) {
    DataFile *files =
        path != NULL ? (DataFile *)realloc(loader->files, ((size_t)loader->file_count + 1) * sizeof *files)
                     : NULL;
    if (files == NULL) {
        free(path);
        return error_set(error, "no memory for the list of data files");
    }
    loader->files = files;
    memset(&files[loader->file_count], 0, sizeof *files);
    files[loader->file_count++].path = path;
    return true;
}

static inline bool data_loader_list_directory(DataLoader *loader, const char *path, Error *error) {
    DIR *directory = opendir(path);
    if (directory == NULL) {
        return error_set(error, "cannot list the data directory %s: %s", path, strerror(errno));
    }
    bool good = true;
    for (struct dirent *entry; good && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.' || !data_name_ends_with(entry->d_name, ".bin")) { continue; }
        size_t length = strlen(path) + strlen(entry->d_name) + 2;
        char *name = (char *)malloc(length);
        if (name != NULL) {
            snprintf(name, length, "%s%s%s", path, data_name_ends_with(path, "/") ? "" : "/", entry->d_name);
        }
        good = data_loader_add(loader, name, error);
    }
    closedir(directory);
    if (good && loader->file_count == 0) {
        return error_set(
            error, "the directory %s holds no .bin file: name a text file, or a pattern such as '%s/*.txt'",
            path, path);
    }
    return good;
}

static inline bool data_loader_list_glob(DataLoader *loader, const char *path, Error *error) {
    glob_t matches;
    memset(&matches, 0, sizeof matches);
    int result = glob(path, GLOB_ERR, NULL, &matches);
    bool good = result == 0;
    for (size_t i = 0; good && i < matches.gl_pathc; i++) {
        good = data_loader_add(loader, strdup(matches.gl_pathv[i]), error);
    }
    globfree(&matches);
    if (result == 0) { return good; }
    if (result == GLOB_NOMATCH) {
        const char *what = strpbrk(path, "*?[") != NULL ? "no file matches the pattern" : "there is no file";
        return error_set(
            error,
            "%s '%s': allowed: builtin, a text file, a .bin token file, a directory of them, a pattern", what,
            path);
    }
    return error_set(error, "cannot look for data in '%s': %s", path,
                     result == GLOB_NOSPACE ? "no memory" : strerror(errno));
}

// Fills loader->files with the paths that the request names, sorted by bytes: the order
// is part of the data, a locale must not move it.
static inline bool data_loader_list(DataLoader *loader, const char *path, Error *error) {
    struct stat status;
    bool exists = stat(path, &status) == 0; // a name with brackets in it may be a plain file
    bool good = exists && S_ISDIR(status.st_mode) ? data_loader_list_directory(loader, path, error)
                : exists                          ? data_loader_add(loader, strdup(path), error)
                                                  : data_loader_list_glob(loader, path, error);
    if (good) { qsort(loader->files, (size_t)loader->file_count, sizeof *loader->files, data_compare_files); }
    return good;
}

// Maps, recognises and checks every listed file.
static inline bool data_loader_map(DataLoader *loader, Error *error) {
    size_t scanned = 0;
    for (int i = 0; i < loader->file_count; i++) {
        DataFile *file = &loader->files[i];
        if (!data_file_map(file, error)) { return false; }
        TokenFileCheck check =
            file->bytes <= DATA_SCAN_BYTES - scanned ? TOKEN_FILE_CHECK_ALL : TOKEN_FILE_CHECK_HEADER;
        if (!data_file_recognise(file, loader->vocabulary, check, error)) { return false; }
        const uint8_t *first = loader->files[0].tokenizer_hash;
        if (first != NULL && file->tokenizer_hash != NULL &&
            memcmp(first, file->tokenizer_hash, SHARD_HASH_BYTES) != 0) {
            return error_set(error, "%s and %s were made by different tokenizers: a run needs one",
                             loader->files[0].path, file->path);
        }
        if ((file->token_bytes == 1) != (loader->files[0].token_bytes == 1)) {
            return error_set(error, "%s and %s cannot be mixed: one is text, the other holds token ids",
                             loader->files[0].path, file->path);
        }
        if (file->token_bytes == 1 && loader->vocabulary < 256) {
            return error_set(error,
                             "%s is text, which is read as bytes and needs a vocabulary of at least 256, but "
                             "the model has %d",
                             file->path, loader->vocabulary);
        }
        if (file->token_bytes == 1 || check == TOKEN_FILE_CHECK_HEADER) { continue; }
        scanned += file->bytes;
        if (!data_file_scan(file, loader->vocabulary, error)) { return false; }
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------------- how many windows

static inline uint64_t data_loader_count_windows(const DataLoader *loader, int T) {
    uint64_t windows = 0;
    for (int i = 0; i < loader->file_count; i++) {
        windows += data_file_windows(loader->files[i].token_count, T);
    }
    return windows;
}

static inline uint64_t data_held_out(const DataLoader *loader, uint64_t windows) {
    if (!loader->hold_out || windows == 0) { return 0; }
    uint64_t share = windows / HOLD_OUT_DIVISOR;
    return share < 1 ? 1 : share > HOLD_OUT_MOST ? (uint64_t)HOLD_OUT_MOST : share;
}

// The longest sequence at which one epoch of training holds `samples`; 0 if none does.
// More T, fewer windows: bisection.
static inline int data_loader_longest_sequence(const DataLoader *loader, uint64_t samples) {
    int fits = 0, too_long = loader->sequence_length + 1;
    while (too_long - fits > 1) {
        int middle = fits + (too_long - fits) / 2;
        uint64_t windows = data_loader_count_windows(loader, middle);
        if (windows - data_held_out(loader, windows) >= samples) {
            fits = middle;
        } else {
            too_long = middle;
        }
    }
    return fits;
}

static inline bool data_loader_divide(DataLoader *loader, Error *error) {
    int T = loader->sequence_length;
    uint64_t windows = data_loader_count_windows(loader, T);
    for (int i = 1; i < loader->file_count; i++) {
        const DataFile *before = &loader->files[i - 1];
        loader->files[i].first_window = before->first_window + data_file_windows(before->token_count, T);
    }
    loader->validation_windows = data_held_out(loader, windows);
    loader->training_windows = windows - loader->validation_windows;
    if (loader->training_windows > 0) { return true; }
    int fits = data_loader_longest_sequence(loader, 1);
    char remedy[64] = "even --seq-len 1 does not fit";
    if (fits > 0) { snprintf(remedy, sizeof remedy, "lower --seq-len to at most %d", fits); }
    return error_set(error, "%s is too short: it holds %llu %s of %d tokens%s: %s", loader->name,
                     (unsigned long long)windows, windows == 1 ? "window" : "windows", T + 1,
                     windows > 0 ? ", and validation takes it" : "", remedy);
}

static inline void data_loader_close(DataLoader *loader) {
    for (int i = 0; i < loader->file_count; i++) {
        if (loader->files[i].mapping != NULL) { munmap(loader->files[i].mapping, loader->files[i].bytes); }
        free(loader->files[i].path);
    }
    free(loader->files);
    memset(loader, 0, sizeof *loader);
}

// Opens what request->path names; files are mapped, recognised, and their ids checked
// against the vocabulary (the first GiB of them; the rest when it is read). Afterwards
// the request may be forgotten. On failure there is nothing to close.
static inline bool data_loader_open(DataLoader *loader, const DataRequest *request, Error *error) {
    assert(request->sequence_length >= 1 && request->vocabulary >= 1);
    memset(loader, 0, sizeof *loader);
    snprintf(loader->name, sizeof loader->name, "%s", request->path);
    loader->sequence_length = request->sequence_length;
    loader->vocabulary = request->vocabulary;
    loader->seed = request->seed;
    loader->hold_out = request->hold_out;
    loader->builtin = strcmp(request->path, "builtin") == 0;
    if (loader->builtin) {
        if (loader->vocabulary >= 256) { return true; }
        return error_set(error,
                         "the built-in corpus is made of bytes and needs a vocabulary of at least 256, but "
                         "the model has %d",
                         loader->vocabulary);
    }
    bool good = data_loader_list(loader, request->path, error) && data_loader_map(loader, error) &&
                data_loader_divide(loader, error);
    if (!good) { data_loader_close(loader); }
    return good;
}

// Training windows; 0: endless.
static inline uint64_t data_loader_samples_per_epoch(const DataLoader *loader) {
    return loader->training_windows;
}

// Windows that data_loader_fill_validation visits before it begins again; 0: endless.
static inline uint64_t data_loader_validation_samples(const DataLoader *loader) {
    return loader->hold_out ? loader->validation_windows : loader->training_windows;
}

// Whether one epoch holds a micro-batch for every rank; if not, `error` says what would
// fit.
static inline bool data_loader_require(const DataLoader *loader, int ranks, int micro_batch, Error *error) {
    assert(ranks >= 1 && micro_batch >= 1);
    uint64_t have = loader->training_windows, need = (uint64_t)ranks * (uint64_t)micro_batch;
    if (loader->builtin || have >= need) { return true; }
    uint64_t batch = have / (uint64_t)ranks;
    int fits = data_loader_longest_sequence(loader, need);
    char held[64] = "", remedy[160];
    if (loader->hold_out) {
        snprintf(held, sizeof held, " (and %llu for validation)",
                 (unsigned long long)loader->validation_windows);
    }
    if (batch > 0 && fits > 0) {
        snprintf(remedy, sizeof remedy, "lower --micro-batch to %llu or --seq-len to %d",
                 (unsigned long long)batch, fits);
    } else if (batch > 0) {
        snprintf(remedy, sizeof remedy, "lower --micro-batch to %llu", (unsigned long long)batch);
    } else if (fits > 0) {
        snprintf(remedy, sizeof remedy, "lower --seq-len to %d, or start at most %llu ranks", fits,
                 (unsigned long long)have);
    } else {
        snprintf(remedy, sizeof remedy, "start at most %llu ranks, or give more data",
                 (unsigned long long)have);
    }
    return error_set(error,
                     "%s holds %llu windows of %d tokens%s, but %d ranks x --micro-batch %d need %llu: %s",
                     loader->name, (unsigned long long)have, loader->sequence_length + 1, held, ranks,
                     micro_batch, (unsigned long long)need, remedy);
}

// One line for the start of a run: what is read and how much of it there is.
static inline void data_loader_describe(const DataLoader *loader, char *text, size_t size) {
    if (loader->builtin) {
        double entropy = corpus_entropy(loader->sequence_length);
        snprintf(text, size, "built-in corpus, endless, bytes as tokens, entropy %.4f nats per byte",
                 entropy);
        return;
    }
    static const char *const kinds[5] = {"", "text as bytes", "uint16 ids", "", "uint32 ids"};
    uint64_t tokens = 0;
    for (int i = 0; i < loader->file_count; i++) { tokens += loader->files[i].token_count; }
    snprintf(text, size, "%s: %d %s, %s, %llu tokens, %llu windows of %d to train on, %llu held out",
             loader->name, loader->file_count, loader->file_count == 1 ? "file" : "files",
             kinds[loader->files[0].token_bytes], (unsigned long long)tokens,
             (unsigned long long)loader->training_windows, loader->sequence_length + 1,
             (unsigned long long)loader->validation_windows);
}

// --------------------------------------------------------------------------------------------------------------------- order and batches

// Where a keyed permutation of [0, n) sends `index`. A Feistel network is a bijection of
// the words of 2h bits whatever its round function; walking on until the word is below n
// makes it one of [0, n), in less than four steps on average because 4^h < 4n. Black and
// Rogaway, "Ciphers with arbitrary finite domains", 2002. Six rounds: four are enough for
// a large domain, small ones profit from more.
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

// The window that the training order visits at `sample`.
static inline uint64_t data_loader_window(const DataLoader *loader, uint64_t sample) {
    uint64_t n = loader->training_windows;
    return data_permute(random_hash(loader->seed, sample / n), n, sample % n);
}

// The file that window `window` lies in, and where in it, in tokens.
static inline const DataFile *data_loader_find(const DataLoader *loader, uint64_t window, uint64_t *start) {
    int low = 0, high = loader->file_count - 1; // the last file whose first window is not behind this one
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (loader->files[middle].first_window <= window) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const DataFile *file = &loader->files[low];
    *start = (window - file->first_window) * (uint64_t)loader->sequence_length;
    return file;
}

// Copies window `window` of the files: tokens (T), targets (T).
static inline bool data_loader_copy(const DataLoader *loader, uint64_t window, int32_t *tokens,
                                    int32_t *targets, Error *error) {
    int T = loader->sequence_length;
    uint64_t start;
    const DataFile *file = data_loader_find(loader, window, &start);
    assert(start + (uint64_t)T < file->token_count);
    uint32_t previous = data_token(file, start);
    if (previous >= (uint32_t)loader->vocabulary) {
        return data_token_error(file, start, loader->vocabulary, error);
    }
    for (int t = 0; t < T; t++) {
        uint64_t position = start + (uint64_t)t + 1;
        uint32_t next = data_token(file, position);
        if (next >= (uint32_t)loader->vocabulary) {
            return data_token_error(file, position, loader->vocabulary, error);
        }
        tokens[t] = (int32_t)previous;
        bool counts = file->mask == NULL || (file->mask[position / 8] >> (position % 8) & 1) != 0;
        targets[t] = counts ? (int32_t)next : -1;
        previous = next;
    }
    return true;
}

// A batch of the built-in corpus: windows first_sample .. first_sample+B-1 of the stream
// `seed`.
static inline bool data_fill_builtin(uint64_t seed, uint64_t first_sample, int B, int T, int32_t *tokens,
                                     int32_t *targets, double *perfect_loss, Error *error) {
    uint8_t *bytes = (uint8_t *)malloc((size_t)T + 1);
    if (bytes == NULL) { return error_set(error, "no memory for a window of %d bytes", T + 1); }
    double nats = 0.0;
    for (int b = 0; b < B; b++) {
        nats += corpus_fill(seed, first_sample + (uint64_t)b, T, bytes, NULL);
        for (int t = 0; t < T; t++) {
            tokens[(size_t)b * (size_t)T + (size_t)t] = bytes[t];
            targets[(size_t)b * (size_t)T + (size_t)t] = bytes[t + 1];
        }
    }
    free(bytes);
    *perfect_loss = nats / ((double)B * T);
    return true;
}

// Fills tokens (B, T) and targets (B, T) with samples first_sample .. first_sample+B-1 of
// the training order, which goes on from epoch to epoch. *perfect_loss: the mean loss
// that a perfect model would have on these targets, in nats per token; NaN where nobody
// knows. Safe from several threads on one loader. False: an id beyond the vocabulary, in
// a part of the data that was not checked at open.
static inline bool data_loader_fill(const DataLoader *loader, uint64_t first_sample, int B, int32_t *tokens,
                                    int32_t *targets, double *perfect_loss, Error *error) {
    int T = loader->sequence_length;
    if (loader->builtin) {
        return data_fill_builtin(random_hash(loader->seed, 0), first_sample, B, T, tokens, targets,
                                 perfect_loss, error);
    }
    *perfect_loss = NAN;
    for (int b = 0; b < B; b++) {
        size_t row = (size_t)b * (size_t)T;
        uint64_t window = data_loader_window(loader, first_sample + (uint64_t)b);
        if (!data_loader_copy(loader, window, tokens + row, targets + row, error)) { return false; }
    }
    return true;
}

// As data_loader_fill, of what is held out, in the order of the file, starting again
// behind the last one (data_loader_validation_samples tells which that is). Without
// hold_out: of all windows in the order of the files, for data that were opened to
// validate on. Of the built-in corpus: another stream.
static inline bool data_loader_fill_validation(const DataLoader *loader, uint64_t first_sample, int B,
                                               int32_t *tokens, int32_t *targets, double *perfect_loss,
                                               Error *error) {
    int T = loader->sequence_length;
    if (loader->builtin) {
        return data_fill_builtin(random_hash(loader->seed, 1), first_sample, B, T, tokens, targets,
                                 perfect_loss, error);
    }
    *perfect_loss = NAN;
    uint64_t first_window = loader->hold_out ? loader->training_windows : 0;
    for (int b = 0; b < B; b++) {
        size_t row = (size_t)b * (size_t)T;
        uint64_t window =
            first_window + (first_sample + (uint64_t)b) % data_loader_validation_samples(loader);
        if (!data_loader_copy(loader, window, tokens + row, targets + row, error)) { return false; }
    }
    return true;
}

#endif
