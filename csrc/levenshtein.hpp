// Levenshtein distance of token-id sequences, bit-parallel: G. Myers 1999 in the form of H. Hyyrö 2003.
//
// Rows are the shorter sequence in words of 64, columns the longer one. A stripe of two words is carried over all
// columns before the next one starts: between stripes only the horizontal differences of one row are kept, so memory
// stays linear in the lengths. O(n * ceil(m / 64)) word operations. A word waits for its own last column and for the
// carry of the word above; with two the processor overlaps these waits, and more have measured no better.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ibpo {

// Numbers the distinct ids of one sequence 1, 2, …; 0 stands for every other id. A hash table with open addressing:
// ids of any size and sign must do.
class LocalIds {
public:
    template <typename Id>
    void reset(const Id* ids, std::size_t size) {
        int bits = 4;
        while ((std::size_t{1} << bits) < 2 * size) ++bits;
        slots_.assign(std::size_t{1} << bits, Slot{0, 0});
        shift_ = 64 - bits;
        count_ = 0;
        for (std::size_t i = 0; i < size; ++i) {
            Slot& slot = find(static_cast<std::uint64_t>(ids[i]));
            if (slot.local == 0) slot = Slot{static_cast<std::uint64_t>(ids[i]), ++count_};
        }
    }
    template <typename Id>
    std::uint32_t operator[](Id id) {
        return find(static_cast<std::uint64_t>(id)).local;
    }
    std::size_t count() const { return count_; }

private:
    struct Slot {
        std::uint64_t id;
        std::uint32_t local;  // 0: the slot is free
    };
    Slot& find(std::uint64_t id) {
        std::size_t at = (id * 0x9E3779B97F4A7C15ull) >> shift_;
        while (slots_[at].local != 0 && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
        return slots_[at];
    }
    std::vector<Slot> slots_;
    int shift_ = 0;
    std::uint32_t count_ = 0;
};

// Working memory of one thread, kept from pair to pair.
struct LevenshteinScratch {
    LocalIds local_ids;
    std::vector<std::uint32_t> rows;     // local ids of the shorter sequence
    std::vector<std::uint32_t> columns;  // local ids of the longer sequence
    std::vector<std::uint64_t> matches;  // by local id and word: the rows of this stripe that hold it
    std::vector<std::uint8_t> carry;     // by column, below the last stripe: bit 0 D rises, bit 1 D falls
};

// Carries the next `height` rows, the last of them in word kWords - 1, over all columns.
template <std::size_t kWords>
void advance_stripe(const std::uint32_t* rows, std::size_t height, LevenshteinScratch& scratch) {
    std::uint64_t* matches = scratch.matches.data();
    for (std::size_t i = 0; i < height; ++i) matches[rows[i] * kWords + i / 64] |= 1ull << i % 64;
    const std::size_t last_row = (height - 1) % 64;
    std::uint64_t rises[kWords], falls[kWords];  // vertical differences: VP and VN of the literature
    std::fill(rises, rises + kWords, ~0ull);
    std::fill(falls, falls + kWords, 0);
    const std::uint32_t* columns = scratch.columns.data();
    std::uint8_t* carry = scratch.carry.data();
    for (std::size_t j = 0, size = scratch.columns.size(); j < size; ++j) {
        const std::uint64_t* column_matches = matches + columns[j] * kWords;
        std::uint64_t in_rises = carry[j] & 1, in_falls = carry[j] >> 1;
        for (std::size_t word = 0; word < kWords; ++word) {
            const std::uint64_t rise = rises[word], fall = falls[word];
            const std::uint64_t equal = column_matches[word] | in_falls;
            const std::uint64_t diagonal = (((equal & rise) + rise) ^ rise) | equal | fall;  // D0
            std::uint64_t right_rises = fall | ~(diagonal | rise);                           // HP
            std::uint64_t right_falls = diagonal & rise;                                     // HN
            const std::size_t bottom = word + 1 < kWords ? 63 : last_row;
            const std::uint64_t out_rises = right_rises >> bottom & 1, out_falls = right_falls >> bottom & 1;
            right_rises = right_rises << 1 | in_rises;
            right_falls = right_falls << 1 | in_falls;
            rises[word] = right_falls | ~(diagonal | right_rises);
            falls[word] = right_rises & diagonal;
            in_rises = out_rises;
            in_falls = out_falls;
        }
        carry[j] = static_cast<std::uint8_t>(in_rises | in_falls << 1);
    }
    for (std::size_t i = 0; i < height; ++i) matches[rows[i] * kWords + i / 64] = 0;
}

// Insertions, deletions and substitutions that turn a into b. Ids compare as their type does.
template <typename Id>
std::size_t levenshtein(const Id* a, std::size_t size_a, const Id* b, std::size_t size_b,
                        LevenshteinScratch& scratch) {
    if (size_a > size_b) {
        std::swap(a, b);
        std::swap(size_a, size_b);
    }
    while (size_a > 0 && a[size_a - 1] == b[size_b - 1]) --size_a, --size_b;
    while (size_a > 0 && *a == *b) ++a, ++b, --size_a, --size_b;
    if (size_a == 0) return size_b;

    LocalIds& local_ids = scratch.local_ids;
    local_ids.reset(a, size_a);
    auto& rows = scratch.rows;
    auto& columns = scratch.columns;
    rows.resize(size_a);
    columns.resize(size_b);
    std::transform(a, a + size_a, rows.begin(), [&](Id id) { return local_ids[id]; });
    std::transform(b, b + size_b, columns.begin(), [&](Id id) { return local_ids[id]; });
    scratch.matches.assign(2 * (local_ids.count() + 1), 0);
    auto& carry = scratch.carry;
    carry.assign(size_b, 1);  // above the first row, D(0, j) = j

    std::size_t top = 0;
    for (; size_a - top > 64; top += std::min<std::size_t>(128, size_a - top))
        advance_stripe<2>(rows.data() + top, std::min<std::size_t>(128, size_a - top), scratch);
    if (top < size_a) advance_stripe<1>(rows.data() + top, size_a - top, scratch);

    std::size_t distance = size_a;
    for (const std::uint8_t step : carry) distance += (step & 1), distance -= step >> 1;
    return distance;
}

}  // namespace ibpo
