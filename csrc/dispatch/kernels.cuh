// CUDA versions of the functions with the same names in schedule.hpp, plan.hpp and rows.hpp.
// All pointers are to device memory. Each function launches kernels on `stream` and does not wait for them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "types.hpp"

namespace megatron_ft::dispatch::cuda {

// Returns the number of elements of `memory` that schedule() needs.
int64_t schedule_cells(int64_t num_experts, int64_t num_ranks);

// Computes schedule [2, E, N]: what `rank` sends, and what it receives. The values of counts and replicas are not
// checked, because that would need a copy to the host; `Totals.of` in rows.py compares the sums of the schedule.
// `memory` is scratch memory.
void schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks, int64_t rank,
              bool balanced, int64_t* memory, int64_t* schedule, cudaStream_t stream);

// row_of [T, E] is scratch memory. starts [E, N]: first row of each (expert, destination rank) block when the blocks
// are ordered by destination rank, then by expert.
void order_sent(const uint8_t* routing_map, const int64_t* outgoing, const int64_t* starts, int64_t num_tokens,
                int64_t num_experts, int64_t num_ranks, int64_t rank, int64_t width, int64_t* row_of,
                int64_t* permutation, int64_t* expert_of_row, int64_t* rows_of_token, cudaStream_t stream);

// sizes, arrivals and places have num_blocks elements. Block b contains sizes[b] rows: they arrived at the indices from
// arrivals[b] on, and have the sorted positions from places[b] on.
void order_received(const int64_t* sizes, const int64_t* arrivals, const int64_t* places, int64_t num_blocks,
                    int64_t* order, cudaStream_t stream);

void gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
            cudaStream_t stream);

void scatter(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
             cudaStream_t stream);

// The shared memory of a block must have space for padded_width(hidden) / 2 sums. On sm_90, `hidden` can be at most
// 65536 with float sums.
void weigh(RowType type, const void* grad, const void* rows, const int64_t* permutation, const void* weights,
           int64_t num_rows, int64_t hidden, void* grad_rows, void* dots, cudaStream_t stream);

void combine(RowType type, const void* rows, const int64_t* rows_of_token, const void* weights, int64_t num_tokens,
             int64_t width, int64_t hidden, void* out, cudaStream_t stream);

}  // namespace megatron_ft::dispatch::cuda
