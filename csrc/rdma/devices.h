#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rdma/gid.h"
#include "rdma/library.h"

namespace megatron_ext {

struct GidEntry {
    int index;
    Gid gid;
    std::string type;        ///< in the kernel's words: "RoCE v2", "IB/RoCE v1"
    std::string net_device;  ///< empty if there is none
};

struct RdmaPort {
    std::uint8_t number;
    int state;  ///< verbs::PortState
    std::uint8_t link_layer;
    std::uint16_t lid;
    int active_mtu;  ///< as encoded by the verbs interface, see mtu_bytes()
    std::uint32_t max_message_bytes;
    std::vector<GidEntry> gids;  ///< without the empty entries of the table

    const char* state_name() const noexcept;
    const char* link_layer_name() const noexcept;
};

struct RdmaDevice {
    std::string name;
    std::string error;  ///< why it cannot be queried, in which case it has no ports
    std::string remedy;
    std::vector<RdmaPort> ports;
};

/// All RDMA devices on this host, from libibverbs and sysfs. Opens and closes each of them. `sysfs`
/// is "/sys" except in tests. Throws RdmaError if the library is missing.
std::vector<RdmaDevice> list_devices(const std::string& sysfs = "/sys");

/// A device that stays open until its last user is gone.
using OpenedDevice = std::shared_ptr<verbs::Context>;

/// Throws RdmaError if no device has that name, or if the device cannot be opened.
OpenedDevice open_device(const std::string& name);

constexpr int mtu_bytes(int code) { return code < 1 || code > 5 ? 0 : 128 << code; }

}  // namespace megatron_ext
