// What every copy kernel shares: where pages lie, how words are loaded and stored, what launches leave behind.

typedef unsigned long long Address;

// One side of a pair; `kernels/page_copies.py` writes it (_SIDE).
struct Side {
    Address first_extent;  // where page 0 begins
    Address extents;       // where the addresses of all extents lie, in device memory
    Address page_stride;
    unsigned int pages_per_extent;
    unsigned int page_count;
};

// Followed by uint64 done[flags] and uint32 flag[flags]; `kernels/page_copies.py` makes it.
struct State {
    unsigned int refused;
    unsigned int unused;
};

__device__ __forceinline__ char *page_address(const Side &side, unsigned int page) {
    Address base = side.first_extent;
    if (page >= side.pages_per_extent) {
        const unsigned int extent = page / side.pages_per_extent;
        base = __ldg(reinterpret_cast<const Address *>(side.extents) + extent);
        page -= extent * side.pages_per_extent;
    }
    return reinterpret_cast<char *>(base + page * side.page_stride);
}

// Bytes that are moved once have no place in the first-level cache, and host memory must be read anew in every launch.
__device__ __forceinline__ uint4 load_16(const void *address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

__device__ __forceinline__ uint2 load_8(const void *address) {
    uint2 value;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
    return value;
}

__device__ __forceinline__ unsigned int load_4(const void *address) {
    unsigned int value;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
}

__device__ __forceinline__ void store_16(void *address, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// The first segment of a warp. Neighbouring segments go to different blocks, so that little work still uses many.
__device__ __forceinline__ unsigned int warp_of_grid() { return (threadIdx.x >> 5) * gridDim.x + blockIdx.x; }

__device__ __forceinline__ unsigned int warps_of_grid() { return gridDim.x * (blockDim.x >> 5); }
