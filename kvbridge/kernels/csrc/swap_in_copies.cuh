// The two ways in which swap-in copies missing rows. Part of swap_in.cu.

// The number of the missing row at a position of the bitmap.
__device__ __forceinline__ u32 number_of(const Shared& shared, u32 position) {
    return shared.before[position / 32] + __popc(shared.missing[position / 32] & ((1u << position % 32) - 1));
}

#if EARLY_ROWS
// Rows that one warp has found missing: `count` of the lists, from `first` on. A lane carries its items of each early row.
struct Early {
    uint4 held[EARLY_ROWS][PASSES];
    u32 first, count;
};

__device__ __forceinline__ void load_row(uint4* held, u64 page, u32 slot) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const u32 item = pass * 32 + threadIdx.x % 32;
        if (item < ITEMS0) held[pass] = load_host<WIDTH0>(page + item_offset(slot, item));
        else if (item < ITEMS) held[pass] = load_host<WIDTH1>(page + item_offset(slot, item));
    }
}

__device__ __forceinline__ void store_row(const uint4* held, u64 page, u32 slot) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const u32 item = pass * 32 + threadIdx.x % 32;
        if (item < ITEMS0) store<WIDTH0>(page + item_offset(slot, item), held[pass]);
        else if (item < ITEMS) store<WIDTH1>(page + item_offset(slot, item), held[pass]);
    }
}

__device__ __forceinline__ void load_early(Early& early, const Shared& shared) {
#pragma unroll
    for (u32 e = 0; e < EARLY_ROWS; ++e)
        if (e < early.count) load_row(early.held[e], shared.page[early.first + e], (u32)shared.row[early.first + e] % SLOTS);
}

__device__ __forceinline__ void finish_early(Early& early, const Shared& shared, int request, u64 hot_base, u64 hot_stride) {
    for (u32 start = 0; start < early.count; start += EARLY_ROWS) {
        if (start) {  // more than could be held
#pragma unroll
            for (u32 e = 0; e < EARLY_ROWS; ++e) {
                const u32 at = early.first + start + e;
                if (start + e < early.count) load_row(early.held[e], shared.page[at], (u32)shared.row[at] % SLOTS);
            }
        }
#pragma unroll
        for (u32 e = 0; e < EARLY_ROWS; ++e) {
            if (start + e >= early.count) continue;
            const u32 row = physical(request, shared.victim[number_of(shared, shared.position[early.first + start + e])]);
            store_row(early.held[e], hot_base + row / SLOTS * hot_stride, row % SLOTS);
        }
    }
}
#else
__device__ void copy_missing(const Shared& shared, u32 missing, u32 rank, u32 blocks, int request, u64 hot_base, u64 hot_stride) {
    const u32 share = missing > rank ? (missing - rank + blocks - 1) / blocks : 0;
    const u32 items = share * ITEMS;
    for (u32 first = threadIdx.x; first < items; first += THREADS * UNROLL) {
        uint4 value[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 at = first + u * THREADS;
            if (at >= items) break;
            const u32 m = at / ITEMS * blocks + rank, item = at % ITEMS;
            const u64 source = shared.page[m] + item_offset((u32)shared.row[m] % SLOTS, item);
            value[u] = item < ITEMS0 ? load_host<WIDTH0>(source) : load_host<WIDTH1>(source);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 at = first + u * THREADS;
            if (at >= items) break;
            const u32 m = at / ITEMS * blocks + rank, item = at % ITEMS;
            const u32 row = physical(request, shared.victim[m]);
            const u64 target = hot_base + row / SLOTS * hot_stride + item_offset(row % SLOTS, item);
            if (item < ITEMS0) store<WIDTH0>(target, value[u]);
            else store<WIDTH1>(target, value[u]);
        }
    }
}
#endif
