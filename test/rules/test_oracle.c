// test_oracle.c: every rule weights gradients by predicted tokens, however unequally its
// micro-batches and ranks are masked.
//
// The oracle is written from the formulas on the pages of the rules, in double. It adds up the
// gradients of single tokens, one worker after the other, and divides once by their number. It
// knows no means of micro-batches, no shards, no wires and no kernels. With the program it shares
// the problem, which token draws which element where, and the numbers of the settings. So it
// differs from the program by rounding alone.
//
// Every case prints, and holds to a limit, how far the program is from the oracle, and how far the
// oracle would be if the means of all micro-batches counted the same: so the case tells them apart.
//
// Under local rules each inner step is a mean over the predicted tokens of its worker, and at an
// exchange a worker counts by those that it has predicted since the exchange before.
#include "test/rules/rules_bench.h"

// looks: at the start, after each commit, and after Rule::finish.
enum { ELEMENTS = 215, LAYER = 43, COMMITS = 8, LOOKS = COMMITS + 2, SIDE = 12 };

static const double RATE = 0.0625, CLIP = 4;
static const double TOLERANCE = 1e-5, SEEN = 1e-2; // in steps: difference_in_steps()

// ---- The problem ----------------------------------------------------------------------

// The tokens that a micro-batch predicts: often none, seldom many. Rank 1 begins with a row of
// micro-batches that predict nothing.
static int tokens_in(int rank, uint64_t index) {
    static const int counts[] = {0, 0, 0, 0, 1, 1, 2, 5, NOISY_TOKENS, NOISY_TOKENS};
    return rank == 1 && index < 9 ? 0 : counts[random_hash((uint64_t)rank + 1, index) % 10];
}

// Where a token draws an element. Ranks differ from each other, as their data may.
static float target_of(int rank, uint64_t index, int token, size_t element) {
    size_t number = (index * NOISY_TOKENS + (uint64_t)token) * ELEMENTS + element;
    return noise((uint64_t)rank, number) + 0.125f * (float)rank;
}

// The gradient of a token is its distance to where it draws. Losses are not looked at.
static MicroBatchResult masked_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                           float *gradients, const Pace *pace) {
    int rank = ((const TestProblem *)self)->rank, tokens = tokens_in(rank, index);
    const float *parameters = (const float *)weights;
    (void)stream;
    pace_need(pace, ELEMENTS);
    for (int token = 0; token < tokens; token++) {
        for (size_t i = 0; i < ELEMENTS; i++) {
            gradients[i] += (parameters[i] - target_of(rank, index, token, i)) / NOISY_TOKENS;
        }
    }
    MicroBatchResult result = {0, 0, (double)tokens};
    return result;
}

// Ranks have unequal numbers of micro-batches, but under local rules. Epsilon is as large as
// gradients and only some are clipped, so that a wrong constant factor shows. Elements start at
// different values: sparse-loco would have to choose among equal ones.
static RunSpec masked_spec(const char *rule, bool muon) {
    static const OptimizerTensor tensors[] = {
        {0, 7, true, 0, 0}, {7, 103, true, 8, 12}, {103, 175, false, SIDE, 6}, {175, ELEMENTS, false, 0, 0}};
    static const int micro_batches[MAX_RANKS] = {3, 5, 2, 4, 6};
    RunSpec spec = noisy_spec(rule, ELEMENTS);
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        spec.micro_batches[rank] = is_local(rule) ? 3 : micro_batches[rank];
    }
    for (size_t l = 0; l <= LAYERS; l++) { spec.layer_begins[l] = l * LAYER; }
    spec.commits = COMMITS;
    spec.start = 0;
    spec.start_step = 0x1p-10f;
    spec.finish = rule_find(rule)->finish != NULL;
    spec.micro_batch = masked_micro_batch;
    spec.masked = true;
    SchedulerSettings *settings = &spec.settings;
    settings->rate.peak = RATE;
    settings->gradient_clip = CLIP;
    settings->local.outer_momentum.phi = 0.0625f;
    settings->local.outer_eager = true;
    settings->optimizer.epsilon = 0.125;
    settings->optimizer.muon_momentum = 0.9;
    settings->optimizer.adamw_ratio = muon ? 3 : 0;
    settings->optimizer.muon_iterations = 5;
    settings->optimizer.tensors = muon ? tensors : &EVERYTHING;
    settings->optimizer.tensor_count = muon ? 4 : 1;
    return spec;
}

// ---- The oracle -----------------------------------------------------------------------

typedef struct OracleSum {
    double gradient[ELEMENTS], weight; // the number of tokens
} OracleSum;

typedef struct OracleState {
    double theta[ELEMENTS], m[ELEMENTS], v[ELEMENTS];
    int t; // steps
} OracleState;

typedef struct OracleWorker {
    OracleState state;      // theta: its own parameters
    double start[ELEMENTS]; // co2: where its period began
    double moved[ELEMENTS]; // sparse-loco: by the inner steps since the latest sending
    double error[ELEMENTS], sent[ELEMENTS];
    double tokens; // since the latest exchange
    double share;  // of it in the latest mean
} OracleWorker;

typedef struct Oracle {
    const RunSpec *spec;
    const SchedulerSettings *settings;
    int ranks;
    bool alike;                        // the means of micro-batches count the same, which is wrong
    uint64_t micro_batches[MAX_RANKS]; // begun
    OracleState state;                 // of rules whose workers step together
    OracleWorker workers[MAX_RANKS];
    double outer[ELEMENTS], momentum[ELEMENTS];
    double mean[ELEMENTS]; // of the pseudo-gradients
    double looks[LOOKS][ELEMENTS];
    int look_count;
} Oracle;

static void oracle_look(Oracle *oracle, const double *theta) {
    assert_true(oracle->look_count < LOOKS);
    memcpy(oracle->looks[oracle->look_count++], theta, sizeof oracle->looks[0]);
}

static Oracle *oracle_create(const RunSpec *spec, int ranks, bool alike) {
    Oracle *oracle = (Oracle *)calloc(1, sizeof *oracle);
    oracle->spec = spec;
    oracle->settings = &spec->settings;
    oracle->ranks = ranks;
    oracle->alike = alike;
    for (int i = 0; i < ELEMENTS; i++) {
        oracle->state.theta[i] = oracle->outer[i] = (double)spec->start + i * (double)spec->start_step;
    }
    for (int rank = 0; rank < ranks; rank++) {
        oracle->workers[rank].state = oracle->state;
        memcpy(oracle->workers[rank].start, oracle->outer, sizeof oracle->outer);
    }
    oracle_look(oracle, oracle->outer);
    return oracle;
}

// sum += the gradients of all tokens in this rank's next micro-batches, at theta.
static void oracle_add(Oracle *oracle, OracleSum *sum, int rank, int micro_batches, const double *theta) {
    for (int n = 0; n < micro_batches; n++) {
        uint64_t index = oracle->micro_batches[rank]++;
        int tokens = tokens_in(rank, index);
        for (int token = 0; token < tokens; token++) {
            for (size_t i = 0; i < ELEMENTS; i++) {
                double gradient = theta[i] - (double)target_of(rank, index, token, i);
                sum->gradient[i] += oracle->alike ? gradient / tokens : gradient;
            }
        }
        sum->weight += oracle->alike ? 1 : tokens;
    }
}

// out (rows, columns) = a (rows, inner) times b (inner, columns)
static void oracle_multiply(double *out, const double *a, const double *b, int rows, int inner, int columns) {
    for (int i = 0; i < rows * columns; i++) {
        out[i] = 0;
        for (int k = 0; k < inner; k++) {
            out[i] += a[i / columns * inner + k] * b[k * columns + i % columns];
        }
    }
}

// As scheduler/muon.h says, but A is X X' of a tall matrix, too.
static void oracle_muon(const Oracle *oracle, OracleState *state, const OptimizerTensor *tensor,
                        const double *mean) {
    const OptimizerSettings *settings = &oracle->settings->optimizer;
    int rows = tensor->rows, columns = tensor->columns, count = rows * columns;
    double x[ELEMENTS], turned[ELEMENTS], norm = 0, mu = settings->muon_momentum;
    double *theta = state->theta + tensor->begin, *m = state->m + tensor->begin;
    for (int i = 0; i < count; i++) {
        double g = mean[tensor->begin + (size_t)i];
        m[i] = mu * m[i] + (1 - mu) * g;
        x[i] = (1 - mu) * g + mu * m[i];
        norm += x[i] * x[i];
    }
    for (int i = 0; i < count; i++) { x[i] /= fmax(sqrt(norm), 1e-7); }
    for (int n = 0; n < settings->muon_iterations; n++) {
        double a[SIDE * SIDE], p[SIDE * SIDE];
        for (int i = 0; i < count; i++) { turned[i % columns * rows + i / columns] = x[i]; }
        oracle_multiply(a, x, turned, rows, columns, rows);
        oracle_multiply(p, a, a, rows, rows, rows);
        for (int i = 0; i < rows * rows; i++) {
            p[i] = (i % (rows + 1) == 0 ? 3.4445 : 0) - 4.7750 * a[i] + 2.0315 * p[i];
        }
        memcpy(turned, x, sizeof x);
        oracle_multiply(x, p, turned, rows, rows, columns);
    }
    double scale = 0.2 * sqrt(rows > columns ? rows : columns);
    double decay = tensor->decays ? settings->weight_decay : 0;
    for (int i = 0; i < count; i++) { theta[i] -= RATE * (scale * x[i] + decay * theta[i]); }
}

static void oracle_adamw(const Oracle *oracle, OracleState *state, const OptimizerTensor *tensor,
                         const double *mean) {
    const OptimizerSettings *settings = &oracle->settings->optimizer;
    double beta1 = settings->beta1, beta2 = settings->beta2;
    double rate = RATE * (settings->adamw_ratio == 0 ? 1 : settings->adamw_ratio);
    double keep = tensor->decays ? 1 - RATE * settings->weight_decay : 1;
    for (size_t i = tensor->begin; i < tensor->end && i < ELEMENTS; i++) {
        state->m[i] = beta1 * state->m[i] + (1 - beta1) * mean[i];
        state->v[i] = beta2 * state->v[i] + (1 - beta2) * mean[i] * mean[i];
        double m = state->m[i] / (1 - pow(beta1, state->t)), v = state->v[i] / (1 - pow(beta2, state->t));
        state->theta[i] = keep * state->theta[i] - rate * m / (sqrt(v) + settings->epsilon);
    }
}

// A step with the mean gradient, which is clipped. Without a token the mean is 0, and the step is
// made nevertheless.
static void oracle_step(const Oracle *oracle, OracleState *state, const OracleSum *sum) {
    const OptimizerSettings *settings = &oracle->settings->optimizer;
    double mean[ELEMENTS], square = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        mean[i] = sum->weight > 0 ? sum->gradient[i] / sum->weight : 0;
        square += mean[i] * mean[i];
    }
    for (int i = 0; i < ELEMENTS; i++) { mean[i] *= fmin(1, CLIP / sqrt(square)); }
    state->t++;
    for (const OptimizerTensor *t = settings->tensors; t < settings->tensors + settings->tensor_count; t++) {
        (t->rows > 0 ? oracle_muon : oracle_adamw)(oracle, state, t, mean);
    }
}

// ---- Rules whose workers step together ------------------------------------------------

typedef enum Round { WHOLE, ROUND_A, ROUND_B } Round;

static void oracle_round(Oracle *oracle, OracleSum *sum, Round round, const double *theta) {
    for (int rank = 0; rank < oracle->ranks; rank++) {
        int all = oracle->spec->micro_batches[rank], a = (all + 1) / 2;
        oracle_add(oracle, sum, rank, round == WHOLE ? all : round == ROUND_A ? a : all - a, theta);
    }
}

static void oracle_commit(Oracle *oracle, const OracleSum *sum) {
    oracle_step(oracle, &oracle->state, sum);
    oracle_look(oracle, oracle->state.theta);
}

// theta(t+1) = Opt(theta(t), mean gradient at theta(t))
static void train_synchronous(Oracle *oracle) {
    for (int commit = 0; commit < COMMITS; commit++) {
        OracleSum sum = {{0}, 0};
        oracle_round(oracle, &sum, WHOLE, oracle->state.theta);
        oracle_commit(oracle, &sum);
    }
}

// theta(t+1) = Opt(theta(t), mean gradient at theta(t-1)). With `predicts` the gradient is that at
// the prediction from theta(t-1): a second step with the gradient that led there. A last commit
// takes what is left.
static void train_delayed(Oracle *oracle, bool predicts) {
    OracleState computing = oracle->state;
    OracleSum sum = {{0}, 0};
    oracle_round(oracle, &sum, WHOLE, computing.theta);
    for (int commit = 0; commit < COMMITS; commit++) {
        OracleSum next = {{0}, 0};
        oracle_round(oracle, &next, WHOLE, computing.theta);
        oracle_commit(oracle, &sum);
        computing = oracle->state;
        if (predicts) { oracle_step(oracle, &computing, &sum); }
        sum = next;
    }
    oracle_commit(oracle, &sum);
}

static void train_dpu(Oracle *oracle) { train_delayed(oracle, false); }
static void train_acco_wp(Oracle *oracle) { train_delayed(oracle, true); }

// theta~(t+1) = Est(theta(t), A / tokens(A)); theta(t+1) = Opt(theta(t), (A + B) / tokens(A + B)).
// A is computed at theta~(t), B at theta(t).
static void train_acco(Oracle *oracle) {
    OracleState estimate = oracle->state;
    for (int commit = 0; commit < COMMITS; commit++) {
        OracleSum sum = {{0}, 0};
        oracle_round(oracle, &sum, ROUND_A, estimate.theta);
        estimate = oracle->state;
        oracle_step(oracle, &estimate, &sum);
        oracle_round(oracle, &sum, ROUND_B, oracle->state.theta);
        oracle_commit(oracle, &sum);
    }
}

// ---- Local rules ----------------------------------------------------------------------

// Every worker steps with the mean over its own tokens.
static void oracle_inner_steps(Oracle *oracle, int steps) {
    for (int step = 0; step < steps; step++) {
        for (int rank = 0; rank < oracle->ranks; rank++) {
            OracleWorker *worker = &oracle->workers[rank];
            OracleState before = worker->state;
            OracleSum sum = {{0}, 0};
            oracle_add(oracle, &sum, rank, oracle->spec->micro_batches[rank], before.theta);
            worker->tokens += sum.weight;
            oracle_step(oracle, &worker->state, &sum);
            for (int i = 0; i < ELEMENTS; i++) {
                worker->moved[i] += worker->state.theta[i] - before.theta[i];
            }
        }
    }
}

// Every worker's share of the tokens since the latest exchange, of which this case has some. With
// `alike` these are micro-batches, so that all have the same.
static void oracle_share(Oracle *oracle) {
    double all = 0;
    for (int rank = 0; rank < oracle->ranks; rank++) { all += oracle->workers[rank].tokens; }
    for (int rank = 0; rank < oracle->ranks; rank++) {
        oracle->workers[rank].share = oracle->workers[rank].tokens / all;
        oracle->workers[rank].tokens = 0;
    }
}

// mean <- the mean over the workers of outer - local, of a fragment. Layers take turns.
static void oracle_send(Oracle *oracle, int fragment) {
    oracle_share(oracle);
    for (int i = 0; i < ELEMENTS; i++) {
        if (i / LAYER % oracle->settings->local.fragments != fragment) { continue; }
        oracle->mean[i] = 0;
        for (int rank = 0; rank < oracle->ranks; rank++) {
            double distance = oracle->outer[i] - oracle->workers[rank].state.theta[i];
            oracle->mean[i] += distance * oracle->workers[rank].share;
        }
    }
}

// buf = mu buf + D; outer -= rate (D + mu buf); local = alpha local + (1 - alpha) outer
static void oracle_apply(Oracle *oracle, int fragment, double alpha) {
    const NesterovStep *step = &oracle->settings->local.outer_nesterov;
    double mu = (double)step->momentum, rate = (double)step->learning_rate;
    for (int i = 0; i < ELEMENTS; i++) {
        if (i / LAYER % oracle->settings->local.fragments != fragment) { continue; }
        oracle->momentum[i] = mu * oracle->momentum[i] + oracle->mean[i];
        oracle->outer[i] -= rate * (oracle->mean[i] + mu * oracle->momentum[i]);
        for (int rank = 0; rank < oracle->ranks; rank++) {
            double *local = &oracle->workers[rank].state.theta[i];
            *local = alpha * *local + (1 - alpha) * oracle->outer[i];
        }
    }
    oracle_look(oracle, oracle->outer);
}

static void train_diloco(Oracle *oracle) {
    for (int commit = 0; commit < COMMITS; commit++) {
        oracle_inner_steps(oracle, oracle->settings->local.steps);
        oracle_send(oracle, 0);
        oracle_apply(oracle, 0, 0);
    }
}

// At the end the fragment that was not applied last is exchanged once more.
static void train_streaming(Oracle *oracle) {
    int fragments = oracle->settings->local.fragments, delay = oracle->settings->local.delay;
    for (int commit = 0; commit < COMMITS; commit++) {
        oracle_inner_steps(oracle, oracle->settings->local.steps / fragments - delay);
        oracle_send(oracle, commit % fragments);
        oracle_inner_steps(oracle, delay);
        oracle_apply(oracle, commit % fragments, (double)oracle->settings->local.outer_nesterov.alpha);
    }
    oracle_send(oracle, 0);
    oracle_apply(oracle, 0, 0);
}

// m = beta m + D(t-1) / Lambda; b -= alpha clip(m, phi)
static void oracle_co2_outer(Oracle *oracle, const MomentumStep *step) {
    double phi = (double)step->phi;
    for (int i = 0; i < ELEMENTS; i++) {
        oracle->momentum[i] = (double)step->beta * oracle->momentum[i] + oracle->mean[i] / (double)step->gap;
        oracle->outer[i] -= (double)step->alpha * fmax(fmin(oracle->momentum[i], phi), -phi);
    }
}

// D = mean(start - x); start = b - alpha (start - x) / workers: a worker does not know the others'
// tokens yet
static void train_co2(Oracle *oracle) {
    const MomentumStep *step = &oracle->settings->local.outer_momentum;
    for (int commit = 0; commit < COMMITS; commit++) {
        oracle_inner_steps(oracle, oracle->settings->local.steps);
        if (commit > 0) { oracle_co2_outer(oracle, step); }
        memset(oracle->mean, 0, sizeof oracle->mean);
        oracle_share(oracle);
        for (int rank = 0; rank < oracle->ranks; rank++) {
            double *start = oracle->workers[rank].start, *x = oracle->workers[rank].state.theta;
            for (int i = 0; i < ELEMENTS; i++) {
                double moved = start[i] - x[i];
                oracle->mean[i] += moved * oracle->workers[rank].share;
                start[i] = x[i] = oracle->outer[i] - (double)step->alpha * moved / oracle->ranks;
            }
        }
        oracle_look(oracle, oracle->outer);
    }
    oracle_co2_outer(oracle, step);
    oracle_look(oracle, oracle->outer);
}

// The nearest number with the eight significant bits of bf16.
static double oracle_bf16(double value) {
    int exponent;
    double fraction = frexp(value, &exponent);
    return ldexp(rint(ldexp(fraction, 8)), exponent - 8);
}

// sent <- the 64 largest elements of the error, each as one of two magnitudes: the means of those
// up to the mean of them all, and of those above.
static void oracle_take_largest(const double *error, double *sent) {
    bool taken[ELEMENTS];
    double mean = 0, sums[2] = {0, 0};
    int counts[2] = {0, 0};
    for (int i = 0; i < ELEMENTS; i++) {
        int larger = 0;
        for (int j = 0; j < ELEMENTS; j++) { larger += fabs(error[j]) > fabs(error[i]); }
        taken[i] = larger < 64;
        mean += taken[i] ? fabs(error[i]) / 64 : 0;
    }
    for (int i = 0; i < ELEMENTS; i++) {
        sums[fabs(error[i]) > mean] += taken[i] ? fabs(error[i]) : 0;
        counts[fabs(error[i]) > mean] += taken[i];
    }
    for (int i = 0; i < ELEMENTS; i++) {
        bool high = fabs(error[i]) > mean;
        sent[i] = taken[i] ? copysign(oracle_bf16(sums[high] / counts[high]), error[i]) : 0;
    }
}

// e = beta e - moved; q = the largest of e; e = e - q. After `steps` more inner steps
// outer -= alpha mean(q); local = outer - e + what these have moved.
static void oracle_sparse_exchange(Oracle *oracle, int steps) {
    double beta = (double)oracle->settings->local.sparse_beta,
           alpha = (double)oracle->settings->local.sparse_alpha;
    oracle_share(oracle);
    for (int rank = 0; rank < oracle->ranks; rank++) {
        OracleWorker *w = &oracle->workers[rank];
        for (int i = 0; i < ELEMENTS; i++) { w->error[i] = beta * w->error[i] - w->moved[i]; }
        oracle_take_largest(w->error, w->sent);
        for (int i = 0; i < ELEMENTS; i++) { w->error[i] -= w->sent[i]; }
        memset(w->moved, 0, sizeof w->moved);
    }
    oracle_inner_steps(oracle, steps);
    for (int i = 0; i < ELEMENTS; i++) {
        double mean = 0;
        for (int rank = 0; rank < oracle->ranks; rank++) {
            mean += oracle->workers[rank].sent[i] * oracle->workers[rank].share;
        }
        oracle->outer[i] -= alpha * mean;
        for (int rank = 0; rank < oracle->ranks; rank++) {
            OracleWorker *w = &oracle->workers[rank];
            w->state.theta[i] = oracle->outer[i] - w->error[i] + w->moved[i];
        }
    }
    oracle_look(oracle, oracle->outer);
}

static void train_sparse(Oracle *oracle) {
    for (int commit = 0; commit < COMMITS; commit++) {
        oracle_inner_steps(oracle, oracle->settings->local.steps - oracle->settings->local.delay);
        oracle_sparse_exchange(oracle, oracle->settings->local.delay);
    }
    oracle_sparse_exchange(oracle, 0);
}

// ---- The program beside it ------------------------------------------------------------

static const struct {
    const char *rule;
    void (*train)(Oracle *oracle);
} ORACLES[] = {
    {"ddp", train_synchronous},
    {"zero1", train_synchronous},
    {"dpu", train_dpu},
    {"acco-wp", train_acco_wp},
    {"acco", train_acco},
    {"co2", train_co2},
    {"diloco", train_diloco},
    {"streaming-diloco", train_streaming},
    {"sparse-loco", train_sparse},
};

// The largest distance from the oracle after a commit, over the mean length of its steps.
static double difference_in_steps(const Oracle *oracle, double (*looks)[ELEMENTS]) {
    double largest = 0, path = 0;
    for (int look = 1; look < oracle->look_count && !isnan(largest); look++) {
        double distance = 0, length = 0;
        for (int i = 0; i < ELEMENTS; i++) {
            distance += pow(looks[look][i] - oracle->looks[look][i], 2);
            length += pow(oracle->looks[look][i] - oracle->looks[look - 1][i], 2);
        }
        path += sqrt(length);
        if (!(sqrt(distance) <= largest)) { largest = sqrt(distance); }
    }
    return largest / (path / (oracle->look_count - 1));
}

static void check_rule(int number, bool muon, int ranks) {
    const char *rule = ORACLES[number].rule;
    RunSpec spec = masked_spec(rule, muon);
    RunResult results[MAX_RANKS];
    if (!run_world(&spec, ranks, results)) { return; }
    expect_replicas_agree(ranks, results, describe(&spec, ranks));
    Oracle *oracle = oracle_create(&spec, ranks, false), *wrong = oracle_create(&spec, ranks, true);
    ORACLES[number].train(oracle);
    ORACLES[number].train(wrong);
    const RunResult *result = &results[first_rank()];
    double program[LOOKS][ELEMENTS];
    assert_int_equal(result->last + 1, oracle->look_count);
    for (int i = 0; i < oracle->look_count * ELEMENTS; i++) {
        program[i / ELEMENTS][i % ELEMENTS] = (double)result->looks[i / ELEMENTS].committed[i % ELEMENTS];
    }
    double difference = difference_in_steps(oracle, program),
           alike = difference_in_steps(oracle, wrong->looks);
    print_message("%-16s %s, %d ranks: %.1e steps from the oracle; micro-batches alike: %.1f\n", rule,
                  muon ? "muon " : "adamw", ranks, difference, alike);
    if (!(difference <= TOLERANCE)) { fail_msg("%s is %g steps from the oracle", rule, difference); }
    if (!(alike >= SEEN)) { fail_msg("%s: nobody would see that micro-batches count the same", rule); }
    free(oracle);
    free(wrong);
    free_results(results, ranks);
}

static void gradients_are_weighted_by_predicted_tokens(void **state) {
    static const int worlds[] = {1, 2, 3, 5};
    (void)state;
    assert_int_equal(sizeof ORACLES / sizeof ORACLES[0], RULE_COUNT);
    for (int i = 0; i < 4 * RULE_COUNT; i++) { check_rule(i / 4, false, worlds[i % 4]); }
    for (int i = 0; i < 4 * RULE_COUNT; i++) { check_rule(i / 4, true, worlds[i % 4]); }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(gradients_are_weighted_by_predicted_tokens)};
    return run_rules_tests(tests, 1);
}
