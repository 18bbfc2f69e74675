// Raw CRC-32C of stretches of device memory. See kernels/digest.py for the tables and the arithmetic behind them.
//
// A warp reads a segment in rows of 512 bytes, each thread 16 bytes of a row. A thread's register is the checksum of its own bytes,
// as if all other threads' bytes were zeros: so what it does from row to row is to look up, for each of its 16 bytes, what that
// byte has become 512 bytes further on. At the end each thread moves its register to the end of the stretch, by one product with
// a power of x for every ten bits of the distance, and the exclusive or of everything is the checksum.

#include "stretches.cuh"

#ifndef SEGMENT  // so that the file can be compiled by itself
#define SEGMENT 8192
#define BATCH 4
#define THREADS 512
#define LEVELS 4
#define BIAS 4096
#endif

#define ROW 512
#define GENERATOR 0x82f63b78u

typedef unsigned long long Address;

struct Tables {
    unsigned int advance[16][256];       // what a byte at place i of a thread's 16 becomes 512 bytes after the thread's first
    unsigned int powers[LEVELS][1024];   // x^(8 * (i - BIAS)), then x^(8 * i * 1024), x^(8 * i * 1024^2), ...
};

__device__ __forceinline__ unsigned int product(unsigned int left, unsigned int right) {
    unsigned int result = 0;
#pragma unroll 8
    for (int bit = 31; bit >= 0; --bit) {
        if (left >> bit & 1) result ^= right;
        right = right >> 1 ^ (right & 1 ? GENERATOR : 0);
    }
    return result;
}

// The 16 bytes at `place`, with zeros for those outside of [start, stop).
__device__ __forceinline__ uint4 read(Address place, Address start, Address stop) {
    if (place >= start && place + 16 <= stop) {
        uint4 value;
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "l"(place));
        return value;
    }
    unsigned int words[4] = {0, 0, 0, 0};
#pragma unroll
    for (unsigned int byte = 0; byte < 16; ++byte) {
        const Address at = place + byte;
        if (at >= start && at < stop)
            words[byte / 4] |= static_cast<unsigned int>(*reinterpret_cast<const unsigned char *>(at)) << (byte % 4 * 8);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ unsigned int advanced(const unsigned int (*advance)[256], unsigned int word) {
    return advance[0][word & 255] ^ advance[1][word >> 8 & 255] ^ advance[2][word >> 16 & 255] ^ advance[3][word >> 24];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    digest(const Address *addresses, const unsigned long long *lengths, const unsigned int *first_segments,
           unsigned long long count, unsigned long long segments, unsigned int *results, const Tables *tables) {
    __shared__ unsigned int advance[16][256];
    for (unsigned int word = threadIdx.x; word < 16 * 256 / 4; word += THREADS)
        reinterpret_cast<uint4 *>(advance)[word] = reinterpret_cast<const uint4 *>(tables->advance)[word];
    __syncthreads();

    const unsigned int lane = threadIdx.x & 31;
    const unsigned int warps = gridDim.x * (THREADS / 32);
    for (unsigned long long item = (threadIdx.x >> 5) * gridDim.x + blockIdx.x; item < segments; item += warps) {
        const unsigned int segment = static_cast<unsigned int>(item);
        const unsigned int index = stretch_of(first_segments, static_cast<unsigned int>(count), segment);
        const Address start = addresses[index];
        const Address stop = start + lengths[index];
        const Address first = (start & ~127ull) + static_cast<Address>(segment - first_segments[index]) * SEGMENT;
        const Address last = first + SEGMENT < stop ? first + SEGMENT : stop;

        unsigned int held = 0;
        Address place = first + lane * 16;
        for (Address row = first; row < last; row += BATCH * ROW) {
            uint4 read_ahead[BATCH];
#pragma unroll
            for (int next = 0; next < BATCH; ++next) read_ahead[next] = read(place + next * ROW, start, stop);
#pragma unroll
            for (int next = 0; next < BATCH; ++next) {
                const uint4 value = read_ahead[next];
                held = advanced(advance, held ^ value.x) ^ advanced(advance + 4, value.y) ^ advanced(advance + 8, value.z) ^
                       advanced(advance + 12, value.w);
            }
            place += BATCH * ROW;
        }
        // The register stands for bytes that end at `place`; they are to be followed by all bytes up to `stop`.
        Address distance = stop + BIAS - place;
        for (int level = 0; level < LEVELS; ++level, distance >>= 10)
            if (level == 0 || (distance & 1023) != 0) held = product(held, tables->powers[level][distance & 1023]);
        held = __reduce_xor_sync(0xffffffffu, held);
        if (lane == 0) atomicXor(results + index, held);
    }
}
