// fuzz_dataloader.h: files of tokens or text in every format: our own, llm.c's,
// nanoGPT's, bytes. The first byte of an input chooses the request
// (fuzz_dataloader_request), the rest is one or two files. Files that are accepted give
// tokens below the vocabulary in every window, and an epoch visits each window once.
#pragma once

#include "dataloader.h"
#include "test/fuzz/fuzz_token_file.h"

enum { FUZZ_DATALOADER_WINDOWS = 64, FUZZ_DATALOADER_LENGTH = 16 };

// Bit 0: text; bit 1: hold out; bits 2 and 3: the length of a window; bits 4 and 5: the
// vocabulary; bit 6: no tokenizer encodes texts; bit 7: documents must be divided.
static inline DataRequest fuzz_dataloader_request(uint8_t choice, const char *path) {
    static const int lengths[4] = {4, 1, 2, FUZZ_DATALOADER_LENGTH}, vocabularies[4] = {300, 256, 50257, 7};
    DataRequest request = {path,
                           lengths[choice >> 2 & 3],
                           vocabularies[choice >> 4 & 3],
                           5,
                           (choice & 2) != 0,
                           NULL,
                           (choice & 128) != 0,
                           (choice & 64) == 0};
    return request;
}

static inline void fuzz_dataloader_row(const DataLoader *loader, const int32_t *tokens,
                                       const int32_t *targets) {
    for (int t = 0; t < loader->sequence_length; t++) {
        fuzz_require(tokens[t] >= 0 && tokens[t] < loader->vocabulary, "every token is below the vocabulary");
        fuzz_require(targets[t] >= -1 && targets[t] < loader->vocabulary,
                     "every target is below the vocabulary, or masked");
        fuzz_require(t == 0 || targets[t - 1] == -1 || targets[t - 1] == tokens[t],
                     "a target is the next token");
    }
}

static inline void fuzz_dataloader_fill(const DataLoader *loader, uint64_t sample, bool validation) {
    int32_t tokens[FUZZ_DATALOADER_LENGTH], targets[FUZZ_DATALOADER_LENGTH];
    double perfect;
    Error error = {""};
    bool good = data_loader_fill(loader, validation ? DATA_VALIDATION : DATA_TRAINING, sample, 1, tokens,
                                 targets, &perfect, &error);
    fuzz_require(good, "what was checked at open can be read");
    fuzz_dataloader_row(loader, tokens, targets);
}

// Checked here because no sanitizer would: after the end of a mapped file its last page
// has zeros.
static inline void fuzz_dataloader_places(const DataLoader *loader) {
    for (int i = 0; i < loader->file_count; i++) {
        const TokenFile *file = &loader->files[i].content;
        const uint8_t *begin = (const uint8_t *)loader->files[i].mapping,
                      *end = begin + loader->files[i].bytes;
        uint64_t width = (uint64_t)file->token_bytes, count = file->token_count;
        bool inside =
            file->tokens >= begin && file->tokens <= end && count <= (uint64_t)(end - file->tokens) / width;
        fuzz_require(inside, "all tokens lie inside their file");
        inside = file->mask == NULL || (file->mask >= file->tokens + count * width &&
                                        (count + 7) / 8 <= (uint64_t)(end - file->mask));
        fuzz_require(inside, "the mask lies behind the tokens, inside the file");
    }
}

static inline void fuzz_dataloader_read(const DataLoader *loader) {
    uint64_t windows = loader->training_windows, visited = 0;
    fuzz_require(windows > 0, "there is something to train on");
    for (uint64_t i = 0; i < windows && i < FUZZ_DATALOADER_WINDOWS; i++) {
        uint64_t window = data_loader_window(loader, DATA_TRAINING, i);
        fuzz_require(window < windows, "the order stays among the windows");
        if (windows <= FUZZ_DATALOADER_WINDOWS) { visited |= UINT64_C(1) << window; }
        fuzz_dataloader_fill(loader, i, false);
    }
    fuzz_require(windows > FUZZ_DATALOADER_WINDOWS || visited == UINT64_MAX >> (64 - windows),
                 "an epoch visits every window");
    uint64_t held_out = data_loader_validation_samples(loader);
    for (uint64_t i = 0; i < held_out && i < FUZZ_DATALOADER_WINDOWS; i++) {
        fuzz_dataloader_fill(loader, held_out - 1 - i, true);
    }
}

static inline bool fuzz_dataloader_open(const DataRequest *request) {
    DataLoader loader;
    Error error = {""};
    char text[512];
    if (!fuzz_accepted(data_loader_open(&loader, request, &error), &error)) { return false; }
    fuzz_dataloader_places(&loader);
    if (request->encodes && data_loader_is_text(&loader)) {
        fuzz_require(loader.training_windows == 0, "a text has no windows before it is encoded");
    } else {
        fuzz_dataloader_read(&loader);
    }
    data_loader_describe(&loader, text, sizeof text);
    fuzz_accepted(data_loader_require(&loader, 2, 3, &error), &error);
    data_loader_close(&loader);
    return true;
}

static inline bool fuzz_dataloader(const uint8_t *data, size_t size) {
    FuzzPart parts[2];
    FuzzFolder folder;
    char path[600];
    if (size == 0) { return false; }
    bool text = (data[0] & 1) != 0;
    fuzz_split(data + 1, size - 1, parts, 2);
    fuzz_folder_open(&folder);
    for (int i = 0; i < 2; i++) {
        if (i > 0 && parts[i].size == 0) { continue; }
        uint8_t *sealed = fuzz_copy(parts[i]);
        FuzzPart part = {sealed, parts[i].size};
        fuzz_token_file_seal(sealed, part.size);
        fuzz_folder_add(&folder, text ? (i == 0 ? "a.txt" : "b.txt") : (i == 0 ? "a.bin" : "b.bin"), part);
        free(sealed);
    }
    snprintf(path, sizeof path, text ? "%s/*.txt" : "%s", folder.path);
    DataRequest request = fuzz_dataloader_request(data[0], path);
    bool good = fuzz_dataloader_open(&request);
    fuzz_folder_close(&folder);
    return good;
}
