// Chooses the rows that a rank sends, and sorts the rows that it receives.
// megatron_ft/runtime/dispatch/backend.py explains the notation.
#pragma once

#include <cstdint>

namespace megatron_ft::dispatch {

// Counts the tokens of each expert in routing_map [T, E] (bytes 0 or 1), into counts [E]. Returns K, the largest number
// of experts of one token.
int64_t count_rows(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts);

// Orders the sent rows by (destination rank, expert, token), and fills permutation [S], expert_of_row [S] and
// rows_of_token [T, K], which DispatchHandle in rows.py explains. outgoing [E, N]: tokens of each expert for each
// rank. The first tokens of an expert go to this rank, the next ones to the other ranks, in rank order. `width` is K.
void order_sent(const uint8_t* routing_map, const int64_t* outgoing, int64_t num_tokens, int64_t num_experts,
                int64_t num_ranks, int64_t rank, int64_t width, int64_t* permutation, int64_t* expert_of_row,
                int64_t* rows_of_token);

// Sorts the received rows by (local expert, source rank). incoming [L, N]: rows of each local expert from each rank.
// Rows arrive ordered by source rank, then by expert. order [R]: arrival index of each sorted row.
void order_received(const int64_t* incoming, int64_t num_local_experts, int64_t num_ranks, int64_t* order);

}  // namespace megatron_ft::dispatch
