// The kernels for AVX-512 with VBMI2 (Intel from Ice Lake, AMD from Zen 4): eight words a vector.
#include "../kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.hpp"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms in GCC 12's own header (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
IBPO_BEGIN_TARGET("avx512f,avx512vbmi2,bmi,bmi2")
#include "packed_kernel.hpp"
#include "stripe_kernel.hpp"

namespace ibpo {
namespace {

struct Avx512 {
    using V = __m512i;
    using Mask = __mmask8;
    static constexpr int kLanes = 8;
    static constexpr bool kLanesAreRuns = false;  // Rows shares what neighbouring columns have in common

    static IBPO_INLINE V load(const std::uint64_t* from) { return _mm512_load_si512(from); }
    static IBPO_INLINE void store(std::uint64_t* to, V value) { _mm512_store_si512(to, value); }
    static IBPO_INLINE V from_word(std::uint64_t word) {
        return _mm512_zextsi128_si512(_mm_cvtsi64_si128(static_cast<long long>(word)));
    }
    static IBPO_INLINE V all(std::uint64_t word) { return _mm512_set1_epi64(static_cast<long long>(word)); }
    static IBPO_INLINE std::uint64_t first_word(V value) {
        return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(value)));
    }
    // each lane gets the one after it, the last lane the first of `above`
    static IBPO_INLINE V neighbours(V above, V own) { return _mm512_alignr_epi64(above, own, 1); }
    template <int kWordsOfLane>
    static IBPO_INLINE Mask active(std::ptrdiff_t column, std::ptrdiff_t num_columns) {
        const V columns = _mm512_add_epi64(_mm512_set1_epi64(column), _mm512_set_epi64(0, -1, -2, -3, -4, -5, -6, -7));
        return _mm512_cmplt_epu64_mask(columns, _mm512_set1_epi64(num_columns));  // a negative one is a huge one
    }
    static IBPO_INLINE V without(V bits, V others) { return _mm512_andnot_si512(others, bits); }
    static IBPO_INLINE V neither(V bits, V others) {
        return _mm512_ternarylogic_epi64(bits, others, others, 0x03);  // of operands 0xF0 and 0xCC
    }
    static IBPO_INLINE V complement(V bits) { return _mm512_xor_si512(bits, _mm512_set1_epi64(-1)); }
    static IBPO_INLINE V select(Mask mask, V yes, V no) { return _mm512_mask_mov_epi64(no, mask, yes); }
    static IBPO_INLINE std::uint64_t top_bits(const std::uint64_t* words) {
        return _mm512_cmplt_epi64_mask(_mm512_loadu_si512(words), _mm512_setzero_si512());
    }
    struct Ids64 {
        V ids[4];

        IBPO_INLINE void read(const std::uint32_t* from) {
            for (int i = 0; i < 4; ++i) ids[i] = _mm512_load_si512(from + 16 * i);
        }
        // a bit for each that is this one
        IBPO_INLINE std::uint64_t equal(std::uint32_t id) const {
            const V wanted = _mm512_set1_epi32(static_cast<int>(id));
            std::uint64_t bits = 0;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) bits |= std::uint64_t{_mm512_cmpeq_epi32_mask(ids[i], wanted)} << 16 * i;
            return bits;
        }
    };

    static IBPO_INLINE void column(V equal, V in_rises, V in_falls, V& not_rises, V& falls, V& right_rises, V& right_falls,
                                   V& zero_diagonal) {
        // truth tables of the three operands: 0xF0, 0xCC, 0xAA
        constexpr int kXorOr = (0xF0 ^ 0xCC) | 0xAA, kOrWithout = 0xF0 | (0xAA & ~0xCC);
        constexpr int kOrButNot = (0xCC | 0xAA) & ~0xF0;
        const V matches = _mm512_or_si512(equal, _mm512_srli_epi64(in_falls, 63));
        const V difference = _mm512_sub_epi64(not_rises, _mm512_andnot_si512(not_rises, matches));
        zero_diagonal = _mm512_ternarylogic_epi64(difference, not_rises, _mm512_or_si512(matches, falls), kXorOr);
        right_rises = _mm512_ternarylogic_epi64(falls, zero_diagonal, not_rises, kOrWithout);
        right_falls = _mm512_andnot_si512(not_rises, zero_diagonal);
        const V shifted_rises = _mm512_shldi_epi64(right_rises, in_rises, 1);
        const V shifted_falls = _mm512_shldi_epi64(right_falls, in_falls, 1);
        not_rises = _mm512_ternarylogic_epi64(shifted_falls, zero_diagonal, shifted_rises, kOrButNot);
        falls = _mm512_and_si512(shifted_rises, zero_diagonal);
    }

    static IBPO_INLINE V follow(V distance, V right_rises, V right_falls, V num_own, std::uint64_t column) {
        const V change = _mm512_sub_epi64(_mm512_srli_epi64(right_rises, 63), _mm512_srli_epi64(right_falls, 63));
        return _mm512_mask_add_epi64(distance, _mm512_cmpgt_epu64_mask(num_own, all(column)), distance, change);
    }

    // Lane 7 - k takes its word from the row of the column k before: three blends a column, by the bits of k, since
    // what one column blends serves the next ones too.
    template <int kStride, int>
    struct Rows {
        V row, by_one[2], by_two[4];

        IBPO_INLINE void start(const std::uint16_t* column, const std::uint64_t* matches) {
            row = load(matches + column[-7] * kStride);
            for (int i = 0; i < 2; ++i) by_one[i] = blend_one(matches + column[i - 6] * kStride);
            for (int i = 0; i < 4; ++i) {
                const V blended = blend_one(matches + column[i - 4] * kStride);
                by_two[i] = _mm512_mask_blend_epi64(0x33, blended, by_one[i & 1]);
                by_one[i & 1] = blended;
            }
        }
        IBPO_INLINE V next(const std::uint16_t* column, const std::uint64_t* matches, int in_block) {
            const V one = blend_one(matches + *column * kStride);
            const V two = _mm512_mask_blend_epi64(0x33, one, by_one[in_block & 1]), two_before = by_two[in_block];
            by_one[in_block & 1] = one;
            by_two[in_block] = two;
            return _mm512_mask_blend_epi64(0x0F, two, two_before);
        }
        IBPO_INLINE V blend_one(const std::uint64_t* next_row) {
            const V before = row;
            row = load(next_row);
            return _mm512_mask_blend_epi64(0x55, row, before);
        }
    };
};

}  // namespace

const Kernels kAvx512Kernels = {
    "avx512",
    Avx512::kLanes,
    512,
    {{8, Avx512::kLanes, 1, 490, 262, 180, 1100, advance_stripe<Avx512, 1, false>, advance_stripe<Avx512, 1, true>,
      advance_two_stripes<Avx512, 1>},
     {16, Avx512::kLanes, 1, 510, 360, 220, 1100, advance_stripe<Avx512, 2, false>, advance_stripe<Avx512, 2, true>,
      advance_two_stripes<Avx512, 2>},
     {32, Avx512::kLanes, 1, 750, 750, 400, 2800, advance_stripe<Avx512, 4, false>, advance_stripe<Avx512, 4, true>, nullptr}},
    {distance_packed<Avx512, 1>, distance_packed<Avx512, 2>, distance_packed<Avx512, 3>, distance_packed<Avx512, 4>},
    {match_rows<Avx512, 1>, match_rows<Avx512, 2>, match_rows<Avx512, 3>, match_rows<Avx512, 4>},
    gather_top_bits<Avx512>,
};

}  // namespace ibpo
IBPO_END_TARGET
#endif
