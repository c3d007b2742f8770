// The pair that is left to align, and lower bounds of what it costs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "buffer.hpp"

namespace ibpo {

using Position = std::int64_t;

// Two sequences without common prefix and suffix; the rows are not the longer one. The id of every row is less than
// num_ids; a column with another id matches no row.
struct Grid {
    const std::uint32_t* rows;
    Position num_rows;
    const std::uint32_t* columns;
    Position num_columns;
    std::size_t num_ids;

    Position surplus() const { return num_columns - num_rows; }
};

// Rows in threes, (0, 1, 2), (3, 4, 5), …: a three that stands nowhere in the columns costs at least one edit, and no
// edit serves two threes. They are looked up by a hash without its value: a collision hides a three and makes the bound
// weaker, never wrong. (Of texts, twos bound worse, since many recur; of random ids, as well.)
class Seeds {
public:
    void count(const Grid& grid) {
        int bits = 12;
        while ((Position{1} << bits) < kBitsPerColumn * grid.num_columns) ++bits;
        shift_ = 64 - bits;
        std::uint64_t* present = present_.zeros((std::size_t{1} << bits) / 64);
        recurring_ = 0;
        for (Position j = 0; j + kLength <= grid.num_columns; ++j) {
            const std::uint64_t at = hash(grid.columns + j), bit = std::uint64_t{1} << at % 64;
            recurring_ += (present[at / 64] & bit) != 0;
            present[at / 64] |= bit;
        }
        num_columns_ = grid.num_columns;
        const Position strides = grid.num_rows / kStride + 1;
        absent_.reserve(static_cast<std::size_t>(strides + 1));
        std::uint32_t absent = 0;
        Position i = grid.num_rows / kLength * kLength;
        for (Position stride = strides; stride-- > 0;) {
            for (; i - kLength >= stride * kStride; i -= kLength) {
                const std::uint64_t at = hash(grid.rows + i - kLength);
                absent += !(present[at / 64] >> at % 64 & 1);
            }
            absent_[static_cast<std::size_t>(stride)] = absent;
        }
        absent_[static_cast<std::size_t>(strides)] = 0;
    }

    // Edits in rows from `row` on, at least.
    Position from(Position row) const { return absent_[static_cast<std::size_t>((row + kStride - 1) / kStride)]; }

    // The share of the columns' threes that were there before: much in texts, nothing in random ids.
    double recurrence() const {
        return std::max(0.0, double(recurring_) / double(num_columns_) - 1.0 / double(kBitsPerColumn));
    }

private:
    static constexpr Position kBitsPerColumn = 32, kStride = 64, kLength = 3;

    std::uint64_t hash(const std::uint32_t* ids) const {
        return (ids[0] * 0x9E3779B97F4A7C15ull + ids[1] * 0xC2B2AE3D27D4EB4Full + ids[2]) * 0xD6E8FEB86659FD93ull >> shift_;
    }

    Buffer<std::uint64_t> present_;
    Buffer<std::uint32_t> absent_;
    int shift_ = 0;
    Position recurring_ = 0, num_columns_ = 1;
};

// Every column whose token no row has left to match it with costs an edit, in whatever order they stand.
class Bag {
public:
    Position least(const Grid& grid) {
        if (num_ids_ < grid.num_ids) {
            left_.zeros(grid.num_ids);
            num_ids_ = grid.num_ids;
        }
        std::uint32_t* left = left_.data();
        for (Position i = 0; i < grid.num_rows; ++i) ++left[grid.rows[i]];
        Position unmatched = 0;
        for (Position j = 0; j < grid.num_columns; ++j) {
            const std::uint32_t id = grid.columns[j];
            const std::uint32_t has_one = id < grid.num_ids && left[id] > 0;
            if (id < grid.num_ids) left[id] -= has_one;
            unmatched += 1 - has_one;
        }
        for (Position i = 0; i < grid.num_rows; ++i) left[grid.rows[i]] = 0;
        return unmatched;
    }

private:
    Buffer<std::uint32_t> left_;  // by id: rows that no column was matched with
    std::size_t num_ids_ = 0;
};

}  // namespace ibpo
