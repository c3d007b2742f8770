// Every path through csrc/ against the oracle, for one batch of pairs. A difference ends the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

template <typename Id>
struct Batch {
    std::vector<Id> a, b;
    std::vector<std::int64_t> a_offsets{0}, b_offsets{0};

    void add(const std::vector<Id>& of_a, const std::vector<Id>& of_b) {
        a.insert(a.end(), of_a.begin(), of_a.end());
        b.insert(b.end(), of_b.begin(), of_b.end());
        a_offsets.push_back(static_cast<std::int64_t>(a.size()));
        b_offsets.push_back(static_cast<std::int64_t>(b.size()));
    }
};

// For std::int32_t and std::int64_t.
template <typename Id>
void check_agreement(const Batch<Id>& batch);
