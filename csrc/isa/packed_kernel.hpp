// Several short pairs at once, one in each lane of a vector. Included as stripe_kernel.hpp is.
#pragma once

#include "stripe_kernel.hpp"

namespace ibpo {

template <typename Vector, int kWords>
void distance_packed(const PackedArgs& args) {
    using V = typename Vector::V;
    constexpr int kLanes = Vector::kLanes;
    V rises[kWords], falls[kWords];
#pragma GCC unroll 4
    for (int word = 0; word < kWords; ++word) {
        rises[word] = Vector::load(args.first_rises + word * kLanes);
        falls[word] = Vector::from_word(0);
    }
    const V num_own = Vector::load(args.num_own);
    V distance = Vector::load(reinterpret_cast<const std::uint64_t*>(args.distances));
    for (std::ptrdiff_t j = 0; j < args.num_columns; ++j) {
        V in_rises = Vector::all(1ull << 63), in_falls = Vector::from_word(0);  // along the first row D rises
#pragma GCC unroll 4
        for (int word = 0; word < kWords; ++word) {
            V right_rises, right_falls, zero_diagonal;
            Vector::column(Vector::load(args.equal + (j * kWords + word) * kLanes), in_rises, in_falls, rises[word],
                           falls[word], right_rises, right_falls, zero_diagonal);
            in_rises = right_rises;
            in_falls = right_falls;
        }
        distance = Vector::follow(distance, in_rises, in_falls, num_own, static_cast<std::uint64_t>(j));
    }
    Vector::store(reinterpret_cast<std::uint64_t*>(args.distances), distance);
}

template <typename Vector>
void match_rows(const std::uint32_t* rows, int words, const std::uint32_t* columns, std::ptrdiff_t num_columns,
                std::uint64_t* equal) {
    for (std::ptrdiff_t j = 0; j < num_columns; ++j)
        for (int word = 0; word < words; ++word)
            equal[(j * words + word) * Vector::kLanes] = Vector::equal_rows(rows + 64 * word, columns[j]);
}

}  // namespace ibpo
