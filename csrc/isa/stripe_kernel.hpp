// One stripe over a range of columns, for any vector: included by each instruction set's file inside its target region.
// Vector gives the operations; nothing here may call a function of the standard library, whose copy for a newer
// instruction set could then be linked into code that runs on older ones.
#pragma once

#include "../kernels.hpp"

namespace ibpo {

#define IBPO_INLINE inline __attribute__((always_inline))

// Steps are done in blocks of four: Vector::Rows keeps what four neighbouring columns share.
constexpr int kBlockSteps = 4;

template <typename Vector, int kGroups>
struct Stripe {
    using V = typename Vector::V;
    static constexpr int kLanes = Vector::kLanes, kWords = kLanes * kGroups;
    // Words that follow one another stand in one lane of all groups, or in the lanes of one group
    // (StripeKernel::position). In the first case what leaves a word enters the same lane of the next group, and only
    // what leaves the last group is permuted.
    static constexpr int kWordsOfLane = Vector::kLanesAreRuns ? kGroups : 1;  // also from one lane of a group to the next
    static constexpr int kGroupWords = Vector::kLanesAreRuns ? 1 : kLanes;    // from one group to the next

    const StripeArgs& args;
    V not_rises[kGroups], falls[kGroups];          // vertical: the complement of VP, and VN, of the literature
    V right_rises[kGroups], right_falls[kGroups];  // horizontal, of the last step: HP and HN
    typename Vector::template Rows<kWords, kWordsOfLane> rows[kGroups];

    explicit IBPO_INLINE Stripe(const StripeArgs& given) : args(given) {
#pragma GCC unroll 8
        for (int group = 0; group < kGroups; ++group) {
            not_rises[group] = Vector::complement(Vector::load(args.vertical_rises + group * kLanes));
            falls[group] = Vector::load(args.vertical_falls + group * kLanes);
            right_rises[group] = right_falls[group] = Vector::from_word(0);
            rows[group].start(args.columns - group * kGroupWords, args.matches + group * kLanes);
        }
    }

    IBPO_INLINE void finish() const {
#pragma GCC unroll 8
        for (int group = 0; group < kGroups; ++group) {
            Vector::store(args.vertical_rises + group * kLanes, Vector::complement(not_rises[group]));
            Vector::store(args.vertical_falls + group * kLanes, falls[group]);
        }
    }

    // What enters a group's words from above: what the words above them have sent to the right a step before.
    static IBPO_INLINE V entering(int group, V top, const V (&right)[kGroups]) {
        const V above = group > 0 ? right[group - 1] : top;
        return Vector::kLanesAreRuns ? above : Vector::neighbours(above, right[group]);
    }

    // kMasked: not every lane has a column of the stripe in this step.
    template <bool kMasked, bool kRecord>
    IBPO_INLINE void step(std::ptrdiff_t at, int in_block) {
        V top_rises = Vector::from_word(args.rises[at]), top_falls = Vector::from_word(args.falls[at]);
        if (Vector::kLanesAreRuns) {
            top_rises = Vector::neighbours(top_rises, right_rises[kGroups - 1]);
            top_falls = Vector::neighbours(top_falls, right_falls[kGroups - 1]);
        }
#pragma GCC unroll 8
        for (int group = kGroups - 1; group >= 0; --group) {  // from below: the group above must still be a step behind
            const V in_rises = entering(group, top_rises, right_rises);
            const V in_falls = entering(group, top_falls, right_falls);
            const std::ptrdiff_t first_column = at - group * kGroupWords;  // of the group's first word
            const V equal = rows[group].next(args.columns + first_column, args.matches + group * kLanes, in_block);
            const V not_rises_before = not_rises[group], falls_before = falls[group];
            V zero_diagonal;
            Vector::column(equal, in_rises, in_falls, not_rises[group], falls[group], right_rises[group],
                           right_falls[group], zero_diagonal);
            if (kMasked) {
                const typename Vector::Mask active =
                    Vector::template active<kWordsOfLane>(first_column, args.num_columns);
                not_rises[group] = Vector::select(active, not_rises[group], not_rises_before);
                falls[group] = Vector::select(active, falls[group], falls_before);
            }
            if (kRecord) {
                std::uint64_t* planes = args.planes + at * kPlanes * kWords + group * kLanes;
                Vector::store(planes + kFromAbove * kWords, Vector::neither(not_rises[group], equal));
                Vector::store(planes + kFromLeft * kWords, Vector::without(right_rises[group], equal));
                Vector::store(planes + kNotDiagonal * kWords, Vector::without(zero_diagonal, equal));
            }
        }
        const std::ptrdiff_t done = at - (kWords - 1);
        if (!kMasked || (done >= 0 && done < args.num_columns)) {
            args.rises[done] = Vector::first_word(right_rises[kGroups - 1]);
            args.falls[done] = Vector::first_word(right_falls[kGroups - 1]);
        }
    }
};

// Runs `step` of all stripes given, which have the same number of columns, in turn: what one waits for, another uses.
template <bool kMasked, bool kRecord, typename... Stripes>
IBPO_INLINE std::ptrdiff_t run_blocks(std::ptrdiff_t first, std::ptrdiff_t last, Stripes&... stripes) {
    std::ptrdiff_t at = first;
    for (; at + (kMasked ? 0 : kBlockSteps - 1) < last; at += kBlockSteps)
#pragma GCC unroll 4
        for (int i = 0; i < kBlockSteps; ++i) (stripes.template step<kMasked, kRecord>(at + i, i), ...);
    return at;
}

template <bool kRecord, typename First, typename... Stripes>
IBPO_INLINE void run_stripes(First& first, Stripes&... others) {
    const std::ptrdiff_t num_columns = first.args.num_columns;
    std::ptrdiff_t at = run_blocks<true, kRecord>(0, First::kWords - 1, first, others...);
    at = run_blocks<false, kRecord>(at, num_columns, first, others...);
    run_blocks<true, kRecord>(at, num_columns + First::kWords - 1, first, others...);
    first.finish();
    (others.finish(), ...);
}

template <typename Vector, int kGroups, bool kRecord>
void advance_stripe(const StripeArgs& args) {
    Stripe<Vector, kGroups> stripe(args);
    run_stripes<kRecord>(stripe);
}

template <typename Vector, int kGroups>
void advance_two_stripes(const StripeArgs& args, const StripeArgs& other_args) {
    Stripe<Vector, kGroups> stripe(args), other(other_args);
    run_stripes<false>(stripe, other);
}

template <typename Vector>
void gather_top_bits(const std::uint64_t* words, std::ptrdiff_t count, std::uint64_t* bits) {
    for (std::ptrdiff_t from = 0; from < count; from += 64) {
        std::uint64_t found = 0;
#pragma GCC unroll 16
        for (int i = 0; i < 64; i += Vector::kLanes) found |= Vector::top_bits(words + from + i) << i;
        bits[from / 64] = found;
    }
}

}  // namespace ibpo
