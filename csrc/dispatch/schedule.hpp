// Computes how many tokens each rank sends to each rank, for every expert. megatron_ft/planning/dispatch.py states the
// rule.
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

// Returns kFine, or why counts [E, N] and replicas [E, N] have no schedule: kNegative, kTooManyTokens (only with
// balanced shares), or 1 + the first expert that has tokens but no copy.
int64_t check_counts(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                     bool balanced);

// Computes quotas [E, N], the number of tokens of each expert that each rank computes, from counts [E, N] and
// replicas [E, N].
void quotas(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks, bool balanced,
            int64_t* quotas);

// Computes outgoing [E, N], the number of tokens that `rank` sends to each rank, and incoming [E, N], the number of
// tokens that it receives from each rank.
void rows_of_rank(const int64_t* counts, const int64_t* quotas, int64_t num_experts, int64_t num_ranks, int64_t rank,
                  int64_t* outgoing, int64_t* incoming);

DISPATCH_ANYWHERE inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
DISPATCH_ANYWHERE inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The number of tokens of each copy of one expert with even shares. Each copy gets `share` tokens. `rest` copies get
// one more: these are copy `first` and those after it; copy 0 follows the last copy.
struct EvenShares {
    int64_t share, rest, first, copies;

    // rests_before: sum of `rest` over all experts before this one. Because of it, the additional tokens of different
    // experts do not always go to the same copies.
    DISPATCH_ANYWHERE static EvenShares of(int64_t tokens, int64_t num_copies, int64_t rests_before) {
        const int64_t copies = larger(num_copies, 1);
        return {tokens / copies, tokens % copies, rests_before % copies, copies};
    }

    // Returns the number of tokens of the copies 0 to end - 1 together.
    DISPATCH_ANYWHERE int64_t until(int64_t end) const {
        const int64_t ahead = smaller(larger(end - first, 0), rest);
        const int64_t wrapped = larger(first + rest - copies, 0);
        return share * end + ahead + smaller(end, wrapped);
    }
};

}  // namespace megatron_ft::dispatch
