// One layer's swap-in: the rows that the indexer selected, as physical rows of the hot region; what is missing is loaded from the
// host. See kernels/swap_in.py for the meaning of the arrays, and the reference there for the exact rules.
//
// Several blocks work for one request. Every block looks up all selected rows by itself and comes to the same plan, so that
// nothing has to be passed between blocks and none ever waits for another; then each copies its share of the missing rows. The
// last block that has read the state writes it, since then nobody reads it any more. Lookup costs one gather for each selected
// row, whatever the size of the hot region; missing rows go into a bitmap over the request's rows in the order of their host
// addresses, which removes duplicates and sorts them at once.
//
// Copies are made in one of two ways, by the batch that the kernel is compiled for. EARLY_ROWS > 0, for small batches: each warp
// starts to load the missing rows that its own lanes found, up to so many, before there is a plan; planning then costs no time,
// since a host read takes longer. EARLY_ROWS 0, for large batches, where the link is the limit: the block's share of the list, in
// the order of host addresses.

#ifndef HOT_ROWS  // so that the file can be compiled by itself
#define HOT_ROWS 4096
#define RING_ROWS 128
#define MAX_ROWS 32768
#define TOP_K 512
#define SLOTS 64
#define PART0_BYTES 576
#define PART1_BYTES 8
#define THREADS 512
#define EARLY_ROWS 8
#endif

#define HOT_WORDS (HOT_ROWS / 32)
#define ROW_WORDS (MAX_ROWS / 32)
#define WANTED_EACH ((TOP_K + THREADS - 1) / THREADS)
#define WORDS_EACH ((HOT_WORDS + THREADS - 1) / THREADS)
#define ROW_WORDS_EACH ((ROW_WORDS + THREADS - 1) / THREADS)
#define WARPS (THREADS / 32)
#define GENERATION_ROWS (HOT_ROWS * 2 / 3)
#define UNROLL 4
#define PASSES ((ITEMS + 31) / 32)
#define LISTED (THREADS * WANTED_EACH)

#define WIDTH_OF(bytes) ((bytes) % 16 == 0 ? 16 : (bytes) % 8 == 0 ? 8 : 4)
#define WIDTH0 WIDTH_OF(PART0_BYTES)
#define WIDTH1 WIDTH_OF(PART1_BYTES)
#define ITEMS0 (PART0_BYTES / WIDTH0)
#define ITEMS (ITEMS0 + PART1_BYTES / WIDTH1)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#include "swap_in_base.cuh"
#include "swap_in_copies.cuh"

__device__ __forceinline__ void move_in(int row, int victim, short* slot_of_row, int* row_of_slot) {
    const int old = row_of_slot[victim];
    if (old >= 0 && old != row) slot_of_row[old] = -1;  // equal when the same row was selected twice
    row_of_slot[victim] = row;
    slot_of_row[row] = victim;
}

// Mark what this step used or loaded, and begin a new generation when the present one has seen enough slots.
__device__ void remember(Shared& shared, uint4* ages, const uint4* planes, const u32* chosen, int* tallies, u32 recent, u32 missing) {
    u32 counts = 0;  // slots used (high half), slots new to the generation (low half)
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) {
        const u32 word = threadIdx.x * WORDS_EACH + i;
        if (word >= HOT_WORDS) break;
        const u32 used = shared.used[word];
        counts += (__popc(used) << 16) + __popc((used | chosen[i]) & ~planes[i].x);
    }
    u32 total;
    block_exclusive(counts, shared.scratch[1], &total);
    recent += total & 0xffff;
    const bool over = recent >= GENERATION_ROWS;
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) {
        const u32 word = threadIdx.x * WORDS_EACH + i;
        if (word >= HOT_WORDS) break;
        const uint4 old = planes[i];
        const u32 now = old.x | shared.used[word] | chosen[i];
        if (over) ages[word] = make_uint4(0, now, old.y, old.z);
        else if (now != old.x) ages[word] = make_uint4(now, old.y, old.z, old.w);
    }
    if (threadIdx.x == 0) {
        tallies[0] = over ? 0 : recent;
        tallies[1] += total >> 16;
        tallies[2] += missing;
        tallies[3] = 0;  // nobody has arrived for the next step
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, EARLY_ROWS ? 1 : 4)
swap_in(const int* __restrict__ top_k, int* __restrict__ out, const int* __restrict__ request_slots,
        const int* __restrict__ row_counts, short* slot_of_row, int* row_of_slot, uint4* ages, int* tallies,
        const int2* __restrict__ pages, const int* __restrict__ ring_begin, const u64* __restrict__ host_extents,
        u64 host_base, u64 host_stride, u64 hot_base, u64 hot_stride, int pages_per_extent, u32 blocks) {
    extern __shared__ uint4 dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const u32 thread = threadIdx.x, rank = blockIdx.x % blocks, entry = blockIdx.x / blocks;

    int row[WANTED_EACH];
#pragma unroll
    for (int i = 0; i < WANTED_EACH; ++i) {
        const u32 at = thread + i * THREADS;
        row[i] = at < TOP_K ? top_k[(u64)entry * TOP_K + at] : -1;
    }
    const int request = request_slots[entry], count = row_counts[entry];
    for (u32 word = thread; word < HOT_WORDS; word += THREADS) shared.used[word] = 0;
    for (u32 word = thread; word < ROW_WORDS; word += THREADS) shared.missing[word] = 0;
    if (request < 0) {  // padding of the batch
        for (u32 at = thread; rank == 0 && at < TOP_K; at += THREADS) out[(u64)entry * TOP_K + at] = -1;
        return;
    }
    slot_of_row += (u64)request * MAX_ROWS;
    row_of_slot += (u64)request * HOT_ROWS;
    ages += (u64)request * HOT_WORDS;
    tallies += request * 4;
    pages += (u64)request * (MAX_ROWS / SLOTS);

    const u32 recent = tallies[0];  // slots of the present generation
    uint4 planes[WORDS_EACH];
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) {
        const u32 word = thread * WORDS_EACH + i;
        planes[i] = word < HOT_WORDS ? ages[word] : make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    short slot[WANTED_EACH];
    int2 page[WANTED_EACH];  // host page, rank
#pragma unroll
    for (int i = 0; i < WANTED_EACH; ++i) {  // for ring rows too: where the ring begins is still on its way from memory
        const bool exists = row[i] >= 0 && row[i] < min(count, MAX_ROWS);
        slot[i] = exists ? slot_of_row[row[i]] : -1;
        page[i] = exists ? pages[row[i] / SLOTS] : make_int2(0, 0);
    }
    const int newest_page = (count - 1) / SLOTS;
    const int ring_start = max(ring_begin[request], (newest_page - (RING_ROWS / SLOTS - 1)) * SLOTS);
    bool on_host[WANTED_EACH];
#pragma unroll
    for (int i = 0; i < WANTED_EACH; ++i) on_host[i] = row[i] >= 0 && row[i] < count && row[i] < ring_start;
    __syncthreads();  // bitmaps are clear
    bool any_missing = false;
#pragma unroll
    for (int i = 0; i < WANTED_EACH; ++i) {
        const u32 at = thread + i * THREADS;
        if (at >= TOP_K) break;
        const bool missing = on_host[i] && slot[i] < 0;
        if (missing) {
            const u32 position = (u32)page[i].y * SLOTS + (u32)row[i] % SLOTS;
            atomicOr(&shared.missing[position / 32], 1u << position % 32);
            any_missing = true;
        } else if (on_host[i]) {
            atomicOr(&shared.used[slot[i] / 32], 1u << slot[i] % 32);
        }
        if (rank == 0 && !missing) {
            int found = -1;
            if (on_host[i]) found = physical(request, slot[i]);
            else if (row[i] >= 0 && row[i] < count) found = physical(request, HOT_ROWS + row[i] % RING_ROWS);
            out[(u64)entry * TOP_K + at] = found;
        }
    }
    const auto page_address = [&](u32 number) {
        return host_extents ? host_extents[number / pages_per_extent] + number % pages_per_extent * host_stride
                            : host_base + number * host_stride;
    };
#if EARLY_ROWS
    Early early;
    early.first = thread / 32 * 32 * WANTED_EACH;
    early.count = 0;
#pragma unroll
    for (int i = 0; i < WANTED_EACH; ++i) {
        const bool listed = on_host[i] && slot[i] < 0 && thread % blocks == rank;
        const u32 lanes = __ballot_sync(~0u, listed);
        if (listed) {
            const u32 at = early.first + early.count + __popc(lanes & ((1u << thread % 32) - 1));
            shared.page[at] = page_address(page[i].x);
            shared.row[at] = row[i];
            shared.position[at] = (u32)page[i].y * SLOTS + (u32)row[i] % SLOTS;
        }
        early.count += __popc(lanes);
    }
#endif
    u32 chosen[WORDS_EACH];
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) chosen[i] = 0;
    if (!__syncthreads_or(any_missing)) {
        if (rank == 0) remember(shared, ages, planes, chosen, tallies, recent, 0);
        return;
    }
    // The barrier has ordered every read of this block before its arrival.
    u32 arrived = 0;
    if (thread == 0) arrived = arrive(&tallies[3]);
#if EARLY_ROWS
    load_early(early, shared);
#endif

    // Number the missing rows, and the slots that may give way.
    const u32 first_word = min(thread * ROW_WORDS_EACH, ROW_WORDS), last_word = min(first_word + ROW_WORDS_EACH, ROW_WORDS);
    u32 mine = 0;
    for (u32 word = first_word; word < last_word; ++word) {
        shared.before[word] = mine;
        mine += __popc(shared.missing[word]);
    }
    u32 used[WORDS_EACH], candidates = 0;
#pragma unroll
    for (int i = 0; i < WORDS_EACH; ++i) {
        const u32 word = thread * WORDS_EACH + i;
        used[i] = word < HOT_WORDS ? shared.used[word] : ~0u;
        candidates += __popc(of_age(planes[i], used[i], 4));
    }
    u32 totals;
    const u32 earlier = block_exclusive(mine << 16 | candidates, shared.scratch[0], &totals);
    const u32 missing = totals >> 16;
    for (u32 word = first_word; word < last_word; ++word) shared.before[word] += earlier >> 16;
    u32 ordinal = earlier & 0xffff, taken = 0;
    totals &= 0xffff;
    for (int age = 4;;) {
#pragma unroll
        for (int i = 0; i < WORDS_EACH; ++i) {
            u32 left = of_age(planes[i], used[i], age);
            while (left && ordinal < missing) {
                const u32 bit = __ffs(left) - 1;
                shared.victim[ordinal++] = (thread * WORDS_EACH + i) * 32 + bit;
                chosen[i] |= 1u << bit;
                left &= left - 1;
            }
        }
        taken += totals;
        if (taken >= missing || --age < 0) break;
        candidates = 0;
#pragma unroll
        for (int i = 0; i < WORDS_EACH; ++i) candidates += __popc(of_age(planes[i], used[i], age));
        __syncthreads();
        ordinal = taken + block_exclusive(candidates, shared.scratch[0], &totals);
    }
    if (thread == 0) shared.last = arrived + 1 == blocks;
    __syncthreads();

#if EARLY_ROWS
    if (rank == 0) {
#pragma unroll
        for (int i = 0; i < WANTED_EACH; ++i) {
            const u32 at = thread + i * THREADS;
            if (at >= TOP_K || !on_host[i] || slot[i] >= 0) continue;
            const u32 m = number_of(shared, (u32)page[i].y * SLOTS + (u32)row[i] % SLOTS);
            out[(u64)entry * TOP_K + at] = physical(request, shared.victim[m]);
        }
    }
    if (shared.last) {
#pragma unroll
        for (int i = 0; i < WANTED_EACH; ++i) {
            if (!on_host[i] || slot[i] >= 0) continue;
            const u32 m = number_of(shared, (u32)page[i].y * SLOTS + (u32)row[i] % SLOTS);
            move_in(row[i], shared.victim[m], slot_of_row, row_of_slot);
        }
        remember(shared, ages, planes, chosen, tallies, recent, missing);
    }
    finish_early(early, shared, request, hot_base, hot_stride);
#else
    // List the missing rows in the order of their host addresses; equal rows write equal facts.
#pragma unroll
    for (int i = 0; i < WANTED_EACH; ++i) {
        const u32 at = thread + i * THREADS;
        if (at >= TOP_K || !on_host[i] || slot[i] >= 0) continue;
        const u32 position = (u32)page[i].y * SLOTS + (u32)row[i] % SLOTS;
        const u32 m = number_of(shared, position);
        shared.page[m] = page_address(page[i].x);
        shared.row[m] = row[i];
        if (rank == 0) out[(u64)entry * TOP_K + at] = physical(request, shared.victim[m]);
    }
    __syncthreads();
    copy_missing(shared, missing, rank, blocks, request, hot_base, hot_stride);
    if (shared.last) {
        for (u32 m = thread; m < missing; m += THREADS) move_in(shared.row[m], shared.victim[m], slot_of_row, row_of_slot);
        remember(shared, ages, planes, chosen, tallies, recent, missing);
    }
#endif
}
