// sample.h: writes text with a model, one token at a time, on the CPU, whatever device trains the
// model: `train_gpt sample` for a model on disk, and the samples during and after training.
//
// A step decodes one token: the model caches what it needs of all earlier positions. When all of
// them are used, the text ends. A sampler has its own arena: training reserves nothing for it.
#pragma once

#include "checkpoint/hf_model.h"
#include "models/decoder.h"
#include "program/data.h"
#include "tokenizer/chat.h"

typedef struct Sampler {
    Model model;
    float *sorted;       // (V), workspace of top-k and top-p
    float *adjusted;     // (V), workspace of the repetition penalty
    int32_t *text;       // (positions): its tokens so far
    const float *logits; // (V), of the latest step
    int length;          // of the text so far
} Sampler;

// How the next token is chosen from the logits: the most probable one where the temperature
// is 0, otherwise one drawn from softmax(logits / temperature).
typedef struct Sampling {
    double temperature;
    int top_k;      // > 0: only the top_k largest logits, and those equal to the last of them
    double top_p;   // below 1: of those only the most probable ones that together have this share
    double penalty; // above 1: positive logits of tokens of the text are divided, others multiplied by it
} Sampling;

// Reserves memory for a stream with a pool of `threads`. The arena keeps pointers into
// *sampler, which must not move before arena_commit.
static inline void sampler_reserve(Sampler *sampler, Arena *arena, const ModelConfig *config, int threads) {
    ModelSettings settings = model_on_cpu(1, 1, threads);
    settings.decodes = true;
    memset(sampler, 0, sizeof *sampler);
    model_reserve(&sampler->model, arena, config, &settings);
    size_t bytes = config->vocabulary * sizeof(float);
    arena_reserve(arena, MEMORY_WORKSPACE, "top-k", bytes, &sampler->sorted);
    arena_reserve(arena, MEMORY_WORKSPACE, "repetition penalty", bytes, &sampler->adjusted);
    arena_reserve(arena, MEMORY_WORKSPACE, "text", config->positions * sizeof(int32_t), &sampler->text);
}

// Appends `token` to the text. Returns the logits (V) of the token that follows, valid
// until the next step, or NULL if all positions are used. parameters: on the host.
static inline const float *sampler_step(Sampler *sampler, Stream *stream, const float *parameters,
                                        int32_t token) {
    Model *model = &sampler->model;
    if (sampler->length == model->config.positions) { return NULL; }
    sampler->text[sampler->length] = token;
    sampler->logits = model_decode(model, stream, parameters, sampler->length++, token);
    return sampler->logits;
}

// values (k) <- the k largest of the logits (count), the largest first.
static inline void sampler_largest(const float *logits, int count, int k, float *values) {
    for (int i = 0, kept = 0; i < count; i++) {
        if (kept == k && !(logits[i] > values[k - 1])) { continue; }
        int at = kept < k ? kept++ : k - 1;
        for (; at > 0 && logits[i] > values[at - 1]; at--) { values[at] = values[at - 1]; }
        values[at] = logits[i];
    }
}

static inline int sampler_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// The least logit that may be drawn.
static inline float sampler_least(Sampler *sampler, const float *logits, const Sampling *how) {
    int V = sampler->model.config.vocabulary, kept = 0;
    float *sorted = sampler->sorted, least = -INFINITY;
    if (how->top_k > 0 && how->top_k < V) {
        sampler_largest(logits, V, how->top_k, sorted);
        least = sorted[how->top_k - 1];
    }
    if (!(how->top_p < 1)) { return least; }
    for (int v = 0; v < V; v++) {
        if (logits[v] >= least) { sorted[kept++] = logits[v]; }
    }
    qsort(sorted, kept, sizeof *sorted, sampler_descending);
    double sum = 0.0, maximum = sorted[0];
    for (int i = 0; i < kept; i++) { sum += exp((sorted[i] - maximum) / how->temperature); }
    double left = how->top_p * sum;
    int last = 0;
    while (last < kept - 1 && (left -= exp((sorted[last] - maximum) / how->temperature)) > 0) { last++; }
    return sorted[last];
}

// Chooses the next token. Returns -1 if the logits are not numbers.
static inline int32_t sampler_choose(Sampler *sampler, const Sampling *how, Random *random) {
    const float *logits = sampler->logits;
    int V = sampler->model.config.vocabulary;
    if (how->penalty > 1) {
        memcpy(sampler->adjusted, logits, V * sizeof(float));
        for (int i = 0; i < sampler->length; i++) {
            float logit = logits[sampler->text[i]], penalty = (float)how->penalty;
            sampler->adjusted[sampler->text[i]] = logit > 0 ? logit / penalty : logit * penalty;
        }
        logits = sampler->adjusted;
    }
    int32_t best = logits_largest(as_reals_const(logits), V, PRECISION_FP32);
    if (best < 0 || !(how->temperature > 0.0)) { return best; }
    float least = sampler_least(sampler, logits, how);
    double sum = 0.0, maximum = logits[best];
    for (int v = 0; v < V; v++) {
        sum += logits[v] >= least ? exp((logits[v] - maximum) / how->temperature) : 0.0;
    }
    double left = random_uniform(random) * sum;
    for (int v = 0; v < V; v++) {
        left -= logits[v] >= least ? exp((logits[v] - maximum) / how->temperature) : 0.0;
        if (left < 0.0 && logits[v] >= least) { return v; }
    }
    return best; // the sum was rounded, and the draw lay beyond all of it
}

// ---- A text that is printed -----------------------------------------------------------

enum { SAMPLE_RANDOM_STREAM = 20 }; // of those that are derived from --seed

typedef struct Sample {
    const Options *options;
    int64_t commit;    // during training; -1: otherwise
    const bool *stops; // atomic: it is to end; NULL: never
    TextCodec codec;
    Chat chat;               // of the tokenizer: a prompt is what a user says
    const float *parameters; // (parameter_count), on the host
    Arena arena;
    Sampler sampler;
    Stream here; // runs everything on this thread
    Random random;
    TokenList ends; // tokens that end a text
    int32_t last;   // the token at the end of the text that no step has seen; -1: none
    int thought[2]; // where in the text the chat's thought before the latest answer begins and ends
    // All prompts and what was written after them, for the caller of sample_close to free;
    // and how many bytes of it have been printed.
    FILE *memory;
    char *text;
    size_t size, shown;
} Sample;

static inline void sample_show(Sample *sample) {
    fflush(sample->memory);
    fwrite(sample->text + sample->shown, 1, sample->size - sample->shown, stdout);
    fflush(stdout);
    sample->shown = sample->size;
}

static inline bool sample_is_end(const Sample *sample, int32_t token) {
    bool ends = false;
    for (size_t i = 0; i < sample->ends.count && !ends; i++) { ends = token == sample->ends.ids[i]; }
    return ends;
}

// Appends the prompt (at least one token) to the text, and prints what the model writes after it,
// up to --sample-tokens tokens. Returns how many; -1: the logits are not numbers. They are fewer at
// the end of the text and of the positions, and where a signal asks the run to stop.
static inline int sample_generate(Sample *sample, const TokenList *prompt) {
    const Options *options = sample->options;
    Sampler *sampler = &sample->sampler;
    const Sampling how = {options->temperature, (int)options->top_k, options->top_p,
                          options->repetition_penalty};
    int written = 0;
    for (size_t i = 0; i < prompt->count; i++) {
        sampler_step(sampler, &sample->here, sample->parameters, prompt->ids[i]);
    }
    sample->last = -1;
    while (written < options->sample_tokens) {
        int32_t token = sampler_choose(sampler, &how, &sample->random);
        if (token < 0) { return -1; }
        sample->last = token;
        written++;
        if (sample_is_end(sample, token)) { break; }
        text_codec_print(&sample->codec, token, false, sample->memory);
        sample_show(sample);
        if (sample->stops != NULL && __atomic_load_n(sample->stops, __ATOMIC_RELAXED)) { break; }
        bool full = written < options->sample_tokens &&
                    sampler_step(sampler, &sample->here, sample->parameters, token) == NULL;
        if (full) { break; }
    }
    return written;
}

// Appends to `ends` the ids that end a text, by eos_token_id of generation_config.json and of
// config.json in `directory`: a number, or a list of them.
static inline void sample_find_ends(const char *directory, TokenList *ends) {
    static const char *const names[2] = {"generation_config.json", "config.json"};
    Error ignored;
    char path[PATH_MAX];
    for (int i = 0; i < 2; i++) {
        if (!path_within(path, directory, names[i], &ignored)) { continue; }
        json_t *root = json_file_load(path, JSON_ALLOW_NUL, NULL),
               *ids = json_object_get(root, "eos_token_id");
        if (json_is_integer(ids)) { token_list_add(ends, (int32_t)json_integer_value(ids)); }
        for (size_t j = 0; j < json_array_size(ids); j++) {
            json_t *id = json_array_get(ids, j);
            if (json_is_integer(id)) { token_list_add(ends, (int32_t)json_integer_value(id)); }
        }
        json_decref(root);
    }
}

// Opens the tokenizer and its chat texts, and finds what ends a text: the tokenizer's own end, the
// end of an answer in a chat, and what the model and the tokenizer's directory name. bytes: tokens
// are bytes where there is no tokenizer.
static inline bool sample_open_codec(Sample *sample, bool bytes, int vocabulary, Error *error) {
    char path[TOKENIZER_PATH_SIZE], base[PATH_MAX];
    tokenizer_path(sample->options, path);
    if (!text_codec_open(&sample->codec, path, bytes, vocabulary, error) ||
        (sample->codec.kind == TEXT_CODEC_TOKENIZER &&
         !chat_open(&sample->chat, path, &sample->codec.tokenizer, error))) {
        return false;
    }
    if (sample->chat.root != NULL) { token_list_add(&sample->ends, sample->chat.end); }
    token_list_add(&sample->ends, text_codec_end(&sample->codec));
    const char *start = options_start(sample->options);
    sample_find_ends(start, &sample->ends);
    if (adapters_find_base(start, base)) { sample_find_ends(base, &sample->ends); } // peft's do not say it
    int length = tokenizer_directory_length(path);
    if (path[0] != '\0') {
        path[length] = '\0';
        sample_find_ends(length > 0 ? path : ".", &sample->ends);
    }
    return sample->options->system[0] == '\0' || sample->chat.system[0] != NULL ||
           error_set(error, "--system needs a chat.json beside the tokenizer, of a chat template that takes "
                            "a system text");
}

// Prints what heads a sample. `sample` has options, codec and parameters, and must stay where it
// is until sample_close.
static inline bool sample_open(Sample *sample, const ModelConfig *config, ThreadPool *pool, int threads,
                               Error *error) {
    const Options *options = sample->options;
    const char *ids = sample->codec.kind == TEXT_CODEC_IDS ? "token ids" : "";
    sample->here.pool = pool;
    sample->random.state = random_hash(options->seed, SAMPLE_RANDOM_STREAM);
    sample->last = -1;
    sampler_reserve(&sample->sampler, &sample->arena, config, threads);
    if (!arena_commit(&sample->arena, error)) { return false; }
    sample->memory = open_memstream(&sample->text, &sample->size);
    if (sample->commit >= 0) {
        printf("%6lld sample%s%s\n", (long long)sample->commit, ids[0] != '\0' ? " of " : "", ids);
        return true;
    }
    printf("\nsample     temperature %g, top-k %lld", options->temperature, (long long)options->top_k);
    if (options->top_p < 1) { printf(", top-p %g", options->top_p); }
    if (options->repetition_penalty > 1) { printf(", repetition penalty %g", options->repetition_penalty); }
    if (ids[0] != '\0') { printf(": %s, for there is no tokenizer", ids); }
    if (options->interactive && sample->chat.root == NULL && sample->codec.kind == TEXT_CODEC_TOKENIZER) {
        printf("; this is no chat: there is no chat.json beside the tokenizer (docs/data.md, Chats)");
    }
    printf("\n");
    return true;
}

static inline void sample_close(Sample *sample) {
    if (sample->memory != NULL) { fclose(sample->memory); }
    json_decref(sample->chat.root);
    token_list_free(&sample->ends);
    text_codec_close(&sample->codec);
    arena_release(&sample->arena);
}

// tokens <- what is to be read before the model writes, from position *from on: what the prompt
// adds to the text. In a chat, where it has another answer written, the thought before the answer
// that stands there goes, and so what follows the thought is read again.
static inline bool sample_encode(const Sample *sample, const char *prompt, int *from, int thought[2],
                                 TokenList *tokens, Error *error) {
    const Chat *chat = &sample->chat;
    bool said = chat->root != NULL && prompt[0] != '\0', follows = sample->sampler.length > 0;
    *from = sample->sampler.length;
    if (said && follows && thought[1] > thought[0]) {
        *from = thought[0];
        for (int i = thought[1]; i < sample->sampler.length; i++) {
            token_list_add(tokens, sample->sampler.text[i]);
        }
    }
    if (sample->last >= 0) { token_list_add(tokens, sample->last); }
    if (prompt[0] == '\0' && tokens->count > 0) { return true; }
    char *text = said ? chat_text(chat, sample->options->system, follows, prompt) : NULL;
    // A chat's template has the token in front of a text itself. Behind an end another text begins.
    bool ended = sample->last >= 0 && sample->last != sample->codec.tokenizer.begin &&
                 sample_is_end(sample, sample->last),
         begins = !said && (follows || tokens->count > 0 ? ended : true);
    bool good = text_codec_encode(&sample->codec, said ? text : prompt, begins, tokens, error);
    free(text);
    thought[0] = thought[1] = *from + (int)tokens->count;
    if (good && said && chat->thought != NULL) {
        good = text_codec_encode(&sample->codec, chat->thought, false, tokens, error);
        thought[1] = *from + (int)tokens->count;
    }
    return good;
}

// Prints the prompt, if that is wanted, and token by token what the model writes after it.
static inline bool sample_text(Sample *sample, const char *prompt, bool shows, Error *error) {
    int positions = sample->sampler.model.config.positions, before = 0,
        count = (int)sample->options->sample_tokens, thought[2];
    memcpy(thought, sample->thought, sizeof thought);
    TokenList tokens = {NULL, 0, 0};
    bool good = sample_encode(sample, prompt, &before, thought, &tokens, error);
    if (good && tokens.count > (size_t)(positions - before)) {
        good = error_set(error, "the prompt has %zu tokens, and the model %d positions%s: %s", tokens.count,
                         positions - before, before > 0 ? " left" : "",
                         before > 0 ? "/reset begins another text" : "shorten it");
    }
    if (good) {
        bool said = sample->chat.root != NULL && prompt[0] != '\0';
        memcpy(sample->thought, thought, sizeof thought);
        sample->sampler.length = before;
        sample->codec.decoder.drops_blank = sample->codec.tokenizer.characters && (said || prompt[0] == '\0');
        if (shows) { fprintf(sample->memory, said ? "> %s\n" : "%s", prompt); }
        sample_show(sample);
        int written = sample_generate(sample, &tokens);
        text_codec_print(&sample->codec, 0, true, sample->memory);
        sample_show(sample);
        printf("\n");
        if (written < 0) { good = error_set(error, "the outputs of the model are not numbers"); }
        // What follows in a chat begins with the end of the answer.
        if (sample->chat.root != NULL && sample_is_end(sample, sample->last)) { sample->last = -1; }
        // The last token of a text that fills all positions stands behind them.
        if (good && written < count && before + (int)tokens.count + written > positions) {
            printf("\n(ends after %d of %d tokens: the model has %d positions, the prompt included)\n",
                   written, count, positions);
        }
    }
    token_list_free(&tokens);
    return good;
}

// A text for each line of `input`; if it is interactive, one that goes on with each, until /reset.
static inline bool sample_lines(Sample *sample, FILE *input, bool interactive, Error *error) {
    char *line = NULL;
    size_t room = 0, lines = 0;
    bool good = true;
    while (good) {
        if (interactive) { printf("> "); }
        fflush(stdout);
        ssize_t length = getline(&line, &room, input);
        if (length < 0) {
            good = interactive || !ferror(input) || error_set_file(error, "read", sample->options->prompts);
            if (interactive) { printf("\n"); }
            break;
        }
        if (strlen(line) != (size_t)length && !interactive) {
            good = error_set(error, "--prompts: line %zu has a byte of value 0", lines + 1);
            break;
        }
        char *said = line + (lines++ == 0 ? utf8_mark(line, strlen(line)) : 0);
        for (size_t end = strlen(said); end > 0 && text_is_line_end((uint8_t)said[end - 1]);) {
            said[--end] = '\0'; // what stands behind another \r is said, too
        }
        bool resets = interactive && strcmp(said, "/reset") == 0;
        if (resets || !interactive) {
            sample->sampler.length = 0;
            sample->last = -1;
        }
        bool goes_on = sample->chat.root == NULL || said[0] != '\0' || sample->last >= 0;
        if (resets || !goes_on) { continue; }
        good = sample_text(sample, said, !interactive, error);
        if (interactive && !good) { good = printf("%s\n", error->text) > 0; }
    }
    free(line);
    return good;
}

// All ranks, between two commits or at the end: rank 0 prints and logs a sample by the
// committed parameters. An error is printed, too, and does not end the run.
static inline void print_sample(Run *run, bool last) {
    Scheduler *s = &run->scheduler;
    const Options *options = &run->options;
    if (options->sample_tokens == 0) { return; }
    scheduler_settle(s); // waiting for communication under way still counts as training
    double began = clock_seconds();
    const float *committed = (const float *)borrow_committed(s, run->rule, true);
    if (run_is_main(run)) {
        Error error = {""};
        const TrainedPart *part = &run->part;
        size_t bytes = part->table.parameter_count * sizeof(float);
        float *copy = run->placement.on_gpu ? (float *)memory_take(1, bytes) : NULL, *whole = NULL;
        Sample sample = {.options = options,
                         .commit = last ? -1 : s->optimizer.steps,
                         .stops = &run->transport.asked_to_stop,
                         .parameters = copy != NULL ? copy : committed};
        if (copy != NULL) {
            stream_copy(s->compute, copy, committed, bytes);
            stream_settle(s->compute);
        }
        if (part->frozen_count > 0) {
            sample.parameters = whole = hf_model_complete(&run->base, part, sample.parameters);
        }
        terminal_clear(&run->terminal);
        bool good =
            sample_open_codec(&sample, data_loader_is_text(&run->data), run->config.vocabulary, &error) &&
            sample_open(&sample, &run->config, run->pool, run->threads.threads, &error) &&
            sample_text(&sample, options->prompt, true, &error);
        sample_close(&sample);
        if (good) {
            report_event(&run->reports,
                         json_pack("{s:s, s:I, s:I, s:o, s:o}", "event", "sample", "commit",
                                   (json_int_t)s->optimizer.steps, "tokens", (json_int_t)tokens_done(run),
                                   "seconds", log_real(training_seconds(&run->clock)), "text",
                                   log_text(sample.text)));
        } else {
            printf("\nno sample: %s\n", error.text);
        }
        fflush(stdout);
        free(copy);
        free(whole);
        free(sample.text);
    }
    return_committed(s, committed);
    wait_for_rank_zero(&run->transport, "sample");
    run->clock.paused += clock_seconds() - began;
}

// One process, without MPI. Returns the exit status.
static inline int command_sample(const Options *options) {
    Error error = {""};
    HfModel model;
    ThreadChoice threads;
    Sample sample = {.options = options, .commit = -1};
    if (!hf_model_open(&model, options->from, &error) ||
        !sample_open_codec(&sample, model.config.vocabulary == 256, model.config.vocabulary, &error)) {
        exit_user_mistake(&error);
    }
    FILE *prompts = options->interactive ? stdin : NULL;
    if (prompts == NULL && options->prompts[0] != '\0' && !(prompts = fopen(options->prompts, "r"))) {
        error_set(&error, "--prompts: %.300s: %s", options->prompts, strerror(errno));
        exit_user_mistake(&error);
    }
    float *parameters = MEMORY_OF(float, model.table.parameter_count);
    launch_threads(1, (int)options->threads, &threads);
    ThreadPool *pool = thread_pool_create(threads.threads, true);
    hf_model_read(&model, parameters);
    sample.parameters = parameters;
    bool good = sample_open(&sample, &model.config, pool, threads.threads, &error) &&
                (prompts != NULL ? sample_lines(&sample, prompts, options->interactive, &error)
                                 : sample_text(&sample, options->prompt, true, &error));
    sample_close(&sample);
    if (!good) { exit_user_mistake(&error); }
    if (prompts != NULL) { fclose(prompts); }
    thread_pool_destroy(pool);
    free(parameters);
    hf_model_close(&model);
    free(sample.text);
    return 0;
}
