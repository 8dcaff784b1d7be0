// tokenize.h: makes token files of documents, with all threads.
//
//   tokenize_texts    texts -> one token file, for a run with --data TEXT
//   tokenize_lines    lines of JSON -> token files for training and validation, for
//                     train_gpt tokenize, which tokenizer/prepare.py feeds
//
// Where the tokenizer puts a token in front of a text, as Llama's <|begin_of_text|>, a document
// begins with it: models that were trained so are worse without it. It is predicted unless a prompt
// follows it. A chat has what its template has. Each document is followed by the end-of-text token,
// which is predicted. A chat that does not end with it anyway is followed by one that is not
// predicted: its answers have ends of their own. Where a document ends with the token's text, this
// text is the token. Other text that looks like a special token is text, except in chats; it is
// counted. Bytes that are not UTF-8 become one token each (tokenizer.h), and are counted, too. A
// token that is only read is ~id until it is written.
//
// The calling thread reads and writes, all threads encode: the same, however many.
#pragma once

#include "runtime/thread_pool.h"
#include "tokenizer/documents.h"
#include "tokenizer/token_file.h"

enum {
    ENCODE_TASK_BYTES = 1 << 19, // that a thread encodes at a time, or one part that is longer
    ENCODE_TASKS_PER_THREAD = 4, // in one round
    TEXTS_NAME_SIZE = 32,
    SHARD_TOKENS = 100000000 // a shard ends with the document that brings it to this number
};

// Parts [first, first + count) of a round.
typedef struct EncodeTask {
    size_t first, count;
    TokenList tokens; // result, of all of them
    bool good;
    Error error;
} EncodeTask;

typedef struct Encoder {
    const Tokenizer *tokenizer;
    DocumentPart *parts; // (part_count)
    size_t part_count, part_capacity;
    EncodeTask *tasks; // (most_tasks)
    int task_count, most_tasks;
} Encoder;

static inline void encoder_drop_parts(Encoder *encoder) {
    for (size_t i = 0; i < encoder->part_count; i++) { free(encoder->parts[i].owned); }
    encoder->part_count = 0;
}

// Encodes the text of a part that is no chat. part->ends is known.
static inline bool encode_text(const Tokenizer *tokenizer, DocumentPart *part, const char *text, size_t count,
                               TokenList *tokens, Error *error) {
    const AddedToken *end = tokenizer_added(tokenizer, NULL, tokenizer->end),
                     *front = tokenizer_added(tokenizer, NULL, tokenizer->begin);
    bool begins = part->begins && front != NULL && count >= front->length;
    part->begins &= count == 0;
    if (begins && memcmp(text, front->text, front->length) == 0) {
        text += front->length; // what is written as the token in front of a text is that token
        count -= front->length;
    }
    size_t left = count, length = 0;
    while (part->ends && left > 0 && memchr(" \t\r\n", text[left - 1], 4) != NULL) { left--; }
    if (part->ends && end != NULL && left >= end->length &&
        memcmp(text + left - end->length, end->text, end->length) == 0) {
        count = left - end->length; // what is written as the end is the end
    }
    if (part->spelled == NULL) { part->spelled = tokenizer_find_spelled(tokenizer, text, count); }
    part->is_lossy |= tokenizer_loses(tokenizer, text, count);
    for (size_t i = 0; i < count && !part->is_odd; i += length) {
        part->is_odd = utf8_scan((const uint8_t *)text + i, count - i, &length) != UTF8_VALID;
    }
    return tokenizer_encode(tokenizer, text, count, false, tokens, error);
}

// A text of JSON whose characters are bytes becomes these bytes, for the caller to free. NULL: a
// character is none.
static inline char *encode_bytes(const char *text, size_t *count) {
    char *bytes = MEMORY_OF(char, *count + 1);
    size_t made = 0;
    for (size_t i = 0; i < *count; i++) {
        unsigned byte = (uint8_t)text[i];
        if (byte > 0xC3) {
            free(bytes);
            return NULL;
        }
        if (byte >= 0x80) { byte = (byte & 3) << 6 | ((uint8_t)text[++i] & 0x3F); }
        bytes[made++] = (char)byte;
    }
    *count = made;
    return bytes;
}

// Encodes a chat; the parts that `learn` names are predicted.
static inline bool encode_chat(const Tokenizer *tokenizer, size_t line, const char *text, size_t bytes,
                               const json_t *learn, TokenList *tokens, Error *error) {
    size_t before = tokens->count, token = 0;
    double last = 0;
    TokenList begins = {NULL, 0, 0};
    bool good = json_is_array(learn) ||
                error_set(error, "line %zu: 'learn' must be a list of [begin, end], if it is there", line);
    good = good && tokenizer_encode_places(tokenizer, text, bytes, true, tokens, &begins, error);
    for (size_t i = 0; good && i < json_array_size(learn); i++) {
        double begin, end;
        good = (json_unpack(json_array_get(learn, i), "[F, F!]", &begin, &end) == 0 && begin >= last &&
                end >= begin && end <= (double)bytes && begin == floor(begin) && end == floor(end)) ||
               error_set(error,
                         "line %zu: part %zu of 'learn' is not [begin, end], behind the part before it and "
                         "within the %zu bytes of 'text'",
                         line, i + 1, bytes);
        for (; good && begin < end && token < begins.count && begins.ids[token] < end; token++) {
            bool reaches = token + 1 == begins.count || begins.ids[token + 1] > begin;
            if (!reaches) { tokens->ids[before + token] = ~tokens->ids[before + token]; }
        }
        last = end;
    }
    for (; good && token < begins.count; token++) {
        tokens->ids[before + token] = ~tokens->ids[before + token];
    }
    token_list_free(&begins);
    return good;
}

// Encodes a line of JSON; what it holds is explained in documents.h.
static inline bool encode_line(const Tokenizer *tokenizer, DocumentPart *part, TokenList *tokens,
                               Error *error) {
    json_error_t trouble;
    json_t *root = json_loadb((const char *)part->bytes, part->count, JSON_ANY_INTEGERS, &trouble);
    const char *text, *prompt = NULL;
    size_t text_bytes, prompt_bytes, before = tokens->count;
    json_t *learn = NULL;
    int more = 0, held_out = 0, is_bytes = 0;
    char *bytes = NULL;
    size_t line = part->line;
    bool good = root != NULL || error_set(error, "line %zu is not JSON: %s", line, trouble.text);
    if (good && json_unpack(root, "{s:s%, s?s%, s?o, s?b, s?b, s?b}", "text", &text, &text_bytes, "prompt",
                            &prompt, &prompt_bytes, "learn", &learn, "more", &more, "val", &held_out, "bytes",
                            &is_bytes) != 0) {
        good = error_set(error,
                         "line %zu must be an object whose 'text' is text; so must be 'prompt', and 'more', "
                         "'val' and 'bytes' true or false, if they are there",
                         line);
    }
    if (good && is_bytes) {
        text = bytes = encode_bytes(text, &text_bytes);
        good = bytes != NULL ||
               error_set(error, "line %zu: 'bytes' says that 'text' has only characters to U+00FF", line);
    }
    part->begins &= learn == NULL;
    part->has_prompt = prompt != NULL && prompt_bytes > 0;
    good = good && (prompt == NULL || encode_text(tokenizer, part, prompt, prompt_bytes, tokens, error));
    for (size_t i = before; i < tokens->count; i++) { tokens->ids[i] = ~tokens->ids[i]; }
    part->ends = more == 0;
    part->is_chat = learn != NULL;
    part->is_lossy |= good && learn != NULL && tokenizer_loses(tokenizer, text, text_bytes);
    part->held_out = held_out != 0;
    good = good && (learn != NULL ? encode_chat(tokenizer, line, text, text_bytes, learn, tokens, error)
                                  : encode_text(tokenizer, part, text, text_bytes, tokens, error));
    free(bytes);
    json_decref(root);
    return good;
}

// The token in front of a document that is no chat; -1: none. alone: each document is a sequence of
// its own. Otherwise a token that ends texts, too, is there already, behind the document before it.
static inline int32_t encode_front(const Tokenizer *tokenizer, bool alone) {
    return alone || tokenizer->begin != tokenizer->end ? tokenizer->begin : -1;
}

static inline void encode_task(void *context, int number, int thread) {
    (void)thread;
    Encoder *encoder = (Encoder *)context;
    EncodeTask *task = &encoder->tasks[number];
    TokenList *tokens = &task->tokens;
    tokens->count = 0;
    task->good = true;
    for (size_t i = task->first; task->good && i < task->first + task->count; i++) {
        DocumentPart *part = &encoder->parts[i];
        size_t before = tokens->count;
        task->good = part->line > 0 ? encode_line(encoder->tokenizer, part, tokens, &task->error)
                                    : encode_text(encoder->tokenizer, part, (const char *)part->bytes,
                                                  part->count, tokens, &task->error);
        int32_t end = encoder->tokenizer->end, begin = encoder->tokenizer->begin;
        bool has_end = false; // as the last token
        bool begins = part->is_chat && tokens->count > before && token_id(tokens->ids[before]) == begin;
        part->divider = begins ? begin : end;
        for (size_t k = before; part->is_chat && k < tokens->count; k++) {
            part->holds_divider |= begins ? k > before && token_id(tokens->ids[k]) == begin : has_end;
            has_end = token_id(tokens->ids[k]) == end;
        }
        part->holds_divider |= !begins && has_end && !part->ends;
        if (part->ends && !has_end) { token_list_add(tokens, part->is_chat ? ~end : end); }
        part->tokens = tokens->count - before;
    }
}

// Takes parts for a round, and divides them into tasks. No tasks: the source has ended.
static inline void encoder_fill(Encoder *encoder, NextPart next, void *source) {
    DocumentPart part;
    size_t bytes = ENCODE_TASK_BYTES; // of the latest task
    encoder_drop_parts(encoder);
    encoder->task_count = 0;
    while ((bytes < ENCODE_TASK_BYTES || encoder->task_count < encoder->most_tasks) && next(source, &part)) {
        list_reserve((void **)&encoder->parts, encoder->part_count, &encoder->part_capacity, 1,
                     sizeof *encoder->parts);
        if (bytes >= ENCODE_TASK_BYTES) {
            EncodeTask *task = &encoder->tasks[encoder->task_count++];
            task->first = encoder->part_count;
            task->count = bytes = 0;
        }
        encoder->parts[encoder->part_count++] = part;
        encoder->tasks[encoder->task_count - 1].count++;
        bytes += part.count;
    }
}

enum { SHARDS_TRAIN, SHARDS_VALIDATION, SHARDS_SIDES };

// One token file, or the shards PREFIX_train_00000.bin, PREFIX_val_00000.bin and so on.
// With padding each document is one sequence of `pad` tokens. A window of training has
// one token more, the first of the next document, which the mask excludes.
typedef struct TokenShards {
    const char *name; // the path of the only file; of shards the prefix
    const Tokenizer *tokenizer;
    int pad;                                       // 0: none
    uint64_t most_tokens;                          // of a shard; 0: there is one file
    void (*progress)(void *context, int64_t done); // called after each part; NULL: never
    void *context;
    // Results.
    int64_t bytes;                    // of the documents, done so far
    size_t documents;                 // that have text
    uint64_t tokens[SHARDS_SIDES];    // in the shards that are whole
    uint64_t sequences[SHARDS_SIDES]; // with padding
    size_t empty, cut, left_out;      // no text; longer than pad; nothing of them would be predicted
    size_t odd, lossy, spelling;      // not UTF-8; with bytes without a token; special tokens in letters
    const char *spelled;              // the first of these
    bool unwritten;                   // a shard that had been begun could not be written
    // Under way.
    TokenWriter writers[SHARDS_SIDES]; // `file` is NULL until there is something to write
    int number;                        // of the shards
    bool continued;                    // the next part belongs to the document before it
    int side;                          // of the document, as its first part says
    bool is_odd, is_lossy, spells;     // of the document that continues, so far
    int32_t divider;                   // stands in front of the document, or behind the one before
    bool holds_divider;                // and within it
    size_t length;                     // tokens of that, so far
    int32_t front;                     // the token in front of it; -1: none
    bool fronted;                      // which is there
    TokenList sequence;                // with padding: the first `pad` tokens of the document
} TokenShards;

// Prints what was left out, and what may not be as the user thinks; `heading` begins each line.
static inline void token_shards_tell(const TokenShards *made, const char *heading) {
    static const char odd[] = "had bytes that are not UTF-8: each of these is a token",
                      lossy[] = "had bytes for which the tokenizer has no token: these are left out";
    const struct {
        size_t count;
        const char *one, *several;
    } notes[] = {
        {made->left_out, "was left out, because nothing of it would have been predicted",
         "were left out, because nothing of them would have been predicted"},
        {made->empty, "was left out, because it is empty", "were left out, because they are empty"},
        {made->odd, odd, odd},
        {made->lossy, lossy, lossy},
    };
    for (size_t i = 0; i < sizeof notes / sizeof notes[0]; i++) {
        size_t count = notes[i].count;
        if (count == 0) { continue; }
        printf("%s%zu document%s %s\n", heading, count, plural(count),
               count == 1 ? notes[i].one : notes[i].several);
    }
    if (made->spelling > 0) {
        printf("%s%zu document%s special tokens as text, such as %s: they are learned in letters\n", heading,
               made->spelling, made->spelling == 1 ? " holds" : "s hold", made->spelled);
    }
}

static inline void token_shard_path(const TokenShards *shards, int side, int number,
                                    char path[PATH_MAX / 2]) {
    snprintf(path, PATH_MAX / 2, "%.2000s_%s_%05d.bin", shards->name, side == SHARDS_TRAIN ? "train" : "val",
             number);
}

// Shards of other documents must not be mixed with these: a pattern such as PREFIX_train_*.bin
// would read both.
static inline bool token_shards_are_new(const TokenShards *shards, Error *error) {
    char path[PATH_MAX / 2];
    for (int side = 0; side < SHARDS_SIDES; side++) {
        token_shard_path(shards, side, 0, path);
        if (access(path, F_OK) != 0) { continue; }
        return error_set(error,
                         "%.600s is there already: remove %.600s_train_*.bin and %.600s_val_*.bin, or choose "
                         "another --out",
                         path, shards->name, shards->name);
    }
    return true;
}

// Completes the shards that have been begun, and moves on to the next number.
static inline bool token_shards_finish(TokenShards *shards, Error *error) {
    bool good = true;
    for (int side = 0; good && side < SHARDS_SIDES; side++) {
        TokenWriter *writer = &shards->writers[side];
        if (writer->file == NULL) { continue; }
        int32_t padding = ~shards->tokenizer->end;
        // The last window, too, needs one token after its last input.
        good = shards->pad == 0 || token_writer_add(writer, &padding, 1, error);
        shards->tokens[side] += writer->header.token_count;
        good = good && token_writer_end(writer, error);
    }
    shards->number++;
    shards->unwritten = !good;
    return good;
}

// Writes ids (count), which belong to one document, behind the token in front of it. front: NULL,
// there is none, or with padding it is ids[0].
static inline bool token_shards_add(TokenShards *shards, const int32_t *ids, size_t count,
                                    const int32_t *front, Error *error) {
    TokenWriter *writer = &shards->writers[shards->side];
    bool pads = shards->pad > 0;
    if (writer->file == NULL) {
        char path[PATH_MAX / 2];
        token_shard_path(shards, shards->side, shards->number, path);
        const char *name = shards->most_tokens > 0 ? path : shards->name;
        if (!token_writer_begin(writer, name, shards->tokenizer, shards->pad, error)) { return false; }
    }
    // Documents are divided by one token, if it is the same for all and stands nowhere else.
    uint32_t separator = shards->holds_divider ? 0 : 1 + (uint32_t)shards->divider;
    bool divides = writer->header.token_count == 0 || writer->header.separator == separator;
    writer->header.separator = divides ? separator : 0;
    shards->sequences[shards->side] += pads;
    int32_t first = pads ? ~token_id(ids[0]) : 0, padding = ~shards->tokenizer->end;
    bool good = (!pads || token_writer_add(writer, &first, 1, error)) &&
                (front == NULL || token_writer_add(writer, front, 1, error)) &&
                token_writer_add(writer, ids + pads, count - pads, error);
    for (size_t i = count; good && i < (size_t)shards->pad; i++) {
        good = token_writer_add(writer, &padding, 1, error);
    }
    shards->unwritten = !good;
    return good;
}

// Takes the tokens ids (part->tokens) of one part, in the order of the parts.
static inline bool token_shards_take(TokenShards *shards, const DocumentPart *part, const int32_t *ids,
                                     Error *error) {
    bool begins = !shards->continued, pads = shards->pad > 0;
    if (begins) {
        shards->side = part->held_out ? SHARDS_VALIDATION : SHARDS_TRAIN;
        shards->length = shards->sequence.count = 0;
        shards->front = part->is_chat ? -1 : encode_front(shards->tokenizer, pads);
        shards->fronted = false;
        shards->divider = shards->front >= 0 ? shards->front : part->divider;
    }
    size_t pad = (size_t)shards->pad, kept = part->tokens, predicted = 0;
    bool puts_front = shards->front >= 0 && !shards->fronted && part->tokens > part->ends;
    int32_t front = part->has_prompt ? ~shards->front : shards->front;
    shards->fronted |= puts_front;
    if (puts_front && pads) { token_list_add(&shards->sequence, front); }
    for (size_t i = 0; i < part->tokens && shards->sequence.count < pad; i++) {
        token_list_add(&shards->sequence, ids[i]);
    }
    shards->length += part->tokens + puts_front;
    shards->continued = !part->ends;
    shards->bytes += (int64_t)part->count;
    shards->is_odd = part->is_odd || (!begins && shards->is_odd);
    shards->is_lossy = part->is_lossy || (!begins && shards->is_lossy);
    shards->spells = part->spelled != NULL || (!begins && shards->spells);
    shards->holds_divider = part->holds_divider || (!begins && shards->holds_divider);
    if (shards->spelled == NULL) { shards->spelled = part->spelled; }
    shards->odd += part->ends && shards->is_odd;
    shards->lossy += part->ends && shards->is_lossy;
    shards->spelling += part->ends && shards->spells;
    if (shards->progress != NULL) { shards->progress(shards->context, shards->bytes); }
    if (part->ends && shards->length == 1) { // the end-of-text token
        shards->empty++;
        return true;
    }
    shards->documents += part->ends;
    if (pads ? !part->ends : part->tokens == 0) { return true; }
    if (pads) {
        ids = shards->sequence.ids;
        kept = shards->sequence.count;
        shards->cut += shards->length > kept;
    }
    for (size_t i = pads; i < kept; i++) { predicted += ids[i] >= 0; } // nothing stands before the first one
    if (predicted == 0 && (pads || (begins && part->ends))) {
        shards->left_out++;
        return true;
    }
    return token_shards_add(shards, ids, kept, pads || !puts_front ? NULL : &front, error) &&
           (!part->ends || shards->most_tokens == 0 ||
            shards->writers[shards->side].header.token_count < shards->most_tokens ||
            token_shards_finish(shards, error));
}

static inline bool token_shards_write(TokenShards *shards, NextPart next, void *source,
                                      const Tokenizer *tokenizer, ThreadPool *pool, Error *error) {
    Encoder encoder = {.tokenizer = tokenizer, .most_tasks = pool->threads * ENCODE_TASKS_PER_THREAD};
    encoder.tasks = MEMORY_OF(EncodeTask, encoder.most_tasks);
    shards->tokenizer = tokenizer;
    bool good = true;
    for (encoder_fill(&encoder, next, source); good && encoder.task_count > 0;) {
        thread_pool_run(pool, encoder.task_count, encode_task, &encoder);
        for (int i = 0; good && i < encoder.task_count; i++) {
            const EncodeTask *task = &encoder.tasks[i];
            const int32_t *ids = task->tokens.ids;
            good = task->good || error_set(error, "%s", task->error.text);
            for (size_t k = task->first; good && k < task->first + task->count; k++) {
                good = token_shards_take(shards, &encoder.parts[k], ids, error);
                ids += encoder.parts[k].tokens;
            }
        }
        if (good) { encoder_fill(&encoder, next, source); }
    }
    encoder_drop_parts(&encoder);
    for (int i = 0; i < encoder.most_tasks; i++) { token_list_free(&encoder.tasks[i].tokens); }
    free(encoder.tasks);
    free(encoder.parts);
    return good;
}

// Completes the last shards, or removes what was begun of them.
static inline bool token_shards_end(TokenShards *shards, bool good, Error *error) {
    good = good && token_shards_finish(shards, error);
    for (int side = 0; side < SHARDS_SIDES; side++) { token_writer_abandon(&shards->writers[side]); }
    token_list_free(&shards->sequence);
    return good;
}

// The name of the token file of these texts: another one if a byte of a text or of the
// tokenizer differs, so such a file can be used again.
static inline void texts_name(const Text *texts, int count, const Tokenizer *tokenizer,
                              char name[TEXTS_NAME_SIZE]) {
    int32_t marks[2] = {tokenizer->end, tokenizer->begin};
    uLong sum = crc32_z(tokenizer->sum, (const Bytef *)marks, (tokenizer->begin < 0 ? 1 : 2) * sizeof *marks);
    for (int i = 0; i < count; i++) {
        uint64_t size = texts[i].size;
        sum = crc32_z(sum, (const Bytef *)&size, sizeof size);
        sum = crc32_z(sum, texts[i].bytes, texts[i].size);
    }
    snprintf(name, TEXTS_NAME_SIZE, "tokens-%08lx.bin", (unsigned long)sum);
}

// The token file of the texts (count), whole or not at all. made: all zeros but the name and the
// progress. Errors: a full disk, or nothing but separators and line ends.
static inline bool tokenize_texts(TokenShards *made, const Text *texts, int count, const Tokenizer *tokenizer,
                                  ThreadPool *pool, Error *error) {
    TextCursor cursor = {.texts = texts, .count = count};
    bool good = token_shards_write(made, text_next_part, &cursor, tokenizer, pool, error) &&
                (made->documents > 0 || error_set(error, "the text holds no document"));
    made->empty += cursor.empty;
    return token_shards_end(made, good, error);
}

// Reads lines of JSON from `input` and writes shards. shards: name, pad and
// most_tokens are set, and the rest is zeros. On failure the shards that are whole stay.
static inline bool tokenize_lines(FILE *input, TokenShards *shards, const Tokenizer *tokenizer,
                                  ThreadPool *pool, Error *error) {
    JsonLines lines = {.file = input};
    bool good = token_shards_write(shards, json_lines_next, &lines, tokenizer, pool, error);
    if (good && lines.problem != 0) {
        good =
            lines.problem == EFBIG
                ? error_set(error, "line %zu is longer than %d MiB", lines.line, JSON_LINE_MOST_BYTES >> 20)
                : error_set(error, "cannot read the documents: %s", strerror(lines.problem));
    }
    if (good && shards->continued) {
        good = error_set(error, "the stream ends within a document: its last line has \"more\"");
    }
    return token_shards_end(shards, good, error);
}
