// page.h: a plan as a page for a browser (--page): every rule over the link between hosts and the
// micro-batches of a commit.
//
// Each cell of the map is a plan of its own, made by forecast_make: the run's cell has the numbers
// that the terminal shows. The page holds all of them as JSON, and draws them itself (page.html).
#ifndef ACCO_PLAN_PAGE_H
#define ACCO_PLAN_PAGE_H

#include "plan/forecast.h"

// page.html with its style sheet, as a string: the Makefile makes it.
static const char PAGE_HTML[] =
#include "build/plan-page.inc"
    ;
static const char PAGE_DATA_GO_HERE[] = "{{plan}}";

enum { PAGE_LINKS = 41, PAGE_COUNTS = 9 };

// Sorts a list that ends with the run's own value, and drops what equals it. Returns the length.
static inline int page_axis(double *values, int count) {
    double own = values[count - 1];
    int kept = 0, at = 0;
    for (int i = 0; i < count - 1; i++) {
        if (fabs(values[i] / own - 1) > 1e-3) { values[kept++] = values[i]; }
    }
    while (at < kept && values[at] < own) { at++; }
    memmove(values + at + 1, values + at, (size_t)(kept - at) * sizeof *values);
    values[at] = own;
    return kept + 1;
}

static inline json_t *page_numbers(const double *values, int count) {
    json_t *list = json_array();
    for (int i = 0; i < count; i++) { json_array_append_new(list, log_real(values[i])); }
    return list;
}

// [tokens/s, share of the time computing, 1: fits] of each rule, null: cannot be run so; and what is recommended.
static inline json_t *page_cell(const Forecast *forecast) {
    json_t *rules = json_array();
    for (int i = 0; i < RULE_COUNT; i++) {
        const ForecastRow *row = &forecast->rows[i];
        bool refused = row->refused[0] != '\0';
        json_array_append_new(rules, refused
                                         ? json_null()
                                         : json_pack("[o, o, i]", log_real(row->tokens_per_second),
                                                     log_real(row->commit.computing / row->commit.seconds),
                                                     (int)row->fits));
    }
    return json_pack("{s:o, s:i, s:i}", "rules", rules, "recommended", forecast->recommended, "committing",
                     forecast->committing);
}

// Plans for all links (links) and micro-batches of a rank and commit (counts): a row for each of the latter.
static inline json_t *page_map(const Setup *setup, const Forecast *own, OptionChoice recompute,
                               const double *mbit, int links, double own_mbit, const double *counts, int rows,
                               double own_count) {
    json_t *map = json_array();
    Options options = *setup->options;
    Setup other = *setup;
    Forecast *forecast = (Forecast *)malloc(sizeof *forecast);
    other.options = &options;
    for (int i = 0; i < rows && forecast != NULL; i++) {
        json_t *row = json_array();
        options.accumulate = counts[i] == own_count ? setup->options->accumulate : (int64_t)counts[i];
        for (int j = 0; j < links; j++) {
            Machine machine = own->machine;
            machine.host.bytes_per_second *= mbit[j] / own_mbit;
            forecast_make(&other, &machine, recompute, false, forecast);
            json_array_append_new(row, page_cell(forecast));
        }
        json_array_append_new(map, row);
    }
    free(forecast);
    return map;
}

// The data of the page. reason: where the time of a micro-batch comes from.
static inline json_t *page_data(const Setup *setup, const Forecast *own, OptionChoice recompute,
                                const char *reason) {
    const Options *options = setup->options;
    const Machine *machine = &own->machine;
    const ForecastRow *row = &own->rows[own->own];
    double mbit[PAGE_LINKS + 1], counts[PAGE_COUNTS + 1];
    double payload = plan_emulates(options) ? 1 : TCP_PAYLOAD;
    double own_mbit = machine->host.bytes_per_second * 8e-6 / payload;
    // Unequal ranks have no such number in common: only the run's own batch is drawn.
    bool unequal = options->rank_accumulate[0] != '\0';
    int links = 0, rows = 0;
    for (; links < PAGE_LINKS; links++) { mbit[links] = pow(10, 1 + links / 8.0); }
    for (; rows < PAGE_COUNTS && !unequal; rows++) { counts[rows] = ldexp(1, rows); }
    mbit[links++] = own_mbit;
    double own_count = options->accumulate > 0 && !unequal
                           ? (double)options->accumulate
                           : rint(row->commit.micro_batches / setup->transport->size);
    counts[rows++] = own_count;
    links = page_axis(mbit, links);
    rows = page_axis(counts, rows);
    json_t *rules = json_array();
    for (int i = 0; i < RULE_COUNT; i++) {
        const Rule *rule = RULES[i].rule;
        json_array_append_new(rules,
                              json_pack("{s:s, s:b}", "name", rule->name, "local", rule->kind == RULE_LOCAL));
    }
    json_t *tokens = options->epochs > 0 ? json_null() : json_real((double)options->tokens);
    return json_pack("{s:s, s:i, s:i, s:I, s:I, s:o, s:s, s:o, s:i, s:o, s:o, s:o, s:o, s:o, s:o}", "model",
                     setup->config->name, "ranks", setup->transport->size, "hosts",
                     setup->transport->hosts.hosts, "micro_batch", (json_int_t)options->micro_batch,
                     "seq_len", (json_int_t)options->seq_len, "micro_batch_ms",
                     log_real(1e3 * machine->micro_batch), "reason", reason, "tokens", tokens, "rule",
                     own->own, "own_mbit", log_real(own_mbit), "own_count", log_real(own_count), "mbit",
                     page_numbers(mbit, links), "counts", page_numbers(counts, rows), "rules", rules, "map",
                     page_map(setup, own, recompute, mbit, links, own_mbit, counts, rows, own_count));
}

// Writes the page of a plan. own: the plan itself.
static inline bool page_write(const Setup *setup, const Forecast *own, OptionChoice recompute,
                              const char *reason, Error *error) {
    const char *path = setup->options->page, *data = strstr(PAGE_HTML, PAGE_DATA_GO_HERE);
    json_t *object = page_data(setup, own, recompute, reason);
    char *text = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(9));
    FILE *file = text == NULL ? NULL : fopen(path, "w");
    bool written = file != NULL && fwrite(PAGE_HTML, 1, (size_t)(data - PAGE_HTML), file) > 0;
    for (const char *at = text; written && *at != '\0'; at++) { // a name in it may not end the script
        written = *at == '<' ? fputs("\\u003c", file) >= 0 : fputc(*at, file) != EOF;
    }
    written = written && fputs(data + strlen(PAGE_DATA_GO_HERE), file) >= 0;
    if (file != NULL && fclose(file) != 0) { written = false; }
    json_decref(object);
    free(text);
    return written || error_set(error, "--page %.300s cannot be written: %s", path, strerror(errno));
}

#endif
