// verdict.h: how all ranks learn whether something that each of them did has worked on
// all of them.
//
// A step that only some ranks can fail at, such as reading a file that is missing on one
// node, must end the same way on all of them: otherwise the others wait for messages that
// never come.
#ifndef ACCO_COMM_VERDICT_H
#define ACCO_COMM_VERDICT_H

#include "comm/transport.h"

typedef struct Verdict {
    int exit_code; // 0: it worked
    char host[64];
    Error error;
} Verdict;

// All ranks call it, each with its own result. Returns the lowest rank whose exit_code is
// not 0, and its verdict; -1: it worked on all ranks.
static inline int transport_first_failure(Transport *transport, const char *operation, int exit_code,
                                          const Error *error, Verdict *found) {
    Verdict mine;
    memset(&mine, 0, sizeof mine);
    mine.exit_code = exit_code;
    memcpy(mine.host, transport->host, sizeof mine.host);
    mine.error = *error;
    Verdict *all = (Verdict *)transport_collect_records(transport, operation, &mine, sizeof mine);
    int rank = 0;
    while (rank < transport->size && all[rank].exit_code == 0) { rank++; }
    if (rank < transport->size) { *found = all[rank]; }
    free(all);
    return rank < transport->size ? rank : -1;
}

#endif
