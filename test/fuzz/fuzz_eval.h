// fuzz_eval.h: data to evaluate on: the JSON lines of LAMBADA and HellaSwag, text and
// token files. The first byte of an input chooses the request (fuzz_evaluate_request),
// the rest is the file. A file that is accepted becomes sequences that lie inside it and
// fit a batch.
#pragma once

#include "evaluation/eval_tasks.h"
#include "test/fuzz/fuzz_text.h"

// Bits 0 and 1: the task; bit 2: with a tokenizer; bit 3: a longer context; bit 4: a
// limit; bit 5: windows side by side.
static inline EvaluateRequest fuzz_evaluate_request(uint8_t choice, const char *path,
                                                    const Tokenizer *tokenizer) {
    static const EvaluateTask tasks[4] = {EVALUATE_LAMBADA, EVALUATE_HELLASWAG, EVALUATE_PERPLEXITY,
                                          EVALUATE_LAMBADA};
    EvaluateRequest request;
    memset(&request, 0, sizeof request);
    request.task = tasks[choice & 3];
    request.path = path;
    request.tokenizer = (choice & 4) != 0 ? tokenizer : NULL;
    request.vocabulary = request.tokenizer != NULL ? tokenizer->vocabulary : 256;
    request.B = 2;
    request.T = (choice & 8) != 0 ? 64 : 12;
    request.limit = (choice & 16) != 0 ? 2 : 0;
    request.stride = (choice & 32) != 0 ? request.T : 0;
    return request;
}

static inline void fuzz_evaluate_sequence(const EvaluateSet *set, const EvaluateSequence *sequence) {
    fuzz_require(sequence->file >= 0 && sequence->file < set->data.file_count, "a sequence is of a file");
    const DataFile *file = &set->data.files[sequence->file];
    uint64_t count = file->content.token_count, length = (uint64_t)sequence->length;
    fuzz_require(sequence->length >= 2 && sequence->length <= set->request.T + 1,
                 "a sequence fits the context");
    fuzz_require(sequence->scored >= 1 && sequence->scored < sequence->length,
                 "something is predicted, from something");
    fuzz_require(sequence->begin <= count && length <= count - sequence->begin,
                 "a sequence lies inside its file");
    for (uint64_t i = sequence->begin; i < sequence->begin + length; i++) {
        fuzz_require(token_file_token(&file->content, i) < (uint32_t)set->request.vocabulary,
                     "every token is below the vocabulary");
    }
}

static inline void fuzz_evaluate_batches(const EvaluateSet *set) {
    size_t most = (size_t)set->request.B * (size_t)set->request.T;
    fuzz_require(set->starts[0] == 0 && set->starts[set->batch_count] == set->count,
                 "batches hold all sequences");
    for (size_t batch = 0; batch < set->batch_count; batch++) {
        size_t rows = set->starts[batch + 1] - set->starts[batch];
        size_t longest = (size_t)evaluate_sequence(set, batch, 0)->length - 1;
        fuzz_require(rows >= 1 && rows <= EVALUATE_MOST_ROWS && rows * longest <= most,
                     "a batch fits its buffers");
        for (size_t row = 1; row < rows; row++) {
            fuzz_require((size_t)evaluate_sequence(set, batch, row)->length - 1 <= longest,
                         "the first of a batch is its longest");
        }
    }
}

static inline void fuzz_evaluate_questions(const EvaluateSet *set) {
    size_t questions = 0;
    for (size_t i = 0; i < set->count; i++) {
        const EvaluateSequence *first = &set->sequences[i];
        if (first->choices == 0) { continue; }
        fuzz_require(first->label >= 0 && first->label < first->choices, "the right choice is one of them");
        fuzz_require(i + (size_t)first->choices <= set->count, "every choice has a sequence");
        questions++;
    }
    fuzz_require(questions == set->questions, "every line has its first sequence");
}

static inline bool fuzz_eval(const uint8_t *data, size_t size) {
    EvaluateSet set;
    FuzzFile file;
    Error error = {""};
    if (size == 0) { return false; }
    FuzzPart part = {data + 1, size - 1};
    fuzz_file_open(&file, part);
    EvaluateRequest request = fuzz_evaluate_request(data[0], file.path, fuzz_text_tokenizer());
    bool good = fuzz_accepted(evaluate_set_open(&set, &request, &error), &error);
    if (good) {
        for (size_t i = 0; i < set.count; i++) { fuzz_evaluate_sequence(&set, &set.sequences[i]); }
        fuzz_evaluate_questions(&set);
        fuzz_evaluate_batches(&set);
        evaluate_set_close(&set);
    }
    fuzz_file_close(&file);
    return good;
}
