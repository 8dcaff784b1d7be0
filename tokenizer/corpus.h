// corpus.h: the built-in corpus: an endless stream of small children's stories, bytes as tokens,
// whose entropy, the loss of a perfect model, is known. Most bytes are certain once the hero, the
// friend, the toy, its colour and the place have been chosen, up to 200 bytes before.
//
// Window i of a seed is a pure function of (seed, i): '\n', a fresh story, '\n', the next story and
// so on, cut at T + 1 bytes. So all that a byte depends on is in its window, and its conditional
// probability is exact.
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
#pragma once

#include "runtime/errors.h"
#include "runtime/random.h"

enum {
    CORPUS_MAX_RULES = 24,
    CORPUS_MAX_ALTERNATIVES = 16 // of one rule, and the NULL; at most 32, because they are bits of a uint32
};

typedef struct CorpusRule {
    const char *name;
    const char *follows; // the earlier rule whose choice decides; NULL: a choice of its own
    const char *alternatives[CORPUS_MAX_ALTERNATIVES]; // NULL behind the last one
} CorpusRule;

static const CorpusRule corpus_rules[] = {
    {"plot",
     NULL,
     {"{once} there was a little {animal} named {hero}. <He> had a {colour} {toy}. "
      "One day <he> lost it near the {place}. Then a {friend} came by. "
      "\"<Sound>! Is this your <colour> <toy>?\" <hero> hugged the <friend>. {end}",
      "{once} there was a little {animal} named {hero}. <He> found a {colour} {toy} near the {place}. "
      "A {friend} was looking for it. \"<Sound>! My <toy>!\" "
      "So <hero> gave the <colour> <toy> back to the <friend>. {end}",
      "{once} there was a little {animal} named {hero}. "
      "<He> made a {colour} {toy} for <his> friend, the {friend}. They met near the {place}. "
      "\"<Sound>! I love my <colour> <toy>!\" said the <friend>. <hero> smiled. {end}",
      "{once} there was a little {animal} named {hero}. <He> was afraid to go to the {place}. "
      "A {friend} took <his> hand. \"<Sound>! I will come with you.\" "
      "So <hero> and the <friend> went to the <place>. They saw a {colour} {toy}. {end}"}},
    {"once", NULL, {"Once upon a time", "Long ago", "One sunny day", "In a far land"}},
    {"animal", NULL, {"bunny", "fox", "bear", "mouse", "panda", "lion"}},
    {"hero", NULL, {"Lily", "Ben", "Mia", "Tom", "Rosie", "Sam"}},
    {"He", "hero", {"She", "He", "She", "He", "She", "He"}},
    {"he", "hero", {"she", "he", "she", "he", "she", "he"}},
    {"his", "hero", {"her", "his", "her", "his", "her", "his"}},
    {"colour", NULL, {"red", "blue", "green", "yellow", "pink"}},
    {"toy", NULL, {"ball", "kite", "drum", "hat", "cup", "train"}},
    {"place", NULL, {"river", "forest", "hill", "lake", "castle"}},
    {"friend", NULL, {"duck", "frog", "cow", "hen", "bee"}},
    {"Sound", "friend", {"Quack", "Ribbit", "Moo", "Cluck", "Buzz"}},
    {"end",
     NULL,
     {"They played all day.", "They danced and sang.", "They were friends for ever.",
      "Then they went home to eat cake."}},
};

enum { CORPUS_RULES = sizeof corpus_rules / sizeof corpus_rules[0] };

// The rule of this name, which `length` letters are; -1: there is none.
static inline int corpus_find(const CorpusRule *rules, int count, const char *name, size_t length) {
    int rule = count - 1;
    while (rule >= 0 && (strncmp(rules[rule].name, name, length) != 0 || rules[rule].name[length] != '\0')) {
        rule--;
    }
    return rule;
}

static inline int corpus_alternatives(const CorpusRule *rule) {
    int count = 0;
    while (rule->alternatives[count] != NULL) { count++; }
    return count;
}

typedef struct CorpusWriter {
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

// The nats that byte j of alternative `chosen` costs. *alive has a bit for every
// alternative that agrees with it before byte j; those that differ at byte j are cleared.
static inline double corpus_byte_nats(const CorpusRule *rule, int chosen, int j, uint32_t *alive) {
    uint32_t survivors = 0;
    if ((*alive & (*alive - 1)) == 0) { return 0.0; }
    for (int k = 0; rule->alternatives[k] != NULL; k++) {
        bool agrees = (*alive >> k & 1) != 0 && rule->alternatives[k][j] == rule->alternatives[chosen][j];
        survivors |= (uint32_t)agrees << k;
    }
    int before = __builtin_popcount(*alive), after = __builtin_popcount(survivors);
    *alive = survivors;
    return before == after ? 0.0 : log((double)before / (double)after);
}

// Chooses an alternative of rule number `index`; *alive <- a bit for each that there is.
static inline int corpus_choose(CorpusWriter *writer, const CorpusRule *rules, int index, uint32_t *alive) {
    int count = corpus_alternatives(&rules[index]);
    *alive = (UINT32_C(1) << count) - 1;
    return writer->chosen[index] = (int)(random_uniform(&writer->random) * count);
}

// corpus_fill for any valid grammar.
static inline double corpus_fill_from(const CorpusRule *rules, int count, uint64_t seed, uint64_t index,
                                      int T, uint8_t *bytes, double *nats) {
    CorpusWriter writer = {.bytes = bytes, .nats = nats, .capacity = T + 1};
    writer.random.state = random_hash(seed, index);
    while (writer.length < writer.capacity) { // the separator and one story
        uint32_t alive, possible = 0;
        int chosen = corpus_choose(&writer, rules, 0, &alive);
        const char *plot = rules[0].alternatives[chosen];
        corpus_put(&writer, '\n', 0.0);
        for (const char *at = plot; *at != '\0'; at++) {
            bool chooses = *at == '{';
            if (!chooses && *at != '<') {
                corpus_put(&writer, *at, corpus_byte_nats(&rules[0], chosen, (int)(at - plot), &alive));
                continue;
            }
            size_t length = strcspn(++at, "}>");
            int named = corpus_find(rules, count, at, length);
            const char *follows = rules[named].follows;
            int source = follows == NULL ? named : corpus_find(rules, count, follows, strlen(follows));
            int word = chooses ? corpus_choose(&writer, rules, named, &possible) : writer.chosen[source];
            const char *text = rules[named].alternatives[word];
            for (int j = 0; text[j] != '\0'; j++) {
                double cost = chooses ? corpus_byte_nats(&rules[named], word, j, &possible) : 0.0;
                corpus_put(&writer, text[j], cost);
            }
            at += length;
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

// The loss of a perfect model on windows of T + 1 bytes (T >= 1): nats per predicted
// byte, the mean over about a million. It falls with T: a story that is cut repeats less.
static inline double corpus_entropy(int T) {
    int windows = 1 + (1 << 20) / (T > 256 ? T : 256);
    uint8_t *bytes = MEMORY_OF(uint8_t, T + 1);
    double total = 0;
    for (int i = 0; i < windows; i++) { total += corpus_fill(0, (uint64_t)i, T, bytes, NULL); }
    free(bytes);
    return total / windows / T;
}
