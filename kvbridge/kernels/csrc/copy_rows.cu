// Scattered rows of many regions, in one launch: a warp for each row of each region. See kernels/row_copies.py.
//
// A row is a list of words, those of its parts one after another, and a thread loads all of its words before it stores one. Few rows
// are a chain of waits for memory, so it is kept short: ids and descriptions first and together, then the row.

#include "copies.cuh"

#ifndef MOST_WARPS  // so that the file can be compiled by itself
#define MOST_WARPS 16
#define SOURCE_SLOTS 64
#define DESTINATION_SLOTS 64
#define PART0_BYTES 576
#define PART0_WIDTH 16
#define PART1_BYTES 8
#define PART1_WIDTH 8
#define PART2_BYTES 0
#define PART2_WIDTH 4
#define PART3_BYTES 0
#define PART3_WIDTH 4
#endif

#define PARTS 4
#define ROW_WORDS (PART0_BYTES / PART0_WIDTH + PART1_BYTES / PART1_WIDTH + PART2_BYTES / PART2_WIDTH + PART3_BYTES / PART3_WIDTH)
#define LOADS (ROW_WORDS <= 32 ? 1 : ROW_WORDS <= 64 ? 2 : 4)

struct alignas(16) RowPair {
    Side source;
    Side destination;
};

// A word of a row, as offsets into the pages that hold slot 0; width 0 when the row has ended.
struct Word {
    unsigned int from;
    unsigned int to;
    unsigned int width;
};

__device__ __forceinline__ Word word_at(unsigned int word, unsigned int source_slot, unsigned int destination_slot) {
    const unsigned int bytes[PARTS] = {PART0_BYTES, PART1_BYTES, PART2_BYTES, PART3_BYTES};
    const unsigned int widths[PARTS] = {PART0_WIDTH, PART1_WIDTH, PART2_WIDTH, PART3_WIDTH};
    unsigned int before = 0;  // bytes of a row in earlier parts
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if (word < bytes[part] / widths[part]) {
            const unsigned int within = word * widths[part];
            return {before * SOURCE_SLOTS + source_slot * bytes[part] + within,
                    before * DESTINATION_SLOTS + destination_slot * bytes[part] + within, widths[part]};
        }
        word -= bytes[part] / widths[part];
        before += bytes[part];
    }
    return {0, 0, 0};
}

__device__ __forceinline__ uint4 load_word(const char *from, unsigned int width) {
    uint4 value = make_uint4(0, 0, 0, 0);
    if (width == 16) {
        value = load_16(from);
    } else if (width == 8) {
        const uint2 half = load_8(from);
        value.x = half.x;
        value.y = half.y;
    } else if (width == 4) {
        value.x = load_4(from);
    }
    return value;
}

__device__ __forceinline__ void store_word(char *to, unsigned int width, uint4 value) {
    if (width == 16) {
        store_16(to, value);
    } else if (width == 8) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(value.x, value.y);
    } else if (width == 4) {
        *reinterpret_cast<unsigned int *>(to) = value.x;
    }
}

__device__ __forceinline__ void copy_row(const char *from, char *to, unsigned int source_slot, unsigned int destination_slot) {
    for (unsigned int first = 0; first < ROW_WORDS; first += LOADS * 32) {
        Word words[LOADS];
        uint4 held[LOADS];
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            words[load] = word_at(first + load * 32 + (threadIdx.x & 31), source_slot, destination_slot);
            held[load] = load_word(from + words[load].from, words[load].width);
        }
#pragma unroll
        for (int load = 0; load < LOADS; ++load) store_word(to + words[load].to, words[load].width, held[load]);
    }
}

__device__ __forceinline__ Side fetch(const Side *side) {
    const uint4 first = __ldg(reinterpret_cast<const uint4 *>(side));
    const uint4 second = __ldg(reinterpret_cast<const uint4 *>(side) + 1);
    return {(Address)first.y << 32 | first.x, (Address)first.w << 32 | first.z, (Address)second.y << 32 | second.x, second.z,
            second.w};
}

// Whether a side has this page. Looks at the first extent for nothing but this: that the compiler does not put off loading the
// rest of the description until the ids are known.
__device__ __forceinline__ bool has(const Side &side, unsigned int page) {
    return (page < side.page_count) & (side.first_extent != 0);
}

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS)
    copy_rows(const RowPair *pairs, unsigned long long pair_count, State *state, const int *sources, const int *destinations,
              long long most, const int *count_address) {
    static_assert(sizeof(RowPair) == 64, "the host writes it so");
    const unsigned int count = present_count(most, count_address);
    const unsigned int items = count * static_cast<unsigned int>(pair_count);  // the host sees that it fits
    for (unsigned int item = warp_of_grid(); item < items; item += warps_of_grid()) {
        const unsigned int index = item / count;
        const unsigned int named = item - index * count;
        const unsigned int source_row = load_4(sources + named);
        const unsigned int destination_row = load_4(destinations + named);
        const Side source = fetch(&pairs[index].source);
        const Side destination = fetch(&pairs[index].destination);
        const unsigned int source_page = source_row / SOURCE_SLOTS;
        const unsigned int destination_page = destination_row / DESTINATION_SLOTS;
        const bool wanted = (source_row != ~0u) & (destination_row != ~0u);
        if (!(wanted & has(source, source_page) & has(destination, destination_page))) {
            if (wanted && (threadIdx.x & 31) == 0) atomicAdd(&state->refused, 1u);
            continue;
        }
        copy_row(page_address(source, source_page), page_address(destination, destination_page), source_row % SOURCE_SLOTS,
                 destination_row % DESTINATION_SLOTS);
    }
}
