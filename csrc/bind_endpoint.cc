// Python bindings of the links between processes.

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "core/endpoint.h"
#include "core/errors.h"
#include "core/message.h"
#include "shm/shm_link.h"
#include "tcp/tcp_link.h"

namespace py = pybind11;

namespace megatron_ext {
namespace {

/// Keeps a Python object alive; threads may release it without holding the GIL.
std::shared_ptr<void> share(py::object object) {
    return {object.release().ptr(), [](void* pointer) {
                py::gil_scoped_acquire gil;
                Py_DECREF(static_cast<PyObject*>(pointer));
            }};
}

UniqueFd duplicate(int peer, const py::object& socket) {
    UniqueFd own_fd(::fcntl(to_fd(socket), F_DUPFD_CLOEXEC, 0));
    if (!own_fd) {
        const int error_number = errno;
        throw_errno("cannot take over the socket to rank " + std::to_string(peer), error_number);
    }
    return own_fd;
}

std::shared_ptr<ShmLink> offer_shm(const Endpoint& endpoint, int peer, const py::object& socket) {
    const LinkContext context = endpoint.context(peer);
    UniqueFd own_fd = duplicate(peer, socket);
    py::gil_scoped_release no_gil;  // allocating an arena takes a while
    return std::make_shared<ShmLink>(context, std::move(own_fd));
}

std::shared_ptr<TcpLink> make_tcp(const Endpoint& endpoint, int peer, const py::object& socket,
                                  double silence_s) {
    return std::make_shared<TcpLink>(endpoint.context(peer), duplicate(peer, socket), silence_s);
}

void accept_shm(ShmLink& self, std::optional<double> timeout_s) {
    py::gil_scoped_release no_gil;
    self.accept(to_deadline(timeout_s), &check_python_signals);
}

/// The size of a message with this dtype and shape; std::nullopt if the shape is invalid.
std::optional<std::uint64_t> num_bytes_of(const MessageInfo& info) {
    std::uint64_t num_bytes = info.dtype_bits / 8;
    for (std::size_t i = 0; i < info.num_dims; ++i) {
        if (info.shape[i] < 0 ||
            __builtin_mul_overflow(num_bytes, static_cast<std::uint64_t>(info.shape[i]),
                                   &num_bytes)) {
            return std::nullopt;
        }
    }
    return num_bytes;
}

/// Sets the dimensions and the size of a message. Throws std::invalid_argument.
void set_shape(MessageInfo& info, const py::tuple& shape) {
    if (shape.size() > kMaxDims) {
        throw std::invalid_argument("a message has at most " + std::to_string(kMaxDims) +
                                    " dimensions, got " + std::to_string(shape.size()));
    }
    info.num_dims = static_cast<std::uint8_t>(shape.size());
    for (std::size_t i = 0; i < info.num_dims; ++i) {
        const long long length =
            PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), static_cast<py::ssize_t>(i)));
        if (length == -1 && PyErr_Occurred() != nullptr) {
            throw py::error_already_set();
        }
        if (length < 0) {
            throw std::invalid_argument("a dimension of a message cannot be " +
                                        std::to_string(length));
        }
        info.shape[i] = length;
    }
    const std::optional<std::uint64_t> num_bytes = num_bytes_of(info);
    if (!num_bytes) {
        throw std::invalid_argument("a message cannot have 2^64 bytes or more");
    }
    info.num_bytes = *num_bytes;
}

MessageInfo make_info(std::uint64_t tag, unsigned dtype, const py::tuple& shape) {
    MessageInfo info;
    info.tag = tag;
    info.dtype_code = static_cast<std::uint8_t>(dtype >> 8);
    info.dtype_bits = static_cast<std::uint8_t>(dtype & 0xFF);
    set_shape(info, shape);
    return info;
}

void send(Endpoint& self, int peer, std::uint64_t tag, unsigned dtype, const py::tuple& shape,
          std::uintptr_t address, py::object owner) {
    const MessageInfo info = make_info(tag, dtype, shape);
    // This reference outlives send(), so that an owner that is no longer needed is released with
    // the GIL held.
    const std::shared_ptr<void> shared = share(std::move(owner));
    py::gil_scoped_release no_gil;
    self.send(peer, info, reinterpret_cast<const void*>(address), shared);
}

std::optional<Message> reserve(Endpoint& self, int peer, std::uint64_t tag, unsigned dtype,
                               const py::tuple& shape) {
    const MessageInfo info = make_info(tag, dtype, shape);
    py::gil_scoped_release no_gil;
    return self.reserve(peer, info);
}

Range add_buffers(Endpoint& self, std::size_t num_slots) {
    const auto [first, num_bytes] = self.add_buffers(num_slots);
    return {reinterpret_cast<std::uintptr_t>(first), num_bytes};
}

std::vector<std::pair<int, std::uint64_t>> arrivals(Endpoint& self,
                                                    std::optional<double> timeout_s) {
    py::gil_scoped_release no_gil;
    std::vector<std::pair<int, std::uint64_t>> result;
    for (const Arrival& arrival : self.arrivals(to_deadline(timeout_s), &check_python_signals)) {
        result.emplace_back(arrival.source, arrival.tag);
    }
    return result;
}

bool flush(Endpoint& self, std::optional<double> timeout_s) {
    py::gil_scoped_release no_gil;
    return self.flush(to_deadline(timeout_s), &check_python_signals);
}

/// DLPack's type code times 256, plus the number of bits of an element.
unsigned dtype_of(const Message& message) {
    return static_cast<unsigned>(message.info.dtype_code << 8 | message.info.dtype_bits);
}

void set_spin(Endpoint& self, double seconds) {
    if (!(seconds >= 0.0 && seconds <= 1.0)) {  // written so that NaN fails as well
        throw std::invalid_argument("a spin lasts 0 to 1 seconds, got " + std::to_string(seconds));
    }
    self.set_spin(std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(seconds)));
}

py::tuple shape_of(const Message& message) {
    py::tuple shape(message.info.num_dims);
    for (std::size_t i = 0; i < message.info.num_dims; ++i) {
        shape[i] = message.info.shape[i];
    }
    return shape;
}

/// The exchange structures of DLPack (ABI version 0, which is frozen): a tensor and its deleter.
struct DlTensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t num_dims;
    std::uint8_t dtype_code;
    std::uint8_t dtype_bits;
    std::uint16_t dtype_lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct DlManagedTensor {
    DlTensor tensor;
    void* context;
    void (*deleter)(DlManagedTensor*);
};

/// A DLPack tensor that uses the bytes of a message and owns the message.
struct MessageTensor {
    explicit MessageTensor(Message m) : message(std::move(m)) {
        const MessageInfo& info = message.info;
        constexpr std::int32_t kCpu = 1;
        managed.tensor = {message.bytes.get(),
                          kCpu,
                          0,
                          info.num_dims,
                          info.dtype_code,
                          info.dtype_bits,
                          1,
                          message.info.shape.data(),
                          nullptr,
                          0};
        managed.context = this;
        managed.deleter = [](DlManagedTensor* self) {  // called by any thread, without the GIL
            delete static_cast<MessageTensor*>(self->context);
        };
    }
    Message message;
    DlManagedTensor managed{};
};

/// Returns the message as a DLPack capsule, which becomes one tensor.
py::capsule to_dlpack(Message message) {
    auto tensor = std::make_unique<MessageTensor>(std::move(message));
    py::capsule capsule(&tensor->managed, "dltensor", [](PyObject* object) {
        if (PyCapsule_IsValid(object, "dltensor") == 0) {
            return;  // consumed, and therefore renamed
        }
        auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(object, "dltensor"));
        managed->deleter(managed);
    });
    tensor.release();
    return capsule;
}

/// Waits for a message and takes it. Returns a capsule if the message has bytes and the dtype is
/// `capsule_dtype`, otherwise a Message; None after the time-out.
py::object take(Endpoint& self, int source, std::uint64_t tag, std::optional<double> timeout_s,
                unsigned capsule_dtype) {
    std::optional<Message> message;
    {
        py::gil_scoped_release no_gil;
        message = self.take(source, tag, to_deadline(timeout_s), &check_python_signals);
    }
    if (!message) {
        return py::none();
    }
    if (num_bytes_of(message->info) != message->info.num_bytes) {  // tensors rely on the shape
        throw TransportError("the messages of rank " + std::to_string(source) +
                             " are damaged: the shape of one does not fit its " +
                             std::to_string(message->info.num_bytes) + " bytes");
    }
    if (message->bytes && dtype_of(*message) == capsule_dtype) {
        return to_dlpack(std::move(*message));
    }
    return py::cast(std::move(*message));
}

py::buffer_info buffer_of(Message& message) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(message.bytes.get()),
                           static_cast<py::ssize_t>(message.info.num_bytes));
}

const char* state_name(const PeerReport& report) {
    switch (report.state) {
        case PeerState::kOpen:
            return "open";
        case PeerState::kClosed:
            return "closed";
        case PeerState::kDied:
            return "died";
        case PeerState::kAborted:
            break;
    }
    return "aborted";
}

/// The reason as a Python string. A peer's reason may be cut off inside a character, or may not be
/// UTF-8.
py::str reason_of(const PeerReport& report) {
    PyObject* const text = PyUnicode_DecodeUTF8(
        report.reason.data(), static_cast<py::ssize_t>(report.reason.size()), "replace");
    if (text == nullptr) {
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::str>(text);
}

/// A thread must not wait for the endpoint's lock while it holds the GIL. This applies to the
/// destructor too, which joins the service thread and closes the links.
struct WithoutGil {
    void operator()(Endpoint* endpoint) const {
        const py::gil_scoped_release no_gil;
        delete endpoint;
    }
};
using EndpointHolder = std::unique_ptr<Endpoint, WithoutGil>;

}  // namespace

void bind_endpoint(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> no_gil;
    py::class_<Message>(module, "Message", py::buffer_protocol(), py::is_final(),
                        "A message that has arrived: a writable buffer of its bytes, in shared "
                        "memory or in memory that is reused afterwards.")
        .def_property_readonly("dtype", &dtype_of, "DLPack's type code times 256, plus bits.")
        .def_property_readonly("shape", &shape_of, "The shape that the sender passed.")
        .def("dlpack", &to_dlpack, "Return a DLPack capsule that owns the bytes.")
        .def("__len__", [](const Message& self) { return self.info.num_bytes; })
        .def_buffer(&buffer_of);

    py::class_<PeerReport>(module, "PeerReport", py::is_final(), "State of a peer.")
        .def_readonly("rank", &PeerReport::rank, "Rank of the peer.")
        .def_property_readonly("state", &state_name, "open, closed, died or aborted.")
        .def_readonly("wire", &PeerReport::wire, "shm, tcp or rdma.")
        .def_property_readonly("reason", &reason_of,
                               "Why it gave up, or how its death was detected.")
        .def_readonly("num_arrived", &PeerReport::num_arrived,
                      "Messages from the peer that were not taken.")
        .def_property_readonly(
            "num_held", [](const PeerReport& self) { return self.counts.num_held; },
            "Slots that its messages occupy, taken or not.")
        .def_property_readonly(
            "num_queued", [](const PeerReport& self) { return self.counts.num_queued; },
            "Messages to the peer that are waiting for room.");

    py::class_<Link, std::shared_ptr<Link>>(module, "Link", "The connection to one peer.");

    py::class_<ShmLink, Link, std::shared_ptr<ShmLink>>(
        module, "ShmLink", py::is_final(), "The connection to a peer through shared memory.")
        .def(py::init(&offer_shm), py::arg("endpoint"), py::arg("peer"), py::arg("socket"),
             "Pass the arena and the bell to a peer, over a connected SOCK_SEQPACKET socket.")
        .def_property_readonly(
            "slots", [](const ShmLink& self) { return slots_of(self.arena()); },
            "Address and bytes of the memory for the peer's messages.")
        .def_property_readonly(
            "peer_slots", [](const ShmLink& self) { return slots_of(self.peer_arena()); },
            "Address and bytes of the memory for messages to the peer.")
        .def("accept", &accept_shm, py::arg("timeout_s") = py::none(),
             "Wait until the peer has created its link.");

    py::class_<TcpLink, Link, std::shared_ptr<TcpLink>>(module, "TcpLink", py::is_final(),
                                                        "The connection to a peer over TCP.")
        .def(py::init(&make_tcp), py::arg("endpoint"), py::arg("peer"), py::arg("socket"),
             py::arg("silence_s") = 15.0, "Use a connected socket.");

    py::class_<EndpointCounts>(module, "EndpointCounts", py::is_final(), "Totals so far.")
        .def_readonly("num_messages", &EndpointCounts::num_messages, "Messages sent.")
        .def_readonly("num_bytes", &EndpointCounts::num_bytes, "Bytes in them.")
        .def_readonly("waited_s", &EndpointCounts::waited_s, "Time spent in waits.")
        .def_readonly("last_wait_s", &EndpointCounts::last_wait_s, "Time spent in the last wait.");

    py::class_<Endpoint, EndpointHolder>(module, "Endpoint", py::is_final(),
                                         "A process in a job and its links to other processes.")
        .def(py::init([](int rank, std::uint32_t slots, std::uint64_t slot_bytes, bool checksums) {
                 return EndpointHolder(
                     new Endpoint(rank, ArenaSize{slots, slot_bytes}, checksums));
             }),
             py::arg("rank"), py::arg("slots"), py::arg("slot_bytes"), py::arg("checksums") = false)
        .def("add", &Endpoint::add, py::arg("peer"), py::arg("link"), no_gil,
             "Use a connected link from now on.")
        .def("send", &send, py::arg("peer"), py::arg("tag"), py::arg("dtype"), py::arg("shape"),
             py::arg("address"), py::arg("owner"),
             "Send bytes; `owner` is kept alive until they are copied.")
        .def("reserve", &reserve, py::arg("peer"), py::arg("tag"), py::arg("dtype"),
             py::arg("shape"), "Return a message to fill and publish, or None: use send().")
        .def("publish", &Endpoint::publish, py::arg("peer"), py::arg("message"), no_gil,
             "Send a message from reserve(), once its bytes are complete.")
        .def("add_buffers", &add_buffers, py::arg("num_slots"), no_gil,
             "Allocate memory at a fixed address for messages that do not stay in place.")
        .def("take", &take, py::arg("source"), py::arg("tag"), py::arg("timeout_s") = py::none(),
             py::arg("capsule_dtype") = 0,
             "Wait for a message and take it; None if it does not arrive.")
        .def("arrivals", &arrivals, py::arg("timeout_s") = py::none(),
             "Wait for messages that no earlier call returned; (source, tag) of each.")
        .def("flush", &flush, py::arg("timeout_s") = py::none(),
             "Wait until all sent messages can be taken; return False after the time-out.")
        .def("abort", &Endpoint::abort, py::arg("reason"), no_gil,
             "Tell all peers to stop waiting.")
        .def("close", &Endpoint::close, no_gil, "Notify the peers and release everything.")
        .def("peers", &Endpoint::peers, no_gil, "Return the states of the peers.")
        .def("set_spin", &set_spin, py::arg("seconds"), "Spin for this long before a sleep.")
        .def("counts", &Endpoint::counts, no_gil, "Return the totals so far.");
}

}  // namespace megatron_ext
