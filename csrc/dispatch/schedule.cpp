#include "schedule.hpp"

#include <algorithm>
#include <numeric>

namespace megatron_ft::dispatch {
namespace {

// Computes sent [N, N] of one expert from counts [N] and replicas [N]. `sent` must be zero before the call. Tokens
// first go to copies on their own rank. Then the tokens that are left on rank `from` are matched with the room on rank
// `to`, the tokens that its copies still get. Both are taken in rank order.
void schedule_expert(const Shares& shares, const int64_t* counts, const int64_t* replicas, int64_t num_ranks,
                     int64_t* sent) {
    int64_t own_copy = 0, to = -1, to_copy = 0, room = 0;
    for (int64_t from = 0; from < num_ranks; ++from) {
        const int64_t own = shares.until(own_copy + replicas[from]) - shares.until(own_copy);
        own_copy += replicas[from];
        const int64_t local = smaller(own, counts[from]);
        sent[from * num_ranks + from] = local;
        for (int64_t left = counts[from] - local; left > 0;) {
            while (room == 0) {
                ++to;
                const int64_t takes = shares.until(to_copy + replicas[to]) - shares.until(to_copy);
                to_copy += replicas[to];
                room = takes - smaller(takes, counts[to]);
            }
            const int64_t moved = smaller(left, room);
            sent[from * num_ranks + to] = moved;
            left -= moved;
            room -= moved;
        }
    }
}

}  // namespace

void schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
              int64_t* schedule) {
    std::fill(schedule, schedule + num_experts * num_ranks * num_ranks, 0);
    int64_t rests = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        const int64_t* own_counts = counts + expert * num_ranks;
        const int64_t* own_replicas = replicas + expert * num_ranks;
        const int64_t tokens = std::accumulate(own_counts, own_counts + num_ranks, int64_t{0});
        const int64_t copies = std::accumulate(own_replicas, own_replicas + num_ranks, int64_t{0});
        const Shares shares = Shares::of(tokens, copies, rests);
        rests += shares.rest;
        schedule_expert(shares, own_counts, own_replicas, num_ranks, schedule + expert * num_ranks * num_ranks);
    }
}

}  // namespace megatron_ft::dispatch
