// Copies rows to an order and sums the rows of each token: the two kernels all movements are built from.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace megatron_ft::dispatch {

// out [B, row_bytes]: row index[b] of source at place b. Any element type: rows are bytes here.
void gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out);

// out [T, H]: sum of the rows [S, H] that rows_of_token [T, K] lists, in that order; weights [S] of the sum's type, or
// null. Each product is rounded before it is added, and the sum once at the end.
template <typename T>
void combine(const T* rows, const int64_t* rows_of_token, const typename SumOf<T>::type* weights, int64_t num_tokens,
             int64_t width, int64_t hidden, T* out);

}  // namespace megatron_ft::dispatch
