// team.h: a team of threads that share one loop, for the inside of a kernel.
//
// The caller of team_run is member 0 and works too; a team of one is a plain loop and starts no thread. Tasks are claimed one by one from
// an atomic counter, so which thread runs which task varies from call to call: a task must write what no other task writes, and must not
// sum into anything shared. Then results do not depend on the number of threads, which is how every kernel here stays bit-reproducible.
//
// OpenMP would do the same but for two things: its waiting threads spin by default, which is ruin when ranks are oversubscribed, and its
// runtime is opaque to ThreadSanitizer. Idle members spin for a moment (a kernel follows a kernel within microseconds), then sleep.
#ifndef ACCO_TEAM_H
#define ACCO_TEAM_H

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef void (*TeamTask)(void *context, int task, int thread);

typedef struct Team Team;

typedef struct TeamMember {
    Team *team;
    int thread; // 1 .. threads-1; 0 is the caller of team_run
    pthread_t handle;
} TeamMember;

struct Team {
    int threads;
    int spin_rounds; // how long an idle member looks before it sleeps
    TeamMember *members;
    pthread_mutex_t mutex;
    pthread_cond_t work_ready;
    pthread_cond_t work_done;
    // The loop in progress. Written under the mutex before `generation` moves.
    TeamTask task;
    void *context;
    int task_count;
    int next_task;  // atomic: the next unclaimed task
    unsigned generation; // atomic: how many loops have been started; wraps around
    int working;    // atomic: members that have not finished the loop
    bool stopping;
};

static inline void team_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline void team_claim_tasks(Team *team, int thread) {
    for (;;) {
        int task = __atomic_fetch_add(&team->next_task, 1, __ATOMIC_RELAXED);
        if (task >= team->task_count) { return; }
        team->task(team->context, task, thread);
    }
}

// Waits until `generation` differs from `seen`: looks for a while, then sleeps. Returns false when the team is being destroyed.
static inline bool team_wait_for_work(Team *team, unsigned seen) {
    for (int round = 0; round < team->spin_rounds; round++) {
        if (__atomic_load_n(&team->generation, __ATOMIC_ACQUIRE) != seen) { break; }
        team_pause();
    }
    pthread_mutex_lock(&team->mutex);
    while (!team->stopping && team->generation == seen) { pthread_cond_wait(&team->work_ready, &team->mutex); }
    bool go_on = !team->stopping;
    pthread_mutex_unlock(&team->mutex);
    return go_on;
}

static inline void *team_member_main(void *argument) {
    TeamMember *member = (TeamMember *)argument;
    Team *team = member->team;
    for (unsigned seen = 0; team_wait_for_work(team, seen); seen++) {
        team_claim_tasks(team, member->thread);
        if (__atomic_sub_fetch(&team->working, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_lock(&team->mutex);
            pthread_cond_signal(&team->work_done);
            pthread_mutex_unlock(&team->mutex);
        }
    }
    return NULL;
}

static inline void team_destroy(Team *team) {
    if (team == NULL) { return; }
    pthread_mutex_lock(&team->mutex);
    team->stopping = true;
    pthread_cond_broadcast(&team->work_ready);
    pthread_mutex_unlock(&team->mutex);
    for (int i = 1; i < team->threads; i++) { pthread_join(team->members[i].handle, NULL); }
    pthread_cond_destroy(&team->work_done);
    pthread_cond_destroy(&team->work_ready);
    pthread_mutex_destroy(&team->mutex);
    free(team->members);
    free(team);
}

// A team of `threads` (>= 1) members, or NULL where the system does not give that many threads. `spin`: members may look for work before
// they sleep; pass false where cores are oversubscribed.
static inline Team *team_create(int threads, bool spin) {
    assert(threads >= 1);
    Team *team = (Team *)calloc(1, sizeof *team);
    team->threads = threads;
    team->spin_rounds = spin ? 4000 : 0;
    team->members = (TeamMember *)calloc((size_t)threads, sizeof *team->members);
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->work_ready, NULL);
    pthread_cond_init(&team->work_done, NULL);
    for (int i = 1; i < threads; i++) {
        team->members[i].team = team;
        team->members[i].thread = i;
        if (pthread_create(&team->members[i].handle, NULL, team_member_main, &team->members[i]) != 0) {
            team->threads = i;
            team_destroy(team);
            return NULL;
        }
    }
    return team;
}

// Runs task(context, i, thread) for i in [0, tasks) and returns when all are done. Not to be called from inside a task.
static inline void team_run(Team *team, int tasks, TeamTask task, void *context) {
    // Otherwise the compiler may build a copy of the task into the loop below, and fuse multiplications and additions there that it does
    // not fuse in the task itself: one thread would give other bits than two.
    __asm__("" : "+r"(task));
    if (team->threads == 1 || tasks <= 1) {
        for (int i = 0; i < tasks; i++) { task(context, i, 0); }
        return;
    }
    pthread_mutex_lock(&team->mutex);
    team->task = task;
    team->context = context;
    team->task_count = tasks;
    team->next_task = 0;
    team->working = team->threads - 1;
    __atomic_store_n(&team->generation, team->generation + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&team->work_ready);
    pthread_mutex_unlock(&team->mutex);
    team_claim_tasks(team, 0);
    for (int round = 0; round < team->spin_rounds && __atomic_load_n(&team->working, __ATOMIC_ACQUIRE) > 0; round++) { team_pause(); }
    pthread_mutex_lock(&team->mutex);
    while (__atomic_load_n(&team->working, __ATOMIC_ACQUIRE) > 0) { pthread_cond_wait(&team->work_done, &team->mutex); }
    pthread_mutex_unlock(&team->mutex);
}

#endif
