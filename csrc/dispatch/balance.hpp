// Computes balanced shares: those for which the rank with most tokens has as few as possible.
// megatron_ft/planning/balanced_shares.py states the rule.
//
// The same source is compiled for C++ and CUDA. A team visits the items of a step, in any order or at once:
//   each(count, visit)   calls visit(0) to visit(count - 1), then waits for all members
//   one(act)             one member calls act(); all members wait before and after it
//   add(cell, value)     adds value to *cell; returns the previous value
//   claim(cell, level)   sets *cell to level if it is kNoLevel; returns whether this member set it
// Within a step, a visit writes only sums, claims and cells of its own item. So the order of visits changes only the
// order of the ranks and experts of one level in their lists, and nothing depends on this order.
#pragma once

#include <cstdint>

#include "schedule.hpp"

namespace megatron_ft::dispatch {

constexpr int64_t kMaxRounds = 64;
constexpr int64_t kNoLevel = -1;

// Divides `amount` in proportion to weights that are passed one by one; `total` is the sum of the weights. The parts
// are integers, and their sum is `amount`.
struct Split {
    int64_t amount, total, weights = 0, given = 0;

    DISPATCH_ANYWHERE Split(int64_t amount, int64_t total) : amount(amount), total(total) {}

    DISPATCH_ANYWHERE int64_t next(int64_t weight) {
        if (amount == 0 || total == 0) {
            return 0;
        }
        weights += weight;
        const int64_t until = (amount * weights + total / 2) / total;
        const int64_t part = until - given;
        given = until;
        return part;
    }
};

// Memory of one call. A pair is an expert and a rank that has a copy of it; there are P <= E * N pairs.
struct Balance {
    int64_t num_experts, num_ranks;
    int64_t* expert_begin;  // [E + 1] first pair of each expert; pairs are ordered by expert, then by rank
    int64_t* rank_begin;    // [N + 1] first entry of each rank in pair_of_rank
    int64_t* next_pair;     // [N]
    int64_t* load;          // [N]
    int64_t* rank_level;    // [N]
    int64_t* expert_level;  // [E]
    int64_t* want;          // [E] sum of the wishes for each expert; in start(), tokens per holder of the expert
    int64_t* ranks;         // [N] ranks with a level, ascending by level
    int64_t* experts;       // [E] experts with a level, ascending by level
    int64_t* ranks_end;     // [N + 2] end of level k in ranks
    int64_t* experts_end;   // [N + 2]
    int64_t* scalars;       // [kNumScalars]
    int64_t* expert;        // [P]; all arrays below also have length P
    int64_t* rank;
    int64_t* pair_of_rank;  // pairs ordered by rank, then by expert
    int64_t* own;           // tokens that the rank routes to the expert (T in balanced_shares.py)
    int64_t* share;         // tokens of the expert that the rank computes (Q in balanced_shares.py)
    int64_t* wish;          // tokens of the expert that the rank would give away; 0 between steps
    int64_t* offer;         // weight with which the rank takes tokens of the expert; 0 between steps

    enum Scalar {
        kLimit,
        kTotal,
        kHolders,
        kAbove,
        kGroupLoad,
        kGroupSize,
        kGroupAbove,
        kRanks,
        kExperts,
        kNumScalars
    };

    DISPATCH_ANYWHERE static int64_t cells(int64_t num_experts, int64_t num_ranks) {
        return 5 * num_experts + 8 * num_ranks + 8 + kNumScalars + 7 * num_experts * num_ranks;
    }

    DISPATCH_ANYWHERE Balance(int64_t num_experts, int64_t num_ranks, int64_t* memory)
        : num_experts(num_experts), num_ranks(num_ranks) {
        const auto take = [&memory](int64_t count) {
            int64_t* taken = memory;
            memory += count;
            return taken;
        };
        const int64_t pairs = num_experts * num_ranks;
        expert_begin = take(num_experts + 1), rank_begin = take(num_ranks + 1), next_pair = take(num_ranks);
        load = take(num_ranks), rank_level = take(num_ranks), expert_level = take(num_experts);
        want = take(num_experts), ranks = take(num_ranks), experts = take(num_experts);
        ranks_end = take(num_ranks + 2), experts_end = take(num_ranks + 2), scalars = take(kNumScalars);
        expert = take(pairs), rank = take(pairs), pair_of_rank = take(pairs), own = take(pairs);
        share = take(pairs), wish = take(pairs), offer = take(pairs);
    }
};

// Computes the steps of the rule with the members of a team.
template <typename Team>
class Balancer {
  public:
    DISPATCH_ANYWHERE Balancer(Team team, const Balance& memory) : team_(team), m_(memory) {}

    // Computes quotas [E, N] from counts and replicas, both [E, N].
    DISPATCH_ANYWHERE void run(const int64_t* counts, const int64_t* replicas, int64_t* quotas) {
        list_pairs(counts, replicas);
        start(counts);
        for (int64_t round = 0; round < kMaxRounds && any_above_limit(); ++round) {
            const int64_t highest = find_levels();
            if (!raise_limit()) {
                for (int64_t level = highest; level > 0; --level) {
                    move_down(level);
                }
            }
        }
        team_.each(m_.num_experts, [&](int64_t e) {
            for (int64_t cell = e * m_.num_ranks; cell < (e + 1) * m_.num_ranks; ++cell) {
                quotas[cell] = 0;
            }
            for (int64_t p = m_.expert_begin[e]; p < m_.expert_begin[e + 1]; ++p) {
                quotas[e * m_.num_ranks + m_.rank[p]] = m_.share[p];
            }
        });
    }

  private:
    // Lists the pairs by expert and by rank.
    DISPATCH_ANYWHERE void list_pairs(const int64_t* counts, const int64_t* replicas) {
        const int64_t num_ranks = m_.num_ranks;
        team_.each(num_ranks + 1, [&](int64_t j) { m_.rank_begin[j] = 0; });
        team_.each(m_.num_experts, [&](int64_t e) {
            int64_t held = 0;
            for (int64_t j = 0; j < num_ranks; ++j) {
                held += replicas[e * num_ranks + j] > 0;
            }
            m_.expert_begin[e + 1] = held;
        });
        team_.one([&] {
            m_.expert_begin[0] = 0;
            for (int64_t e = 0; e < m_.num_experts; ++e) {
                m_.expert_begin[e + 1] += m_.expert_begin[e];
            }
        });
        team_.each(m_.num_experts, [&](int64_t e) {
            int64_t p = m_.expert_begin[e];
            for (int64_t j = 0; p < m_.expert_begin[e + 1]; ++j) {
                if (replicas[e * num_ranks + j] > 0) {
                    m_.expert[p] = e, m_.rank[p] = j, m_.own[p] = counts[e * num_ranks + j];
                    m_.wish[p] = 0, m_.offer[p] = 0;
                    team_.add(&m_.rank_begin[j + 1], 1);
                    ++p;
                }
            }
        });
        team_.one([&] {
            for (int64_t j = 0; j < num_ranks; ++j) {
                m_.next_pair[j] = m_.rank_begin[j];
                m_.rank_begin[j + 1] += m_.rank_begin[j];
            }
        });
        team_.each(m_.expert_begin[m_.num_experts],
                   [&](int64_t p) { m_.pair_of_rank[team_.add(&m_.next_pair[m_.rank[p]], 1)] = p; });
        // The pairs of a rank are in the order of visits: sort them.
        team_.each(num_ranks, [&](int64_t j) {
            for (int64_t i = m_.rank_begin[j] + 1; i < m_.rank_begin[j + 1]; ++i) {
                const int64_t pair = m_.pair_of_rank[i];
                int64_t to = i;
                for (; to > m_.rank_begin[j] && m_.pair_of_rank[to - 1] > pair; --to) {
                    m_.pair_of_rank[to] = m_.pair_of_rank[to - 1];
                }
                m_.pair_of_rank[to] = pair;
            }
        });
    }

    // Computes the first shares, loads and limit (steps 1 and 2).
    DISPATCH_ANYWHERE void start(const int64_t* counts) {
        team_.one([&] { m_.scalars[Balance::kTotal] = m_.scalars[Balance::kHolders] = 0; });
        team_.each(m_.num_experts, [&](int64_t e) {
            int64_t total = 0, own = 0;
            for (int64_t j = 0; j < m_.num_ranks; ++j) {
                total += counts[e * m_.num_ranks + j];
            }
            const int64_t begin = m_.expert_begin[e], end = m_.expert_begin[e + 1];
            for (int64_t p = begin; p < end; ++p) {
                own += m_.own[p];
            }
            Split elsewhere(total - own, end - begin);
            for (int64_t p = begin; p < end; ++p) {
                m_.share[p] = m_.own[p] + elsewhere.next(1);
            }
            m_.want[e] = end > begin ? ceil(total, end - begin) : 0;
            team_.add(&m_.scalars[Balance::kTotal], total);
        });
        team_.each(m_.num_ranks, [&](int64_t j) {
            add_up(j);
            team_.add(&m_.scalars[Balance::kHolders], m_.rank_begin[j + 1] > m_.rank_begin[j]);
        });
        team_.one([&] {
            int64_t limit = ceil(m_.scalars[Balance::kTotal], larger(m_.scalars[Balance::kHolders], 1));
            for (int64_t e = 0; e < m_.num_experts; ++e) {
                limit = larger(limit, m_.want[e]);
            }
            m_.scalars[Balance::kLimit] = limit;
        });
    }

    DISPATCH_ANYWHERE bool any_above_limit() {
        team_.one([&] { m_.scalars[Balance::kAbove] = 0; });
        team_.each(m_.num_ranks, [&](int64_t j) {
            if (m_.load[j] > limit()) {
                team_.add(&m_.scalars[Balance::kAbove], 1);
            }
        });
        return m_.scalars[Balance::kAbove] > 0;
    }

    // Computes the levels (step 3a). Returns the highest level of a rank.
    DISPATCH_ANYWHERE int64_t find_levels() {
        team_.one([&] { m_.scalars[Balance::kRanks] = m_.scalars[Balance::kExperts] = 0; });
        team_.each(m_.num_experts, [&](int64_t e) { m_.expert_level[e] = kNoLevel; });
        team_.each(m_.num_ranks, [&](int64_t j) {
            m_.rank_level[j] = kNoLevel;
            if (m_.load[j] < limit()) {
                reach_rank(j, 0);
            }
        });
        int64_t level = 0, first_rank = 0, first_expert = 0;
        for (;; ++level) {
            const int64_t end_rank = m_.scalars[Balance::kRanks];
            team_.each(end_rank - first_rank, [&](int64_t i) {
                const int64_t j = m_.ranks[first_rank + i];
                for (int64_t at = m_.rank_begin[j]; at < m_.rank_begin[j + 1]; ++at) {
                    const int64_t e = m_.expert[m_.pair_of_rank[at]];
                    if (team_.claim(&m_.expert_level[e], level)) {
                        m_.experts[team_.add(&m_.scalars[Balance::kExperts], 1)] = e;
                    }
                }
            });
            const int64_t end_expert = m_.scalars[Balance::kExperts];
            team_.one([&] { m_.ranks_end[level] = end_rank, m_.experts_end[level] = end_expert; });
            team_.each(end_expert - first_expert, [&](int64_t i) {
                const int64_t e = m_.experts[first_expert + i];
                for (int64_t p = m_.expert_begin[e]; p < m_.expert_begin[e + 1]; ++p) {
                    if (m_.share[p] > 0) {
                        reach_rank(m_.rank[p], level + 1);
                    }
                }
            });
            first_rank = end_rank, first_expert = end_expert;
            if (m_.scalars[Balance::kRanks] == end_rank) {
                return level;
            }
        }
    }

    // Raises the limit if this is necessary (step 3b). Returns whether it was raised.
    DISPATCH_ANYWHERE bool raise_limit() {
        int64_t* scalars = m_.scalars;
        team_.one(
            [=] { scalars[Balance::kGroupLoad] = scalars[Balance::kGroupSize] = scalars[Balance::kGroupAbove] = 0; });
        team_.each(m_.num_ranks, [&](int64_t j) {
            if (m_.rank_level[j] == kNoLevel) {
                team_.add(&scalars[Balance::kGroupLoad], m_.load[j]);
                team_.add(&scalars[Balance::kGroupSize], 1);
                team_.add(&scalars[Balance::kGroupAbove], m_.load[j] > limit());
            }
        });
        const bool raises = scalars[Balance::kGroupAbove] > 0;
        team_.one([=] {
            if (raises) {
                scalars[Balance::kLimit] = ceil(scalars[Balance::kGroupLoad], scalars[Balance::kGroupSize]);
            }
        });
        return raises;
    }

    // Moves tokens from ranks of `level` above the limit to ranks of the level below (step 3c).
    DISPATCH_ANYWHERE void move_down(int64_t level) {
        const int64_t takers = level > 1 ? m_.ranks_end[level - 2] : 0, givers = m_.ranks_end[level - 1];
        const int64_t num_givers = m_.ranks_end[level] - givers;
        const int64_t experts = level > 1 ? m_.experts_end[level - 2] : 0;
        const int64_t num_experts = m_.experts_end[level - 1] - experts;
        team_.each(num_givers, [&](int64_t i) { wish(m_.ranks[givers + i], level); });
        team_.each(num_experts, [&](int64_t i) {
            const int64_t e = m_.experts[experts + i];
            int64_t want = 0;
            for (int64_t p = m_.expert_begin[e]; p < m_.expert_begin[e + 1]; ++p) {
                want += m_.wish[p];
            }
            m_.want[e] = want;
        });
        if (level == 1) {
            team_.each(givers, [&](int64_t i) { offer(m_.ranks[i]); });
        }
        team_.each(num_experts, [&](int64_t i) { move(m_.experts[experts + i], level); });
        team_.each(givers + num_givers - takers, [&](int64_t i) { add_up(m_.ranks[takers + i]); });
    }

    // Computes `wish`, the tokens of each expert that rank j of `level` would give away: tokens of other ranks first.
    DISPATCH_ANYWHERE void wish(int64_t j, int64_t level) {
        const int64_t above = m_.load[j] - limit();
        if (above <= 0) {
            return;
        }
        int64_t all_foreign = 0, all_own = 0;
        for (int64_t at = m_.rank_begin[j]; at < m_.rank_begin[j + 1]; ++at) {
            const int64_t p = m_.pair_of_rank[at];
            if (m_.expert_level[m_.expert[p]] == level - 1) {
                all_own += smaller(m_.share[p], m_.own[p]);
                all_foreign += larger(m_.share[p] - m_.own[p], 0);
            }
        }
        Split foreign(smaller(above, all_foreign), all_foreign);
        Split own(smaller(above - foreign.amount, all_own), all_own);
        for (int64_t at = m_.rank_begin[j]; at < m_.rank_begin[j + 1]; ++at) {
            const int64_t p = m_.pair_of_rank[at];
            if (m_.expert_level[m_.expert[p]] == level - 1) {
                m_.wish[p] =
                    foreign.next(larger(m_.share[p] - m_.own[p], 0)) + own.next(smaller(m_.share[p], m_.own[p]));
            }
        }
    }

    // Computes `offer`, the room of rank j of level 0 for each of its experts. All of them have level 0.
    DISPATCH_ANYWHERE void offer(int64_t j) {
        int64_t wanted = 0;
        for (int64_t at = m_.rank_begin[j]; at < m_.rank_begin[j + 1]; ++at) {
            wanted += m_.want[m_.expert[m_.pair_of_rank[at]]];
        }
        Split room(smaller(limit() - m_.load[j], wanted), wanted);
        for (int64_t at = m_.rank_begin[j]; at < m_.rank_begin[j + 1]; ++at) {
            const int64_t p = m_.pair_of_rank[at];
            m_.offer[p] = room.next(m_.want[m_.expert[p]]);
        }
    }

    // Moves tokens of expert e from giving to taking ranks.
    DISPATCH_ANYWHERE void move(int64_t e, int64_t level) {
        const int64_t begin = m_.expert_begin[e], end = m_.expert_begin[e + 1], want = m_.want[e];
        if (want == 0) {
            return;
        }
        int64_t offers = 0;
        for (int64_t p = begin; p < end; ++p) {
            if (level > 1) {
                m_.offer[p] = m_.rank_level[m_.rank[p]] == level - 1;
            }
            offers += m_.offer[p];
        }
        const int64_t moved = level > 1 ? want : smaller(want, offers);
        Split taken(moved, want), given(moved, offers);
        for (int64_t p = begin; p < end; ++p) {
            m_.share[p] += given.next(m_.offer[p]) - taken.next(m_.wish[p]);
            m_.wish[p] = m_.offer[p] = 0;
        }
    }

    DISPATCH_ANYWHERE void reach_rank(int64_t j, int64_t level) {
        if (team_.claim(&m_.rank_level[j], level)) {
            m_.ranks[team_.add(&m_.scalars[Balance::kRanks], 1)] = j;
        }
    }

    DISPATCH_ANYWHERE void add_up(int64_t j) {
        int64_t load = 0;
        for (int64_t at = m_.rank_begin[j]; at < m_.rank_begin[j + 1]; ++at) {
            load += m_.share[m_.pair_of_rank[at]];
        }
        m_.load[j] = load;
    }

    DISPATCH_ANYWHERE int64_t limit() const { return m_.scalars[Balance::kLimit]; }

    DISPATCH_ANYWHERE static int64_t ceil(int64_t amount, int64_t count) { return (amount + count - 1) / count; }

    Team team_;
    Balance m_;
};

}  // namespace megatron_ft::dispatch
