// An upper bound of the distance from the tokens that both sequences have exactly once.
//
// Where the order of most of them agrees, as after edits, an alignment through the longest increasing run of them
// (patience) costs little more than the best one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "bounds.hpp"
#include "buffer.hpp"

namespace ibpo {

class Anchors {
public:
    Position upper_bound(const Grid& grid) {
        const std::size_t count = collect(grid);
        const std::size_t length = longest_increasing(count);
        Position cost = 0, row = grid.num_rows, column = grid.num_columns;
        std::uint32_t at = length > 0 ? tails_[length - 1] : 0;
        for (std::size_t i = 0; i < length; ++i, at = before_[at]) {  // from the last anchor to the first
            cost += gap(grid, anchors_[at].row + Position{1}, row, anchors_[at].column + Position{1}, column);
            row = anchors_[at].row;
            column = anchors_[at].column;
        }
        return cost + gap(grid, 0, row, 0, column);
    }

private:
    struct Token {
        std::uint32_t in_rows, in_columns, row, column;  // counts, and where it was seen last
    };
    struct Anchor {
        std::uint32_t row, column;
    };
    static constexpr Position kExactCells = 1024;  // a gap of at most this many cells is aligned exactly

    // In the order of rows: numbers are given in the order of first appearance there.
    std::size_t collect(const Grid& grid) {
        Token* tokens = tokens_.zeros(grid.num_ids);
        for (Position i = 0; i < grid.num_rows; ++i) {
            Token& token = tokens[grid.rows[i]];
            ++token.in_rows;
            token.row = static_cast<std::uint32_t>(i);
        }
        for (Position j = 0; j < grid.num_columns; ++j) {
            Token& token = tokens[grid.columns[j]];
            ++token.in_columns;
            token.column = static_cast<std::uint32_t>(j);
        }
        anchors_.reserve(grid.num_ids);
        std::size_t count = 0;
        for (std::size_t local = 1; local < grid.num_ids; ++local) {
            anchors_[count] = {tokens[local].row, tokens[local].column};
            count += tokens[local].in_rows == 1 && tokens[local].in_columns == 1;
        }
        return count;
    }

    // Its length; tails_ and before_ chain it from its end.
    std::size_t longest_increasing(std::size_t count) {
        tails_.reserve(count);
        before_.reserve(count);
        std::size_t length = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint32_t column = anchors_[i].column;
            std::size_t at = length;
            if (length > 0 && column < anchors_[tails_[length - 1]].column)
                at = static_cast<std::size_t>(
                    std::lower_bound(tails_.data(), tails_.data() + length, column,
                                     [&](std::uint32_t tail, std::uint32_t value) { return anchors_[tail].column < value; }) -
                    tails_.data());
            tails_[at] = i;
            before_[i] = at > 0 ? tails_[at - 1] : 0;
            length = std::max(length, at + 1);
        }
        return length;
    }

    Position gap(const Grid& grid, Position first_row, Position last_row, Position first_column, Position last_column) {
        const std::uint32_t *rows = grid.rows, *columns = grid.columns;
        while (first_row < last_row && first_column < last_column && rows[first_row] == columns[first_column])
            ++first_row, ++first_column;
        while (first_row < last_row && first_column < last_column && rows[last_row - 1] == columns[last_column - 1])
            --last_row, --last_column;
        const Position height = last_row - first_row, width = last_column - first_column;
        if (height == 0 || width == 0) return height + width;
        if (height * width <= kExactCells) return exact(rows + first_row, height, columns + first_column, width);
        if (height != width) return std::max(height, width);
        Position different = 0;
        for (Position i = 0; i < height; ++i) different += rows[first_row + i] != columns[first_column + i];
        return different;
    }

    static Position exact(const std::uint32_t* rows, Position height, const std::uint32_t* columns, Position width) {
        Position above[kExactCells + 1];
        for (Position j = 0; j <= width; ++j) above[j] = j;
        for (Position i = 0; i < height; ++i) {
            Position diagonal = above[0], left = above[0] = i + 1;
            for (Position j = 0; j < width; ++j) {
                const Position up = above[j + 1];
                left = std::min(std::min(up, left) + 1, diagonal + (rows[i] != columns[j]));
                above[j + 1] = left;
                diagonal = up;
            }
        }
        return above[width];
    }

    Buffer<Token> tokens_;
    Buffer<Anchor> anchors_;
    Buffer<std::uint32_t> tails_, before_;
};

}  // namespace ibpo
