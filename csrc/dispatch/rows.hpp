// Copies rows to a given order, and sums the rows of each token.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace megatron_ft::dispatch {

// Copies row index[b] of source to row b of out [B, row_bytes]. Elements may have any type, because rows are copied as
// bytes.
void gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out);

// Copies row b of source [B, row_bytes] to row index[b] of out. The indices are distinct.
void scatter(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out);

// Sums, for each token, the rows [S, H] that rows_of_token [T, K] lists, in that order, to out [T, H]. weights [S] are
// factors of the rows; null means no factors. Each product is rounded before it is added; the sum is rounded to T at
// the end.
template <typename T>
void combine(const T* rows, const int64_t* rows_of_token, const typename SumOf<T>::type* weights, int64_t num_tokens,
             int64_t width, int64_t hidden, T* out);

// Computes the gradient of `combine` with weights, from grad [T, H], rows [S, H] and permutation [S], the token of each
// row. grad_rows [S, H] is grad * weight. dots [S] is grad * row, summed over H in a fixed order: the terms are padded
// with zeros to a power of two, then the second half is added to the first half until one number is left.
template <typename T>
void weigh(const T* grad, const T* rows, const int64_t* permutation, const typename SumOf<T>::type* weights,
           int64_t num_rows, int64_t hidden, T* grad_rows, typename SumOf<T>::type* dots);

}  // namespace megatron_ft::dispatch
