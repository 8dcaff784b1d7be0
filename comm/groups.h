// groups.h: which ranks share a host, and which rank speaks to whom over the slow link between
// hosts. A vector crosses that link once per host (collective.h).
//
// For every owner of elements, each host has one rank that adds up what the ranks there have for
// it, and speaks with it: the owner's delegate, which has the same place on its host as the owner;
// on a host with fewer ranks, places are counted round. An owner is its own delegate.
//
//   host 0      host 1            owner   its delegate on host 0, 1, 2
//   | r0 r1 |   | r2 r3 |         r0      r0, r2, r4
//   host 2                        r1      r1, r3, r4
//   | r4 |                        r3      r1, r3, r4
//
// In the flat exchange every rank counts as a host, and sends straight to every owner. The order of
// a sum follows from the groups alone: hosts by their lowest ranks, in each the ranks ascending.
#pragma once

#include <assert.h>

#include "runtime/errors.h"
#include "runtime/numbers.h"

typedef struct Groups {
    int size, hosts;
    int rank, host, mates; // this rank, its host, and the number of ranks there, itself included
    int *ranks;            // (size): host after host
    int *begins;           // (hosts + 1): where the ranks of a host begin in `ranks`
    int *host_of;          // (size): each rank's host
    int *place;            // (size): each rank's place among the ranks of its host
} Groups;

static inline void groups_free(Groups *groups) {
    free(groups->ranks); // with all other numbers
    groups->ranks = groups->begins = groups->host_of = groups->place = NULL;
}

static inline int groups_count(const Groups *groups, int host) {
    return groups->begins[host + 1] - groups->begins[host];
}

// leader_of (size): each rank's lowest one of its host.
static inline void groups_make(Groups *groups, int rank, int size, const int *leader_of) {
    groups->rank = rank;
    groups->size = size;
    groups->hosts = 0;
    groups->ranks = MEMORY_OF(int, 4 * (size_t)size + 1);
    groups->host_of = groups->ranks + size;
    groups->place = groups->host_of + size;
    groups->begins = groups->place + size;
    for (int i = 0; i < size; i++) {
        int leader = leader_of[i];
        assert(leader >= 0 && leader <= i && leader_of[leader] == leader);
        groups->host_of[i] = leader == i ? groups->hosts++ : groups->host_of[leader];
        groups->place[i] = groups->begins[groups->host_of[i] + 1]++; // counts, until the sums below
    }
    for (int host = 0; host < groups->hosts; host++) { groups->begins[host + 1] += groups->begins[host]; }
    for (int i = 0; i < size; i++) {
        groups->ranks[groups->begins[groups->host_of[i]] + groups->place[i]] = i;
    }
    groups->host = groups->host_of[rank];
    groups->mates = groups_count(groups, groups->host);
}

// Every `per_host` ranks in a row share a host; the last host may have fewer.
static inline void groups_make_even(Groups *groups, int rank, int size, int per_host) {
    int *leader_of = MEMORY_OF(int, size);
    for (int i = 0; i < size; i++) { leader_of[i] = i / per_host * per_host; }
    groups_make(groups, rank, size, leader_of);
    free(leader_of);
}

static inline bool groups_are_flat(const Groups *groups) { return groups->hosts == groups->size; }

static inline int groups_rank(const Groups *groups, int host, int place) {
    assert(place < groups_count(groups, host));
    return groups->ranks[groups->begins[host] + place];
}

static inline int groups_delegate(const Groups *groups, int host, int owner) {
    return groups_rank(groups, host, groups->place[owner] % groups_count(groups, host));
}

// The rank of this host `step` places ahead. Ranks take turns: in a step no two send to
// the same rank, and one that sends `step` ahead receives from `step` behind.
static inline int groups_mate(const Groups *groups, int step) {
    int place = groups->place[groups->rank] + step + groups->mates;
    return groups_rank(groups, groups->host, place % groups->mates);
}

// The same for hosts.
static inline int groups_other_host(const Groups *groups, int step) {
    return (groups->host + step + groups->hosts) % groups->hosts;
}

// For the user: "2 hosts of 4 ranks", "3 hosts of 1 to 4 ranks".
static inline void groups_describe(const Groups *groups, char *text, size_t size) {
    int least = groups->size, most = 0;
    for (int host = 0; host < groups->hosts; host++) {
        int count = groups_count(groups, host);
        least = int_min(least, count);
        most = count > most ? count : most;
    }
    if (least == most) {
        snprintf(text, size, "%d host%s of %d rank%s", groups->hosts, plural(groups->hosts), most,
                 plural(most));
    } else {
        snprintf(text, size, "%d hosts of %d to %d ranks", groups->hosts, least, most);
    }
}

// Steps to the next of the owners on a host whose delegate a rank is; false behind the last one.
// owner: -1 before the first.
static inline bool groups_next_owner_on(const Groups *groups, int host, int delegate, int *owner) {
    int place = *owner < 0 ? groups->place[delegate]
                           : groups->place[*owner] + groups_count(groups, groups->host_of[delegate]);
    bool found = place < groups_count(groups, host);
    if (found) { *owner = groups_rank(groups, host, place); }
    return found;
}

// The same on all hosts, host after host.
static inline bool groups_next_owner(const Groups *groups, int delegate, int *owner) {
    int host = *owner < 0 ? 0 : groups->host_of[*owner], next = *owner;
    while (host < groups->hosts && !groups_next_owner_on(groups, host, delegate, &next)) {
        host++;
        next = -1;
    }
    *owner = next;
    return next >= 0;
}

static inline int groups_count_owners(const Groups *groups, int delegate) {
    int count = 0;
    for (int owner = -1; groups_next_owner(groups, delegate, &owner);) { count++; }
    return count;
}
