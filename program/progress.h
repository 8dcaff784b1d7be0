// progress.h: how far training has come, told in three places: to people on the terminal,
// to programs in log.jsonl, to gnuplot and spreadsheets in progress.tsv.
//
//   DIRECTORY/log.jsonl      one JSON object per line with an "event": start, report, ...
//   DIRECTORY/progress.tsv   the learning curves: a row per report and per validation
//   the terminal             an aligned line per report; a bar with the time left where
//                            a person looks at it, elsewhere a line after a silence
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

// Where nobody looks, a line says how far the program is after so many seconds without
// one. While it trains there are reports, as often as the user wants them.
#define QUIET_SECONDS 10.0
#define QUIET_TRAINING_SECONDS 60.0

enum {
    NUMBER_TEXT_SIZE = 32,        // text of one number
    PROGRESS_TEXT_SIZE = 192,     // of a bar, or of the line in its place
    TERMINAL_COLUMNS = 80,        // of a screen that does not say how wide it is
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

// Parts of a commit's time: 0.6ms, 22.1ms, 123ms, 1.23s, 45.6s, 123s.
static inline const char *human_milliseconds(double value, char text[NUMBER_TEXT_SIZE]) {
    double seconds = value / 1e3;
    if (value < 99.95) {
        snprintf(text, NUMBER_TEXT_SIZE, "%.1fms", value);
    } else if (value < 999.5) {
        snprintf(text, NUMBER_TEXT_SIZE, "%.0fms", value);
    } else {
        snprintf(text, NUMBER_TEXT_SIZE, "%.*fs", seconds < 9.995 ? 2 : seconds < 99.95 ? 1 : 0, seconds);
    }
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
    // Of rank 0: what a micro-batch took, and for how long the thread that drives it had a core;
    // and the same of the thread that communicates, per commit.
    double micro_batch_ms, micro_batch_cpu_ms;
    double gradients_per_commit;
    // By rank 0, since the start: to all others, and of it what left its host.
    double bytes_sent, bytes_sent_outside;
    // Over all ranks: model operations, 10^12 a second, and their share of the peak
    // (peak.h).
    double model_tflops, mfu;
    // Of rank 0's GPU when the report was made: MHz, watts, and NVML's bits that say why
    // the clock is not the highest.
    double gpu_clock, gpu_watts, gpu_throttle;
} Report;

// A field of the report and how it is shown.
typedef struct ReportField {
    size_t offset;       // in Report
    bool whole;          // a whole number
    const char *key;     // in log.jsonl; NULL: not there
    const char *column;  // of progress.tsv; NULL: not there
    const char *heading; // on the terminal, as wide as what stands below it; NULL: not there
    const char *format;  // on the terminal; NULL: `human`
    const char *(*human)(double value, char text[NUMBER_TEXT_SIZE]);
    const char *unknown; // what the terminal shows for NAN
    bool optional;       // left out of log.jsonl where it is not known
} ReportField;

// With a blank between the columns a line has 79, so that it fits where the last column
// of 80 must stay free.
// clang-format off
#define AT(member) offsetof(Report, member)
#define AS(format) format, NULL
#define AS_COUNT NULL, human_count
#define AS_TIME NULL, human_milliseconds
#define NOWHERE NULL, NULL, NULL, NULL
static const ReportField REPORT_FIELDS[] = {
    // in Report         whole  log.jsonl            progress.tsv         terminal
    {AT(commit),               1, "commit",            "commit",            "commit",  AS("%.0f"), "nan", 0},
    {AT(gradients),            1, "grads",             NULL,                NOWHERE, 0},
    {AT(tokens),               1, "tokens",            "tokens",            "tokens",  AS_COUNT, "-", 0},
    {AT(seconds),              0, "seconds",           "seconds",           NOWHERE, 0},
    {AT(loss),                 0, "loss",              "loss",              "   loss", AS("%.4f"), "nan", 0},
    {AT(perfect_loss),         0, "perfect_loss",      NULL,                "perfect", AS("%.4f"), "-", 0},
    {AT(validation_loss),      0, NULL,                "validation_loss",   NOWHERE, 0},
    {AT(learning_rate),        0, "lr",                "learning_rate",     "     lr", AS("%.1e"), "nan", 0},
    {AT(gradient_norm),        0, "grad_norm",         "gradient_norm",     "  norm",  AS("%.3g"), "nan", 0},
    {AT(tokens_per_second),    0, "tokens_per_second", "tokens_per_second", "tok/s",   AS_COUNT, "-", 0},
    {AT(compute_ms),           0, "compute_ms",        NULL,                "compute", AS_TIME, "nan", 0},
    {AT(communication_ms),     0, "communication_ms",  NULL,                "  comm",  AS_TIME, "nan", 0},
    {AT(exposed_ms),           0, "exposed_ms",        NULL,                "exposed", AS_TIME, "nan", 0},
    {AT(steps),                1, "steps",             NULL,                NOWHERE, 0},
    {AT(micro_batch_ms),       0, "micro_batch_ms",    NULL,                NOWHERE, 1},
    {AT(micro_batch_cpu_ms),   0, "micro_batch_cpu_ms", NULL,               NOWHERE, 1},
    {AT(gradients_per_commit), 0, "grads_per_commit",  NULL,                "grads",   AS("%.4g"), "nan", 0},
    {AT(bytes_sent),           1, "bytes_sent",        NULL,                NOWHERE, 0},
    {AT(bytes_sent_outside),   1, "bytes_sent_outside", NULL,               NOWHERE, 0},
    {AT(model_tflops),         0, "model_tflops",      NULL,                NOWHERE, 0},
    {AT(mfu),                  0, "mfu",               NULL,                NOWHERE, 1},
    {AT(gpu_clock),            0, "gpu_mhz",           NULL,                NOWHERE, 1},
    {AT(gpu_watts),            0, "gpu_watts",         NULL,                NOWHERE, 1},
    {AT(gpu_throttle),         1, "gpu_throttle",      NULL,                NOWHERE, 1},
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
    if (field->format == NULL) { return field->human(value, text); }
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

// Appends an event to log.jsonl and its row to progress.tsv. One that cannot be written
// does not keep the other from its file; the error is that of the first.
static inline bool progress_append(Log *log, Log *curves, json_t *event, const Report *row, Error *error) {
    Error second = {""};
    bool logged = log_event(log, event, error);
    return progress_append_row(curves, row, logged ? error : &second) && logged;
}

// Appends the event "report" to log.jsonl and its row to progress.tsv.
static inline bool progress_log_report(Log *log, Log *curves, const Report *report, Error *error) {
    json_t *event = json_pack("{s:s}", "event", "report");
    for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
        const ReportField *field = &REPORT_FIELDS[i];
        if (field->key == NULL) { continue; }
        double value = report_value(report, field);
        if (field->optional && isnan(value)) { continue; }
        json_object_set_new(event, field->key,
                            field->whole ? json_integer((json_int_t)value) : log_real(value));
    }
    return progress_append(log, curves, event, report, error);
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
    return progress_append(log, curves, event, &row, error);
}

// ---------------------------------------------------------------------------------------
// The terminal

typedef struct Terminal {
    FILE *stream;
    bool interactive;   // a person looks at it: the bar may redraw its line
    bool bar_shown;     // the cursor stands behind a bar
    bool knows_perfect; // the loss of a perfect model is known and has its column
    int columns;        // width of the screen
    int reports;        // printed so far
    double bar_seconds; // when the bar was last drawn
    double quiet_since; // where nobody looks: since when; -1: not known yet
} Terminal;

// How far something long has come.
typedef struct Progress {
    const char *what, *unit; // as "validation, " and "batches"; "" and "tokens"
    int64_t done, total;
    double seconds; // that it took so far
    double silence; // where nobody looks: seconds of it after which a line is printed
} Progress;

// Whether a person sees what is written to `stream`, on a screen that can go back in a
// line. Open MPI gives every rank a terminal of its own and forwards what the rank writes
// there, perhaps to a file. So under mpirun, which is the parent of the ranks on its own
// node, its own output decides.
static inline bool terminal_is_watched(FILE *stream) {
    const char *kind = getenv("TERM");
    bool redraws = kind != NULL && kind[0] != '\0' && strcmp(kind, "dumb") != 0;
    if (!redraws || isatty(fileno(stream)) != 1) { return false; }
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
    terminal->columns = TERMINAL_COLUMNS;
    terminal->bar_seconds = terminal->quiet_since = -1;
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
    terminal->quiet_since = -1;
}

// Prints a report as one aligned line, under a heading that returns every
// TERMINAL_HEADER_INTERVAL reports.
static inline void terminal_report(Terminal *terminal, const Report *report) {
    bool headed = terminal->reports++ % TERMINAL_HEADER_INTERVAL == 0;
    terminal_clear(terminal);
    for (int line = headed ? 0 : 1; line < 2; line++) {
        const char *space = "";
        for (int i = 0; i < REPORT_FIELD_COUNT; i++) {
            const ReportField *field = &REPORT_FIELDS[i];
            char text[REPORT_CELL_SIZE];
            bool hidden = field->offset == offsetof(Report, perfect_loss) && !terminal->knows_perfect;
            if (field->heading == NULL || hidden) { continue; }
            const char *cell = line == 0 ? field->heading : report_cell(report, field, text);
            fprintf(terminal->stream, "%s%*s", space, (int)strlen(field->heading), cell);
            space = " ";
        }
        fputc('\n', terminal->stream);
    }
    fflush(terminal->stream);
}

// " 25 %  validation, 4 of 16 batches, 0:30 left". Returns its length.
static inline int progress_text(const Progress *progress, char text[PROGRESS_TEXT_SIZE]) {
    char have[NUMBER_TEXT_SIZE], all[NUMBER_TEXT_SIZE], left[NUMBER_TEXT_SIZE];
    double share = fmin(fmax((double)progress->done / (double)progress->total, 0), 1);
    double seconds_left = progress->done > 0 ? progress->seconds * (1 - share) / share : NAN;
    return snprintf(text, PROGRESS_TEXT_SIZE, "%3.0f %%  %.40s%.31s of %.31s %.20s, %.31s left", 100 * share,
                    progress->what, human_count((double)progress->done, have),
                    human_count((double)progress->total, all), progress->unit,
                    human_duration(seconds_left, left));
}

// Where nobody looks: a line, once the silence was long enough.
static inline void terminal_break_silence(Terminal *terminal, const Progress *progress, double now) {
    char text[PROGRESS_TEXT_SIZE];
    if (terminal->quiet_since < 0) { terminal->quiet_since = now; }
    if (now - terminal->quiet_since < progress->silence) { return; }
    progress_text(progress, text);
    fprintf(terminal->stream, "%s\n", text);
    fflush(terminal->stream);
    terminal->quiet_since = now;
}

// Redraws the bar in place, at most ten times a second. now: clock_seconds().
static inline void terminal_bar(Terminal *terminal, const Progress *progress, double now) {
    bool ends = progress->done >= progress->total,
         recent = terminal->bar_shown && now - terminal->bar_seconds < 0.1;
    if (progress->total <= 0 || (recent && !ends)) { return; }
    if (!terminal->interactive) {
        terminal_break_silence(terminal, progress, now);
        return;
    }
    char text[PROGRESS_TEXT_SIZE], bar[64];
    double share = fmin(fmax((double)progress->done / (double)progress->total, 0), 1);
    int length = progress_text(progress, text);
    // Room for two brackets and a blank; the last column stays free, because some
    // terminals wrap there.
    int width = (int)int64_min(terminal->columns - length - 5, 40);
    for (int i = 0; i < width; i++) {
        bar[i] = i < (int)(share * width) ? '=' : i == (int)(share * width) ? '>' : ' ';
    }
    bar[width > 0 ? width : 0] = '\0';
    if (width > 4) {
        fprintf(terminal->stream, "\r\033[K[%s] %s", bar, text);
    } else {
        fprintf(terminal->stream, "\r\033[K%.*s", terminal->columns > 1 ? terminal->columns - 1 : 1, text);
    }
    fflush(terminal->stream);
    terminal->bar_shown = true;
    terminal->bar_seconds = now;
}

#endif
