#include "oracle.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace oracle {

namespace {

template <typename T>
class Table {
public:
    Table(std::size_t rows, std::size_t columns, T value) : columns_(columns), values_(rows * columns, value) {}
    T& operator()(std::size_t i, std::size_t j) { return values_[i * columns_ + j]; }

private:
    std::size_t columns_;
    std::vector<T> values_;
};

}  // namespace

std::int64_t distance(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
    std::vector<int> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (const std::int64_t of_a : a) {
        int diagonal = row[0]++;
        for (std::size_t j = 0; j < b.size(); ++j) {
            const int above = row[j + 1];
            row[j + 1] = std::min(std::min(above, row[j]) + 1, diagonal + (of_a != b[j]));
            diagonal = above;
        }
    }
    return row.back();
}

template <typename Id>
Alignment align(const std::vector<Id>& whole_a, const std::vector<Id>& whole_b) {
    std::size_t prefix = 0, suffix = 0;
    const std::size_t shorter = std::min(whole_a.size(), whole_b.size());
    while (prefix < shorter && whole_a[prefix] == whole_b[prefix]) ++prefix;
    while (suffix < shorter - prefix && whole_a[whole_a.size() - 1 - suffix] == whole_b[whole_b.size() - 1 - suffix]) ++suffix;
    const auto core = [&](const std::vector<Id>& ids) {
        return std::vector<Id>(ids.begin() + static_cast<std::ptrdiff_t>(prefix), ids.end() - static_cast<std::ptrdiff_t>(suffix));
    };
    const std::vector<Id> a = core(whole_a), b = core(whole_b);
    const std::size_t m = a.size(), n = b.size();

    Table<int> cost(m + 1, n + 1, 0);
    for (std::size_t i = 0; i <= m; ++i)
        for (std::size_t j = 0; j <= n; ++j) {
            if (i == 0 || j == 0) {
                cost(i, j) = static_cast<int>(i + j);
                continue;
            }
            const int either = std::min(cost(i - 1, j), cost(i, j - 1)) + 1;
            cost(i, j) = std::min(either, cost(i - 1, j - 1) + (a[i - 1] != b[j - 1]));
        }

    // by vertex: 4 · the most matches to come + what is preferred (3 diagonal, 2 leave out of a, 1 put in of b)
    Table<int> ahead(m + 1, n + 1, -1);
    ahead(m, n) = 0;
    for (std::size_t i = m + 1; i-- > 0;)
        for (std::size_t j = n + 1; j-- > 0;) {
            if (ahead(i, j) < 0) continue;
            const int matches = ahead(i, j) / 4;
            const auto offer = [&](std::size_t to_i, std::size_t to_j, int value) {
                ahead(to_i, to_j) = std::max(ahead(to_i, to_j), value);
            };
            if (i > 0 && j > 0 && a[i - 1] == b[j - 1]) {
                offer(i - 1, j - 1, 4 * (matches + 1) + 3);
                continue;
            }
            if (i > 0 && j > 0 && cost(i - 1, j - 1) + 1 == cost(i, j)) offer(i - 1, j - 1, 4 * matches + 3);
            if (i > 0 && cost(i - 1, j) + 1 == cost(i, j)) offer(i - 1, j, 4 * matches + 2);
            if (j > 0 && cost(i, j - 1) + 1 == cost(i, j)) offer(i, j - 1, 4 * matches + 1);
        }

    Alignment found{cost(m, n), std::vector<std::uint8_t>(whole_a.size(), 0), std::vector<std::uint8_t>(whole_b.size(), 0)};
    for (std::size_t i = 0; i < prefix; ++i) found.matched_a[i] = found.matched_b[i] = 1;
    for (std::size_t i = 1; i <= suffix; ++i) found.matched_a[whole_a.size() - i] = found.matched_b[whole_b.size() - i] = 1;
    for (std::size_t i = 0, j = 0; i < m || j < n;) {
        const int preferred = ahead(i, j) % 4;
        if (preferred == 3 && a[i] == b[j]) found.matched_a[prefix + i] = found.matched_b[prefix + j] = 1;
        i += preferred != 1;
        j += preferred != 2;
    }
    return found;
}

template Alignment align(const std::vector<std::int32_t>&, const std::vector<std::int32_t>&);
template Alignment align(const std::vector<std::int64_t>&, const std::vector<std::int64_t>&);

}  // namespace oracle
