// summary.h: what a run says when it ends. Rank 0 only.
#ifndef ACCO_PROGRAM_SUMMARY_H
#define ACCO_PROGRAM_SUMMARY_H

#include "program/run.h"
#include "runtime/names.h"

#define WAITING_SHARE 0.1 // of the time: more is worth a line at the end

// Prints and logs how training ended. fingerprint: of the parameters, from
// check_replicas. exposed: seconds in which a rank only waited for communication, the mean.
// saved: whether the end is on disk.
static inline void print_end(Run *run, uint64_t fingerprint, double exposed, bool saved) {
    long long commits = (long long)run->scheduler.optimizer.commits;
    const Reports *reports = &run->reports;
    bool stopped = run->scheduler.wishes.stop_agreed;
    double seconds = training_seconds(&run->clock),
           tokens = run->scheduler.gradients_done * reports->micro_batch_tokens;
    double waiting = exposed / (seconds - run->clock.before); // share of this part of the run
    double planned = (double)run->arena.bytes, used = (double)arena_resident_bytes(&run->arena);
    double flops = tokens / seconds * reports->token_flops;
    char word[4 * RUN_PATH_SIZE + 3], share[48] = "", print[32];
    snprintf(print, sizeof print, "%016llx", (unsigned long long)fingerprint);
    text_for_shell(run->directory, word, sizeof word);
    terminal_clear(&run->terminal);
    if (run->nothing_left) {
        printf("finished   nothing is left to do: this run had its %.0f tokens; with a larger --tokens it "
               "goes on\n",
               tokens);
    } else {
        if (reports->peak_flops > 0) {
            snprintf(share, sizeof share, ", %.1f %% of the peak", 100 * flops / reports->peak_flops);
        }
        printf("\ntrained    %lld %ss, %.0f tokens in %.1f s: %.0f tokens/s, %.1f GFLOP/s over all "
               "ranks%s\n",
               commits, step_name(run->rule), tokens, seconds, tokens / seconds, flops / 1e9, share);
    }
    if (waiting > WAITING_SHARE) {
        printf("network    %.0f %% of the time ranks only waited for communication; train_gpt plan --like %s "
               "says what would be faster\n",
               100 * waiting, word);
    }
    if (!isnan(reports->validation)) {
        printf("loss       %.4f nats per token on text it has not seen", reports->validation);
        if (isfinite(reports->perfect_validation)) { // known where the text comes from a grammar
            printf("; the best possible, knowing the grammar, is %.4f", reports->perfect_validation);
        }
        printf("\n");
    }
    printf("memory     planned %.1f MB, used %.1f MB (%+.2f %%)\n", planned / 1e6, used / 1e6,
           100 * (used - planned) / planned);
    printf("parameters fingerprint %s, the same on every rank\n", print);
    report_event(&run->reports,
                 json_pack("{s:s, s:s, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:s}", "event", "end", "reason",
                           stopped ? "asked to stop" : "done", "commit", (json_int_t)commits, "tokens",
                           (json_int_t)tokens, "seconds", log_real(seconds), "tokens_per_second",
                           log_real(tokens / seconds), "exposed_share", log_real(waiting), "planned_bytes",
                           (json_int_t)planned, "used_bytes", (json_int_t)used, "parameters_fingerprint",
                           print));
    if (!stopped) { return; }
    printf("stopped    because it was asked to");
    if (!run->saving.times.never) {
        printf("; it goes on with --out %s --resume auto%s", word,
               saved ? "" : ", from an earlier checkpoint");
    }
    printf("\n");
}

// The files that the run has written.
static inline void print_files(const Run *run) {
    char word[4 * RUN_PATH_SIZE + 3];
    const char *directory = run->directory;
    if (run->saving.times.never) {
        printf("not saved  because of --save-every never: there is no checkpoint\n");
    }
    printf("\nlog        %s/log.jsonl\ncurves     %s/progress.tsv (scripts/plot %s makes "
           "%s/plot.html)\nsettings   %s/config.txt (train_gpt --config it)\n",
           directory, directory, text_for_shell(directory, word, sizeof word), directory, directory);
    if (run->options.trace[0] != '\0' && !run->trace_is_lost) {
        printf("trace      %s (https://ui.perfetto.dev opens it)\n", run->options.trace);
    }
}

// What the run should have left and did not. saved: whether its end is on disk.
static inline void print_missing(int64_t lost_lines, bool saved) {
    if (lost_lines > 0) {
        fprintf(stderr,
                "train_gpt: %lld line%s of the log or of progress.tsv could not be written: the reason is "
                "printed above\n",
                (long long)lost_lines, lost_lines == 1 ? "" : "s");
    }
    if (!saved) {
        fprintf(stderr, "train_gpt: the end of this run is not on disk: the reason is printed above\n");
    }
}

#endif
