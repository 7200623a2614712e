// Python bindings of the native core: the module megatron_ext.transport._C (typed in _C.pyi).

#include "bind.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <exception>

#include "core/errors.h"

namespace py = pybind11;

namespace megatron_ext {
namespace {

/// Translates the C++ TransportError into megatron_ext.errors.TransportError.
void register_errors() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> python_error;
    python_error.call_once_and_store_result([] {
        return py::object(py::module_::import("megatron_ext.errors").attr("TransportError"));
    });
    py::register_local_exception_translator([](std::exception_ptr raised) {
        try {
            if (raised) {
                std::rethrow_exception(raised);
            }
        } catch (const TransportError& error) {
            py::set_error(python_error.get_stored(), error.what());
        }
    });
}

}  // namespace
}  // namespace megatron_ext

PYBIND11_MODULE(_C, module) {
    using namespace megatron_ext;  // NOLINT: the module exposes this namespace
    module.doc() = "Native core of megatron_ext: links between processes, tensor fingerprints.";
    register_errors();

    bind_endpoint(module);
    bind_fingerprint(module);
    bind_rdma(module);
}
