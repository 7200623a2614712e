// Python binding for tensor fingerprints.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "core/fingerprint.h"

namespace py = pybind11;

namespace megatron_ext {
namespace {

/// Addresses of the factors and of the weights of rows or columns.
using Addresses = std::pair<std::uintptr_t, std::uintptr_t>;

FingerprintConstants to_constants(std::size_t count, const Addresses& addresses) {
    return {count, reinterpret_cast<const std::int64_t*>(addresses.first),
            reinterpret_cast<const float*>(addresses.second)};
}

std::pair<std::int64_t, std::vector<double>> fingerprint_of(
    std::uintptr_t values, std::pair<std::size_t, std::size_t> shape, const Addresses& rows,
    const Addresses& columns) {
    if (shape.second % kFingerprintLanes != 0) {
        throw std::invalid_argument("a fingerprint needs a multiple of " +
                                    std::to_string(kFingerprintLanes) + " columns, got " +
                                    std::to_string(shape.second));
    }
    const Fingerprint result =
        fingerprint(reinterpret_cast<const float*>(values), to_constants(shape.first, rows),
                    to_constants(shape.second, columns));
    std::vector<double> sizes{result.norm};
    sizes.insert(sizes.end(), result.projections.begin(), result.projections.end());
    return {result.bits, std::move(sizes)};
}

}  // namespace

void bind_fingerprint(py::module_& module) {
    module.def("fingerprint", &fingerprint_of, py::call_guard<py::gil_scoped_release>(),
               py::arg("values"), py::arg("shape"), py::arg("rows"), py::arg("columns"),
               "The fingerprint of a matrix of floats: its bits; its norm and its projections.");
}

}  // namespace megatron_ext
