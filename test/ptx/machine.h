// machine.h: a machine that executes PTX, the code which nvcc makes of kernels/cuda. The
// emulator (test/simt) runs the kernels' C++ with stand-ins for every instruction that
// is written as assembly; here nvcc's own instructions run, launched by the program's
// own host code, which is linked with the machine in the place of the CUDA runtime.
//
//   parse.h         PTX text -> kernels of decoded instructions
//   arithmetic.h    the instructions that each lane executes by itself
//   memory.h        loads, stores and asynchronous copies; what is wrong with an access
//   warp.h          the instructions that the lanes of a warp execute together
//   execute.h       warps and blocks, in an order that no kernel may rely on
//   runtime.h       the functions of the CUDA runtime; a launch has ended when it returns
//
// Lanes. A warp is a set of groups of lanes with the same program counter. A branch
// splits a group; groups that meet join. What PTX defines for a whole warp waits until
// all lanes of its mask are there; nothing else orders lanes. In the second order groups
// are also split at random.
//
// It reports: accesses out of bounds or not aligned; reads of what nobody wrote;
// accesses of two threads to the same place, one of them a write, which neither a
// barrier of the block nor one of the warp orders; shared memory that is touched while
// an asynchronous copy is under way, and copies nobody waited for; lanes that are
// missing where a warp does something together, and warps at different barriers;
// launches beyond the limits of the hardware. A program that is linked with it ends with
// exit code 3 then.
//
// It does not know: ptxas and what it makes of PTX; time and caches; the weaker orders
// of the memory model; streams that run at the same time. Tensor cores add exactly and
// cut towards zero. Functions that PTX calls approximate are off by a unit or two in the
// last place, always the same for the same input.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

// Shared memory does not begin at address 0, so that a null pointer is seen.
enum { LANES = 32, ALL_LANES = -1, SHARED_BASE = 1024 };

struct Warp;
struct Instruction;
typedef void Handler(Warp &warp, const Instruction &instruction, uint32_t mask);

enum Kind : uint8_t {
    PLAIN,         // each lane by itself
    BRANCH,        // to `target`
    ENDING,        // of the thread
    OF_MEMBERS,    // the lanes of a mask together: the last operand
    OF_WARP,       // all lanes together
    BLOCK_BARRIER, // all threads of the block
};

// What an operation does. sizes: bytes of its results and, behind a colon, of its
// operands, a digit each; p is a predicate.
struct Operation {
    Handler *run;
    std::string sizes;
    Kind kind;
};

// Operands are places in the register file of a warp, where a register has a value for
// each lane and a predicate 32 bits. Constants are registers that are never written.
struct Instruction {
    Handler *run = nullptr;
    Kind kind = PLAIN;
    bool guarded = false, negated = false, is_signed = false;
    uint8_t size = 0, count = 0; // of a memory access: bytes of an element, elements
    uint8_t width = 0;           // bytes of its registers
    uint32_t guard = 0, target = 0, members = 0;
    uint32_t out[4] = {}, in[10] = {};
    int64_t offset = 0; // of an address
    std::string text;
    const char *file = "?"; // of the CUDA source
    int line = 0;
    uint64_t executed = 0;
};

struct Parameter {
    std::string name;
    size_t offset, size;
};

// A register that is filled before a warp begins.
struct Constant {
    uint32_t place;
    int size;
    uint64_t value;
};
struct Special {
    uint32_t place;
    int which; // of SPECIAL_NAMES
};

struct Kernel {
    std::string name, unknown; // unknown: why it cannot be run
    std::vector<Parameter> parameters;
    size_t parameter_bytes = 0;
    std::vector<Instruction> code;
    std::vector<Constant> constants;
    std::vector<Special> specials;
    uint32_t file_bytes = 0; // of the registers of a warp
    unsigned max_threads = 0;
    uint64_t launches = 0, executed = 0; // executed: instructions, counted for each lane
};

struct Dim {
    unsigned x, y, z;
    uint64_t count() const { return (uint64_t)x * y * z; }
};

// Device or pinned memory. The last accesses to every byte: see Stamp in memory.h. The system makes
// their pages when they are touched: kernels touch little of the large buffers.
struct Allocation {
    char *begin;
    size_t bytes;
    uint64_t *writers, *readers; // (bytes)
    uint8_t *written;            // (bytes)
};

// An asynchronous copy under way: what will be written, and the group of its thread.
struct Copy {
    uint32_t to, group;
    char data[16];
};

struct Group {
    uint32_t pc, mask;
    bool waiting;
};

struct Block {
    Kernel *kernel;
    Dim grid, size, at;
    uint64_t number;
    const char *parameters;
    std::vector<char> shared;
    std::vector<uint8_t> written;
    std::vector<uint16_t> copying; // 1 + the thread whose copy writes this byte
    std::vector<uint64_t> writers, readers;
    std::vector<Warp> warps;
    uint64_t epoch = 1; // barriers passed
};

struct Warp {
    char *file;
    Block *block;
    int index;
    uint32_t live;
    std::vector<Group> groups;
    uint64_t epoch = 1;
    bool at_barrier = false;
    std::vector<Copy> copies[LANES];
    uint32_t copy_group[LANES] = {};
};

struct Machine {
    std::map<std::string, Kernel> kernels;
    std::map<uintptr_t, Allocation> allocations;
    std::map<std::string, uint64_t> reported; // what, kernel and place -> how often
    uint64_t launches = 0;
    uint64_t random = 0x9e3779b97f4a7c15u;
    bool split_groups = false;
    Warp *warp = nullptr; // that runs, and where it is
    const Instruction *current = nullptr;
};

static inline Machine &machine() {
    static Machine machine;
    return machine;
}

static inline uint32_t random_word() {
    uint64_t &state = machine().random;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 21);
}

// What registers and shared memory begin with: bits from anywhere in a table of random ones,
// because to make them anew for every warp would take longer than to execute it.
static inline void random_fill(char *at, size_t bytes) {
    const size_t words = 1 << 15, most = words * sizeof(uint32_t);
    static std::vector<uint32_t> table;
    while (table.size() < 2 * words) { table.push_back(random_word()); }
    for (size_t done = 0; done < bytes; done += most) {
        memcpy(at + done, &table[random_word() % words], std::min(bytes - done, most));
    }
}

// Prints a mistake of a kernel or of the host; the same one at the same place only once.
static inline void report(const char *what, const std::string &detail) {
    const Warp *warp = machine().warp;
    const Instruction *at = machine().current;
    std::string place = "the host";
    if (warp != nullptr) {
        const Dim &block = warp->block->at;
        place = warp->block->kernel->name;
        if (at != nullptr) {
            place += std::string(", ") + at->file + ":" + std::to_string(at->line) + ", " + at->text;
        }
        if (machine().reported[what + place]++ == 0) {
            printf("PTX: %s: %s\n  by %s\n  block %u %u %u, warp %d\n", what, detail.c_str(), place.c_str(),
                   block.x, block.y, block.z, warp->index);
        }
    } else if (machine().reported[what + place]++ == 0) {
        printf("PTX: %s: %s\n", what, detail.c_str());
    }
    fflush(stdout);
}

[[noreturn]] static inline void report_and_end(const char *what, const std::string &detail) {
    report(what, detail);
    _Exit(3);
}

template <typename... T> static std::string text_of(const char *format, T... values) {
    char text[256];
    snprintf(text, sizeof text, format, values...);
    return text;
}
