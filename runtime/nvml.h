// nvml.h: a GPU's clock and power, and what reduces the clock, from NVIDIA's library.
//
// The library comes with the driver. It is opened when a run begins and is not linked, so the
// program also runs without it; then nothing is known. Only the few functions that are used
// are declared here, as nvml.h of the CUDA toolkit declares them.
#ifndef ACCO_RUNTIME_NVML_H
#define ACCO_RUNTIME_NVML_H

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct Nvml {
    void *library, *device; // NULL: nothing is known
    bool started;           // the library must be shut down
    int (*clock)(void *device, int kind, unsigned *megahertz);
    int (*highest_clock)(void *device, int kind, unsigned *megahertz);
    int (*power)(void *device, unsigned *milliwatts);
    int (*reasons)(void *device, unsigned long long *bits);
} Nvml;

// NAN, and no reasons: not known.
typedef struct NvmlReading {
    double clock, highest_clock; // MHz of the multiprocessors
    double watts;
    double reasons_as_number; // for the log; NAN: not known
    uint64_t reasons;         // those of NVML_REASONS why the clock is not the highest one
} NvmlReading;

// The reasons that slow a run down, and not idleness or what an administrator has set.
static const struct {
    uint64_t bit;
    const char *text;
} NVML_REASONS[] = {{0x04, "the power limit"},
                    {0x08, "slowdown by hardware"},
                    {0x20, "heat"},
                    {0x40, "heat, by hardware"},
                    {0x80, "the power supply's brake"}};

enum { NVML_REASON_COUNT = sizeof NVML_REASONS / sizeof NVML_REASONS[0], NVML_CLOCK_OF_MULTIPROCESSORS = 1 };

// Sets target, a pointer to a function, to the function `name`. False: the library has none.
static inline bool nvml_find(void *library, const char *name, void *target) {
    void *found = dlsym(library, name);
    memcpy(target, &found, sizeof found);
    return found != NULL;
}

static inline void nvml_close(Nvml *nvml) {
    int (*shutdown)(void) = NULL;
    if (nvml->started && nvml_find(nvml->library, "nvmlShutdown", &shutdown)) { (void)shutdown(); }
    if (nvml->library != NULL) { dlclose(nvml->library); }
    memset(nvml, 0, sizeof *nvml);
}

// bus: the GPU's PCI address (Gpu::bus). Nothing is known if the library or the GPU is not
// found, or if the library is too old.
static inline void nvml_open(Nvml *nvml, const char *bus) {
    int (*start)(void) = NULL, (*find)(const char *bus, void **device) = NULL;
    memset(nvml, 0, sizeof *nvml);
    nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    bool good = nvml->library != NULL && nvml_find(nvml->library, "nvmlInit_v2", &start) &&
                nvml_find(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2", &find) &&
                nvml_find(nvml->library, "nvmlDeviceGetClockInfo", &nvml->clock) &&
                nvml_find(nvml->library, "nvmlDeviceGetMaxClockInfo", &nvml->highest_clock) &&
                nvml_find(nvml->library, "nvmlDeviceGetPowerUsage", &nvml->power) &&
                nvml_find(nvml->library, "nvmlDeviceGetCurrentClocksThrottleReasons", &nvml->reasons);
    nvml->started = good && start() == 0;
    if (!nvml->started || find(bus, &nvml->device) != 0) {
        nvml->device = NULL;
        nvml_close(nvml);
    }
}

// The state at this moment; the power is the mean over a fraction of a second.
static inline NvmlReading nvml_read(const Nvml *nvml) {
    NvmlReading reading = {.clock = NAN, .highest_clock = NAN, .watts = NAN, .reasons_as_number = NAN};
    unsigned clock = 0, highest = 0, milliwatts = 0;
    unsigned long long reasons = 0;
    if (nvml->device == NULL) { return reading; }
    if (nvml->clock(nvml->device, NVML_CLOCK_OF_MULTIPROCESSORS, &clock) == 0) { reading.clock = clock; }
    if (nvml->highest_clock(nvml->device, NVML_CLOCK_OF_MULTIPROCESSORS, &highest) == 0) {
        reading.highest_clock = highest;
    }
    if (nvml->power(nvml->device, &milliwatts) == 0) { reading.watts = milliwatts / 1e3; }
    if (nvml->reasons(nvml->device, &reasons) == 0) {
        for (int i = 0; i < NVML_REASON_COUNT; i++) { reading.reasons |= reasons & NVML_REASONS[i].bit; }
        reading.reasons_as_number = (double)reasons;
    }
    return reading;
}

#endif
