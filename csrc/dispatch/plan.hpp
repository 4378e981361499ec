// Chooses the rows that a rank sends, and the order of arrived rows. Notation: megatron_ft/runtime/dispatch/backend.py.
#pragma once

#include <cstdint>

namespace megatron_ft::dispatch {

// counts [E]: tokens of each expert in routing_map [T, E] (bytes 0 or 1). Returns K, the most rows of one token.
int64_t count_rows(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts);

// Rows in the order (destination rank, expert, token). outgoing [E, N]: tokens of each expert for each rank, summing
// to the counts. An expert's tokens, in token order, fill its copies in the order: own rank, then the others ascending.
// Fills permutation [S], expert_of_row [S] and rows_of_token [T, K].
void order_sent(const uint8_t* routing_map, const int64_t* outgoing, int64_t num_tokens, int64_t num_experts,
                int64_t num_ranks, int64_t rank, int64_t width, int64_t* permutation, int64_t* expert_of_row,
                int64_t* rows_of_token);

// incoming [L, N]: rows of each local expert from each rank; they arrive by rank, then expert. order [R]: arrived row
// at each place of the order (expert, rank, arrival). place [R]: its inverse.
void order_received(const int64_t* incoming, int64_t num_local_experts, int64_t num_ranks, int64_t* order,
                    int64_t* place);

}  // namespace megatron_ft::dispatch
