// The canonical alignment of a pair: which tokens stay.
//
// Of all alignments of least cost, one with most matches, and of these a fixed one:
//   1. The common prefix is matched, then the common suffix of the rest.
//   2. In what is left, an edge of the grid counts if it is optimal for the distances D(i, j) of prefixes; where two
//      tokens are equal, only the edge that matches them does. (A path that leaves them unmatched can be bent through
//      that edge without cost: the one that ends in (i, j) otherwise matches one of the two tokens to an earlier one,
//      or neither. So no cost and no match is lost.)
//   3. Of the paths along such edges one with most matches; among these, from the start, the diagonal is preferred, then
//      leaving out a token of a, then one of b.
//
// D is not kept. The band's forward pass keeps the state at the corners of tiles. From the end to the start each
// stripe's tiles that optimal paths touch are run again, every cell they visit (a few a token) gets the most matches
// that can follow it, and at last the path is walked from the start. Memory: the corners, the tiles of one stripe, and
// four bytes a visited cell up to kMostSteps; what is beyond is forgotten and computed once more in the walk.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "band.hpp"
#include "bounds.hpp"
#include "buffer.hpp"
#include "kernels.hpp"

namespace ibpo {

class Alignment {
public:
    // Marks the rows and columns that are matched, all others are left as they are. False: the distance is above
    // `limit`, and nothing is marked.
    bool trace(const Kernels& kernels, const Grid& grid, const Seeds* seeds, Position limit, bool rows_are_a,
               std::uint8_t* matched_rows, std::uint8_t* matched_columns) {
        kernels_ = &kernels;
        grid_ = grid;
        rank_[kDiagonal] = 0;
        rank_[kRow] = rows_are_a ? 1 : 2;
        rank_[kColumn] = rows_are_a ? 2 : 1;
        if (!forward(seeds, limit)) return false;
        num_steps_ = 0;
        frontier_.assign(1, Vertex{static_cast<std::uint32_t>(grid.num_columns), 0, kDiagonal});
        for (std::size_t s = stripes_.size(); s-- > 0;) {
            stripes_[s].below = frontier_;
            sweep(stripes_[s]);
            num_steps_ += stripes_[s].steps.size();
            if (num_steps_ > kMostSteps) forget(stripes_[s]);
        }
        walk(matched_rows, matched_columns);
        return true;
    }

    Position distance() const { return distance_; }

private:
    static constexpr Position kTile = 512;                         // columns
    static constexpr std::size_t kMostSteps = std::size_t{1} << 23;  // kept at once, four bytes each

    enum Step : std::uint8_t { kDiagonal, kRow, kColumn };  // on from a vertex, towards the end

    // A corner of cells: `column` columns, and as many rows as the list it is in says, lie before it.
    struct Vertex {
        std::uint32_t column;
        std::uint32_t matches;  // that can follow at most, on an optimal path
        Step step;              // by which
    };

    struct TracedStripe {
        StripeRange range;
        const StripeKernel* kernel;
        std::vector<std::uint64_t> above;    // bits of the row above: rises, then falls
        std::vector<std::uint64_t> corners;  // vertical state left of each tile: rises, then falls
        std::vector<Vertex> below;           // vertices of the row below that paths come through
        std::vector<std::uint32_t> steps;    // row by row from below, from the right: column · 4 + step
        std::vector<std::size_t> row_ends;   // in `steps`, from the last row to the first
    };

    // ---- forward: the band, keeping the corners of tiles ----

    bool forward(const Seeds* seeds, Position limit) {
        stripes_.clear();
        band_.start(*kernels_, grid_, seeds, limit);
        while (band_.prepare()) {
            stripes_.emplace_back();
            TracedStripe& stripe = stripes_.back();
            stripe.range = band_.range();
            stripe.kernel = &band_.kernel();
            keep_above(stripe);
            advance_by_tiles(stripe);
            band_.complete();
        }
        distance_ = band_.distance();
        return distance_ <= limit;
    }

    void keep_above(TracedStripe& stripe) {
        const Position count = stripe.range.last_column - stripe.range.first_column;
        const auto words = static_cast<std::size_t>((count + 63) / 64);
        stripe.above.assign(2 * words, 0);
        const std::uint64_t *rises = band_.args().rises, *falls = band_.args().falls;
        for (Position j = 0; j < count; ++j) {
            stripe.above[static_cast<std::size_t>(j / 64)] |= (rises[j] >> 63) << j % 64;
            stripe.above[words + static_cast<std::size_t>(j / 64)] |= (falls[j] >> 63) << j % 64;
        }
    }

    void advance_by_tiles(TracedStripe& stripe) {
        const int words = stripe.kernel->words;
        StripeArgs args = band_.args();
        const Position count = args.num_columns;
        for (Position from = 0; from < count; from += kTile) {
            stripe.corners.insert(stripe.corners.end(), args.vertical_rises, args.vertical_rises + words);
            stripe.corners.insert(stripe.corners.end(), args.vertical_falls, args.vertical_falls + words);
            args.num_columns = std::min(kTile, count - from);
            stripe.kernel->advance(args);
            args.columns += args.num_columns;
            args.rises += args.num_columns;
            args.falls += args.num_columns;
        }
    }

    // ---- backward: tiles once more, with all their bits ----

    // Which optimal steps lead into the cell of a row: one look-up a column.
    class Tiles {
    public:
        void start(const Kernels& kernels, const Grid& grid, const TracedStripe& stripe, StripeTable& table) {
            kernels_ = &kernels;
            stripe_ = &stripe;
            const StripeRange& range = stripe.range;
            table.build(kernels, stripe.kernel->words, grid, range.first_row, range.last_row);
            columns_ = table.columns(grid, range.first_column, range.last_column);
            matches_ = table.matches();
            const Position count = range.last_column - range.first_column;
            planes_of_.assign(static_cast<std::size_t>((count + kTile - 1) / kTile), nullptr);
            num_used_ = 0;
        }
        void set_row(Position row) {
            const int word = static_cast<int>((row - stripe_->range.first_row) / 64);
            const auto words = static_cast<std::size_t>(stripe_->kernel->words);
            bit_ = static_cast<int>((row - stripe_->range.first_row) % 64);
            offset_ = static_cast<std::size_t>(word) * kPlanes * words + static_cast<std::size_t>(kernels_->position(word));
        }
        // The words of the planes, one after another at a distance of plane_stride(), for the row set and this column.
        const std::uint64_t* at(Position column) {
            const Position from_first = column - stripe_->range.first_column;
            const auto tile = static_cast<std::size_t>(from_first / kTile);
            if (planes_of_[tile] == nullptr) run(tile);
            return planes_of_[tile] + static_cast<std::size_t>(from_first % kTile) * kPlanes * plane_stride() + offset_;
        }
        std::size_t plane_stride() const { return static_cast<std::size_t>(stripe_->kernel->words); }
        int bit() const { return bit_; }

    private:
        void run(std::size_t tile) {
            const auto words = static_cast<std::size_t>(stripe_->kernel->words);
            const Position from = static_cast<Position>(tile) * kTile;
            const Position count =
                std::min(kTile, stripe_->range.last_column - stripe_->range.first_column - from);
            if (num_used_ == planes_.size()) planes_.push_back(std::make_unique<Buffer<std::uint64_t>>());
            std::uint64_t* planes = planes_[num_used_++]->reserve(static_cast<std::size_t>(kTile + kMaxWords + 2) * kPlanes * words);
            std::uint64_t* rises = rises_.reserve(static_cast<std::size_t>(kTile + kColumnPad));
            std::uint64_t* falls = falls_.reserve(static_cast<std::size_t>(kTile + kColumnPad));
            const std::size_t above_words = stripe_->above.size() / 2;
            for (Position j = 0; j < count; ++j) {
                const auto at = static_cast<std::size_t>((from + j) / 64);
                rises[j] = stripe_->above[at] >> (from + j) % 64 << 63;
                falls[j] = stripe_->above[above_words + at] >> (from + j) % 64 << 63;
            }
            std::fill(rises + count, rises + count + kColumnPad, 0);
            std::fill(falls + count, falls + count + kColumnPad, 0);
            const std::uint64_t* corner = stripe_->corners.data() + tile * 2 * words;
            std::copy(corner, corner + words, state_.rises);
            std::copy(corner + words, corner + 2 * words, state_.falls);
            stripe_->kernel->record({columns_ + from, count, matches_, rises, falls, state_.rises, state_.falls, planes});
            planes_of_[tile] = planes;
        }

        const Kernels* kernels_ = nullptr;
        const TracedStripe* stripe_ = nullptr;
        const std::uint16_t* columns_ = nullptr;
        const std::uint64_t* matches_ = nullptr;
        std::vector<const std::uint64_t*> planes_of_;  // by tile; null: not run yet
        std::vector<std::unique_ptr<Buffer<std::uint64_t>>> planes_;
        std::size_t num_used_ = 0, offset_ = 0;
        int bit_ = 0;
        Buffer<std::uint64_t> rises_, falls_;
        VerticalState state_;
    };

    // From stripe.below to frontier_, the vertices of the row above the stripe; keeps the steps on the way.
    void sweep(TracedStripe& stripe) {
        tiles_.start(*kernels_, grid_, stripe, table_);
        frontier_ = stripe.below;
        stripe.steps.clear();
        stripe.row_ends.clear();
        for (Position row = stripe.range.last_row; row-- > stripe.range.first_row;) {
            tiles_.set_row(row);
            sweep_row(stripe, row);
            stripe.row_ends.push_back(stripe.steps.size());
        }
        table_.clear(grid_, stripe.range.first_row, stripe.range.last_row);
    }

    // frontier_ holds vertices below `row`, from the right; puts those above it in their place.
    void sweep_row(TracedStripe& stripe, Position row) {
        above_.clear();
        const std::uint32_t token = grid_.rows[row];
        const std::size_t stride = tiles_.plane_stride();
        Vertex left{};  // offered by the vertex to the right
        bool has_left = false;
        for (std::size_t next = 0; next < frontier_.size() || has_left;) {
            Vertex vertex;
            if (next < frontier_.size() && (!has_left || frontier_[next].column >= left.column)) {
                vertex = frontier_[next++];
                if (has_left && left.column == vertex.column) improve(vertex, left);
            } else {
                vertex = left;
            }
            has_left = false;
            stripe.steps.push_back(vertex.column << 2 | vertex.step);
            const Position column = static_cast<Position>(vertex.column) - 1;
            if (column < stripe.range.first_column) {  // the band's edge: no way but up
                offer_above({vertex.column, vertex.matches, kRow});
            } else if (grid_.columns[column] == token) {
                offer_above({vertex.column - 1, vertex.matches + 1, kDiagonal});
            } else {
                const std::uint64_t* planes = tiles_.at(column);
                const int bit = tiles_.bit();
                if (planes[kUp * stride] >> bit & 1) offer_above({vertex.column, vertex.matches, kRow});
                if (!(planes[kZeroDiagonal * stride] >> bit & 1))
                    offer_above({vertex.column - 1, vertex.matches, kDiagonal});
                if (planes[kLeft * stride] >> bit & 1) {
                    left = {vertex.column - 1, vertex.matches, kColumn};
                    has_left = true;
                }
            }
        }
        frontier_.swap(above_);
    }

    void offer_above(const Vertex& offered) {
        if (!above_.empty() && above_.back().column == offered.column)
            improve(above_.back(), offered);
        else
            above_.push_back(offered);
    }
    void improve(Vertex& vertex, const Vertex& offered) const {
        if (offered.matches > vertex.matches ||
            (offered.matches == vertex.matches && rank_[offered.step] < rank_[vertex.step]))
            vertex = offered;
    }

    static void forget(TracedStripe& stripe) {
        std::vector<std::uint32_t>().swap(stripe.steps);
        std::vector<std::size_t>().swap(stripe.row_ends);
    }

    // ---- the walk, from the start ----

    void walk(std::uint8_t* matched_rows, std::uint8_t* matched_columns) {
        const Vertex& start = leave_first_row();
        Position row = 0, column = start.column;
        Step step = start.step;
        for (TracedStripe& stripe : stripes_) {
            const bool forgotten = stripe.row_ends.empty();
            if (forgotten) sweep(stripe);
            while (row < stripe.range.last_row || step == kColumn) {
                if (step == kDiagonal && grid_.rows[row] == grid_.columns[column])
                    matched_rows[row] = matched_columns[column] = 1;
                row += step != kColumn;
                column += step != kRow;
                if (row == grid_.num_rows && column == grid_.num_columns) return;
                step = step_at(stripe, row, column);
            }
            if (forgotten) forget(stripe);
        }
    }

    // Where the path goes down: along the first row, columns are left out one by one while that is preferred.
    const Vertex& leave_first_row() const {
        const Vertex* best = &frontier_.front();  // of those to the right
        for (const Vertex& vertex : frontier_)
            if (vertex.matches > best->matches || (vertex.matches == best->matches && rank_[vertex.step] < rank_[kColumn]))
                best = &vertex;
        return *best;
    }

    static Step step_at(const TracedStripe& stripe, Position row, Position column) {
        const auto from_below = static_cast<std::size_t>(stripe.range.last_row - row);
        const std::size_t first = from_below == 0 ? 0 : stripe.row_ends[from_below - 1];
        const std::uint32_t *begin = stripe.steps.data() + first, *end = stripe.steps.data() + stripe.row_ends[from_below];
        const std::uint32_t* found = std::lower_bound(begin, end, static_cast<std::uint32_t>(column), [](std::uint32_t step, std::uint32_t value) {
            return step >> 2 > value;
        });
        return static_cast<Step>(*found & 3);
    }

    const Kernels* kernels_ = nullptr;
    Grid grid_{};
    int rank_[3] = {};
    Position distance_ = 0;
    std::size_t num_steps_ = 0;
    Band band_;
    StripeTable table_;
    Tiles tiles_;
    std::vector<TracedStripe> stripes_;
    std::vector<Vertex> frontier_, above_;
};

}  // namespace ibpo
