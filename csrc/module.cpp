// megatron_ibpo._edit_distance: numpy arrays in, one array out. megatron_ibpo/edit_distance.py is its only caller and
// checks what it passes; what is checked here keeps a wrong call from reading outside the arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "batch.hpp"
#include "levenshtein.hpp"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Offsets = Array<std::int64_t>;

std::size_t count_sequences(const Offsets& offsets, py::ssize_t num_values) {
    const py::ssize_t size = offsets.size();
    if (size < 1 || offsets.data()[0] != 0 || offsets.data()[size - 1] != num_values)
        throw std::invalid_argument("offsets must run from 0 to the number of values");
    for (py::ssize_t i = 1; i < size; ++i)
        if (offsets.data()[i] < offsets.data()[i - 1]) throw std::invalid_argument("offsets must not fall");
    return static_cast<std::size_t>(size - 1);
}

template <typename Id>
Array<std::int64_t> batch_distance(const Array<Id>& a, const Offsets& a_offsets, const Array<Id>& b,
                                   const Offsets& b_offsets, std::size_t num_threads) {
    const std::size_t count = count_sequences(a_offsets, a.size());
    if (count != count_sequences(b_offsets, b.size()))
        throw std::invalid_argument("a and b must hold the same number of sequences");
    Array<std::int64_t> result(static_cast<py::ssize_t>(count));
    const Id *ids_a = a.data(), *ids_b = b.data();
    const std::int64_t *from_a = a_offsets.data(), *from_b = b_offsets.data();
    std::int64_t* out = result.mutable_data();
    {
        const py::gil_scoped_release release;
        ibpo::for_each_index<ibpo::LevenshteinScratch>(
            count, num_threads, [=](std::size_t i, ibpo::LevenshteinScratch& scratch) {
                out[i] = static_cast<std::int64_t>(ibpo::levenshtein(
                    ids_a + from_a[i], static_cast<std::size_t>(from_a[i + 1] - from_a[i]), ids_b + from_b[i],
                    static_cast<std::size_t>(from_b[i + 1] - from_b[i]), scratch));
            });
    }
    return result;
}

template <typename Id>
std::size_t distance(const Array<Id>& a, const Array<Id>& b) {
    const py::gil_scoped_release release;
    ibpo::LevenshteinScratch scratch;
    return ibpo::levenshtein(a.data(), static_cast<std::size_t>(a.size()), b.data(),
                             static_cast<std::size_t>(b.size()), scratch);
}

// The numbers of a list of plain ints, several times faster than numpy reads them; None if anything else is in it.
py::object read_ints(const py::list& list) {
    const py::ssize_t size = PyList_GET_SIZE(list.ptr());
    Array<std::int64_t> result(size);
    std::int64_t* out = result.mutable_data();
    for (py::ssize_t i = 0; i < size; ++i) {
        PyObject* item = PyList_GET_ITEM(list.ptr(), i);
        if (!PyLong_CheckExact(item)) return py::none();
        int overflow = 0;
        out[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow != 0) return py::none();
    }
    return std::move(result);
}

// noconvert: pybind11 would otherwise turn NaN, 1.7 or uint64 into wrong ids without a word
template <typename Id>
void define_distances(py::module_& module) {
    module.def("distance", &distance<Id>, py::arg("a").noconvert(), py::arg("b").noconvert());
    module.def("batch_distance", &batch_distance<Id>, py::arg("a").noconvert(), py::arg("a_offsets").noconvert(),
               py::arg("b").noconvert(), py::arg("b_offsets").noconvert(), py::arg("num_threads"));
}

}  // namespace

PYBIND11_MODULE(_edit_distance, module) {
    define_distances<std::int32_t>(module);
    define_distances<std::int64_t>(module);
    module.def("read_ints", &read_ints);
}
