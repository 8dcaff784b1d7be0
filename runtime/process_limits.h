// process_limits.h: how much memory and how many cores this process may use.
//
// Containers, Slurm and systemd limit both by control groups: all from the process's own to the
// root hold. Version 2 has one tree, version 1 one for each controller. What cannot be read does
// not limit. Decisions are functions of paths and texts, so that tests can put them on any machine.
#pragma once

#include <limits.h>

#include "runtime/numbers.h"
#include "runtime/system.h"

enum { CORE_LIST_SIZE = 4096, MOST_CORES = 8192 }; // Linux has no more

typedef struct GroupLimits {
    size_t memory;            // bytes that the process may still take; SIZE_MAX: no limit
    double cores;             // the share of time, as a number of cores; INFINITY: no limit
    char set[CORE_LIST_SIZE]; // the cores that it may have, as the kernel lists them; empty: no limit
} GroupLimits;

// text <- what follows `row` in a line of the file `name` of a directory; false: there is none.
static inline bool group_line(const char *directory, const char *name, const char *row, char *text,
                              int size) {
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/%s", directory, name) < (int)sizeof path &&
           file_read_line(path, row, text, size);
}

// The number that stands there; false: there is none, or it is "max".
static inline bool group_number(const char *directory, const char *name, const char *row, double *value) {
    char text[128], *end = text;
    if (group_line(directory, name, row, text, sizeof text)) { *value = strtod(text, &end); }
    return end != text;
}

// Lowers the limits to one directory's. Pages of files count as free: the kernel drops them where
// memory is wanted, also those that were read more than once (active).
static inline void group_limit(const char *directory, GroupLimits *limits) {
    char text[128];
    double most = 0, used = 0, active = 0, inactive = 0, quota = 0, period = 100000;
    bool second = group_number(directory, "memory.max", "", &most);
    if (second || group_number(directory, "memory.limit_in_bytes", "", &most)) {
        group_number(directory, second ? "memory.current" : "memory.usage_in_bytes", "", &used);
        group_number(directory, "memory.stat", second ? "active_file " : "total_active_file ", &active);
        group_number(directory, "memory.stat", second ? "inactive_file " : "total_inactive_file ", &inactive);
        double left = fmax(most - fmax(used - active - inactive, 0), 0);
        if (left < (double)limits->memory) { limits->memory = (size_t)left; }
    }
    bool shared = (group_line(directory, "cpu.max", "", text, sizeof text) &&
                   sscanf(text, "%lf %lf", &quota, &period) == 2) ||
                  (group_number(directory, "cpu.cfs_quota_us", "", &quota) &&
                   group_number(directory, "cpu.cfs_period_us", "", &period));
    if (shared && quota > 0 && period > 0) { limits->cores = fmin(limits->cores, quota / period); }
    // A group's cores are among those of the groups around it, which come later.
    static const char *const sets[] = {"cpuset.cpus.effective", "cpuset.effective_cpus"};
    for (int i = 0; i < 2 && limits->set[0] == '\0'; i++) {
        group_line(directory, sets[i], "", limits->set, sizeof limits->set);
        limits->set[strcspn(limits->set, "\n")] = '\0';
    }
}

// self: /proc/self/cgroup, whose lines are NUMBER:CONTROLLERS:PATH. root: /sys/fs/cgroup.
static inline GroupLimits group_limits(const char *self, const char *root) {
    GroupLimits limits = {SIZE_MAX, INFINITY, ""};
    char line[PATH_MAX], directory[PATH_MAX];
    FILE *file = fopen(self, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':'),
             *path = controllers == NULL ? NULL : strchr(++controllers, ':');
        if (path == NULL) { continue; }
        *path++ = '\0';
        path[strcspn(path, "\n")] = '\0';
        // Directories of version 1 have the names of their controllers, or links that have.
        int base = snprintf(directory, sizeof directory, "%s%s%s", root, *controllers == '\0' ? "" : "/",
                            controllers);
        if (base + (int)strlen(path) >= (int)sizeof directory) { continue; }
        strcpy(directory + base, path);
        for (char *end = directory + strlen(directory); end != NULL; end = strrchr(directory + base, '/')) {
            *end = '\0';
            group_limit(directory, &limits);
        }
    }
    if (file != NULL) { fclose(file); }
    group_limit(root, &limits); // of a container that hides where it is
    return limits;
}

static inline GroupLimits process_limits(void) { return group_limits("/proc/self/cgroup", "/sys/fs/cgroup"); }

// Bytes to be had without swapping, within the control groups' limits; 0: not known.
static inline size_t memory_available(void) {
    char kilobytes[128];
    bool known = file_read_line("/proc/meminfo", "MemAvailable:", kilobytes, sizeof kilobytes);
    size_t host = known ? (size_t)strtoull(kilobytes, NULL, 10) * 1024 : 0;
    return known ? size_max(size_min(host, process_limits().memory), 1) : 0; // 1: nothing is left
}

// Whether a list of the Linux kernel, such as "0-3,8,10-11", names this core.
static inline bool core_list_has(const char *list, long core) {
    for (const char *at = list; at != NULL && *at != '\0'; at = strchr(at + 1, ',')) {
        long first = -1, last = -1;
        int ends = sscanf(at + (*at == ','), "%ld-%ld", &first, &last);
        if (ends > 0 && first <= core && core <= (ends > 1 ? last : first)) { return true; }
    }
    return false;
}

// list <- the kernel's list of the hardware threads that share a core with this one, itself
// included; false: it does not say.
typedef bool (*SiblingLookup)(long core, char *list, int size);

// How many physical cores two lists have in common: two hardware threads of one core are one,
// because matrix products on both together are no faster than on one.
static inline int core_lists_physical(const char *one, const char *other, SiblingLookup lookup) {
    char siblings[256];
    int count = 0;
    for (long core = 0; core < MOST_CORES; core++) {
        if (!core_list_has(one, core) || !core_list_has(other, core)) { continue; }
        long first = lookup(core, siblings, sizeof siblings) ? 0 : core; // of both, among the siblings
        while (first < core && !(core_list_has(siblings, first) && core_list_has(one, first) &&
                                 core_list_has(other, first))) {
            first++;
        }
        count += first == core;
    }
    return count;
}

static inline bool core_siblings(long core, char *list, int size) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%ld/topology/thread_siblings_list", core);
    return file_read_line(path, "", list, size);
}

// Physical cores that this process may run on.
static inline int process_cores(void) {
    char mask[CORE_LIST_SIZE];
    bool known = file_read_line("/proc/self/status", "Cpus_allowed_list:", mask, sizeof mask);
    int cores = known ? core_lists_physical(mask, mask, core_siblings) : 0;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? cores : online < 1 ? 1 : (int)online;
}

// A share of the time of 1.5 cores keeps two threads busy for most of it.
static inline int cores_within_share(int cores, double share) {
    if (ceil(share) < cores) { return (int)ceil(share); }
    return cores < 1 ? 1 : cores;
}

// Physical cores of the node that all ranks may use: those online, or fewer if control groups limit
// them (a core set, a share of time). Reads the kernel's list, because sysconf of some C libraries
// already counts only the affinity mask.
static inline int machine_cores(void) {
    char online[CORE_LIST_SIZE];
    GroupLimits limits = process_limits();
    bool known = file_read_line("/sys/devices/system/cpu/online", "", online, sizeof online);
    const char *allowed = limits.set[0] != '\0' ? limits.set : online;
    int cores = known ? core_lists_physical(online, allowed, core_siblings) : 0;
    if (cores < 1) { cores = (int)sysconf(_SC_NPROCESSORS_ONLN); }
    return cores_within_share(cores, limits.cores);
}
