// options_value.h: the value of an option as text, to and from its field of Options.
//
// Nothing is changed silently: a value out of range or an unknown word is refused in one
// sentence that says what is allowed and, where there is one, the nearest valid name.
// What option_print_value writes option_set reads back to the same bits.
#ifndef ACCO_OPTIONS_OPTIONS_VALUE_H
#define ACCO_OPTIONS_OPTIONS_VALUE_H

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>

#include "options/options_table.h"

// ---------------------------------------------------------------------------------------
// From text

static inline void *option_field(const OptionSpec *option, Options *options) {
    return (char *)options + option->offset;
}
static inline const void *option_field_const(const OptionSpec *option, const Options *options) {
    return (const char *)options + option->offset;
}

// "auto or 1 .. 4096", "end, or 1 or more", "fp32, bf16 or fp16", "on or off"; empty for
// texts.
static inline const char *option_allowed(const OptionSpec *option, char text[OPTION_VALUE_SIZE]) {
    int length = 0;
    text[0] = '\0';
    if (option->type == OPTION_SWITCH) {
        snprintf(text, OPTION_VALUE_SIZE, "on or off");
    } else if (option->type == OPTION_CHOICE) {
        for (int i = 0; option->choices[i] != NULL; i++) {
            const char *between = i == 0 ? "" : option->choices[i + 1] == NULL ? " or " : ", ";
            length += snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%s%s", between,
                               option->choices[i]);
        }
    } else if (option->type != OPTION_TEXT) {
        bool no_limit = option->maximum == OPTION_NO_LIMIT;
        if (option->word != NULL) {
            length = snprintf(text, OPTION_VALUE_SIZE, "%s%s or ", option->word, no_limit ? "," : "");
        }
        if (no_limit) {
            snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%.15g or more", option->minimum);
        } else {
            snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%.15g .. %.15g", option->minimum,
                     option->maximum);
        }
    }
    return text;
}

// The sentence for a value that cannot be taken: what was written, what is wrong with it,
// what is allowed.
static inline bool option_refuse(const OptionSpec *option, const char *written, const char *why,
                                 Error *error) {
    char allowed[OPTION_VALUE_SIZE], excerpt[64];
    return error_set(error, "--%s: %s %s; allowed: %s", option->name, text_excerpt(written, excerpt), why,
                     option_allowed(option, allowed));
}

// A decimal number and nothing else: no blanks, no hexadecimal, no nan or inf. `end`
// receives what follows the digits.
static inline bool option_read_real(const char *text, double *value, const char **end) {
    size_t length = strspn(text, "0123456789+-.eE");
    char *stop;
    errno = 0;
    *value = strtod(text, &stop);
    *end = stop;
    return length > 0 && stop != text && stop <= text + length && errno == 0;
}

// A whole number; for counts also 1500k, 1.5M, 2G and 1e6, as long as the result is
// whole. errno tells ERANGE from bad syntax.
static inline bool option_read_integer(const char *text, bool is_count, int64_t *value) {
    static const char suffixes[] = "kKMG";
    static const double factors[] = {1e3, 1e3, 1e6, 1e9};
    const char *end;
    double real;
    if (!is_count) {
        char *stop;
        errno = 0;
        *value = (int64_t)strtoll(text, &stop, 10);
        return !isspace((unsigned char)*text) && stop != text && *stop == '\0' && errno == 0;
    }
    if (!option_read_real(text, &real, &end)) { return false; }
    if (*end != '\0') {
        const char *suffix = strchr(suffixes, *end);
        if (suffix == NULL || end[1] != '\0') { return false; }
        real *= factors[suffix - suffixes];
    }
    double whole = nearbyint(real); // 1.001M is not exact in binary, hence the tolerance
    if (!(fabs(real - whole) <= 1e-9 * fabs(real))) { return false; }
    if (!(fabs(whole) <= OPTION_NO_LIMIT)) {
        errno = ERANGE;
        return false;
    }
    *value = (int64_t)whole;
    return true;
}

// Whether 0 may be written instead of the word: for off, none and end it says the same.
// "auto", "round" and "unset" have no number, because a user who writes --threads 0 may well
// mean something else.
static inline bool option_zero_is_word(const OptionSpec *option) {
    return option->word != NULL && option->word_value == 0 && strcmp(option->word, "auto") != 0 &&
           strcmp(option->word, "round") != 0 && strcmp(option->word, "unset") != 0;
}

// The word first, then the number and its range.
static inline bool option_set_number(const OptionSpec *option, Options *options, const char *text,
                                     Error *error) {
    int64_t integer = 0;
    double real = 0;
    const char *end = "";
    bool is_real = option->type == OPTION_REAL;
    if (option->word != NULL && strcmp(text, option->word) == 0) {
        real = option->word_value;
        integer = (int64_t)option->word_value;
    } else {
        bool valid = is_real ? option_read_real(text, &real, &end) && *end == '\0'
                             : option_read_integer(text, option->type == OPTION_COUNT, &integer);
        double value = is_real ? real : (double)integer;
        bool is_off = value == 0 && option_zero_is_word(option);
        bool in_range = (value >= option->minimum && value <= option->maximum) || is_off;
        if (!valid && errno != ERANGE) {
            return option_refuse(option, text, is_real ? "is not a number" : "is not a whole number", error);
        }
        bool too_large = option->maximum == OPTION_NO_LIMIT && (!valid || value > option->maximum);
        if (too_large && text[0] != '-') {
            return option_refuse(option, text, "is out of range, the largest is 9007199254740992", error);
        }
        if (!valid || !in_range) { return option_refuse(option, text, "is out of range", error); }
    }
    if (is_real) {
        *(double *)option_field(option, options) = real == 0 ? 0 : real; // no negative zero
    } else {
        *(int64_t *)option_field(option, options) = integer;
    }
    return true;
}

static inline bool option_set_choice(const OptionSpec *option, Options *options, const char *text,
                                     Error *error) {
    int count = 0;
    for (; option->choices[count] != NULL; count++) {
        if (strcmp(option->choices[count], text) == 0) {
            *(OptionChoice *)option_field(option, options) = count;
            return true;
        }
    }
    const char *nearest = nearest_name(text, option->choices, count);
    if (nearest == NULL) { return option_refuse(option, text, "is unknown", error); }
    char why[96];
    snprintf(why, sizeof why, "is unknown (did you mean %.32s?)", nearest);
    return option_refuse(option, text, why, error);
}

// Whether a line of the configuration file can hold the text as it stands.
static inline bool option_text_is_plain(const char *text) {
    size_t length = strlen(text);
    bool plain = length > 0 && text[0] != '"' && text[0] != ' ' && text[length - 1] != ' ' &&
                 strchr(text, '#') == NULL;
    for (size_t i = 0; i < length; i++) { plain = plain && (unsigned char)text[i] >= 32 && text[i] != 127; }
    return plain;
}

static inline bool option_set_text(const OptionSpec *option, Options *options, const char *text,
                                   Error *error) {
    size_t length = strlen(text);
    if (length >= sizeof(OptionText)) {
        return error_set(error, "--%s: the text is longer than %zu bytes", option->name,
                         sizeof(OptionText) - 1);
    }
    if ((double)length < option->minimum) {
        return error_set(error, "--%s needs a value: --%s %s", option->name, option->name,
                         option->metavariable);
    }
    json_t *as_json = json_string(text);
    bool can_be_saved = as_json != NULL || option_text_is_plain(text);
    json_decref(as_json);
    if (!can_be_saved) {
        return error_set(
            error, "--%s: a text with control characters, a # or blanks at its ends must be valid UTF-8",
            option->name);
    }
    memset(option_field(option, options), 0, sizeof(OptionText)); // so that equal options are equal bytes
    memcpy(option_field(option, options), text, length);
    return true;
}

// Sets one field from text. The error names the option but not where the text came from.
static inline bool option_set(const OptionSpec *option, Options *options, const char *text, Error *error) {
    if (option->type == OPTION_TEXT) { return option_set_text(option, options, text, error); }
    if (option->type == OPTION_CHOICE) { return option_set_choice(option, options, text, error); }
    if (option->type != OPTION_SWITCH) { return option_set_number(option, options, text, error); }
    bool on = strcmp(text, "on") == 0;
    if (!on && strcmp(text, "off") != 0) {
        return option_refuse(option, text, "is neither on nor off", error);
    }
    *(bool *)option_field(option, options) = on;
    return true;
}

// Every option at its default, the command train.
static inline void options_defaults(Options *options) {
    Error error;
    memset(options, 0, sizeof *options);
    options->command = COMMAND_TRAIN;
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (option_table[i].offset == offsetof(Options, config)) { continue; }
        bool valid = option_set(&option_table[i], options, option_table[i].default_text, &error);
        assert(valid && "a default is outside its own range");
        (void)valid;
    }
}

// Whether two runs have the same value of the option.
static inline bool option_is_same(const OptionSpec *option, const Options *a, const Options *b) {
    const void *left = option_field_const(option, a), *right = option_field_const(option, b);
    switch (option->type) {
    case OPTION_TEXT: return strcmp((const char *)left, (const char *)right) == 0;
    case OPTION_CHOICE: return *(const OptionChoice *)left == *(const OptionChoice *)right;
    case OPTION_SWITCH: return *(const bool *)left == *(const bool *)right;
    case OPTION_REAL: return *(const double *)left == *(const double *)right;
    default: return *(const int64_t *)left == *(const int64_t *)right;
    }
}

// ---------------------------------------------------------------------------------------
// To text

// The shortest decimal that reads back as the same double; 300 and not 3e+02.
static inline void option_print_real(double value, char text[OPTION_VALUE_SIZE]) {
    if (value == nearbyint(value) && fabs(value) < 1e15) {
        snprintf(text, OPTION_VALUE_SIZE, "%.0f", value);
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, OPTION_VALUE_SIZE, "%.*g", digits, value);
        if (strtod(text, NULL) == value) { return; }
    }
}

// Whether the value is the one that the word stands for; only numbers have words.
static inline bool option_has_word_value(const OptionSpec *option, const Options *options) {
    if (option->word == NULL) { return false; }
    const void *field = option_field_const(option, options);
    return (option->type == OPTION_REAL ? *(const double *)field : (double)*(const int64_t *)field) ==
           option->word_value;
}

// Whether a number has the word "unset".
static inline bool option_is_unset(const OptionSpec *option, const Options *options) {
    return option_has_word_value(option, options) && strcmp(option->word, "unset") == 0;
}

// The value of an option as option_set reads it: written into `text`, or of a text the field
// itself.
static inline const char *option_print_value(const OptionSpec *option, const Options *options,
                                             char text[OPTION_VALUE_SIZE]) {
    const void *field = option_field_const(option, options);
    if (option->type == OPTION_TEXT) { return (const char *)field; }
    if (option->type == OPTION_SWITCH) {
        snprintf(text, OPTION_VALUE_SIZE, "%s", *(const bool *)field ? "on" : "off");
    } else if (option->type == OPTION_CHOICE) {
        snprintf(text, OPTION_VALUE_SIZE, "%s", option->choices[*(const OptionChoice *)field]);
    } else if (option_has_word_value(option, options)) {
        snprintf(text, OPTION_VALUE_SIZE, "%s", option->word);
    } else if (option->type == OPTION_REAL) {
        option_print_real(*(const double *)field, text);
    } else {
        snprintf(text, OPTION_VALUE_SIZE, "%lld", (long long)*(const int64_t *)field);
    }
    return text;
}

static inline bool option_is_auto(const OptionSpec *option, const Options *options) {
    char text[OPTION_VALUE_SIZE];
    return strcmp(option_print_value(option, options, text), "auto") == 0;
}

// Whether a choice is left to a measurement that has not been made yet.
static inline bool options_left_to_measure(const Options *options) {
    bool left = false;
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        left = left || (option_table[i].effect == MEASURED && option_is_auto(&option_table[i], options));
    }
    return left;
}

// The word of a choice: options_choice_name(options, &options->wire).
static inline const char *options_choice_name(const Options *options, const OptionChoice *field) {
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        if (option->type == OPTION_CHOICE && option_field_const(option, options) == field) {
            return option->choices[*field];
        }
    }
    assert(!"a choice that the table does not have");
    return "";
}

#endif
