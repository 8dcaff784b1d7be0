// test_ptx.cu: does the machine that executes PTX (machine.h) see mistakes? One at a
// time is made in the PTX of a kernel, which then runs in a process of its own. It must
// be seen: by what the machine reports or, where nothing of that kind is wrong, by a
// wrong result.
#include <sys/wait.h>

#include <fstream>
#include <regex>
#include <string>
#include <vector>

// Behind them, because cmocka makes `fail` a macro.
#include "test/cuda/cuda_kernels.h"

#include "kernels/kernels.h"
#include "test/layer_calls.h"

enum { B = 1, T = 130, HEADS = 1, D = 64, C = HEADS * D, COUNT = B * T * C, SUMS = 97 };

// What a kernel with a mistake is run on. False: a wrong result.
typedef bool Trial(void);

static float *random_floats(size_t count, double stddev, uint64_t seed) {
    Random random = {seed};
    return host_normals(&random, count, stddev);
}

static bool attention_is_right(void) {
    float *qkv = random_floats(3 * COUNT, 0.5, 1), *got = random_floats(COUNT, 1, 2), *want, *sums;
    host_round(qkv, 3 * COUNT, PRECISION_BF16);
    want = (float *)malloc(COUNT * sizeof(float));
    sums = (float *)malloc(B * T * HEADS * sizeof(float));
    Stream cpu = {};
    cpu.pool = thread_pool_create(1, false);
    size_t floats = attention_workspace_floats(T, D, 1, PRECISION_FP32);
    float *workspace = (float *)malloc(floats * sizeof(float));
    call_attention_forward(&cpu, as_reals(want), sums, workspace, as_reals_const(qkv), B, T, C, HEADS, 0);
    Real *device_qkv = device_reals(qkv, 3 * COUNT, PRECISION_BF16), *output = (Real *)device_new(2 * COUNT);
    float *device_sums = (float *)device_new(B * T * HEADS * sizeof(float));
    Stream *stream = cuda_test_stream(PRECISION_BF16);
    call_attention_forward(stream, output, device_sums, NULL, device_qkv, B, T, C, HEADS, 0);
    host_reals(got, output, COUNT, PRECISION_BF16);
    return relative_error(got, want, COUNT) <= 4e-3;
}

static bool sums_are_right(void) {
    enum { BLOCKS = 131 };
    float *partials = random_floats(BLOCKS * SUMS, 1, 3), *got = random_floats(SUMS, 1, 4);
    float *want = (float *)malloc(SUMS * sizeof(float));
    for (int i = 0; i < SUMS; i++) {
        double sum = (double)got[i];
        for (int block = 0; block < BLOCKS; block++) { sum += (double)partials[block * SUMS + i]; }
        want[i] = (float)sum;
    }
    float *device = (float *)device_from_host(partials, BLOCKS * SUMS * sizeof(float)),
          *sums = (float *)device_from_host(got, SUMS * sizeof(float));
    cuda_column_sums_add(cuda_test_stream(PRECISION_FP32), {.first = sums}, 1, device, BLOCKS, SUMS, SUMS);
    device_to_host(got, sums, SUMS * sizeof(float));
    return relative_error(got, want, SUMS) <= 1e-6;
}

typedef struct Mistake {
    const char *what, *kernel; // kernel: how its name begins
    const char *pattern;       // of a line
    int number;                // which line that has it
    const char *change;        // what becomes of the part that has the pattern
    Trial *trial;
    const char *seen; // in what is printed
} Mistake;

#define FORWARD "_Z29cuda_attention_forward_kernelILi64ELi2ELb0ELb0E"
#define SUM_COLUMNS "_Z18column_sums_kernel"
#define RACE "a race in shared memory"
#define WRONG "a wrong result"

static const Mistake mistakes[] = {
    {"nothing", FORWARD, "bar\\.sync", 0, "$&", attention_is_right, "all is well"},
    {"no barrier before the first matrices are loaded", FORWARD, "bar\\.sync\\s+0;", 0, "",
     attention_is_right, "while a copy to it is under way"},
    {"no barrier in the loop over tiles", FORWARD, "bar\\.sync\\s+0;", 1, "", attention_is_right, RACE},
    {"no barrier before results take the place of queries", FORWARD, "bar\\.sync\\s+0;", 2, "",
     attention_is_right, RACE},
    {"no __syncwarp before results are read back", FORWARD, "bar\\.warp\\.sync\\s+-1;", 0, "",
     attention_is_right, RACE},
    {"a copy is not waited for in the loop", FORWARD, "wait_group 0", 1, "wait_group 1", attention_is_right,
     "while a copy to it is under way"},
    {"values are loaded as they lie", FORWARD, "x4\\.trans", 0, "x4", attention_is_right, WRONG},
    {"two operands of a product are exchanged", FORWARD, "(mma\\S+ \\{[^}]*\\}, \\{)(%r\\d+),(%r\\d+)", 5,
     "$1$3,$2", attention_is_right, WRONG},
    {"a matrix is loaded 8 bytes behind its place", FORWARD, "(ldmatrix\\S+ \\{[^}]*\\}, \\[%r\\d+)\\]", 3,
     "$1+8]", attention_is_right, "not aligned"},
    {"a matrix is loaded 32 bytes behind its place", FORWARD, "(ldmatrix\\S+ \\{[^}]*\\}, \\[%r\\d+)\\]", 3,
     "$1+32]", attention_is_right, WRONG},
    {"a result is stored in the row behind its own", FORWARD, "(st\\.global\\.wb\\.v4\\.u32 \\[%rd\\d+)", 0,
     "$1+128", attention_is_right, "global memory"}, // another warp's row, or behind the last one
    {"a result is stored far behind", FORWARD, "(st\\.global\\.wb\\.v4\\.u32 \\[%rd\\d+)", 0, "$1+1048576",
     attention_is_right, "out of bounds of global memory"},
    {"a result is stored between two places", FORWARD, "(st\\.global\\.wb\\.v4\\.u32 \\[%rd\\d+)", 0, "$1+8",
     attention_is_right, "global memory that is not aligned"},
    {"lane and value of an exchange are exchanged", FORWARD, "(shfl\\S+\\s+[^,]+,\\s+)([^,]+),\\s+([^,]+),",
     0, "$1$3, $2,", attention_is_right, WRONG},
    {"an exchange leaves half of the lanes out", FORWARD, "(shfl.*),\\s+%r\\d+;", 0, "$1, 65535;",
     attention_is_right, "a mask without a lane that takes part"},
    {"no barrier before slices are added up", SUM_COLUMNS, "bar\\.sync\\s+0;", 0, "", sums_are_right, RACE},
    {"a sum is not kept for the other warps", SUM_COLUMNS, "st\\.shared\\.f32.*;", 0, "", sums_are_right,
     "nobody wrote what is read from shared memory"},
    {"a sum is stored behind shared memory", SUM_COLUMNS, "(st\\.shared\\.f32\\s+\\[%r\\d+)", 0, "$1+4096",
     sums_are_right, "out of bounds of shared memory"},
};

// The lines of a PTX file, of which one has the mistake.
static std::vector<std::string> lines_with(const Mistake &mistake, const char *path) {
    std::ifstream file(path);
    std::vector<std::string> lines;
    std::regex pattern(mistake.pattern);
    bool inside = false, made = false;
    int number = 0;
    for (std::string line; std::getline(file, line);) {
        size_t entry = line.find(".entry ");
        if (entry != std::string::npos) {
            inside = line.compare(entry + 7, strlen(mistake.kernel), mistake.kernel) == 0;
        }
        if (inside && !made && std::regex_search(line, pattern) && number++ == mistake.number) {
            line = std::regex_replace(line, pattern, mistake.change, std::regex_constants::format_first_only);
            made = true;
        }
        lines.push_back(line);
    }
    if (!made) { fail_msg("%s: the PTX has no such place", mistake.what); }
    return lines;
}

// In a process of its own, because the machine reads PTX once.
static void run_trial(const Mistake &mistake, const std::string &ptx, const std::string &output) {
    if (freopen(output.c_str(), "w", stdout) == NULL) { _exit(1); }
    setenv("PTX_FILE", ptx.c_str(), 1);
    unsetenv("PTX_REPORT");
    puts(mistake.trial() ? "all is well" : WRONG);
    exit(0);
}

static void every_mistake_is_seen(void **state) {
    (void)state;
    std::string scratch = std::string(getenv("PTX_FILE")) + ".mistake", output = scratch + ".out";
    for (const Mistake &mistake : mistakes) {
        std::ofstream changed(scratch);
        for (const std::string &line : lines_with(mistake, getenv("PTX_FILE"))) { changed << line << "\n"; }
        changed.close();
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) { run_trial(mistake, scratch, output); }
        int status = 0;
        waitpid(child, &status, 0);
        std::ifstream file(output);
        std::string printed(std::istreambuf_iterator<char>(file), {});
        bool seen = printed.find(mistake.seen) != std::string::npos;
        bool right = printed.find("PTX:") == std::string::npos && printed.find(WRONG) == std::string::npos;
        printf("%s: %s\n", mistake.what, printed.substr(0, printed.find('\n')).c_str());
        if (!seen || right != (&mistake == mistakes)) {
            fail_msg("%s: exit status %d; %s", mistake.what, WEXITSTATUS(status), printed.c_str());
        }
    }
    remove(scratch.c_str());
    remove(output.c_str());
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_mistake_is_seen)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
