// How words are loaded, and which warp takes which segment.

typedef unsigned long long Address;

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

// The first segment of a warp. Neighbouring segments go to different blocks, so that little work still uses many.
__device__ __forceinline__ unsigned int warp_of_grid() { return (threadIdx.x >> 5) * gridDim.x + blockIdx.x; }

__device__ __forceinline__ unsigned int warps_of_grid() { return gridDim.x * (blockDim.x >> 5); }
