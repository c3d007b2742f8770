// Many pairs: short ones in groups of a vector's lanes, the others two at a time, the longest first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "levenshtein.hpp"
#include "packed.hpp"
#include "threads.hpp"

namespace ibpo {

constexpr std::int64_t kSaturated = std::numeric_limits<std::int64_t>::max();

// Sequence i of a is a[a_offsets[i] .. a_offsets[i + 1]), likewise b.
template <typename Id>
struct Pairs {
    const Id* a;
    const std::int64_t* a_offsets;
    const Id* b;
    const std::int64_t* b_offsets;
    std::size_t count;

    std::size_t size_a(std::size_t i) const { return static_cast<std::size_t>(a_offsets[i + 1] - a_offsets[i]); }
    std::size_t size_b(std::size_t i) const { return static_cast<std::size_t>(b_offsets[i + 1] - b_offsets[i]); }
    Core<Id> core(std::size_t i) const { return strip(a + a_offsets[i], size_a(i), b + b_offsets[i], size_b(i)); }
    // Working memory is kept for the next call unless some pair was huge.
    bool are_usual() const {
        constexpr std::size_t kHuge = 1 << 16;
        for (std::size_t i = 0; i < count; ++i)
            if (std::max(size_a(i), size_b(i)) > kHuge) return false;
        return true;
    }
};

// Works on two tasks at a time. begin(task), called whenever one is done, takes note of its result and begins another in
// its place; it returns false when there are no more. A Task has done(), advance() and advance(task, other).
template <typename Task, typename Begin>
void run_two_at_a_time(Task (&tasks)[2], Begin begin) {
    bool busy[2] = {true, true};
    while (true) {
        for (int slot = 0; slot < 2; ++slot)
            while (busy[slot] && tasks[slot].done()) busy[slot] = begin(tasks[slot]);
        if (busy[0] && busy[1])
            Task::advance(tasks[0], tasks[1]);
        else if (busy[0] || busy[1])
            tasks[busy[1]].advance();
        else
            return;
    }
}

template <typename Id>
class BatchDistance {
public:
    // limits may be null; out[i] is kSaturated where the distance is above limits[i].
    BatchDistance(const Kernels& kernels, Engine engine, const Pairs<Id>& pairs, const std::int64_t* limits,
                  std::int64_t* out)
        : kernels_(kernels), engine_(engine), pairs_(pairs), limits_(limits), out_(out), cores_(pairs.count) {}

    void run(std::size_t num_threads) {
        const bool keep = pairs_.are_usual();
        double tokens = 0;
        for (std::size_t i = 0; i < pairs_.count; ++i) tokens += double(pairs_.size_a(i)) + double(pairs_.size_b(i));
        each_thread(useful_threads(num_threads, pairs_.count, tokens), keep, [this](Scratch& scratch) { prepare(scratch); });
        plan();
        double work = 0;
        for (const std::size_t i : long_) work += cost(cores_[i]);
        for (const std::size_t i : short_) work += cost(cores_[i]);
        const std::size_t num_tasks = (long_.size() + 1) / 2 + groups_.size();
        each_thread(useful_threads(num_threads, num_tasks, work), keep, [this](Scratch& scratch) {
            solve_long(scratch);
            solve_groups(scratch);
        });
    }

private:
    static constexpr std::size_t kNone = ~std::size_t{0};
    struct Numbered : Job<Id> {
        std::size_t number = kNone;  // of the pair
    };
    struct Scratch {
        Tools tools;
        Numbered jobs[2];
        PackedPairs packed;
        OwnIds<Id> own;
        GridIds ids;
    };
    static constexpr Position kOneWord = 64;           // rows in a group so fast that nothing else need be tried
    static constexpr std::size_t kWindow = 512;        // pairs among which groups are made
    static constexpr std::size_t kChunk = 64;         // pairs that a thread takes at once to prepare
    static constexpr Position kMostColumns = 1 << 12;  // of a pair in a group: longer ones leave lanes idle

    template <typename Work>
    void each_thread(std::size_t num_threads, bool keep, Work work) {
        next_ = next_group_ = 0;
        run_on_threads<Scratch>(num_threads, keep, work);
    }

    static double cost(const Core<Id>& core) {  // nanoseconds, about
        return double(core.num_rows) * double(core.num_columns) / 150 + 5 * double(core.num_columns);
    }
    Position limit(std::size_t i) const { return limits_ == nullptr ? kSaturated - 1 : limits_[i]; }
    void report(std::size_t i, Position distance) { out_[i] = distance <= limit(i) ? distance : kSaturated; }
    bool is_short(const Core<Id>& core) const {
        return (engine_ == Engine::automatic || engine_ == Engine::packed) &&
               core.num_rows <= PackedPairs::kMaxRows && core.num_columns <= kMostColumns;
    }

    // Strips every pair, and is done with those of which little is left.
    void prepare(Scratch& scratch) {
        for (std::size_t first; (first = next_.fetch_add(kChunk)) < pairs_.count;) {
            const std::size_t last = std::min(first + kChunk, pairs_.count);
            for (std::size_t i = first; i < last; ++i) {
                Core<Id>& core = cores_[i] = pairs_.core(i);
                if (core.num_columns - core.num_rows > limit(i)) {
                    out_[i] = kSaturated;
                    core.num_columns = 0;
                } else if (core.num_rows == 0) {
                    out_[i] = core.num_columns;
                    core.num_columns = 0;
                } else if (engine_ == Engine::automatic && is_short(core) && core.num_rows > kOneWord) {
                    const Position few = core.num_rows / 32 + 2;
                    const Position found = scratch.tools.wavefront.distance(core.rows, core.num_rows, core.columns,
                                                                            core.num_columns, core.num_columns, few);
                    if (found == Wavefront::kGaveUp) continue;
                    report(i, found);
                    core.num_columns = 0;
                }
            }
        }
    }

    void plan() {
        for (std::size_t i = 0; i < pairs_.count; ++i)
            if (cores_[i].num_columns > 0) (is_short(cores_[i]) ? short_ : long_).push_back(i);
        std::sort(long_.begin(), long_.end(), [this](std::size_t i, std::size_t j) {
            return std::tuple(-cost(cores_[i]), i) < std::tuple(-cost(cores_[j]), j);
        });
        // pairs of as many words and about as many columns, from near each other in memory
        const auto kind = [this](std::size_t i) { return std::tuple(i / kWindow, (cores_[i].num_rows + 63) / 64); };
        const auto by_size = [&](std::size_t i) { return std::tuple(kind(i), cores_[i].num_columns, i); };
        std::sort(short_.begin(), short_.end(), [&](std::size_t i, std::size_t j) { return by_size(i) > by_size(j); });
        for (std::size_t first = 0; first < short_.size();) {
            std::size_t last = first;
            while (last < short_.size() && last - first < static_cast<std::size_t>(kernels_.lanes) &&
                   kind(short_[last]) == kind(short_[first]))
                ++last;
            groups_.push_back({first, last});
            first = last;
        }
    }

    void solve_long(Scratch& scratch) {
        const BandUse use{long_.size() > 1, false};
        run_two_at_a_time(scratch.jobs, [&](Numbered& job) {
            if (job.number != kNone) report(job.number, job.distance());
            job.number = kNone;
            const std::size_t next = next_.fetch_add(1);
            if (next >= long_.size()) return false;
            job.number = long_[next];
            job.begin(kernels_, engine_, cores_[job.number], limit(job.number), use, scratch.tools);
            return true;
        });
    }

    void solve_groups(Scratch& scratch) {
        for (std::size_t g; (g = next_group_.fetch_add(1)) < groups_.size();) {
            const auto [first, last] = groups_[g];
            Position most_rows = 0, most_columns = 0;
            for (std::size_t i = first; i < last; ++i) {
                most_rows = std::max(most_rows, cores_[short_[i]].num_rows);
                most_columns = std::max(most_columns, cores_[short_[i]].num_columns);
            }
            scratch.packed.start(kernels_, most_rows, most_columns);
            for (std::size_t i = first; i < last; ++i)
                scratch.packed.add(scratch.ids.read(scratch.own.take(cores_[short_[i]]), scratch.tools.local_ids));
            const std::int64_t* distances = scratch.packed.distances();
            for (std::size_t i = first; i < last; ++i) report(short_[i], distances[i - first]);
        }
    }

    struct Group {
        std::size_t first, last;  // in short_
    };

    const Kernels& kernels_;
    const Engine engine_;
    const Pairs<Id>& pairs_;
    const std::int64_t* limits_;
    std::int64_t* out_;
    std::vector<Core<Id>> cores_;  // num_columns 0: that pair is done
    std::vector<std::size_t> long_, short_;
    std::vector<Group> groups_;
    std::atomic<std::size_t> next_{0}, next_group_{0};
};

// The canonical alignments (alignment.hpp) of many pairs.
template <typename Id>
class BatchAlign {
public:
    // matched_a and matched_b: a flag for each token of a and b that stays.
    BatchAlign(const Kernels& kernels, Engine engine, const Pairs<Id>& pairs, std::uint8_t* matched_a,
               std::uint8_t* matched_b, std::int64_t* distances)
        : kernels_(kernels), engine_(engine), pairs_(pairs), matched_a_(matched_a), matched_b_(matched_b),
          distances_(distances) {}

    void run(std::size_t num_threads) {
        double tokens = 0;
        for (std::size_t i = 0; i < pairs_.count; ++i) {
            order_.push_back(i);
            tokens += double(size(i));
        }
        std::sort(order_.begin(), order_.end(), [this](std::size_t i, std::size_t j) {
            return std::tuple(size(j), i) < std::tuple(size(i), j);
        });
        const std::size_t useful = useful_threads(num_threads, pairs_.count, 20 * tokens);
        run_on_threads<Scratch>(useful, pairs_.are_usual(), [this](Scratch& scratch) {
            run_two_at_a_time(scratch.tracings, [&](Tracing& tracing) {
                if (tracing.number != kNone) finish(tracing);
                tracing.number = kNone;
                const std::size_t next = next_.fetch_add(1);
                if (next >= order_.size()) return false;
                begin(tracing, order_[next], scratch.tools);
                return true;
            });
        });
    }

private:
    static constexpr std::size_t kNone = ~std::size_t{0};
    struct Tracing {
        std::size_t number = kNone;  // of the pair
        Job<Id> job;
        Alignment alignment;

        bool done() const { return job.done(); }
        void advance() { job.advance(alignment); }
        static void advance(Tracing& tracing, Tracing& other) {
            Job<Id>::advance(tracing.job, tracing.alignment, other.job, other.alignment);
        }
    };
    struct Scratch {
        Tools tools;
        Tracing tracings[2];
    };

    std::size_t size(std::size_t i) const { return pairs_.size_a(i) + pairs_.size_b(i); }

    void begin(Tracing& tracing, std::size_t i, Tools& tools) {
        const Core<Id> core = pairs_.core(i);
        mark(matched_a_ + pairs_.a_offsets[i], pairs_.size_a(i), core);
        mark(matched_b_ + pairs_.b_offsets[i], pairs_.size_b(i), core);
        tracing.number = i;
        tracing.job.begin(kernels_, engine_, core, core.num_columns, BandUse{pairs_.count > 1, true}, tools);
    }

    // The common prefix and suffix stay.
    static void mark(std::uint8_t* matched, std::size_t size, const Core<Id>& core) {
        std::fill(matched, matched + core.prefix, 1);
        std::fill(matched + core.prefix, matched + size - core.suffix, 0);
        std::fill(matched + size - core.suffix, matched + size, 1);
    }

    void finish(Tracing& tracing) {
        const std::size_t i = tracing.number;
        const Core<Id>& core = tracing.job.core();
        distances_[i] = tracing.job.distance();
        if (core.num_rows == 0) return;
        std::uint8_t* in_a = matched_a_ + pairs_.a_offsets[i] + core.prefix;
        std::uint8_t* in_b = matched_b_ + pairs_.b_offsets[i] + core.prefix;
        if (core.swapped) std::swap(in_a, in_b);
        tracing.alignment.trace(tracing.job.grid(), !core.swapped, in_a, in_b);
    }

    const Kernels& kernels_;
    const Engine engine_;
    const Pairs<Id>& pairs_;
    std::uint8_t *matched_a_, *matched_b_;
    std::int64_t* distances_;
    std::vector<std::size_t> order_;  // the longest first
    std::atomic<std::size_t> next_{0};
};

}  // namespace ibpo
