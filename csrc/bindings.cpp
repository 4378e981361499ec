// The functions that megatron_ft/runtime/dispatch/cpp.py and transformer_engine_ext/kernels.py call. The caller has
// checked all arguments, but not the values of counts and replicas: dispatch_schedule checks these.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "adamw/update.hpp"
#include "dispatch/plan.hpp"
#include "dispatch/rows.hpp"
#include "dispatch/schedule.hpp"

namespace adamw = megatron_ft::adamw;
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

// Updates one range of a parameter. Returns 0, or 1 if the formats belong to no regime.
int64_t adamw_update(const adamw::Range* range, int64_t master, int64_t exp_avg, int64_t exp_avg_sq) {
    const bool is_known =
        adamw::with_formats(master, exp_avg, exp_avg_sq, [&](auto of_master, auto of_exp_avg, auto of_exp_avg_sq) {
            const int64_t num_blocks = (range->num_elements + adamw::kBlockElements - 1) / adamw::kBlockElements;
            for (int64_t block = 0; block < num_blocks; ++block) {
                adamw::update_block<decltype(of_master), decltype(of_exp_avg), decltype(of_exp_avg_sq), 1>(
                    *range, block, 0, [](uint32_t largest) { return largest; });
            }
        });
    return is_known ? 0 : 1;
}

// Casts `count` values to codes (for tests of the casts). `random` has one number per value; null rounds to nearest.
int64_t adamw_cast(int64_t format, const float* values, const uint32_t* random, int64_t count, void* codes) {
    const auto run = [=](auto unit) {
        using Format = decltype(unit);
        for (int64_t each = 0; each < count; ++each) {
            static_cast<typename Format::Code*>(codes)[each] =
                random == nullptr ? adamw::cast<Format>(values[each])
                                  : adamw::cast_stochastically<Format>(values[each], random[each]);
        }
    };
    switch (static_cast<adamw::FormatCode>(format)) {
        case adamw::FormatCode::kFp32:
            return 1;
        case adamw::FormatCode::kFp16:
            run(adamw::Fp16());
            return 0;
        case adamw::FormatCode::kE4m3:
            run(adamw::E4m3());
            return 0;
    }
    return 1;
}

}  // extern "C"
