// megatron_ibpo._edit_distance: numpy arrays in, arrays out. megatron_ibpo/edit_distance.py is its only caller and
// checks what it passes; what is checked here keeps a wrong call from reading outside the arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "batch.hpp"
#include "dispatch.hpp"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Offsets = Array<std::int64_t>;

// Offsets in memory of our own, checked there: other threads may write to the caller's while the GIL is released, and
// numpy may while it is not.
std::vector<std::int64_t> own_offsets(const Offsets& offsets, py::ssize_t num_values) {
    std::vector<std::int64_t> own(offsets.data(), offsets.data() + offsets.size());
    if (own.empty() || own.front() != 0 || own.back() != num_values)
        throw std::invalid_argument("offsets must run from 0 to the number of values");
    for (std::size_t i = 1; i < own.size(); ++i) {
        const std::int64_t length = own[i] - own[i - 1];
        if (length < 0) throw std::invalid_argument("offsets must not fall");
        if (length >= std::int64_t{1} << 30) throw std::invalid_argument("a sequence has 2^30 ids or more");
    }
    return own;
}

// The arguments of a call, which outlive it.
template <typename Id>
struct OwnPairs {
    OwnPairs(const Array<Id>& a, const Offsets& a_offsets, const Array<Id>& b, const Offsets& b_offsets)
        : a_offsets(own_offsets(a_offsets, a.size())), b_offsets(own_offsets(b_offsets, b.size())),
          pairs{a.data(), this->a_offsets.data(), b.data(), this->b_offsets.data(), this->a_offsets.size() - 1} {
        if (this->a_offsets.size() != this->b_offsets.size())
            throw std::invalid_argument("a and b must hold the same number of sequences");
    }

    const std::vector<std::int64_t> a_offsets, b_offsets;
    const ibpo::Pairs<Id> pairs;
};

ibpo::Engine engine_named(const std::string& name) {
    if (name.empty()) return ibpo::Engine::automatic;
    if (name == "packed") return ibpo::Engine::packed;
    if (name == "stripes") return ibpo::Engine::stripes;
    if (name == "wavefront") return ibpo::Engine::wavefront;
    throw std::invalid_argument("engine=" + name + ": there are packed, stripes and wavefront");
}

template <typename Id>
Array<std::int64_t> batch_distance(const Array<Id>& a, const Offsets& a_offsets, const Array<Id>& b,
                                   const Offsets& b_offsets, const std::optional<Array<std::int64_t>>& cutoffs,
                                   std::size_t num_threads, const std::string& isa, const std::string& engine) {
    const OwnPairs<Id> own(a, a_offsets, b, b_offsets);
    const ibpo::Pairs<Id>& pairs = own.pairs;
    if (cutoffs && static_cast<std::size_t>(cutoffs->size()) != pairs.count)
        throw std::invalid_argument("there must be a cutoff for each pair");
    const ibpo::Kernels& kernels = ibpo::choose_kernels(isa);
    const ibpo::Engine chosen = engine_named(engine);
    Array<std::int64_t> result(static_cast<py::ssize_t>(pairs.count));
    const std::int64_t* limits = cutoffs ? cutoffs->data() : nullptr;
    std::int64_t* out = result.mutable_data();
    {
        const py::gil_scoped_release release;
        ibpo::BatchDistance<Id>(kernels, chosen, pairs, limits, out).run(num_threads);
    }
    return result;
}

template <typename Id>
py::tuple batch_align(const Array<Id>& a, const Offsets& a_offsets, const Array<Id>& b, const Offsets& b_offsets,
                      std::size_t num_threads, const std::string& isa, const std::string& engine) {
    const OwnPairs<Id> own(a, a_offsets, b, b_offsets);
    const ibpo::Pairs<Id>& pairs = own.pairs;
    const ibpo::Kernels& kernels = ibpo::choose_kernels(isa);
    const ibpo::Engine chosen = engine_named(engine);
    Array<std::uint8_t> matched_a(a.size()), matched_b(b.size());
    Array<std::int64_t> distances(static_cast<py::ssize_t>(pairs.count));
    std::uint8_t *flags_a = matched_a.mutable_data(), *flags_b = matched_b.mutable_data();
    std::int64_t* out = distances.mutable_data();
    {
        const py::gil_scoped_release release;
        ibpo::BatchAlign<Id>(kernels, chosen, pairs, flags_a, flags_b, out).run(num_threads);
    }
    return py::make_tuple(matched_a, matched_b, distances);
}

// The numbers of a list or tuple of plain ints, several times faster than numpy reads them; None if anything else
// is in it.
template <typename Id>
py::object read_ints_as(PyObject* fast) {
    const py::ssize_t size = PySequence_Fast_GET_SIZE(fast);
    Array<Id> result(size);
    Id* out = result.mutable_data();
    for (py::ssize_t i = 0; i < size; ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(fast, i);
        if (!PyLong_CheckExact(item)) return py::none();
        int overflow = 0;
        const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow != 0 || value != static_cast<Id>(value)) return py::none();
        out[i] = static_cast<Id>(value);
    }
    return std::move(result);
}

py::object read_ints(const py::object& ints) {
    const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(ints.ptr(), "neither list nor tuple"));
    if (!fast) throw py::error_already_set();
    py::object narrow = read_ints_as<std::int32_t>(fast.ptr());  // half the memory to go through
    return narrow.is_none() ? read_ints_as<std::int64_t>(fast.ptr()) : narrow;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const ibpo::Kernels* kernels : ibpo::supported_kernels()) names.emplace_back(kernels->isa);
    return names;
}

// noconvert: pybind11 would otherwise turn NaN, 1.7 or uint64 into wrong ids without a word
template <typename Id>
void define_for(py::module_& module) {
    module.def("batch_distance", &batch_distance<Id>, py::arg("a").noconvert(), py::arg("a_offsets").noconvert(),
               py::arg("b").noconvert(), py::arg("b_offsets").noconvert(), py::arg("cutoffs").noconvert(),
               py::arg("num_threads"), py::arg("isa") = "", py::arg("engine") = "");
    module.def("batch_align", &batch_align<Id>, py::arg("a").noconvert(), py::arg("a_offsets").noconvert(),
               py::arg("b").noconvert(), py::arg("b_offsets").noconvert(), py::arg("num_threads"), py::arg("isa") = "",
               py::arg("engine") = "");
}

}  // namespace

PYBIND11_MODULE(_edit_distance, module) {
    define_for<std::int32_t>(module);
    define_for<std::int64_t>(module);
    module.def("read_ints", &read_ints);
    module.def("supported_isas", &supported_isas);
}
