// machine.h: the cost model of the machines that a simulation supposes (simulation.h).
//
//   micro-batch   seconds, given or measured
//   pass          bytes moved / memory bandwidth
//   exchange      the time of the links, the work of the ranks (encode, copy, add), and the
//                 latency of messages
//
// The exchange, per rank: n hosts of g ranks, N ranks in all, and S bytes for the
// elements that a rank owns of the range, in the format of the wire:
//
//                       leaves the host, of each rank   stays inside, of each rank
//   reduce, two levels  (n - 1) S                       n (g - 1) own elements in fp32
//   gather, two levels  (n - 1) S                       n (g - 1) S
//   either, flat        (N - g) S                       (g - 1) S
//
// The ranks of a host share its link. Chunks go through two lanes (collectives_host.h),
// so links and ranks work at the same time except for one chunk.
#pragma once

#include "comm/collectives_host.h"

typedef struct LinkCost {
    double bytes_per_second; // one way; both ways at once. INFINITY: it costs nothing
    double latency;          // seconds of a message
} LinkCost;

typedef struct Machine {
    LinkCost host;       // between a host and all others, shared by its ranks
    LinkCost inside;     // between a rank and the others of its host
    double micro_batch;  // seconds of one on a rank, forward and backward
    double slow_seconds; // what a micro-batch takes in addition on rank `slow_rank`
    int slow_rank;       // -1: on none
    // (ranks), each relative to this rank's; NULL: all are alike
    const double *slowness;        // seconds of a micro-batch
    const double *counts;          // micro-batches of a round
    const double *estimate_counts; // the same, of a round during an estimate; NULL: as `counts`
    // (WIRE_FORMAT_COUNT): seconds of a reduce-scatter and an all-gather of the whole vector,
    // which the run has measured; NULL: they follow from the rates
    const double *measured_exchange;
    double memory_bytes_per_second;   // in passes over vectors
    double exchange_bytes_per_second; // the same, in a rank's work for an exchange
    // In Muon's matrix products: where compute waits for them, and of a thread that also exchanges.
    double flops_per_second, exchange_flops_per_second;
    // What an exchange takes from the overlapped computation: a share of the rank's work for it
    // (both need the same cores), and of its whole time (it keeps some of a GPU's processors busy).
    double taken_of_work, taken_of_time;
    double chunk;           // elements of each owner that travel at a time; 0: as collectives_host.h cuts
    double message_seconds; // of a rank's work for a message, however short
    double wake_seconds;    // until all ranks have noticed that an exchange may begin
    bool sleeps;            // ranks that wait sleep between looks, as transport_wait does
} Machine;

// Bytes of memory that are read and written for an element.
enum {
    PASS_COPY = 12,   // of gradients
    PASS_SQUARE = 4,  // sum of squares
    PASS_ADAMW = 28,  // gradient, parameter and two moments
    PASS_OUTER = 28,  // an outer step, or a pseudo-gradient, of local rules
    PASS_SPARSE = 104 // finding the largest elements: as many as would take as long (measured on a CPU)
};

static inline double machine_pass(const Machine *machine, double elements, double bytes) {
    return elements * bytes / machine->memory_bytes_per_second;
}

// The same by a thread that also exchanges.
static inline double machine_exchange_pass(const Machine *machine, double elements, double bytes) {
    return elements * bytes / machine->exchange_bytes_per_second;
}

// Bytes of memory for an element that is encoded, decoded and added, by format. Coarse formats are
// bound by arithmetic: theirs is the number of bytes that would take as long.
static inline double machine_coding(WireFormat wire) {
    return wire == WIRE_FP32 ? 12 : wire == WIRE_BF16 ? 16 : 22;
}

enum { MESSAGE_COPIES = 4 }; // times that a byte of a message is read or written on its way

typedef struct ExchangeCost {
    double seconds; // from the moment when all ranks have begun
    double work;    // of these, what a rank works itself
    double bytes;   // that leave a host
} ExchangeCost;

// A reduce-scatter, or an all-gather, of `own` elements of every rank.
static inline ExchangeCost machine_exchange(const Machine *machine, const Transport *transport, double own,
                                            WireFormat wire, bool gather) {
    const Groups *hosts = &transport->hosts;
    double N = transport->size, n = hosts->hosts, g = ceil(N / n);
    double element = (double)wire_bytes(wire, WIRE_BLOCK) / WIRE_BLOCK;
    bool two_level = transport->two_level;
    double outside = own * (two_level ? n - 1 : N - g), inside = own * (two_level ? n : 1) * (g - 1);
    double inside_element = two_level && !gather ? sizeof(float) : element;
    // NCCL is given whole cells, as many as fit into its buffers, and at least one.
    double chunk_elements =
        machine->chunk > 0 ? fmax(machine->chunk, own / LAYOUT_CELLS) : host_chunk_elements(transport);
    double chunks = fmax(ceil(own / chunk_elements), 1);
    double messages = chunks * (two_level ? n - 1 + g - 1 : N - 1), bytes = g * outside * element;
    double link =
        bytes / machine->host.bytes_per_second + inside * inside_element / machine->inside.bytes_per_second;
    double latency = (n > 1 ? machine->host.latency : 0) + (g > 1 ? machine->inside.latency : 0);
    double work = ((outside + own) * machine_coding(wire) +
                   inside * (two_level && !gather ? machine_coding(WIRE_FP32) : 4) +
                   (outside * element + inside * inside_element) * MESSAGE_COPIES) /
                      machine->exchange_bytes_per_second +
                  messages * machine->message_seconds;
    double chunk = fmax(link / chunks, latency / TRANSPORT_LANES);
    link = chunk * chunks;
    ExchangeCost cost = {fmax(link, work) + fmin(link, work) / chunks + latency, work, bytes};
    if (N > 1) { cost.seconds += machine->wake_seconds; }
    // A rank that has waited long polls less often (transport_wait), so it notices the end late. On
    // average that is half a pause, and half of it is hidden behind the next chunk (measured).
    if (N > 1 && machine->sleeps && chunk > TRANSPORT_SPIN_SECONDS) {
        cost.seconds += fmin(fmax(chunk / 8, TRANSPORT_SPIN_SECONDS), TRANSPORT_SLEEP_SECONDS) / 4;
    }
    return cost;
}

// The encoded vectors of all ranks to all ranks, `bytes` each, in so many slices. On two
// levels the first rank of a host passes all ranks' vectors on to each of its mates.
static inline ExchangeCost machine_gather(const Machine *machine, const Transport *transport, double bytes,
                                          double slices) {
    double N = transport->size, n = transport->hosts.hosts, g = ceil(N / n);
    double outside = bytes * (transport->two_level ? n - 1 : N - g);
    double inside = bytes * (g - 1) * (transport->two_level ? N + 1 : 1);
    double latency = (n > 1 ? machine->host.latency : 0) + (g > 1 ? 2 * machine->inside.latency : 0) +
                     (N > 1 ? machine->wake_seconds : 0);
    double work = MESSAGE_COPIES * N * bytes / machine->exchange_bytes_per_second;
    double links = g * outside / machine->host.bytes_per_second + inside / machine->inside.bytes_per_second;
    ExchangeCost cost = {links + work + slices * latency, work, g * outside};
    return cost;
}

// A record of every rank.
static inline double machine_records(const Machine *machine, const Transport *transport, double bytes) {
    double N = transport->size, others = transport_groups(transport)->hosts - 1;
    bool levels = transport->two_level, crosses = others > 0;
    double seconds = others * machine->message_seconds + crosses * machine->host.latency +
                     (levels ? 2 * machine->inside.latency : 0);
    if (transport->hosts.hosts > 1) { seconds += N * bytes / machine->host.bytes_per_second; }
    return seconds + (crosses + (levels ? 2 : 0)) * machine->wake_seconds;
}
