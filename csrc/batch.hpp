// Many pairs: short ones in groups of a vector's lanes, the others two at a time, the longest first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
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
    struct Scratch {
        Tools tools;
        Job<Id> jobs[2];
        PackedPairs packed;
        GridIds ids;
    };
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
                } else if (engine_ == Engine::automatic && is_short(core)) {
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
        const auto by_size = [this](std::size_t i) {
            return std::tuple((cores_[i].num_rows + 63) / 64, cores_[i].num_columns, i);
        };
        std::sort(short_.begin(), short_.end(), [&](std::size_t i, std::size_t j) { return by_size(i) > by_size(j); });
        for (std::size_t first = 0; first < short_.size();) {  // pairs of as many words
            const auto words = std::get<0>(by_size(short_[first]));
            std::size_t last = first;
            while (last < short_.size() && last - first < static_cast<std::size_t>(kernels_.lanes) &&
                   std::get<0>(by_size(short_[last])) == words)
                ++last;
            groups_.push_back({first, last});
            first = last;
        }
    }

    void solve_long(Scratch& scratch) {
        constexpr std::size_t kNone = ~std::size_t{0};
        const BandUse use = long_.size() > 1 ? BandUse::paired : BandUse::alone;
        std::size_t at[2] = {kNone, kNone};
        while (true) {
            for (int slot = 0; slot < 2; ++slot) {
                Job<Id>& job = scratch.jobs[slot];
                while (at[slot] == kNone || job.done()) {
                    if (at[slot] != kNone) report(at[slot], job.distance());
                    at[slot] = kNone;
                    const std::size_t next = next_.fetch_add(1);
                    if (next >= long_.size()) break;
                    at[slot] = long_[next];
                    job.begin(kernels_, engine_, cores_[at[slot]], limit(at[slot]), use, scratch.tools);
                }
            }
            if (at[0] == kNone && at[1] == kNone) return;
            if (at[0] != kNone && at[1] != kNone)
                advance(scratch.jobs[0].band(), scratch.jobs[1].band());
            else
                advance(scratch.jobs[at[0] == kNone].band());
            for (int slot = 0; slot < 2; ++slot)
                if (at[slot] != kNone) scratch.jobs[slot].proceed(scratch.tools);
        }
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
                scratch.packed.add(scratch.ids.read(cores_[short_[i]], scratch.tools.local_ids));
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

// matched_a and matched_b: a flag for each token of a and b that stays.
template <typename Id>
void batch_align(const Kernels& kernels, Engine engine, const Pairs<Id>& pairs, std::size_t num_threads,
                 std::uint8_t* matched_a, std::uint8_t* matched_b, std::int64_t* distances) {
    struct Scratch {
        Tools tools;
        Aligner aligner;
    };
    std::vector<std::size_t> order(pairs.count);
    double tokens = 0;
    for (std::size_t i = 0; i < pairs.count; ++i) {
        order[i] = i;
        tokens += double(pairs.size_a(i)) + double(pairs.size_b(i));
    }
    const auto size = [&](std::size_t i) { return pairs.size_a(i) + pairs.size_b(i); };
    std::sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) {
        return std::tuple(size(j), i) < std::tuple(size(i), j);
    });
    std::atomic<std::size_t> next{0};
    run_on_threads<Scratch>(useful_threads(num_threads, pairs.count, 20 * tokens), pairs.are_usual(), [&](Scratch& scratch) {
        for (std::size_t n; (n = next.fetch_add(1)) < pairs.count;) {
            const std::size_t i = order[n];
            distances[i] = scratch.aligner.align(kernels, engine, pairs.a + pairs.a_offsets[i], pairs.size_a(i),
                                                 pairs.b + pairs.b_offsets[i], pairs.size_b(i),
                                                 matched_a + pairs.a_offsets[i], matched_b + pairs.b_offsets[i],
                                                 scratch.tools);
        }
    });
}

}  // namespace ibpo
