// report.h: what a run tells while it trains, in four places:
//
//   the terminal             for people: an aligned line per report
//   DIRECTORY/log.jsonl      for programs: one JSON object per line with an "event": start,
//                            report, validation, checkpoint, spike, end, ...
//   DIRECTORY/progress.tsv   for gnuplot, spreadsheets and scripts: a row per report and validation
//   DIRECTORY/run.tsv        for scripts: the members of all other events, each on a line
//
// One table, REPORT_FIELDS, says what a report holds and how the first three show it. In
// progress.tsv what is not known is nan: in the row of a validation nearly all. Its perfect_loss is
// that of the held-out text. An empty line, where gnuplot interrupts a curve, stands where a run is
// resumed or rolled back, because commits may then go back.
//
// A line of run.tsv is a key, a tab, and the value as in JSON, but text without its quotes. A key
// is an event and the path in it: start.options.lr, end.reason. An array has its length and its
// first element: start.ranks, start.ranks.0.device. Of a key that occurs again the last counts.
//
// A log that cannot be written does not end the run (runtime/log.h), but its end tells it, by a
// message and its exit code. Rank 0 only.
#pragma once

#include "dataloader.h"
#include "program/terminal.h"
#include "runtime/log.h"
#include "scheduler/state.h"

// Means are over the commits since the previous report; what is not known is NAN. All are
// doubles, for one table to point at; whole numbers are exact up to 2^53.
typedef struct Report {
    double commit, gradients, tokens; // since the start; micro-batch gradients and tokens over all ranks
    double seconds;                   // of training, since the start
    double loss, perfect_loss;        // nats per token; what a perfect model would reach on the same tokens
    double validation_loss;           // nats per token of the held-out batches; only in a validation's row
    double learning_rate, gradient_norm; // of the latest commit, the norm before clipping
    double tokens_per_second;            // over all ranks
    double compute_ms, communication_ms; // per commit, on rank 0
    double exposed_ms;                   // communication that compute had to wait for
    double steps; // the three are means over so many; local rules also count those without a report
    // On rank 0: what a micro-batch took, and for how long the thread that drives it had a core.
    double micro_batch_ms, micro_batch_cpu_ms;
    double gradients_per_commit;
    // By rank 0, since the start: to all others, and of it what left its host.
    double bytes_sent, bytes_sent_outside;
    // Over all ranks: model operations, 10^12 a second, and their share of the peak rate.
    double model_tflops, mfu;
} Report;

typedef struct ReportField {
    size_t offset;       // in Report
    bool whole;          // a whole number
    const char *key;     // in log.jsonl, and column of progress.tsv
    bool first;          // comes before the others in progress.tsv
    const char *heading; // on the terminal, as wide as what stands below it; NULL: not there
    const char *format;  // on the terminal; NULL: `human`
    const char *(*human)(double value, char text[NUMBER_TEXT_SIZE]);
    const char *unknown; // what the terminal shows for NAN
    bool optional;       // left out of log.jsonl if it is not known
} ReportField;

// With a blank between the columns a line has 79: some terminals wrap at 80.
// clang-format off
#define AT(member) offsetof(Report, member)
#define AS(format) format, NULL
#define AS_COUNT NULL, human_count
#define AS_TIME NULL, human_milliseconds
#define NOWHERE NULL, NULL, NULL, NULL
static const ReportField REPORT_FIELDS[] = {
    // in Report         whole  key                first  terminal
    {AT(commit),               1, "commit",             1, "commit",  AS("%.0f"), "nan", 0},
    {AT(gradients),            1, "grads",              0, NOWHERE, 0},
    {AT(tokens),               1, "tokens",             1, "tokens",  AS_COUNT, "-", 0},
    {AT(seconds),              0, "seconds",            1, NOWHERE, 0},
    {AT(loss),                 0, "loss",               1, "   loss", AS("%.4f"), "-", 0},
    {AT(perfect_loss),         0, "perfect_loss",       0, "perfect", AS("%.4f"), "-", 0},
    {AT(validation_loss),      0, "validation_loss",    1, NOWHERE, 1},
    {AT(learning_rate),        0, "lr",                 1, "     lr", AS("%.1e"), "nan", 0},
    {AT(gradient_norm),        0, "grad_norm",          1, "  norm",  AS("%.3g"), "nan", 0},
    {AT(tokens_per_second),    0, "tokens_per_second",  1, "tok/s",   AS_COUNT, "-", 0},
    {AT(compute_ms),           0, "compute_ms",         0, "compute", AS_TIME, "nan", 0},
    {AT(communication_ms),     0, "communication_ms",   0, "  comm",  AS_TIME, "nan", 0},
    {AT(exposed_ms),           0, "exposed_ms",         0, "exposed", AS_TIME, "nan", 0},
    {AT(steps),                1, "steps",              0, NOWHERE, 0},
    {AT(micro_batch_ms),       0, "micro_batch_ms",     0, NOWHERE, 1},
    {AT(micro_batch_cpu_ms),   0, "micro_batch_cpu_ms", 0, NOWHERE, 1},
    {AT(gradients_per_commit), 0, "grads_per_commit",   0, "grads",   AS("%.4g"), "nan", 0},
    {AT(bytes_sent),           1, "bytes_sent",         0, NOWHERE, 0},
    {AT(bytes_sent_outside),   1, "bytes_sent_outside", 0, NOWHERE, 0},
    {AT(model_tflops),         0, "model_tflops",       0, NOWHERE, 0},
    {AT(mfu),                  0, "mfu",                0, NOWHERE, 1},
};
#undef NOWHERE
#undef AS_TIME
#undef AS_COUNT
#undef AS
#undef AT
// clang-format on

enum { REPORT_FIELD_COUNT = sizeof REPORT_FIELDS / sizeof REPORT_FIELDS[0] };

static inline double report_value(const Report *report, const ReportField *field) {
    return *(const double *)((const char *)report + field->offset);
}

static inline Report report_unknown(void) {
    Report report;
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        *(double *)((char *)&report + REPORT_FIELDS[i].offset) = NAN;
    }
    return report;
}

// ---- What rank 0 reports with ---------------------------------------------------------

// The commits since the latest report: what the next report is made of.
typedef struct ReportWindow {
    CommitReport sum;  // over these commits; losses summed over the predicted tokens
    CommitReport from; // where the latest report ended
    bool has_commits;  // otherwise there is nothing to report
    int64_t from_step; // how far the run had come when the latest report was made
    double from_work, from_seconds;
    uint64_t from_micro_batches; // Scheduler::micro_batches_begun
} ReportWindow;

typedef struct Reports {
    Log log, curves, facts; // log.jsonl, progress.tsv, run.tsv
    Terminal *terminal;
    // Facts about the run, known when it starts.
    const Scheduler *scheduler;
    double micro_batch_tokens; // of one rank
    double token_flops;        // model operations per token
    double peak_flops; // of all ranks, a second: what the rate of these is compared with; NAN: unknown
    const DataLoader *data, *validation_data; // tokens and losses are reported of each source; NULL: of none
    bool knows_perfect;                       // the loss of a perfect model is known and has a column

    ReportWindow window;
    struct { // how much of what the scheduler counts has been looked at
        int64_t commit, reports;
        double spikes;
    } seen;
    // Of this part of the run, and of this rank: see TraceSums; and where its micro-batches began.
    double exposed_seconds, micro_batch_seconds;
    uint64_t micro_batches_before;
    double validation, perfect_validation; // losses of the latest validation; NAN: there was none
    double source_validation[DATA_SOURCES_MOST];
    int lines;          // reports that the terminal has shown
    bool is_unwritten;  // stdout cannot be written any more
    int64_t lost_lines; // of the three, which could not be written
} Reports;

// Appends a row to progress.tsv; report NULL: the heading.
static inline bool curves_append(Log *curves, const Report *report, Error *error) {
    char line[REPORT_FIELD_COUNT * NUMBER_TEXT_SIZE] = "";
    for (int i = 0; i < 2 * REPORT_FIELD_COUNT; i++) {
        const ReportField *field = &REPORT_FIELDS[i % REPORT_FIELD_COUNT];
        if (field->first != (i < REPORT_FIELD_COUNT)) { continue; }
        char cell[NUMBER_TEXT_SIZE] = "nan"; // printf may write -nan; gnuplot leaves a gap for nan
        double value = report != NULL ? report_value(report, field) : NAN;
        if (isfinite(value)) { snprintf(cell, sizeof cell, field->whole ? "%.0f" : "%.9g", value); }
        text_join(line, sizeof line, "\t", "%s", report != NULL ? cell : field->key);
    }
    strcat(line, "\n");
    return log_append(curves, line, strlen(line), error);
}

// Prints the members of a JSON value as lines of run.tsv.
static inline void facts_print(FILE *file, const char *path, json_t *value) {
    char longer[256];
    const char *key;
    json_t *member;
    json_object_foreach(value, key, member) {
        snprintf(longer, sizeof longer, "%s.%s", path, key);
        facts_print(file, longer, member);
    }
    if (json_is_array(value)) {
        snprintf(longer, sizeof longer, "%s.0", path);
        fprintf(file, "%s\t%zu\n", path, json_array_size(value));
        facts_print(file, longer, json_array_get(value, 0));
    } else if (value != NULL && !json_is_object(value)) {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(LOG_JSON_DIGITS));
        int quotes = json_is_string(value);
        fprintf(file, "%s\t%.*s\n", path, (int)strlen(text) - 2 * quotes, text + quotes);
        free(text);
    }
}

static inline bool facts_append(Log *facts, json_t *event, Error *error) {
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    facts_print(file, json_text(event, "event"), event);
    fclose(file);
    bool written = log_append(facts, text, length, error);
    free(text);
    return written;
}

// Opens the files for appending. A new progress.tsv gets its heading. In a run that goes on an
// empty line interrupts the curves, and ends a line that a crash of the machine has cut off.
static inline bool reports_open(Reports *reports, const char *directory, Error *error) {
    return log_open(&reports->log, directory, "log.jsonl", error) &&
           log_open(&reports->curves, directory, "progress.tsv", error) &&
           log_open(&reports->facts, directory, "run.tsv", error) && log_end_line(&reports->log, error) &&
           (lseek(reports->curves.descriptor, 0, SEEK_END) == 0
                ? curves_append(&reports->curves, NULL, error)
                : log_append(&reports->curves, "\n", 1, error) &&
                      log_append(&reports->facts, "\n", 1, error));
}

static inline void reports_lose(Reports *reports, int64_t lines, const Error *error) {
    bool is_first = reports->lost_lines == 0;
    reports->lost_lines += lines;
    if (!is_first) { return; }
    terminal_clear(reports->terminal);
    fprintf(stderr, "train_gpt: %s; training goes on, but what cannot be written is lost\n", error->text);
}

// Writes the lines that wait for space. Returns how many still do.
static inline int64_t reports_flush(Reports *reports, Error *error) {
    Log *logs[] = {&reports->log, &reports->curves, &reports->facts};
    int64_t lines = 0;
    for (size_t i = 0; i < sizeof logs / sizeof logs[0]; i++) {
        Log *log = logs[i];
        if (log->waiting_bytes > 0) { log_append(log, "", 0, error); }
        for (size_t j = 0; j < log->waiting_bytes; j++) { lines += log->waiting[j] == '\n'; }
    }
    return lines;
}

static inline void reports_close(Reports *reports) {
    Error error = {""};
    reports->log.patient = reports->curves.patient = reports->facts.patient = false;
    int64_t lost = reports_flush(reports, &error);
    if (lost > 0) { reports_lose(reports, lost, &error); }
    log_close(&reports->log);
    log_close(&reports->curves);
    log_close(&reports->facts);
}

// Appends an event to log.jsonl, and its row to progress.tsv or, where that is NULL, its members
// to run.tsv. Releases the event. If one of the files cannot be written, the other one is.
static inline void report_write(Reports *reports, json_t *event, const Report *row) {
    Error error = {""}, second = {""};
    bool listed = row != NULL ? curves_append(&reports->curves, row, &second)
                              : facts_append(&reports->facts, event, &second);
    bool logged = log_event(&reports->log, event, &error);
    if (!logged || !listed) { reports_lose(reports, 1, logged ? &second : &error); }
}

static inline void report_event(Reports *reports, json_t *event) { report_write(reports, event, NULL); }

static inline int report_sources(const DataLoader *data) {
    return data != NULL && data->source_count > 1 ? data->source_count : 0;
}

// Appends the number of source `index` to the event's array, which has one for each source.
static inline void report_add_source(json_t *event, const char *key, int index, json_t *value) {
    if (index == 0) { json_object_set_new(event, key, json_array()); }
    json_array_append_new(json_object_get(event, key), value);
}

static inline void report_log(Reports *reports, const Report *report) {
    json_t *event = json_pack("{s:s}", "event", "report");
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        const ReportField *field = &REPORT_FIELDS[i];
        double value = report_value(report, field);
        if (field->optional && isnan(value)) { continue; }
        json_object_set_new(event, field->key,
                            field->whole ? json_integer((json_int_t)value) : log_real(value));
    }
    const DataLoader *data = reports->data;
    for (int i = 0; i < report_sources(data); i++) {
        uint64_t T = data->sequence_length, samples = (uint64_t)report->tokens / T;
        data_loader_source(data, i, &samples);
        report_add_source(event, "source_tokens", i, json_integer((json_int_t)(samples * T)));
    }
    report_write(reports, event, report);
}

// Prints a report as one aligned line; NULL: the heading of such lines.
static inline void report_print_line(const Reports *reports, const Report *report) {
    FILE *stream = reports->terminal->stream;
    const char *space = "";
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        const ReportField *field = &REPORT_FIELDS[i];
        char text[330]; // the largest double with %.4f
        bool hidden = field->offset == offsetof(Report, perfect_loss) && !reports->knows_perfect;
        if (field->heading == NULL || hidden) { continue; }
        double value = report == NULL ? 0 : report_value(report, field);
        const char *cell = report == NULL ? field->heading : isnan(value) ? field->unknown : text;
        if (cell == text && field->format == NULL) { cell = field->human(value, text); }
        if (cell == text && field->format != NULL) { snprintf(text, sizeof text, field->format, value); }
        fprintf(stream, "%s%*s", space, (int)strlen(field->heading), cell);
        space = " ";
    }
    fputc('\n', stream);
}

// Before a line between reports: the table begins with its heading.
static inline void report_begin_table(Reports *reports) {
    terminal_clear(reports->terminal);
    if (reports->lines == 0) {
        reports->lines++;
        report_print_line(reports, NULL);
    }
}

static inline void report_print(Reports *reports, const Report *report) {
    terminal_clear(reports->terminal);
    if (reports->lines++ % 20 == 0) { report_print_line(reports, NULL); }
    report_print_line(reports, report);
    fflush(reports->terminal->stream);
}

// ---- While it trains ------------------------------------------------------------------

static inline void window_add_commit(Reports *reports) {
    const CommitReport *commit = &reports->scheduler->report;
    CommitReport *sum = &reports->window.sum;
    reports->window.has_commits = true;
    if (commit->predicted > 0) { // otherwise there is no loss
        sum->predicted += commit->predicted;
        sum->loss += commit->loss * commit->predicted;
        sum->perfect_loss += commit->perfect_loss * commit->predicted;
    }
    sum->seconds.compute += commit->seconds.compute;
    sum->seconds.communication += commit->seconds.communication;
    sum->seconds.exposed += commit->seconds.exposed;
    sum->seconds.micro_batch += commit->seconds.micro_batch;
    sum->seconds.micro_batch_cpu += commit->seconds.micro_batch_cpu;
    reports->exposed_seconds += commit->seconds.exposed;
    reports->micro_batch_seconds += commit->seconds.micro_batch;
}

// Begins a new window behind the latest report, after `seconds` seconds of training.
static inline void window_begin(Reports *reports, double seconds) {
    const Scheduler *s = reports->scheduler;
    ReportWindow window = {.from = s->report,
                           .from_step = s->optimizer.steps,
                           .from_work = s->gradients_done,
                           .from_seconds = seconds,
                           .from_micro_batches = s->micro_batches_begun};
    reports->window = window;
}

// Prints and logs the commits in the window, and begins a new one. A run may have computed more
// than it has committed: speeds count all that was computed since the last report, and are unknown
// if that is nothing. seconds: of training.
static inline void report_window(Reports *reports, double seconds) {
    const Scheduler *s = reports->scheduler;
    const ReportWindow *window = &reports->window;
    const CommitReport *last = &s->report, *sum = &window->sum;
    double commits = fmax(last->commit - window->from.commit, 1),
           steps = fmax(s->optimizer.steps - window->from_step, 1);
    double work = s->gradients_done - window->from_work, tokens = reports->micro_batch_tokens;
    Report report = report_unknown();
    report.commit = last->commit;
    // A run that was resumed with other sequences may have done part of a micro-batch.
    report.gradients = floor(last->gradients_done);
    report.tokens = report.gradients * tokens;
    report.seconds = seconds;
    report.loss = sum->loss / sum->predicted;
    report.perfect_loss = sum->perfect_loss / sum->predicted;
    report.learning_rate = last->learning_rate;
    report.gradient_norm = last->gradient_norm;
    if (work > 0) { report.tokens_per_second = work * tokens / (seconds - window->from_seconds); }
    report.compute_ms = 1e3 * sum->seconds.compute / steps;
    report.communication_ms = 1e3 * sum->seconds.communication / steps;
    report.exposed_ms = 1e3 * sum->seconds.exposed / steps;
    double micro_batches = s->micro_batches_begun - window->from_micro_batches;
    if (micro_batches > 0) {
        report.micro_batch_ms = 1e3 * sum->seconds.micro_batch / micro_batches;
        report.micro_batch_cpu_ms = 1e3 * sum->seconds.micro_batch_cpu / micro_batches;
    }
    report.steps = steps;
    report.gradients_per_commit = (last->gradients_done - window->from.gradients_done) / commits;
    report.model_tflops = report.tokens_per_second * reports->token_flops / 1e12;
    report.mfu = report.model_tflops * 1e12 / reports->peak_flops;
    report.bytes_sent = __atomic_load_n(&s->transport->bytes_sent, __ATOMIC_RELAXED);
    report.bytes_sent_outside = __atomic_load_n(&s->transport->bytes_sent_outside, __ATOMIC_RELAXED);
    window_begin(reports, seconds);
    report_print(reports, &report);
    if (!reports->is_unwritten && ferror(stdout) != 0) { // the reader of a pipe has gone, or the disk is full
        reports->is_unwritten = true;
        fprintf(stderr,
                "train_gpt: what is printed cannot be written any more; training goes on, and %s has it "
                "all\n",
                reports->log.path);
    }
    report_log(reports, &report);
}

// Prints and logs the latest validation: the mean losses over the held-out batches, nats per
// token. tokens, seconds: of training until now.
static inline void report_validation(Reports *reports, int64_t tokens, double seconds) {
    int64_t commit = reports->scheduler->optimizer.steps;
    Report row = report_unknown();
    row.commit = commit;
    row.tokens = tokens;
    row.seconds = seconds;
    row.validation_loss = reports->validation;
    row.perfect_loss = reports->perfect_validation;
    report_begin_table(reports);
    if (isnan(reports->validation)) {
        printf("%6lld validation without a loss: none of its tokens is predicted", (long long)commit);
    } else {
        printf("%6lld validation loss %.4f", (long long)commit, reports->validation);
    }
    if (isfinite(reports->perfect_validation)) {
        printf(", a perfect model has %.4f", reports->perfect_validation);
    }
    json_t *event =
        json_pack("{s:s, s:I, s:I, s:o, s:o, s:o}", "event", "validation", "commit", (json_int_t)commit,
                  "tokens", (json_int_t)tokens, "seconds", log_real(seconds), "loss",
                  log_real(reports->validation), "perfect_loss", log_real(reports->perfect_validation));
    for (int i = 0; i < report_sources(reports->validation_data); i++) {
        double loss = reports->source_validation[i];
        printf("%s %s %.4f", i == 0 ? ":" : ",", reports->validation_data->sources[i].name, loss);
        report_add_source(event, "source_losses", i, log_real(loss));
    }
    printf("\n");
    fflush(stdout);
    report_write(reports, event, &row);
}
