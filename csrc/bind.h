#pragma once

// What the files of the Python module share.

#include <pybind11/pybind11.h>

#include <optional>

#include "core/wait.h"

namespace megatron_ext {

/// Runs on a thread that waits without the GIL: lets Ctrl-C and other Python signal handlers
/// happen.
inline void check_python_signals() {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw pybind11::error_already_set();
    }
}

inline Deadline to_deadline(std::optional<double> timeout_s) {
    return timeout_s ? deadline_after(*timeout_s) : kNever;
}

/// The descriptor of an int or of an object with fileno(), as everywhere in Python.
inline int to_fd(const pybind11::object& file) {
    const int fd = PyObject_AsFileDescriptor(file.ptr());
    if (fd < 0) {
        throw pybind11::error_already_set();
    }
    return fd;
}

/// Adds the links between processes to the module.
void bind_endpoint(pybind11::module_& module);

/// Adds links over RDMA, and what can be known without a peer. After bind_endpoint().
void bind_rdma(pybind11::module_& module);

}  // namespace megatron_ext
