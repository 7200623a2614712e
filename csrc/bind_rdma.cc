// Python bindings of what can be known about RDMA without a peer.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bind.h"
#include "rdma/choice.h"
#include "rdma/devices.h"
#include "rdma/probe.h"

namespace py = pybind11;

namespace megatron_ext {

void bind_rdma(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> no_gil;

    py::class_<GidEntry>(module, "GidEntry", py::is_final(), "An address of an RDMA port.")
        .def_readonly("index", &GidEntry::index, "Its place in the port's table.")
        .def_property_readonly(
            "gid", [](const GidEntry& self) { return self.gid.text(); }, "As an IPv6 address.")
        .def_readonly("type", &GidEntry::type, "As the kernel writes it, for example RoCE v2.")
        .def_readonly("net_device", &GidEntry::net_device, "Empty where there is none.");

    py::class_<RdmaPort>(module, "RdmaPort", py::is_final(), "A port of an RDMA device.")
        .def_readonly("number", &RdmaPort::number, "From 1.")
        .def_property_readonly("state", &RdmaPort::state_name, "active, down or on the way.")
        .def_property_readonly("link_layer", &RdmaPort::link_layer_name, "Ethernet or InfiniBand.")
        .def_readonly("lid", &RdmaPort::lid, "Its address in an InfiniBand subnet.")
        .def_property_readonly(
            "mtu_bytes", [](const RdmaPort& self) { return mtu_bytes(self.active_mtu); },
            "Payload of a packet.")
        .def_readonly("max_message_bytes", &RdmaPort::max_message_bytes, "Of one write.")
        .def_readonly("gids", &RdmaPort::gids, "Without the empty entries of the table.");

    py::class_<RdmaDevice>(module, "RdmaDevice", py::is_final(), "An RDMA device of this host.")
        .def_readonly("name", &RdmaDevice::name, "As libibverbs names it.")
        .def_readonly("error", &RdmaDevice::error, "Why it cannot be used, if it cannot.")
        .def_readonly("remedy", &RdmaDevice::remedy, "What to do about it.")
        .def_readonly("ports", &RdmaDevice::ports, "Empty for a device with an error.");

    py::class_<RdmaFinding>(module, "RdmaFinding", py::is_final(), "What one step found.")
        .def_readonly("step", &RdmaFinding::step, "What was tried.")
        .def_readonly("is_good", &RdmaFinding::is_good, "Whether it works.")
        .def_readonly("text", &RdmaFinding::text, "What was found.")
        .def_readonly("remedy", &RdmaFinding::remedy, "What to do, if it does not work.");

    module.def("rdma_devices", &list_devices, no_gil, py::arg("sysfs") = "/sys",
               "All RDMA devices of this host.");
    module.def("probe_rdma", &probe_rdma, no_gil, py::arg("address") = "",
               py::arg("sysfs") = "/sys",
               "Try what a link over RDMA needs, up to a queue pair connected to itself.");
}

}  // namespace megatron_ext
