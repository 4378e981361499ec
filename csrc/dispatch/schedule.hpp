// Computes how many tokens go where. The rule is stated in megatron_ft/planning/dispatch.py.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DISPATCH_ANYWHERE __host__ __device__
#else
#define DISPATCH_ANYWHERE
#endif

namespace megatron_ft::dispatch {

// schedule [E, N, N] from counts [E, N] and replicas [E, N].
void schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
              int64_t* schedule);

DISPATCH_ANYWHERE inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
DISPATCH_ANYWHERE inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Tokens of the copies of one expert: `share` tokens each, one more for `rest` of them from copy `first` on,
// cyclically.
struct Shares {
    int64_t share, rest, first, copies;

    // rests_before: the `rest` of all experts before, added up. Each expert's begins where those before it ended.
    DISPATCH_ANYWHERE static Shares of(int64_t tokens, int64_t num_copies, int64_t rests_before) {
        const int64_t copies = larger(num_copies, 1);
        return {tokens / copies, tokens % copies, rests_before % copies, copies};
    }

    // Tokens of the copies 0..end-1 together.
    DISPATCH_ANYWHERE int64_t until(int64_t end) const {
        const int64_t ahead = smaller(larger(end - first, 0), rest);
        const int64_t wrapped = larger(first + rest - copies, 0);
        return share * end + ahead + smaller(end, wrapped);
    }
};

}  // namespace megatron_ft::dispatch
