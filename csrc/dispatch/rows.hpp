// Copies rows to an order and sums the rows of each token: the kernels all movements are built from.
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

// The gradient of a weighted combine. grad [T, H], rows [S, H], permutation [S]: token of each row. grad_rows [S, H]:
// grad * weight. dots [S]: grad * row, summed over H by halves: padded with zeros to a power of two, the second half is
// added to the first until one is left.
template <typename T>
void weigh(const T* grad, const T* rows, const int64_t* permutation, const typename SumOf<T>::type* weights,
           int64_t num_rows, int64_t hidden, T* grad_rows, typename SumOf<T>::type* dots);

}  // namespace megatron_ft::dispatch
