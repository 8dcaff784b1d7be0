// memory.h: loads, stores and asynchronous copies, and what is wrong with an access.
//
// For every byte there are two stamps: who wrote them last, and who has read them since
// the last barrier. A stamp has, from the upper bits down:
//
//   32  launch and block; shared memory is cleared before a block begins
//   10  barriers that the block has passed
//   10  barriers that the warp has passed by itself
//   10  the thread of the block
//    2  of readers: one thread, lanes of one warp, warps of a block, or several blocks
//
// Counts go round: what lies exactly 1024 barriers apart looks unordered.
#pragma once

#include "test/ptx/arithmetic.h"

enum Readers { ONE_THREAD, SOME_LANES, SOME_WARPS, SOME_BLOCKS };

typedef uint64_t Stamp;

static inline Stamp stamp_of(const Warp &warp, int lane) {
    const Block &block = *warp.block;
    return (machine().launches & 4095) << 52 | (block.number & 0xfffff) << 32 | (block.epoch & 1023) << 22 |
           (warp.epoch & 1023) << 12 | (uint64_t)(warp.index * LANES + lane) << 2;
}
static inline uint64_t stamp_block(Stamp stamp) { return stamp >> 32; }
static inline bool stamp_other_launch(Stamp a, Stamp b) { return a == 0 || a >> 52 != b >> 52; }
static inline uint64_t stamp_block_epoch(Stamp stamp) { return stamp >> 22 & 1023; }
static inline uint64_t stamp_warp_epoch(Stamp stamp) { return stamp >> 12 & 1023; }
static inline uint64_t stamp_thread(Stamp stamp) { return stamp >> 2 & 1023; }
static inline uint64_t stamp_warp(Stamp stamp) { return stamp_thread(stamp) / LANES; }
static inline Readers stamp_readers(Stamp stamp) { return (Readers)(stamp & 3); }

// Whether nothing orders the accesses of `old` before that of `mine`.
static inline bool stamp_conflicts(Stamp old, Stamp mine) {
    if (stamp_other_launch(old, mine)) { return false; }
    if (stamp_block(old) != stamp_block(mine) || stamp_readers(old) == SOME_BLOCKS) { return true; }
    if (stamp_block_epoch(old) != stamp_block_epoch(mine)) { return false; }
    if (stamp_warp(old) != stamp_warp(mine) || stamp_readers(old) == SOME_WARPS) { return true; }
    if (stamp_warp_epoch(old) != stamp_warp_epoch(mine)) { return false; }
    return stamp_thread(old) != stamp_thread(mine) || stamp_readers(old) == SOME_LANES;
}

// The stamp of the readers, when `mine` joins them.
static inline Stamp stamp_read(Stamp old, Stamp mine) {
    if (stamp_other_launch(old, mine)) { return mine; }
    if (stamp_readers(old) == SOME_BLOCKS) { return old; }
    if (stamp_block(old) != stamp_block(mine)) { return mine | SOME_BLOCKS; }
    if (stamp_block_epoch(old) != stamp_block_epoch(mine)) { return mine; }
    if (stamp_readers(old) == SOME_WARPS) { return old; }
    if (stamp_warp(old) != stamp_warp(mine)) { return mine | SOME_WARPS; }
    if (stamp_warp_epoch(old) != stamp_warp_epoch(mine)) { return mine; }
    return stamp_thread(old) == stamp_thread(mine) ? old : mine | SOME_LANES;
}

// The stamps of memory that is global or of the block.
struct Marks {
    Stamp *writers, *readers;
    uint8_t *written;
    const char *of;
};

// Checks an access to the bytes from `begin` on, and keeps it.
static inline void marks_access(Marks marks, Stamp mine, size_t begin, size_t bytes, bool write) {
    for (size_t i = begin; i < begin + bytes; i++) {
        bool after_write = stamp_conflicts(marks.writers[i], mine);
        if (after_write || (write && stamp_conflicts(marks.readers[i], mine))) {
            Stamp other = after_write ? marks.writers[i] : marks.readers[i];
            report(text_of("a race in %s memory", marks.of).c_str(),
                   text_of("thread %lu %s byte %zu, which thread %lu of block %lu has %s", stamp_thread(mine),
                           write ? "writes" : "reads", i, stamp_thread(other), stamp_block(other) & 0xfffff,
                           after_write ? "written" : "read"));
        }
        if (write) {
            marks.writers[i] = mine;
            marks.written[i] = 1;
            continue;
        }
        marks.readers[i] = stamp_read(marks.readers[i], mine);
        if (!marks.written[i]) {
            report(text_of("nobody wrote what is read from %s memory", marks.of).c_str(),
                   text_of("byte %zu, lane %lu", i, stamp_thread(mine) % LANES));
        }
    }
}

// The allocation that has this address; NULL: none.
static inline Allocation *allocation_at(uintptr_t address) {
    std::map<uintptr_t, Allocation> &all = machine().allocations;
    auto behind = all.upper_bound(address);
    if (behind == all.begin()) { return nullptr; }
    Allocation &found = std::prev(behind)->second;
    return address < (uintptr_t)found.begin + found.bytes ? &found : nullptr;
}

static inline void mark_written(const void *memory, size_t bytes) {
    Allocation *found = allocation_at((uintptr_t)memory);
    if (found == nullptr || bytes == 0) { return; }
    size_t begin = (size_t)((const char *)memory - found->begin);
    std::fill_n(&found->written[begin], bytes, (uint8_t)1);
}

// What a lane may access there; NULL where it must not.
static inline char *global_access(Warp &warp, int lane, uint64_t address, unsigned bytes, bool write) {
    Allocation *found = allocation_at(address);
    if (found == nullptr || address + bytes > (uintptr_t)found->begin + found->bytes) {
        report("an access out of bounds of global memory",
               text_of("%s of %u bytes, lane %d, %s", write ? "write" : "read", bytes, lane,
                       found != nullptr ? "behind the end of an allocation" : "where nothing is allocated"));
        return nullptr;
    }
    if (address % bytes != 0) {
        report("an access to global memory that is not aligned", text_of("%u bytes, lane %d", bytes, lane));
        return nullptr;
    }
    marks_access({found->writers, found->readers, found->written, "global"}, stamp_of(warp, lane),
                 address - (uintptr_t)found->begin, bytes, write);
    return (char *)address;
}

static inline char *shared_access(Warp &warp, int lane, uint32_t address, unsigned bytes, bool write) {
    Block &block = *warp.block;
    uint32_t at = address - SHARED_BASE;
    if (address < SHARED_BASE || (size_t)at + bytes > block.shared.size()) {
        report("an access out of bounds of shared memory",
               text_of("%s of %u bytes at %d, lane %d", write ? "write" : "read", bytes, (int)at, lane));
        return nullptr;
    }
    if (at % bytes != 0) {
        report("an access to shared memory that is not aligned", text_of("%u bytes at %u", bytes, at));
        return nullptr;
    }
    for (uint32_t i = at; i < at + bytes; i++) {
        if (block.copying[i] == 0) { continue; }
        report("shared memory is accessed while a copy to it is under way",
               text_of("at %u, lane %d; the copy is of thread %d", i, lane, block.copying[i] - 1));
    }
    marks_access({block.writers.data(), block.readers.data(), block.written.data(), "shared"},
                 stamp_of(warp, lane), at, bytes, write);
    return block.shared.data() + at;
}

static inline void register_put(Warp &warp, uint32_t place, int width, int lane, u64 value) {
    char *target = warp.file + place + lane * width;
    switch (width) { // a copy of a length that the compiler knows is one store
    case 8: memcpy(target, &value, 8); break;
    case 4: memcpy(target, &value, 4); break;
    default: memcpy(target, &value, (size_t)width);
    }
}
static inline u64 register_get(Warp &warp, uint32_t place, int width, int lane) {
    u64 value = 0;
    memcpy(&value, warp.file + place + lane * width, (size_t)width);
    return value;
}

// An element of memory, as wide as a register.
static inline u64 element_of(const char *memory, const Instruction &instruction) {
    u64 value = 0;
    memcpy(&value, memory, instruction.size);
    int unused = 64 - 8 * instruction.size;
    return instruction.is_signed ? (u64)((s64)(value << unused) >> unused) : value;
}

// The address is the last operand.
template <bool SHARED, bool WRITE>
static void access_memory(Warp &warp, const Instruction &instruction, uint32_t mask) {
    unsigned bytes = (unsigned)instruction.size * instruction.count;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        uint32_t place = instruction.in[4];
        char *memory =
            SHARED ? shared_access(warp, lane, lane_value<u32>(warp, place, lane) + (u32)instruction.offset,
                                   bytes, WRITE)
                   : global_access(warp, lane, lane_value<u64>(warp, place, lane) + (u64)instruction.offset,
                                   bytes, WRITE);
        for (int k = 0; k < instruction.count && memory != nullptr; k++) {
            char *element = memory + k * instruction.size;
            if (WRITE) {
                u64 value = register_get(warp, instruction.in[k], instruction.width, lane);
                memcpy(element, &value, instruction.size);
            } else {
                register_put(warp, instruction.out[k], instruction.width, lane,
                             element_of(element, instruction));
            }
        }
    }
}

static void load_parameter(Warp &warp, const Instruction &instruction, uint32_t mask) {
    unsigned bytes = (unsigned)instruction.size * instruction.count;
    u64 at = (u64)-1, values[4] = {};
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        u64 mine = lane_value<u64>(warp, instruction.in[4], lane) + (u64)instruction.offset;
        if (mine != at) { // most often all lanes read the same one
            at = mine;
            if (at + bytes > warp.block->kernel->parameter_bytes || at % bytes != 0) {
                report_and_end("a parameter is read wrongly", text_of("%u bytes at %lu", bytes, at));
            }
            for (int k = 0; k < instruction.count; k++) {
                values[k] = element_of(warp.block->parameters + at + k * instruction.size, instruction);
            }
        }
        for (int k = 0; k < instruction.count; k++) {
            register_put(warp, instruction.out[k], instruction.width, lane, values[k]);
        }
    }
}

// ---------------------------------------------------------------------------------------
// Asynchronous copies: the source is read when one starts, the target is written when it
// is waited for. Until then it has other bytes.

static void copy_start(Warp &warp, const Instruction &instruction, uint32_t mask) {
    Block &block = *warp.block;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        u32 to = lane_value<u32>(warp, instruction.in[0], lane),
            bytes = lane_value<u32>(warp, instruction.in[3], lane);
        u64 from = lane_value<u64>(warp, instruction.in[1], lane) + (u64)instruction.offset;
        if (lane_value<u32>(warp, instruction.in[2], lane) != 16 || (bytes != 16 && bytes != 0)) {
            report_and_end("a copy that this machine does not know", text_of("%u bytes", bytes));
        }
        Copy copy = {to - SHARED_BASE, warp.copy_group[lane], {}};
        if (shared_access(warp, lane, to, sizeof copy.data, true) == nullptr) { continue; }
        const char *source = bytes > 0 ? global_access(warp, lane, from, bytes, false) : nullptr;
        if (source != nullptr) { memcpy(copy.data, source, bytes); }
        memset(&block.shared[copy.to], 0xff, sizeof copy.data);
        std::fill_n(&block.copying[copy.to], sizeof copy.data, (uint16_t)(warp.index * LANES + lane + 1));
        warp.copies[lane].push_back(copy);
    }
}

static void copy_commit(Warp &warp, const Instruction &, uint32_t mask) {
    for (int lane = 0; lane < LANES; lane++) { warp.copy_group[lane] += mask >> lane & 1; }
}

// All but the latest groups of a thread arrive.
static void copy_wait(Warp &warp, const Instruction &instruction, uint32_t mask) {
    Block &block = *warp.block;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        uint32_t pending = lane_value<u32>(warp, instruction.in[0], lane);
        std::vector<Copy> under_way;
        for (Copy &copy : warp.copies[lane]) {
            if (copy.group + pending >= warp.copy_group[lane]) {
                under_way.push_back(copy);
                continue;
            }
            std::fill_n(&block.copying[copy.to], sizeof copy.data, (uint16_t)0);
            char *place = shared_access(warp, lane, copy.to + SHARED_BASE, sizeof copy.data, true);
            if (place != nullptr) { memcpy(place, copy.data, sizeof copy.data); }
        }
        warp.copies[lane] = under_way;
    }
}

static inline void add_memory(Operations &all) {
    all["cp.async.cg.shared.global"] = {copy_start, ":4844", PLAIN};
    all["cp.async.commit_group"] = {copy_commit, ":", PLAIN};
    all["cp.async.wait_group"] = {copy_wait, ":4", PLAIN};
}
