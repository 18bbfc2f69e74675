// Copies by address: stretches of any length at any alignment, in one launch. See kernels/copies.py.
//
// Stretches are cut into segments of SEGMENT bytes that begin at cache lines of the destination; a warp copies one at a time, in
// the widest words that source and destination have in common.

#include "copies.cuh"
#include "stretches.cuh"

#ifndef SEGMENT  // so that the file can be compiled by itself
#define SEGMENT 4096
#define THREADS 512
#endif

#define LOADS 8

__device__ __forceinline__ void load(uint4 &value, const char *from) { value = load_16(from); }
__device__ __forceinline__ void load(uint2 &value, const char *from) { value = load_8(from); }
__device__ __forceinline__ void load(unsigned int &value, const char *from) { value = load_4(from); }
__device__ __forceinline__ void load(unsigned char &value, const char *from) {
    value = *reinterpret_cast<const volatile unsigned char *>(from);
}

// Both addresses are multiples of the word's size, and so is `bytes`.
template <typename Word>
__device__ __forceinline__ void copy_words(const char *from, char *to, unsigned int bytes) {
    for (unsigned int first = (threadIdx.x & 31) * sizeof(Word); first < bytes; first += LOADS * 32 * sizeof(Word)) {
        Word held[LOADS];
#pragma unroll
        for (unsigned int step = 0; step < LOADS; ++step) {
            const unsigned int offset = first + step * 32 * sizeof(Word);
            if (offset < bytes) load(held[step], from + offset);
        }
#pragma unroll
        for (unsigned int step = 0; step < LOADS; ++step) {
            const unsigned int offset = first + step * 32 * sizeof(Word);
            if (offset < bytes) *reinterpret_cast<Word *>(to + offset) = held[step];
        }
    }
}

// Bytes up to the first whole word of the destination, whole words, and the bytes that are left.
template <typename Word>
__device__ __forceinline__ void copy_aligned(const char *from, char *to, unsigned int bytes) {
    const unsigned int ahead = static_cast<unsigned int>(0 - reinterpret_cast<Address>(to)) & (sizeof(Word) - 1);
    const unsigned int head = ahead < bytes ? ahead : bytes;
    const unsigned int body = (bytes - head) & ~static_cast<unsigned int>(sizeof(Word) - 1);
    const unsigned int lane = threadIdx.x & 31;
    if (lane < head) to[lane] = from[lane];
    copy_words<Word>(from + head, to + head, body);
    const unsigned int rest = head + body + lane;
    if (rest < bytes) to[rest] = from[rest];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_stretches(const Address *sources, const Address *destinations, const unsigned long long *lengths,
                   const unsigned int *first_segments, unsigned long long count, unsigned long long segments) {
    for (unsigned long long item = warp_of_grid(); item < segments; item += warps_of_grid()) {
        const unsigned int segment = static_cast<unsigned int>(item);
        const unsigned int index = stretch_of(first_segments, static_cast<unsigned int>(count), segment);
        const Address destination = destinations[index];
        const long long length = static_cast<long long>(lengths[index]);
        const long long begin = static_cast<long long>(segment - first_segments[index]) * SEGMENT - (destination & 127);
        const long long start = begin < 0 ? 0 : begin;
        const long long stop = begin + SEGMENT < length ? begin + SEGMENT : length;
        const char *const from = reinterpret_cast<const char *>(sources[index] + start);
        char *const to = reinterpret_cast<char *>(destination + start);
        const unsigned int bytes = static_cast<unsigned int>(stop - start);
        const unsigned int differing = static_cast<unsigned int>(sources[index] ^ destination);
        if ((differing & 15) == 0) {
            copy_aligned<uint4>(from, to, bytes);
        } else if ((differing & 7) == 0) {
            copy_aligned<uint2>(from, to, bytes);
        } else if ((differing & 3) == 0) {
            copy_aligned<unsigned int>(from, to, bytes);
        } else {
            copy_words<unsigned char>(from, to, bytes);
        }
    }
}
