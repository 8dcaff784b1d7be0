// json_lines.h: train_gpt tokenize, which makes token files of lines of JSON.
//
//     train_gpt tokenize --tokenizer DIR --out PREFIX < documents.jsonl
//
// Writes PREFIX_train_00000.bin, PREFIX_val_00000.bin and so on of lines as documents.h
// describes them, but not where there are such files. python -m tokenizer.prepare feeds it with
// other formats.
#pragma once

#include "program/agreement.h"
#include "tokenizer/tokenize.h"

static inline int command_tokenize(const Options *options) {
    Error error = {""};
    Tokenizer tokenizer;
    ThreadChoice choice;
    char unit[48] = "tokens";
    TokenShards made = {.name = options->out, .pad = (int)options->seq_len, .most_tokens = SHARD_TOKENS};
    if (options->tokenizer[0] == '\0' || strcmp(options->out, "auto") == 0) {
        error_set(&error, "tokenize needs --tokenizer DIR and --out PREFIX, and reads lines of JSON from its "
                          "standard input: train_gpt tokenize --tokenizer DIR --out PREFIX < FILE.jsonl");
    } else if (options->seq_len == 1 || options->seq_len > TOKEN_FILE_MAX_PADDED) {
        error_set(&error, "tokenize --seq-len %lld: documents can be padded to 2 to %d tokens",
                  (long long)options->seq_len, TOKEN_FILE_MAX_PADDED);
    } else if (tokenizer_open(&tokenizer, options->tokenizer, &error) && tokenizer.end >= 0) {
        token_shards_are_new(&made, &error);
    } else if (!error_is_set(&error)) {
        error_set(&error, "%.400s " TOKENIZER_NO_END, options->tokenizer);
    }
    if (error_is_set(&error)) { exit_user_mistake(&error); }
    launch_threads(1, (int)options->threads, &choice);
    ThreadPool *pool = thread_pool_create(choice.threads, false);
    bool good = tokenize_lines(stdin, &made, &tokenizer, pool, &error);
    thread_pool_destroy(pool);
    if (!good) { exit_alone(made.unwritten ? EXIT_SYSTEM_FAILURE : EXIT_USER_MISTAKE, &error); }
    const uint64_t *amount = made.pad > 0 ? made.sequences : made.tokens;
    if (made.pad > 0) {
        snprintf(unit, sizeof unit, "sequence%s of %d tokens", plural(amount[SHARDS_TRAIN]), made.pad);
    }
    printf("%llu document%s: %llu %s to train on, %llu for validation; vocabulary %d\n",
           (unsigned long long)made.documents, plural(made.documents),
           (unsigned long long)amount[SHARDS_TRAIN], unit, (unsigned long long)amount[SHARDS_VALIDATION],
           tokenizer.vocabulary);
    if (made.cut > 0) {
        printf("documents longer than %d tokens, which lost their end: %llu\n", made.pad,
               (unsigned long long)made.cut);
    }
    token_shards_tell(&made, "");
    if (amount[SHARDS_TRAIN] + amount[SHARDS_VALIDATION] == 0) {
        error_set(&error, "nothing was written: the input holds no document that can be trained on");
        exit_user_mistake(&error);
    }
    tokenizer_close(&tokenizer);
    return 0;
}
