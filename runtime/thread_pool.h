// thread_pool.h: a pool of threads that share one loop, for the inside of a kernel.
//
// The caller of thread_pool_run is member 0 and works too; a pool of one is a plain loop. Tasks are
// claimed one by one from an atomic counter. So a task must write only what no other task writes,
// and must not add into anything shared: this is what keeps every kernel reproducible bit for bit,
// whatever the number of threads.
//
// Not OpenMP, whose waiting threads spin, which costs too much when ranks share cores. Here idle
// members spin only for a moment, for the next kernel comes within microseconds, and then sleep.
#pragma once

#include <assert.h>

#include "runtime/errors.h"

typedef void (*ThreadPoolTask)(void *context, int task, int thread);

typedef struct ThreadPool {
    int threads;
    int spin_rounds;    // how often an idle member looks for work before it sleeps
    pthread_t *members; // (threads); 0, which stays empty, is the caller of thread_pool_run
    int numbered;       // atomic: how many members have taken a number, from 1 on
    pthread_mutex_t mutex;
    pthread_cond_t work_ready;
    pthread_cond_t work_done;
    // The loop in progress. Written under the mutex before `generation` moves.
    ThreadPoolTask task;
    void *context;
    int task_count;
    int next_task;       // atomic: the next unclaimed task
    unsigned generation; // atomic: how many loops have been started; wraps around
    int working;         // atomic: members that have not finished the loop
    bool stopping;
} ThreadPool;

static inline void thread_pool_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void thread_pool_claim_tasks(ThreadPool *pool, int thread) {
    for (;;) {
        int task = __atomic_fetch_add(&pool->next_task, 1, __ATOMIC_RELAXED);
        if (task >= pool->task_count) { return; }
        pool->task(pool->context, task, thread);
    }
}

static inline void *thread_pool_member_main(void *argument) {
    ThreadPool *pool = (ThreadPool *)argument;
    int thread = __atomic_add_fetch(&pool->numbered, 1, __ATOMIC_RELAXED);
    for (unsigned seen = 0;; seen++) {
        for (int round = 0; round < pool->spin_rounds; round++) {
            if (__atomic_load_n(&pool->generation, __ATOMIC_ACQUIRE) != seen) { break; }
            thread_pool_pause();
        }
        pthread_mutex_lock(&pool->mutex);
        while (!pool->stopping && pool->generation == seen) {
            pthread_cond_wait(&pool->work_ready, &pool->mutex);
        }
        bool stopping = pool->stopping;
        pthread_mutex_unlock(&pool->mutex);
        if (stopping) { return NULL; }
        thread_pool_claim_tasks(pool, thread);
        if (__atomic_sub_fetch(&pool->working, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->work_done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static inline void thread_pool_destroy(ThreadPool *pool) {
    if (pool == NULL) { return; }
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->work_ready);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 1; i < pool->threads; i++) { pthread_join(pool->members[i], NULL); }
    pthread_cond_destroy(&pool->work_done);
    pthread_cond_destroy(&pool->work_ready);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->members);
    free(pool);
}

// A pool of `threads` (>= 1) members; where the system does not give that many, the process
// ends. spin: idle members look for work for a moment; pass false if there are fewer cores.
static inline ThreadPool *thread_pool_create(int threads, bool spin) {
    assert(threads >= 1);
    ThreadPool *pool = (ThreadPool *)calloc(1, sizeof *pool);
    pool->threads = threads;
    pool->spin_rounds = spin ? 4000 : 0;
    pool->members = (pthread_t *)calloc((size_t)threads, sizeof *pool->members);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work_ready, NULL);
    pthread_cond_init(&pool->work_done, NULL);
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&pool->members[i], NULL, thread_pool_member_main, pool) == 0) { continue; }
        char *text = (char *)memory_take(1, 80);
        snprintf(text, 80, "the system does not give %d threads: lower --threads", threads);
        failure_report(text);
    }
    return pool;
}

// task(context, i, thread) for i in [0, tasks), until all are done. Not inside a task.
static inline void thread_pool_run(ThreadPool *pool, int tasks, ThreadPoolTask task, void *context) {
    if (pool->threads == 1 || tasks <= 1) {
        for (int i = 0; i < tasks; i++) { task(context, i, 0); }
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->task = task;
    pool->context = context;
    pool->task_count = tasks;
    pool->next_task = 0;
    pool->working = pool->threads - 1;
    __atomic_store_n(&pool->generation, pool->generation + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->work_ready);
    pthread_mutex_unlock(&pool->mutex);
    thread_pool_claim_tasks(pool, 0);
    for (int round = 0; round < pool->spin_rounds && __atomic_load_n(&pool->working, __ATOMIC_ACQUIRE) > 0;
         round++) {
        thread_pool_pause();
    }
    pthread_mutex_lock(&pool->mutex);
    while (__atomic_load_n(&pool->working, __ATOMIC_ACQUIRE) > 0) {
        pthread_cond_wait(&pool->work_done, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
}
