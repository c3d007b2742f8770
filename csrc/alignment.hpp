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
// that can follow it, and at last the path is walked from the start. Memory: the corners, the tiles of one stripe, what
// a few stripes read, and four bytes a visited cell up to kMostSteps; what is beyond is forgotten and computed once
// more in the walk. A pair of one stripe is run but once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "band.hpp"
#include "bounds.hpp"
#include "buffer.hpp"
#include "kernels.hpp"

namespace ibpo {

class Alignment {
public:
    // The next stripe of a band started with BandUse::traced, kept for the way back; of two bands, at once where that
    // pays.
    void advance(Band& band) {
        TracedStripe& stripe = add_stripe(band);
        StripeArgs args = band.args();
        if (stripe.is_recorded) {
            args.planes = tiles_.room(stripe, args.num_columns);
            stripe.kernel->record(args);
            return band.complete();
        }
        for (Position left = args.num_columns; left > 0; left -= std::min(left, stripe.tile)) {
            keep_corner(stripe, args);
            ibpo::advance(*stripe.kernel, args, std::min(left, stripe.tile));
        }
        complete(band, stripe);
    }
    static void advance(Alignment& alignment, Band& band, Alignment& other, Band& other_band) {
        if (!can_advance_together(band, other_band) || is_recorded(band) || is_recorded(other_band)) {
            alignment.advance(band);
            return other.advance(other_band);
        }
        TracedStripe &stripe = alignment.add_stripe(band), &other_stripe = other.add_stripe(other_band);
        StripeArgs args = band.args(), other_args = other_band.args();
        for (Position left = args.num_columns, other_left = other_args.num_columns; left > 0 || other_left > 0;) {
            if (left > 0) keep_corner(stripe, args);
            if (other_left > 0) keep_corner(other_stripe, other_args);
            const Position count = std::min(left, stripe.tile), other_count = std::min(other_left, stripe.tile);
            ibpo::advance(*stripe.kernel, args, count, other_args, other_count);
            left -= count;
            other_left -= other_count;
        }
        complete(band, stripe);
        complete(other_band, other_stripe);
    }

    // The way back, after the last stripe: sets a flag for every row and column, it is matched.
    void trace(const Grid& grid, bool rows_are_a, std::uint8_t* matched_rows,
               std::uint8_t* matched_columns) {
        grid_ = grid;
        row_step_ = rows_are_a ? 2 : 1;
        column_step_ = rows_are_a ? 1 : 2;
        num_steps_ = 0;
        frontier_.reserve(static_cast<std::size_t>(grid.num_columns) + 2);
        above_.reserve(static_cast<std::size_t>(grid.num_columns) + 2);
        frontier_[0] = vertex(static_cast<std::uint64_t>(grid.num_columns), 0, kDiagonal);
        num_frontier_ = 1;
        for (std::size_t s = num_stripes_; s-- > 0;) {
            stripes_[s].below.assign(frontier_.data(), frontier_.data() + num_frontier_);
            sweep(stripes_[s]);
            num_steps_ += stripes_[s].steps.size();
            if (num_steps_ > kMostSteps) forget(stripes_[s]);
        }
        walk(matched_rows, matched_columns);
    }

private:
    // Columns of a tile, in words of its stripe: the more, the less its slanted ends cost, but the more is run in vain.
    static constexpr Position kTileWords = 32, kMostTile = 512;
    static constexpr std::size_t kMostSteps = std::size_t{1} << 23;  // kept at once, four bytes each

    // A corner of cells: so many columns, and as many rows as the list it is in says, lie before it. In one word, so that
    // of two ways on from one corner the greater is the better: the column, the most matches that can follow on an
    // optimal path, and the step that leads to them.
    using Vertex = std::uint64_t;
    static constexpr std::uint64_t kDiagonal = 3;  // steps: leaving out a token of a is 2, one of b is 1
    static constexpr std::uint64_t kMatch = 0;     // among the steps kept: a diagonal that matches
    static constexpr int kMatchedShift = 2, kMatchesShift = 3, kColumnShift = 34;

    static Vertex vertex(std::uint64_t column, std::uint64_t matches, std::uint64_t step, std::uint64_t matched = 0) {
        return column << kColumnShift | matches << kMatchesShift | matched << kMatchedShift | step;
    }
    static std::uint64_t column_of(Vertex vertex) { return vertex >> kColumnShift; }
    static std::uint64_t matches_of(Vertex vertex) {
        return vertex << (64 - kColumnShift) >> (64 - kColumnShift + kMatchesShift);
    }
    static std::uint64_t step_of(Vertex vertex) { return vertex & 3; }
    // Of a vertex, what the walk needs.
    static std::uint32_t kept_step(Vertex vertex) {
        const std::uint64_t matched = vertex >> kMatchedShift & 1;
        return static_cast<std::uint32_t>(column_of(vertex) << 2 | (step_of(vertex) & (matched - 1)));
    }

    struct TracedStripe {
        StripeRange range;
        const StripeKernel* kernel;
        Position tile;                       // columns
        bool is_recorded;                    // the forward pass has kept all bits
        bool has_table;                      // and of these two, if not, what it read
        Buffer<std::uint64_t> matches;
        Buffer<std::uint16_t> columns;
        std::vector<std::uint64_t> above;    // bits of the row above: rises, then falls
        std::vector<std::uint64_t> corners;  // vertical state left of each tile: rises, then falls
        std::vector<Vertex> below;           // vertices of the row below that paths come through
        Growing<std::uint32_t> steps;        // row by row from below, from the right: column << 2 | step
        Growing<std::size_t> row_ends;       // in `steps`, from the last row to the first
    };

    // ---- forward: the band, keeping the corners of tiles ----

    TracedStripe& add_stripe(const Band& band) {
        const StripeRange range = band.range();
        if (range.first_row == 0) num_stripes_ = 0;  // the band has begun anew
        if (num_stripes_ == stripes_.size()) stripes_.emplace_back();
        TracedStripe& stripe = stripes_[num_stripes_++];
        stripe.corners.clear();
        stripe.range = range;
        stripe.kernel = &band.kernel();
        stripe.is_recorded = is_recorded(band);
        stripe.has_table = !stripe.is_recorded && num_stripes_ <= kTablesKept;
        if (stripe.is_recorded) return stripe;
        stripe.tile = std::min(kMostTile, kTileWords * stripe.kernel->words);
        // the last word takes in some of the frontier's padding, which no one reads
        const Position count = range.last_column - range.first_column;
        const auto words = static_cast<std::size_t>((count + 63) / 64);
        stripe.above.resize(2 * words);
        band.kernels().top_bits(band.args().rises, count, stripe.above.data());
        band.kernels().top_bits(band.args().falls, count, stripe.above.data() + words);
        return stripe;
    }

    // Whether a band is but one stripe, and not a long one: then its bits are kept at once, and no tile is run again.
    static bool is_recorded(const Band& band) {
        const StripeRange range = band.range();
        return range.first_row == 0 && range.last_row == band.grid().num_rows &&
               (range.last_column - range.first_column) * band.kernel().words <= kMostRecorded;
    }
    static constexpr Position kMostRecorded = 1 << 13;  // words of a plane
    static constexpr std::size_t kTablesKept = 8;       // so few that they stay in the caches

    static void complete(Band& band, TracedStripe& stripe) {
        if (stripe.has_table) band.hand_over(stripe.matches, stripe.columns);
        band.complete();
    }

    static void keep_corner(TracedStripe& stripe, const StripeArgs& args) {
        const int words = stripe.kernel->words;
        stripe.corners.insert(stripe.corners.end(), args.vertical_rises, args.vertical_rises + words);
        stripe.corners.insert(stripe.corners.end(), args.vertical_falls, args.vertical_falls + words);
    }

    // ---- backward: tiles once more, with all their bits ----

    // Which optimal steps lead into the cell of a row: one look-up a column.
    class Tiles {
    public:
        void start(const Grid& grid, const TracedStripe& stripe, StripeTable& table) {
            stripe_ = &stripe;
            const StripeRange& range = stripe.range;
            plane_stride_ = static_cast<std::size_t>(stripe.kernel->words);
            for (int word = 0; word < stripe.kernel->words; ++word)
                offsets_[word] = static_cast<std::size_t>(word) * kPlanes * plane_stride_ +
                                 static_cast<std::size_t>(stripe.kernel->position(word));
            if (stripe.is_recorded) return;
            if (stripe.has_table) {
                matches_ = stripe.matches.data();
                columns_ = stripe.columns.data() + kColumnPad;
            } else {
                table.build(*stripe.kernel, grid, range.first_row, range.last_row);
                matches_ = table.matches();
                columns_ = table.columns(grid, range.first_column, range.last_column, columns_made_);
                table.clear(grid, range.first_row, range.last_row);
            }
            const Position count = range.last_column - range.first_column;
            planes_of_.assign(static_cast<std::size_t>((count + stripe.tile - 1) / stripe.tile), nullptr);
            num_used_ = 0;
            tile_columns_ = static_cast<std::size_t>(stripe.tile);
            tile_column_ = range.last_column;  // none is at hand yet
        }
        // For the planes of a whole stripe, which the forward pass writes itself.
        std::uint64_t* room(const TracedStripe& stripe, Position num_columns) {
            num_used_ = 0;
            tile_columns_ = static_cast<std::size_t>(num_columns);
            tile_column_ = stripe.range.first_column;
            std::uint64_t* planes = next_planes(static_cast<std::size_t>(stripe.kernel->words));
            tile_planes_ = planes;
            return planes;
        }
        void set_row(Position row) {
            offset_ = offsets_[(row - stripe_->range.first_row) / 64];
            bit_ = static_cast<int>((row - stripe_->range.first_row) % 64);
        }
        // The words of the planes, one after another at a distance of plane_stride(), for the row set and this column.
        const std::uint64_t* at(Position column) {
            if (static_cast<std::size_t>(column - tile_column_) >= tile_columns_) fetch(column);
            return tile_planes_ + static_cast<std::size_t>(column - tile_column_) * kPlanes * plane_stride_ + offset_;
        }
        std::size_t plane_stride() const { return plane_stride_; }
        int bit() const { return bit_; }

    private:
        void fetch(Position column) {
            const auto tile = static_cast<std::size_t>(column - stripe_->range.first_column) / tile_columns_;
            if (planes_of_[tile] == nullptr) run(tile);
            tile_planes_ = planes_of_[tile];
            tile_column_ = first_column(tile);
        }

        void run(std::size_t tile) {
            const auto words = static_cast<std::size_t>(stripe_->kernel->words);
            const Position left = stripe_->range.last_column - first_column(tile), count = std::min(stripe_->tile, left);
            const std::size_t from = tile * tile_columns_, above_words = stripe_->above.size() / 2;
            std::uint64_t* rises = rises_.reserve(static_cast<std::size_t>(count + kColumnPad));
            std::uint64_t* falls = falls_.reserve(static_cast<std::size_t>(count + kColumnPad));
            for (Position j = 0; j < count; ++j) {
                const std::size_t column = from + static_cast<std::size_t>(j), at = column / 64;
                rises[j] = stripe_->above[at] << (63 - column % 64);
                falls[j] = stripe_->above[above_words + at] << (63 - column % 64);
            }
            std::fill(rises + count, rises + count + kColumnPad, 0);
            std::fill(falls + count, falls + count + kColumnPad, 0);
            const std::uint64_t* corner = stripe_->corners.data() + tile * 2 * words;
            std::copy(corner, corner + words, state_.rises);
            std::copy(corner + words, corner + 2 * words, state_.falls);
            std::uint64_t* planes = next_planes(words);
            stripe_->kernel->record(
                {columns_ + from, count, matches_, rises, falls, state_.rises, state_.falls, planes});
            planes_of_[tile] = planes;
        }

        std::uint64_t* next_planes(std::size_t words) {
            if (num_used_ == planes_.size()) planes_.push_back(std::make_unique<Buffer<std::uint64_t>>());
            return planes_[num_used_++]->reserve((tile_columns_ + kMaxWords + 2) * kPlanes * words);
        }

        Position first_column(std::size_t tile) const {
            return stripe_->range.first_column + static_cast<Position>(tile) * stripe_->tile;
        }
        const TracedStripe* stripe_ = nullptr;
        const std::uint64_t* matches_ = nullptr;
        const std::uint16_t* columns_ = nullptr;
        std::vector<const std::uint64_t*> planes_of_;  // by tile; null: not run yet
        std::vector<std::unique_ptr<Buffer<std::uint64_t>>> planes_;
        const std::uint64_t* tile_planes_ = nullptr;  // of the tile that begins at tile_column_
        Position tile_column_ = 0;
        std::size_t num_used_ = 0, tile_columns_ = 0, plane_stride_ = 0, offset_ = 0;
        std::size_t offsets_[kMaxWords];  // by word
        int bit_ = 0;
        Buffer<std::uint64_t> rises_, falls_;
        Buffer<std::uint16_t> columns_made_;
        VerticalState state_;
    };

    // From stripe.below to frontier_, the vertices of the row above the stripe; keeps the steps on the way.
    void sweep(TracedStripe& stripe) {
        tiles_.start(grid_, stripe, table_);
        num_frontier_ = stripe.below.size();
        std::copy(stripe.below.begin(), stripe.below.end(), frontier_.data());
        stripe.steps.clear();
        stripe.row_ends.clear();
        const auto height = static_cast<std::size_t>(stripe.range.last_row - stripe.range.first_row);
        std::size_t* row_end = stripe.row_ends.room(height);
        stripe.row_ends.took(height);
        for (Position row = stripe.range.last_row; row-- > stripe.range.first_row;) {
            if (!match_one(stripe, row)) sweep_row(stripe, row);
            *row_end++ = stripe.steps.size();
        }
        if (num_stripes_ > kTablesKept) stripe.steps.fit();
    }

    // What sweep_row() does, if all paths come through one vertex and its two tokens match: no tile is looked at.
    bool match_one(TracedStripe& stripe, Position row) {
        const Vertex only = frontier_[0];
        const std::uint64_t column = column_of(only);
        if (num_frontier_ != 1 || column == 0 || grid_.columns[column - 1] != grid_.rows[row]) return false;
        *stripe.steps.room(1) = kept_step(only);
        stripe.steps.took(1);
        frontier_[0] = vertex(column - 1, matches_of(only) + 1, kDiagonal, 1);
        return true;
    }

    // frontier_ holds vertices below `row`, from the right; puts those above it in their place. Whether a cell can be
    // entered by this step or that is hardly foreseeable, so what it offers is written in any case and counted or not.
    void sweep_row(TracedStripe& stripe, Position row) {
        tiles_.set_row(row);
        const std::uint32_t token = grid_.rows[row], *columns = grid_.columns;
        const int bit = tiles_.bit();
        const std::uint64_t window = column_of(frontier_[0]) - static_cast<std::uint64_t>(stripe.range.first_column);
        std::uint32_t* const first_step = stripe.steps.room(window + 1);
        std::uint32_t* steps = first_step;
        const std::size_t stride = tiles_.plane_stride(), num_below = num_frontier_;
        const auto first_column = static_cast<std::uint64_t>(stripe.range.first_column);
        const Vertex* below = frontier_.data();
        Vertex* above = above_.data();
        std::size_t num_above = 0;
        const std::uint64_t row_step = row_step_, column_step = column_step_;
        Vertex left = 0;  // offered by the vertex to the right; 0: nothing is
        for (std::size_t next = 0; next < num_below || left != 0;) {
            Vertex best = left;
            if (next < num_below && column_of(below[next]) >= column_of(left)) best = std::max(left, below[next++]);
            const std::uint64_t column = column_of(best), matches = matches_of(best);
            *steps++ = kept_step(best);
            if (column <= first_column) {  // the band's edge: no way but up
                offer(above, num_above, vertex(column, matches, row_step), true);
                left = 0;
                continue;
            }
            const std::uint64_t* planes = tiles_.at(static_cast<Position>(column - 1));
            const std::uint64_t equal = columns[column - 1] == token;
            const std::uint64_t up = planes[kFromAbove * stride] >> bit & 1;
            const std::uint64_t sideways = planes[kFromLeft * stride] >> bit & 1;
            const std::uint64_t diagonal = ~(planes[kNotDiagonal * stride] >> bit) & 1;
            offer(above, num_above, vertex(column, matches, row_step), up != 0);
            above[num_above] = vertex(column - 1, matches + equal, kDiagonal, equal);
            num_above += diagonal;
            left = vertex(column - 1, matches, column_step) & (0 - sideways);
        }
        stripe.steps.took(static_cast<std::size_t>(steps - first_step));
        num_frontier_ = num_above;
        frontier_.swap(above_);
    }

    // The last one offered may be at the same column: the better counts.
    static void offer(Vertex* above, std::size_t& count, Vertex offered, bool counts) {
        const bool same = count > 0 && column_of(above[count - (count > 0)]) == column_of(offered);
        const std::size_t at = count - same;
        const Vertex kept = same ? above[at] : 0;
        above[at] = counts ? std::max(kept, offered) : kept;
        count = counts ? at + 1 : count;
    }

    static void forget(TracedStripe& stripe) {
        stripe.steps.release();
        stripe.row_ends.release();
    }

    // ---- the walk, from the start ----

    void walk(std::uint8_t* matched_rows, std::uint8_t* matched_columns) {
        // one place more than there are tokens: every step writes to where it stands, whether it consumes that or not
        std::uint8_t* rows = kept_rows_.reserve(static_cast<std::size_t>(grid_.num_rows) + 1);
        std::uint8_t* columns = kept_columns_.zeros(static_cast<std::size_t>(grid_.num_columns) + 1);
        const Vertex start = leave_first_row();
        auto column = static_cast<Position>(column_of(start));
        Position row = 0;
        std::uint64_t step = kept_step(start) & 3;
        for (std::size_t s = 0; s < num_stripes_; ++s) {
            TracedStripe& stripe = stripes_[s];
            const bool forgotten = stripe.row_ends.size() == 0;
            if (forgotten) sweep(stripe);
            const bool is_last = stripe.range.last_row == grid_.num_rows;
            while (row < stripe.range.last_row || step == column_step_) {
                rows[row] = columns[column] = step == kMatch;
                row += step != column_step_;
                column += step != row_step_;
                if (is_last && row == grid_.num_rows && column == grid_.num_columns) break;
                step = step_at(stripe, row, column);
            }
            if (forgotten) forget(stripe);
        }
        std::copy(rows, rows + grid_.num_rows, matched_rows);
        std::copy(columns, columns + grid_.num_columns, matched_columns);
    }

    // Where the path goes down: along the first row, columns are left out one by one while that is preferred.
    Vertex leave_first_row() const {
        Vertex best = frontier_[0];  // of those to the right
        for (std::size_t i = 1; i < num_frontier_; ++i)
            if (vertex(0, matches_of(frontier_[i]), step_of(frontier_[i])) > vertex(0, matches_of(best), column_step_))
                best = frontier_[i];
        return best;
    }

    static std::uint64_t step_at(const TracedStripe& stripe, Position row, Position column) {
        const auto from_below = static_cast<std::size_t>(stripe.range.last_row - row);
        const std::size_t first = from_below == 0 ? 0 : stripe.row_ends[from_below - 1];
        const std::uint32_t* found = stripe.steps.data() + first;
        const auto wanted = static_cast<std::uint32_t>(column);
        const std::uint32_t* end = stripe.steps.data() + stripe.row_ends[from_below];
        if (end - found > kFewSteps)
            found = std::lower_bound(found, end, wanted,
                                     [](std::uint32_t step, std::uint32_t value) { return step >> 2 > value; });
        while (*found >> 2 != wanted) ++found;
        return *found & 3;
    }
    static constexpr std::ptrdiff_t kFewSteps = 16;

    Grid grid_{};
    std::uint64_t row_step_ = 0, column_step_ = 0;
    std::size_t num_steps_ = 0;
    StripeTable table_;
    Tiles tiles_;
    std::deque<TracedStripe> stripes_;  // with memory from other pairs
    std::size_t num_stripes_ = 0;
    Buffer<Vertex> frontier_, above_;  // of the row that sweep() is at, from the right
    std::size_t num_frontier_ = 0;
    Buffer<std::uint8_t> kept_rows_, kept_columns_;
};

}  // namespace ibpo
