// tokenize.h: train_gpt tokenize, which makes token files of lines of JSON.
//
//     train_gpt tokenize --tokenizer DIR --out PREFIX < documents.jsonl
//
// Writes PREFIX_train_00000.bin, PREFIX_val_00000.bin and so on. tokenizer/documents.h says
// what a line holds. python -m tokenizer.prepare starts this command and feeds it with the
// documents of other formats.
#ifndef ACCO_PROGRAM_TOKENIZE_H
#define ACCO_PROGRAM_TOKENIZE_H

#include "options/options.h"
#include "program/agreement.h"
#include "program/launch_checks.h"
#include "tokenizer/tokenize.h"

// What was written. Returns false where that is nothing.
static inline bool tokenize_report(const TokenShards *made) {
    const uint64_t *amount = made->pad > 0 ? made->sequences : made->tokens;
    char unit[48] = "tokens";
    if (made->pad > 0) { snprintf(unit, sizeof unit, "sequences of %d tokens", made->pad); }
    printf("%llu documents: %llu %s to train on, %llu for validation; vocabulary %d\n",
           (unsigned long long)made->documents, (unsigned long long)amount[SHARDS_TRAIN], unit,
           (unsigned long long)amount[SHARDS_VALIDATION], made->tokenizer->vocabulary);
    if (made->cut > 0) {
        printf("%llu documents were longer than %d tokens and lost their end\n",
               (unsigned long long)made->cut, made->pad);
    }
    if (made->left_out > 0) {
        printf("%llu documents were left out, because nothing of them would have been predicted\n",
               (unsigned long long)made->left_out);
    }
    if (made->empty > 0) {
        printf("%llu documents were left out, because they are empty\n", (unsigned long long)made->empty);
    }
    return amount[SHARDS_TRAIN] + amount[SHARDS_VALIDATION] > 0;
}

static inline int command_tokenize(const Options *options) {
    Error error = {""};
    Tokenizer tokenizer;
    ThreadChoice choice;
    TokenShards made;
    memset(&made, 0, sizeof made);
    made.prefix = options->out;
    made.pad = (int)options->seq_len;
    made.most_tokens = SHARD_TOKENS;
    if (options->tokenizer[0] == '\0' || strcmp(options->out, "auto") == 0) {
        error_set(&error, "tokenize needs --tokenizer DIR and --out PREFIX, and reads lines of JSON from its "
                          "standard input: train_gpt tokenize --tokenizer DIR --out PREFIX < FILE.jsonl");
        exit_user_mistake(&error);
    }
    if (!tokenizer_open(&tokenizer, options->tokenizer, &error)) { exit_user_mistake(&error); }
    if (tokenizer_find_added(&tokenizer, "<|endoftext|>") < 0) {
        error_set(&error, "%.400s has no token <|endoftext|>, which is put between documents",
                  options->tokenizer);
        exit_user_mistake(&error);
    }
    if (options->seq_len == 1 || options->seq_len > TOKEN_FILE_MAX_PADDED) {
        error_set(&error, "tokenize --seq-len %lld: documents can be padded to 2 to %d tokens",
                  (long long)options->seq_len, TOKEN_FILE_MAX_PADDED);
        exit_user_mistake(&error);
    }
    launch_threads(1, (int)options->threads, &choice);
    ThreadPool *pool = thread_pool_create(choice.threads, false);
    if (pool == NULL) { error_set(&error, "the system does not give %d threads", choice.threads); }
    if (pool == NULL || !tokenize_lines(STDIN_FILENO, &made, &tokenizer, pool, &error)) {
        exit_user_mistake(&error);
    }
    if (!tokenize_report(&made)) {
        error_set(&error, "nothing was written: the input holds no document that can be trained on");
        exit_user_mistake(&error);
    }
    thread_pool_destroy(pool);
    tokenizer_close(&tokenizer);
    return 0;
}

#endif
