// test_network.c: how links are measured (comm/probe.h), and what a plan finds odd in what was
// measured (plan/network.h).
//
// Ranks are threads, whose messages the emulated link delays as a test asks for. Times are those
// of a busy machine: links may seem slower than they are, never much faster.

#include "test/harness.h"

#include "runtime/device.h"

// The time of a thread that tells it; NULL: the machine's.
static __thread double *told_time;
#define clock_seconds() (told_time != NULL ? *told_time : clock_seconds())

#include "plan/network.h"
#include "test/threads_link.h"

// ---- Measuring ------------------------------------------------------------------------

// In every round each host meets at most one other, which meets it, and in all rounds each other
// once.
static void every_host_meets_every_other_once(void **state) {
    (void)state;
    for (int hosts = 2; hosts <= 33; hosts++) {
        int met[33][33] = {{0}};
        for (int round = 0; round < hosts - 1 + hosts % 2; round++) {
            for (int host = 0; host < hosts; host++) {
                int partner = tournament_partner(hosts, host, round);
                if (partner < 0) { continue; }
                assert_true(partner != host && partner < hosts);
                assert_int_equal(tournament_partner(hosts, partner, round), host);
                met[host][partner]++;
            }
        }
        for (int i = 0; i < hosts * hosts; i++) {
            assert_int_equal(met[i / hosts][i % hosts], i / hosts != i % hosts);
        }
    }
}

enum { RANKS = 4, HOSTS = 3 };

typedef struct Probed {
    PairMeasure pairs[RANKS][HOSTS][HOSTS]; // that each rank knows in the end
    LinkMeasure exchange[RANKS];
} Probed;

static const double SLOW_RATE = 4e6, SLOW_LATENCY = 5e-3;

// Ranks 0 and 1 share a host. What rank 2 sends is slow, and what rank 3 sends is late.
static void probe_rank(Transport *transport, void *context) {
    Probed *probed = (Probed *)context;
    int rank = transport->rank;
    transport_meet(transport, rank == 1 ? 0 : rank);
    transport->link_bytes_per_second = rank == 2 ? SLOW_RATE : 0;
    transport->link_latency = rank == 3 ? SLOW_LATENCY : 0;
    probe_pairs(transport, &probed->pairs[rank][0][0]);
    probed->exchange[rank] = link_measure(transport, true);
}

// Who sends slowly, and who late, is told from who receives so; all ranks know it.
static void a_pair_is_measured_in_both_directions(void **state) {
    (void)state;
    Probed *probed = (Probed *)calloc(1, sizeof *probed);
    threads_run(RANKS, probe_rank, probed);
    for (int rank = 1; rank < RANKS; rank++) {
        assert_memory_equal(probed->pairs[rank], probed->pairs[0], sizeof probed->pairs[0]);
        assert_memory_equal(&probed->exchange[rank], &probed->exchange[0], sizeof(LinkMeasure));
    }
    for (int a = 0; a < HOSTS; a++) {
        for (int b = 0; b < HOSTS; b++) {
            const PairMeasure *pair = &probed->pairs[0][a][b], *back = &probed->pairs[0][b][a];
            assert_true((pair->latency > 0) == (a != b));
            if (a == b) { continue; }
            assert_true(pair->sends == back->receives && pair->at_once == back->at_once);
            bool slow = a == 1; // the host of rank 2
            if (slow && !(pair->sends < 1.2 * SLOW_RATE)) { fail_msg("%d to %d: %g", a, b, pair->sends); }
            if (!slow && !(pair->sends > 2 * SLOW_RATE)) { fail_msg("%d to %d: %g", a, b, pair->sends); }
            if (slow && !(pair->at_once < 1.2 * SLOW_RATE)) { fail_msg("at once: %g", pair->at_once); }
            bool late = a == 2 || b == 2; // a message there and back is late once
            assert_true(!late || (pair->latency >= SLOW_LATENCY / 2 && pair->latency < 0.9 * SLOW_LATENCY));
        }
    }
    double rate = probed->exchange[0].rate;
    if (!(rate < 1.5 * SLOW_RATE && rate > 0.05 * SLOW_RATE)) { fail_msg("exchange: %g", rate); }
    free(probed);
}

// A link to others that answer at once with zeros. All that a rank sends takes the told time: a
// message its share of the latency, and its bytes.
typedef struct ToldLink {
    double time, latency, rate;
} ToldLink;

static void told_start(void *state, LinkRequest *request, bool is_send, int peer, void *data, size_t bytes) {
    ToldLink *link = (ToldLink *)state;
    (void)request, (void)peer;
    if (is_send) {
        link->time += link->latency / (RANKS - 1) + (double)bytes / link->rate;
    } else {
        memset(data, 0, bytes);
    }
}

static bool told_is_done(void *state, LinkRequest *request) {
    (void)state, (void)request;
    return true;
}

// The latency is that of one exchange, the rate that of all bytes that leave a rank; the slowest
// rank's times count. Slow links are not measured for long.
static void an_exchange_is_measured_as_it_is(void **state) {
    (void)state;
    static const ToldLink links[] = {{0, 1e-3, 1e8}, {0, 2e-3, 1e6}, {0, 20e-3, 1e9}, {0, 0, 1e5}};
    for (int i = 0; i < 8; i++) {
        ToldLink told = links[i / 2];
        const Link link = {.name = "told", .state = &told, .start = told_start, .is_done = told_is_done};
        Transport transport;
        transport_prepare(&transport, 0, RANKS, 1, &link, "a test");
        told_time = &told.time;
        LinkMeasure measure = link_measure(&transport, i % 2 == 1);
        told_time = NULL;
        transport_close(&transport);
        double alone = told.latency + (RANKS - 1) * sizeof(double) / told.rate;
        assert_close(measure.latency, alone, 1e-9, "latency");
        assert_close(measure.rate / told.rate, 1, 0.02, "rate");
        if (!(told.time > 0.05 && told.time < 1.6)) { fail_msg("measured for %g s", told.time); }
    }
}

// A link to one other, whose short messages take a latency in each direction, and the others their
// bytes; what goes forth and what comes back take turns.
typedef struct TurnsLink {
    double time, latencies[2], rates[2]; // forth, back
} TurnsLink;

static void turns_start(void *state, LinkRequest *request, bool is_send, int peer, void *data, size_t bytes) {
    TurnsLink *link = (TurnsLink *)state;
    int way = is_send ? 0 : 1;
    (void)request, (void)peer;
    link->time += bytes <= sizeof(ProbeRequest) ? link->latencies[way] : (double)bytes / link->rates[way];
    if (!is_send) { memset(data, 0, bytes); }
}

// The latency is half of a word's way there and back; a rate is that of the bytes of one direction.
static void a_pair_is_timed_as_it_is(void **state) {
    (void)state;
    static const TurnsLink links[] = {{0, {3e-3, 1e-3}, {1e8, 2e7}}, {0, {0, 2e-6}, {1e6, 5e9}}};
    for (int i = 0; i < 2; i++) {
        TurnsLink told = links[i];
        const Link link = {.name = "told", .state = &told, .start = turns_start, .is_done = told_is_done};
        Transport transport;
        char *buffer = (char *)calloc(2, PROBE_MESSAGE);
        transport_prepare(&transport, 0, 2, 1, &link, "a test");
        told_time = &told.time;
        PairMeasure pair = probe_pair(&transport, 1, buffer);
        told_time = NULL;
        transport_close(&transport);
        free(buffer);
        assert_close(pair.latency, (told.latencies[0] + told.latencies[1]) / 2, 1e-9, "latency");
        assert_close(pair.sends / told.rates[0], 1, 1e-6, "sends");
        assert_close(pair.receives / told.rates[1], 1, 1e-6, "receives");
        assert_close(pair.at_once * (1 / told.rates[0] + 1 / told.rates[1]), 1, 1e-6, "at once");
        if (!(told.time < 3)) { fail_msg("measured for %g s", told.time); }
    }
}

// Of three interfaces the second sends most: each byte of a tunnel (the third) passes it, too.
static void an_interface_is_found_by_what_it_has_sent(void **state) {
    (void)state;
    static const Interfaces before = {3, {"lo", "none0", "none1"}, {500, 10, 0}},
                            now = {4, {"none9", "none0", "none1", "lo"}, {1e6, 120, 100, 540}};
    static const struct {
        double bytes;
        const char *name;
    } cases[] = {{100, "none0"}, {219, "none0"}, {221, ""}}; // none0 has sent 110
    for (int i = 0; i < 3; i++) {
        HostFacts facts;
        memset(&facts, 0, sizeof facts);
        interfaces_find(&before, &now, cases[i].bytes, &facts);
        assert_string_equal(facts.interface, cases[i].name);
    }
}

// The counters of this machine: none goes down. Others may open and close interfaces meanwhile.
static void interfaces_of_this_machine_are_read(void **state) {
    (void)state;
    Interfaces before, now;
    interfaces_read(&before);
    if (before.count == 0) { leave_out("/proc/net/dev"); }
    interfaces_read(&now);
    int same = 0;
    for (int i = 0; i < before.count; i++) {
        for (int j = 0; j < now.count; j++) {
            if (strcmp(before.names[i], now.names[j]) != 0) { continue; }
            same++;
            assert_true(before.sent[i] >= 0 && now.sent[j] >= before.sent[i]);
        }
    }
    assert_true(same >= 1);
}

// ---- What is odd ----------------------------------------------------------------------

enum { EACH = 2 }; // ranks of a host; what a host has done its first one tells

typedef struct Told {
    Network network;
    Groups groups;
    Hello hellos[EACH * (HOSTS + 1)];
    HostFacts facts[EACH * (HOSTS + 1)];
    PairMeasure pairs[(HOSTS + 1) * (HOSTS + 1)];
} Told;

// `hosts` hosts that are alike: 1 Gbit/s and 100 us.
static void tell(Told *told, int hosts) {
    memset(told, 0, sizeof *told);
    groups_make_even(&told->groups, 0, EACH * hosts, EACH);
    told->network.groups = &told->groups;
    told->network.hellos = told->hellos;
    told->network.facts = told->facts;
    told->network.pairs = told->pairs;
    for (int host = 0; host < hosts; host++) {
        Hello *hello = &told->hellos[EACH * host];
        HostFacts *facts = &told->facts[EACH * host];
        snprintf(hello->host, sizeof hello->host, "node%d", host);
        snprintf(hello->revision, sizeof hello->revision, "abc");
        snprintf(facts->interface, sizeof facts->interface, "eth%d", host);
        for (int to = 0; to < hosts; to++) {
            PairMeasure alike = {100e-6, 125e6, 125e6, 120e6};
            if (to != host) { told->pairs[host * hosts + to] = alike; }
        }
    }
}

// Both hosts' views of a pair.
static void tell_pair(Told *told, int a, int b, double there, double back, double at_once, double latency) {
    int hosts = told->groups.hosts;
    PairMeasure one = {latency, there, back, at_once}, other = {latency, back, there, at_once};
    told->pairs[a * hosts + b] = one;
    told->pairs[b * hosts + a] = other;
}

// Exactly these sentences are said, each of which begins as given.
static void expect_odd(Told *told, const char *const *begins, size_t count) {
    json_t *odd = network_odd(&told->network);
    for (size_t i = 0; i < json_array_size(odd) || i < count; i++) {
        const char *said = json_string_value(json_array_get(odd, i));
        if (said == NULL || i >= count || strncmp(said, begins[i], strlen(begins[i])) != 0) {
            fail_msg("said: %s; expected: %s", said != NULL ? said : "nothing",
                     i < count ? begins[i] : "nothing");
        }
    }
    json_decref(odd);
    groups_free(&told->groups);
}

static void hosts_that_are_alike_are_not_odd(void **state) {
    (void)state;
    Told told;
    for (int hosts = 2; hosts <= HOSTS + 1; hosts++) {
        tell(&told, hosts);
        told.facts[EACH * 1].clock = 0.9; // the clocks of machines that no one keeps
        tell_pair(&told, 0, 1, 80e6, 125e6, 70e6, 500e-6);
        expect_odd(&told, NULL, 0);
    }
    tell(&told, 3); // late all, and one of them twice as late
    told.facts[EACH * 2].clock = -3;
    told.facts[EACH * 2].clock_error = 2.5; // it may be right
    tell_pair(&told, 0, 1, 125e6, 125e6, 120e6, 10e-3);
    tell_pair(&told, 0, 2, 125e6, 125e6, 120e6, 10e-3);
    tell_pair(&told, 1, 2, 125e6, 125e6, 120e6, 20e-3);
    expect_odd(&told, NULL, 0);
}

static void what_differs_is_named(void **state) {
    (void)state;
    Told told;
    tell(&told, 2); // of two hosts the slower direction is the odd one
    tell_pair(&told, 0, 1, 125e6, 11.8e6, 11e6, 100e-6);
    expect_odd(&told,
               (const char *const[]){"between node0 and node1 1.00G bits a second go there and 94.4M back"},
               1);
    tell(&told, 3);
    tell_pair(&told, 1, 2, 1e6, 1e6, 1e6, 100e-6);
    expect_odd(&told,
               (const char *const[]){"between node1 and node2 8.00M bits a second go there and 8.00M "
                                     "back, where 1.00G are usual"},
               1);
    tell(&told, 3); // a host that is slow to all is named, and not its pairs
    tell_pair(&told, 2, 0, 12e6, 125e6, 11e6, 100e-6);
    tell_pair(&told, 2, 1, 13e6, 125e6, 11e6, 100e-6);
    expect_odd(&told, (const char *const[]){"node2 sends 104M bits a second at most, where 1.00G are usual"},
               1);
    tell(&told, 4);
    tell_pair(&told, 0, 3, 125e6, 125e6, 64e6, 3e-3);
    expect_odd(&told,
               (const char *const[]){"node0 and node3 send each other 512M bits a second at once",
                                     "a message between node0 and node3 takes 3 ms, where 0.1 ms are usual"},
               2);
    tell(&told, 3);
    told.facts[EACH * 1].clock = -12.5;
    told.facts[EACH * 2].wireless = true;
    snprintf(told.hellos[EACH * 2].rounding, sizeof told.hellos[EACH * 2].rounding, "x86-64-v2");
    expect_odd(&told,
               (const char *const[]){"the clock of node1 is 12.5 s behind rank 0's",
                                     "node2 runs another program than rank 0: commit abc, x86-64-v2",
                                     "node2 sends by eth2, which is wireless"},
               3);
    tell(&told, 3); // hosts that an emulated link makes of one have its name
    tell_pair(&told, 2, 0, 125e6, 12e6, 11e6, 100e-6);
    tell_pair(&told, 2, 1, 125e6, 13e6, 11e6, 100e-6);
    snprintf(told.hellos[EACH * 1].host, sizeof told.hellos->host, "node2");
    told.facts[EACH * 1].clock = 5;
    told.facts[EACH * 1].half_duplex = true;
    snprintf(told.hellos[EACH * 1].revision, sizeof told.hellos->revision, "def");
    expect_odd(
        &told,
        (const char *const[]){"the clock of rank 2 is 5.0 s ahead of rank 0's",
                              "rank 2 runs another program than rank 0: commit def, ; rank 0: commit abc",
                              "rank 2 sends by eth1, which is half-duplex",
                              "rank 4 receives 104M bits a second at most, where 1.00G are usual"},
        4);
}

// What the options say is not measured; what they do not say is.
static void a_plan_takes_what_was_measured(void **state) {
    (void)state;
    Told told;
    Options options;
    double slowness[EACH * HOSTS];
    tell(&told, HOSTS);
    told.network.slowness = slowness;
    told.network.host_rate = 7e6;
    told.network.latency = 2e-3;
    for (int i = 0; i < EACH * HOSTS; i++) { told.facts[i].micro_batch = 0.1 * (i + 1); }
    options_defaults(&options);
    Machine machine = {.host = {1, 1}};
    network_set_machine(&told.network, &options, &machine);
    assert_true(machine.host.bytes_per_second == 7e6 && machine.host.latency == 2e-3);
    for (int i = 0; i < EACH * HOSTS; i++) { assert_close(machine.slowness[i], i + 1, 1e-12, "slowness"); }
    Machine said = {.host = {1, 1}};
    options.host_mbit = options.host_us = options.compute_ms = 5;
    network_set_machine(&told.network, &options, &said);
    assert_true(said.host.bytes_per_second == 1 && said.host.latency == 1 && said.slowness == NULL);
    for (int i = 0; i < 2; i++) { // one of them alone
        options.host_mbit = i == 0 ? 5 : 0;
        options.host_us = i == 0 ? 0 : 5;
        machine = said;
        network_set_machine(&told.network, &options, &machine);
        assert_true(machine.host.bytes_per_second == (i == 0 ? 1 : 7e6));
        assert_true(machine.host.latency == (i == 0 ? 2e-3 : 1));
    }
    options_defaults(&options);
    told.facts[EACH * 1].micro_batch = NAN; // a GPU of which nothing is known
    network_set_machine(&told.network, &options, &said);
    assert_true(said.slowness == NULL);
    groups_free(&told.groups);
}

// In --json, too, rates are in bits.
static void programs_are_told_bits(void **state) {
    (void)state;
    Told told;
    tell(&told, 2);
    tell_pair(&told, 0, 1, 100e6, 50e6, 40e6, 3e-3);
    HostFacts *facts = &told.facts[EACH * 1];
    Hello *hello = &told.hellos[EACH * 1];
    facts->micro_batch = 0.25;
    facts->clock = -1.5;
    facts->interface_mbit = 100;
    hello->cores = 6;
    snprintf(hello->rounding, sizeof hello->rounding, "x86-64-v3");
    json_t *odd = json_pack("[s]", "it is cold"), *network = network_as_json(&told.network, odd),
           *pairs = json_object_get(network, "pairs"), *hosts = json_object_get(network, "hosts"),
           *wanted =
               json_pack("{s:s, s:i, s:i, s:s, s:f, s:f, s:f, s:s, s:s}", "host", "node1", "ranks", EACH,
                         "cores", 6, "interface", "eth1", "interface_mbit", 100.0, "clock_seconds", -1.5,
                         "micro_batch_ms", 250.0, "commit", "abc", "rounding", "x86-64-v3");
    assert_int_equal(json_array_size(hosts), 2);
    assert_true(json_equal(json_array_get(hosts, 1), wanted));
    assert_true(json_equal(json_object_get(network, "odd"), odd));
    json_decref(wanted);
    assert_int_equal(json_array_size(pairs), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *pair = json_array_get(pairs, i);
        assert_string_equal(json_string_value(json_object_get(pair, "from")), i == 0 ? "node0" : "node1");
        assert_string_equal(json_string_value(json_object_get(pair, "to")), i == 0 ? "node1" : "node0");
        assert_close(json_number_value(json_object_get(pair, "bits_per_second")), i == 0 ? 800e6 : 400e6, 0,
                     "one way");
        assert_close(json_number_value(json_object_get(pair, "at_once")), 320e6, 0, "at once");
        assert_close(json_number_value(json_object_get(pair, "latency_us")), 3000, 1e-9, "latency");
    }
    json_decref(network);
    json_decref(odd);
    groups_free(&told.groups);
}

enum { TABLE_MOST = 64 };

// lines (TABLE_MOST) <- those of the table that are not empty. Returns how many.
static int print_table(const Network *network, json_t *odd, char lines[TABLE_MOST][512]) {
    static char text[TABLE_MOST * 512];
    int count = 0;
    Capture capture = capture_begin(stdout);
    network_print(network, odd);
    capture_end(&capture, text, sizeof text);
    for (char *line = strtok(text, "\n"); line != NULL && count < TABLE_MOST; line = strtok(NULL, "\n")) {
        snprintf(lines[count++], sizeof lines[0], "%s", line);
    }
    json_decref(odd);
    return count;
}

// The table ends so. Returns how many lines stand before that.
static int expect_end(const Network *network, json_t *odd, const char *const *wanted, int count) {
    static char lines[TABLE_MOST][512];
    int before = print_table(network, odd, lines) - count;
    assert_true(before >= 0);
    for (int i = 0; i < count; i++) { assert_string_equal(lines[before + i], wanted[i]); }
    return before;
}

// Of each host the slowest pair: rates in bits, latencies in microseconds, and how far its clock is
// ahead of rank 0's.
static void the_table_says_what_was_measured(void **state) {
    (void)state;
    static const char *const wanted[] = {
        "network          measured between 3 hosts: bits a second and microseconds of each one's slowest "
        "pair",
        "  host             ranks cores  interface      micro-batch    sends receives  at once  latency"
        "     clock  program",
        "  node0                2     8  eth0                10.0ms    1.00G     800M     400M      500"
        "         -  abc",
        "  node1                2     4  eth1      100M           -    1.00G    1.00G     960M      100"
        "   +0.250s  abc",
        "  node2                2     0  -                   20.0ms     800M    1.00G     400M      500"
        "   -2.000s  abc",
        "odd              it is cold",
    };
    Told told;
    tell(&told, 3);
    tell_pair(&told, 0, 2, 125e6, 100e6, 50e6, 500e-6);
    told.facts[EACH * 0].micro_batch = 0.01;
    told.facts[EACH * 1].micro_batch = NAN;
    told.facts[EACH * 2].micro_batch = 0.02;
    told.facts[EACH * 1].clock = 0.25;
    told.facts[EACH * 2].clock = -2;
    told.facts[EACH * 1].interface_mbit = 100;
    told.facts[EACH * 2].interface[0] = '\0';
    told.hellos[EACH * 0].cores = 8;
    told.hellos[EACH * 1].cores = 4;
    assert_int_equal(expect_end(&told.network, json_pack("[s]", "it is cold"), wanted, 6), 0);
    groups_free(&told.groups);
}

static void a_long_table_says_how_much_is_missing(void **state) {
    (void)state;
    static const char *const wanted[] = {"odd              the 15th", "odd              the 16th",
                                         "                 and 2 more: --json has all"};
    static const char *const alike[] = {
        "odd              nothing: hosts, links, clocks and programs are alike"};
    enum { MANY = 34 };
    static Hello hellos[MANY];
    static HostFacts facts[MANY];
    static PairMeasure pairs[MANY * MANY];
    Told told;
    tell(&told, 2);
    assert_int_equal(expect_end(&told.network, json_array(), alike, 1), 4);
    json_t *odd = json_array();
    for (int i = 1; i <= 18; i++) { odd_add(odd, "the %dth", i); }
    assert_int_equal(expect_end(&told.network, odd, wanted, 3), 4 + 14);
    groups_free(&told.groups);
    Groups groups;
    groups_make_even(&groups, 0, MANY, 1);
    for (int host = 0; host < MANY; host++) {
        snprintf(hellos[host].host, sizeof hellos->host, "node%d", host);
        snprintf(hellos[host].revision, sizeof hellos->revision, "abc");
        pairs[host * MANY + (host + 1) % MANY] = (PairMeasure){100e-6, 125e6, 125e6, 120e6};
    }
    Network network = {.groups = &groups, .hellos = hellos, .facts = facts, .pairs = pairs};
    static const char *const cut[] = {
        "  node31               1     0  -                    0.0ms    1.00G    1.00G     960M      100"
        "   +0.000s  abc",
        "  and 2 more: --json has all", alike[0]};
    assert_int_equal(expect_end(&network, json_array(), cut, 3), 2 + 31);
    groups_free(&groups);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_host_meets_every_other_once),
        cmocka_unit_test(a_pair_is_measured_in_both_directions),
        cmocka_unit_test(an_exchange_is_measured_as_it_is),
        cmocka_unit_test(a_pair_is_timed_as_it_is),
        cmocka_unit_test(an_interface_is_found_by_what_it_has_sent),
        cmocka_unit_test(interfaces_of_this_machine_are_read),
        cmocka_unit_test(hosts_that_are_alike_are_not_odd),
        cmocka_unit_test(what_differs_is_named),
        cmocka_unit_test(a_plan_takes_what_was_measured),
        cmocka_unit_test(programs_are_told_bits),
        cmocka_unit_test(the_table_says_what_was_measured),
        cmocka_unit_test(a_long_table_says_how_much_is_missing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
