// Random batches of all kinds.
#include <algorithm>
#include <cstdio>
#include <random>

#include "agreement.hpp"

namespace {

using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t bound) { return static_cast<std::size_t>(random() % bound); }

template <typename Id>
Id any_id(Random& random, std::size_t alphabet) {
    const std::size_t value = below(random, alphabet);
    if (alphabet <= 150'000) return static_cast<Id>(value);
    return static_cast<Id>(static_cast<std::int64_t>(value * 0x9E3779B97F4A7C15ull));  // of any size and sign
}

template <typename Id>
std::vector<Id> edit(Random& random, const std::vector<Id>& from, std::size_t percent, std::size_t alphabet) {
    std::vector<Id> made;
    for (const Id id : from) {
        const std::size_t kind = below(random, 100) < percent ? 1 + below(random, 3) : 0;
        if (kind == 1 || kind == 3) made.push_back(any_id<Id>(random, alphabet));
        if (kind == 0 || kind == 3) made.push_back(id);
    }
    return made;
}

template <typename Id>
void check_one(Random& random) {
    constexpr std::size_t kLengths[] = {0, 1, 5, 63, 64, 65, 129, 256, 257, 511, 513, 700, 1025, 1500};
    constexpr std::size_t kAlphabets[] = {1, 2, 4, 50, 150'000, 1'000'000};
    constexpr std::size_t kPercents[] = {0, 2, 20, 60, 95};
    Batch<Id> batch;
    for (std::size_t pair = 0, count = 1 + below(random, 12); pair < count; ++pair) {
        const std::size_t alphabet = kAlphabets[below(random, 6)];
        const std::size_t of_edits = below(random, 4) == 0 ? kAlphabets[below(random, 6)] : alphabet;
        std::vector<Id> a(kLengths[below(random, 14)]), b;
        for (Id& id : a) id = any_id<Id>(random, alphabet);
        if (below(random, 4) == 0) {
            b.resize(kLengths[below(random, 14)]);
            for (Id& id : b) id = any_id<Id>(random, of_edits);
        } else {
            b = edit(random, a, kPercents[below(random, 5)], of_edits);
            if (below(random, 4) == 0) std::rotate(b.begin(), b.begin() + static_cast<std::ptrdiff_t>(below(random, b.size() + 1)), b.end());
        }
        if (below(random, 2) == 0) std::swap(a, b);
        batch.add(a, b);
    }
    check_agreement(batch);
}

}  // namespace

void check_random(std::uint64_t seed, long count) {
    Random random(seed);
    for (long i = 0; i < count; ++i) {
        check_one<std::int64_t>(random);
        check_one<std::int32_t>(random);
    }
    std::printf("%ld random batches agree\n", 2 * count);
}
