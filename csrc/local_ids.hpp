// Small numbers for the ids of one sequence: 1, 2, … in the order of their first appearance, 0 for every other id.
//
// Ids of a vocabulary go through a table that their value indexes, which takes no comparison; any others, negative or
// huge, through a hash table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "buffer.hpp"

namespace ibpo {

class LocalIds {
public:
    static constexpr std::size_t kIndexed = 1 << 18;  // ids below this index a table: all of today's vocabularies

    template <typename Id>
    static bool indexes(const Id* ids, std::size_t size) {
        std::uint64_t all_bits = 0;
        for (std::size_t i = 0; i < size; ++i) all_bits |= static_cast<std::uint64_t>(ids[i]);
        return all_bits < kIndexed;
    }

    // locals[i] = the number of ids[i]; their count is returned.
    template <typename Id>
    std::uint32_t number(const Id* ids, std::size_t size, std::uint32_t* locals) {
        indexed_ = indexes(ids, size);
        return indexed_ ? number_indexed(ids, size, locals) : number_hashed(ids, size, locals);
    }

    template <typename Id>
    void look_up(const Id* ids, std::size_t size, std::uint32_t* locals) {
        if (indexed_) {
            for (std::size_t i = 0; i < size; ++i) {
                const auto id = static_cast<std::uint64_t>(ids[i]);
                locals[i] = id < kIndexed ? table_[id] : 0;
            }
        } else {
            for (std::size_t i = 0; i < size; ++i) locals[i] = slot(static_cast<std::uint64_t>(ids[i])).local;
        }
    }

    // Forget the numbers; ids and size as they were given to number().
    template <typename Id>
    void clear(const Id* ids, std::size_t size) {
        if (indexed_)
            for (std::size_t i = 0; i < size; ++i) table_[static_cast<std::uint64_t>(ids[i])] = 0;
    }

private:
    struct Slot {
        std::uint64_t id;
        std::uint32_t local;  // 0: the slot is free
    };
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    template <typename Id>
    std::uint32_t number_indexed(const Id* ids, std::size_t size, std::uint32_t* locals) {
        if (!table_) {  // calloc: pages that no id touches cost nothing
            table_.reset(static_cast<std::uint32_t*>(std::calloc(kIndexed, sizeof(std::uint32_t))));
            if (!table_) throw std::bad_alloc();
        }
        std::uint32_t count = 0;
        for (std::size_t i = 0; i < size; ++i) {  // without a branch: which ids are new is anyone's guess
            std::uint32_t& entry = table_[static_cast<std::uint64_t>(ids[i])];
            const std::uint32_t known = entry, is_new = known == 0;
            count += is_new;
            const std::uint32_t local = known | (count & (0 - is_new));
            entry = local;
            locals[i] = local;
        }
        return count;
    }

    template <typename Id>
    std::uint32_t number_hashed(const Id* ids, std::size_t size, std::uint32_t* locals) {
        int bits = 4;
        while ((std::size_t{1} << bits) < 2 * size) ++bits;
        slots_.zeros(std::size_t{1} << bits);
        shift_ = 64 - bits;
        std::uint32_t count = 0;
        for (std::size_t i = 0; i < size; ++i) {
            Slot& found = slot(static_cast<std::uint64_t>(ids[i]));
            if (found.local == 0) found = Slot{static_cast<std::uint64_t>(ids[i]), ++count};
            locals[i] = found.local;
        }
        return count;
    }

    Slot& slot(std::uint64_t id) {
        const std::size_t mask = ~std::uint64_t{0} >> shift_;
        std::size_t at = (id * 0x9E3779B97F4A7C15ull) >> shift_;
        while (slots_[at].local != 0 && slots_[at].id != id) at = (at + 1) & mask;
        return slots_[at];
    }

    std::unique_ptr<std::uint32_t[], Free> table_;
    Buffer<Slot> slots_;
    int shift_ = 0;
    bool indexed_ = false;
};

}  // namespace ibpo
