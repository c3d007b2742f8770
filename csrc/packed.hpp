// Short pairs, as many at once as a vector has lanes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bounds.hpp"
#include "buffer.hpp"
#include "kernels.hpp"

namespace ibpo {

class PackedPairs {
public:
    static constexpr Position kMaxRows = 64 * kMaxPackedWords;

    void start(const Kernels& kernels, Position most_rows, Position most_columns) {
        kernels_ = &kernels;
        words_ = static_cast<int>((most_rows + 63) / 64);
        count_ = 0;
        num_columns_ = most_columns;
        const auto lanes = static_cast<std::size_t>(kernels.lanes), words = static_cast<std::size_t>(words_);
        matches_.zeros((static_cast<std::size_t>(most_rows) * lanes + 1) * words);
        columns_.zeros(static_cast<std::size_t>(most_columns) * lanes);
        last_used_ = 0;  // row 0 is for columns that match nothing
        std::fill(first_rises_, first_rises_ + words * lanes, 0);
        std::fill(num_own_, num_own_ + lanes, 0);
        std::fill(distances_, distances_ + lanes, 0);
    }

    void add(const Grid& grid) {
        if (num_ids_ < grid.num_ids) {
            by_id_.zeros(grid.num_ids);
            num_ids_ = grid.num_ids;
        }
        const auto lanes = static_cast<std::size_t>(kernels_->lanes), words = static_cast<std::size_t>(words_);
        const std::size_t lane = static_cast<std::size_t>(count_++);
        const Position skipped = 64 * words_ - grid.num_rows;  // rows above the pair's own
        for (std::size_t word = 0; word < words; ++word) {
            const Position above = std::clamp<Position>(skipped - 64 * static_cast<Position>(word), 0, 64);
            first_rises_[word * lanes + lane] = above == 64 ? 0 : ~std::uint64_t{0} << above;
        }
        num_own_[lane] = static_cast<std::uint64_t>(grid.num_columns);
        distances_[lane] = grid.num_rows;
        std::uint16_t* by_id = by_id_.data();
        std::uint64_t* matches = matches_.data();
        for (Position i = 0, at = skipped; i < grid.num_rows; ++i, ++at) {  // no branch: see StripeTable::build
            std::uint16_t& entry = by_id[grid.rows[i]];
            const std::uint32_t known = entry, is_new = known == 0;
            last_used_ += is_new;
            const std::uint32_t own = known | (last_used_ & (0 - is_new));
            entry = static_cast<std::uint16_t>(own);
            matches[own * words + static_cast<std::size_t>(at / 64)] |= std::uint64_t{1} << at % 64;
        }
        std::uint32_t* out = columns_.data() + lane;
        for (Position j = 0; j < grid.num_columns; ++j, out += lanes)
            *out = grid.columns[j] < grid.num_ids ? static_cast<std::uint32_t>(by_id[grid.columns[j]] * words) : 0;
        for (Position i = 0; i < grid.num_rows; ++i) by_id[grid.rows[i]] = 0;
    }

    // Of the pairs in the order in which they were added.
    const std::int64_t* distances() {
        kernels_->packed[words_ - 1]({matches_.data(), columns_.data(), num_columns_, num_own_, first_rises_, distances_});
        return distances_;
    }

private:
    const Kernels* kernels_ = nullptr;
    int words_ = 0, count_ = 0;
    std::uint32_t last_used_ = 0;  // row of `matches`
    std::size_t num_ids_ = 0;
    Position num_columns_ = 0;
    Buffer<std::uint64_t> matches_;
    Buffer<std::uint32_t> columns_;
    Buffer<std::uint16_t> by_id_;
    alignas(64) std::uint64_t first_rises_[kMaxPackedWords * kMaxLanes];
    alignas(64) std::uint64_t num_own_[kMaxLanes];
    alignas(64) std::int64_t distances_[kMaxLanes];
};

}  // namespace ibpo
