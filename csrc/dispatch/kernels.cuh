// CUDA kernels of the dispatch; same meaning as their namesakes in schedule.hpp, plan.hpp and rows.hpp.
// All pointers are device memory; each function only launches on `stream`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.hpp"

namespace megatron_ft::dispatch::cuda {

// Cells of `memory` that schedule() needs.
int64_t schedule_cells(int64_t num_experts, int64_t num_ranks);

// schedule [2, E, N]: what `rank` sends, and what it receives. Values are not checked; plan() compares the sums.
void schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks, int64_t rank,
              bool balanced, int64_t* memory, int64_t* schedule, cudaStream_t stream);

// row_of [T, E] is scratch. starts [E, N]: first row of each block of the order (destination, expert).
void order_sent(const uint8_t* routing_map, const int64_t* outgoing, const int64_t* starts, int64_t num_tokens,
                int64_t num_experts, int64_t num_ranks, int64_t rank, int64_t width, int64_t* row_of,
                int64_t* permutation, int64_t* expert_of_row, int64_t* rows_of_token, cudaStream_t stream);

// For each of num_blocks: `sizes` rows that arrived from `arrivals` on stand at `places` on.
void order_received(const int64_t* sizes, const int64_t* arrivals, const int64_t* places, int64_t num_blocks,
                    int64_t* order, int64_t* place, cudaStream_t stream);

void gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
            cudaStream_t stream);

// Half of H, rounded up to a power of two, must fit a block's shared memory: H to 65536 in float sums on sm_90.
void weigh(RowType type, const void* grad, const void* rows, const int64_t* permutation, const void* weights,
           int64_t num_rows, int64_t hidden, void* grad_rows, void* dots, cudaStream_t stream);

void combine(RowType type, const void* rows, const int64_t* rows_of_token, const void* weights, int64_t num_tokens,
             int64_t width, int64_t hidden, void* out, cudaStream_t stream);

}  // namespace megatron_ft::dispatch::cuda
