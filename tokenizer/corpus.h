// corpus.h: the built-in corpus: an endless stream of small children's stories, bytes as
// tokens, whose entropy is known.
//
// So the loss of a perfect model is known, too. Most bytes are certain once the hero, the
// friend, the toy, its colour and the place have been chosen, but knowing them takes looking
// back up to 200 bytes: a loss above the entropy is what the model has not yet learned of that.
//
// Window i of a seed is a pure function of (seed, i): '\n', a fresh story, '\n', the next
// story and so on, cut at T + 1 bytes. A window never begins inside a story, so all that
// a byte depends on is in it, and its conditional probability is exact.
//
// The grammar is one table of strings. Rule 0 holds the plots, the other rules hold
// words. In a plot
//     {rule}   chooses one of the rule's alternatives, all equally likely; at most once
//              in a plot
//     <rule>   repeats that choice. A rule that follows another one gives its alternative
//              of the same index: <he> after {hero}
// The alternatives of a choice are prefix-free, and plots first differ at a plain byte
// (test/unit/test_corpus.c checks it). So the text up to any byte tells which alternatives are
// still possible, and the byte costs ln(possible before it / possible after it) nats.
#ifndef ACCO_TOKENIZER_CORPUS_H
#define ACCO_TOKENIZER_CORPUS_H

#include <assert.h>

#include "runtime/errors.h"
#include "runtime/random.h"

typedef struct CorpusRule {
    const char *name;
    const char *follows;      // the earlier rule whose choice decides; NULL: a choice of its own
    const char *alternatives; // separated by '|'
} CorpusRule;

static const CorpusRule corpus_rules[] = {
    {"plot", NULL,
     "{once} there was a little {animal} named {hero}. <He> had a {colour} {toy}. "
     "One day <he> lost it near the {place}. Then a {friend} came by. "
     "\"<Sound>! Is this your <colour> <toy>?\" <hero> hugged the <friend>. {end}"
     "|"
     "{once} there was a little {animal} named {hero}. <He> found a {colour} {toy} near the {place}. "
     "A {friend} was looking for it. \"<Sound>! My <toy>!\" "
     "So <hero> gave the <colour> <toy> back to the <friend>. {end}"
     "|"
     "{once} there was a little {animal} named {hero}. "
     "<He> made a {colour} {toy} for <his> friend, the {friend}. They met near the {place}. "
     "\"<Sound>! I love my <colour> <toy>!\" said the <friend>. <hero> smiled. {end}"
     "|"
     "{once} there was a little {animal} named {hero}. <He> was afraid to go to the {place}. "
     "A {friend} took <his> hand. \"<Sound>! I will come with you.\" "
     "So <hero> and the <friend> went to the <place>. They saw a {colour} {toy}. {end}"},
    {"once", NULL, "Once upon a time|Long ago|One sunny day|In a far land"},
    {"animal", NULL, "bunny|fox|bear|mouse|panda|lion"},
    {"hero", NULL, "Lily|Ben|Mia|Tom|Rosie|Sam"},
    {"He", "hero", "She|He|She|He|She|He"},
    {"he", "hero", "she|he|she|he|she|he"},
    {"his", "hero", "her|his|her|his|her|his"},
    {"colour", NULL, "red|blue|green|yellow|pink"},
    {"toy", NULL, "ball|kite|drum|hat|cup|train"},
    {"place", NULL, "river|forest|hill|lake|castle"},
    {"friend", NULL, "duck|frog|cow|hen|bee"},
    {"Sound", "friend", "Quack|Ribbit|Moo|Cluck|Buzz"},
    {"end", NULL,
     "They played all day.|They danced and sang.|They were friends for ever.|"
     "Then they went home to eat cake."},
};

enum {
    CORPUS_RULES = (int)(sizeof corpus_rules / sizeof corpus_rules[0]),
    CORPUS_MAX_RULES = 24,
    CORPUS_MAX_ALTERNATIVES = 16, // of one rule; at most 32, because they are bits of a uint32
    CORPUS_MAX_STORY = 512        // bytes, separator included; the test checks it
};

// ---------------------------------------------------------------------------------------
// Reading the grammar

// A part of the table's strings, not terminated.
typedef struct CorpusText {
    const char *start;
    int length;
} CorpusText;

typedef struct CorpusChoice {
    CorpusText name;
    int source; // the rule whose choice decides: itself, or the one it follows; -1: no such rule
    int count;
    CorpusText alternatives[CORPUS_MAX_ALTERNATIVES];
} CorpusChoice;

typedef struct CorpusGrammar {
    int count;
    CorpusChoice rules[CORPUS_MAX_RULES];
} CorpusGrammar;

// A piece of a plot: a plain byte, {rule} or <rule>.
typedef enum CorpusPieceKind { CORPUS_BYTE, CORPUS_CHOOSE, CORPUS_REPEAT } CorpusPieceKind;

typedef struct CorpusPiece {
    CorpusPieceKind kind;
    int position; // of its first character in the plot
    int rule;     // to choose or to repeat; -1: no such rule
} CorpusPiece;

static inline int corpus_find(const CorpusGrammar *grammar, const char *name, int length) {
    for (int r = 0; r < grammar->count; r++) {
        CorpusText candidate = grammar->rules[r].name;
        if (candidate.length == length && memcmp(candidate.start, name, (size_t)length) == 0) { return r; }
    }
    return -1;
}

// Cuts the table into rules and alternatives. It takes 2 us, so it is done for every
// window, and no state has to outlive a call.
static inline void corpus_read(const CorpusRule *rules, int count, CorpusGrammar *grammar) {
    assert(count <= CORPUS_MAX_RULES);
    grammar->count = count;
    for (int r = 0; r < count; r++) {
        CorpusChoice *choice = &grammar->rules[r];
        choice->name.start = rules[r].name;
        choice->name.length = (int)strlen(rules[r].name);
        choice->count = 0;
        for (const char *start = rules[r].alternatives; start != NULL;) {
            assert(choice->count < CORPUS_MAX_ALTERNATIVES);
            const char *bar = strchr(start, '|');
            CorpusText *alternative = &choice->alternatives[choice->count++];
            alternative->start = start;
            alternative->length = bar != NULL ? (int)(bar - start) : (int)strlen(start);
            start = bar != NULL ? bar + 1 : NULL;
        }
    }
    for (int r = 0; r < count; r++) {
        const char *follows = rules[r].follows;
        grammar->rules[r].source = follows == NULL ? r : corpus_find(grammar, follows, (int)strlen(follows));
    }
}

// Reads the piece of a plot at *position and moves on to the next; false at the end.
static inline bool corpus_next_piece(const CorpusGrammar *grammar, CorpusText plot, int *position,
                                     CorpusPiece *piece) {
    if (*position >= plot.length) { return false; }
    const char *start = plot.start + *position;
    piece->kind = *start == '{' ? CORPUS_CHOOSE : *start == '<' ? CORPUS_REPEAT : CORPUS_BYTE;
    piece->position = *position;
    piece->rule = -1;
    if (piece->kind == CORPUS_BYTE) {
        *position += 1;
        return true;
    }
    char closing = piece->kind == CORPUS_CHOOSE ? '}' : '>';
    const char *end = (const char *)memchr(start, closing, (size_t)(plot.length - *position));
    *position = end != NULL ? (int)(end + 1 - plot.start) : plot.length;
    if (end != NULL) { piece->rule = corpus_find(grammar, start + 1, (int)(end - start) - 1); }
    return true;
}

// The nats that byte j of alternative `chosen` costs. *alive has a bit for every
// alternative that agrees with it before byte j; those that differ at byte j are cleared.
static inline double corpus_byte_nats(const CorpusChoice *choice, int chosen, int j, uint32_t *alive) {
    if ((*alive & (*alive - 1)) == 0) { return 0.0; }
    char byte = choice->alternatives[chosen].start[j];
    uint32_t survivors = 0;
    for (int k = 0; k < choice->count; k++) {
        CorpusText other = choice->alternatives[k];
        if ((*alive >> k & 1) != 0 && j < other.length && other.start[j] == byte) {
            survivors |= UINT32_C(1) << k;
        }
    }
    int before = __builtin_popcount(*alive), after = __builtin_popcount(survivors);
    *alive = survivors;
    return before == after ? 0.0 : log((double)before / (double)after);
}

static inline uint32_t corpus_all_alive(const CorpusChoice *choice) {
    return (UINT32_C(1) << choice->count) - 1;
}

// ---------------------------------------------------------------------------------------
// Writing stories

typedef struct CorpusWriter {
    CorpusGrammar grammar;
    Random random;
    int chosen[CORPUS_MAX_RULES]; // alternatives, in this story
    uint8_t *bytes;               // (capacity)
    double *nats;                 // (capacity), or NULL
    int length, capacity;
    double total; // nats of all bytes so far
} CorpusWriter;

static inline void corpus_put(CorpusWriter *writer, char byte, double nats) {
    if (writer->length >= writer->capacity) { return; }
    writer->bytes[writer->length] = (uint8_t)byte;
    if (writer->nats != NULL) { writer->nats[writer->length] = nats; }
    writer->total += nats;
    writer->length++;
}

static inline int corpus_choose(CorpusWriter *writer, int rule) {
    writer->chosen[rule] = (int)(random_uniform(&writer->random) * writer->grammar.rules[rule].count);
    return writer->chosen[rule];
}

// corpus_fill for any valid grammar.
static inline double corpus_fill_from(const CorpusRule *rules, int count, uint64_t seed, uint64_t index,
                                      int T, uint8_t *bytes, double *nats) {
    CorpusWriter writer = {.bytes = bytes, .nats = nats, .capacity = T + 1};
    corpus_read(rules, count, &writer.grammar);
    writer.random.state = random_hash(seed, index);
    const CorpusChoice *plots = &writer.grammar.rules[0];
    while (writer.length < writer.capacity) { // the separator and one story
        int plot = corpus_choose(&writer, 0), position = 0;
        uint32_t alive = corpus_all_alive(plots);
        CorpusPiece piece;
        corpus_put(&writer, '\n', 0.0);
        while (corpus_next_piece(&writer.grammar, plots->alternatives[plot], &position, &piece)) {
            if (piece.kind == CORPUS_BYTE) {
                double cost = corpus_byte_nats(plots, plot, piece.position, &alive);
                corpus_put(&writer, plots->alternatives[plot].start[piece.position], cost);
                continue;
            }
            const CorpusChoice *choice = &writer.grammar.rules[piece.rule];
            bool chooses = piece.kind == CORPUS_CHOOSE;
            int chosen = chooses ? corpus_choose(&writer, piece.rule) : writer.chosen[choice->source];
            uint32_t possible = corpus_all_alive(choice);
            for (int j = 0; j < choice->alternatives[chosen].length; j++) {
                double cost = chooses ? corpus_byte_nats(choice, chosen, j, &possible) : 0.0;
                corpus_put(&writer, choice->alternatives[chosen].start[j], cost);
            }
        }
    }
    return writer.total;
}

// Window `index` of the stream `seed`: fills bytes (T + 1) and, unless it is NULL, nats
// (T + 1): -ln of the probability of each byte given those before it. The first byte is
// always '\n' and costs 0. Returns the sum: T times the loss of a perfect model.
static inline double corpus_fill(uint64_t seed, uint64_t index, int T, uint8_t *bytes, double *nats) {
    return corpus_fill_from(corpus_rules, CORPUS_RULES, seed, index, T, bytes, nats);
}

// The loss of a perfect model on windows of T + 1 bytes (T >= 1): nats per predicted byte, as the
// mean over about a million bytes. It falls slowly with T, towards the entropy of the endless
// stream, because a story that is cut has not repeated its choices yet.
static inline double corpus_entropy(int T) {
    int windows = 1 + (1 << 20) / (T > 256 ? T : 256);
    uint8_t *bytes = (uint8_t *)memory_take((size_t)T + 1, 1);
    double total = 0;
    for (int i = 0; i < windows; i++) { total += corpus_fill(0, (uint64_t)i, T, bytes, NULL); }
    free(bytes);
    return total / windows / T;
}

#endif
