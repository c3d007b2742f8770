// Independent pieces of work over threads that live for one call: nothing is left behind that a fork could break.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace ibpo {

// Calls work(i, scratch) for every i < count, each i once, on num_threads threads (0: one a core), with one Scratch
// a thread. Which thread takes which i varies; results written by i do not.
template <typename Scratch, typename Work>
void for_each_index(std::size_t count, std::size_t num_threads, Work work) {
    if (num_threads == 0) num_threads = std::max(1u, std::thread::hardware_concurrency());
    num_threads = std::min(num_threads, count);
    std::atomic<std::size_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_lock;
    auto run = [&] {
        try {
            Scratch scratch;
            for (std::size_t i; (i = next.fetch_add(1)) < count;) work(i, scratch);
        } catch (...) {
            const std::lock_guard guard(failure_lock);
            failure = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(num_threads);
    try {
        for (std::size_t i = 1; i < num_threads; ++i) others.emplace_back(run);
    } catch (const std::system_error&) {
        // the system gives no more threads: those there are do the work
    }
    run();
    for (std::thread& thread : others) thread.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace ibpo
