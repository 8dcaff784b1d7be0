// test_chat.c: a model learns a chat from raw lines, and then answers. What `train_gpt sample`
// says with a chat.json is what it says, byte for byte, when its constant texts are typed by hand.
#include "test/program/fleet.h"

enum { ES = 307 }; // the id of the token "es"

#define CHAT \
    "{\"first\": [\"Q \", \" A\"], \"system\": [\"S \", \"<|end|>Q \", \" A\"], " \
    "\"next\": [\"<|end|>Q \", \" A\"], \"end\": \"<|end|>\"}"

// chat/ has the pieces above, raw/ the same model without them.
static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE];
    FILE *file = fopen(stage_path(stage, "chats.jsonl", path), "w");
    for (int i = 0; i < 300; i++) {
        char text[256] = "";
        json_t *learn = json_array();
        for (int turn = 0; turn < 3; turn++) {
            bool asks = (i * 7 + turn * 3 + i / 5) % 2 == 0;
            const char *answer = asks ? " yes<|end|>" : " no<|end|>";
            sprintf(text + strlen(text), "Q %s A", asks ? "fox" : "mill");
            size_t begin = strlen(text), end = begin + strlen(answer);
            strcat(text, answer);
            json_array_append_new(learn, json_pack("[i, i]", (int)begin, (int)end));
        }
        json_t *line = json_pack("{s:s, s:o}", "text", text, "learn", learn);
        assert_int_equal(json_dumpf(line, file, 0), 0);
        fputc('\n', file);
        json_decref(line);
    }
    assert_int_equal(fclose(file), 0);
    stage_write(stage, "model.json",
                "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 32, \"n_head\": 2, "
                "\"n_positions\": 48, \"vocab_size\": 406}");
    shell(stage,
          "mkdir bpe && cp '%s/test/reference/tokenizer.json' bpe && echo '{{ messages }}' > "
          "bpe/chat_template.jinja && printf '%%s' '" CHAT "' > bpe/chat.json &&"
          "\"$TRAIN_GPT\" tokenize --tokenizer bpe --out chats --seq-len 48 < chats.jsonl > out.txt",
          stage->root);
    shell(
        stage,
        "\"$TRAIN_GPT\" --model model.json --tokenizer bpe --data chats_train_00000.bin --seq-len 48 "
        "--micro-batch 4 --accumulate 1 --optimizer ddp --lr 0.01 --epochs 4 --val-batches none --threads 1 "
        "--device cpu --prompt fox --temperature 0 --out run > train.txt && "
        "cp -r run/checkpoints/commit-*/model chat && rm chat/checksums.json && cp -r chat raw && rm "
        "raw/chat*");
}

static Outcome run_well(Stage *stage, const char *arguments) {
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    return outcome;
}

static void an_answer_ends_with_its_token(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "grep -A 1 '^> fox' train.txt | grep -qx ' yes'"); // at the end of the training
    shell(stage, "cmp bpe/chat.json chat/chat.json && cmp bpe/chat_template.jinja chat/chat_template.jinja");
    Outcome outcome = run_well(stage, "sample --from chat --threads 1 --temperature 0 --prompt fox");
    text_check(outcome.output, "> fox\n yes\n", "--prompt");
    assert_null(strstr(outcome.output, "yes\n "));
    shell(
        stage,
        "printf 'fox\\nmill\\n' > asked.txt && \"$TRAIN_GPT\" sample --from chat --threads 1 --temperature 0 "
        "--prompts asked.txt > out.txt && tail -n 4 out.txt > last.txt && "
        "printf '> fox\\n yes\\n> mill\\n no\\n' | cmp - last.txt");
    shell(stage,
          "printf 'mill\\n\\nfox\\n/reset\\nfox\\nmill' | \"$TRAIN_GPT\" sample --from chat --threads 1 "
          "--temperature 0 --interactive on | grep '^> ' > out.txt; "
          "printf '>  no\\n> >  yes\\n> >  yes\\n>  no\\n> \\n' | cmp - out.txt");
}

// Without a chat.json a text ends where the model's own files say so: transformers looks there.
static void a_text_ends_at_each_of_the_models_ends(void **state) {
    Stage *stage = stage_of(state);
    static const char typed[] =
        "sample --from raw --threads 1 --temperature 0 --sample-tokens 9 --prompt 'Q fox A'";
    shell(stage, "cp raw/config.json before.json");
    Outcome outcome = run_well(stage, typed);
    assert_non_null(strstr(outcome.output, "Q fox A yes"));
    for (int in_config = 0; in_config < 2; in_config++) {
        shell(stage,
              in_config == 0
                  ? "printf '{\"eos_token_id\": [0, %d]}' > raw/generation_config.json"
                  : "sed 's/\"eos_token_id\": [a-z0-9]*/\"eos_token_id\": %d/' before.json > raw/config.json",
              ES);
        outcome = run_well(stage, typed);
        text_check(outcome.output, "Q fox A y\n", in_config ? "config.json" : "generation_config.json");
        shell(stage, "rm -f raw/generation_config.json; cp before.json raw/config.json");
    }
    // Of a --tokenizer that is a directory what lies in it says so, and not what lies above it.
    shell(stage,
          "mkdir -p above && cp -r raw above/in && "
          "printf '{\"eos_token_id\": [0, %d]}' > above/in/generation_config.json",
          ES);
    for (int above = 0; above < 2; above++) {
        outcome = run_well(stage, "sample --from raw --tokenizer above/in --threads 1 --temperature 0 "
                                  "--sample-tokens 9 --prompt 'Q fox A'");
        text_check(outcome.output, above ? "Q fox A yes" : "Q fox A y\n", above ? "above" : "in");
        shell(stage, // a file of the working directory
              "(cd above/in && \"$TRAIN_GPT\" sample --from ../../raw --tokenizer tokenizer.json --threads 1 "
              "--temperature 0 --sample-tokens 9 --prompt 'Q fox A') | grep -x 'Q fox A y%s'",
              above ? "es.*" : "");
        shell(stage,
              "if [ -f above/in/generation_config.json ]; then mv above/in/generation_config.json above; fi");
    }
}

// The end of these answers is a token that the model never writes: typed texts know no end.
static void pieces_are_those_that_are_typed(void **state) {
    static const char *const cases[][3] = {
        {"hello fox\\nthe mill\\n/reset\\nagain", "Q hello fox A\\n<|end|>Q the mill A\\n/reset\\nQ again A",
         ""},
        {"the\\n\\nfox", "Q the A\\n\\n<|end|>Q fox A", ""},
        {"fox\\nmill\\n/reset\\nfox",
         "S be kind<|end|>Q fox A\\n<|end|>Q mill A\\n/reset\\nS be kind<|end|>Q fox A",
         "--system 'be kind'"},
    };
    static const char sample[] = "\"$TRAIN_GPT\" sample --threads 1 --interactive on --temperature";
    Stage *stage = stage_of(state);
    shell(stage, "cp -r chat endless && sed -i 's/end|>\"}/end|>!\"}/' endless/chat.json && ! cmp -s "
                 "chat/chat.json endless/chat.json");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        shell(stage,
              "printf '%s' | %s 9 --sample-tokens 4 --from endless %s > chat.txt && "
              "printf '%s' | %s 9 --sample-tokens 4 --from raw > raw.txt && ! grep 'no chat' chat.txt && "
              "grep -q '; this is no chat: ' raw.txt && sed 's/; this is.*//' raw.txt | cmp chat.txt -",
              cases[i][0], sample, cases[i][2], cases[i][1], sample);
    }
}

static void what_is_no_chat_is_refused(void **state) {
    static const char *const files[] = {
        "",
        "{",
        "[]",
        "3",
        "{}",
        "{\"first\": [\"a\", \"b\"], \"next\": [\"a\", \"b\"]}",
        "{\"first\": [\"a\", \"b\"], \"next\": [\"a\", \"b\"], \"end\": \"the\"}",
        "{\"first\": [\"a\", \"b\"], \"next\": [\"a\", \"b\"], \"end\": 3}",
        "{\"first\": [\"a\"], \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\"}",
        "{\"first\": [\"a\", 3], \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\"}",
        "{\"first\": \"ab\", \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\"}",
        "{\"first\": [\"a\", \"b\"], \"next\": null, \"end\": \"<|end|>\"}",
        "{\"first\": [\"a\", \"b\"], \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\", \"system\": []}",
        ("{\"first\": [\"a\", \"b\"], \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\", \"system\": [\"a\", "
         "\"b\"]}"),
        "{\"first\": [\"a\", \"b\\u0000\"], \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\"}",
        "{\"first\": [\"a\", \"b\"], \"next\": [\"a\", \"b\"], \"end\": \"<|end|>\", \"thought\": 3}",
    };
    Stage *stage = stage_of(state);
    shell(stage, "cp -r raw broken");
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        stage_write(stage, "broken/chat.json", files[i]);
        Outcome outcome = program_run(stage, 0, "sample --from broken --prompt fox --threads 1");
        outcome_check(&outcome, 2, files[i]);
        text_check(outcome.errors, "broken/chat.json does not say how to speak with this model", files[i]);
        assert_int_equal(text_lines(outcome.errors), 1);
    }
}

static void a_system_text_needs_a_chat(void **state) {
    Stage *stage = stage_of(state);
    Outcome outcome = program_run(stage, 0, "sample --from raw --system kind --prompt fox");
    outcome_check(&outcome, 2, "--system");
    text_check(outcome.errors, "--system needs a chat.json", "--system");
}

#define CHAT_TEST(function) cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage)

int main(void) {
    static Stage stage;
    const struct CMUnitTest tests[] = {
        CHAT_TEST(an_answer_ends_with_its_token),   CHAT_TEST(a_text_ends_at_each_of_the_models_ends),
        CHAT_TEST(pieces_are_those_that_are_typed), CHAT_TEST(what_is_no_chat_is_refused),
        CHAT_TEST(a_system_text_needs_a_chat),
    };
    stage_open(&stage);
    write_stage(&stage);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
