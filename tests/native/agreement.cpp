#include "agreement.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "../../csrc/batch.hpp"
#include "../../csrc/dispatch.hpp"
#include "oracle.hpp"

namespace {

void demand(bool holds, const char* what, const char* isa, int engine, std::size_t pair) {
    if (holds) return;
    std::fprintf(stderr, "%s differs: %s, engine %d, pair %zu\n", what, isa, engine, pair);
    std::abort();
}

}  // namespace

template <typename Id>
void check_agreement(const Batch<Id>& batch) {
    const std::size_t count = batch.a_offsets.size() - 1;
    std::vector<oracle::Alignment> want;
    for (std::size_t i = 0; i < count; ++i)
        want.push_back(oracle::align(
            std::vector<Id>(batch.a.begin() + batch.a_offsets[i], batch.a.begin() + batch.a_offsets[i + 1]),
            std::vector<Id>(batch.b.begin() + batch.b_offsets[i], batch.b.begin() + batch.b_offsets[i + 1])));
    const ibpo::Pairs<Id> pairs{batch.a.data(), batch.a_offsets.data(), batch.b.data(), batch.b_offsets.data(), count};
    std::vector<std::int64_t> limits(count), distances(count);
    std::vector<std::uint8_t> matched_a(batch.a.size()), matched_b(batch.b.size());
    using ibpo::Engine;
    for (const ibpo::Kernels* kernels : ibpo::supported_kernels())
        for (const Engine engine : {Engine::automatic, Engine::packed, Engine::stripes, Engine::wavefront}) {
            const int name = static_cast<int>(engine);
            for (int more = -1; more <= 1; ++more) {
                for (std::size_t i = 0; i < count; ++i) limits[i] = std::max<std::int64_t>(0, want[i].distance + more);
                ibpo::BatchDistance<Id>(*kernels, engine, pairs, limits.data(), distances.data()).run(2);
                for (std::size_t i = 0; i < count; ++i)
                    demand(distances[i] == (want[i].distance <= limits[i] ? want[i].distance : ibpo::kSaturated),
                           "a distance with a limit", kernels->isa, name, i);
            }
            ibpo::BatchDistance<Id>(*kernels, engine, pairs, nullptr, distances.data()).run(0);
            for (std::size_t i = 0; i < count; ++i)
                demand(distances[i] == want[i].distance, "a distance", kernels->isa, name, i);
            ibpo::BatchAlign<Id>(*kernels, engine, pairs, matched_a.data(), matched_b.data(), distances.data()).run(1);
            for (std::size_t i = 0; i < count; ++i) {
                demand(distances[i] == want[i].distance, "an alignment's distance", kernels->isa, name, i);
                demand(std::equal(want[i].matched_a.begin(), want[i].matched_a.end(), matched_a.begin() + batch.a_offsets[i]),
                       "the mask of a", kernels->isa, name, i);
                demand(std::equal(want[i].matched_b.begin(), want[i].matched_b.end(), matched_b.begin() + batch.b_offsets[i]),
                       "the mask of b", kernels->isa, name, i);
            }
        }
}

template void check_agreement(const Batch<std::int32_t>&);
template void check_agreement(const Batch<std::int64_t>&);
