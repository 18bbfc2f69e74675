// What the benchmarks compare with: the least that a launch can do, and a gather that knows beforehand which rows to load.

#define VALUE_BYTES 576
#define SCALE_BYTES 8
#define SLOTS 64

extern "C" __global__ void nothing() {}

// One warp a row: 36 loads of 16 bytes and one of 8, all of them before the stores. Rows are numbered page * SLOTS + slot.
extern "C" __global__ void __launch_bounds__(1024)
bare_gather(const int* __restrict__ source_rows, const int* __restrict__ target_rows, int count, const char* __restrict__ source,
            char* __restrict__ target, unsigned long long page_bytes) {
    const int lane = threadIdx.x % 32;
    const int warps = gridDim.x * (blockDim.x / 32);
    for (int i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < count; i += warps) {
        const unsigned from = source_rows[i], to = target_rows[i];
        const char* source_page = source + from / SLOTS * page_bytes;
        char* target_page = target + to / SLOTS * page_bytes;
        const uint4* values = reinterpret_cast<const uint4*>(source_page + from % SLOTS * VALUE_BYTES);
        uint4* places = reinterpret_cast<uint4*>(target_page + to % SLOTS * VALUE_BYTES);
        const uint4 first = values[lane];
        uint4 second = {0, 0, 0, 0};
        uint2 scale = {0, 0};
        if (lane < 4) second = values[32 + lane];
        if (lane == 4) scale = *reinterpret_cast<const uint2*>(source_page + SLOTS * VALUE_BYTES + from % SLOTS * SCALE_BYTES);
        places[lane] = first;
        if (lane < 4) places[32 + lane] = second;
        if (lane == 4) *reinterpret_cast<uint2*>(target_page + SLOTS * VALUE_BYTES + to % SLOTS * SCALE_BYTES) = scale;
    }
}
