// What a decode step reads, without what it computes: the least time that reading can take. Nothing is kept of what was read.

#define VALUE_BYTES 576
#define SCALE_BYTES 8
#define SLOTS 64

__device__ __forceinline__ unsigned mixed(uint4 word) { return word.x ^ word.y ^ word.z ^ word.w; }

// A store that never happens, so that no load is left out.
__device__ __forceinline__ void keep(unsigned value, unsigned* out) {
    if (value == 0x9E3779B9u) *out = value;
}

extern "C" __global__ void __launch_bounds__(512)
read_all(const uint4* __restrict__ from, unsigned long long words, unsigned* out) {
    const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long at = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned kept = 0;
    for (; at + 7 * step < words; at += 8 * step) {
        uint4 held[8];
#pragma unroll
        for (int number = 0; number < 8; ++number) held[number] = from[at + number * step];
#pragma unroll
        for (int number = 0; number < 8; ++number) kept ^= mixed(held[number]);
    }
    for (; at < words; at += step) kept ^= mixed(from[at]);
    keep(kept, out);
}

// One warp a row; rows are numbered page * SLOTS + slot, and a negative one is none.
extern "C" __global__ void __launch_bounds__(512)
read_rows(const int* __restrict__ rows, int count, const char* __restrict__ pages, unsigned long long page_bytes, unsigned* out) {
    const int lane = threadIdx.x % 32;
    const int warps = gridDim.x * (blockDim.x / 32);
    unsigned kept = 0;
    for (int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < count; i += warps) {
        const int row = rows[i];
        if (row < 0) continue;
        const char* page = pages + row / SLOTS * page_bytes;
        const uint4* values = reinterpret_cast<const uint4*>(page + row % SLOTS * VALUE_BYTES);
        kept ^= mixed(values[lane]);
        if (lane < 4) kept ^= mixed(values[32 + lane]);
        if (lane == 4) {
            const uint2 scale = *reinterpret_cast<const uint2*>(page + SLOTS * VALUE_BYTES + row % SLOTS * SCALE_BYTES);
            kept ^= scale.x ^ scale.y;
        }
    }
    keep(kept, out);
}
