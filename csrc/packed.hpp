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

// Where an id of a few stands first: a hash table that stays in the nearest cache.
class FirstPlaces {
public:
    void reset(std::size_t most_ids) {
        int bits = 6;
        while ((std::size_t{1} << bits) < kSlotsPerId * most_ids) ++bits;
        shift_ = 32 - bits;
        mask_ = (std::size_t{1} << bits) - 1;
        slots_.reserve(mask_ + 1);
    }
    void start() { std::memset(slots_.data(), 0, (mask_ + 1) * sizeof(std::uint16_t)); }
    // 1 + the first place of ids[at], which becomes known by this.
    std::uint32_t add(const std::uint32_t* ids, std::size_t at) {
        std::uint16_t& slot = find(ids, ids[at]);
        const std::uint32_t place = slot != 0 ? slot : static_cast<std::uint32_t>(at + 1);
        slot = static_cast<std::uint16_t>(place);
        return place;
    }
    // 0: it is none of those added.
    std::uint32_t look_up(const std::uint32_t* ids, std::uint32_t id) { return find(ids, id); }

private:
    static constexpr std::size_t kSlotsPerId = 16;  // so that few collide: a collision is a branch mispredicted

    std::uint16_t& find(const std::uint32_t* ids, std::uint32_t id) {
        std::size_t at = (id * 0x9E3779B1u) >> shift_;
        while (true) {
            const std::uint32_t place = slots_[at], is_used = place != 0;
            // one branch, hardly ever taken; whether an id is known or not may be a toss-up, and takes none
            if (((ids[place - is_used] ^ id) & (0u - is_used)) == 0) return slots_[at];
            at = (at + 1) & mask_;
        }
    }

    Buffer<std::uint16_t> slots_;
    int shift_ = 0;
    std::size_t mask_ = 0;
};

class PackedPairs {
public:
    static constexpr Position kMaxRows = 64 * kMaxPackedWords;

    void start(const Kernels& kernels, Position most_rows, Position most_columns) {
        kernels_ = &kernels;
        words_ = static_cast<int>((most_rows + 63) / 64);
        count_ = 0;
        num_columns_ = most_columns;
        const auto lanes = static_cast<std::size_t>(kernels.lanes), words = static_cast<std::size_t>(words_);
        equal_.zeros(static_cast<std::size_t>(most_columns) * words * lanes);
        places_.reset(static_cast<std::size_t>(most_rows));
        std::fill(first_rises_, first_rises_ + words * lanes, 0);
        std::fill(num_own_, num_own_ + lanes, 0);
        std::fill(distances_, distances_ + lanes, 0);
    }

    void add(const Grid& grid) {
        const auto lanes = static_cast<std::size_t>(kernels_->lanes), words = static_cast<std::size_t>(words_);
        const auto lane = static_cast<std::size_t>(count_++);
        const Position skipped = 64 * words_ - grid.num_rows;  // rows above the pair's own
        for (std::size_t word = 0; word < words; ++word) {
            const Position above = std::clamp<Position>(skipped - 64 * static_cast<Position>(word), 0, 64);
            first_rises_[word * lanes + lane] = above == 64 ? 0 : ~std::uint64_t{0} << above;
        }
        num_own_[lane] = static_cast<std::uint64_t>(grid.num_columns);
        distances_[lane] = grid.num_rows;
        if (kernels_->match[words_ - 1] != nullptr)
            compare(grid, skipped, equal_.data() + lane);
        else
            look_up(grid, skipped, equal_.data() + lane);
    }

    // Of the pairs in the order in which they were added.
    const std::int64_t* distances() {
        kernels_->packed[words_ - 1]({equal_.data(), num_columns_, num_own_, first_rises_, distances_});
        return distances_;
    }

private:
    void compare(const Grid& grid, Position skipped, std::uint64_t* equal) {
        std::fill(rows_, rows_ + skipped, kNoId);
        std::copy(grid.rows, grid.rows + grid.num_rows, rows_ + skipped);
        kernels_->match[words_ - 1](rows_, grid.columns, grid.num_columns, equal);
    }

    void look_up(const Grid& grid, Position skipped, std::uint64_t* equal) {
        const auto lanes = static_cast<std::size_t>(kernels_->lanes), words = static_cast<std::size_t>(words_);
        places_.start();
        std::uint64_t* matches = matches_.zeros((static_cast<std::size_t>(grid.num_rows) + 1) * words);
        for (Position i = 0, at = skipped; i < grid.num_rows; ++i, ++at)
            matches[places_.add(grid.rows, static_cast<std::size_t>(i)) * words + static_cast<std::size_t>(at / 64)] |=
                std::uint64_t{1} << at % 64;
        for (Position j = 0; j < grid.num_columns; ++j, equal += words * lanes) {
            const std::uint64_t* found = matches + places_.look_up(grid.rows, grid.columns[j]) * words;
            for (std::size_t word = 0; word < words; ++word) equal[word * lanes] = found[word];
        }
    }

    static constexpr std::uint32_t kNoId = ~std::uint32_t{0};  // no column has it

    const Kernels* kernels_ = nullptr;
    int words_ = 0, count_ = 0;
    Position num_columns_ = 0;
    FirstPlaces places_;
    Buffer<std::uint64_t> equal_, matches_;
    alignas(64) std::uint32_t rows_[64 * kMaxPackedWords];
    alignas(64) std::uint64_t first_rises_[kMaxPackedWords * kMaxLanes];
    alignas(64) std::uint64_t num_own_[kMaxLanes];
    alignas(64) std::int64_t distances_[kMaxLanes];
};

}  // namespace ibpo
