// The kernels for AVX2: four words a vector.
#include "../kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.hpp"
IBPO_BEGIN_TARGET("avx2,bmi,bmi2")
#include "packed_kernel.hpp"
#include "stripe_kernel.hpp"

namespace ibpo {
namespace {

struct Avx2 {
    using V = __m256i;
    using Mask = __m256i;
    static constexpr int kLanes = 4;
    static constexpr bool kLanesAreRuns = true;

    static IBPO_INLINE V load(const std::uint64_t* from) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
    }
    static IBPO_INLINE void store(std::uint64_t* to, V value) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), value);
    }
    static IBPO_INLINE V from_word(std::uint64_t word) {
        return _mm256_zextsi128_si256(_mm_cvtsi64_si128(static_cast<long long>(word)));
    }
    static IBPO_INLINE V all(std::uint64_t word) { return _mm256_set1_epi64x(static_cast<long long>(word)); }
    static IBPO_INLINE std::uint64_t first_word(V value) {
        return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(value)));
    }
    // each lane gets the one after it, the last lane the first of `above`
    static IBPO_INLINE V neighbours(V above, V own) {
        return _mm256_permute4x64_epi64(_mm256_blend_epi32(own, above, 0x03), 0x39);
    }
    template <int kWordsOfLane>
    static IBPO_INLINE Mask active(std::ptrdiff_t column, std::ptrdiff_t num_columns) {
        const V columns = _mm256_add_epi64(_mm256_set1_epi64x(column),
                                           _mm256_set_epi64x(0, -kWordsOfLane, -2 * kWordsOfLane, -3 * kWordsOfLane));
        return _mm256_andnot_si256(_mm256_cmpgt_epi64(_mm256_setzero_si256(), columns),
                                   _mm256_cmpgt_epi64(_mm256_set1_epi64x(num_columns), columns));
    }
    static IBPO_INLINE V without(V bits, V others) { return _mm256_andnot_si256(others, bits); }
    static IBPO_INLINE V complement(V bits) { return _mm256_xor_si256(bits, _mm256_set1_epi64x(-1)); }
    static IBPO_INLINE V neither(V bits, V others) { return complement(_mm256_or_si256(bits, others)); }
    static IBPO_INLINE V select(Mask mask, V yes, V no) { return _mm256_blendv_epi8(no, yes, mask); }
    static IBPO_INLINE std::uint64_t top_bits(const std::uint64_t* words) {
        const __m256d four = _mm256_loadu_pd(reinterpret_cast<const double*>(words));
        return static_cast<std::uint64_t>(_mm256_movemask_pd(four));
    }
    // Their lower 16 bits and the 8 above, apart: twice and four times as many are compared at once as of 32 bits. Ids of
    // columns have no more bits.
    struct Ids64 {
        V low[4], high[2];

        IBPO_INLINE void read(const std::uint32_t* from) {
            const V low_bits = _mm256_set1_epi32(0xFFFF), high_bits = _mm256_set1_epi32(0xFF);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                V parts[2];
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    const V one = apart(from + 32 * half + 8 * i), two = apart(from + 32 * half + 8 * i + 4);
                    low[2 * half + i] =
                        _mm256_packus_epi32(_mm256_and_si256(one, low_bits), _mm256_and_si256(two, low_bits));
                    parts[i] = _mm256_packus_epi32(_mm256_and_si256(_mm256_srli_epi32(one, 16), high_bits),
                                                   _mm256_and_si256(_mm256_srli_epi32(two, 16), high_bits));
                }
                high[half] = _mm256_packus_epi16(parts[0], parts[1]);
            }
        }
        // a bit for each that is this one
        IBPO_INLINE std::uint64_t equal(std::uint32_t id) const {
            const V low_id = _mm256_set1_epi16(static_cast<short>(id));
            const V high_id = _mm256_set1_epi8(static_cast<char>(id >> 16));
            std::uint64_t bits[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const V same_low = _mm256_packs_epi16(_mm256_cmpeq_epi16(low[2 * half], low_id),
                                                      _mm256_cmpeq_epi16(low[2 * half + 1], low_id));
                const V same = _mm256_and_si256(same_low, _mm256_cmpeq_epi8(high[half], high_id));
                bits[half] = static_cast<std::uint32_t>(_mm256_movemask_epi8(same));
            }
            return bits[0] | bits[1] << 32;
        }
        // four ids, and the four that lie 16 further: so that packing, which works on half vectors, keeps the order
        static IBPO_INLINE V apart(const std::uint32_t* ids) {
            const __m128i four = _mm_load_si128(reinterpret_cast<const __m128i*>(ids));
            return _mm256_inserti128_si256(_mm256_castsi128_si256(four),
                                           _mm_load_si128(reinterpret_cast<const __m128i*>(ids + 16)), 1);
        }
    };

    static IBPO_INLINE void column(V equal, V in_rises, V in_falls, V& not_rises, V& falls, V& right_rises, V& right_falls,
                                   V& zero_diagonal) {
        const V carry_falls = _mm256_srli_epi64(in_falls, 63);
        const V matches = _mm256_or_si256(equal, carry_falls);
        const V difference = _mm256_sub_epi64(not_rises, _mm256_andnot_si256(not_rises, matches));
        zero_diagonal = _mm256_or_si256(_mm256_xor_si256(difference, not_rises), _mm256_or_si256(matches, falls));
        right_rises = _mm256_or_si256(falls, _mm256_andnot_si256(zero_diagonal, not_rises));
        right_falls = _mm256_andnot_si256(not_rises, zero_diagonal);
        const V shifted_rises =
            _mm256_or_si256(_mm256_add_epi64(right_rises, right_rises), _mm256_srli_epi64(in_rises, 63));
        const V shifted_falls = _mm256_or_si256(_mm256_add_epi64(right_falls, right_falls), carry_falls);
        not_rises = _mm256_andnot_si256(shifted_falls, _mm256_or_si256(zero_diagonal, shifted_rises));
        falls = _mm256_and_si256(shifted_rises, zero_diagonal);
    }

    static IBPO_INLINE V follow(V distance, V right_rises, V right_falls, V num_own, std::uint64_t column) {
        const V change = _mm256_sub_epi64(_mm256_srli_epi64(right_rises, 63), _mm256_srli_epi64(right_falls, 63));
        return _mm256_add_epi64(distance, _mm256_and_si256(change, _mm256_cmpgt_epi64(num_own, all(column))));
    }

    // Lane 3 - k takes its word from the row of the column k times kApart before.
    template <int kStride, int kApart>
    struct Rows {
        IBPO_INLINE void start(const std::uint16_t*, const std::uint64_t*) {}
        IBPO_INLINE V next(const std::uint16_t* column, const std::uint64_t* matches, int) {
            const V low = _mm256_blend_epi32(load(matches + column[-3 * kApart] * kStride),
                                             load(matches + column[-2 * kApart] * kStride), 0x0C);
            const V high = _mm256_blend_epi32(load(matches + column[-kApart] * kStride),
                                              load(matches + column[0] * kStride), 0xC0);
            return _mm256_blend_epi32(low, high, 0xF0);
        }
    };
};

}  // namespace

const Kernels kAvx2Kernels = {
    "avx2",
    Avx2::kLanes,
    512,
    {{4, Avx2::kLanes, 1, 430, 300, 150, 2700, advance_stripe<Avx2, 1, false>, advance_stripe<Avx2, 1, true>,
      advance_two_stripes<Avx2, 1>},
     {8, Avx2::kLanes, 2, 506, 506, 180, 1800, advance_stripe<Avx2, 2, false>, advance_stripe<Avx2, 2, true>, nullptr},
     {16, Avx2::kLanes, 4, 990, 990, 220, 3000, advance_stripe<Avx2, 4, false>, advance_stripe<Avx2, 4, true>, nullptr}},
    {distance_packed<Avx2, 1>, distance_packed<Avx2, 2>, distance_packed<Avx2, 3>, distance_packed<Avx2, 4>},
    {match_rows<Avx2, 1>, match_rows<Avx2, 2>, match_rows<Avx2, 3>, match_rows<Avx2, 4>},
    gather_top_bits<Avx2>,
};

}  // namespace ibpo
IBPO_END_TARGET
#endif
