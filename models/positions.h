// positions.h: rotary positions: the angles by which queries and keys are turned, and how a
// config.json says so.
//
//   angle of position t, pair i: t f,  f = theta^(-2i/D)      as fp32, which transformers computes with
//
//   linear    f / factor
//   dynamic   f, for no sequence is longer than the model's positions
//   llama3    f where its wavelength 2 pi / f is below original / high, f / factor where it is above
//             original / low; between them a mean of both, weighted by original / wavelength
//   yarn      (1 - r) f + r f / factor with a ramp r over the pairs, from the one that turns high times
//             in the original positions to the one that turns low times; cosines and sines grow
//
// Files of transformers 4 have "rope_theta" and "rope_scaling", files of 5 have "rope_parameters".
// Both are read and written.
#pragma once

#include "models/config_json.h"

static const char *const ROTARY_KINDS[] = {"default", "linear", "dynamic", "llama3", "yarn"};
enum { ROTARY_KIND_COUNT = sizeof ROTARY_KINDS / sizeof ROTARY_KINDS[0] };

// A number of "rope_parameters", which the kinds from `first` to `last` have.
typedef struct RotaryKey {
    const char *name;
    size_t member;
    int first, last;
    double fallback; // where it is absent; below 0: it must be there
} RotaryKey;

#define ROTARY_MEMBER(name) offsetof(RotaryPositions, name)

static const RotaryKey ROTARY_KEYS[] = {
    {"rope_theta", ROTARY_MEMBER(theta), ROTARY_DEFAULT, ROTARY_YARN, 1e4},
    {"factor", ROTARY_MEMBER(factor), ROTARY_LINEAR, ROTARY_YARN, -1},
    {"original_max_position_embeddings", ROTARY_MEMBER(original), ROTARY_LLAMA3, ROTARY_YARN, 0},
    {"low_freq_factor", ROTARY_MEMBER(low), ROTARY_LLAMA3, ROTARY_LLAMA3, -1},
    {"high_freq_factor", ROTARY_MEMBER(high), ROTARY_LLAMA3, ROTARY_LLAMA3, -1},
    {"beta_slow", ROTARY_MEMBER(low), ROTARY_YARN, ROTARY_YARN, 1},
    {"beta_fast", ROTARY_MEMBER(high), ROTARY_YARN, ROTARY_YARN, 32},
    {"attention_factor", ROTARY_MEMBER(attention), ROTARY_YARN, ROTARY_YARN, 0},
    {"mscale", ROTARY_MEMBER(mscale), ROTARY_YARN, ROTARY_YARN, 0},
    {"mscale_all_dim", ROTARY_MEMBER(mscale_all_dim), ROTARY_YARN, ROTARY_YARN, 0},
};
enum { ROTARY_KEY_COUNT = sizeof ROTARY_KEYS / sizeof ROTARY_KEYS[0] };

// By which yarn multiplies cosines and sines.
static inline double positions_growth(const RotaryPositions *rotary) {
    bool two = rotary->mscale > 0 && rotary->mscale_all_dim > 0;
    double grown = rotary->factor > 1 ? 0.1 * log(rotary->factor) : 0;
    if (rotary->kind != ROTARY_YARN) { return 1; }
    if (rotary->attention > 0) { return rotary->attention; }
    return two ? (grown * rotary->mscale + 1) / (grown * rotary->mscale_all_dim + 1) : grown + 1;
}

// The pair that turns `times` times in the original positions.
static inline double positions_pair(const RotaryPositions *rotary, int D, double times) {
    return D * log(rotary->original / (times * 2 * M_PI)) / (2 * log(rotary->theta));
}

static inline float positions_frequency(const RotaryPositions *rotary, int D, int i) {
    float power = (float)pow(rotary->theta, (double)((float)(2 * i) / (float)D)), f = 1.0f / power,
          factor = (float)rotary->factor;
    if (rotary->kind == ROTARY_LINEAR) { return f / factor; }
    if (rotary->kind == ROTARY_LLAMA3) {
        double wave = (double)((float)(2 * M_PI) / f);
        float s = (float)((rotary->original / wave - rotary->low) / (rotary->high - rotary->low));
        return wave < rotary->original / rotary->high  ? f
               : wave > rotary->original / rotary->low ? f / factor
                                                       : (1 - s) * f / factor + s * f;
    }
    if (rotary->kind == ROTARY_YARN) {
        double low = positions_pair(rotary, D, rotary->high), high = positions_pair(rotary, D, rotary->low);
        low = fmax(rotary->fractional ? low : floor(low), 0);
        high = fmin(rotary->fractional ? high : ceil(high), D - 1);
        high = low == high ? high + 0.001 : high;
        float ramp = (float)fmin(fmax((i - low) / (high - low), 0), 1);
        return 1 / (factor * power) * ramp + f * (1 - ramp);
    }
    return f;
}

// turns (T, D): of positions from `first` on, the cosines of their angles, then the sines.
static inline void positions_turn(const ModelConfig *config, int first, int T, float *turns) {
    int D = model_head_size(config), half = D / 2;
    double growth = positions_growth(&config->rotary);
    for (int i = 0; i < half; i++) {
        float f = positions_frequency(&config->rotary, D, i);
        for (int t = 0; t < T; t++) {
            double angle = (double)((float)(first + t) * f);
            turns[t * D + i] = (float)(growth * cos(angle));
            turns[t * D + half + i] = (float)(growth * sin(angle));
        }
    }
}

// `config` has its number of positions already.
static inline bool positions_read(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    const json_t *scaling = json_object_get(root, "rope_scaling"),
                 *theta = json_object_get(root, "rope_theta");
    const char *key = json_object_size(scaling) > 0 ? "rope_scaling" : "rope_parameters";
    const json_t *given = json_object_get(root, key), *word = json_object_get(given, "rope_type"),
                 *part = json_object_get(given, "partial_rotary_factor");
    RotaryPositions *rotary = &config->rotary;
    if (word == NULL) { word = json_object_get(given, "type"); }
    if (part == NULL) { part = json_object_get(root, "partial_rotary_factor"); }
    const char *kind = word == NULL ? ROTARY_KINDS[0] : json_is_string(word) ? json_string_value(word) : "";
    memset(rotary, 0, sizeof *rotary);
    while (rotary->kind < ROTARY_KIND_COUNT && strcmp(kind, ROTARY_KINDS[rotary->kind]) != 0) {
        rotary->kind++;
    }
    if (rotary->kind == ROTARY_KIND_COUNT) {
        return error_set(error,
                         "%s: \"%s\": \"rope_type\" is \"%.40s\" and must be \"default\", \"linear\", "
                         "\"dynamic\", \"llama3\" or \"yarn\"",
                         path, key, kind);
    }
    if (part != NULL && !json_is_null(part) && json_number_value(part) != 1) {
        return error_set(error, "%s: \"partial_rotary_factor\" must be 1", path);
    }
    rotary->fractional = json_is_false(json_object_get(given, "truncate"));
    for (const RotaryKey *row = ROTARY_KEYS; row < ROTARY_KEYS + ROTARY_KEY_COUNT; row++) {
        if (rotary->kind < row->first || rotary->kind > row->last) { continue; }
        const json_t *item = json_object_get(given, row->name);
        if (item == NULL && row == ROTARY_KEYS) { item = theta; }
        bool absent = item == NULL || json_is_null(item);
        double number = absent ? row->fallback : config_json_round(json_number_value(item));
        *(double *)((char *)rotary + row->member) = number;
        if (number < 0 || (!absent && !(number > 0 && number <= 1e12))) {
            return error_set(error, "%s: \"%s\" must be a number above 0", path, row->name);
        }
    }
    rotary->original = floor(rotary->original);
    if (rotary->original < 1 && (rotary->kind == ROTARY_LLAMA3 || rotary->kind == ROTARY_YARN)) {
        rotary->original = config->positions;
    }
    return (rotary->theta > 1 || error_set(error, "%s: \"rope_theta\" must be above 1", path)) &&
           (rotary->kind != ROTARY_LLAMA3 || rotary->high > rotary->low ||
            error_set(error, "%s: \"high_freq_factor\" must be above \"low_freq_factor\"", path));
}

static inline void positions_write(json_t *root, const ModelConfig *config) {
    const RotaryPositions *rotary = &config->rotary;
    json_t *parameters = json_pack("{s:s}", "rope_type", ROTARY_KINDS[rotary->kind]);
    for (const RotaryKey *row = ROTARY_KEYS; row < ROTARY_KEYS + ROTARY_KEY_COUNT; row++) {
        double number = *(const double *)((const char *)rotary + row->member);
        if (rotary->kind < row->first || rotary->kind > row->last || number == 0) { continue; }
        json_object_set_new(parameters, row->name,
                            row->member == ROTARY_MEMBER(original) ? json_integer((json_int_t)number)
                                                                   : json_real(number));
    }
    if (rotary->fractional) { json_object_set_new(parameters, "truncate", json_false()); }
    json_object_set_new(root, "rope_theta", json_real(rotary->theta));
    json_object_set_new(root, "rope_scaling",
                        rotary->kind == ROTARY_DEFAULT ? json_null() : json_deep_copy(parameters));
    json_object_set_new(root, "rope_parameters", parameters);
}
