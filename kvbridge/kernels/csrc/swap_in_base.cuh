// What the blocks of swap-in share, and the words of their trade: scans, loads from the host, ages. Part of swap_in.cu.

struct Shared {
    u64 page[LISTED];         // host address of the page that holds a missing row
    int row[LISTED];          // its number in the request
#if EARLY_ROWS
    u32 position[LISTED];     // where it is in the bitmap
#endif
    u32 used[HOT_WORDS];      // hot slots that this step reads
    u32 missing[ROW_WORDS];   // rows to load, by the rank of their page, then slot
    u16 before[ROW_WORDS];    // bits set in earlier words
    u16 victim[TOP_K];        // hot slot for missing row m
    u32 scratch[2][32];
    u32 last;                 // whether this block is the last that reads the state
};

__device__ __forceinline__ u32 warp_inclusive(u32 value) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// The sum of `value` over the threads before this one, and over all of them. One barrier; `scratch` must not be in use.
__device__ __forceinline__ u32 block_exclusive(u32 value, u32* scratch, u32* total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 inclusive = warp_inclusive(value);
    if (lane == 31) scratch[warp] = inclusive;
    __syncthreads();
    const u32 sums = warp_inclusive(lane < WARPS ? scratch[lane] : 0);
    *total = __shfl_sync(~0u, sums, WARPS - 1);
    const u32 earlier = __shfl_sync(~0u, sums, warp ? warp - 1 : 0);
    return inclusive - value + (warp ? earlier : 0);
}

template <int WIDTH>
__device__ __forceinline__ uint4 load_host(u64 address) {
    uint4 v = {0, 0, 0, 0};
    if constexpr (WIDTH == 16)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    else if constexpr (WIDTH == 8)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    else
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v.x) : "l"(address));
    return v;
}

template <int WIDTH>
__device__ __forceinline__ void store(u64 address, uint4 v) {
    if constexpr (WIDTH == 16) *reinterpret_cast<uint4*>(address) = v;
    else if constexpr (WIDTH == 8) *reinterpret_cast<uint2*>(address) = make_uint2(v.x, v.y);
    else *reinterpret_cast<u32*>(address) = v.x;
}

// Count a block that has read the state; returns how many came before. A release waits for every earlier access of this thread, so
// it comes before the loads from the host. Nothing is read that others wrote: the last block only writes what all have read, and a
// store that depends on the answer cannot come before it; so no acquire, which would hold back the loads that follow.
__device__ __forceinline__ u32 arrive(int* arrivals) {
    u32 before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    return before;
}

// Slots that this step does not use, of one age: 0 is the present generation, 4 is older than all that are remembered.
__device__ __forceinline__ u32 of_age(uint4 planes, u32 used, int age) {
    switch (age) {
        case 4: return ~(planes.x | planes.y | planes.z | planes.w | used);
        case 3: return planes.w & ~(planes.x | planes.y | planes.z | used);
        case 2: return planes.z & ~(planes.x | planes.y | used);
        case 1: return planes.y & ~(planes.x | used);
        default: return planes.x & ~used;
    }
}

__device__ __forceinline__ int physical(int request, int slot) { return request * (HOT_ROWS + RING_ROWS) + slot; }

// Where part 0 or 1 of physical row `row` begins in pages from `base` on.
__device__ __forceinline__ u64 item_offset(u32 slot, u32 item) {
    return item < ITEMS0 ? slot * PART0_BYTES + item * WIDTH0
                         : SLOTS * PART0_BYTES + slot * PART1_BYTES + (item - ITEMS0) * WIDTH1;
}
