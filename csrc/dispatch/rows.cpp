#include "rows.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace megatron_ft::dispatch {

void gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out) {
    for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(out + row * row_bytes, source + index[row] * row_bytes, static_cast<size_t>(row_bytes));
    }
}

void scatter(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out) {
    for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(out + index[row] * row_bytes, source + row * row_bytes, static_cast<size_t>(row_bytes));
    }
}

template <typename T>
void combine(const T* rows, const int64_t* rows_of_token, const typename SumOf<T>::type* weights, int64_t num_tokens,
             int64_t width, int64_t hidden, T* out) {
    using Sum = typename SumOf<T>::type;
    std::vector<Sum> total(static_cast<size_t>(hidden));
    for (int64_t token = 0; token < num_tokens; ++token) {
        std::fill(total.begin(), total.end(), Sum(0));
        const int64_t* listed = rows_of_token + token * width;
        for (int64_t column = 0; column < width && listed[column] != kNoRow; ++column) {
            const T* row = rows + listed[column] * hidden;
            if (weights == nullptr) {
                for (int64_t unit = 0; unit < hidden; ++unit) {
                    total[unit] += static_cast<Sum>(row[unit]);
                }
            } else {
                const Sum weight = weights[listed[column]];
                for (int64_t unit = 0; unit < hidden; ++unit) {
                    total[unit] += static_cast<Sum>(row[unit]) * weight;
                }
            }
        }
        std::transform(total.begin(), total.end(), out + token * hidden, [](Sum sum) { return static_cast<T>(sum); });
    }
}

template <typename T>
void weigh(const T* grad, const T* rows, const int64_t* permutation, const typename SumOf<T>::type* weights,
           int64_t num_rows, int64_t hidden, T* grad_rows, typename SumOf<T>::type* dots) {
    using Sum = typename SumOf<T>::type;
    const int64_t width = padded_width(hidden);
    std::vector<Sum> terms(static_cast<size_t>(width));
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* from = grad + permutation[row] * hidden;
        const T* own = rows + row * hidden;
        T* to = grad_rows + row * hidden;
        for (int64_t unit = 0; unit < hidden; ++unit) {
            const Sum wide = static_cast<Sum>(from[unit]);
            to[unit] = static_cast<T>(wide * weights[row]);
            terms[unit] = wide * static_cast<Sum>(own[unit]);
        }
        std::fill(terms.begin() + hidden, terms.end(), Sum(0));
        for (int64_t half = width / 2; half > 0; half /= 2) {
            for (int64_t unit = 0; unit < half; ++unit) {
                terms[unit] += terms[unit + half];
            }
        }
        dots[row] = terms[0];
    }
}

template void combine(const float*, const int64_t*, const float*, int64_t, int64_t, int64_t, float*);
template void combine(const c10::BFloat16*, const int64_t*, const float*, int64_t, int64_t, int64_t, c10::BFloat16*);
template void combine(const c10::Half*, const int64_t*, const float*, int64_t, int64_t, int64_t, c10::Half*);
template void combine(const double*, const int64_t*, const double*, int64_t, int64_t, int64_t, double*);

template void weigh(const float*, const float*, const int64_t*, const float*, int64_t, int64_t, float*, float*);
template void weigh(const c10::BFloat16*, const c10::BFloat16*, const int64_t*, const float*, int64_t, int64_t,
                    c10::BFloat16*, float*);
template void weigh(const c10::Half*, const c10::Half*, const int64_t*, const float*, int64_t, int64_t, c10::Half*,
                    float*);
template void weigh(const double*, const double*, const int64_t*, const double*, int64_t, int64_t, double*, double*);

}  // namespace megatron_ft::dispatch
