#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rdma/devices.h"
#include "rdma/gid.h"
#include "rdma/settings.h"

namespace megatron_ext {

/// A place from which queue pairs can be made.
struct RdmaSource {
    std::string device;
    std::uint8_t port;
    std::uint8_t link_layer;
    std::uint16_t lid;
    int mtu;  ///< in the code of the interface
    std::uint32_t max_message_bytes;
    int gid_index;
    Gid gid;

    /// "rxe0 port 1 GID 1 (::ffff:10.77.0.1)"
    std::string text() const;
};

/// The sources of one port, best first: the others are for a peer that the first does not reach.
///
/// On Ethernet a source is a RoCE v2 GID: the one of `address` if that is given; else IPv4 before
/// global IPv6 before link-local, without those of containers' bridges. On InfiniBand it is GID 0,
/// and `address` that of a network interface of the device, as `sysfs` tells. Ports of equal worth
/// are dealt out by `rail`, usually the local rank.
///
/// Throws RdmaError if there is none; it says why for each device.
std::vector<RdmaSource> choose_sources(const std::vector<RdmaDevice>& devices,
                                       const RdmaSettings& settings, const std::string& address,
                                       unsigned rail, const std::string& sysfs = "/sys");

}  // namespace megatron_ext
