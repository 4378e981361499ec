// The CUDA version of update() in update.cpp. All pointers of a range are to device memory.
#pragma once

#include <cuda_runtime.h>

#include "update.hpp"

namespace megatron_ft::adamw::cuda {

// Launches the update on `stream` and does not wait for it. Returns whether there is a kernel for the formats.
bool update(const Range& range, int64_t master, int64_t exp_avg, int64_t exp_avg_sq, cudaStream_t stream);

}  // namespace megatron_ft::adamw::cuda
