// Puts the rows that a step brought to the device into their slots: one launch for all misses of
// a layer, keys and values.
//
// Layout
//   rows     [count][2][row_bytes], packed: of each miss the key row, then the value row
//   targets  [count]: miss m goes to row targets[m] of `keys` and of `values`
//   keys, values  [rows of slots][row_bytes]
// Rows are bytes: f32, f16 and bf16 are the same to a copy. scatter_rows_N moves words of N bytes.
//
// Invariants, for the caller to hold
//   - N divides row_bytes and the addresses of rows, keys and values; targets is a multiple of 4.
//   - Targets are distinct and inside keys and values; no two buffers overlap. So no two threads
//     write the same word, and nothing but the target rows is written.
//   - row_bytes > 0. count may be 0. Offsets are 64 bits wide: a buffer may exceed 4 GiB.
//
// Launch: blocks [x, y] in a grid [n], of any size; x threads share a miss, y misses share a block.
// Best is x = 2 * row_bytes / N, up to a block: then each thread has one load and one store in
// flight, a warp reads consecutive words (a bf16 row pair of head_dim 128 is one warp of 16 bytes
// each), a target is read once per warp, and no index is divided. No shared memory: nothing is used
// twice. NVRTC compiles it without an include path, so it includes nothing.

template <typename Word>
__device__ void scatter(const Word* __restrict__ rows, const unsigned* __restrict__ targets,
                        Word* __restrict__ keys, Word* __restrict__ values, unsigned count,
                        unsigned words) {
    using Size = unsigned long long;
    const Size step = Size(gridDim.x) * blockDim.y;
    for (Size m = Size(blockIdx.x) * blockDim.y + threadIdx.y; m < count; m += step) {
        const Size from = m * 2 * words, to = Size(targets[m]) * words;
        for (Size w = threadIdx.x; w < 2 * Size(words); w += blockDim.x) {
            Word& slot = w < words ? keys[to + w] : values[to + w - words];
            slot = rows[from + w];
        }
    }
}

#define SCATTER_ROWS(N, Word)                                                                     \
    extern "C" __global__ void scatter_rows_##N(                                                  \
        const void* __restrict__ rows, const unsigned* __restrict__ targets,                      \
        void* __restrict__ keys, void* __restrict__ values, unsigned count, unsigned row_bytes) { \
        scatter(static_cast<const Word*>(rows), targets, static_cast<Word*>(keys),                \
                static_cast<Word*>(values), count, row_bytes / N);                                \
    }

SCATTER_ROWS(16, uint4)
SCATTER_ROWS(8, uint2)
SCATTER_ROWS(4, unsigned)
SCATTER_ROWS(2, unsigned short)
