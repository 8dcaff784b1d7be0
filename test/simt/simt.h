// simt.h: an emulator of GPUs. It runs CUDA kernels on the host, so that they can be
// tested where there is no GPU, and it finds mistakes that a GPU may hide.
//
// The host's C++ compiler compiles a kernel against the headers of this directory, which
// stand in for those of the CUDA toolkit. A launch runs its blocks one after another and
// returns when the last has ended. The threads of a block are coroutines, each with its
// own stack. One runs until it must wait for others (a barrier of the block or of the
// warp, an exchange within the warp, a tensor core instruction), then the next one runs.
//
// How it finds mistakes:
//
//   order      Threads and blocks run in ascending, descending or shuffled order
//              (simt_order). A kernel that lacks a barrier, or in which one block relies
//              on another, gives other results in at least one of them.
//   memory     Device memory, pinned memory and the shared memory of a block come from
//              malloc, so AddressSanitizer sees accesses past their ends. New memory is
//              filled with bytes of 0xff, which are NaNs in every format.
//   copies     An asynchronous copy into shared memory arrives as late as the program
//              allows: at the wait that makes it visible. Until then its target holds
//              NaNs, so a kernel that still needs the old values, or reads the new ones
//              too early, gets NaNs. Writing to the source or the target meanwhile ends
//              the program.
//   barriers   When some threads wait at a barrier or an exchange, and the others have
//              ended or wait elsewhere, the program ends with a message.
//
// What it does not see:
//
//   * updates that are lost because two threads read, add and write at the same time (but
//     a sum of floats in another order has other bits)
//   * an exchange within a warp in the place of __syncwarp, although it orders no memory
//   * threads of a block that meet at barriers in different places of the source
//   * a kernel that is given memory of the host
//   * a host that does not wait for a stream
//   * launch bounds
//
// It says nothing about speed. Each thread of the host has one launch at a time; several
// threads may launch at once.
#pragma once
#define ACCO_SIMT_H // what tests ask for

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SIMT_SWITCH_BEGIN(save, bottom, size) __sanitizer_start_switch_fiber(save, bottom, size)
#define SIMT_SWITCH_END(save, bottom, size) __sanitizer_finish_switch_fiber(save, bottom, size)
enum { SIMT_STACK = 1 << 18 };
#else
#define SIMT_SWITCH_BEGIN(save, bottom, size) ((void)0)
#define SIMT_SWITCH_END(save, bottom, size) ((void)0)
enum { SIMT_STACK = 1 << 16 };
#endif

enum {
    SIMT_WARP = 32,
    SIMT_MAX_THREADS = 1024,       // of a block
    SIMT_SHARED_LIMIT = 99 * 1024, // bytes of shared memory of a block: what the smallest GPUs have
    SIMT_SLOT = 64,                // bytes that a lane can show in an exchange
    SIMT_COPY = 16                 // bytes of the largest asynchronous copy
};

// For code that looks at memory in the name of a kernel: accesses by it are not the
// kernel's own (test/cuda/accesses.h).
#define SIMT_UNWATCHED __attribute__((no_sanitize("thread")))

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// The built-in variables of a kernel, for the thread that is running.
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

enum SimtOrder { SIMT_ASCENDING, SIMT_DESCENDING, SIMT_SHUFFLED, SIMT_ORDERS };

// The order of threads and blocks in all launches from now on. SIMT_SHUFFLED shuffles
// anew for every block.
inline SimtOrder &simt_order() {
    static SimtOrder order = SIMT_ASCENDING;
    return order;
}

enum SimtState { SIMT_READY, SIMT_AT_BLOCK_BARRIER, SIMT_AT_WARP_BARRIER, SIMT_ENDED };

struct SimtCopy {
    void *target;
    const void *source;
    size_t bytes, valid;  // `valid` of them come from the source, the others become zero
    char seen[SIMT_COPY]; // what will arrive: the source when the copy was started
};

// A suspended thread of control. simt_switch suspends the running one in `from` and continues
// with `to`. A kernel of a thousand threads switches many thousands of times, so on
// x86-64 this is done in a few instructions. The functions of the C library also save the
// mask of signals, with system calls, and take twenty times as long. The last instruction is a
// jump: a processor predicts where a return goes from the calls before it, and here that is wrong.
#if defined(__x86_64__)
typedef void *SimtPlace;
__asm__(".text\nsimt_switch_stack:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
        "popq %rcx\njmp *%rcx\n");
extern "C" void simt_switch_stack(SimtPlace *from, SimtPlace to);
inline void simt_switch(SimtPlace *from, SimtPlace *to) { simt_switch_stack(from, *to); }

// Makes a stack that simt_switch_stack can switch to: six registers, then the return
// address, which is `entry`, then the return address of `entry`, which never returns.
inline void simt_place_start(SimtPlace *place, char *stack, size_t bytes, void (*entry)()) {
    void **top = (void **)(stack + bytes);
    top[-1] = nullptr;
    top[-2] = (void *)entry;
    for (int i = 3; i <= 8; i++) { top[-i] = nullptr; }
    *place = &top[-8];
}
#else
typedef ucontext_t SimtPlace;
inline void simt_switch(SimtPlace *from, SimtPlace *to) { swapcontext(from, to); }

inline void simt_place_start(SimtPlace *place, char *stack, size_t bytes, void (*entry)()) {
    getcontext(place);
    place->uc_stack.ss_sp = stack;
    place->uc_stack.ss_size = bytes;
    place->uc_link = nullptr;
    makecontext(place, entry, 0);
}
#endif

// A stack, and where the code on it is suspended. It outlives the launch: when its thread
// has ended, it waits for the next body to run.
struct SimtFiber {
    SimtPlace where;
    bool started;
    char *stack;
    size_t stack_bytes;
    void *fake_stack; // AddressSanitizer's
};

struct SimtThread {
    SimtState state;
    dim3 index;          // threadIdx
    int number;          // within the block
    unsigned warp_mask;  // the lanes that its exchange waits for
    size_t warp_bytes;   // how much it shows in the exchange
    uint64_t warp_round; // in how many exchanges of its warp it has taken part
    SimtFiber *fiber;
    // Asynchronous copies under way, as groups in the order of their commits. The last
    // group is open.
    std::vector<std::vector<SimtCopy>> copies;
};

// What the lanes of a warp show each other. Exchanges use the two halves in turn, so that
// a fast lane cannot overwrite what a slow one has yet to read.
struct SimtWarp {
    char slots[2][SIMT_WARP][SIMT_SLOT];
};

struct SimtBlock {
    dim3 grid, size, index;
    char *shared;
    size_t shared_bytes;
    std::vector<SimtThread> threads;
    std::vector<SimtWarp> warps;
    SimtThread *warp;                 // the lanes that run in turn
    const std::vector<size_t> *lanes; // their order
    size_t next;                      // the place in it of the first that has not had its turn
    SimtThread *running;              // nullptr: the scheduler is running
    SimtPlace scheduler;              // simt_take_turns, which the last of these lanes returns to
    bool scheduler_left;              // a lane is about to begin, or to go on, in the scheduler's place
    void *scheduler_fake_stack;       // AddressSanitizer's; also the next two
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    std::function<void()> body; // the kernel with its arguments
    uint64_t random;            // state of simt_random
};

// The block that this thread of the host runs.
inline SimtBlock *&simt_block() {
    static thread_local SimtBlock *block = nullptr;
    return block;
}

inline SimtThread *simt_self() { return simt_block()->running; }

// Ends the program. The kernel has made a mistake.
[[noreturn]] inline void simt_fail(const char *what) {
    SimtBlock *block = simt_block();
    fprintf(stderr, "emulated kernel: %s", what);
    if (block != nullptr) {
        fprintf(stderr, " (block %u,%u,%u of %u,%u,%u; %zu threads)", block->index.x, block->index.y,
                block->index.z, block->grid.x, block->grid.y, block->grid.z, block->threads.size());
        if (block->running != nullptr) { fprintf(stderr, ", thread %d", block->running->number); }
    }
    fprintf(stderr, "\n");
    abort();
}

// ---- Coroutines -----------------------------------------------------------------------

inline void simt_fiber_main();

// The next lane that is ready has its turn: returns where it is suspended. nullptr: all had it.
inline SimtFiber *simt_next(SimtBlock *block) {
    while (block->next < SIMT_WARP) {
        SimtThread *thread = &block->warp[(*block->lanes)[block->next++]];
        SimtFiber *fiber = thread->fiber;
        if (thread->state != SIMT_READY) { continue; }
        block->running = thread;
        threadIdx = thread->index;
        if (!fiber->started) {
            simt_place_start(&fiber->where, fiber->stack, fiber->stack_bytes, simt_fiber_main);
        }
        fiber->started = true;
        return fiber;
    }
    return nullptr;
}

// After a switch to a thread: AddressSanitizer is told, and says where the scheduler's stack is.
// Without it nothing follows a switch, so that simt_yield ends in a jump: a return would be
// predicted wrongly, as in simt_switch_stack.
inline void simt_arrive(SimtBlock *block, void *fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    const void *left = nullptr;
    size_t bytes = 0;
    SIMT_SWITCH_END(fake_stack, &left, &bytes);
    if (!block->scheduler_left) { return; }
    block->scheduler_stack = left;
    block->scheduler_stack_bytes = bytes;
    block->scheduler_left = false;
#else
    (void)block, (void)fake_stack;
#endif
}

// Continues with the next lane, or behind the last with the scheduler, until this thread has its
// next turn, or the thread that runs on this stack in a later block.
__attribute__((noinline)) inline void simt_yield() {
    SimtBlock *block = simt_block();
    SimtFiber *mine = block->running->fiber, *next = simt_next(block);
    if (next != nullptr) {
        SIMT_SWITCH_BEGIN(&mine->fake_stack, next->stack, next->stack_bytes);
        simt_switch(&mine->where, &next->where);
    } else {
        SIMT_SWITCH_BEGIN(&mine->fake_stack, block->scheduler_stack, block->scheduler_stack_bytes);
        simt_switch(&mine->where, &block->scheduler);
    }
    simt_arrive(simt_block(), mine->fake_stack); // the block, too, may be a later one
}

// What runs on every stack: the threads that use it, one after another.
inline void simt_fiber_main() {
    simt_arrive(simt_block(), nullptr);
    for (;;) {
        simt_block()->body();
        SimtThread *self = simt_self();
        if (self->copies.size() > 1 || !self->copies.back().empty()) {
            simt_fail("a thread ends while asynchronous copies of it are under way");
        }
        self->state = SIMT_ENDED;
        simt_yield();
    }
}

// Gives each lane of the warp that is ready a turn: it runs until it waits or has ended. A lane
// switches to the next by itself, which takes half as many switches as through the scheduler.
__attribute__((noinline)) inline void simt_take_turns(SimtBlock *block) {
    block->next = 0;
    SimtFiber *first = simt_next(block);
    if (first == nullptr) { return; }
    block->scheduler_left = true;
    SIMT_SWITCH_BEGIN(&block->scheduler_fake_stack, first->stack, first->stack_bytes);
    simt_switch(&block->scheduler, &first->where);
    SIMT_SWITCH_END(block->scheduler_fake_stack, nullptr, nullptr);
    block->running = nullptr;
}

// ---- Waiting --------------------------------------------------------------------------

// Waits for all threads of the block.
inline void simt_block_barrier() {
    simt_self()->state = SIMT_AT_BLOCK_BARRIER;
    simt_yield();
}

// Shows `bytes` bytes of `mine` to the lanes of `mask`, and returns when all of them have
// shown theirs. result[lane] is what that lane has shown.
inline const char (*simt_warp_exchange(unsigned mask, const void *mine, size_t bytes))[SIMT_SLOT] {
    SimtBlock *block = simt_block();
    SimtThread *self = block->running;
    int lane = self->number % SIMT_WARP;
    if (bytes > SIMT_SLOT) { simt_fail("too much is exchanged at once within a warp"); }
    if ((mask >> lane & 1u) == 0) { simt_fail("a lane takes part in an exchange whose mask leaves it out"); }
    SimtWarp *warp = &block->warps[(size_t)(self->number / SIMT_WARP)];
    int half = (int)(self->warp_round++ % 2);
    memcpy(warp->slots[half][lane], mine, bytes);
    self->warp_mask = mask;
    self->warp_bytes = bytes;
    self->state = SIMT_AT_WARP_BARRIER;
    simt_yield();
    return warp->slots[half];
}

// Releases lanes of a warp that wait for each other and are all there. False: there are
// none.
inline bool simt_release_warp(SimtThread *lanes, int count) {
    bool released = false;
    for (int lane = 0; lane < count; lane++) {
        if (lanes[lane].state != SIMT_AT_WARP_BARRIER) { continue; }
        unsigned mask = lanes[lane].warp_mask, there = 0; // there: who waits in the same exchange
        for (int other = 0; other < count; other++) {
            bool together = lanes[other].state == SIMT_AT_WARP_BARRIER && lanes[other].warp_mask == mask;
            there |= together && lanes[other].warp_round == lanes[lane].warp_round ? 1u << other : 0u;
        }
        if ((there & mask) != mask) {
            if (mask == 0xffffffffu) { return released; }
            continue;
        }
        for (int other = 0; other < count; other++) {
            if ((mask >> other & 1u) == 0) { continue; }
            if (lanes[other].warp_bytes != lanes[lane].warp_bytes) {
                simt_fail("lanes of a warp are in different exchanges");
            }
            lanes[other].state = SIMT_READY;
        }
        released = true;
    }
    return released;
}

// Releases the threads of a block if all of them wait at a barrier of the block. False:
// they do not.
inline bool simt_release_block(SimtBlock *block) {
    for (SimtThread &thread : block->threads) {
        if (thread.state != SIMT_AT_BLOCK_BARRIER) { return false; }
    }
    for (SimtThread &thread : block->threads) { thread.state = SIMT_READY; }
    return true;
}

// ---- Blocks ---------------------------------------------------------------------------

inline uint64_t simt_random(uint64_t *state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 33;
}

// The order in which `count` threads, warps or blocks run.
inline void simt_permutation(std::vector<size_t> *order, size_t count, uint64_t *random) {
    order->resize(count);
    for (size_t i = 0; i < count; i++) { (*order)[i] = simt_order() == SIMT_DESCENDING ? count - 1 - i : i; }
    for (size_t i = count; simt_order() == SIMT_SHUFFLED && i > 1; i--) {
        size_t other = simt_random(random) % i, kept = (*order)[i - 1];
        (*order)[i - 1] = (*order)[other];
        (*order)[other] = kept;
    }
}

// Runs the lanes of a warp until all of them have ended or wait for other warps. So a
// warp gets as far ahead of the others as the kernel allows.
inline void simt_run_warp(SimtBlock *block, size_t first, const std::vector<size_t> &lanes) {
    block->warp = &block->threads[first];
    block->lanes = &lanes;
    do { simt_take_turns(block); } while (simt_release_warp(block->warp, SIMT_WARP));
}

inline void simt_run_block(SimtBlock *block) {
    std::vector<size_t> warps, lanes;
    memset(block->shared, 0xff, block->shared_bytes);
    for (SimtThread &thread : block->threads) {
        thread.state = SIMT_READY;
        thread.warp_round = 0;
        thread.copies.resize(1);
    }
    do {
        simt_permutation(&warps, block->warps.size(), &block->random);
        for (size_t warp : warps) {
            simt_permutation(&lanes, SIMT_WARP, &block->random);
            simt_run_warp(block, warp * SIMT_WARP, lanes);
        }
    } while (simt_release_block(block));
    for (SimtThread &thread : block->threads) {
        if (thread.state != SIMT_ENDED) { simt_fail("threads wait at a barrier that others never reach"); }
    }
}

// The fibers of one thread of the host, made at its first launch. Memory is used only by
// those that have run.
struct SimtFibers {
    std::vector<SimtFiber> fibers;
    char *stacks;
    SimtFibers() : fibers(SIMT_MAX_THREADS) {
        void *base = mmap(nullptr, (size_t)SIMT_STACK * SIMT_MAX_THREADS, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) { simt_fail("no memory for stacks"); }
        stacks = (char *)base;
        for (size_t i = 0; i < fibers.size(); i++) {
            fibers[i].started = false;
            fibers[i].stack = stacks + i * SIMT_STACK;
            // Not all alike: the tops of a warp's stacks shall lie in different lines of the cache.
            fibers[i].stack_bytes = SIMT_STACK - i % 16 * 256;
        }
    }
    ~SimtFibers() { munmap(stacks, (size_t)SIMT_STACK * SIMT_MAX_THREADS); }
};

inline SimtFiber *simt_fiber(size_t thread) {
    static thread_local SimtFibers fibers;
    return &fibers.fibers[thread];
}

// A launch, for a test that watches.
struct SimtLaunch {
    const void *kernel;
    dim3 grid, block;
    size_t shared; // bytes of a block
};

// What the threads of kernels have done since somebody set it to 0, as far as it goes
// through the emulator. Counted on each thread of the host.
struct SimtCounts {
    uint64_t product_operations; // of tensor cores; a multiply-add is two
};
inline thread_local SimtCounts simt_counts;

// Called if it is set: which bytes an asynchronous copy reads from global memory.
typedef void (*SimtCopyObserver)(const void *source, size_t bytes);
inline SimtCopyObserver &simt_copy_observer() {
    static SimtCopyObserver observer = nullptr;
    return observer;
}

// Called before every launch if it is set; false: the launch is left out.
typedef bool (*SimtObserver)(const SimtLaunch *launch);
inline SimtObserver &simt_observer() {
    static SimtObserver observer = nullptr;
    return observer;
}

// Runs `body` once for every thread of every block.
inline void simt_launch(dim3 grid, dim3 size, size_t shared_bytes, std::function<void()> body) {
    size_t threads = (size_t)size.x * size.y * size.z, blocks = (size_t)grid.x * grid.y * grid.z;
    if (threads % SIMT_WARP != 0) { simt_fail("a block has no whole number of warps"); }
    if (threads == 0 || threads > SIMT_MAX_THREADS || blocks == 0 || grid.y > 65535 || grid.z > 65535) {
        simt_fail("a launch has no threads, no blocks, or too many of them");
    }
    if (shared_bytes > SIMT_SHARED_LIMIT) { simt_fail("a launch asks for more shared memory than there is"); }
    SimtBlock block;
    block.grid = grid;
    block.size = size;
    block.shared_bytes = shared_bytes;
    void *shared = nullptr; // exactly as large, so that AddressSanitizer sees its end
    if (posix_memalign(&shared, 128, shared_bytes > 0 ? shared_bytes : 1) != 0) {
        simt_fail("no memory for shared memory");
    }
    block.shared = (char *)shared;
    block.threads.resize(threads);
    block.warps.resize((threads + SIMT_WARP - 1) / SIMT_WARP);
    block.running = nullptr;
    block.body = body;
    block.random = 12345 + blocks;
    for (size_t i = 0; i < threads; i++) {
        SimtThread *thread = &block.threads[i];
        thread->number = (int)i;
        thread->index =
            dim3((unsigned)(i % size.x), (unsigned)(i / size.x % size.y), (unsigned)(i / size.x / size.y));
        thread->fiber = simt_fiber(i);
    }
    simt_block() = &block;
    gridDim = grid;
    blockDim = size;
    std::vector<size_t> order;
    simt_permutation(&order, blocks, &block.random);
    for (size_t i : order) {
        block.index =
            dim3((unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y));
        blockIdx = block.index;
        simt_run_block(&block);
    }
    simt_block() = nullptr;
    free(block.shared);
}

// ---- Asynchronous copies into shared memory -------------------------------------------

// Whether `bytes` bytes from `place` on are shared memory of this block.
inline bool simt_is_shared(const void *place, size_t bytes) {
    const SimtBlock *block = simt_block();
    uintptr_t begin = (uintptr_t)block->shared, at = (uintptr_t)place;
    return at >= begin && bytes <= block->shared_bytes && at - begin <= block->shared_bytes - bytes;
}

// Starts a copy of `bytes` bytes, of which `valid` come from `source` and the others are
// zero.
SIMT_UNWATCHED inline void simt_copy_start(void *target, const void *source, size_t bytes, size_t valid) {
    if (!simt_is_shared(target, bytes)) { simt_fail("an asynchronous copy misses shared memory"); }
    bool aligned = (uintptr_t)target % bytes == 0 && (valid == 0 || (uintptr_t)source % bytes == 0);
    if (!aligned) { simt_fail("an asynchronous copy is not aligned"); }
    SimtCopy copy = {target, source, bytes, valid, {0}};
    if (valid > 0) { memcpy(copy.seen, source, valid); }
    if (simt_copy_observer() != nullptr) { simt_copy_observer()(source, valid); }
    memset(target, 0xff, bytes);
    simt_self()->copies.back().push_back(copy);
}

SIMT_UNWATCHED inline void simt_copy_arrive(const SimtCopy *copy) {
    char awaited[SIMT_COPY];
    memset(awaited, 0xff, sizeof awaited);
    if (copy->valid > 0 && memcmp(copy->source, copy->seen, copy->valid) != 0) {
        simt_fail("the source of an asynchronous copy changes while it is under way");
    }
    if (memcmp(copy->target, awaited, copy->bytes) != 0) {
        simt_fail("something is written where an asynchronous copy is to arrive");
    }
    memcpy(copy->target, copy->seen, copy->bytes);
}

inline void simt_copy_commit() { simt_self()->copies.push_back({}); }

// Lets copies arrive until at most `groups` of the committed groups are under way.
inline void simt_copy_wait(size_t groups) {
    std::vector<std::vector<SimtCopy>> &copies = simt_self()->copies;
    while (copies.size() - 1 > groups) {
        for (const SimtCopy &copy : copies.front()) { simt_copy_arrive(&copy); }
        copies.erase(copies.begin());
    }
}
