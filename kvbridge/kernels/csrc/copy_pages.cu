// Scattered pages of many regions, in one launch. See kernels/page_copies.py for what is copied.
//
// The work is a list of segments: of the pairs in the order of their groups, then of their pages, LOADS * 512 bytes each. Warp w
// of W takes segments w, w + W, ..., so all warps are in the same group at about the same time and early groups end early.

#include "copies.cuh"

#ifndef LOADS  // so that the file can be compiled by itself
#define LOADS 4
#define MOST_TABLES 4
#endif

#define SEGMENT (LOADS * 512)

struct PagePair {
    Side source;
    Side destination;
    Address page_bytes;
    unsigned int group;
    unsigned int table;
    unsigned int segments;
    unsigned int unused[3];
};

struct Lists {
    const int *source;
    const int *destination;
    unsigned int count;
};

// What a warp has done of a group that it has left, and has not counted yet.
struct Left {
    unsigned int group;
    unsigned long long done;  // 0: nothing to count
};

struct Flags {
    State *state;
    unsigned int count;  // 0 when nobody waits for groups

    // How many segments of a group are done; 0 between launches.
    __device__ __forceinline__ unsigned long long *counter(unsigned int group) const {
        return reinterpret_cast<unsigned long long *>(state + 1) + group;
    }

    // Raise a group's flag by one: everything that was written before is visible to whoever sees it.
    __device__ __forceinline__ void raise(unsigned int group) const {
        unsigned int *flag = reinterpret_cast<unsigned int *>(counter(count)) + group;
        const unsigned int next = *flag + 1;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(next) : "memory");
    }
};

__device__ __forceinline__ unsigned long long load_counter(const unsigned long long *counter) {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
}

// Count what this warp has done of a group.
__device__ __forceinline__ void count_left(const Flags &flags, Left &left) {
    if (left.done == 0) return;
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        __threadfence();
        atomicAdd(flags.counter(left.group), left.done);
    }
    left.done = 0;
}

// Segments begin at cache lines of the side that lies on the host: partly used lines cost the link as much as whole ones.
// A fence waits until the warp's writes are done, so the group before is counted while the next loads are on their way.
__device__ __forceinline__ void copy_segment(const char *from, char *to, int page_bytes, unsigned int segment,
                                             bool align_source, const Flags &flags, Left &left) {
    const int ahead = static_cast<int>(reinterpret_cast<Address>(align_source ? from : to) & 127);
    const int first = static_cast<int>(segment) * SEGMENT - ahead + static_cast<int>(threadIdx.x & 31) * 16;
    uint4 held[LOADS];
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        const int offset = first + load * 512;
        if (offset >= 0 && offset < page_bytes) held[load] = load_16(from + offset);
    }
    count_left(flags, left);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        const int offset = first + load * 512;
        if (offset >= 0 && offset < page_bytes) store_16(to + offset, held[load]);
    }
}

__device__ __forceinline__ void copy_item(const PagePair &pair, const Lists &lists, unsigned int item, bool align_source,
                                          const Flags &flags, Left &left) {
    const unsigned int index = item / pair.segments;
    const unsigned int segment = item - index * pair.segments;
    const int source = lists.source[index];
    const int destination = lists.destination[index];
    if (source == -1 || destination == -1) return;
    if (static_cast<unsigned int>(source) >= pair.source.page_count ||
        static_cast<unsigned int>(destination) >= pair.destination.page_count) {
        if (segment == 0 && (threadIdx.x & 31) == 0) atomicAdd(&flags.state->refused, 1u);
        return;
    }
    copy_segment(page_address(pair.source, source), page_address(pair.destination, destination),
                 static_cast<int>(pair.page_bytes), segment, align_source, flags, left);
}

// Raise the flag of each group when all its segments are counted. A thread of its own does it: a release to the whole system takes
// more than a microsecond, and a warp that copies would begin the next group late, end it last, and so release that one, too.
__device__ void watch_groups(const PagePair *pairs, unsigned int pair_count, const Lists *lists, const Flags &flags) {
    unsigned long long total = 0;
    for (unsigned int index = 0; index < pair_count; ++index) {
        const PagePair &pair = pairs[index];
        total += lists[pair.table].count * pair.segments;
        if (index + 1 != pair_count && pairs[index + 1].group == pair.group) continue;
        unsigned long long seen = load_counter(flags.counter(pair.group));
        while (seen != total) {
            __nanosleep(50);
            seen = load_counter(flags.counter(pair.group));
        }
        *flags.counter(pair.group) = 0;
        flags.raise(pair.group);
        total = 0;
    }
}

// `groups`: how many flags there are, or 0 when nobody waits for them.
extern "C" __global__ void __launch_bounds__(1024)
    copy_pages(const PagePair *pairs, unsigned long long pair_count, State *state, unsigned long long groups,
               unsigned long long align_source,  //
               const int *source_0, const int *destination_0, unsigned long long count_0,  //
               const int *source_1, const int *destination_1, unsigned long long count_1,  //
               const int *source_2, const int *destination_2, unsigned long long count_2,  //
               const int *source_3, const int *destination_3, unsigned long long count_3) {
    extern __shared__ uint4 shared[];
    __shared__ Lists lists[4];
    static_assert(sizeof(PagePair) == 96 && MOST_TABLES == 4, "the host writes it so");

    for (unsigned int word = threadIdx.x; word < pair_count * (sizeof(PagePair) / 16); word += blockDim.x)
        shared[word] = reinterpret_cast<const uint4 *>(pairs)[word];
    if (threadIdx.x == 0) lists[0] = {source_0, destination_0, static_cast<unsigned int>(count_0)};
    if (threadIdx.x == 32) lists[1] = {source_1, destination_1, static_cast<unsigned int>(count_1)};
    if (threadIdx.x == 64) lists[2] = {source_2, destination_2, static_cast<unsigned int>(count_2)};
    if (threadIdx.x == 96) lists[3] = {source_3, destination_3, static_cast<unsigned int>(count_3)};
    __syncthreads();

    const PagePair *const held = reinterpret_cast<const PagePair *>(shared);
    const Flags flags = {state, static_cast<unsigned int>(groups)};
    const unsigned int watchers = groups != 0;
    if (warp_of_grid() < watchers) {
        if (threadIdx.x == 0) watch_groups(held, static_cast<unsigned int>(pair_count), lists, flags);
        return;
    }
    const unsigned int warps = warps_of_grid() - watchers;
    Left left = {};
    unsigned int next = warp_of_grid() - watchers;
    unsigned int done = 0;
    for (unsigned int index = 0; index < pair_count; ++index) {
        const PagePair &pair = held[index];
        const Lists &named = lists[pair.table];
        const unsigned int items = named.count * pair.segments;  // the host sees that it fits
        for (; next < items; next += warps, ++done) copy_item(pair, named, next, align_source != 0, flags, left);
        next -= items;
        if (watchers && done && (index + 1 == pair_count || held[index + 1].group != pair.group)) {
            count_left(flags, left);  // of pages that were left out nothing was copied
            left = {pair.group, done};
            done = 0;
        }
    }
    count_left(flags, left);
}
