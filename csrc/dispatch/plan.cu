#include "kernels.cuh"

namespace megatron_ft::dispatch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Counts the bits of `votes` for the lanes before this one.
__device__ inline int lanes_before(unsigned votes) { return __popc(votes & ((1u << (threadIdx.x % 32)) - 1)); }

// Returns how many threads before this one in the block have `routed` set. *total: how many threads of the block have
// it.
__device__ int place_in_tile(bool routed, int* warp_totals, int* total) {
    const unsigned votes = __ballot_sync(kAllLanes, routed);
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        warp_totals[warp] = __popc(votes);
    }
    __syncthreads();
    int before = 0;
    *total = 0;
    for (int each = 0; each < kWarps; ++each) {
        before += each < warp ? warp_totals[each] : 0;
        *total += warp_totals[each];
    }
    return before + lanes_before(votes);
}

// Returns the first position whose entry in quotas_end, which ascends, is greater than `token`. This is the position of
// the destination rank of an expert's token number `token`.
__device__ int64_t copy_of(int64_t token, const int64_t* quotas_end, int64_t num_ranks) {
    int64_t low = 0, high = num_ranks - 1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (token < quotas_end[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Assigns a row to each token that is routed to an expert. One block handles one expert, one tile of tokens at a time.
__global__ void place_rows_kernel(const uint8_t* routing_map, const int64_t* outgoing, const int64_t* starts,
                                  int64_t num_tokens, int64_t num_experts, int64_t num_ranks, int64_t rank,
                                  int64_t* row_of, int64_t* permutation, int64_t* expert_of_row) {
    extern __shared__ int64_t shared[];
    __shared__ int warp_totals[kWarps];
    int64_t* quotas_end = shared;
    int64_t* shift = shared + num_ranks;  // the expert's n-th token has row n + shift[position of its destination]
    const int64_t expert = blockIdx.x;
    if (threadIdx.x == 0) {
        int64_t end = 0;
        for (int64_t position = 0; position < num_ranks; ++position) {
            const int64_t to = position == 0 ? rank : (position <= rank ? position - 1 : position);
            shift[position] = starts[expert * num_ranks + to] - end;
            end += outgoing[expert * num_ranks + to];
            quotas_end[position] = end;
        }
    }
    int64_t placed = 0;
    for (int64_t tile = 0; tile < num_tokens; tile += kThreads) {
        const int64_t token = tile + threadIdx.x;
        const bool routed = token < num_tokens && routing_map[token * num_experts + expert] != 0;
        int total;
        const int64_t nth = placed + place_in_tile(routed, warp_totals, &total);
        placed += total;
        if (routed) {
            const int64_t row = nth + shift[copy_of(nth, quotas_end, num_ranks)];
            permutation[row] = token;
            expert_of_row[row] = expert;
            row_of[token * num_experts + expert] = row;
        }
    }
}

// Lists the rows of each token, experts ascending. One warp handles one token.
__global__ void list_rows_kernel(const uint8_t* routing_map, const int64_t* row_of, int64_t num_tokens,
                                 int64_t num_experts, int64_t width, int64_t* rows_of_token) {
    const int64_t token = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (token >= num_tokens) {
        return;
    }
    const int lane = threadIdx.x % 32;
    int64_t* rows = rows_of_token + token * width;
    int64_t num_rows = 0;
    for (int64_t chunk = 0; chunk < num_experts; chunk += 32) {
        const int64_t cell = token * num_experts + chunk + lane;
        const bool routed = chunk + lane < num_experts && routing_map[cell] != 0;
        const unsigned votes = __ballot_sync(kAllLanes, routed);
        if (routed) {
            rows[num_rows + lanes_before(votes)] = row_of[cell];
        }
        num_rows += __popc(votes);
    }
    for (int64_t column = num_rows + lane; column < width; column += 32) {
        rows[column] = kNoRow;
    }
}

__global__ void order_received_kernel(const int64_t* sizes, const int64_t* arrivals, const int64_t* places,
                                      int64_t* order) {
    const int64_t arrived = arrivals[blockIdx.x], placed = places[blockIdx.x];
    for (int64_t row = threadIdx.x; row < sizes[blockIdx.x]; row += blockDim.x) {
        order[placed + row] = arrived + row;
    }
}

}  // namespace

void order_sent(const uint8_t* routing_map, const int64_t* outgoing, const int64_t* starts, int64_t num_tokens,
                int64_t num_experts, int64_t num_ranks, int64_t rank, int64_t width, int64_t* row_of,
                int64_t* permutation, int64_t* expert_of_row, int64_t* rows_of_token, cudaStream_t stream) {
    if (num_tokens == 0 || width == 0) {
        return;
    }
    const size_t shared_bytes = 2 * num_ranks * sizeof(int64_t);
    place_rows_kernel<<<num_experts, kThreads, shared_bytes, stream>>>(
        routing_map, outgoing, starts, num_tokens, num_experts, num_ranks, rank, row_of, permutation, expert_of_row);
    const int64_t blocks = (num_tokens + kWarps - 1) / kWarps;
    list_rows_kernel<<<blocks, kThreads, 0, stream>>>(routing_map, row_of, num_tokens, num_experts, width,
                                                      rows_of_token);
}

void order_received(const int64_t* sizes, const int64_t* arrivals, const int64_t* places, int64_t num_blocks,
                    int64_t* order, cudaStream_t stream) {
    if (num_blocks > 0) {
        order_received_kernel<<<num_blocks, kThreads, 0, stream>>>(sizes, arrivals, places, order);
    }
}

}  // namespace megatron_ft::dispatch::cuda
