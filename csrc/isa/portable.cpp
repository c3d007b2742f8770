// The kernels in plain C++: one word is a vector of one lane.
#include "packed_kernel.hpp"
#include "stripe_kernel.hpp"

namespace ibpo {
namespace {

struct Word {
    using V = std::uint64_t;
    using Mask = bool;
    static constexpr int kLanes = 1;
    static constexpr bool kLanesAreRuns = true;

    static IBPO_INLINE V load(const std::uint64_t* from) { return *from; }
    static IBPO_INLINE void store(std::uint64_t* to, V value) { *to = value; }
    static IBPO_INLINE V from_word(std::uint64_t word) { return word; }
    static IBPO_INLINE V all(std::uint64_t word) { return word; }
    static IBPO_INLINE std::uint64_t first_word(V value) { return value; }
    static IBPO_INLINE V neighbours(V above, V) { return above; }
    template <int kWordsOfLane>
    static IBPO_INLINE Mask active(std::ptrdiff_t column, std::ptrdiff_t num_columns) {
        return column >= 0 && column < num_columns;
    }
    static IBPO_INLINE V without(V bits, V others) { return bits & ~others; }
    static IBPO_INLINE V neither(V bits, V others) { return ~(bits | others); }
    static IBPO_INLINE V complement(V bits) { return ~bits; }
    static IBPO_INLINE V select(Mask mask, V yes, V no) { return mask ? yes : no; }
    static IBPO_INLINE std::uint64_t top_bits(const std::uint64_t* words) { return *words >> 63; }

    static IBPO_INLINE void column(V equal, V in_rises, V in_falls, V& not_rises, V& falls, V& right_rises, V& right_falls,
                                   V& zero_diagonal) {
        const V matches = equal | in_falls >> 63;
        // differences of bits instead of complements, which would take an instruction of their own
        zero_diagonal = ((2 * not_rises - (matches | not_rises)) ^ not_rises) | matches | falls;
        const V both = zero_diagonal & not_rises;
        right_rises = falls | (not_rises ^ both);
        right_falls = zero_diagonal ^ both;
        const V shifted_rises = right_rises << 1 | in_rises >> 63, shifted_falls = right_falls << 1 | in_falls >> 63;
        not_rises = (zero_diagonal | shifted_rises) & ~shifted_falls;
        falls = shifted_rises & zero_diagonal;
    }

    static IBPO_INLINE V follow(V distance, V right_rises, V right_falls, V num_own, std::uint64_t column) {
        return column < num_own ? distance + (right_rises >> 63) - (right_falls >> 63) : distance;
    }

    template <int kStride, int>
    struct Rows {
        IBPO_INLINE void start(const std::uint16_t*, const std::uint64_t*) {}
        IBPO_INLINE V next(const std::uint16_t* column, const std::uint64_t* matches, int) {
            return matches[*column * kStride];
        }
    };
};

}  // namespace

const Kernels kPortableKernels = {
    "portable",
    Word::kLanes,
    64,
    {{1, Word::kLanes, 1, 360, 360, 150, 4200, advance_stripe<Word, 1, false>, advance_stripe<Word, 1, true>, nullptr},
     {2, Word::kLanes, 2, 456, 456, 150, 3600, advance_stripe<Word, 2, false>, advance_stripe<Word, 2, true>, nullptr},
     {4, Word::kLanes, 4, 888, 888, 160, 3300, advance_stripe<Word, 4, false>, advance_stripe<Word, 4, true>, nullptr}},
    {distance_packed<Word, 1>, distance_packed<Word, 2>, distance_packed<Word, 3>, distance_packed<Word, 4>},
    {},
    gather_top_bits<Word>,
};

}  // namespace ibpo
