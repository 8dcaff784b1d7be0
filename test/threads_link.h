// threads_link.h: a link between threads of one process, so that a test can run N ranks
// without a launcher and under ThreadSanitizer.
//
// There is one mailbox for each ordered pair of ranks. A sender leaves a pointer to its
// data, and the receiver copies them when both have come. A send is done only when it was
// copied, as late as a link may say so: the hardest case for code that reuses a buffer
// too early.
#pragma once

#include "comm/transport.h"

enum { MAILBOX_CAPACITY = 16 };

typedef struct Message {
    const void *data;
    size_t bytes;
} Message;

typedef struct Mailbox {
    Message messages[MAILBOX_CAPACITY];
    uintptr_t sent, receives_begun, received; // messages are taken in the order in which they were sent
} Mailbox;

typedef struct ThreadsWorld {
    int size;
    pthread_mutex_t mutex;
    Mailbox *mailboxes; // (size, size): [from][to]
} ThreadsWorld;

typedef struct ThreadsRank {
    ThreadsWorld *world;
    int rank;
    int messages; // sent so far
} ThreadsRank;

static inline ThreadsWorld *threads_world_create(int size) {
    ThreadsWorld *world = (ThreadsWorld *)calloc(1, sizeof *world);
    world->size = size;
    world->mailboxes = (Mailbox *)calloc((size_t)(size * size), sizeof(Mailbox));
    pthread_mutex_init(&world->mutex, NULL);
    return world;
}

static inline void threads_world_destroy(ThreadsWorld *world) {
    pthread_mutex_destroy(&world->mutex);
    free(world->mailboxes);
    free(world);
}

// A request: {mailbox, number of the message, target or NULL for a send, bytes}.
static inline void threads_send(void *state, LinkRequest *request, int peer, const void *data, size_t bytes) {
    ThreadsRank *self = (ThreadsRank *)state;
    Mailbox *mailbox = &self->world->mailboxes[self->rank * self->world->size + peer];
    pthread_mutex_lock(&self->world->mutex);
    assert(mailbox->sent - mailbox->received < MAILBOX_CAPACITY);
    Message *message = &mailbox->messages[mailbox->sent % MAILBOX_CAPACITY];
    message->data = data;
    message->bytes = bytes;
    request->words[0] = mailbox;
    request->words[1] = (void *)mailbox->sent++;
    request->words[2] = NULL;
    self->messages++;
    pthread_mutex_unlock(&self->world->mutex);
}

static inline void threads_receive(void *state, LinkRequest *request, int peer, void *data, size_t bytes) {
    ThreadsRank *self = (ThreadsRank *)state;
    Mailbox *mailbox = &self->world->mailboxes[peer * self->world->size + self->rank];
    pthread_mutex_lock(&self->world->mutex);
    request->words[0] = mailbox;
    request->words[1] = (void *)mailbox->receives_begun++;
    request->words[2] = data;
    request->words[3] = (void *)bytes;
    pthread_mutex_unlock(&self->world->mutex);
}

static inline void threads_start(void *state, LinkRequest *request, bool is_send, int peer, void *data,
                                 size_t bytes) {
    if (is_send) {
        threads_send(state, request, peer, data, bytes);
    } else {
        threads_receive(state, request, peer, data, bytes);
    }
}

static inline bool threads_is_done(void *state, LinkRequest *request) {
    ThreadsRank *self = (ThreadsRank *)state;
    Mailbox *mailbox = (Mailbox *)request->words[0];
    uintptr_t number = (uintptr_t)request->words[1];
    pthread_mutex_lock(&self->world->mutex);
    bool done = mailbox->received > number;
    if (request->words[2] != NULL && mailbox->received == number && mailbox->sent > number) {
        const Message *message = &mailbox->messages[number % MAILBOX_CAPACITY];
        assert(message->bytes == (size_t)request->words[3]);
        memcpy(request->words[2], message->data, message->bytes);
        mailbox->received++;
        done = true;
    }
    pthread_mutex_unlock(&self->world->mutex);
    return done;
}

static inline void threads_open(Transport *transport, ThreadsRank *self) {
    Link link = {.name = "threads", .state = self, .start = threads_start, .is_done = threads_is_done};
    transport_prepare(transport, self->rank, self->world->size, 1, &link, "a test");
    transport->local_rank = self->rank;
    transport->local_size = self->world->size;
}

// Runs body(transport, context) on `ranks` threads, each with a transport of its own, and
// waits for all.
typedef void (*ThreadsBody)(Transport *transport, void *context);

typedef struct ThreadsMember {
    ThreadsRank rank;
    ThreadsBody body;
    void *context;
    pthread_t thread;
} ThreadsMember;

static inline void *threads_member_main(void *argument) {
    ThreadsMember *member = (ThreadsMember *)argument;
    Transport transport;
    threads_open(&transport, &member->rank);
    member->body(&transport, member->context);
    transport_close(&transport);
    return NULL;
}

static inline void threads_run(int ranks, ThreadsBody body, void *context) {
    ThreadsWorld *world = threads_world_create(ranks);
    ThreadsMember *members = (ThreadsMember *)calloc((size_t)ranks, sizeof *members);
    for (int i = 0; i < ranks; i++) {
        members[i].rank.world = world;
        members[i].rank.rank = i;
        members[i].rank.messages = 0;
        members[i].body = body;
        members[i].context = context;
        pthread_create(&members[i].thread, NULL, threads_member_main, &members[i]);
    }
    for (int i = 0; i < ranks; i++) { pthread_join(members[i].thread, NULL); }
    free(members);
    threads_world_destroy(world);
}

// Lets every `ranks_per_host` consecutive ranks count as one host. 0: every rank by itself.
static inline void join_hosts(Transport *transport, int ranks_per_host) {
    transport->two_level = ranks_per_host > 1;
    transport_meet(transport,
                   ranks_per_host > 1 ? transport->rank - transport->rank % ranks_per_host : transport->rank);
}
