// The functions that megatron_ft/runtime/dispatch/cpp.py calls. The caller has checked all arguments,
// but not the values of counts and replicas: dispatch_schedule checks these.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "dispatch/plan.hpp"
#include "dispatch/rows.hpp"
#include "dispatch/schedule.hpp"

namespace dispatch = megatron_ft::dispatch;

namespace {

// Calls run(T()), where T is the element type with the code `row_type`.
template <typename Run>
void with_row_type(int64_t row_type, Run run) {
    switch (static_cast<dispatch::RowType>(row_type)) {
        case dispatch::RowType::kFloat32:
            return run(float());
        case dispatch::RowType::kBFloat16:
            return run(c10::BFloat16());
        case dispatch::RowType::kFloat16:
            return run(c10::Half());
        case dispatch::RowType::kFloat64:
            return run(double());
    }
}

}  // namespace

extern "C" {

// Computes schedule [2, E, N]: what `rank` sends, and what it receives. quotas [E, N] is scratch memory. Returns the
// result of check_counts; the schedule is only computed if this is kFine.
int64_t dispatch_schedule(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                          int64_t rank, int64_t balanced, int64_t* quotas, int64_t* schedule) {
    const int64_t problem = dispatch::check_counts(counts, replicas, num_experts, num_ranks, balanced != 0);
    if (problem == dispatch::kFine) {
        dispatch::quotas(counts, replicas, num_experts, num_ranks, balanced != 0, quotas);
        dispatch::rows_of_rank(counts, quotas, num_experts, num_ranks, rank, schedule,
                               schedule + num_experts * num_ranks);
    }
    return problem;
}

int64_t dispatch_count_rows(const uint8_t* routing_map, int64_t num_tokens, int64_t num_experts, int64_t* counts) {
    return dispatch::count_rows(routing_map, num_tokens, num_experts, counts);
}

void dispatch_order_sent(const uint8_t* routing_map, const int64_t* outgoing, int64_t num_tokens, int64_t num_experts,
                         int64_t num_ranks, int64_t rank, int64_t width, int64_t* permutation, int64_t* expert_of_row,
                         int64_t* rows_of_token) {
    dispatch::order_sent(routing_map, outgoing, num_tokens, num_experts, num_ranks, rank, width, permutation,
                         expert_of_row, rows_of_token);
}

void dispatch_order_received(const int64_t* incoming, int64_t num_local_experts, int64_t num_ranks, int64_t* order) {
    dispatch::order_received(incoming, num_local_experts, num_ranks, order);
}

void dispatch_gather(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out) {
    dispatch::gather(source, index, num_rows, row_bytes, out);
}

void dispatch_scatter(const char* source, const int64_t* index, int64_t num_rows, int64_t row_bytes, char* out) {
    dispatch::scatter(source, index, num_rows, row_bytes, out);
}

void dispatch_combine(int64_t row_type, const void* rows, const int64_t* rows_of_token, const void* weights,
                      int64_t num_tokens, int64_t width, int64_t hidden, void* out) {
    with_row_type(row_type, [=](auto unit) {
        using T = decltype(unit);
        using Sum = typename dispatch::SumOf<T>::type;
        dispatch::combine(static_cast<const T*>(rows), rows_of_token, static_cast<const Sum*>(weights), num_tokens,
                          width, hidden, static_cast<T*>(out));
    });
}

void dispatch_weigh(int64_t row_type, const void* grad, const void* rows, const int64_t* permutation,
                    const void* weights, int64_t num_rows, int64_t hidden, void* grad_rows, void* dots) {
    with_row_type(row_type, [=](auto unit) {
        using T = decltype(unit);
        using Sum = typename dispatch::SumOf<T>::type;
        dispatch::weigh(static_cast<const T*>(grad), static_cast<const T*>(rows), permutation,
                        static_cast<const Sum*>(weights), num_rows, hidden, static_cast<T*>(grad_rows),
                        static_cast<Sum*>(dots));
    });
}

}  // extern "C"
