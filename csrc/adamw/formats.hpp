// Number formats of quantized state, and casts to them. transformer_engine_ext/formats.py and quantized.py are the
// reference; every function here gives the same bits. The same source is compiled for C++ and CUDA.
//
// Casts use integer arithmetic and FP32 products with powers of two. So their results do not depend on the compiler,
// the conversion instructions of a device, or the version of a library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ADAMW_ANYWHERE __host__ __device__
#else
#define ADAMW_ANYWHERE
#endif

namespace megatron_ft::adamw {

constexpr int kBlockElements = 64;
constexpr int kBias = 127;  // of a scale and of the exponent of FP32
constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinity = 0x7F800000u;

// The intrinsics of CUDA are never contracted or approximated, whatever the compiler flags are. For C++, the build
// forbids contraction with -ffp-contract=off.
#ifdef __CUDA_ARCH__
#define ADAMW_ROUNDED(on_device, on_host) on_device
#else
#define ADAMW_ROUNDED(on_device, on_host) on_host
#endif
ADAMW_ANYWHERE inline float product(float a, float b) { return ADAMW_ROUNDED(__fmul_rn(a, b), a * b); }
ADAMW_ANYWHERE inline float sum(float a, float b) { return ADAMW_ROUNDED(__fadd_rn(a, b), a + b); }
ADAMW_ANYWHERE inline float quotient(float a, float b) { return ADAMW_ROUNDED(__fdiv_rn(a, b), a / b); }
ADAMW_ANYWHERE inline float root(float a) { return ADAMW_ROUNDED(__fsqrt_rn(a), std::sqrt(a)); }
#undef ADAMW_ROUNDED

ADAMW_ANYWHERE inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

ADAMW_ANYWHERE inline float value_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

ADAMW_ANYWHERE inline bool is_nan(float value) { return (bits_of(value) & ~kSign) > kInfinity; }

// Returns 2**exponent for exponents from -126 to 127.
ADAMW_ANYWHERE inline float power_of_two(int exponent) {
    return value_of(static_cast<uint32_t>(exponent + kBias) << 23);
}

// Returns the exponent e with magnitude = m * 2**e and m in [0.5, 1), like frexp; 0 for zero. `magnitude` are the bits
// of a finite number that is not negative.
ADAMW_ANYWHERE inline int exponent_of(uint32_t magnitude) {
    if (magnitude >= 1u << 23) {
        return static_cast<int>(magnitude >> 23) - 126;
    }
    int length = 0;  // of a subnormal number, which is an integer times 2**-149
    for (uint32_t rest = magnitude; rest != 0; rest >>= 1) {
        ++length;
    }
    return magnitude == 0 ? 0 : length - 149;
}

struct Fp32 {
    using Code = float;
    static constexpr bool kIsScaled = false;
};

struct Fp16 {
    using Code = uint16_t;
    static constexpr bool kIsScaled = true;
    static constexpr int kMantissaBits = 10, kMinExponent = -14;
    static constexpr int kExponentOfLargest = 16;  // 65504 = m * 2**16 with m in [0.5, 1)
    static constexpr float kLargest = 65504.0f, kSmallest = 1.0f / (1 << 24);
    static constexpr uint32_t kFirstSpecial = 0x7C00, kNan = 0x7E00;  // from kFirstSpecial on: infinity and NaN
};

struct E4m3 {
    using Code = uint8_t;
    static constexpr bool kIsScaled = true;
    static constexpr int kMantissaBits = 3, kMinExponent = -6;
    static constexpr int kExponentOfLargest = 9;
    static constexpr float kLargest = 448.0f, kSmallest = 1.0f / (1 << 9);
    static constexpr uint32_t kFirstSpecial = 0x7F, kNan = 0x7F;
};

// Returns the value of a code without its scale.
template <typename Format>
ADAMW_ANYWHERE float decode(typename Format::Code code) {
    constexpr int kShift = 8 * sizeof(code) - 1;
    const uint32_t sign = static_cast<uint32_t>(code >> kShift) << 31;
    const uint32_t magnitude = code & ((1u << kShift) - 1);
    if (magnitude >= Format::kFirstSpecial) {
        const bool is_infinite = Format::kFirstSpecial != Format::kNan && magnitude == Format::kFirstSpecial;
        return value_of(sign | (is_infinite ? kInfinity : 0x7FC00000u));
    }
    if (magnitude < 1u << Format::kMantissaBits) {
        const float value =
            product(static_cast<float>(magnitude), power_of_two(Format::kMinExponent - Format::kMantissaBits));
        return value_of(sign | bits_of(value));
    }
    constexpr uint32_t kRebias = static_cast<uint32_t>(kBias + Format::kMinExponent - 1) << 23;
    return value_of(sign | ((magnitude << (23 - Format::kMantissaBits)) + kRebias));
}

// Rounds to nearest, ties to even. Larger values become the largest value of the format. NaN stays NaN.
template <typename Format>
ADAMW_ANYWHERE typename Format::Code cast(float value) {
    constexpr int kShift = 23 - Format::kMantissaBits;
    const uint32_t sign = (bits_of(value) & kSign) >> (32 - 8 * sizeof(typename Format::Code));
    if (is_nan(value)) {
        return static_cast<typename Format::Code>(sign | Format::kNan);
    }
    float magnitude = value_of(bits_of(value) & ~kSign);
    magnitude = magnitude > Format::kLargest ? Format::kLargest : magnitude;
    if (magnitude < power_of_two(Format::kMinExponent)) {
        // In units of the smallest value. The sum with 2**23 rounds to an integer.
        const float units = product(magnitude, power_of_two(Format::kMantissaBits - Format::kMinExponent));
        return static_cast<typename Format::Code>(sign | (bits_of(sum(units, 8388608.0f)) - bits_of(8388608.0f)));
    }
    const uint32_t bits = bits_of(magnitude);
    const uint32_t rounded = (bits + (1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1)) >> kShift;
    constexpr uint32_t kRebias = static_cast<uint32_t>(kBias + Format::kMinExponent - 1) << Format::kMantissaBits;
    return static_cast<typename Format::Code>(sign | (rounded - kRebias));
}

// Rounds up with a probability equal to the distance from the lower value. `random` has 32 random bits.
template <typename Format>
ADAMW_ANYWHERE typename Format::Code cast_stochastically(float value, uint32_t random) {
    if (is_nan(value)) {
        return cast<Format>(value);
    }
    float magnitude = value_of(bits_of(value) & ~kSign);
    magnitude = magnitude > Format::kLargest ? Format::kLargest : magnitude;
    const int exponent = exponent_of(bits_of(magnitude)) - 1;
    const int spacing = (exponent < Format::kMinExponent ? Format::kMinExponent : exponent) - Format::kMantissaBits;
    constexpr int kFractionBits = 23 - Format::kMantissaBits;
    const uint64_t fixed = static_cast<uint64_t>(product(magnitude, power_of_two(kFractionBits - spacing)));
    const uint64_t rounded = (fixed + (random >> (32 - kFractionBits))) >> kFractionBits;
    const float found = product(static_cast<float>(rounded), power_of_two(spacing));
    return cast<Format>(value_of((bits_of(value) & kSign) | bits_of(found)));
}

// Returns the biased exponent of the scale of a block, from the bits of its largest finite magnitude.
template <typename Format>
ADAMW_ANYWHERE uint8_t scale_for(uint32_t largest) {
    if (largest == 0) {
        return kBias;
    }
    constexpr int kMost = 2 * kBias + 1 - Format::kExponentOfLargest;
    int biased = exponent_of(largest) - Format::kExponentOfLargest + kBias;
    biased = biased < 1 ? 1 : biased;
    biased += product(value_of(largest), power_of_two(kBias - biased)) > Format::kLargest ? 1 : 0;
    return static_cast<uint8_t>(biased > kMost ? kMost : biased);
}

// Returns 32 random bits of one element of the flattened parameter: SplitMix64, as in formats.py.
ADAMW_ANYWHERE inline uint32_t draw(uint64_t key, int64_t element) {
    uint64_t mixed = static_cast<uint64_t>(element + 1) * 0x9E3779B97F4A7C15u + key;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>((mixed ^ (mixed >> 31)) >> 32);
}

}  // namespace megatron_ft::adamw
