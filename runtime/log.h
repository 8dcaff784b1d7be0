// log.h: what a run leaves behind, and what it shows while it runs.
//
//   DIRECTORY/log.jsonl      one JSON object per line with an "event": start, report, validation, checkpoint, end
//   DIRECTORY/progress.tsv   the same curve as columns that gnuplot and a spreadsheet read
//   the terminal             one aligned line per report; a bar with the time left where the output is a terminal
//
// A line is one write() to a file opened for appending, so a run that dies leaves a file
// whose every line is whole, and an old run is never truncated. When a write fails half
// way (disk full), the half line is cut off again and the caller gets an Error. JSON has
// no NaN: what is not finite becomes null, because one `nan` makes the whole file
// unreadable to every strict parser, exactly for the run that somebody wants to look at.
// Text that is not UTF-8 (a small model samples bytes) is repaired for the same reason.
//
// Only rank 0 owns a Log and a Terminal; nothing here is thread safe, and nothing here
// prints but the terminal_ functions.
#ifndef ACCO_RUNTIME_LOG_H
#define ACCO_RUNTIME_LOG_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/errors.h"
#include "runtime/files.h"

enum {
    RUN_PATH_SIZE = 1280,         // directory and file, longer than any option text
    LOG_JSON_DIGITS = 12,         // 0.1 stays 0.1 in the file; losses are float32 and have 9
    LOG_NUMBER_SIZE = 32,         // text of one number
    TERMINAL_HEADER_INTERVAL = 20 // reports between two headings
};

// What one report says. Means are over the commits since the previous report; a value
// that is not known is NAN.
typedef struct Report {
    int64_t commit, grads,
        tokens; // since the start: commits, micro-batch gradients and tokens over all ranks
    double loss,
        perfect_loss;     // nats per token; the latter is what a perfect model would reach on the same tokens
    double lr, grad_norm; // of the last commit, the norm before clipping
    double tokens_per_second;                        // over all ranks
    double compute_ms, communication_ms, exposed_ms; // per commit; exposed: what compute had to wait for
    double grads_per_commit;
    double bytes_sent; // by rank 0 to others, since the start
    double seconds;    // since the start of training
} Report;

// ---------------------------------------------------------------------------------------
// Numbers and text

// Numbers for people: 999, 12.3k, 1.50M, 2.00G. Three significant digits; the unit is
// chosen after rounding (999950 is 1.00M).
static inline const char *human_count(double value, char text[LOG_NUMBER_SIZE]) {
    static const char *const units[] = {"", "k", "M", "G", "T", "P"};
    if (!isfinite(value)) {
        snprintf(text, LOG_NUMBER_SIZE, "%s", "-");
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
    snprintf(text, LOG_NUMBER_SIZE, "%.*f%s", decimals, scaled, units[unit]);
    return text;
}

// Durations for people: 0:07, 12:34, 1:02:03, 2d 03:04. Unknown or absurd: "?".
static inline const char *human_duration(double seconds, char text[LOG_NUMBER_SIZE]) {
    if (!(seconds >= 0 && seconds < 1e9)) {
        snprintf(text, LOG_NUMBER_SIZE, "%s", "?");
        return text;
    }
    long whole = lround(seconds);
    long days = whole / 86400, hours = whole / 3600 % 24, minutes = whole / 60 % 60;
    if (days > 0) {
        snprintf(text, LOG_NUMBER_SIZE, "%ldd %02ld:%02ld", days, hours, minutes);
    } else if (hours > 0) {
        snprintf(text, LOG_NUMBER_SIZE, "%ld:%02ld:%02ld", hours, minutes, whole % 60);
    } else {
        snprintf(text, LOG_NUMBER_SIZE, "%ld:%02ld", minutes, whole % 60);
    }
    return text;
}

// A JSON number, or null where the value is NaN or infinite.
static inline json_t *log_real(double value) { return isfinite(value) ? json_real(value) : json_null(); }

// Length in bytes of the well formed UTF-8 character at `text`, 0 where there is none: no
// surrogates, no overlong forms (Unicode, D92).
static inline int log_utf8_length(const unsigned char *text) {
    if (text[0] < 0x80) { return 1; }
    int length = text[0] >= 0xC2 && text[0] < 0xE0   ? 2
                 : text[0] >= 0xE0 && text[0] < 0xF0 ? 3
                 : text[0] >= 0xF0 && text[0] < 0xF5 ? 4
                                                     : 0;
    for (int i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) { return 0; } // also stops at the end of the string
    }
    if (text[0] == 0xE0 && text[1] < 0xA0) { return 0; }
    if (text[0] == 0xED && text[1] > 0x9F) { return 0; }
    if (text[0] == 0xF0 && text[1] < 0x90) { return 0; }
    if (text[0] == 0xF4 && text[1] > 0x8F) { return 0; }
    return length;
}

// A JSON string of any zero-terminated bytes: each byte that is not part of UTF-8 becomes
// '?'. (json_string would return NULL.)
static inline json_t *log_text(const char *text) {
    char *clean = strdup(text);
    for (char *position = clean; *position != '\0';) {
        int length = log_utf8_length((const unsigned char *)position);
        if (length == 0) { *position = '?'; }
        position += length == 0 ? 1 : length;
    }
    json_t *string = json_string(clean);
    free(clean);
    return string;
}

// ---------------------------------------------------------------------------------------
// The run directory

static inline bool run_directory_make(const char *path, Error *error) {
    char partial[RUN_PATH_SIZE];
    size_t length = strlen(path);
    assert(length < sizeof partial);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') { continue; }
        memcpy(partial, path, i);
        partial[i] = '\0';
        if (mkdir(partial, 0777) != 0 && errno != EEXIST) {
            return error_set(error, "cannot create the directory %.400s: %s: choose another with --out",
                             partial, strerror(errno));
        }
    }
    return true;
}

// "tiny" stays; of a path the part that tells models apart stays: my/gpt/config.json
// gives "gpt", other.json gives "other".
static inline void run_directory_model_name(const char *model, char name[64]) {
    const char *end = model + strlen(model), *suffix = "/config.json";
    if ((size_t)(end - model) > strlen(suffix) && strcmp(end - strlen(suffix), suffix) == 0) {
        end -= strlen(suffix);
    }
    while (end > model && end[-1] == '/') { end--; }
    const char *start = end;
    while (start > model && start[-1] != '/') { start--; }
    if (end - start > 5 && strncmp(end - 5, ".json", 5) == 0) { end -= 5; }
    int length = 0;
    for (; start < end && length < 63; start++) {
        unsigned char c = (unsigned char)*start;
        bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' ||
                     c == '_';
        name[length++] = plain ? (char)c : '-';
    }
    name[length] = '\0';
    if (length == 0 || name[0] == '.') { strcpy(name, "model"); }
}

static inline bool run_directory_create_numbered(const char *model, const char *optimizer,
                                                 char path[RUN_PATH_SIZE], Error *error) {
    char name[64];
    run_directory_model_name(model, name);
    if (!run_directory_make("runs", error)) { return false; }
    for (int number = 1; number < 1000000; number++) {
        snprintf(path, RUN_PATH_SIZE, "runs/%s-%.64s-%d", name, optimizer, number);
        if (mkdir(path, 0777) == 0) {
            return true;
        } // mkdir decides, so that two runs started at once get two numbers
        if (errno != EEXIST) {
            return error_set(error, "cannot create the directory %.400s: %s: choose another with --out", path,
                             strerror(errno));
        }
    }
    return error_set(error, "runs/%s-%.64s-1 and so on are all taken: choose a directory with --out", name,
                     optimizer);
}

// Creates the directory of a run with all its parents and writes its path. out "auto":
// runs/MODEL-OPTIMIZER-N with the first N that is free. goes_on: a run that was begun
// there goes on. Errors: a directory that already holds another run's log.jsonl, one that
// cannot be created or written to, something that is no directory.
static inline bool run_directory_create(const char *out, const char *model, const char *optimizer,
                                        bool goes_on, char path[RUN_PATH_SIZE], Error *error) {
    if (strcmp(out, "auto") == 0) { return run_directory_create_numbered(model, optimizer, path, error); }
    if (strlen(out) + 64 > RUN_PATH_SIZE) {
        return error_set(error, "--out is longer than %d characters", RUN_PATH_SIZE - 65);
    }
    strcpy(path, out);
    struct stat status;
    char log_path[RUN_PATH_SIZE + 16];
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", out);
    if (stat(path, &status) == 0 && !S_ISDIR(status.st_mode)) {
        return error_set(error, "--out %.400s is not a directory", path);
    }
    if (!goes_on && lstat(log_path, &status) == 0) {
        return error_set(error,
                         "--out %.400s already holds the log of a run: choose another directory, leave --out "
                         "away, or go on with "
                         "--resume auto",
                         path);
    }
    if (!run_directory_make(path, error)) { return false; }
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) != 0) {
        return error_set(error, "cannot write to the directory %.400s: %s: choose another with --out", path,
                         strerror(errno));
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// The files

typedef struct LogFile {
    int descriptor; // -1: not open
    char path[RUN_PATH_SIZE + 16];
} LogFile;

typedef struct Log {
    LogFile events; // log.jsonl
    LogFile table;  // progress.tsv
} Log;

static inline bool log_file_open(LogFile *file, const char *directory, const char *name, Error *error) {
    snprintf(file->path, sizeof file->path, "%.*s/%s", RUN_PATH_SIZE - 1, directory, name);
    file->descriptor = open(file->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file->descriptor < 0) {
        return error_set(error, "cannot open %.400s for writing: %s", file->path, strerror(errno));
    }
    return true;
}

// Appends `length` bytes, normally in one write(). On failure what was written of them is
// cut off again.
static inline bool log_file_append(LogFile *file, const char *text, size_t length, Error *error) {
    struct stat status;
    bool regular = fstat(file->descriptor, &status) == 0 && S_ISREG(status.st_mode);
    if (file_write_all(file->descriptor, text, length, FILE_POSITION)) { return true; }
    int reason = errno;
    if (regular && ftruncate(file->descriptor, status.st_size) != 0) { reason = errno; }
    return error_set(error, "cannot write %.400s: %s", file->path, strerror(reason));
}

static inline void log_close(Log *log) {
    if (log->events.descriptor >= 0) { close(log->events.descriptor); }
    if (log->table.descriptor >= 0) { close(log->table.descriptor); }
    log->events.descriptor = log->table.descriptor = -1;
}

// Opens both files of an existing directory, for appending; a new table gets its heading.
// On failure nothing stays open.
static inline bool log_open(Log *log, const char *directory, Error *error) {
    static const char *const heading =
        "commit\ttokens\tseconds\tloss\tvalidation_loss\tlearning_rate\tgradient_norm\ttokens_per_second\n";
    log->events.descriptor = log->table.descriptor = -1;
    bool opened = log_file_open(&log->events, directory, "log.jsonl", error);
    opened = opened && log_file_open(&log->table, directory, "progress.tsv", error);
    struct stat status;
    if (opened && fstat(log->table.descriptor, &status) == 0 && status.st_size == 0) {
        opened = log_file_append(&log->table, heading, strlen(heading), error);
    }
    if (!opened) { log_close(log); }
    return opened;
}

// Writes one object as one line and releases it, also on failure. Build reals with
// log_real and foreign text with log_text.
static inline bool log_event(Log *log, json_t *event, Error *error) {
    assert(event != NULL && json_object_get(event, "event") != NULL);
    char *text = json_dumps(event, JSON_COMPACT | JSON_REAL_PRECISION(LOG_JSON_DIGITS));
    json_decref(event);
    size_t length = text == NULL ? 0 : strlen(text);
    char *line = text == NULL ? NULL : (char *)realloc(text, length + 2);
    if (line == NULL) {
        free(text);
        return error_set(error, "no memory for a line of %.400s", log->events.path);
    }
    line[length] = '\n';
    bool written = log_file_append(&log->events, line, length + 1, error);
    free(line);
    return written;
}

static inline const char *log_cell(double value, char text[LOG_NUMBER_SIZE]) {
    // printf may write -nan; gnuplot knows nan and leaves a gap
    if (isfinite(value)) {
        snprintf(text, LOG_NUMBER_SIZE, "%.9g", value);
    } else {
        snprintf(text, LOG_NUMBER_SIZE, "%s", "nan");
    }
    return text;
}

static inline bool log_table_row(Log *log, const Report *report, double validation_loss, Error *error) {
    char line[9 * LOG_NUMBER_SIZE], cells[6][LOG_NUMBER_SIZE];
    int length = snprintf(
        line, sizeof line, "%lld\t%lld\t%s\t%s\t%s\t%s\t%s\t%s\n", (long long)report->commit,
        (long long)report->tokens, log_cell(report->seconds, cells[0]), log_cell(report->loss, cells[1]),
        log_cell(validation_loss, cells[2]), log_cell(report->lr, cells[3]),
        log_cell(report->grad_norm, cells[4]), log_cell(report->tokens_per_second, cells[5]));
    return log_file_append(&log->table, line, (size_t)length, error);
}

// The report event and its row of the table.
static inline bool log_report(Log *log, const Report *report, Error *error) {
    json_t *event = json_pack(
        "{s:s, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:o}", "event", "report",
        "commit", (json_int_t)report->commit, "grads", (json_int_t)report->grads, "tokens",
        (json_int_t)report->tokens, "loss", log_real(report->loss), "lr", log_real(report->lr), "grad_norm",
        log_real(report->grad_norm), "tokens_per_second", log_real(report->tokens_per_second), "compute_ms",
        log_real(report->compute_ms), "communication_ms", log_real(report->communication_ms), "exposed_ms",
        log_real(report->exposed_ms), "grads_per_commit", log_real(report->grads_per_commit), "bytes_sent",
        (json_int_t)report->bytes_sent, "seconds", log_real(report->seconds), "perfect_loss",
        log_real(report->perfect_loss));
    return log_event(log, event, error) && log_table_row(log, report, NAN, error);
}

// The validation event and its row. loss: mean over the held-out batches, nats per token;
// perfect_loss: NAN where it is not known.
static inline bool log_validation(Log *log, int64_t commit, int64_t tokens, double seconds, double loss,
                                  double perfect_loss, Error *error) {
    json_t *event = json_pack("{s:s, s:I, s:I, s:o, s:o, s:o}", "event", "validation", "commit",
                              (json_int_t)commit, "tokens", (json_int_t)tokens, "seconds", log_real(seconds),
                              "loss", log_real(loss), "perfect_loss", log_real(perfect_loss));
    Report row;
    memset(&row, 0, sizeof row);
    row.commit = commit;
    row.tokens = tokens;
    row.seconds = seconds;
    row.loss = row.lr = row.grad_norm = row.tokens_per_second = NAN;
    return log_event(log, event, error) && log_table_row(log, &row, loss, error);
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
// of its own and passes on what it reads there, to a file perhaps: then what counts is
// where mpirun, the parent of a rank on its node, writes to.
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

// One aligned line, at most 100 columns, under a heading that returns every
// TERMINAL_HEADER_INTERVAL reports.
static inline void terminal_report(Terminal *terminal, const Report *report) {
    char tokens[LOG_NUMBER_SIZE], rate[LOG_NUMBER_SIZE], perfect[LOG_NUMBER_SIZE] = "-";
    terminal_clear(terminal);
    if (terminal->reports++ % TERMINAL_HEADER_INTERVAL == 0) {
        fprintf(terminal->stream, "%7s %7s %8s %8s %10s %8s %7s %10s %8s %11s %6s\n", "commit", "tokens",
                "loss", "perfect", "lr", "norm", "tok/s", "compute ms", "comm ms", "exposed ms", "grads");
    }
    if (isfinite(report->perfect_loss)) { snprintf(perfect, sizeof perfect, "%.4f", report->perfect_loss); }
    fprintf(terminal->stream, "%7lld %7s %8.4f %8s %10.3e %8.3g %7s %10.1f %8.1f %11.1f %6.4g\n",
            (long long)report->commit, human_count((double)report->tokens, tokens),
            isnan(report->loss) ? fabs(report->loss) : report->loss, perfect, report->lr,
            isnan(report->grad_norm) ? fabs(report->grad_norm) : report->grad_norm,
            human_count(report->tokens_per_second, rate), report->compute_ms, report->communication_ms,
            report->exposed_ms, report->grads_per_commit);
    fflush(terminal->stream);
}

// Redraws the bar in place, at most ten times a second; does nothing where nobody looks.
// `done` of `total` tokens after `seconds`.
static inline void terminal_bar(Terminal *terminal, int64_t done, int64_t total, double seconds) {
    bool recent = terminal->bar_shown && seconds - terminal->bar_seconds < 0.1;
    if (!terminal->interactive || total <= 0 || (recent && done < total)) { return; }
    char have[LOG_NUMBER_SIZE], all[LOG_NUMBER_SIZE], left[LOG_NUMBER_SIZE], text[160], bar[64];
    double share = (double)done / (double)total;
    share = share < 0 ? 0 : share > 1 ? 1 : share;
    double seconds_left = done > 0 ? seconds * (1 - share) / share : NAN;
    int length = snprintf(text, sizeof text, " %3.0f %%  %s of %s tokens, %s left", 100 * share,
                          human_count((double)done, have), human_count((double)total, all),
                          human_duration(seconds_left, left));
    int width = terminal->columns - length -
                4; // two brackets, and the last column stays free: some terminals wrap there
    width = width > 40 ? 40 : width;
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
