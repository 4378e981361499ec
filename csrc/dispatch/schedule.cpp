#include "schedule.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "balance.hpp"

namespace megatron_ft::dispatch {
namespace {

// A team with one member. It visits items in ascending order.
struct Alone {
    template <typename Visit>
    void each(int64_t count, Visit visit) {
        for (int64_t item = 0; item < count; ++item) {
            visit(item);
        }
    }

    template <typename Act>
    void one(Act act) {
        act();
    }

    int64_t add(int64_t* cell, int64_t value) {
        const int64_t before = *cell;
        *cell += value;
        return before;
    }

    bool claim(int64_t* cell, int64_t level) {
        if (*cell != kNoLevel) {
            return false;
        }
        *cell = level;
        return true;
    }
};

// Computes quotas [E, N] with even shares.
void even_quotas(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                 int64_t* quotas) {
    int64_t rests = 0;
    for (int64_t line = 0; line < num_experts * num_ranks; line += num_ranks) {
        const int64_t tokens = std::accumulate(counts + line, counts + line + num_ranks, int64_t{0});
        const int64_t copies = std::accumulate(replicas + line, replicas + line + num_ranks, int64_t{0});
        const EvenShares shares = EvenShares::of(tokens, copies, rests);
        rests += shares.rest;
        int64_t copy = 0, taken = 0;
        for (int64_t rank = line; rank < line + num_ranks; ++rank) {
            copy += replicas[rank];
            const int64_t until = shares.until(copy);
            quotas[rank] = until - taken;
            taken = until;
        }
    }
}

// Computes matched [N], the number of tokens of one expert that rank `own` exchanges with each rank. has[j] - fits[j]
// tokens are left over on a rank that has more tokens than fit there, and fits[j] - has[j] is the room of a rank that
// has fewer. Both are laid end to end in rank order; the interval of `own` is matched with the intervals of room. If
// `has` is counts and `fits` is quotas, these are the tokens that `own` sends; if it is the other way round, the tokens
// that it receives.
void match(const int64_t* has, const int64_t* fits, int64_t num_ranks, int64_t own, int64_t* matched) {
    int64_t start = 0;
    for (int64_t rank = 0; rank < own; ++rank) {
        start += larger(has[rank] - fits[rank], 0);
    }
    const int64_t end = start + larger(has[own] - fits[own], 0);
    if (end > start) {
        int64_t room = 0;
        for (int64_t rank = 0; rank < num_ranks && room < end; ++rank) {
            const int64_t before = room;
            room += larger(fits[rank] - has[rank], 0);
            matched[rank] = larger(smaller(end, room) - larger(start, before), 0);
        }
    }
    matched[own] = smaller(has[own], fits[own]);
}

}  // namespace

int64_t check_counts(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                     bool balanced) {
    int64_t signs = 0, total = 0, orphan = kFine;
    for (int64_t expert = num_experts - 1; expert >= 0; --expert) {
        int64_t tokens = 0, copies = 0;
        for (int64_t cell = expert * num_ranks; cell < (expert + 1) * num_ranks; ++cell) {
            signs |= counts[cell] | replicas[cell];
            tokens += counts[cell];
            copies += replicas[cell];
        }
        orphan = tokens > 0 && copies == 0 ? 1 + expert : orphan;
        total += tokens;
    }
    if (signs < 0) {
        return kNegative;
    }
    return balanced && total >= kMaxTokens ? kTooManyTokens : orphan;
}

void quotas(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks, bool balanced,
            int64_t* quotas) {
    if (!balanced) {
        even_quotas(counts, replicas, num_experts, num_ranks, quotas);
        return;
    }
    thread_local std::vector<int64_t> memory;
    memory.resize(std::max<size_t>(memory.size(), Balance::cells(num_experts, num_ranks)));
    Balancer<Alone>(Alone(), Balance(num_experts, num_ranks, memory.data())).run(counts, replicas, quotas);
}

void rows_of_rank(const int64_t* counts, const int64_t* quotas, int64_t num_experts, int64_t num_ranks, int64_t rank,
                  int64_t* outgoing, int64_t* incoming) {
    const int64_t num_cells = num_experts * num_ranks;
    std::fill(outgoing, outgoing + num_cells, 0);
    std::fill(incoming, incoming + num_cells, 0);
    for (int64_t line = 0; line < num_cells; line += num_ranks) {
        match(counts + line, quotas + line, num_ranks, rank, outgoing + line);
        match(quotas + line, counts + line, num_ranks, rank, incoming + line);
    }
}

}  // namespace megatron_ft::dispatch
