// eval_tasks.h: reads the data of an evaluation into sequences of tokens to score.
//
//   perplexity   windows of T tokens, one every S tokens. Each token counts once, in the first
//                window that contains it, so at least T - S tokens precede it there. The first
//                token of a file, with S = T of every window, is not predicted and does not count.
//                This is the method of Hugging Face's guide to the perplexity of fixed-length
//                models. A text becomes the tokens that a model with a tokenizer is trained on.
//   lambada      JSON lines {"text"}: the last word, with the space before it, is
//                predicted from all that precedes it.
//   hellaswag    JSON lines as in the data set (ctx_a, ctx_b, activity_label, endings,
//                label): each ending is predicted from the context. A line that has "ctx"
//                and no "ctx_a" is taken as prepared, and its texts are not cleaned.
//
// The last two are defined as in EleutherAI's lm-evaluation-harness (lambada_openai, hellaswag), so
// the numbers can be compared. Context and continuation are encoded together; if the context by
// itself has n tokens, those behind the first n are predicted. Spaces at the end of the context
// belong to the continuation. A sequence that is too long loses its beginning. One difference
// remains: capital and small letters are PCRE2's, which maps one character to one.
#pragma once

#include "dataloader.h"
#include "tokenizer/tokenize.h"

enum {
    EVALUATE_MOST_ROWS = 64,   // sequences of a batch
    EVALUATE_MOST_CHOICES = 64 // HellaSwag has four
};

typedef enum EvaluateTask { EVALUATE_PERPLEXITY, EVALUATE_LAMBADA, EVALUATE_HELLASWAG } EvaluateTask;

typedef struct EvaluateRequest {
    EvaluateTask task;
    const char *path;           // perplexity: what dataloader.h reads, except for the built-in corpus
    const Tokenizer *tokenizer; // NULL: a token is a byte; otherwise it must live as long as the set
    int vocabulary;             // of the model: every token must be below it
    int B, T;                   // a batch is as large as B sequences of T tokens, or of T inputs (below)
    int stride;                 // S of perplexity, 1 to T; 0: T / 2
    int64_t limit;              // windows or lines that are read, from the first; 0: all
    bool divides;               // perplexity: attention stays inside documents
} EvaluateRequest;

// The most tokens of a sequence that the model reads: not the last one of a window, and those in
// front of the last one of a line.
static inline int evaluate_inputs(const EvaluateRequest *request) {
    return request->task == EVALUATE_PERPLEXITY ? request->T - 1 : request->T;
}

// Tokens [begin, begin + length) of a file; the last `scored` of them are predicted. The
// inputs of the model are all but the last.
typedef struct EvaluateSequence {
    uint64_t begin;
    int file, length, scored;
    int characters; // hellaswag: of the ending
    // Lambada and hellaswag, in the first sequence of a line: how many choices it has, each a
    // sequence, and which one is right; 0: this is another choice, or a window.
    int choices, label;
} EvaluateSequence;

// All sequences of a task and their batches, on every rank.
typedef struct EvaluateSet {
    EvaluateRequest request;
    DataLoader data; // the files
    TokenList text;  // the tokens of files that are text for a tokenizer; then the first file has them all
    EvaluateSequence *sequences;
    size_t count, capacity;
    size_t questions;               // lines of lambada or hellaswag
    const EvaluateSequence **order; // (count) the longest first
    size_t *starts; // (batch_count + 1) batch b is order[starts[b]] up to order[starts[b + 1]]
    size_t batch_count;
} EvaluateSet;

// The characters that Python's str.strip removes.
#define EVALUATE_SPACE "[\\x1C-\\x1F" TOKENIZER_SPACE "]"

// A text as printf writes it, for the caller to free.
PRINTF_LIKE(1, 2) static inline char *evaluate_format(const char *format, ...) {
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    va_list values;
    va_start(values, format);
    vfprintf(file, format, values);
    va_end(values);
    fclose(file);
    return text;
}

// Replaces everything in *text, valid UTF-8 of malloc, that matches the pattern.
static inline void evaluate_replace(char **text, const char *pattern, const char *replacement) {
    int code = 0;
    size_t count = strlen(*text);
    PCRE2_SIZE offset = 0, size = 3 * count + 16; // one byte becomes three at most when its case changes
    char *result = (char *)memory_take(size, 1);
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code, &offset, NULL);
    int found =
        pcre2_substitute(compiled, (PCRE2_SPTR)*text, count, 0,
                         PCRE2_NO_UTF_CHECK | PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_EXTENDED, NULL, NULL,
                         (PCRE2_SPTR)replacement, PCRE2_ZERO_TERMINATED, (PCRE2_UCHAR *)result, &size);
    if (found < 0) { failure_report("PCRE2 has no room to clean a text"); }
    pcre2_code_free(compiled);
    free(*text);
    *text = result;
}

// Prepares HellaSwag's texts, which still have marks of the web pages that they come from.
static inline void evaluate_clean(char **text) {
    evaluate_replace(text, "\\A" EVALUATE_SPACE "+|" EVALUATE_SPACE "+\\z", "");
    evaluate_replace(text, " \\[title\\]", ". ");
    evaluate_replace(text, "\\[[^]\\n]*+]", ""); // everything else in brackets on one line
    evaluate_replace(text, "  ", " ");
}

// As Python's str.capitalize: the first character becomes a capital, the others small.
static inline void evaluate_capitalise(char **text) {
    evaluate_replace(text, "(?s)\\A(.)(.*)\\z", "\\u${1}\\L${2}");
}

// ---- Adding sequences -----------------------------------------------------------------

// Appends the tokens of a text, behind the one that begins a text. The text of a special token,
// such as <|endoftext|>, stands for the token, as it does in the harness.
static inline bool evaluate_encode(EvaluateSet *set, const char *text, size_t count, Error *error) {
    if (set->request.tokenizer != NULL) {
        tokenizer_begin_text(set->request.tokenizer, text, &set->text);
        return tokenizer_encode(set->request.tokenizer, text, count, true, &set->text, error);
    }
    for (size_t i = 0; i < count; i++) { token_list_add(&set->text, (uint8_t)text[i]); }
    return true;
}

static inline bool evaluate_take_text(EvaluateSet *set, Error *error) {
    DataFile *data = &set->data.files[0];
    data->content.tokens = (const uint8_t *)set->text.ids;
    data->content.token_bytes = 4;
    data->content.token_count = set->text.count;
    return data_file_scan(data, set->request.vocabulary, error);
}

static inline void evaluate_add_sequence(EvaluateSet *set, int file, uint64_t begin, uint64_t length,
                                         uint64_t scored, int characters) {
    EvaluateSequence sequence = {begin, file, (int)length, (int)scored, characters, 0, 0};
    list_reserve((void **)&set->sequences, set->count, &set->capacity, 1, sizeof *set->sequences);
    set->sequences[set->count++] = sequence;
}

// The latest `choices` sequences are one line's.
static inline void evaluate_add_question(EvaluateSet *set, int choices, int label) {
    EvaluateSequence *first = &set->sequences[set->count - choices];
    first->choices = choices;
    first->label = label;
    set->questions++;
}

// ---- Perplexity -----------------------------------------------------------------------

// The texts of all files become the tokens that tokenize_texts makes of them.
static inline bool evaluate_read_texts(EvaluateSet *set, Error *error) {
    const Tokenizer *tokenizer = set->request.tokenizer;
    int32_t end_of_text = tokenizer->end;
    if (end_of_text < 0) { return error_set(error, "the tokenizer " TOKENIZER_NO_END " of a text"); }
    Text *texts = data_files_texts(set->data.files, set->data.file_count);
    TextCursor cursor = {.texts = texts, .count = set->data.file_count};
    int32_t front = encode_front(tokenizer, false);
    size_t begin = 0; // of the document, behind the token in front of it
    bool good = true;
    for (DocumentPart part; good && text_next_part(&cursor, &part);) {
        if (part.begins && front >= 0) { token_list_add(&set->text, front); }
        if (part.begins) { begin = set->text.count; }
        good = encode_text(tokenizer, &part, (const char *)part.bytes, part.count, &set->text, error);
        bool is_empty = set->text.count == begin;
        if (part.ends && !is_empty) { token_list_add(&set->text, end_of_text); }
        if (part.ends && is_empty) { set->text.count -= front >= 0; }
    }
    free(texts);
    set->data.separator = (uint32_t)(front >= 0 ? front : end_of_text) + 1;
    return good && evaluate_take_text(set, error);
}

static inline bool evaluate_read_file(EvaluateSet *set, int file, Error *error) {
    const EvaluateRequest *request = &set->request;
    DataFile *data = &set->data.files[file];
    if (request->tokenizer != NULL && !token_sums_agree(data->content.tokenizer, request->tokenizer->sum)) {
        return error_set(error, "%.300s was made with another tokenizer than the one that is given",
                         data->path);
    }
    // The windows of a padded file are its documents: another length makes no sense.
    int padded = data->content.padded;
    if (padded != 0 && (padded != request->T || request->stride != request->T)) {
        return error_set(error, "%.300s was padded to sequences of %d tokens: give --seq-len %d --stride %d",
                         data->path, padded, padded, padded);
    }
    uint64_t T = request->T, count = data->content.token_count,
             stride = request->stride > 0 ? request->stride : request->T / 2,
             counted = 0; // the end of what earlier windows have counted
    for (uint64_t begin = 0; counted < count; begin += stride) {
        if (request->limit > 0 && set->count >= (uint64_t)request->limit) { break; }
        uint64_t end = count - begin < T ? count : begin + T, from = counted > begin ? counted : begin + 1;
        if (end > from) { evaluate_add_sequence(set, file, begin, end - begin, end - from, 0); }
        counted = end;
    }
    return true;
}

static inline bool evaluate_read_files(EvaluateSet *set, Error *error) {
    const EvaluateRequest *request = &set->request;
    // A sequence length of 1: no file is too short here, and windows are made above.
    DataRequest files = {.path = request->path,
                         .sequence_length = 1,
                         .vocabulary = request->vocabulary,
                         .divides = request->divides,
                         .encodes = request->tokenizer != NULL};
    if (request->T < 2) {
        return error_set(error,
                         "perplexity needs --seq-len of at least 2: a window's first token is not predicted");
    }
    if (request->stride < 0 || request->stride > request->T) {
        return error_set(error, "--stride %d: allowed is 1 to %d, the length of a window", request->stride,
                         request->T);
    }
    // An open loader has files; gcc cannot know that and warns of a negative size.
    if (!data_loader_open(&set->data, &files, error) || set->data.file_count < 1) { return false; }
    bool encodes = files.encodes && data_loader_is_text(&set->data);
    if (encodes && !evaluate_read_texts(set, error)) { return false; }
    for (int i = 0; i < (encodes ? 1 : set->data.file_count); i++) {
        if (!evaluate_read_file(set, i, error)) { return false; }
    }
    return set->count > 0 ||
           error_set(error, "%.300s holds nothing to predict: it needs two tokens", request->path);
}

// ---- LAMBADA and HellaSwag ------------------------------------------------------------

// Adds a text whose first `context` bytes are given, the others to be predicted. Without a context
// it follows the token in front of a text; where there is none, <|endoftext|>, or a line end where
// tokens are bytes.
static inline bool evaluate_add_pair(EvaluateSet *set, const char *text, size_t context, int characters,
                                     Error *error) {
    TokenList *list = &set->text;
    const Tokenizer *tokenizer = set->request.tokenizer;
    size_t T = set->request.T, begin = list->count, given_tokens = 1;
    bool has_begin = tokenizer != NULL && tokenizer->begin >= 0; // then evaluate_encode puts it there
    if (context == 0 && !has_begin) {
        int32_t start = tokenizer == NULL ? '\n' : tokenizer->end;
        if (start < 0) {
            return error_set(error, "nothing precedes the text to predict, and no token ends a text");
        }
        token_list_add(list, start);
    } else if (context > 0) { // encoded by itself only to count its tokens
        char *given = strndup(text, context);
        evaluate_replace(&given, EVALUATE_SPACE "+\\z", "");
        bool good = (given[0] != '\0' || error_set(error, "only spaces precede the text to predict")) &&
                    evaluate_encode(set, given, strlen(given), error);
        free(given);
        if (!good) { return false; }
        given_tokens = size_max(list->count - begin, 1); // bytes may have no tokens
        list->count = begin;
    }
    if (!evaluate_encode(set, text, strlen(text), error)) { return false; }
    size_t total = list->count - begin, scored = total - given_tokens;
    if (total <= given_tokens) { return error_set(error, "there is no token to predict"); }
    if (scored > T) {
        return error_set(error, "%zu tokens are to be predicted, more than --seq-len %zu", scored, T);
    }
    size_t cut = total > T + 1 ? total - T - 1 : 0;
    evaluate_add_sequence(set, 0, begin + cut, total - cut, scored, characters);
    return true;
}

static inline bool evaluate_read_lambada(EvaluateSet *set, const json_t *object, Error *error) {
    const char *text = json_string_value(json_object_get(object, "text"));
    if (text == NULL || text[0] == '\0') { return error_set(error, "\"text\" must be there, and a text"); }
    const char *space = strrchr(text, ' ');
    char *whole = evaluate_format("%s%s", space != NULL ? "" : " ", text);
    bool good = evaluate_add_pair(set, whole, space != NULL ? space - text : 0, 0, error);
    free(whole);
    if (good) { evaluate_add_question(set, 1, 0); }
    return good;
}

static inline bool evaluate_read_hellaswag(EvaluateSet *set, json_t *object, Error *error) {
    const json_t *endings = json_object_get(object, "endings"), *right = json_object_get(object, "label");
    const char *activity, *begin, *rest;
    int choices = json_array_size(endings) <= EVALUATE_MOST_CHOICES ? (int)json_array_size(endings) : 0;
    if (choices < 2) {
        return error_set(error, "\"endings\" must be a list of 2 to %d texts", (int)EVALUATE_MOST_CHOICES);
    }
    // The data set gives the label as a number or as a string of digits.
    const char *digits = json_string_value(right);
    char *stop = NULL;
    json_int_t label = json_is_integer(right) ? json_integer_value(right) : -1;
    if (digits != NULL && digits[0] >= '0' && digits[0] <= '9') { label = strtol(digits, &stop, 10); }
    if (label < 0 || label >= choices || (stop != NULL && *stop != '\0')) {
        return error_set(error, "\"label\" must be a number from 0 to %d", choices - 1);
    }
    bool prepared =
        json_object_get(object, "ctx_a") == NULL && json_unpack(object, "{s:s}", "ctx", &rest) == 0;
    if (!prepared && json_unpack(object, "{s:s, s:s, s:s}", "activity_label", &activity, "ctx_a", &begin,
                                 "ctx_b", &rest) != 0) {
        return error_set(error, "\"activity_label\", \"ctx_a\" and \"ctx_b\" must be there, and texts; or "
                                "\"ctx\" alone");
    }
    char *context = strdup(rest);
    if (!prepared) {
        char *last = context;
        evaluate_capitalise(&last);
        context = evaluate_format("%s: %s %s", activity, begin, last);
        free(last);
        evaluate_clean(&context);
    }
    bool good = true;
    for (int i = 0; good && i < choices; i++) {
        const char *written = json_string_value(json_array_get(endings, i));
        good = written != NULL || error_set(error, "ending %d is not a string", i);
        if (!good) { break; }
        int characters = 0;
        char *ending = strdup(written);
        if (!prepared) { evaluate_clean(&ending); }
        char *whole = evaluate_format("%s %s", context, ending);
        for (const char *c = ending; *c != '\0'; c++) { characters += (*c & 0xC0) != 0x80; }
        good = evaluate_add_pair(set, whole, strlen(context), characters, error);
        free(ending);
        free(whole);
    }
    free(context);
    if (good) { evaluate_add_question(set, choices, (int)label); }
    return good;
}

static inline bool evaluate_read_lines(EvaluateSet *set, Error *error) {
    const EvaluateRequest *request = &set->request;
    if (request->tokenizer == NULL && request->vocabulary != 256) {
        return error_set(error,
                         "LAMBADA and HellaSwag need a --tokenizer: without one a token is a byte, and the "
                         "model has a vocabulary of %d, not 256",
                         request->vocabulary);
    }
    data_loader_add(&set->data, strdup(request->path));
    DataFile *file = &set->data.files[0];
    if (!data_file_map(file, error)) { return false; }
    const char *text = (const char *)file->mapping, *end = text + file->bytes;
    text += utf8_mark(text, file->bytes);
    for (int64_t line = 1; text < end && (request->limit == 0 || (int64_t)set->questions < request->limit);
         line++) {
        const char *stop = (const char *)memchr(text, '\n', end - text);
        size_t count = (stop != NULL ? stop : end) - text, blank = 0;
        while (blank < count && strchr(" \t\r", text[blank]) != NULL && text[blank] != '\0') { blank++; }
        json_error_t trouble;
        Error wrong = {"every line must be a JSON object"};
        json_t *object = blank < count ? json_loadb(text, count, JSON_REJECT_DUPLICATES, &trouble) : NULL;
        if (blank < count && object == NULL) { error_set(&wrong, "not JSON: %.160s", trouble.text); }
        bool good = blank == count ||
                    (json_is_object(object) &&
                     (request->task == EVALUATE_LAMBADA ? evaluate_read_lambada(set, object, &wrong)
                                                        : evaluate_read_hellaswag(set, object, &wrong)));
        json_decref(object);
        if (!good) {
            return error_set(error, "%.300s, line %lld: %.500s", request->path, (long long)line, wrong.text);
        }
        text += count + (stop != NULL ? 1 : 0);
    }
    return (set->questions > 0 || error_set(error, "%.300s holds no line with a question", request->path)) &&
           evaluate_take_text(set, error);
}

// The longest first; among equals the order of the data.
static inline int evaluate_compare_lengths(const void *a, const void *b) {
    const EvaluateSequence *x = *(const EvaluateSequence *const *)a, *y = *(const EvaluateSequence *const *)b;
    return x->length != y->length ? y->length - x->length : x < y ? -1 : x > y;
}

static inline void evaluate_set_close(EvaluateSet *set) {
    token_list_free(&set->text);
    data_loader_close(&set->data);
    free(set->sequences);
    free(set->order);
    free(set->starts);
    memset(set, 0, sizeof *set);
}

// The request's path must live as long as the set. On failure there is nothing to close.
static inline bool evaluate_set_open(EvaluateSet *set, const EvaluateRequest *request, Error *error) {
    assert(request->B >= 1 && request->T >= 1 && request->vocabulary >= 1);
    memset(set, 0, sizeof *set);
    set->request = *request;
    bool good = request->task == EVALUATE_PERPLEXITY ? evaluate_read_files(set, error)
                                                     : evaluate_read_lines(set, error);
    set->order = (const EvaluateSequence **)memory_take(set->count + 1, sizeof *set->order);
    set->starts = MEMORY_OF(size_t, set->count + 1);
    if (!good) {
        evaluate_set_close(set);
        return false;
    }
    for (size_t i = 0; i < set->count; i++) { set->order[i] = &set->sequences[i]; }
    qsort(set->order, set->count, sizeof *set->order, evaluate_compare_lengths);
    // The first sequence of a batch is its longest, which determines how many fit.
    size_t positions = (size_t)request->B * evaluate_inputs(request);
    for (size_t i = 0; i < set->count;) {
        size_t rows = positions / (set->order[i]->length - 1);
        set->starts[set->batch_count++] = i;
        i += size_min(size_min(rows, EVALUATE_MOST_ROWS), set->count - i);
    }
    set->starts[set->batch_count] = set->count;
    return true;
}

static inline const EvaluateSequence *evaluate_sequence(const EvaluateSet *set, size_t batch, size_t row) {
    return set->order[set->starts[batch] + row];
}
