// text_shard.h: makes a token file of texts, with all threads.
//
// The file is the one that tokenizer/prepare.py makes of the same texts when it holds
// nothing out, byte for byte, as long as they are UTF-8: a line <|endoftext|> separates
// documents; line ends around a document are dropped, and so is an empty document; each
// document is followed by the end-of-text token. A document longer than
// TEXT_DOCUMENT_BYTES is encoded in parts, cut before a line end or a blank, without a
// token between them. Bytes that are not UTF-8 become one token each (tokenizer.h), where
// Python has U+FFFD.
//
// text_shard_name gives the file a name that follows from the texts' bytes and the
// tokenizer. So a file of that name can be used again, and one that is no longer right
// has another name. Sizes and times of the texts would be quicker to compare than bytes,
// but copying tools preserve both, and then a changed text would go unnoticed.
//
// Memory is a few MB a thread, however long the texts are.
#ifndef ACCO_TOKENIZER_TEXT_SHARD_H
#define ACCO_TOKENIZER_TEXT_SHARD_H

#include "runtime/thread_pool.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"

enum {
    TEXT_DOCUMENT_BYTES = 1 << 22, // DOCUMENT_BYTES in tokenizer/sources.py
    TEXT_TASK_BYTES = 1 << 19,     // that a thread encodes at a time, or one piece that is longer
    TEXT_TASKS_PER_THREAD = 4,     // in one round
    TEXT_HASH_BYTES = 1 << 24,     // of a text that a thread hashes at a time
    TEXT_SHARD_NAME = 32
};

typedef struct Text {
    const uint8_t *bytes; // (size)
    size_t size;
} Text;

// What went into a token file.
typedef struct TextShardCounts {
    uint64_t documents, tokens;
    uint64_t empty; // documents that were left out, because they have no text
} TextShardCounts;

// Called on the calling thread after every round. bytes: of the texts, done so far.
typedef struct TextProgress {
    void (*tell)(void *context, int64_t bytes);
    void *context;
} TextProgress;

// ---------------------------------------------------------------------------------------
// Documents

// A document, or a part of one that is long.
typedef struct TextPiece {
    const uint8_t *bytes; // (count)
    size_t count;
    bool ends; // the document ends here
} TextPiece;

// Where reading goes on. All zeros but `texts` and `count` at the beginning.
typedef struct TextCursor {
    const Text *texts; // (count)
    int count, index;
    size_t at;      // in texts[index]
    bool continued; // within a document
    uint64_t empty; // documents before here
} TextCursor;

// The bytes of the separator that a line begins with, including its line end; 0: the line
// is none. ends: nothing follows the `count` bytes, so a line end may be missing.
static inline size_t text_separator(const uint8_t *line, size_t count, bool ends) {
    static const char mark[] = "<|endoftext|>";
    size_t at = sizeof mark - 1;
    if (count < at || memcmp(line, mark, at) != 0) { return 0; }
    while (at < count && (line[at] == ' ' || line[at] == '\t')) { at++; }
    if (at < count && line[at] == '\r') { at++; }
    if (at == count) { return ends ? count : 0; }
    return line[at] == '\n' ? at + 1 : 0;
}

// Where in `count` bytes, which begin with a line, the first separator begins; count:
// there is none. *length: of the separator.
static inline size_t text_find_separator(const uint8_t *bytes, size_t count, bool ends, size_t *length) {
    *length = 0;
    for (size_t at = 0; at < count;) {
        *length = text_separator(bytes + at, count - at, ends);
        if (*length > 0) { return at; }
        const uint8_t *line_end = (const uint8_t *)memchr(bytes + at, '\n', count - at);
        at = line_end != NULL ? (size_t)(line_end - bytes) + 1 : count;
    }
    return count;
}

// Where to cut a document that is too long, as cut_before_space in sources.py: before the
// last line end or else blank of its second half, or else between two characters.
static inline size_t text_cut(const uint8_t *bytes, size_t count) {
    for (int i = 0; i < 2; i++) {
        size_t cut = count - 1;
        while (cut > count / 2 && bytes[cut] != (i == 0 ? '\n' : ' ')) { cut--; }
        if (cut > count / 2) { return cut; }
    }
    size_t cut = count;
    while (cut > count - 4 && (bytes[cut - 1] & 0xC0) == 0x80) { cut--; }
    return cut - 1;
}

static inline bool text_is_line_end(uint8_t byte) { return byte == '\r' || byte == '\n'; }

// The next piece of the texts. False: there is none.
static inline bool text_next_piece(TextCursor *cursor, TextPiece *piece) {
    while (cursor->index < cursor->count) {
        const Text *text = &cursor->texts[cursor->index];
        const uint8_t *bytes = text->bytes + cursor->at;
        size_t left = text->size - cursor->at, separator = 0;
        if (left == 0) {
            cursor->index++;
            cursor->at = 0;
            continue;
        }
        bool last = left < TEXT_DOCUMENT_BYTES, continued = cursor->continued;
        size_t window = size_min(left, TEXT_DOCUMENT_BYTES);
        size_t count = text_find_separator(bytes, window, last, &separator);
        bool ends = separator > 0 || last;
        if (!ends) { count = text_cut(bytes, window); }
        cursor->at += count + separator;
        cursor->continued = !ends;
        while (!continued && count > 0 && text_is_line_end(bytes[0])) {
            bytes++;
            count--;
        }
        while (ends && count > 0 && text_is_line_end(bytes[count - 1])) { count--; }
        if (count == 0 && !continued) {
            cursor->empty += separator > 0;
            continue;
        }
        piece->bytes = bytes;
        piece->count = count;
        piece->ends = ends;
        return true;
    }
    return false;
}

// ---------------------------------------------------------------------------------------
// The name

typedef struct TextHashes {
    const Text *text;
    uint8_t (*digests)[SHA256_BYTES]; // of each TEXT_HASH_BYTES
} TextHashes;

static inline void text_hash_task(void *context, int task, int thread) {
    (void)thread;
    TextHashes *hashes = (TextHashes *)context;
    size_t begin = (size_t)task * TEXT_HASH_BYTES;
    Sha256 sha;
    sha256_begin(&sha);
    sha256_add(&sha, hashes->text->bytes + begin, size_min(hashes->text->size - begin, TEXT_HASH_BYTES));
    sha256_end(&sha, hashes->digests[task]);
}

// The name of the token file of these texts, which differs where a byte of them or the
// tokenizer differs. False: no memory.
static inline bool text_shard_name(const Text *texts, int count, const Tokenizer *tokenizer, ThreadPool *pool,
                                   char name[TEXT_SHARD_NAME], Error *error) {
    static const char version[] = "acco text shard 1\n";
    uint8_t digest[SHA256_BYTES];
    Sha256 sha;
    sha256_begin(&sha);
    sha256_add(&sha, version, sizeof version - 1);
    sha256_add(&sha, tokenizer->hash, sizeof tokenizer->hash);
    for (int i = 0; i < count; i++) {
        size_t blocks = (texts[i].size + TEXT_HASH_BYTES - 1) / TEXT_HASH_BYTES;
        uint64_t size = texts[i].size;
        TextHashes hashes = {&texts[i], (uint8_t(*)[SHA256_BYTES])malloc((blocks + 1) * SHA256_BYTES)};
        if (hashes.digests == NULL) { return error_set(error, "no memory for the hashes of a text"); }
        thread_pool_run(pool, (int)blocks, text_hash_task, &hashes);
        sha256_add(&sha, &size, sizeof size);
        sha256_add(&sha, hashes.digests, blocks * SHA256_BYTES);
        free(hashes.digests);
    }
    sha256_end(&sha, digest);
    int length = snprintf(name, TEXT_SHARD_NAME, "tokens-");
    for (int i = 0; i < 8; i++) { length += snprintf(name + length, 3, "%02x", digest[i]); }
    snprintf(name + length, 5, ".bin");
    return true;
}

// ---------------------------------------------------------------------------------------
// Encoding

// Pieces [first, first + count) of a round.
typedef struct TextTask {
    size_t first, count;
    TokenList tokens; // result
    bool good;
    Error error;
} TextTask;

// What the threads encode at once.
typedef struct TextRound {
    const Tokenizer *tokenizer;
    int32_t end_of_text;
    TextPiece *pieces;
    size_t piece_count, piece_capacity;
    TextTask *tasks; // (most_tasks)
    int task_count, most_tasks;
    const TextProgress *progress; // or NULL
} TextRound;

static inline void text_encode_task(void *context, int number, int thread) {
    (void)thread;
    TextRound *round = (TextRound *)context;
    TextTask *task = &round->tasks[number];
    task->tokens.count = 0;
    task->good = true;
    for (size_t i = task->first; task->good && i < task->first + task->count; i++) {
        const TextPiece *piece = &round->pieces[i];
        task->good = tokenizer_encode(round->tokenizer, (const char *)piece->bytes, piece->count, false,
                                      &task->tokens, &task->error);
        if (task->good && piece->ends && !token_list_add(&task->tokens, round->end_of_text)) {
            task->good = error_set(&task->error, "no memory for the tokens of a text");
        }
    }
}

// Takes pieces for a round, and divides them into tasks. No tasks: the texts have ended.
static inline bool text_round_fill(TextRound *round, TextCursor *cursor, Error *error) {
    TextPiece piece;
    size_t bytes = TEXT_TASK_BYTES; // of the latest task
    round->piece_count = 0;
    round->task_count = 0;
    for (;;) {
        if (bytes >= TEXT_TASK_BYTES && round->task_count == round->most_tasks) { return true; }
        if (!text_next_piece(cursor, &piece)) { return true; }
        if (!list_reserve((void **)&round->pieces, round->piece_count, &round->piece_capacity, 1,
                          sizeof *round->pieces)) {
            return error_set(error, "no memory for the documents of a text");
        }
        if (bytes >= TEXT_TASK_BYTES) {
            TextTask *task = &round->tasks[round->task_count++];
            task->first = round->piece_count;
            task->count = bytes = 0;
        }
        round->pieces[round->piece_count++] = piece;
        round->tasks[round->task_count - 1].count++;
        bytes += piece.count;
    }
}

// ---------------------------------------------------------------------------------------
// Writing

// A token file that is being written under a temporary name.
typedef struct TokenWriter {
    int descriptor, token_bytes; // 2 or 4
    uint8_t *buffer;
    size_t capacity;
    uint64_t count;
    uint32_t checksum; // of the tokens
} TokenWriter;

static inline void token_writer_put(uint8_t *bytes, uint64_t number, int count) {
    for (int i = 0; i < count; i++) { bytes[i] = (uint8_t)(number >> (8 * i)); }
}

static inline bool token_writer_add(TokenWriter *writer, const TokenList *tokens) {
    size_t width = (size_t)writer->token_bytes, size = tokens->count * width;
    if (!list_reserve((void **)&writer->buffer, 0, &writer->capacity, size, 1)) {
        errno = ENOMEM;
        return false;
    }
    for (size_t i = 0; i < tokens->count; i++) {
        token_writer_put(writer->buffer + i * width, (uint32_t)tokens->ids[i], writer->token_bytes);
    }
    writer->checksum = (uint32_t)crc32_z(writer->checksum, writer->buffer, size);
    writer->count += tokens->count;
    return file_write_all(writer->descriptor, writer->buffer, size, FILE_POSITION);
}

// Writes the header, for which the file must have room at its beginning.
static inline bool token_writer_head(const TokenWriter *writer, const Tokenizer *tokenizer) {
    uint8_t header[TOKEN_FILE_HEADER_BYTES] = {0};
    memcpy(header, token_file_magic(), TOKEN_FILE_MAGIC_BYTES);
    token_writer_put(header + 8, TOKEN_FILE_VERSION, 4);
    token_writer_put(header + 12, (uint64_t)writer->token_bytes, 4);
    token_writer_put(header + 16, (uint64_t)tokenizer->vocabulary, 4);
    token_writer_put(header + 24, writer->count, 8);
    memcpy(header + TOKEN_FILE_HASH_AT, tokenizer->hash, TOKEN_FILE_HASH_BYTES);
    uint64_t checksum = crc32_z(writer->checksum, header, sizeof header);
    token_writer_put(header + TOKEN_FILE_CHECKSUM_AT, checksum, TOKEN_FILE_CHECKSUM_BYTES);
    return file_write_all(writer->descriptor, header, sizeof header, 0);
}

// Encodes all texts and writes their tokens. False: errno says why, or `error` already
// does.
static inline bool text_shard_encode(TokenWriter *writer, TextRound *round, TextCursor *cursor,
                                     ThreadPool *pool, TextShardCounts *counts, Error *error) {
    int64_t bytes = 0;
    for (;;) {
        if (!text_round_fill(round, cursor, error)) { return false; }
        if (round->task_count == 0) { return true; }
        thread_pool_run(pool, round->task_count, text_encode_task, round);
        for (size_t i = 0; i < round->piece_count; i++) {
            counts->documents += round->pieces[i].ends;
            bytes += (int64_t)round->pieces[i].count;
        }
        for (int i = 0; i < round->task_count; i++) {
            if (!round->tasks[i].good) {
                *error = round->tasks[i].error;
                return false;
            }
            if (!token_writer_add(writer, &round->tasks[i].tokens)) { return false; }
        }
        if (round->progress != NULL) { round->progress->tell(round->progress->context, bytes); }
    }
}

static inline void text_round_free(TextRound *round) {
    for (int i = 0; i < round->most_tasks && round->tasks != NULL; i++) {
        token_list_free(&round->tasks[i].tokens);
    }
    free(round->tasks);
    free(round->pieces);
}

// Writes the token file of the texts (count) to `path`, whole or not at all. The
// tokenizer must have the token <|endoftext|>. Errors: the disk is full, memory is short,
// or the texts hold nothing but separators and line ends. progress: or NULL.
static inline bool text_shard_write(const char *path, const Text *texts, int count,
                                    const Tokenizer *tokenizer, ThreadPool *pool,
                                    const TextProgress *progress, TextShardCounts *counts, Error *error) {
    static const uint8_t room[TOKEN_FILE_HEADER_BYTES] = {0};
    char temporary[PATH_MAX];
    TextCursor cursor = {texts, count, 0, 0, false, 0};
    TextRound round;
    TokenWriter writer;
    memset(&round, 0, sizeof round);
    memset(&writer, 0, sizeof writer);
    memset(counts, 0, sizeof *counts);
    error->text[0] = '\0';
    snprintf(temporary, sizeof temporary, "%.*s.tmp", PATH_MAX - 8, path);
    round.tokenizer = tokenizer;
    round.progress = progress;
    round.end_of_text = tokenizer_find_added(tokenizer, "<|endoftext|>");
    round.most_tasks = pool->threads * TEXT_TASKS_PER_THREAD;
    round.tasks = (TextTask *)calloc((size_t)round.most_tasks, sizeof *round.tasks);
    writer.token_bytes = tokenizer->vocabulary <= 65536 ? 2 : 4;
    writer.descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (writer.descriptor < 0) {
        text_round_free(&round);
        return error_set(error, "cannot write %.400s: %s", temporary, strerror(errno));
    }
    bool written = round.tasks != NULL &&
                   file_write_all(writer.descriptor, room, sizeof room, FILE_POSITION) &&
                   text_shard_encode(&writer, &round, &cursor, pool, counts, error);
    if (written && writer.count == 0) { written = error_set(error, "the text holds no document"); }
    written = written && token_writer_head(&writer, tokenizer);
    Error trouble;
    bool good = file_finish(writer.descriptor, temporary, written, &trouble);
    if (good && rename(temporary, path) != 0) {
        good = error_set(&trouble, "cannot rename %.400s: %s", temporary, strerror(errno));
    }
    counts->tokens = writer.count;
    counts->empty = cursor.empty;
    text_round_free(&round);
    free(writer.buffer);
    if (!good) { unlink(temporary); }
    if (!good && !error_is_set(error)) { *error = trouble; }
    return good;
}

#endif
