// New rows into the hot region: row i goes to physical row places[i], its parts apart; a negative place is skipped.
// See kernels/swap_in.py. One block a row.

#ifndef SLOTS  // so that the file can be compiled by itself
#define SLOTS 64
#define PART0_BYTES 576
#define PART1_BYTES 8
#endif

#define PART0_WORDS (PART0_BYTES / 4)
#define ROW_WORDS ((PART0_BYTES + PART1_BYTES) / 4)

extern "C" __global__ void __launch_bounds__(192)
append_rows(const unsigned int* __restrict__ rows, const int* __restrict__ places, char* pages, unsigned long long page_stride) {
    const int place = places[blockIdx.x];
    if (place < 0) return;
    const unsigned int slot = (unsigned int)place % SLOTS;
    char* page = pages + (unsigned int)place / SLOTS * page_stride;
    const unsigned int* row = rows + (unsigned long long)blockIdx.x * ROW_WORDS;
    for (unsigned int word = threadIdx.x; word < ROW_WORDS; word += blockDim.x) {
        const unsigned int at = word < PART0_WORDS
            ? slot * PART0_BYTES + word * 4
            : SLOTS * PART0_BYTES + slot * PART1_BYTES + (word - PART0_WORDS) * 4;
        *reinterpret_cast<unsigned int*>(page + at) = row[word];
    }
}
