// config_json.h: a Hugging Face config.json, read and written by the keys of a family's page.
//
// Keys that no page has are ignored: they belong to other heads than a language model's
// (classifier_dropout, summary_...) or change nothing here (reorder_and_upcast_attn: scores are
// fp32 in any case). Dropout is read, but not used: the published files ask for it, and nobody
// who fine-tunes them does.
#pragma once

#include "models/model.h"

typedef enum ConfigKind {
    CONFIG_COUNT,   // a whole number from 1 to `most`
    CONFIG_FLAG,    // true unless it is false
    CONFIG_NUMBER,  // above 0, at most 0.1
    CONFIG_DROPOUT, // the largest of all rows counts
    CONFIG_GELU,    // a name of the tanh form of GELU, which has two
    CONFIG_SILU,    // "silu"
    CONFIG_TRUE,    // refused if false, for the reason `other`
    CONFIG_ABSENT,  // refused unless it is absent, null or false, for the reason `other`
    CONFIG_FIXED    // no key: a flag that is always `fallback`
} ConfigKind;

typedef struct ConfigKey {
    const char *name;
    const char *other; // by which transformers knows it, too; or NULL
    ConfigKind kind;
    size_t member; // MEMBER()
    int most;
    double fallback; // where the key is absent, a count also where it is null
} ConfigKey;

#define MEMBER(name) offsetof(ModelConfig, name)

enum {
    CONFIG_NEEDED = 0, // fallback of a count: none
    CONFIG_OPEN = -1   // 0, and accept() fills it in
};

// A number with the digits that a config.json gets.
static inline double config_json_round(double number) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.9g", number);
    return strtod(digits, NULL);
}

static inline bool config_json_read_count(const json_t *item, const char *path, const char *name,
                                          const ConfigKey *key, int *value, Error *error) {
    if ((item == NULL || json_is_null(item)) && key->fallback != CONFIG_NEEDED) {
        *value = key->fallback > 0 ? (int)key->fallback : 0;
        return true;
    }
    if (item == NULL) { return error_set(error, "%s: \"%s\" is not given", path, name); }
    *value = (int)json_integer_value(item);
    return (json_is_integer(item) && json_integer_value(item) >= 1 &&
            json_integer_value(item) <= key->most) ||
           error_set(error, "%s: \"%s\" must be a whole number from 1 to %d", path, name, key->most);
}

static inline bool config_json_read_key(const json_t *root, const char *path, const ConfigKey *key,
                                        ModelConfig *config, Error *error) {
    bool other = json_object_get(root, key->name) == NULL && key->kind <= CONFIG_SILU &&
                 json_object_get(root, key->other) != NULL;
    const char *name = other ? key->other : key->name, *must = "a number above 0, at most 0.1";
    const json_t *item = json_object_get(root, name);
    double number = item != NULL ? json_number_value(item) : key->fallback;
    void *member = (char *)config + key->member;
    bool good = true;
    if (key->kind == CONFIG_COUNT) {
        return config_json_read_count(item, path, name, key, (int *)member, error);
    }
    if (key->kind == CONFIG_FLAG || key->kind == CONFIG_FIXED) {
        bool given = key->kind == CONFIG_FLAG && item != NULL && !json_is_null(item);
        *(bool *)member = given ? !json_is_false(item) : key->fallback > 0;
    }
    if (key->kind == CONFIG_DROPOUT) { *(double *)member = fmax(*(double *)member, number); }
    if (key->kind == CONFIG_NUMBER) {
        *(double *)member = number = config_json_round(number);
        good = (float)number > 0.0f && number <= 0.1;
    } else if (key->kind == CONFIG_GELU && item != NULL) {
        const char *word = json_string_value(item);
        good = word != NULL && (strcmp(word, "gelu_new") == 0 || strcmp(word, "gelu_pytorch_tanh") == 0);
        must = "\"gelu_new\" or \"gelu_pytorch_tanh\"";
    } else if (key->kind == CONFIG_SILU && item != NULL) {
        good = json_is_string(item) && strcmp(json_string_value(item), "silu") == 0;
        must = "\"silu\"";
    } else if (key->kind == CONFIG_ABSENT && item != NULL && !json_is_null(item) && !json_is_false(item)) {
        return error_set(error, "%s: \"%s\" is not supported: %s", path, name, key->other);
    } else if (key->kind == CONFIG_TRUE && json_is_false(item)) {
        return error_set(error, "%s: \"%s\" must be true: %s", path, name, key->other);
    }
    return good || error_set(error, "%s: \"%s\" must be %s", path, name, must);
}

// Fills all of `config` but family, which is set, and name.
static inline bool config_json_read(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    for (const ConfigKey *key = config->family->keys; key->name != NULL; key++) {
        if (!config_json_read_key(root, path, key, config, error)) { return false; }
    }
    return config->family->accept(root, path, config, error);
}

// Fills in the channels of an MLP that are left open. Heads must divide the model's channels;
// `channels` and `heads` are the names of these keys.
static inline bool config_json_accept_heads(const char *path, const char *channels, const char *heads,
                                            ModelConfig *config, Error *error) {
    if (config->mlp_channels == 0) { config->mlp_channels = 4 * config->channels; }
    return config->channels % config->heads == 0 ||
           error_set(error, "%s: %s %d must be a multiple of %s %d", path, channels, config->channels, heads,
                     config->heads);
}

// Sets all members that are no counts as a config.json without them would.
static inline void config_json_fill(ModelConfig *config) {
    for (const ConfigKey *key = config->family->keys; key->name != NULL; key++) {
        if (key->kind != CONFIG_COUNT) { config_json_read_key(NULL, "", key, config, NULL); }
    }
}

// What config_json_read reads, and what transformers asks for besides. hf_model.h adds the rest.
static inline json_t *config_json_write(const ModelConfig *config) {
    json_t *root = json_pack("{s:f, s:b}", "initializer_range", 0.02, "use_cache", 1);
    for (const ConfigKey *key = config->family->keys; key->name != NULL; key++) {
        const void *member = (const char *)config + key->member;
        if (key->kind >= CONFIG_ABSENT) { continue; }
        json_object_set_new(root, key->name,
                            key->kind == CONFIG_COUNT  ? json_integer(*(const int *)member)
                            : key->kind == CONFIG_FLAG ? json_boolean(*(const bool *)member)
                            : key->kind == CONFIG_GELU ? json_string("gelu_new")
                            : key->kind == CONFIG_SILU ? json_string("silu")
                            : key->kind == CONFIG_TRUE ? json_true()
                                                       : json_real(*(const double *)member));
    }
    config->family->write(root, config);
    return root;
}
