#include "kernels.cuh"
#include "schedule.hpp"

namespace megatron_ft::dispatch::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int64_t total_of(const int64_t* values, int64_t count) {
    int64_t total = 0;
    for (int64_t each = 0; each < count; ++each) {
        total += values[each];
    }
    return total;
}

// Computes rests_before [E], an exclusive prefix sum of Shares::rest over the experts. One block handles all experts,
// one tile at a time.
__global__ void rests_kernel(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                             int64_t* rests_before) {
    __shared__ int64_t sums[kThreads];
    int64_t before_tile = 0;
    for (int64_t tile = 0; tile < num_experts; tile += kThreads) {
        const int64_t expert = tile + threadIdx.x;
        int64_t rest = 0;
        if (expert < num_experts) {
            const int64_t tokens = total_of(counts + expert * num_ranks, num_ranks);
            rest = Shares::of(tokens, total_of(replicas + expert * num_ranks, num_ranks), 0).rest;
        }
        sums[threadIdx.x] = rest;
        __syncthreads();
        for (int reach = 1; reach < kThreads; reach *= 2) {
            const int64_t added = threadIdx.x >= reach ? sums[threadIdx.x - reach] : 0;
            __syncthreads();
            sums[threadIdx.x] += added;
            __syncthreads();
        }
        if (expert < num_experts) {
            rests_before[expert] = before_tile + sums[threadIdx.x] - rest;
        }
        before_tile += sums[kThreads - 1];
        __syncthreads();
    }
}

// Computes the schedule of one expert in one block. Thread 0 sends tokens to copies on their own rank. Then it sums up,
// rank by rank, the tokens that are left and the room: the tokens that the copies on a rank still get. These sums
// divide an axis into one interval of tokens and one of room per rank. All threads compute the overlaps of these
// intervals.
__global__ void schedule_kernel(const int64_t* counts, const int64_t* replicas, const int64_t* rests_before,
                                int64_t num_ranks, int64_t* schedule) {
    extern __shared__ int64_t shared[];
    int64_t* tokens_end = shared;
    int64_t* room_end = shared + num_ranks;
    const int64_t expert = blockIdx.x;
    int64_t* sent = schedule + expert * num_ranks * num_ranks;
    for (int64_t rank = threadIdx.x; rank < num_ranks; rank += blockDim.x) {
        tokens_end[rank] = counts[expert * num_ranks + rank];
        room_end[rank] = replicas[expert * num_ranks + rank];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int64_t tokens = 0, copies = 0;
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            tokens += tokens_end[rank];
            copies += room_end[rank];
        }
        const Shares shares = Shares::of(tokens, copies, rests_before[expert]);
        int64_t copy = 0, taken = 0, left_tokens = 0, left_room = 0;
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            copy += room_end[rank];
            const int64_t until = shares.until(copy);
            const int64_t takes = until - taken;
            taken = until;
            const int64_t local = smaller(takes, tokens_end[rank]);
            sent[rank * num_ranks + rank] = local;
            left_tokens += tokens_end[rank] - local;
            left_room += takes - local;
            tokens_end[rank] = left_tokens;
            room_end[rank] = left_room;
        }
    }
    __syncthreads();
    for (int64_t cell = threadIdx.x; cell < num_ranks * num_ranks; cell += blockDim.x) {
        const int64_t from = cell / num_ranks, to = cell % num_ranks;
        if (from != to) {
            const int64_t start = larger(from == 0 ? 0 : tokens_end[from - 1], to == 0 ? 0 : room_end[to - 1]);
            sent[cell] = larger(smaller(tokens_end[from], room_end[to]) - start, 0);
        }
    }
}

}  // namespace

void schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
              int64_t* rests_before, int64_t* schedule, cudaStream_t stream) {
    if (num_experts > 0) {
        const size_t shared_bytes = 2 * num_ranks * sizeof(int64_t);
        rests_kernel<<<1, kThreads, 0, stream>>>(counts, replicas, num_experts, num_ranks, rests_before);
        schedule_kernel<<<num_experts, kThreads, shared_bytes, stream>>>(counts, replicas, rests_before, num_ranks,
                                                                         schedule);
    }
}

}  // namespace megatron_ft::dispatch::cuda
