// rule_cases.h: one row per update rule: what tests and dev/fingerprints know of it. A new rule
// gets a row here, and with it most tests of whole runs.
#pragma once

enum { MANY_RANKS = 20, MOST_REPLAYS = 24 };

// A run that must end with the same bits as the replay of its rule (test_replay.c).
typedef struct ReplayCase {
    int ranks; // 0: behind the last case
    const char *options;
} ReplayCase;

typedef struct RuleCase {
    const char *name;
    const char *options; // with them ranks communicate several times within the few steps of base.json
    int chaos_ms;        // smaller where a rule sends many small messages, each of which is delayed
    // What a rank sends in two commits (test_schedule.c). An exchange of all elements is a
    // reduce-scatter and an all-gather, which together send 2 (N - 1) / N elements for each
    // element of the vector.
    double exchanges; // of all elements, on the wire
    double estimates; // the same, on the wire of the estimate
    int blocks;       // the sparse encoding of the vector, to each other rank
    int jobs;         // in each, every rank sends one tally to every other
    // Awkward settings: numbers of steps that do not divide each other, gradients that are
    // clipped, warm-ups that end, shards that are padded. With --ranks-per-host the sum is a
    // tree of ranks and hosts.
    ReplayCase replays[MOST_REPLAYS];
} RuleCase;

// Places in rule_cases, in the order of RULES.
enum { DDP, ZERO1, DPU, ACCO_WP, ACCO, CO2, DILOCO, STREAMING_DILOCO, SPARSE_LOCO, RULES_TESTED };

static const RuleCase rule_cases[RULES_TESTED] = {
    [DDP] = {.name = "ddp",
             .options = "--optimizer ddp",
             .chaos_ms = 2,
             .exchanges = 2,
             .jobs = 2,
             .replays = {{2, "--accumulate 3 --grad-clip 0.9 --bucket-mb 0.05"},
                         {3, "--wire bf16"},
                         {MANY_RANKS, "--accumulate 1"},
                         {3, "--wire int8"},
                         {4, "--ranks-per-host 2 --bucket-mb 0.02"},
                         {6, "--ranks-per-host 3 --wire int8"},
                         {3, "--inner muon --wire int8 --bucket-mb 0.05"}}},
    [ZERO1] = {.name = "zero1",
               .options = "--optimizer zero1",
               .chaos_ms = 2,
               .exchanges = 2,
               .jobs = 2,
               .replays = {{2, "--decay all --lr-by commits --schedule linear"},
                           {3, "--accumulate 4 --grad-clip 0.9 --wire bf16"},
                           {3, "--rank-accumulate 3,1,2 --bucket-mb 0.02 --micro-batch 2 --seq-len 20"},
                           {2, "--wire int8 --bucket-mb 0.02"},
                           {MANY_RANKS, "--accumulate 1 --grad-clip 0.5"},
                           {2, "--wire int4"},
                           {4, "--ranks-per-host 2 --wire bf16 --chaos-ms 2"},
                           {6, "--ranks-per-host 2 --wire int4 --bucket-mb 0.02"},
                           {5, "--ranks-per-host 2 --wire e3m0"},
                           {3, "--exchange two-level --ranks-per-host 3 --wire bf16"},
                           {4, "--exchange flat --wire bf16"},
                           {3, "--inner muon --rank-accumulate 3,1,2 --bucket-mb 0.02 --decay all"},
                           {MANY_RANKS,
                            "--inner muon --accumulate 1 --muon-iterations 3 --muon-adamw-lr 0.02"},
                           {5, "--inner muon --ranks-per-host 2 --wire int4 --grad-clip 0.5"}}},
    [DPU] = {.name = "dpu",
             .options = "--optimizer dpu",
             .chaos_ms = 20,
             .exchanges = 2,
             .jobs = 2,
             .replays = {{2, "--sequential 2"},
                         {3, "--accumulate 4 --grad-clip 0.9 --wire bf16"},
                         {3, "--wire e3m0 --sequential 1"},
                         {MANY_RANKS, "--accumulate 1"},
                         {6, "--ranks-per-host 3 --wire int8"},
                         {3, "--inner muon --sequential 1 --wire bf16"}}},
    [ACCO_WP] = {.name = "acco-wp",
                 .options = "--optimizer acco-wp",
                 .chaos_ms = 20,
                 .exchanges = 2,
                 .jobs = 2,
                 .replays = {{2, "--accumulate 3 --grad-clip 0.9 --lr-by commits"},
                             {3, "--sequential 2 --wire bf16"},
                             {2, "--wire int8 --sequential 1"},
                             {MANY_RANKS, "--accumulate 1"},
                             {4, "--ranks-per-host 2 --overlap off"},
                             {2, "--inner muon --wire int8 --muon-momentum 0.9 --muon-adamw-lr 0.001"}}},
    [ACCO] = {.name = "acco",
              .options = "--optimizer acco --accumulate 4",
              .chaos_ms = 20,
              .exchanges = 2,
              .estimates = 2,
              .jobs = 4,
              .replays = {{2, "--accumulate 4 --acco-init 1 --grad-clip 0.9"},
                          {3, "--sequential 2 --wire bf16"},
                          {3, "--rank-accumulate 4,2,6 --lr-by commits"},
                          {2, "--wire bf16 --estimate-wire fp32"},
                          {3, "--estimate-wire e3m0 --grad-clip 0.9"},
                          {3, "--wire int8 --acco-init 1 --accumulate 4"},
                          {2, "--accumulate 4 --acco-split 0.75"},
                          {2, "--accumulate 4 --acco-split 0.25 --overlap off"},
                          {3, "--accumulate 8 --acco-split 0.875 --chaos-ms 3"},
                          {3, "--rank-accumulate 8,3,5 --acco-split 0.75 --sequential 1 --grad-clip 0.9"},
                          {2, "--accumulate 5 --estimate-wire int8"},
                          {3, "--rank-accumulate 2,9,4 --wire bf16 --estimate-wire e3m0 --acco-init 2"},
                          {2, "--accumulate 3 --acco-split half"},
                          {3, "--accumulate 4 --estimate-wire int4 --grad-clip 0.9"},
                          {2, "--accumulate 8 --acco-split auto --estimate-wire auto --link-mbit 50"},
                          {MANY_RANKS, ""},
                          {4, "--ranks-per-host 2 --accumulate 4 --estimate-wire int4"},
                          {6, "--ranks-per-host 2 --wire bf16 --link-mbit 100"},
                          {7, "--ranks-per-host 3 --wire int8 --chaos-ms 2"},
                          {MANY_RANKS, "--ranks-per-host 8"},
                          {3, "--inner muon --accumulate 4 --acco-split 0.75 --estimate-wire int4"},
                          {4, "--inner muon --ranks-per-host 2 --rank-accumulate 4,2,6,3 --chaos-ms 2"}}},
    [CO2] = {.name = "co2",
             .options = "--optimizer co2 --co2-tau 3 --co2-beta 0.3",
             .chaos_ms = 20,
             .exchanges = 2,
             .jobs = 2,
             .replays =
                 {{2, "--co2-tau 3 --co2-eager off --co2-beta 0.5 --co2-phi 0.001 --co2-gap 1.5"},
                  {3,
                   "--co2-tau 2 --co2-alpha 0.8 --co2-beta 0.2 --accumulate 3 --grad-clip 0.9 --wire bf16"},
                  {2, "--co2-tau 2 --wire e3m0"},
                  {MANY_RANKS, "--co2-tau 2 --accumulate 1 --co2-beta 0.3"},
                  {4, "--ranks-per-host 2 --co2-tau 2 --co2-eager off --wire bf16"},
                  {3, "--co2-tau 3 --co2-beta 0.3 --wire bf16 --chaos-ms 2"},
                  {2, "--co2-tau 2 --co2-gap 1 --accumulate 3 --overlap off"},
                  {2, "--inner muon --co2-tau 2 --co2-beta 0.3"}}},
    [DILOCO] = {.name = "diloco",
                .options = "--optimizer diloco --diloco-H 4",
                .chaos_ms = 20,
                .exchanges = 2,
                .jobs = 2,
                .replays = {{2, "--diloco-H 3 --grad-clip 0.9"},
                            {3, "--diloco-H 4 --accumulate 3 --diloco-outer-lr 0.5 --diloco-mu 0.6 --lr-by "
                                "commits --wire bf16"},
                            {2, "--diloco-H 3 --wire int8"},
                            {MANY_RANKS, "--diloco-H 3 --accumulate 1"},
                            {6, "--ranks-per-host 3 --diloco-H 3 --wire e3m0"},
                            {3, "--inner muon --diloco-H 3 --wire int8 --muon-adamw-lr 0.02"}}},
    [STREAMING_DILOCO] =
        {.name = "streaming-diloco",
         .options = "--optimizer streaming-diloco --diloco-H 4",
         .chaos_ms = 20,
         .exchanges = 1, // with two fragments half of the vector in each commit
         .jobs = 2,
         .replays = {{2, "--diloco-H 4 --streaming-P 2 --streaming-tau 0 --streaming-alpha 0"},
                     {3,
                      "--diloco-H 4 --streaming-P 2 --streaming-tau 1 --streaming-alpha 0.5 --grad-clip 0.9"},
                     {2, "--diloco-H 6 --streaming-P 2 --streaming-tau 1 --streaming-alpha 0"},
                     {2, "--diloco-H 6 --streaming-P 3 --streaming-tau 0 --streaming-alpha 0.5 --wire bf16"},
                     {3,
                      "--diloco-H 4 --streaming-P 1 --streaming-tau 2 --streaming-alpha 0.5 --accumulate 1"},
                     {3, "--diloco-H 4 --streaming-P 2 --streaming-tau 1 --wire e3m0"},
                     {MANY_RANKS, "--diloco-H 4 --streaming-P 2 --streaming-tau 1 --accumulate 1"},
                     {6, "--ranks-per-host 2 --diloco-H 4 --streaming-P 2 --streaming-tau 1 --wire int8"},
                     {2, "--inner muon --diloco-H 4 --streaming-P 2 --streaming-tau 1"}}},
    [SPARSE_LOCO] = {.name = "sparse-loco",
                     .options = "--optimizer sparse-loco --sparse-H 4 --sparse-tau 1",
                     .chaos_ms = 20,
                     .blocks = 2,
                     .jobs = 2,
                     .replays = {{1, "--sparse-H 3"},
                                 {2, "--sparse-H 3 --grad-clip 0.9"},
                                 {3, "--sparse-H 4 --sparse-tau 1 --sparse-beta 0.5 --lr-by commits"},
                                 {2, "--sparse-H 2 --sparse-tau 1 --accumulate 3 --sparse-alpha 0.6"},
                                 {3, "--sparse-H 7 --sparse-tau 6 --chaos-ms 2 --sparse-beta 1"},
                                 {MANY_RANKS, "--sparse-H 3 --accumulate 1"},
                                 {6, "--ranks-per-host 3 --sparse-H 3 --sparse-beta 0"},
                                 {5, "--ranks-per-host 2 --sparse-H 4 --sparse-tau 2 --overlap off"},
                                 {3, "--inner muon --sparse-H 3 --sparse-tau 1"}}},
};
