// Computes how many tokens go where. The rule is stated in megatron_ft/planning/dispatch.py.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DISPATCH_ANYWHERE __host__ __device__
#else
#define DISPATCH_ANYWHERE
#endif

namespace megatron_ft::dispatch {

constexpr int64_t kNegative = -1, kTooManyTokens = -2, kFine = 0;
constexpr int64_t kMaxTokens = int64_t{1} << 31;

// kFine, or why counts [E, N] and replicas [E, N] have no schedule: kNegative, kTooManyTokens (balanced shares only),
// or 1 + an expert that has tokens and no copy.
int64_t check_counts(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                     bool balanced);

// quotas [E, N], the tokens that each rank computes, from counts [E, N] and replicas [E, N].
void quotas(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks, bool balanced,
            int64_t* quotas);

// outgoing [E, N]: tokens that `rank` sends to each rank; incoming [E, N]: tokens that it receives from each.
void rows_of_rank(const int64_t* counts, const int64_t* quotas, int64_t num_experts, int64_t num_ranks, int64_t rank,
                  int64_t* outgoing, int64_t* incoming);

DISPATCH_ANYWHERE inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
DISPATCH_ANYWHERE inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Tokens of the copies of one expert with even shares: `share` tokens each, one more for `rest` of them from copy
// `first` on, cyclically.
struct EvenShares {
    int64_t share, rest, first, copies;

    // rests_before: the `rest` of all experts before, added up. Each expert's begins where those before it ended.
    DISPATCH_ANYWHERE static EvenShares of(int64_t tokens, int64_t num_copies, int64_t rests_before) {
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
