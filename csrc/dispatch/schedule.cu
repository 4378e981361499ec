#include "balance.hpp"
#include "kernels.cuh"
#include "schedule.hpp"

namespace megatron_ft::dispatch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBalanceThreads = 512;

__device__ int64_t total_of(const int64_t* values, int64_t count) {
    int64_t total = 0;
    for (int64_t each = 0; each < count; ++each) {
        total += values[each];
    }
    return total;
}

// Computes rests_before [E], an exclusive prefix sum of EvenShares::rest over the experts. One block handles all
// experts, one tile at a time.
__global__ void rests_kernel(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                             int64_t* rests_before) {
    __shared__ int64_t sums[kThreads];
    int64_t before_tile = 0;
    for (int64_t tile = 0; tile < num_experts; tile += kThreads) {
        const int64_t expert = tile + threadIdx.x;
        int64_t rest = 0;
        if (expert < num_experts) {
            const int64_t tokens = total_of(counts + expert * num_ranks, num_ranks);
            rest = EvenShares::of(tokens, total_of(replicas + expert * num_ranks, num_ranks), 0).rest;
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

// Computes the even shares of the copies of each expert. One block handles one expert.
__global__ void even_quotas_kernel(const int64_t* counts, const int64_t* replicas, const int64_t* rests_before,
                                   int64_t num_ranks, int64_t* quotas) {
    extern __shared__ int64_t shared[];
    int64_t* own_counts = shared;
    int64_t* own_replicas = shared + num_ranks;
    const int64_t line = blockIdx.x * num_ranks;
    for (int64_t rank = threadIdx.x; rank < num_ranks; rank += blockDim.x) {
        own_counts[rank] = counts[line + rank];
        own_replicas[rank] = replicas[line + rank];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const EvenShares shares = EvenShares::of(total_of(own_counts, num_ranks), total_of(own_replicas, num_ranks),
                                                 rests_before[blockIdx.x]);
        int64_t copy = 0, taken = 0;
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            copy += own_replicas[rank];
            const int64_t until = shares.until(copy);
            quotas[line + rank] = until - taken;
            taken = until;
        }
    }
}

// A team whose members are the threads of one block. The memory of the balancer is global memory. After a barrier, all
// threads see what each of them wrote.
struct Block {
    template <typename Visit>
    __device__ void each(int64_t count, Visit visit) {
        for (int64_t item = threadIdx.x; item < count; item += blockDim.x) {
            visit(item);
        }
        __syncthreads();
    }

    template <typename Act>
    __device__ void one(Act act) {
        __syncthreads();
        if (threadIdx.x == 0) {
            act();
        }
        __syncthreads();
    }

    __device__ int64_t add(int64_t* cell, int64_t value) {
        return atomicAdd(reinterpret_cast<unsigned long long*>(cell), static_cast<unsigned long long>(value));
    }

    __device__ bool claim(int64_t* cell, int64_t level) {
        const auto none = static_cast<unsigned long long>(kNoLevel);
        return atomicCAS(reinterpret_cast<unsigned long long*>(cell), none, static_cast<unsigned long long>(level)) ==
               none;
    }
};

// Computes balanced shares. One block handles all experts.
__global__ void __launch_bounds__(kBalanceThreads)
    balanced_quotas_kernel(const int64_t* counts, const int64_t* replicas, Balance memory, int64_t* quotas) {
    Balancer<Block>(Block(), memory).run(counts, replicas, quotas);
}

// Computes how many tokens rank `own` sends to and receives from each rank. One block handles one expert. Thread 0 sums
// up, rank by rank, the tokens that a rank has beyond its quota, and the room: the tokens that a rank has below its
// quota. These sums divide an axis into one interval of tokens and one of room per rank. All threads compute the
// overlaps of these intervals. Tokens up to its quota stay on a rank.
__global__ void rows_kernel(const int64_t* counts, const int64_t* quotas, int64_t num_ranks, int64_t own,
                            int64_t* outgoing, int64_t* incoming) {
    extern __shared__ int64_t shared[];
    int64_t* tokens_end = shared;
    int64_t* room_end = shared + num_ranks;
    const int64_t line = blockIdx.x * num_ranks;
    for (int64_t rank = threadIdx.x; rank < num_ranks; rank += blockDim.x) {
        tokens_end[rank] = larger(counts[line + rank] - quotas[line + rank], 0);
        room_end[rank] = larger(quotas[line + rank] - counts[line + rank], 0);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int64_t rank = 1; rank < num_ranks; ++rank) {
            tokens_end[rank] += tokens_end[rank - 1];
            room_end[rank] += room_end[rank - 1];
        }
    }
    __syncthreads();
    const auto sent = [&](int64_t from, int64_t to) {
        const int64_t start = larger(from == 0 ? 0 : tokens_end[from - 1], to == 0 ? 0 : room_end[to - 1]);
        return larger(smaller(tokens_end[from], room_end[to]) - start, 0);
    };
    for (int64_t rank = threadIdx.x; rank < num_ranks; rank += blockDim.x) {
        const int64_t kept = rank == own ? smaller(counts[line + own], quotas[line + own]) : 0;
        outgoing[line + rank] = sent(own, rank) + kept;
        incoming[line + rank] = sent(rank, own) + kept;
    }
}

}  // namespace

int64_t schedule_cells(int64_t num_experts, int64_t num_ranks) {
    return num_experts * num_ranks + larger(num_experts, Balance::cells(num_experts, num_ranks));
}

void schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks, int64_t rank,
              bool balanced, int64_t* memory, int64_t* schedule, cudaStream_t stream) {
    if (num_experts == 0) {
        return;
    }
    int64_t *quotas = memory, *rest = memory + num_experts * num_ranks;
    const size_t shared_bytes = 2 * num_ranks * sizeof(int64_t);
    if (balanced) {
        const Balance balance(num_experts, num_ranks, rest);
        balanced_quotas_kernel<<<1, kBalanceThreads, 0, stream>>>(counts, replicas, balance, quotas);
    } else {
        rests_kernel<<<1, kThreads, 0, stream>>>(counts, replicas, num_experts, num_ranks, rest);
        even_quotas_kernel<<<num_experts, kThreads, shared_bytes, stream>>>(counts, replicas, rest, num_ranks, quotas);
    }
    rows_kernel<<<num_experts, kThreads, shared_bytes, stream>>>(counts, quotas, num_ranks, rank, schedule,
                                                                 schedule + num_experts * num_ranks);
}

}  // namespace megatron_ft::dispatch::cuda
