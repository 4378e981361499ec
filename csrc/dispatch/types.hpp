// Element types of rows, by the codes that megatron_ft/runtime/dispatch/extension.py passes.
#pragma once

#include <cstdint>

namespace megatron_ft::dispatch {

enum class RowType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// The type sums over rows of T run in.
template <typename T>
struct SumOf {
    using type = float;
};
template <>
struct SumOf<double> {
    using type = double;
};

// Padding of rows_of_token: this token has fewer than K rows.
constexpr int64_t kNoRow = -1;

}  // namespace megatron_ft::dispatch
