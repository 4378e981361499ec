#include "plan.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "types.hpp"

namespace megatron_ft::dispatch {
namespace {

// Calls visit(expert) for every expert of one token, in ascending order. `line` is the token's line of the routing map.
// Reads eight bytes at a time, because most of them are zero.
template <typename Visit>
inline void for_each_expert(const uint8_t* line, int64_t num_experts, Visit visit) {
    int64_t expert = 0;
    for (; expert + 8 <= num_experts; expert += 8) {
        uint64_t eight;
        std::memcpy(&eight, line + expert, sizeof(eight));
        if (eight == 0) {
            continue;
        }
        for (int64_t each = expert; each < expert + 8; ++each) {
            if (line[each] != 0) {
                visit(each);
            }
        }
    }
    for (; expert < num_experts; ++expert) {
        if (line[expert] != 0) {
            visit(expert);
        }
    }
}

// Returns the rank at `position` in the order in which an expert's tokens are sent: `rank` itself, then the other ranks
// in ascending order.
inline int64_t filling(int64_t position, int64_t rank) {
    if (position == 0) {
        return rank;
    }
    return position <= rank ? position - 1 : position;
}

// Destination of the next token of one expert.
struct Cursor {
    int64_t position = -1;  // position of the destination rank in the order of `filling`
    int64_t next_row = 0;
    int64_t room = 0;  // number of tokens that still go to this destination rank
};

// Returns the first row of each (expert, destination rank) block when the blocks are ordered by destination rank, then
// by expert.
std::vector<int64_t> block_starts(const int64_t* outgoing, int64_t num_experts, int64_t num_ranks) {
    std::vector<int64_t> starts(num_experts * num_ranks);
    int64_t row = 0;
    for (int64_t destination = 0; destination < num_ranks; ++destination) {
        for (int64_t expert = 0; expert < num_experts; ++expert) {
            starts[expert * num_ranks + destination] = row;
            row += outgoing[expert * num_ranks + destination];
        }
    }
    return starts;
}

}  // namespace

int64_t count_rows(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts) {
    std::fill(counts, counts + num_experts, 0);
    int64_t most = 0;
    for (int64_t token = 0; token < num_tokens; ++token) {
        int64_t num_rows = 0;
        for_each_expert(routing_map + token * num_experts, num_experts, [&](int64_t expert) {
            ++counts[expert];
            ++num_rows;
        });
        most = std::max(most, num_rows);
    }
    return most;
}

void order_sent(const uint8_t* routing_map, const int64_t* outgoing, int64_t num_tokens, int64_t num_experts,
                int64_t num_ranks, int64_t rank, int64_t width, int64_t* permutation, int64_t* expert_of_row,
                int64_t* rows_of_token) {
    const std::vector<int64_t> starts = block_starts(outgoing, num_experts, num_ranks);
    std::vector<Cursor> cursors(num_experts);
    for (int64_t token = 0; token < num_tokens; ++token) {
        int64_t* rows = rows_of_token + token * width;
        int64_t num_rows = 0;
        for_each_expert(routing_map + token * num_experts, num_experts, [&](int64_t expert) {
            Cursor& cursor = cursors[expert];
            while (cursor.room == 0) {
                const int64_t block = expert * num_ranks + filling(++cursor.position, rank);
                cursor.next_row = starts[block];
                cursor.room = outgoing[block];
            }
            --cursor.room;
            const int64_t row = cursor.next_row++;
            permutation[row] = token;
            expert_of_row[row] = expert;
            rows[num_rows++] = row;
        });
        std::fill(rows + num_rows, rows + width, kNoRow);
    }
}

void order_received(const int64_t* incoming, int64_t num_local_experts, int64_t num_ranks, int64_t* order) {
    std::vector<int64_t> next_place(num_local_experts * num_ranks);
    int64_t total = 0;
    for (size_t block = 0; block < next_place.size(); ++block) {
        next_place[block] = total;
        total += incoming[block];
    }
    int64_t arrived = 0;
    for (int64_t source = 0; source < num_ranks; ++source) {
        for (int64_t expert = 0; expert < num_local_experts; ++expert) {
            const int64_t block = expert * num_ranks + source;
            for (int64_t row = 0; row < incoming[block]; ++row, ++arrived) {
                order[next_place[block] + row] = arrived;
            }
        }
    }
}

}  // namespace megatron_ft::dispatch
