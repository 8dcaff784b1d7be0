// probe.h: how fast the links between hosts are, measured by sending.
//
//   pairs      hosts meet in rounds of pairs, as in a tournament; the pairs of a round share
//              no host, so a slow pair slows no other down
//   exchange   all ranks send to all others at once, as in training
//
// In a pair the host with the lower number asks and the other answers. A request says how many
// bytes go forth and back; the answer's last word is sent when all have arrived. So one clock
// measures each direction and both at once, which shows a half-duplex link. Amounts grow until one
// takes PROBE_SECONDS. What is sent cannot be compressed.
#pragma once

#include "comm/transport.h"

#define PROBE_SECONDS 0.05

enum {
    PROBE_ECHOES = 16,       // messages of no length; the fastest counts
    PROBE_LEAST = 1 << 16,   // bytes of the first amount
    PROBE_MOST = 1 << 26,    // and of the last
    PROBE_MESSAGE = 1 << 20, // bytes of a message, about as in training
    PROBE_EXCHANGES = 64,    // that are timed together, at most
    PROBE_ROUNDS = 63        // of a tournament, at most: beyond 64 hosts each meets 63 others
};

// What one host measured of another.
typedef struct PairMeasure {
    double latency;         // seconds of a short message, one way; 0: they have not met
    double sends, receives; // bytes a second, one way at a time
    double at_once;         // and each way, with both ways at once
} PairMeasure;

// A request. end: there are no more.
typedef struct ProbeRequest {
    uint64_t forth, back; // bytes
    bool end;
} ProbeRequest;

// Sends and receives so many bytes, in messages. buffer (2, PROBE_MESSAGE): what is sent, then
// what comes.
static inline void probe_move(Transport *transport, int peer, size_t sent, size_t received, char *buffer) {
    const Lane lane = {BETWEEN_HOSTS, 1};
    for (size_t at = 0; at < size_max(sent, received); at += PROBE_MESSAGE) {
        if (at < sent) {
            transport_post(transport, lane, true, peer, buffer, size_min(sent - at, PROBE_MESSAGE));
        }
        if (at < received) {
            size_t bytes = size_min(received - at, PROBE_MESSAGE);
            transport_post(transport, lane, false, peer, buffer + PROBE_MESSAGE, bytes);
        }
        transport_wait(transport, lane);
    }
}

static inline void probe_word(Transport *transport, int peer, bool is_send, void *word, size_t bytes) {
    const Lane lane = {BETWEEN_HOSTS, 0};
    transport_post(transport, lane, is_send, peer, word, bytes);
    transport_wait(transport, lane);
}

// Returns the seconds from the request to the last word of the answer.
static inline double probe_ask(Transport *transport, int peer, size_t forth, size_t back, char *buffer) {
    ProbeRequest request = {forth, back, false};
    char word = 0;
    double began = clock_seconds();
    probe_word(transport, peer, true, &request, sizeof request);
    probe_move(transport, peer, forth, back, buffer);
    probe_word(transport, peer, false, &word, 1);
    return clock_seconds() - began;
}

// Answers the requests of a peer until their end.
static inline void probe_answer(Transport *transport, int peer, char *buffer) {
    ProbeRequest request;
    char word = 0;
    for (;;) {
        probe_word(transport, peer, false, &request, sizeof request);
        if (request.end) { return; }
        probe_move(transport, peer, request.back, request.forth, buffer);
        probe_word(transport, peer, true, &word, 1);
    }
}

// Bytes a second of amounts that grow. echo: seconds of a request without bytes.
static inline double probe_rate(Transport *transport, int peer, bool forth, bool back, double echo,
                                char *buffer) {
    for (size_t bytes = PROBE_LEAST;; bytes *= 4) {
        double seconds = probe_ask(transport, peer, forth ? bytes : 0, back ? bytes : 0, buffer) - echo;
        if (seconds >= PROBE_SECONDS || bytes >= PROBE_MOST) { return (double)bytes / fmax(seconds, 1e-9); }
    }
}

static inline PairMeasure probe_pair(Transport *transport, int peer, char *buffer) {
    ProbeRequest end = {0, 0, true};
    double echo = INFINITY;
    for (int i = 0; i < PROBE_ECHOES; i++) { echo = fmin(echo, probe_ask(transport, peer, 0, 0, buffer)); }
    PairMeasure pair = {.latency = echo / 2,
                        .sends = probe_rate(transport, peer, true, false, echo, buffer),
                        .receives = probe_rate(transport, peer, false, true, echo, buffer),
                        .at_once = probe_rate(transport, peer, true, true, echo, buffer)};
    probe_word(transport, peer, true, &end, sizeof end);
    return pair;
}

// Whom `host` meets in a round; -1: nobody. Places 0 .. n - 2 stand on a circle; two meet if their
// sum is the round, modulo n - 1. A place that would meet itself meets place n - 1, which is nobody
// for an odd number of hosts.
static inline int tournament_partner(int hosts, int host, int round) {
    int n = hosts + hosts % 2, circle = n - 1;
    int own = round * (n / 2) % circle; // twice this is the round
    int partner = host == n - 1 ? own : host == own ? n - 1 : (round - host % circle + circle) % circle;
    return partner < hosts ? partner : -1;
}

// All ranks call it. pairs (hosts, hosts) <- what the row's host measured of the column's; the
// same on all ranks. The first rank of each host measures.
static inline void probe_pairs(Transport *transport, PairMeasure *pairs) {
    const Groups *groups = &transport->hosts;
    int hosts = groups->hosts, host = groups->host, rounds = hosts - 1 + hosts % 2;
    size_t row = (size_t)hosts * sizeof *pairs;
    PairMeasure *mine = MEMORY_OF(PairMeasure, hosts);
    char *buffer = (char *)memory_take(2, PROBE_MESSAGE);
    Random random = {.state = 1};
    for (size_t i = 0; i < PROBE_MESSAGE; i++) { buffer[i] = (char)random_bits(&random); }
    for (int round = 0; round < rounds && round < PROBE_ROUNDS; round++) {
        int partner = tournament_partner(hosts, host, round);
        transport_barrier(transport, "measuring the links");
        if (groups->place[transport->rank] != 0 || partner < 0) { continue; }
        int peer = groups_rank(groups, partner, 0);
        if (host < partner) {
            mine[partner] = probe_pair(transport, peer, buffer);
        } else {
            probe_answer(transport, peer, buffer);
        }
    }
    PairMeasure *all = (PairMeasure *)transport_collect_records(transport, "measuring the links", mine, row);
    for (int from = 0; from < hosts; from++) {
        memcpy(pairs + from * hosts, all + (size_t)groups_rank(groups, from, 0) * (size_t)hosts, row);
    }
    for (int from = 0; from < hosts; from++) { // the host with the lower number has measured
        for (int to = 0; to < from; to++) {
            const PairMeasure *seen = &pairs[to * hosts + from];
            const PairMeasure back = {seen->latency, seen->receives, seen->sends, seen->at_once};
            pairs[from * hosts + to] = back;
        }
    }
    free(all);
    free(buffer);
    free(mine);
}

typedef struct LinkMeasure {
    double latency; // seconds of the smallest all-gather of records
    double rate;    // bytes per second that leave one rank
} LinkMeasure;

enum { LINK_PROBES = 16, LINK_PROBE_BYTES = 4096 };

// The mean seconds of an all-gather of records of `bytes`, on the slowest rank.
static inline double link_time_records(Transport *transport, size_t bytes, int tries) {
    static const char operation[] = "measurement of the link";
    char *mine = (char *)memory_take(1, bytes), *all = (char *)memory_take((size_t)transport->size, bytes);
    double began = clock_seconds();
    for (int i = 0; i < tries; i++) { transport_all_gather_records(transport, operation, mine, all, bytes); }
    double mean = (clock_seconds() - began) / tries;
    free(mine);
    free(all);
    return transport_fold(transport, operation, mean, fmax);
}

// All ranks call it and get the same answer. Records grow until one takes well over the
// latency and PROBE_SECONDS. exact: these then travel for ten times as long.
static inline LinkMeasure link_measure(Transport *transport, bool exact) {
    LinkMeasure measure = {0, INFINITY};
    if (transport->size == 1) { return measure; }
    measure.latency = link_time_records(transport, sizeof(double), LINK_PROBES);
    size_t most = size_min((size_t)1 << 20, ((size_t)1 << 28) / (size_t)transport->size), bytes;
    double seconds = 0;
    for (bytes = LINK_PROBE_BYTES;; bytes *= 4) {
        seconds = link_time_records(transport, bytes, 2);
        if ((seconds > 20 * measure.latency && seconds > PROBE_SECONDS) || 4 * bytes > most) { break; }
    }
    int tries = (int)fmin(10 * PROBE_SECONDS / seconds, PROBE_EXCHANGES);
    if (exact && tries > 2) { seconds = link_time_records(transport, bytes, tries); }
    measure.rate = (double)bytes * (transport->size - 1) / fmax(seconds - measure.latency, 1e-9);
    return measure;
}
