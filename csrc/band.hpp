// The distance through stripes of rows, each over no more columns than a path of at most `limit` edits can visit.
//
// E. Ukkonen 1985: a path that leaves the diagonal of the end by x costs 2x extra, so with limit k only diagonals within
// a total width of k matter. Below every stripe the band is narrowed further: a column is dropped once its value there
// plus what must still follow (Seeds) exceeds the limit. What is left out is treated as if it were dear, never as
// if it were cheap: a result of at most `limit` is exact, any other is above `limit`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "bounds.hpp"
#include "buffer.hpp"
#include "kernels.hpp"

namespace ibpo {

struct StripeRange {
    Position first_row, last_row;        // half-open
    Position first_column, last_column;  // half-open
};

// The rows of one stripe as the kernels read them: by row of the stripe's own few tokens, a bit for each place.
class StripeTable {
public:
    void build(const StripeKernel& kernel, const Grid& grid, Position first_row, Position last_row) {
        const int words = kernel.words;
        const auto height = static_cast<std::size_t>(64 * words);
        matches_.reserve((height + 1) * static_cast<std::size_t>(words));
        if (num_ids_ < grid.num_ids) {
            by_id_.zeros(grid.num_ids);
            num_ids_ = grid.num_ids;
        }
        // A token's row in the table is its last place in the stripe: neither counting nor branches, which would be as
        // unforeseeable as the text.
        std::uint16_t* by_id = by_id_.data();
        const std::uint32_t* rows = grid.rows + first_row;
        const Position num_rows = last_row - first_row;
        for (Position i = 0; i < num_rows; ++i) by_id[rows[i]] = static_cast<std::uint16_t>(i + 1);
        std::memset(matches_.data(), 0, (static_cast<std::size_t>(num_rows) + 1) * height / 8);
        for (Position top = 0; top < num_rows; top += 64) {
            std::uint64_t* word = matches_.data() + kernel.position(static_cast<int>(top / 64));
            const Position last = std::min<Position>(64, num_rows - top);
            for (Position i = 0; i < last; ++i) word[by_id[rows[top + i]] * words] |= std::uint64_t{1} << i;
        }
    }
    // To be called before the next build(), with the same rows.
    void clear(const Grid& grid, Position first_row, Position last_row) {
        std::uint16_t* by_id = by_id_.data();
        for (Position i = first_row; i < last_row; ++i) by_id[grid.rows[i]] = 0;
    }
    // Of columns [first, last): the row of the table of each. The result, in `buffer`, has kColumnPad zeros on either
    // side.
    const std::uint16_t* columns(const Grid& grid, Position first, Position last, Buffer<std::uint16_t>& buffer) const {
        const Position count = last - first;
        std::uint16_t* padded = buffer.reserve(static_cast<std::size_t>(count + 2 * kColumnPad));
        std::uint16_t* out = padded + kColumnPad;
        std::memset(padded, 0, kColumnPad * sizeof *padded);
        std::memset(out + count, 0, kColumnPad * sizeof *padded);
        const std::uint16_t* by_id = by_id_.data();
        for (Position j = 0; j < count; ++j) {
            const std::uint32_t id = grid.columns[first + j];
            out[j] = id < grid.num_ids ? by_id[id] : 0;
        }
        return out;
    }
    const std::uint64_t* matches() const { return matches_.data(); }
    void swap_matches(Buffer<std::uint64_t>& other) { matches_.swap(other); }

private:
    std::size_t num_ids_ = 0;
    Buffer<std::uint64_t> matches_;
    Buffer<std::uint16_t> by_id_;
};

// Horizontal differences below the last stripe, for a window of columns that slides to the right.
class Frontier {
public:
    void reset(Position num_columns, Position window) {
        capacity_ = std::min(num_columns, 2 * window) + kColumnPad;
        rises_.reserve(static_cast<std::size_t>(capacity_));
        falls_.reserve(static_cast<std::size_t>(capacity_));
        origin_ = 0;
    }
    // Make [first, last) available: kept up to `known`, from there on D rises by one a column.
    void cover(Position first, Position known, Position last) {
        if (last - origin_ + kColumnPad > capacity_) {
            const auto kept = static_cast<std::size_t>(known - first);
            std::memmove(rises_.data(), rises(first), kept * sizeof(std::uint64_t));
            std::memmove(falls_.data(), falls(first), kept * sizeof(std::uint64_t));
            origin_ = first;
        }
        std::fill(rises(known), rises(last), ~std::uint64_t{0});
        std::fill(falls(known), falls(last), 0);
    }
    std::uint64_t* rises(Position column) { return rises_.data() + (column - origin_); }
    std::uint64_t* falls(Position column) { return falls_.data() + (column - origin_); }
    int difference(Position column) {
        return static_cast<int>(*rises(column) >> 63) - static_cast<int>(*falls(column) >> 63);
    }

private:
    Buffer<std::uint64_t> rises_, falls_;
    Position origin_ = 0, capacity_ = 0;
};

// Vertical differences of one stripe, between two calls of a kernel.
struct VerticalState {
    alignas(64) std::uint64_t rises[kMaxWords];
    alignas(64) std::uint64_t falls[kMaxWords];

    void start(int words) {  // D rises down the first column
        std::fill(rises, rises + words, ~std::uint64_t{0});
        std::fill(falls, falls + words, 0);
    }
    // D at the foot of the first `height` rows less D at their top
    Position change(const StripeKernel& kernel, Position height) const {
        Position sum = 0;
        for (Position row = 0; row < height; row += 64) {
            const int at = kernel.position(static_cast<int>(row / 64));
            const std::uint64_t mask = height - row < 64 ? (std::uint64_t{1} << (height - row)) - 1 : ~std::uint64_t{0};
            sum += __builtin_popcountll(rises[at] & mask) - __builtin_popcountll(falls[at] & mask);
        }
        return sum;
    }
};

struct BandUse {
    bool paired = false;  // most stripes will be advanced together with another band's
    bool traced = false;  // an alignment is wanted
};

// The distance of one pair, stripe by stripe: prepare() says what a kernel must do next, complete() takes note of it.
class Band {
public:
    // `grid` and `seeds` must outlive the run; seeds may be null.
    void start(const Kernels& kernels, const Grid& grid, const Seeds* seeds, Position limit, BandUse use) {
        use_ = use;
        kernels_ = &kernels;
        grid_ = grid;
        seeds_ = seeds;
        limit_ = std::min(limit, grid.num_columns);
        top_ = bottom_ = first_ = last_ = at_first_ = at_last_ = 0;
        finished_ = limit_ < grid.surplus();
        result_ = limit_ + 1;
        if (!finished_) frontier_.reset(grid.num_columns, limit_ + 1 + 64 * kMaxWords);
    }

    // False: there is nothing left to do, distance() tells the result.
    bool prepare() {
        if (finished_) return false;
        kernel_ = &choose();
        bottom_ = std::min(grid_.num_rows, top_ + 64 * kernel_->words);
        const Position end = last_column(bottom_);
        frontier_.cover(first_, last_, end);
        at_last_ += end - last_;
        last_ = end;
        table_.build(*kernel_, grid_, top_, bottom_);
        state_.start(kernel_->words);
        args_ = {table_.columns(grid_, first_, last_, columns_), last_ - first_, table_.matches(), frontier_.rises(first_),
                 frontier_.falls(first_), state_.rises, state_.falls, nullptr};
        return true;
    }

    const Kernels& kernels() const { return *kernels_; }
    const Grid& grid() const { return grid_; }
    const StripeKernel& kernel() const { return *kernel_; }
    const StripeArgs& args() const { return args_; }

    // Gives what args() has of matches and columns away for other memory: before complete(), if it is wanted later.
    void hand_over(Buffer<std::uint64_t>& matches, Buffer<std::uint16_t>& columns) {
        table_.swap_matches(matches);
        columns_.swap(columns);
    }

    void complete() {
        table_.clear(grid_, top_, bottom_);
        at_first_ += bottom_ - top_;
        at_last_ += state_.change(*kernel_, bottom_ - top_);
        top_ = bottom_;
        if (top_ == grid_.num_rows) {
            finished_ = true;
            if (last_ == grid_.num_columns) result_ = std::min(result_, at_last_);
        } else {
            finished_ = !narrow();
        }
    }

    // If it is at most the limit, else the limit + 1.
    Position distance() const { return result_; }
    // Of a distance above the limit: down to this row there are about so many edits.
    Position rows() const { return top_; }
    Position edits() const { return limit_ - seeds_from(top_); }

    // What is being worked on, for a traceback.
    StripeRange range() const { return {top_, bottom_, first_, last_}; }

private:
    Position seeds_from(Position row) const { return seeds_ == nullptr ? 0 : seeds_->from(row); }

    // The height that costs least a row.
    const StripeKernel& choose() const {
        const StripeKernel* best = nullptr;
        double least = 0;
        for (const StripeKernel& kernel : kernels_->stripes) {
            const Position bottom = std::min(grid_.num_rows, top_ + 64 * kernel.words);
            const Position steps = last_column(bottom) - first_ + kernel.words;
            const int column_cost = use_.paired ? kernel.paired_column_cost : kernel.column_cost;
            const int row_cost = kernel.row_cost + (use_.traced ? kernel.traced_row_cost : 0);
            const double cost = row_cost + double(column_cost) * double(steps) / double(bottom - top_);
            if (best == nullptr || cost < least) best = &kernel, least = cost;
        }
        return *best;
    }

    // Up to which column rows down to `bottom` must go: to end on a diagonal beyond the one of (top_, last_), a path
    // pays for going there, and for coming back or for the seeds that remain.
    Position last_column(Position bottom) const {
        const Position diagonal = last_ - top_, left = limit_ - at_last_;
        const Position back = (left + diagonal + grid_.surplus()) / 2;
        const Position beyond = std::max(grid_.surplus(), diagonal + left - seeds_from(bottom));
        return std::max(last_, std::min(grid_.num_columns, bottom + std::max(diagonal, std::min(back, beyond))));
    }

    // Drop columns at both ends of row top_ from which no path of at most `limit` edits leads on; false: none does.
    bool narrow() {
        const Position in_rows = seeds_from(top_), end_diagonal = grid_.surplus() + top_;
        const auto needed = [&](Position column) { return std::max(in_rows, std::abs(end_diagonal - column)); };
        while (at_first_ + needed(first_) > limit_) {
            if (first_ == last_) return false;
            at_first_ += frontier_.difference(first_++);
        }
        while (at_last_ + needed(last_) > limit_) at_last_ -= frontier_.difference(--last_);
        return true;
    }

    const Kernels* kernels_ = nullptr;
    const StripeKernel* kernel_ = nullptr;
    Grid grid_{};
    const Seeds* seeds_ = nullptr;
    Position limit_ = 0, result_ = 0;
    BandUse use_;
    bool finished_ = true;
    Position top_ = 0, bottom_ = 0;    // rows of the stripe
    Position first_ = 0, last_ = 0;    // columns of the band, in row top_
    Position at_first_ = 0, at_last_ = 0;  // D at (top_, first_) and at (top_, last_)
    StripeArgs args_{};
    StripeTable table_;
    Buffer<std::uint16_t> columns_;
    Frontier frontier_;
    VerticalState state_;
};

// The next `count` columns of a stripe; `args` then stand behind them.
inline void advance(const StripeKernel& kernel, StripeArgs& args, Position count) {
    if (count == 0) return;
    args.num_columns = count;
    kernel.advance(args);
    args.columns += count;
    args.rises += count;
    args.falls += count;
}

// Of two stripes, at once as far as that goes.
inline void advance(const StripeKernel& kernel, StripeArgs& args, Position count, StripeArgs& other,
                    Position other_count) {
    const Position together = std::min(count, other_count);
    if (together > 0) {
        args.num_columns = other.num_columns = together;
        kernel.advance_two(args, other);
        for (StripeArgs* passed : {&args, &other}) {
            passed->columns += together;
            passed->rises += together;
            passed->falls += together;
        }
    }
    advance(kernel, args, count - together);
    advance(kernel, other, other_count - together);
}

inline bool can_advance_together(const Band& band, const Band& other) {
    return &band.kernel() == &other.kernel() && band.kernel().advance_two != nullptr;
}

// The next stripe of one band, or of two at once where that pays.
inline void advance(Band& band) {
    band.kernel().advance(band.args());
    band.complete();
}

inline void advance(Band& band, Band& other) {
    if (can_advance_together(band, other)) {
        StripeArgs args = band.args(), other_args = other.args();
        advance(band.kernel(), args, args.num_columns, other_args, other_args.num_columns);
    } else {
        band.kernel().advance(band.args());
        other.kernel().advance(other.args());
    }
    band.complete();
    other.complete();
}

}  // namespace ibpo
