// Work that is cut into segments of equal length, except at the ends of each stretch of memory.

// Returns the stretch to which a segment belongs: the last one whose first segment is not behind it. `first` holds the first
// segment of each of `count` stretches, ascending. The lanes of a warp look at 32 places at once.
__device__ __forceinline__ unsigned int stretch_of(const unsigned int *first, unsigned int count, unsigned int segment) {
    unsigned int low = 0, high = count;
    while (high - low > 1) {
        const unsigned int step = (high - low + 31) / 32;
        const unsigned int probe = low + step * (threadIdx.x & 31);
        const unsigned int votes = __ballot_sync(0xffffffffu, probe < high && first[probe] <= segment);
        low += step * (31 - __clz(votes));  // lane 0 always votes
        high = high < low + step ? high : low + step;
    }
    return low;
}
