// nvml_stand_in.c: a library that stands in for NVIDIA's management library, with one
// GPU, that of the emulator. NVML_READING in the environment is what it reads: the clock
// and the highest clock in MHz, milliwatts, and the reasons as a number, "1410 1980
// 698500 4". Without it the library does not start. 0 stands for success, as in nvml.h.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNKNOWN = 999, CLOCK_OF_MULTIPROCESSORS = 1 };

static unsigned long long reading(int place) {
    unsigned long long values[4] = {0, 0, 0, 0};
    const char *text = getenv("NVML_READING");
    if (text != NULL) {
        (void)sscanf(text, "%llu %llu %llu %llu", &values[0], &values[1], &values[2], &values[3]);
    }
    return values[place];
}

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device);
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *megahertz);
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *megahertz);
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts);
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits);

int nvmlInit_v2(void) { return getenv("NVML_READING") != NULL ? OK : UNKNOWN; }
int nvmlShutdown(void) { return OK; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    static int gpu;
    *device = &gpu;
    return strcmp(bus, "0000:00:00.0") == 0 ? OK : UNKNOWN;
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *megahertz) {
    *megahertz = (unsigned)reading(0);
    return device != NULL && kind == CLOCK_OF_MULTIPROCESSORS ? OK : UNKNOWN;
}

int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *megahertz) {
    *megahertz = (unsigned)reading(1);
    return device != NULL && kind == CLOCK_OF_MULTIPROCESSORS ? OK : UNKNOWN;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = (unsigned)reading(2);
    return device != NULL && *milliwatts > 0 ? OK : UNKNOWN;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    *bits = reading(3);
    return device != NULL ? OK : UNKNOWN;
}
