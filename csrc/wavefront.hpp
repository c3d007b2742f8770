// The distance of near-equal sequences: for s = 0, 1, … the farthest place on each diagonal that s edits can reach.
//
// E. Ukkonen 1985, E. Myers 1986. O(n + d²) steps, which is little while d is. Whether it will be is read off the
// first edits: the pace at which they cover the sequences tells about how many the rest will take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "affix.hpp"
#include "bounds.hpp"
#include "buffer.hpp"

namespace ibpo {

class Wavefront {
public:
    static constexpr Position kGaveUp = -1;

    // The distance if it is at most `limit`, else limit + 1; kGaveUp once it looks like more than `worthwhile` edits.
    // Rows are not the longer sequence, neither is empty, and their first and last tokens differ.
    template <typename Id>
    Position distance(const Id* rows, Position num_rows, const Id* columns, Position num_columns, Position limit,
                      Position worthwhile) {
        const Position surplus = num_columns - num_rows;
        const Position most = std::min(std::min(limit, worthwhile), num_columns);
        edits_ = rows_ = 0;
        if (surplus > limit) return limit + 1;
        if (surplus > most) return kGaveUp;
        // reach[diagonal + most + 1] = row; a diagonal is column - row
        const auto width = static_cast<std::size_t>(2 * most + 3);
        std::int32_t* reach = before_.reserve(width) + most + 1;
        std::int32_t* next = after_.reserve(width) + most + 1;
        std::fill(reach - most - 1, reach + most + 2, kNowhere);
        std::fill(next - most - 1, next + most + 2, kNowhere);
        reach[0] = 0;
        for (Position edits = 1; edits <= most; ++edits) {
            // a diagonal that the rest of the edits cannot lead back from to the end's is left out
            const Position low = std::max(-std::min(edits, num_rows), surplus - (most - edits));
            const Position high = std::min(std::min(edits, num_columns), surplus + (most - edits));
            for (Position diagonal = low; diagonal <= high; ++diagonal)
                next[diagonal] = advance(rows, num_rows, columns, num_columns, diagonal, reach[diagonal - 1],
                                         reach[diagonal], reach[diagonal + 1]);
            next[low - 1] = next[high + 1] = kNowhere;
            std::swap(reach, next);
            if (surplus >= low && surplus <= high && reach[surplus] >= num_rows) return edits;
            if (edits % (kPaceInterval / 2) == 0 && edits < most) {
                edits_ = edits;
                rows_ = std::max<std::int32_t>(1, *std::max_element(reach + low, reach + high + 1));
                // the fewer the edits, the less their pace tells
                if (edits * num_rows > (worthwhile + worthwhile * kPaceInterval / edits) * rows_) return kGaveUp;
            }
        }
        return most == limit ? limit + 1 : kGaveUp;
    }
    // Of a pair that was given up: so many edits lead down to this row, and none farther.
    Position edits() const { return edits_; }
    Position rows() const { return rows_; }

private:
    static constexpr std::int32_t kNowhere = -(1 << 30);
    static constexpr Position kPaceInterval = 16;

    template <typename Id>
    static std::int32_t advance(const Id* rows, Position num_rows, const Id* columns, Position num_columns,
                                Position diagonal, std::int32_t from_left, std::int32_t from_diagonal,
                                std::int32_t from_above) {
        const std::int32_t row = std::max(from_left, std::max(from_diagonal, from_above) + 1);
        const Position room = std::min(num_rows - row, num_columns - diagonal - row);
        if (room <= 0) return static_cast<std::int32_t>(row + room);  // no farther than the edge
        if (row < 0 || row + diagonal < 0) return kNowhere;
        const Id *a = rows + row, *b = columns + row + diagonal;
        if (*a != *b) return row;
        return row + static_cast<std::int32_t>(common_prefix(a, b, static_cast<std::size_t>(room)));
    }

    Buffer<std::int32_t> before_, after_;
    Position edits_ = 0, rows_ = 0;
};

}  // namespace ibpo
