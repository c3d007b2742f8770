// Several short pairs at once, one in each lane of a vector. Included as stripe_kernel.hpp is.
#pragma once

#include "stripe_kernel.hpp"

namespace ibpo {

template <typename Vector, int kWords>
void distance_packed(const PackedArgs& args) {
    using V = typename Vector::V;
    constexpr int kLanes = Vector::kLanes;
    V not_rises[kWords], falls[kWords];
#pragma GCC unroll 4
    for (int word = 0; word < kWords; ++word) {
        not_rises[word] = Vector::complement(Vector::load(args.first_rises + word * kLanes));
        falls[word] = Vector::from_word(0);
    }
    const V num_own = Vector::load(args.num_own);
    V distance = Vector::load(reinterpret_cast<const std::uint64_t*>(args.distances));
    for (std::ptrdiff_t j = 0; j < args.num_columns; ++j) {
        V in_rises = Vector::all(1ull << 63), in_falls = Vector::from_word(0);  // along the first row D rises
#pragma GCC unroll 4
        for (int word = 0; word < kWords; ++word) {
            V right_rises, right_falls, zero_diagonal;
            Vector::column(Vector::load(args.equal + (j * kWords + word) * kLanes), in_rises, in_falls, not_rises[word],
                           falls[word], right_rises, right_falls, zero_diagonal);
            in_rises = right_rises;
            in_falls = right_falls;
        }
        distance = Vector::follow(distance, in_rises, in_falls, num_own, static_cast<std::uint64_t>(j));
    }
    Vector::store(reinterpret_cast<std::uint64_t*>(args.distances), distance);
}

template <typename Vector, int kWords>
void match_rows(const std::uint32_t* rows, const std::uint32_t* columns, std::ptrdiff_t num_columns,
                std::uint64_t* equal) {
    typename Vector::Ids64 ids[kWords];
    for (int word = 0; word < kWords; ++word) ids[word].read(rows + 64 * word);
    for (std::ptrdiff_t j = 0; j < num_columns; ++j)
#pragma GCC unroll 4
        for (int word = 0; word < kWords; ++word)
            equal[(j * kWords + word) * Vector::kLanes] = ids[word].equal(columns[j]);
}

}  // namespace ibpo
