// rules.h: the list of update rules, and of the options that single rules have.
#pragma once

#include "acco.h"
#include "co2.h"
#include "ddp.h"
#include "diloco.h"
#include "dpu.h"
#include "sparse_loco.h"
#include "zero.h"

// The options that only some rules have. options/options_table.h says how a user writes them.
typedef struct RuleOptions {
    AccoOptions acco;
    Co2Options co2;
    DilocoOptions diloco;
    SparseLocoOptions sparse_loco;
} RuleOptions;

enum { RULE_WITHOUT_OPTIONS = 0 }; // no function of such a rule looks at them

// In the order of the choices of --optimizer.
static const struct {
    const Rule *rule;
    size_t own_options; // offset of this rule's part of RuleOptions
} RULES[] = {
    {&ddp_rule, RULE_WITHOUT_OPTIONS},
    {&zero1_rule, RULE_WITHOUT_OPTIONS},
    {&dpu_rule, RULE_WITHOUT_OPTIONS},
    {&acco_wp_rule, RULE_WITHOUT_OPTIONS},
    {&acco_rule, offsetof(RuleOptions, acco)},
    {&co2_rule, offsetof(RuleOptions, co2)},
    {&diloco_rule, offsetof(RuleOptions, diloco)},
    {&streaming_diloco_rule, offsetof(RuleOptions, diloco)},
    {&sparse_loco_rule, offsetof(RuleOptions, sparse_loco)},
};

enum { RULE_COUNT = sizeof RULES / sizeof RULES[0] };

// NULL for an unknown name.
static inline const Rule *rule_find(const char *name) {
    for (int i = 0; i < RULE_COUNT; i++) {
        if (strcmp(RULES[i].rule->name, name) == 0) { return RULES[i].rule; }
    }
    return NULL;
}

// Whether each rank steps a shard, which it then sends to the others.
static inline bool rule_shards(const Rule *rule) { return !rule->replicated && rule->kind != RULE_LOCAL; }
static inline bool rule_overlaps(const Rule *rule) { return rule->kind == RULE_OVERLAPPED; }

// The names of the rules for which `fits` is true, as "one, two or three", for messages.
static inline const char *rule_list(bool (*fits)(const Rule *rule), char text[RULE_TEXT]) {
    int left = 0;
    text[0] = '\0';
    for (int i = 0; i < RULE_COUNT; i++) { left += fits(RULES[i].rule); }
    for (int i = 0; i < RULE_COUNT; i++) {
        if (!fits(RULES[i].rule)) { continue; }
        text_join(text, RULE_TEXT, --left > 0 ? ", " : " or ", "%s", RULES[i].rule->name);
    }
    return text;
}

// The argument `own` of Rule::check, configure and choose.
static inline void *rule_own_options(int rule, const RuleOptions *options) {
    return (char *)options + RULES[rule].own_options;
}
