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

// The power of two that H units are padded to before they are summed by halves.
inline int64_t padded_width(int64_t hidden) {
    int64_t width = 1;
    while (width < hidden) {
        width *= 2;
    }
    return width;
}

// Padding of rows_of_token: this token has fewer than K rows.
constexpr int64_t kNoRow = -1;

}  // namespace megatron_ft::dispatch
