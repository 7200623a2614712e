// Python bindings of the RDMA link, the list of devices and the probe.

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bind.h"
#include "core/endpoint.h"
#include "core/errors.h"
#include "rdma/choice.h"
#include "rdma/devices.h"
#include "rdma/probe.h"
#include "rdma/rdma_link.h"
#include "rdma/settings.h"

namespace py = pybind11;

namespace megatron_ext {
namespace {

std::shared_ptr<RdmaLink> make_rdma(const Endpoint& endpoint, int peer, const py::object& socket,
                                    const std::string& address, unsigned rail, double silence_s,
                                    const std::string& sysfs) {
    const LinkContext context = endpoint.context(peer);
    UniqueFd own_fd(::fcntl(to_fd(socket), F_DUPFD_CLOEXEC, 0));
    if (!own_fd) {
        const int error_number = errno;
        throw_errno("cannot take over the socket to rank " + std::to_string(peer), error_number);
    }
    py::gil_scoped_release no_gil;  // allocating and registering arenas takes a while
    const RdmaSettings settings = RdmaSettings::from_environment();
    auto sources = choose_sources(list_devices(sysfs), settings, address, rail, sysfs);
    return std::make_shared<RdmaLink>(context, std::move(own_fd), std::move(sources), settings,
                                      silence_s);
}

void connect_rdma(RdmaLink& self, std::optional<double> timeout_s) {
    py::gil_scoped_release no_gil;
    self.connect(to_deadline(timeout_s), &check_python_signals);
}

}  // namespace

void bind_rdma(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> no_gil;

    py::class_<GidEntry>(module, "GidEntry", py::is_final(), "An address of an RDMA port.")
        .def_readonly("index", &GidEntry::index, "Its index in the port's table.")
        .def_property_readonly(
            "gid", [](const GidEntry& self) { return self.gid.text(); }, "As an IPv6 address.")
        .def_readonly("type", &GidEntry::type, "As the kernel writes it, for example RoCE v2.")
        .def_readonly("net_device", &GidEntry::net_device, "Empty if there is none.");

    py::class_<RdmaPort>(module, "RdmaPort", py::is_final(), "A port of an RDMA device.")
        .def_readonly("number", &RdmaPort::number, "Counts from 1.")
        .def_property_readonly("state", &RdmaPort::state_name, "For example active or down.")
        .def_property_readonly("link_layer", &RdmaPort::link_layer_name, "Ethernet or InfiniBand.")
        .def_readonly("lid", &RdmaPort::lid, "Its address in an InfiniBand subnet.")
        .def_property_readonly(
            "mtu_bytes", [](const RdmaPort& self) { return mtu_bytes(self.active_mtu); },
            "Payload of a packet.")
        .def_readonly("max_message_bytes", &RdmaPort::max_message_bytes, "Limit of one write.")
        .def_readonly("gids", &RdmaPort::gids, "Without the empty entries of the table.");

    py::class_<RdmaDevice>(module, "RdmaDevice", py::is_final(), "An RDMA device on this host.")
        .def_readonly("name", &RdmaDevice::name, "Its name in libibverbs.")
        .def_readonly("error", &RdmaDevice::error, "Why it cannot be used; empty if it can.")
        .def_readonly("remedy", &RdmaDevice::remedy, "How to fix the error.")
        .def_readonly("ports", &RdmaDevice::ports, "Empty for a device with an error.");

    py::class_<RdmaFinding>(module, "RdmaFinding", py::is_final(), "Result of one step.")
        .def_readonly("step", &RdmaFinding::step, "The step that was tried.")
        .def_readonly("is_good", &RdmaFinding::is_good, "Whether the step succeeded.")
        .def_readonly("text", &RdmaFinding::text, "The finding.")
        .def_readonly("remedy", &RdmaFinding::remedy, "How to fix a failure.");

    py::class_<RdmaLink, Link, std::shared_ptr<RdmaLink>>(
        module, "RdmaLink", py::is_final(), "The connection to a peer over RDMA.")
        .def(py::init(&make_rdma), py::arg("endpoint"), py::arg("peer"), py::arg("socket"),
             py::arg("address") = "", py::arg("rail") = 0, py::arg("silence_s") = 15.0,
             py::arg("sysfs") = "/sys", "Allocate this host's resources.")
        .def("connect", &connect_rdma, py::arg("timeout_s") = py::none(),
             "Connect to the peer, which must call this too.")
        .def_property_readonly(
            "slots", [](const RdmaLink& self) { return slots_of(self.arena()); },
            "Address and bytes of the memory for the peer's messages.")
        .def_property_readonly(
            "peer_slots", [](const RdmaLink& self) { return slots_of(self.mirror()); },
            "Address and bytes of the memory for outgoing messages.")
        .def_property_readonly("text", &RdmaLink::text, "Both ends of the connection.");

    module.def("rdma_devices", &list_devices, no_gil, py::arg("sysfs") = "/sys",
               "All RDMA devices on this host.");
    module.def("probe_rdma", &probe_rdma, no_gil, py::arg("address") = "",
               py::arg("sysfs") = "/sys",
               "Try what an RDMA link needs, up to a queue pair connected to itself.");
}

}  // namespace megatron_ext
