// recipes.h: the ways to run each rule, and how many tokens they were measured to need.
//
// A plan weighs a rule's speed against them (forecast.h). Numbers: tokens-to-a-loss-2026-11-25.md,
// wires-2026-11-27.md and four-bits-2026-11-27.md in dev/results/: two workers, small models.
#pragma once

#include "rules.h"

// How many times the tokens of plain data-parallel training with the same --inner a rule needs
// for the same loss: the lowest and the highest ratio. A local rule's excess over 1 grows with
// the number of workers, as each has a smaller share of the batch (measured up to 8). Runs were
// cut off at twice the tokens; TOKENS_UNKNOWN marks those that had not reached the loss. Seeds lie
// 2 % apart: what a coarser format on the wire seems to save counts as nothing.
#define TOKENS_UNKNOWN 3.0

typedef struct TokensNeeded {
    double least, most;
} TokensNeeded;

typedef struct Recipe {
    const Rule *rule;
    const char *options; // "--name value ..."; "": the rule's defaults, or whatever the user says
    TokensNeeded with_adamw, with_muon;
} Recipe;

// In the order of RULES, a rule's defaults first.
static const Recipe RECIPES[] = {
    {&ddp_rule, "", {1, 1}, {1, 1}},
    {&ddp_rule, "--wire int8", {1, 1.03}, {1, 1.02}},
    {&ddp_rule, "--wire int4", {1, 1.02}, {1, 1.08}}, // as zero1's
    {&zero1_rule, "", {1, 1}, {1, 1}},
    {&zero1_rule, "--wire int8", {1, 1.03}, {1, 1.02}},
    {&zero1_rule, "--wire int4", {1, 1.02}, {1, 1.08}},
    {&dpu_rule, "", {2, TOKENS_UNKNOWN}, {1.33, TOKENS_UNKNOWN}},
    {&acco_wp_rule, "", {1.72, TOKENS_UNKNOWN}, {1.1, TOKENS_UNKNOWN}},
    {&acco_rule, "", {1.03, 1.07}, {1.02, 1.05}},
    {&acco_rule, "--estimate-wire int8", {1.02, 1.04}, {1, 1.05}},
    {&acco_rule, "--estimate-wire int4 --sequential warmup", {1.01, 1.06}, {0.99, 1.03}},
    {&acco_rule, "--wire int8", {1.03, 1.03}, {1, 1.03}},
    {&acco_rule, "--wire int8 --estimate-wire e3m0", {1.03, 1.03}, {1, 1.03}},
    {&acco_rule, "--wire int4", {1.03, 1.13}, {1.01, 1.15}},
    {&co2_rule, "", {2, TOKENS_UNKNOWN}, {1.42, TOKENS_UNKNOWN}},
    {&co2_rule, "--wire e3m0", {2, TOKENS_UNKNOWN}, {1.49, TOKENS_UNKNOWN}},
    {&diloco_rule, "", {1.18, 1.69}, {1.16, 1.41}},
    {&diloco_rule, "--wire e3m0", {1.18, 1.69}, {1.27, 1.48}},
    {&diloco_rule, "--diloco-H 4", {1.18, 1.69}, {1.12, 1.14}},
    {&streaming_diloco_rule, "", {1.04, 1.30}, {1.15, 1.97}},
    {&streaming_diloco_rule, "--wire e3m0", {1.06, 1.28}, {1.15, 2.00}},
    {&sparse_loco_rule, "", {1.42, 1.49}, {1.29, TOKENS_UNKNOWN}},
    {&sparse_loco_rule, "--sparse-H 1", {1.12, 1.21}, {1.11, 1.14}},
    {&sparse_loco_rule, "--sparse-H 8", {1.71, 1.71}, {1.73, 1.73}},
};

enum { RECIPE_COUNT = sizeof RECIPES / sizeof RECIPES[0] };
