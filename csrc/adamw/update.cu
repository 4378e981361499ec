#include "update.cuh"

namespace megatron_ft::adamw::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kBlocksPerThreadBlock = 8;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// One warp updates one block of 64 elements, so that the largest magnitude needs no shared memory.
template <typename Master, typename ExpAvg, typename ExpAvgSq>
__global__ void update_kernel(const Range range, int64_t num_blocks) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kBlocksPerThreadBlock + threadIdx.x / kLanes;
    if (number >= num_blocks) {
        return;  // the whole warp
    }
    const auto largest_of_all = [](uint32_t largest) {
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            const uint32_t other = __shfl_xor_sync(kAllLanes, largest, distance);
            largest = other > largest ? other : largest;
        }
        return largest;
    };
    update_block<Master, ExpAvg, ExpAvgSq, kLanes>(range, number, threadIdx.x % kLanes, largest_of_all);
}

}  // namespace

bool update(const Range& range, int64_t master, int64_t exp_avg, int64_t exp_avg_sq, cudaStream_t stream) {
    return with_formats(master, exp_avg, exp_avg_sq, [&](auto of_master, auto of_exp_avg, auto of_exp_avg_sq) {
        const int64_t num_blocks = (range.num_elements + kBlockElements - 1) / kBlockElements;
        if (num_blocks == 0) {
            return;
        }
        const int64_t num_thread_blocks = (num_blocks + kBlocksPerThreadBlock - 1) / kBlocksPerThreadBlock;
        update_kernel<decltype(of_master), decltype(of_exp_avg), decltype(of_exp_avg_sq)>
            <<<num_thread_blocks, kBlocksPerThreadBlock * kLanes, 0, stream>>>(range, num_blocks);
    });
}

}  // namespace megatron_ft::adamw::cuda
