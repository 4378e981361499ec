#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels.cuh"

namespace megatron_ft::dispatch::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kPackBytes = 16;

template <typename T, int Size>
struct alignas(sizeof(T) * Size) Pack {
    T units[Size];
};

__device__ inline float widen(float unit) { return unit; }
__device__ inline double widen(double unit) { return unit; }
__device__ inline float widen(__half unit) { return __half2float(unit); }
__device__ inline float widen(__nv_bfloat16 unit) { return __bfloat162float(unit); }

template <typename T, typename Sum>
__device__ inline T narrow(Sum sum) {
    return sum;
}
template <>
__device__ inline __half narrow<__half, float>(float sum) {
    return __float2half_rn(sum);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16, float>(float sum) {
    return __float2bfloat16_rn(sum);
}

// `index` selects the row that is read (gather), or the row that is written (scatter).
enum class Indexed { kSource, kTarget };

// One block copies one row.
template <typename Word, Indexed indexed>
__global__ void copy_rows_kernel(const Word* source, const int64_t* index, int64_t row_words, Word* out) {
    const int64_t block = blockIdx.x, other = index[block];
    const Word* from = source + (indexed == Indexed::kSource ? other : block) * row_words;
    Word* to = out + (indexed == Indexed::kSource ? block : other) * row_words;
    for (int64_t word = threadIdx.x; word < row_words; word += blockDim.x) {
        to[word] = from[word];
    }
}

// One block sums the rows of one token. The compiler flags forbid contraction, so each product is rounded before it is
// added.
template <typename T, int Size>
__global__ void combine_kernel(const Pack<T, Size>* rows, const int64_t* rows_of_token,
                               const typename SumOf<T>::type* weights, int64_t width, int64_t row_packs,
                               Pack<T, Size>* out) {
    using Sum = typename SumOf<T>::type;
    const int64_t* listed = rows_of_token + static_cast<int64_t>(blockIdx.x) * width;
    for (int64_t pack = threadIdx.x; pack < row_packs; pack += blockDim.x) {
        Sum total[Size] = {};
        for (int64_t column = 0; column < width && listed[column] != kNoRow; ++column) {
            const Pack<T, Size> term = rows[listed[column] * row_packs + pack];
            const Sum weight = weights == nullptr ? Sum(1) : weights[listed[column]];
#pragma unroll
            for (int unit = 0; unit < Size; ++unit) {
                total[unit] += widen(term.units[unit]) * weight;
            }
        }
        Pack<T, Size> rounded;
#pragma unroll
        for (int unit = 0; unit < Size; ++unit) {
            rounded.units[unit] = narrow<T, Sum>(total[unit]);
        }
        out[static_cast<int64_t>(blockIdx.x) * row_packs + pack] = rounded;
    }
}

// One block handles one row. It adds the second half of the terms to the first half while it reads them, so shared
// memory needs space for only half of them.
template <typename T>
__global__ void weigh_kernel(const T* grad, const T* rows, const int64_t* permutation,
                             const typename SumOf<T>::type* weights, int64_t hidden, int64_t half_width, T* grad_rows,
                             typename SumOf<T>::type* dots) {
    using Sum = typename SumOf<T>::type;
    extern __shared__ double shared[];
    Sum* terms = reinterpret_cast<Sum*>(shared);
    const int64_t row = blockIdx.x;
    const T* from = grad + permutation[row] * hidden;
    const Sum weight = weights[row];
    const auto visit = [&](int64_t unit) -> Sum {
        if (unit >= hidden) {
            return Sum(0);
        }
        const Sum wide = widen(from[unit]);
        grad_rows[row * hidden + unit] = narrow<T, Sum>(wide * weight);
        return wide * widen(rows[row * hidden + unit]);
    };
    for (int64_t unit = threadIdx.x; unit < half_width; unit += blockDim.x) {
        const Sum first = visit(unit);
        terms[unit] = first + visit(unit + half_width);
    }
    __syncthreads();
    for (int64_t half = half_width / 2; half > 0; half /= 2) {
        for (int64_t unit = threadIdx.x; unit < half; unit += blockDim.x) {
            terms[unit] += terms[unit + half];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        dots[row] = terms[0];
    }
}

int threads_for(int64_t items) { return static_cast<int>(std::min<int64_t>(kMaxThreads, (items + 31) / 32 * 32)); }

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <typename Word, Indexed indexed>
bool try_copy(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
              cudaStream_t stream) {
    constexpr int64_t bytes = sizeof(Word);
    if (row_bytes % bytes != 0 || !aligned(source, bytes) || !aligned(out, bytes)) {
        return false;
    }
    const int64_t words = row_bytes / bytes;
    copy_rows_kernel<Word, indexed><<<num_rows, threads_for(words), 0, stream>>>(
        reinterpret_cast<const Word*>(source), index, words, reinterpret_cast<Word*>(out));
    return true;
}

template <Indexed indexed>
void copy_rows(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
               cudaStream_t stream) {
    if (num_rows == 0 || row_bytes == 0) {
        return;
    }
    try_copy<uint4, indexed>(source, index, num_rows, row_bytes, out, stream) ||
        try_copy<uint32_t, indexed>(source, index, num_rows, row_bytes, out, stream) ||
        try_copy<uint16_t, indexed>(source, index, num_rows, row_bytes, out, stream) ||
        try_copy<uint8_t, indexed>(source, index, num_rows, row_bytes, out, stream);
}

template <typename T, int Size>
void launch_combine(const void* rows, const int64_t* rows_of_token, const void* weights, int64_t num_tokens,
                    int64_t width, int64_t hidden, void* out, cudaStream_t stream) {
    const int64_t packs = hidden / Size;
    combine_kernel<T, Size><<<num_tokens, threads_for(packs), 0, stream>>>(
        static_cast<const Pack<T, Size>*>(rows), rows_of_token, static_cast<const typename SumOf<T>::type*>(weights),
        width, packs, static_cast<Pack<T, Size>*>(out));
}

template <typename T>
void weigh_as(const void* grad, const void* rows, const int64_t* permutation, const void* weights, int64_t num_rows,
              int64_t hidden, void* grad_rows, void* dots, cudaStream_t stream) {
    using Sum = typename SumOf<T>::type;
    const int64_t half_width = std::max<int64_t>(padded_width(hidden) / 2, 1);
    const int shared_bytes = static_cast<int>(half_width * sizeof(Sum));
    cudaFuncSetAttribute(weigh_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    weigh_kernel<T><<<num_rows, threads_for(half_width), shared_bytes, stream>>>(
        static_cast<const T*>(grad), static_cast<const T*>(rows), permutation, static_cast<const Sum*>(weights), hidden,
        half_width, static_cast<T*>(grad_rows), static_cast<Sum*>(dots));
}

template <typename T>
void combine_as(const void* rows, const int64_t* rows_of_token, const void* weights, int64_t num_tokens, int64_t width,
                int64_t hidden, void* out, cudaStream_t stream) {
    constexpr int size = kPackBytes / sizeof(T);
    if (hidden % size == 0 && aligned(rows, kPackBytes) && aligned(out, kPackBytes)) {
        launch_combine<T, size>(rows, rows_of_token, weights, num_tokens, width, hidden, out, stream);
    } else {
        launch_combine<T, 1>(rows, rows_of_token, weights, num_tokens, width, hidden, out, stream);
    }
}

}  // namespace

void gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
            cudaStream_t stream) {
    copy_rows<Indexed::kSource>(source, index, num_rows, row_bytes, out, stream);
}

void scatter(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out,
             cudaStream_t stream) {
    copy_rows<Indexed::kTarget>(source, index, num_rows, row_bytes, out, stream);
}

void weigh(RowType type, const void* grad, const void* rows, const int64_t* permutation, const void* weights,
           int64_t num_rows, int64_t hidden, void* grad_rows, void* dots, cudaStream_t stream) {
    if (num_rows == 0) {
        return;
    }
    switch (type) {
        case RowType::kFloat32:
            return weigh_as<float>(grad, rows, permutation, weights, num_rows, hidden, grad_rows, dots, stream);
        case RowType::kBFloat16:
            return weigh_as<__nv_bfloat16>(grad, rows, permutation, weights, num_rows, hidden, grad_rows, dots, stream);
        case RowType::kFloat16:
            return weigh_as<__half>(grad, rows, permutation, weights, num_rows, hidden, grad_rows, dots, stream);
        case RowType::kFloat64:
            return weigh_as<double>(grad, rows, permutation, weights, num_rows, hidden, grad_rows, dots, stream);
    }
}

void combine(RowType type, const void* rows, const int64_t* rows_of_token, const void* weights, int64_t num_tokens,
             int64_t width, int64_t hidden, void* out, cudaStream_t stream) {
    if (num_tokens == 0 || hidden == 0) {
        return;
    }
    switch (type) {
        case RowType::kFloat32:
            return combine_as<float>(rows, rows_of_token, weights, num_tokens, width, hidden, out, stream);
        case RowType::kBFloat16:
            return combine_as<__nv_bfloat16>(rows, rows_of_token, weights, num_tokens, width, hidden, out, stream);
        case RowType::kFloat16:
            return combine_as<__half>(rows, rows_of_token, weights, num_tokens, width, hidden, out, stream);
        case RowType::kFloat64:
            return combine_as<double>(rows, rows_of_token, weights, num_tokens, width, hidden, out, stream);
    }
}

}  // namespace megatron_ft::dispatch::cuda
