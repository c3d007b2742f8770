// Work over threads that live for one call: nothing is left behind that a fork could break.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace ibpo {

// Working memory that waits for the next call, since fresh pages cost more than many a pair. A thread takes what lies
// in a slot and puts it back later; there is no lock that a child of fork() could inherit locked.
template <typename Scratch>
class Stash {
public:
    static std::unique_ptr<Scratch> take() {
        for (auto& slot : slots_)
            if (Scratch* kept = slot.exchange(nullptr)) return std::unique_ptr<Scratch>(kept);
        return std::make_unique<Scratch>();
    }
    static void put(std::unique_ptr<Scratch> scratch) {
        for (auto& slot : slots_) {
            Scratch* empty = nullptr;
            if (slot.compare_exchange_strong(empty, scratch.get())) {
                scratch.release();
                return;
            }
        }
    }

private:
    static inline std::atomic<Scratch*> slots_[4]{};
};

// Runs work(scratch) on `num_threads` threads, this one among them. What it throws first is thrown again.
template <typename Scratch, typename Work>
void run_on_threads(std::size_t num_threads, bool keep_scratch, Work work) {
    std::exception_ptr failure;
    std::mutex failure_lock;
    auto run = [&] {
        try {
            std::unique_ptr<Scratch> scratch = Stash<Scratch>::take();
            work(*scratch);
            if (keep_scratch) Stash<Scratch>::put(std::move(scratch));
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

// At most `asked` threads (0: one a core), and no more than there is work for; `nanoseconds` estimates all of it.
inline std::size_t useful_threads(std::size_t asked, std::size_t num_tasks, double nanoseconds) {
    constexpr double kWorthAThread = 100e3;
    if (asked == 0) {
        const auto by_work = static_cast<std::size_t>(std::min(nanoseconds / kWorthAThread, 1e4));
        asked = std::min<std::size_t>(std::max(1u, std::thread::hardware_concurrency()), by_work);
    }
    return std::max<std::size_t>(1, std::min(asked, num_tasks));
}

}  // namespace ibpo
