// execute.h: runs a launch: block by block, each with its warps in turns of random
// length, each of them by groups of lanes. Registers and shared memory begin with random
// bits.
#pragma once

#include <algorithm>
#include <numeric>

#include "test/ptx/parse.h"

// Groups at the same instruction become one, which then looks anew whether it must wait.
static inline void warp_join_groups(Warp &warp) {
    std::vector<Group> joined;
    for (const Group &group : warp.groups) {
        auto same =
            std::find_if(joined.begin(), joined.end(), [&](Group &other) { return other.pc == group.pc; });
        if (same == joined.end()) {
            joined.push_back(group);
        } else {
            same->mask |= group.mask;
            same->waiting = false;
        }
    }
    warp.groups = joined;
}

// The group that runs next: the one that is furthest behind, so that lanes meet again,
// or, where groups are split, any. -1: all wait.
static inline int warp_choose_group(Warp &warp) {
    bool random = machine().split_groups;
    if (warp.groups.size() > 1 && (!random || random_word() % 16 == 0)) { warp_join_groups(warp); }
    int best = -1;
    uint32_t ready = 0;
    for (size_t i = 0; i < warp.groups.size(); i++) {
        if (warp.groups[i].waiting) { continue; }
        ready++;
        bool better = best < 0 || (random ? random_word() % ready == 0
                                          : warp.groups[i].pc < warp.groups[(size_t)best].pc);
        if (better) { best = (int)i; }
    }
    return best;
}

static inline void warp_split_group(Warp &warp, size_t chosen) {
    if (!machine().split_groups || random_word() % 64 != 0 || warp.groups.size() >= 6) { return; }
    uint32_t all = warp.groups[chosen].mask, some = all & (random_word() | random_word() << 16);
    if (some == 0 || some == all) { return; }
    warp.groups[chosen].mask &= ~some;
    warp.groups.push_back({warp.groups[chosen].pc, some, false});
}

// All groups wait. Whether it is for the other warps: at the same barrier of the block.
static inline bool warp_waits_for_block(Warp &warp) {
    const std::vector<Instruction> &code = warp.block->kernel->code;
    size_t groups = warp.groups.size();
    warp_join_groups(warp);
    if (warp.groups.size() < groups) { return false; } // those that have joined look again
    machine().current = &code[warp.groups[0].pc];
    if (groups > 1) {
        report_and_end("lanes of a warp wait at different places",
                       text_of("one more waits at line %d", code[warp.groups[1].pc].line));
    }
    if (code[warp.groups[0].pc].kind == BLOCK_BARRIER) { return true; }
    if (warp.groups[0].mask != warp.live) {
        report_and_end("lanes of a warp are missing", "what they do together waits");
    }
    warp.groups[0].waiting = false; // the lanes that were missing have ended
    return false;
}

// The lanes that must be there before what they do together is done.
static inline uint32_t warp_needed(Warp &warp, const Group &group, const Instruction &instruction) {
    if (instruction.kind == OF_WARP && warp.live != (uint32_t)ALL_LANES) {
        report("an instruction of a whole warp, of which lanes have ended",
               text_of("%#x are left", warp.live));
    }
    if (instruction.kind != OF_MEMBERS) { return warp.live; }
    uint32_t needed = lane_value<u32>(warp, instruction.members, __builtin_ctz(group.mask));
    for (int lane = 0; lane < LANES; lane++) {
        if (group.mask >> lane & 1 && lane_value<u32>(warp, instruction.members, lane) != needed) {
            report("lanes with different masks", text_of("lane %d", lane));
        }
    }
    if ((group.mask & ~needed) != 0 || (needed & ~warp.live) != 0) {
        report("a mask without a lane that takes part, or with one that has ended",
               text_of("mask %#x, here %#x, live %#x", needed, group.mask, warp.live));
    }
    return (needed | group.mask) & warp.live;
}

// What lanes do together: once all are there, they become one group and do it. False: which
// group runs next must be chosen anew.
static inline bool group_together(Warp &warp, size_t chosen, const Instruction &instruction) {
    uint32_t pc = warp.groups[chosen].pc, needed = warp_needed(warp, warp.groups[chosen], instruction),
             there = 0;
    warp.groups[chosen].waiting = true;
    for (const Group &group : warp.groups) { there |= group.pc == pc && group.waiting ? group.mask : 0; }
    if ((there & needed) != needed) { return false; }
    Group all = {pc, 0, false};
    std::vector<Group> others;
    for (const Group &group : warp.groups) {
        if (group.pc == pc && group.waiting) {
            all.mask |= group.mask;
        } else {
            others.push_back(group);
        }
    }
    if (instruction.kind == BLOCK_BARRIER) {
        all.waiting = true;
    } else {
        instruction.run(warp, instruction, all.mask);
        all.pc++;
    }
    bool alone = warp.groups.size() == 1;
    warp.groups = others;
    warp.groups.push_back(all);
    return alone && !all.waiting;
}

static inline void group_end(Warp &warp, size_t chosen, uint32_t mask) {
    for (int lane = 0; lane < LANES; lane++) {
        if (mask >> lane & 1 && !warp.copies[lane].empty()) {
            report("a thread ends while its copies are under way", text_of("lane %d", lane));
        }
    }
    Group &group = warp.groups[chosen];
    warp.live &= ~mask;
    group.mask &= ~mask;
    group.pc++;
    if (group.mask == 0) { warp.groups.erase(warp.groups.begin() + (long)chosen); }
}

// Lanes of `mask` go to the target, the others on. False: they have parted.
static inline bool group_branch(Warp &warp, size_t chosen, const Instruction &instruction, uint32_t mask) {
    Group &group = warp.groups[chosen];
    Group others = {group.pc + 1, group.mask & ~mask, false};
    group.mask = mask;
    group.pc = instruction.target;
    if (mask == 0) { group = others; }
    if (mask == 0 || others.mask == 0) { return true; }
    warp.groups.push_back(others);
    return false;
}

// One instruction. False: which group runs next must be chosen anew.
static inline bool group_step(Warp &warp, size_t chosen) {
    Group &group = warp.groups[chosen];
    Instruction &instruction = warp.block->kernel->code[group.pc];
    uint32_t mask = group.mask;
    if (instruction.guarded) {
        uint32_t guard = *lanes_of<uint32_t>(warp, instruction.guard);
        mask &= instruction.negated ? ~guard : guard;
    }
    machine().current = &instruction;
    instruction.executed++;
    warp.block->kernel->executed += (uint64_t)__builtin_popcount(mask);
    switch (instruction.kind) {
    case PLAIN:
        if (mask != 0) { instruction.run(warp, instruction, mask); }
        group.pc++;
        return true;
    case BRANCH: return group_branch(warp, chosen, instruction, mask);
    case ENDING: group_end(warp, chosen, mask); return false;
    default: return group_together(warp, chosen, instruction);
    }
}

// A turn of a warp, which ends early where it waits for others or has ended.
static inline void warp_run(Warp &warp, int steps) {
    machine().warp = &warp;
    while (steps > 0 && !warp.groups.empty()) {
        int chosen = warp_choose_group(warp);
        if (chosen < 0 && warp_waits_for_block(warp)) {
            warp.at_barrier = true;
            return;
        }
        if (chosen < 0) { continue; }
        warp_split_group(warp, (size_t)chosen);
        bool alone = warp.groups.size() == 1;
        int turn = alone ? steps : machine().split_groups ? 1 + (int)(random_word() % 32) : 1;
        for (int i = 0; i < turn && group_step(warp, (size_t)chosen); i++) { steps--; }
        steps--;
    }
}

static inline unsigned block_special(const Block &block, const Special &special, unsigned thread) {
    const Dim &size = block.size;
    const Dim index = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    const Dim *const groups[] = {&index, &size, &block.at, &block.grid};
    if (special.which == SPECIALS - 1) { return thread % LANES; }
    const Dim &of = *groups[special.which / 3];
    return special.which % 3 == 0 ? of.x : special.which % 3 == 1 ? of.y : of.z;
}

static inline void warp_begin(Block &block, Warp &warp, size_t index, char *file) {
    const Kernel &kernel = *block.kernel;
    warp.file = file;
    warp.block = &block;
    warp.index = (int)index;
    warp.live = (uint32_t)ALL_LANES;
    warp.groups.push_back({0, warp.live, false});
    random_fill(file, kernel.file_bytes);
    for (const Constant &constant : kernel.constants) {
        for (int lane = 0; lane < LANES; lane++) { // a predicate has one word for all lanes
            int size = constant.size == 0 ? 4 : constant.size, at = constant.size == 0 ? 0 : lane * size;
            memcpy(file + constant.place + at, &constant.value, (size_t)size);
        }
    }
    for (const Special &special : kernel.specials) {
        for (unsigned lane = 0; lane < LANES; lane++) {
            lanes_of<u32>(warp, special.place)[lane] =
                block_special(block, special, (unsigned)index * LANES + lane);
        }
    }
}

// All warps that have not ended are at a barrier, which they leave.
static inline void block_pass_barrier(Block &block) {
    const uint32_t *first = nullptr;
    for (Warp &warp : block.warps) {
        if (warp.groups.empty()) { continue; }
        machine().warp = &warp;
        machine().current = &block.kernel->code[warp.groups[0].pc];
        if (first != nullptr && *first != warp.groups[0].pc) {
            report_and_end("warps of a block are at different barriers", "they wait for each other");
        }
        first = &warp.groups[0].pc;
    }
    for (Warp &warp : block.warps) {
        if (warp.groups.empty()) { continue; }
        warp.at_barrier = warp.groups[0].waiting = false;
        warp.groups[0].pc++;
        warp.epoch++;
    }
    block.epoch++;
}

static inline void block_run(Block &block, std::vector<char> &files) {
    size_t warps = block.size.count() / LANES;
    random_fill(block.shared.data(), block.shared.size());
    for (std::vector<uint64_t> *stamps : {&block.writers, &block.readers}) {
        stamps->assign(block.shared.size(), 0);
    }
    block.written.assign(block.shared.size(), 0);
    block.copying.assign(block.shared.size(), 0);
    block.epoch = 1;
    block.warps.assign(warps, Warp());
    for (size_t i = 0; i < warps; i++) {
        warp_begin(block, block.warps[i], i, files.data() + i * block.kernel->file_bytes);
    }
    for (;;) {
        std::vector<size_t> ready;
        bool waiting = false;
        for (size_t i = 0; i < warps; i++) {
            waiting = waiting || block.warps[i].at_barrier;
            if (!block.warps[i].at_barrier && !block.warps[i].groups.empty()) { ready.push_back(i); }
        }
        if (ready.empty() && !waiting) { break; }
        if (ready.empty()) {
            block_pass_barrier(block);
        } else {
            warp_run(block.warps[ready[random_word() % ready.size()]], 1 << (2 + random_word() % 11));
        }
    }
    machine().warp = nullptr;
    machine().current = nullptr;
}

// Blocks begin anywhere and are a step apart that has no factor in common with their
// number.
static inline void machine_run(Kernel &kernel, Dim grid, Dim size, size_t shared, const char *parameters) {
    if (++machine().launches % 4096 == 0) { machine().launches++; } // a stamp of 0 is none
    uint64_t blocks = grid.count(), first = random_word() % blocks, step = 1 + random_word() % blocks;
    while (std::gcd(step, blocks) != 1) { step++; }
    Block block = {};
    block.kernel = &kernel;
    block.grid = grid;
    block.size = size;
    block.parameters = parameters;
    block.shared.resize(shared);
    std::vector<char> files(kernel.file_bytes * (size.count() / LANES));
    for (uint64_t i = 0; i < blocks; i++) {
        block.number = (first + i * step) % blocks;
        block.at = {(unsigned)(block.number % grid.x), (unsigned)(block.number / grid.x % grid.y),
                    (unsigned)(block.number / grid.x / grid.y)};
        block_run(block, files);
    }
    kernel.launches++;
}
