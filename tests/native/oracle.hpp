// Distance and canonical alignment by whole tables, as alignment.hpp in csrc/ documents it and by other means.
#pragma once

#include <cstdint>
#include <vector>

namespace oracle {

struct Alignment {
    std::int64_t distance;
    std::vector<std::uint8_t> matched_a, matched_b;
};

// For std::int32_t and std::int64_t.
template <typename Id>
Alignment align(const std::vector<Id>& a, const std::vector<Id>& b);

// For pairs whose table is too large to keep.
std::int64_t distance(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b);

}  // namespace oracle
