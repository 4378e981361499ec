// One update of AdamW on quantized masters and moments. transformer_engine_ext/adamw.py is the reference; the bits of
// the results are equal. The same source is compiled for C++ and CUDA.
//
// Roundings, in this order. Each operation below rounds once to FP32, to nearest, and none is fused with the next:
//   gradient   clamped to 2**63 (exact)
//   first      decoded * beta1, gradient * rest1, their sum
//   second     decoded * beta2, gradient * gradient, that * rest2, the sum
//   move       square root of second, * correction, + eps; first / that; * rate
//   master     decoded * decay, - move
//   decoded    code * 2**(scale - 127); inexact only if the result is subnormal
//   stored     value * 2**(127 - scale), then the cast of the format
#pragma once

#include "formats.hpp"

namespace megatron_ft::adamw {

// Numbers of one update, computed in FP64 and rounded to FP32 by the caller.
struct Factors {
    float beta1, rest1;  // rest1 is 1 - beta1
    float beta2, rest2;
    float correction;  // of the second moment: 1 / sqrt(1 - beta2**step)
    float eps;
    float rate;   // lr / (1 - beta1**step)
    float decay;  // 1 - lr * weight_decay
};

// Codes and scales of one kind of state. `scales` is not read if the format has none.
struct Tensor {
    void* codes;
    uint8_t* scales;
};

struct Range {
    const float* gradient;  // [num_elements]; finite
    Tensor master, exp_avg, exp_avg_sq;
    int64_t num_elements;
    int64_t start;          // number of the first element in the flattened parameter
    int64_t is_stochastic;  // whether masters are rounded stochastically
    uint64_t key;
    Factors factors;
};

// The format codes are indices in FORMAT_CODES of transformer_engine_ext/kernels.py.
enum class FormatCode : int64_t { kFp32 = 0, kFp16 = 1, kE4m3 = 2 };

// Calls run(Master(), ExpAvg(), ExpAvgSq()) with the formats of one of the five regimes. Returns whether there is one.
template <typename Run>
bool with_formats(int64_t master, int64_t exp_avg, int64_t exp_avg_sq, Run run) {
    switch (master * 100 + exp_avg * 10 + exp_avg_sq) {
        case 111:
            run(Fp16(), Fp16(), Fp16());
            return true;
        case 0:
            run(Fp32(), Fp32(), Fp32());
            return true;
        case 100:
            run(Fp16(), Fp32(), Fp32());
            return true;
        case 121:
            run(Fp16(), E4m3(), Fp16());
            return true;
        case 221:
            run(E4m3(), E4m3(), Fp16());
            return true;
    }
    return false;
}

// One kind of state in one block of 64 elements.
template <typename Format>
struct Block {
    typename Format::Code* codes;
    uint8_t* scale;

    ADAMW_ANYWHERE Block(const Tensor& tensor, int64_t block)
        : codes(static_cast<typename Format::Code*>(tensor.codes) + block * kBlockElements),
          scale(Format::kIsScaled ? tensor.scales + block : nullptr) {}

    ADAMW_ANYWHERE float read(int element) const {
        if constexpr (Format::kIsScaled) {
            return product(decode<Format>(codes[element]), power_of_two(static_cast<int>(*scale) - kBias));
        } else {
            return codes[element];
        }
    }
};

// Values of one kind of state that one lane updates, and the largest finite magnitude among them.
template <int kCount>
struct Values {
    float value[kCount];
    uint32_t largest = 0;

    ADAMW_ANYWHERE void set(int index, float found) {
        value[index] = found;
        const uint32_t magnitude = bits_of(found) & ~kSign;
        // A NaN or an infinity must not become a scale.
        largest = magnitude < kInfinity && magnitude > largest ? magnitude : largest;
    }
};

struct Rounding {
    bool keeps_nonzero;  // values above zero become at least the smallest value of the format
    bool is_stochastic;
    uint64_t key;
    int64_t start;  // number of the first element of the block
};

template <typename Format, int kLanes, int kCount>
ADAMW_ANYWHERE void store(const Block<Format>& block, const Values<kCount>& values, uint32_t largest, int lane,
                          int num_elements, const Rounding& rounding) {
    if constexpr (Format::kIsScaled) {
        const uint8_t scale = scale_for<Format>(largest);
        const float inverse = power_of_two(kBias - static_cast<int>(scale));
        constexpr float kSmallest = Format::kSmallest;
        for (int index = 0; index < kCount; ++index) {
            const int element = lane + index * kLanes;
            if (element >= num_elements) {
                break;
            }
            float scaled = product(values.value[index], inverse);
            if (rounding.keeps_nonzero && values.value[index] > 0.0f && scaled < kSmallest) {
                scaled = kSmallest;
            }
            block.codes[element] = rounding.is_stochastic ? cast_stochastically<Format>(
                                                                scaled, draw(rounding.key, rounding.start + element))
                                                          : cast<Format>(scaled);
        }
        if (lane == 0) {
            *block.scale = scale;
        }
    } else {
        for (int index = 0; index < kCount && lane + index * kLanes < num_elements; ++index) {
            block.codes[lane + index * kLanes] = values.value[index];
        }
    }
}

// Updates one block. `lane` of kLanes lanes updates the elements lane, lane + kLanes, ... `largest_of_all` returns the
// largest of the numbers with which the lanes of the block call it, and waits for all of them.
template <typename Master, typename ExpAvg, typename ExpAvgSq, int kLanes, typename LargestOfAll>
ADAMW_ANYWHERE void update_block(const Range& range, int64_t number, int lane, LargestOfAll largest_of_all) {
    constexpr int kCount = kBlockElements / kLanes;
    constexpr float kLargestGradient = 9223372036854775808.0f;  // 2**63, whose square FP32 can hold
    const Block<Master> master(range.master, number);
    const Block<ExpAvg> exp_avg(range.exp_avg, number);
    const Block<ExpAvgSq> exp_avg_sq(range.exp_avg_sq, number);
    const int64_t first = number * kBlockElements;
    const int64_t rest = range.num_elements - first;
    const int num_elements = rest < kBlockElements ? static_cast<int>(rest) : kBlockElements;
    const Factors& with = range.factors;
    Values<kCount> masters, firsts, seconds;
    for (int index = 0; index < kCount; ++index) {
        const int element = lane + index * kLanes;
        if (element >= num_elements) {
            break;
        }
        float gradient = range.gradient[first + element];
        gradient = gradient > kLargestGradient ? kLargestGradient : gradient;
        gradient = gradient < -kLargestGradient ? -kLargestGradient : gradient;
        const float mean = sum(product(exp_avg.read(element), with.beta1), product(gradient, with.rest1));
        const float square =
            sum(product(exp_avg_sq.read(element), with.beta2), product(product(gradient, gradient), with.rest2));
        const float denominator = sum(product(root(square), with.correction), with.eps);
        const float move = product(quotient(mean, denominator), with.rate);
        masters.set(index, sum(product(master.read(element), with.decay), -move));
        firsts.set(index, mean);
        seconds.set(index, square);
    }
    // Every lane has read codes and scales before the first of these calls returns.
    const uint32_t of_master = largest_of_all(masters.largest);
    const uint32_t of_first = largest_of_all(firsts.largest);
    const uint32_t of_second = largest_of_all(seconds.largest);
    const Rounding nearest = {false, false, 0, 0}, kept = {true, false, 0, 0};
    const Rounding drawn = {false, range.is_stochastic != 0, range.key, range.start + first};
    store<Master, kLanes>(master, masters, of_master, lane, num_elements, drawn);
    store<ExpAvg, kLanes>(exp_avg, firsts, of_first, lane, num_elements, nearest);
    store<ExpAvgSq, kLanes>(exp_avg_sq, seconds, of_second, lane, num_elements, kept);
}

}  // namespace megatron_ft::adamw
