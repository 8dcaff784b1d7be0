// terminal.h: what people see while they wait: numbers in few characters, and a bar with the
// time left. If the output is no screen, a line takes the bar's place after a silence.
#pragma once

#include <sys/ioctl.h>

#include "runtime/errors.h"
#include "runtime/numbers.h"

// Seconds of silence after which a line says how far the program has come, if the output is
// no screen. While it trains there are reports, as often as the user wants them.
#define QUIET_SECONDS 10.0
#define QUIET_TRAINING_SECONDS 60.0

enum {
    PROGRESS_TEXT_SIZE = 192, // of a bar, or of the line in its place
    TERMINAL_COLUMNS = 80     // of a screen that does not say how wide it is
};

// Parts of a commit's time: 0.6ms, 22.1ms, 123ms, 1.23s, 45.6s, 123s.
static inline const char *human_milliseconds(double value, char text[NUMBER_TEXT_SIZE]) {
    bool in_seconds = !(value < 999.5);
    double shown = in_seconds ? value / 1e3 : value;
    int decimals = in_seconds && shown < 9.995 ? 2 : shown < 99.95 ? 1 : 0;
    snprintf(text, NUMBER_TEXT_SIZE, "%.*f%s", decimals, shown, in_seconds ? "s" : "ms");
    return text;
}

// Durations: 0:07, 12:34, 1:02:03, 2d 03:04. Unknown or absurd: "?".
static inline const char *human_duration(double seconds, char text[NUMBER_TEXT_SIZE]) {
    if (!(seconds >= 0 && seconds < 1e9)) { return strcpy(text, "?"); }
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

typedef struct Terminal {
    FILE *stream;
    bool interactive;   // a person looks at it: the bar may redraw its line
    bool bar_shown;     // the cursor stands behind a bar
    int columns;        // width of the screen
    double bar_seconds; // when the bar was last drawn
    double quiet_since; // not interactive: when the latest line was printed; -1: not known yet
} Terminal;

typedef struct Progress {
    const char *what, *unit; // as "validation, " and "batches"; "" and "tokens"
    int64_t done, total;
    double seconds; // that it took so far
    double silence; // not interactive: seconds after which a line is printed
} Progress;

// Whether a person sees what is written to `stream`, on a screen that can go back in a line. Open
// MPI gives every rank a terminal of its own; so under mpirun, their parent, its output decides.
static inline bool terminal_is_watched(FILE *stream) {
    const char *kind = getenv("TERM");
    bool redraws = kind != NULL && kind[0] != '\0' && strcmp(kind, "dumb") != 0;
    return redraws && isatty(fileno(stream)) == 1 &&
           (getenv("OMPI_COMM_WORLD_SIZE") == NULL || parent_prints_to_terminal());
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

// Wipes the bar. Call it before printing anything else to the same stream.
static inline void terminal_clear(Terminal *terminal) {
    if (terminal->bar_shown) { fputs("\r\033[K", terminal->stream); }
    terminal->bar_shown = false;
    terminal->quiet_since = -1;
}

// Redraws the bar in place, "[==>   ]  25 %  validation, 4 of 16 batches, 0:30 left", at most
// ten times a second, or prints a line after the silence. now: clock_seconds().
static inline void terminal_bar(Terminal *terminal, const Progress *progress, double now) {
    bool ends = progress->done >= progress->total,
         recent = terminal->bar_shown && now - terminal->bar_seconds < 0.1;
    if (progress->total <= 0 || (recent && !ends)) { return; }
    if (terminal->quiet_since < 0) { terminal->quiet_since = now; }
    if (!terminal->interactive && now - terminal->quiet_since < progress->silence) { return; }
    static const char line[] = "========================================";
    char text[PROGRESS_TEXT_SIZE];
    char have[NUMBER_TEXT_SIZE], all[NUMBER_TEXT_SIZE], left[NUMBER_TEXT_SIZE];
    double share = fmin(fmax((double)progress->done / progress->total, 0), 1);
    double seconds_left = progress->done > 0 ? progress->seconds * (1 - share) / share : NAN;
    int length =
        snprintf(text, sizeof text, "%3.0f %%  %.40s%.31s of %.31s %.20s, %.31s left", 100 * share,
                 progress->what, human_count(progress->done, have), human_count(progress->total, all),
                 progress->unit, human_duration(seconds_left, left));
    // For brackets, the head and a blank; some terminals wrap at the last column.
    int width = (int)int64_min(terminal->columns - length - 6, 39), done = (int)(share * width);
    if (!terminal->interactive) {
        fprintf(terminal->stream, "%s\n", text);
        terminal->quiet_since = now;
    } else if (width > 3) {
        fprintf(terminal->stream, "\r\033[K[%.*s>%*s] %s", done, line, width - done, "", text);
    } else {
        fprintf(terminal->stream, "\r\033[K%.*s", terminal->columns > 1 ? terminal->columns - 1 : 1, text);
    }
    fflush(terminal->stream);
    terminal->bar_shown = terminal->interactive;
    terminal->bar_seconds = now;
}
