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

/// Runs pending Python signal handlers, such as the one for Ctrl-C, and throws their exception. For
/// threads that wait without the GIL.
inline void check_python_signals() {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw pybind11::error_already_set();
    }
}

inline Deadline to_deadline(std::optional<double> timeout_s) {
    return timeout_s ? deadline_after(*timeout_s) : kNever;
}

/// The descriptor of an int or of an object with fileno(), as Python's standard library accepts it.
inline int to_fd(const pybind11::object& file) {
    const int fd = PyObject_AsFileDescriptor(file.ptr());
    if (fd < 0) {
        throw pybind11::error_already_set();
    }
    return fd;
}

/// An address and a number of bytes, as passed to Python.
using Range = std::pair<std::uintptr_t, std::size_t>;

inline Range slots_of(const Arena& arena) {
    return {reinterpret_cast<std::uintptr_t>(arena.bytes(0)), arena.num_slots_bytes()};
}

/// Adds the endpoint and the links over shared memory and TCP to the module.
void bind_endpoint(pybind11::module_& module);

/// Adds tensor fingerprints to the module.
void bind_fingerprint(pybind11::module_& module);

/// Adds the RDMA link, the list of devices and the probe. Call it after bind_endpoint().
void bind_rdma(pybind11::module_& module);

}  // namespace megatron_ext
