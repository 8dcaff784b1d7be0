// eval.h: how good a model is: perplexity of a text, LAMBADA, HellaSwag; the numbers of
// other programs, to be compared with theirs.
//
//   perplexity   windows of T tokens, one every S tokens; in each only those count that no window before has counted, so that a token is
//                predicted from at least T - S others. The very first token of a file has nothing before it and does not count, with S = T
//                neither does that of any window: Hugging Face's guide to the perplexity of fixed-length models.
//   lambada      JSON lines {"text"}: the last word, with the space before it, from all that precedes. perplexity: exp of minus the mean
//                log-likelihood of a word; acc: how often each of its tokens is the most probable one.
//   hellaswag    JSON lines as in the data set (ctx_a, ctx_b, activity_label, endings, label): which ending is the most probable. acc: by
//                the log-likelihood of an ending, acc_norm: by that divided by its characters. Lines that have "ctx" and no "ctx_a" are
//                taken to be prepared already.
//
// The last two are as in EleutherAI's lm-evaluation-harness (tasks lambada_openai,
// hellaswag), tokens included: those of the context and the continuation together, less
// as many as the context alone has, and spaces at the end of the context belong to the
// continuation. What is too long loses its beginning. One difference is left:
// "capitalised" and "small" are PCRE2's, which turns a character into one.
//
// Everything becomes sequences of which the last tokens are scored. The longest come
// first, as many to a batch as fit; which go together hangs on nothing but the data and
// the size of a batch. Rank r of N does batches r, r + N, ...; after each round all ranks
// tell each other the scores, which are added up in the order of the data. So the numbers
// are the same bits on any number of ranks.
//
//   evaluate_set_open;  evaluator_reserve, arena_commit;  evaluate_run on all ranks;  evaluate_summarise, evaluate_print
//
// Files are foreign bytes: whatever is wrong with them is one line that names the file
// and its line.
#ifndef ACCO_PROGRAM_EVAL_H
#define ACCO_PROGRAM_EVAL_H

#include "comm/transport.h"
#include "dataloader.h"
#include "gpt_neo.h"
#include "program/report.h"
#include "program/sample.h" // sampler_largest
#include "tokenizer/tokenizer.h"

enum {
    EVALUATE_MOST_ROWS = 64,   // sequences of a batch
    EVALUATE_MOST_CHOICES = 64 // HellaSwag has four
};

typedef enum EvaluateTask { EVALUATE_PERPLEXITY, EVALUATE_LAMBADA, EVALUATE_HELLASWAG } EvaluateTask;

typedef struct EvaluateRequest {
    EvaluateTask task;
    const char *path; // of the data; perplexity: all that dataloader.h reads, but the built-in corpus
    const Tokenizer
        *tokenizer; // NULL: a token is a byte, for a vocabulary of 256; must live as long as the set
    int vocabulary; // of the model: every token must be below it
    int B, T;       // a batch has at most B x T positions, a sequence at most T
    int stride;     // S of perplexity, 1 to T; 0: T / 2
    int64_t limit;  // the first so many windows or lines; 0: all
} EvaluateRequest;

// Tokens [begin, begin + length) of a file; the last `scored` of them are predicted, the
// last one is no input.
typedef struct EvaluateSequence {
    uint64_t begin;
    int file, length, scored;
    int characters; // of an ending
} EvaluateSequence;

// A line of lambada or hellaswag: sequences [first, first + choices).
typedef struct EvaluateItem {
    size_t first;
    int64_t line;
    int choices, label;
} EvaluateItem;

// What is to be scored. All ranks have all of it.
typedef struct EvaluateSet {
    EvaluateRequest request;
    DataLoader data;  // its files; those that are text hold tokens instead, which are in `texts`
    TokenList *texts; // (data.file_count)
    EvaluateSequence *sequences;
    size_t count, capacity;
    EvaluateItem *items;
    size_t item_count, item_capacity;
    size_t *order;  // (count) sequences, the longest first
    size_t *starts; // (batch_count + 1) batch b is order[starts[b]] up to order[starts[b + 1]]
    size_t batch_count;
} EvaluateSet;

// What the model says to one sequence.
typedef struct EvaluateScore {
    double log_likelihood; // natural, of the tokens that count
    int64_t counted;       // all that are scored, but those that a shard masks
    int64_t bytes;         // of their text; -1 where nobody knows
    int64_t greedy;        // lambada: 1 where each of them is the most probable one
} EvaluateScore;

typedef struct Evaluator {
    GptNeo model;
    int32_t *tokens, *targets; // (B, T)
    Real *logits;              // (chunk, logits_stride) on the host; with a GPU
    float *row;                // (V) one row of them; with a GPU
} Evaluator;

typedef struct EvaluateSummary {
    uint64_t items;   // windows or lines
    uint64_t counted; // tokens
    double nats;      // per token
    double perplexity;
    double bits_per_byte; // NaN where nobody knows the bytes
    double accuracy, accuracy_norm;
} EvaluateSummary;

static inline const char *evaluate_task_name(EvaluateTask task) {
    static const char *const names[3] = {"perplexity", "lambada", "hellaswag"};
    return names[task];
}

// ---------------------------------------------------------------------------------------
// Text

// What Python strips.
static inline bool evaluate_is_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

// The length of good UTF-8 without spaces at its end.
static inline size_t evaluate_end(const char *text, size_t count) {
    while (count > 0) {
        size_t begin = count - 1;
        while (begin > 0 && ((uint8_t)text[begin] & 0xC0) == 0x80) { begin--; }
        if (!evaluate_is_space(utf8_character((const uint8_t *)text + begin, count - begin))) { break; }
        count = begin;
    }
    return count;
}

// Where good UTF-8 begins to be something else than spaces.
static inline size_t evaluate_begin(const char *text, size_t count) {
    size_t begin = 0, length = 0;
    for (; begin < count; begin += length) {
        utf8_scan((const uint8_t *)text + begin, count - begin, &length);
        if (!evaluate_is_space(utf8_character((const uint8_t *)text + begin, length))) { break; }
    }
    return begin;
}

static inline int evaluate_characters(const char *text, size_t count) {
    int characters = 0;
    for (size_t i = 0; i < count; i++) { characters += ((uint8_t)text[i] & 0xC0) != 0x80; }
    return characters;
}

// Takes away brackets with all between them, as \[.*?\] finds them. Returns what is left
// of `count`. `stop`: the next place, from here on, that closes a bracket or a line.
static inline size_t evaluate_drop_brackets(char *text, size_t count) {
    size_t kept = 0, stop = 0;
    for (size_t i = 0; i < count;) {
        if (stop < i) { stop = i; }
        while (stop < count && text[stop] != ']' && text[stop] != '\n') { stop++; }
        bool bracket = text[i] == '[' && stop < count && text[stop] == ']';
        if (!bracket) { text[kept++] = text[i]; }
        i = bracket ? stop + 1 : i + 1;
    }
    return kept;
}

// What HellaSwag's texts still have of the pages that they came from: " [title]" becomes
// ". ", all else in brackets goes away, and after that two spaces become one. Rewrites
// `text`, from which spaces have been stripped; false: no memory.
static inline bool evaluate_clean(TextList *text) {
    static const char title[] = " [title]";
    TextList half = {NULL, 0, 0};
    bool good = true;
    for (size_t i = 0; good && i < text->count;) {
        bool found =
            text->count - i >= sizeof title - 1 && memcmp(text->bytes + i, title, sizeof title - 1) == 0;
        good = text_list_add(&half, found ? ". " : text->bytes + i, found ? 2 : 1);
        i += found ? sizeof title - 1 : 1;
    }
    size_t without = good ? evaluate_drop_brackets(half.bytes, half.count) : 0, count = 0;
    for (size_t i = 0; good && i < without; i++) {
        half.bytes[count++] = half.bytes[i];
        if (half.bytes[i] == ' ' && i + 1 < without && half.bytes[i + 1] == ' ') { i++; }
    }
    half.count = count;
    text_list_free(text);
    *text = half;
    return good;
}

// Appends good UTF-8 without the spaces around it, cleaned; out must be empty.
static inline bool evaluate_add_clean(TextList *out, const char *text, size_t count) {
    size_t end = evaluate_end(text, count), begin = evaluate_begin(text, end);
    return text_list_add(out, text + begin, end - begin) && evaluate_clean(out);
}

// Appends good UTF-8 with its first character as a capital and the others small, as
// Python's capitalize. False: no memory.
static inline bool evaluate_add_capitalised(TextList *out, const char *text, size_t count) {
    static const char pattern[] = "(?s)\\A(.)(.*)\\z", replacement[] = "\\u${1}\\L${2}";
    int code = 0;
    PCRE2_SIZE offset = 0, size = 3 * count + 16; // another case has at most three bytes for one
    char *result = (char *)malloc(size);
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code, &offset, NULL);
    bool good =
        result != NULL && compiled != NULL &&
        pcre2_substitute(compiled, (PCRE2_SPTR)text, count, 0, PCRE2_NO_UTF_CHECK | PCRE2_SUBSTITUTE_EXTENDED,
                         NULL, NULL, (PCRE2_SPTR)replacement, PCRE2_ZERO_TERMINATED, (PCRE2_UCHAR *)result,
                         &size) >= 0 &&
        text_list_add(out, result, size);
    pcre2_code_free(compiled);
    free(result);
    return good;
}

// ---------------------------------------------------------------------------------------
// The set

static inline bool evaluate_no_memory(const EvaluateSet *set, Error *error) {
    return error_set(error, "no memory for the sequences of %.300s", set->request.path);
}

// Appends the tokens of a text to those of file `file`. <|endoftext|> in it stands for
// itself, as in the programs to compare with.
static inline bool evaluate_encode(EvaluateSet *set, int file, const char *text, size_t count, Error *error) {
    TokenList *list = &set->texts[file];
    if (set->request.tokenizer != NULL) {
        return tokenizer_encode(set->request.tokenizer, text, count, true, list, error);
    }
    for (size_t i = 0; i < count; i++) {
        if (!token_list_add(list, (uint8_t)text[i])) { return evaluate_no_memory(set, error); }
    }
    return true;
}

// The file's bytes make way for the tokens that were made of them.
static inline bool evaluate_take_text(EvaluateSet *set, int file, Error *error) {
    DataFile *data = &set->data.files[file];
    data->tokens = (const uint8_t *)(const void *)set->texts[file].ids;
    data->token_bytes = 4;
    data->token_count = set->texts[file].count;
    return data_file_scan(data, set->request.vocabulary, error);
}

static inline bool evaluate_add_sequence(EvaluateSet *set, int file, uint64_t begin, uint64_t length,
                                         uint64_t scored, int characters, Error *error) {
    EvaluateSequence sequence = {begin, file, (int)length, (int)scored, characters};
    if (!tokenizer_reserve((void **)&set->sequences, set->count, &set->capacity, 1, sizeof *set->sequences)) {
        return evaluate_no_memory(set, error);
    }
    set->sequences[set->count++] = sequence;
    return true;
}

static inline bool evaluate_add_item(EvaluateSet *set, int64_t line, int choices, int label, Error *error) {
    EvaluateItem item = {set->count - (size_t)choices, line, choices, label};
    if (!tokenizer_reserve((void **)&set->items, set->item_count, &set->item_capacity, 1,
                           sizeof *set->items)) {
        return evaluate_no_memory(set, error);
    }
    set->items[set->item_count++] = item;
    return true;
}

// ---- perplexity

static inline bool evaluate_add_windows(EvaluateSet *set, int file, Error *error) {
    const EvaluateRequest *request = &set->request;
    uint64_t T = (uint64_t)request->T,
             stride = (uint64_t)(request->stride > 0 ? request->stride : request->T / 2);
    uint64_t count = set->data.files[file].token_count, counted = 0;
    for (uint64_t begin = 0; counted < count; begin += stride) {
        if (request->limit > 0 && set->count >= (uint64_t)request->limit) { break; }
        uint64_t end = count - begin < T ? count : begin + T, from = counted > begin ? counted : begin + 1;
        if (end > from && !evaluate_add_sequence(set, file, begin, end - begin, end - from, 0, error)) {
            return false;
        }
        counted = end;
    }
    return true;
}

// Whether the tokens of a shard are those of the tokenizer, where it says of which they
// are.
static inline bool evaluate_check_shard(const EvaluateSet *set, const DataFile *file, Error *error) {
    static const uint8_t unknown[SHARD_HASH_BYTES] = {0};
    if (set->request.tokenizer == NULL || !token_file_recognise(file->mapping, file->bytes)) { return true; }
    const uint8_t *hash = (const uint8_t *)file->mapping + SHARD_HASH_AT;
    bool same = memcmp(hash, set->request.tokenizer->hash, SHARD_HASH_BYTES) == 0 ||
                memcmp(hash, unknown, SHARD_HASH_BYTES) == 0;
    return same ||
           error_set(error, "%.300s was made with another tokenizer than the one that is given", file->path);
}

// Windows of padded documents are the documents.
static inline bool evaluate_check_padding(const EvaluateSet *set, const DataFile *file, Error *error) {
    const EvaluateRequest *request = &set->request;
    if (file->padded == 0 || (file->padded == request->T && request->stride == request->T)) { return true; }
    return error_set(error, "%.300s was padded to sequences of %d tokens: give --seq-len %d --stride %d",
                     file->path, file->padded, file->padded, file->padded);
}

static inline bool evaluate_read_file(EvaluateSet *set, int file, Error *error) {
    DataFile *data = &set->data.files[file];
    bool text = data->token_bytes == 1;
    if (text && set->request.tokenizer != NULL) {
        return evaluate_encode(set, file, (const char *)data->mapping, data->bytes, error) &&
               evaluate_take_text(set, file, error) && evaluate_add_windows(set, file, error);
    }
    if (text && set->request.vocabulary != 256) {
        return error_set(error,
                         "%.300s is text, and the model has a vocabulary of %d: allowed without --tokenizer "
                         "are token files, or text for a "
                         "vocabulary of 256, as bytes",
                         data->path, set->request.vocabulary);
    }
    return evaluate_check_shard(set, data, error) && evaluate_check_padding(set, data, error) &&
           evaluate_add_windows(set, file, error);
}

static inline bool evaluate_read_files(EvaluateSet *set, Error *error) {
    const EvaluateRequest *request = &set->request;
    DataRequest files = {request->path, 1, request->vocabulary, 0, false};
    if (strcmp(request->path, "builtin") == 0) {
        return error_set(error, "perplexity needs --data with a file: the built-in corpus has no end");
    }
    if (request->T < 2) {
        return error_set(error,
                         "perplexity needs --seq-len of at least 2: a window's first token is not predicted");
    }
    if (request->stride < 0 || request->stride > request->T) {
        return error_set(error, "--stride %d: allowed is 1 to %d, the length of a window", request->stride,
                         request->T);
    }
    if (!data_loader_open(&set->data, &files, error)) { return false; }
    set->texts = (TokenList *)calloc((size_t)set->data.file_count, sizeof *set->texts);
    if (set->texts == NULL) { return evaluate_no_memory(set, error); }
    for (int i = 0; i < set->data.file_count; i++) {
        if (!evaluate_read_file(set, i, error)) { return false; }
    }
    return set->count > 0 ||
           error_set(error, "%.300s holds nothing to predict: it needs two tokens", request->path);
}

// ---- lines

PRINTF_LIKE(4, 5)
static inline bool evaluate_line_error(const EvaluateSet *set, int64_t line, Error *error, const char *format,
                                       ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return error_set(error, "%.300s, line %lld: %s", set->request.path, (long long)line, text);
}

// Without a context a text begins as texts do: behind <|endoftext|>, or a line end where
// tokens are bytes. -1: there is no such token.
static inline int32_t evaluate_first_token(const EvaluateSet *set) {
    return set->request.tokenizer == NULL ? '\n'
                                          : tokenizer_find_added(set->request.tokenizer, "<|endoftext|>");
}

// How many tokens `context` has by itself; its text is in good UTF-8, without spaces at
// its end.
static inline bool evaluate_count_tokens(EvaluateSet *set, const char *context, size_t count, size_t *tokens,
                                         Error *error) {
    TokenList *list = &set->texts[0];
    size_t before = list->count;
    bool good = evaluate_encode(set, 0, context, count, error);
    *tokens = list->count - before;
    list->count = before;
    return good;
}

// Adds the sequence of a text whose first `context` bytes are given and whose others are
// to be predicted.
static inline bool evaluate_add_pair(EvaluateSet *set, int64_t line, const TextList *text, size_t context,
                                     int characters, Error *error) {
    TokenList *list = &set->texts[0];
    size_t given = evaluate_end(text->bytes, context), T = (size_t)set->request.T, begin = list->count,
           first = 1;
    int32_t start = evaluate_first_token(set);
    if (context > 0 && given == 0) {
        return evaluate_line_error(set, line, error, "only spaces precede the text to predict");
    }
    if (given == 0 && start < 0) {
        return evaluate_line_error(
            set, line, error, "nothing precedes the text to predict, and the tokenizer has no <|endoftext|>");
    }
    if (given == 0 && !token_list_add(list, start)) { return evaluate_no_memory(set, error); }
    if (given > 0 && !evaluate_count_tokens(set, text->bytes, given, &first, error)) { return false; }
    if (!evaluate_encode(set, 0, text->bytes, text->count, error)) { return false; }
    size_t total = list->count - begin;
    if (total <= first) { return evaluate_line_error(set, line, error, "there is no token to predict"); }
    if (total - first > T) {
        return evaluate_line_error(
            set, line, error, "%zu tokens are to be predicted, more than --seq-len %zu", total - first, T);
    }
    size_t cut = total > T + 1 ? total - T - 1 : 0;
    return evaluate_add_sequence(set, 0, begin + cut, total - cut, total - first, characters, error);
}

// A member of a line that must be text.
static inline const char *evaluate_text(const EvaluateSet *set, int64_t line, const json_t *object,
                                        const char *key, Error *error) {
    const char *text = json_string_value(json_object_get(object, key));
    if (text == NULL) { evaluate_line_error(set, line, error, "\"%s\" is missing or is no text", key); }
    return text;
}

static inline bool evaluate_read_lambada(EvaluateSet *set, int64_t line, const json_t *object, Error *error) {
    const char *text = evaluate_text(set, line, object, "text", error);
    if (text == NULL) { return false; }
    const char *space = strrchr(text, ' ');
    TextList whole = {NULL, 0, 0};
    bool good = (space != NULL || text_list_add(&whole, " ", 1)) && text_list_add(&whole, text, strlen(text));
    good = good ? evaluate_add_pair(set, line, &whole, space != NULL ? (size_t)(space - text) : 0, 0, error)
                : evaluate_no_memory(set, error);
    text_list_free(&whole);
    return good && evaluate_add_item(set, line, 1, 0, error);
}

// What precedes the endings of a HellaSwag line; out must be empty.
static inline bool evaluate_hellaswag_context(EvaluateSet *set, int64_t line, const json_t *object,
                                              TextList *out, Error *error) {
    if (json_object_get(object, "ctx_a") == NULL && json_object_get(object, "ctx") != NULL) {
        const char *ready = evaluate_text(set, line, object, "ctx", error);
        return ready != NULL && (text_list_add(out, ready, strlen(ready)) || evaluate_no_memory(set, error));
    }
    static const char *const keys[3] = {"activity_label", "ctx_a", "ctx_b"};
    const char *parts[3];
    for (int i = 0; i < 3; i++) {
        parts[i] = evaluate_text(set, line, object, keys[i], error);
        if (parts[i] == NULL) { return false; }
    }
    TextList raw = {NULL, 0, 0};
    bool good = text_list_add(&raw, parts[0], strlen(parts[0])) && text_list_add(&raw, ": ", 2) &&
                text_list_add(&raw, parts[1], strlen(parts[1])) && text_list_add(&raw, " ", 1) &&
                evaluate_add_capitalised(&raw, parts[2], strlen(parts[2])) &&
                evaluate_add_clean(out, raw.bytes, raw.count);
    text_list_free(&raw);
    return good || evaluate_no_memory(set, error);
}

// Adds the sequence of one ending; `prepared`: it is taken as it is.
static inline bool evaluate_add_ending(EvaluateSet *set, int64_t line, const TextList *context,
                                       const char *ending, bool prepared, Error *error) {
    TextList text = {NULL, 0, 0}, whole = {NULL, 0, 0};
    bool good = prepared ? text_list_add(&text, ending, strlen(ending))
                         : evaluate_add_clean(&text, ending, strlen(ending));
    good = good && text_list_add(&whole, context->bytes, context->count) && text_list_add(&whole, " ", 1) &&
           text_list_add(&whole, text.bytes, text.count);
    good = good ? evaluate_add_pair(set, line, &whole, context->count,
                                    evaluate_characters(text.bytes, text.count), error)
                : evaluate_no_memory(set, error);
    text_list_free(&text);
    text_list_free(&whole);
    return good;
}

// The right choice: a number, or a text with one. -1: neither.
static inline int evaluate_label(const json_t *value, int choices) {
    const char *text = json_string_value(value);
    char *end = NULL;
    json_int_t label = json_is_integer(value) ? json_integer_value(value) : -1;
    if (text != NULL && text[0] >= '0' && text[0] <= '9') {
        label = strtol(text, &end, 10);
        label = *end == '\0' ? label : -1;
    }
    return label >= 0 && label < choices ? (int)label : -1;
}

static inline bool evaluate_read_hellaswag(EvaluateSet *set, int64_t line, const json_t *object,
                                           Error *error) {
    const json_t *endings = json_object_get(object, "endings");
    int choices = json_array_size(endings) <= EVALUATE_MOST_CHOICES ? (int)json_array_size(endings) : 0;
    int label = evaluate_label(json_object_get(object, "label"), choices);
    if (choices < 2) {
        return evaluate_line_error(set, line, error, "\"endings\" must be a list of 2 to %d texts",
                                   (int)EVALUATE_MOST_CHOICES);
    }
    if (label < 0) {
        return evaluate_line_error(set, line, error, "\"label\" must be a number from 0 to %d", choices - 1);
    }
    TextList context = {NULL, 0, 0};
    bool good = evaluate_hellaswag_context(set, line, object, &context, error),
         prepared = json_object_get(object, "ctx_a") == NULL;
    for (int i = 0; good && i < choices; i++) {
        const char *ending = json_string_value(json_array_get(endings, (size_t)i));
        good = ending != NULL ? evaluate_add_ending(set, line, &context, ending, prepared, error)
                              : evaluate_line_error(set, line, error, "ending %d is no text", i);
    }
    text_list_free(&context);
    return good && evaluate_add_item(set, line, choices, label, error);
}

static inline bool evaluate_read_line(EvaluateSet *set, int64_t line, const char *text, size_t count,
                                      Error *error) {
    json_error_t trouble;
    json_t *object = json_loadb(text, count, JSON_REJECT_DUPLICATES, &trouble);
    bool good = false;
    if (object == NULL) {
        evaluate_line_error(set, line, error, "no JSON: %.160s", trouble.text);
    } else if (!json_is_object(object)) {
        evaluate_line_error(set, line, error, "every line must be a JSON object");
    } else {
        good = set->request.task == EVALUATE_LAMBADA ? evaluate_read_lambada(set, line, object, error)
                                                     : evaluate_read_hellaswag(set, line, object, error);
    }
    json_decref(object);
    return good;
}

static inline bool evaluate_read_lines(EvaluateSet *set, Error *error) {
    const EvaluateRequest *request = &set->request;
    if (request->tokenizer == NULL && request->vocabulary != 256) {
        return error_set(error,
                         "%s needs a --tokenizer: without one a token is a byte, and the model has a "
                         "vocabulary of %d, not 256",
                         evaluate_task_name(request->task), request->vocabulary);
    }
    set->texts = (TokenList *)calloc(1, sizeof *set->texts);
    if (set->texts == NULL || !data_loader_add(&set->data, strdup(request->path), error)) {
        return evaluate_no_memory(set, error);
    }
    DataFile *file = &set->data.files[0];
    if (!data_file_map(file, error)) { return false; }
    const char *text = (const char *)file->mapping, *end = text + file->bytes;
    for (int64_t line = 1; text < end && (request->limit == 0 || (int64_t)set->item_count < request->limit);
         line++) {
        const char *stop = (const char *)memchr(text, '\n', (size_t)(end - text));
        size_t count = (size_t)((stop != NULL ? stop : end) - text), blank = 0;
        while (blank < count && (text[blank] == ' ' || text[blank] == '\t' || text[blank] == '\r')) {
            blank++;
        }
        if (blank < count && !evaluate_read_line(set, line, text, count, error)) { return false; }
        text += count + (stop != NULL ? 1 : 0);
    }
    if (set->item_count == 0) {
        return error_set(error, "%.300s holds no line with a question", request->path);
    }
    return evaluate_take_text(set, 0, error);
}

// ---- batches

typedef struct EvaluateLength {
    size_t index;
    int length;
} EvaluateLength;

static inline int evaluate_compare(const void *a, const void *b) {
    const EvaluateLength *x = (const EvaluateLength *)a, *y = (const EvaluateLength *)b;
    return x->length != y->length ? (x->length < y->length ? 1 : -1) : x->index < y->index ? -1 : 1;
}

static inline bool evaluate_sort(EvaluateSet *set) {
    EvaluateLength *lengths = (EvaluateLength *)malloc(set->count * sizeof *lengths);
    if (lengths == NULL) { return false; }
    for (size_t i = 0; i < set->count; i++) {
        lengths[i].index = i;
        lengths[i].length = set->sequences[i].length;
    }
    qsort(lengths, set->count, sizeof *lengths, evaluate_compare);
    for (size_t i = 0; i < set->count; i++) { set->order[i] = lengths[i].index; }
    free(lengths);
    return true;
}

// Fills order and starts: the first sequence of a batch is its longest and says how many
// fit.
static inline bool evaluate_arrange(EvaluateSet *set, Error *error) {
    size_t positions = (size_t)set->request.B * (size_t)set->request.T;
    set->order = (size_t *)malloc(set->count * sizeof *set->order);
    set->starts = (size_t *)malloc((set->count + 1) * sizeof *set->starts);
    if (set->order == NULL || set->starts == NULL || !evaluate_sort(set)) {
        return evaluate_no_memory(set, error);
    }
    for (size_t i = 0; i < set->count;) {
        size_t rows = positions / (size_t)(set->sequences[set->order[i]].length - 1);
        rows = rows < EVALUATE_MOST_ROWS ? rows : (size_t)EVALUATE_MOST_ROWS;
        set->starts[set->batch_count++] = i;
        i += rows < set->count - i ? rows : set->count - i;
    }
    set->starts[set->batch_count] = set->count;
    return true;
}

static inline void evaluate_set_close(EvaluateSet *set) {
    for (int i = 0; i < set->data.file_count && set->texts != NULL; i++) { token_list_free(&set->texts[i]); }
    data_loader_close(&set->data);
    free(set->texts);
    free(set->sequences);
    free(set->items);
    free(set->order);
    free(set->starts);
    memset(set, 0, sizeof *set);
}

// Reads what the request names; on failure there is nothing to close. The request's path
// must live as long as the set.
static inline bool evaluate_set_open(EvaluateSet *set, const EvaluateRequest *request, Error *error) {
    assert(request->B >= 1 && request->T >= 1 && request->vocabulary >= 1);
    memset(set, 0, sizeof *set);
    set->request = *request;
    bool good = request->task == EVALUATE_PERPLEXITY ? evaluate_read_files(set, error)
                                                     : evaluate_read_lines(set, error);
    good = good && evaluate_arrange(set, error);
    if (!good) { evaluate_set_close(set); }
    return good;
}

// ---------------------------------------------------------------------------------------
// Scores

// Plans a model for batches of B x T positions, and no more of its activations than a
// forward pass needs. `evaluator` must stay where it is.
static inline void evaluator_reserve(Evaluator *evaluator, Arena *arena, const GptNeoConfig *config,
                                     const GptNeoSettings *asked) {
    memset(evaluator, 0, sizeof *evaluator);
    GptNeoSettings settings = *asked;
    GptNeo *model = &evaluator->model;
    settings.recompute = RECOMPUTE_BLOCK; // all layers in the same place
    gpt_neo_reserve(model, arena, config, &settings);
    size_t bytes = (size_t)settings.B * (size_t)settings.T * sizeof(int32_t);
    size_t logits = (size_t)model->chunk * (size_t)model->logits_stride * precision_bytes(settings.precision);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "tokens to evaluate", bytes, &evaluator->tokens);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "targets to evaluate", bytes, &evaluator->targets);
    if (!settings.on_gpu) { return; }
    arena_reserve_host(arena, MEMORY_WORKSPACE, "logits on the host", logits, &evaluator->logits);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "a row of logits", (size_t)config->vocabulary * sizeof(float),
                       &evaluator->row);
}

// A batch of fewer or shorter sequences uses the front of every buffer.
static inline void evaluator_set_shape(Evaluator *evaluator, size_t rows, size_t length) {
    GptNeo *model = &evaluator->model;
    const GptNeoSettings *settings = &model->settings;
    assert(length <= (size_t)settings->T && rows * length <= (size_t)settings->B * (size_t)settings->T);
    model->B = (int)rows;
    model->T = (int)length;
}

static inline const EvaluateSequence *evaluate_sequence(const EvaluateSet *set, size_t batch, size_t row) {
    return &set->sequences[set->order[set->starts[batch] + row]];
}

// Bytes of a token's text; negative where nobody knows.
static inline int64_t evaluate_token_bytes(const EvaluateSet *set, const DataFile *file, int32_t token) {
    size_t bytes = 1;
    if (set->request.tokenizer != NULL) {
        tokenizer_bytes(set->request.tokenizer, token, &bytes);
    } else if (set->request.task == EVALUATE_PERPLEXITY && file->token_bytes != 1) {
        return -1;
    }
    return (int64_t)bytes;
}

// Writes the inputs of a sequence to tokens (length - 1) and what is to be predicted to
// targets (scored); -1: does not count.
static inline bool evaluator_fill_row(const Evaluator *evaluator, const EvaluateSet *set,
                                      const EvaluateSequence *sequence, int32_t *tokens, int32_t *targets,
                                      EvaluateScore *score, Error *error) {
    const DataFile *file = &set->data.files[sequence->file];
    int vocabulary = evaluator->model.config.vocabulary, context = sequence->length - sequence->scored;
    for (int t = 0; t < sequence->length; t++) {
        uint64_t position = sequence->begin + (uint64_t)t;
        uint32_t token = data_token(file, position);
        if (token >= (uint32_t)vocabulary) { return data_token_error(file, position, vocabulary, error); }
        if (t < sequence->length - 1) { tokens[t] = (int32_t)token; }
        if (t < context) { continue; }
        bool counts = file->mask == NULL || (file->mask[position / 8] >> (position % 8) & 1) != 0;
        int64_t bytes = evaluate_token_bytes(set, file, (int32_t)token);
        targets[t - context] = counts ? (int32_t)token : -1;
        score->counted += counts;
        score->bytes = bytes < 0 ? -1 : score->bytes + (counts ? bytes : 0);
    }
    return true;
}

// Shapes the model for a batch, fills tokens (rows, length) and targets (the scored ones
// of all rows, one behind the other), and begins the scores. Returns how many targets
// there are; -1: an error.
static inline int evaluator_fill(Evaluator *evaluator, const EvaluateSet *set, size_t batch,
                                 EvaluateScore *scores, Error *error) {
    size_t rows = set->starts[batch + 1] - set->starts[batch],
           length = (size_t)evaluate_sequence(set, batch, 0)->length - 1;
    int scored = 0;
    evaluator_set_shape(evaluator, rows, length);
    memset(evaluator->tokens, 0,
           rows * length * sizeof(int32_t)); // nothing that counts looks at what is behind a sequence
    memset(scores, 0, rows * sizeof *scores);
    for (size_t row = 0; row < rows; row++) {
        const EvaluateSequence *sequence = evaluate_sequence(set, batch, row);
        if (!evaluator_fill_row(evaluator, set, sequence, evaluator->tokens + row * length,
                                evaluator->targets + scored, &scores[row], error)) {
            return -1;
        }
        scored += sequence->scored;
    }
    return scored;
}

// Moves the hidden states from which something is predicted to the front of
// model->branch, in the order of the targets.
static inline void evaluator_gather(Evaluator *evaluator, Stream *stream, const EvaluateSet *set,
                                    size_t batch) {
    GptNeo *model = &evaluator->model;
    size_t C = (size_t)model->config.channels, bytes = C * precision_bytes(model->settings.precision),
           done = 0;
    for (size_t row = 0; row < (size_t)model->B; row++) {
        const EvaluateSequence *sequence = evaluate_sequence(set, batch, row);
        size_t scored = (size_t)sequence->scored,
               first = row * (size_t)model->T + (size_t)sequence->length - 1 - scored;
        stream_copy(stream, real_at(model->branch, done * C, model->settings.precision),
                    real_at(gpt_neo_hidden(model), first * C, model->settings.precision), scored * bytes);
        done += scored;
    }
}

// largest (count) <- the most probable tokens of the rows of the logits chunk; -1 where
// there is none.
static inline void evaluator_find_largest(Evaluator *evaluator, Stream *stream, int count, int32_t *largest) {
    GptNeo *model = &evaluator->model;
    size_t V = (size_t)model->config.vocabulary, stride = (size_t)model->logits_stride,
           bytes = precision_bytes(model->settings.precision);
    const Real *logits = model->logits;
    if (stream->queue != NULL) {
        stream_copy(stream, evaluator->logits, logits, (size_t)count * stride * bytes);
        stream_settle(stream);
        logits = evaluator->logits;
    }
    for (int i = 0; i < count; i++) {
        const Real *row = real_at_const(logits, (size_t)i * stride, model->settings.precision);
        const float *values = (const float *)(const void *)row;
        if (model->settings.precision == PRECISION_BF16) {
            for (size_t v = 0; v < V; v++) {
                evaluator->row[v] = bf16_to_float(((const uint16_t *)(const void *)row)[v]);
            }
            values = evaluator->row;
        }
        largest[i] = sampler_largest(values, (int)V);
    }
}

// Losses of targets [first, first + count) into model->losses. With `largest` (count):
// the most probable tokens, -1 where there is none.
static inline void evaluator_score_chunk(Evaluator *evaluator, Stream *stream, const int32_t *targets,
                                         int first, int count, int32_t *largest) {
    GptNeo *model = &evaluator->model;
    int C = model->config.channels, V = model->config.vocabulary, stride = model->logits_stride;
    const Real *hidden = real_at_const(model->branch, (size_t)first * (size_t)C, model->settings.precision);
    matmul_forward(stream, model->logits, stride, hidden, gpt_neo_weight(model, model->offsets[GPT_NEO_WTE]),
                   count, C, V);
    if (largest != NULL) { evaluator_find_largest(evaluator, stream, count, largest); }
    cross_entropy(stream, model->logits, stride, model->losses + first, targets + first, count, V, 0.0f);
}

// Parameters do not change: what a GPU has made of them is made once.
static inline void evaluator_need(void *self, size_t end) { (void)self, (void)end; }

static inline Pace evaluator_pace(void) {
    Pace pace = {NULL, 1, evaluator_need, evaluator_need};
    return pace;
}

// Scores of the sequences of a batch, in its order (EVALUATE_MOST_ROWS at most). False: a
// token beyond the vocabulary.
static inline bool evaluator_score(Evaluator *evaluator, Stream *stream, const float *parameters,
                                   const EvaluateSet *set, size_t batch, EvaluateScore *scores,
                                   Error *error) {
    GptNeo *model = &evaluator->model;
    const Pace pace = evaluator_pace();
    int scored = evaluator_fill(evaluator, set, batch, scores, error), done = 0;
    if (scored < 0) { return false; }
    gpt_neo_forward(model, stream, parameters, evaluator->tokens, &pace);
    evaluator_gather(evaluator, stream, set, batch);
    const int32_t *targets = gpt_neo_upload(model, stream, model->targets, evaluator->targets);
    // Inputs are not needed any more, and there are at least as many of them as targets.
    int32_t *largest = set->request.task == EVALUATE_LAMBADA ? evaluator->tokens : NULL;
    for (int first = 0; first < scored; first += model->chunk) {
        int count = scored - first < model->chunk ? scored - first : model->chunk;
        evaluator_score_chunk(evaluator, stream, targets, first, count,
                              largest != NULL ? largest + first : NULL);
    }
    stream_settle(stream);
    for (int row = 0; row < model->B; row++) {
        int end = done + evaluate_sequence(set, batch, (size_t)row)->scored;
        scores[row].greedy = 1;
        for (; done < end; done++) {
            scores[row].log_likelihood -= (double)model->losses[done];
            if (largest != NULL && largest[done] != evaluator->targets[done]) { scores[row].greedy = 0; }
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// All of it, by all ranks

// Told after every round how many tokens were scored, of how many; rank 0's is the one to
// show.
typedef struct EvaluateProgress {
    void (*tell)(void *context, int64_t done, int64_t total); // NULL: nobody listens
    void *context;
} EvaluateProgress;

// What must be the same on all ranks, or their rounds would not meet.
static inline uint64_t evaluate_fingerprint(const EvaluateSet *set) {
    uint64_t hash = random_hash((uint64_t)set->request.task, (uint64_t)set->request.B);
    for (size_t i = 0; i < set->count; i++) {
        const EvaluateSequence *sequence = &set->sequences[set->order[i]];
        hash = random_hash(hash, sequence->begin);
        hash = random_hash(hash, (uint64_t)sequence->length << 32 | (uint32_t)sequence->scored);
    }
    return hash;
}

static inline void evaluate_check_ranks(const EvaluateSet *set, Transport *transport) {
    uint64_t mine = evaluate_fingerprint(set);
    uint64_t *all = (uint64_t *)calloc((size_t)transport->size, sizeof mine);
    if (all == NULL) { transport_fail(transport, "no memory for %d numbers", transport->size); }
    transport_all_gather_records(transport, "data", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] == mine) { continue; }
        transport_fail(transport, "rank %d sees other data in %s: the file must be the same for all ranks",
                       rank, set->request.path);
    }
    free(all);
}

// Scores of all sequences, in their order, for the caller to free; on every rank the
// same. `stream` is that of the task this runs in, or on the CPU the calling thread's.
// What fails ends all ranks.
static inline EvaluateScore *evaluate_run(Evaluator *evaluator, Stream *stream, const float *parameters,
                                          const EvaluateSet *set, Transport *transport,
                                          const EvaluateProgress *progress) {
    size_t ranks = (size_t)transport->size, record = EVALUATE_MOST_ROWS * sizeof(EvaluateScore);
    EvaluateScore mine[EVALUATE_MOST_ROWS];
    EvaluateScore *all = (EvaluateScore *)calloc(ranks, record),
                  *scores = (EvaluateScore *)calloc(set->count, sizeof *scores);
    if (all == NULL || scores == NULL) {
        transport_fail(transport, "no memory for the scores of %zu sequences", set->count);
    }
    int64_t done = 0, total = 0;
    for (size_t i = 0; i < set->count; i++) { total += set->sequences[i].scored; }
    evaluate_check_ranks(set, transport);
    for (size_t first = 0; first < set->batch_count; first += ranks) {
        Error error = {""};
        size_t batch = first + (size_t)transport->rank;
        memset(mine, 0, sizeof mine);
        if (batch < set->batch_count &&
            !evaluator_score(evaluator, stream, parameters, set, batch, mine, &error)) {
            transport_fail(transport, "%s", error.text);
        }
        transport_all_gather_records(transport, "scores", mine, all, record);
        for (size_t rank = 0; rank < ranks && first + rank < set->batch_count; rank++) {
            for (size_t i = set->starts[first + rank]; i < set->starts[first + rank + 1]; i++) {
                scores[set->order[i]] = all[rank * EVALUATE_MOST_ROWS + i - set->starts[first + rank]];
                done += set->sequences[set->order[i]].scored;
            }
        }
        if (progress != NULL && progress->tell != NULL) { progress->tell(progress->context, done, total); }
    }
    free(all);
    return scores;
}

// ---------------------------------------------------------------------------------------
// What it comes to

// A model whose outputs are not numbers must not look like a bad one.
static inline bool evaluate_check_scores(const EvaluateSet *set, const EvaluateScore *scores, Error *error) {
    for (size_t i = 0; i < set->count; i++) {
        if (isfinite(scores[i].log_likelihood)) { continue; }
        return error_set(error,
                         "the model gives %g as a log-likelihood (sequence %zu of %.300s): its weights or "
                         "outputs are no numbers",
                         scores[i].log_likelihood, i, set->request.path);
    }
    return true;
}

// The first of the largest.
static inline int evaluate_best(const EvaluateSet *set, const EvaluateItem *item, const EvaluateScore *scores,
                                bool by_character) {
    int best = 0;
    double largest = -INFINITY;
    for (int i = 0; i < item->choices; i++) {
        double value = scores[item->first + (size_t)i].log_likelihood;
        if (by_character) {
            value /= set->sequences[item->first + (size_t)i].characters;
        } // of an empty one: -infinity
        if (!(value > largest)) { continue; }
        best = i;
        largest = value;
    }
    return best;
}

static inline void evaluate_count_right(const EvaluateSet *set, const EvaluateScore *scores,
                                        EvaluateSummary *summary) {
    size_t right = 0, right_norm = 0;
    for (size_t i = 0; i < set->item_count; i++) {
        const EvaluateItem *item = &set->items[i];
        bool greedy = set->request.task == EVALUATE_LAMBADA && scores[item->first].greedy == 1;
        bool chosen =
            set->request.task == EVALUATE_HELLASWAG && evaluate_best(set, item, scores, false) == item->label;
        right += greedy || chosen;
        right_norm +=
            set->request.task == EVALUATE_HELLASWAG && evaluate_best(set, item, scores, true) == item->label;
    }
    summary->accuracy = (double)right / (double)set->item_count;
    summary->accuracy_norm = (double)right_norm / (double)set->item_count;
}

// What the scores (of evaluate_run) come to. False: they are not numbers, or nothing
// counted.
static inline bool evaluate_summarise(const EvaluateSet *set, const EvaluateScore *scores,
                                      EvaluateSummary *summary, Error *error) {
    double sum = 0;
    int64_t counted = 0, bytes = 0;
    if (!evaluate_check_scores(set, scores, error)) { return false; }
    memset(summary, 0, sizeof *summary);
    for (size_t i = 0; i < set->count; i++) {
        sum -= scores[i].log_likelihood;
        counted += scores[i].counted;
        bytes = bytes < 0 || scores[i].bytes < 0 ? -1 : bytes + scores[i].bytes;
    }
    if (counted == 0) {
        return error_set(error, "%.300s masks every token: nothing counts", set->request.path);
    }
    bool windows = set->request.task == EVALUATE_PERPLEXITY;
    summary->items = windows ? set->count : set->item_count;
    summary->counted = (uint64_t)counted;
    summary->nats = sum / (double)counted;
    summary->perplexity = exp(windows ? summary->nats : sum / (double)set->count);
    summary->bits_per_byte = bytes > 0 ? sum / (log(2.0) * (double)bytes) : (double)NAN;
    if (!windows) { evaluate_count_right(set, scores, summary); }
    return true;
}

static inline void evaluate_print(FILE *file, const EvaluateSet *set, const EvaluateSummary *summary) {
    bool windows = set->request.task == EVALUATE_PERPLEXITY;
    fprintf(file, "%-14s %llu\n", windows ? "windows" : "lines", (unsigned long long)summary->items);
    fprintf(file, "%-14s %llu\n", "tokens", (unsigned long long)summary->counted);
    if (windows) { fprintf(file, "%-14s %.6f\n", "nats per token", summary->nats); }
    if (set->request.task != EVALUATE_HELLASWAG) {
        fprintf(file, "%-14s %.6g\n", "perplexity", summary->perplexity);
    }
    if (windows && isfinite(summary->bits_per_byte)) {
        fprintf(file, "%-14s %.6f\n", "bits per byte", summary->bits_per_byte);
    }
    if (!windows) { fprintf(file, "%-14s %.6f\n", "acc", summary->accuracy); }
    if (set->request.task == EVALUATE_HELLASWAG) {
        fprintf(file, "%-14s %.6f\n", "acc_norm", summary->accuracy_norm);
    }
}

// ---------------------------------------------------------------------------------------
// The command

static inline EvaluateTask evaluate_task(const Options *options) {
    int task = EVALUATE_PERPLEXITY;
    while (strcmp(options->task, evaluate_task_name((EvaluateTask)task)) != 0) { task++; }
    return (EvaluateTask)task;
}

// What is to be evaluated and with what; errors of this rank alone.
static inline bool open_evaluation(Run *run, HfModel *model, TextCodec *spelling, EvaluateSet *set,
                                   Error *error) {
    Options *options = &run->options;
    char path[2048];
    if (options->from[0] == '\0' || strcmp(options->data, "builtin") == 0) {
        return error_set(
            error,
            "eval needs --from DIR, a directory with config.json and model.safetensors, and --data FILE");
    }
    if (!hf_model_open(model, options->from, error)) { return false; }
    int vocabulary = model->config.vocabulary, positions = model->config.positions;
    run->T = options->seq_len > 0 ? (int)options->seq_len : positions < 1024 ? positions : 1024;
    run->B = options->micro_batch > 0 ? (int)options->micro_batch : 8;
    if (run->T > positions) {
        return error_set(error, "--seq-len %d is longer than the model's %d positions", run->T, positions);
    }
    if (!text_codec_open(spelling, tokenizer_path(options, path), vocabulary == 256, vocabulary, error)) {
        return false;
    }
    EvaluateRequest request = {evaluate_task(options),
                               options->data,
                               spelling->kind == TEXT_CODEC_TOKENIZER ? &spelling->tokenizer : NULL,
                               vocabulary,
                               run->B,
                               run->T,
                               (int)options->stride,
                               options->limit};
    return evaluate_set_open(set, &request, error);
}

static inline void tell_evaluation(void *context, int64_t done, int64_t total) {
    Run *run = (Run *)context;
    terminal_bar(&run->terminal, done, total, clock_seconds() - run->started);
}

// What the stream of an evaluation works on.
typedef struct Evaluation {
    Run *run;
    const HfModel *model;
    const EvaluateSet *set;
    Evaluator evaluator;
    float *parameters;     // (parameter_count), where the kernels want them
    EvaluateScore *scores; // out
} Evaluation;

static inline void evaluation_read_parameters(Evaluation *evaluation, Stream *stream) {
    const HfModel *model = evaluation->model;
    size_t bytes = model->table.parameter_count * sizeof(float);
    float *host = stream->queue != NULL ? (float *)malloc(bytes) : evaluation->parameters;
    if (host == NULL) {
        transport_fail(&evaluation->run->transport, "no memory for the parameters: %zu bytes", bytes);
    }
    hf_model_read(model, host);
    if (stream->queue == NULL) { return; }
    stream_copy(stream, evaluation->parameters, host, bytes);
    stream_settle(stream);
    free(host);
}

static inline void evaluation_task(void *context, Stream *stream) {
    Evaluation *evaluation = (Evaluation *)context;
    Run *run = evaluation->run;
    EvaluateProgress progress = {run_is_main(run) ? tell_evaluation : NULL, run};
    evaluation_read_parameters(evaluation, stream);
    if (run->placement.on_gpu) { gemm_open(stream, evaluation->evaluator.model.gemm_workspace, 0); }
    run->started = clock_seconds();
    evaluation->scores = evaluate_run(&evaluation->evaluator, stream, evaluation->parameters, evaluation->set,
                                      &run->transport, &progress);
    gpt_neo_stop(&evaluation->evaluator.model, stream);
}

static inline void reserve_evaluation(Evaluation *evaluation) {
    Run *run = evaluation->run;
    const Placement *placement = &run->placement;
    GptNeoSettings settings = {
        run->B, run->T, run->threads.threads, placement->on_gpu, placement->precision, RECOMPUTE_NONE};
    Error error = {""};
    run->arena.on_gpu = placement->on_gpu;
    evaluator_reserve(&evaluation->evaluator, &run->arena, &evaluation->model->config, &settings);
    arena_reserve(&run->arena, MEMORY_PARAMETERS, "parameters",
                  evaluation->model->table.parameter_count * sizeof(float), &evaluation->parameters);
    agree_or_exit(run, arena_commit(&run->arena, &error) ? 0 : EXIT_SYSTEM_FAILURE, &error);
}

static inline void run_evaluation(Run *run, const HfModel *model, const EvaluateSet *set) {
    Evaluation *evaluation = (Evaluation *)calloc(1, sizeof *evaluation);
    EvaluateSummary summary;
    Error error = {""};
    evaluation->run = run;
    evaluation->model = model;
    evaluation->set = set;
    reserve_evaluation(evaluation);
    StreamPlace place = {placement_gpu(&run->placement), run->placement.precision, false};
    run->pool = thread_pool_create(run->threads.threads, true);
    Stream *stream = stream_create("evaluation", run->pool, &place);
    Event *ended = event_create();
    if (run->pool == NULL || stream == NULL) {
        transport_fail(&run->transport, "the system does not give %d threads", run->threads.threads);
    }
    terminal_open(&run->terminal, stdout);
    stream_run(stream, evaluation_task, evaluation);
    event_record(ended, stream);
    while (!event_wait(ended, 3600)) {}
    terminal_clear(&run->terminal);
    agree_or_exit(
        run, evaluate_summarise(set, evaluation->scores, &summary, &error) ? 0 : EXIT_SYSTEM_FAILURE, &error);
    if (run_is_main(run)) {
        printf("%-14s %s, %s, contexts of %d\n", "evaluation", evaluate_task_name(set->request.task),
               set->request.path, run->T);
        evaluate_print(stdout, set, &summary);
    }
    stream_destroy(stream);
    event_destroy(ended);
    thread_pool_destroy(run->pool);
    arena_release(&run->arena);
    free(evaluation->scores);
    free(evaluation);
}

// Numbers of a model on disk; all ranks share the work.
static inline int command_eval(Run *run) {
    Error error = {""};
    HfModel model;
    TextCodec spelling;
    EvaluateSet set;
    if (!transport_open(&run->transport, &error)) { exit_user_mistake(&error); }
    launch_threads(run->transport.local_size, (int)run->options.threads, &run->threads);
    bool good =
        placement_choose_device(&run->placement, &run->options, run->transport.local_rank, false, &error) &&
        placement_choose_precision(&run->placement, &run->options, &error) &&
        open_evaluation(run, &model, &spelling, &set, &error) &&
        placement_check_shapes(&run->placement, &model.config, run->B, run->T, &error);
    agree_or_exit(run, good ? 0 : EXIT_USER_MISTAKE, &error);
    run->transport.timeout_seconds = run->options.timeout_s;
    run_evaluation(run, &model, &set);
    evaluate_set_close(&set);
    text_codec_close(&spelling);
    hf_model_close(&model);
    transport_close(&run->transport);
    return 0;
}

#endif
