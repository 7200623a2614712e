// Python bindings of the native core: the module megatron_ext.transport._C (typed in _C.pyi).

#include "bind.h"

#include <fcntl.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/doorbell.h"
#include "core/errors.h"
#include "core/fd_passing.h"
#include "core/segment.h"

namespace py = pybind11;

namespace megatron_ext {
namespace {

std::shared_ptr<Segment> create_segment(std::int64_t size_bytes) {
    if (size_bytes <= 0) {  // before the cast, which turns -1 into 2^64 - 1
        throw std::invalid_argument("size_bytes must be >= 1, got " + std::to_string(size_bytes));
    }
    py::gil_scoped_release no_gil;  // allocating gigabytes takes seconds
    return std::make_shared<Segment>(Segment::create(static_cast<std::size_t>(size_bytes)));
}

std::shared_ptr<Segment> attach_segment(const py::object& file) {
    const int fd = to_fd(file);
    UniqueFd own_fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!own_fd) {
        const int error_number = errno;
        throw_errno("cannot attach file descriptor " + std::to_string(fd), error_number);
    }
    return std::make_shared<Segment>(Segment::attach(std::move(own_fd)));
}

void send_segment(const Segment& segment, const py::object& socket,
                  std::optional<double> timeout_s) {
    const int socket_fd = to_fd(socket);
    py::gil_scoped_release no_gil;
    send_fd(socket_fd, segment.fd(), to_deadline(timeout_s), &check_python_signals);
}

std::shared_ptr<Segment> receive_segment(const py::object& socket,
                                         std::optional<double> timeout_s) {
    const int socket_fd = to_fd(socket);
    py::gil_scoped_release no_gil;
    return std::make_shared<Segment>(
        Segment::attach(receive_fd(socket_fd, to_deadline(timeout_s), &check_python_signals)));
}

py::buffer_info segment_buffer(Segment& segment) {
    return py::buffer_info(static_cast<std::uint8_t*>(segment.data()),
                           static_cast<py::ssize_t>(segment.size_bytes()));
}

/// A doorbell that keeps its memory alive, also while a thread waits on it without the GIL.
class SegmentDoorbell {
  public:
    SegmentDoorbell(std::shared_ptr<Segment> segment, std::int64_t offset_bytes)
        : segment_(std::move(segment)), bell_(word_at(*segment_, offset_bytes)) {}

    Doorbell& bell() { return bell_; }

  private:
    static void* word_at(const Segment& segment, std::int64_t offset_bytes) {
        const auto offset = static_cast<std::uint64_t>(offset_bytes);
        if (offset_bytes < 0 || offset % sizeof(std::uint32_t) != 0 ||
            segment.size_bytes() < sizeof(std::uint32_t) ||
            offset > segment.size_bytes() - sizeof(std::uint32_t)) {
            throw std::invalid_argument(
                "offset_bytes must be a multiple of 4 that leaves 4 bytes in a segment of " +
                std::to_string(segment.size_bytes()) + " bytes, got " +
                std::to_string(offset_bytes));
        }
        return static_cast<char*>(segment.data()) + offset;
    }

    std::shared_ptr<Segment> segment_;
    Doorbell bell_;
};

bool wait_for_ring(SegmentDoorbell& self, std::uint32_t seen, std::optional<double> timeout_s) {
    py::gil_scoped_release no_gil;
    return self.bell().wait(seen, to_deadline(timeout_s), &check_python_signals);
}

/// Translates TransportError of C++ to that of megatron_ext.errors.
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
    module.doc() =
        "Native core of megatron_ext: shared memory, futex doorbells and links between "
        "processes.";
    register_errors();

    py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment", py::buffer_protocol(),
                                                  py::is_final(),
                                                  "Anonymous shared memory (memfd); freed by the "
                                                  "kernel with its last user. A buffer of bytes.")
        .def_static("create", &create_segment, py::arg("size_bytes"),
                    "Allocate a new segment of zero bytes.")
        .def_static("attach", &attach_segment, py::arg("file"),
                    "Map the segment behind a descriptor (int or fileno()); the caller keeps it.")
        .def_static("receive", &receive_segment, py::arg("socket"),
                    py::arg("timeout_s") = py::none(),
                    "Receive a segment that another process sends over a unix socket.")
        .def("send", &send_segment, py::arg("socket"), py::arg("timeout_s") = py::none(),
             "Send this segment to the process at the other end of a unix socket.")
        .def("fileno", &Segment::fd, "The descriptor, owned by the segment.")
        .def("__len__", &Segment::size_bytes)
        .def_property_readonly("size_bytes", &Segment::size_bytes, "Number of bytes of the buffer.")
        .def("__repr__",
             [](const Segment& self) {
                 return "<Segment of " + std::to_string(self.size_bytes()) + " bytes, fd " +
                        std::to_string(self.fd()) + ">";
             })
        .def_buffer(&segment_buffer);

    py::class_<SegmentDoorbell>(module, "Doorbell", py::is_final(),
                                "A futex on a 32-bit word of a segment: wakes waiting threads of "
                                "every process that shares it.")
        .def(py::init<std::shared_ptr<Segment>, std::int64_t>(), py::arg("segment"),
             py::arg("offset_bytes") = 0)
        .def(
            "ring", [](SegmentDoorbell& self) { self.bell().ring(); },
            "Count one ring and wake all waiters.")
        .def_property_readonly(
            "sequence", [](SegmentDoorbell& self) { return self.bell().sequence(); },
            "Number of rings so far, modulo 2**32.")
        .def("wait", &wait_for_ring, py::arg("seen"), py::arg("timeout_s") = py::none(),
             "Sleep until the sequence differs from `seen` (True) or the time is over (False).");

    bind_endpoint(module);
    bind_rdma(module);
}
