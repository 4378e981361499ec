// Element types of rows. The codes are indices in ROW_DTYPES of megatron_ft/runtime/dispatch/rows.py.
#pragma once

#include <cstdint>

namespace megatron_ft::dispatch {

enum class RowType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// The type in which rows of T are summed.
template <typename T>
struct SumOf {
    using type = float;
};
template <>
struct SumOf<double> {
    using type = double;
};

// Returns the smallest power of two that is at least `hidden`. `weigh` pads its terms to this number.
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
