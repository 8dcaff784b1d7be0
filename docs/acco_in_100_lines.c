// ACCO in 100 lines: data-parallel training whose communication hides behind computation.
//     cc -O2 docs/acco_in_100_lines.c -lpthread -lm && ./a.out
//                                  seconds  theta after 25 commits
//     ddp                             1.17  1.26587868 1.13020289 0.271492064 0.0442843176
//     acco, one stream at a time      1.41  1.26587653 1.1302141 0.271467358 0.0442809016
//     acco, two streams               1.06  1.26587653 1.1302141 0.271467358 0.0442809016
// A batch is computed in two rounds, A and B, while a second thread exchanges gradients:
//   compute        | B at theta(t)                | A of t+1 at theta~(t+1)    | B at theta(t+1) ..
//   communication  | ESTIMATE theta~(t+1) from A  | COMMIT theta(t+1) from A+B | ESTIMATE ..
// An estimate is a step that is not kept: the commit starts from the same theta(t) and uses both
// rounds. So no gradient is late, and an exchange shorter than a round takes no time. Here four
// workers fit exp(cos t) ~ sum theta_i cos(i t) by least squares, and the network is a sleep.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { WORKERS = 4, SIZE = 4, SAMPLES = 65536, COMMITS = 25, NETWORK_NS = 8000000 };
enum { ESTIMATE, COMMIT, CLEAR, KEEP };

typedef struct Scheduler {
    float theta[SIZE];                  // compute reads theta(t) or theta~(t) here
    float gradients[WORKERS][SIZE];     // and adds up each worker's gradients here
    float sent[WORKERS][SIZE];          // the job reads what was handed over,
    float stepped[SIZE];                // writes the next parameters,
    float master[SIZE], momentum[SIZE]; // and in a commit changes the optimizer's state
    int kind, sample, overlap, launched;
    pthread_t thread;
} Scheduler;

static double clock_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// A round on the compute stream: worker n / SAMPLES adds the gradient of its next micro-batch.
static void accumulate(Scheduler *s) {
    for (int n = 0; n < WORKERS * SAMPLES; n++) {
        double t = 2e-5 * s->sample++, x[SIZE], error = -exp(cos(t));
        for (int i = 0; i < SIZE; i++) { error += s->theta[i] * (x[i] = cos(i * t)); }
        for (int i = 0; i < SIZE; i++) { s->gradients[n / SAMPLES][i] += error * x[i] / SAMPLES; }
    }
}

// A job on the communication stream: sums in the order of ranks, then a step with their mean.
static void *job(void *scheduler) {
    Scheduler *s = scheduler;
    for (int i = 0; i < SIZE; i++) {
        float sum = 0;
        for (int w = 0; w < WORKERS; w++) { sum += s->sent[w][i]; }
        float m = 0.5f * (s->momentum[i] + sum / (s->kind == COMMIT ? 2 * WORKERS : WORKERS));
        s->stepped[i] = s->master[i] - 0.5f * m;
        if (s->kind == COMMIT) { s->momentum[i] = m, s->master[i] = s->stepped[i]; }
    }
    nanosleep(&(struct timespec){.tv_nsec = NETWORK_NS}, NULL);
    return NULL;
}

static void launch(Scheduler *s, int kind) {
    s->kind = kind, s->launched = 1;
    s->overlap = s->overlap && pthread_create(&s->thread, NULL, job, s) == 0;
    if (!s->overlap) { job(s); }
}

static void wait_for(Scheduler *s) { // and takes the parameters that the job has made
    if (s->overlap) { pthread_join(s->thread, NULL); }
    memcpy(s->theta, s->stepped, sizeof s->theta), s->launched = 0;
}

// The only place where the buffers of both streams meet.
static void hand_over(Scheduler *s, int mode) {
    if (s->launched) { wait_for(s); }
    memcpy(s->sent, s->gradients, sizeof s->sent);
    if (mode == CLEAR) { memset(s->gradients, 0, sizeof s->gradients); }
}

static void acco_commit(Scheduler *s) {
    if (s->sample == 0) { accumulate(s), hand_over(s, KEEP); } // the first round A
    launch(s, ESTIMATE), accumulate(s), hand_over(s, CLEAR);
    launch(s, COMMIT), accumulate(s), hand_over(s, KEEP);
}

static void ddp_commit(Scheduler *s) {
    accumulate(s), accumulate(s), hand_over(s, CLEAR), launch(s, COMMIT), wait_for(s);
}

int main(void) {
    static const char *const names[] = {"ddp", "acco, one stream at a time", "acco, two streams"};
    printf("%-28s seconds  theta after %d commits\n", "", COMMITS);
    for (int way = 0; way < 3; way++) {
        Scheduler s = {.overlap = way == 2};
        double began = clock_seconds();
        for (int t = 0; t < COMMITS; t++) { (way == 0 ? ddp_commit : acco_commit)(&s); }
        printf("%-28s %7.2f ", names[way], clock_seconds() - began);
        for (int i = 0; i < SIZE; i++) { printf(" %.9g%s", s.master[i], i + 1 < SIZE ? "" : "\n"); }
    }
    return 0;
}
