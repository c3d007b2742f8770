// Coverage-guided: libFuzzer makes up bytes, every path through csrc/ is compared with the oracle.
//
// GCC calls __sanitizer_cov_trace_pc() in every block. libFuzzer's own only says that it wants counters instead, so the
// one here, which must be linked before it, gives it some.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "agreement.hpp"

namespace {

constexpr int kCounterBits = 14;
std::uint8_t counters[1 << kCounterBits];

}  // namespace

extern "C" {

void __sanitizer_cov_8bit_counters_init(std::uint8_t* first, std::uint8_t* last);
int LLVMFuzzerRunDriver(int* argc, char*** argv, int (*one_input)(const std::uint8_t*, std::size_t));

// Called too often to be checked itself.
__attribute__((no_sanitize("address,undefined"))) void __sanitizer_cov_trace_pc() {
    const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
    ++counters[place * 0x9E3779B97F4A7C15ull >> (64 - kCounterBits)];
}

void __sanitizer_cov_trace_cmpd(double, double) {}  // GCC's alone; libFuzzer does not look at floating point

// The first byte says how to read the rest: ids of one or of two bytes, of which width, where a ends.
int one_input(const std::uint8_t* data, std::size_t size) {
    if (size < 4) return 0;
    const bool wide = data[0] & 1, two_bytes = data[0] & 2;
    const std::size_t repeats = 1 + (data[0] >> 2) % 8;
    const std::size_t count = two_bytes ? (size - 3) / 2 : size - 3;
    const std::size_t end = (data[1] | std::size_t{data[2]} << 8) % (count + 1);
    std::vector<std::int64_t> ids;
    for (std::size_t i = 0; i < count; ++i)
        ids.push_back(two_bytes ? data[3 + 2 * i] | std::int64_t{data[4 + 2 * i]} << 8
                                : static_cast<std::int64_t>(static_cast<std::int8_t>(data[3 + i])));
    std::vector<std::int64_t> a, b;
    for (std::size_t r = 0; r < repeats; ++r) {
        a.insert(a.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(end));
        b.insert(b.end(), ids.begin() + static_cast<std::ptrdiff_t>(end), ids.end());
    }
    if (a.size() * b.size() > 1 << 19) return 0;
    if (wide) {
        Batch<std::int64_t> batch;
        batch.add(a, b);
        check_agreement(batch);
    } else {
        Batch<std::int32_t> batch;
        batch.add({a.begin(), a.end()}, {b.begin(), b.end()});
        batch.add({b.begin(), b.end()}, {a.begin(), a.end()});
        check_agreement(batch);
    }
    return 0;
}

}  // extern "C"

int fuzz(int argc, char** argv) {
    __sanitizer_cov_8bit_counters_init(counters, counters + sizeof counters);
    return LLVMFuzzerRunDriver(&argc, &argv, one_input);
}
