// Pairs that are long enough for what short ones never come to: a band that moves on, anchors, guesses that are too low.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "../../csrc/batch.hpp"
#include "../../csrc/dispatch.hpp"
#include "oracle.hpp"

namespace {

using Ids = std::vector<std::int64_t>;
using Mask = std::vector<std::uint8_t>;

void demand(bool holds, const char* what, const char* isa, std::size_t pair) {
    if (holds) return;
    std::fprintf(stderr, "%s: %s, long pair %zu\n", what, isa, pair);
    std::abort();
}

Ids draw(std::mt19937_64& random, std::size_t size, std::uint64_t alphabet) {
    Ids ids(size);
    for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random() % alphabet);
    return ids;
}

// A copy with about so many in a hundred replaced, left out, or preceded by another.
Ids edit(std::mt19937_64& random, const Ids& from, std::uint64_t percent) {
    Ids made;
    for (const std::int64_t id : from) {
        const std::uint64_t kind = random() % 100 < percent ? 1 + random() % 3 : 0;
        if (kind == 1 || kind == 3) made.push_back(static_cast<std::int64_t>(random() % 150'000));
        if (kind == 0 || kind == 3) made.push_back(id);
    }
    return made;
}

// What an alignment with these matches costs: between two of them, as much as the longer side. -1: they are none.
std::int64_t cost(const Ids& a, const Ids& b, const Mask& matched_a, const Mask& matched_b) {
    std::int64_t sum = 0;
    for (std::size_t i = 0, j = 0;; ++i, ++j) {
        const std::size_t gap_a = i, gap_b = j;
        while (i < a.size() && !matched_a[i]) ++i;
        while (j < b.size() && !matched_b[j]) ++j;
        sum += static_cast<std::int64_t>(std::max(i - gap_a, j - gap_b));
        if (i == a.size() && j == b.size()) return sum;
        if (i == a.size() || j == b.size() || a[i] != b[j]) return -1;
    }
}

// `want` may have no masks, where whole tables would be too large: then those of all paths must be the same.
void check_pair(const Ids& a, const Ids& b, oracle::Alignment want, std::size_t number) {
    const std::int64_t a_offsets[] = {0, static_cast<std::int64_t>(a.size())};
    const std::int64_t b_offsets[] = {0, static_cast<std::int64_t>(b.size())};
    const ibpo::Pairs<std::int64_t> pairs{a.data(), a_offsets, b.data(), b_offsets, 1};
    for (const ibpo::Kernels* kernels : ibpo::supported_kernels())
        for (const ibpo::Engine engine : {ibpo::Engine::automatic, ibpo::Engine::stripes}) {
            const auto claim = [&](bool holds, const char* what) { demand(holds, what, kernels->isa, number); };
            std::int64_t found = 0;
            for (const std::int64_t limit : {want.distance - 1, want.distance, want.distance + 1, ibpo::kSaturated - 1}) {
                ibpo::BatchDistance<std::int64_t>(*kernels, engine, pairs, &limit, &found).run(1);
                claim(found == (want.distance <= limit ? want.distance : ibpo::kSaturated), "the distance is wrong");
            }
            Mask matched_a(a.size()), matched_b(b.size());
            ibpo::BatchAlign<std::int64_t>(*kernels, engine, pairs, matched_a.data(), matched_b.data(), &found).run(1);
            claim(found == want.distance, "the alignment's distance is wrong");
            claim(cost(a, b, matched_a, matched_b) == found, "the masks are not of an alignment of this cost");
            if (want.matched_a.empty()) want.matched_a = matched_a, want.matched_b = matched_b;
            claim(matched_a == want.matched_a && matched_b == want.matched_b, "the masks are not the expected ones");
        }
}

}  // namespace

void check_long() {
    std::mt19937_64 random(1);
    const Ids ids = draw(random, 8800, 150'000);
    Ids moved = ids, repeated(ids.size());
    std::rotate(moved.begin(), moved.begin() + 3000, moved.end());
    for (std::size_t i = 0; i < repeated.size(); ++i) repeated[i] = static_cast<std::int64_t>(i % 97);
    const Ids others[] = {edit(random, ids, 2), edit(random, ids, 60), moved};
    std::size_t number = 0;
    for (const Ids& other : others) check_pair(ids, other, {oracle::distance(ids, other), {}, {}}, number++);
    const auto half = repeated.begin() + 4400;
    Ids few_then_many = edit(random, Ids(repeated.begin(), half), 1);  // how few misleads about how many
    const Ids many = edit(random, Ids(half, repeated.end()), 30);
    few_then_many.insert(few_then_many.end(), many.begin(), many.end());
    for (const Ids& other : {edit(random, repeated, 5), few_then_many})
        check_pair(repeated, other, {oracle::distance(repeated, other), {}, {}}, number++);
    // optimal paths visit about 3400 times 2970 places, more than are kept at once
    Ids left(3500), right(6500);
    std::iota(left.begin(), left.end(), 0);
    std::iota(right.begin(), right.end(), 10'000);
    right[130] = right[200] = left[100];
    right[150] = left[90];
    check_pair(left, right, oracle::align(left, right), number++);
    std::printf("%zu long pairs agree\n", number);
}
