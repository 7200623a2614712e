#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rdma/devices.h"
#include "rdma/gid.h"
#include "rdma/settings.h"

namespace megatron_ext {

/// A local endpoint of queue pairs: a device, one of its ports and a GID.
struct RdmaSource {
    std::string device;
    std::uint8_t port;
    std::uint8_t link_layer;
    std::uint16_t lid;
    int mtu;  ///< as encoded by the verbs interface
    std::uint32_t max_message_bytes;
    int gid_index;
    Gid gid;

    /// "rxe0 port 1 GID 1 (::ffff:10.77.0.1)"
    std::string text() const;
};

/// The sources of one port, best first; the later ones serve peers that the first cannot reach.
///
/// On Ethernet, a source is a RoCE v2 GID: the GID of `address` if one is given; otherwise IPv4
/// comes before global IPv6, which comes before link-local, and the GIDs of container bridges are
/// excluded. On InfiniBand it is GID 0, and `address` selects the device by its network interfaces,
/// as listed in `sysfs`. `rail`, usually the local rank, selects one of several equally good ports.
///
/// Throws RdmaError if no port is usable, with the reason for each device, and
/// std::invalid_argument for a malformed address.
std::vector<RdmaSource> choose_sources(const std::vector<RdmaDevice>& devices,
                                       const RdmaSettings& settings, const std::string& address,
                                       unsigned rail, const std::string& sysfs = "/sys");

}  // namespace megatron_ext
