// progress.h: how far training has come, told in three places: to people on the terminal,
// to programs in log.jsonl, to gnuplot and spreadsheets in progress.tsv.
//
//   DIRECTORY/log.jsonl      one JSON object per line with an "event": start, report, ...
//   DIRECTORY/progress.tsv   the learning curves: a row per report and per validation
//   the terminal             an aligned line per report; a bar with the time left where
//                            a person looks at it
//
// One table, REPORT_FIELDS, says what a report holds and how each of the three shows it.
//
// Only rank 0 has these; nothing here is thread safe, and only the terminal_ functions
// print.
#ifndef ACCO_PROGRAM_PROGRESS_H
#define ACCO_PROGRAM_PROGRESS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#include "runtime/log.h"
#include "runtime/numbers.h"

enum {
    NUMBER_TEXT_SIZE = 32,        // text of one number
    TERMINAL_HEADER_INTERVAL = 20 // reports between two headings
};

// ---------------------------------------------------------------------------------------
// Numbers for people

// 999, 12.3k, 1.50M, 2.00G: three significant digits; the unit is chosen after rounding
// (999950 is 1.00M).
static inline const char *human_count(double value, char text[NUMBER_TEXT_SIZE]) {
    static const char *const units[] = {"", "k", "M", "G", "T", "P"};
    if (!isfinite(value)) {
        snprintf(text, NUMBER_TEXT_SIZE, "%s", "-");
        return text;
    }
    int unit = 0;
    double scaled = value;
    while (fabs(scaled) >= 999.5 && unit < 5) {
        scaled /= 1000;
        unit++;
    }
    double size = fabs(scaled);
    int decimals = unit == 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
    snprintf(text, NUMBER_TEXT_SIZE, "%.*f%s", decimals, scaled, units[unit]);
    return text;
}

// Durations: 0:07, 12:34, 1:02:03, 2d 03:04. Unknown or absurd: "?".
static inline const char *human_duration(double seconds, char text[NUMBER_TEXT_SIZE]) {
    if (!(seconds >= 0 && seconds < 1e9)) {
        snprintf(text, NUMBER_TEXT_SIZE, "%s", "?");
        return text;
    }
    long whole = lround(seconds);
    long days = whole / 86400, hours = whole / 3600 % 24, minutes = whole / 60 % 60;
    if (days > 0) {
        snprintf(text, NUMBER_TEXT_SIZE, "%ldd %02ld:%02ld", days, hours, minutes);
    } else if (hours > 0) {
        snprintf(text, NUMBER_TEXT_SIZE, "%ld:%02ld:%02ld", hours, minutes, whole % 60);
    } else {
        snprintf(text, NUMBER_TEXT_SIZE, "%ld:%02ld", minutes, whole % 60);
    }
    return text;
}

// ---------------------------------------------------------------------------------------
// The report

// What one report says. Means are taken over the commits since the previous report; a
// value that is not known is NAN. All are doubles, so that one table can point at them;
// whole numbers are exact up to 2^53.
typedef struct Report {
    double commit, gradients, tokens; // since the start; micro-batch gradients and tokens over all ranks
    double seconds;                   // of training, since the start
    double loss, perfect_loss;        // nats per token; what a perfect model would reach on the same tokens
    double validation_loss;           // nats per token of the held-out batches; only in a validation's row
    double learning_rate, gradient_norm; // of the latest commit, the norm before clipping
    double tokens_per_second;            // over all ranks
    double compute_ms, communication_ms; // per commit, on rank 0
    double exposed_ms;                   // communication that compute had to wait for
    double steps; // of which these three are means: of a local rule also those not yet reported
    double gradients_per_commit;
    // By rank 0, since the start: to all others, and of it what left its host.
    double bytes_sent, bytes_sent_outside;
} Report;

// A field of the report and how it is shown.
typedef struct ReportField {
    size_t offset;       // in Report
    bool whole;          // a whole number
    const char *key;     // in log.jsonl; NULL: not there
    const char *column;  // of progress.tsv; NULL: not there
    const char *heading; // on the terminal, as wide as what stands below it; NULL: not there
    const char *format;  // on the terminal; NULL: human_count
    const char *unknown; // what the terminal shows for NAN
} ReportField;

// clang-format off
#define AT(member) offsetof(Report, member)
static const ReportField REPORT_FIELDS[] = {
    // in Report         whole  log.jsonl            progress.tsv         terminal
    {AT(commit),               1, "commit",            "commit",            " commit",     "%.0f", "nan"},
    {AT(gradients),            1, "grads",             NULL,                NULL,          NULL,   NULL},
    {AT(tokens),               1, "tokens",            "tokens",            " tokens",     NULL,   "-"},
    {AT(seconds),              0, "seconds",           "seconds",           NULL,          NULL,   NULL},
    {AT(loss),                 0, "loss",              "loss",              "    loss",    "%.4f", "nan"},
    {AT(perfect_loss),         0, "perfect_loss",      NULL,                " perfect",    "%.4f", "-"},
    {AT(validation_loss),      0, NULL,                "validation_loss",   NULL,          NULL,   NULL},
    {AT(learning_rate),        0, "lr",                "learning_rate",     "        lr",  "%.3e", "nan"},
    {AT(gradient_norm),        0, "grad_norm",         "gradient_norm",     "    norm",    "%.3g", "nan"},
    {AT(tokens_per_second),    0, "tokens_per_second", "tokens_per_second", "  tok/s",     NULL,   "-"},
    {AT(compute_ms),           0, "compute_ms",        NULL,                "compute ms",  "%.1f", "nan"},
    {AT(communication_ms),     0, "communication_ms",  NULL,                " comm ms",    "%.1f", "nan"},
    {AT(exposed_ms),           0, "exposed_ms",        NULL,                " exposed ms", "%.1f", "nan"},
    {AT(steps),                1, "steps",             NULL,                NULL,          NULL,   NULL},
    {AT(gradients_per_commit), 0, "grads_per_commit",  NULL,                " grads",      "%.4g", "nan"},
    {AT(bytes_sent),           1, "bytes_sent",        NULL,                NULL,          NULL,   NULL},
    {AT(bytes_sent_outside),   1, "bytes_sent_outside", NULL,               NULL,          NULL,   NULL},
};
#undef AT
// clang-format on

enum { REPORT_FIELD_COUNT = sizeof REPORT_FIELDS / sizeof REPORT_FIELDS[0] };

static inline double report_value(const Report *report, const ReportField *field) {
    return *(const double *)((const char *)report + field->offset);
}

// A report of which nothing is known yet.
static inline Report report_unknown(void) {
    Report report;
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        *(double *)((char *)&report + REPORT_FIELDS[i].offset) = NAN;
    }
    return report;
}

enum { REPORT_CELL_SIZE = 330 }; // the largest double with %.4f

// What the terminal shows of a field.
static inline const char *report_cell(const Report *report, const ReportField *field,
                                      char text[REPORT_CELL_SIZE]) {
    double value = report_value(report, field);
    if (isnan(value)) { return field->unknown; }
    if (field->format == NULL) { return human_count(value, text); }
    snprintf(text, REPORT_CELL_SIZE, field->format, value);
    return text;
}

// ---------------------------------------------------------------------------------------
// The files

// Appends a row to progress.tsv; report NULL: the heading.
static inline bool progress_append_row(Log *curves, const Report *report, Error *error) {
    char line[REPORT_FIELD_COUNT * NUMBER_TEXT_SIZE] = "";
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        const ReportField *field = &REPORT_FIELDS[i];
        if (field->column == NULL) { continue; }
        char cell[NUMBER_TEXT_SIZE] = "nan"; // printf may write -nan; gnuplot leaves a gap for nan
        double value = report != NULL ? report_value(report, field) : NAN;
        if (isfinite(value)) { snprintf(cell, sizeof cell, field->whole ? "%.0f" : "%.9g", value); }
        if (line[0] != '\0') { strcat(line, "\t"); }
        strcat(line, report != NULL ? cell : field->column);
    }
    strcat(line, "\n");
    return log_append(curves, line, strlen(line), error);
}

// Opens progress.tsv in an existing directory for appending; a new file gets its heading.
static inline bool progress_open_curves(Log *curves, const char *directory, Error *error) {
    struct stat status;
    if (!log_open(curves, directory, "progress.tsv", error)) { return false; }
    bool is_new = fstat(curves->descriptor, &status) == 0 && status.st_size == 0;
    return !is_new || progress_append_row(curves, NULL, error);
}

// Appends the event "report" to log.jsonl and its row to progress.tsv.
static inline bool progress_log_report(Log *log, Log *curves, const Report *report, Error *error) {
    json_t *event = json_pack("{s:s}", "event", "report");
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        const ReportField *field = &REPORT_FIELDS[i];
        if (field->key == NULL) { continue; }
        double value = report_value(report, field);
        json_object_set_new(event, field->key,
                            field->whole ? json_integer((json_int_t)value) : log_real(value));
    }
    return log_event(log, event, error) && progress_append_row(curves, report, error);
}

// Appends the event "validation" and its row. loss: mean over the held-out batches, nats
// per token; perfect_loss: NAN where it is not known.
static inline bool progress_log_validation(Log *log, Log *curves, int64_t commit, int64_t tokens,
                                           double seconds, double loss, double perfect_loss, Error *error) {
    json_t *event = json_pack("{s:s, s:I, s:I, s:o, s:o, s:o}", "event", "validation", "commit",
                              (json_int_t)commit, "tokens", (json_int_t)tokens, "seconds", log_real(seconds),
                              "loss", log_real(loss), "perfect_loss", log_real(perfect_loss));
    Report row = report_unknown();
    row.commit = (double)commit;
    row.tokens = (double)tokens;
    row.seconds = seconds;
    row.validation_loss = loss;
    return log_event(log, event, error) && progress_append_row(curves, &row, error);
}

// ---------------------------------------------------------------------------------------
// The terminal

typedef struct Terminal {
    FILE *stream;
    bool interactive;   // a person looks at it: the bar may redraw its line
    bool bar_shown;     // the cursor stands behind a bar
    int columns;        // width of the screen
    int reports;        // printed so far
    double bar_seconds; // when the bar was last drawn
} Terminal;

// Whether a person sees what is written to `stream`. Open MPI gives every rank a terminal
// of its own and forwards what the rank writes there, perhaps to a file. So under mpirun,
// which is the parent of the ranks on its own node, its own output decides.
static inline bool terminal_is_watched(FILE *stream) {
    if (isatty(fileno(stream)) != 1) { return false; }
    if (getenv("OMPI_COMM_WORLD_SIZE") == NULL) { return true; }
    char link[64], target[64];
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    ssize_t length = readlink(link, target, sizeof target - 1);
    target[length > 0 ? length : 0] = '\0';
    return strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0;
}

static inline void terminal_open(Terminal *terminal, FILE *stream) {
    memset(terminal, 0, sizeof *terminal);
    terminal->stream = stream;
    terminal->interactive = terminal_is_watched(stream);
    terminal->columns = 80;
    terminal->bar_seconds = -1;
    struct winsize size;
    if (terminal->interactive && ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
        terminal->columns = size.ws_col;
    }
}

// Wipes the bar, so that an ordinary line can follow. Call it before printing anything
// else to the same stream.
static inline void terminal_clear(Terminal *terminal) {
    if (terminal->bar_shown) { fputs("\r\033[K", terminal->stream); }
    terminal->bar_shown = false;
}

// Prints a report as one aligned line of at most 100 columns, under a heading that
// returns every TERMINAL_HEADER_INTERVAL reports.
static inline void terminal_report(Terminal *terminal, const Report *report) {
    bool headed = terminal->reports++ % TERMINAL_HEADER_INTERVAL == 0;
    terminal_clear(terminal);
    for (int line = headed ? 0 : 1; line < 2; line++) {
        const char *space = "";
        for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
            const ReportField *field = &REPORT_FIELDS[i];
            char text[REPORT_CELL_SIZE];
            if (field->heading == NULL) { continue; }
            const char *cell = line == 0 ? field->heading : report_cell(report, field, text);
            fprintf(terminal->stream, "%s%*s", space, (int)strlen(field->heading), cell);
            space = " ";
        }
        fputc('\n', terminal->stream);
    }
    fflush(terminal->stream);
}

// Redraws the bar in place, at most ten times a second; does nothing where nobody looks.
// `done` of `total` tokens after `seconds`.
static inline void terminal_bar(Terminal *terminal, int64_t done, int64_t total, double seconds) {
    bool recent = terminal->bar_shown && seconds - terminal->bar_seconds < 0.1;
    if (!terminal->interactive || total <= 0 || (recent && done < total)) { return; }
    char have[NUMBER_TEXT_SIZE], all[NUMBER_TEXT_SIZE], left[NUMBER_TEXT_SIZE], text[160], bar[64];
    double share = fmin(fmax((double)done / (double)total, 0), 1);
    double seconds_left = done > 0 ? seconds * (1 - share) / share : NAN;
    int length = snprintf(text, sizeof text, " %3.0f %%  %s of %s tokens, %s left", 100 * share,
                          human_count((double)done, have), human_count((double)total, all),
                          human_duration(seconds_left, left));
    // Room for two brackets; the last column stays free, because some terminals wrap there.
    int width = (int)int64_min(terminal->columns - length - 4, 40);
    for (int i = 0; i < width; i++) {
        bar[i] = i < (int)(share * width) ? '=' : i == (int)(share * width) ? '>' : ' ';
    }
    bar[width > 0 ? width : 0] = '\0';
    if (width > 4) {
        fprintf(terminal->stream, "\r\033[K[%s]%s", bar, text);
    } else {
        fprintf(terminal->stream, "\r\033[K%.*s", terminal->columns > 1 ? terminal->columns - 1 : 1, text);
    }
    fflush(terminal->stream);
    terminal->bar_shown = true;
    terminal->bar_seconds = seconds;
}

#endif
