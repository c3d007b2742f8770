// Common prefixes and suffixes.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ibpo {

// Ids compared at once, in a loop without exits that compilers turn into a few vector instructions.
constexpr std::size_t kBlock = 16;

template <typename Id>
bool equal_block(const Id* a, const Id* b) {
    Id different = 0;
    for (std::size_t i = 0; i < kBlock; ++i) different |= a[i] ^ b[i];
    return different == 0;
}

template <typename Id>
std::size_t common_prefix(const Id* a, const Id* b, std::size_t size) {
    std::size_t length = 0;
    while (length + kBlock <= size && equal_block(a + length, b + length)) length += kBlock;
    while (length < size && a[length] == b[length]) ++length;
    return length;
}

template <typename Id>
std::size_t common_suffix(const Id* a, std::size_t size_a, const Id* b, std::size_t size_b) {
    const std::size_t size = std::min(size_a, size_b);
    const Id *end_a = a + size_a, *end_b = b + size_b;
    std::size_t length = 0;
    while (length + kBlock <= size && equal_block(end_a - length - kBlock, end_b - length - kBlock)) length += kBlock;
    while (length < size && end_a[-1 - static_cast<std::ptrdiff_t>(length)] == end_b[-1 - static_cast<std::ptrdiff_t>(length)])
        ++length;
    return length;
}

}  // namespace ibpo
