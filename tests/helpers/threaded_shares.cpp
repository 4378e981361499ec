// Computes balanced shares by a team of threads with barriers and atomics, as a block of CUDA threads does, but without
// a GPU.
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "dispatch/balance.hpp"

namespace dispatch = megatron_ft::dispatch;

namespace {

struct Threads {
    int64_t member, members;
    std::barrier<>* barrier;

    template <typename Visit>
    void each(int64_t count, Visit visit) {
        // The order is the reverse of the one in a block of CUDA threads, so that a dependence on the order shows.
        for (int64_t item = count - 1 - member; item >= 0; item -= members) {
            visit(item);
        }
        barrier->arrive_and_wait();
    }

    template <typename Act>
    void one(Act act) {
        barrier->arrive_and_wait();
        if (member == members - 1) {
            act();
        }
        barrier->arrive_and_wait();
    }

    int64_t add(int64_t* cell, int64_t value) { return std::atomic_ref<int64_t>(*cell).fetch_add(value); }

    bool claim(int64_t* cell, int64_t level) {
        int64_t none = dispatch::kNoLevel;
        return std::atomic_ref<int64_t>(*cell).compare_exchange_strong(none, level);
    }
};

}  // namespace

extern "C" void threaded_quotas(const int64_t* counts, const int64_t* replicas, int64_t num_experts, int64_t num_ranks,
                                int64_t members, int64_t* quotas) {
    std::vector<int64_t> memory(dispatch::Balance::cells(num_experts, num_ranks), -7);
    const dispatch::Balance balance(num_experts, num_ranks, memory.data());
    std::barrier<> barrier(members);
    std::vector<std::thread> threads;
    for (int64_t member = 0; member < members; ++member) {
        threads.emplace_back([&, member] {
            dispatch::Balancer<Threads>(Threads{member, members, &barrier}, balance).run(counts, replicas, quotas);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}
