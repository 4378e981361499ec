// The functions that megatron_ft/runtime/dispatch/cuda.py and transformer_engine_ext/kernels.py call. The caller has
// checked all arguments.
// Every function makes `device` the current device, launches kernels on `stream` and returns a CUDA error code.
#include "adamw/update.cuh"
#include "dispatch/kernels.cuh"

namespace adamw = megatron_ft::adamw;
namespace dispatch = megatron_ft::dispatch;

namespace {

template <typename Launch>
int on(int64_t device, Launch launch) {
    const cudaError_t found = cudaSetDevice(static_cast<int>(device));
    if (found != cudaSuccess) {
        return found;
    }
    launch();
    return cudaGetLastError();
}

}  // namespace

extern "C" {

const char* dispatch_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// Returns the number of elements of the scratch memory of dispatch_schedule.
int64_t dispatch_schedule_cells(int64_t num_experts, int64_t num_ranks) {
    return dispatch::cuda::schedule_cells(num_experts, num_ranks);
}

int dispatch_schedule(int64_t device, cudaStream_t stream, const int64_t* counts, const int64_t* replicas,
                      int64_t num_experts, int64_t num_ranks, int64_t rank, int64_t balanced, int64_t* memory,
                      int64_t* schedule) {
    return on(device, [=] {
        dispatch::cuda::schedule(counts, replicas, num_experts, num_ranks, rank, balanced != 0, memory, schedule,
                                 stream);
    });
}

int dispatch_order_sent(int64_t device, cudaStream_t stream, const uint8_t* routing_map, const int64_t* outgoing,
                        const int64_t* starts, int64_t num_tokens, int64_t num_experts, int64_t num_ranks, int64_t rank,
                        int64_t width, int64_t* row_of, int64_t* permutation, int64_t* expert_of_row,
                        int64_t* rows_of_token) {
    return on(device, [=] {
        dispatch::cuda::order_sent(routing_map, outgoing, starts, num_tokens, num_experts, num_ranks, rank, width,
                                   row_of, permutation, expert_of_row, rows_of_token, stream);
    });
}

int dispatch_order_received(int64_t device, cudaStream_t stream, const int64_t* sizes, const int64_t* arrivals,
                            const int64_t* places, int64_t num_blocks, int64_t* order) {
    return on(device, [=] { dispatch::cuda::order_received(sizes, arrivals, places, num_blocks, order, stream); });
}

int dispatch_gather(int64_t device, cudaStream_t stream, const char* source, const int64_t* index, int64_t num_rows,
                    int64_t row_bytes, char* out) {
    return on(device, [=] { dispatch::cuda::gather(source, index, num_rows, row_bytes, out, stream); });
}

int dispatch_scatter(int64_t device, cudaStream_t stream, const char* source, const int64_t* index, int64_t num_rows,
                     int64_t row_bytes, char* out) {
    return on(device, [=] { dispatch::cuda::scatter(source, index, num_rows, row_bytes, out, stream); });
}

int dispatch_weigh(int64_t device, cudaStream_t stream, int64_t row_type, const void* grad, const void* rows,
                   const int64_t* permutation, const void* weights, int64_t num_rows, int64_t hidden, void* grad_rows,
                   void* dots) {
    return on(device, [=] {
        dispatch::cuda::weigh(static_cast<dispatch::RowType>(row_type), grad, rows, permutation, weights, num_rows,
                              hidden, grad_rows, dots, stream);
    });
}

int dispatch_combine(int64_t device, cudaStream_t stream, int64_t row_type, const void* rows,
                     const int64_t* rows_of_token, const void* weights, int64_t num_tokens, int64_t width,
                     int64_t hidden, void* out) {
    return on(device, [=] {
        dispatch::cuda::combine(static_cast<dispatch::RowType>(row_type), rows, rows_of_token, weights, num_tokens,
                                width, hidden, out, stream);
    });
}

const char* adamw_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// Updates one range of a parameter. `range` is in host memory, its pointers are to device memory.
int adamw_update(int64_t device, cudaStream_t stream, const adamw::Range* range, int64_t master, int64_t exp_avg,
                 int64_t exp_avg_sq) {
    bool is_known = false;
    const int code = on(device, [&] { is_known = adamw::cuda::update(*range, master, exp_avg, exp_avg_sq, stream); });
    return code == cudaSuccess && !is_known ? cudaErrorInvalidValue : code;
}

}  // extern "C"
