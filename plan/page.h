// page.h: a plan as a page: every rule over the hosts' link and a commit's micro-batches (--page).
//
// Each cell of the map is a plan of its own; of each rule it has the recipe that is first at a
// loss. The page holds all of them as JSON, and draws them (page.html).
#pragma once

#include "plan/forecast.h"

// page.html with its style sheet and the colours of rules, as a string: the Makefile makes it.
static const char PAGE_HTML[] =
#include "build/plan-page.inc"
    ;
static const char PAGE_DATA_GO_HERE[] = "{{plan}}";

enum { PAGE_LINKS = 40, PAGE_COUNTS = 8 }; // steps of a map with all its cells

#define PAGE_SECONDS 10 // a map that would take longer has fewer cells

// An axis of the map: ascending values; one of them is the run's own.
typedef struct PageAxis {
    double values[PAGE_LINKS + 2], own;
    int count;
} PageAxis;

// first ratio^(i step) for all i step up to `steps`, and `own`, in the place of its equal if there
// is one.
static inline PageAxis page_axis(double first, double ratio, int steps, int step, double own) {
    PageAxis axis = {.values = {own}, .own = own, .count = 1};
    for (int i = 0; i <= steps; i += step) {
        double value = first * pow(ratio, i);
        bool is_own = own <= value * (1 + 1e-9) && fabs(value / own - 1) < 1e-3;
        if (!is_own) { axis.values[axis.count++] = value; }
    }
    qsort(axis.values, axis.count, sizeof(double), numbers_compare);
    return axis;
}

static inline json_t *page_axis_as_json(const PageAxis *axis) {
    json_t *list = json_array();
    for (int i = 0; i < axis->count; i++) { json_array_append_new(list, log_real(axis->values[i])); }
    return list;
}

// A rule in a cell: [tokens/s, tokens needed over plain training with AdamW, share of the time
// computing, 1: fits, options] of its recipe that is first at a loss, or null: it cannot be run so.
static inline json_t *page_rule(const Forecast *forecast, int rule) {
    int chosen = forecast_choose(forecast, rule);
    if (chosen < 0) { chosen = rule; } // as asked for
    // A choice among all rules may weigh equals otherwise.
    const int named[2] = {forecast->committing, forecast->recommended};
    for (int i = 0; i < 2; i++) {
        if (named[i] >= 0 && forecast->rows[named[i]].options.rule == rule) { chosen = named[i]; }
    }
    const ForecastRow *row = &forecast->rows[chosen];
    if (error_is_set(&row->refused)) { return json_null(); }
    char *options = forecast_options(forecast, row);
    json_t *cell = json_pack(
        "[o, o, o, i, s]", log_real(row->tokens_per_second), log_real(row_tokens_needed(row)),
        log_real(row->commit.computing / row->commit.seconds), (int)row->fits, options + (options[0] == ' '));
    free(options);
    return cell;
}

// The rule of a row; -1 of none.
static inline int page_rule_of(const Forecast *forecast, int row) {
    return row < 0 ? -1 : forecast->rows[row].options.rule;
}

// Plans for all links and numbers of micro-batches: a row for each of the latter.
static inline json_t *page_map(const Run *run, const Forecast *own, const PageAxis *mbit,
                               const PageAxis *counts) {
    json_t *map = json_array();
    Run *other = trial_of(run, &run->options);
    Options *options = &other->options;
    Forecast *forecast = MEMORY_OF(Forecast, 1);
    for (int i = 0; i < counts->count; i++) {
        json_t *row = json_array();
        for (int j = 0; j < mbit->count; j++) {
            Machine machine = own->machine;
            bool is_own = counts->values[i] == counts->own && mbit->values[j] == mbit->own;
            // With --accumulate auto only the own cell is adaptive; --rank-accumulate holds in all.
            bool as_given = is_own || options->rank_accumulate[0] != '\0';
            options->accumulate = as_given ? run->options.accumulate : (int64_t)counts->values[i];
            machine.host.bytes_per_second *= mbit->values[j] / mbit->own;
            forecast_make(other, &machine, false, forecast);
            json_t *rules = json_array();
            for (int rule = 0; rule < RULE_COUNT; rule++) {
                json_array_append_new(rules, page_rule(forecast, rule));
            }
            json_array_append_new(row, json_pack("{s:o, s:i, s:i}", "rules", rules, "recommended",
                                                 page_rule_of(forecast, forecast->recommended), "committing",
                                                 page_rule_of(forecast, forecast->committing)));
        }
        json_array_append_new(map, row);
    }
    free(forecast);
    trial_free(other);
    return map;
}

// The data of the page. reason: of the time of a micro-batch. seconds: that the own cell takes.
static inline json_t *page_data(const Run *run, const Forecast *own, const char *reason, double seconds) {
    const Options *options = &run->options;
    const Machine *machine = &own->machine;
    double payload = plan_emulates(options) ? 1 : TCP_PAYLOAD;
    // Unequal ranks have no number of micro-batches in common: only the own batch is drawn.
    bool unequal = options->rank_accumulate[0] != '\0';
    double count = rint(own->rows[own->own].commit.micro_batches / run->transport.size);
    if (options->accumulate > 0 && !unequal) { count = options->accumulate; }
    int step = 1;
    while (step < PAGE_COUNTS && seconds * PAGE_LINKS * PAGE_COUNTS > PAGE_SECONDS * step * step) {
        step *= 2;
    }
    PageAxis mbit =
        page_axis(10, pow(10, 1 / 8.0), PAGE_LINKS, step, machine->host.bytes_per_second * 8e-6 / payload);
    PageAxis counts = page_axis(1, 2, unequal ? -1 : PAGE_COUNTS, step, fmax(count, 1));
    json_t *rules = json_array();
    for (int i = 0; i < RULE_COUNT; i++) {
        const Rule *rule = RULES[i].rule;
        json_array_append_new(rules,
                              json_pack("{s:s, s:b}", "name", rule->name, "local", rule->kind == RULE_LOCAL));
    }
    double tokens = row_tokens(&own->rows[own->own]);
    return json_pack("{s:o, s:i, s:i, s:I, s:I, s:o, s:o, s:o, s:i, s:b, s:o, s:o, s:o, s:o, s:o, s:o}",
                     "model", log_text(run->config.name), "ranks", run->transport.size, "hosts",
                     run->transport.hosts.hosts, "micro_batch", (json_int_t)options->micro_batch, "seq_len",
                     (json_int_t)options->seq_len, "micro_batch_ms", log_real(1e3 * machine->micro_batch),
                     "reason", log_text(reason), "tokens", tokens > 0 ? json_real(tokens) : json_null(),
                     "rule", own->own, "unequal", (int)unequal, "own_mbit", log_real(mbit.own), "own_count",
                     log_real(counts.own), "mbit", page_axis_as_json(&mbit), "counts",
                     page_axis_as_json(&counts), "rules", rules, "map", page_map(run, own, &mbit, &counts));
}

// Writes the page of a plan. own: the plan itself, which took `seconds`.
static inline bool page_write(const Run *run, const Forecast *own, const char *reason, double seconds,
                              Error *error) {
    const char *path = run->options.page, *data = strstr(PAGE_HTML, PAGE_DATA_GO_HERE);
    json_t *object = page_data(run, own, reason, seconds);
    char *text = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(9));
    FILE *file = text == NULL ? NULL : fopen(path, "w");
    bool written = file != NULL && fwrite(PAGE_HTML, 1, data - PAGE_HTML, file) > 0;
    for (const char *at = text; written && *at != '\0'; at++) { // a name in it may not end the script
        written = *at == '<' ? fputs("\\u003c", file) >= 0 : fputc(*at, file) != EOF;
    }
    written = written && fputs(data + strlen(PAGE_DATA_GO_HERE), file) >= 0;
    if (file != NULL && fclose(file) != 0) { written = false; }
    json_decref(object);
    free(text);
    return written || error_set(error, "--page %.300s cannot be written: %s", path, strerror(errno));
}
