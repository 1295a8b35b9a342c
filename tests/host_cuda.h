// CUDA's built-ins for a CPU: g++ compiles a kernel with `-include host_cuda.h` as it is.
// For kernels without shared memory and barriers: a thread runs to its end before the next begins.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

using Kernel = void(const void*, const unsigned*, void*, void*, unsigned, unsigned);

// Runs every thread of every block, in an order that the seed shuffles.
extern "C" void launch(Kernel* kernel, unsigned blocks, unsigned block_x, unsigned block_y,
                       std::uint64_t seed, const void* rows, const unsigned* targets, void* keys,
                       void* values, unsigned count, unsigned row_bytes) {
    const std::uint64_t threads = std::uint64_t(block_x) * block_y;
    std::vector<std::uint64_t> order(blocks * threads);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
    gridDim = {blocks, 1, 1};
    blockDim = {block_x, block_y, 1};
    for (const std::uint64_t i : order) {
        blockIdx = {unsigned(i / threads), 0, 0};
        threadIdx = {unsigned(i % block_x), unsigned(i % threads / block_x), 0};
        kernel(rows, targets, keys, values, count, row_bytes);
    }
}
