// Levenshtein distance of two token-id sequences: which engine does which pair.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "affix.hpp"
#include "alignment.hpp"
#include "anchors.hpp"
#include "band.hpp"
#include "bounds.hpp"
#include "local_ids.hpp"
#include "wavefront.hpp"

namespace ibpo {

enum class Engine { automatic, packed, stripes, wavefront };

// What is left of two sequences without their common prefix and suffix, the shorter one as rows.
template <typename Id>
struct Core {
    const Id* rows;
    Position num_rows;
    const Id* columns;
    Position num_columns;
    Position prefix, suffix;
    bool swapped;  // rows are of b
};

template <typename Id>
Core<Id> strip(const Id* a, std::size_t size_a, const Id* b, std::size_t size_b) {
    const std::size_t prefix = common_prefix(a, b, std::min(size_a, size_b));
    const std::size_t suffix = common_suffix(a + prefix, size_a - prefix, b + prefix, size_b - prefix);
    const bool swapped = size_a > size_b;
    if (swapped) std::swap(a, b), std::swap(size_a, size_b);
    return {a + prefix,
            static_cast<Position>(size_a - prefix - suffix),
            b + prefix,
            static_cast<Position>(size_b - prefix - suffix),
            static_cast<Position>(prefix),
            static_cast<Position>(suffix),
            swapped};
}

// A core's ids in memory of our own. Another thread of the caller's may write to its arrays meanwhile: what is read twice
// must be the same twice, or tables made from the first reading are too small for the second.
template <typename Id>
class OwnIds {
public:
    Core<Id> take(Core<Id> core) {
        core.rows = copy(core.rows, core.num_rows, rows_);
        core.columns = copy(core.columns, core.num_columns, columns_);
        return core;
    }

private:
    static const Id* copy(const Id* ids, Position size, Buffer<Id>& own) {
        Id* out = own.reserve(static_cast<std::size_t>(size));
        std::copy(ids, ids + size, out);
        return out;
    }
    Buffer<Id> rows_, columns_;
};

// The ids of one core in 32 bits.
class GridIds {
public:
    // As they are, or, if a row's is negative or huge, by numbers of their own.
    template <typename Id>
    Grid read(const Core<Id>& core, LocalIds& local_ids) {
        reserve(core);
        if (!LocalIds::indexes(core.rows, static_cast<std::size_t>(core.num_rows))) return number(core, local_ids);
        narrow(core.rows, core.num_rows, rows_.data());
        narrow(core.columns, core.num_columns, columns_.data());
        if (!LocalIds::indexes(core.columns, at(core.num_columns)))
            for (Position j = 0; j < core.num_columns; ++j)
                if (static_cast<std::uint64_t>(core.columns[j]) >= LocalIds::kIndexed) columns_[at(j)] = LocalIds::kIndexed;
        return {rows_.data(), core.num_rows, columns_.data(), core.num_columns, LocalIds::kIndexed};
    }
    // By numbers 1, 2, … in the order of the rows.
    template <typename Id>
    Grid number(const Core<Id>& core, LocalIds& local_ids) {
        reserve(core);
        const std::uint32_t count = local_ids.number(core.rows, at(core.num_rows), rows_.data());
        local_ids.look_up(core.columns, at(core.num_columns), columns_.data());
        local_ids.clear(core.rows, at(core.num_rows));
        return {rows_.data(), core.num_rows, columns_.data(), core.num_columns, count + std::size_t{1}};
    }

private:
    template <typename Id>
    static void narrow(const Id* ids, Position size, std::uint32_t* out) {
        for (Position i = 0; i < size; ++i) out[i] = static_cast<std::uint32_t>(ids[i]);
    }
    static std::size_t at(Position position) { return static_cast<std::size_t>(position); }
    template <typename Id>
    void reserve(const Core<Id>& core) {
        rows_.reserve(at(core.num_rows));
        columns_.reserve(at(core.num_columns));
    }
    Buffer<std::uint32_t> rows_, columns_;
};

// Working memory that any pair may use for a moment.
struct Tools {
    LocalIds local_ids;
    GridIds numbered;
    Anchors anchors;
    Bag bag;
    Wavefront wavefront;
};

// Edits up to which the wavefront is the faster engine; measured.
inline Position wavefront_edits(Position num_rows) {
    Position edits = 4;
    while (2 * edits * edits < 3 * num_rows) edits += edits / 2;
    return edits;
}

// From so many rows on, texts, whose tokens recur, are worth a sample, and any ids a bound by anchors; measured.
constexpr Position kManyRows = 2048, kVeryManyRows = 8192;
constexpr double kRecurring = 0.02;

// Nearly all seeds are broken when two tokens of three are edited, and when all are as well.
inline bool look_unrelated(Position least, const Grid& grid) { return least * 100 >= grid.num_rows * 31; }

// The distance of one pair in the making: begin(), then advance() while it is not done(). The tools must outlive that.
template <typename Id>
class Job {
public:
    // `limit`: of a larger distance only that it is larger is asked.
    void begin(const Kernels& kernels, Engine engine, const Core<Id>& core, Position limit, BandUse use, Tools& tools) {
        use_ = use;
        kernels_ = &kernels;
        core_ = own_.take(core);
        tools_ = &tools;
        limit_ = std::min(limit, core.num_columns);
        done_ = false;
        if (core.num_columns - core.num_rows > limit_) return finish(limit_ + 1);
        if (core.num_rows == 0) return finish(core.num_columns);
        Position found = Wavefront::kGaveUp;
        if (engine != Engine::stripes) {
            const Position most = engine == Engine::wavefront ? core.num_columns : wavefront_edits(core.num_rows);
            found = tools.wavefront.distance(core_.rows, core_.num_rows, core_.columns, core_.num_columns, limit_, most);
            if (found != Wavefront::kGaveUp && !use.traced) return finish(found);
        }
        begin_band(found);
    }

    bool done() const { return done_; }
    // If it is at most the limit, else more than that.
    Position distance() const { return distance_; }
    const Core<Id>& core() const { return core_; }
    // What its band works on.
    const Grid& grid() const { return grid_; }

    void advance() {
        ibpo::advance(band_);
        proceed();
    }
    static void advance(Job& job, Job& other) {
        ibpo::advance(job.band_, other.band_);
        job.proceed();
        other.proceed();
    }
    // Those of a job begun to be traced.
    void advance(Alignment& alignment) {
        alignment.advance(band_);
        proceed();
    }
    static void advance(Job& job, Alignment& alignment, Job& other, Alignment& other_alignment) {
        Alignment::advance(alignment, job.band_, other_alignment, other.band_);
        job.proceed();
        other.proceed();
    }

private:
    // `known`: the distance, if it is, and what is asked for is an alignment.
    void begin_band(Position known) {
        grid_ = ids_.read(core_, tools_->local_ids);
        use_seeds_ = core_.num_rows > kernels_->rows_without_seeds;
        if (use_seeds_) seeds_.count(grid_);
        if (known != Wavefront::kGaveUp) return start_band(known);
        if (!use_seeds_) return start_band(limit_);
        const Position least = std::max(seeds_.from(0), grid_.surplus());
        if (least > limit_) return finish(limit_ + 1);
        if (limit_ < grid_.num_columns && look_unrelated(least, grid_) && tools_->bag.least(grid_) > limit_)
            return finish(limit_ + 1);
        start_band(std::min(limit_, std::max(least, guess(least))));
    }

    // How many edits there probably are, with a margin: too few cost another band, too many a wider one.
    Position guess(Position least) {
        const Position num_rows = grid_.num_rows;
        if (num_rows >= kVeryManyRows && least * 100 >= num_rows * 29)
            return tools_->anchors.upper_bound(tools_->numbered.number(core_, tools_->local_ids));
        if (look_unrelated(least, grid_)) return limit_;
        if (num_rows >= kManyRows && seeds_.recurrence() > kRecurring) {
            Wavefront& wavefront = tools_->wavefront;
            const Position most = num_rows < kVeryManyRows ? 64 : 128, many = num_rows * 36 / 100;
            wavefront.distance(core_.rows, num_rows, core_.columns, core_.num_columns, limit_, most);
            const Position guessed = extrapolate(wavefront.edits(), wavefront.rows());
            if (guessed <= many) return guessed;
            // among many edits the farthest path is too lucky
            return num_rows >= kVeryManyRows && least * 100 < num_rows * 19 ? many : limit_;
        }
        // If they are scattered: seeds with two edits or more count for one, edits between seeds for none, and where much
        // recurs many a broken seed is there elsewhere. Fitted to edits at all rates of ids of all distributions.
        const double share = double(least) / double(num_rows);
        const double of_each = (1.2 + 0.7 * share + 6.2 * share * share) * (1 + 4.5 * seeds_.recurrence());
        return static_cast<Position>(double(least) * of_each + 2 * std::sqrt(double(least))) + 8;
    }

    // The same if there are `edits` down to `row`: as many for each of the other rows, or as many for each of the other
    // broken seeds. Rows mislead where edits are few in one part and many in another; seeds where one part repeats itself.
    Position extrapolate(Position edits, Position row) const {
        const double broken = double(seeds_.from(0) - seeds_.from(row)), rest = double(seeds_.from(row));
        const double by_rows = double(edits + 1) / double(row + 1) * double(grid_.num_rows - row);
        const double by_seeds = double(edits + 8) / (broken + 6) * rest;
        const double guessed = double(edits) + std::sqrt(by_rows * by_seeds);
        return static_cast<Position>(guessed * (1.05 + 0.8 / std::sqrt(double(edits) + 4))) + 8;
    }

    // After each stripe of the band.
    void proceed() {
        if (band_.prepare()) return;
        if (band_.distance() <= band_limit_ || band_limit_ == limit_) return finish(band_.distance());
        start_band(std::min(limit_, std::max(band_limit_ * 9 / 8, extrapolate(band_.edits(), band_.rows()))));
    }

    void start_band(Position limit) {
        band_limit_ = limit;
        band_.start(*kernels_, grid_, use_seeds_ ? &seeds_ : nullptr, limit, use_);
        proceed();
    }

    void finish(Position distance) {
        distance_ = distance;
        done_ = true;
    }

    const Kernels* kernels_ = nullptr;
    Tools* tools_ = nullptr;
    Core<Id> core_{};
    OwnIds<Id> own_;
    Position limit_ = 0, band_limit_ = 0, distance_ = 0;
    bool done_ = true, use_seeds_ = false;
    BandUse use_;
    GridIds ids_;
    Grid grid_{};
    Seeds seeds_;
    Band band_;
};

}  // namespace ibpo
