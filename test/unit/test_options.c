// test_options.c: everything that is made from the option table.
//
//   - the table itself: no name and no field twice, rules that exist
//   - the command line: every kind of value, and for every mistake one line that names
//     the option and says what is allowed
//   - the configuration file: the same, with its name; what is saved reads back bit for bit
//   - options that contradict each other, the rule, or the number of ranks are refused
//   - --help, the tables of docs/options.md and the JSON of the log have every option
#include "test/harness.h"

#include "options/options_check.h"
#include "options/options_help.h"

enum { WORDS_MAX = 16 };

static char scratch[64]; // a temporary directory

static void scratch_path(const char *name, char path[256]) { snprintf(path, 256, "%s/%s", scratch, name); }

static void write_file(const char *path, const char *text, size_t length) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
}

// Parses "train_gpt" followed by `words` up to NULL.
static bool parse(Options *options, Error *error, const char *const *words) {
    char *argv[WORDS_MAX + 1] = {(char *)"train_gpt"};
    int argc = 1;
    for (; words[argc - 1] != NULL; argc++) {
        assert_true(argc < WORDS_MAX);
        argv[argc] = (char *)words[argc - 1];
    }
    error->text[0] = '\0';
    return options_parse(argc, argv, options, error);
}

// Words separated by single blanks.
static bool parse_line(Options *options, Error *error, const char *line) {
    static char copy[4096];
    const char *words[WORDS_MAX + 1] = {NULL};
    int count = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word != NULL; word = strtok(NULL, " ")) { words[count++] = word; }
    return parse(options, error, words);
}

static void expect_valid(Options *options, const char *line) {
    Error error;
    if (!parse_line(options, &error, line)) { fail_msg("%s: %s", line, error.text); }
}

static void expect_text(const char *line, const char *text, const char *part) {
    if (strstr(text, part) == NULL) { fail_msg("%s\n  says      %s\n  expected  %s", line, text, part); }
    if (strpbrk(text, "\n\r") != NULL) { fail_msg("%s: more than one line", line); }
}

// The parser refuses the line, and both parts are in the message.
static void expect_refused(const char *line, const char *part, const char *other_part) {
    Options options;
    Error error;
    if (parse_line(&options, &error, line)) { fail_msg("%s is accepted", line); }
    expect_text(line, error.text, part);
    expect_text(line, error.text, other_part);
}

// The options of the line are valid and do not contradict each other.
static void expect_consistent(const char *line) {
    Options options;
    Error error;
    expect_valid(&options, line);
    if (!options_check(&options, &error)) { fail_msg("%s: %s", line, error.text); }
}

// Each option of the line is valid, but options_check refuses them together.
static void expect_contradiction(const char *line, const char *part) {
    Options options;
    Error error;
    expect_valid(&options, line);
    if (options_check(&options, &error)) { fail_msg("%s is not refused", line); }
    expect_text(line, error.text, part);
}

static void assert_same_options(const Options *a, const Options *b) {
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        size_t size = option->type == OPTION_TEXT     ? sizeof(OptionText)
                      : option->type == OPTION_SWITCH ? sizeof(bool)
                                                      : 8;
        if (option->offset == offsetof(Options, config)) { continue; }
        if (memcmp(option_field(option, a), option_field(option, b), size) != 0) {
            fail_msg("--%s differs", option->name);
        }
    }
}

static char *print_to_text(void (*print)(FILE *)) {
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    print(file);
    fclose(file);
    return text;
}

// ---- The table ------------------------------------------------------------------------

static void test_table_is_sound(void **state) {
    (void)state;
    static bool taken[sizeof(Options)];
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        assert_ptr_equal(option_find(option->name), option); // also: no name twice
        assert_false(taken[option->offset]);                 // no field twice
        taken[option->offset] = true;
        assert_true(strlen(option->help) > 20 && strlen(option->help) < 1000 &&
                    option->help[strlen(option->help) - 1] == '.');
        assert_true(option->metavariable != NULL || option->type == OPTION_CHOICE ||
                    option->type == OPTION_SWITCH);
        if (option->type == OPTION_CHOICE) {
            assert_true(option->choices[0] != NULL && option->choices[OPTION_CHOICES_MAX - 1] == NULL);
        }
        if (option->type == OPTION_INTEGER || option->type == OPTION_COUNT || option->type == OPTION_REAL) {
            assert_true(option->minimum < option->maximum && option->maximum <= OPTION_NO_LIMIT);
        }
        assert_true(option->word_value == 0 || option->word != NULL);
    }
}

// Relations name options of the table, and values that these can have. A need is of an option
// whose default prints as it is written.
static void test_relations_name_values_that_exist(void **state) {
    (void)state;
    int named = 0;
    Options defaults;
    options_defaults(&defaults);
    for (EACH_OPTION(option)) {
        for (const OptionRelation *relation = option->relations; relation->kind != 0; relation++, named++) {
            const OptionSpec *other = option_of(relation->other);
            Options options = defaults;
            Error error;
            bool good = option != other && other < option_end;
            good = good && (relation->own == NULL || option_set(option, &options, relation->own, &error));
            good = good && (relation->value == NULL || option_set(other, &options, relation->value, &error));
            good = good && (relation->kind != OPTION_FOLLOWS || option_open(option) != NULL);
            good = good && (relation->kind != OPTION_NEEDS ||
                            option_has_value(other, &defaults, other->default_text));
            if (!good) { fail_msg("--%s and --%s", option->name, other->name); }
        }
        assert_int_equal(option->relations[OPTION_RELATIONS_MAX - 1].kind, 0);
        bool measures = option->measured == NULL || option_set(option, &defaults, option->measured, NULL);
        assert_true(measures);
        char list[512];
        snprintf(list, sizeof list, "%s", option->also == NULL ? "" : option->also);
        for (char *name = strtok(list, ", "); name != NULL; name = strtok(NULL, ", ")) {
            if (option_find(name) != NULL) { fail_msg("--%s is also --%s", option->name, name); }
        }
    }
    assert_int_equal(named, 74);
}

// An option that is only for some rules names rules that can be chosen. Otherwise nobody
// could ever give it.
static void test_options_of_rules_name_rules_that_exist(void **state) {
    (void)state;
    const OptionSpec *optimizer = option_find("optimizer");
    int owned = 0;
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        char list[256];
        if (option_table[i].rules == NULL) { continue; }
        owned++;
        snprintf(list, sizeof list, "%s", option_table[i].rules);
        for (char *name = strtok(list, ", "); name != NULL; name = strtok(NULL, ", ")) {
            int choice = 0;
            while (optimizer->choices[choice] != NULL && strcmp(optimizer->choices[choice], name) != 0) {
                choice++;
            }
            if (optimizer->choices[choice] == NULL && strcmp(name, "or") != 0) {
                fail_msg("--%s is for %s", option_table[i].name, name);
            }
        }
    }
    assert_int_equal(owned, 23);
    assert_true(option_list_names("dpu, acco-wp or acco", "dpu") &&
                option_list_names("dpu, acco-wp or acco", "acco"));
    assert_true(option_list_names("co2", "co2"));
    assert_false(option_list_names("dpu or acco-wp", "acco")); // whole names only
    assert_false(option_list_names("diloco", "streaming-diloco"));
    assert_false(option_list_names("streaming-diloco", "diloco"));
}

// ---- The command line -----------------------------------------------------------------

// Of all that decides the numbers of a run only these leave the bits of a resumed one as they were.
static void test_few_options_change_no_bit(void **state) {
    (void)state;
    for (EACH_OPTION(option)) {
        bool same = option_list_names("overlap, bucket-mb, epochs, decay-now", option->name);
        if (option->group > GROUP_RATE || (option->effect == SAME_BITS) == same) { continue; }
        fail_msg("--%s %s the bits", option->name, same ? "changes" : "does not change");
    }
}

static void test_defaults(void **state) {
    (void)state;
    Options options;
    Error error;
    expect_valid(&options, "");
    assert_int_equal(options.command, COMMAND_TRAIN);
    assert_string_equal(options_choice_name(&options, &options.rule), "acco");
    assert_string_equal(options.model, "tiny");
    assert_string_equal(options.data, "builtin");
    assert_string_equal(options.val_data, "");
    assert_string_equal(options.out, "auto");
    assert_int_equal(options.micro_batch, 0);
    assert_int_equal(options.seq_len, 0);
    assert_int_equal(options.accumulate, 2);
    assert_int_equal(options.tokens, 1500000);
    assert_true(options.learning_rate == 0 && options.minimum_learning_rate == -1);
    assert_true(options.beta1 == 0.9 && options.beta2 == 0.95 && options.eps == 1e-8 &&
                options.weight_decay == -1);
    assert_true(options.overlap && options.link_mbit == 0 && options.chaos_ms == 0 &&
                options.slow_rank == -1);
    assert_string_equal(options_choice_name(&options, &options.wire), "fp32");
    assert_string_equal(options_choice_name(&options, &options.rules.acco.estimate_wire), "same");
    assert_string_equal(options.rules.acco.split, "wire");
    assert_string_equal(options.rank_accumulate, "");
    assert_string_equal(options.trace, "");
    assert_true(options.rules.co2.gap == 2);
    assert_true(options.rules.acco.first_round == 0 && options.sequential == 0 && options.bucket_mb == 0 &&
                options.link_us == 0);
    assert_true(options.rules.co2.inner_steps == 12 && options.rules.co2.beta == 0 &&
                options.rules.co2.alpha == 1 && options.rules.co2.phi == 0);
    assert_true(options.rules.diloco.inner_steps == 30 && options.rules.diloco.outer_learning_rate == -1 &&
                options.rules.diloco.outer_momentum == -1);
    assert_true(options.rules.diloco.fragments == 2 && options.rules.diloco.delay == 1 &&
                options.rules.diloco.alpha == 0.5);
    assert_true(options.rules.sparse_loco.inner_steps == 4 && options.rules.sparse_loco.delay == 0 &&
                options.rules.sparse_loco.beta == 1 && options.rules.sparse_loco.eager &&
                options.rules.sparse_loco.alpha == 2);
    assert_true(options_check(&options, &error));
    assert_true(options_check_ranks(&options, 2, 256, &error));
    static const char *const rules[] = {
        "ddp", "zero1", "dpu", "acco-wp", "acco", "co2", "diloco", "streaming-diloco", "sparse-loco"};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        char line[64];
        snprintf(line, sizeof line, "--optimizer %s", rules[i]);
        expect_consistent(line);
    }
}

static void test_values(void **state) {
    (void)state;
    Options options;
    expect_valid(&options, "plan --optimizer zero1 --micro-batch=3 --seq-len 17 --accumulate auto --lr 3e-4 "
                           "--min-lr 0 --overlap off");
    assert_int_equal(options.command, COMMAND_PLAN);
    assert_string_equal(options_choice_name(&options, &options.rule), "zero1");
    assert_int_equal(options.micro_batch, 3);
    assert_int_equal(options.seq_len, 17);
    assert_int_equal(options.accumulate, 0);
    assert_true(options.learning_rate == 3e-4 && options.minimum_learning_rate == 0 && !options.overlap);
    expect_valid(&options, "train --slow-rank 0 --slow-ms 2.5 --grad-clip off --chaos-ms 0 --val-every end "
                           "--sample-tokens none --lr-by "
                           "commits");
    assert_true(options.slow_rank == 0 && options.slow_ms == 2.5 && options.grad_clip == 0 &&
                options.chaos_ms == 0);
    assert_true(options.val_every == 0 && options.sample_tokens == 0);
    assert_string_equal(options_choice_name(&options, &options.learning_rate_by), "commits");
    expect_valid(&options, "--grad-clip 0");
    assert_true(options.grad_clip == 0);
    char allowed[OPTION_VALUE_SIZE];
    assert_string_equal(option_allowed(option_find("grad-clip"), allowed), "off or 1e-06 .. 1000000");
    assert_non_null(strstr(option_find("grad-clip")->help, "off, or 0: no gradient is scaled"));
    expect_valid(&options, "--optimizer acco --wire int8 --estimate-wire e3m0 --acco-init 3 --sequential 5 "
                           "--link-us 2.5 --trace t.json");
    assert_string_equal(options_choice_name(&options, &options.wire), "int8");
    assert_string_equal(options_choice_name(&options, &options.rules.acco.estimate_wire), "e3m0");
    assert_string_equal(options.trace, "t.json");
    assert_true(options.rules.acco.first_round == 3 && options.sequential == 5 && options.link_us == 2.5);
    expect_valid(&options, "--diloco-H 500 --diloco-outer-lr 1 --diloco-mu 0 --streaming-P=5 --streaming-tau "
                           "0 --streaming-alpha 1");
    assert_true(options.rules.diloco.inner_steps == 500 && options.rules.diloco.outer_learning_rate == 1 &&
                options.rules.diloco.outer_momentum == 0);
    assert_true(options.rules.diloco.fragments == 5 && options.rules.diloco.delay == 0 &&
                options.rules.diloco.alpha == 1);
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    streaming_diloco_configure(&options.rules.diloco, &settings); // 0 is a momentum, not the rule's own
    assert_true(settings.local.outer_nesterov.momentum == 0 &&
                settings.local.outer_nesterov.learning_rate == 1);
    expect_valid(&options, "--co2-tau 48 --co2-beta 0.6 --co2-alpha 2 --co2-phi 1 --co2-gap 3 "
                           "--bucket-mb 0.25 "
                           "--rank-accumulate 4,1");
    assert_true(options.rules.co2.inner_steps == 48 && options.rules.co2.beta == 0.6 &&
                options.rules.co2.alpha == 2 && options.rules.co2.phi == 1);
    assert_true(options.rules.co2.gap == 3);
    assert_string_equal(options.rank_accumulate, "4,1");
    assert_true(options.bucket_mb == 0.25);
    expect_valid(&options, "--acco-init round --co2-phi 0 --co2-eager on --link-us off --bucket-mb auto");
    assert_true(options.rules.acco.first_round == 0 && options.rules.co2.phi == 0 &&
                options.rules.co2.eager && options.link_us == 0 && options.bucket_mb == 0);
}

static void test_counts_take_suffixes(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t value;
    } cases[] = {{"7", 7},          {"1500k", 1500000},
                 {"2K", 2000},      {"2M", 2000000},
                 {"1.5M", 1500000}, {"1.001M", 1001000},
                 {"1e6", 1000000},  {"3G", 3000000000},
                 {"0.1k", 100},     {"9007199254740992", 9007199254740992}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options options;
        char line[64];
        snprintf(line, sizeof line, "--tokens %s", cases[i].text);
        expect_valid(&options, line);
        assert_int_equal(options.tokens, cases[i].value);
    }
    expect_refused("--tokens 1.5", "1.5 is not a whole number", "--tokens");
    expect_refused("--tokens 1.2345k", "not a whole number", "1 or more");
    expect_refused("--tokens 2Mk", "not a whole number", "2Mk");
    expect_refused("--tokens 2T", "not a whole number", "2T");
    expect_refused("--tokens 20000000000G", "out of range", "1 or more");
    expect_refused("--tokens 99999999999G", "out of range, the largest is 9007199254740992", "1 or more");
    expect_refused("--seed 99999999999", "out of range; allowed: 0 .. 4294967295", "");
    expect_refused("--micro-batch 2k", "not a whole number", "1 .. 65536"); // not a count of tokens
}

// At most 1023 bytes; empty texts and texts that begin with -- are allowed.
static void test_texts(void **state) {
    (void)state;
    Options options;
    Error error;
    char longest[1100];
    memset(longest, 'x', sizeof longest);
    longest[1023] = '\0';
    const char *words[] = {"--prompt", "", "--model", longest, "--data=--a=b c", NULL};
    assert_true(parse(&options, &error, words));
    assert_string_equal(options.model, longest);
    assert_string_equal(options.data, "--a=b c"); // only the first = splits
    longest[1023] = 'x';
    longest[1024] = '\0';
    assert_false(parse(&options, &error, words));
    expect_text("long model", error.text, "--model: the text is longer than 1023 bytes");
    const char *prompt[] = {"--prompt", longest, NULL};
    assert_false(parse(&options, &error, prompt));
    expect_text("long prompt", error.text, "longer than 1023 bytes; a file of --prompts may have more");
    const char *foreign[] = {"--prompt", "caf\xe9", NULL};
    assert_false(parse(&options, &error, foreign));
    expect_text("Latin-1", error.text, "--prompt: the text is not valid UTF-8");
    const OptionSpec *model = option_find("model");
    assert_true(option_set(model, &options, "a-long-name", &error)); // nothing of it stays
    assert_true(option_set(model, &options, "short", &error));
    assert_string_equal(options.model, "short");
    expect_valid(&options, "--slow-ms -0"); // is 0, also as text
    assert_false(signbit(options.slow_ms));
}

static void test_names_are_suggested(void **state) {
    (void)state;
    expect_refused("--optimzer acco",
                   "unknown option --optimzer: did you mean --optimizer? (--help lists all)", "");
    expect_refused("--optimzier acco", "did you mean --optimizer?", "");
    expect_refused("--micro_batch 3", "did you mean --micro-batch?", "");
    expect_refused("--Tokens 3", "did you mean --tokens?", "");
    expect_refused("--token 3", "did you mean --tokens?", "");
    expect_refused("-lr 3", "unknown option -lr: did you mean --lr?", "");
    expect_refused("--accum 3", "did you mean --accumulate?", "");
    expect_refused("--versoin", "did you mean --version?", "");
    expect_refused("--xyzzyplugh=3", "unknown option --xyzzyplugh (--help lists all)", "");
    expect_refused("--diloco-h 30", "unknown option --diloco-h: did you mean --diloco-H? (--help lists all)",
                   "");
    expect_refused("--streaming-p 2", "unknown option --streaming-p: did you mean --streaming-P?", "");
    expect_refused("--STREAMING-TAU 2", "did you mean --streaming-tau?", "");
    expect_refused("--H 30", "unknown option --H", "");
    expect_refused("--lrate 3", "unknown option --lrate: did you mean --lr?", "");
    expect_refused("--batch-size=8", "unknown option --batch-size: did you mean --micro-batch?", "");
    expect_refused("--learning_rate 1", "unknown option --learning_rate: did you mean --lr?", "");
    expect_refused("--log-every 5", "unknown option --log-every: did you mean --report-every?", "");
    expect_refused("--num_train_epochs 5", "did you mean --epochs?", "");
    expect_refused("--precision fp16", "fp16 is unknown (did you mean fp32?)", "auto, fp32, bf16 or fastest");
    expect_refused("--precision bfloat16", "bfloat16 is unknown (did you mean bf16?)", "");
    expect_refused("--device gpu", "gpu is unknown (did you mean cuda?)", "auto, cpu or cuda"); // and not cpu
    expect_refused("--co2_gap 1", "did you mean --co2-gap?", "");
    expect_refused("--rank-acumulate 1,2", "did you mean --rank-accumulate?", "");
    char all[256] = "";
    for (int i = 0; i < RULE_COUNT; i++) {
        const char *before = i == 0 ? "" : i + 1 < RULE_COUNT ? ", " : " or ";
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", before, RULES[i].rule->name);
    }
    expect_refused("--optimizer adco", "did you mean acco?", all);
    expect_refused("--optimizer adamw", "adamw is unknown; allowed: ", all);
    expect_refused("--optimizer DiLoCo", "did you mean diloco?", "");
    expect_refused("--wire fp4", "fp4 is unknown", "fp32, bf16, int8, int4 or e3m0");
    expect_refused("--wire same", "same is unknown", "fp32, bf16, int8, int4 or e3m0");
    expect_refused("--estimate-wire int5", "did you mean int8?",
                   "same, auto, fp32, bf16, int8, int4 or e3m0");
    expect_refused("trian", "unknown command trian (did you mean train?); commands: train", "");
    expect_refused(
        "serve",
        "unknown command serve; commands: train, sample, eval, plan, tokenize, average, export, help", "");
    expect_refused("plan there", "unexpected word there", "--name value, patterns of files in quotes");
    const char *const names[] = {"tiny", "36M", "125M"};
    assert_int_equal(name_distance("acco", "caco"), 1); // two letters swapped are one mistake
    assert_int_equal(name_distance("kitten", "sitting"), 3);
    assert_int_equal(name_distance("", "abc"), 3);
    assert_string_equal(nearest_name("126m", names, 3), "125M");
    assert_string_equal(nearest_name("tyni", names, 3), "tiny");
    assert_null(nearest_name("", names, 3));
    assert_null(nearest_name("t", names, 3)); // one letter may be the beginning of anything
    assert_null(nearest_name("medium", names, 3));
    char endless[400];
    memset(endless, 'a', sizeof endless - 1);
    endless[sizeof endless - 1] = '\0';
    assert_null(nearest_name(endless, names, 3));
}

static void test_bad_numbers(void **state) {
    (void)state;
    expect_refused("--epochs 0", "is out of range", "unset or"); // 0 does not say unset
    expect_refused("--weight-decay 1e-400", "is out of range", "1e-400");
    expect_refused("--keep-every -99999999999999999999", "is out of range; allowed", "1 or more");
    static const char *const whole[] = {"3x",
                                        "x",
                                        "1.0",
                                        "0x10",
                                        "1e3",
                                        "--1",
                                        "3,000",
                                        "",
                                        "nan",
                                        "99999999999999999999",
                                        "-99999999999999999999"};
    static const char *const reals[] = {"nan",   "inf", "-inf",  "infinity", "0x1p-3", "1e", "1..2",
                                        "1e-3x", "",    "1e999", "1e-999",   "1,5",    "-1"};
    char line[64];
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        snprintf(line, sizeof line, "--threads=%s", whole[i]);
        expect_refused(line, "--threads", "allowed: auto or 1 .. 4096");
    }
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        snprintf(line, sizeof line, "--lr=%s", reals[i]);
        expect_refused(line, "--lr", "allowed: auto or 1e-12 .. 100");
    }
    Options options;
    Error error;
    const char *words[] = {"--seed", " 1", NULL};
    assert_false(parse(&options, &error, words));
}

// Words such as auto stand for a number that cannot be given as a number.
static void test_ranges(void **state) {
    (void)state;
    expect_refused("--micro-batch 0", "0 is out of range", "allowed: auto or 1 .. 65536");
    expect_refused("--micro-batch 65537", "out of range", "1 .. 65536");
    expect_refused("--seq-len 0", "0 is out of range", "auto or 1 .. 1048576");
    expect_refused("--threads 0", "0 is out of range", "auto or 1");
    expect_refused("eval --from x --limit 0", "0 is out of range", "allowed: all, or 1 or more");
    expect_refused("--min-lr -1", "out of range", "auto or 0 .. 100");
    expect_refused("--slow-rank -1", "out of range", "none or 0");
    expect_refused("--lr 0", "out of range", "auto or");
    expect_refused("--beta1 1", "out of range", "0 .. 0.999999");
    expect_refused("--beta2 1.5", "out of range", "0 .. 0.999999");
    expect_refused("--tokens 99999999999999999999", "out of range", "1 or more");
    expect_refused("--seed -1", "out of range", "0 .. 4294967295");
    expect_refused("--overlap yes", "neither on nor off", "on or off");
    expect_refused("--acco-init 0", "0 is out of range", "round or 1 .. 1000000");
    expect_refused("--sequential -1", "out of range", "0 or more");
    expect_refused("--bucket-mb 0", "0 is out of range", "auto or 0.001 .. 1000000");
    expect_refused("--co2-tau 0", "out of range", "1 .. 1000000");
    expect_refused("--co2-beta 1", "out of range", "0 .. 0.999999");
    expect_refused("--co2-alpha 0", "out of range", "1e-06 .. 100");
    expect_refused("--co2-phi -1", "out of range", "off or 1e-12 .. 1000000");
    expect_refused("--diloco-H 0", "out of range", "1 .. 1000000");
    expect_refused("--diloco-outer-lr 0", "out of range", "1e-06 .. 100");
    expect_refused("--diloco-mu 1", "out of range", "0 .. 0.999999");
    expect_refused("--streaming-P 0", "out of range", "1 .. 1000000");
    expect_refused("--streaming-tau -1", "out of range", "0 .. 1000000");
    expect_refused("--streaming-alpha 1.5", "out of range", "0 .. 1");
    expect_refused("--streaming-alpha nan", "is not a number", "0 .. 1");
    expect_refused("--link-us -1", "out of range", "off or 0.001 .. 1000000");
}

static void test_missing_values_and_options_given_twice(void **state) {
    (void)state;
    expect_refused("--model", "--model needs a value: NAME|PATH", "");
    expect_refused("--model --data x", "--model needs a value", "NAME|PATH");
    expect_refused("--model=", "--model needs a value", "NAME|PATH");
    expect_refused("--optimizer", "--optimizer needs a value", "streaming-diloco or sparse-loco");
    expect_refused("--acco-split=", "--acco-split needs a value: wire|auto|half|SHARE", "");
    expect_refused("--lr 1 --seed 2 --lr 1", "--lr is given twice", "");
    expect_refused("--lr=1 --lr 2", "--lr is given twice", "");
}

static void test_messages_stay_one_short_line(void **state) {
    (void)state;
    Options options;
    Error error;
    char text[4000];
    memset(text, 'y', sizeof text - 1);
    text[3] = '\n';
    text[sizeof text - 1] = '\0';
    const char *value[] = {"--lr", text, NULL}, *name[] = {text, NULL}, *option[] = {"--x\ny", "1", NULL};
    assert_false(parse(&options, &error, value));
    expect_text("long value", error.text, "yyy?yyy");
    expect_text("long value", error.text, "allowed: auto");
    assert_false(parse(&options, &error, name));
    expect_text("long command", error.text,
                "commands: train, sample, eval, plan, tokenize, average, export, help");
    assert_false(parse(&options, &error, option));
    expect_text("newline in a name", error.text, "--x?y");
}

static void test_help_and_version_come_first(void **state) {
    (void)state;
    static const char *const help[] = {
        "--help",          "-h", "help", "plan --help", "--nonsense --lr x --help", "--version --help",
        "--help --version"};
    Options options;
    for (size_t i = 0; i < sizeof help / sizeof help[0]; i++) {
        expect_valid(&options, help[i]);
        assert_int_equal(options.command, COMMAND_HELP);
    }
    expect_valid(&options, "--version");
    assert_int_equal(options.command, COMMAND_VERSION);
    static const struct {
        const char *line, *topic;
    } topics[] = {{"help", ""},
                  {"-h", ""},
                  {"--help", "all"},
                  {"help --keep", "--keep"},
                  {"train --help", "all"},
                  {"plan --help", "plan"},
                  {"sample -h", "sample"},
                  {"eval --from x --help", "eval"}};
    for (size_t i = 0; i < sizeof topics / sizeof topics[0]; i++) {
        expect_valid(&options, topics[i].line);
        assert_int_equal(options.command, COMMAND_HELP);
        assert_string_equal(options.topic, topics[i].topic);
    }
    expect_refused("help keep lr", "help takes one topic, as in train_gpt help lr", "");
}

// ---- The configuration file -----------------------------------------------------------

// The command line wins over the file, whether it stands before or behind --config. Numbers
// may be written as on the command line; null is as good as not there.
static void test_file_and_precedence(void **state) {
    (void)state;
    static const char text[] =
        "{\"micro-batch\": 4, \"lr\": 1e-3,\n \"prompt\": \"a # \\\"b\\\\\\n\\u0001\",\n"
        " \"tokens\": \"5k\", \"overlap\": false, \"eps\": 1, \"acco-split\": 0.875,\n"
        " \"seq-len\": \"auto\", \"model\": null, \"val-data\": \"\"}";
    Options options;
    char path[256], line[700];
    scratch_path("good.conf", path);
    write_file(path, text, strlen(text));
    snprintf(line, sizeof line, "--lr 2e-3 --config %s --seq-len 9 --from C", path);
    expect_valid(&options, line);
    assert_int_equal(options.micro_batch, 4);
    assert_string_equal(options.prompt, "a # \"b\\\n\x01");
    assert_true(options.tokens == 5000 && !options.overlap && options.eps == 1);
    assert_string_equal(options.rules.acco.split, "0.875");
    assert_string_equal(options.model, "tiny");
    assert_string_equal(options.config, path);
    assert_true(options.learning_rate == 2e-3 && options.seq_len == 9);
}

// As some editors write them.
static void test_byte_order_mark_is_skipped(void **state) {
    (void)state;
    static const char text[] = "\xEF\xBB\xBF{\"tokens\": \"5k\", \"seed\": 3}\n";
    Options options;
    char path[256], line[700];
    scratch_path("good.conf", path);
    write_file(path, text, strlen(text));
    snprintf(line, sizeof line, "--config %s", path);
    expect_valid(&options, line);
    assert_true(options.tokens == 5000 && options.seed == 3);
}

static void expect_file_refused(const char *text, size_t length, const char *part) {
    Options options;
    Error error;
    char path[256], line[700];
    scratch_path("bad.conf", path);
    write_file(path, text, length);
    snprintf(line, sizeof line, "--config %s", path);
    if (parse_line(&options, &error, line)) { fail_msg("accepted: %s", text); }
    expect_text(text, error.text, part);
}

static void test_bad_files_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"{\"lr\": 1,\n\"micro-batch\": \"x\"}",
         "bad.conf: --micro-batch: x is not a whole number; allowed: auto or 1 .. 65536"},
        {"{\"microbatch\": 1}", "bad.conf: unknown option microbatch: did you mean micro-batch?"},
        {"{\"--lr\": 1}", "bad.conf: unknown option --lr: did you mean lr?"},
        {"{\"diloco-h\": 1}", "bad.conf: unknown option diloco-h: did you mean diloco-H?"},
        {"{\"learning-rate\": null}", "bad.conf: unknown option learning-rate: did you mean lr?"},
        {"{\"lr\": 1,\n \"lr\": 1}", "bad.conf:2: duplicate object key near '\"lr\"'"},
        {"lr = 1\n", "bad.conf:1: '[' or '{' expected near 'lr'; a configuration is a JSON object"},
        {"{\"lr\": 1,\n \"seed\" 2}", "bad.conf:2: ':' expected near '2'"},
        {"[1]", "bad.conf:1: no object; a configuration is a JSON object, as the config.json of a run"},
        {"{\"options\": 1}", "bad.conf: unknown option options"},
        {"", "bad.conf:1: '[' or '{' expected near end of file"},
        {"{\"lr\": \"\"}", "bad.conf: --lr:  is not a number"},
        {"{\"lr\": -1}", "bad.conf: --lr: -1 is out of range; allowed: auto or 1e-12 .. 100"},
        {"{\"seed\": 1.5}", "bad.conf: --seed: 1.5 is not a whole number"},
        {"{\"lr\": true}", "bad.conf: --lr: true is no value of an option; allowed: auto or 1e-12 .. 100"},
        {"{\"overlap\": 1}", "bad.conf: --overlap: 1 is neither on nor off; allowed: on or off"},
        {"{\"overlap\": [true]}", "bad.conf: --overlap: [true] is no value of an option; allowed: on or off"},
        {"{\"data\": {}}", "bad.conf: --data: {} is no value of an option; allowed: text"},
        {"{\"data\": \"\"}", "bad.conf: --data needs a value: PATH|builtin"},
        {"{\"wire\": \"fp4\"}", "bad.conf: --wire: fp4 is unknown"},
        {"{\"config\": \"other\"}", "bad.conf: a configuration file cannot name another one"},
        {"{\"prompt\": \"\\u0000\"}", "bad.conf:1: "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_file_refused(cases[i].text, strlen(cases[i].text), cases[i].part);
    }
    expect_file_refused("{}\0", 3, "bad.conf:1: end of file expected near");
    expect_refused("--config /does/not/exist", "cannot read /does/not/exist: No such file or directory",
                   "--config");
    expect_refused("--config /", "cannot read /: Is a directory", "--config");
}

// Whatever bytes a file has, reading it gives options or a message of one line.
static void test_random_files(void **state) {
    (void)state;
    static const char letters[] = "{}\"lr\":,[]\n\\u0 prompt-seed19.e\t";
    uint64_t random = 88172645463325252u;
    char path[256], text[200];
    scratch_path("random.conf", path);
    for (int round = 0; round < 3000; round++) {
        size_t length = 0;
        while (length < sizeof text) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if (random % 97 == 0) { break; }
            text[length++] =
                random % 31 == 0 ? (char)(random >> 20) : letters[(random >> 8) % (sizeof letters - 1)];
        }
        Options options;
        Error error;
        write_file(path, text, length);
        options_defaults(&options);
        memset(&error, 0, sizeof error);
        bool has[OPTION_COUNT_OF_TABLE] = {false};
        if (!options_read_file(path, &options, has, &error)) {
            assert_true(error.text[0] != '\0' && strchr(error.text, '\n') == NULL);
        }
    }
}

// A run that goes on does not take these from the one before it.
static void test_options_of_one_run(void **state) {
    (void)state;
    char names[1024] = "";
    for (EACH_OPTION(option)) {
        if (option->of_one_run) { text_join(names, sizeof names, ", ", "%s", option->name); }
    }
    assert_string_equal(names, "decay-now, ranks, resume, fresh-moments, out, trace, config");
}

// Sets every option to something that is not its default, saves, reads, and compares the
// bytes.
static void test_save_reloads_bit_for_bit(void **state) {
    (void)state;
    static const double reals[] = {
        1.0 / 3, 1e-9, 0.1 + 0.2, 5e-324 * 4503599627370496.0 * 1e290, 0.9999989999999999, 2.0 / 3e5};
    static const char *const texts[] = {"# x", " lead",        "trail ",      "\"", "a\\b", "a\"b\\",
                                        "\n",  "\t\x01\x7f\r", "caf\xc3\xa9", "#",  "a#b",  "auto"};
    char path[256];
    scratch_path("saved.conf", path);
    for (int round = 0; round < 24; round++) {
        Options options, loaded;
        Error error;
        options_defaults(&options);
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            void *field = option_field(option, &options);
            bool replaces = false;
            for (EACH_OPTION(other)) {
                replaces = replaces || option_relates(option, OPTION_INSTEAD_OF, other);
            }
            if (option->offset == offsetof(Options, config) || replaces) { continue; }
            if (option->type == OPTION_TEXT) {
                assert_true(option_set(option, &options, texts[(i + round) % 12], &error));
            }
            if (option->type == OPTION_SWITCH) { *(bool *)field = round % 2 == 0; }
            if (option->type == OPTION_CHOICE) {
                int count = 0;
                while (option->choices[count] != NULL) { count++; }
                *(OptionChoice *)field = round % count;
            }
            if (option->type == OPTION_INTEGER || option->type == OPTION_COUNT) {
                bool word = round == 7 && option->word != NULL;
                *(int64_t *)field = word ? (int64_t)option->word_value : (int64_t)option->minimum + round * 3;
            }
            if (option->type != OPTION_REAL) { continue; }
            double value = option->minimum + reals[(i + round) % 6];
            *(double *)field = value <= option->maximum ? value : option->maximum;
            if (round == 7 && option->word != NULL) { *(double *)field = option->word_value; }
        }
        if (!options_save_file(&options, path, &error)) { fail_msg("%s", error.text); }
        options_defaults(&loaded);
        bool has[OPTION_COUNT_OF_TABLE] = {false};
        if (!options_read_file(path, &loaded, has, &error)) { fail_msg("%s", error.text); }
        assert_same_options(&options, &loaded);
    }
}

// What the program has chosen is left to it in a template, but for measurements, and kept where
// the same run goes on; what the user has changed in the file counts.
// What was measured holds for as many ranks as have measured it.
static void test_measured_values(void **state) {
    (void)state;
    char path[] = "/tmp/acco-options-XXXXXX";
    const OptionSpec *split = option_find("acco-split"), *rate = option_find("lr");
    Options options;
    Error error;
    close(mkstemp(path));
    for (int ranks = 1; ranks <= 3; ranks++) {
        OptionSource sources[OPTION_COUNT_OF_TABLE] = {FROM_DEFAULT};
        options_defaults(&options);
        strcpy(options.rules.acco.split, "auto");
        assert_true(options_leave(&options, options.rules.acco.split));
        assert_true(options_leave(&options, &options.learning_rate));
        strcpy(options.rules.acco.split, "0.75");
        options.learning_rate = 0.5;
        options.measuring_ranks = 2;
        assert_true(options_save_file(&options, path, &error));
        options_defaults(&options);
        assert_true(options_take(path, FROM_RUN, &options, sources, &error));
        options_measure_anew(&options, ranks);
        assert_string_equal(options.rules.acco.split, ranks == 2 ? "0.75" : "auto");
        assert_true(options.chosen[split - option_table] == (ranks == 2));
        assert_true(options.learning_rate == 0.5 && options.chosen[rate - option_table]);
    }
    unlink(path);
}

static void test_chosen_values(void **state) {
    (void)state;
    char path[] = "/tmp/acco-options-XXXXXX";
    Options options, loaded;
    Error error;
    close(mkstemp(path));
    options_defaults(&options);
    options.minimum_learning_rate = 0.25;
    strcpy(options.rules.acco.split, "auto");
    assert_true(options_leave(&options, &options.learning_rate));
    assert_true(options_leave(&options, &options.warmup));
    assert_true(options_leave(&options, options.rules.acco.split));
    assert_false(options_leave(&options, &options.minimum_learning_rate));
    options.learning_rate = 0.5;
    options.warmup = 12;
    strcpy(options.rules.acco.split, "0.75");
    assert_true(options_save_file(&options, path, &error));
    for (int again = 0; again < 2; again++) {
        OptionSource sources[OPTION_COUNT_OF_TABLE] = {FROM_DEFAULT};
        options_defaults(&loaded);
        if (!options_take(path, again ? FROM_RUN : FROM_FILE, &loaded, sources, &error)) {
            fail_msg("%s", error.text);
        }
        assert_true(loaded.learning_rate == (again ? 0.5 : 0) && loaded.warmup == (again ? 12 : -1));
        assert_true(loaded.minimum_learning_rate == 0.25);
        assert_string_equal(loaded.rules.acco.split, "0.75");
        assert_true(loaded.chosen[option_find("lr") - option_table] == (bool)again);
        assert_true(loaded.chosen[option_find("acco-split") - option_table] == (bool)again);
        assert_false(loaded.chosen[option_find("min-lr") - option_table]);
    }
    const char *const files[] = {"{\"lr\": 0.125, \"chosen\": {\"lr\": 0.5}}", "{\"chosen\": null}"};
    for (int i = 0; i < 2; i++) {
        OptionSource sources[OPTION_COUNT_OF_TABLE] = {FROM_DEFAULT};
        FILE *file = fopen(path, "w");
        fputs(files[i], file);
        fclose(file);
        options_defaults(&loaded);
        assert_true(options_take(path, FROM_FILE, &loaded, sources, &error));
        assert_true(loaded.learning_rate == (i == 0 ? 0.125 : 0));
        assert_false(loaded.chosen[option_find("lr") - option_table]);
    }
    unlink(path);
}

static void test_save_failures(void **state) {
    (void)state;
    Options options;
    Error error;
    options_defaults(&options);
    assert_false(options_save_file(&options, "/does/not/exist/x", &error));
    expect_text("save", error.text, "cannot create /does/not/exist/x: No such file");
    // On a full disk the file that was there stays as it was.
    char directory[] = "/tmp/acco-options-XXXXXX", path[64], beside[80];
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/config.json", directory);
    snprintf(beside, sizeof beside, "%s.new", path);
    options.seed = 77;
    if (!options_save_file(&options, path, &error)) { fail_msg("%s", error.text); }
    options.seed = 78;
    assert_int_equal(symlink("/dev/full", beside), 0);
    assert_false(options_save_file(&options, path, &error));
    expect_text("save", error.text, "/config.json: No space left on device");
    assert_int_equal(access(beside, F_OK), -1);
    bool has[OPTION_COUNT_OF_TABLE] = {false};
    if (!options_read_file(path, &options, has, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(options.seed, 77);
    unlink(path);
    rmdir(directory);
}

// ---- Options that would be ignored ----------------------------------------------------

static void test_options_of_other_commands_are_refused(void **state) {
    (void)state;
    Options options;
    expect_refused("sample --from C --model 36M", "--model has no effect on train_gpt sample",
                   "it is for train and plan");
    expect_refused("eval --from C --moments bf16", "--moments has no effect on train_gpt eval", "");
    expect_refused("sample --from C --tokens 5", "--tokens has no effect on train_gpt sample", "");
    expect_refused("eval --from C --data f --out x", "--out has no effect on train_gpt eval",
                   "it is for train and plan");
    expect_refused("eval --sample-tokens 5", "--sample-tokens has no effect on train_gpt eval", "");
    expect_refused("--task lambada", "--task has no effect on train_gpt train: it is for eval", "");
    expect_refused("plan --limit 3", "--limit has no effect on train_gpt plan", "");
    expect_contradiction("eval --from C --data f --task lambada --stride 4",
                         "--stride 4 does not go together with --task lambada: leave one of them away");
    expect_contradiction("eval --from C --data f --task hellaswag --stride 4", "with --task hellaswag");
    expect_valid(&options, "sample --from C --prompt x --top-k 3 --temperature 1 --seed 2 --threads 1");
    expect_valid(&options, "eval --from C --data f --task lambada --limit 3 --device cpu --seq-len 8");
    expect_valid(&options, "plan --ranks 8 --device cuda --save-every 10 --out x");
}

static void test_rivals_are_refused(void **state) {
    (void)state;
    expect_refused("--from C --model 36M", "--from and --model: one takes the place of the other",
                   "choose one");
    expect_refused("--model tiny --finetune C", "--finetune and --model", "choose one");
    expect_refused("plan --from C --model tiny", "--from and --model", "choose one");
    expect_refused("--from a --finetune b", "--from and --finetune: one takes the place", "choose one");
    expect_refused("--rank-accumulate 4 --accumulate 8", "--rank-accumulate and --accumulate", "choose one");
    expect_refused("--epochs 2 --tokens 1M", "--epochs and --tokens", "choose one");
    expect_refused("--accumulate auto --rank-accumulate 2,2", "choose one", "");
}

// An option on the command line takes the place of its rival in the file.
static void test_nearer_rival_wins(void **state) {
    (void)state;
    static const char text[] =
        "{\"from\": \"C\", \"model\": null, \"rank-accumulate\": \"4,2\", \"accumulate\": null}"; // as saved
    static const char other[] = "{\"model\": \"36M\", \"accumulate\": 4}";
    Options options;
    char path[256], line[700];
    scratch_path("good.conf", path);
    write_file(path, text, strlen(text));
    snprintf(line, sizeof line, "--config %s", path);
    expect_valid(&options, line);
    assert_string_equal(options.from, "C");
    assert_string_equal(options.rank_accumulate, "4,2");
    snprintf(line, sizeof line, "--config %s --model 36M --accumulate 3", path);
    expect_valid(&options, line);
    assert_string_equal(options.from, "");
    assert_string_equal(options.model, "36M");
    assert_string_equal(options.rank_accumulate, "");
    assert_int_equal(options.accumulate, 3);
    snprintf(line, sizeof line, "--config %s --finetune D", path);
    expect_valid(&options, line);
    assert_string_equal(options.from, "");
    assert_string_equal(options.finetune, "D");
    write_file(path, other, strlen(other));
    snprintf(line, sizeof line, "--config %s --from C --rank-accumulate 4,2", path);
    expect_valid(&options, line);
    assert_string_equal(options.from, "C");
    assert_string_equal(options.model, "tiny");
    assert_string_equal(options.rank_accumulate, "4,2");
    assert_int_equal(options.accumulate, 2);
    snprintf(line, sizeof line, "--config %s --data f --epochs 0.5", path);
    expect_valid(&options, line);
    assert_true(options.epochs == 0.5);
    snprintf(line, sizeof line, "--config %s --tokens 5k --epochs unset", path); // unset says nothing
    expect_valid(&options, line);
    assert_true(options.epochs == 0 && options.tokens == 5000);
    snprintf(line, sizeof line, "--config %s --rank-accumulate=", path); // an empty text says nothing
    expect_valid(&options, line);
    assert_int_equal(options.accumulate, 4);
    static const char both[] = "{\"model\": \"36M\", \"from\": \"C\"}";
    Error error;
    write_file(path, both, strlen(both));
    snprintf(line, sizeof line, "--config %s", path);
    assert_false(parse_line(&options, &error, line));
    expect_text(line, error.text, "--from and --model: one takes the place of the other; choose one");
    // What has won over the file is still a rival of what else the line has.
    static const char like[] = "{\"like\": \"R\"}";
    write_file(path, like, strlen(like));
    snprintf(line, sizeof line, "plan --config %s --compute-ms 3 --gpu-tflops 4 --gpu-memory 8G", path);
    assert_false(parse_line(&options, &error, line));
    expect_text(line, error.text, "--gpu-tflops and --compute-ms: one takes the place of the other");
}

// ---- Options that do not fit together -------------------------------------------------

static void test_acco_split(void **state) {
    (void)state;
    expect_contradiction("--acco-split haf",
                         "--acco-split haf is no split (did you mean half?); allowed: wire, auto, half, or "
                         "the share of the micro-batches during the commit, above 0 and below 1, such as");
    static const char *const splits[] = {"0",   "1",      "-0.5", "1e3", "nan",
                                         "inf", "0x1p-1", "0.5x", "3:1", "+.5"};
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++) {
        char line[64];
        snprintf(line, sizeof line, "--acco-split %s", splits[i]);
        expect_contradiction(line, "is no split; allowed: wire");
    }
    expect_consistent("--acco-split 0.875 --accumulate 3");
    expect_consistent("--acco-split 1e-3 --estimate-wire auto");
    expect_contradiction("--acco-split 0.875 --accumulate auto", "--acco-split 0.875 does not go together");
    expect_contradiction("--acco-split auto --accumulate auto", "with --accumulate auto: leave one of them");
    expect_contradiction("--estimate-wire auto --accumulate auto",
                         "with --accumulate auto: leave one of them");
    expect_consistent("--estimate-wire int8 --accumulate auto");
    expect_contradiction("--acco-split half --optimizer dpu", "--acco-split belongs to --optimizer acco");
}

// --save-every takes times in seconds, minutes and hours, of a second at least.
static void test_times_have_units(void **state) {
    (void)state;
    static const struct {
        const char *line;
        double seconds;
    } cases[] = {{"--save-every 90s", 90}, {"--save-every 10m", 600}, {"--save-every 2.5h", 9000}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options options;
        SaveTimes times;
        Error error;
        expect_valid(&options, cases[i].line);
        assert_true(options_save_times(&options, &times, &error));
        assert_true(times.seconds == cases[i].seconds && times.commits == 0 && !times.never);
    }
    static const char *const wrong[] = {"0.5s", "0", "-1", "10mx", "1e9h", "1.5", "s"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char line[64];
        snprintf(line, sizeof line, "--save-every %s", wrong[i]);
        expect_contradiction(line, "is not valid; allowed: a number of commits, a time of 1s or more");
    }
}

static void test_contradictions(void **state) {
    (void)state;
    expect_contradiction("--accumulate 1", "--accumulate 1: acco computes a commit in 2 rounds, of one "
                                           "micro-batch each at least; use 2 or more");
    expect_consistent("--accumulate 3");
    expect_contradiction("--accumulate auto --overlap off", "--overlap off: leave one of them away");
    expect_contradiction("--accumulate auto --lr-by commits --optimizer dpu",
                         "--accumulate auto does not go together with --lr-by commits");
    expect_consistent("--accumulate 3 --lr-by commits --overlap off");
    expect_contradiction("plan --precision fastest", "--precision fastest is measured where training begins");
    expect_contradiction("--lr 1e-3 --min-lr 2e-3", "--min-lr 0.002 is above --lr 0.001");
    expect_contradiction("--schedule constant --min-lr 0",
                         "--min-lr 0 does not go together with --schedule constant: leave one of them away");
    expect_contradiction("--lr 10 --weight-decay 0.1", "would erase the parameters");
    expect_refused("--ranks 2", "--ranks has no effect on train_gpt train: it is for plan", "");
    expect_refused("--gpu-memory 80G", "--gpu-memory has no effect on train_gpt train", "");
    expect_refused("plan --like x --compute-ms 3", "--like and --compute-ms: one takes the place", "");
    expect_consistent("plan --json x --like runs/a");
    expect_contradiction("--exchange library --wire int8", "--exchange library does not go together");
    expect_consistent("--exchange two-level --wire int8");
    expect_consistent("--exchange library --wire bf16");
    expect_contradiction("--exchange library --estimate-wire int8",
                         "--estimate-wire int8 does not go together");
    expect_contradiction("--exchange library --estimate-wire auto",
                         "--estimate-wire auto does not go together");
    expect_consistent("--exchange library --estimate-wire bf16");
    expect_consistent("--exchange library --optimizer ddp");
    expect_contradiction(
        "plan --gpu-memory 80G --device cpu",
        "--gpu-memory 80000000000 does not go together with --device cpu: leave one of them away");
    expect_contradiction("--slow-ms 3", "--slow-ms needs --slow-rank");
    expect_contradiction("--resume auto", "--resume needs --out, whose default, auto, does not fit");
    expect_consistent("--resume runs/a --optimizer acco");
    expect_contradiction("--slow-rank 0", "--slow-rank needs --slow-ms");
    expect_refused("plan --gpu-memory 80GB", "80GB is not a whole number", "k, M or G may follow, as in 80G");
    expect_consistent("--on-spike rollback --save-every 10m");
    expect_consistent("--on-spike rollback --save-every 100");
    expect_contradiction("--val-data x --val-batches none",
                         "--val-data x does not go together with --val-batches none");
    expect_contradiction("--prompt x --sample-tokens none",
                         "--prompt x does not go together with --sample-tokens none");
    expect_contradiction("--epochs 2", "--epochs needs --data, whose default, builtin, does not fit");
    expect_contradiction("--sample-every 5 --sample-tokens none",
                         "--sample-every 5 does not go together with --sample-tokens none");
    static const char *const fine[] = {"--accumulate 3 --optimizer ddp",
                                       "--accumulate 1 --optimizer zero1",
                                       "--accumulate auto",
                                       "--lr 1e-3 --min-lr 1e-3",
                                       "--schedule constant",
                                       "--slow-rank 1 --slow-ms 5",
                                       "--min-lr 1",
                                       "--val-data builtin",
                                       "--val-batches none"};
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) { expect_consistent(fine[i]); }
}

static void test_options_of_other_rules_are_refused(void **state) {
    (void)state;
    expect_contradiction("--co2-tau 4",
                         "--co2-tau belongs to --optimizer co2, this run uses acco: leave it at 12");
    expect_contradiction("--co2-tau 4 --optimizer diloco",
                         "--co2-tau belongs to --optimizer co2, this run uses diloco");
    expect_contradiction("--co2-beta 0.2 --optimizer ddp",
                         "--co2-beta belongs to --optimizer co2, this run uses ddp");
    expect_contradiction("--co2-alpha 0.5", "--co2-alpha belongs to");
    expect_contradiction("--co2-phi 1", "this run uses acco: leave it at off");
    expect_contradiction("--co2-gap 1",
                         "--co2-gap belongs to --optimizer co2, this run uses acco: leave it at 2");
    expect_contradiction(
        "--diloco-H 10 --optimizer co2",
        "--diloco-H belongs to --optimizer diloco or streaming-diloco, this run uses co2: leave it at 30");
    expect_contradiction("--diloco-outer-lr 1",
                         "--diloco-outer-lr belongs to --optimizer diloco or streaming-diloco");
    expect_contradiction("--diloco-mu 0", "--diloco-mu belongs to --optimizer diloco or streaming-diloco");
    expect_contradiction(
        "--streaming-P 3 --optimizer diloco",
        "--streaming-P belongs to --optimizer streaming-diloco, this run uses diloco: leave it at 2");
    expect_contradiction("--streaming-tau 0", "--streaming-tau belongs to");
    expect_contradiction("--streaming-alpha 0 --optimizer diloco", "--streaming-alpha belongs to");
    expect_contradiction(
        "--bucket-mb 1",
        "--bucket-mb belongs to --optimizer ddp or zero1, this run uses acco: leave it at auto");
    expect_contradiction(
        "--sequential 1 --optimizer zero1",
        "--sequential belongs to --optimizer dpu, acco-wp or acco, this run uses zero1: leave it at 0");
    expect_contradiction("--acco-init 1 --optimizer dpu",
                         "--acco-init belongs to --optimizer acco, this run uses dpu: leave it at round");
    expect_contradiction("--acco-init 1 --optimizer acco-wp",
                         "--acco-init belongs to --optimizer acco, this run uses acco-wp");
    expect_contradiction("--estimate-wire bf16 --optimizer dpu",
                         "--estimate-wire belongs to --optimizer acco, this run uses dpu: leave it "
                         "at same");
    expect_contradiction("--rank-accumulate 2,2 --optimizer co2",
                         "--rank-accumulate belongs to --optimizer ddp, zero1, dpu, acco-wp or acco, this "
                         "run uses co2: leave it empty");
    static const char *const fine[] = {
        "--co2-tau 4 --co2-beta 0.2 --co2-alpha 0.5 --co2-phi 1 --co2-gap 1 --optimizer co2",
        "--co2-tau 12 --diloco-H 30 --acco-init round --bucket-mb auto --optimizer ddp",
        "--diloco-H 7 --diloco-outer-lr 1 --diloco-mu 0 --optimizer diloco",
        "--diloco-H 9 --streaming-P 3 --streaming-tau 2 --streaming-alpha 0 --optimizer streaming-diloco",
        "--bucket-mb 1 --optimizer ddp",
        "--bucket-mb 1 --optimizer zero1",
        "--sequential 9 --optimizer dpu",
        "--sequential 9 --optimizer acco-wp",
        "--sequential 9 --acco-init 1 --estimate-wire int8 --wire bf16 --optimizer acco",
        "--rank-accumulate 3,1 --optimizer dpu",
        "--link-us 100 --trace x.json --wire e3m0 --optimizer diloco"};
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) { expect_consistent(fine[i]); }
}

// A run saves every option. Its file can be used with another rule, unless an option of
// the old rule was set.
static void test_options_of_other_rules_are_refused_in_files(void **state) {
    (void)state;
    Options options;
    Error error;
    char path[256], line[700];
    scratch_path("saved.conf", path);
    expect_valid(&options, "--optimizer co2 --wire int8");
    if (!options_save_file(&options, path, &error)) { fail_msg("%s", error.text); }
    snprintf(line, sizeof line, "--config %s --optimizer streaming-diloco", path);
    expect_consistent(line);
    expect_valid(&options, "--optimizer co2 --co2-gap 3");
    if (!options_save_file(&options, path, &error)) { fail_msg("%s", error.text); }
    snprintf(line, sizeof line, "--config %s", path);
    expect_consistent(line);
    snprintf(line, sizeof line, "--config %s --optimizer ddp", path);
    expect_contradiction(line, "--co2-gap belongs to --optimizer co2, this run uses ddp: leave it at 2");
}

// --accumulate auto is for overlapped rules only.
static void test_accumulate_auto_is_for_overlapped_rules(void **state) {
    (void)state;
    expect_contradiction(
        "--accumulate auto --optimizer ddp",
        "--accumulate auto needs --optimizer dpu, acco-wp or acco: ddp takes a fixed number");
    expect_contradiction("--accumulate auto --optimizer zero1", "zero1 takes a fixed number");
    expect_contradiction("--accumulate auto --optimizer co2", "co2 takes a fixed number");
    expect_contradiction("--accumulate auto --optimizer diloco", "diloco takes a fixed number");
    expect_contradiction("--accumulate auto --optimizer streaming-diloco", "takes a fixed number");
    expect_consistent("--accumulate auto --optimizer acco");
    expect_consistent("--accumulate auto --optimizer acco-wp");
    expect_consistent("--accumulate auto --optimizer dpu");
    expect_consistent("--accumulate 1 --optimizer acco-wp"); // only acco has two rounds per commit
    expect_consistent("--accumulate 3 --optimizer dpu");
    expect_consistent("--accumulate 3 --optimizer co2");
}

static void test_fragments_fit_their_period(void **state) {
    (void)state;
#define STREAMING "--optimizer streaming-diloco "
    expect_contradiction(STREAMING "--streaming-P 4",
                         "--diloco-H 30 is not a multiple of --streaming-P 4: fragments are sent every H/P "
                         "steps; use 32");
    expect_contradiction(STREAMING "--diloco-H 3 --streaming-P 4",
                         "--diloco-H 3 is not a multiple of --streaming-P 4: fragments are sent every H/P "
                         "steps; use 4");
    expect_contradiction(STREAMING "--streaming-P 10 --streaming-tau 3",
                         "--streaming-tau 3 is not below H/P = 3: a fragment must arrive before the next one "
                         "is sent; use 0 .. 2");
    expect_contradiction(
        STREAMING "--diloco-H 2",
        "--streaming-tau 1 is not below H/P = 1: a fragment must arrive before the next one is "
        "sent; use 0");
    expect_consistent(STREAMING "--streaming-P 10 --streaming-tau 2");
    expect_consistent(STREAMING "--diloco-H 2 --streaming-tau 0");
    expect_consistent(STREAMING "--diloco-H 1 --streaming-P 1 --streaming-tau 0");
    expect_consistent("--optimizer diloco --diloco-H 1"); // no fragments
    expect_contradiction("--optimizer sparse-loco --sparse-H 4 --sparse-tau 4",
                         "--sparse-tau 4 is not below --sparse-H 4: an exchange must end before the next one "
                         "begins; use 0 .. 3");
    expect_contradiction("--optimizer sparse-loco --sparse-H 1 --sparse-tau 2", "next one begins; use 0");
    expect_consistent("--optimizer sparse-loco --sparse-H 4 --sparse-tau 3");
#undef STREAMING
}

// Each fragment has a layer. Their number is known only with the model.
static void test_fragments_have_layers(void **state) {
    (void)state;
    const DilocoOptions options = {.inner_steps = 12, .fragments = 3};
    for (int layers = 0; layers < 5; layers++) {
        Error error = {""};
        bool good = streaming_diloco_check(&options, layers, &error);
        assert_int_equal(good, layers == 0 || layers >= 3); // 0: not known yet
        if (layers == 1) { assert_non_null(strstr(error.text, "the model has only 1 layer to make")); }
        if (layers == 2) {
            assert_non_null(strstr(error.text, "--streaming-P 3: the model has only 2 layers"));
        }
    }
}

static void test_rank_lists(void **state) {
    (void)state;
    static const char *const bad[] = {
        ",",     "4,",   ",4",   "4,,1", "4,0", "4,-1", "4;1",     "4,x",
        "4,1.0", "+4,1", "4, 1", " 4",   "4 ",  "auto", "1000001", "99999999999999999999,1"};
    Options options;
    Error error;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const char *words[] = {"--optimizer", "zero1", "--rank-accumulate", bad[i], NULL};
        if (!parse(&options, &error, words)) { fail_msg("%s: %s", bad[i], error.text); }
        if (options_check(&options, &error)) { fail_msg("%s is accepted", bad[i]); }
        expect_text(bad[i], error.text,
                    "allowed: a whole number 1 .. 1000000 for each rank, with commas between, as 4,4,1,1");
    }
    expect_contradiction("--rank-accumulate 4,x", "--rank-accumulate 4,x: rank 1 has no valid number");
    expect_contradiction("--rank-accumulate 4,1",
                         "--rank-accumulate: rank 1's 1: acco computes a commit in 2 "
                         "rounds, of one micro-batch each at least; use 2 or more");
    expect_consistent("--rank-accumulate 4,3");
    expect_consistent("--rank-accumulate 4,3 --optimizer acco-wp");
    expect_consistent("--rank-accumulate 1000000,1 --optimizer ddp");
}

static void test_micro_batches_of_ranks(void **state) {
    (void)state;
    Options options;
    Error error;
    expect_valid(&options, "--optimizer ddp --rank-accumulate 4,12,1");
    assert_int_equal(options_rank_accumulate(&options, 0), 4);
    assert_int_equal(options_rank_accumulate(&options, 1), 12);
    assert_int_equal(options_rank_accumulate(&options, 2), 1);
    assert_int_equal(options_total_accumulate(&options, 3), 17);
    assert_true(options_check_ranks(&options, 3, 256, &error));
    assert_false(options_check_ranks(&options, 2, 256, &error));
    expect_text("ranks", error.text,
                "--rank-accumulate 4,12,1 has 3 numbers for 2 ranks: give one for each rank");
    assert_false(options_check_ranks(&options, 4, 256, &error));
    expect_text("ranks", error.text, "3 numbers for 4 ranks");
    expect_valid(&options, "--rank-accumulate 4");
    assert_true(options_check_ranks(&options, 1, 256, &error));
    assert_false(options_check_ranks(&options, 2, 256, &error));
    expect_text("ranks", error.text, "--rank-accumulate 4 has 1 number for 2 ranks");
    expect_valid(&options, "--accumulate 6");
    assert_int_equal(options_rank_accumulate(&options, 2), 6);
    assert_int_equal(options_total_accumulate(&options, 3), 18);
    expect_valid(&options, "--accumulate auto"); // at least one in each of two rounds
    assert_int_equal(options_rank_accumulate(&options, 1), 0);
    assert_int_equal(options_total_accumulate(&options, 2), 4);
    expect_valid(&options, "--accumulate auto --optimizer dpu");
    assert_int_equal(options_total_accumulate(&options, 2), 2);
}

static void test_contradictions_with_ranks(void **state) {
    (void)state;
    Options options;
    Error error;
    expect_valid(&options, "--slow-rank 2 --slow-ms 1");
    assert_true(options_check_ranks(&options, 3, 256, &error));
    assert_false(options_check_ranks(&options, 2, 256, &error));
    expect_text("slow rank", error.text, "none or 0 .. 1");
    expect_valid(&options, "--tokens 8192 --micro-batch 8 --accumulate 2");
    assert_true(options_check_ranks(&options, 2, 256, &error));
    assert_false(options_check_ranks(&options, 3, 256, &error));
    expect_text("tokens", error.text, "--tokens 8192 is less than one commit");
    expect_text("tokens", error.text, "6 micro-batches on 3 ranks x 8 sequences x 256 tokens = 12288");
    expect_text("tokens", error.text, "or --accumulate");
    expect_valid(&options, "--tokens 8192 --micro-batch 8 --rank-accumulate 2,4");
    assert_false(options_check_ranks(&options, 2, 256, &error));
    expect_text("tokens", error.text, "6 micro-batches on 2 ranks x 8 sequences x 256 tokens = 12288");
    expect_text("tokens", error.text, "or --rank-accumulate");
    expect_valid(&options,
                 "--data f --epochs 2 --micro-batch 1"); // how many tokens these are is not known yet
    options.tokens = 0;
    assert_true(options_check_ranks(&options, 3, 256, &error));
}

// ---- What is printed ------------------------------------------------------------------

// What help prints on a topic; NULL: it is refused.
static char *help_on(const char *topic, Error *error) {
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    bool known = options_print_topic(file, topic, error);
    fclose(file);
    if (known) { return text; }
    free(text);
    return NULL;
}

static void test_help_is_complete_and_narrow(void **state) {
    (void)state;
    Error error = {""};
    char *help = help_on("all", &error), *markdown = print_to_text(options_print_markdown), name[64];
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        snprintf(name, sizeof name, "\n  --%s ", option_table[i].name);
        if (strstr(help, name) == NULL) { fail_msg("--help lacks %s", name); }
        snprintf(name, sizeof name, "\n| `--%s", option_table[i].name);
        if (strstr(markdown, name) == NULL) { fail_msg("help markdown lacks %s", name); }
    }
    for (int group = 0; group < GROUP_COUNT; group++) {
        assert_non_null(strstr(help, option_groups[group].title));
    }
    assert_non_null(strstr(help, "[default auto; auto or 1 .. 65536]"));
    assert_non_null(strstr(help, "--accumulate N|auto"));
    assert_non_null(strstr(help, "  --co2-phi X|off\n            Only for co2. Limit for every"));
    assert_non_null(
        strstr(help, "  --diloco-H N\n            Only for diloco or streaming-diloco. Inner steps"));
    assert_non_null(strstr(help, "[default round; round or 1 .. 1000000]"));
    assert_non_null(
        strstr(markdown,
               "| `--acco-init N\\|round` | round | round or 1 .. 1000000 | Only for acco. Micro-batches"));
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        assert_non_null(strstr(markdown, option_table[i].help));
    }
    assert_non_null(strstr(markdown, "| `--accumulate N\\|auto` | 2 | auto or 1 .. 1000000 | "));
    for (char *line = strtok(help, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        if (strlen(line) > 80 || line[strlen(line) - 1] == ' ') {
            fail_msg("--help: a line over 80 columns, or with a blank at its end: %s", line);
        }
    }
    for (char *line = strtok(markdown, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        int bars = 0;
        for (char *c = line; *c != '\0'; c++) { bars += *c == '|' && (c == line || c[-1] != '\\'); }
        if (line[0] == '|' && bars != 5) { fail_msg("help markdown: a row without four cells: %s", line); }
    }
    free(help);
    free(markdown);
}

static void expect_help(const char *topic, int least_options, int most_options, const char *part) {
    Error error = {""};
    char *text = help_on(topic, &error);
    int options = 0;
    if (text == NULL) { fail_msg("help %s: %s", topic, error.text); }
    for (const char *at = text; (at = strstr(at, "\n  --")) != NULL; at++) { options++; }
    options += strncmp(text, "  --", 4) == 0;
    if (strstr(text, part) == NULL || options < least_options || options > most_options) {
        fail_msg("help %s: %d options in %s", topic, options, text);
    }
    free(text);
}

static void test_help_by_topic(void **state) {
    (void)state;
    enum { ALL = OPTION_COUNT_OF_TABLE };
    Error error = {""};
    expect_help("all", ALL, ALL, "  --optimizer ddp|");
    expect_help("keep", 1, 1, "  --keep N ");
    expect_help("--keep", 1, 1, "How many of the latest checkpoints");
    expect_help("rates", 12, 20, "Learning rate and AdamW");
    expect_help("acco", 4, 12, "--estimate-wire");
    expect_help("diloco", 4, 12, "--diloco-H");
    expect_help("sample", 14, 14, "--temperature");
    expect_help("eval", 14, 14, "--stride");
    expect_help("plan", 12, 12, "--host-mbit");
    expect_help("train", 0, 0, "help TOPIC");
    expect_help("weight-decay", 1, 1, "; auto or 0 .. ");
    char *text = help_on("acco", &error);
    const char *heading = strstr(text, "Options of acco that not every rule has");
    assert_non_null(heading);
    assert_null(strstr(heading + 1, "Options of acco")); // it stands there once
    free(text);
    for (int group = 0; group < GROUP_COUNT; group++) { // no other topic is called as a group is
        expect_help(option_groups[group].name, 1, 20, option_groups[group].title);
        assert_null(option_find(option_groups[group].name));
    }
    assert_null(help_on("optimzer", &error));
    expect_text("help", error.text, "no help on optimzer (did you mean optimizer?); train_gpt help");
    assert_null(help_on("xyzzyplugh", &error));
    expect_text("help", error.text, "no help on xyzzyplugh; train_gpt help lists the topics");
}

// The overview fits a screen.
static void test_overview_fits_a_screen(void **state) {
    (void)state;
    Error error = {""};
    char *text = help_on("", &error);
    int lines = 0;
    assert_non_null(text);
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n"), lines++) {
        if (strlen(line) > 80) { fail_msg("over 80 columns: %s", line); }
    }
    assert_true(lines >= 15 && lines + 1 <= 24); // one is empty
    free(text);
}

static void test_json(void **state) {
    (void)state;
    Options options;
    expect_valid(&options, "--lr 3e-4 --overlap off --threads 2 --prompt caf\xc3\xa9 --from C");
    json_t *object = options_as_json(&options);
    assert_int_equal(json_object_size(object), OPTION_COUNT_OF_TABLE + 1); // and "chosen"
    assert_true(json_number_value(json_object_get(object, "lr")) == 3e-4);
    assert_string_equal(json_string_value(json_object_get(object, "min-lr")), "auto");
    assert_string_equal(json_string_value(json_object_get(object, "optimizer")), "acco");
    assert_true(json_is_false(json_object_get(object, "overlap")));
    assert_int_equal(json_integer_value(json_object_get(object, "threads")), 2);
    assert_string_equal(json_string_value(json_object_get(object, "prompt")), "caf\xc3\xa9");
    assert_true(json_is_null(json_object_get(object, "model")) &&
                json_is_null(json_object_get(object, "config")));
    assert_int_equal(json_integer_value(json_object_get(object, "accumulate")), 2);
    json_decref(object);
}

static int make_scratch(void **state) {
    (void)state;
    const char *parent = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%.40s/acco_options_XXXXXX",
             parent != NULL && strlen(parent) < 40 ? parent : "/tmp");
    return mkdtemp(scratch) == NULL;
}

static int remove_scratch(void **state) {
    (void)state;
    static const char *const names[] = {"good.conf", "bad.conf", "random.conf", "saved.conf"};
    char path[256];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        scratch_path(names[i], path);
        remove(path);
    }
    return rmdir(scratch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table_is_sound),
        cmocka_unit_test(test_relations_name_values_that_exist),
        cmocka_unit_test(test_options_of_rules_name_rules_that_exist),
        cmocka_unit_test(test_few_options_change_no_bit),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_counts_take_suffixes),
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_names_are_suggested),
        cmocka_unit_test(test_bad_numbers),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_missing_values_and_options_given_twice),
        cmocka_unit_test(test_messages_stay_one_short_line),
        cmocka_unit_test(test_help_and_version_come_first),
        cmocka_unit_test(test_file_and_precedence),
        cmocka_unit_test(test_byte_order_mark_is_skipped),
        cmocka_unit_test(test_bad_files_are_refused),
        cmocka_unit_test(test_random_files),
        cmocka_unit_test(test_options_of_one_run),
        cmocka_unit_test(test_save_reloads_bit_for_bit),
        cmocka_unit_test(test_measured_values),
        cmocka_unit_test(test_chosen_values),
        cmocka_unit_test(test_save_failures),
        cmocka_unit_test(test_options_of_other_commands_are_refused),
        cmocka_unit_test(test_rivals_are_refused),
        cmocka_unit_test(test_nearer_rival_wins),
        cmocka_unit_test(test_acco_split),
        cmocka_unit_test(test_times_have_units),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_options_of_other_rules_are_refused),
        cmocka_unit_test(test_options_of_other_rules_are_refused_in_files),
        cmocka_unit_test(test_accumulate_auto_is_for_overlapped_rules),
        cmocka_unit_test(test_fragments_fit_their_period),
        cmocka_unit_test(test_fragments_have_layers),
        cmocka_unit_test(test_rank_lists),
        cmocka_unit_test(test_micro_batches_of_ranks),
        cmocka_unit_test(test_contradictions_with_ranks),
        cmocka_unit_test(test_help_is_complete_and_narrow),
        cmocka_unit_test(test_help_by_topic),
        cmocka_unit_test(test_overview_fits_a_screen),
        cmocka_unit_test(test_json),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
