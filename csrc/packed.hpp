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

// Where an id of a few stands first. A hash table that stays in the nearest cache; ids may be any.
class FirstPlaces {
public:
    void reset(std::size_t most_ids) {
        int bits = 6;
        while ((std::size_t{1} << bits) < kSlotsPerId * most_ids) ++bits;
        shift_ = 64 - bits;
        mask_ = (std::size_t{1} << bits) - 1;
        slots_.reserve(mask_ + 1);
    }
    void start() {
        std::memset(slots_.data(), 0, (mask_ + 1) * sizeof(std::uint16_t));
    }
    // 1 + the first place of ids[at], which becomes known by this.
    template <typename Id>
    std::uint32_t add(const Id* ids, std::size_t at) {
        std::uint16_t& slot = find(ids, ids[at]);
        const std::uint32_t place = slot != 0 ? slot : static_cast<std::uint32_t>(at + 1);
        slot = static_cast<std::uint16_t>(place);
        return place;
    }
    // 0: it is none of those added.
    template <typename Id>
    std::uint32_t look_up(const Id* ids, Id id) {
        return find(ids, id);
    }

private:
    static constexpr std::size_t kSlotsPerId = 16;  // so that few collide: a collision is a branch mispredicted

    template <typename Id>
    std::uint16_t& find(const Id* ids, Id id) {
        std::size_t at = (static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> shift_;
        while (true) {
            const std::uint32_t place = slots_[at], is_used = place != 0;
            const auto different = static_cast<std::uint64_t>(ids[place - is_used]) ^ static_cast<std::uint64_t>(id);
            // one branch, hardly ever taken; whether an id is known or not may be a toss-up, and takes none
            if ((different & (std::uint64_t{0} - is_used)) == 0) return slots_[at];
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
        matches_.zeros((static_cast<std::size_t>(most_rows) * lanes + 1) * words);
        columns_.zeros(static_cast<std::size_t>(most_columns) * lanes);
        num_used_ = 0;
        places_.reset(static_cast<std::size_t>(most_rows));
        std::fill(first_rises_, first_rises_ + words * lanes, 0);
        std::fill(num_own_, num_own_ + lanes, 0);
        std::fill(distances_, distances_ + lanes, 0);
    }

    // Neither sequence is empty, the rows not the longer one.
    template <typename Id>
    void add(const Id* rows, Position num_rows, const Id* columns, Position num_columns) {
        const auto lanes = static_cast<std::size_t>(kernels_->lanes), words = static_cast<std::size_t>(words_);
        const auto lane = static_cast<std::size_t>(count_++);
        const Position skipped = 64 * words_ - num_rows;  // rows above the pair's own
        for (std::size_t word = 0; word < words; ++word) {
            const Position above = std::clamp<Position>(skipped - 64 * static_cast<Position>(word), 0, 64);
            first_rises_[word * lanes + lane] = above == 64 ? 0 : ~std::uint64_t{0} << above;
        }
        num_own_[lane] = static_cast<std::uint64_t>(num_columns);
        distances_[lane] = num_rows;
        places_.start();
        // row 0 of `matches` is for columns that match nothing, each pair's own follow those of the one before
        std::uint64_t* matches = matches_.data() + num_used_ * words;
        for (Position i = 0, at = skipped; i < num_rows; ++i, ++at)
            matches[places_.add(rows, static_cast<std::size_t>(i)) * words + static_cast<std::size_t>(at / 64)] |=
                std::uint64_t{1} << at % 64;
        std::uint32_t* out = columns_.data() + lane;
        for (Position j = 0; j < num_columns; ++j, out += lanes) {
            const std::uint32_t place = places_.look_up(rows, columns[j]);
            *out = static_cast<std::uint32_t>((place + (place != 0 ? num_used_ : 0)) * words);
        }
        num_used_ += static_cast<std::size_t>(num_rows);
    }

    // Of the pairs in the order in which they were added.
    const std::int64_t* distances() {
        kernels_->packed[words_ - 1]({matches_.data(), columns_.data(), num_columns_, num_own_, first_rises_, distances_});
        return distances_;
    }

private:
    const Kernels* kernels_ = nullptr;
    int words_ = 0, count_ = 0;
    std::size_t num_used_ = 0;  // rows of `matches` after the first
    Position num_columns_ = 0;
    FirstPlaces places_;
    Buffer<std::uint64_t> matches_;
    Buffer<std::uint32_t> columns_;
    alignas(64) std::uint64_t first_rises_[kMaxPackedWords * kMaxLanes];
    alignas(64) std::uint64_t num_own_[kMaxLanes];
    alignas(64) std::int64_t distances_[kMaxLanes];
};

}  // namespace ibpo
