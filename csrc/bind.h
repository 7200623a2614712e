#pragma once

// Declarations shared by the files of the Python module.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/arena.h"
#include "core/wait.h"

namespace megatron_ext {

/// For a thread that waits without the GIL: runs pending Python signal handlers, such as that of
/// Ctrl-C, and throws their exception.
inline void check_python_signals() {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw pybind11::error_already_set();
    }
}

inline Deadline to_deadline(std::optional<double> timeout_s) {
    return timeout_s ? deadline_after(*timeout_s) : kNever;
}

/// The descriptor of an int or of an object with fileno(), as elsewhere in Python.
inline int to_fd(const pybind11::object& file) {
    const int fd = PyObject_AsFileDescriptor(file.ptr());
    if (fd < 0) {
        throw pybind11::error_already_set();
    }
    return fd;
}

/// An address and a number of bytes, for Python.
using Range = std::pair<std::uintptr_t, std::size_t>;

inline Range slots_of(const Arena& arena) {
    return {reinterpret_cast<std::uintptr_t>(arena.bytes(0)), arena.num_slots_bytes()};
}

/// Adds the links between processes to the module.
void bind_endpoint(pybind11::module_& module);

/// Adds links over RDMA, the list of devices and the probe. Call it after bind_endpoint().
void bind_rdma(pybind11::module_& module);

}  // namespace megatron_ext
