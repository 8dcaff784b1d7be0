// network.h: mpirun ... train_gpt plan: what hosts and links can do, measured by their ranks.
//
// The plan takes the rate of an exchange between all ranks, the longest latency of a pair, and the
// pace of every rank. What differs from the other hosts is named, because it is most often a
// mistake: a slow or half-duplex link, a clock that is late, another program. No MPI says which
// network interface it uses: it is the one that has sent most bytes while the links were measured.
#pragma once

#include "comm/probe.h"
#include "comm/trace.h"
#include "options/options.h"
#include "plan/machine.h"
#include "program/run.h"

// What each rank tells.
typedef struct HostFacts {
    double clock, clock_error; // seconds to the wall clock of rank 0; at most this far from the truth
    double micro_batch;        // seconds; NAN: not known
    char interface[16];        // that messages to other hosts leave by; "": the kernel counted none
    double interface_mbit;     // 0: not known
    bool wireless, half_duplex;
} HostFacts;

typedef struct Network {
    const Groups *groups;
    const Hello *hellos; // (ranks)
    HostFacts *facts;    // (ranks)
    PairMeasure *pairs;  // (hosts, hosts)
    double host_rate;    // bytes per second that leave a host in an exchange; INFINITY: there is one host
    double latency;      // seconds of a message between hosts
    double *slowness;    // (ranks): seconds of a micro-batch of each over this rank's
} Network;

// ---- Measuring ------------------------------------------------------------------------

enum { INTERFACES_MOST = 64 };

typedef struct Interfaces {
    int count;
    char names[INTERFACES_MOST][16];
    double sent[INTERFACES_MOST]; // bytes, since the machine started
} Interfaces;

static inline void interfaces_read(Interfaces *interfaces) {
    char line[512];
    FILE *file = fopen("/proc/net/dev", "r");
    interfaces->count = 0;
    while (file != NULL && interfaces->count < INTERFACES_MOST && fgets(line, sizeof line, file) != NULL) {
        int i = interfaces->count; // after the name stand eight numbers of what was received
        interfaces->count += sscanf(line, " %15[^: ]: %*f %*f %*f %*f %*f %*f %*f %*f %lf",
                                    interfaces->names[i], &interfaces->sent[i]) == 2;
    }
    if (file != NULL) { fclose(file); }
}

// facts <- the interface that has sent most between `before` and `now`, if it is most of `bytes`.
static inline void interfaces_find(const Interfaces *before, const Interfaces *now, double bytes,
                                   HostFacts *facts) {
    char path[96], text[32] = "";
    double most = bytes / 2;
    for (int i = 0; i < now->count; i++) {
        for (int j = 0; j < before->count; j++) {
            double sent = now->sent[i] - before->sent[j];
            if (strcmp(now->names[i], before->names[j]) != 0 || !(sent > most)) { continue; }
            most = sent;
            memcpy(facts->interface, now->names[i], sizeof facts->interface);
        }
    }
    if (facts->interface[0] == '\0') { return; }
    snprintf(path, sizeof path, "/sys/class/net/%s/wireless", facts->interface);
    facts->wireless = access(path, F_OK) == 0;
    snprintf(path, sizeof path, "/sys/class/net/%s/duplex", facts->interface);
    facts->half_duplex = file_read_line(path, "half", text, sizeof text);
    snprintf(path, sizeof path, "/sys/class/net/%s/speed", facts->interface);
    if (file_read_line(path, "", text, sizeof text)) { facts->interface_mbit = fmax(strtod(text, NULL), 0); }
}

static inline double wall_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

// All ranks, with the same result. micro_batch: seconds of one on this rank, NAN: not known.
static inline Network network_measure(Transport *transport, const Hello *hellos, double micro_batch) {
    const Groups *groups = &transport->hosts;
    size_t hosts = groups->hosts;
    Network network = {.groups = groups, .hellos = hellos};
    Interfaces before, now;
    ClockOffset offset = trace_measure_clock(transport, wall_clock);
    HostFacts mine = {.clock = -offset.seconds, .clock_error = offset.error, .micro_batch = micro_batch};
    network.pairs = MEMORY_OF(PairMeasure, hosts * hosts);
    network.slowness = MEMORY_OF(double, transport->size);
    interfaces_read(&before);
    uint64_t sent = transport->bytes_sent_outside;
    probe_pairs(transport, network.pairs);
    interfaces_read(&now);
    interfaces_find(&before, &now, transport->bytes_sent_outside - sent, &mine);
    double rate = hosts > 1 ? link_measure(transport, true).rate : INFINITY;
    double size = transport->size, mates = ceil(size / hosts);
    network.host_rate = hosts > 1 ? rate * mates * (size - mates) / (size - 1) : rate;
    for (size_t i = 0; i < hosts * hosts; i++) {
        network.latency = fmax(network.latency, network.pairs[i].latency);
    }
    network.facts = (HostFacts *)transport_collect_records(transport, "facts of hosts", &mine, sizeof mine);
    return network;
}

static inline void network_free(Network *network) {
    free(network->pairs);
    free(network->facts);
    free(network->slowness);
}

// ---- What is odd ----------------------------------------------------------------------

#define ODD_RATE 0.6     // of what hosts reach with their best partner: the median over hosts
#define ODD_AT_ONCE 0.65 // of the slower direction alone
#define ODD_LATENCY 3.0  // times that median, and ODD_LATENCY_MORE
#define ODD_LATENCY_MORE 500e-6
#define ODD_CLOCK 1.0 // seconds

static inline const Hello *network_hello(const Network *network, int host) {
    return &network->hellos[groups_rank(network->groups, host, 0)];
}

static inline const HostFacts *network_facts(const Network *network, int host) {
    return &network->facts[groups_rank(network->groups, host, 0)];
}

// The name of a host; where several have the same one, as with an emulated link, its first rank.
static inline const char *network_name(const Network *network, int host, char text[80]) {
    const char *name = network_hello(network, host)->host;
    int same = 0;
    for (int other = 0; other < network->groups->hosts; other++) {
        same += strcmp(network_hello(network, other)->host, name) == 0;
    }
    snprintf(text, 80, "%s", name);
    if (same > 1) { snprintf(text, 80, "rank %d", groups_rank(network->groups, host, 0)); }
    return text;
}

static inline const PairMeasure *network_pair(const Network *network, int from, int to) {
    return &network->pairs[from * network->groups->hosts + to];
}

// A number of a pair, by its offset in PairMeasure: the extreme of a host with all it has met.
static inline double network_extreme(const Network *network, int host, size_t number,
                                     double (*choose)(double, double)) {
    double extreme = NAN; // which fmin and fmax leave out
    for (int other = 0; other < network->groups->hosts; other++) {
        const PairMeasure *pair = network_pair(network, host, other);
        if (pair->latency > 0) { extreme = choose(extreme, *(const double *)((const char *)pair + number)); }
    }
    return extreme;
}

// What is usual: the median over the hosts of each one's best pair.
static inline double network_usual(const Network *network, size_t number, double (*choose)(double, double)) {
    int hosts = network->groups->hosts;
    double *best = MEMORY_OF(double, hosts);
    for (int host = 0; host < hosts; host++) { best[host] = network_extreme(network, host, number, choose); }
    double usual = median_of(best, hosts);
    free(best);
    return usual;
}

PRINTF_LIKE(2, 3) static inline void odd_add(json_t *odd, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    json_array_append_new(odd, json_vsprintf(format, arguments));
    va_end(arguments);
}

// A host whose every pair is slow is named once; the function says whether it is one.
static inline bool odd_add_slow_host(const Network *network, int host, size_t number, const char *does,
                                     double usual, json_t *odd) {
    char name[80], most[NUMBER_TEXT_SIZE], others[NUMBER_TEXT_SIZE];
    double best = network_extreme(network, host, number, fmax);
    if (network->groups->hosts < 3 || !(best < ODD_RATE * usual)) { return false; }
    odd_add(odd, "%s %s %s bits a second at most, where %s are usual: look at its cable, its port and --mca",
            network_name(network, host, name), does, human_count(8 * best, most),
            human_count(8 * usual, others));
    return true;
}

static inline void odd_add_pair(const Network *network, int a, int b, const bool *named, double usual,
                                double usual_latency, json_t *odd) {
    const PairMeasure *pair = network_pair(network, a, b);
    char one[80], other[80], there[NUMBER_TEXT_SIZE], back[NUMBER_TEXT_SIZE], rate[NUMBER_TEXT_SIZE];
    double slower = fmin(pair->sends, pair->receives);
    network_name(network, a, one);
    network_name(network, b, other);
    if (slower < ODD_RATE * usual && !named[a] && !named[b]) {
        odd_add(odd, "between %s and %s %s bits a second go there and %s back, where %s are usual", one,
                other, human_count(8 * pair->sends, there), human_count(8 * pair->receives, back),
                human_count(8 * usual, rate));
    }
    if (pair->at_once < ODD_AT_ONCE * slower) {
        odd_add(odd,
                "%s and %s send each other %s bits a second at once, %s one at a time: the link is "
                "half-duplex, as Wi-Fi is, or too few cores serve it",
                one, other, human_count(8 * pair->at_once, there), human_count(8 * slower, rate));
    }
    if (pair->latency > ODD_LATENCY * usual_latency && pair->latency > usual_latency + ODD_LATENCY_MORE) {
        odd_add(odd, "a message between %s and %s takes %.3g ms, where %.3g ms are usual", one, other,
                1e3 * pair->latency, 1e3 * usual_latency);
    }
}

static inline void odd_add_host(const Network *network, int host, json_t *odd) {
    const HostFacts *facts = network_facts(network, host);
    const Hello *hello = network_hello(network, host), *first = network->hellos;
    char name[80];
    network_name(network, host, name);
    if (fabs(facts->clock) > ODD_CLOCK + facts->clock_error) {
        odd_add(odd, "the clock of %s is %.1f s %s rank 0's: times in files and logs will not agree", name,
                fabs(facts->clock), facts->clock < 0 ? "behind" : "ahead of");
    }
    if (strcmp(hello->revision, first->revision) != 0 || strcmp(hello->rounding, first->rounding) != 0) {
        odd_add(odd, "%s runs another program than rank 0: commit %s, %s; rank 0: commit %s, %s", name,
                hello->revision, hello->rounding, first->revision, first->rounding);
    }
    if (facts->wireless || facts->half_duplex) {
        odd_add(odd, "%s sends by %s, which is %s", name, facts->interface,
                facts->wireless ? "wireless" : "half-duplex");
    }
}

// A list of sentences, for the caller to free.
static inline json_t *network_odd(const Network *network) {
    int hosts = network->groups->hosts;
    bool *named = MEMORY_OF(bool, hosts);
    json_t *odd = json_array();
    double sends = network_usual(network, offsetof(PairMeasure, sends), fmax),
           latency = network_usual(network, offsetof(PairMeasure, latency), fmin);
    for (int host = 0; host < hosts; host++) {
        named[host] = odd_add_slow_host(network, host, offsetof(PairMeasure, sends), "sends", sends, odd);
        named[host] |=
            odd_add_slow_host(network, host, offsetof(PairMeasure, receives), "receives", sends, odd);
        odd_add_host(network, host, odd);
    }
    for (int a = 0; a < hosts; a++) {
        for (int b = a + 1; b < hosts; b++) {
            bool met = network_pair(network, a, b)->latency > 0;
            if (met) { odd_add_pair(network, a, b, named, sends, latency, odd); }
        }
    }
    free(named);
    return odd;
}

// ---- Saying it ------------------------------------------------------------------------

enum { HOSTS_SHOWN = 32, ODD_SHOWN = 16 };

static inline void network_print_host(const Network *network, int host) {
    const HostFacts *facts = network_facts(network, host);
    const Hello *hello = network_hello(network, host);
    char name[80], sends[NUMBER_TEXT_SIZE], receives[NUMBER_TEXT_SIZE], at_once[NUMBER_TEXT_SIZE],
        micro_batch[NUMBER_TEXT_SIZE], clock[32] = "-", speed[NUMBER_TEXT_SIZE] = "";
    if (host > 0) { snprintf(clock, sizeof clock, "%+.3fs", facts->clock); }
    if (facts->interface_mbit > 0) { human_count(1e6 * facts->interface_mbit, speed); }
    printf("  %-16.16s %5d %5d  %-8.8s %5s %11s %8s %8s %8s %8.0f %9s  %.16s\n",
           network_name(network, host, name), groups_count(network->groups, host), hello->cores,
           facts->interface[0] != '\0' ? facts->interface : "-", speed,
           isnan(facts->micro_batch) ? "-" : human_milliseconds(1e3 * facts->micro_batch, micro_batch),
           human_count(8 * network_extreme(network, host, offsetof(PairMeasure, sends), fmin), sends),
           human_count(8 * network_extreme(network, host, offsetof(PairMeasure, receives), fmin), receives),
           human_count(8 * network_extreme(network, host, offsetof(PairMeasure, at_once), fmin), at_once),
           1e6 * network_extreme(network, host, offsetof(PairMeasure, latency), fmax), clock,
           hello->revision);
}

static inline void network_print(const Network *network, const json_t *odd) {
    int hosts = network->groups->hosts, lines = (int)json_array_size(odd);
    printf(
        "\nnetwork          measured between %d hosts: bits a second and microseconds of each one's slowest "
        "pair\n\n"
        "  host             ranks cores  interface      micro-batch    sends receives  at once  latency"
        "     clock  program\n",
        hosts);
    for (int host = 0; host < hosts && host < HOSTS_SHOWN; host++) { network_print_host(network, host); }
    if (hosts > HOSTS_SHOWN) { printf("  and %d more: --json has all\n", hosts - HOSTS_SHOWN); }
    printf("\n");
    for (int i = 0; i < lines && i < ODD_SHOWN; i++) {
        printf("odd              %s\n", json_string_value(json_array_get(odd, i)));
    }
    if (lines > ODD_SHOWN) { printf("                 and %d more: --json has all\n", lines - ODD_SHOWN); }
    if (lines == 0) { printf("odd              nothing: hosts, links, clocks and programs are alike\n"); }
}

// For --json, with what is odd.
static inline json_t *network_as_json(const Network *network, json_t *odd) {
    json_t *hosts = json_array(), *pairs = json_array();
    char name[80], other[80];
    for (int host = 0; host < network->groups->hosts; host++) {
        const HostFacts *facts = network_facts(network, host);
        const Hello *hello = network_hello(network, host);
        json_array_append_new(
            hosts, json_pack("{s:s, s:i, s:i, s:s, s:o, s:o, s:o, s:s, s:s}", "host",
                             network_name(network, host, name), "ranks", groups_count(network->groups, host),
                             "cores", hello->cores, "interface", facts->interface, "interface_mbit",
                             log_real(facts->interface_mbit), "clock_seconds", log_real(facts->clock),
                             "micro_batch_ms", log_real(1e3 * facts->micro_batch), "commit", hello->revision,
                             "rounding", hello->rounding));
        for (int to = 0; to < network->groups->hosts; to++) {
            const PairMeasure *pair = network_pair(network, host, to);
            if (!(pair->latency > 0)) { continue; }
            json_array_append_new(
                pairs, json_pack("{s:s, s:s, s:o, s:o, s:o}", "from", network_name(network, host, name), "to",
                                 network_name(network, to, other), "bits_per_second",
                                 log_real(8 * pair->sends), "at_once", log_real(8 * pair->at_once),
                                 "latency_us", log_real(1e6 * pair->latency)));
        }
    }
    return json_pack("{s:o, s:o, s:O}", "hosts", hosts, "pairs", pairs, "odd", odd);
}

// What the options do not say is as measured. The machine points to the network's slowness.
static inline void network_set_machine(const Network *network, const Options *options, Machine *machine) {
    int ranks = network->groups->size;
    double *slowness = network->slowness;
    bool known = options->compute_ms == 0 && options->like[0] == '\0';
    for (int rank = 0; rank < ranks; rank++) {
        slowness[rank] = network->facts[rank].micro_batch / network->facts[network->groups->rank].micro_batch;
        known = known && isfinite(slowness[rank]);
    }
    if (known) { machine->slowness = slowness; }
    if (options->host_mbit == 0) { machine->host.bytes_per_second = network->host_rate; }
    if (options->host_us == 0) { machine->host.latency = network->latency; }
}
