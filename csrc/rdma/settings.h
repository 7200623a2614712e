#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megatron_ext {

/// The user's RDMA settings: the MEGATRON_EXT_IB_* environment variables.
struct RdmaSettings {
    /// A device, or one port of it.
    struct DevicePort {
        std::string device;
        std::optional<int> port;
    };

    std::vector<DevicePort> devices;    ///< _HCA=mlx5_0:1,mlx5_1: the only ones to use; empty: all
    std::optional<int> gid_index;       ///< _GID_INDEX
    std::uint8_t traffic_class = 0;     ///< _TC
    std::uint8_t service_level = 0;     ///< _SL
    std::uint8_t timeout = 18;          ///< _TIMEOUT: 4.096 us * 2^timeout for each attempt
    /// _RETRY: attempts after the first one. For some drivers, including the kernel's software
    /// RoCE, 7 means to retry forever, which would hide a dead peer.
    std::uint8_t retry_count = 6;

    /// Throws std::invalid_argument with the variable, the value and the rule.
    static RdmaSettings from_environment();
};

}  // namespace megatron_ext
