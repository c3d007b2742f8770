// The innermost loops, compiled once for each instruction set and chosen at run time.
//
// A stripe is a band of 64·words rows that is carried over a range of columns, bit-parallel: G. Myers 1999 in the form
// of H. Hyyrö 2003. Of every cell (i, j) a bit says whether D rises (+1) or falls (-1) from the cell above (vertical)
// or from the cell to the left (horizontal). Word w of a stripe handles column j at step j + w, so what leaves the
// bottom of one word enters the top of the next a step later and no carry crosses the lanes of a vector within a step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ibpo {

// Readable entries that `columns` must have before its first and after its last, and `rises`, `falls` after their last.
constexpr std::ptrdiff_t kColumnPad = 64;
constexpr int kMaxWords = 32;
constexpr int kMaxLanes = 8;
constexpr int kHeights = 3;
constexpr int kMaxPackedWords = 4;
// What a recording kernel keeps of every word and step, in this order: whether an optimal path may come from the cell
// above, from that to the left, and not along the diagonal. Where the tokens are equal it comes along the diagonal.
enum Plane { kFromAbove, kFromLeft, kNotDiagonal, kPlanes };

struct StripeArgs {
    const std::uint16_t* columns;  // by column: the row of `matches` with its rows of the stripe; 0: none
    std::ptrdiff_t num_columns;
    const std::uint64_t* matches;  // [.][words] in lane order, 64-byte aligned; row 0 is zero
    std::uint64_t* rises;          // by column, bit 63: D rises along the row above the stripe; then below it
    std::uint64_t* falls;
    std::uint64_t* vertical_rises;  // [words] in lane order: the state left of the first column; then of the last
    std::uint64_t* vertical_falls;
    std::uint64_t* planes;  // recording kernels: [num_columns + words + 2 steps][kPlanes][words], 64-byte aligned
};

// Short pairs, one in each lane of a vector. Rows are aligned to the end of the last word, columns to the start.
struct PackedArgs {
    const std::uint64_t* equal;        // [num_columns][words][lanes] a bit for each row that has the column's token
    std::ptrdiff_t num_columns;        // of the longest
    const std::uint64_t* num_own;      // [lanes] columns of each pair
    const std::uint64_t* first_rises;  // [words][lanes] a bit for each row that is in use
    std::int64_t* distances;           // [lanes] in: rows of each pair, out: its distance
};

struct StripeKernel {
    int words, lanes;
    int words_of_lane;  // that follow one another in one lane, each in a vector of its own
    // To choose between heights, in hundredths of a nanosecond on a Zen 5 core; columns of AVX2 on a Xeon with AVX-512:
    int column_cost;         // of a column
    int paired_column_cost;  // of a column when two stripes are advanced at once
    int row_cost;            // of the table, by row
    int traced_row_cost;     // of running once more, and looking at, what an alignment needs, by row
    void (*advance)(const StripeArgs&);
    void (*record)(const StripeArgs&);
    // Two stripes of as many columns, in little more than the time of one. Null: that is not so for this height.
    void (*advance_two)(const StripeArgs&, const StripeArgs&);

    // Where a word lies in a row of `matches` and in the state: lanes run backwards within a vector.
    int position(int word) const {
        const int lane = word / words_of_lane, vector = lane / lanes * words_of_lane + word % words_of_lane;
        return vector * lanes + lanes - 1 - lane % lanes;
    }
};

struct Kernels {
    const char* isa;
    int lanes;
    int rows_without_seeds;  // so few that a bound by Seeds takes more time than it saves; measured
    StripeKernel stripes[kHeights];  // by height: the higher ones are faster where the band is wide
    void (*packed[kMaxPackedWords])(const PackedArgs&);  // by words - 1
    // By words - 1: fills one lane of PackedArgs::equal by comparing every column, whose ids have at most 24 bits, with
    // all 64·words rows. Null: a table is faster.
    void (*match[kMaxPackedWords])(const std::uint32_t* rows, const std::uint32_t* columns, std::ptrdiff_t num_columns,
                                   std::uint64_t* equal);
    // Bit 63 of each word, up to the next multiple of 64: word j becomes bit j % 64 of bits[j / 64].
    void (*top_bits)(const std::uint64_t* words, std::ptrdiff_t count, std::uint64_t* bits);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace ibpo
